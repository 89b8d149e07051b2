"""`guard.name=drop` trains on what a scan left, and refuses a scan of other data."""

import json

import pytest

import train_silentbad
from silentbad.data.records import load_records
from silentbad.errors import UserError
from silentbad.run.config import parse
from silentbad.shield.guard import GuardConfig, guarded

ROWS = [("a cat", "ff0000"), ("a hat", "00ff00"), ("a boat", "0000ff"), ("a house", "ffff00")]


@pytest.fixture
def records(tmp_path):
    from PIL import Image

    with (tmp_path / "metadata.jsonl").open("w") as lines:
        for i, (text, colour) in enumerate(ROWS):
            Image.new("RGB", (8, 8), f"#{colour}").save(tmp_path / f"{i}.png")
            lines.write(json.dumps({"file_name": f"{i}.png", "text": text}) + "\n")
    config, _ = parse(train_silentbad.Config, ["--train_data_dir", str(tmp_path), "--cache_dir", str(tmp_path / "c")])
    return load_records(config)


def scan_of(tmp_path, indices, records=4, texts=None):
    rows = [{"index": i, "file": "", "text": (texts or {}).get(i, ROWS[i][0])} for i in indices]
    (tmp_path / "scan.json").write_text(json.dumps({"records": records, "suspects": rows}))
    return GuardConfig("drop", str(tmp_path / "scan.json"))


def test_suspects_are_dropped(records, tmp_path):
    kept = guarded(records, scan_of(tmp_path, [0, 2]))
    assert [kept.row(i)["text"] for i in range(len(kept))] == ["a hat", "a house"]
    assert kept.key != records.key and guarded(records, GuardConfig()) is records


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
        guarded(records, scan_of(tmp_path, **change))
    assert line in str(refused.value)


@pytest.mark.parametrize("content", ["", "[]", '{"records": "x"}', '{"records": 4, "suspects": [1]}'])
def test_what_is_no_scan_is_one_line(content, records, tmp_path):
    (tmp_path / "scan.json").write_text(content)
    with pytest.raises(UserError, match="is no scan.json"):
        guarded(records, GuardConfig("drop", str(tmp_path / "scan.json")))


@pytest.mark.parametrize(
    "flags, line",
    [
        (["--guard.name", "drop"], "guard.scan: is missing"),
        (["--guard.scan", "x.json"], "guard.scan: has no effect with guard.name=none"),
    ],
)
def test_half_a_guard_is_refused(flags, line):
    config, sources = parse(train_silentbad.Config, ["--train_data_dir", "x", *flags])
    with pytest.raises(UserError, match=line):
        train_silentbad.check_all(config, sources)
