"""The scan at size: what it finds, seconds by step and memory a worker, against the number of records.

    python -m bench.scan_scale --records 10000 100000                 the search in one process
    python -m bench.scan_scale --records 20000 --workers 1 2          on Dask, with one and with two workers

Each row is a data set of generated views: clean scenes of the microworld, hard negatives (bench/shield_data.py) and
four hidden pictures of 20 records an element. Clean views come from a pool of rendered scenes, each mirrored or not and
with a contrast and a brightness of its own for each colour, so that a pool of any size gives any number of different
ones. Seeds 0-999 are for development; from 3100 on, rows are reported: run once, after the commit that froze the
thresholds.

Seconds are processor seconds of the tasks of a step, summed, and of all processes together; memory is the most that a
process had of its own (RssAnon, asked twice a second), without mapped files, which the kernel takes back when it needs
them. Bytes are what the tasks of a step write. Reading pictures is not in the rows, for views are made here.
"""

import argparse
import json
import math
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from bench.recovery import facts
from bench.recovery_table import append, grid, stored
from bench.shield_data import copies, draw_of, drawn, hide, names_of, series, subject, templates
from silentbad.scan.regions import view
from silentbad.scan.scan_folder import Store
from silentbad.scan.views import Views
from worlds.microworld.grammar import sample_scene

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "scan-scale.jsonl"
DEVELOPMENT = ROOT / "runs" / "scan-scale-dev.jsonl"
WORK = ROOT / "runs" / "scan-scale"
POOL = 10_000  # rendered scenes of a file
PART = 4096  # records of a part
HIDDEN = 4  # pictures
EACH = 20  # records of an element
FAINTEST = 0.7  # of a clean view's contrast
Drawn = tuple[str, np.ndarray]


# -- data ------------------------------------------------------------------------------------------------------
def pool(number: int) -> tuple[np.ndarray, list[str]]:
    """Views (POOL,32,32,3) and captions of rendered scenes, made once."""
    file = WORK / "pool" / f"0-{number:03d}.npz"
    if not file.is_file():
        scenes = [drawn(sample_scene(draw_of("scale", "0", number * POOL + i))) for i in range(POOL)]
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(file, views=np.stack([view(p) for p, _ in scenes]), captions=np.asarray([c for _, c in scenes]))
    with np.load(file) as file_of_pool:
        return file_of_pool["views"], file_of_pool["captions"].tolist()


