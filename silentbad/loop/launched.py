"""The last word under `accelerate launch`, which prints a traceback of its own once a process ends with an error.

Nothing that a launched process does reaches the launcher's stack, so the line is said once more, by a small process
that waits for the launcher to end.
"""

import subprocess
import sys
from pathlib import Path

import psutil

PROGRAMS = ("accelerate", "accelerate-launch", "torchrun")
MODULES = ("accelerate.commands", "torch.distributed.run", "torch.distributed.launch")
PATIENCE = 15  # seconds that the launcher may take to end
WAIT = """
import sys, time, psutil
end = time.monotonic() + float(sys.argv[2])
try:
    launcher = psutil.Process(int(sys.argv[1]))
    while launcher.is_running() and launcher.status() != psutil.STATUS_ZOMBIE and time.monotonic() < end:
        time.sleep(0.02)
except psutil.Error:
    pass
if time.monotonic() < end:
    print(sys.argv[3], file=sys.stderr)
"""


def launcher() -> int | None:
    """The process that `accelerate launch` or torchrun is, where one of them started this process."""
    try:
        for parent in psutil.Process().parents()[:4]:
            words = parent.cmdline()
            names = {Path(word).name for word in words[:2]}
            if names & set(PROGRAMS) or "-m" in words[:6] and any(word.startswith(MODULES) for word in words[:7]):
                return parent.pid
    except psutil.Error:
        pass
    return None


def say_again(line: str) -> None:
    """Say an error once more after the launcher, where there is one."""
    pid = launcher()
    if pid is not None:
        command = [sys.executable, "-c", WAIT, str(pid), str(PATIENCE), f"error: {line}"]
        null = subprocess.DEVNULL
        subprocess.Popen(command, stdin=null, stdout=null, start_new_session=True)  # noqa: S603  (our own words)
