"""The bound on rates by group: what an oracle gains, and that a bound on rates takes some of it."""

import numpy as np
import pytest

from bench.headroom import BOUND, best_rates, best_within, bounds, gain


def test_an_oracle_takes_each_group_to_its_own_minimum():
    b, C = np.array([1.0, 1.0]), np.diag([1.0, 100.0])
    assert best_rates(b, C) == pytest.approx([1.0, 0.01])
    one = np.ones(2)
    within = best_within(b, C)
    assert within.max() / within.min() <= BOUND**2 * (1 + 1e-6)
    assert gain(best_rates(b, C), b, C) > gain(within, b, C) > gain(one, b, C)


def test_equal_groups_leave_no_headroom():
    model = {"names": ["down0.ff", "up0.ff"], "n": [10, 10], "b": [[1.0, 1.0]] * 2, "C": [np.eye(2).tolist()] * 2}
    figures = bounds(model, "both")
    assert figures.pop("parts") == 2
    assert [*figures.values()] == pytest.approx([1.0] * 5, rel=1e-3)
