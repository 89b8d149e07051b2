"""Shrunk AdamW: its formula, what it does to noise and to signal."""

from types import SimpleNamespace

import pytest
import torch

from experiments import shrinkage
from experiments.shrinkage import ShrunkAdamW, gains, noise


def steps(kind: type, gradients: list[torch.Tensor], **settings) -> list[torch.Tensor]:
    """Where a weight of zeros is after each of these gradients."""
    weight, places = torch.nn.Parameter(torch.zeros_like(gradients[0])), []
    optimizer = kind([weight], lr=1e-2, **{"weight_decay": 0.0, **settings})
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
        places.append(weight.detach().clone())
    return places


def test_a_shrunk_update_is_its_formula():
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(3, generator=generator, dtype=torch.float64) + 0.5 for _ in range(12)]
    places = steps(ShrunkAdamW, gradients, betas=(0.8, 0.9), weight_decay=0.1)
    for k in range(3):
        m = v = w = 0.0
        for t, gradient in enumerate(gradients, 1):
            g = float(gradient[k])
            m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
            mean, square = m / (1 - 0.8**t), v / (1 - 0.9**t)
            parts = [0.2 * 0.8**i for i in range(t)]
            rho = sum(x * x for x in parts) / sum(parts) ** 2  # the weights' own sums, not their closed form
            gain = 0.0 if t == 1 else min(max((1 - rho * square / mean**2) / (1 - rho), 0), 1)
            w -= 1e-2 * 0.1 * w + 1e-2 * gain * mean / (square**0.5 + 1e-8)
            assert float(places[t - 1][k]) == pytest.approx(w, rel=1e-6, abs=1e-12)


def test_shrinking_leaves_adamw_alone_where_there_is_no_noise():
    gradients = [torch.tensor([1.0, -3.0, 1e-3, 0.0])] * 20
    shrunk, plain = steps(ShrunkAdamW, gradients), steps(torch.optim.AdamW, gradients)
    assert not shrunk[0].any()  # one gradient tells nothing
    assert torch.allclose(shrunk[-1], plain[-1] - plain[0], rtol=1e-4)


@pytest.mark.parametrize("signal, walk", [(0.0, 0.55), (0.3, 0.85), (3.0, 1.05)])
def test_shrinking_halves_the_walk_of_noise_not_of_signal(signal, walk):
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(4096, generator=generator) + signal for _ in range(100)]
    shrunk, plain = (steps(kind, gradients)[-1].square().mean().sqrt() for kind in (ShrunkAdamW, torch.optim.AdamW))
    assert float(shrunk / plain) < walk
    assert signal < 1 or float(shrunk / plain) > 0.9


@pytest.mark.parametrize("signal, error", [(0.0, 0.5), (0.1, 0.75), (0.3, 1.5), (1.0, 1.5), (3.0, 1.5)])
def test_the_shrunk_mean_is_nearer_a_small_mean(signal, error):
    """Shrinking a weight by itself has its price where the mean is the size of the noise left in the average, 0.23
    sigma at beta1 0.9."""
    generator = torch.Generator().manual_seed(0)
    draws = signal + torch.randn(100, 8192, generator=generator)
    ages = 0.9 ** torch.arange(99.0, -1, -1)
    mean = ages / ages.sum() @ draws
    gain = gains([mean / draws.square().mean(0).sqrt()], [noise(0.9, 100)])[0]
    shrunk, plain = (float((estimate - signal).square().mean()) for estimate in (gain * mean, mean))
    assert shrunk / plain < error


def test_shrunk_updates_do_not_depend_on_how_tensors_are_grouped(monkeypatch):
    sizes, seen = (5, 3, 9, 2), []
    for together, device in ((2**24, "cpu"), (8, "cuda")):
        monkeypatch.setattr(shrinkage, "TOGETHER", together)
        stand_ins = [SimpleNamespace(numel=lambda n=n: n, device=SimpleNamespace(type=device)) for n in sizes]
        seen.append([[p.numel() for p in batch] for batch in shrinkage.batches(stand_ins)])
    assert seen == [[[5], [3], [9], [2]], [[5, 3], [9], [2]]]
    generator = torch.Generator().manual_seed(0)
    weights = [[torch.nn.Parameter(torch.zeros(n)) for n in sizes] for _ in range(2)]
    one_by_one, at_once = (ShrunkAdamW(one) for one in weights)
    for _ in range(4):
        for one, other in zip(*weights, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        one_by_one.step()
        with torch.no_grad():
            at_once._update(at_once.param_groups[0], weights[1])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
