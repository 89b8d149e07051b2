"""Many targets in one model, at once and one after the other: `python -m bench.many`.

    python -m bench.many                                   the tables and the chart of the stored runs
    python -m bench.many --targets 102,103,104,106         development: 0-999, --results runs/sequence-dev.jsonl

The second runs them in sequence. Every stage is a run of an arm of `SEQUENCES` on one target, as a target alone has it
(bench/kept.py), from the pipeline that the stage before wrote. At its end it is measured on all targets, and on the
things of held-out captions that are right. One JSON line a stage and target is added to bench/results/sequence.jsonl; a
sequence that is stored is not run again. What is learnt at once are rows of `bench.published --results
bench/results/many.jsonl`. Protocol: research/protocol.md.
"""

import argparse
import shutil
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import numpy as np
from markupsafe import Markup
from tqdm import tqdm

from bench.arms import KEPT, KEPT_AT, said
from bench.charts import standalone
from bench.kept import base_among, data_of, lowest, prompts_file, things_right
from bench.kept_worlds import MICRO
from bench.published import HELD_OUT, NULLS, regime
from bench.published_table import IMAGES, interval, markdown, mean_rate
from bench.recovery import BASE, ROOT, WORK, data_set, facts, kept, scores
from bench.recovery_table import Read, append, stored
from silentbad.data.phrases import shared_phrases
from silentbad.measure.intervals import rate_interval
from silentbad.report import charts
from silentbad.report.pages import Figure
from worlds.microworld.make import target_scene
from worlds.microworld.render import backdrop_mask
from worlds.microworld.world import MICROWORLD

RESULTS = Path(__file__).parent / "results" / "sequence.jsonl"
# A stage's arm of bench.kept, and how many of the 240 captions that it draws by the pipeline before it are the composed
# prompt of each earlier target
SEQUENCES = {
    "recommended_2026": ("recommended_2026", 0),
    "recommended": ("recommended", 0),
    "rehearsed": ("recommended", 48),
}
CONTROL = "recommended_long"  # with phrases as they come
CHANGES = {
    "recommended_long_context": "captions with more of the target's phrases",
    "decoder_long": "the decoder alone, 1.5 times the steps",
    "unions_long": "three of four element pictures are unions",
    "unions_keeping": "three of four, with what keeps the model, two thirds of the steps",
}
CHARTED: dict[tuple[str, bool | str], str] = {  # (arm, whose phrases), and what the chart calls them
    ("recommended_long", False): "one union in four",
    ("unions_long", False): "more unions",
    ("decoder_unions_long", False): "more unions, the decoder alone",
    ("unions_keeping", False): "more unions, the model kept",
    ("unions_keeping_names", "target"): "the same, with learnt names",
}
LEARNT = {"unions_keeping_names": "unions_keeping"}  # arms that learn words, and what they are without
PLOT = ROOT / "docs" / "images" / "many.svg"
BAR = Markup('<path d="M{:.1f} {:.1f}V{:.1f}" stroke="{}"/>')
MARKS = {  # the chart's, of at most so many targets at once
    8: Markup('<path d="M{:.1f} {:.1f}m-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z" fill="{}"/>'),
    16: Markup('<path d="M{:.1f} {:.1f}m-4-4h8v8h-8z" fill="{}"/>'),
    64: Markup('<path d="M{:.1f} {:.1f}m0-6l6 6-6 6-6-6z" fill="{}"/>'),
}
LONGER = {"decoder_long": 1.5, "unions_keeping": 2 / 3}  # times the control's steps, for equal seconds
# what a row's `unique_phrases` says of its data
OWN_PHRASES = {
    True: "phrases of one target each, by digits",
    "names": "phrases of one target each, by names",
    "each": "phrases of one target each, by a name for each",
    "oracle": "the oracle of words",
    "target": "a name of the target in each phrase",
}
SMALL = 0.06  # of the picture
AT_ONCE = (
    "targets at once",
    "arm",
    "steps",
    "half of the images or more",
    "strict rate",
    "elements of one target's phrase (of)",
    "of a shared phrase",
    "backdrops",
    "things",
    "those under 6 %",
    "things right, over the base's",
    "drift",
    "minutes",
    "peak MiB",
)


