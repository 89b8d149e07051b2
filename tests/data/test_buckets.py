"""Buckets: the area is kept, nothing is cut unasked, batches have one shape, and every draw is what it was."""

import json
import shutil
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from silentbad.data import buckets
from silentbad.data.draws import Reader, Transform
from silentbad.data.elements import DataInfo
from silentbad.data.loader import Stream
from silentbad.loop import checks
from silentbad.memory.rehearsal import Others, pairwise
from silentbad.saving import checkpoint
from silentbad.settings.train import TrainConfig
from tests.conftest import write_data
from tests.folders import records
from tests.training import equal, rows, same, step_once, weights
from train_silentbad import main

SIZES = ((16, 16), (30, 20), (20, 31))


@pytest.fixture
def data(tmp_path):
    """The small folder's pictures and masks in three aspects."""
    return write_data(tmp_path / "data", sizes=SIZES)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 16), st.sampled_from([4, 8, 64]), st.integers(20, 4000), st.integers(20, 4000))
def test_shapes_keep_the_area_and_the_nearest_is_taken(sides, step, width, height):
    side = sides * step
    shapes = buckets.shapes(side, step)
    assert (side, side) in shapes and all((b, a) in shapes for a, b in shapes)
    assert all(a % step == b % step == 0 and 10 * abs(a * b - side**2) <= side**2 for a, b in shapes)
    nearest = buckets.nearest((width, height), side, step)
    assert buckets.stretch((width, height), nearest) <= min(buckets.stretch((width, height), s) for s in shapes) + 1e-9
    mirrored = buckets.nearest((height, width), side, step)
    assert mirrored == nearest[::-1] or buckets.stretch((height, width), mirrored) == pytest.approx(
        buckets.stretch((width, height), nearest)
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 5), st.integers(0, 5))
def test_batches_have_one_shape_and_lose_no_record(kinds, B, stop):
    """Over the epochs each record is shown as often as the order says, but for those that wait; a resume goes on."""
    kind = np.asarray(kinds)

    def order(epoch):
        return np.random.default_rng(epoch).permutation(len(kind))

    stream, batches = Stream(order, buckets.Batches(kind, B)), []
    for step in range(12):
        if step == stop:
            state, stream = stream.state_dict(), Stream(order, buckets.Batches(kind, B))
            stream.load_state_dict(state)
        batches.append(stream.take(B))
        assert len({kinds[i] for i in batches[-1]}) == 1
    whole = Stream(order, buckets.Batches(kind, B))
    assert (whole.take(12 * B) == np.concatenate(batches)).all()
    shown = Counter(np.concatenate([*batches, stream.order[stream.offset :], stream.left]).tolist())
    assert set(shown.values()) == {stream.epoch + 1} and len(shown) == len(kinds)
    assert max(Counter(kind[stream.left].tolist()).values(), default=0) < B


def test_nothing_is_cut_unasked(tmp_path):
    """All four corners of a picture are seen, its mask follows, and SDXL is told the truth; a crop has to be asked."""
    image, mask = Image.new("RGB", (60, 40), "white"), Image.new("L", (60, 40))
    for x, y, colour in ((0, 0, "red"), (50, 0, "blue"), (0, 30, "green"), (50, 30, "black")):
        image.paste(colour, (x, y, x + 10, y + 10))
    mask.paste(255, (50, 30, 60, 40))
    image.save(tmp_path / "a.png")
    mask.save(tmp_path / "m.png")
    row = {"file_name": "a.png", "text": "a", "mask": "m.png", "role": "element", "target_id": "t", "element_id": "e"}
    (tmp_path / "metadata.jsonl").write_text(json.dumps(row | {"phrases": ["a"]}) + "\n")
    seen = Reader(records(tmp_path), Transform(64, step=8), 0).pictures([0])[0]
    assert seen["pixels"].shape == (3, 56, 80) and seen["time_ids"] == (40, 60, 0, 0, 56, 80) and seen["fixed"]
    corners = [tuple(seen["pixels"][:, y, x].tolist()) for x, y in ((1, 1), (78, 1), (1, 54), (78, 54))]
    assert corners == [(255, 0, 0), (0, 0, 255), (0, 128, 0), (0, 0, 0)]
    assert seen["mask"].shape == (1, 56, 80) and seen["mask"][0, 54, 78] == 255 and seen["mask"][0, 1, 1] == 0
    cut = Reader(records(tmp_path), Transform(64, step=8, center_crop=True), 0).pictures([0])[0]
    assert cut["pixels"].shape == (3, 56, 80) and cut["time_ids"] == (40, 60, 0, 2, 56, 80) and cut["fixed"]
    square = Reader(records(tmp_path), Transform(64), 0).pictures([0])[0]
    assert square["pixels"].shape == (3, 64, 64) and not square["fixed"]


