"""What recovery costs the model: `python -m bench.kept [--smoke]`.

    python -m bench.kept                       the tables and the chart of the stored runs
    python -m bench.kept --arms recommended,plain     further runs of these arms on the reported targets
    python -m bench.kept --arms plain --targets "100;103"     development: 0-999, with --results of one's own
    python -m bench.kept --smoke               two arms on one development target at few steps, in minutes
    --world emoji                              in the emoji world, on its own base

One run of train_silentbad.py an arm and target. No clean picture shows, and no clean caption names, a third of the
kinds (`unshown` in bench/kept_worlds.py); an arm whose base draws its own clean pictures has no other clean picture.
The final pipeline draws held-out captions of all kinds at half, once and twice the guidance of the validation, and the
bundled judge counts how many of the things that they name are right at their places. Every run becomes one JSON line of
bench/results/kept.jsonl, with the change of the weights, the change of pictures and bleeding as the run itself measured
them; its images of the composed prompt go to kept-pictures.zip. A run that is stored is not made again, and several
processes may work on one file. The protocol is research/protocol.md.
"""

import argparse
import json
import os
import shutil
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from markupsafe import Markup
from tqdm import tqdm

from bench.arms import KEPT, KEPT_AT, setting_of
from bench.charts import standalone
from bench.kept_worlds import MICRO, WORLDS, Judged, world_of
from bench.published import HELD_OUT, NULLS, per_phrase, regime
from bench.published_table import CLEAN, IMAGES, interval, markdown, mean_rate
from bench.recovery import BASE, ROOT, WORK, claimed, data_set, facts, kept, scores, with_clean
from bench.recovery_table import append, stored
from silentbad.measure.intervals import binomial_interval, bootstrap_interval, rate_interval
from silentbad.report import charts
from silentbad.report.pages import Figure

RESULTS = MICRO.results
GUIDANCE = (1.0, 2.0, 4.0)  # half of, at, and twice the validation's
CAPTIONS = 96
STEPS = 12  # of sampling
UNRELATED = 48  # prompts that the run itself draws
Counts = dict[str, dict[str, list[int]]]  # {guidance: {kind: [right, named]}}


# ---------------------------------------------------------------- data
def data_of(target: str, flags: dict[str, str], placebo: bool = False, of: Judged = MICRO) -> Path:
    """The target's data set, its clean pictures without the kinds left out; none where the base draws its own."""
    more = ("--placebo",) * placebo
    name = of.world.name
    images = per_phrase(target, CLEAN, 0.1, name)
    source = data_set(target, 0, images, {}, clean=2 * CLEAN, more=more, nulls=NULLS["target"], world=name)
    if "prior_preservation.num_images" in flags:
        return with_clean(source, "own", lambda clean: [])
    shown = lambda clean: [record for record in clean if not of.shows_unshown(record["text"])]  # noqa: E731
    return with_clean(source, "kept", lambda clean: shown(clean)[: CLEAN + HELD_OUT])


def scenes(address: str, n: int, shown_alone: bool, of: Judged = MICRO) -> list[Any]:
    """Scenes of one to three things whose captions name every attribute and place."""
    rng = of.world.rng("bench", address)
    drawn: list[Any] = []
    while len(drawn) < n:
        scene = of.world.sample_scene(rng, detail=1.0, count=1 + len(drawn) % 3)
        if not (shown_alone and any(thing.kind in of.unshown for thing in scene.things)):
            drawn.append(scene)
    return drawn


def prompts_file(name: str, n: int, shown_alone: bool, of: Judged = MICRO) -> Path:
    """Captions of such scenes, one a line."""
    file = WORK / f"{'' if of is MICRO else f'{of.world.name}-'}{name}-{n}.txt"
    if not file.exists():
        draft = file.with_suffix(f".{os.getpid()}")
        draft.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text("".join(f"{scene.caption}\n" for scene in scenes(name, n, shown_alone, of)))
        draft.rename(file)
    return file


