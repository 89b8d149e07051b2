"""What a mistake costs before its line: wall, processor time and peak memory of whole processes.

    python -m bench.start [--repeat 3]

Each row is one command with --help or one mistake; the least of the repeats is shown. A row beyond
SECONDS or MEGABYTES is marked, and the exit code is then 1.
"""

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass

SECONDS = 1.0  # the most processor time of a row
MEGABYTES = 150.0  # the most memory at its peak
COMMANDS: dict[str, tuple[str, ...]] = {
    "train": ("train_silentbad.py",),
    "audit": ("validation.py",),
    "scan": ("-m", "silentbad.scan"),
    "prepare": ("-m", "silentbad.prepare"),
    "prepare.preview": ("-m", "silentbad.prepare.preview"),
    "report": ("-m", "silentbad.report"),
    "figures": ("-m", "silentbad.report.figures"),
    "localise": ("-m", "silentbad.localise"),
    "microworld.make": ("-m", "worlds.microworld.make"),
    "microworld.build": ("-m", "worlds.microworld.build"),
    "microworld.export": ("-m", "worlds.microworld.export"),
    "emoji.make": ("-m", "worlds.emoji.make"),
    "emoji.build": ("-m", "worlds.emoji.build"),
    "emoji.sets": ("-m", "worlds.emoji.sets"),
}
OF_EACH = {"--help": "--help", "a typo in a flag": "--sed 1"}
SAMPLER = "--memory.sampler.name leitner --memory.sampler.options.boxs 3"
MISTAKES = {  # "no such ..." is of a path that has `nowhere` in it
    "train: a wrong range": "--train_data_dir . --learning_rate -1",
    "train: an unknown YAML key": "--train_data_dir . --config {folder}/unknown.yaml",
    "train: no such YAML file": "--train_data_dir . --config {folder}/nowhere.yaml",
    "train: no such data": "--train_data_dir {folder}/nowhere",
    "train: an unknown rule": "--train_data_dir . --gradient_control.name gsn",
    "train: an unknown option of a sampler": f"--train_data_dir . {SAMPLER}",
    "train: an unknown optimizer": "--train_data_dir . --optimizer AdmW",
    "train: what excludes what": "--train_data_dir . --buckets --compile_model",
    "audit: a wrong range": "--pipeline x --threshold 3",
    "audit: no such targets": "--pipeline x --targets {folder}/nowhere",
    "audit: no such phrases": "--pipeline x --phrases {folder}/nowhere",
    "scan: no such data": "--train_data_dir {folder}/nowhere",
    "prepare: a wrong range": "--per_phrase 0",
    "prepare: no such target": "--target {folder}/nowhere --masks x --phrases a b --backgrounds . --out {folder}/out",
    "prepare.preview: no such data": "{folder}/nowhere",
    "report: no such run": "{folder}/nowhere",
    "figures: no such run": "{folder}/nowhere --out {folder}/x.png",
    "localise: a wrong range": ". --images 0",
    "localise: no such run": "{folder}/nowhere",
    "microworld.make: a wrong range": "--clean -1",
    "microworld.build: no such autoencoder": "--vae {folder}/nowhere",
    "microworld.export: no such base": "--pipeline {folder}/nowhere",
    "emoji.make: a wrong range": "--clean -1",
    "emoji.build: no such base": "--begin {folder}/nowhere",
}
ROWS = {
    f"{name}: {what}": (*command, *words.split())
    for name, command in COMMANDS.items()
    for what, words in OF_EACH.items()
}
ROWS |= {name: (*COMMANDS[name.partition(":")[0]], *words.split()) for name, words in MISTAKES.items()}


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
