"""Read an input and say whether the reader meets the property that holds for every input.

It is read, or refused in one printable line; within `LIMIT` seconds and `MEMORY` bytes more, and without a traceback.
"""

import contextlib
import re
import signal
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from silentbad.errors import UserError

LIMIT = 10  # seconds of the processor that an input may take
WAITING = 60  # seconds by the clock: other processes may have the processor
MEMORY = 3 * 2**29  # bytes that an input may add to what its process holds: earlier tests of the process left much


class TookTooLong(BaseException):
    """Raised by the alarm: a BaseException, so that nobody's `except Exception` takes it for a mistake of a file."""


@contextlib.contextmanager
def alarm() -> Iterator[None]:
    """Stop what takes longer."""

    def ring(number: int, _frame: object) -> None:
        raise TookTooLong(f"longer than {LIMIT} s" if number == signal.SIGPROF else f"waits for more than {WAITING} s")

    clocks = ((signal.SIGPROF, signal.ITIMER_PROF, LIMIT), (signal.SIGALRM, signal.ITIMER_REAL, WAITING))
    before = [signal.signal(number, ring) for number, *_ in clocks]
    for _, timer, seconds in clocks:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for (number, timer, _), handler in zip(clocks, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def place(error: BaseException) -> str:
    """Type of an exception and the innermost line of this project that it passed."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/silentbad/" in f.filename or f.name == "main"]
    at = frames[-1] if frames else traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(at.filename).name}:{at.lineno} {at.name}: {str(error)[:200]}"


@dataclass
class Tally:
    """What a kind of input gave: counts, and each way to fall short with the first input that showed it."""

    kind: str
    accepted: int = 0
    refused: int = 0
    mutated: int = 0  # bytes
    slowest: float = 0.0
    seconds: float = 0.0
    short: dict[str, list[object]] = field(default_factory=dict)

    def fell_short(self, why: str, case: object) -> None:
        self.short.setdefault(why, []).append(case)

    def __str__(self) -> str:
        short = sum(map(len, self.short.values()))
        counts = f"{self.accepted:7,} accepted {self.refused:7,} refused {short:4} short"
        times = f"{self.seconds:7.1f} s, slowest {self.slowest:5.2f} s"
        return f"{self.kind:28} {counts} {times}" + (f", {self.mutated:,} bytes mutated" if self.mutated else "")

    def settle(self) -> None:
        """Fail where anything fell short, with one input for each way."""
        ways = [f"{len(cases)}x {why}\n      {str(cases[0])[:1500]}" for why, cases in self.short.items()]
        assert not ways, f"{self.kind}: {len(ways)} ways to fall short\n" + "\n".join(ways)


TALLIES: list[Tally] = []  # of this session, for the summary


def tally(kind: str) -> Tally:
    TALLIES.append(Tally(kind))
    return TALLIES[-1]


def largest() -> int:
    """Bytes that this process held at most. getrusage will not do: it passes on what a parent held before exec."""
    return _status("VmHWM")


def held() -> int:
    """Bytes that this process holds now."""
    return _status("VmRSS")


def _status(entry: str) -> int:
    return int(re.search(rf"{entry}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


@contextlib.contextmanager
def timed(counts: Tally, case: object) -> Iterator[None]:
    """Count an input's time; what takes too long or stops with anything but a UserError falls short."""
    began = time.process_time()
    before = largest()
    at_most = held() + MEMORY
    try:
        with alarm(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except UserError as error:
        counts.refused += 1
        line = str(error)
        if not line.isprintable() or not line.strip():
            counts.fell_short("a line that is not one printable line", (case, line))
    except (Exception, TookTooLong) as error:
        counts.fell_short(place(error), case)
    else:
        counts.accepted += 1
    seconds = time.process_time() - began
    counts.seconds += seconds
    counts.slowest = max(counts.slowest, seconds)
    if largest() > max(at_most, before):
        counts.fell_short(f"{largest() / 2**30:.1f} GiB of memory", case)
