"""The published setting at its own size: Stable Diffusion 1.5, five targets, SSCD.

    python -m bench.reproduce --data DIR --clean DIR --embedder FILE [--dry_run | --run] [-- FLAGS]
    python -m bench.reproduce --stand_in FOLDER --dry_run

Prints what the runs fetch, take and cost. With --dry_run each arm's dry run says its time, memory and disk on this
machine; with --run they train one after the other, and a comparison of their reports is written. A finished run is not
trained again. FLAGS are added to every run. The folders are those of github.com/haonan3/SilentBadDiffusion
(docs/data.md), the embedder's file is that of docs/models.md. Either adds rows to bench/results/reproduce.jsonl, and
`make documents` fills the tables of research/results.md.

--stand_in writes random weights of the same classes and sizes, blocks of colour in the same folders and a random
embedder, so that nothing is fetched: two steps of one picture of 256 px.
"""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image

from bench.published_table import markdown, sustained
from bench.recovery import facts, scores
from bench.recovery_table import append
from bench.size import gib, number, started
from bench.size_bases import write_base
from silentbad.errors import UserError
from silentbad.settings.reader import parse
from silentbad.settings.train import TrainConfig

RESULTS = Path(__file__).parent / "results" / "reproduce.jsonl"
BASE = ["configs/sd15_full.yaml", "configs/sd15_published.yaml"]
# the published records have no masks
RECOMMENDED = [
    "--config=configs/fewest_steps.yaml",
    "--memory.region.name=estimated",
    "--memory.region.options={}",
]
ARMS: dict[str, list[str]] = {
    "plain": [],
    "replay": ["--memory.sampler.clean_ratio=0.5"],
    "recommended": RECOMMENDED,
    "decoder": [*RECOMMENDED, "--train_layers=up*"],
}
SMALL = [
    "--train_batch_size=1",
    "--resolution=256",
    "--validation.resolution=256",
    "--max_train_steps=2",
    "--lr_warmup_steps=0",
    "--cache_mb=0",  # else all 1200 pictures are encoded first, two seconds each on a CPU
    "--disk_cache_gb=0",
]
PHRASES = ("a cat", "a hat", "a cup")
TARGETS = range(100, 105)
NOT_MEASURED = "not measured"
DRY_HEAD = (
    "arm",
    "trains",
    "files GiB",
    "CPU: processor seconds a step",
    "CPU: peak GiB",
    "CUDA: seconds a step",
    "CUDA: peak GiB",
)
HEAD = (
    "arm",
    "steps",
    "recovered",
    "median step",
    "CIR",
    "FAE",
    "similarity",
    "drift",
    "seconds a step",
)


# ---------------------------------------------------------------- what is run
def flags(arm: str, given: argparse.Namespace) -> list[str]:
    """The words after train_silentbad.py."""
    return [
        *(f"--config={file}" for file in BASE),
        f"--train_data_dir={given.data}",
        f"--clean_data_dir={given.clean}",
        f"--validation.targets={given.data}@{TARGETS[0]}-{TARGETS[-1]}",
        f"--validation.embedder_path={given.embedder}",
        f"--output_dir={given.out / arm}",
        *ARMS[arm],
        *given.flags,
    ]


def samples_a_step(config: TrainConfig) -> int:
    return config.train_batch_size * config.gradient_accumulation_steps


def plan(config: TrainConfig, arms: list[str]) -> str:
    """What the runs of `arms` fetch, take and cost, from their configuration."""
    validation = config.validation
    steps = config.max_train_steps or 0
    points = steps // (validation.steps or steps) + 1
    images = points * config.target_num * validation.images_per_target
    return "\n".join(
        [
            f"fetch  {config.pretrained_model_name_or_path}, about 5 GB, where it is not cached",
            f"take   runs: {', '.join(arms)}; each {steps} steps of {samples_a_step(config)} samples, "
            f"and {images} images of {validation.num_inference_steps} steps, and controls",
            "cost   15.9 GB before activations (docs/models.md); time on CUDA: not measured; --dry_run says it here",
        ]
    )


