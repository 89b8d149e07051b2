"""Whether a learning rate carries over to a base of another size: `python -m bench.carry [--smoke]`.

    python -m bench.carry --sizes quarter,rescaled     the bases that are built in minutes
    python -m bench.carry                              all, then the runs, then the table
    python -m bench.carry --smoke                      a base and a run of a few steps each, in a minute

Bases are the bundled one with another UNet, of a quarter and of four times its weights, trained from scratch on the
bundled autoencoder and text encoder as `worlds.microworld.build` trains the bundled UNet; a build resumes where it was
stopped. `rescaled` is the bundled UNet with weights of other sizes that predict the same. Each base is fine-tuned by
the arm `recommended` of bench.published at one rate in each unit, that of the bundled base, or at multiples of it.
Every evaluation becomes one JSON line of bench/results/carry.jsonl, what a new base draws right of things in held-out
captions one of carry-bases.jsonl; what is stored is not made again. What is compared is the step from which on half of
the images count at every evaluation.

By the processor seconds of a step, the builds take half an hour and two and a half, the runs about two hours more.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.resnet import ResnetBlock2D

from bench import kept, published
from bench.published_table import figures, markdown, mean_rate
from bench.recovery import ROOT, facts
from bench.recovery_table import append, stored

RESULTS = Path(__file__).parent / "results" / "carry.jsonl"
DRAWN = RESULTS.with_name("carry-bases.jsonl")  # what the bases draw before
BASE = ROOT / "assets" / "micro-sd"


class Built(NamedTuple):
    """How the UNet of a base is built."""

    widths: tuple[int, int]  # of its two resolutions
    muon: bool = True
    steps: int = 3800  # as many as the bundled base's


# Four times the weights would take three hours for as many steps as the bundled base's
SIZES = {"quarter": Built((32, 80)), "four": Built((128, 320), steps=1900)}
ADAMW = "adamw"  # the base of bench/match.py, of the bundled one's size
BASES = {**SIZES, ADAMW: Built((64, 160), muon=False, steps=14000)}
# Learning rates in units of 1e-4: that of the arm, and 1.36 times as many, the mean of `step_change/` over it by stage
UNITS = {"absolute": 40.0, "relative": 54.0}
RESCALED = "rescaled"
OTHERS = (*SIZES, RESCALED)  # than the bundled one
SAID = {"quarter": "a quarter", None: "bundled", RESCALED: "bundled, rescaled", "four": "four times"}
TARGETS = "100;101;102;103"
HEAD = (
    *("weights", "unit", "lr x", "targets", "recovered", "strict rate", "median step"),
    *("steps over the bundled base's, where both recover", "clean error rises by"),
)


def build(name: str, work: Path, steps: int | None, pool: int) -> Path:
    """The pipeline of a base, trained where it is not there; `steps` None: its own."""
    folder = work / name
    if (folder / "model_index.json").is_file():
        return folder
    from diffusers import StableDiffusionPipeline

    from worlds.microworld.build import run_stage, unet_stage
    from worlds.microworld.networks import new_unet
    from worlds.microworld.world import MICROWORLD

    pipe = StableDiffusionPipeline.from_pretrained(BASE)
    if name == RESCALED:
        rescale(pipe.unet)
        pipe.save_pretrained(folder)
        return folder
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


@torch.no_grad()
def rescale(unet: Any, by: float = 1 / 3) -> None:
    """Multiply weights in place such that the UNet predicts the same: those before a normalisation, which takes a
    scale back; queries and keys, values and outputs in opposite ways."""
    for module in unet.modules():
        if isinstance(module, ResnetBlock2D):
            scaled = [(p, by) for layer in (module.conv1, module.time_emb_proj) for p in layer.parameters()]
        elif isinstance(module, Attention):
            scaled = [(module.to_q.weight, by), (module.to_k.weight, 1 / by)]
            scaled += [(module.to_v.weight, by), (module.to_out[0].weight, 1 / by)]
        else:
            continue
        for parameter, factor in scaled:
            parameter.mul_(factor)


def runs_of(rows: list[dict]) -> dict[tuple[str | None, str, float], dict[str, list[dict]]]:
    """{(base, unit, rate): {target: the evaluations of its run}}."""
    runs: dict[tuple, dict[str, list[dict]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        unit = json.loads(row["flags"])["learning_rate_unit"]
        runs[row.get("base"), unit, row["factor"]][row["target"]].append(row)
    return runs


def table(rows: list[dict]) -> str:
    """A line a base, unit and rate: Markdown. The ratio is the geometric mean over targets that both recover."""
    runs = runs_of(rows)
    steps = {
        run: {target: figures(of_run)["strict"] for target, of_run in of_targets.items()}
        for run, of_targets in runs.items()
    }
    lines = []
    for base, unit, rate in sorted(runs, key=lambda run: (run[1], [*SAID].index(run[0]), run[2])):
        of_targets = steps[base, unit, rate]
        back = sum(step is not None for step in of_targets.values())
        median = np.median([np.inf if step is None else step for step in of_targets.values()])
        bundled = steps.get((None, unit, UNITS[unit]), {})
        pairs = [(step, bundled.get(target)) for target, step in of_targets.items()]
        both = [np.log(step / other) for step, other in pairs if step and other]
        of_runs = runs[base, unit, rate].values()
        last = [of_run[-1]["rate"] for of_run in of_runs]
        rise = np.mean([of_run[-1]["drift"] - of_run[0]["drift"] for of_run in of_runs])
        cells = [SAID[base], unit, f"{rate:g}", str(len(of_targets)), str(back), mean_rate(last)]
        cells += [f"{median:.0f}" if np.isfinite(median) else "never"]
        lines.append([*cells, f"{np.exp(np.mean(both)):.2f}" if both else "", f"{rise:.3f}"])
    return markdown(HEAD, lines)


def bases(rows: list[dict], bundled: list[dict]) -> str:
    """What these bases and the bundled one draw right: Markdown."""
    built = {row["base"]: row for row in rows}
    named = {SAID[name]: built[name] for name in SAID if name in built}
    return kept.drawn_right({**named, "bundled": kept.base_among(bundled)})


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(OTHERS), help="bases beside the bundled one; empty: none")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "carry", help="folder of the bases")
    parser.add_argument("--unet_steps", type=int, help="steps of a build, in place of each base's own")
    parser.add_argument("--pool", type=int, default=4096, help="scenes that are encoded before its first step")
    parser.add_argument("--targets", default=TARGETS)
    parser.add_argument("--times", default="1", help="rates, as multiples of each unit's own, separated by ','")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20, help="steps between evaluations")
    parser.add_argument("--images", type=int, default=8, help="of an evaluation")
    parser.add_argument("--captions", type=int, default=96, help="whose things a base is asked to draw")
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
            "captions": 12,
        }
        work = args.work.with_name("carry-smoke")
        vars(args).update(small, work=work, results=work / "carry.jsonl")
    sizes = [size for size in args.sizes.split(",") if size]
    if unknown := [size for size in sizes if size not in OTHERS]:
        parser.exit(2, f"error: --sizes: unknown size '{unknown[0]}'; there are: {', '.join(OTHERS)}\n")
    args.work.mkdir(parents=True, exist_ok=True)
    built = {size: build(size, args.work, args.unet_steps, args.pool) for size in sizes}
    for base in [None, *built.values()]:
        for unit, rate in UNITS.items():
            run = {
                "arms": "recommended",
                "factors": ",".join(f"{float(times) * rate}" for times in args.times.split(",")),
                "flags": json.dumps({"learning_rate_unit": unit, "validation.unrelated_images": "0"}),
                "nulls": "target",
                **({} if base is None else {"base": base}),
                **{name: getattr(args, name) for name in ("targets", "steps", "every", "images", "results")},
            }
            published.main([word for name, value in run.items() for word in (f"--{name}", str(value))])
    drawn = args.results.with_name(DRAWN.name)
    known = {row["base"] for row in stored(drawn)}
    for size, base in built.items():
        if size not in known:
            asked = argparse.Namespace(world="microworld", base=base, captions=args.captions)
            append(drawn, [{**kept.of_base(asked), **facts()}])
    print(table(stored(args.results)), bases(stored(drawn), stored(kept.RESULTS)), sep="\n\n")


if __name__ == "__main__":
    main()
