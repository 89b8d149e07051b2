"""Progress: a bar on a terminal, lines in a log, and a rate that knows of pauses."""

import io

import pytest

from silentbad import progress
from silentbad.progress import Bar


class Screen(io.StringIO):
    """A terminal that keeps what is written."""

    def isatty(self) -> bool:
        return True


class Clock:
    """Time that passes when a test says so."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "FIRST", 5.0)
    monkeypatch.setattr("tqdm.std.time", clock)
    return clock


@pytest.fixture
def log() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def screen() -> Screen:
    return Screen()


def test_a_log_has_lines_in_growing_intervals_and_the_last_state(log, clock):
    bar = Bar(total=200, desc="Steps", file=log, unit="step")
    for _ in range(200):
        clock.now += 1
        bar.set_postfix(loss="0.5", refresh=False)
        bar.update()
    bar.close()
    bar.close()
    lines = log.getvalue().splitlines()
    assert "\r" not in log.getvalue() and all(lines)
    assert [int(line.split()[1]) for line in lines] == [5, 15, 35, 75, 135, 195, 200]
    assert lines[0] == "Steps: 5 of 200, 00:05 so far, 03:15 to go, 1.00step/s, loss=0.5"


def test_a_short_log_has_its_first_and_its_last_state(log, clock):
    bar = Bar(total=6, desc="Steps", file=log, unit="step")
    for step in range(1, 7):
        clock.now += 0.1
        bar.update()
        if step == 1:
            bar.refresh()
    bar.close()
    assert [line.split(",")[0] for line in log.getvalue().splitlines()] == ["Steps: 1 of 6", "Steps: 6 of 6"]


def test_an_iterable_is_counted_as_it_is_read(log, clock):
    for _ in Bar(range(200), desc="Steps", file=log):
        clock.now += 1
    said = [line.split(",")[0] for line in log.getvalue().splitlines()]
    assert said == [f"Steps: {n} of 200" for n in (5, 15, 35, 75, 135, 195, 200)]


def test_what_is_done_before_a_line_is_due_leaves_no_line(log, clock):
    assert list(Bar(range(3), desc="targets", file=log)) == [0, 1, 2]
    assert log.getvalue() == ""


def test_a_bar_that_is_not_left_has_no_last_line(log, clock):
    for _ in Bar(range(7), desc="Images", file=log, leave=False):
        clock.now += 1
    assert [line.split(",")[0] for line in log.getvalue().splitlines()] == ["Images: 5 of 7"]


def test_a_terminal_has_a_bar(screen):
    for _ in Bar(range(3), desc="targets", file=screen):
        pass
    assert "\r" in screen.getvalue() and "100%" in screen.getvalue() and "so far" not in screen.getvalue()


@pytest.mark.parametrize("stream", ["log", "screen"])
def test_a_pause_counts_neither_for_rate_nor_forecast(stream, request, clock):
    stream = request.getfixturevalue(stream)
    bar = Bar(total=100, desc="Steps", file=stream, unit="step")
    with bar.paused("measuring the base model"):
        clock.now += 5000
    for _ in range(50):
        clock.now += 1
        bar.update()
        with bar.paused(), bar.paused("measuring"):  # one in another counts once
            clock.now += 30
    assert bar.format_dict["elapsed"] == pytest.approx(50)
    assert bar.format_dict["rate"] == pytest.approx(1)
    text = str(bar)
    bar.close()
    assert "1.00step/s" in text and ("00:50 to go" in text or "00:50<00:50" in text)
    assert "Steps: measuring the base model" in stream.getvalue() and bar.desc in ("Steps", "Steps: ")


def test_a_disabled_bar_pauses_in_silence(log, clock):
    bar = Bar(total=3, desc="Steps", file=log, disable=True)
    with bar.paused("measuring"):
        clock.now += progress.LONGEST
    bar.update()
    bar.close()
    assert log.getvalue() == ""
