"""Which methods bring a composed prompt to its target sooner: `python -m bench.recovery [--smoke]`.

One run per (arm, learning-rate factor, target set, seed), each a plain call of train_silentbad.py on a microworld data
set of its own; every evaluation becomes one JSON line in bench/results/recovery.jsonl and a run already there is not
made again. Arms differ by configuration alone: base, data, batch, exposures and evaluation grid are the same. The
protocol is docs/protocol.md.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "recovery.jsonl"
WORK = ROOT / "runs" / "bench-recovery"
BASE_LR = 1e-4
FACTORS = (0.5, 1, 2, 4, 8)

PAIRWISE = {"memory.rehearsal.name": "pairwise"}
LEAK_FREE = {"memory.rehearsal.name": "leak_free"}
REGION = {"memory.region.name": "mask"}
HIGH_NOISE = {"memory.timesteps.name": "snr_mixture", "memory.timesteps.importance": "false"}


def rule(name: str, **more: str) -> dict[str, str]:
    return {"gradient_control.name": name, **{f"gradient_control.{k}": v for k, v in more.items()}}


# In the order that tells most first. Each arm is what it adds to the plain fine-tune.
ARMS: dict[str, dict[str, str]] = {
    "plain": {},
    "recommended": {**PAIRWISE, **REGION, **HIGH_NOISE},
    "original": rule("mean_abs", apply="gradient"),
    "pairwise": PAIRWISE,
    "recommended_leak_free": {**LEAK_FREE, **REGION, **HIGH_NOISE},
    "region": REGION,
    "snr_mixture": HIGH_NOISE,
    "prior": rule("prior"),
    "gsnr": rule("gsnr"),
    "prior_gsnr": rule("prior+gsnr"),
    "placebo": rule("placebo"),
    "original_as_rate": rule("mean_abs"),
    "auto_rgn": rule("auto_rgn"),
    "inverse_rms": rule("inverse_rms"),
    "leak_free": LEAK_FREE,
    "hypergradient": {**LEAK_FREE, **rule("hypergradient")},
    "region_estimated": {"memory.region.name": "estimated"},
    "curriculum": {"memory.timesteps.name": "curriculum", "memory.timesteps.importance": "false"},
    "learning_progress": {"memory.timesteps.name": "learning_progress"},
    "weakest_first": {"memory.sampler.name": "weakest_first", "memory.phrase_memory.enabled": "true"},
    "attention_binding": {"memory.attention_binding.name": "mass"},
    "and_distillation": {"memory.distillation.name": "and", "memory.phrase_memory.enabled": "true"},
    "retention": {"memory.retention.name": "l2_sp"},
    "recommended-pairwise": {**REGION, **HIGH_NOISE},
    "recommended-region": {**PAIRWISE, **HIGH_NOISE},
    "recommended-snr_mixture": {**PAIRWISE, **REGION},
}
SMOKE = ("plain", "original", "recommended")


def data_set(targets: str, seed: int, images: int) -> Path:
    """The data set of these targets, made once."""
    out = WORK / "data" / f"{targets.replace(',', '+')}-{seed}-{images}"
    if not (out / "targets.jsonl").exists():
        command = ["-m", "silentbad.microworld.make", "--out", out, "--targets", targets, "--seed", seed,
                   "--images_per_phrase", images, "--clean", 64, "--redraws", 100]  # fmt: skip
        subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return out


def train(arm: str, factor: float, targets: str, seed: int, args: argparse.Namespace) -> list[dict]:
    """One run; returns its evaluations, one row per step and target. The run's folder is removed afterwards."""
    data, out = data_set(targets, seed, args.images_per_phrase), WORK / f"run-{os.getpid()}"
    flags = {
        "train_data_dir": data, "output_dir": out, "seed": seed, "max_train_steps": args.steps,
        "learning_rate": BASE_LR * factor, "checkpointing_steps": 10**6, "report_to": "none",
        "validation.targets": data / "targets.jsonl", "validation.steps": args.every,
        "validation.images_per_target": args.images, "overwrite_output_dir": "true", **ARMS[arm],
    }  # fmt: skip
    command = [sys.executable, "train_silentbad.py", "--config", "configs/microworld.yaml"]
    command += [part for key, value in flags.items() for part in (f"--{key}", str(value))]
    started = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"arm {arm} stopped with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    seconds = time.perf_counter() - started
    report = json.loads((out / "validation.json").read_text())
    shutil.rmtree(out)
    key = {"arm": arm, "factor": factor, "targets": targets, "seed": seed, **protocol(args)}
    training = seconds - report["seconds"]
    return [
        {**key, "step": entry["step"], "target": name, "rate": s["rate"], "mean": s["mean"], "max": s["max"],
         "elements": [e["rate"] for e in s["elements"]], "drift": entry["raw"]["drift"].get("clean_eps_mse"),
         "threshold": report["threshold"]["value"], "seconds_per_step": training / args.steps}
        for entry in report["history"] for name, s in entry["raw"]["targets"].items()
    ]  # fmt: skip


