"""Whether a learning rate carries over to a base of another size: `python -m bench.carry [--smoke]`.

    python -m bench.carry --sizes quarter          the smaller base alone, which is built in minutes
    python -m bench.carry                          both, then the runs, then the table
    python -m bench.carry --smoke                  a base and a run of a few steps each, in a minute

Bases are the bundled one with another UNet, of a quarter and of four times its weights, trained from scratch on the
bundled autoencoder and text encoder as `worlds.microworld.build` trains the bundled UNet; a build resumes where it was
stopped. Each base is fine-tuned by the arm `recommended` of bench.published at one rate in each unit, that of the
bundled base. Every evaluation becomes one JSON line of bench/results/carry.jsonl; a run that is stored is not made
again. What is compared is the step from which on half of the images count at every evaluation.

By the processor seconds of a step, the builds take half an hour and four and a half, the runs about two hours more.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench import published
from bench.published_table import figures, markdown
from bench.recovery import ROOT
from bench.recovery_table import stored

RESULTS = Path(__file__).parent / "results" / "carry.jsonl"
BASE = ROOT / "assets" / "micro-sd"


class Built(NamedTuple):
    """How the UNet of a base is built."""

    widths: tuple[int, int]  # of its two resolutions
    muon: bool = True
    steps: int = 3800  # as many as the bundled base's


SIZES = {"quarter": Built((32, 80)), "four": Built((128, 320))}
ADAMW = "adamw"  # the base of bench/match.py, of the bundled one's size
BASES = {**SIZES, ADAMW: Built((64, 160), muon=False, steps=14000)}
# Learning rates in units of 1e-4: that of the arm, and 1.36 times as many, the mean of `step_change/` over it by stage
UNITS = {"absolute": 40.0, "relative": 54.0}
SAID = {"quarter": "a quarter", None: "bundled", "four": "four times"}
TARGETS = "100;101;102;103"
HEAD = ("weights", "unit", "targets", "recovered", "median step", "steps, over the bundled base's")


def build(name: str, work: Path, steps: int | None, pool: int) -> Path:
    """The pipeline of a base, trained where it is not there; `steps` None: its own."""
    folder = work / name
    if (folder / "model_index.json").is_file():
        return folder
    import torch
    from diffusers import StableDiffusionPipeline

    from worlds.microworld.build import run_stage, unet_stage
    from worlds.microworld.networks import new_unet
    from worlds.microworld.world import MICROWORLD

    pipe = StableDiffusionPipeline.from_pretrained(BASE)
    for part in (pipe.vae, pipe.text_encoder):
        part.eval().requires_grad_(False)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    frozen = (pipe.vae.to(device), pipe.text_encoder.to(device), pipe.tokenizer)
    how = BASES[name]
    unet = new_unet(how.widths)
    stage = unet_stage(steps or how.steps, 48, 2e-3, *frozen, device, 3, pool, MICROWORLD, unet, muon=how.muon)
    checkpoints = work / f"{name}-checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    pipe.unet = run_stage(stage, checkpoints, device)["unet"]
    pipe.save_pretrained(folder)
    return folder


def steps_of(rows: list[dict]) -> dict[tuple[str | None, str], dict[str, float | None]]:
    """{(base, unit): {target: the step of its recovery}}; None: never."""
    runs: dict[tuple, list[dict]] = defaultdict(list)
    for row in rows:
        unit = json.loads(row["flags"])["learning_rate_unit"]
        runs[row.get("base"), unit, row["target"]].append(row)
    steps: dict[tuple, dict] = defaultdict(dict)
    for (base, unit, target), of_run in runs.items():
        steps[base, unit][target] = figures(of_run)["strict"]
    return steps


def table(rows: list[dict]) -> str:
    """A line a base and unit: Markdown. The ratio is the geometric mean over targets that both recover."""
    steps = steps_of(rows)
    lines = []
    for unit in UNITS:
        bundled = steps.get((None, unit), {})
        for base in SAID:
            mine = steps.get((base, unit), {})
            back = [step for step in mine.values() if step is not None]
            pairs = [(mine[target], bundled.get(target)) for target in mine]
            both = [np.log(step / other) for step, other in pairs if step and other]
            if mine:
                median = f"{np.median(back):.0f}" if back else "never"
                ratio = f"{np.exp(np.mean(both)):.2f}" if both else ""
                lines.append([SAID[base], unit, str(len(mine)), str(len(back)), median, ratio])
    return markdown(HEAD, lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(SIZES), help="bases beside the bundled one; empty: none")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "carry", help="folder of the bases")
    parser.add_argument("--unet_steps", type=int, help="steps of a build, in place of each base's own")
    parser.add_argument("--pool", type=int, default=4096, help="scenes that are encoded before its first step")
    parser.add_argument("--targets", default=TARGETS)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20, help="steps between evaluations")
    parser.add_argument("--images", type=int, default=8, help="of an evaluation")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args(argv)
    if args.smoke:
        small = {
            "sizes": "quarter",
            "unet_steps": 4,
            "pool": 64,
            "targets": "103",
            "steps": 12,
            "every": 12,
            "images": 2,
        }
        work = args.work.with_name("carry-smoke")
        vars(args).update(small, work=work, results=work / "carry.jsonl")
    sizes = [size for size in args.sizes.split(",") if size]
    if unknown := [size for size in sizes if size not in SIZES]:
        parser.exit(2, f"error: --sizes: unknown size '{unknown[0]}'; there are: {', '.join(SIZES)}\n")
    args.work.mkdir(parents=True, exist_ok=True)
    bases = [None, *(build(size, args.work, args.unet_steps, args.pool) for size in sizes)]
    for base in bases:
        for unit, rate in UNITS.items():
            run = {
                "arms": "recommended",
                "factors": rate,
                "flags": json.dumps({"learning_rate_unit": unit, "validation.unrelated_images": "0"}),
                "nulls": "target",
                **({} if base is None else {"base": base}),
                **{name: getattr(args, name) for name in ("targets", "steps", "every", "images", "results")},
            }
            published.main([word for name, value in run.items() for word in (f"--{name}", str(value))])
    print(table(stored(args.results)))


if __name__ == "__main__":
    main()
