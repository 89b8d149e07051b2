"""Exposures by need: the maximum of a product."""

import numpy as np
import pytest

from experiments.by_need import by_need
from silentbad.errors import UserError

NOTHING = np.zeros((0, 4))


def product(q: np.ndarray, rates: list[float], slope: float = 1.26) -> float:
    odds = np.log(np.array(rates) / (1 - np.array(rates)))
    return float((1 / (1 + np.exp(-odds - slope * np.log(len(q) * q)))).prod())


@pytest.mark.parametrize("rates", [[0.62, 0.97, 0.97, 0.9], [0.05, 0.5, 0.9, 0.99]])
def test_no_other_shares_have_a_higher_product(rates):
    q = by_need(NOTHING, np.ones(4), 0, rates=rates)
    assert q.sum() == pytest.approx(1) and q[0] == q.max()
    best = product(q, rates)
    assert best > product(np.full(4, 0.25), rates)
    for noise in np.random.default_rng(0).normal(scale=0.05, size=(50, 4)):
        other = q * np.exp(noise)
        assert product(other / other.sum(), rates) <= best + 1e-9


def test_equal_rates_share_alike_and_a_cap_holds():
    assert np.allclose(by_need(NOTHING, np.ones(4), 0, rates=[0.9] * 4), 0.25)
    assert by_need(NOTHING, np.ones(4), 0, rates=[0.01, 0.99, 0.99, 0.99], cap=2.0).max() == pytest.approx(0.5)
    with pytest.raises(UserError, match="2 rates for 4 elements"):
        by_need(NOTHING, np.ones(4), 0, rates=[0.5, 0.5])
