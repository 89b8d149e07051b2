"""What a command costs from its start to its end: a mistake is said soon, in little memory."""

import subprocess
import sys
from dataclasses import dataclass

SECONDS = 1.0  # the most processor time of a mistake
MEGABYTES = 150.0  # the most memory at its peak


@dataclass
class Cost:
    """Of one process, its children included."""

    wall: float  # seconds
    cpu: float  # seconds, user and system
    memory: float  # megabytes at its peak
    code: int
    said: str  # on stderr

    @property
    def is_light(self) -> bool:
        return self.cpu < SECONDS and self.memory < MEGABYTES


# A small process starts the command: the peak memory of a child counts what its parent held.
MEASURE = """
import os, subprocess, sys, time
started = time.perf_counter()
command = [sys.executable, *sys.argv[1:]]
process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
said = process.stderr.read().decode()
_, status, used = os.wait4(process.pid, 0)
wall = time.perf_counter() - started
unit = 2**20 if sys.platform == "darwin" else 2**10
cpu = used.ru_utime + used.ru_stime
print(wall, cpu, used.ru_maxrss / unit, os.waitstatus_to_exitcode(status))
print(said, end="")
"""


def cost_of(command: tuple[str, ...]) -> Cost:
    """Run a command to its end, without its output but for stderr."""
    output = subprocess.check_output([sys.executable, "-c", MEASURE, *command], text=True)
    numbers, _, said = output.partition("\n")
    wall, cpu, memory, code = numbers.split()
    return Cost(float(wall), float(cpu), float(memory), int(code), said)
