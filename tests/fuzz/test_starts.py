"""Fifty starts in one folder at once: one writes at a time, the others say who does, and nothing is lost."""

import json
import shutil
from pathlib import Path

import pytest

from silentbad import owned
from silentbad.measure.record import Record
from silentbad.saving import checkpoint
from tests.kill.runner import finish, start
from tests.mistakes import flags

STARTS = 50
REFUSED = ("is being written by", "many runs start there at once", "holds a run already")


def started(root: Path, out: Path, number: int, **changes):
    """A start of number `number`: every fifth wants to resume, the others to begin."""
    given = flags(root, output_dir=out, **{"max_train_steps": 2, "checkpointing_steps": 1} | changes)
    if number % 5 == 0:
        given["resume_from_checkpoint"] = "latest"
    return start([f"--{key}={value}" for key, value in given.items()], root / f"{number}.log")


def ends(root: Path, processes: list) -> tuple[list[int], list[str]]:
    """(exit codes, lines of errors)."""
    codes = [finish(process, 600) for process in processes]
    logs = [(root / f"{number}.log").read_text().splitlines() for number in range(len(processes))]
    return codes, [line for log in logs for line in log if line.startswith("error: ")]


def whole(folder: Path, steps: int) -> None:
    """The run in a folder is finished, and everything of it can be read."""
    assert json.loads((folder / "finished.json").read_text())["step"] == steps
    assert [checkpoint.problem(found) for found in checkpoint.steps(folder / "checkpoints")] == [None] * steps
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, steps + 1))
    Record.load(folder / "validation.json")
    assert not (folder / owned.LOCK).exists()


@pytest.mark.thorough
def test_of_fifty_starts_one_at_a_time_writes(good, tmp_path):
    root = tmp_path / "inputs"
    shutil.copytree(good, root)
    codes, said = ends(root, [started(root, root / "new", number, log_every=1) for number in range(STARTS)])
    assert set(codes) == {0, 2} and codes.count(2) == len(said)
    assert all(any(part in line for part in REFUSED) for line in said), said
    assert any("is being written by" in line for line in said)
    whole(root / "new", 2)


@pytest.mark.thorough
def test_fifty_starts_leave_a_run_that_is_there(good, tmp_path):
    root = tmp_path / "inputs"
    shutil.copytree(good, root)
    kept = {p: p.read_bytes() for p in (root / "held/checkpoints/step-2").iterdir()}
    codes, said = ends(
        root, [started(root, root / "held", number, checkpointing_steps=100) for number in range(STARTS)]
    )
    assert set(codes) <= {0, 2} and codes.count(2) == len(said)
    assert {path: path.read_bytes() for path in kept} == kept
    assert not (root / "held" / owned.LOCK).exists()
    assert json.loads((root / "held/finished.json").read_text())["step"] == 2
