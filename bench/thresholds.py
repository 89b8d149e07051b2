"""Thresholds from renders against thresholds from what the base draws: `python -m bench.thresholds [--reported]`.

Real pictures have no renderer, so their nulls are counterfactuals that the base model draws. In the microworld both can
be had for one target. Each calibrates as a run does (silentbad.measure.thresholds); both then judge the same pictures:
every kind of hard null, and true copies. Targets that the results file has are not measured again.

    development  targets 0-7        bench/results/thresholds-dev.json
    --reported   targets 2500-2507  bench/results/thresholds.json
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from tqdm import tqdm

from bench.instrument import BASE, COPIES, RESULTS, TESTED, WORDS, Detector, Target, known, passed, pictures_of, rows_of
from silentbad.data.images import to_pil
from silentbad.data.targets import Target as Asked
from silentbad.measure.counterfactuals import counterfactuals
from silentbad.measure.generation import Sampler
from silentbad.measure.intervals import bootstrap_interval
from silentbad.measure.thresholds import thresholds
from validation import ValidationConfig
from worlds.microworld.make import phrase_of, spelt_out

RATE = 0.01  # false positives asked of every kind but those that change one element in place
SOURCES = ("renders", "counterfactuals")


def asked(target: Target) -> Asked:
    """The target as targets.jsonl gives it."""
    scene = target.scene
    masks: list[Any] = [to_pil(mask.expand(3, -1, -1)).convert("L") for mask in target.masks]
    phrases = [phrase_of(scene, k) for k in range(len(masks))]
    return Asked(target.name, to_pil(target.image[0]), phrases, scene.caption, masks, spelt_out(scene).caption)


def drawn(target: Target, judge: Detector, sampler: Sampler, count: int) -> list[Any]:
    """Null rows of the base's counterfactuals."""
    masks: Any = [target.masks]
    with sampler.using(sampler.pipe.unet, torch.device("cpu")):
        drawings = list(counterfactuals(sampler, [asked(target)], masks, count, seed=0))
    rows = rows_of(judge, target, torch.stack([null.image for null in drawings]))
    return [{**row, "kind": null.kind, "changed": null.changed} for row, null in zip(rows, drawings, strict=True)]


def rendered(target: Target, judge: Detector, calibration: dict[str, tuple]) -> list[Any]:
    """Null rows of the renderer's pictures."""
    return [
        {**row, "kind": kind} for kind, pictures in calibration.items() for row in rows_of(judge, target, *pictures)
    ]


def measure(target: Target, judge: Detector, sampler: Sampler, vae: Any, args: argparse.Namespace) -> dict[str, Any]:
    """{source: {threshold, element_thresholds, strict: {kind: [passed, asked]}}} of a target."""
    calibration, tested = pictures_of(target, vae, None, args)
    nulls = {
        "renders": rendered(target, judge, calibration),
        "counterfactuals": drawn(target, judge, sampler, args.drawn),
    }
    rows = {kind: rows_of(judge, target, *pictures) for kind, pictures in tested.items()}
    found = {}
    for source in SOURCES:
        whole, element = thresholds(nulls[source], None, RATE, source)
        limits = whole.of_target(0), [element.of(0, k) for k in range(len(target.masks))]
        counted = {}
        for kind, of_kind in rows.items():
            strict = [passed(row, limits)["strict"][0] for row in of_kind]
            counted[kind] = [sum(strict), len(strict)]
        found[source] = {"threshold": limits[0], "element_thresholds": limits[1], "strict": counted}
    return found


def table(results: dict[str, Any]) -> str:
    """Thresholds and strict pass rates by source, means over targets with their 95 % intervals."""

    def cell(values: list[float], digits: int) -> str:
        low, high = bootstrap_interval(values)
        return f"{np.mean(values):.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"

    targets = results["targets"].values()
    lines = ["| picture | may pass | " + " | ".join(f"from {s}" for s in SOURCES) + " |", "|---|---|---|---|"]
    whole = [cell([t[s]["threshold"] for t in targets], 2) for s in SOURCES]
    parts = [cell([float(np.mean(t[s]["element_thresholds"])) for t in targets], 2) for s in SOURCES]
    lines += [
        f"| *threshold of the whole* | | {' | '.join(whole)} |",
        f"| *of an element, mean* | | {' | '.join(parts)} |",
    ]
    for kind, bar in {**TESTED, **COPIES}.items():
        if all(kind in t[s]["strict"] for t in targets for s in SOURCES):
            shares = [cell([t[s]["strict"][kind][0] / t[s]["strict"][kind][1] for t in targets], 3) for s in SOURCES]
            limit = "" if bar is None else f">= {bar}" if kind in COPIES else f"<= {bar}"
            lines.append(f"| {WORDS[kind]} | {limit} | {' | '.join(shares)} |")
    return "\n".join(lines)


def tables(results: dict[str, Any]) -> str:
    """The same, and of how many targets."""
    return f"{len(results['targets'])} targets.\n\n{table(results)}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reported", action="store_true", help="the reported targets instead of those for development")
    parser.add_argument("--targets", help="comma-separated seeds instead")
    parser.add_argument("--calibration", type=int, default=100, help="rendered nulls of each kind per target")
    parser.add_argument("--drawn", type=int, default=32, help="drawn nulls of each kind per target or element")
    parser.add_argument("--pictures", type=int, default=25, help="tested pictures of each kind per target")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    names = args.targets.split(",") if args.targets else [str(i + 2500 * args.reported) for i in range(8)]
    out = args.out or RESULTS / ("thresholds.json" if args.reported else "thresholds-dev.json")
    settings = {name: getattr(args, name) for name in ("calibration", "drawn", "pictures")}
    results: dict[str, Any] = {**settings, "targets": known(out, settings)}
    pipe = StableDiffusionPipeline.from_pretrained(BASE)
    config = ValidationConfig(num_inference_steps=12, guidance_scale=3.0)
    judge, sampler = Detector(), Sampler(pipe.components, config, seed=0)
    for name in tqdm(names, desc="targets"):
        if name not in results["targets"]:
            results["targets"][name] = measure(Target(name), judge, sampler, pipe.vae, args)
            out.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
