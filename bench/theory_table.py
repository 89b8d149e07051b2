"""What the machine of bench/theory.py predicts, beside the trained network: tables of stored rows."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from scipy.stats import spearmanr

from bench.published_table import interval, markdown, mean_rate
from bench.recovery_table import Read
from worlds.microworld.make import target_scene

FRESH = tuple(map(str, range(2760, 2776)))
KNOWN = tuple(map(str, range(2744, 2750)))  # whose network rows were known when the machine was chosen
FAILS = (0.9, 0.5)  # an element fails where the network shows it in fewer of its images
Scores = Callable[[dict], Sequence[float]]  # of a row, one an element, higher where it should come back
OVER = "machine over the threshold"
COPY = "copy over the threshold"
PREDICTORS: dict[str, Scores] = {
    OVER: lambda r: [m - t for m, t in zip(r["element_means"], r["thresholds"][1:], strict=True)],
    "machine: share of samples that pass": lambda r: r["elements"],
    "machine: latent error": lambda r: [-error for error in r["error"]],
    "machine: log odds of its places": lambda r: r["odds"],
    "machine: lowest log odds of a boundary": lambda r: [
        min((o for pair, o in r["pairs"].items() if int(pair.split(",")[0]) == k), default=9.0)
        for k in range(len(r["area"]))
    ],
    COPY: lambda r: [c - t for c, t in zip(r["copies"], r["thresholds"][1:], strict=True)],
    "no machine: area": lambda r: r["area"],
    "no machine: the threshold alone": lambda r: [-t for t in r["thresholds"][1:]],
}


# ---------------------------------------------------------------- against the network
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


def of_network(rows: Iterable[dict], arm: str, names: Sequence[str]) -> dict[str, dict]:
    """{target: row} of a trained arm, its longest run."""
    chosen = [row for row in rows if row["arm"] == arm and row["target"] in names]
    return {row["target"]: row for row in sorted(chosen, key=lambda row: row["steps"])}


def aucs(
    rows: list[dict], kept: list[dict], arm: str, names: Sequence[str], predictors: Iterable[str] = PREDICTORS
) -> list[list[str]]:
    """A line a score: how well it tells the network's failing elements from the others, for each of FAILS."""
    network = of_network(kept, arm, names)
    both = [row for row in rows if row["variant"] == "recommended" and row["target"] in network]
    lines = []
    for predictor in predictors:
        cells = [f"`{arm}`", predictor, f"{len(both)} of {len(names)}"]
        for limit in FAILS:
            parts = [
                (np.array(PREDICTORS[predictor](row)), np.array(network[row["target"]]["elements"]) < limit)
                for row in both
            ]
            failed, total = sum(int(fails.sum()) for _, fails in parts), sum(len(fails) for _, fails in parts)
            value = "{:.2f} [{:.2f}, {:.2f}] ".format(*auc_interval(parts)) if 0 < failed < total else ""
            cells.append(f"{value}({failed}/{total})" if total else "")
        lines.append(cells)
    return lines


HEAD = ("arm", "score of an element", "targets", *(f"AUC, fails below {limit}" for limit in FAILS))


def compared(rows: list[dict], kept: list[dict], names: Sequence[str] = FRESH) -> str:
    """Every arm that has rows of half of these targets, or `recommended` where none has: Markdown."""
    trained = dict.fromkeys(row["arm"] for row in kept if row["arm"] != "base")
    arms = [arm for arm in trained if len(of_network(kept, arm, names)) >= len(names) / 2] or ["recommended"]
    return markdown(HEAD, [line for arm in arms for line in aucs(rows, kept, arm, names)])


def compared_briefly(rows: list[dict], kept: list[dict]) -> str:
    """The frozen score and the copy: on targets known before, then against `recommended` on fresh ones: Markdown."""
    asked = (("own_pictures", KNOWN), ("recommended", FRESH))
    lines = [line for arm, names in asked for line in aucs(rows, kept, arm, names, (OVER, COPY))]
    return markdown(HEAD[:-1], [line[:-1] for line in lines])


# ---------------------------------------------------------------- the machine itself
MEANS: dict[str, Callable[[dict], float]] = {
    "strict rate": lambda row: row["rate"],
    "whole": lambda row: row["whole_rate"],
    "things": lambda row: float(np.mean(row["elements"][:-1])),
    "backdrop": lambda row: row["elements"][-1],
    "similarity of things": lambda row: float(np.mean(row["element_means"][:-1])),
    "of the backdrop": lambda row: row["element_means"][-1],
    "latent error": lambda row: float(np.mean(row["error"])),
}


BRIEFLY = ("recommended", "leak_free", "L0", "L1", "leak_free_unique", "unions_with_backdrop", "unions_without")


def all_elements(row: dict) -> float:
    """Share of samples that pass, mean over elements."""
    return float(np.mean(row["elements"]))


