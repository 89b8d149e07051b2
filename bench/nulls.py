"""How many nulls a threshold needs: `python -m bench.nulls`.

An element's threshold rests on the nulls that change this element. With 100 of a kind for a target they are 20 to 50 an
element, and at 5 % the threshold is their highest score: one redraw that by chance looks like the target decides. With
100 for each element it is the fifth highest. The same images of two models are judged both ways: of `recommended`, and
of the base fine-tuned on the target itself, all of whose images should count. One JSON line a target, model and number
of nulls in bench/results/nulls.jsonl; what is stored is not measured again.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from bench.arms import PUBLISHED, PUBLISHED_AT
from bench.ceiling import STEPS, data_of, judged, save_memorised
from bench.published import regime
from bench.published_table import interval, markdown
from bench.recovery import WORK, kept, measure_targets

RESULTS = Path(__file__).parent / "results" / "nulls.jsonl"
TARGETS = ";".join(map(str, range(2400, 2424)))
NULLS = {"100 of a kind": 100, "100 of a kind for each element": None}
MODELS = ("recommended", "memorised")
HEAD = ("nulls", "targets", "half of the images or more", "strict rate", "whole", "elements", "weakest element")


def train(target: str, model: str, folder: Path) -> Path:
    """The pipeline of a model that has learnt the target: in parts, or whole."""
    if model == "memorised":
        save_memorised(target, STEPS, folder / "pipeline")
    else:
        factor, steps, _ = PUBLISHED_AT[model]
        once = {"validation.steps": steps, "validation.images_per_target": 1, "validation.controls": "never"}
        kept(model, {**regime(data_of(target), folder, factor, 0, steps), **PUBLISHED[model], **once})
    return folder / "pipeline"


def measure(target: str) -> Iterator[dict]:
    """The rows of both models."""
    for model in MODELS:
        yield from measure_model(target, model)


def measure_model(target: str, model: str) -> Iterator[dict]:
    """A row a number of nulls, of the same 16 images."""
    folder = WORK / f"nulls-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    pipeline = train(target, model, folder)
    for name, nulls in NULLS.items():
        scores = judged(target, pipeline, data_of(target, nulls), WORK / f"{folder.name}-audit")
        yield {"target": target, "model": model, "nulls": name, **scores}
        shutil.rmtree(WORK / f"{folder.name}-audit")
    shutil.rmtree(folder)


def table(rows: list[dict]) -> str:
    """A line a model and number of nulls, over the targets that have all: Markdown."""
    of = {
        (model, nulls): [r for r in rows if r["model"] == model and r["nulls"] == nulls]
        for model in MODELS
        for nulls in NULLS
    }
    shared = set.intersection(*({row["target"] for row in mine} for mine in of.values()))
    lines = []
    for way, of_way in of.items():
        mine = [row for row in of_way if row["target"] in shared]
        reached = f"{sum(row['rate'] >= 0.5 for row in mine)} of {len(mine)}"
        elements = [
            [sum(row["elements"]) / len(row["elements"]) for row in mine],
            [min(row["elements"]) for row in mine],
        ]
        rates = [[row["rate"] for row in mine], [row["whole_rate"] for row in mine], *elements]
        lines.append([*way, str(len(mine)), reached, *map(interval, rates)])
    return markdown(("model", *HEAD), lines)


def main(argv: list[str] | None = None) -> None:
    measure_targets(__doc__, TARGETS, RESULTS, measure, table, argv)


if __name__ == "__main__":
    main()
