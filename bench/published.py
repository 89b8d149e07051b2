"""The published setting: few pictures of elements among many clean ones.

    python -m bench.published                   the reported targets, each arm at its frozen rate and length
    python -m bench.published --smoke           three arms on one development target, in minutes
    python -m bench.published --targets "100;103" --arms plain --steps 600 --factors 4,8        development: 0-999

Every record is shown once an epoch, in another order. Reuses the runs of bench/recovery.py; every evaluation becomes
one JSON line of bench/results/published.jsonl, and a run already there is not made again. The endpoint is strict: an
image counts when the whole and every element pass, and a run recovers from the first step on after which half of the
images count at every evaluation. Several processes may work on one results file. The protocol is the last section of
research/protocol.md.
"""

import argparse
import json
import os
import shutil
import zlib
from importlib import import_module
from pathlib import Path

from tqdm import tqdm

from bench.arms import HALVES, LATER, PUBLISHED, PUBLISHED_AT, flags_of
from bench.published_table import CLEAN, IMAGES, MAIN, table, tables
from bench.recovery import BASES, DRAWN_BY, WORK, claimed, common, data_set, facts, kept, own_base, scores, with_clean
from bench.recovery_table import append, stored

RESULTS = Path(__file__).parent / "results" / "published.jsonl"
HELD_OUT = 32  # clean pictures that measure drift and are not trained on
TARGETS = ";".join(map(str, range(MAIN, MAIN + 24)))
OWN = (8.0, 600, 50)  # rate, steps and steps between evaluations of an arm that is not reported
RUN = ("arm", "factor", "steps", "ratio", "targets", "seed")  # the fields that identify a run
Run = tuple[str, float, int, float, str, int]
SETTING = (
    *("clean", "images", "first_images", "settled", "guidance", "flags"),
    *("placebo", "nulls", "words", "unique_phrases", "world", "own_alone"),
)
# The values of rows without these fields.
BEFORE = {
    "base": None,
    "nulls": "target",
    "words": "shared",
    "first_images": 0,
    "settled": 0,
    "unique_phrases": False,
    "world": "microworld",
    "own_alone": False,
}
# arguments of the world's `make`, by --unique-phrases
NAMING = {False: (), "each": ("--unique_phrases",), "target": ("--name_targets",)}
NULLS = {"target": 100, "element": None}  # of each harder kind: 100 for a target, or for each element it changes


def per_phrase(targets: str, clean: int, ratio: float, world: str = "microworld") -> int:
    """Pictures of each element, so that elements are `ratio` of the records beside `clean` clean ones."""
    target_scene = import_module(f"worlds.{world}.make").target_scene
    elements = sum(len(target_scene(name).things) + 1 for name in targets.split(","))
    return max(1, round(clean * ratio / (1 - ratio) / elements))


def regime(data: Path, out: Path, factor: float, seed: int, steps: int) -> dict:
    """Flags of every run in this setting: each record once an epoch, some clean ones held out."""
    alike = {"held_out_clean": HELD_OUT, "memory.sampler.clean_ratio": "null"}
    return {**common(data, out, factor, seed, steps), **alike}


def train(run: Run, args: argparse.Namespace) -> list[dict]:
    """One run; returns its evaluations, one row per step and target."""
    arm, factor, steps, ratio, targets, seed = run
    flags_of_arm, images = (
        {**flags_of(arm), **json.loads(args.flags or "{}")},
        per_phrase(targets, args.clean, ratio, args.world),
    )
    more = ("--placebo",) * args.placebo + ("--other_words",) * (args.words == "other")
    more += NAMING[args.unique_phrases]
    clean, nulls = args.clean + HELD_OUT, NULLS[args.nulls]
    data = data_set(targets, seed, images, flags_of_arm, clean=clean, more=more, nulls=nulls, world=args.world)
    if args.own_alone:
        data = with_clean(data, "own", lambda clean: [])
        from bench.kept import judged, own_pictures  # it imports this module

        count = int(flags_of_arm["prior_preservation.num_images"]) * len(targets.split(","))
        flags_of_arm |= own_pictures("own-any", count, shown_alone=False, of=judged(args))
    out = WORK / f"published-{os.getpid()}"
    flags = {
        **regime(data, out, factor, seed, steps),
        "validation.steps": every(arm, args),
        "validation.images_per_target": args.images,
        "validation.first_images": args.first_images,
        "validation.settled_after": args.settled,
        "validation.guidance_scale": args.guidance,
        **own_base(args.world),
        **({"pretrained_model_name_or_path": args.base} if args.base else {}),
        **flags_of_arm,
    }
    report, seconds = kept(arm, flags)
    right = things_right_after(out, args)
    shutil.rmtree(out)
    key = dict(zip(RUN, run, strict=True))
    key |= setting(args) | {"every": every(arm, args), "images_per_phrase": images}
    return [
        {
            **key,
            "step": entry["step"],
            "target": name,
            **{k: s.get(k) for k in ("rate", "whole_rate", "mean", "max")},
            "elements": [e["rate"] for e in s["elements"]],
            "element_means": [e["mean"] for e in s["elements"]],
            "drift": scores(entry)["drift"].get("clean_eps_mse"),
            "seconds": seconds[str(entry["step"])],
            "peak_mib": seconds["peak_mib"],
            **(right if entry is report["history"][-1] else {}),
        }
        for entry in report["history"]
        for name, s in scores(entry)["targets"].items()
    ]


