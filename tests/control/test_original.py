"""The rule that gradient control replaces: what it did, and why multipliers on gradients do nothing."""

import math

import pytest
import torch
from torch import nn

from gradient_control import (
    adjust_gradient_scale,
)
from tests.toy import GSNR, Toy, config, controlled, equal, run


def original(model, layer_scales, current_gradients, beta=0.9):
    """The user's function, line for line."""
    param_grad_means = []
    for grad in current_gradients:
        if grad is not None:
            param_grad_means.append(grad.abs().mean())
        else:
            param_grad_means.append(torch.tensor(0.0, device=layer_scales.device))
    param_grad_means = torch.stack(param_grad_means)
    scaling_factors = param_grad_means / (param_grad_means.sum() + 1e-10)
    return layer_scales * beta + scaling_factors * (1 - beta)


def test_adjust_gradient_scale_is_the_users_rule():
    rng, ours, theirs = torch.Generator().manual_seed(0), torch.ones(4), torch.ones(4)
    for _ in range(20):
        grads = [torch.randn(5, 7, generator=rng), None, 3 * torch.randn(11, generator=rng), torch.zeros(2)]
        ours = adjust_gradient_scale(None, ours, grads)
        theirs = original(None, theirs, grads)
    assert torch.allclose(ours, theirs, rtol=1e-6)


def test_adjust_gradient_scale_edge_cases():
    scales = torch.tensor([0.5, 0.7])
    assert torch.equal(adjust_gradient_scale(None, scales, [None, None]), scales)
    assert torch.equal(adjust_gradient_scale(None, scales, [torch.zeros(3), torch.zeros(2)]), scales)
    for bad in (math.nan, math.inf):  # the original stays NaN for ever
        assert torch.equal(adjust_gradient_scale(None, scales, [torch.tensor([bad]), torch.ones(2)]), scales)
    tiny = adjust_gradient_scale(None, scales, [torch.full((3,), 1e-12), torch.full((2,), 3e-12)])
    assert torch.allclose(tiny, 0.9 * scales + 0.1 * torch.tensor([0.25, 0.75]))  # the original's 1e-10 hides these
    halves = [torch.full((3,), 3e4).half(), torch.empty(0)]
    assert torch.allclose(adjust_gradient_scale(None, scales, halves), 0.9 * scales + torch.tensor([0.1, 0.0]))
    assert adjust_gradient_scale(None, torch.ones(0), []).shape == (0,)
    with pytest.raises(ValueError, match="2 layer_scales need as many gradients, got 1"):
        adjust_gradient_scale(None, scales, [torch.ones(1)])


def displacement(scale_of, steps=60):
    model = Toy()
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for step in range(steps):
        model.grads(step, scale=30.0)  # scaled or not, well above Adam's eps
        for i, p in enumerate(model.parameters()):
            p.grad *= scale_of(i, step)
        optimizer.step()
    return [p.detach() - s for p, s in zip(model.parameters(), start, strict=True)]


@pytest.mark.parametrize("scale", [1e-3, 10.0])
def test_constant_gradient_scaling_does_not_move_adamw(scale):
    for scaled, plain in zip(displacement(lambda i, t: scale), displacement(lambda i, t: 1.0), strict=True):
        assert (scaled - plain).norm() / plain.norm() < 1e-4


def test_why_adjust_gradient_scale_was_replaced():
    """Its settled scales change nothing under AdamW, are 1/N on average, and undo the clipping threshold."""
    model, scales = Toy(), torch.ones(5)
    for step in range(200):
        model.grads(step)
        scales = adjust_gradient_scale(model, scales, [p.grad for p in model.parameters()])
    assert scales.mean().item() == pytest.approx(1 / 5, rel=1e-4) and scales.max() / scales.min() > 3
    for scaled, plain in zip(displacement(lambda i, t: scales[i]), displacement(lambda i, t: 1.0), strict=True):
        assert (scaled - plain).norm() / plain.norm() < 1e-4
    before = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    after = nn.utils.get_total_norm([s * p.grad for s, p in zip(scales, model.parameters(), strict=True)])
    assert after < before / 2
    control, optimizer = controlled(model, config(GSNR))  # its successor moves AdamW
    moved, plain = run(model, control, optimizer, range(60)), displacement(lambda i, t: 1.0)
    starts = [p.detach() for p in Toy().parameters()]
    change = [(m - s - d).norm() / d.norm() for m, s, d in zip(moved, starts, plain, strict=True)]
    assert max(change) > 0.2


def test_a_layer_with_small_gradients_stops():
    """Its share of the sum brings them under Adam's eps, where no other scale of its own would matter."""
    gradients = [torch.ones(4), torch.full((4,), 1e-6)]
    scales = torch.ones(2)
    for _ in range(300):
        scales = adjust_gradient_scale(None, scales, gradients)
    moved = []
    for scale in (1.0, scales[1]):
        weight = nn.Parameter(torch.zeros(4))
        weight.grad = scale * gradients[1]
        torch.optim.AdamW([weight], lr=1.0).step()
        moved.append(float(weight.detach().abs().max()))
    assert moved[0] > 0.9 and moved[1] < 1e-3


def test_gradient_mode_scales_once_per_optimizer_step(capsys):
    model = Toy()
    control, optimizer = controlled(model, config("mean_abs", apply="gradient"))
    assert "next to no effect" in capsys.readouterr().err and len(optimizer.param_groups) == 1
    run(model, control, optimizer, range(12))
    model.grads(12)
    before = [p.grad.clone() for p in control.params]
    control.params[0].grad = None
    control.before_step(12)
    a = [*control.multipliers.values()]
    assert control.params[0].grad is None and len(set(a)) == 5
    assert equal([p.grad for p in control.params[1:]], [g * x for g, x in zip(before[1:], a[1:], strict=True)])
