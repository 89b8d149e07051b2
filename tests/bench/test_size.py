"""Runs at true size: what a process is timed by, and the tables."""

from bench import size

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


def test_the_tables_take_the_last_row_of_each_name():
    name = next(iter(size.RUNS))
    row = dict.fromkeys(("processor", "processor_forecast", "seconds", "seconds_forecast"), 2.0)
    row |= dict.fromkeys(("peak", "peak_forecast", "files", "files_forecast", "counted"), 3 * 2**30)
    turn = {"seconds": 3.0, "processor": 2.0, "peak": 2**30}
    pair = {"row": f"{name} | train_text_to_image_lora.py", "ours": [turn], "theirs": [turn, {**turn, "seconds": 5.0}]}
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


def test_limits_say_how_a_run_ended():
    rows = [{"row": f"{limit} GiB", "code": code, "traceback": code == 1} for limit, code in ((9, 0), (2, 1), (7, 2))]
    ends = [line.split(" | ")[1:] for line in size.limits(rows).splitlines()[2:]]
    assert ends == [["a traceback", "1 |"], ["one line", "2 |"], ["ends well", "0 |"]]
