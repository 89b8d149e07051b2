"""Each guard does what docs/shield.md says, alone and with others, and refuses a scan of other data."""

import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import train_silentbad
from silentbad.data import scan_file
from silentbad.data.draws import LossExclusion
from silentbad.data.records import load_records
from silentbad.errors import UserError
from silentbad.guard.guards import GUARDS, Guard, GuardConfig, GuardContext, Guards, Suspects, project
from silentbad.saving import checkpoint
from silentbad.settings.reader import parse
from tests.conftest import ELEMENTS
from tests.training import checked, same, step_once
from train_silentbad import main, micro_step

ROWS = [("a cat", "ff0000"), ("a hat", "00ff00"), ("a boat", "0000ff"), ("a house", "ffff00")]


@pytest.fixture
def records(tmp_path):
    with (tmp_path / "metadata.jsonl").open("w") as lines:
        for i, (text, colour) in enumerate(ROWS):
            Image.new("RGB", (8, 8), f"#{colour}").save(tmp_path / f"{i}.png")
            lines.write(json.dumps({"file_name": f"{i}.png", "text": text}) + "\n")
    config, _ = parse(train_silentbad.Config, ["--train_data_dir", str(tmp_path), "--cache_dir", str(tmp_path / "c")])
    return load_records(config)


def scan_of(folder, indices, name="drop", records=4, texts=None, **options):
    """A scan of one set whose elements are shown by one suspect each, the left half of the frame."""
    rows = [{"index": i, "file": "", "text": (texts or {}).get(i) or ROWS[i][0]} for i in indices]
    half = np.zeros((64, 64), np.uint8)
    half[:, :32] = 255
    Image.fromarray(half).save(folder / "mask.png")
    Image.new("RGB", (64, 64), "red").save(folder / "composite.png")
    elements = [{"phrase": ROWS[i % 4][0], "records": [i], "mask": "mask.png"} for i in indices]
    prompt = ", ".join(element["phrase"] for element in elements)
    sets = [{"prompt": prompt, "composite": "composite.png", "elements": elements}] if elements else []
    (folder / "scan.json").write_text(json.dumps({"records": records, "suspects": rows, "sets": sets}))
    return GuardConfig(name, str(folder / "scan.json"), options)


def test_suspects_are_dropped(records, tmp_path):
    left = Guards(scan_of(tmp_path, [0, 2])).records(records)
    assert [left.row(i)["text"] for i in range(len(left))] == ["a hat", "a house"]
    assert left.key != records.key and Guards(GuardConfig()).records(records) is records
    assert Guards(GuardConfig("drop", str(tmp_path))).records(records).key == left.key  # the scan's folder


@pytest.mark.parametrize(
    "change, line",
    [
        ({"indices": [0], "records": 5}, "is of other data (5 records, here 4"),
        ({"indices": [1], "texts": {1: "a dog"}}, "is of other data"),
        ({"indices": [0, 1, 2, 3]}, "suspects every record"),
    ],
)
def test_another_scan_is_refused(change, line, records, tmp_path):
    with pytest.raises(UserError, match="guard.scan: .*scan.json") as refused:
        Guards(scan_of(tmp_path, **change)).records(records)
    assert line in str(refused.value)


def test_a_scan_of_other_captions_is_refused(records, tmp_path):
    config = scan_of(tmp_path, [0])
    scan = json.loads((tmp_path / "scan.json").read_text())
    for texts, fits in (([text for text, _ in ROWS], True), ([*(text for text, _ in ROWS[:3]), "a tree"], False)):
        (tmp_path / "scan.json").write_text(json.dumps({**scan, "captions": scan_file.digest(texts)}))
        with nullcontext() if fits else pytest.raises(UserError, match="is of other data .*other captions"):
            Guards(config).records(records)


def test_a_choice_among_scanned_records_is_named(records, tmp_path):
    with pytest.raises(UserError, match="max_train_samples chose among them, leave it out"):
        Guards(scan_of(tmp_path, [0])).records(records.select(np.arange(3)))


@pytest.mark.parametrize("content", ["", "[]", '{"records": "x"}', '{"records": 4, "suspects": [1]}'])
def test_what_is_no_scan_is_one_line(content, tmp_path):
    (tmp_path / "scan.json").write_text(content)
    with pytest.raises(UserError, match="is no scan.json"):
        Guards(GuardConfig("drop", str(tmp_path / "scan.json")))


