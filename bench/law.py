"""Which elements fail, by what is known before training: `python -m bench.law`.

    python -m bench.law              the law from stored rows, for targets left out and for fresh targets
    python -m bench.law --predict    writes bench/results/law-predicted.jsonl, before anybody trains on its targets
    python -m bench.law --need own   flags of `bench.published --flags`: exposures by the predicted rates

A logistic regression of the share of images that show an element, on the features of silentbad/memory/law.py, which has
the coefficients too. It is fitted to the last evaluation of the runs of `ROWS`, of targets up to `LAST`. The unit is
the target: it is left out with all its runs, and intervals resample targets. The protocol is
research/protocol.md#what-is-frozen-the-law.
"""

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.arms import KEPT, KEPT_AT, PUBLISHED, Flags, experiment, part
from bench.many import areas, halves, phrases_of
from bench.published_table import BATCH, interval, markdown, mean_rate
from bench.recovery_table import Read, append, stored
from bench.theory_table import FAILS, auc_interval
from experiments.by_need import by_need
from silentbad.memory.law import COEFFICIENTS, Facts, expected_rate, features

PREDICTED = Path(__file__).parent / "results" / "law-predicted.jsonl"
FIRST, LAST = 2450, 2770  # targets of the rows that are fitted
LATER = {"recommended_2026": 2760}  # from this target on their rows came after the fit
MOST = 16  # most targets at once in these rows
# Arms with unions of all elements but one, by file of rows.
ROWS = {
    "published.jsonl": ("recommended", "recommended_long"),
    "many.jsonl": ("recommended_long",),
    "layers.jsonl": ("recommended", "recommended_long"),
    "spectral.jsonl": ("recommended",),
    "kept.jsonl": ("recommended", "recommended_2026", "own_pictures", "own_pictures_long"),
}
RATE = 40.0  # learning rate of these arms in the published setting, in units of 1e-4
# Shares of the exposures of the fresh targets at once -> by whose predicted rates
SHARES = {"equal": "", "by need": "own", "those of other elements": "shuffled"}
BY_SHARES = (
    "shares",
    "strict rate expected",
    "half of the images or more",
    "strict rate",
    "elements",
    "less equal shares",
)
BINS = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0)  # of expected rates
DRAWS = 200  # fits to resampled targets
# A second model, of targets trained alone: coefficients of 1, of the law's log odds and of the element's threshold.
SECOND = np.array([5.55, 0.63, -7.98])


class Block(NamedTuple):
    """Targets that nobody has trained on before they were predicted."""

    name: str
    file: str  # of their rows
    arm: str
    runs: tuple[str, ...]  # the targets of each, joined by ','
    lengths: tuple[int, ...]  # optimizer steps


FRESH = (
    Block(
        "one at a time",
        file="kept.jsonl",
        arm="recommended",
        runs=tuple(map(str, range(2780, 2796))),
        lengths=KEPT_AT["recommended"][1:],
    ),
    Block(
        "16 at once",
        file="many.jsonl",
        arm="recommended_long",
        runs=(",".join(map(str, range(2796, 2812))),),
        lengths=(2400, 4800, 9600),
    ),
)


class Case(NamedTuple):
    """An element of a target in one run."""

    target: str
    run: tuple[int, str, int]  # targets at once, arm, steps a target
    row: tuple  # what tells apart runs of one target in one such setting
    facts: Facts
    rate: float  # share of images that show it
    strict: float  # share of images in which the whole and all elements of its target pass


# ---------------------------------------------------------------- the rows
def flags_of(arm: str, file: str) -> Flags:
    """The flags of an arm, whose name means one thing in kept.jsonl and another elsewhere."""
    return (KEPT if file == "kept.jsonl" else PUBLISHED)[arm]


def facts_of(target: str, targets: str, flags: Flags, steps: int) -> list[Facts]:
    """What is known of a target's elements before a run on all `targets`."""
    phrases = phrases_of(targets)
    sharing = Counter(phrase for of_target in phrases.values() for phrase in of_target)
    batch = int(flags.get("train_batch_size", BATCH))
    exposures = steps * batch / (1 + float(flags["memory.sampler.clean_ratio"]))
    return [
        Facts(
            exposures=exposures / sum(map(len, phrases.values())),
            targets=len(phrases),
            sharing=sharing[phrase],
            backdrop=phrase == phrases[target][-1],
            area=area,
            elements=len(phrases[target]),
            own_pictures="prior_preservation.num_images" in flags,
        )
        for phrase, area in zip(phrases[target], areas(target), strict=True)
    ]