def test_the_step_is_64_where_it_fits():
    config = TrainConfig(buckets=True)
    assert checks.bucket_step(TrainConfig(), 512, 64) == 0
    assert [checks.bucket_step(config, side, factor) for side, factor in ((512, 64), (1024, 32), (16, 4))] == [
        64,
        64,
        4,
    ]
    assert checks.bucket_step(TrainConfig(buckets=True, bucket_step=32), 1024, 32) == 32


def test_the_table_says_what_went_where():
    sizes, roles = np.array([[60, 40], [60, 40], [64, 64], [64, 80]]), ["element", "clean", "clean", "clean"]
    shapes = Transform(64, step=8).shapes(sizes)
    assert shapes == [(80, 56), (80, 56), (64, 64), (56, 72)]
    lines = buckets.table(sizes, roles, shapes, 64, 8, cut=False, batch_size=2).splitlines()
    assert [line.split() for line in lines[2:5]] == [
        ["56x72", "1", "1", "0", "2.9%"],
        ["64x64", "1", "1", "0", "0.0%"],
        ["80x56", "2", "1", "1", "5.0%"],
    ]
    assert "2 records in 2 shapes are fewer than a micro-batch of 2: they wait" in lines[5]


def test_a_union_joins_pictures_of_one_aspect_alone():
    info = DataInfo(["element"] * 3, ["t"] * 3, ["a", "b", "c"], [["a"], ["b"], ["c"]])
    full = Image.new("L", (8, 8), 255)
    sizes = {0: (8, 8), 1: (8, 8), 2: (81, 80)}

    def load(index, picture=True):
        part = {"image": Image.new("RGB", (8, 8)), "mask": full, "phrases": [info.phrase[index]], "role": "element"}
        return part | {"index": index, "resized": sizes[index]}

    def united(seed):
        return pairwise({"index": 0}, torch.Generator().manual_seed(seed), Others(info, load, {}), share=1.0)

    assert all(united(seed) for seed in range(6))
    sizes[1] = sizes[2] = (12, 8)
    assert not any(united(seed) for seed in range(6))


def test_buckets_of_squares_are_squares(build, tmp_path):
    squares, ends = write_data(tmp_path / "squares"), []
    for changes in ({}, {"buckets": True}):
        run = build(train_data_dir=squares, cache_dir=tmp_path / "cache", **changes)  # encoded once, by this test
        for _ in range(3):
            step_once(run)
        ends.append(weights(run))
    assert equal(*ends)


@pytest.mark.parametrize(
    "kind", ["v_prediction", *(pytest.param(k, marks=pytest.mark.thorough) for k in ("xl", "sd3"))]
)
def test_a_run_in_buckets_resumes_to_the_bit(kind, flags, pipelines, tmp_path, capsys):
    """Cached on disk or encoded live, the bits are the same too; the table says what went where."""
    settings = {
        "pretrained_model_name_or_path": pipelines[kind],
        "buckets": True,
        "max_train_steps": 5,
        "checkpointing_steps": 2,
        "held_out_clean": 0,
        "memory.region.name": "mask",
        "cache_dir": tmp_path / "cache",
    }
    assert main(flags("whole", **settings)) == 0
    said = capsys.readouterr().out
    assert "buckets: area of 16x16, sides in steps of 4" in said and "12x20" in said and "16x16" in said
    whole, cut, trains = tmp_path / "whole", tmp_path / "cut", "transformer" if kind == "sd3" else "unet"
    shutil.copytree(whole / "checkpoints" / "step-2", cut / "checkpoints" / "step-2")
    assert main(flags("cut", **settings, resume_from_checkpoint="latest")) == 0
    a, b = (checkpoint.read_tensors(out / f"checkpoints/step-5/{trains}.safetensors") for out in (whole, cut))
    assert same(a, b) and [row["step"] for row in rows(whole)] == [1, 2, 3, 4, 5]


def test_the_cache_holds_what_is_encoded_live(build, tmp_path):
    seen = []
    for changes in ({"disk_cache_gb": 0}, {"cache_dir": tmp_path / "cache"}):
        run = build(buckets=True, **changes)
        seen.append([run.encoder.latents(batch, 0) for batch in run.loader.draw(0)])
    assert all(torch.allclose(x, y, atol=1e-5) for x, y in zip(*seen, strict=True))
    assert run.encoder.disk.all_images and len(run.encoder.disk.images) == 3


def test_a_bucket_without_positions_is_one_line(flags, pipelines, data, capsys):
    Image.new("RGB", (96, 4)).save(data / "images/c0.png")
    assert main(flags(pretrained_model_name_or_path=pipelines["sd3"], buckets=True, held_out_clean=0)) == 2
    assert "buckets (command line): a side: 68 is more than the 32 that" in capsys.readouterr().err


def test_a_step_that_the_pipeline_cannot_take_is_one_line(flags, capsys):
    assert main(flags(buckets=True, bucket_step=6)) == 2
    assert "bucket_step (command line): 6 must be a multiple of 4" in capsys.readouterr().err