def things_right_after(out: Path, args: argparse.Namespace) -> dict:
    """What the result of a run draws right of things that held-out captions name, as bench.kept counts it."""
    if not args.captions:
        return {}
    from bench.kept import judged, right_after  # it imports this module

    return {"captions": args.captions, "right": right_after(out, args.captions, judged(args))}


def setting(args: argparse.Namespace) -> dict:
    """The settings that comparable runs share beside RUN; another base is given by the name of its folder."""
    shared = {name: getattr(args, name) for name in SETTING}
    return shared | ({"base": args.base.name} if args.base else {})


def every(arm: str, args: argparse.Namespace) -> int:
    """Steps between two evaluations."""
    return args.every or PUBLISHED_AT.get(arm, OWN)[2]


# ------------------------------------------------------------------------------------------------- command
def done(args: argparse.Namespace) -> set[tuple]:
    """The runs that are stored in this setting."""
    asked = BEFORE | setting(args)
    rows = (row for row in stored(args.results) if {name: (BEFORE | row).get(name) for name in asked} == asked)
    return {tuple(row[name] for name in RUN) for row in rows}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default=",".join(arm for arm in PUBLISHED_AT if arm not in LATER))
    parser.add_argument("--targets", default=TARGETS, help="';' between runs, ',' between the targets of one run")
    parser.add_argument("--ratios", default="0.1", help="elements' share of the records: 0.05,0.1,0.15,0.33,0.67")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--factors", help="learning rates in units of 1e-4, in place of each arm's own")
    parser.add_argument("--clean", type=int, default=CLEAN, help="clean pictures that are trained on")
    parser.add_argument("--steps", type=int, help="optimizer steps, in place of each arm's own")
    parser.add_argument("--every", type=int, help="steps between evaluations, in place of each arm's own")
    parser.add_argument("--images", type=int, default=IMAGES, help="images per target and evaluation")
    parser.add_argument(
        "--first-images", type=int, default=0, help="of these, until one counts, then all; 0: always all"
    )
    parser.add_argument("--settled", type=int, default=0, help="end a run once it recovers at so many evaluations")
    parser.add_argument("--nulls", choices=NULLS, default="element", help="100 of each harder kind for each of these")
    parser.add_argument(
        "--own-alone",
        action="store_true",
        help="no clean picture but those that the base draws, the arm's number for each target",
    )
    parser.add_argument("--words", choices=("shared", "other"), default="shared", help="of clean and element captions")
    parser.add_argument(
        "--unique-phrases",
        nargs="?",
        # in older rows "names" are of targets, and True stands for digits
        const="each",
        choices=[*filter(None, NAMING)],
        default=False,
        help="no phrase is of several targets: a name for each that was, or in all phrases one of the target",
    )
    parser.add_argument("--guidance", type=float, default=2.0, help="guidance scale of the evaluations")
    parser.add_argument(
        "--captions", type=int, default=0, help="held-out ones whose things are counted at the end; 0: none"
    )
    parser.add_argument("--flags", help="further flags of train_silentbad.py for every arm, as JSON")
    parser.add_argument("--base", type=Path, help="folder of another base to fine-tune; unset: the world's")
    parser.add_argument("--world", choices=DRAWN_BY, default="microworld", help="of targets and data")
    parser.add_argument("--placebo", action="store_true", help="data that shows no exact element, as a control")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--smoke", action="store_true", help="three arms on one development target, in minutes")
    args = parser.parse_args(argv)
    if args.smoke:
        smoke = {"arms": "plain,replay,recommended", "targets": "103", "steps": 100, "every": 50, "images": 8}
        vars(args).update(smoke, results=RESULTS.with_name("published-smoke.jsonl"))
    if unknown := [arm for arm in args.arms.split(",") if arm not in {*PUBLISHED, *HALVES}]:
        parser.exit(2, f"error: --arms: unknown arm '{unknown[0]}'; there are: {', '.join([*PUBLISHED, *HALVES])}\n")
    args.base = args.base or BASES.get(args.world)
    here = facts()  # before the first run: the code has been read by now
    for run in tqdm(runs(args), desc="runs"):
        data = f"{args.words}{args.unique_phrases}"
        also = zlib.crc32(f"{args.flags or ''}{args.base or ''}{data}{args.world}".encode())
        with claimed(("published", *run, int(args.placebo), also)) as free:
            if free and run not in done(args):
                append(args.results, [{**row, **here} for row in train(run, args)])
    rows = stored(args.results)
    print(tables(rows) or table(rows))


def runs(args: argparse.Namespace) -> list[Run]:
    """All that is asked for, the arms in turn on each target."""
    lengths = {arm: PUBLISHED_AT.get(arm, OWN) for arm in args.arms.split(",")}
    return [
        (arm, float(factor), args.steps or steps, float(ratio), targets, int(seed))
        for seed in args.seeds.split(",")
        for ratio in args.ratios.split(",")
        for targets in args.targets.split(";")
        for arm, (rate, steps, _) in lengths.items()
        for factor in (args.factors.split(",") if args.factors else [rate])
    ]


if __name__ == "__main__":
    main()
