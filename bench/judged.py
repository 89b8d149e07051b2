"""What today's judge says of the images that bench.kept has stored: `python -m bench.judged [--results FILE]`.

The reported runs keep their images of the composed prompt (kept-pictures.zip beside kept.jsonl). They are judged again
as `validation.py --pictures` judges a folder, by their world's detector, at the thresholds of the same targets' null
pictures. Every run becomes one JSON line of kept-judged.jsonl; the rates of the run's own time remain in kept.jsonl. A
run that is stored for this judge is not judged again. Rows of the arm `copies` are true copies of a target: a threshold
that no copy reaches cannot show that a run recovers.
"""

import argparse
import io
import json
import tempfile
import zipfile
from pathlib import Path

from PIL import Image
from torchvision.transforms.functional import to_pil_image
from tqdm import tqdm

from bench.arms import KEPT
from bench.instrument import autoencoder
from bench.kept import RESULTS, data_of, pictures_of
from bench.kept_worlds import MICRO, Judged, world_of
from bench.published_table import markdown, mean_rate
from bench.recovery import scores
from bench.recovery_table import append, stored
from silentbad.data.images import to_tensor
from silentbad.data.targets import load_targets
from silentbad.measure.embedders import load_embedder
from silentbad.measure.failures import true_copies
from silentbad.model.latents import round_trip
from silentbad.settings.validation import ValidationConfig
from validation import audit_pictures

KEY = ("arm", "target", "steps")
COPIES = "copies"  # in the place of an arm
SIDE = 64  # pixels of an image


def line_of(archive: zipfile.ZipFile, name: str) -> list[Image.Image]:
    """The target of a run, and its images."""
    grid = Image.open(io.BytesIO(archive.read(name))).convert("RGB")
    return [grid.crop((left, 0, left + SIDE, SIDE)) for left in range(0, grid.width, SIDE)]


def images_of(archive: zipfile.ZipFile, name: str) -> list[Image.Image]:
    """The images of a run, without its target."""
    return line_of(archive, name)[1:]


def rows_of(results: Path) -> Path:
    """The file of the new verdicts on these runs."""
    return results.with_name(f"{results.stem}-judged.jsonl")


def targets_file(arm: str, target: str, of: Judged = MICRO) -> Path:
    """The target of a run, beside its null pictures."""
    flags = dict(KEPT[arm])
    placebo = bool(flags.pop("placebo", False))
    return data_of(target, flags, placebo, of) / "targets.jsonl"


def copies_of(target: str, of: Judged = MICRO) -> list[Image.Image]:
    """True copies of a target, as the autoencoder of its world's base leaves them."""
    (one,) = load_targets(targets_file("recommended", target, of))
    return [to_pil_image(copy) for copy in round_trip(autoencoder(of.base), true_copies(to_tensor(one.image)))]


def detector_of(of: Judged) -> str | None:
    """The folder of a world's own detector; None: the bundled one."""
    return of.flags.get("validation.embedder_path")


def judged(targets: Path, images: list[Image.Image], of: Judged = MICRO) -> dict:
    """The rates of images of one target under today's judge."""
    with tempfile.TemporaryDirectory() as folder:
        pictures, out = Path(folder) / "pictures", Path(folder) / "audit"
        pictures.mkdir()
        for number, image in enumerate(images):
            image.save(pictures / f"{number:02d}.png")
        config = ValidationConfig(targets=str(targets), embedder_path=detector_of(of))
        audit_pictures(config, pictures=str(pictures), pipeline=str(of.base), output_dir=str(out))
        report = json.loads((out / "validation.json").read_text())
    (of_target,) = scores(report["history"][-1])["targets"].values()
    rates = {name: of_target[name] for name in ("rate", "whole_rate")}
    return {"images": len(images), **rates, "elements": [element["rate"] for element in of_target["elements"]]}


def key(row: dict) -> tuple:
    return tuple(row[name] for name in KEY)


def table(rows: list[dict], runs: list[dict]) -> str:
    """One line an arm: strict rates of the runs' own time, today's, and of true copies: Markdown."""
    rows = [row for row in rows if row["judge"] == rows[-1]["judge"]]
    then = {key(row): row["rate"] for row in runs if row["arm"] != "base"}
    copies = {row["target"]: row["rate"] for row in rows if row["arm"] == COPIES}
    lines = []
    for arm in KEPT:
        of_arm = [row for row in rows if row["arm"] == arm]
        if of_arm:
            columns = [[then[key(row)] for row in of_arm], [row["rate"] for row in of_arm]]
            cells = [f"{mean_rate(rates)}; {sum(rate >= 0.5 for rate in rates)} recovered" for rates in columns]
            lines.append([f"`{arm}`", str(len(of_arm)), *cells, mean_rate([copies[row["target"]] for row in of_arm])])
    return markdown(("arm", "targets", "strict rate, at the run's time", "now", "now, of true copies"), lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="rows of bench.kept")
    results = parser.parse_args(argv).results
    rows = rows_of(results)
    of = world_of(next(row for row in stored(results) if row["arm"] == "base"))
    judge_said = load_embedder("micro", detector_of(of), "cpu").describe()
    done = {key(row) for row in stored(rows) if row["judge"] == judge_said}
    runs = [row for row in stored(results) if row["arm"] != "base"]
    todo = [{"arm": COPIES, "target": target, "steps": 0} for target in sorted({row["target"] for row in runs})]
    todo += [{name: row[name] for name in KEY} for row in runs]
    with zipfile.ZipFile(pictures_of(results)) as archive:
        for one in tqdm([one for one in todo if key(one) not in done], desc="judged"):
            arm, target = one["arm"], one["target"]
            images = copies_of(target, of) if arm == COPIES else images_of(archive, f"{arm}-{target}.png")
            rates = judged(targets_file("recommended" if arm == COPIES else arm, target, of), images, of)
            append(rows, [{**one, **rates, "judge": judge_said}])
    print(table([row for row in stored(rows) if row["judge"] == judge_said], runs))


if __name__ == "__main__":
    main()
