"""Spectral updates: the iteration, the size of an update, what has AdamW, and that the rare is learnt as fast."""

from collections.abc import Sequence

import pytest
import torch
from diffusers import UNet2DConditionModel
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from silentbad.control.spectral import (
    ITERATIONS,
    SpectralAdamW,
    by_gram,
    directly,
    orthogonalise,
    split,
)
from silentbad.errors import UserError
from tests.tiny import tiny_unet

SHAPES = [(8, 8), (8, 40), (40, 8), (16, 20)]


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("iteration", ITERATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_orthogonal_update_keeps_the_singular_vectors(shape, iteration):
    matrix = gaussian(*shape)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    rotated = u.mT @ orthogonalise(matrix, iteration) @ v.mT
    assert torch.allclose(rotated, torch.diag(rotated.diagonal()), atol=1e-9)
    held = rotated.diagonal()[s / s.norm() > 1e-2]
    assert float(held.min()) > 0.6 and float(held.max()) < 1.25


@pytest.mark.parametrize("shape", [(8, 40), (40, 8), (6, 6)], ids=str)
def test_groups_of_rows_are_orthogonal_by_themselves(shape):
    matrix = gaussian(*shape)
    moved = orthogonalise(matrix, row_groups=2)
    rows, moved_rows = (x if shape[0] <= shape[1] else x.mT for x in (matrix, moved))
    half = len(rows) // 2
    for part in (slice(half), slice(half, None)):
        assert torch.equal(moved_rows[part], orthogonalise(rows[part]))
    assert abs(moved.norm() / orthogonalise(matrix).norm() - 1) < 0.15


def test_the_gram_matrix_gives_the_same_polynomial():
    x = gaussian(8, 40)
    x = x / x.norm()
    for steps in ITERATIONS.values():
        assert torch.allclose(by_gram(x, steps), directly(x, steps), atol=1e-9)


@pytest.mark.parametrize("iteration, lowest, highest", [("newton_schulz", 0.68, 1.14), ("polar_express", 0.86, 1.13)])
def test_singular_values_end_near_one(iteration, lowest, highest):
    values = torch.logspace(-2, 0, 2000, dtype=torch.float64)
    for a, b, c in ITERATIONS[iteration]:
        values = a * values + b * values**3 + c * values**5
    assert lowest <= float(values.min()) and float(values.max()) <= highest


def test_three_steps_leave_what_is_small_small():
    values = torch.tensor([1e-3, 1e-2, 0.1, 0.5], dtype=torch.float64)
    for a, b, c in ITERATIONS["newton_schulz_3"]:
        values = a * values + b * values**3 + c * values**5
    assert values[0] < 0.042 and 0.35 < values[1] < 0.42
    assert 0.6 < float(values[2:].min()) and float(values[2:].max()) < 1.2


def stepped(parameter: nn.Parameter, gradients: list[torch.Tensor], **settings) -> torch.Tensor:
    optimizer = SpectralAdamW([{"params": [parameter], **settings}], lr=1e-2, weight_decay=0.1)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def test_a_kernel_moves_by_its_formula():
    start, gradients = gaussian(6, 3, 2, 2), [gaussian(6, 3, 2, 2, seed=seed) for seed in (1, 2)]
    weight, average = start.clone(), torch.zeros_like(start)
    for gradient in gradients:
        average = 0.95 * average + 0.05 * gradient
        change = orthogonalise((0.05 * gradient + 0.95 * average).reshape(6, 12)).reshape(6, 3, 2, 2)
        weight = weight * (1 - 1e-3) - 1e-2 * 0.2 * 12**0.5 * change
    assert torch.allclose(stepped(nn.Parameter(start), gradients, spectral=True), weight, atol=1e-9)


def test_what_is_not_spectral_has_adamw():
    start, gradients = gaussian(7), [gaussian(7, seed=seed) for seed in range(1, 5)]
    adamw = nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([adamw], lr=1e-2, weight_decay=0.1)
    for gradient in gradients:
        adamw.grad = gradient.clone()
        optimizer.step()
    assert torch.allclose(stepped(nn.Parameter(start.clone()), gradients), adamw, atol=1e-9)


def test_weights_are_spectral_and_tables_norms_and_biases_not():
    model = nn.ModuleDict(
        {"table": nn.Embedding(9, 4), "linear": nn.Linear(4, 4), "conv": nn.Conv2d(1, 2, 3), "norm": nn.LayerNorm(4)}
    )
    groups = split([{"params": [*model.parameters()], "name": "all"}], model)
    chosen = {id(p) for group in groups if group["spectral"] for p in group["params"]}
    assert chosen == {id(model["linear"].weight), id(model["conv"].weight)}
    assert [group["name"] for group in groups] == ["all", "all"]
    assert sum(len(group["params"]) for group in groups) == len([*model.parameters()])


def learnt(kind: type, **settings) -> torch.Tensor:
    """How much of each of 8 pairs a linear memory holds, the first shown 64 times as often as the last four."""
    keys = torch.linalg.qr(gaussian(16, 16))[0][:8]
    values = torch.linalg.qr(gaussian(16, 16, seed=1))[0][:8]
    share = torch.tensor([64.0, 32, 16, 8, 1, 1, 1, 1], dtype=torch.float64)
    weight = nn.Parameter(torch.zeros(16, 16, dtype=torch.float64))
    optimizer = kind([{"params": [weight], **settings}], lr=1e-2, weight_decay=0.0)
    for _ in range(10):
        optimizer.zero_grad()
        error = keys @ weight.mT - values
        ((share / share.sum())[:, None] * error.square()).sum().backward()
        optimizer.step()
    return (keys @ weight.detach().mT * values).sum(1)


def test_the_rare_is_learnt_as_fast_as_the_frequent():
    """2509.26030, their one-layer memory: Muon is balanced over classes, Adam is not."""
    spectral, adam = learnt(SpectralAdamW, spectral=True), learnt(torch.optim.AdamW)
    assert float(spectral[4:].mean() / spectral[0]) > 0.5
    assert float(adam[4:].mean() / adam[0]) < 0.5 * float(spectral[4:].mean() / spectral[0])


def test_a_momentum_out_of_range_is_refused():
    with pytest.raises(ValueError, match="momentum"):
        SpectralAdamW([nn.Parameter(torch.zeros(2, 2))], momentum=1.0)


@pytest.mark.parametrize(
    "dtype, tflop", [(torch.float32, 11.4), pytest.param(torch.bfloat16, 22.4, marks=pytest.mark.thorough)]
)
def test_the_cost_at_the_size_of_stable_diffusion(dtype, tflop):
    with torch.device("meta"):
        unet = UNet2DConditionModel(sample_size=64, cross_attention_dim=768)
    assert round(sum(p.numel() for p in unet.parameters()) / 1e6, 1) == 859.5
    with FlopCounterMode(display=False) as counter:
        for parameter in unet.parameters():
            if parameter.ndim > 1:
                orthogonalise(parameter.detach().to(dtype).flatten(1))
    assert counter.get_total_flops() / 1e12 == pytest.approx(tflop, abs=0.05)


def updated(without: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """A tiny UNet after two updates."""
    torch.manual_seed(0)
    unet = tiny_unet()
    groups = split([{"params": [*unet.parameters()], "name": "all"}], unet, without)
    optimizer = SpectralAdamW(groups, lr=1e-2)
    for seed in (1, 2):
        torch.manual_seed(seed)
        for p in unet.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    return {name: p.detach() for name, p in unet.named_parameters()}


def test_layers_left_out_move_as_under_adamw():
    """Time embeddings and projections are few parameters and a sixth of the iteration's time."""
    plain, without = updated(), updated(without=["time", "proj"])
    torch.manual_seed(0)
    unet = tiny_unet()
    adamw = torch.optim.AdamW(unet.parameters(), lr=1e-2)
    for seed in (1, 2):
        torch.manual_seed(seed)
        for p in unet.parameters():
            p.grad = torch.randn_like(p)
        adamw.step()
    by_adamw = dict(unet.named_parameters())
    for name in ("time_embedding.linear_1.weight", "mid_block.attentions.0.proj_in.weight"):
        assert torch.allclose(without[name], by_adamw[name], atol=1e-6)
        assert not torch.allclose(plain[name], by_adamw[name], atol=1e-6)
    name = "mid_block.resnets.0.conv1.weight"
    assert torch.equal(without[name], plain[name])
    with pytest.raises(UserError, match="spectral_except: 'tim' names no layer of this model; did you mean 'time'"):
        updated(without=["tim"])
