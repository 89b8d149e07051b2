"""Tables of the earlier benchmark (bench/recovery.py) for the documents."""

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from bench.arms import ARMS, setting_of
from bench.recovery_table import (
    HEAD,
    OVER,
    Arm,
    Read,
    compared,
    difference,
    grid,
    lines_of,
    named,
    pairs,
    read_arm,
    runs_of,
    speedup,
    tables,
)

FILE = "recovery.jsonl"
PLAIN: Arm = ("plain", 8.0)
RESULT_ARMS = """
    plain plain@4 recommended recommended_leak_free recommended_estimated recommended+gsnr
    unconditional pairwise region snr_mixture leak_free joint_captions keys_values
    keys_values_placebo gsnr auto_rgn original
""".split()
SEED_ARMS = """
    recommended recommended_leak_free recommended+gsnr pairwise joint_captions keys_values
""".split()
RATE_ARMS = """
    keys_values keys_values_placebo prior gsnr prior_gsnr placebo auto_rgn inverse_rms
    hypergradient original_as_rate shrink original plain@4
""".split()
RATE_PAIRS = (
    ("keys_values", "keys_values_placebo"),
    ("keys_values", "plain@4"),
    ("hypergradient", "leak_free"),
    ("recommended+gsnr", "recommended"),
    ("recommended+placebo", "recommended"),
    ("recommended+gsnr", "recommended+placebo"),
    ("recommended+gsnr", "plain@4"),
    ("recommended_leak_free+shrink", "recommended_leak_free"),
)
MEMORY_ARMS = """
    recommended recommended_leak_free recommended+gsnr unconditional region region_estimated
    pairwise joint_captions leak_free snr_mixture weakest_first retention
    recommended_leak_free+shrink recommended_estimated recommended+placebo curriculum
    learning_progress recommended-snr_mixture recommended-unconditional
    recommended_leak_free-snr_mixture recommended_leak_free-region region+snr_mixture
    leak_free+region+snr_mixture leak_free+snr_mixture and_distillation and_distillation_gated
""".split()
MEMORY_PAIRS = (
    ("recommended_leak_free", "leak_free+region+snr_mixture"),
    ("recommended", "recommended-unconditional"),
    ("recommended", "recommended_leak_free"),
    ("pairwise", "recommended"),
    ("pairwise", "recommended-unconditional"),
    ("recommended_estimated", "recommended"),
    ("recommended-snr_mixture", "recommended"),
    ("recommended_leak_free-snr_mixture", "recommended_leak_free"),
    ("recommended_leak_free-region", "recommended_leak_free"),
    ("recommended_leak_free+shrink", "recommended_leak_free"),
    ("recommended+gsnr", "recommended"),
)
RESULT_PAIRS = (
    ("recommended", "recommended_leak_free"),
    ("recommended_estimated", "recommended"),
    ("recommended+gsnr", "recommended"),
    ("recommended+placebo", "recommended"),
    ("recommended_leak_free+shrink", "recommended_leak_free"),
    ("keys_values", "keys_values_placebo"),
    ("recommended", "plain@4"),
    ("recommended_leak_free", "plain@4"),
    ("recommended+gsnr", "plain@4"),
    ("keys_values", "plain@4"),
)


def code(arm: Arm) -> str:
    """An arm's name and setting as the documents write them."""
    return f"`{named(arm)}` ({setting_of(ARMS[arm[0]])})"


@cache
def single(read: Read) -> list[dict]:
    """The rows of runs that train on one target."""
    return [row for row in read(FILE) if "," not in row["targets"]]


@cache
def lines(read: Read) -> dict[tuple[str, str], dict[str, str]]:
    """{(arm, rate): {heading: cell}} of the whole table."""
    return {(line[0], line[1]): dict(zip(HEAD, line, strict=True)) for line in tables(read(FILE))}


def line(read: Read, arm: Arm) -> dict[str, str]:
    return lines(read)[arm[0], f"{arm[1]:g}"]


@cache
def over(read: Read, arm: Arm, base: Arm) -> dict[str, str]:
    """{heading: cell} of one arm over another, paired over the targets and seeds that both have."""
    return dict(zip(OVER, difference(single(read), base, arm), strict=True))


def with_every_element(rows: list[dict], arm: Arm) -> float:
    """Upper bound of the share of images at the budget that pass as a whole and in every element.

    A row has rates, not images: an image that passes everything counts in each rate, so the least
    of them bounds it.
    """
    of_target = []
    for seeds in runs_of(rows, *arm).values():
        last = [max(run, key=lambda row: row["step"]) for run in seeds.values()]
        of_target.append(np.mean([min(row["rate"], *row["elements"]) for row in last]))
    return float(np.mean(of_target))


