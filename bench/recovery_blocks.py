"""Tables of the earlier benchmark (bench/recovery.py) for the documents."""

from collections.abc import Callable, Sequence
from functools import cache

from bench.arms import ARMS, setting_of
from bench.recovery_table import (
    HEAD,
    OVER,
    Arm,
    Read,
    difference,
    grid,
    lines_of,
    named,
    read_arm,
    runs_of,
    tables,
)

FILE = "recovery.jsonl"
PLAIN: Arm = ("plain", 8.0)
RATE_ARMS = """
    keys_values keys_values_placebo prior gsnr prior_gsnr placebo auto_rgn inverse_rms
    hypergradient original_as_rate shrink original plain@4
""".split()
MEMORY_ARMS = """
    recommended recommended_leak_free recommended+gsnr unconditional region
    pairwise joint_captions snr_mixture retention
    recommended_leak_free+shrink recommended_estimated curriculum
    recommended-snr_mixture recommended-unconditional
    recommended_leak_free-region region+snr_mixture
    leak_free+region+snr_mixture and_distillation
""".split()


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
    "coverage": coverage,
    "rates": lambda read: over_plain(read, RATE_ARMS),
    "memory": lambda read: over_plain(read, MEMORY_ARMS),
}