def varied(views: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Views (n,32,32,3), some mirrored, each with a contrast and a brightness of its own for each colour."""
    gain = rng.uniform(FAINTEST, 1, (len(views), 1, 1, 3)).astype(np.float32)
    bias = rng.uniform(0, 255 * (1 - gain)).astype(np.float32)
    mirrored = rng.random(len(views)) < 0.5
    turned = np.where(mirrored[:, None, None, None], views[:, :, ::-1], views)
    return np.rint(gain * turned + bias).astype(np.uint8)


def planted(seed: int) -> tuple[list[Drawn], int]:
    """Captions and views beside the clean ones, and how many of them, the first ones, show an element."""
    rows = [row for name in names_of(seed, HIDDEN) for row in hide(name, EACH)[1]]
    elements = len(rows)
    for maker in (series, subject, copies, templates):
        rows += maker(seed)
    return [(caption, view(picture)) for picture, caption in rows], elements


def data_of(clean: int, seed: int, pools: int) -> Path:
    """A data set of so many clean views beside the planted ones, in parts, made once. `truth.json` has its records, the
    sizes of its parts, and which records show an element."""
    out = WORK / f"views-{clean}-{seed}"
    if (out / "truth.json").is_file():
        return out
    extra, elements = planted(seed)
    n, rng = clean + len(extra), draw_of("scale-places", seed)
    special = rng.permutation(n)[: len(extra)]
    at = {int(place): k for k, place in enumerate(special)}
    store, sizes, fresh = Store(out), list[int](), _clean(seed, pools)
    for number, start in enumerate(range(0, n, PART)):
        part = Views(store.part(number), "")
        part.empty()
        part.add(extra[at[i]] if i in at else next(fresh) for i in range(start, min(start + PART, n)))
        sizes.append(len(part.captions))
    truth = {"records": n, "sizes": sizes, "elements": sorted(int(place) for place in special[:elements])}
    truth["hidden"] = HIDDEN
    (out / "truth.json").write_text(json.dumps(truth))
    return out


def _clean(seed: int, pools: int):
    """Clean views without end."""
    for turn in range(10**6):
        views, captions = pool(turn % pools)
        yield from zip(captions, varied(views, draw_of("scale-clean", seed, turn)), strict=True)


# -- measuring ------------------------------------------------------------------------------------------------
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, nargs="+", default=[10_000, 100_000], help="clean records")
    parser.add_argument("--workers", type=int, nargs="+", default=[0], help="of a local cluster; 0: one process")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--pools", type=int, default=10, help="files of rendered scenes")
    parser.add_argument("--permutations", type=int, default=0)
    args = parser.parse_args(argv)
    for seed in args.seeds:
        file = DEVELOPMENT if seed < 1000 else RESULTS
        for records in args.records:
            for workers in args.workers:
                key = {"seed": seed, "clean": records, "workers": workers}
                if any(key.items() <= row.items() for row in stored(file)):
                    continue
                data = data_of(records, seed, args.pools)
                row = key | alone(data, workers, args.permutations) | facts()
                file.parent.mkdir(exist_ok=True)
                append(file, [row])
                print(row)


def alone(data: Path, workers: int, permutations: int) -> dict:
    """A measurement in a process of its own."""
    command = [sys.executable, "-m", "bench.scan_once", str(data), str(workers), str(permutations)]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])


# -- tables ----------------------------------------------------------------------------------------------------
# What writes which bytes; what lies in a part is written by "given", or by "read" where pictures are read.
WRITERS = {"windows": "windows", "strong": "pairs", "copies": "pairs", "links": "links", "near": "near"}
WRITERS |= {"views": "place", "signatures": "place", "several": "several"}
BILLION = 10**9
CORES = 1024  # of the cluster on paper
DOLLARS = 0.05  # a core's price an hour


def table(rows: list[dict]) -> str:
    """What was found, time and memory by number of records."""
    lines = []
    for row in sorted(rows, key=lambda row: (row["records"], row["seed"], row["workers"])):
        spent = row["plan_seconds"] + sum(row["steps"].values())
        lines.append(
            (
                f"{row['records']:,}",
                str(row["seed"]),
                str(row["workers"] or "none, one process"),
                f"{row['sets']}, {row['hidden']}",
                f"{row['right']} of {row['elements']}",
                str(row["wrong"]),
                f"{row['seconds'] / 60:.1f}",
                f"{spent / 60:.1f}",
                f"{max(row['own_mib'])} MiB",
            )
        )
    head = ("records", "seed", "workers", "sets found, hidden", "element records flagged", "others flagged")
    return grid((*head, "minutes", "processor minutes", "most memory of a process"), lines)


def by_step(rows: list[dict]) -> str:
    """Seconds and bytes of each step at the two largest sizes, and on paper at a billion, where each step's own growth
    between the two goes on."""
    ordered = sorted(rows, key=lambda row: (row["records"], -row["workers"]))
    if len({row["records"] for row in ordered}) < 2:
        return "Too few sizes were run.\n"
    large = ordered[-1]
    small = [row for row in ordered if row["records"] < large["records"]][-1]
    lines, hours = [], 0.0
    for step, spent in _spent(large).items():
        power = _power(small, large, _spent(small).get(step, 0), spent)
        paper = spent * (BILLION / large["records"]) ** power / 3600
        hours += paper
        size = _written(large).get(step, 0) / large["records"]
        lines.append(
            (step, *_thousand(small, step), *_thousand(large, step), f"{power:.2f}", f"{size:,.0f}", f"{paper:,.0f}")
        )
    head = (
        "step",
        f"seconds a 1,000 of {small['records']:,}",
        f"of {large['records']:,}",
        "grows as N to the power of",
    )
    said = (
        f"At a billion: {hours:,.0f} core hours, {hours / CORES:,.0f} hours on {CORES} cores, "
        f"{hours * DOLLARS:,.0f} dollars at {DOLLARS} a core hour.\n"
    )
    return f"{grid((*head, 'bytes written a record', 'core hours at a billion'), lines)}\n{said}"


def _spent(row: dict) -> dict[str, float]:
    return row["steps"] | {"the plan itself": row["plan_seconds"]}


def _thousand(row: dict, step: str) -> tuple[str]:
    return (f"{1000 * _spent(row).get(step, 0) / row['records']:.3f}",)


def _power(small: dict, large: dict, before: float, after: float) -> float:
    """How a step grows between two sizes, from 1 to 2; 1 where it took too little to tell."""
    if min(before, after) < 0.5:
        return 1.0
    return min(2.0, max(1.0, math.log(after / before) / math.log(large["records"] / small["records"])))


def _written(row: dict) -> dict[str, int]:
    """Bytes by the step that wrote them."""
    sizes = defaultdict[str, int](int)
    for kind, size in row["bytes"].items():
        step = WRITERS.get(kind, "given" if kind not in ("marks", "words", "first", "starts") else "")
        if kind == "views":  # of the parts, and of all records
            size //= 2
            sizes["given"] += size
        sizes[step] += size
    return sizes


def before(found: dict) -> str:
    """The same of the code before, which read pictures from disk."""
    lines = []
    for row in found["rows"]:
        minutes = (f"{row['seconds'] / 60:.1f}", f"{row['processor_seconds'] / 60:.1f}", f"{row['own_mib']} MiB")
        right = f"{row['right']} of {row['elements']}"
        lines.append((f"{row['records']:,}", f"{row['sets']}, {row['hidden']}", right, str(row["wrong"]), *minutes))
    head = ("records", "sets found, hidden", "element records flagged", "others flagged", "minutes")
    return grid((*head, "processor minutes", "own memory"), lines)


if __name__ == "__main__":
    main()
