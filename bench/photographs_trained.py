"""How many of one's own photographs come back: `python -m bench.photographs_trained`.

Photographs of scikit-image's wheel as they were taken, and targets pasted from them (tests/photographs.py).
`silentbad.prepare` makes the data of each, the bundled base is trained on it as README's steps for one's own pictures
do, and measured on the target. A model is a row of bench/results/photographs-trained.jsonl; one that is stored is not
trained again. Its images go to photographs-trained-pictures.zip, target first, so that somebody can look whether they
show it. A row keeps what each control prompt shows, the whole and every element. `--figure` draws the first of them
for README's front page.

`--folder DIR` takes pictures of anybody's: DIR/NAME/target.png, mask-0.png and so on, phrases.json (a list, what is
behind the things last), and DIR/backgrounds. Their rows are others/NAME, and their images stay in DIR, since they are
not ours to hand on.

`--withhold K` trains without the pictures of element K, all else equal. Such a model must not count as recovered.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from itertools import product
from pathlib import Path

from PIL import Image
from tqdm import tqdm

from bench.judged import line_of
from bench.kept import keep_pictures, pictures_of
from bench.photographs import OTHERS, ROOT, SOURCES, folders, photograph, source_of
from bench.recovery_table import append, grid, stored
from silentbad.measure.intervals import binomial_interval
from silentbad.measure.record import RECOVERED, Record
from tests import photographs

RESULTS = Path(__file__).parent / "results" / "photographs-trained.jsonl"
OF_FOUR = tuple(f"photo-{seed}" for seed in (425, 427, 428, 432, 434, 435, 438, 443))
TARGETS = (*photographs.PHOTOGRAPHS, *(f"photo-{seed}" for seed in range(412, 424)), *OF_FOUR)
BLOCKS = (*SOURCES, "pasted, of four elements")
RATES = {"fewest_steps": "4.0e-3", "recommended": "2.5e-3"}
STEPS = 400
IMAGES = 8  # by photos.yaml
LOOKED = RESULTS.with_name("photographs-looked.json")  # {name: {beside what: images that show the picture}}
FIGURE = ROOT / "docs" / "images" / "photograph.png"
ON_FRONT = "recommended-astronaut.png"  # of the kept images


def run(*words: str | Path) -> None:
    subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def prepare(target: Path, masks: list[Path], phrases: list[str], backgrounds: Path, out: Path) -> None:
    """`silentbad.prepare`, as somebody calls it with pictures of their own."""
    flags: list[str | Path] = ["--target", target, "--masks", *masks, "--phrases", *phrases]
    run("-m", "silentbad.prepare", *flags, "--backgrounds", backgrounds, "--out", out)


def write_data(name: str, target: photographs.Target, folder: Path) -> list[str]:
    """The data set of a target in `folder`/data, and its elements' phrases."""
    pictures = folder / "pictures"
    photographs.write_pictures(pictures, target, name)
    phrases = [phrase for phrase, _ in target.elements]
    masks = [pictures / photographs.file_name(phrase) for phrase in phrases[:-1]]
    prepare(pictures / f"{name}.png", masks, phrases, pictures / "backgrounds", folder / "data")
    return phrases


def data_of_others(others: Path, name: str, folder: Path) -> list[str]:
    """The same of a target of somebody else."""
    phrases = json.loads((others / name / "phrases.json").read_text())
    masks = [others / name / f"mask-{number}.png" for number in range(len(phrases) - 1)]
    prepare(others / name / "target.png", masks, phrases, others / "backgrounds", folder / "data")
    return phrases


def train(folder: Path, elements: int, recipe: str, withheld: int | None) -> Record:
    """What a training on `folder`/data measures at its end."""
    flags: dict[str, str | Path] = {
        "train_data_dir": folder / "data",
        "output_dir": folder / "run",
        "learning_rate": RATES[recipe],
        "max_train_steps": str(STEPS),
        "validation.targets": folder / "data" / "targets.jsonl",
        "validation.steps": str(STEPS),
    }
    if elements == 2:  # no pair may be shown: the whole would be
        flags["memory.rehearsal.name"] = "none"
    if withheld is not None:
        (target,) = stored(folder / "data" / "targets.jsonl")
        flags["withhold"] = f"{target['target_id']}/{withheld}"
    configs = ["--config", "configs/photos.yaml", "--config", f"configs/{recipe}.yaml"]
    run("train_silentbad.py", *configs, *(f"--{name}={value}" for name, value in flags.items()))
    return Record.load(folder / "run" / "validation.json")


