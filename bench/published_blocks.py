"""Tables of the published setting for the documents: stored rows to Markdown."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from bench.arms import said
from bench.published_table import (
    HEAD,
    IMAGES,
    LAYERS,
    LONG,
    MAIN,
    alone,
    block_alone,
    by_arm,
    first,
    interval,
    lines_of,
    longer,
    mean_rate,
    ratio,
    reported_of,
    said_sooner,
    sign_flips,
    times_sooner,
    usual,
)
from bench.recovery_table import Read, grid

FILE = "published.jsonl"
FILES = {LAYERS: "layers.jsonl"}  # of a block whose rows are in another file
SOONER = "times sooner than `plain`"
ELSEWHERE = ("arm", "steps", "recovered", "strict rate", "elements", "drift", "s/step")  # in another world
TOGETHER = ("arm", "steps", "recovered", "strict rate", "elements", "drift")


def frozen(read: Read, block: int = MAIN) -> list[dict]:
    """The rows of a block at a ratio of 10 %, one target a run, each arm at its frozen length."""
    rows = [row for row in reported_of(read(FILES.get(block, FILE)), block) if row["images"] == IMAGES]
    return [row for row in rows if usual(row) and alone(row) and not longer(row)]


def usual_of(read: Read) -> list[dict]:
    """The rows of MAIN with one target a run, in the usual setting."""
    return [row for row in block_alone(read(FILE), MAIN) if usual(row)]


def arms_of(read: Read, block: int = MAIN) -> dict[str, dict[str, str]]:
    """{arm: {heading: cell}} of a block."""
    return {line[0]: dict(zip(HEAD, line, strict=True)) for line in lines_of(frozen(read, block))}


def results(read: Read, block: int = MAIN) -> str:
    """Every column of a block's arms."""
    return grid(HEAD, [list(line.values()) for line in arms_of(read, block).values()])


def under(columns: Sequence[str], line: list[str]) -> list[str]:
    """The cells of a line of `lines_of` under some columns of HEAD."""
    cells = dict(zip(HEAD, line, strict=True))
    return [cells[column] for column in columns]


def elsewhere(read: Read) -> str:
    """The arms in the emoji world."""
    return grid(ELSEWHERE, [under(ELSEWHERE, line) for line in lines_of(read("emoji-claims.jsonl"))])


def together(read: Read) -> str:
    """What an arm recovers of several targets at once, and of the same targets alone (seed 0)."""
    lines = []
    for block, arm in ((MAIN, "recommended"), (LONG, "recommended_long"), (LONG, "recommended")):
        rows = [row for row in reported_of(read(FILE), block) if row["arm"] == arm]
        rows = [row for row in rows if usual(row) and not row["placebo"] and row["seed"] == 0]
        for targets in sorted({row["targets"] for row in rows if not alone(row)}, key=len):
            joint = [row for row in rows if row["targets"] == targets]
            single = [row for row in rows if alone(row) and row["target"] in targets.split(",")]
            count = len(targets.split(","))
            for name, part in ((f"{count} at once", joint), (f"the same {count}, each alone", single)):
                if part:
                    lines.append([name, *under(TOGETHER, lines_of(part)[0])])
    return grid(("targets", *TOGETHER), lines)


def over_plain(read: Read) -> str:
    """`recommended` over each length of plain and over replay, on the targets that both ran."""
    rows = [row for row in reported_of(read(FILE), MAIN) if usual(row) and alone(row)]
    arms = by_arm([row for row in rows if not row["placebo"] and row["seed"] == 0])
    ours = next(runs for (arm, *_), runs in arms.items() if arm == "recommended")

    cost: dict[str, float] = {}  # least seconds of a step, whatever the length of a run
    for (arm, *_), runs in arms.items():
        cost[arm] = min(cost.get(arm, np.inf), *(run["s/step"] for (run,) in runs.values()))

    lines = []
    for (arm, _, horizon), other in arms.items():
        if arm in ("plain", "replay"):
            logs = times_sooner(other, ours, horizon)
            seconds = np.log(cost[arm] / cost["recommended"])
            p = f"{sign_flips(logs):.4f}" if len(logs) > 1 else ""
            cells = [said_sooner(logs, other, ours), p, said_sooner(logs + seconds, other, ours)]
            lines.append([said(arm), str(horizon), str(len(logs)), *cells])
    return grid(("over", "steps", "targets", "times sooner", "p", "the same in seconds"), lines)


def over_adamw(read: Read) -> str:
    """`recommended` over the same with AdamW and unions of two, on the targets that both ran."""
    rows = [row for row in usual_of(read) if row["seed"] == 0]
    arms = {arm: (runs, steps) for (arm, _, steps), runs in by_arm(rows).items()}
    (adamw, horizon), (ours, _) = arms["recommended_adamw"], arms["recommended"]
    both = [target for target in ours if target in adamw]

    def mean(key: str, form: str) -> str:
        return interval([ours[target][0][key] - adamw[target][0][key] for target in both], form)

    sooner = times_sooner(adamw, ours, horizon)
    seen = np.log([first(adamw[t][0], horizon) / first(ours[t][0], horizon) for t in both])
    lines = [
        (
            "steps, the earlier evaluation counting for AdamW",
            ratio(sooner, False),
            f"{sign_flips(sooner):.4f}",
        ),
        (
            "steps, the first evaluation that shows it for both",
            ratio(seen, False),
            f"{sign_flips(seen):.4f}",
        ),
        ("strict rate at the end, difference", mean("strict rate", "+.2f"), ""),
        ("drift at the end, difference", mean("drift", "+.4f"), ""),
    ]
    return grid((f"over {len(both)} targets", "figure", "p"), lines)


def withheld(read: Read) -> str:
    """`recommended` without one element's pictures, beside the same targets with all of them."""
    rows = read("withheld.jsonl")
    targets = {row["target"] for row in rows}
    whole = [row for row in usual_of(read) if row["arm"] == "recommended" and row["seed"] == 0]
    shown = {"all": [row for row in whole if row["target"] in targets], "all but the first": rows}
    lines = []
    for name, part in shown.items():
        runs = [run for seeds in by_arm(part)["recommended", 40.0, 200].values() for run in seeds]
        last = [row["elements"] for row in part if row["step"] == row["steps"]]
        rates = [[row[key] for row in runs] for key in ("strict rate", "whole rate")]
        rates += [[one[0] for one in last], [float(np.mean(one[1:])) for one in last]]
        lines.append([name, str(len(runs)), *map(mean_rate, rates)])
    return grid(("elements shown", "targets", "strict rate", "whole", "first element", "others"), lines)


BLOCKS: dict[str, Callable[[Read], str]] = {
    "published-results": results,
    "published-results-long": partial(results, block=LONG),
    "published-over": over_plain,
    "published-pair": over_adamw,
    "published-together": together,
    "withheld": withheld,
    "emoji-claims": elsewhere,
}
