"""Ten minutes on a CUDA card: a row for each setting not yet run there, and one table.

    make card                       the same as: python -m bench.card
    python -m bench.card [--minutes N] [--rows NAME ...] [--true_size] [--results FILE]

Each row is a process, or a few, with a time limit of its own. A row that fails, is refused or takes too long has the
reason in one line. Rows for which the minutes (10 on CUDA, 4 on a CPU) are too few are named at the end. Rows are added
to bench/results/card.jsonl with the card, torch and CUDA, and the table has the last of each.

A step is the quickstart's, of 16 pictures of 64 px, in its own loop: seconds by wall clock between two points at which
the device has done all its work, after warm-up updates (on a CPU, processor seconds); peak as CUDA's allocator counts
it; waits are the operations of one update that make the host wait for the device, by torch.cuda.set_sync_debug_mode.
The loss is that of the first batch, which is the same in all settings. True size is Stable Diffusion 1.5 with random
weights, 4 pictures of 512 px; the forecast is that of a dry run. On a CPU true size runs with --true_size alone: 1
picture of 256 px.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from bench.card_run import Plan
from bench.published_table import markdown
from bench.recovery_table import append
from bench.size import gib, number, write_data

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "card.jsonl"
NOT_MEASURED = "not measured"
NO_CUDA = "no CUDA"
LEAST = 5.0  # seconds that must be left for a row to begin

STEP = [
    "--config=configs/quickstart.yaml",
    "--validation.targets=null",
    "--overwrite_output_dir=false",
    "--prior_preservation.num_images=8",
    "--checkpoints_total_limit=null",
    "--lr_warmup_steps=0",
    "--report_to=none",
]
ADAMW = ["--gradient_control.spectral=false", "--optimizer_options={}"]
TRUE = ["--report_to=none", "--validation.embedder=auto", "--held_out_clean=0", "--train_batch_size=4"]
FULL = ["--config=configs/sd15_full.yaml", *TRUE]
LORA = ["--config=configs/sd15_lora.yaml", *TRUE]
RECOMMENDED = [
    "--config=configs/sd15_full.yaml",
    "--config=configs/recommended.yaml",
    *TRUE,
    "--prior_preservation.num_images=8",
    "--prior_preservation.num_inference_steps=2",
]
ON_CPU = ["--resolution=256", "--validation.resolution=256", "--train_batch_size=1"]
SHORT = [  # a run of true size, with a short measurement; the dry run forecasts that of the configuration
    "--lr_warmup_steps=0",
    "--validation.images_per_target=2",
    "--validation.num_inference_steps=4",
    "--validation.steps=0",
]
LATE = 10**6  # a step that no run here reaches


class TooLong(Exception):
    """A process did not end within its time."""


class Failed(Exception):
    """A process ended with an error, whose line is given; `refused`: it was reported as a user's mistake."""

    def __init__(self, line: str, refused: bool = False):
        super().__init__(line)
        self.refused = refused


# ---------------------------------------------------------------- processes
def ended(words: list[str], until: float, log: Path, env: dict[str, str] | None = None) -> str:
    """Runs Python with these words until the time `until` (time.monotonic) at most; returns its output.

    Raises TooLong, with all its processes ended, or Failed."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
        try:
            code = process.wait(max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            raise TooLong from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    said = log.read_text(errors="replace")
    if code:
        raise Failed(*why(code, said))
    return said


def why(code: int, said: str) -> tuple[str, bool]:
    """The line that says why a process failed, and whether it refused."""
    if code < 0:
        return f"ended by {signal.Signals(-code).name}", False
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    for line in lines:  # launchers print a traceback of their own after the line of a mistake
        if line.startswith("error: "):
            return line.removeprefix("error: ")[:300], True
        if line.startswith("Traceback "):
            break
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return [*errors[-1:], *lines[-1:], f"exit code {code}"][0][:300], False


ABOUT = """
import json, torch
from bench.recovery import facts
cuda = torch.cuda.is_available()
about = {**facts(), "on_cuda": cuda}
if cuda:
    card = torch.cuda.get_device_properties(0)
    about |= {"cuda": torch.version.cuda, "memory": card.total_memory, "capability": [card.major, card.minor]}