def table(rows: list[dict], names: Sequence[str] = FRESH) -> str:
    """What each variant brings back, means over targets: Markdown."""
    lines = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        of_variant = [row for row in rows if row["variant"] == variant and row["target"] in names]
        means = [f"{np.mean([read(row) for row in of_variant]):.2f}" for read in MEANS.values() if of_variant]
        lines += [[f"`{variant}`", str(len(of_variant)), *means]] if means else []
    return markdown(("variant", "targets", *MEANS), lines)


def briefly(rows: list[dict]) -> str:
    """Strict rate, things and backdrop of the variants that users read: Markdown."""
    lines = []
    for variant in BRIEFLY:
        of_variant = [row for row in rows if row["variant"] == variant and row["target"] in FRESH]
        means = [
            np.mean([MEANS[column](row) for row in of_variant]) for column in ("strict rate", "things", "backdrop")
        ]
        lines.append([f"`{variant}`", *(f"{mean:.2f}" for mean in means)])
    return markdown(("variant", "strict rate", "things", "backdrop"), lines)


def difference(rows: list[dict], variant: str, over: str, read: Callable[[dict], float]) -> str:
    """Mean difference of two variants over targets, with its interval."""
    of = {(row["target"], row["variant"]): read(row) for row in rows}
    both = [name for name in FRESH if (name, variant) in of and (name, over) in of]
    return interval([of[name, variant] - of[name, over] for name in both], "+.2f")


def over_recommended(rows: list[dict], variant: str) -> str:
    """The difference of the strict rate to `recommended`."""
    return difference(rows, variant, "recommended", MEANS["strict rate"])


def worn(target: str) -> bool:
    """Whether a target of three elements has a worn hat."""
    scene = target_scene(target)
    return len(scene.things) == 2 and any(thing.worn for thing in scene.things)


def claims(rows: list[dict]) -> str:
    """Each claim of the protocol about the machine itself, and its value on the frozen targets: Markdown."""
    frozen = [row for row in rows if row["target"] in FRESH]
    shown = [row for row in frozen if row["variant"] == "recommended"]
    alone = [row for row in frozen if row["variant"] == "leak_free"]
    closed = [row["rate"] for row in shown if min(row["pairs"].values()) > 0]
    open_ones = [row["rate"] for row in shown if min(row["pairs"].values()) <= 0]
    areas, alike = zip(
        *(pair for row in shown for pair in zip(row["area"][:-1], row["element_means"][:-1], strict=True)), strict=True
    )
    backdrop, things = MEANS["backdrop"], MEANS["things"]
    lines = [
        ("elements that pass", "at least 0.70", mean_rate([all_elements(row) for row in shown])),
        ("strict rate", "at least 0.25", mean_rate([row["rate"] for row in shown])),
        ("strict rate without unions", "at most 0.05", mean_rate([row["rate"] for row in alone])),
        (
            "strict rate, every boundary won and not",
            "the first is higher",
            f"{np.mean(closed):.2f} ({len(closed)}), {np.mean(open_ones):.2f} ({len(open_ones)})",
        ),
        ("region weight: elements without it", "fewer", difference(frozen, "no_region", "recommended", all_elements)),
        ("area of a thing and its similarity, rank correlation", "above 0", f"{spearmanr(areas, alike)[0]:+.2f}"),
        ("L1: elements", "within 0.05", difference(frozen, "L1", "leak_free", all_elements)),
        ("L1: backdrop", "no claim", difference(frozen, "L1", "leak_free", backdrop)),
        ("L0: backdrop", "at most -0.10", difference(frozen, "L0", "leak_free", backdrop)),
        ("L0: things", "no fall", difference(frozen, "L0", "leak_free", things)),
        ("unique words: backdrop", "rises", difference(frozen, "leak_free_unique", "leak_free", backdrop)),
        ("noise window: elements", "within 0.05", difference(frozen, "window", "recommended", all_elements)),
        ("backdrop in every union: strict rate", "no claim", over_recommended(frozen, "unions_with_backdrop")),
        ("backdrop in no union: strict rate", "no claim", over_recommended(frozen, "unions_without")),
        ("pairs, each with the backdrop: strict rate", "no claim", over_recommended(frozen, "pairs_with_backdrop")),
        (
            "strict rate, three elements with a worn hat",
            "below 0.10",
            ", ".join(f"{row['rate']:.2f}" for row in shown if worn(row["target"])),
        ),
    ]
    return markdown(("in the machine", "claimed", "measured"), [list(line) for line in lines])


BLOCKS: dict[str, Callable[[Read], str]] = {
    "theory": lambda read: table(read("theory.jsonl")) + "\n",
    "theory-briefly": lambda read: briefly(read("theory.jsonl")) + "\n",
    "theory-claims": lambda read: claims(read("theory.jsonl")) + "\n",
    "theory-network-briefly": lambda read: compared_briefly(read("theory.jsonl"), read("kept.jsonl")) + "\n",
}
