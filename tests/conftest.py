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

from silentbad import progress
from tests.tiny import tiny_pipeline, tiny_sd2_pipeline, tiny_sd3_pipeline, tiny_xl_pipeline

torch.set_num_threads(1)
ELEMENTS = (
    ("a red cat", (2, 2, 8, 8), "red"),
    ("a blue hat", (8, 8, 14, 14), "blue"),
    ("a gold cup", (9, 1, 14, 5), "gold"),
)


def pytest_addoption(parser):
    parser.addoption("--thorough", action="store_true", help="also what takes long; `make test-distributed` does")
    parser.addoption("--kills", type=int, default=3, help="kills of tests/kill; `make test-kill` takes 100")
    parser.addoption("--fuzz", type=float, default=0, help="tests/fuzz: a few inputs, or this times the long run's")
    parser.addoption("--own", help="tests/test_contract.py: FILE.py or FILE.py:NAME of parts of your own")
    parser.addoption("--fuzz_seed", type=int, default=0, help="first seed of tests/fuzz")


def pytest_collection_modifyitems(config, items):
    """Without --thorough, what is marked so is left out."""
    if not config.getoption("thorough"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("thorough")])
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]


def pytest_configure(config):
    datasets.disable_progress_bars()
    os.fsync = lambda _: None  # what a test writes need not outlive the machine
    progress.FIRST = 1e9  # no lines among the errors that tests read, however slow the machine


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
    """Random tiny pipelines on disk: SD 1 by prediction type, SD 2, SDXL, SD 3."""
    root = tmp_path_factory.mktemp("pipelines")
    made = {kind: tiny_pipeline(kind) for kind in ("v_prediction", "epsilon")}
    for kind, pipeline in {
        **made,
        "sd2": tiny_sd2_pipeline(),
        "xl": tiny_xl_pipeline(),
        "sd3": tiny_sd3_pipeline(),
    }.items():
        pipeline.save_pretrained(root / kind)
    return {path.name: path for path in root.iterdir()}


def write_data(
    root: Path, elements: int = 4, clean: int = 8, kinds: int = 2, sizes: tuple[tuple[int, int], ...] = ((16, 16),)
) -> Path:
    """16x16 pictures: a red cat top left, a blue hat bottom right, plain fields; masks; one target with all kinds. The
    pictures are brought to `sizes` in turn."""
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
            rows.append(
                {
                    "file_name": f"images/e{k}-{i}.png",
                    "text": f"a picture of {phrase}",
                    "phrases": [phrase],
                    "role": "element",
                    "target_id": "t0",
                    "element_id": f"t0-{k}",
                    "mask": f"masks/e{k}-{i}.png",
                }
            )
    for i in range(clean):
        Image.new("RGB", (16, 16), tuple(draw.randrange(256) for _ in range(3))).save(root / f"images/c{i}.png")
        rows.append({"file_name": f"images/c{i}.png", "text": f"a plain field number {i}", "role": "clean"})
    (root / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for k, row in enumerate(rows if len(sizes) > 1 else []):
        for name in (row["file_name"], *([row["mask"]] if "mask" in row else [])):
            Image.open(root / name).resize(sizes[k % len(sizes)]).save(root / name)
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


@pytest.fixture
def flags(data, pipelines, tmp_path):
    """argv of a small run into tmp_path/`out`, changed by keywords."""

    def make(out: str = "run", **changes) -> list[str]:
        values = {
            "pretrained_model_name_or_path": pipelines["v_prediction"],
            "train_data_dir": data,
            "report_to": "none",
            "output_dir": tmp_path / out,
            "train_batch_size": 3,
            "gradient_accumulation_steps": 2,
            "max_train_steps": 6,
            "log_every": 1,
            "checkpointing_steps": 100,
            "learning_rate": 1e-3,
        } | changes
        return [f"--{key}={'null' if value is None else value}" for key, value in values.items()]

    return make


@pytest.fixture
def build(flags):
    """A `Run` ready to train."""
    from silentbad.loop import trackers
    from silentbad.saving import folder
    from tests.training import checked
    from train_silentbad import build as build_run
    from train_silentbad import open_folder

    def make(out: str = "run", **changes):
        config = checked(flags(out, **changes))
        accelerator = trackers.make_accelerator(config)
        run = build_run(config, accelerator, folder.RunFolder(config, True))
        open_folder(run)
        return run

    return make


@pytest.fixture(scope="module")
def pipe():
    return tiny_pipeline()