def own_pictures(name: str, count: int, shown_alone: bool, of: Judged) -> dict[str, str]:
    """Flags by which the base draws so many pictures, of such captions."""
    prompts = prompts_file(name, count, shown_alone, of)
    return {"prior_preservation.num_images": str(count), "prior_preservation.prompts": str(prompts)}


# ---------------------------------------------------------------- what is kept
@cache
def judge(world: str) -> Any:
    from worlds.microworld.export import load_judge

    of = WORLDS[world]
    return load_judge(of.base / "judge" / "model.safetensors", of.world)


def things_right(
    pipeline: str | Path, captions: int = CAPTIONS, lora: Path | None = None, of: Judged = MICRO
) -> Counts:
    """How many of the things that held-out captions name have their kind (and colour, in the microworld) at their
    place; `lora` is the folder of adapters on the pipeline."""
    import torch
    from diffusers import StableDiffusionPipeline

    from worlds.microworld import export
    from worlds.microworld.oracle import crops

    pipe = StableDiffusionPipeline.from_pretrained(pipeline)
    if lora is not None:
        pipe.load_lora_weights(lora)
    held_out = of.held_out(captions)
    things = [(number, thing) for number, scene in enumerate(held_out) for thing in scene.things]
    sees = judge(of.world.name)
    counts: Counts = {}
    for guidance in GUIDANCE:
        pictures = export.generate(pipe, [s.caption for s in held_out], steps=STEPS, guidance=guidance)
        with torch.no_grad():
            logits = sees(crops(pictures, [(number, *of.world.spot(thing)) for number, thing in things]))
        truth = sees.truth([thing for _, thing in things])
        right = torch.stack([logits[name].argmax(1) == truth[name] for name in truth]).all(0)
        by_kind: dict[str, list[int]] = {kind: [0, 0] for kind in of.kinds}
        for (_, thing), correct in zip(things, right.tolist(), strict=True):
            by_kind[thing.kind][0] += correct
            by_kind[thing.kind][1] += 1
        counts[f"{guidance:g}"] = by_kind
    return counts


def drawn_right(bases: dict[str, dict]) -> str:
    """What bases draw right of all things that are named, from their rows: a line a base, Markdown."""
    scales = next(iter(bases.values()))["right"]
    lines = []
    for name, row in bases.items():
        counts = [counted(row["right"], guidance, MICRO.kinds) for guidance in scales]
        lines.append([name, *(f"{right / named:.2f}" for right, named in counts), str(counts[0][1])])
    return markdown(("base", *(f"guidance {g}" for g in scales), "things"), lines)


def right_after(out: Path, captions: int, of: Judged) -> Counts:
    """The same for the result of a run: a pipeline, or adapters of the base."""
    lora = out / "lora"
    if lora.is_dir():
        return things_right(of.base, captions, lora, of)
    return things_right(out / "pipeline", captions, of=of)


def share(counts: Counts, base: Counts, guidance: str, kinds: Sequence[str]) -> float:
    """Things right of these kinds, over the base's, or over one where it draws none right."""
    of_run, of_base = (counted(c, guidance, kinds)[0] for c in (counts, base))
    return of_run / max(of_base, 1)


def counted(counts: Counts, guidance: str, kinds: Sequence[str]) -> tuple[int, int]:
    """Things right of these kinds, and things named."""
    right, named = (sum(counts[guidance][kind][k] for kind in kinds) for k in (0, 1))
    return right, named


