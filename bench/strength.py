"""Is a picture easier to bring back from a stronger base, and one of fewer elements?

    python -m worlds.microworld.build --work runs/strength --stage unet --vae assets/micro-sd/vae --things 4 \
        --keep 25,50,75 --unet_steps 3800       the bases: 50 minutes on one core
    python -m bench.strength                    measures them, and runs `recommended` on each

The bases are one training of the UNet after 25, 50, 75 and 100 % of its steps, on scenes of up to four things, so that
targets may have five elements. Text encoder, autoencoder, copy detector and data are the same for all. Rows are those
of bench/published.py with the base's name, in bench/results/strength.jsonl; what each base draws is measured into
strength-bases.json. A run that is stored is not made again.
"""

import argparse
import itertools
import json
from pathlib import Path

from tqdm import tqdm

from bench import published
from bench.published_table import figures, interval, markdown, runs_of
from bench.recovery import words
from bench.recovery_table import stored

RESULTS = Path(__file__).parent / "results" / "strength.jsonl"
MEASURED = RESULTS.with_name("strength-bases.json")
WORK = Path(__file__).parents[1] / "runs" / "strength"
PERCENT = (100, 25, 50, 75)
TARGETS = ";".join(f"{2200 + i}k{2 + i % 4}" for i in range(12))  # three of each number of elements
HEAD = ("targets", "recovered", "strict rate", "whole", "elements", "weakest element", "drift")


def arm(target: str) -> str:
    """`recommended`; of a picture of two elements no union may be shown, and what is left is another arm's name."""
    return "recommended_leak_free" if target.endswith("k2") else "recommended"


def base(percent: int) -> Path:
    """The folder of the base after this share of its training."""
    return WORK / f"pipeline-{percent}"


def what_they_draw(bases: list[Path]) -> dict[str, dict]:
    """{name of a base: its share of things with the right kind, colour and both}, stored where measured before."""
    from diffusers import StableDiffusionPipeline

    from worlds.microworld.build import ASSETS
    from worlds.microworld.export import load_judge, measure

    shares = json.loads(MEASURED.read_text()) if MEASURED.is_file() else {}
    judge = load_judge(ASSETS / "judge" / "model.safetensors")
    for folder in tqdm([b for b in bases if b.name not in shares], desc="bases"):
        shares[folder.name] = measure(StableDiffusionPipeline.from_pretrained(folder), judge)["generated"]
        MEASURED.write_text(json.dumps(shares, indent=1) + "\n")
    return shares


def cells(rows: list[dict]) -> list[str]:
    """Under HEAD, of the rows of one arm: runs at their last step, one a target."""
    runs: list[dict] = [figures(of_run) for of_run in runs_of(rows).values()]
    reached = sum(run["strict"] is not None for run in runs)
    rates = [interval([run[key] for run in runs]) for key in ("strict rate", "whole rate", "elements", "weakest")]
    return [str(len(runs)), f"{reached} of {len(runs)}", *rates, f"{sum(run['drift'] for run in runs) / len(runs):.4f}"]


def shared(rows: list[dict]) -> list[dict]:
    """Those of the targets that every base ran."""
    ran = [{row["target"] for row in rows if row["base"] == base(percent).name} for percent in PERCENT]
    by_all = set.intersection(*ran)
    return [row for row in rows if row["target"] in by_all]


def by_strength(rows: list[dict], drawn: dict[str, dict]) -> str:
    """A line a base, over the targets that every base ran: Markdown."""
    rows, lines = shared(rows), []
    for percent in sorted(PERCENT):
        of_base = [row for row in rows if row["base"] == base(percent).name]
        right = f"{drawn[base(percent).name]['both']:.2f}"
        lines += [[f"{percent} %", right, *cells(of_base)]] if of_base else []
    return markdown(("training", "kind and colour right", *HEAD), lines)


def by_elements(rows: list[dict]) -> str:
    """A line a number of elements, on the whole training: Markdown."""
    full = [row for row in rows if row["base"] == base(100).name]
    counts = sorted({len(row["elements"]) for row in full})
    return markdown(("k", *HEAD), [[str(k), *cells([r for r in full if len(r["elements"]) == k])] for k in counts])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=TARGETS, help="separated by ';'")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    bases = [base(percent) for percent in PERCENT]
    if missing := [folder for folder in bases if not folder.is_dir()]:
        parser.exit(2, f"error: no base {missing[0]}; train the bases first, --help has the command\n")
    what_they_draw(bases)
    for target, folder in itertools.product(args.targets.split(";"), bases):  # a target's four together
        asked = {"arms": arm(target), "targets": target, "base": folder, "nulls": "target", "results": args.results}
        try:
            published.main(words(asked))
        except SystemExit as stopped:
            if "is a near copy of target" not in str(stopped):
                raise
            print(f"{target}: left out, since a clean picture is a near copy of it")
    rows = stored(args.results)
    print(by_strength(rows, json.loads(MEASURED.read_text())), by_elements(rows), sep="\n\n")


if __name__ == "__main__":
    main()
