"""What a verdict says of one's own pictures: `python -m bench.photographs [--targets N] [--first SEED]`.

Targets are photographs of scikit-image's wheel as they were taken, others pasted from them (tests/photographs.py), and
docs/example. Of each, failures that its calibration did not see, which must not count: an element missing,
mirrored, turned, moved, replaced by another or by a foreign thing; the backdrop flat or foreign; an element, the
backdrop or the whole in other colours, in grey, with a tint. And copies, which must. Each is measured as the pipeline's
autoencoder leaves it, calibrated as an audit without a baseline is. Each picture is a row of
bench/results/photographs.jsonl with the judge that measured it; targets that are stored for this judge are not measured
again.
"""

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

import validation
from bench.recovery_table import append, grid, stored
from silentbad.data.images import resize, to_tensor
from silentbad.data.targets import Target, load_targets
from silentbad.distributed.start import start
from silentbad.measure.calibrate import calibrate
from silentbad.measure.embedders import load_embedder
from silentbad.measure.nearest import TrainingPicture
from silentbad.measure.scores import is_recovered
from silentbad.model.pipeline import load_pipeline
from tests import photographs

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "photographs.jsonl"
EXAMPLE = ROOT / "docs" / "example"
SIDE = 64
FIRST = 400
TARGETS = 12
WORDS = {
    "missing": "an element missing, the backdrop in its place",
    "mirrored": "an element or the whole mirrored",
    "turned": "an element turned by 180 degrees",
    "moved": "an element moved by a tenth of the side",
    "replaced": "an element replaced by another of the target",
    "foreign": "an element or the backdrop replaced by a foreign one",
    "flattened": "the backdrop its mean colour",
    "recoloured": "an element or the whole with green for red",
    "grey": "an element or the whole in grey",
    "tinted": "an element or the whole with a tint of 0.15",
}
SOURCES = ("pasted", "as taken", "by others")
OTHERS = "others/"  # prefix of the names of pictures that others chose
JUDGES = {"copy: the lower of two scores": "before", "copy: micro": "now"}  # by how their descriptions begin


class Judge:
    """The measure of a validation on some targets, calibrated as in an audit without a baseline; with the null pictures
    that lie beside a `file` of targets."""

    def __init__(
        self,
        targets: list[Target],
        shown: list[TrainingPicture],
        folder: Path,
        file: str | Path = "targets.jsonl",
        pipeline: str | Path = "assets/micro-sd",
        **options: Any,
    ):
        accelerator = start()
        pipe = load_pipeline(str(pipeline), "float32", accelerator.device)
        self.hook = validation.RecoveryHook(
            validation.ValidationConfig(targets=str(file), **options),
            targets=targets,
            components=pipe.components,
            accelerator=accelerator,
            output_dir=folder,
            seed=0,
            training=shown,
        )
        self.targets = targets
        self.using = partial(self.hook.sampler.using, pipe.unet, torch.device("cpu"), step=1)
        with self.using():
            self.whole, self.element, self.ranges = calibrate(self.hook.measure)

    def rows(self, target: int, pictures: list[Image.Image]) -> list[dict]:
        """What is measured of pictures, as the autoencoder leaves them."""
        images = torch.stack([small(picture) for picture in pictures])
        with self.using():
            seen = self.hook.sampler.round_trip(images)
            rows = self.hook.measure.similar(seen, [target] * len(pictures))
        return [{**row, "magnitude": None} for row in rows]

    def passes(self, row: Any) -> bool:
        """Whether the whole and every element reach their thresholds."""
        return is_recovered(row, self.whole, self.element)

    def passing(self, target: int, pictures: Mapping[str, Image.Image]) -> dict[str, bool]:
        rows = self.rows(target, [*pictures.values()])
        return {kind: self.passes(row) for kind, row in zip(pictures, rows, strict=True)}

    def parts(self, target: int) -> bool:
        """Whether the detector tells copies from failures, of the whole and of every element."""
        told = self.ranges[target]
        return all(part is None or part.separable for part in (told.whole, *told.elements))


def small(picture: Image.Image) -> torch.Tensor:
    """A picture (3,64,64) in [0,1]."""
    return resize(to_tensor(picture)[None], (SIDE, SIDE))[0]


def textures() -> list[TrainingPicture]:
    """Training pictures that show no target's element but a backdrop."""
    rng = np.random.default_rng(0)
    return [TrainingPicture(name, to_tensor(photographs.texture(name, rng)), (name,)) for name in photographs.TEXTURES]


def target_of(made: photographs.Target, name: str) -> Target:
    masks: list = [mask for _, mask in made.elements]
    return Target(name, made.picture, [phrase for phrase, _ in made.elements], masks=masks)


def photograph(name: str) -> photographs.Target:
    """A photograph as it was taken, or `photo-SEED`, which is pasted from several."""
    pasted, _, seed = name.partition("-")
    return photographs.make_target(int(seed)) if pasted == "photo" else photographs.photograph(name)


def folders(folder: Path) -> list[Path]:
    """Those in a folder that hold somebody's picture with its phrases."""
    return sorted(file.parent for file in folder.glob("*/phrases.json"))