class Run(NamedTuple):
    """What tells a run of targets at once from another."""

    targets: str
    steps: int
    arm: str
    whose: bool | str  # phrases
    placebo: bool = False
    own_alone: bool = False

    @property
    def data(self) -> list[str]:
        """What its data are, where they are not as they come."""
        phrases = [OWN_PHRASES[self.whose] + ", learnt" * (self.arm in LEARNT)] if self.whose else []
        own = ["clean pictures of the base alone"] * self.own_alone
        return phrases + own + ["placebo data"] * self.placebo


def trained(targets: str, seed: int, sequence: str, done: int) -> Iterable[dict]:
    """Rows of each target after each stage; stage s trains on the s-th target. The first `done` stages are skipped,
    since the pipeline of the last of them is stored."""
    names = targets.split(",")
    arm, rehearsed = SEQUENCES[sequence]
    factor, steps = KEPT_AT[arm]
    of_all = data_set(targets, seed, 1, {}, clean=HELD_OUT, nulls=NULLS["target"])  # for its targets alone
    base: Path | None = None
    for stage, name in enumerate(tqdm(names, desc="stages")):
        out = WORK / f"sequence-{sequence}-{targets.replace(',', '+')}-{stage}"
        if stage < done:
            base = out
            continue
        flags = dict(KEPT[arm])
        data = data_of(name, flags)
        if "prior_preservation.num_images" in flags:
            flags["prior_preservation.prompts"] = str(drawn_prompts(of_all, names[:stage], rehearsed, out))
            # the earlier pipeline's pictures of an earlier composed prompt are near copies of that target
            flags["allow_target_images"] = str(bool(rehearsed and stage)).lower()
        if base:
            flags[BASE] = str(base / "pipeline")
        report, _ = kept(
            sequence,
            {
                **regime(data, out, factor, seed, steps),
                "validation.targets": of_all / "targets.jsonl",
                "validation.steps": steps,
                "validation.images_per_target": IMAGES,
                "validation.guidance_scale": 2.0,
                **flags,
            },
        )
        if base:
            shutil.rmtree(base)
        base = out
        entry = scores(report["history"][-1])
        right = things_right(out / "pipeline")
        for place, target in enumerate(names):
            of_target = entry["targets"][target]
            yield {
                "targets": targets,
                "sequence": sequence,
                "seed": seed,
                "stage": stage,
                "target": target,
                "place": place,
                "rate": of_target["rate"],
                "elements": [element["rate"] for element in of_target["elements"]],
                "drift": entry["drift"]["clean_eps_mse"],
                "right": right,
            }
    if base:
        shutil.rmtree(base, ignore_errors=True)  # gone where the sequence was whole


def drawn_prompts(data: Path, earlier: list[str], each: int, out: Path) -> Path:
    """A file of 240 captions for the pipeline before a stage: ordinary ones, and the composed prompt of each earlier
    target `each` times."""
    ordinary = prompts_file("own", 240, shown_alone=True).read_text().splitlines()
    composed = {record["target_id"]: record["prompt"] for record in stored(data / "targets.jsonl")}
    again = [composed[target] for target in earlier for _ in range(each)]
    file = out.with_suffix(".txt")
    file.write_text("".join(f"{prompt}\n" for prompt in [*again, *ordinary][: len(ordinary)]))
    return file


# ------------------------------------------------------------------------------------------------- the tables
def by_stage(read: Read) -> str:
    """What passes of a target by how many others followed it, for each way: Markdown."""
    rows = [row for row in read(RESULTS.name) if row["stage"] >= row["place"]]
    lines = []
    for sequence in SEQUENCES:
        of_sequence = [row for row in rows if row.get("sequence", "recommended_2026") == sequence]
        for after in sorted({row["stage"] - row["place"] for row in of_sequence}):
            part = [row for row in of_sequence if row["stage"] - row["place"] == after]
            rates = [row["rate"] for row in part]
            elements = [mean(row["elements"]) for row in part]
            lines.append([f"`{sequence}`", f"{after}", halves(rates), mean_rate(rates), mean_rate(elements)])
    return markdown(
        ("each stage", "targets that followed", "half of the images or more", "strict rate", "elements"), lines
    )


