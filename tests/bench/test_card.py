"""The table of a card: rows on a tiny pipeline, what becomes a row, the budget, the table."""

import json
import shutil
import time
from pathlib import Path

import pytest

from bench import card, card_run, size
from bench.recovery_table import stored


@pytest.fixture
def session(tmp_path):
    return card.Session(tmp_path / "scratch", cuda=False, minutes=5)


def gives(found):
    """A row that only returns something, or raises it."""

    def run(place, flags):
        if isinstance(found, Exception):
            raise found
        return found

    return card.Row(run, [])


# ---------------------------------------------------------------- one process
@pytest.mark.parametrize(
    ("code", "line", "refused"),
    [
        ("import sys; print('error: fp16 needs a card'); sys.exit(2)", "fp16 needs a card", True),
        ("import sys; print('error: this\\nTraceback (of a launcher)\\nOther'); sys.exit(1)", "this", True),
        ("raise ValueError('no such\\nthing')", "ValueError: no such", False),
        ("import os; os.kill(os.getpid(), 9)", "ended by SIGKILL", False),
    ],
)
def test_a_process_that_fails_says_why_in_a_line(code, line, refused, tmp_path):
    with pytest.raises(card.Failed) as failed:
        card.ended(["-c", code], time.monotonic() + 60, tmp_path / "log")
    assert (str(failed.value), failed.value.refused) == (line, refused)


def test_a_process_that_takes_too_long_is_ended_with_its_children(tmp_path):
    start = "import subprocess, time; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); time.sleep(600)"
    with pytest.raises(card.TooLong):
        card.ended(["-c", start], time.monotonic() + 3, tmp_path / "log")
    child = int((tmp_path / "log").read_text())
    waited = 0
    while runs(child) and (waited := waited + 1) < 100:
        time.sleep(0.1)
    assert not runs(child)


def runs(number: int) -> bool:
    """Whether a process does, and is not only waited for."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---------------------------------------------------------------- rows
@pytest.fixture
def watched(flags, tmp_path):
    """A run of the tiny pipeline, watched: its exit code and what was read."""

    def run(plan, **changes):
        result = tmp_path / "result.json"
        code = card_run.main(
            [str(result), json.dumps(plan._asdict()), *flags(max_train_steps=plan.steps, **changes)],
        )
        return code, json.loads(result.read_text())

    return run


@pytest.fixture(autouse=True)
def loop_as_it_is(monkeypatch):
    """A watched run changes the loop's functions, in a process of its own."""
    import train_silentbad

    for name in ("micro_step", "update", "validate", "finish"):
        monkeypatch.setattr(train_silentbad, name, getattr(train_silentbad, name))


def test_a_watched_run_reads_seconds_losses_and_memory(watched, tmp_path):
    plan = card_run.Plan(warm=2, timed=2, watched=1)
    code, found = watched(plan)
    assert code == 0 and found["skipped"] == 0
    assert len(found["losses"]) == 2 * plan.steps and all(loss > 0 for loss in found["losses"])  # two micro-batches
    assert 0 < found["seconds"] < 60 and found["first_step"] > 0 and found["process_peak"] > 2**26
    assert not (tmp_path / "run" / "pipeline").exists()  # nothing is written at the end


