"""The hypergradient: groups whose updates serve rehearsals are faster, and a skipped update says nothing."""

from types import SimpleNamespace

import pytest
import torch

from experiments.hypergradient import TRANSFER, Transfer, hypergradient
from tests.toy import Toy, stats_of


@pytest.fixture
def hook():
    TRANSFER.clear()
    return Transfer(SimpleNamespace(model=Toy(), device=torch.device("cpu")), averaging=0.9)


def step(hook: Transfer, number: int, signs: list[float], skipped: bool = False) -> None:
    """One update against a gradient of ones, then a rehearsal whose gradient has these signs."""
    parameters = list(hook.sample.params)
    for p, sign in zip(parameters, signs, strict=True):
        p.grad = torch.zeros_like(p)
        hook.before_backward(torch.zeros(1), ["rehearsal"])
        p.grad = sign * torch.ones_like(p)
    hook.earlier = torch.zeros_like(hook.earlier)
    hook.after_backward()
    hook.before_step(number)
    with torch.no_grad():
        for p in parameters:
            p -= 0.1
    hook.after_step(number + 1, skipped)


def test_groups_that_serve_rehearsals_are_faster(hook):
    signs = [1.0, -1.0, 1.0, -1.0, 1.0]
    for number in range(20):
        step(hook, number, signs)
    rates = hypergradient(stats_of(groups=5, names=hook.names)).tolist()
    assert all((rate > 1) == (sign > 0) for rate, sign in zip(rates, signs, strict=True))
    assert set(hypergradient(stats_of()).tolist()) == {1.0}  # of groups that nothing was measured of


def test_the_gradient_of_others_is_not_taken_in(hook):
    step(hook, 0, [1.0] * 5)
    learned = hook.value.clone()
    hook.before_backward(torch.zeros(1), ["element"])
    hook.after_backward()
    assert torch.equal(hook.value, learned)


def test_a_skipped_update_says_nothing(hook):
    for number in range(3):
        step(hook, number, [1.0] * 5)
    learned = hook.value.clone()
    assert learned.all() and hook.update.any()
    hook.after_step(4, skipped=True)
    hook.learn(torch.ones_like(hook.update))
    assert torch.equal(hook.value, learned)


def test_a_state_is_taken_up_by_the_rule(hook):
    step(hook, 0, [1.0] * 5)
    step(hook, 1, [1.0] * 5)
    rates = hypergradient(stats_of(groups=5, names=hook.names))
    state = hook.state_dict()
    TRANSFER.clear()
    hook.load_state_dict(state)
    assert torch.equal(hypergradient(stats_of(groups=5, names=hook.names)), rates)
