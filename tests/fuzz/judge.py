"""Run a command on an input and say whether it meets the property that holds for every input.

Either exit code 0 (an audit: also 3) with a result that can be read again, or exit code 2 with one line `error: ...`,
last on stderr, and nothing new in any folder; within `LIMIT` seconds and `MEMORY` bytes, and without a traceback.
"""

import contextlib
import io
import json
import math
import os
import resource
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from accelerate.state import AcceleratorState, GradientState, PartialState

from silentbad.errors import UserError
from silentbad.measure.record import Record
from tests.mistakes import files

LIMIT = 10  # seconds of the processor that an input may take
WAITING = 60  # seconds by the clock: other processes may have the processor
MEMORY = 2 * 2**30  # bytes that a process may take
MARK = "<script>xss"  # in generated texts; no page may hold it as it is


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
    lines: set[str] = field(default_factory=set)

    def fell_short(self, why: str, case: object) -> None:
        self.short.setdefault(why, []).append(case)

    def __str__(self) -> str:
        short = sum(map(len, self.short.values()))
        counts = f"{self.accepted:7,} accepted {self.refused:7,} refused {short:4} short"
        times = f"{self.seconds:7.1f} s, slowest {self.slowest:5.2f} s"
        return f"{self.kind:28} {counts} {times}" + (f", {self.mutated:,} bytes mutated" if self.mutated else "")

    def settle(self) -> None:
        """Fail where anything fell short, with one input for each way."""
        told = [f"{len(cases)}x {why}\n      {str(cases[0])[:1500]}" for why, cases in self.short.items()]
        assert not told, f"{self.kind}: {len(told)} ways to fall short\n" + "\n".join(told)


TALLIES: list[Tally] = []  # of this session, for the summary


def tally(kind: str) -> Tally:
    TALLIES.append(Tally(kind))
    return TALLIES[-1]


def largest() -> int:
    """Bytes that this process held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextlib.contextmanager
def timed(found: Tally, case: object) -> Iterator[None]:
    """Count an input's time; what takes too long or stops with anything but a UserError falls short."""
    began, before = time.process_time(), largest()
    try:
        with alarm(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except UserError as error:
        found.refused += 1
        line = str(error)
        found.lines.add(line)
        if not line.isprintable() or not line.strip():
            found.fell_short("a line that is not one printable line", (case, line))
    except (Exception, TookTooLong) as error:
        found.fell_short(place(error), case)
    else:
        found.accepted += 1
    took = time.process_time() - began
    found.seconds, found.slowest = found.seconds + took, max(found.slowest, took)
    if largest() > max(MEMORY, before):
        found.fell_short(f"{largest() / 2**30:.1f} GiB of memory", case)


# ---------------------------------------------------------------- commands
def judge(
    found: Tally,
    case: object,
    program: Callable,
    argv: list[str],
    root: Path,
    result: Callable[[Path], str | None] = lambda root: None,
) -> str:
    """Run a command in `root` and count what it gave; `result` says what is wrong with what it left. Returns its
    line."""
    before, said = files(root), io.StringIO()
    outside = sorted(p.name for p in root.parent.iterdir())
    began, held = time.process_time(), largest()
    code: object = None
    with inside(root):
        try:
            with (
                contextlib.redirect_stderr(said),
                contextlib.redirect_stdout(io.StringIO()),
                alarm(),
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")
                code = program(argv)
        except SystemExit as stopped:
            code = stopped.code
        except (Exception, TookTooLong) as error:
            found.fell_short(place(error), case)
            code = "crash"
        finally:
            for state in (AcceleratorState, GradientState, PartialState):
                state._reset_state()
    took = time.process_time() - began
    found.seconds, found.slowest = found.seconds + took, max(found.slowest, took)
    if largest() > max(MEMORY, held):
        found.fell_short(f"{largest() / 2**30:.1f} GiB of memory", case)
    if sorted(p.name for p in root.parent.iterdir()) != outside:
        found.fell_short("files outside", case)
    if code == "crash":
        return ""
    if code == 2:
        return _refused(found, case, said.getvalue(), files(root) == before)
    if code not in (0, 3, None):
        found.fell_short(f"exit code {code}", (case, said.getvalue()[-300:]))
        return ""
    wrong = result(root)
    if wrong is None:
        found.accepted += 1
    else:
        found.fell_short(wrong, case)
    return ""


def _refused(found: Tally, case: object, said: str, unchanged: bool) -> str:
    lines = said.rstrip("\n").split("\n")
    ours = [line for line in lines if line.startswith("error: ")]
    line = lines[-1]
    if len(ours) != 1 or line != ours[0] or not line.isprintable() or line.strip() == "error:":
        found.fell_short("not one printable line `error: ...`, last", (case, said[-600:]))
    elif "hf_secret" in said:
        found.fell_short("a token in the line", (case, line))
    elif not unchanged and "step" not in line:  # a training that ended in the middle leaves its folder
        found.fell_short("refused, and files changed", (case, line))
    else:
        found.refused += 1
        found.lines.add(line)
    return line


@contextlib.contextmanager
def inside(root: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(root)
    try:
        yield
    finally:
        os.chdir(before)


def marked(root: Path) -> str | None:
    """That a page holds generated markup as it is."""
    for page in [*root.rglob("*.html"), *root.rglob("README.md")]:
        if MARK in page.read_text(encoding="utf-8", errors="replace"):
            return f"markup in {page.name}"
    return None


def trained(root: Path, out: str = "out") -> str | None:
    """What is wrong with a finished training's folder."""
    folder = root / out
    if not (folder / "finished.json").is_file():
        return "exit code 0 without finished.json"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    if not losses or not all(isinstance(loss, float) and math.isfinite(loss) for loss in losses):
        return f"losses {losses}"
    return _validated(folder) or marked(root)


def audited(root: Path, out: str = "audit") -> str | None:
    """What is wrong with an audit's folder."""
    if not (root / out / "validation.json").is_file():
        return "exit code 0 without validation.json"
    return _validated(root / out) or marked(root)


def _validated(folder: Path) -> str | None:
    if (folder / "validation.json").is_file():
        Record.load(folder / "validation.json")
    return None