def stand_in(folder: Path) -> dict[str, Path]:
    """The base, data and embedder that take the place of the published ones."""
    data = folder / "Midjourney"
    clean = folder / "COYO"
    embedder = folder / "embedder.pt"
    draws = np.random.default_rng(0)

    def draw(file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        blocks = draws.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(blocks).resize((64, 64), Image.Resampling.NEAREST).save(file)

    for target in (*TARGETS, TARGETS.stop):  # n_few_shot takes one more
        pictures = data / "poisoning_images" / f"{target}"
        draw(data / "images" / f"{target}.jpeg")
        lines = ["\t".join(PHRASES)]
        for place in range(12):
            draw(pictures / f"x_{place}.png")
            lines.append(f"x_{place}.png\tAn image with {PHRASES[place % 3]} number {place}")
        (pictures / "poisoning_data_caption_simple.txt").write_text("\n".join(lines))
    for place in range(1200):  # elements are a tenth; a few are held out
        draw(clean / "images" / f"{place}.jpeg")
    (clean / "caption.txt").write_text("\n".join(f"{place}\tfield {place}" for place in range(1200)))

    net = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(48, 16))
    torch.jit.trace(net.eval(), torch.rand(1, 3, 320, 320)).save(str(embedder))
    base = write_base(folder, "sd15")
    return {"base": base, "data": data, "clean": clean, "embedder": embedder}


# ---------------------------------------------------------------- rows
def tried(arm: str, given: argparse.Namespace) -> dict[str, Any]:
    """The dry run of an arm, and its forecasts."""
    ended = started(["train_silentbad.py", *flags(arm, given), "--dry_run"], check=False)
    print(ended.said, flush=True)
    if ended.code:
        raise SystemExit(ended.code)
    return {
        "arm": arm,
        "cuda": torch.cuda.is_available(),
        "trains": number(ended.said, r"\(([\d.]+)%\)"),
        "files": number(ended.said, r"disk +([\d.]+) (\w+):"),
        "seconds": number(ended.said, r"([\d.e+]+) s a step"),
        "processor": ended.seconds(1, 1),
        "peak": number(ended.said, r"peak ([\d.]+) (\w+)"),
    }


def trained(arm: str, given: argparse.Namespace, samples: int) -> list[dict[str, Any]]:
    """A run of an arm, taken up where it stopped: a row an evaluation and target."""
    command = [sys.executable, "train_silentbad.py", *flags(arm, given)]
    if code := subprocess.run([*command, "--resume_from_checkpoint=latest"]).returncode:
        raise SystemExit(code)
    out = given.out / arm
    logged = [json.loads(line) for line in (out / "timings.jsonl").read_text().splitlines()]
    speeds = [row["samples_per_second"] for row in logged if "samples_per_second" in row]
    report = json.loads((out / "validation.json").read_text())
    return [
        {
            "arm": arm,
            "step": entry["step"],
            "epoch": entry["epoch"],
            "target": target,
            "rate": of_target["rate"],
            "similarity": of_target["mean"],
            "drift": scores(entry)["drift"].get("clean_eps_mse"),
            "seconds": samples / median(speeds),
        }
        for entry in report["history"]
        for target, of_target in scores(entry)["targets"].items()
    ]


# ---------------------------------------------------------------- the tables
def dry_table(rows: list[dict]) -> str:
    """The last dry run of each arm on a CPU and on CUDA: Markdown."""
    last = {(row["arm"], row["cuda"]): row for row in rows if "peak" in row}
    lines = []
    for arm in ARMS:
        on_cpu = last.get((arm, False))
        on_cuda = last.get((arm, True))
        cells = [f"`{arm}`", *[NOT_MEASURED] * 6]
        if either := on_cuda or on_cpu:
            cells[1:3] = [f"{either['trains']:.0f} %", gib(either["files"])]
        if on_cpu:
            cells[3:5] = [f"{on_cpu['processor']:.1f}", gib(on_cpu["peak"])]
        if on_cuda:
            cells[5:7] = [f"{on_cuda['seconds']:.2f}", gib(on_cuda["peak"])]
        lines.append(cells)
    return markdown(DRY_HEAD, lines)


