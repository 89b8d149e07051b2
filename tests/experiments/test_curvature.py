"""Rates from curvature: each role goes to its own minimum, and a run's rates come to differ by role."""

import numpy as np
import pytest

from experiments.curvature import best_rates, role_of
from silentbad.settings import user_code
from tests.toy import experiment
from tests.training import step_once


def test_a_curved_role_is_slower_within_the_bound():
    a = best_rates(np.ones(3), np.diag([1.0, 4.0, 9.0]), bound=4.0)
    assert a[0] / a[1] == pytest.approx(4, rel=0.01) and a[0] / a[2] == pytest.approx(9, rel=0.01)
    a = best_rates(np.ones(2), np.diag([1.0, 1e4]), bound=4.0)
    assert a[0] / a[1] == pytest.approx(16, rel=1e-3)


def test_a_run_has_one_rate_a_role(build):
    run = build(
        train_batch_size=4,
        hooks=experiment("curvature", "Curvature"),
        hook_options=f'{{"{experiment("curvature", "Curvature")}": {{"every": 2}}}}',
        **{
            "gradient_control.name": experiment("curvature"),
            "gradient_control.warmup": 0,
            "gradient_control.refresh": 1,
            "gradient_control.max_log_step": 10,
        },
    )
    for _ in range(8):
        step_once(run)
    rates = user_code.load("hooks", experiment("curvature", "RATES"))
    (hook,) = (hook for hook in run.hooks if type(hook).__name__ == "Curvature")
    state = hook.state_dict()
    measured = hook.measured
    rates.clear()
    hook.measured = None
    hook.load_state_dict(state)
    assert hook.measured is measured and rates == state["rates"]
    assert {"ff", "attn", "resnet"} <= rates.keys() and max(rates.values()) > 1.1 * min(rates.values())
    by_role: dict[str, set[float]] = {}
    for name, a in run.control.multipliers.items():
        by_role.setdefault(role_of(name), set()).add(round(a, 5))
    assert all(len(values) == 1 for values in by_role.values())
    assert len(set.union(*by_role.values())) > 1
