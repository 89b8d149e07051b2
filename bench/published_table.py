"""What the rows of bench/published.py say: a line an arm over its targets, and a line a run.

The unit is the target, its seeds inside. A recovery lies between two evaluations: the earlier one counts for `plain`,
the later one for the others. A run that never recovers counts as recovering at the last step of `plain`'s runs, so that
a speed-up of an arm that always recovers, over one that does not, is a lower bound, and two that never do are equal.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from bench.arms import PUBLISHED_AT, said
from bench.recovery_table import grid
from silentbad.measure.intervals import FEW_TARGETS, binomial_interval, bootstrap_interval, rate_interval

BATCH = 16  # pictures a step
CLEAN = 720  # clean pictures, if nothing is said
IMAGES = 16  # of an evaluation, if nothing is said
# first target of each block of reported targets; a later idea takes the next
FIRST_TARGETS = (2000, 2100, 2450, 2500, 2524, 2732, 2842, 2930)
MAIN, LONG, LAYERS = FIRST_TARGETS[2:5]  # the blocks of all arms, of `recommended_long`, of which layers train


def sustained(curve: dict[int, float], level: float = 0.5) -> int | None:
    """First step from which on the rate is at least `level` at every evaluation; None: never."""
    steps = sorted(curve)
    below = [i for i, step in enumerate(steps) if curve[step] < level]
    first = below[-1] + 1 if below else 0
    return steps[first] if first < len(steps) else None


def figures(rows: list[dict]) -> dict[str, float | int | None]:
    """The figures of one run on one target; drift is the rise of the error on held-out clean pictures."""
    by_step = {row["step"]: row for row in rows}
    start, last = by_step[0], by_step[max(by_step)]

    def curve(value: Callable[[dict], float]) -> dict[int, float]:
        return {step: value(row) for step, row in by_step.items()}

    strict = sustained(curve(lambda row: row["rate"]))
    return {
        "strict": strict,
        "not yet": None if strict is None else max((step for step in by_step if step < strict), default=0),
        "whole": sustained(curve(lambda row: row["whole_rate"])),
        "all elements": sustained(curve(lambda row: min(row["elements"]))),
        "strict rate": last["rate"],
        "whole rate": last["whole_rate"],
        "similarity": last["mean"],
        "element similarity": sum(last["element_means"]) / len(last["element_means"]),
        "elements": sum(last["elements"]) / len(last["elements"]),
        "weakest": min(last["elements"]),
        "drift": last["drift"] - start["drift"],
        "s/step": last["seconds"] / max(by_step),
    }


def runs_of(rows: list[dict]) -> dict[tuple, list[dict]]:
    """{(ratio, target, arm, factor, seed, steps, commit): rows}."""
    runs: dict[tuple, list[dict]] = {}
    for row in rows:
        arm = row["arm"] + (" on placebo data" if row["placebo"] else "")
        name = (row["ratio"], row["target"], arm, row["factor"], row["seed"], row["steps"], row["commit"][:7])
        runs.setdefault(name, []).append(row)
    return runs


def table(rows: list[dict]) -> str:
    """One line a run and target: Markdown."""
    head: tuple[str, ...] = ("ratio", "target", "arm", "factor", "seed", "steps", "commit")
    columns, lines = head, []
    for name, of_run in sorted(runs_of(rows).items()):
        shown = figures(of_run)
        lines.append([*map(str, name), *("never" if v is None else f"{v:.4g}" for v in shown.values())])
        columns = (*head, *shown)
    return markdown(columns, lines)


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table without its last line's end."""
    return grid(head, filter(None, lines)).removesuffix("\n")


# ------------------------------------------------------------------------------------------------- arms
HEAD = (
    "arm",
    "lr x",
    "steps",
    "targets (runs)",
    "recovered",
    "median step",
    "strict rate",
    "elements",
    "drift",
    "s/step",
    "times sooner than `plain`",
    "p (Holm)",
    "the same in seconds",
)
Runs = dict[str, list[dict]]  # {target: what `figures` says of each seed}


def by_arm(rows: list[dict]) -> dict[tuple[str, float, int], Runs]:
    """{(arm, factor, steps): runs}, in the order stored."""
    arms: dict[tuple[str, float, int], Runs] = defaultdict(lambda: defaultdict(list))
    for (_, target, arm, factor, _, steps, _), of_run in runs_of(rows).items():
        arms[arm, factor, steps][target].append(figures(of_run))
    return arms