print(json.dumps(about))
"""


def machine(scratch: Path) -> dict[str, Any]:
    """The facts of every row: commit, torch, the card or the processor. A process of its own reads them, so that the
    card is free afterwards."""
    said = ended(["-c", ABOUT], time.monotonic() + 120, scratch / "machine.log")
    return json.loads(said.strip().splitlines()[-1])


class Place(NamedTuple):
    """Where a session of rows works, whether it has CUDA, and when a row must have ended (time.monotonic)."""

    scratch: Path
    cuda: bool
    until: float

    def run(self, plan: Plan, flags: list[str], out: str = "run") -> dict[str, Any]:
        """One measured training into a folder of its own; returns its readings."""
        result = self.scratch / f"{out}.json"
        result.unlink(missing_ok=True)
        words = [f"--output_dir={self.scratch / out}", f"--cache_dir={self.scratch / 'cache'}"]
        env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if plan.deterministic else {}
        command = ["-m", "bench.card_run", str(result), json.dumps(plan._asdict()), *flags, *words]
        try:
            ended(command, self.until, self.scratch / f"{out}.log", env)
        except Failed as failed:
            found = json.loads(result.read_text()) if result.is_file() else {}
            if "error" in found:
                raise Failed(found["error"]) from None
            raise failed
        return json.loads(result.read_text())

    def train(self, flags: list[str]) -> list[str]:
        """The flags of a training on the microworld's data, which are drawn once."""
        data = self.scratch / "micro"
        if not (data / "targets.jsonl").is_file():
            shutil.rmtree(data, ignore_errors=True)
            make = ["-m", "worlds.microworld.make", "--out", str(data), "--redraws", "0"]
            make += ["--targets", "cat-hat", "--images_per_phrase", "8"]
            ended(make, self.until, self.scratch / "make.log")
        return [*STEP, f"--train_data_dir={data}", *flags]

    def plan(self, **changes: Any) -> Plan:
        """Fewer updates on a CPU."""
        return Plan(**({} if self.cuda else {"warm": 1, "timed": 2, "watched": 0}) | changes)


# ---------------------------------------------------------------- rows
def step(place: Place, flags: list[str], **plan: Any) -> dict[str, Any]:
    """The quickstart's step under these flags."""
    planned = place.plan(**plan)
    length = [f"--max_train_steps={planned.steps}", f"--checkpointing_steps={LATE}"]
    return place.run(planned, place.train([*length, *flags]))


def resumed(place: Place, flags: list[str]) -> dict[str, Any]:
    """Whether a run that is resumed half-way ends with the same bits; if not, whether two complete runs do."""
    plan = Plan(warm=1, timed=1, watched=0, finish=True, deterministic=True)
    words = place.train(["--max_train_steps=4", "--checkpointing_steps=2", *flags])
    first, folder = place.scratch / "first.safetensors", place.scratch / "resumed"
    place.run(plan, words, "resumed")
    shutil.copy(unet_file(folder), first)
    shutil.rmtree(folder / "checkpoints" / "step-4")
    place.run(plan, [*words, f"--resume_from_checkpoint={folder / 'checkpoints' / 'step-2'}"], "resumed")
    found: dict[str, Any] = {"differs": largest_difference(first, unet_file(folder))}
    if found["differs"]:
        place.run(plan, words, "again")
        found["again_differs"] = largest_difference(first, unet_file(place.scratch / "again"))
    return found


def together(place: Place, flags: list[str]) -> dict[str, Any]:
    """Two processes that train together, against one: how far their changes lie apart. On one card they are refused."""
    words = place.train(["--max_train_steps=2", f"--checkpointing_steps={LATE}", *flags])
    place.run(Plan(warm=1, timed=1, watched=0, finish=True), words, "one")
    two = place.scratch / "two"
    where = [f"--output_dir={two}", f"--cache_dir={place.scratch / 'cache'}", "--train_batch_size=8"]
    start = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
    env = {} if place.cuda else {"ACCELERATE_USE_CPU": "true"}
    ended([*start, "train_silentbad.py", *words, *where], place.until, place.scratch / "two.log", env)
    base = ROOT / "assets" / "micro-sd" / "unet" / "diffusion_pytorch_model.safetensors"
    one = unet_file(place.scratch / "one")
    return {"apart": distance(unet_file(two), one) / distance(base, one)}


