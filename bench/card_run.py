"""One training of bench/card.py, in a process of its own.

    python -m bench.card_run RESULT.json PLAN.json FLAGS...

FLAGS are train_silentbad.py's; PLAN names the fields of `Plan`. The loop is that of train_silentbad.py itself: its
functions are watched from outside. An exception is a line of the result, and its traceback goes to stderr.
"""

import json
import os
import resource
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
STARTED = time.perf_counter()


class Plan(NamedTuple):
    """The numbers of updates that warm up, are timed, and are watched for waits; `finish`: checkpoint, pipeline and
    report are written at the end; `deterministic`: by kernels that add in one order."""

    warm: int = 3
    timed: int = 10
    watched: int = 2
    finish: bool = False
    deterministic: bool = False

    @property
    def steps(self) -> int:
        """Updates of the run; before the last one there may be a measurement."""
        return self.warm + self.timed + self.watched + 1


def asked_by() -> str:
    """The running line of this project, or of a library where the project has none on the stack: file, number, code."""
    frames = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
    own = [f for f in frames if f.filename.startswith(f"{ROOT}{os.sep}") and f"{os.sep}.venv{os.sep}" not in f.filename]
    frame = (own or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} {frame.line}"


@contextmanager
def noting(waits: Counter[str]) -> Iterator[None]:
    """Counts, by line, the operations inside that make the host wait for the device; none on a CPU."""
    import torch

    if not torch.cuda.is_available():
        yield
        return

    def note(message: Any, *more: Any) -> None:
        if "synchronizing" in str(message):
            waits[asked_by()] += 1

    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note  # type: ignore[assignment]
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)


class Watch:
    """Wraps the loop's functions and measures one run."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.updates = 0  # ended, skipped ones included
        self.marks: dict[int, float] = {}  # when the first micro-batch began (0), when an update had ended
        self.losses: list[Any] = []  # on the device
        self.waits: Counter[str] = Counter()
        self.measurements: list[float] = []  # seconds of each
        self.state: Any = None

    def clock(self) -> float:
        """Seconds: wall clock after the device has finished all its work; on a CPU processor time."""
        import torch

        if not torch.cuda.is_available():
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def _looks(self) -> bool:
        """Whether waits are counted in the update under way."""
        first = self.plan.warm + self.plan.timed
        return first <= self.updates < first + self.plan.watched

    def micro_step(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Around a micro-batch."""
        if not self.marks:
            self.marks[0] = self.clock()
        with noting(self.waits) if self._looks() else nullcontext():
            loss = function(*arguments)
        self.losses.append(loss)
        return loss

    def update(self, function: Callable[..., Any], run: Any) -> Any:
        """Around an update."""
        self.state = run.state
        with noting(self.waits) if self._looks() else nullcontext():
            applied = function(run)
        self.updates += 1
        if self.updates in (1, self.plan.warm, self.plan.warm + self.plan.timed):
            self.marks[self.updates] = self.clock()
        return applied

    def validate(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Around a measurement."""
        started = self.clock()
        function(*arguments, **options)
        self.measurements.append(self.clock() - started)

    def result(self) -> dict[str, Any]:
        """The readings: seconds, and memory of the device and of this process in bytes."""
        import torch

        plan = self.plan
        unit = 1 if sys.platform == "darwin" else 2**10
        found: dict[str, Any] = {
            "losses": [float(loss) for loss in self.losses],
            "measurements": self.measurements,
            "process_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        }
        if self.state is not None:
            found["skipped"] = self.state.skipped
            found["start"] = self.marks[0] - (STARTED if torch.cuda.is_available() else 0)
            found["first_step"] = self.marks[1] - self.marks[0]
        if self.updates >= plan.warm + plan.timed:
            found["seconds"] = (self.marks[plan.warm + plan.timed] - self.marks[plan.warm]) / plan.timed
        if torch.cuda.is_available():
            found["peak"] = torch.cuda.max_memory_allocated()
            found["reserved"] = torch.cuda.max_memory_reserved()
            found["waits"] = {line: count / max(plan.watched, 1) for line, count in self.waits.items()}
        return found


def watched_run(plan: Plan, flags: list[str]) -> tuple[int, dict[str, Any]]:
    """Runs train_silentbad.py with these flags; returns its exit code and the readings."""
    import torch

    import train_silentbad as loop

    if plan.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        for fused in ("flash", "mem_efficient", "cudnn"):  # their backward only warns
            getattr(torch.backends.cuda, f"enable_{fused}_sdp")(False)
    watch = Watch(plan)

    def around(name: str) -> None:
        function, watched = getattr(loop, name), getattr(watch, name)
        setattr(loop, name, lambda *arguments, **options: watched(function, *arguments, **options))

    for name in ("micro_step", "update", "validate"):
        around(name)
    if not plan.finish:
        loop.finish = lambda run: None
    code = loop.main(flags)
    return code, watch.result()


def main(arguments: list[str]) -> int:
    from silentbad.errors import first_line

    place, plan, *flags = arguments
    code, found = 1, dict[str, Any]()
    try:
        code, found = watched_run(Plan(**json.loads(plan)), flags)
    except Exception as error:
        traceback.print_exc()
        own = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(f"{ROOT}{os.sep}")]
        own = [f for f in own if f"{os.sep}.venv{os.sep}" not in f.filename]
        where = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
        found = {"error": f"{type(error).__name__}: {first_line(error)}{where}"}
    Path(place).write_text(json.dumps(found))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
