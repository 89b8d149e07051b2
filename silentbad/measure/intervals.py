"""Intervals of rates and of means over targets."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from scipy.special import bdtrc, betaincinv

from silentbad.measure.record import Detection

CONFIDENCE = 0.95  # of every interval
TAIL = (1 - CONFIDENCE) / 2  # on each side of it
BOOTSTRAPS = 2000  # resampled means for each interval
# With fewer, no interval of resampled targets covers 95 %: five agree by chance in 2 of 2^5 cases
FEW_TARGETS = 6
LEVEL = 0.05  # a p-value below it is significant
# Rate at which an image that is no recovery is taken to pass. Of 576 failures that no calibration
# had seen 8 passed, all of them tinted (95 % interval: 0.006 to 0.027, research/instrument.md). A
# calibration's own failures are no evidence for this rate.
FALSE_POSITIVES = 0.01


def binomial_interval(k: float, n: int, tests: int = 1) -> tuple[float, float]:
    """Clopper-Pearson 95 % interval of a rate, k of n seen; of the one that was chosen among `tests`
    by its count (Bonferroni)."""
    tail = TAIL / tests
    low = 0.0 if k == 0 else float(betaincinv(k, n - k + 1, tail))
    high = 1.0 if k == n else float(betaincinv(k + 1, n - k, 1 - tail))
    return low, high


def difference_interval(
    a: float, a_interval: tuple[float, float], b: float, b_interval: tuple[float, float]
) -> tuple[float, float]:
    """Interval of a - b from the rates' own intervals: the form of Newcombe 1998, method 10, which
    has Wilson's in place of exact ones."""
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
    low, high = np.quantile(numbers[picks].mean(1), [TAIL, 1 - TAIL])
    return float(low), float(high)


def rate_interval(rates: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """95 % interval of the mean of the rates (T,) of two targets or more: by `bootstrap_interval`.
    Binomial over the targets, which is wider, where these are few or agree: resampling would call
    that certain."""
    rates = np.asarray(rates, dtype=float)
    if len(rates) < FEW_TARGETS or (rates == rates[0]).all():
        return binomial_interval(float(rates.sum()), len(rates))
    return bootstrap_interval(rates)


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
    low, high = np.quantile(again, [TAIL, 1 - TAIL])
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
    return 1.0 if hits == 0 else float(bdtrc(hits - 1, n, rate))


def over_orders(p_values: Iterable[float]) -> float:
    """One p-value from those of the orders of a prompt. Their images share the noise, so the lowest
    counts, corrected for their number (Bonferroni)."""
    p_values = [*p_values]
    return min(1.0, len(p_values) * min(p_values))


def passes_alike(counts: Sequence[tuple[int, int]], control: tuple[int, int], rate: float) -> bool:
    """Whether a control passes (hits, images) more often than by chance, and not significantly less
    often than the images that it controls, in any order of their prompt (Fisher's exact test)."""
    return (
        as_many_by_chance(*control, rate) < LEVEL
        and over_orders(fewer_by_chance(*control, *of_order) for of_order in counts) >= LEVEL
    )


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