def cases_of(row: dict, file: str) -> list[Case]:
    """The elements of a stored row."""
    targets = row.get("targets", row["target"])
    arm = "recommended_2026" if (file != "kept.jsonl" and row["arm"] == "recommended") else row["arm"]
    at_once = targets.count(",") + 1
    run = (at_once, arm, row["steps"] // at_once)
    facts = facts_of(row["target"], targets, flags_of(row["arm"], file), row["steps"])
    of_row = (file, row.get("seed"), row.get("clean"), targets)
    return [
        Case(target=row["target"], run=run, row=of_row, facts=of_element, rate=rate, strict=row["rate"])
        for of_element, rate in zip(facts, row["elements"], strict=True)
    ]


def is_last(row: dict) -> bool:
    """Whether a row is the last of a run of its arm as frozen."""
    changed = row.get("placebo") or row.get("unique_phrases") or row.get("flags")
    return row.get("step", row["steps"]) == row["steps"] and not changed


def cases(read: Read) -> list[Case]:
    """The elements of all runs that the law is about, also of those that it is not fitted to."""
    return [
        case
        for file, arms in ROWS.items()
        for row in read(file)
        if row["arm"] in arms
        and is_last(row)
        and (file == "kept.jsonl" or row["factor"] == RATE)
        and FIRST <= int(row["target"]) < int(FRESH[0].runs[0])
        for case in cases_of(row, file)
    ]


def fitted(read: Read) -> list[Case]:
    """Those that the law is fitted to."""
    return [case for case in cases(read) if is_fitted(case)]


def is_fitted(case: Case) -> bool:
    """Whether the law is fitted to an element."""
    target = int(case.target)
    return case.facts.targets <= MOST and target < LATER.get(case.run[1], LAST + 1)


# ---------------------------------------------------------------- the law
def matrix(of: Sequence[Case]) -> tuple[np.ndarray, np.ndarray]:
    """Features (N,F) and rates (N,)."""
    return np.array([features(case.facts) for case in of]), np.array([case.rate for case in of])


def expected(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Rates (N,) by coefficients (F,) of features (N,F)."""
    return 1 / (1 + np.exp(-x @ w))


def fit(x: np.ndarray, rates: np.ndarray, ridge: float = 1e-3) -> np.ndarray:
    """Coefficients (F,) of the logistic regression of rates (N,) on x (N,F), by Newton's method; the ridge gives rates
    that are all 1 a maximum."""
    w = np.zeros(x.shape[1])
    for _ in range(30):
        p = expected(w, x)
        curvature = (x * (p * (1 - p))[:, None]).T @ x + ridge * np.eye(len(w))
        w = w + np.linalg.solve(curvature, x.T @ (rates - p) - ridge * w)
    return w


def left_out(of: Sequence[Case], x: np.ndarray | None = None) -> np.ndarray:
    """The rate of each case (N,) by a fit without its target, to the law's features or to x (N,F)."""
    features_of_law, rates = matrix(of)
    x = features_of_law if x is None else x
    names = np.array([case.target for case in of])
    predicted = np.zeros(len(of))
    for name in set(names):
        out = names == name
        predicted[out] = expected(fit(x[~out], rates[~out]), x[out])
    return predicted


# ---------------------------------------------------------------- tables
HEAD = (
    "elements (targets)",
    *(f"AUC, fails below {limit} (failing)" for limit in FAILS),
    "mean expected",
    "mean measured",
    "strict rate: product of expected",
    "product of measured",
    "measured",
)


def outcome(of: Sequence[Case], predicted: np.ndarray) -> list[str]:
    """The cells under HEAD for the expected rates (N,) of these elements."""
    rates = np.array([case.rate for case in of])
    places = by_target(of)
    cells = [f"{len(of)} ({len(places)})"]
    for limit in FAILS:
        fails = rates < limit
        parts = [(predicted[chosen], fails[chosen]) for chosen in places.values()]
        auc = "{:.2f} [{:.2f}, {:.2f}] ".format(*auc_interval(parts)) if 0 < fails.sum() < len(of) else ""
        cells.append(f"{auc}({fails.sum()})")
    measured = mean_rate([float(rates[chosen].mean()) for chosen in places.values()])
    in_run = by_target(of, runs=True).values()
    strict = (
        np.mean([predicted[chosen].prod() for chosen in in_run]),
        np.mean([rates[chosen].prod() for chosen in in_run]),
        np.mean([of[chosen[0]].strict for chosen in in_run]),
    )
    return [*cells, f"{predicted.mean():.2f}", measured, *(f"{rate:.2f}" for rate in strict)]


def by_target(of: Sequence[Case], runs: bool = False) -> dict[tuple, list[int]]:
    """The places of each target; `runs`: of each target in each run."""
    places: dict[tuple, list[int]] = defaultdict(list)
    for place, case in enumerate(of):
        places[(case.target, case.run, case.row) if runs else (case.target,)].append(place)
    return places


def by_setting(read: Read) -> str:
    """What the law says of targets left out, and, in the last lines, what the whole law says of later targets and of
    more at once than it is fitted to: Markdown."""
    of = fitted(read)
    more = [case for case in cases(read) if not is_fitted(case)]
    predicted = left_out(of)
    beyond = expected(fit(*matrix(of)), matrix(more)[0])
    lines = [[f"up to {MOST}", "", "", *outcome(of, predicted)]]
    for some, values, note in ((of, predicted, ""), (more, beyond, ", not fitted")):
        for run in sorted({case.run for case in some}):
            chosen = [place for place, case in enumerate(some) if case.run == run]
            at_once, arm, steps = run
            cells = outcome([some[place] for place in chosen], values[chosen])
            lines.append([f"{at_once}{note}", f"`{arm}`", str(steps), *cells])
    return markdown(("targets at once", "arm", "steps a target", *HEAD), lines)


def calibration(read: Read) -> str:
    """Mean expected and mean measured rates of targets left out, by what is expected: Markdown."""
    of = fitted(read)
    predicted = left_out(of)
    lines = []
    for low, high in pairwise(BINS):
        chosen = np.flatnonzero((low <= predicted) & (predicted < high))
        inside = [of[place] for place in chosen]
        rates = np.array([case.rate for case in inside])
        measured = mean_rate([float(rates[places].mean()) for places in by_target(inside).values()])
        lines.append([f"{low:g} to {high:g}", str(len(chosen)), f"{predicted[chosen].mean():.2f}", measured])
    return markdown(("expected rate", "elements", "mean expected", "mean measured, over targets"), lines)


def coefficients(read: Read) -> str:
    """The law, with intervals from resampled targets: Markdown."""
    of = fitted(read)
    x, rates = matrix(of)
    places = [*by_target(of).values()]
    rng = np.random.default_rng(0)
    targets = rng.integers(len(places), size=(DRAWS, len(places)))
    draws = [np.concatenate([places[i] for i in of_draw]) for of_draw in targets]
    again = [fit(x[drawn], rates[drawn]) for drawn in draws]
    bounds = np.quantile(again, (0.025, 0.975), axis=0).T
    lines = [
        [name, f"{value:+.2f} [{low:+.2f}, {high:+.2f}]"]
        for name, value, (low, high) in zip(COEFFICIENTS, fit(x, rates), bounds, strict=True)
    ]
    return markdown(("feature", "coefficient"), lines)


def second_features(predicted: np.ndarray, thresholds: Sequence[float]) -> np.ndarray:
    """Features (N,3) of the second model."""
    return np.column_stack([np.ones(len(predicted)), np.log(predicted / (1 - predicted)), thresholds])


def with_thresholds(read: Read) -> tuple[list[int], list[float]]:
    """The places among `fitted` of elements whose thresholds bench/theory.py stored, and these thresholds."""
    known = {row["target"]: row["thresholds"][1:] for row in read("theory.jsonl") if row["variant"] == "recommended"}
    runs = {run: places for run, places in by_target(fitted(read), runs=True).items() if run[0] in known}
    return sum(runs.values(), []), [value for target, *_ in runs for value in known[target]]


def second(read: Read) -> str:
    """Which elements fail in targets trained alone, by the law, by thresholds alone and by both, each target left out:
    Markdown."""
    every = fitted(read)
    places, thresholds = with_thresholds(read)
    of = [every[place] for place in places]
    by_law = left_out(every)[places]
    both = second_features(by_law, thresholds)
    scores = {
        "the law": by_law,
        "the threshold": left_out(of, both[:, [0, 2]]),
        "both": left_out(of, both),
    }
    lines = []
    for arm in ("all", "recommended"):
        chosen = [place for place, case in enumerate(of) if arm in ("all", case.run[1])]
        for name, values in scores.items():
            cells = outcome([of[place] for place in chosen], values[chosen])
            lines.append([f"`{arm}`" if arm != "all" else arm, name, *cells[:5]])
    return markdown(("arm", "by", *HEAD[:5]), lines)


# ---------------------------------------------------------------- fresh targets
def predictions() -> Iterator[dict]:
    """A row an element of the fresh targets, by the coefficients of silentbad/memory/law.py."""
    for block in FRESH:
        flags = flags_of(block.arm, block.file)
        for targets in block.runs:
            phrases = phrases_of(targets)
            for steps in block.lengths:
                for target in phrases:
                    facts = facts_of(target, targets, flags, steps)
                    for phrase, of_element in zip(phrases[target], facts, strict=True):
                        yield {
                            "block": block.name,
                            "steps": steps,
                            "target": target,
                            "phrase": phrase,
                            **of_element._replace(exposures=round(of_element.exposures))._asdict(),
                            "expected": round(expected_rate(of_element), 4),
                        }


def fresh(read: Read) -> str:
    """What was predicted against the rows that are there; last, all blocks, each at its longest run: Markdown."""
    lines = []
    longest: dict[str, tuple[list[Case], list[float]]] = {}
    for block in FRESH:
        rows = [row for row in read(block.file) if row["arm"] == block.arm and is_last(row)]
        of_block = [row for row in rows if row.get("targets", row["target"]) in block.runs]
        for steps in block.lengths:
            predicted: dict[str, list[float]] = defaultdict(list)
            for row in read(PREDICTED.name):
                if (row["block"], row["steps"]) == (block.name, steps):
                    predicted[row["target"]].append(row["expected"])
            ran = [row for row in of_block if row["steps"] == steps]
            cells = ["not run yet", "", "", f"{np.mean(sum(predicted.values(), [])):.2f}", "", "", "", ""]
            if ran:
                of = [case for row in ran for case in cases_of(row, block.file)]
                values = [rate for row in ran for rate in predicted[row["target"]]]
                longest[block.name] = (of, values)
                cells = outcome(of, np.array(values))
            lines.append([block.name, f"`{block.arm}`", str(steps), *cells])
            if ran and all("thresholds" in row for row in ran):
                x = second_features(np.array(values), sum((row["thresholds"] for row in ran), []))
                lines.append([f"{block.name}, with thresholds", *lines[-1][1:3], *outcome(of, expected(SECOND, x))])
    if len(longest) == len(FRESH):
        of, values = (sum(part, []) for part in zip(*longest.values(), strict=True))
        lines.append(["all", "", "", *outcome(of, np.array(values))])
    return markdown(("targets", "arm", "steps", *HEAD), lines)


def predicted_at_once(read: Read, whose: str) -> list[float]:
    """The expected rates of all elements of the fresh targets at once at the longest run, in the order of the data;
    `shuffled`: each has another element's."""
    block = FRESH[1]
    of_run = (block.name, block.lengths[-1])
    rates = [row["expected"] for row in read(PREDICTED.name) if (row["block"], row["steps"]) == of_run]
    return np.random.default_rng(0).permutation(rates).tolist() if whose == "shuffled" else rates


def shares_flags(read: Read, whose: str) -> str:
    """Flags of training, as JSON, that expose these elements by need."""
    return json.dumps(part("sampler", experiment("by_need"), rates=predicted_at_once(read, whose)))


def need(read: Read) -> str:
    """The strict rate of the fresh targets at once by the shares of the exposures, expected and measured: Markdown."""
    block = FRESH[1]
    steps = block.lengths[-1]
    flags = flags_of(block.arm, block.file)
    facts = [facts_of(target, block.runs[0], flags, steps) for target in phrases_of(block.runs[0])]
    n = sum(map(len, facts))
    of_runs = (block.runs[0], steps, block.arm)
    rows = [row for row in read(block.file) if (row["targets"], row["step"], row["arm"]) == of_runs]
    equal = {row["target"]: row["rate"] for row in rows if row["flags"] is None}
    lines = []
    for name, whose in SHARES.items():
        rates = predicted_at_once(read, whose) if whose else [0.5] * n  # equal rates give equal shares
        factors = iter(n * by_need(np.zeros((0, n)), np.ones(n), 0, rates=rates))
        expected_of = [[expected_rate(f._replace(exposures=f.exposures * next(factors))) for f in of] for of in facts]
        ran = [row for row in rows if row["flags"] == (shares_flags(read, whose) if whose else None)]
        cells = ["not run", "", "", ""]
        if ran:
            rates = [row["rate"] for row in ran]
            gains = [row["rate"] - equal[row["target"]] for row in ran]
            elements = mean_rate([float(np.mean(row["elements"])) for row in ran])
            cells = [halves(rates), mean_rate(rates), elements, interval(gains, "+.2f") if whose else ""]
        lines.append([name, f"{np.mean([np.prod(of) for of in expected_of]):.2f}", *cells])
    return markdown(BY_SHARES, lines)


BLOCKS = {
    "law": by_setting,
    "law-calibration": calibration,
    "law-coefficients": coefficients,
    "law-thresholds": second,
    "law-fresh": fresh,
    "law-need": need,
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predict", action="store_true", help="write the predictions for the fresh targets again")
    parser.add_argument("--need", choices=("own", "shuffled"), help="print flags of training: exposures by whose rates")
    args = parser.parse_args(argv)
    if args.predict:
        PREDICTED.unlink(missing_ok=True)
        append(PREDICTED, predictions())
    read = cache(lambda name: stored(PREDICTED.with_name(name)))
    if args.need:
        print(shares_flags(read, args.need))
        return
    print(*(table(read) for table in BLOCKS.values()), sep="\n\n")


if __name__ == "__main__":
    main()
