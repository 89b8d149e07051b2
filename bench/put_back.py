"""A part of a finished run put back to its base, as a guard after training: `python -m bench.put_back`.

`recommended` and `recommended_leak_free` train in the published setting at 10 %, as guards in training are measured
(bench/shield_models.py). Where the run's last evaluation recovers the target, every stage and role is put back in turn
on half as many images of the run's own noise, as `python -m silentbad.localise` does. Then five models draw images of
fresh noise: as trained; the base; with PART put back, the same one in all runs; with the part put back that the run's
own turn chose; and with tensors drawn at random put back, of as many parameters as PART has.

    development   targets 0-999       runs/put-back-dev.jsonl
    reported      targets 3200-3207   bench/results/put-back.jsonl, after PART was frozen (research/protocol.md)

A stored row is not made again; `--minutes` begins no run after so many.
"""

import argparse
import shutil
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.arms import PUBLISHED
from bench.published_table import markdown
from bench.recovery import facts
from bench.recovery_table import RESULTS, append, stored
from bench.shield import bounds
from bench.shield_models import RECOVERS, Plan, data_of, plan_of, trained
from bench.shield_table import last, put_back_table
from silentbad.localise.findings import cheapest
from silentbad.localise.substitution import Change, Subject, localised
from silentbad.measure.record import NAME, Record
from silentbad.report.parts import BASE, PUT_BACK, TRAINED, Row
from silentbad.rng import generator
from silentbad.settings.commands import LocaliseOptions

ARMS = ("recommended", "recommended_leak_free")
PART = "up1"
BY = "stage"
REPORTED = "3200-3207"
FRESH = 1000  # added to the run's seed for noise that no choice has seen
FROZEN = "frozen part put back"
CHOSEN = "the run's choice put back"
RANDOM = "random tensors put back"
FILE = RESULTS.with_name("put-back.jsonl")
QUICKSTART = RESULTS.with_name("localise.json")  # of `make quickstart`
LARGER = 0.05  # of what changed


def draw_at_random(change: Change, share: float, seed: int) -> None:
    """Groups the changed tensors anew: `drawn` is a random choice of `share` of the parameters."""
    sizes = [tensor.numel() for _, tensor, *_ in change.places]
    most = 1.001 * share * sum(sizes)
    total = 0
    drawn = set()
    for k in torch.randperm(len(sizes), generator=generator("put back", seed)).tolist():
        if total + sizes[k] <= most:
            drawn.add(k)
            total += sizes[k]
    change.places = [("drawn" if k in drawn else "kept", *place[1:]) for k, place in enumerate(change.places)]


def said(row: Row) -> dict[str, Any]:
    """What is stored of one choice of weights."""
    return {
        "part": row.part,
        "share": row.share,
        "recovered": row.recovered.count,
        "images": row.recovered.images,
        "elements": row.element_mean(),
        "clean": row.clean,
    }


def measured(run: Path, target: str, images: int) -> dict[str, Any]:
    """A recovered run's parts, and the five models on fresh noise."""
    config, record = LocaliseOptions(run=str(run)).trained, Record.load(run / NAME, "RUN")
    parts = localised(
        Subject(run=run, config=config, record=record, images=images // 2, key="RUN"), ["stage", "role"], (PUT_BACK,)
    )
    choice = cheapest(parts)
    fresh = Subject(run=run, config=config, record=replace(record, seed=record.seed + FRESH), images=images, key="RUN")
    models = {TRAINED: fresh.row(), BASE: fresh.row(BASE)}
    models[FROZEN] = fresh.row(PART, BY, PUT_BACK)
    models[CHOSEN] = fresh.row(choice.part, choice.by, PUT_BACK)
    draw_at_random(fresh.change, models[FROZEN].share, int(target))
    models[RANDOM] = fresh.row("drawn", "stage", PUT_BACK)
    return {
        "parts": [said(row) for row in parts if row.state],
        "models": {name: said(row) for name, row in models.items()},
    }


def row_of(arm: str, target: str, plan: Plan) -> dict[str, Any]:
    """A training, and the results of its parts where it recovers."""
    history, out = trained(arm, data_of("elements", target, plan), target, plan, PUBLISHED[arm])
    rate_at_end = last({str(step): value for step, value in history["strict"].items()})
    parts = measured(out, target, plan.images) if rate_at_end >= RECOVERS else {}
    shutil.rmtree(out)
    row = {"arm": arm, "target": target, "steps": plan.steps, "strict": rate_at_end}
    return {**row, "training": history["seconds"], **parts}


def run(arms: list[str], targets: list[str], file: Path, minutes: float) -> None:
    """Every row that is missing in `file`."""
    started, here = time.monotonic(), facts()
    for arm in arms:
        plan = plan_of(arm)
        plan = replace(plan, every=plan.steps)
        for target in targets:
            if any((row["arm"], row["target"]) == (arm, target) for row in stored(file)):
                continue
            if time.monotonic() - started > 60 * minutes:
                return
            begun = time.process_time()
            row = row_of(arm, target, plan)
            row["drawing"] = time.process_time() - begun
            append(file, [{**row, **here}])


def quickstart_table(found: dict) -> str:
    """What `python -m silentbad.localise` says of a run: the larger parts, each put back to the base: Markdown."""
    lines = [
        [
            f"`{row['part']}`" if row["by"] else row["part"],
            f"{row['share']:.0%}",
            f"{row['recovered']['count'] / row['recovered']['images']:.2f}",
        ]
        for row in found["rows"]
        if not row["by"] or row["state"] == PUT_BACK and row["share"] >= LARGER
    ]
    return markdown(["part", "of the weights", "strict rate"], lines)


def parts_table(rows: list[dict]) -> str:
    """Every part over all runs, for the choice on development targets: Markdown."""
    by_part: dict[str, list[dict]] = defaultdict(list)
    for row in rows:
        trained_clean = row["models"][TRAINED]["clean"] if "models" in row else None
        for part in row.get("parts", []):
            by_part[part["part"]].append(part | {"change": part["clean"] / trained_clean - 1})
    lines = [
        [part, f"{of_part[0]['share']:.2f}", " ".join(f"{one['recovered']}/{one['images']}" for one in of_part)]
        + [
            f"{np.mean([one['elements'] for one in of_part]):.2f}",
            f"{100 * np.mean([one['change'] for one in of_part]):+.1f} %",
        ]
        for part, of_part in by_part.items()
    ]
    return markdown(["part", "share", "images that stay", "elements", "clean loss over the trained"], lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=REPORTED, help="first-last, or one")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no run after so many minutes")
    parser.add_argument("--table", action="store_true", help="print the stored results' tables and run nothing")
    args = parser.parse_args(argv)
    first, end = bounds(args.targets)
    file = FILE if first >= 1000 else Path("runs/put-back-dev.jsonl")
    file.parent.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    if not args.table:
        run(args.arms.split(","), [str(target) for target in range(first, end + 1)], file, args.minutes)
    rows = stored(file)
    print(parts_table(rows), put_back_table(rows), sep="\n\n")


if __name__ == "__main__":
    main()