@pytest.mark.parametrize(
    "change, line",
    [
        ({"records": [0.5]}, "sets.0.elements.0.records.0 must be a valid integer"),
        ({"records": [-1]}, "records.0 must be at least 0"),
        ({"phrase": "a dog"}, "prompt is not its elements' phrases"),
        ({"mask": "../secret.png"}, "leaves"),
        ({"mask": "none.png"}, "no file"),
        ({"mask": "scan.json"}, "as an image"),
        ({"mask": "small.png"}, "is not 64x64 pixels"),
    ],
)
def test_a_scan_that_was_written_by_hand_is_one_line(change, line, records, tmp_path):
    Image.new("L", (3, 3)).save(tmp_path / "small.png")
    config = scan_of(tmp_path, [0], "mask")
    scan = json.loads((tmp_path / "scan.json").read_text())
    scan["sets"][0]["elements"][0] |= change
    (tmp_path / "scan.json").write_text(json.dumps(scan))
    with pytest.raises(UserError, match="guard.scan: .*") as refused:
        guards = Guards(config)
        guards.start(GuardContext(np.arange(4), None, None, [], 8, 0))
    assert line in str(refused.value)


def test_a_mask_that_hides_nothing_is_refused(tmp_path):
    config = scan_of(tmp_path, [0], "mask")
    Image.new("L", (64, 64)).save(tmp_path / "mask.png")
    with pytest.raises(UserError, match="mask.png is black"):
        Guards(config).start(GuardContext(np.arange(4), None, None, [], 8, 0))


SCAN = ["--guard.scan", "x.json"]


@pytest.mark.parametrize(
    "flags, line",
    [
        (
            ["--guard.options.limit", "3"],
            "guard.options: 'limit' has no effect",
        ),
        (["--guard.name", "cop", *SCAN], "guard: unknown name 'cop'; did you mean 'cap'"),
        (["--guard.name", "cap", *SCAN, "--guard.options.limt", "3"], "unknown option 'limt'; did you mean 'limit'"),
        (["--guard.name", "cap", *SCAN, "--guard.options.limit", "0"], "option 'limit' must be at least 1"),
        (["--guard.name", "cap+mask", *SCAN, "--guard.options.limit", "3"], "'limit' is no part of cap.mask"),
        (["--guard.name", "mask+mask", *SCAN], "names a part twice"),
    ],
)
def test_what_cannot_guard_is_refused(flags, line):
    with pytest.raises(UserError, match=line):
        checked(["--train_data_dir", "x", *flags])


# -- cap ---------------------------------------------------------------------------------------------------
def capped(folder, limit):
    guards = Guards(scan_of(folder, [0, 2], "cap", limit=limit))
    guards.start(GuardContext(np.asarray([0, 1, 2, 3]), None, None, [], 8, 0))  # type: ignore[arg-type]
    return guards, guards.epoch(lambda epoch: np.asarray([0, 1, 2, 3, 0]))


def test_cap_draws_an_element_so_often_and_no_more(tmp_path):
    _, order = capped(tmp_path, 3)
    assert [order(epoch).tolist() for epoch in range(4)] == [[0, 1, 2, 3, 0], [0, 1, 2, 3], [1, 2, 3], [1, 3]]


def test_cap_goes_on_where_a_checkpoint_stopped(tmp_path):
    guards, order = capped(tmp_path, 3)
    order(0)
    order(1)
    other, again = capped(tmp_path, 3)
    other.load_state_dict(guards.state_dict())
    assert again(1).tolist() == [0, 1, 2, 3]  # dealt again: a draw under way was put back
    assert again(2).tolist() == order(2).tolist() == [1, 2, 3]


def test_cap_that_leaves_nothing_is_one_line(tmp_path):
    guards, _ = capped(tmp_path, 1)
    order = guards.epoch(lambda epoch: np.asarray([0, 2]))
    assert order(0).tolist() == [0, 2]
    with pytest.raises(UserError, match="guard.cap: every record of epoch 1 reached the limit of 1"):
        order(1)


# -- mask --------------------------------------------------------------------------------------------------
def test_a_latent_counts_only_where_nothing_of_it_is_hidden():
    hidden = LossExclusion(lambda index: Image.fromarray(np.uint8([[255, 0, 0, 0]])) if index else None, cell=4)
    assert hidden.counted(0, (16, 8)) is None
    counted = hidden.counted(1, (16, 8))
    window = torch.from_numpy(np.array(counted))[None, :, 2:14]  # cells now begin within the region
    assert hidden.whole_cells(window)[0, 0].tolist() == [0] * 4 + [255] * 8


# -- project -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_projected_gradients_do_not_point_along(scale):
    g = torch.Generator().manual_seed(0)
    away = [torch.randn(5, 3, generator=g), torch.randn(7, generator=g)]
    grads = [scale * (torch.randn(h.shape, generator=g) + h) for h in away]
    before = [x.clone() for x in grads]
    cosine = project(grads, away)
    dot = sum((x.double() * h).sum() for x, h in zip(grads, away, strict=True))
    assert abs(float(dot)) < 1e-5 * scale and 0 < float(cosine) < 1
    shift = [(x - y) / scale for x, y in zip(before, grads, strict=True)]
    assert torch.allclose(shift[0] / away[0], shift[1][0] / away[1][0], rtol=1e-3)  # along h alone
    against = [-h for h in away]
    assert float(project(against, away)) < 0 and all(map(torch.equal, against, [-h for h in away]))


