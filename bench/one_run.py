"""One training of a benchmark (bench/recovery.py), in a process of its own."""

import json
import os
import resource
import shutil
import sys
import time
from pathlib import Path
from unittest import mock

import torch

import train_silentbad
from silentbad.device import device_name
from silentbad.measure.limit import FOLDER
from silentbad.measure.scores import scalars
from validation import RecoveryHook


def measured(argv: list[str], log: Path, clock: Path, base: Path) -> None:
    """Runs train_silentbad.py with these flags and writes its output to `log`. Its peak memory and the seconds of
    training before each evaluation go to `clock`: processor time on a CPU, where other work may share the cores, wall
    clock on an accelerator. The base's evaluation is read from the file `base`, or written there, with its pictures
    beside it."""
    now = time.perf_counter if torch.cuda.is_available() else time.process_time
    run = RecoveryHook.run
    seconds: dict[int, float] = {}
    pictures = base.with_suffix("")
    resumed = trained = 0.0

    def timed(hook, step, *rest, **more):
        nonlocal resumed, trained
        trained += now() - resumed if seconds else 0.0  # what came before the first evaluation was loading
        seconds[step] = trained
        if step == 0 and base.is_file():
            hook.load_state_dict(json.loads(base.read_text()))
            if pictures.is_dir():
                shutil.copytree(pictures, hook.output_dir / FOLDER, dirs_exist_ok=True)
            resumed = now()
            return scalars(hook.history[0], hook.threshold)
        scores = run(hook, step, *rest, **more)
        if step == 0:
            base.parent.mkdir(parents=True, exist_ok=True)
            draft = base.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps(hook.state_dict()))
            if (drawn := hook.output_dir / FOLDER).is_dir():
                shutil.copytree(drawn, pictures, dirs_exist_ok=True)
            draft.rename(base)  # complete, whichever process is first
        resumed = now()
        return scores

    os.chdir(Path(__file__).parents[1])
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    with mock.patch.object(RecoveryHook, "run", timed):
        code = train_silentbad.main(argv)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    clock.write_text(json.dumps(seconds | {"peak_mib": peak / 1024}))
    sys.exit(code)


def machine() -> tuple[str, str, int | None]:
    """(version of torch, device, cores)."""
    device = device_name("cuda" if torch.cuda.is_available() else "cpu")
    return torch.__version__, device, os.cpu_count()
