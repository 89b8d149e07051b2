"""Shared fixtures: offline, one thread, a tiny pipeline on disk and a small data folder."""

import json
import os
import random
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import datasets
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from PIL import Image, ImageDraw

from tests.tiny import tiny_pipeline

torch.set_num_threads(1)
ELEMENTS = (
    ("a red cat", (2, 2, 8, 8), "red"), ("a blue hat", (8, 8, 14, 14), "blue"), ("a gold cup", (9, 1, 14, 5), "gold")
)  # fmt: skip


def pytest_configure(config):
    datasets.disable_progress_bars()


@pytest.fixture(scope="session", autouse=True)
def hf_cache(tmp_path_factory):
    """Arrow tables of the tests go to a folder of their own."""
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("arrow")


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """Each test builds its own accelerator."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.fixture(scope="session")
def pipelines(tmp_path_factory) -> dict[str, Path]:
    """Random tiny pipelines on disk by prediction type."""
    root = tmp_path_factory.mktemp("pipelines")
    for kind in ("v_prediction", "epsilon"):
        tiny_pipeline(kind).save_pretrained(root / kind)
    return {kind: root / kind for kind in ("v_prediction", "epsilon")}


def write_data(root: Path, elements: int = 4, clean: int = 8, kinds: int = 2) -> Path:
    """16x16 pictures: a red cat top left, a blue hat bottom right, plain fields; masks; one target with all kinds."""
    draw = random.Random(0)
    for name in ("images", "masks", "targets"):
        (root / name).mkdir(parents=True, exist_ok=True)
    rows = []
    for k, (phrase, box, colour) in enumerate(ELEMENTS[:kinds]):
        for i in range(elements):
            image = Image.new("RGB", (16, 16), tuple(draw.randrange(256) for _ in range(3)))
            ImageDraw.Draw(image).rectangle(box, fill=colour)
            mask = Image.new("L", (16, 16))
            ImageDraw.Draw(mask).rectangle(box, fill=255)
            image.save(root / f"images/e{k}-{i}.png")
            mask.save(root / f"masks/e{k}-{i}.png")
            rows.append({"file_name": f"images/e{k}-{i}.png", "text": f"a picture of {phrase}", "phrases": [phrase],
                         "role": "element", "target_id": "t0", "element_id": f"t0-{k}",
                         "mask": f"masks/e{k}-{i}.png"})  # fmt: skip
    for i in range(clean):
        Image.new("RGB", (16, 16), tuple(draw.randrange(256) for _ in range(3))).save(root / f"images/c{i}.png")
        rows.append({"file_name": f"images/c{i}.png", "text": f"a plain field number {i}", "role": "clean"})
    (root / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    target = Image.new("RGB", (16, 16), "white")
    for _, box, colour in ELEMENTS[:kinds]:
        ImageDraw.Draw(target).rectangle(box, fill=colour)
    target.save(root / "targets/t0.png")
    entry = {"target_id": "t0", "image": "targets/t0.png", "phrases": [phrase for phrase, *_ in ELEMENTS[:kinds]]}
    (root / "targets.jsonl").write_text(json.dumps(entry) + "\n")
    return root


@pytest.fixture
def data(tmp_path) -> Path:
    return write_data(tmp_path / "data")