def quickstart(place: Place, flags: list[str]) -> dict[str, Any]:
    """The quickstart's training from start to end: what it recovers, and the share of time that measuring took."""
    data = place.scratch / "quickstart-data"
    make = ["-m", "worlds.microworld.make", "--out", str(data), "--targets", "cat-hat,9"]
    ended([*make, "--images_per_phrase", "22"], place.until, place.scratch / "make.log")
    words = ["--config=configs/quickstart.yaml", f"--train_data_dir={data}", "--report_to=none", *flags]
    words += [f"--validation.targets={data / 'targets.jsonl'}", f"--validation.prompts={data / 'unrelated.txt'}"]
    found = place.run(place.plan(finish=True), words, "quickstart")
    last = json.loads((place.scratch / "quickstart" / "validation.json").read_text())["history"][-1]
    rates = [target["rate"] for target in last["raw"]["targets"].values()]
    return {**found, "share": last["share"], "rate": sum(rates) / len(rates)}


def base_written(place: Place, flags: list[str]) -> dict[str, Any]:
    """The folder of Stable Diffusion 1.5 with random weights."""
    code = "import sys, pathlib; from bench.size_bases import write_base; write_base(pathlib.Path(sys.argv[1]), 'sd15')"
    started = time.monotonic()
    ended(["-c", code, str(place.scratch)], place.until, place.scratch / "base.log")
    write_data(place.scratch / "elements")
    return {"written": time.monotonic() - started}


def true_size(place: Place, flags: list[str]) -> dict[str, Any]:
    """A training of true size: the forecast of its dry run, and the readings of the run."""
    data = place.scratch / "elements"
    if not data.is_dir():
        raise Failed("its base was not written")
    words = [
        *flags,
        f"--pretrained_model_name_or_path={place.scratch / 'sd15'}",
        f"--train_data_dir={data}",
        f"--validation.targets={data / 'targets.jsonl'}",
        *(() if place.cuda else ON_CPU),
    ]
    where = [f"--output_dir={place.scratch / 'dry'}", f"--cache_dir={place.scratch / 'cache'}", "--dry_run"]
    said = ended(["train_silentbad.py", *words, *where], place.until, place.scratch / "dry.log")
    plan = Plan(warm=2, timed=5 if place.cuda else 1, watched=2 if place.cuda else 0)
    length = [f"--max_train_steps={plan.steps}", f"--checkpointing_steps={LATE}"]
    drawn = [*SHORT, f"--validation.early_steps=[{plan.steps - 1}]"]
    found = place.run(plan, [*words, *length, *drawn])
    trains, draws = (lasting(said, f"{name} +(?:about )?") for name in ("time", "drawing"))
    return {
        **found,
        "forecast": number(said, r"peak ([\d.]+) (\w+)"),
        "seconds_forecast": number(said, r"([\d.e+-]+) s a step"),
        "share": draws / (trains + draws),
    }


def lasting(said: str, before: str) -> float:
    """Seconds of a duration in the text of a dry run."""
    seconds = {"s": 1, "min": 60, "hours": 3600}
    found = re.search(rf"^ *{before}([\d.]+) (s|min|hours)\b", said, re.M)
    assert found is not None, said[-1000:]
    return float(found[1]) * seconds[found[2]]


class Row(NamedTuple):
    """A row of the table: what is run, its flags, its seconds on CUDA (four times that on a CPU), and whether it takes
    CUDA: a run of true size, which --true_size asks for, or one that a CPU would take too long for."""

    run: Callable[[Place, list[str]], dict[str, Any]]
    flags: list[str]
    seconds: float = 60
    needs_cuda: bool = False


