"""A run at the size that users have: seconds a step, peak memory and files, beside what the dry run said before.

    python -m bench.size [--rows NAME ...] [--smoke]

SD 1.5's classes and sizes with random half-precision weights and its tokenizer are written to a temporary folder, and
removed at the end (another 4 GB a row while it runs). Each row starts train_silentbad.py twice, at 256 pixels, batch 1
and full precision: as a dry run, and for STEPS steps. Seconds are the mean of the steps that a dry run times, wall
clock; memory is the whole process's peak. Rows of LIMITS get too little memory, and must end in one line. One JSON line
a row is added to bench/results/size.jsonl; the table takes the last of each. `--smoke`: the first row, and one limit.
"""

import argparse
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from statistics import mean

import torch

from bench.published_table import markdown
from bench.throughput import sd15_pipeline
from silentbad.device import device_name

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "size.jsonl"
STEPS, TIMED = 4, 2  # of a run; the last ones, which the dry run times too
ADAPTERS = {"lora.rank": 16, "gradient_checkpointing": True}
ROWS: dict[str, dict] = {
    "LoRA of rank 16": ADAPTERS,
    "the same, `--train_layers up*`": {**ADAPTERS, "train_layers": '["up*"]'},
    "the same, `recommended.yaml`": {**ADAPTERS, "config": "configs/recommended.yaml"},
    "`--train_layers up*`, 8-bit AdamW": {
        "train_layers": '["up*"]',
        "use_8bit_adam": True,
        "gradient_checkpointing": True,
    },
}
LIMITS = (7, 9, 11)  # GiB of address space, of the first row; the libraries alone take about 6
UNITS = {"MiB": 2**20, "GiB": 2**30}
HEAD = ("run", "seconds a step", "forecast", "peak memory", "forecast", "files", "forecast")


# ---------------------------------------------------------------- what is trained
def write_base(folder: Path) -> Path:
    """The pipeline, in half precision as it is published."""
    torch.set_default_dtype(torch.float16)
    try:
        return sd15_pipeline(folder)
    finally:
        torch.set_default_dtype(torch.float32)


def write_data(folder: Path) -> Path:
    """Two records of each element of docs/example and two clean ones, with masks."""
    shutil.copytree(ROOT / "docs" / "example", folder)
    file = folder / "metadata.jsonl"
    kept: dict[str, list[str]] = {}
    for line in file.read_text().splitlines():
        kept.setdefault(json.loads(line).get("element_id", ""), []).append(line)
    file.write_text("".join(f"{line}\n" for lines in kept.values() for line in lines[:2]))
    return folder


def command(base: Path, data: Path, out: Path, settings: dict) -> list[str]:
    """The command line of a training."""
    flags = {
        "pretrained_model_name_or_path": base,
        "train_data_dir": data,
        "output_dir": out,
        "resolution": 256,
        "train_batch_size": 1,
        "max_train_steps": STEPS,
        "log_every": 1,
        "report_to": "none",
        **settings,
    }
    return [sys.executable, str(ROOT / "train_silentbad.py"), *(f"--{key}={value}" for key, value in flags.items())]


# ---------------------------------------------------------------- one row
def started(words: list[str], limit: int | None = None) -> tuple[int, str, int]:
    """(exit code, what it said, peak memory in bytes) of a process, with `limit` GiB of address space."""

    def restrict() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit * 2**30, limit * 2**30))

    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log, preexec_fn=restrict)
        _, status, used = os.wait4(process.pid, 0)
        log.seek(0)
        unit = 1 if sys.platform == "darwin" else 2**10
        return os.waitstatus_to_exitcode(status), log.read(), used.ru_maxrss * unit


def number(text: str, pattern: str) -> float:
    """What the first group of a pattern holds; bytes where a unit follows."""
    found = re.search(pattern, text)
    assert found is not None, text[-2000:]
    return float(found[1]) * (UNITS[found[2]] if found.re.groups > 1 else 1)


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def measured(name: str, base: Path, data: Path, work: Path) -> dict:
    """A row: the forecast, and what happened."""
    out = work / "run"
    code, said, _ = started([*command(base, data, out, ROWS[name]), "--dry_run"])
    assert code == 0, said[-2000:]
    print(said[said.index("dry run:") :], flush=True)
    code, log, peak = started(command(base, data, out, ROWS[name]))
    assert code == 0, log[-2000:]
    rows = [json.loads(line) for line in (out / "timings.jsonl").read_text().splitlines()]
    rates = [row["samples_per_second"] for row in rows if "samples_per_second" in row]
    row = {
        "row": name,
        "seconds": mean(1 / rate for rate in rates[-TIMED:]),
        "seconds_forecast": number(said, r"([\d.e+]+) s a step"),
        "peak": peak,
        "peak_forecast": number(said, r"peak ([\d.]+) (\w+) of this process"),
        "files": sum(size_of(out / part) for part in ("checkpoints", "pipeline", "lora")),
        "files_forecast": number(said, r"disk +([\d.]+) (\w+):"),
    }
    shutil.rmtree(out)
    return row


def limited(limit: int, base: Path, data: Path, work: Path) -> dict:
    """A row of LIMITS: whether the run ended well, or in one line."""
    first = next(iter(ROWS.values()))
    code, said, _ = started(command(base, data, work / "limited", first), limit)
    last = said.strip().splitlines()[-1]
    shutil.rmtree(work / "limited", ignore_errors=True)
    return {"row": f"{limit} GiB", "code": code, "line": last, "traceback": "Traceback" in said}


# ---------------------------------------------------------------- the table
def table(rows: Iterable[dict]) -> str:
    """The last row of each name: Markdown."""
    last = {row["row"]: row for row in rows}
    lines = []
    for name in ROWS:
        if row := last.get(name):
            sizes = [f"{row[key] / 2**30:.2f} GiB" for key in ("peak", "peak_forecast", "files", "files_forecast")]
            lines.append((name, f"{row['seconds']:.1f}", f"{row['seconds_forecast']:.1f}", *sizes))
    return markdown(HEAD, lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    limits = [f"{limit} GiB" for limit in LIMITS]
    parser.add_argument("--rows", nargs="*", choices=[*ROWS, *limits], default=[*ROWS, *limits])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--smoke", action="store_true", help="the first row and one limit; stores nothing")
    given = parser.parse_args(arguments)
    facts = {"torch": torch.__version__, "device": device_name("cpu"), "threads": os.environ.get("OMP_NUM_THREADS")}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        base, data = write_base(work / "base"), write_data(work / "data")
        for name in [next(iter(ROWS)), limits[0]] if given.smoke else given.rows:
            if name in ROWS:
                row = measured(name, base, data, work)
            else:
                row = limited(int(name.split()[0]), base, data, work)
            print(json.dumps(row), flush=True)
            if not given.smoke:
                with given.results.open("a") as file:
                    file.write(json.dumps({**row, **facts, "python": platform.python_version()}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
