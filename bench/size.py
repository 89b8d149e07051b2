"""Seconds, memory and files of a run at the size that users have, beside its forecast.

    python -m bench.size [--rows NAME ...] [--work FOLDER] [--smoke]
    python -m bench.size --rows "LoRA of rank 16, 256 px" --peer train_text_to_image_lora.py

Pipelines of the true classes and sizes, with random half-precision weights and a tokenizer of 77 places, are written to
a temporary folder and removed at the end; with `--work` they stay for the next call (SD 1.5 2.1 GB, SDXL 6.9 GB). Each
row of RUNS starts train_silentbad.py twice, with batch 1: as a dry run, and for a few steps. A step is the time from
one step of the optimizer to the next; the mean of the second half. Seconds are wall clock, and processor time, which
other work disturbs less. Memory is the peak of the whole process. Afterwards plain diffusers loads the result; rows
with `resume` start again half-way and must end with the same bits. STARTS are the shipped configurations: a dry run of
one step. LIMITS get too little memory, and must end in one line. MANY counts pictures of 64 px on the bundled base.
Rows in THOROUGH run with `--thorough` or by name. One JSON line a row is added to bench/results/size.jsonl; the tables
take the last of each.

`--peer` runs diffusers' script beside the chosen rows, in turns, on the same folder and with the same settings. It is
not part of this project: take examples/text_to_image/train_text_to_image.py or train_text_to_image_lora.py from
https://github.com/huggingface/diffusers, of the version that is installed. `--smoke`: the first row, and one limit.
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
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from hashlib import sha256
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import safe_open

from bench.published_table import markdown
from bench.recovery import facts
from bench.recovery_table import append
from bench.size_bases import write_base
from silentbad.data.images import to_pil

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "size.jsonl"


class Row(NamedTuple):
    """A run: its flags, its base, whether it is resumed half-way, and its steps: the dry run times the second half."""

    flags: dict[str, Any]
    base: str = "sd15"
    resume: bool = False
    steps: int = 4

    @property
    def half(self) -> int:
        return self.steps // 2


LORA = {"lora.rank": 16}
BLOCKS = {"gradient_checkpointing": True}
RECOMMENDED = {"config": "configs/fewest_steps.yaml"}
BF16 = {"mixed_precision": "bf16"}
EIGHT = {"use_8bit_adam": True, **BLOCKS}
PROMPTS = {
    "validation_prompts": '["a red ball", "a blue hat"]',
    "validation_epochs": 100,  # at the end alone
    "validation.resolution": 256,
}
DRAWN = {
    "validation.targets": "docs/example/targets.jsonl",
    "validation.images_per_target": 1,
    "validation.num_inference_steps": 4,
    "validation.resolution": 256,
    "validation.controls": "never",
    "validation.early_steps": "[]",
}
RUNS = {
    "LoRA of rank 16, 256 px": Row(LORA, resume=True),
    "LoRA of rank 16, checkpointing": Row(LORA | BLOCKS),
    "LoRA of rank 16, EMA, no caches": Row(LORA | {"use_ema": True, "cache_mb": 0, "disk_cache_gb": 0}),
    "LoRA of rank 16, `fewest_steps.yaml`": Row(LORA | RECOMMENDED),
    "LoRA of rank 16, `--train_layers up*`": Row(LORA | {"train_layers": '["up*"]'}),
    "LoRA of rank 16, images drawn": Row(LORA | DRAWN),
    "LoRA of rank 16, checkpointing, 512 px": Row(LORA | BLOCKS | {"resolution": 512}),
    "whole UNet, 8-bit AdamW, checkpointing, 256 px": Row(EIGHT, resume=True, steps=2),
    "`--train_layers up*`, 8-bit AdamW, checkpointing": Row(EIGHT | {"train_layers": '["up*"]'}),
    "SDXL, LoRA of rank 16, bf16, checkpointing, 256 px": Row(LORA | BLOCKS | BF16, "sdxl"),
}
MORE_RUNS = {
    "LoRA of rank 16, two prompts drawn": Row(LORA | PROMPTS),
    "whole UNet, 8-bit AdamW, checkpointing, 512 px": Row(EIGHT | {"resolution": 512}, steps=2),
    "whole UNet, 8-bit AdamW, checkpointing, EMA, 256 px": Row(EIGHT | {"use_ema": True}, steps=2),
    "SD 3.5 medium, LoRA of rank 16, bf16, checkpointing, 256 px": Row(LORA | BLOCKS | BF16, "sd3"),
}
SMALL = {
    "resolution": 256,
    "gradient_accumulation_steps": 1,
    "lr_warmup_steps": 0,
    "max_train_steps": 1,
    "checkpointing_steps": 1,
}
STARTS = {
    "configs/sd15_lora.yaml": Row(SMALL),
    "configs/sd15_full.yaml": Row(SMALL | {"use_8bit_adam": True}),
    "configs/sd21_full.yaml": Row(SMALL | {"use_8bit_adam": True}, "sd21"),
    "configs/sdxl_lora.yaml": Row(SMALL, "sdxl"),
    "configs/sd3.yaml": Row(SMALL, "sd3"),
    "configs/sd15_lora.yaml + configs/fewest_steps.yaml + configs/many.yaml": Row(SMALL),
}
FINE = [9.1, 9.2, 9.3, 9.4, 9.5, 9.6, 9.7, 9.8, 9.9]  # where the first row begins to end well
# GiB of address space, of the first row; the libraries alone take about 6
LIMITS = [2, 3, 4, 5, 6, 7, 8, 9, *FINE, 10, 11, 12]
MANY = (2_000, 20_000)  # pictures
THOROUGH = [*MORE_RUNS, *(f"{limit} GiB" for limit in FINE)]
HEAD = (
    "run",
    "processor (forecast)",
    "seconds a step (forecast)",
    "peak GiB (forecast)",
    "counted",
    "files GiB (forecast)",
    "resumed to the bit",
    "in plain diffusers",
)
UNITS = {"MiB": 2**20, "GiB": 2**30}

# Starts a script and writes (wall clock, processor) seconds: at the start, then after each step of an optimizer.
CLOCK = """
import runpy, sys, time
from torch.optim.optimizer import register_optimizer_step_post_hook
file = open(sys.argv[1], "w")
def tick(*_):
    print(time.time(), time.process_time(), file=file, flush=True)