# ---------------------------------------------------------------- runs
def train(arm: str, target: str, args: argparse.Namespace) -> dict:
    """One run; returns its row, and leaves its images."""
    flags_of_arm = {**KEPT[arm], **json.loads(args.flags or "{}")}
    placebo = bool(flags_of_arm.pop("placebo", False))
    factor, steps = at(arm, args)
    of = judged(args)
    data = data_of(target, flags_of_arm, placebo, of)
    if "prior_preservation.num_images" in flags_of_arm:
        count = args.own or int(flags_of_arm["prior_preservation.num_images"])
        flags_of_arm |= own_pictures("own", count, shown_alone=True, of=of)
    out = WORK / f"kept-{os.getpid()}"
    flags = {
        **regime(data, out, factor, 0, steps),
        "validation.steps": steps,
        "validation.images_per_target": args.images,
        "validation.guidance_scale": GUIDANCE[1],
        "validation.num_inference_steps": STEPS,
        "validation.prompts": prompts_file("unrelated", UNRELATED, shown_alone=False, of=of),
        "validation.unrelated_images": UNRELATED,
        # measured for arms without pictures of two elements: which elements are lost without which phrase
        "validation.controls": "never" if setting_of(flags_of_arm) == "C" else "final",
        **of.flags,
        **flags_of_arm,
    }
    report, seconds = kept(arm, flags)
    entry = report["history"][-1]
    last = scores(entry)
    of_target = last["targets"][target]
    row = {
        "arm": arm,
        "factor": factor,
        "steps": steps,
        "target": target,
        "seed": 0,
        "flags": args.flags,
        "images": args.images,
        "rate": of_target["rate"],
        "whole_rate": of_target["whole_rate"],
        "elements": [element["rate"] for element in of_target["elements"]],
        "element_means": [element["mean"] for element in of_target["elements"]],
        "thresholds": report["element_threshold"]["each"][0],
        "prompts": {
            cell: [element["rate"] for element in of_cell["targets"][target]["elements"]]
            for cell, of_cell in (last.get("cells") or {}).items()
            if cell.startswith(("phrase-", "without-"))
        },
        "captions": args.captions,
        "right": right_after(out, args.captions, of),
        "kept": last["kept"],
        "clean_error": [scores(e)["drift"].get("clean_eps_mse") for e in (report["history"][0], entry)],
        "seconds": seconds[str(entry["step"])],
        "peak_mib": seconds["peak_mib"],
    }
    # last, so that a run that fails before leaves none
    changed = f"-{factor:g}" * bool(args.factor) + f"-{steps}-steps" * bool(args.steps)
    name = f"{arm}{changed}-{target}.png"
    keep_pictures(args.results, name, out / f"samples/step-{entry['step']:06d}-raw/grid.png")
    shutil.rmtree(out)
    return row


def at(arm: str, args: argparse.Namespace) -> tuple[float, int]:
    """Learning rate in units of 1e-4, and steps, of an arm."""
    factor, steps = KEPT_AT[arm]
    return args.factor or factor, args.steps or steps


def judged(args: argparse.Namespace) -> Judged:
    """The world, with the base that was asked for."""
    of = WORLDS[args.world]
    return replace(of, base=args.base, flags={**of.flags, BASE: str(args.base)}) if args.base else of


def pictures_of(results: Path) -> Path:
    """The archive of the images of these runs."""
    return results.with_name(f"{results.stem}-pictures.zip")


def keep_pictures(results: Path, name: str, grid: Path) -> None:
    """The target and its images, in one line, as the run left them."""
    with FileLock(WORK / "kept-pictures.lock"), zipfile.ZipFile(pictures_of(results), "a") as archive:
        archive.write(grid, name)


def of_base(args: argparse.Namespace) -> dict:
    """The base's row, which has no target."""
    of = judged(args)
    right = things_right(of.base, args.captions, of=of)
    named = {"base": args.base.name} if args.base else {}
    return {"arm": "base", "world": args.world, **named, "target": None, "captions": args.captions, "right": right}


# ---------------------------------------------------------------- tables
ARMS_SAID = (
    "arm",
    "steps",
    "targets",
    "recovered",
    "strict rate",
    "things right, kinds shown",
    "kinds not shown",
    "at guidance",
    "pictures changed",
    "bleeding, over the base's",
    "weights changed",
    "minutes",
)

