"""Statistics of gradients by group, and the projection of multipliers."""

import math

import pytest
import torch
from torch import nn

from silentbad.control.statistics import Sample, Statistics, project
from tests.toy import Toy, config, controlled, equal, run


@pytest.mark.parametrize("seed", range(20))
def test_projection_holds_bounds_and_mean_one_together(seed):
    rng = torch.Generator().manual_seed(seed)
    groups, A, delta = 1 + seed * 7, 1.5 + seed / 4, 0.05 + seed / 10
    n = torch.logspace(0, 8, groups).double()[torch.randperm(groups, generator=rng)]
    past = torch.ones(groups).double()
    for _ in range(6):  # a random walk of extreme raw values, each step starting from the last
        log_x = torch.randn(groups, generator=rng).double() * 10 ** (seed % 3)
        low, high = (past * math.exp(-delta)).clamp(min=1 / A), (past * math.exp(delta)).clamp(max=A)
        a = project(log_x, n, low, high)
        assert ((n * a**2).sum() / n.sum()).item() == pytest.approx(1, abs=1e-6)
        assert a.min() >= 1 / A - 1e-6 and a.max() <= A + 1e-6
        assert ((a / past).log().abs() <= delta + 1e-6).all()
        past = a


def test_projection_keeps_order_and_ratios_of_the_free():
    log_x = torch.tensor([-0.5, 0.0, 0.3]).double()
    a = project(log_x, torch.tensor([5.0, 3.0, 2.0]).double(), torch.full((3,), 0.25), torch.full((3,), 4.0))
    assert torch.allclose(a.log().diff(), log_x.diff())


def update_stats(params, gradients, momentum=0.9, averaging=0.98, per_tensor=8192):
    """Statistics over groups of one tensor each, after every list of gradients."""
    sample = Sample([[p] for p in params], per_tensor, torch.device("cpu"))
    statistics = Statistics(sample, momentum, averaging)
    for g in gradients:
        statistics.update(g)
    return statistics


def grouped(statistics):
    return statistics.groups(names=("g",) * len(statistics.sample.n))


@pytest.mark.parametrize("r, tolerance", [(0.5, 0.04), (0.0025, 0.15)])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_synthetic_mean_and_noise_are_recovered(r, tolerance, scale):
    """g = mu + noise with ||mu||^2 / E||noise||^2 = r on 100k coordinates, of which a few thousand are
    kept.
    """
    rng = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.zeros(250, 400))
    mu = torch.randn(250, 400, generator=rng)
    mu *= scale * math.sqrt(r) / mu.square().mean().sqrt()
    steps = ([mu + scale * torch.randn(250, 400, generator=rng)] for _ in range(300))
    stats = grouped(update_stats([p], steps))
    estimate = (stats.S / (stats.E - stats.S)).item()
    assert estimate == pytest.approx(r, rel=tolerance)
    assert (stats.S / p.numel()).item() == pytest.approx(r * scale**2, rel=tolerance)
    assert stats.rms.item() == pytest.approx(scale * math.sqrt(1 + r), rel=0.02)


def test_pure_noise_has_no_signal():
    p, rng = nn.Parameter(torch.zeros(40_000)), torch.Generator().manual_seed(0)
    stats = grouped(update_stats([p], ([torch.randn(40_000, generator=rng)] for _ in range(200))))
    assert abs(stats.S / stats.E) < 2e-3  # the naive m^2 / v would show (1 - 0.9) / (1 + 0.9) = 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_exact_statistics_of_small_tensors(dtype):
    """Every coordinate sampled: S, E, Q, L1 equal their definitions; zeros, None, channels_last and 0-dim
    too.
    """
    shapes = [(7,), (3, 5), (4, 3, 3, 3), (), (300,)]
    params = [nn.Parameter(torch.ones(s, dtype=dtype)) for s in shapes]
    g = [torch.randn(s).to(dtype) for s in shapes]
    g[2], g[4] = g[2].to(memory_format=torch.channels_last), None
    g[1] = torch.zeros_like(g[1])
    stats = grouped(update_stats(params, [g, [None if x is None else 2 * x for x in g]]))
    exact = [torch.zeros(()) if x is None else x.double() for x in g]
    square = torch.stack([x.square().sum() for x in exact])
    for value, factor in ((stats.S, 2), (stats.E, 4), (stats.Q, 4)):
        assert torch.allclose(value, factor * square, rtol=1e-5)
    assert torch.allclose(stats.L1, 2 * torch.stack([x.abs().sum() for x in exact]), rtol=1e-5)
    assert torch.allclose(stats.theta**2, torch.tensor([float(math.prod(s)) for s in shapes]).double())


