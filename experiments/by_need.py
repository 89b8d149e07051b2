"""More exposures for elements that are expected to fail. Measured: no gain on one development target
of one run, nor on sixteen at once (0.39 of the images in place of 0.40), where the law of `python
-m bench.law` expects 0.65 in place of 0.58."""

import numpy as np

from silentbad.data.elements import capped
from silentbad.errors import UserError
from silentbad.settings.types import Positive, Unit


def by_need(
    rho: np.ndarray,
    records: np.ndarray,
    epoch: int,
    *,
    rates: list[Unit],
    slope: Positive = 1.26,
    cap: Positive = 4.0,
) -> np.ndarray:
    """The shares q (n,) that maximise the product of p_i = sigmoid(a_i + slope log(n q_i)).

    `rates` are the p_i at equal shares, in the order of the data's elements, as `python -m
    bench.law` expects them; `slope` is its coefficient of exposures. At the maximum (1 - p_i)/q_i
    is one number for all. Shuffled rates are the control; equal ones give equal shares."""
    n = len(records)
    if len(rates) != n:
        wrong = f"{len(rates)} rates for {n} elements; give one for each"
        raise UserError(f"memory.sampler.options.rates: {wrong}, in the order of the data")
    p = np.clip(rates, 1e-3, 1 - 1e-3)
    at_equal_shares = np.log(p / (1 - p))
    q = np.full(n, 1 / n)
    for _ in range(200):
        p = 1 / (1 + np.exp(-at_equal_shares - slope * np.log(n * q)))
        q = np.sqrt(q * (1 - p))
        q /= q.sum()
    return capped(q, cap)