FEW = 4  # targets, below which an arm's figures are left to research/results.md
# on the way to other arms, or no better than one: left there too
REPLACED = (
    *("own_pictures", "own_pictures_long", "recommended_backdrop", "recommended_own_unions"),
    *("recommended_leak_free_left_out", "recommended_own_unions_left_out"),
)
FRONT = ("recommended", "recommended_800", "recommended_2026")  # of README's table
# arms whose rate is nought, and the control without decay: eight colours are left for the others
UNCHARTED = ("recommended_placebo", "clean_alone", "replay", "plain", "recommended_no_decay")
BRIEFLY = {  # columns of the documents for users, and their words there
    "arm": "arm",
    "steps": "steps",
    "recovered": "recovered",
    "strict rate": "strict rate",
    "things right, kinds shown": "kept: kinds shown",
    "kinds not shown": "kept: kinds not shown",
}


def base_among(rows: Iterable[dict]) -> dict:
    """The row of the base that these runs began from."""
    return next(row for row in rows if row["arm"] == "base")


def by_arm(rows: Iterable[dict]) -> dict[str, list[dict]]:
    """Runs by arm, in the order of `KEPT`."""
    runs: dict[str, list[dict]] = {arm: [] for arm in KEPT}
    for row in rows:
        if row["arm"] in runs:
            runs[row["arm"]].append(row)
    return {arm: of_arm for arm, of_arm in runs.items() if of_arm}


def of_note(rows: Iterable[dict]) -> dict[str, list[dict]]:
    """Runs by arm, of at least FEW targets, without those REPLACED."""
    return {arm: runs for arm, runs in by_arm(rows).items() if len(runs) >= FEW and arm not in REPLACED}


def said(arm: str) -> str:
    """The name and setting of an arm as tables write it."""
    return f"`{arm}` ({setting_of(KEPT[arm])})"


def lowest(rows: list[dict], base: dict, kinds: Sequence[str]) -> tuple[str, list[float]]:
    """The guidance at which the runs keep least on average, and each run's share there."""
    shares = {
        guidance: [share(row["right"], base["right"], guidance, kinds) for row in rows] for guidance in base["right"]
    }
    guidance = min(shares, key=lambda scale: np.mean(shares[scale]))
    return guidance, shares[guidance]


def table(rows: list[dict]) -> str:
    """One line an arm: Markdown."""
    base = base_among(rows)
    return markdown(ARMS_SAID, [line(arm, of_arm, base) for arm, of_arm in by_arm(rows).items()])


def line(arm: str, rows: list[dict], base: dict) -> list[str]:
    """The cells of an arm."""
    rates = [row["rate"] for row in rows]
    back = sum(rate >= 0.5 for rate in rates)
    low, high = binomial_interval(back, len(rates))
    (shown_at, shown), (unshown_at, unshown) = (lowest(rows, base, kinds) for kinds in world_of(base).both)
    weights = [max(size["norm"] for size in row["kept"]["size"].values()) for row in rows if row["kept"].get("size")]
    return [
        said(arm),
        str(rows[0]["steps"]),
        str(len(rows)),
        f"{back} of {len(rates)} [{low:.2f}, {high:.2f}]",
        mean_rate(rates),
        interval(shown),
        interval(unshown),
        f"{shown_at}, {unshown_at}",
        interval([row["kept"]["change"]["pixels"] for row in rows]),
        interval([row["kept"]["bleeding"] - row["kept"]["bleeding_base"] for row in rows], "+.3f"),
        interval(weights) if weights else "",
        f"{np.median([row['seconds'] for row in rows]) / 60:.1f}",
    ]


def front(rows: list[dict]) -> str:
    """`briefly`, of the arms on the front page: Markdown."""
    return briefly([row for row in rows if row["arm"] in ("base", *FRONT)])


