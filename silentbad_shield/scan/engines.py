"""Where the tasks of a scan run: one after another in this process, or on the workers of a Dask
cluster.

A task is a function of a module with plain arguments. It writes files into the scan's folder,
which every worker sees, and returns little. It may run again: it then writes the same. So a worker
that dies costs the task under way, and a stopped scan goes on from the tasks that ended."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from silentbad.errors import UserError, first_line
from silentbad.files import read_json, replace_text
from silentbad.progress import Bar
from silentbad_shield.options import ScanOptions

Task = Callable[..., Any]
Ended = Iterator[tuple[int, Any]]  # (number of a task, what it returned), as they end


class Engine(Protocol):
    """Runs the calls task(*arguments), in any order."""

    def run(self, task: Task, calls: Sequence[tuple]) -> Ended: ...


class Process:
    """This process, one task after another."""

    def run(self, task: Task, calls: Sequence[tuple]) -> Ended:
        """Yield each task's number and result."""
        for number, arguments in enumerate(calls):
            yield number, task(*arguments)


class Dask:
    """The workers of a Dask client (https://distributed.dask.org), two tasks at most waiting for
    each: a task of a worker that died runs again on another one."""

    def __init__(self, client: Any):
        self.client = client

    def run(self, task: Task, calls: Sequence[tuple]) -> Ended:
        """Yield each task's number and result. Raises UserError where workers die on a task."""
        from distributed import KilledWorker, as_completed

        numbers = {
            self.client.submit(task, *arguments, pure=False): number
            for number, arguments in enumerate(calls)
        }
        try:
            for future in as_completed(list(numbers)):
                yield numbers.pop(future), future.result()
        except KilledWorker as error:
            raise UserError(
                f"engine: workers died again and again on one task ({first_line(error)}); give them"
                " more memory, then start the same scan: it goes on where it was"
            ) from None
        finally:
            self.client.cancel(list(numbers))


@contextmanager
def opened(options: ScanOptions) -> Iterator[Engine]:
    """The engine of a scan. Raises UserError where it is not installed or does not answer."""
    if options.engine == "process":
        yield Process()
        return
    try:
        import distributed
    except ImportError:
        raise UserError("engine: dask is not installed; pip install distributed") from None
    if options.scheduler is None:
        with (
            distributed.LocalCluster(
                n_workers=options.workers,
                threads_per_worker=1,
                memory_limit=None,
                dashboard_address=None,
            ) as cluster,
            distributed.Client(cluster) as client,
        ):
            yield Dask(client)
        return
    try:
        client = distributed.Client(options.scheduler)
    except (OSError, ValueError) as error:
        raise UserError(
            f"scheduler: no Dask scheduler answers at {options.scheduler} ({first_line(error)})"
        ) from None
    with client:
        yield Dask(client)


def timed(task: Task, *arguments: Any) -> tuple[Any, float]:
    """(what a task returns, its processor seconds)."""
    start = time.process_time()
    result = task(*arguments)
    return result, time.process_time() - start


class Steps:
    """The steps of a scan on an engine. What a task returned is kept in `folder`/done, so that a
    stopped scan does not run it again; `seconds` has each step's, summed over its tasks."""

    def __init__(self, folder: Path, engine: Engine):
        self.done = folder / "done"
        self.done.mkdir(parents=True, exist_ok=True)
        self.engine = engine
        self.seconds = dict[str, float]()

    def run(self, name: str, task: Task, calls: Sequence[tuple]) -> list[Any]:
        """What each call task(*arguments) returned, as JSON gives it back."""
        results = dict[int, Any]()
        for number in range(len(calls)):
            with suppress(OSError, ValueError):
                results[number] = read_json(self._file(name, number))
        missing = [number for number in range(len(calls)) if number not in results]
        ended = self.engine.run(timed, [(task, *calls[number]) for number in missing])
        with Bar(desc=name, total=len(missing)) as bar:
            for place, result in ended:
                file = self._file(name, missing[place])
                replace_text(file, json.dumps(result))
                results[missing[place]] = read_json(file)
                bar.update()
        self.seconds[name] = sum(seconds for _, seconds in results.values())
        return [results[number][0] for number in range(len(calls))]

    def _file(self, name: str, number: int) -> Path:
        return self.done / f"{name}-{number}.json"