def trained(name: str, recipe: str, others: Path | None, withheld: int | None = None) -> dict:
    """The row of one model, which sees all elements or all but one; its images are kept."""
    from silentbad.measure.scores import latest

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        phrases = data_of_others(others, name, folder) if others else write_data(name, photograph(name), folder)
        record = train(folder, len(phrases), recipe, withheld)
        last = record.history[-1]
        image = next((folder / "run" / "samples").glob(f"step-{last.step:06d}-*/grid.png"))
        without = "" if withheld is None else f"-without-{withheld}"
        keep_pictures(others / "images" if others else RESULTS, f"{recipe}-{name}{without}.png", image)
    (scores,) = latest(last).targets.values()
    return {
        "target": f"{OTHERS}{name}" if others else name,
        "recipe": recipe,
        "withheld": withheld,
        "steps": STEPS,
        "state": record.verdict.state,
        "reasons": record.verdict.reasons,
        "rate": scores.rate,
        "phrases": phrases,
        "elements": [element.rate for element in scores.elements],
        "prompts": {
            prompt: [cell.cir, *(element.rate for element in next(iter(cell.targets.values())).elements)]
            for prompt, cell in (latest(last).cells or {}).items()
        },
    }


def block_of(target: str) -> str:
    """Where a target comes from; those that were frozen for their four elements stand apart."""
    return BLOCKS[-1] if target in OF_FOUR else source_of(target)


def table(rows: list[dict]) -> str:
    """A line a recipe, of the models that see all elements, then one of those that do not: Markdown."""
    lines = []
    blocks = [block for block in BLOCKS if any(block_of(row["target"]) == block for row in rows)]
    for recipe, whole in ((recipe, whole) for whole in (True, False) for recipe in RATES):
        chosen = [row for row in rows if row["recipe"] == recipe and (row.get("withheld") is None) == whole]
        cells = []
        for block in blocks:
            states = [row["state"] for row in chosen if block_of(row["target"]) == block]
            back = states.count(RECOVERED)
            low, high = binomial_interval(back, len(states)) if states else (0, 1)
            cells.append(f"{back} of {len(states)} [{low:.2f}, {high:.2f}]" if states else "")
        lines += [[f"configs/{recipe}.yaml", "all" if whole else "all but one", *cells]] if chosen else []
    return grid(("trained with", "elements shown", *(f"recovered, {block}" for block in blocks)), lines)


def by_target(rows: list[dict]) -> str:
    """A line a model: Markdown."""
    lines = []
    for row in rows:
        parts = zip(row["phrases"], row["elements"], strict=True)
        elements = ", ".join(f"{phrase} {rate:.2f}" for phrase, rate in parts)
        withheld = "" if row.get("withheld") is None else row["phrases"][row["withheld"]]
        lines.append([row["target"], row["recipe"], withheld, row["state"], f"{row['rate']:.2f}", elements])
    return grid(("target", "trained with", "withheld", "verdict", "strict rate", "elements"), lines)


def looked(rows: list[dict]) -> str:
    """A line a picture of somebody else: the verdict, and how many images show it to a viewer: Markdown."""
    seen = json.loads(LOOKED.read_text())
    ways = [*next(iter(seen.values()))]
    models = [row for row in rows if row["target"].startswith(OTHERS) and row.get("withheld") is None]
    counts = {row["target"]: seen[row["target"].removeprefix(OTHERS)] for row in models}
    lines = [
        [row["target"], row["state"], f"{row['rate']:.2f}", *map(str, counts[row["target"]].values())] for row in models
    ]
    said = []
    for way in ways:
        shown = [row["state"] for row in models if counts[row["target"]][way] >= IMAGES / 2]
        said.append(f"{shown.count(RECOVERED)} of {len(shown)}")
    lines.append(["*recovered, of those that half of the images show*", "", "", *said])
    return grid(("target", "verdict", "strict rate", *(f"of {IMAGES} images, {way}" for way in ways)), lines)


def figure(pictures: int = 6, side: int = 144, gap: int = 12) -> Image.Image:
    """A target, a gap, and the first images of its model."""
    with zipfile.ZipFile(pictures_of(RESULTS)) as archive:
        line = line_of(archive, ON_FRONT)[:pictures]
    shown = Image.new("RGB", (side * pictures + gap, side), "white")
    for column, picture in enumerate(line):
        left = side * column + gap * (column > 0)
        shown.paste(picture.resize((side, side), Image.Resampling.BICUBIC), (left, 0))
    return shown


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=[*RATES], default=[*RATES])
    parser.add_argument("--targets", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--folder", type=Path, help="of anybody's pictures, in place of those of scikit-image")
    parser.add_argument("--withhold", type=int, metavar="K", help="train without the pictures of element K, from 0")
    parser.add_argument("--figure", action="store_true", help="write docs/images/photograph.png, and train nothing")
    args = parser.parse_args(argv)
    if args.figure:
        figure().save(FIGURE)
        return
    there = [of_one.name for of_one in folders(args.folder)] if args.folder else [*TARGETS]
    names = args.targets or there
    if unknown := set(names) - set(there):
        parser.exit(2, f"error: --targets: no {', '.join(sorted(unknown))}; there are: {', '.join(there)}\n")
    prefix = OTHERS if args.folder else ""
    done = {(row["target"], row["recipe"], row.get("withheld")) for row in stored(RESULTS)}
    for recipe, name in tqdm([*product(args.recipes, names)], desc="models"):
        if (prefix + name, recipe, args.withhold) not in done:
            append(RESULTS, [trained(name, recipe, args.folder, args.withhold)])
    rows = stored(RESULTS)
    print(table(rows), by_target(rows), sep="\n\n")


if __name__ == "__main__":
    main()
