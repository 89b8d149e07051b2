"""Intervals of rates and of means over targets."""

import math
from collections.abc import Sequence

import numpy as np

from silentbad.measure.record import Detection

CONFIDENCE = 0.95  # of every interval
TAIL = (1 - CONFIDENCE) / 2  # on each side of it
BOOTSTRAPS = 2000  # resampled means for each interval
LEVEL = 0.05  # a p-value below it is significant
# Rate at which an image that is no recovery is taken to pass. None of 343 failures that no
# calibration had seen passed (95 % interval: up to 0.011, research/instrument.md). A calibration's
# own failures are no evidence for this rate.
FALSE_POSITIVES = 0.01


def binomial_cdf(n: int, p: float) -> np.ndarray:
    """P(K <= k) for k = 0..n, K ~ Binomial(n, p)."""
    if p <= 0 or p >= 1:
        return (np.arange(n + 1) >= (0 if p <= 0 else n)).astype(float)
    k = np.arange(1, n + 1)
    logs = np.concatenate([[0.0], np.cumsum(np.log(n - k + 1) - np.log(k))])
    k = np.arange(n + 1)
    return np.minimum(1.0, np.cumsum(np.exp(logs + k * np.log(p) + (n - k) * np.log1p(-p))))


def binomial_interval(k: int, n: int) -> tuple[float, float]:
    """Clopper-Pearson 95 % interval of a rate, k of n seen."""
    if n == 0:
        return 0.0, 1.0

    def solve(goal: float, index: int) -> float:  # the CDF at `index` falls as p rises
        low = 0.0
        high = 1.0
        for _ in range(60):
            p = (low + high) / 2
            low, high = (p, high) if binomial_cdf(n, p)[index] > goal else (low, p)
        return (low + high) / 2

    return (0.0 if k == 0 else solve(1 - TAIL, k - 1)), (1.0 if k == n else solve(TAIL, k))


def difference_interval(
    a: float, a_interval: tuple[float, float], b: float, b_interval: tuple[float, float]
) -> tuple[float, float]:
    """Interval of a - b from the rates' own intervals (Newcombe 1998, method 10)."""
    low = a - b - float(np.hypot(a - a_interval[0], b_interval[1] - b))
    high = a - b + float(np.hypot(a_interval[1] - a, b - b_interval[0]))
    return max(low, -1.0), min(high, 1.0)


def bootstrap_interval(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """95 % percentile interval of the mean over units (targets), values (T,); nan units are left
    out."""
    numbers = np.asarray(values, dtype=float)
    numbers = numbers[~np.isnan(numbers)]
    if len(numbers) < 2:
        return float("nan"), float("nan")
    picks = np.random.default_rng(0).integers(len(numbers), size=(BOOTSTRAPS, len(numbers)))
    low, high = np.quantile(numbers[picks].mean(1), [TAIL, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def detection(positives: Sequence[float], negatives: Sequence[float]) -> Detection | None:
    """How well a score tells positives from negatives: `auc` with its 95 % bootstrap interval, and
    with at least 100 negatives the true-positive rate at 1 % false positives with its binomial
    interval. None where either list is empty or holds a nan."""
    a = np.asarray(positives, float)
    b = np.asarray(negatives, float)
    if not len(a) or not len(b) or np.isnan(a).any() or np.isnan(b).any():
        return None

    def auc(x: np.ndarray, y: np.ndarray) -> float:
        return float((x[:, None] > y[None]).mean() + (x[:, None] == y[None]).mean() / 2)

    rng = np.random.default_rng(0)
    again = [auc(rng.choice(a, len(a)), rng.choice(b, len(b))) for _ in range(1000)]
    low, high = np.quantile(again, (0.025, 0.975))
    discrimination = Detection(
        auc=auc(a, b), positives=len(a), negatives=len(b), auc_low=float(low), auc_high=float(high)
    )
    if len(b) >= 100:
        above = int((a > np.sort(b)[int(np.ceil(0.99 * len(b))) - 1]).sum())
        discrimination.tpr = above / len(a)
        discrimination.tpr_low, discrimination.tpr_high = binomial_interval(above, len(a))
    return discrimination


def as_many_by_chance(hits: int, n: int, rate: float) -> float:
    """P(K >= hits) for K ~ Binomial(n, rate)."""
    return 1.0 if hits == 0 else max(float(1 - binomial_cdf(n, rate)[hits - 1]), 0.0)


def passes_alike(hits: int, n: int, other_hits: int, other_n: int, rate: float) -> bool:
    """Whether a control passes (`other_hits` of `other_n`) more often than by chance, and not
    significantly less often than the images it controls (`hits` of n; Fisher's exact test)."""
    if as_many_by_chance(other_hits, other_n, rate) >= LEVEL:
        return False
    return fewer_by_chance(other_hits, other_n, hits, n) >= LEVEL


def fewer_by_chance(hits: int, n: int, other_hits: int, other_n: int) -> float:
    """The one-sided p-value of Fisher's exact test: the probability of at most `hits` of n, if both
    groups have the same rate and `hits` + `other_hits` together."""
    total = hits + other_hits
    ways = [
        math.comb(n, k) * math.comb(other_n, total - k)
        for k in range(hits + 1)
        if total - k <= other_n
    ]
    return sum(ways) / math.comb(n + other_n, total)