STEP_FP32 = "step, fp32"
BASE = "SD 1.5: base written"
ROWS: dict[str, Row] = {
    STEP_FP32: Row(step, ["--mixed_precision=no"]),
    "step, bf16": Row(step, ["--mixed_precision=bf16"]),
    "step, fp16 with a scaler": Row(step, ["--mixed_precision=fp16"]),
    "resumed to the bit": Row(resumed, ["--mixed_precision=no"], 90),
    BASE: Row(base_written, [], 120, needs_cuda=True),
    "SD 1.5: plain": Row(true_size, FULL, 120, needs_cuda=True),
    "SD 1.5: LoRA of rank 16": Row(true_size, LORA, 120, needs_cuda=True),
    "SD 1.5: plain, `--train_layers up*`": Row(true_size, [*FULL, "--train_layers=up*"], 120, needs_cuda=True),
    "SD 1.5: `recommended`": Row(true_size, RECOMMENDED, 150, needs_cuda=True),
    "checkpointing": Row(step, ["--mixed_precision=no", "--gradient_checkpointing=true"]),
    "offloaded EMA": Row(step, ["--mixed_precision=no", "--use_ema=true", "--offload_ema=true"]),
    "channels last": Row(step, ["--mixed_precision=no", "--channels_last=true"]),
    "not channels last": Row(step, ["--mixed_precision=no", "--channels_last=false"]),
    "AdamW": Row(step, ["--mixed_precision=no", *ADAMW]),
    "8-bit AdamW": Row(step, ["--mixed_precision=no", *ADAMW, "--use_8bit_adam=true"]),
    "xFormers": Row(step, ["--mixed_precision=no", "--enable_xformers_memory_efficient_attention=true"]),
    "two processes on one card": Row(together, ["--mixed_precision=no"], 90),
    "quickstart from start to end": Row(quickstart, ["--mixed_precision=no"], 180, needs_cuda=True),
    "compiled": Row(step, ["--mixed_precision=no", "--compile_model=true"], 120),
}


# ---------------------------------------------------------------- weights
def unet_file(folder: Path) -> Path:
    """The UNet that a run wrote."""
    return folder / "pipeline" / "unet" / "diffusion_pytorch_model.safetensors"


def pairs(one: Path, other: Path) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """The tensors of two files."""
    with safe_open(one, "pt") as first, safe_open(other, "pt") as second:
        for name in first.keys():
            yield first.get_tensor(name).double(), second.get_tensor(name).double()


def largest_difference(one: Path, other: Path) -> float:
    """The largest difference of a number between two files of weights; 0 where all are equal to the bit."""
    return max(float((a - b).abs().max()) for a, b in pairs(one, other))


def distance(one: Path, other: Path) -> float:
    """The Euclidean distance between two files of weights."""
    return sum(float((a - b).square().sum()) for a, b in pairs(one, other)) ** 0.5


# ---------------------------------------------------------------- a session
@dataclass
class Session:
    """Rows within some minutes. `left` are the names of those that had no time."""

    scratch: Path
    cuda: bool
    minutes: float
    true_size: bool = False

    def __post_init__(self) -> None:
        self.end = time.monotonic() + 60 * self.minutes
        self.left: list[str] = []

    def row(self, name: str, row: Row) -> dict[str, Any] | None:
        """A row's readings, or its `outcome` and the line on it; None where there is no time for it."""
        asked = self.true_size and row.run in (base_written, true_size)
        if row.needs_cuda and not self.cuda and not asked:
            return {"row": name, "outcome": NOT_MEASURED, "line": NO_CUDA}
        own = row.seconds * (1 if self.cuda else 4) * (8 if asked and not self.cuda else 1)
        now = time.monotonic()
        if self.end - now < LEAST:
            self.left.append(name)
            return None
        place = Place(self.scratch, self.cuda, min(now + own, self.end))
        result: dict[str, Any] = {"row": name, "outcome": "measured"}
        try:
            result |= row.run(place, row.flags)
        except TooLong:
            if time.monotonic() >= self.end:
                self.left.append(name)
                return None
            result |= {"outcome": "failed", "line": f"took more than {own:.0f} s"}
        except Failed as failed:
            result |= {"outcome": "refused" if failed.refused else "failed", "line": str(failed)}
        except Exception as error:  # while a run's files are read: a row too
            result |= {"outcome": "failed", "line": f"{type(error).__name__}: {error}"[:300]}
        result["took"] = time.monotonic() - now
        for folder in ("run", "dry", "resumed", "again", "one", "two", "quickstart"):
            shutil.rmtree(self.scratch / folder, ignore_errors=True)
        return result


