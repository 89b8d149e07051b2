"""What the scan finds and what it misses: `python -m bench.shield`.

Data sets with hidden pictures at five ratios and without any, each with hard negatives (bench/shield_data.py), scanned
as `silentbad-scan` does, from memory. Beside it, a plain near-duplicate search on the same data: of whole
pictures, and of quarters at the same place. Then one hidden picture under changes that break "same pixels, same place".

    development   seeds 0-999       runs/shield-dev.json
    reported      seeds 3170-3189   bench/results/shield.json, after the code was frozen; 3000-3099 by earlier code
    emoji world   seeds 3150-3169   bench/results/shield-emoji.json, by `--world emoji`, at 5 % and without any

`--audit` and `--guards` train models instead (bench/shield_models.py); rows go to shield-audit.jsonl and
shield-guards.jsonl beside shield.json, of the emoji world to shield-audit-emoji.jsonl:

    python -m bench.shield --audit --world emoji

What differs from world to world is in bench/shield_worlds.py.

A data set that the file has is not run again; `--minutes` stops after the seed under way. Clean pictures are a seeded
choice from one pool of each range (development, reported), since drawing them takes longest.
"""

import argparse
import json
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from bench.instrument import Detector, Target, by_kind, passed, rows_of
from bench.recovery_table import stored
from bench.shield_data import (
    RATIOS,
    Data,
    Drawn,
    Hidden,
    assemble,
    at_ratio,
    clean,
    draw_of,
    hide,
    jittered,
    names_of,
    paraphrased,
    recoloured,
    rescaled,
)
from bench.shield_table import audit_table, guard_table
from bench.shield_worlds import ROOT, WORLDS, Setting
from silentbad_shield.scan.find import Findings, draw, find
from silentbad_shield.scan.regions import view
from worlds.microworld import make as microworld
from worlds.microworld.grammar import Thing, respecify, seat_hat
from worlds.microworld.nulls import STORED

NULLS = 20
ARMS = ("recommended_leak_free_adamw", "recommended")  # that guards are measured on
LEVELS = 8.0  # root mean square, of a near duplicate, as silentbad.data.images.copies has it
ROBUST_RECORDS = 1000


def pool_of(seed: int, world: Setting) -> list[Drawn]:
    """The range's clean pictures, drawn once and kept in runs/."""
    first = 0 if seed < 1000 else 3000
    file = ROOT / "runs" / f"shield-clean{world.suffix}-{first}.npz"
    if not file.is_file():
        pictures = clean(first, max(RATIOS[ratio] for ratio in world.ratios if ratio), world.targets)
        file.parent.mkdir(exist_ok=True)
        np.savez(file, pictures=np.stack([p for p, _ in pictures]), captions=np.asarray([c for _, c in pictures]))
    with np.load(file) as stored_pool:
        return list(zip(stored_pool["pictures"], stored_pool["captions"].tolist(), strict=True))


def chosen(seed: int, ratio: float, pool: list[Drawn]) -> list[Drawn]:
    return [pool[i] for i in draw_of("choice", seed, str(ratio)).permutation(len(pool))]


# -- judging ---------------------------------------------------------------------------------------------------
def scanned(data: Data) -> tuple[Findings, float]:
    """What the scan finds, and its processor seconds."""
    start = time.process_time()
    findings = find(np.stack([view(picture) for picture in data.pictures]), data.captions)
    draw(findings, lambda i: data.pictures[i])
    return findings, time.process_time() - start