def test_a_watched_run_that_fails_leaves_its_error(watched, monkeypatch):
    import train_silentbad

    def fails(*arguments):
        raise RuntimeError("CUDA error: an illegal memory access\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(train_silentbad, "micro_step", fails)
    code, found = watched(card_run.Plan())
    assert code == 1 and found["error"].startswith("RuntimeError: CUDA error: an illegal memory access (")


def test_a_failing_row_is_a_row_and_the_next_one_runs(session):
    for error, outcome, line in (
        (card.Failed("RuntimeError: out of memory"), "failed", "RuntimeError: out of memory"),
        (card.Failed("not here", refused=True), "refused", "not here"),
        (ValueError("no file"), "failed", "ValueError: no file"),
        (card.TooLong(), "failed", "took more than 240 s"),
    ):
        row = session.row("step, fp32", gives(error))
        assert (row["outcome"], row["line"]) == (outcome, line)
    assert session.row("step, bf16", gives({"seconds": 1.0}))["outcome"] == "measured" and not session.left


def test_rows_that_take_cuda_are_not_measured_without(session):
    row = session.row("SD 1.5: plain", card.ROWS["SD 1.5: plain"])
    assert (row["outcome"], row["line"]) == ("not measured", "no CUDA")
    session.true_size = True
    assert session.row("SD 1.5: plain", card.ROWS["SD 1.5: plain"])["line"] == "its base was not written"
    quickstart = session.row("quickstart from start to end", card.ROWS["quickstart from start to end"])
    assert quickstart["outcome"] == "not measured"  # --true_size does not ask for it


def test_what_the_minutes_do_not_reach_is_left_out_and_named(tmp_path, monkeypatch, capsys):
    results = tmp_path / "card.jsonl"
    monkeypatch.setattr(card, "machine", lambda scratch: {"on_cuda": False, "device": "a processor"})
    slow = card.Row(lambda place, flags: time.sleep(0.1) or {"seconds": 0.5}, [])
    monkeypatch.setattr(card, "ROWS", {"first": slow, "second": slow, "third": slow})
    monkeypatch.setattr(card, "LEAST", 0.05)
    assert card.main(["--minutes", "0.002", "--results", str(results), "--rows", "first", "second", "third"]) == 0
    said = capsys.readouterr().out
    names = [row["row"] for row in stored(results)]
    assert names and names[0] == "first" and "third" not in names
    assert "left out, for lack of time: " in said and said.strip().endswith("third; --minutes gives more")


def test_two_files_of_weights_are_compared(tmp_path):
    import torch
    from safetensors.torch import save_file

    one, other = tmp_path / "one", tmp_path / "other"
    save_file({"w": torch.zeros(2), "b": torch.ones(1)}, one)
    save_file({"w": torch.tensor([3.0, 0.0]), "b": torch.tensor([5.0])}, other)
    assert card.largest_difference(one, one) == 0 and card.largest_difference(one, other) == 4
    assert card.distance(one, other) == 5


def test_a_forecast_is_read_from_a_dry_run():
    said = "  time     12 min to train, 0.3 s a step\n  drawing  about 90 s: 16 images of 20 steps\n"
    assert card.lasting(said, "time +(?:about )?") == 720 and card.lasting(said, "drawing +(?:about )?") == 90


@pytest.mark.thorough
@pytest.mark.parametrize("flags", [card.FULL, card.LORA, card.RECOMMENDED])
def test_a_row_of_true_size_has_forecast_and_outcome(flags, pipelines, tmp_path, monkeypatch):
    shutil.copytree(pipelines["epsilon"], tmp_path / "sd15")
    size.write_data(tmp_path / "elements")
    small = ["--resolution=16", "--validation.resolution=16", "--train_batch_size=1"]
    monkeypatch.setattr(card, "ON_CPU", small)
    found = card.true_size(card.Place(tmp_path, False, time.monotonic() + 600), flags)
    assert found["seconds"] > 0 and found["seconds_forecast"] > 0 and found["forecast"] > 2**28
    assert 0 < found["share"] < 1 and len(found["measurements"]) == 2
    row = {"row": "SD 1.5: plain", "on_cuda": True, "outcome": "measured", **found}
    assert " of the time |" in card.table([row])


# ---------------------------------------------------------------- the table
def test_the_table_says_what_was_not_measured():
    plain = {"row": "step, fp32", "on_cuda": False, "outcome": "measured", "seconds": 0.5, "losses": [0.2, 0.1]}
    rows = [
        {**plain, "seconds": 9.0},
        plain,
        {**plain, "row": "step, bf16", "losses": [0.201]},
        {"row": "resumed to the bit", "on_cuda": False, "outcome": "measured", "differs": 0.0},
        {"row": "xFormers", "on_cuda": False, "outcome": "refused", "line": "a | b"},
    ]
    lines = {line.split(" | ")[0].strip("| "): line for line in card.table(rows).splitlines()[2:]}
    assert set(lines) == set(card.ROWS)
    cuda = " | ".join(["not measured"] * 4)
    assert lines["step, fp32"] == f"| step, fp32 | 0.5 | loss 0.2000 | {cuda} |"
    assert lines["step, bf16"] == f"| step, bf16 | 0.5 | loss 0.2010, +0.5% of fp32 | {cuda} |"
    assert " |  | equal to the bit | " in lines["resumed to the bit"]
    assert lines["xFormers"] == f"| xFormers |  | refused: a / b | {cuda} |"
    assert lines["AdamW"].count("not measured") == 6


def test_the_table_has_a_card_beside_the_processor():
    gib = 2**30
    row = {"row": "SD 1.5: plain", "on_cuda": True, "outcome": "measured", "seconds": 1.25, "seconds_forecast": 1.2}
    row |= {"peak": 20 * gib, "forecast": 19 * gib, "waits": {"train_silentbad.py:183 size = norm.item()": 1.0}}
    row |= {"losses": [0.5], "share": 0.28}
    differs = {**row, "row": "resumed to the bit", "differs": 1e-7, "again_differs": 2e-7}
    text = card.table([row, differs])
    assert (
        "| SD 1.5: plain | not measured | not measured | 1.25 (1.2) | 20.00 (19.00) | 1 | measuring 28% of the time |"
        in text
    )
    assert "differs by 1e-07; two whole runs by 2e-07" in text