def first(run: dict, horizon: int, key: str = "strict") -> float:
    """Step of the sustained recovery, at least 1; the horizon where there is none before it."""
    return float(horizon if run[key] is None else min(max(run[key], 1), horizon))


def times_sooner(plain: Runs, other: Runs, horizon: int) -> np.ndarray:
    """log(steps of plain / steps of the arm) (T,) of the targets that both ran, seeds averaged inside."""

    def log_steps(runs: list[dict], key: str) -> float:
        return float(np.mean([np.log(first(run, horizon, key)) for run in runs]))

    return np.array([log_steps(plain[t], "not yet") - log_steps(other[t], "strict") for t in plain if t in other])


def seconds_sooner(logs: np.ndarray, plain: Runs, other: Runs, cost: float) -> np.ndarray:
    """`times_sooner` (T,) in seconds, where a step of the arm costs `cost` times one of plain's. A target that neither
    recovers stays a tie, as in steps."""
    back = [any(run["strict"] is not None for run in (*plain[t], *other[t])) for t in plain if t in other]
    return np.where(back, logs - np.log(cost), 0.0)


def recoveries(runs: Runs, among: Runs) -> list[bool]:
    """Which runs recover, of the targets that are in `among` too."""
    return [run["strict"] is not None for target in runs if target in among for run in runs[target]]


def is_bound(plain: Runs, other: Runs) -> bool:
    """Whether `times_sooner` is a lower bound: plain never recovered in some run, the arm did in all. One that did not
    is given plain's last step, which is too early."""
    return not all(recoveries(plain, other)) and all(recoveries(other, plain))


def sign_flips(x: np.ndarray, draws: int = 20000) -> float:
    """One-sided p of mean(x) > 0 where each sign is as likely as the other: a permutation test over targets."""
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (draws, len(x)))
    return float((1 + ((signs * x).mean(1) >= x.mean() - 1e-12).sum()) / (draws + 1))


def holm(p: list[float]) -> list[float]:
    """Holm's step-down adjustment of p values (Holm 1979)."""
    order, adjusted, least = np.argsort(p), [0.0] * len(p), 0.0
    for rank, i in enumerate(order):
        least = max(least, min(1.0, (len(p) - rank) * p[i]))
        adjusted[i] = least
    return adjusted


def mean_of(runs: Runs, key: str, targets: Sequence[str]) -> np.ndarray:
    """A figure of each target, over its seeds."""
    return np.array([np.mean([run[key] for run in runs[target]]) for target in targets])


def interval(values: Sequence[float], form: str = ".2f", of: Callable = bootstrap_interval) -> str:
    """Mean and 95 % interval over targets; of too few to resample there is none, of one never."""
    if len(values) < (FEW_TARGETS if of is bootstrap_interval else 2):
        return f"{np.mean(values):{form}}"
    low, high = of(np.array(values))
    return f"{np.mean(values):{form}} [{low:{form}}, {high:{form}}]"


mean_rate = partial(interval, of=rate_interval)  # of rates: binomial where few, or all agree


def said_sooner(logs: np.ndarray, plain: Runs, other: Runs) -> str:
    """`times_sooner` in words; an arm that recovers in no run that is compared has none."""
    return ratio(logs, is_bound(plain, other)) if any(recoveries(other, plain)) else "-"


def ratio(logs: np.ndarray, bound: bool, form: str = ".1f") -> str:
    """Geometric mean of ratios from their logs, with its interval unless it is one; `bound`: it is a lower bound."""
    mean = f"{'>= ' if bound else ''}{np.exp(logs.mean()):{form}}"
    if len(logs) < FEW_TARGETS:
        return mean
    low, high = np.exp(bootstrap_interval(logs))
    return f"{mean} [{low:{form}}, {high:{form}}]"


def summary(rows: list[dict]) -> str:
    """One line an arm, over the targets that it ran: Markdown."""
    return markdown(HEAD, lines_of(rows))