def test_sampled_norms_estimate_the_whole_and_cover_all_columns():
    p = nn.Parameter(torch.zeros(1280, 1280))
    sample = Sample([[p]], 8192, torch.device("cpu"))
    g = torch.rand(1280, 1280) * torch.linspace(0, 1, 1280)
    estimate = sample.per_group(sample.read([g]).square().sum(1)).item()
    assert estimate == pytest.approx(g.square().sum().item(), rel=0.05)
    assert len({k * sample.stride[0] % 1280 for k in range(8192)}) == 1280
    assert sample.read([g]).numel() <= 8192 + 128


@pytest.mark.parametrize("shape", [(320, 320), (1280, 1280), (64, 64, 3, 3), (100, 100), (8193,)])
def test_sampled_coordinates_reach_from_the_first_to_the_last_part_of_a_tensor(shape):
    """A tenth of the tensor at a time: a stride rounded down would spend all coordinates before the end."""
    place = torch.arange(math.prod(shape)).view(shape)
    sample = Sample([[nn.Parameter(torch.zeros(shape))]], 8192, torch.device("cpu"))
    read = sample.read([place.float()]).flatten()[: sample.count[0]]
    tenths = (read / place.numel() * 10).long().bincount(minlength=10)
    assert sample.count[0] <= 8192 and tenths.max() - tenths.min() <= 1


def test_the_same_coordinates_are_read_in_any_memory_format():
    g = torch.randn(8, 6, 3, 3)
    sample = Sample([[nn.Parameter(g.clone())]], 50, torch.device("cpu"))
    assert sample.read([g]).equal(sample.read([g.to(memory_format=torch.channels_last)]))


def snapshot(control):
    state = control.state_dict()
    statistics = {k: v for k, v in state["statistics"].items() if k not in ("ignored", "norm")}
    return {**statistics, "scale": state["scale"]}, state["updates"], control.multipliers, len(control.history)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_steps_are_ignored(bad):
    model = Toy()
    control, optimizer = controlled(model, config(refresh=100))
    run(model, control, optimizer, range(5))
    before = snapshot(control)
    model.grads(5)
    [*model.parameters()][2].grad[1234] = bad  # one coordinate of one group spoils the step for all
    control.before_step(5)
    control.after_step(skipped=True)
    model.grads(6)
    control.before_step(6, finite=torch.tensor(False))
    control.after_step(skipped=True)
    after = snapshot(control)
    assert equal(before[0].values(), after[0].values()) and before[1:] == after[1:]
    assert control.meters()["control/ignored_steps"] == 2


def test_skipped_fp16_step_leaves_statistics_alone():
    """A GradScaler that overflows: the first steps are skipped, and a run without them is bit-equal."""
    histories = []
    for start in (2.0**126, 2.0**96):
        model = Toy()
        control, optimizer = controlled(model, config(refresh=3))
        scaler = torch.amp.GradScaler("cpu", init_scale=start, growth_interval=1000, backoff_factor=2.0**-30)
        step = 0
        while step < 12:
            model.grads(step)
            noise = [p.grad.clone() for p in model.parameters()]
            optimizer.zero_grad()
            scaler.scale(sum((p * g).sum() for p, g in zip(model.parameters(), noise, strict=True))).backward()
            scaler.unscale_(optimizer)
            control.before_step(step)
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped = scaler.get_scale() < scale
            control.after_step(skipped=skipped)
            step += not skipped
        histories.append((control.history, [p.detach() for p in model.parameters()], snapshot(control)[0]))
    assert histories[0][0] == histories[1][0] and equal(histories[0][1], histories[1][1])
    assert equal(histories[0][2].values(), histories[1][2].values())


def test_nothing_changes_on_non_synchronised_micro_steps():
    model = Toy()
    control, optimizer = controlled(model, config(conflict=True))
    run(model, control, optimizer, range(7))
    before, rates = snapshot(control), [g["lr"] for g in optimizer.param_groups]
    for micro in range(3):
        model.grads(micro)
        gradients = [p.grad.clone() for p in model.parameters()]
        control.after_backward(last=False, source="element")
        assert equal(gradients, [p.grad for p in model.parameters()])
    after = snapshot(control)
    assert equal(before[0].values(), after[0].values()) and before[1:] == after[1:]
    assert rates == [g["lr"] for g in optimizer.param_groups]


def test_statistics_of_micro_batches_equal_those_of_the_batch():
    states = []
    for parts in (1, 4):
        model = Toy()
        control, optimizer = controlled(model, config())
        for step in range(9):
            model.grads(step)
            whole = [p.grad for p in model.parameters()]
            optimizer.zero_grad()
            for micro in range(parts):
                sum((p * g).sum() / parts for p, g in zip(model.parameters(), whole, strict=True)).backward()
                control.after_backward(last=micro == parts - 1)
            control.before_step(step)
            optimizer.step()
            control.after_step()
        states.append((control.multipliers, snapshot(control)[0]))
    assert states[0][0] == states[1][0] and equal(states[0][1].values(), states[1][1].values())
