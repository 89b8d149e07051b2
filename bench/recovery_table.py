"""Compares arms of bench/recovery.py over the targets and seeds that both ran.

    python -m bench.recovery_table recommended recommended+gsnr --over recommended_leak_free
    python -m bench.recovery_table recommended --over plain@4       compared with plain at 4 times the base rate

A time that a run does not reach within the budget counts as the budget, so a mean is a restricted mean and a speed-up
over an arm that never got there is a lower bound. The unit of inference is the target; seeds are averaged inside it. An
arm is compared with plain over the targets and seeds that both ran. Seconds are steps times the least time a step took
in any run of the arm, at any rate: other work on the machine only ever adds to it, and arms run hours apart.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.arms import RATES

RESULTS = Path(__file__).parent / "results" / "recovery.jsonl"
TIMES = ("first", "cir50", "cir80")
Figures = dict[str, dict[str, float]]  # by target
Arm = tuple[str, float]  # its name and its learning-rate factor
Read = Callable[[str], Any]  # the stored results of bench/results by the file's name


def stored(path: Path) -> list[dict]:
    """The rows of a JSON Lines file; none where it does not exist yet."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: Path, rows: Iterable[dict]) -> None:
    """Add rows to a JSON Lines file."""
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def first_step(curve: dict[int, float], level: float) -> float:
    """First step at which the rate reaches `level`; infinite where it never does within the budget."""
    return min((step for step, rate in curve.items() if step > 0 and rate >= level), default=float("inf"))


def area(curve: dict[int, float]) -> float:
    """Area under the recovery curve over the budget, in [0, 1] (trapezoid)."""
    steps = sorted(curve)
    return float(np.trapezoid([curve[s] for s in steps], steps) / (steps[-1] - steps[0]))


def summarise(rows: list[dict]) -> dict[str, float]:
    """Figures of one run on one target. `drift` is the rise of the error on held-out clean records."""
    by_step = {row["step"]: row for row in rows}
    curve = {step: row["rate"] for step, row in by_step.items()}
    start, last, budget = by_step[0], by_step[max(by_step)], max(by_step)
    figures = {name: first_step(curve, level) for name, level in zip(TIMES, (1e-9, 0.5, 0.8), strict=True)}
    for name in TIMES:
        reached = figures[name] < float("inf")
        figures[f"{name}_reached"] = float(reached)
        figures[name] = figures[name] if reached else float(budget)
    known = float(np.mean(last["elements"]))
    return figures | {
        "cir": last["rate"],
        "aurc": area(curve),
        "mean": last["mean"],
        "elements": known,
        "parts_only": float(known >= 0.5 and last["rate"] < 0.5),
        "drift": last["drift"] - start["drift"],
        "seconds_per_step": last["seconds"] / budget,
        "budget": budget,
    }


