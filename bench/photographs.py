"""What a verdict says of one's own pictures: `python -m bench.photographs [--targets N] [--first SEED]`.

Targets pasted from the photographs of scikit-image's wheel (tests/photographs.py), and docs/example. Of each,
failures that its calibration did not see (an element missing, mirrored, turned, replaced by another or by a foreign
thing; the backdrop flat or foreign), which must not count, and copies, which must. Each is measured as the pipeline's
autoencoder leaves it, calibrated as an audit without a baseline is. Each picture is a row of
bench/results/photographs.jsonl; targets that are stored are not measured again.
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
from silentbad.measure.intervals import binomial_interval
from silentbad.measure.nearest import Shown
from silentbad.measure.scores import is_recovered
from silentbad.model.pipeline import load_pipeline
from tests import photographs

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "photographs.jsonl"
EXAMPLE = ROOT / "docs" / "example"
SIDE = 64
FIRST = 300
TARGETS = 24
WORDS = {
    "missing": "an element missing, the backdrop in its place",
    "mirrored": "an element mirrored",
    "turned": "an element turned by 180 degrees",
    "replaced": "an element replaced by another of the target",
    "foreign": "an element or the backdrop replaced by a foreign one",
    "flattened": "the backdrop its mean colour",
}


class Judge:
    """The measure of a validation on some targets, calibrated as in an audit without a baseline."""

    def __init__(self, targets: list[Target], shown: list[Shown], folder: Path, **options: Any):
        accelerator = start()
        pipe = load_pipeline("assets/micro-sd", "float32", accelerator.device)
        self.hook = validation.RecoveryHook(
            validation.ValidationConfig(targets="targets.jsonl", **options),
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
            self.whole, self.element, self.ranges = self.hook.measure.calibrate_targets(1)

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


def textures() -> list[Shown]:
    """Training pictures that show no target's element but a backdrop."""
    rng = np.random.default_rng(0)
    return [Shown(name, to_tensor(photographs.texture(name, rng)), (name,)) for name in photographs.TEXTURES]


def of_photographs(seed: int) -> Target:
    photograph = photographs.make_target(seed)
    phrases = [phrase for phrase, _ in photograph.elements]
    masks: list = [mask for _, mask in photograph.elements]
    return Target(f"photo-{seed}", photograph.picture, phrases, masks=masks)


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


def measure(target: Target, pictures: Mapping[str, Image.Image], shown: list[Shown]) -> Iterator[dict]:
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
            "whole": row["sim"],
            "elements": row["elements"],
            "passes": judge.passes(row),
            "parts": judge.parts(0),
            "ranges": ranges,
        }


def pictures_of(seed: int) -> dict[str, Image.Image]:
    photograph = photographs.make_target(seed)
    copies = {f"copy: {kind}": picture for kind, picture in photographs.copies(photograph).items()}
    return photographs.failures(photograph) | copies


# ------------------------------------------------------------------------------------------------- tables
def table(rows: list[dict]) -> str:
    """What counted, by kind of picture, over the photographs; then docs/example."""
    of_photos = [row for row in rows if row["target"].startswith("photo-")]
    kinds: dict[str, list[bool]] = defaultdict(list)
    for row in of_photos:
        name = "a copy" if row["copy"] else WORDS[row["kind"].rpartition("-")[0]]
        kinds[name].append(row["passes"])
    kinds["every failure"] = [row["passes"] for row in of_photos if not row["copy"]]
    kinds["a copy, where the detector tells"] = [row["passes"] for row in of_photos if row["copy"] and row["parts"]]
    lines = []
    for name in [*WORDS.values(), "every failure", "a copy", "a copy, where the detector tells"]:
        passed = kinds[name]
        low, high = binomial_interval(sum(passed), len(passed))
        lines.append([name, f"{sum(passed)} of {len(passed)}", f"{low:.3f} to {high:.3f}"])
    told = {row["target"]: row["parts"] for row in of_photos}
    said = f"{len(told)} targets; in {sum(told.values())} the detector tells copies from failures in every part.\n\n"
    return said + grid(("picture", "counts as recovered", "95 %"), lines)


def example(rows: list[dict]) -> str:
    """docs/example: similarities beside the thresholds."""
    of_example = [row for row in rows if row["target"] == "ball-box"]
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
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    done = {row["target"] for row in stored(args.results)} if args.results.exists() else set()
    (ball_box,) = load_targets(EXAMPLE / "targets.jsonl")
    todo = [(ball_box, partial(example_pictures, ball_box))]
    for seed in range(args.first, args.first + args.targets):
        todo.append((of_photographs(seed), partial(pictures_of, seed)))
    for target, pictures in tqdm([work for work in todo if work[0].target_id not in done], desc="targets"):
        append(args.results, [*measure(target, pictures(), textures())])
    rows = stored(args.results)
    print(f"{table(rows)}\n{example(rows)}")


if __name__ == "__main__":
    main()