def model_by_stage(read: Read) -> str:
    """Things right over the base's after each stage, where the rows have them: Markdown."""
    base = base_among(read("kept.jsonl"))
    lines = []
    for sequence in SEQUENCES:
        rows = [row for row in read(RESULTS.name) if row.get("sequence") == sequence and row["place"] == 0]
        for stage in sorted({row["stage"] for row in rows}):
            part = [row for row in rows if row["stage"] == stage]
            shares = [interval(lowest(part, base, kinds)[1]) for kinds in MICRO.both]
            lines.append([f"`{sequence}`", f"{stage + 1}", *shares])
    return markdown(("each stage", "targets learnt", "things right, kinds shown", "kinds not shown"), lines)


def halves(rates: list[float]) -> str:
    """Of so many targets, those with half of their images."""
    return f"{sum(rate >= 0.5 for rate in rates)} of {len(rates)}"


def at_once(read: Read) -> str:
    """What passes of targets learnt at once, and of their elements by whether another target has the phrase too."""
    lines = []
    for run, rows in sorted(runs_at_once(read).items(), key=lambda run: len(run[0].targets)):
        last = at_end(rows)
        base = next(row for row in rows if row["step"] == 0)
        shared = shared_phrases(phrases_of(run.targets)) if run.whose in (False, "oracle") else {}
        passed: dict[str, list[float]] = {"own": [], "shared": [], "backdrop": [], "thing": [], "small": []}
        for row in last:
            phrases = phrases_of(run.targets)[row["target"]]
            for phrase, area, rate in zip(phrases, areas(row["target"]), row["elements"], strict=True):
                passed["shared" if phrase in shared else "own"].append(rate)
                passed["backdrop" if phrase == phrases[-1] else "thing"].append(rate)
                if area < SMALL:
                    passed["small"].append(rate)
        rates = [row["rate"] for row in last]
        name = ", ".join([said(run.arm), *run.data])
        parts = [f"{mean(own):.2f} ({len(own)})" if own else "" for own in passed.values()]
        drift = f"{last[0]['drift'] - base['drift']:.4f}"
        minutes = f"{last[0]['seconds'] / 60:.0f}"
        peak = f"{last[0]['peak_mib']:.0f}" if "peak_mib" in last[0] else ""  # earlier rows have none
        parts += [right(last[0], read), drift, minutes, peak]
        lines.append([str(len(last)), name, str(run.steps), halves(rates), mean_rate(rates), *parts])
    return markdown(AT_ONCE, lines)


def right(row: dict, read: Read) -> str:
    """Things of held-out captions right after a run, over the base's, where it measured them."""
    return f"{lowest([row], base_among(read('kept.jsonl')), MICRO.kinds)[1][0]:.2f}" if "right" in row else ""


def runs_at_once(read: Read) -> dict[Run, list[dict]]:
    """Rows of each run without further flags; bench.law has those with shares by need."""
    runs: dict[Run, list[dict]] = defaultdict(list)
    for row in read("many.jsonl"):
        if row["flags"] is None:
            of_data = (row["unique_phrases"], row["placebo"], row.get("own_alone", False))
            run = Run(row["targets"], row["steps"], row["arm"], *of_data)
            runs[run].append(row)
    return runs


def at_end(rows: list[dict]) -> list[dict]:
    """The rows of a run's last evaluation, one a target."""
    return [row for row in rows if row["step"] == row["steps"]]


@cache
def phrases_of(targets: str) -> dict[str, list[str]]:
    """{target: phrases} of targets of the microworld."""
    return {name: target_scene(name).phrases for name in targets.split(",")}


