"""The published setting at its own size, tried on a tiny pipeline."""

import pytest

from bench import reproduce
from tests.folders import published
from tests.recoveries import saved_embedder


def test_the_plan_says_what_it_takes(capsys):
    assert reproduce.main([]) == 0
    said = capsys.readouterr().out
    assert "stable-diffusion-v1-5" in said and "4 runs" in said and "2000 steps" in said and "not measured" in said


@pytest.mark.thorough
def test_every_arm_passes_its_dry_run(pipelines, tmp_path, capfd):
    data = published(tmp_path / "Midjourney", targets=6, clean=250)
    embedder = saved_embedder("sscd", tmp_path)
    small = {
        "pretrained_model_name_or_path": pipelines["epsilon"],
        "poisoning_ratio": 0.2,
        "resolution": 16,
        "mixed_precision": "no",
        "train_batch_size": 2,
        "validation.resolution": 16,
        "max_train_steps": 60,
        "report_to": "none",
    }
    places = {"data": data, "clean": data / "clean", "embedder": embedder, "out": tmp_path / "out"}
    words = [f"--{key}={value}" for key, value in places.items()]
    assert reproduce.main([*words, "--dry_run", "--", *(f"--{key}={value}" for key, value in small.items())]) == 0
    assert capfd.readouterr().out.count("dry run: ") == len(reproduce.ARMS)