tick()
register_optimizer_step_post_hook(tick)
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# Plain diffusers takes what a run wrote: the adapters, or the whole pipeline; one sampling step.
PLAIN = """
import json, sys, torch
from pathlib import Path
from diffusers import DiffusionPipeline
base, out, side = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
adapters = (out / "lora").is_dir()
folder = base if adapters else out / "pipeline"
parts = json.loads((folder / "model_index.json").read_text())
absent = {name: None for name, part in parts.items() if part == [None, None]}
pipe = DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.bfloat16, **absent)
if adapters:
    pipe.load_lora_weights(out / "lora", weight_name="pytorch_lora_weights.safetensors")
    assert pipe.get_active_adapters()
image = pipe("a red ball", num_inference_steps=1, height=side, width=side, output_type="latent").images
assert image.isfinite().all()
"""


# ---------------------------------------------------------------- what is trained
def write_data(folder: Path) -> Path:
    """Two records of each element of docs/example and two clean ones, with masks."""
    shutil.copytree(ROOT / "docs" / "example", folder)
    file = folder / "metadata.jsonl"
    kept: dict[str, list[str]] = {}
    for line in file.read_text().splitlines():
        kept.setdefault(json.loads(line).get("element_id", ""), []).append(line)
    file.write_text("".join(f"{line}\n" for lines in kept.values() for line in lines[:2]))
    return folder


