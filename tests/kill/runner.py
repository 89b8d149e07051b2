"""Training runs as processes of their own, forked from a server that imported everything: a start costs no import."""

import multiprocessing
import os
import resource
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.kill.preload"])


def work(argv: list[str], log: str, file_limit: int | None, environment: dict, prepare: Callable | None) -> None:
    """`train_silentbad.main(argv)` with its output in `log`, the threads it left beside it; its code the process's."""
    os.environ.update(environment)
    with open(log, "a") as out:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(out.fileno(), stream.fileno())
    import train_silentbad

    if file_limit is not None:  # writing beyond it fails with EFBIG
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    code = 1
    try:
        if prepare is not None:
            prepare(argv)
        code = train_silentbad.main(argv)
        threads = sorted(thread.read_text().strip() for thread in Path("/proc/self/task").glob("*/comm"))
        Path(log).with_suffix(".threads").write_text("\n".join(threads))
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def start(
    argv: list[str],
    log: Path,
    file_limit: int | None = None,
    environment: dict | None = None,
    prepare: Callable | None = None,
) -> multiprocessing.Process:
    """A training process, running; `prepare(argv)` is called in it first."""
    said = [str(word) for word in argv]
    process = CONTEXT.Process(target=work, args=(said, str(log), file_limit, environment or {}, prepare))
    process.start()
    return process


def finish(process: multiprocessing.Process, timeout: float = 240) -> int:
    """Its exit code; one that does not end in time is killed and fails the test."""
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError(f"still running after {timeout} s")
    return process.exitcode