def fall_back(rows: list[dict], arm: Arm, level: float = 0.5) -> tuple[int, int]:
    """Runs whose rate reaches `level` at some step, and how many fall below it later."""
    reached = again = 0
    for seeds in runs_of(rows, *arm).values():
        for run in seeds.values():
            on = [row["rate"] >= level for row in sorted(run, key=lambda row: row["step"]) if row["step"] > 0]
            reached += any(on)
            again += any(on) and not all(on[on.index(True) :])
    return reached, again


def result_table(read: Read) -> str:
    """The arms that say most, and the runs with eight targets at once."""
    head = (
        "arm",
        "runs",
        "CIR 50 %",
        "CIR",
        "plain's CIR",
        "elements",
        "drift",
        "speed-up",
        "in seconds",
    )
    measures = ("runs", "CIR 50 %", "CIR", "plain's CIR there", "elements", "drift, equal CIR")
    keys = (*measures, "speed-up to CIR 50 %", "the same in seconds")
    chosen = [(code(arm), line(read, arm)) for arm in map(read_arm, RESULT_ARMS)]
    for (arm, _), cells in lines(read).items():
        name, _, together = arm.partition(", ")
        if together:
            number = int(together.split()[0])
            runs = str(int(cells["runs"]) // number)  # a run has all its targets
            chosen.append((f"`{name}`, {number} targets at once", {**cells, "runs": runs}))
    return grid(head, [(label, *(cells[key] for key in keys)) for label, cells in chosen])


def strict_table(read: Read) -> str:
    """What a stricter endpoint leaves: every element too, and no return below half."""
    head = ("arm", "runs", "whole", "whole and every element, at most", "reached 50 %", "fall back")
    rows = []
    for arm in map(read_arm, RESULT_ARMS):
        cells = line(read, arm)
        bound = with_every_element(single(read), arm)
        reached, again = fall_back(single(read), arm)
        rows.append((code(arm), cells["runs"], cells["CIR"], f"{bound:.2f}", str(reached), str(again)))
    return grid(head, rows)


def seed_table(read: Read) -> str:
    """Median speed-up over plain of each seed by itself."""
    seeds = sorted({row["seed"] for row in single(read)})
    table = []
    for arm in map(read_arm, SEED_ARMS):
        medians = []
        for seed in seeds:
            rows = [row for row in single(read) if row["seed"] == seed]
            medians.append(f"{speedup(*compared(pairs(rows, PLAIN, arm)))[0]:.2f}")
        table.append((code(arm), *medians))
    return grid(("arm", *(f"seed {seed}" for seed in seeds)), table)


def counted(cells: dict[str, str]) -> list[str]:
    """Runs, speed-up, sooner and later, differences and drift of a line of OVER."""
    return [cells[key] for key in ("runs", "speed-up to CIR 50 %", "sooner, later", "CIR", "elements", OVER[-1])]


def over_plain(read: Read, arms: Sequence[str]) -> str:
    """Arms over plain."""
    head = (
        "arm",
        "runs",
        "speed-up",
        "sooner, later",
        "CIR",
        "CIR, difference",
        "elements, difference",
        "drift",
    )
    table = []
    for arm in map(read_arm, arms):
        cells = counted(over(read, arm, PLAIN))
        table.append((code(arm), *cells[:3], line(read, arm)["CIR"], *cells[3:]))
    return grid(head, table)


def over_arms(read: Read, couples: Sequence[tuple[str, str]]) -> str:
    """(arm, base) by (arm, base)."""
    head = (
        "arm",
        "over",
        "runs",
        "speed-up",
        "sooner, later",
        "CIR, difference",
        "elements, difference",
        "drift",
    )
    table = []
    for arm, base in couples:
        ours, other = read_arm(arm), read_arm(base)
        table.append((code(ours), code(other), *counted(over(read, ours, other))))
    return grid(head, table)


def coverage(read: Read) -> str:
    """Which arms ran on how many targets, with which seeds, grouped by that."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for alone in (True, False):
        rows = [row for row in read(FILE) if ("," not in row["targets"]) == alone]
        for arm, factor in lines_of(rows):
            runs = runs_of(rows, arm, factor)
            seeds = ", ".join(map(str, sorted({seed for of_target in runs.values() for seed in of_target})))
            count = str(len(runs)) if alone else f"{len(runs)} targets at once"
            groups.setdefault((count, seeds, f"{factor:g}e-4"), []).append(f"`{arm}`")
    return grid(("targets", "seeds", "lr", "arm"), [(*key, ", ".join(arms)) for key, arms in groups.items()])


BLOCKS: dict[str, Callable[[Read], str]] = {
    "results": result_table,
    "strict": strict_table,
    "seeds": seed_table,
    "coverage": coverage,
    "pairs": lambda read: over_arms(read, RESULT_PAIRS),
    "rates": lambda read: over_plain(read, RATE_ARMS),
    "rate-pairs": lambda read: over_arms(read, RATE_PAIRS),
    "memory": lambda read: over_plain(read, MEMORY_ARMS),
    "memory-pairs": lambda read: over_arms(read, MEMORY_PAIRS),
}