def lines_of(rows: list[dict]) -> list[list[str]]:
    """The cells under HEAD of each arm, in the order stored."""
    arms = by_arm(rows)
    base = next((key for key in arms if key[0] == "plain"), None)
    plain, horizon = (arms[base], base[2]) if base else ({}, 0)
    over = {key: times_sooner(plain, runs, horizon) for key, runs in arms.items() if key != base}
    compared = [key for key, logs in over.items() if len(logs) > 1]
    p = dict(zip(compared, holm([sign_flips(over[key]) for key in compared]), strict=True))
    return [line(key, runs, plain, over.get(key), p.get(key)) for key, runs in arms.items()]


def line(key: tuple[str, float, int], runs: Runs, plain: Runs, logs: np.ndarray | None, p: float | None) -> list[str]:
    """An arm's cells; a target counts as recovered where most of its seeds are."""
    arm, factor, steps = key

    def means(of: str) -> list[float]:
        return [float(np.mean([run[of] for run in seeds])) for seeds in runs.values()]

    reached = [bool(np.mean([run["strict"] is not None for run in seeds]) > 0.5) for seeds in runs.values()]
    low, high = binomial_interval(sum(reached), len(reached))
    when = [first(run, 10**9) for seeds in runs.values() for run in seeds]
    middle = f"{np.median(when):.0f}" if np.median(when) < 10**8 else "never"  # half of the runs at least recover
    cells = [said(arm), f"{factor:g}", f"{steps}", f"{len(runs)} ({len(when)})"]
    cells += [f"{sum(reached)} of {len(reached)} [{low:.2f}, {high:.2f}]", middle]
    cells += [mean_rate(means("strict rate")), mean_rate(means("elements")), f"{np.mean(means('drift')):.4f}"]
    cells += [f"{min(run['s/step'] for seeds in runs.values() for run in seeds):.3f}"]
    if logs is None or len(logs) < 2:
        return [*cells, "", "", ""]
    least = [min(run["s/step"] for seeds in part.values() for run in seeds) for part in (plain, runs)]
    seconds = seconds_sooner(logs, plain, runs, least[1] / least[0])
    in_steps, in_seconds = (said_sooner(of, plain, runs) for of in (logs, seconds))
    return [*cells, in_steps, "" if p is None else f"{p:.4f}", in_seconds]


def block_of(row: dict) -> int:
    """First target of the block that a row's targets are of; 0: development."""
    first = min(int(target.partition("k")[0]) for target in row["targets"].split(","))
    return max((block for block in FIRST_TARGETS if block <= first), default=0)


def alone(row: dict) -> bool:
    """Whether a run has one target."""
    return "," not in row["targets"]


def longer(row: dict) -> bool:
    """Whether plain or replay ran beyond its frozen length, to see if it recovers at all."""
    return row["arm"] in ("plain", "replay") and row["steps"] > PUBLISHED_AT[row["arm"]][1]


def usual(row: dict) -> bool:
    """Whether elements are 10 % of the records, among as many clean pictures as usual, in words that they share; and
    the run went to its end with all images."""
    clean, short = CLEAN * (row["targets"].count(",") + 1), row.get("first_images") or row.get("settled")
    return row["ratio"] == 0.1 and row["clean"] == clean and row.get("words", "shared") == "shared" and not short


def reported_of(rows: list[dict], block: int) -> list[dict]:
    """The rows of the reported targets of a block."""
    return [row for row in rows if block_of(row) == block]


def block_alone(rows: list[dict], block: int) -> list[dict]:
    """The rows of a block with one target a run, on data that holds their elements."""
    return [row for row in reported_of(rows, block) if alone(row) and not row["placebo"] and not longer(row)]


def tables(rows: list[dict]) -> str:
    """The tables of the reported targets by block and poisoning ratio; several targets at once have their own."""
    return "\n".join(text for block in FIRST_TARGETS if (text := tables_of(reported_of(rows, block), block)))


def tables_of(reported: list[dict], block: int) -> str:
    parts: dict[tuple[int, float, int], list[dict]] = defaultdict(list)
    for row in reported:
        parts[row["targets"].count(",") + 1, row["ratio"], row["clean"]].append(row)
    lines = []
    for (together, share, clean), of_part in sorted(parts.items()):
        also = "" if together == 1 else f", {together} targets at once"
        head = f"Targets from {block}, poisoning ratio {100 * share:g} % among {clean} clean pictures{also}"
        lines += [head, "", summary(of_part), ""]
    return "\n".join(lines)