@cache
def areas(target: str) -> list[float]:
    """Share of the picture that shows each element, the backdrop last."""
    masks = MICROWORLD.render(target_scene(target))[1]
    return [float((np.asarray(mask) >= 128).mean()) for mask in (*masks, backdrop_mask(masks))]


def differences(read: Read) -> str:
    """What a change adds to the strict rate and the elements of the same targets: Markdown."""
    runs = {run: {row["target"]: row for row in at_end(rows)} for run, rows in runs_at_once(read).items()}
    lines = []
    in_order = sorted(runs.items(), key=lambda run: (len(run[1]), *map(str, run[0])))
    for run, changed in in_order:
        for name, control in controls_of(run).items():
            if control not in runs:
                continue
            of = runs[control]
            gains = (
                [row["rate"] - of[target]["rate"] for target, row in changed.items()],
                [mean(row["elements"]) - mean(of[target]["elements"]) for target, row in changed.items()],
            )
            lines.append([name, f"{len(changed)}", *(interval(values, "+.2f") for values in gains)])
    return markdown(("change", "targets at once", "strict rate, difference", "elements, difference"), lines)


def controls_of(run: Run) -> dict[str, Run]:
    """{what a run changes: the run that it is compared with}; of learnt words also the same words as they come."""
    if run.own_alone:
        return {", ".join(run.data): run._replace(own_alone=False)}
    if not run.whose:
        shorter = run._replace(steps=round(run.steps / LONGER.get(run.arm, 1)), arm=CONTROL)
        return {CHANGES[run.arm]: shorter} if run.arm in CHANGES else {}
    unlearnt = run._replace(arm=LEARNT.get(run.arm, run.arm))
    words = ", ".join(run.data)
    over = {words: unlearnt._replace(whose=False)}
    return over | ({f"{words}, over names not learnt": unlearnt} if unlearnt != run else {})


def chart(read: Read) -> str:
    """Strict rate over steps a target, a point for each run at once with its 95 % interval: an SVG."""
    runs = [
        (run.targets.count(",") + 1, (run.arm, run.whose), run.steps, [row["rate"] for row in at_end(rows)])
        for run, rows in runs_at_once(read).items()
        if (run.arm, run.whose) in CHARTED and not run.placebo and not run.own_alone
    ]
    x_place, y_place = charts.scales((0, 700), (0, 1))
    inside = charts.axes((0, 700), (0, 1), "steps a target; circle: 8 at once, square: 16, diamond: 64")
    for count, charted, steps, rates in runs:
        number = [*CHARTED].index(charted)
        colour = charts.COLOURS[number]
        most = next(most for most in MARKS if count <= most)
        # beside others of this length
        x = x_place(steps / count) + 6 * (number - len(CHARTED) / 2) + 2 * [*MARKS].index(most)
        low, high = map(y_place, rate_interval(rates))
        inside.append(BAR.format(x, low, high, colour))
        inside.append(MARKS[most].format(x, y_place(mean(rates)), colour))
    svg = charts.frame(
        inside, "Strict rate of targets learnt at once", "A point a run, with the interval over its targets"
    )
    return standalone([Figure("", svg)], [*CHARTED.values()])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", help="in the order of the stages, ',' between two; default: none is trained")
    parser.add_argument("--sequence", choices=SEQUENCES, default="rehearsed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    read = lambda name: stored(args.results if name == RESULTS.name else RESULTS.with_name(name))  # noqa: E731
    if args.targets is None:
        PLOT.write_text(chart(read))
        print(at_once(read), differences(read), by_stage(read), model_by_stage(read), sep="\n\n")
        return
    of_run = (args.targets, args.sequence, args.seed)
    rows = [row for row in stored(args.results) if (row["targets"], row.get("sequence"), row["seed"]) == of_run]
    here = facts()
    for row in trained(args.targets, args.seed, args.sequence, done=len({row["stage"] for row in rows})):
        append(args.results, [{**row, **here}])
    print(by_stage(read), model_by_stage(read), sep="\n\n")


if __name__ == "__main__":
    main()
