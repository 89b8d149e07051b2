"""What a mistake costs before its line: wall, processor time and peak memory of whole processes.

    python -m bench.start [--repeat 3]

Each row is one command with --help or one mistake; the least of the repeats is shown. A row beyond
LIMIT is marked, and the exit code is then 1.
"""

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass

SECONDS, MEGABYTES = 1.0, 150.0  # LIMIT of a row: processor time and peak memory
TRAIN = ("train_silentbad.py", "--train_data_dir", ".")
SCAN = ("-m", "silentbad.scan")
PREPARE = ("-m", "silentbad.prepare")
IMAGES = ("-m", "silentbad.prepare.class_images")
MAKE = ("-m", "silentbad.worlds.microworld.make")
BUILD = ("-m", "silentbad.worlds.microworld.build")
LOCALISE = ("-m", "silentbad.localise")
FIGURES = ("-m", "silentbad.report.figures")
REPORT = ("-m", "silentbad.report")
ROWS: dict[str, tuple[str, ...]] = {
    "train: --help": ("train_silentbad.py", "--help"),
    "train: a typo in a flag": ("train_silentbad.py", "--learnin_rate", "1"),
    "train: a wrong range": (*TRAIN, "--learning_rate", "-1"),
    "train: an unknown YAML key": (*TRAIN, "--config", "{folder}/unknown.yaml"),
    "train: no such YAML file": (*TRAIN, "--config", "{folder}/nowhere.yaml"),
    "train: no such data": ("train_silentbad.py", "--train_data_dir", "{folder}/nowhere"),
    "train: an unknown rule": (*TRAIN, "--gradient_control.name", "gsn"),
    "train: an unknown option of a sampler": (
        *(*TRAIN, "--memory.sampler.name", "leitner"),
        *("--memory.sampler.options.boxs", "3"),
    ),
    "train: an unknown optimizer": (*TRAIN, "--optimizer", "AdmW"),
    "train: what excludes what": (*TRAIN, "--buckets", "--compile_model"),
    "audit: --help": ("validation.py", "--help"),
    "audit: a typo in a flag": ("validation.py", "--pipelin", "x"),
    "audit: a wrong range": ("validation.py", "--pipeline", "x", "--threshold", "3"),
    "audit: no such targets": ("validation.py", "--pipeline", "x", "--targets", "{folder}/nowhere"),
    "scan: --help": (*SCAN, "--help"),
    "scan: a typo in a flag": (*SCAN, "--train_data_dirs", "x"),
    "scan: no such data": (*SCAN, "--train_data_dir", "{folder}/nowhere"),
    "prepare: --help": (*PREPARE, "--help"),
    "prepare: a typo in a flag": (*PREPARE, "--target", "x", "--phrase", "x", "--outs", "x"),
    "report: --help": (*REPORT, "--help"),
    "report: no such run": (*REPORT, "{folder}/nowhere"),
    "figures: --help": (*FIGURES, "--help"),
    "figures: no such run": (*FIGURES, "{folder}/nowhere", "--out", "{folder}/x.png"),
    "class images: --help": (*IMAGES, "--help"),
    "class images: a wrong range": (*IMAGES, "--count", "-3"),
    "localise: a wrong range": (*LOCALISE, ".", "--images", "0"),
    "prepare: a wrong range": (*PREPARE, "--per_phrase", "0"),
    "microworld.make: --help": (*MAKE, "--help"),
    "microworld.make: a wrong range": (*MAKE, "--clean", "-1"),
    "microworld.build: --help": (*BUILD, "--help"),
    "microworld.build: a typo in a flag": (*BUILD, "--unet_step", "1"),
}


@dataclass
class Cost:
    """Of one process, its children included."""

    wall: float  # seconds
    cpu: float  # seconds, user and system
    memory: float  # megabytes at its peak
    code: int

    @property
    def is_light(self) -> bool:
        return self.cpu < SECONDS and self.memory < MEGABYTES


# A small process starts the command: the peak memory of a child counts what its parent held.
MEASURE = """
import os, subprocess, sys, time
null = subprocess.DEVNULL
started = time.perf_counter()
process = subprocess.Popen([sys.executable, *sys.argv[1:]], stdout=null, stderr=null)
_, status, used = os.wait4(process.pid, 0)
wall = time.perf_counter() - started
unit = 2**20 if sys.platform == "darwin" else 2**10
cpu = used.ru_utime + used.ru_stime
print(wall, cpu, used.ru_maxrss / unit, os.waitstatus_to_exitcode(status))
"""


def cost_of(command: tuple[str, ...]) -> Cost:
    """Run a command to its end, without its output."""
    line = subprocess.check_output([sys.executable, "-c", MEASURE, *command], text=True)
    wall, cpu, memory, code = line.split()
    return Cost(float(wall), float(cpu), float(memory), int(code))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    repeat = parser.parse_args(argv).repeat
    print(f"{'command':<40}{'wall s':>8}{'CPU s':>8}{'MB':>7}{'exit':>6}")
    is_light = True
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/unknown.yaml", "w") as file:
            file.write("learnin_rate: 1\n")
        for name, words in ROWS.items():
            command = tuple(word.format(folder=folder) for word in words)
            cost = min((cost_of(command) for _ in range(repeat)), key=lambda cost: cost.cpu)
            mark = "" if cost.is_light else "  too heavy"
            is_light = is_light and cost.is_light
            print(f"{name:<40}{cost.wall:8.2f}{cost.cpu:8.2f}{cost.memory:7.0f}{cost.code:6}{mark}")
    return 0 if is_light else 1


if __name__ == "__main__":
    sys.exit(main())