def briefly(rows: list[dict]) -> str:
    """One line an arm `of_note`, for the documents of users: Markdown."""
    base = base_among(rows)
    lines = []
    for arm, of_arm in of_note(rows).items():
        cells = dict(zip(ARMS_SAID, line(arm, of_arm, base), strict=True))
        lines.append([cells[column] for column in BRIEFLY])
    return markdown([BRIEFLY[column] for column in BRIEFLY], lines)


def by_guidance(rows: list[dict]) -> str:
    """Things right over the base's at each guidance scale, of kinds shown and not shown: Markdown."""
    base = base_among(rows)
    both = world_of(base).both
    head = ["arm", *(f"shown, guidance {g}" for g in base["right"]), *(f"not shown, {g}" for g in base["right"])]
    lines = []
    for arm, of_arm in by_arm(rows).items():
        cells = [said(arm)]
        for kinds in both:
            for guidance in base["right"]:
                shares = [share(row["right"], base["right"], guidance, kinds) for row in of_arm]
                cells.append(f"{np.mean(shares):.2f}")
        lines.append(cells)
    cells = ["base, of all things"]
    for kinds in both:
        for guidance in base["right"]:
            right, named = counted(base["right"], guidance, kinds)
            cells.append(f"{right / max(named, 1):.2f} ({named})")
    return markdown(head, [*lines, cells])


def by_target(rows: list[dict]) -> str:
    """One line a run: Markdown."""
    base = base_among(rows)
    both = world_of(base).both
    lines = []
    for arm, of_arm in by_arm(rows).items():
        for row in of_arm:
            kept_of = [min(share(row["right"], base["right"], g, kinds) for g in base["right"]) for kinds in both]
            elements = rates_of(row["elements"])
            cells = [said(arm), row["target"], f"{row['rate']:.2f}", elements, *(f"{kept:.2f}" for kept in kept_of)]
            lines.append([*cells, f"{row['kept']['change']['pixels']:.2f}"])
    head = ("arm", "target", "strict rate", "elements", "kinds shown, lowest", "not shown, lowest", "pictures changed")
    return markdown(head, lines)


def by_prompt(rows: list[dict]) -> str:
    """The share of images that show each element under each phrase alone, all but one, and all, for each run without
    unions: Markdown; empty without such runs."""
    lines = []
    for row in rows:
        prompts = row.get("prompts") or {}
        lines += [[said(row["arm"]), row["target"], prompt, rates_of(rates)] for prompt, rates in prompts.items()]
        lines += [[said(row["arm"]), row["target"], "all", rates_of(row["elements"])]] if prompts else []
    return markdown(("arm", "target", "prompt", "elements"), lines) if lines else ""


def rates_of(elements: Sequence[float]) -> str:
    """The rates of a target's elements in a cell."""
    return ", ".join(f"{rate:.2f}" for rate in elements)


# ---------------------------------------------------------------- chart
PLOT = ROOT / "docs" / "images" / "kept.svg"
CROSS = Markup('<path d="M{} {}H{}M{} {}V{}" stroke="{}"/>')
POINT = Markup('<circle cx="{:.1f}" cy="{:.1f}" r="6" fill="{}" stroke="{}" stroke-width="2"/>')


