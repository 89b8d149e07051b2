"""The similarity from which an image counts as recovered: given, or calibrated on images that are no recovery."""

from pathlib import Path

import numpy as np

from silentbad.errors import UserError
from silentbad.readers import id_text, json_lines, open_image, safe_path
from silentbad.similarity import binomial_cdf


def calibrate(null, false_positive_rate: float, groups=None, confidence: float = 0.95) -> dict:
    """Threshold that a fresh null score exceeds with probability at most alpha, with its interval.

    null (n,) similarities of images that are no recovery, groups (n,) their targets. The value is the
    conformal order statistic ceil((n+1)(1-alpha)), so the rate holds on average over null sets; with fewer
    than 1/alpha - 1 scores it is the largest, and `attained` = 1/(n+1) says what that is worth. The interval
    of the 1-alpha quantile is from order statistics (distribution-free, scores independent); `held_out` is
    the rate on each target under a threshold from the others: it sees the dependence inside a target.
    """
    null = np.asarray(null, dtype=float)
    n, alpha = len(null), false_positive_rate
    if n == 0 or not 0 < alpha < 1:
        raise UserError(f"calibration needs null scores and 0 < rate < 1; got {n} scores and rate {alpha}")
    ordered = np.sort(null)

    def order_statistic(x: np.ndarray) -> float:
        k = int(np.ceil((len(x) + 1) * (1 - alpha) - 1e-9))
        return float(np.nextafter(x[min(k, len(x)) - 1], np.inf))  # recovered means >=, so just above it

    cdf, tail = binomial_cdf(n, 1 - alpha), (1 - confidence) / 2  # of the count below the quantile
    low, high = int(np.searchsorted(cdf, tail)), int(np.searchsorted(cdf, 1 - tail))
    held_out = None
    if groups is not None and len(set(groups)) > 1:
        groups = np.asarray(groups)
        splits = [(null[groups == g], np.sort(null[groups != g])) for g in sorted(set(groups.tolist()))]
        held_out = float(np.mean([np.mean(inside >= order_statistic(rest)) for inside, rest in splits]))
    return {
        "value": order_statistic(ordered), "low": float(ordered[max(low - 1, 0)]) if low > 0 else None,
        "high": float(ordered[high]) if high < n else None, "n": n, "false_positive_rate": alpha,
        "attained": max(alpha, 1 / (n + 1)), "confidence": confidence, "held_out": held_out,
    }  # fmt: skip


def thresholds(null: list[dict], value: float | None, false_positive_rate: float, source: str) -> tuple[dict, dict]:
    """(of images, of elements): given, or calibrated on null rows; elements without nulls use the images'.

    How alike two backdrops are says little about two fish, so an element has its own threshold, in `each` (a list
    per target), where its nulls are enough for the rate; otherwise that of all elements together.
    """

    def fit(scores: list[tuple[float, int]]) -> dict:
        sims, groups = zip(*scores, strict=True)
        return {**calibrate(sims, false_positive_rate, groups), "source": source}

    parts = [(s, row["target"]) for row in null for s in row["elements"] if s is not None]
    given = {"value": value, "source": "given"}
    whole = given if value is not None else fit([(row["sim"], row["target"]) for row in null])
    element = fit(parts) if parts else dict(whole)
    enough = 1 / false_positive_rate - 1
    each: dict[int, list[float]] = {}
    for j in sorted({row["target"] for row in null}):
        columns = zip(*(row["elements"] for row in null if row["target"] == j), strict=True)
        own = [[s for s in column if s is not None] for column in columns]
        each[j] = [fit([(s, j) for s in x])["value"] if len(x) >= enough else element["value"] for x in own]
    return whole, {**element, "each": [each.get(j) for j in range(max(each, default=-1) + 1)]}


def of_element(threshold: dict, target: int, element: int) -> float:
    """The threshold of one element: its own where it has one."""
    each = threshold.get("each") or []
    own = each[target] if target < len(each) else None
    return own[element] if own else threshold["value"]


def load_redraws(targets_file: str | None, targets: list, decode: bool = False) -> list[tuple[int, Path]]:
    """redraws.jsonl beside the targets -> (target index, file): other images of the captions, the nulls.

    Every line is checked, also one of a target that is not there, which is then left out; `decode` opens the images.
    """
    root = Path(targets_file or ".")
    file = (root if root.is_dir() else root.parent) / "redraws.jsonl"
    if targets_file is None or not file.is_file():
        return []
    index, found = {t.target_id: j for j, t in enumerate(targets)}, []
    for where, entry in json_lines(file):
        for key in ("target_id", "image"):
            if entry.get(key) in (None, ""):
                raise UserError(f"{where}: a redraw needs {key}")
        target_id = id_text(entry["target_id"], "target_id", where)
        image = safe_path(file.parent, entry["image"], where)
        if target_id not in index:
            continue
        if not image.is_file():
            raise UserError(f"{where}: no file {image}")
        if decode:
            open_image(image, where)
        found.append((index[target_id], image))
    return found