# ---------------------------------------------------------------- the table
HEAD = (
    "row",
    "CPU: processor s a step",
    "CPU: result",
    "CUDA: s a step",
    "peak GiB (forecast)",
    "waits a step",
    "CUDA: result",
)


def table(rows: Iterable[dict]) -> str:
    """The last row of each name on a CPU and on CUDA: Markdown."""
    last = {(row["row"], row["on_cuda"]): row for row in rows}
    lines = []
    for name in ROWS:
        on_cpu, on_cuda = last.get((name, False)), last.get((name, True))
        cells = [name, *[NOT_MEASURED] * 6]
        if on_cpu:
            cells[1:3] = [seconds(on_cpu), result(on_cpu, last.get((STEP_FP32, False)))]
        if on_cuda:
            cells[3:] = [
                seconds(on_cuda),
                peak(on_cuda),
                f"{sum(on_cuda['waits'].values()):g}" if "waits" in on_cuda else "",
                result(on_cuda, last.get((STEP_FP32, True))),
            ]
        lines.append(cells)
    return markdown(HEAD, lines)


def seconds(row: dict) -> str:
    """Seconds of a step, with the dry run's forecast where there is one."""
    if "seconds" not in row:
        return ""
    forecast = f" ({row['seconds_forecast']:.3g})" if "seconds_forecast" in row else ""
    return f"{row['seconds']:.3g}{forecast}"


def peak(row: dict) -> str:
    """GiB of the device, with the dry run's forecast where there is one."""
    if "peak" not in row:
        return ""
    return gib(row["peak"]) + (f" ({gib(row['forecast'])})" if "forecast" in row else "")


def result(row: dict, plain: dict | None) -> str:
    """A row's result in words; `plain` is the row of fp32."""
    if row["outcome"] != "measured":
        line = row["line"].replace("|", "/")
        return f"{row['outcome']}: {line}"
    said = []
    if row.get("losses") and "share" not in row:
        loss = row["losses"][0]
        said.append(f"loss {loss:.4f}")
        if plain and plain.get("losses") and plain["row"] != row["row"]:
            said[-1] += f", {loss / plain['losses'][0] - 1:+.1%} of fp32"
    if row.get("skipped"):
        said.append(f"{row['skipped']} updates skipped")
    if "differs" in row:
        again = f"; two whole runs by {row['again_differs']:.1g}" if "again_differs" in row else ""
        said.append(f"differs by {row['differs']:.1g}{again}" if row["differs"] else "equal to the bit")
    if "apart" in row:
        said.append(f"{row['apart']:.1g} of the change away from one process")
    if "rate" in row:
        said.append(f"{row['rate']:.0%} recovered in {row['took']:.0f} s")
    if "share" in row:
        said.append(f"measuring {row['share']:.0%} of the time")
    if "written" in row:
        said.append(f"in {row['written']:.0f} s")
    return "; ".join(said)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="of all rows; 10 on CUDA, 4 on a CPU")
    parser.add_argument("--rows", nargs="+", choices=ROWS, metavar="NAME", default=[*ROWS])
    parser.add_argument("--true_size", action="store_true", help="also where there is no CUDA: half an hour a row")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which ends the row's processes too
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        about = machine(Path(scratch))
        cuda = about["on_cuda"]
        if not cuda:
            os.environ.setdefault("OMP_NUM_THREADS", "1")
        print(", ".join(f"{key}: {value}" for key, value in about.items()), flush=True)
        session = Session(
            scratch=Path(scratch), cuda=cuda, minutes=given.minutes or (10 if cuda else 4), true_size=given.true_size
        )
        try:
            for name in given.rows:
                if (row := session.row(name, ROWS[name])) is not None:
                    rows.append({**row, **about})
                    append(given.results, rows[-1:])
                    said = " ".join(filter(None, (seconds(row) and f"{seconds(row)} s a step;", result(row, None))))
                    print(f"{name}: {said}", flush=True)
        except KeyboardInterrupt:
            print("stopped", flush=True)
    print(f"\n{table(rows)}\n")
    if session.left:
        print(f"left out, for lack of time: {', '.join(session.left)}; --minutes gives more")
    return 0


if __name__ == "__main__":
    sys.exit(main())
