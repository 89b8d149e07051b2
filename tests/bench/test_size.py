"""Runs at true size: what a process is timed by, the rows on a tiny pipeline, and the tables."""

import pytest

from bench import size
from tests.tiny import tiny_sd3_pipeline

SCRIPT = """
import time, torch
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight])
for _ in range(3):
    time.sleep(0.2)
    optimizer.step()
"""


def test_a_step_lasts_from_one_update_to_the_next(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = size.started([str(script)])
    assert len(ended.ticks) == 4 and ended.peak > 2**26  # the start, three steps; torch alone takes more
    assert 0.2 <= ended.seconds(0, 2) < 1 and ended.seconds(1, 2) < 0.2


# ---------------------------------------------------------------- rows
SMALL = {"resolution": 16}
PEER = """
import sys, pathlib, torch
given = dict(word[2:].split("=") for word in sys.argv[1:])
pathlib.Path(given["output_dir"]).mkdir()
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
for _ in range(int(given["max_train_steps"])):
    optimizer.step()
"""


@pytest.fixture
def places(pipelines, tmp_path):
    """The tiny pipeline in place of every base, and the data of the benchmark."""
    data, clean = size.write_data(tmp_path / "data"), size.write_clean(tmp_path / "clean", 4, 16)
    return size.Places(lambda name: pipelines["epsilon"], data, clean, tmp_path / "run")


def test_too_little_memory_for_the_libraries_is_one_line(places):
    row = size.limited("2 GiB", places)
    assert row["code"] == 1 and not row["traceback"] and row["line"].startswith("error: memory ran out (")


@pytest.mark.thorough
@pytest.mark.parametrize("base", ["sd15", "sd3"])
def test_a_row_has_the_forecast_and_what_happened(base, places, tmp_path, monkeypatch):
    if base == "sd3":
        tiny_sd3_pipeline(t5=False).save_pretrained(tmp_path / "sd3")
        places = places._replace(base=lambda name: tmp_path / name)
    name = next(iter(size.RUNS))
    monkeypatch.setitem(size.RUNS, name, size.Row(size.LORA | SMALL, base, resume=True))
    row = size.measured(name, places)
    assert row["resumed_to_the_bit"] and row["plain"]
    assert 0.3 < row["peak"] / row["peak_forecast"] < 3
    assert 0.5 < row["files"] / row["files_forecast"] < 1.2  # of one more checkpoint
    assert 0 < row["counted"] < row["peak"]
    assert 0 < row["seconds"] and 0 < row["seconds_forecast"]
    assert size.table([row]).count("| yes | yes |") == 1


@pytest.mark.thorough
def test_a_shipped_configuration_starts(places, monkeypatch):
    name = "configs/sd15_lora.yaml"
    monkeypatch.setitem(size.STARTS, name, size.Row(size.SMALL | SMALL))
    row = size.start_of(name, places)
    assert row["code"] == 0, row["line"]


@pytest.mark.thorough
def test_a_warm_cache_is_read_again(places):
    row = size.many("8 pictures", places)
    assert row["pictures"] > 0 and row["cache"] > 0
    assert all(row[which]["seconds"] > 0 and row[which]["peak"] > 2**28 for which in ("cold", "warm"))


@pytest.mark.thorough
def test_a_peer_runs_in_turns(places, tmp_path, monkeypatch):
    name = next(iter(size.RUNS))
    monkeypatch.setitem(size.RUNS, name, size.Row(size.LORA | SMALL, steps=2))
    script = tmp_path / "peer.py"
    script.write_text(PEER)
    row = size.beside(name, script, places, 1)
    assert row["row"] == f"{name} | peer.py" and len(row["ours"]) == len(row["theirs"]) == 1
    assert all(turn[key] > 0 for arm in ("ours", "theirs") for turn in row[arm] for key in turn)


# ---------------------------------------------------------------- tables
def test_the_tables_take_the_last_row_of_each_name():
    name = next(iter(size.RUNS))
    row = dict.fromkeys(("processor", "processor_forecast", "seconds", "seconds_forecast"), 2.0)
    row |= dict.fromkeys(("peak", "peak_forecast", "files", "files_forecast", "counted"), 3 * 2**30)
    turn = {"seconds": 3.0, "processor": 2.0, "peak": 2**30}
    pair = {
        "row": f"{name} | train_text_to_image_lora.py",
        "ours": [turn],
        "theirs": [turn, {**turn, "seconds": 5.0}],
    }
    rows = [
        {"row": name, **row},
        {"row": "7 GiB", "code": 2},
        pair,
        {"row": name, **row, "seconds": 4.0, "plain": True},
    ]
    (line,) = size.table(rows).splitlines()[2:]
    assert line.count("3.00") == 5 and "| 2.0 (2.0) | 4.0 (2.0) |" in line and line.endswith("|  | yes |")
    ours, theirs = size.peers(rows).splitlines()[2:]
    assert "| 1 | 2.0 | 3.0 | 1.00 |" in ours and "`train_text_to_image_lora.py` | 2 | 2.0 | 4.0 |" in theirs
