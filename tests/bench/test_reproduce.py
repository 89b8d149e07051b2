"""The published setting at its own size, tried on a tiny pipeline."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bench import reproduce
from tests.folders import published
from tests.recoveries import saved_embedder

PHRASES = ["a cat", "a hat", "a cup"]


def test_the_plan_says_what_it_takes(capsys):
    assert reproduce.main([]) == 0
    said = capsys.readouterr().out
    assert "stable-diffusion-v1-5" in said and "4 runs" in said and "2000 steps" in said and "not measured" in said


def of_three_elements(root: Path) -> Path:
    """The published layout with four pictures of each of three elements a target."""
    published(root, targets=6, clean=250)
    draws = np.random.default_rng(0)
    for folder in (root / "poisoning_images").iterdir():
        lines = ["\t".join(PHRASES)]
        for file in (root / "images" / f"{folder.name}.jpeg", *(folder / f"x_{i}.png" for i in range(12))):
            blocks = draws.integers(0, 256, (4, 4, 3), dtype=np.uint8)
            Image.fromarray(blocks).resize((16, 16), Image.Resampling.NEAREST).save(file)
        lines += [f"x_{i}.png\tAn image with {PHRASES[i % 3]} number {i}" for i in range(12)]
        (folder / "poisoning_data_caption_simple.txt").write_text("\n".join(lines))
    return root


@pytest.mark.thorough
def test_every_arm_passes_its_dry_run(pipelines, tmp_path, capfd):
    data = of_three_elements(tmp_path / "Midjourney")
    places = {
        "data": data,
        "clean": data / "clean",
        "embedder": saved_embedder("sscd", tmp_path),
        "out": tmp_path / "out",
    }
    small = {
        "pretrained_model_name_or_path": pipelines["epsilon"],
        "poisoning_ratio": 0.5,
        "resolution": 16,
        "mixed_precision": "no",
        "train_batch_size": 2,
        "validation.resolution": 16,
        "max_train_steps": 60,
        "report_to": "none",
    }
    words, flags = ([f"--{key}={value}" for key, value in given.items()] for given in (places, small))
    assert reproduce.main([*words, "--dry_run", "--", *flags]) == 0
    assert capfd.readouterr().out.count("dry run: ") == len(reproduce.ARMS)