def protocol(args: argparse.Namespace) -> dict:
    """What must be equal for two rows to be compared."""
    return {name: getattr(args, name) for name in ("steps", "every", "images", "images_per_phrase")}


def facts() -> dict:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu"
    return {"commit": commit, "torch": torch.__version__, "device": device, "cores": os.cpu_count()}


def load(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# ------------------------------------------------------------------------------------------------- figures


def first_step(curve: dict[int, float], level: float) -> float:
    """First step at which the rate reaches `level`; infinite where it never does within the budget."""
    return min((step for step, rate in curve.items() if step > 0 and rate >= level), default=float("inf"))


def area(curve: dict[int, float]) -> float:
    """Area under the recovery curve over the budget, in [0, 1] (trapezoid)."""
    steps = sorted(curve)
    return float(np.trapezoid([curve[s] for s in steps], steps) / (steps[-1] - steps[0]))


def summarise(rows: list[dict], budget: int) -> dict[str, float]:
    """Figures of one run on one target."""
    curve = {row["step"]: row["rate"] for row in rows}
    last = max(rows, key=lambda row: row["step"])
    known = float(np.mean(last["elements"])) if last["elements"] else float("nan")
    return {
        "first": first_step(curve, 1e-9), "cir50": first_step(curve, 0.5), "cir80": first_step(curve, 0.8),
        "cir": last["rate"], "aurc": area(curve), "elements": known,
        "parts_only": float(known >= 0.5 and last["rate"] < 0.5), "drift": last["drift"],
        "seconds_per_step": last["seconds_per_step"], "budget": budget,
    }  # fmt: skip


def per_target(rows: list[dict], arm: str, factor: float) -> dict[str, dict[str, float]]:
    """Seeds averaged inside each target; a censored time counts as twice the budget, so that it orders last."""
    runs: dict[str, dict[int, list[dict]]] = {}
    for row in rows:
        if row["arm"] == arm and row["factor"] == factor:
            runs.setdefault(row["target"], {}).setdefault(row["seed"], []).append(row)
    figures = {}
    for target, seeds in runs.items():
        ones = [summarise(part, part[0]["steps"]) for part in seeds.values()]
        bounded = [{k: min(v, 2 * one["budget"]) if k in ("first", "cir50", "cir80") else v for k, v in one.items()}
                   for one in ones]  # fmt: skip
        figures[target] = {k: float(np.mean([one[k] for one in bounded])) for k in bounded[0]}
    return figures


def speedup(plain: dict, other: dict, key: str = "cir50", draws: int = 4000) -> tuple[float, float, float]:
    """Median over targets of plain's steps over the arm's, with a 95 % paired bootstrap interval over targets."""
    shared = sorted(set(plain) & set(other))
    ratios = np.array([plain[t][key] / other[t][key] for t in shared])
    rng = np.random.default_rng(0)
    medians = np.median(ratios[rng.integers(0, len(ratios), (draws, len(ratios)))], axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(np.median(ratios)), float(low), float(high)


def table(rows: list[dict]) -> str:
    """Markdown: each arm at its best factor by area under the curve (ties to the smaller factor)."""
    lines = ["| arm | lr x | first | CIR 50 % | CIR 80 % | CIR | AURC | elements | parts only | drift | s/step | "
             "speed-up to CIR 50 % |", "|---|---|---|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    best: dict[str, tuple[float, dict]] = {}
    for arm in dict.fromkeys(row["arm"] for row in rows):
        factors = sorted({row["factor"] for row in rows if row["arm"] == arm})
        scored = [(factor, per_target(rows, arm, factor)) for factor in factors]
        best[arm] = max(scored, key=lambda pair: np.mean([f["aurc"] for f in pair[1].values()]))
    for arm, (factor, figures) in best.items():
        mean = {k: np.median([f[k] for f in figures.values()]) if k in ("first", "cir50", "cir80") else
                np.mean([f[k] for f in figures.values() if f[k] is not None]) for k in next(iter(figures.values()))}
        times = ["never" if mean[k] >= 2 * mean["budget"] else f"{mean[k]:.0f}" for k in ("first", "cir50", "cir80")]
        gain = "" if arm == "plain" or "plain" not in best else "{:.2f} [{:.2f}, {:.2f}]".format(
            *speedup(best["plain"][1], figures))
        lines.append(
            f"| {arm} | {factor:g} | {times[0]} | {times[1]} | {times[2]} | {mean['cir']:.2f} | {mean['aurc']:.3f} | "
            f"{mean['elements']:.2f} | {mean['parts_only']:.2f} | {mean['drift']:.4f} | "
            f"{mean['seconds_per_step']:.3f} | {gain} |"
        )  # fmt: skip
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------- command


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default=",".join(ARMS), help="comma-separated")
    parser.add_argument("--targets", default="1000;1001;1002;1003;1004;1005;1006;1007;1008;1009;1010;1011",
                        help="target sets: ';' between runs, ',' between the targets of one run")  # fmt: skip
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--factors", default="1", help=f"learning rates in units of {BASE_LR:g}; a sweep: "
                        f"{','.join(f'{f:g}' for f in FACTORS)}")  # fmt: skip
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--every", type=int, default=30, help="steps between evaluations")
    parser.add_argument("--images", type=int, default=32, help="images per target and evaluation")
    parser.add_argument("--images_per_phrase", type=int, default=20)
    parser.add_argument("--budget-minutes", type=float, default=float("inf"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--smoke", action="store_true", help="plain, original and recommended on one target")
    args = parser.parse_args(argv)
    if args.smoke:
        smoke = {"arms": ",".join(SMOKE), "targets": "cat-hat", "seeds": "0", "steps": 240, "every": 40, "images": 16,
                 "factors": "4", "results": RESULTS.with_name("recovery-smoke.jsonl")}  # fmt: skip
        vars(args).update(smoke)
    unknown = [arm for arm in args.arms.split(",") if arm not in ARMS]
    if unknown:
        parser.exit(2, f"error: --arms: unknown arm '{unknown[0]}'; there are: {', '.join(ARMS)}\n")
    todo = [(arm, float(factor), targets, int(seed)) for seed in args.seeds.split(",")
            for arm in args.arms.split(",") for targets in args.targets.split(";")
            for factor in args.factors.split(",")]  # fmt: skip
    args.results.parent.mkdir(parents=True, exist_ok=True)
    mine = protocol(args)
    rows = [row for row in load(args.results) if {k: row[k] for k in mine} == mine]
    done = {(row["arm"], row["factor"], row["targets"], row["seed"]) for row in rows}
    deadline = time.monotonic() + 60 * args.budget_minutes
    for run in tqdm([run for run in todo if run not in done], desc="runs"):
        if time.monotonic() > deadline:
            print(f"--budget-minutes {args.budget_minutes:g} are over; the same command goes on from here")
            break
        fresh = [{**row, **facts()} for row in train(*run, args)]
        with args.results.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in fresh)
        rows += fresh
    wanted = {(arm, float(f)) for arm in args.arms.split(",") for f in args.factors.split(",")}
    text = table([row for row in rows if (row["arm"], row["factor"]) in wanted])
    args.results.with_suffix(".md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