def runs_of(rows: list[dict], arm: str, factor: float) -> dict[str, dict[int, list[dict]]]:
    """{target: {seed: rows}} of an arm at one learning rate."""
    runs: dict[str, dict[int, list[dict]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["arm"] == arm and row["factor"] == factor:
            runs[row["target"]][row["seed"]].append(row)
    return runs


def per_target(rows: list[dict], arm: str, factor: float) -> Figures:
    """Seeds averaged inside each target."""
    runs = runs_of(rows, arm, factor)
    return {target: averaged([summarise(part) for part in seeds.values()]) for target, seeds in runs.items()}


def averaged(figures: Iterable[dict[str, float]]) -> dict[str, float]:
    ones = list(figures)
    return {k: float(np.mean([one[k] for one in ones])) for k in ones[0]}


def pairs(rows: list[dict], plain: Arm, other: Arm) -> Iterator[tuple[str, list[dict], list[dict]]]:
    """(target, plain's run, the arm's run) of every target and seed that both ran."""
    runs = runs_of(rows, *other)
    for target, seeds in runs_of(rows, *plain).items():
        yield from ((target, seeds[s], runs[target][s]) for s in seeds if s in runs.get(target, {}))


def compared(runs: Iterable[tuple[str, list[dict], list[dict]]]) -> tuple[Figures, Figures]:
    """Both arms' figures by target, over the pairs of runs."""
    both: dict[str, list[list[dict]]] = defaultdict(lambda: [[], []])
    for target, *pair in runs:
        for k in range(2):
            both[target][k].append(summarise(pair[k]))
    plain, other = ({target: averaged(pair[k]) for target, pair in both.items()} for k in range(2))
    return plain, other


def speedup(plain: Figures, other: Figures, draws: int = 4000) -> tuple[float, float, float]:
    """Median over targets of plain's steps to CIR 50 % over the arm's; 95 % paired bootstrap interval over targets."""
    return bootstrap([plain[target]["cir50"] / other[target]["cir50"] for target in sorted(plain)], np.median, draws)


def bootstrap(values: list[float], of: Callable, draws: int = 4000) -> tuple[float, float, float]:
    """A statistic over targets, and its 95 % interval over draws of targets."""
    x, rng = np.array(values), np.random.default_rng(0)
    low, high = np.quantile(of(x[rng.integers(0, len(x), (draws, len(x)))], axis=1), [0.025, 0.975])
    return float(of(x)), float(low), float(high)


def seconds_per_step(rows: list[dict], arm: str) -> dict[str, float]:
    """{device: the least seconds of a step in any run of the arm there; the learning rate does not change it}."""
    least: dict[str, float] = defaultdict(lambda: float("inf"))
    for one, factor in lines_of([row for row in rows if row["arm"] == arm]):
        for seeds in runs_of(rows, one, factor).values():
            for run in seeds.values():
                device = run[0].get("device", "")
                least[device] = min(least[device], summarise(run)["seconds_per_step"])
    return least


def drift_at_equal_recovery(rows: list[dict], plain: Arm, other: Arm) -> float:
    """Median over targets and seeds of the arm's drift over plain's, each at its first step with plain's best rate."""
    ratios = []
    for _, base, other_run in pairs(rows, plain, other):
        level = max(row["rate"] for row in base)
        before, after = (rise_at(run, level) for run in (base, other_run))
        if level > 0 and before is not None and after is not None and before > 0:
            ratios.append(after / before)
    return float(np.median(ratios)) if ratios else float("nan")


def rise_at(run: list[dict], level: float) -> float | None:
    """Drift at the first step whose rate reaches `level`; None where none does."""
    by_step = {row["step"]: row for row in run}
    step = first_step({s: row["rate"] for s, row in by_step.items()}, level)
    return None if step == float("inf") else by_step[int(step)]["drift"] - by_step[0]["drift"]


def lines_of(rows: list[dict]) -> list[Arm]:
    """Every arm and rate that ran, the arms in the order of bench/arms.py; an arm's own rate before others, which are a
    sweep's."""
    arms = list(dict.fromkeys([*RATES, *(alone(row["arm"]) for row in rows)]))
    ran = {(row["arm"], row["factor"]) for row in rows}
    return sorted(ran, key=lambda one: (arms.index(alone(one[0])), one[1] != own_rate(one[0]), one[1]))


def alone(arm: str) -> str:
    """The arm of a label that says how many targets it was trained on at once."""
    return arm.partition(",")[0]


def own_rate(arm: str) -> float | None:
    """The learning-rate factor an arm was frozen at."""
    return RATES.get(alone(arm))


HEAD = (
    "arm",
    "lr x",
    "runs",
    "first",
    "CIR 50 %",
    "CIR 80 %",
    "CIR",
    "AURC",
    "elements",
    "parts only",
    "drift",
    "s/step",
    "plain's CIR there",
    "drift, equal CIR",
    "speed-up to CIR 50 %",
    "the same in seconds",
)


def label(row: dict) -> str:
    """The arm, marked where several targets were trained on together."""
    together = row["targets"].count(",") + 1
    return row["arm"] if together == 1 else f"{row['arm']}, {together} targets at once"


def tables(rows: list[dict]) -> list[tuple[str, ...]]:
    """The lines of the single-target runs, then those of runs with several targets, each against its own plain arm."""
    lines = []
    for together in sorted({row["targets"].count(",") for row in rows}):
        part = [{**row, "arm": label(row)} for row in rows if row["targets"].count(",") == together]
        lines += table(part, label({"arm": "plain", "targets": "," * together}))
    return lines


def table(rows: list[dict], against: str = "plain") -> list[tuple[str, ...]]:
    """A line per arm and rate: medians of times over targets, means of the rest; then what `against` has, at its own
    rate, on the same targets and seeds."""
    arms, lines = lines_of(rows), []
    base = next((one for one in arms if one[0] == against), None)
    for arm, factor in arms:
        figures = per_target(rows, arm, factor)
        mean = averaged(figures.values())
        compared = [""] * 4 if base is None or (arm, factor) == base else beside(rows, base, (arm, factor))
        lines.append(
            (
                arm,
                f"{factor:g}",
                str(sum(map(len, runs_of(rows, arm, factor).values()))),
                *(time(figures, name) for name in TIMES),
                f"{mean['cir']:.2f}",
                f"{mean['aurc']:.3f}",
                f"{mean['elements']:.2f}",
                f"{mean['parts_only']:.2f}",
                f"{mean['drift']:.4f}",
                f"{min(seconds_per_step(rows, arm).values()):.3f}",
                *compared,
            )
        )
    return lines


def beside(rows: list[dict], plain: Arm, other: Arm) -> list[str]:
    """The last four columns: plain's CIR, drift at equal recovery, speed-ups in steps and, on the device that both came
    to last, in seconds."""
    theirs, mine = compared(pairs(rows, plain, other))
    if not mine:
        return [""] * 4
    base, own = (seconds_per_step(rows, arm) for arm, _ in (plain, other))
    steps, costs = speedup(theirs, mine), [base[device] / own[device] for device in base if device in own]
    return [
        f"{averaged(theirs.values())['cir']:.2f}",
        f"{drift_at_equal_recovery(rows, plain, other):.2f}",
        interval(steps),
        interval(tuple(costs[-1] * x for x in steps)) if costs else "",
    ]


def difference(rows: list[dict], over: Arm, arm: Arm) -> tuple[str, ...]:
    """A line of OVER: the arm beside another over the targets and seeds that both ran."""
    runs = list(pairs(rows, over, arm))
    theirs, mine = compared(runs)
    if not mine:
        return (named(arm), named(over), "0", *[""] * 5)
    rises = {name: [mine[t][name] - theirs[t][name] for t in sorted(mine)] for name in ("cir50", "cir", "elements")}
    sooner = f"{sum(x < 0 for x in rises['cir50'])}, {sum(x > 0 for x in rises['cir50'])} of {len(mine)}"
    return (
        named(arm),
        named(over),
        str(len(runs)),
        interval(speedup(theirs, mine)),
        sooner,
        *(interval(bootstrap(rises[name], np.mean), "+") for name in ("cir", "elements")),
        f"{drift_at_equal_recovery(rows, over, arm):.2f}",
    )


OVER = ("arm", "over", "runs", "speed-up to CIR 50 %", "sooner, later", "CIR", "elements", "drift, equal CIR")


def named(arm: Arm) -> str:
    return arm[0] if arm[1] == own_rate(arm[0]) else f"{arm[0]}@{arm[1]:g}"


def read_arm(name: str) -> Arm:
    """An arm's name, with @FACTOR where it is another than its own rate."""
    arm, _, factor = name.partition("@")
    return arm, float(factor or RATES[arm])


def time(figures: Figures, name: str) -> str:
    """Median over targets; "never" where at least half of the runs did not get there."""
    reached = np.mean([f[f"{name}_reached"] for f in figures.values()])
    return f"{np.median([f[name] for f in figures.values()]):.0f}" if reached > 0.5 else "never"


def interval(x: tuple[float, ...], sign: str = "") -> str:
    return "{} [{}, {}]".format(*(f"{value:{sign}.2f}" for value in x))


def grid(head: Sequence[str], lines: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    first, *rest = ("| " + " | ".join(line) + " |\n" for line in (head, *lines))
    return "".join([first, "|" + "---|" * len(head) + "\n", *rest])


def save(rows: list[dict], results: Path) -> str:
    """The Markdown table beside the results; returns it."""
    text = grid(HEAD, tables(rows))
    results.with_suffix(".md").write_text(text)
    return text


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="+", metavar="ARM[@FACTOR]")
    parser.add_argument("--over", default="plain", metavar="ARM[@FACTOR]")
    parser.add_argument("--seeds", help="comma-separated; all that both ran")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    try:
        over, *arms = map(read_arm, [args.over, *args.arms])
    except (KeyError, ValueError) as error:
        parser.exit(2, f"error: {error.args[0]!r} is no arm or no factor; there are: {', '.join(RATES)}\n")
    rows = [row for row in stored(args.results) if "," not in row["targets"]]
    if args.seeds:
        rows = [row for row in rows if str(row["seed"]) in args.seeds.split(",")]
    print(grid(OVER, [difference(rows, over, arm) for arm in arms]), end="")


if __name__ == "__main__":
    main()