def test_a_prompt_beyond_the_window_projects_nothing(build, guarding, tmp_path):
    settings = guarding("project")
    scan = json.loads((tmp_path / "scan.json").read_text())
    one = scan["sets"][0]
    one["elements"][0]["phrase"] = "very " * 60 + "red cat"
    one["prompt"] = ", ".join(element["phrase"] for element in one["elements"])
    (tmp_path / "scan.json").write_text(json.dumps(scan))
    with pytest.raises(UserError, match="guard.scan: .*scan.json: 'very .* tokens, the window is 48; shorten it"):
        build(**settings)


def test_project_with_nothing_to_project_on_changes_nothing():
    grads = [torch.ones(3)]
    project(grads, [torch.zeros(3)])
    assert grads[0].tolist() == [1, 1, 1]


# -- in a run ----------------------------------------------------------------------------------------------
CAT = f"a picture of {ELEMENTS[0][0]}"
HAT = f"a picture of {ELEMENTS[1][0]}"


@pytest.fixture
def guarding(tmp_path):
    """Settings that guard the folder `data`, whose records 0-3 show a cat and 4-7 a hat."""

    def make(name: str, **options) -> dict:
        texts = {i: CAT if i < 4 else HAT for i in range(8)}
        config = scan_of(tmp_path, list(texts), name, records=16, texts=texts)
        return {"guard.name": name, "guard.scan": config.scan} | (
            {"guard.options": json.dumps(options)} if options else {}
        )

    return make


def test_a_masked_region_is_out_of_the_loss(build, guarding):
    run = build(**guarding("mask"), center_crop=True, resolution=16)
    suspect, clean = (run.loader.draws(index, 0, 0) for index in (0, 15))
    assert clean["counted"] is None
    assert (suspect["counted"][..., 8:] == 255).all() and (suspect["counted"][..., :8] == 0).all()
    assert all(torch.isfinite(loss) for loss in step_once(run))


def test_a_projected_step_does_not_teach_the_composite(build, guarding):
    run = build(**guarding("project"))
    for micro, batch in enumerate(run.loader.draw(0)):
        with run.accelerator.accumulate(run.model):
            micro_step(run, batch, micro)
    trained = [p for p in run.control.params if p.grad is not None]
    away = torch.autograd.grad(run.guards.each[0].loss(0), trained)
    for p, h in zip(trained, away, strict=True):
        p.grad.copy_(p.grad + h)  # points along, whatever the batch brought
    before = sum(float((p.grad * h).sum()) for p, h in zip(trained, away, strict=True))
    run.guards.before_step(0)
    after = sum(float((p.grad * h).sum()) for p, h in zip(trained, away, strict=True))
    assert before > 0 and abs(after) < 1e-4 * before


def test_guards_together_resume_bit_equal(flags, guarding, tmp_path):
    options = {"cap": {"limit": 2}, "project": {"pictures": 1}}
    changes = {"max_train_steps": 4, "checkpointing_steps": 2, **guarding("mask+cap+project", **options)}
    assert main(flags("whole", **changes)) == 0
    (tmp_path / "cut/checkpoints").mkdir(parents=True)
    (tmp_path / "whole/checkpoints/step-2").rename(tmp_path / "cut/checkpoints/step-2")
    assert main(flags("cut", **changes, resume_from_checkpoint="latest")) == 0
    a, b = (
        checkpoint.read_tensors(tmp_path / f"{out}/checkpoints/step-4/unet.safetensors") for out in ("whole", "cut")
    )
    assert same(a, b)
    assert "guard/cosine" in (tmp_path / "whole/metrics.jsonl").read_text()


@pytest.mark.parametrize(("name", "picture"), [("mask", "mask.png"), ("project", "composite.png")])
def test_a_resume_compares_the_pictures_of_a_guard(name, picture, flags, guarding, capsys):
    changes = {"max_train_steps": 2, "checkpointing_steps": 2, **guarding(name)}
    assert main(flags(**changes)) == 0
    Image.new("RGB", (64, 64), "gold").save(Path(changes["guard.scan"]).with_name(picture))
    assert main(flags(**changes | {"max_train_steps": 3}, resume_from_checkpoint="latest")) == 2
    assert "pictures of guard.scan changed" in capsys.readouterr().err


def test_one_more_guard_is_a_class_and_an_entry(tmp_path, monkeypatch):
    class Odd(Guard):
        """Only odd records."""

        def kept(self):
            return np.arange(self.suspects.count) % 2 == 1

    monkeypatch.setitem(GUARDS, "odd", Odd)
    guards = Guards(scan_of(tmp_path, [0], "odd"))
    assert isinstance(guards.each[0], Odd) and isinstance(guards.suspects, Suspects)
