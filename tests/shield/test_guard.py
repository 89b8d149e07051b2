"""The shield's guard leaves out what a scan found, as a hook of anybody's own, and refuses a scan of other data."""

import json
from contextlib import nullcontext

import numpy as np
import pytest
from PIL import Image

import train_silentbad
from silentbad.data.formats import checked_row
from silentbad.data.published import as_trained
from silentbad.data.records import load_records
from silentbad.errors import UserError
from silentbad.loop.hooks import hook_classes
from silentbad.loop.inputs import chosen
from silentbad.settings.reader import parse
from silentbad_shield import scan_file
from silentbad_shield.scan.words import segments, text_of
from tests.conftest import ELEMENTS
from tests.training import checked
from train_silentbad import main

DROP = "silentbad_shield.guard:Drop"
ROWS = [("a cat", "ff0000"), ("a hat", "00ff00"), ("a boat", "0000ff"), ("a house", "ffff00")]


@pytest.fixture
def records(tmp_path):
    with (tmp_path / "metadata.jsonl").open("w") as lines:
        for i, (text, colour) in enumerate(ROWS):
            Image.new("RGB", (8, 8), f"#{colour}").save(tmp_path / f"{i}.png")
            lines.write(json.dumps({"file_name": f"{i}.png", "text": text}) + "\n")
    config, _ = parse(train_silentbad.Config, ["--train_data_dir", str(tmp_path), "--cache_dir", str(tmp_path / "c")])
    return load_records(config)


def scan_of(folder, indices, records=4, texts=None):
    """A scan whose suspects these are."""
    rows = [{"index": i, "file": "", "text": (texts or {}).get(i) or ROWS[i][0]} for i in indices]
    elements = [{"phrase": row["text"], "records": [row["index"]]} for row in rows]
    sets = [{"prompt": ", ".join(row["text"] for row in rows), "elements": elements}] if elements else []
    (folder / "scan.json").write_text(json.dumps({"records": records, "suspects": rows, "sets": sets}))
    return folder / "scan.json"


def left(records, scan):
    return chosen(records, hook_classes([DROP]), {DROP: {"scan": str(scan)}})


@pytest.mark.parametrize("text", ["An image with @@ a cat, @@ a hat.", "a cat \n"])
def test_captions_are_compared_as_training_reads_them(text, records):
    """With the marker of the published layout, or with what a text file ends in."""
    read = checked_row({**records.row(0), "text": text, "phrases": [], "captioned": True})["text"]
    assert scan_file.digest([as_trained(text_of({"text": text, "where": "a row"}))[0]]) == scan_file.digest([read])
    assert all("@" not in token for tokens in segments(text) for token in tokens)


def test_suspects_are_dropped(records, tmp_path, capsys):
    guarded = left(records, scan_of(tmp_path, [0, 2]))
    assert [guarded.row(i)["text"] for i in range(len(guarded))] == ["a hat", "a house"]
    assert guarded.key != records.key and chosen(records, {}, {}) is records
    assert left(records, tmp_path).key == guarded.key  # the scan's folder
    assert left(records, scan_of(tmp_path, [])) is records
    assert "names no suspect; no record is left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change, line",
    [
        ({"indices": [0], "records": 5}, "is of other data (5 records, here 4"),
        ({"indices": [1], "texts": {1: "a dog"}}, "is of other data"),
        ({"indices": [0, 1, 2, 3]}, "suspects every record"),
    ],
)
def test_another_scan_is_refused(change, line, records, tmp_path):
    with pytest.raises(UserError, match="hook_options: .*scan.json") as refused:
        left(records, scan_of(tmp_path, **change))
    assert line in str(refused.value)


def test_a_scan_of_other_captions_is_refused(records, tmp_path):
    file = scan_of(tmp_path, [0])
    scan = json.loads(file.read_text())
    for texts, fits in (([text for text, _ in ROWS], True), ([*(text for text, _ in ROWS[:3]), "a tree"], False)):
        file.write_text(json.dumps({**scan, "captions": scan_file.digest(texts)}))
        with nullcontext() if fits else pytest.raises(UserError, match="is of other data .*other captions"):
            left(records, file)


def test_a_choice_among_scanned_records_is_named(records, tmp_path):
    with pytest.raises(UserError, match="max_train_samples selects some of them, leave it out"):
        left(records.select(np.arange(3)), scan_of(tmp_path, [0]))


@pytest.mark.parametrize("content", ["", "[]", '{"records": "x"}', '{"records": 4, "suspects": [1]}'])
def test_what_is_no_scan_is_one_line(content, records, tmp_path):
    (tmp_path / "scan.json").write_text(content)
    with pytest.raises(UserError, match="is no scan.json"):
        left(records, tmp_path / "scan.json")


@pytest.mark.parametrize(
    "change, line",
    [
        ({"records": [0.5]}, "sets.0.elements.0.records.0 must be a valid integer"),
        ({"records": [-1]}, "records.0 must be at least 0"),
        ({"phrase": "a dog"}, "prompt is not its elements' phrases"),
    ],
)
def test_a_scan_that_was_written_by_hand_is_one_line(change, line, records, tmp_path):
    file = scan_of(tmp_path, [0])
    scan = json.loads(file.read_text())
    scan["sets"][0]["elements"][0] |= change
    file.write_text(json.dumps(scan))
    with pytest.raises(UserError, match="hook_options: .*") as refused:
        left(records, file)
    assert line in str(refused.value)


@pytest.mark.parametrize(
    "flags, line",
    [
        (["--hooks", DROP], "hook_options: silentbad_shield.guard:Drop: option 'scan' is missing; it takes: scan"),
        (["--hooks", "silentbad_shield.gard:Drop"], "hooks: no module silentbad_shield.gard; is its package installed"),
        (["--hooks", DROP, "--hook_options", f"{{{DROP}: {{scna: x}}}}"], "unknown option 'scna'; did you mean 'scan'"),
        (["--hooks", DROP, "--hook_options", "{mine.py:Mine: {}}"], "mine.py:Mine is none of the hooks"),
        (["--hooks", DROP, "--hook_options", f"{{{DROP}: 3}}"], "must be option: value pairs"),
        (["--guard.name", "drop"], "is a hook now: use --hooks silentbad_shield.guard:Drop"),
        (["--guard.scan", "x"], "is a hook now: use --hooks silentbad_shield.guard:Drop"),
    ],
)
def test_what_cannot_guard_is_refused(flags, line):
    with pytest.raises(UserError) as refused:
        checked(["--train_data_dir", "x", *flags])
    assert line in str(refused.value)


def test_a_guarded_run_trains_on_the_rest_and_resumes_with_its_scan(flags, tmp_path, capsys):
    texts = {i: f"a picture of {ELEMENTS[i // 4][0]}" for i in range(8)}
    scan = scan_of(tmp_path, [*texts], records=16, texts=texts)
    own = {"hooks": json.dumps([DROP]), "hook_options": json.dumps({DROP: {"scan": str(scan)}})}
    assert main(flags(max_train_steps=2, **own)) == 0
    entry = json.loads((tmp_path / "run/run.json").read_text())["own_code"][DROP]
    assert entry["file"].endswith("silentbad_shield/guard.py")
    assert main(flags(max_train_steps=3, resume_from_checkpoint="latest", **own)) == 0
    scan_of(tmp_path, [*texts][:4], records=16, texts=texts)
    assert main(flags(max_train_steps=4, resume_from_checkpoint="latest", **own)) == 2
    assert "records" in capsys.readouterr().err
