"""What the rows of bench/published.py say: one line a run and target."""

from collections.abc import Callable


def sustained(curve: dict[int, float], level: float = 0.5) -> int | None:
    """First step from which on the rate is at least `level` at every evaluation; None: never."""
    steps = sorted(curve)
    below = [i for i, step in enumerate(steps) if curve[step] < level]
    first = below[-1] + 1 if below else 0
    return steps[first] if first < len(steps) else None


def figures(rows: list[dict]) -> dict[str, float | int | None]:
    """Of one run on one target; drift is the rise of the error on held-out clean pictures."""
    by_step = {row["step"]: row for row in rows}
    start, last = by_step[0], by_step[max(by_step)]

    def curve(value: Callable[[dict], float]) -> dict[int, float]:
        return {step: value(row) for step, row in by_step.items()}

    return {
        "strict": sustained(curve(lambda row: row["rate"])),
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
    for name, mine in sorted(runs_of(rows).items()):
        shown = figures(mine)
        lines.append([*map(str, name), *("never" if v is None else f"{v:.4g}" for v in shown.values())])
        columns = (*head, *shown)
    return "\n".join("| " + " | ".join(line) + " |" for line in (columns, ["---"] * len(columns), *lines) if lines)
