"""What the machine of bench/theory.py predicts, beside the trained network: tables of stored rows."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from bench.published_table import markdown
from bench.recovery_table import stored

KEPT = Path(__file__).parent / "results" / "kept.jsonl"  # the network's rows
FAILS = (0.9, 0.5)  # an element fails where the network shows it in fewer of its images
Scores = Callable[[dict], Sequence[float]]  # of a row, one an element, higher where it should come back
PREDICTORS: dict[str, Scores] = {
    "machine: similarity over the threshold": lambda r: [
        m - t for m, t in zip(r["element_means"], r["thresholds"][1:], strict=True)
    ],
    "machine: share of samples that pass": lambda r: r["elements"],
    "machine: latent error": lambda r: [-error for error in r["error"]],
    "machine: log odds of its places": lambda r: r["odds"],
    "machine: lowest log odds of a boundary": lambda r: [
        min((o for pair, o in r["pairs"].items() if int(pair.split(",")[0]) == k), default=9.0)
        for k in range(len(r["area"]))
    ],
    "no machine: autoencoder's copy over the threshold": lambda r: [
        c - t for c, t in zip(r["copies"], r["thresholds"][1:], strict=True)
    ],
    "no machine: area": lambda r: r["area"],
    "no machine: the threshold alone": lambda r: [-t for t in r["thresholds"][1:]],
}


def auc(scores: np.ndarray, fails: np.ndarray) -> float:
    """Chance that an element which comes back scores above one that fails."""
    back, failed = scores[~fails], scores[fails]
    if not len(back) or not len(failed):
        return float("nan")
    return float((back[:, None] > failed).mean() + (back[:, None] == failed).mean() / 2)


def auc_interval(targets: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[float, float, float]:
    """AUC over the elements of (scores, fails) of targets, and 95 % of it where targets are drawn again."""
    rng = np.random.default_rng(0)
    join = lambda chosen: [np.concatenate([targets[i][part] for i in chosen]) for part in (0, 1)]  # noqa: E731
    again = [auc(*join(rng.integers(len(targets), size=len(targets)))) for _ in range(1000)]
    low, high = np.nanquantile(again, (0.025, 0.975))
    return auc(*join(range(len(targets)))), float(low), float(high)


def network(arm: str, names: Iterable[str]) -> dict[str, dict]:
    """{target: row} of the trained network, of the arm's longest run."""
    wanted = {*names}
    rows = [r for r in stored(KEPT) if r["arm"] == arm and r["target"] in wanted]
    return {row["target"]: row for row in sorted(rows, key=lambda row: row["steps"])}


def compared(rows: list[dict], arm: str, names: Sequence[str], variant: str = "recommended") -> str:
    """How well each score tells the network's failing elements from the others: Markdown."""
    of_machine = {r["target"]: r for r in rows if r["variant"] == variant and r["target"] in names}
    of_network = network(arm, of_machine)
    both = [name for name in of_machine if name in of_network]
    head = f"`{arm}` against `{variant}`: the network's rows of {len(both)} of {len(names)} targets."
    if not both:
        return head
    lines = []
    for predictor, score in PREDICTORS.items():
        cells = [predictor]
        for limit in FAILS:
            parts = [(np.array(score(of_machine[n])), np.array(of_network[n]["elements"]) < limit) for n in both]
            failed, total = sum(int(f.sum()) for _, f in parts), sum(len(f) for _, f in parts)
            cells.append("{:.2f} [{:.2f}, {:.2f}]".format(*auc_interval(parts)) if 0 < failed < total else "")
            cells[-1] += f" ({failed} of {total})"
        lines.append(cells)
    return f"{head}\n\n{markdown(('score of an element', *(f'AUC, fails below {limit}' for limit in FAILS)), lines)}"


def table(rows: list[dict], names: Sequence[str], variants: Iterable[str]) -> str:
    """What each variant brings back, means over targets: Markdown."""
    lines = []
    for variant in variants:
        of_variant = [row for row in rows if row["variant"] == variant and row["target"] in names]
        if of_variant:
            mean = lambda read: f"{np.mean([read(row) for row in of_variant]):.2f}"  # noqa: B023, E731
            cells = [f"`{variant}`", str(len(of_variant)), mean(lambda r: r["rate"]), mean(lambda r: r["whole_rate"])]
            cells += [mean(lambda r: np.mean(r["elements"][:-1])), mean(lambda r: r["elements"][-1])]
            cells += [mean(lambda r: np.mean(r["element_means"][:-1])), mean(lambda r: r["element_means"][-1])]
            lines.append([*cells, mean(lambda r: np.mean(r["error"]))])
    head = ("variant", "targets", "strict", "whole", "things", "backdrop", "similarity of things", "of the backdrop")
    return markdown((*head, "latent error"), lines)
