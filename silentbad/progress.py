"""Progress bars of every command: a bar on a terminal, plain lines in a log."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

FIRST = 5.0  # seconds until the first line of a log, and to the next; they double up to LONGEST
LONGEST = 60.0
LINE = "{desc}: {n_fmt} of {total_fmt}, {elapsed} so far, {remaining} to go, {rate_fmt}{postfix}"


class Bar(tqdm):
    """tqdm's bar where stderr is a terminal. Elsewhere plain lines without carriage returns: the
    first after `FIRST` seconds, then in growing intervals, and one at the end unless `leave` is
    False.

    Example: "Steps: 120 of 350, 01:05 so far, 02:05 to go, 1.84step/s, loss=0.0712"."""

    mininterval: float
    start_t: float
    last_print_t: float
    leave: bool | None

    def __init__(self, *args: Any, **options: Any):
        self.lines = not (options.get("file") or sys.stderr).isatty()
        if self.lines:
            options |= {"bar_format": LINE, "mininterval": FIRST, "miniters": 1, "delay": 1e-9}
        self.interval = FIRST
        self.due = 0.0  # no earlier line
        super().__init__(*args, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Draw the bar, or print a line."""
        if not self.lines:
            return super().display(msg, pos)
        now = self._time()
        if msg is None and now >= self.due:  # tqdm wipes a bar out with an empty text
            self.say(" ".join(str(self).split()))  # tqdm pads its numbers
            # tqdm's own interval stays: its loop over an iterable reads it once, `update` each time
            self.interval = min(2 * self.interval, LONGEST)
            self.due = now + self.interval
        return False

    def say(self, line: str) -> None:
        """A line of a log."""
        print(line, file=self.fp, flush=True)

    def close(self) -> None:
        """Show the last state once; in a log only after a first line or `FIRST` seconds."""
        if self.lines and not self.disable:
            late = self._time() - self.start_t >= FIRST
            if self.leave is not False and (late or self.due):
                self.due = 0.0
                self.display()
            self.leave = False  # the line is already printed
        super().close()

    @contextmanager
    def paused(self, what: str = "") -> Iterator[None]:
        """Exclude the time inside from rate and forecast; `what`, the work meanwhile, is shown in
        the description."""
        if self.disable:
            yield
            return
        description = self.desc
        name = description.removesuffix(": ")
        began = self._time()
        start = self.start_t
        last = self.last_print_t
        if what and self.lines:
            self.say(f"{name}: {what}")
        elif what:
            self.set_description(f"{name}: {what}")
        try:
            yield
        finally:
            away = self._time() - began
            self.start_t = start + away  # from the earlier values, since pauses may be nested
            self.last_print_t = last + away
            if what and not self.lines:
                self.set_description_str(description)
