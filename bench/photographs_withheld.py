"""Verdicts on models that never saw one element: `python -m bench.photographs_withheld [--targets N] [--first SEED]`.

Each target is pasted from the photographs of scikit-image's wheel (tests/photographs.py), and `silentbad.prepare` makes
its data, as README's example of one's own pictures does. Then the pictures of one element are taken away (each in turn:
the things and the backdrop), the bundled base is trained on the rest with photos.yaml and fewest_steps.yaml, and
measured on the whole target. Such a model must not count as recovered. Of every fourth target one more model sees all.
A model is a row of bench/results/photographs-withheld.jsonl; those that are stored are not trained again.
"""

import argparse
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from tqdm import tqdm

from bench.recovery_table import append, grid, stored
from silentbad.measure.intervals import binomial_interval
from silentbad.measure.record import IN_PART, NOT_RECOVERED, RECOVERED, UNDECIDED, Record
from tests import photographs

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "photographs-withheld.jsonl"
FIRST = 324
TARGETS = 20
WHOLE_EVERY = 4  # of so many targets one is trained on all its elements too
RECIPE = "fewest_steps"  # of configs/
NOTHING = "nothing"  # is withheld from that model
STATES = (RECOVERED, UNDECIDED, NOT_RECOVERED)


def run(*words: str | Path) -> None:
    subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def write_data(name: str, target: photographs.Target, folder: Path) -> list[str]:
    """The data set of a target, and its elements' phrases."""
    pictures = folder / "pictures"
    photographs.write_pictures(pictures, target, name)
    phrases = [phrase for phrase, _ in target.elements]
    masks = [pictures / photographs.file_name(phrase) for phrase in phrases[:-1]]
    prepare(pictures / f"{name}.png", masks, phrases, pictures / "backgrounds", folder / "data")
    return phrases


def prepare(target: Path, masks: list[Path], phrases: list[str], backgrounds: Path, out: Path) -> None:
    """`silentbad.prepare`, as somebody calls it with pictures of their own."""
    flags: list[str | Path] = ["--target", target, "--masks", *masks, "--phrases", *phrases]
    run("-m", "silentbad.prepare", *flags, "--backgrounds", backgrounds, "--out", out)


def train(data: Path, out: Path, steps: int, elements: int, recipe: str = RECIPE, **more: str) -> Record:
    """What a training on pictures of so many elements measures at its end; `more` flags."""
    # of two elements no pair may be shown: the whole would be
    rehearsal = {} if elements > 2 else {"memory.rehearsal.name": "none"}
    flags = {
        "train_data_dir": data,
        "output_dir": out,
        "max_train_steps": steps,
        "validation.targets": data / "targets.jsonl",
        "validation.steps": steps,
        **rehearsal,
        **more,
    }
    configs = ["--config", "configs/photos.yaml", "--config", f"configs/{recipe}.yaml"]
    run("train_silentbad.py", *configs, *(f"--{name}={value}" for name, value in flags.items()))
    return Record.load(out / "validation.json")


def measured(seed: int, withheld: int | None, steps: int) -> dict:
    """The row of one model."""
    from silentbad.measure.scores import latest

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        phrases = write_data(f"photo-{seed}", photographs.make_target(seed), folder)
        left_out = {} if withheld is None else {"withhold": f"photo-{seed}/{withheld}"}
        record = train(folder / "data", folder / "run", steps, len(phrases) - len(left_out), **left_out)
    verdict = record.verdict
    (scores,) = latest(record.history[-1]).targets.values()
    return {
        "seed": seed,
        "withheld": NOTHING if withheld is None else phrases[withheld],
        "backdrop": withheld == len(phrases) - 1,
        "steps": steps,
        "state": NOT_RECOVERED if verdict.state == IN_PART else verdict.state,
        "reasons": verdict.reasons,
        "above": verdict.images_above,
        "images": verdict.images,
        "mean": scores.mean,
        "elements": [element.rate for element in scores.elements],
    }


def todo(first: int, targets: int, whole_alone: bool) -> list[tuple[int, int | None]]:
    """(seed, place of the element that is withheld) of each model; None: none is."""
    models: list[tuple[int, int | None]] = []
    for k in range(targets):
        seed = first + k
        if not whole_alone:
            places = len(photographs.make_target(seed).elements)
            models.append((seed, k % places))
        if k % WHOLE_EVERY == 0:
            models.append((seed, None))
    return models


def table(rows: list[dict]) -> str:
    """Verdicts by what a model did not see."""
    kinds: dict[str, list[dict]] = defaultdict(list)
    for row in rows:
        if row["withheld"] == NOTHING:
            kinds[f"all elements, {row['steps']} steps"].append(row)
        else:
            kinds["all but the backdrop" if row["backdrop"] else "all but a thing"].append(row)
            kinds["all but one element"].append(row)
    lines = []
    whole = sorted(kind for kind in kinds if kind.startswith("all elements"))
    for kind in ("all but a thing", "all but the backdrop", "all but one element", *whole):
        models = kinds[kind]
        counts = [sum(row["state"] == state for row in models) for state in STATES]
        low, high = binomial_interval(counts[0], len(models))
        above, images = (sum(row[key] for row in models) for key in ("above", "images"))
        lines.append([kind, *map(str, counts), f"{low:.2f} to {high:.2f}", f"{above} of {images}"])
    return grid(("trained on", *STATES, "recovered, 95 %", "images that pass strictly"), lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=FIRST, help="seed of the first target")
    parser.add_argument("--targets", type=int, default=TARGETS)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--whole_alone", action="store_true", help="only the models that see all elements")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    stored_models = {(row["seed"], row["withheld"] == NOTHING, row["steps"]) for row in stored(args.results)}
    models = todo(args.first, args.targets, args.whole_alone)
    models = [model for model in models if (model[0], model[1] is None, args.steps) not in stored_models]
    for seed, withheld in tqdm(models, desc="models"):
        append(args.results, [measured(seed, withheld, args.steps)])
    print(table(stored(args.results)))


if __name__ == "__main__":
    main()