def example_pictures(target: Target) -> dict[str, Image.Image]:
    """What docs/example was certified on before, and a copy; of its own pixels."""
    picture = np.asarray(target.image.convert("RGB"))
    ball, box, _ = (np.asarray(mask.convert("L").resize(target.image.size)) > 127 for mask in target.masks if mask)
    field = tuple(int(level) for level in np.median(picture[~(ball | box)], axis=0))

    def without(*regions: np.ndarray) -> Image.Image:
        changed = picture.copy()
        for region in regions:
            changed[region] = field
        return Image.fromarray(changed)

    size = target.image.size
    return {
        "copy: the target": target.image.convert("RGB"),
        "the ball alone": without(box & ~ball),
        "the box alone": without(ball & ~box),
        "an empty field": without(ball, box),
        "plain grey": Image.new("RGB", size, (128, 128, 128)),
        "plain red": Image.new("RGB", size, (255, 0, 0)),
    }


def measure(target: Target, pictures: Mapping[str, Image.Image], shown: list[TrainingPicture]) -> Iterator[dict]:
    """One row a picture."""
    with tempfile.TemporaryDirectory() as folder:
        judge = Judge([target], shown, Path(folder))
    told = judge.ranges[0]
    ranges = [
        None if part is None else [part.floor, part.threshold, part.ceiling] for part in (told.whole, *told.elements)
    ]
    for kind, row in zip(pictures, judge.rows(0, [*pictures.values()]), strict=True):
        yield {
            "target": target.target_id,
            "kind": kind,
            "copy": kind.startswith("copy"),
            "judge": judge.hook.embedder.describe(),
            "whole": row["sim"],
            "elements": row["elements"],
            "passes": judge.passes(row),
            "parts": judge.parts(0),
            "ranges": ranges,
        }


def pictures_of(made: photographs.Target) -> dict[str, Image.Image]:
    copies = {f"copy: {kind}": picture for kind, picture in photographs.copies(made).items()}
    return photographs.failures(made) | copies


def work(first: int, targets: int, folder: Path | None) -> Iterator[tuple[Target, dict[str, Image.Image]]]:
    if folder:
        named = [(f"{OTHERS}{of_one.name}", photographs.of_folder(of_one)) for of_one in folders(folder)]
    else:
        (ball_box,) = load_targets(EXAMPLE / "targets.jsonl")
        yield ball_box, example_pictures(ball_box)
        names = [*photographs.PHOTOGRAPHS, *(f"photo-{seed}" for seed in range(first, first + targets))]
        named = [(name, photograph(name)) for name in names]
    for name, made in named:
        yield target_of(made, name), pictures_of(made)


# ------------------------------------------------------------------------------------------------- tables
def source_of(target: str) -> str:
    """Where a picture comes from, by its name."""
    pasted, as_taken, others = SOURCES
    if target.startswith(OTHERS):
        return others
    return pasted if target.startswith("photo-") else as_taken


def judged_by(row: dict) -> str:
    """A column of the tables; rows of the first benchmark name no judge."""
    return next((name for start, name in JUDGES.items() if row.get("judge", "").startswith(start)), "")


def table(rows: list[dict]) -> str:
    """What counted, by kind of picture and judge: of targets pasted from photographs, of photographs as taken, and of
    pictures that others chose."""
    cells: dict[tuple[str, str], list[bool]] = defaultdict(list)
    told: dict[str, dict[str, bool]] = defaultdict(dict)
    for row in rows:
        judge = judged_by(row)
        if not judge or row["target"] == "ball-box":
            continue
        column = f"{source_of(row['target'])}, {judge}"
        told[column][row["target"]] = row["parts"]
        names = ["a copy"] if row["copy"] else [WORDS[row["kind"].rpartition("-")[0]], "every failure"]
        for name in names:
            cells[name, column].append(row["passes"])
    columns = [f"{source}, {judge}" for source in SOURCES for judge in ("now", "before")]
    columns = [column for column in columns if column in told]
    parts = ["*targets in which the detector tells copies from failures in every part*"]
    lines = [parts + [f"{sum(told[column].values())} of {len(told[column])}" for column in columns]]
    for name in [*WORDS.values(), "every failure", "a copy"]:
        lines.append([name, *(f"{sum(cells[name, column])} of {len(cells[name, column])}" for column in columns)])
    return grid(("counts as recovered", *columns), lines)


def example(rows: list[dict]) -> str:
    """docs/example: similarities beside the thresholds."""
    of_example = [row for row in rows if row["target"] == "ball-box" and judged_by(row) == "now"]
    if not of_example:
        return ""
    thresholds = [part[1] for part in of_example[0]["ranges"] if part is not None]
    lines = [
        [row["kind"], *(f"{score:.2f}" for score in (row["whole"], *row["elements"])), "yes" if row["passes"] else "no"]
        for row in of_example
    ]
    lines.append(["threshold", *(f"{value:.2f}" for value in thresholds), ""])
    return grid(("picture", "whole", "ball", "box", "field", "counts"), lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=FIRST, help="seed of the first target")
    parser.add_argument("--targets", type=int, default=TARGETS)
    parser.add_argument("--folder", type=Path, help="of anybody's pictures, as for bench.photographs_trained")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    shown = textures()
    judge = load_embedder("copy", None, "cpu").describe()
    done = {row["target"] for row in stored(args.results) if row.get("judge") == judge}
    for target, pictures in tqdm(work(args.first, args.targets, args.folder), desc="targets"):
        if target.target_id not in done:
            append(args.results, [*measure(target, pictures, shown)])
    rows = stored(args.results)
    print(f"{table(rows)}\n{example(rows)}")


if __name__ == "__main__":
    main()
