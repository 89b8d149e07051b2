"""How near the training data comes to the target: `python -m bench.stealth`.

No training picture shows the target. For each reported target of the published setting, every training picture is
compared with it by the detector, under the thresholds that judge the generations, from the null pictures of the same
data set. One JSON line a target in bench/results/stealth.jsonl; a stored one is not measured again.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from bench.instrument import Detector, Target, by_kind, passed, rows_of
from bench.published import HELD_OUT, per_phrase
from bench.published_table import CLEAN, MAIN, interval, markdown
from bench.recovery import data_set, facts
from bench.recovery_table import append, stored
from silentbad.data.images import to_tensor

RESULTS = Path(__file__).parent / "results" / "stealth.jsonl"
TARGETS = ";".join(map(str, range(MAIN, MAIN + 8)))
HEAD = (
    "pictures",
    "number",
    "targets",
    "nearest, similarity",
    "threshold",
    "most elements in one",
    "count as recovered",
)
BLOCK = 128


def data_of(name: str) -> Path:
    """The data set that the arms of the published setting train on, with nulls for each element."""
    images = per_phrase(name, CLEAN, ratio=0.1)
    return data_set(name, 0, images, {}, clean=CLEAN + HELD_OUT, nulls=None)


def pictures(files: list[Path]) -> Iterator[Tensor]:
    """(B,3,64,64) in [0,1], some at a time."""
    for k in range(0, len(files), BLOCK):
        yield torch.stack([to_tensor(Image.open(file)) for file in files[k : k + BLOCK]])


def measure(name: str) -> dict[str, Any]:
    """How near the element pictures and the clean ones of a target's data set come to it."""
    data, target, judge = data_of(name), Target(name), Detector()
    null: dict[str, list[dict]] = {}
    redraws = stored(data / "redraws.jsonl")
    for kind in {row["kind"]: None for row in redraws}:
        of_kind = [row for row in redraws if row["kind"] == kind]
        changed = iter([tuple(row["changed"]) for row in of_kind])
        for x in pictures([data / row["image"] for row in of_kind]):
            null.setdefault(kind, []).extend(rows_of(judge, target, x, [next(changed) for _ in x]))
    threshold = by_kind(null)
    found: dict[str, Any] = {"target": name, "threshold": threshold[0]}
    for role in ("element", "clean"):
        files = [data / row["file_name"] for row in stored(data / "metadata.jsonl") if row["role"] == role]
        rows = [row for x in pictures(files) for row in rows_of(judge, target, x)]
        seen = [passed(row, threshold) for row in rows]
        found[role] = {
            "pictures": len(rows),
            "nearest": max(row["sim"] for row in rows),
            "elements": max(sum(one["each"]) for one in seen),
            "recovered": sum(one["strict"][0] for one in seen),
        }
    return found


def table(rows: list[dict]) -> str:
    """A line a role: Markdown."""
    cells = []
    for role in ("element", "clean"):
        of_role = [row[role] for row in rows]
        count = sum(one["pictures"] for one in of_role)
        nearest, level = (
            interval([one["nearest"] for one in of_role], ".3f"),
            interval([row["threshold"] for row in rows]),
        )
        most, recovered = max(one["elements"] for one in of_role), sum(one["recovered"] for one in of_role)
        cells.append([role, str(count), str(len(rows)), nearest, level, str(most), f"{recovered} of {count}"])
    return markdown(HEAD, cells)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=TARGETS, help="separated by ';'")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    here = facts()  # before the first target: the code has been read by now
    measured = {row["target"] for row in stored(args.results)}
    for target in tqdm([name for name in args.targets.split(";") if name not in measured], desc="targets"):
        append(args.results, [{**measure(target), **here}])
    print(table(stored(args.results)))


if __name__ == "__main__":
    main()