def f1(flagged: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """Precision, recall and F1 of records (N,) bool; None where there is nothing to find."""
    hits = float((flagged & truth).sum())
    precision, recall = hits / max(1, flagged.sum()), hits / max(1, truth.sum())
    return {"precision": precision, "recall": recall, "f1": 2 * hits / max(1, flagged.sum() + truth.sum())}


def matched(hidden: Hidden, found: Findings) -> tuple[int | None, list[int]]:
    """(the set that is this picture, which element each of its parts is): a part is an element where most of its
    records are; a set is the picture where it holds all its elements but one at most, and nothing else."""
    for k, one in enumerate(found.sets):
        parts = []
        for records in one.records:
            shares = [np.isin(records, element).mean() for element in hidden.records]
            parts.append(int(np.argmax(shares)) if max(shares) > 0.5 else -1)
        if -1 not in parts and len(set(parts)) >= max(2, len(hidden.records) - 1):
            return k, parts
    return None, []


def elements_found(data: Data, found: Findings) -> list[int]:
    """[elements that have a group of their own, in a set or in none, and all]: most of the group's records are the
    element's, and most of the element's records are there."""
    groups = [records for one in found.sets for records in one.records]
    groups += [element.group.records for element in found.recurring]
    elements = [records for hidden in data.hidden for records in hidden.records]
    seen = [
        any(np.isin(group, own).mean() > 0.5 and np.isin(own, group).mean() > 0.5 for group in groups)
        for own in elements
    ]
    return [sum(seen), len(seen)]


def as_tensor(picture: np.ndarray) -> Tensor:
    return torch.from_numpy(picture.copy()).permute(2, 0, 1)[None].float() / 255


@cache
def judged_by(name: str) -> tuple[Target, tuple[float, list[float]]]:
    """A target and its strict thresholds, from NULLS nulls of each stored kind."""
    target, judge = Target(name), Detector()
    null = {}
    for kind in STORED:
        images, changed = target.nulls(kind, NULLS, "shield")
        null[kind] = rows_of(judge, target, images, changed)
    return target, by_kind(null)


def likeness(hidden: Hidden, composite: np.ndarray, parts: list[int]) -> dict:
    """Similarity of a composite to its picture, whole and by element, against the strict thresholds."""
    target, threshold = judged_by(hidden.name)
    row = rows_of(Detector(), target, as_tensor(composite))[0]
    each = passed(row, threshold)["each"]
    return {"sim": row["sim"], "elements": row["elements"], "known": parts, "reached": [bool(each[p]) for p in parts]}


def measured(data: Data, compare: bool) -> dict:
    """One row of results; `compare` runs the rival and judges the first picture's composite."""
    found, seconds = scanned(data)
    truth, flagged = data.suspect(), np.zeros(len(data.captions), bool)
    flagged[found.records] = True
    places = [matched(hidden, found) for hidden in data.hidden]
    row = {
        "records": len(truth),
        "suspects": int(truth.sum()),
        **f1(flagged, truth),
        "hidden": len(data.hidden),
        "found": sum(place is not None for place, _ in places),
        "sets": len(found.sets),
        "elements": elements_found(data, found),
        "seconds": seconds,
        "flagged_kinds": dict(Counter(kind for kind, flag in zip(data.kinds, flagged, strict=True) if flag)),
    }
    if compare:
        row["rival"] = {name: f1(flags, truth) for name, flags in near_duplicates(data.pictures).items()}
        if places and (k := places[0][0]) is not None:
            parts = places[0][1]
            row["composite"] = likeness(data.hidden[0], found.composites[k].picture, parts)
    return row


def near_duplicates(pictures: np.ndarray, block: int = 1000) -> dict[str, np.ndarray]:
    """The rival: records (N,) that have a near copy, of the whole picture or of a quarter at the same place."""
    small = pictures.reshape(-1, 16, 4, 16, 4, 3).mean((2, 4)).astype(np.float32)
    quarters = [small[:, y : y + 8, x : x + 8].reshape(len(small), -1) for y in (0, 8) for x in (0, 8)]
    by_name = {}
    for name, parts in (("whole pictures", [small.reshape(len(small), -1)]), ("quarters", quarters)):
        flags = np.zeros(len(small), bool)
        for part in parts:
            square, limit = (part**2).sum(1), np.minimum(LEVELS, 0.25 * part.std(1)) ** 2 * part.shape[1]
            for start in range(0, len(part), block):
                rows = slice(start, start + block)
                distances = square[rows, None] + square[None] - 2 * part[rows] @ part.T
                distances[np.arange(len(distances)), np.arange(start, start + len(distances))] = np.inf
                flags[rows] |= (distances <= limit[rows, None]).any(1)
        by_name[name] = flags
    return by_name


# -- robustness ------------------------------------------------------------------------------------------------
def sharing(name: str) -> list[tuple[Hidden, list[Drawn]]]:
    """Two hidden pictures of the same phrases: the second one's things are drawn anew within their words."""
    scene = microworld.target_scene(name)
    rng, things = draw_of("sharing", name), list[Thing]()
    for i, thing in enumerate(scene.things):
        fresh = respecify(rng, thing)
        things.append(seat_hat(rng, fresh, things[i - 1]) if thing.worn and i else fresh)
    twin = type(scene)(tuple(things), type(scene.backdrop)(scene.backdrop.kind, (0.3, 0.8, 0.6, 0.4)), scene.order)
    return [hide(name, 20), hide(name, 20, scene=twin)]


CHANGES: dict[str, Callable[[str], list[tuple[Hidden, list[Drawn]]]]] = {
    "none, 20 records an element": lambda name: [hide(name, 20)],
    "10 records an element": lambda name: [hide(name, 10)],
    "5 records an element": lambda name: [hide(name, 5)],
    "3 records an element": lambda name: [hide(name, 3)],
    "things shifted by up to 2 pixels": lambda name: [hide(name, 20, jittered(2))],
    "things shifted by up to 6 pixels": lambda name: [hide(name, 20, jittered(6))],
    "things rescaled by up to 10 %": lambda name: [hide(name, 20, rescaled)],
    "half of the pictures mirrored": lambda name: [hide(name, 20, mirror=True)],
    "things recoloured by up to 5 %": lambda name: [hide(name, 20, recoloured)],
    "saved as JPEG of quality 75 to 95": lambda name: [hide(name, 20, jpeg=1)],
    "saved as JPEG of quality 75 to 95 at 512 pixels": lambda name: [hide(name, 20, jpeg=8)],
    "phrases paraphrased in half of the captions": lambda name: [hide(name, 20, reword=paraphrased)],
    "two pictures with the same phrases": sharing,
}


# -- running ---------------------------------------------------------------------------------------------------
def code() -> str:
    """The commit that last changed the scan or its data."""
    command = ["git", "log", "-1", "--format=%h", "--", "silentbad_shield/scan", "bench/shield_data.py"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def complete(row: dict, seed: int, pool: list[Drawn], robust: bool, world: Setting) -> bool:
    """Add the data sets of a seed that its row has not; returns whether there were any."""
    ratios, changes = row.setdefault("ratios", {}), {}
    if robust and world.changes:
        changes = {name: change for name, change in CHANGES.items() if name not in row.setdefault("robust", {})}
    if not ratios:
        row["code"] = code()
    missing = [ratio for ratio in world.ratios if f"{ratio:g}" not in ratios]
    for ratio in missing:
        data = at_ratio(seed, ratio, chosen(seed, ratio, pool), world.targets)
        ratios[f"{ratio:g}"] = measured(data, world.changes and ratio > 0)
    for name, change in changes.items():
        data = assemble(seed, ROBUST_RECORDS, change(names_of(seed, 1)[0]), chosen(seed, 1.0, pool))
        row["robust"][name] = measured(data, False)
    return bool(missing or changes)


def bounds(seeds: str) -> tuple[int, int]:
    """The first and the last of `first-last`, or of one seed."""
    first, _, last = seeds.partition("-")
    return int(first), int(last or first)


def on_models(args: argparse.Namespace, world: Setting) -> None:
    """Train, measure and print what is stored then."""
    from bench import shield_models

    first, last = bounds(args.seeds or world.models)
    plan = shield_models.plan_of(args.arm) if args.guards else shield_models.Plan()
    plan = replace(plan, world=args.world, base=args.base, embedder=args.embedder)
    file = world.file(first, "shield-guards.jsonl" if args.guards else "shield-audit.jsonl")
    targets = list(map(str, range(first, last + 1)))
    torch.set_num_threads(1)
    rows = stored(file) if args.table else shield_models.run(plan, targets, file, args.minutes)
    print(guard_table(rows) if args.guards else audit_table(rows))


def on_data(args: argparse.Namespace, world: Setting) -> None:
    """Scan, and print what is stored then."""
    first, last = bounds(args.seeds or world.scans)
    file = world.file(first, "shield-dev.json" if first < 1000 else "shield.json")
    results: dict = json.loads(file.read_text()) if file.is_file() else {"seeds": {}}
    if args.table:
        print(world.table(results))
        return
    torch.set_num_threads(1)
    pool, started = pool_of(first, world), time.monotonic()
    for k, seed in enumerate(tqdm(range(first, last + 1))):
        if time.monotonic() - started > 60 * args.minutes:
            break
        if not complete(results["seeds"].setdefault(str(seed), {}), seed, pool, k < args.robust, world):
            continue
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(results, indent=1) + "\n")
    print(world.table(results))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", help="first-last, of targets where models are trained; unset: those reported")
    parser.add_argument("--world", choices=WORLDS, default="microworld", help="of the pictures")
    parser.add_argument("--robust", type=int, default=100, help="seeds that also run the table of changes")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no seed after so many minutes")
    parser.add_argument("--table", action="store_true", help="print the stored results' table and run nothing")
    parser.add_argument("--audit", action="store_true", help="score the audit over trained pipelines instead")
    parser.add_argument("--guards", action="store_true", help="measure the guards in training instead")
    parser.add_argument("--arm", choices=ARMS, default=ARMS[0], help="that is guarded")
    parser.add_argument("--base", type=Path, help="pipeline that models are trained from; unset: the world's")
    parser.add_argument("--embedder", type=Path, help="detector that judges models' images; unset: the world's")
    args = parser.parse_args(argv)
    world = WORLDS[args.world]
    if not (args.audit or args.guards):
        on_data(args, world)
        return
    on_models(args, world)


if __name__ == "__main__":
    main()