def write_clean(root: Path, count: int, side: int) -> Path:
    """Pictures of smooth colour fields with captions, all clean."""
    generator = torch.Generator().manual_seed(0)
    (root / "images").mkdir(parents=True)
    rows = []
    for i in range(count):
        field = F.interpolate(torch.rand(1, 3, 6, 6, generator=generator), size=(side, side), mode="bicubic")[0]
        to_pil(field).save(root / f"images/{i}.png")
        rows.append({"file_name": f"images/{i}.png", "text": f"a field of colours, number {i}", "role": "clean"})
    (root / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def shared(base: Path, data: Path, out: Path, row: Row) -> dict[str, Any]:
    """The settings that diffusers' scripts have under the same names."""
    return {
        "pretrained_model_name_or_path": base,
        "train_data_dir": data,
        "output_dir": out,
        "resolution": 256,
        "train_batch_size": 1,
        "max_train_steps": row.steps,
    }


def command(base: Path, data: Path, out: Path, row: Row, **more: Any) -> list[str]:
    """The command line of a training, with `more` flags."""
    settings = {
        **shared(base, data, out, row),
        "checkpointing_steps": row.half,
        "cache_dir": out.parent / "cache",
        "report_to": "none",
        **row.flags,
        **more,
    }
    return [
        str(ROOT / "train_silentbad.py"),
        *(f"--{key}={value}" for key, value in settings.items()),
    ]


def peer_command(script: Path, base: Path, data: Path, out: Path, row: Row) -> list[str]:
    """The command line of diffusers' script with the same settings."""
    settings = {
        **shared(base, data, out, row),
        "image_column": "image",
        "caption_column": "text",
        **{{"lora.rank": "rank"}.get(key, key): value for key, value in row.flags.items()},
    }
    words = [f"--{key}={value}" for key, value in settings.items() if value is not True]
    return [str(script), *words, *(f"--{key}" for key, value in settings.items() if value is True)]


# ---------------------------------------------------------------- one process
class Ended(NamedTuple):
    """How a process ended: its exit code, output, peak memory in bytes and clock readings."""

    code: int
    said: str
    peak: int
    ticks: list[tuple[float, float]]

    def seconds(self, clock: int, steps: int) -> float:
        """The mean seconds of the last steps, by wall clock (0) or processor time (1)."""
        times = [tick[clock] for tick in self.ticks[-steps - 1 :]]
        return mean(later - sooner for sooner, later in zip(times, times[1:], strict=False))


def started(words: list[str], *, limit: float | None = None, check: bool = True) -> Ended:
    """Runs a script or `-c` code under CLOCK, with `limit` GiB of address space."""

    def restrict() -> None:
        if limit is not None:
            size = int(limit * 2**30)
            resource.setrlimit(resource.RLIMIT_AS, (size, size))

    with tempfile.TemporaryFile("w+") as log, tempfile.NamedTemporaryFile("r") as clock:
        clocked = [sys.executable, *([] if words[0] == "-c" else ["-c", CLOCK, clock.name]), *words]
        if limit is not None:  # as a user starts it
            clocked = [sys.executable, *words]
        process = subprocess.Popen(clocked, cwd=ROOT, stdout=log, stderr=log, preexec_fn=restrict)
        _, status, used = os.wait4(process.pid, 0)
        log.seek(0)
        unit = 1 if sys.platform == "darwin" else 2**10
        ticks = [(float(wall), float(own)) for wall, own in map(str.split, clock.read().splitlines())]
        ended = Ended(code=os.waitstatus_to_exitcode(status), said=log.read(), peak=used.ru_maxrss * unit, ticks=ticks)
    assert not check or ended.code == 0, f"{words}\n{ended.said[-3000:]}"
    return ended


def number(text: str, pattern: str) -> float:
    """The number in a pattern's first group; in bytes where a unit follows."""
    found = re.search(pattern, text)
    assert found is not None, text[-2000:]
    return float(found[1]) * (UNITS[found[2]] if found.re.groups > 1 else 1)


def counted(base: Path, row: Row, said: str) -> float:
    """Bytes of the weights, the gradients and the optimizer's state; the base's files are in half precision."""
    frozen = sum(file.stat().st_size for file in base.rglob("*.safetensors"))
    copies = 1 if "mixed_precision" in row.flags else 2
    trained = float(re.search(r"trains +([\d,]+)", said)[1].replace(",", ""))  # type: ignore[index]
    own = 2 if "lora.rank" in row.flags else 1  # adapters beside the base, and gradients
    return copies * frozen + own * 4 * trained + number(said, r"; ([\d.]+) (\w+) of optimizer")


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def weights(out: Path) -> str:
    """A digest of the weights that a run ended with; the order of a file's metadata does not count."""
    kept = sorted(file for part in ("lora", "pipeline") for file in (out / part).rglob("*.safetensors"))
    assert kept
    digest = sha256()
    for file in kept:
        with safe_open(file, framework="pt") as tensors:
            for name in sorted(tensors.keys()):
                digest.update(name.encode())
                digest.update(tensors.get_tensor(name).reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


# ---------------------------------------------------------------- rows
class Places(NamedTuple):
    """Where the bases are, the data with elements, the clean data, and where a run writes."""

    base: Callable[[str], Path]
    data: Path
    clean: Path
    out: Path


def measured(name: str, places: Places) -> dict:
    """A row of RUNS or MORE_RUNS: the forecast, and what happened."""
    row, out = (RUNS | MORE_RUNS)[name], places.out
    start = partial(command, places.base(row.base), places.data, out, row)
    tried = started([*start(), "--dry_run"])
    print(tried.said[tried.said.index("dry run:") :], flush=True)
    ended = started(start())
    result = {
        "row": name,
        "seconds": ended.seconds(0, row.half),
        "processor": ended.seconds(1, row.half),
        "seconds_forecast": number(tried.said, r"([\d.e+]+) s a step"),
        "processor_forecast": tried.seconds(1, row.half),
        "peak": ended.peak,
        "counted": counted(places.base(row.base), row, tried.said),
        "peak_forecast": number(tried.said, r"peak ([\d.]+) (\w+) of this process"),
        "files": sum(size_of(out / part) for part in ("checkpoints", "pipeline", "lora")),
        "files_forecast": number(tried.said, r"disk +([\d.]+) (\w+):"),
    }
    if row.resume:
        first = weights(out)
        shutil.rmtree(out / "checkpoints" / f"step-{row.steps}")
        started(start(resume_from_checkpoint=out / "checkpoints" / f"step-{row.half}"))
        result["resumed_to_the_bit"] = weights(out) == first
    side = row.flags.get("resolution", 256)
    drawing = started(["-c", PLAIN, str(places.base(row.base)), str(out), str(side)], check=False)
    result["plain"] = drawing.code == 0
    return result


def start_of(name: str, places: Places) -> dict:
    """A row of STARTS: a dry run of one step of a shipped configuration, or of several merged in their order."""
    row = STARTS[name]
    files = [f"--config={file}" for file in name.split(" + ")]
    words = command(places.base(row.base), places.data, places.out, row)
    ended = started([*words, *files, "--dry_run"], check=False)
    return {
        "row": name,
        "code": ended.code,
        "peak": ended.peak,
        "line": ended.said.strip().splitlines()[-1],
    }


def limited(name: str, places: Places) -> dict:
    """A row of LIMITS: whether the run ended well, or in one line."""
    words = command(places.base("sd15"), places.data, places.out, next(iter(RUNS.values())), max_train_steps=2)
    ended = started(words, limit=float(name.split()[0]), check=False)
    last = ended.said.strip().splitlines()[-1]
    return {"row": name, "code": ended.code, "line": last, "traceback": "Traceback" in ended.said}


def many(name: str, places: Places) -> dict:
    """A row of MANY: seconds to the first step, memory and cache, twice: cold and warm."""
    count = int(name.split()[0])
    with tempfile.TemporaryDirectory() as folder:
        data, cache = write_clean(Path(folder) / "data", count, 64), Path(folder) / "cache"
        run = Row({"resolution": 64, "cache_dir": cache, "held_out_clean": 0}, steps=2)
        row: dict[str, Any] = {"row": name, "pictures": size_of(data)}
        for which in ("cold", "warm"):
            ended = started(command(ROOT / "assets" / "micro-sd", data, places.out, run))
            first, second = (ended.ticks[1][clock] - ended.ticks[0][clock] for clock in (0, 1))
            row[which] = {"seconds": first, "processor": second, "peak": ended.peak}
            shutil.rmtree(places.out)
        return {**row, "cache": size_of(cache)}


def beside(name: str, script: Path, places: Places, rounds: int) -> dict:
    """A row of RUNS and diffusers' script in turns."""
    row, base, out = RUNS[name], places.base(RUNS[name].base), places.out
    arms = {
        "ours": command(base, places.clean, out, row, checkpointing_steps=500),
        "theirs": peer_command(script, base, places.clean, out, row),
    }
    result: dict[str, Any] = {"row": f"{name} | {script.name}", "ours": [], "theirs": []}
    for _ in range(rounds):
        for arm, words in arms.items():
            ended = started(words)
            seconds = (ended.seconds(clock, row.half) for clock in (0, 1))
            turn = {**dict(zip(("seconds", "processor"), seconds, strict=True)), "peak": ended.peak}
            print(arm, json.dumps(turn), flush=True)
            result[arm].append(turn)
            shutil.rmtree(out)
    return result


KINDS: dict[str, Callable[[str, Places], dict]] = {
    **dict.fromkeys([*RUNS, *MORE_RUNS], measured),
    **dict.fromkeys(STARTS, start_of),
    **{f"{limit} GiB": limited for limit in LIMITS},
    **{f"{count} pictures": many for count in MANY},
}


# ---------------------------------------------------------------- the tables
def gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def table(rows: Iterable[dict]) -> str:
    """The last row of each of RUNS and MORE_RUNS that ran: Markdown."""
    last = {row["row"]: row for row in rows}
    return markdown(HEAD, [cells(last[name]) for name in (*RUNS, *MORE_RUNS) if name in last])


def cells(row: dict) -> list[str]:
    """What a row says under HEAD."""
    times = (f"{row[key]:.1f} ({row[f'{key}_forecast']:.1f})" for key in ("processor", "seconds"))
    peak, files = (f"{gib(row[key])} ({gib(row[f'{key}_forecast'])})" for key in ("peak", "files"))
    checks = ("" if key not in row else "yes" if row[key] else "no" for key in ("resumed_to_the_bit", "plain"))
    return [row["row"], *times, peak, gib(row["counted"]), files, *checks]


def peers(rows: Iterable[dict]) -> str:
    """The last row of each pair: Markdown."""
    lines = []
    for name, row in {row["row"]: row for row in rows if "theirs" in row}.items():
        for arm, label in (
            ("ours", name.partition(" | ")[0]),
            ("theirs", f"`{name.partition(' | ')[2]}`"),
        ):
            turns = row[arm]
            seconds = (f"{mean(turn[key] for turn in turns):.1f}" for key in ("processor", "seconds"))
            lines.append((label, f"{len(turns)}", *seconds, gib(max(turn["peak"] for turn in turns))))
    return markdown(("run", "turns", "processor", "seconds a step", "peak GiB"), lines)


def starts(rows: Iterable[dict]) -> str:
    """How a dry run of one step of each shipped configuration ended: Markdown."""
    last = {row["row"]: row for row in rows if row["row"] in STARTS}
    lines = [(f"`{name}`", f"{row['code']}", gib(row["peak"])) for name, row in sorted(last.items())]
    return markdown(("configuration", "exit code", "peak GiB"), lines)


def counts(rows: Iterable[dict]) -> str:
    """Seconds to the first step by number of pictures: Markdown."""
    last = {row["row"]: row for row in rows if "cold" in row}
    lines = []
    for name, row in last.items():
        seconds = (f"{row[which]['seconds']:.0f}" for which in ("cold", "warm"))
        lines.append((name, *seconds, gib(row["cold"]["peak"]), gib(row["cache"])))
    return markdown(("data", "seconds to the first step", "again", "peak GiB", "cache GiB"), lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", choices=KINDS, metavar="NAME", help="those of THOROUGH too")
    parser.add_argument("--thorough", action="store_true", help="what THOROUGH names too")
    parser.add_argument("--peer", type=Path, help="diffusers' script, to run beside the rows")
    parser.add_argument("--rounds", type=int, default=2, help="of ours and the peer's")
    parser.add_argument("--work", type=Path, help="keeps the pipelines there")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--smoke", action="store_true", help="the first row and one limit; stores nothing")
    given = parser.parse_args(arguments)
    names = given.rows or [name for name in KINDS if given.thorough or name not in THOROUGH]
    if given.smoke:
        names = [next(iter(RUNS)), f"{LIMITS[0]} GiB"]
    about = {
        **facts(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "python": platform.python_version(),
    }
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        root = given.work or scratch
        data, clean = write_data(scratch / "data"), write_clean(scratch / "clean", 8, 256)
        places = Places(base=partial(write_base, root), data=data, clean=clean, out=scratch / "run")
        for name in names:
            made = beside(name, given.peer, places, given.rounds) if given.peer else KINDS[name](name, places)
            row = {**made, **about, "load": os.getloadavg()[1]}
            print(json.dumps(row), flush=True)
            shutil.rmtree(places.out, ignore_errors=True)
            if not given.smoke:
                append(given.results, [row])
    return 0


if __name__ == "__main__":
    sys.exit(main())