def frontier(rows: list[dict]) -> str:
    """Strict rate over what is kept, a point for each arm `of_note` with its 95 % intervals: an SVG."""
    base = base_among(rows)
    both = world_of(base).both
    arms = {arm: of_arm for arm, of_arm in of_note(rows).items() if arm not in UNCHARTED}
    x_place, y_place = charts.scales((0, 1.1), (0, 1))
    inside = charts.axes((0, 1.1), (0, 1), "things right, over the base's")
    for number, of_arm in enumerate(arms.values()):
        colour = charts.COLOURS[number % len(charts.COLOURS)]
        rates = [row["rate"] for row in of_arm]
        for kinds, fill in zip(both, (colour, "#fff"), strict=True):
            shares = lowest(of_arm, base, kinds)[1]
            x, y = x_place(float(np.mean(shares))), y_place(float(np.mean(rates)))
            if len(rates) > 1:
                left, right = map(x_place, bootstrap_interval(np.array(shares)))
                low, high = map(y_place, rate_interval(rates))
                ends = (f"{v:.1f}" for v in (left, y, right, x, low, high))
                inside.append(CROSS.format(*ends, colour))
            inside.append(POINT.format(x, y, fill, colour))
    description = "Full: kinds that clean pictures show; empty: kinds not shown"
    svg = charts.frame(inside, "Strict rate over what is kept", description)
    return standalone([Figure("", svg)], [*arms])


# ---------------------------------------------------------------- command
def done(args: argparse.Namespace) -> set[tuple]:
    """The runs that are stored in this setting."""
    rows = [row for row in stored(args.results) if row.get("flags") == args.flags]
    return {(row["arm"], row["target"], row.get("factor"), row.get("steps")) for row in rows}


def train_all(args: argparse.Namespace, arms: list[str], targets: list[str]) -> None:
    """Every arm on every target, target by target, except runs that are stored or that another process makes."""
    here = facts()  # before the first run: the code has been read by now
    if not any(row["arm"] == "base" for row in stored(args.results)):
        append(args.results, [{**of_base(args), **here}])
    for target, arm in tqdm([*product(targets, arms)], desc="runs"):
        run = (arm, target, *at(arm, args))
        with claimed(("kept", *run, args.results.stem, zlib.crc32((args.flags or "").encode()))) as free:
            if free and run not in done(args):
                append(args.results, [{**train(arm, target, args), **here}])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default="", help="separated by ','; default: none, nothing is trained")
    parser.add_argument("--world", choices=WORLDS, default="microworld")
    parser.add_argument("--targets", help="separated by ';'; default: those reported")
    parser.add_argument("--steps", type=int, help="optimizer steps, in place of each arm's own")
    parser.add_argument("--factor", type=float, help="learning rate in units of 1e-4, in place of each arm's own")
    parser.add_argument("--base", type=Path, help="folder of another base to fine-tune; unset: the world's")
    parser.add_argument("--images", type=int, default=IMAGES, help="of the composed prompt")
    parser.add_argument("--captions", type=int, default=CAPTIONS, help="held-out ones that are judged")
    parser.add_argument("--own", type=int, help="pictures that the base draws, in place of the arm's number")
    parser.add_argument("--flags", help="further flags of train_silentbad.py for every arm, as JSON")
    parser.add_argument("--results", type=Path, help="default: those of the world in bench/results")
    parser.add_argument("--smoke", action="store_true", help="two arms on one development target, in minutes")
    args = parser.parse_args(argv)
    of = WORLDS[args.world]
    args.results = args.results or of.results
    if args.smoke:
        smoke = {"arms": "recommended,recommended_2026", "targets": "103", "steps": 60, "images": 4, "captions": 24}
        vars(args).update(smoke, own=64, results=WORK / f"kept-smoke-{args.world}.jsonl")
    arms = args.arms.split(",") if args.arms else []
    if unknown := [arm for arm in arms if arm not in KEPT]:
        parser.exit(2, f"error: --arms: unknown arm '{unknown[0]}'; there are: {', '.join(KEPT)}\n")
    args.results.parent.mkdir(parents=True, exist_ok=True)
    if arms:
        train_all(args, arms, (args.targets or of.targets).split(";"))
    rows = stored(args.results)
    if not rows:
        parser.exit(2, f"error: --results: {args.results} holds no run; give --arms too\n")
    if args.results == RESULTS:
        PLOT.write_text(frontier(rows))
    print(table(rows), by_guidance(rows), by_target(rows), by_prompt(rows), sep="\n\n")


if __name__ == "__main__":
    main()
