"""Shares of the element exposures by measured strength.

Legend: rho (H,n) strengths of n elements at H probes, records (n,) records of each, q (n,) shares.
"""

import numpy as np

from silentbad.data.elements import capped
from silentbad.settings.types import NotNegative, Positive, Strength, Unit


def weakest_first(
    rho: np.ndarray,
    records: np.ndarray,
    epoch: int,
    *,
    alpha: NotNegative = 1.0,
    uniform_share: Unit = 0.3,
    centre: Strength = 0.5,
    width: Positive = 0.15,
    cap: Positive = 4.0,
) -> np.ndarray:
    """Weak elements more often: q ~ p^-alpha, p = sigmoid((rho - centre)/width) of the last probes.
    log P(composed) ~ sum_i log p_i has the derivative 1/p_i."""
    n = len(records)
    if not len(rho):
        return np.full(n, 1 / n)
    p = 1 / (1 + np.exp(-((rho[-1] - centre) / width).clip(-30, 30)))
    return capped(uniform_share / n + (1 - uniform_share) * p**-alpha / (p**-alpha).sum(), cap)