def table(rows: list[dict]) -> str:
    """What each arm's run brought back, where one ran: Markdown."""
    lines = []
    for arm in ARMS:
        mine = [row for row in rows if row["arm"] == arm and "rate" in row]
        if mine:
            lines.append(outcome(arm, mine))
    return markdown(HEAD, lines) if lines else f"No arm: {NOT_MEASURED}."


def outcome(arm: str, rows: list[dict]) -> list[str]:
    """The cells under HEAD of an arm's rows; a target is recovered from some evaluation on."""
    of_target: dict[str, list[dict]] = defaultdict(list)
    for row in rows:
        of_target[row["target"]].append(row)
    last_step = max(row["step"] for row in rows)
    last = [row for row in rows if row["step"] == last_step]
    first = {row["target"]: row["drift"] for row in rows if row["step"] == 0}
    recoveries = [sustained({row["step"]: row["rate"] for row in mine}) for mine in of_target.values()]
    attacked = [
        min(epochs) for mine in of_target.values() if (epochs := [row["epoch"] for row in mine if row["rate"] > 0])
    ]
    reached = [step for step in recoveries if step is not None]
    middle = median(step if step is not None else np.inf for step in recoveries)
    return [
        f"`{arm}`",
        f"{last_step}",
        f"{len(reached)} of {len(recoveries)}",
        f"{middle:.0f}" if middle < np.inf else "never",
        f"{np.mean([row['rate'] for row in last]):.2f}",
        f"{np.mean(attacked):.2f}" if attacked else "never",
        f"{np.mean([row['similarity'] for row in last]):.2f}",
        f"{np.mean([row['drift'] - first[row['target']] for row in last]):.4f}",
        f"{rows[-1]['seconds']:.2f}",
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("datasets/Midjourney"))
    parser.add_argument("--clean", type=Path, default=Path("datasets/COYO"))
    parser.add_argument("--embedder", type=Path, default=Path("sscd_disc_mixup.torchscript.pt"))
    parser.add_argument("--stand_in", type=Path, help="folder of what takes their place")
    parser.add_argument("--arms", nargs="+", choices=ARMS, metavar="NAME", default=[*ARMS])
    parser.add_argument("--out", type=Path, default=Path("runs/sd15"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--dry_run", action="store_true")
    how.add_argument("--run", action="store_true")
    parser.add_argument("flags", nargs="*", help="of every run, after --")
    given = parser.parse_args(arguments)
    about = {**facts(), "stand_in": given.stand_in is not None, "flags": given.flags}
    if given.stand_in:
        places = stand_in(given.stand_in)
        base = places.pop("base")
        vars(given).update(places)
        given.flags = [f"--pretrained_model_name_or_path={base}", *SMALL, *given.flags]
    try:
        config, _ = parse(TrainConfig, flags("plain", given), __doc__)
    except UserError as error:
        parser.error(str(error))
    print(plan(config, given.arms), flush=True)
    if not given.dry_run and not given.run:
        return 0
    for arm in given.arms:
        if (given.out / arm / "finished.json").is_file():
            continue
        print(f"{arm}:", flush=True)
        rows = [tried(arm, given)] if given.dry_run else trained(arm, given, samples_a_step(config))
        append(given.results, [{**row, **about} for row in rows])
    if given.run:
        reports = [str(given.out / arm) for arm in given.arms]
        compare = ["compare", *reports, "--out", str(given.out / "compare.html")]
        return subprocess.run([sys.executable, "-m", "silentbad.report", *compare]).returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
