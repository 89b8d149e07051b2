"""AND distillation and L2-SP against closed forms."""

import pytest
import torch
import torch.nn.functional as F

from experiments import and_distillation, l2_sp
from silentbad.errors import UserError
from silentbad.loop.hooks import MicroStep
from silentbad.memory import auxiliary
from tests.tiny import tiny_unet
from tests.world import PHRASES, SD, T, World, facts_of, masked, phrase_memory


def linear_eps(x, a, s, mean, var):
    """epsilon of x_t when x0 ~ N(mean, var): -s * score."""
    return s * (x - a * mean) / (a**2 * var + s**2)


def test_and_target_equals_the_gaussian_closed_form():
    """Ungated, the sum of score differences is the score of p_0 prod_i p_i/p_0, Gaussian with summed
    precisions;
    with disjoint gates it is p_i's score inside gate i and p_0's outside."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, 4, 8, 8, generator=g)
    means = torch.randn(3, 1, 4, 8, 8, generator=g)
    a = 0.6
    s = 0.8
    var = 0.3
    var0 = 1.0
    base = linear_eps(x, a, s, 0.0, var0)
    cond = torch.stack([linear_eps(x, a, s, m, var) for m in means])
    v = a**2 * var + s**2
    v0 = a**2 * var0 + s**2
    precision = 1 / v0 + 3 * (1 / v - 1 / v0)
    mean = (a * means.sum(dim=0) / v) / precision
    assert torch.allclose(
        and_distillation.and_target(base, cond, torch.ones(3, 1, 1, 8, 8)), s * precision * (x - mean), atol=1e-5
    )
    gates = torch.zeros(3, 1, 1, 8, 8)
    gates[0, ..., :4, :] = 1
    gates[1, ..., 4:, :4] = 1
    expected = base.clone()
    expected[..., :4, :] = cond[0][..., :4, :]
    expected[..., 4:, :4] = cond[1][..., 4:, :4]
    assert torch.allclose(and_distillation.and_target(base, cond, gates), expected, atol=1e-6)
    to_v = [(e - s * x) / a for e in (base, *cond)]  # v is affine in eps at a given x_t
    v_star = and_distillation.and_target(to_v[0], torch.stack(to_v[1:]), gates)
    assert torch.allclose(v_star, (expected - s * x) / a, atol=1e-5)


def distiller(**options):
    world = World()
    memory = masked(phrase_memory(n=5))
    return and_distillation.AndDistillation(tiny_unet(), facts_of(memory, world), **options), memory


def step_of(unet, predict, index=0):
    return MicroStep(index, 0, 1.0, {}, torch.zeros(1, 4, 8, 8), torch.zeros(1), None, unet, predict)


def test_distillation_learns_the_closed_form_of_a_linear_score():
    part, memory = distiller(every=1)
    memory.history = [{"step": 0, "rho": [0.9, 0.9, 0.9, 0.1, 0.9]}]
    phrases = part.facts.info.phrase
    seen = []

    def predict(x_t, t, texts, model=None):
        a, s = (v[t][:, None, None, None].sqrt() for v in (SD.alphas_cumprod, 1 - SD.alphas_cumprod))
        seen.append((x_t, t, texts, model))
        means = [phrases.index(c) + 1.0 if c in phrases else 0.0 for c in texts]
        return linear_eps(x_t, a, s, torch.tensor(means)[:, None, None, None], 0.5)

    loss = part(step_of(tiny_unet(), predict))
    (x_t, t, taught, teacher), (x_s, t_s, composed, student) = seen
    assert teacher is part.teacher and student is None and torch.equal(x_t[:1], x_s)
    assert taught[0] == "" and set(taught[1:]) == set(PHRASES) and composed == [", ".join(taught[1:])]
    a, s = (v[t_s][0].sqrt() for v in (SD.alphas_cumprod, 1 - SD.alphas_cumprod))
    mean = torch.zeros(1, 1, 8, 8)
    mean[..., :4, :4] = 1
    mean[..., :4, 4:] = 2
    mean[..., 4:, :] = 3
    student_out = linear_eps(x_s, a, s, 0.0, 0.5)
    assert loss.item() == pytest.approx(F.mse_loss(student_out, linear_eps(x_s, a, s, mean, 0.5)).item(), rel=1e-4)


def test_distillation_needs_the_strengths_that_it_waits_for():
    with pytest.raises(UserError, match="needs memory.phrase_memory.enabled=true"):
        and_distillation.AndDistillation(tiny_unet(), facts_of(phrase_memory(n=0)))


def test_distillation_waits_for_the_weakest_element():
    part, memory = distiller(every=3)
    calls = []

    def predict(x_t, t, texts, model=None):
        calls.append((x_t, t))
        return torch.zeros_like(x_t).requires_grad_()

    memory.history = [{"step": 0, "rho": [0.9, 0.5, 0.9, 0.9, 0.3]}]
    assert part.ready() == [] and part(step_of(tiny_unet(), predict)) is None
    memory.history = [{"step": 0, "rho": [0.9, 0.6, 0.9, 0.9, 0.3]}]
    assert part.ready() == ["t0"]
    assert part(step_of(tiny_unet(), predict, index=1)) is None and not calls
    for index in range(0, 30, 3):
        assert part(step_of(tiny_unet(), predict, index=index)) is not None
    elements = torch.cat([e.latents for e in part.facts.bank[:3]])
    for x_t, t in calls[1::2]:
        a, s = (v[t][:, None, None, None].sqrt() for v in (SD.alphas_cumprod, 1 - SD.alphas_cumprod))
        residual = ((x_t - a * elements) / s).flatten(1).std(dim=1)
        assert t.item() >= 300 and (residual - 1).abs().min() < 0.2  # one element's picture plus unit noise
    noise, memory = distiller(every=1, source="noise")
    memory.history = [{"step": 0, "rho": [0.9] * 5}]
    calls.clear()
    noise(step_of(tiny_unet(), predict))
    assert calls[1][1].item() == T - 1


@pytest.mark.parametrize("given, kind", [(None, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_teacher_is_a_copy_that_follows_only_when_refreshed(given, kind):
    unet = tiny_unet()
    unet.forward = unet.forward  # accelerate binds a wrapper to the instance, as here
    teacher = auxiliary.Teacher(unet, given)
    x = torch.randn(1, 4, 8, 8)
    t = torch.tensor([5])
    c = torch.randn(1, 6, 32)
    before = teacher(x, t, c).sample
    assert next(teacher.unet.parameters()).dtype == kind and before.dtype == torch.float32
    with torch.no_grad():
        for p in unet.parameters():
            p.mul_(1.5)
    assert torch.equal(teacher(x, t, c).sample, before)
    assert torch.equal(teacher(x, t, c, return_dict=False)[0], before)
    teacher.refresh(unet)
    assert torch.allclose(teacher(x, t, c).sample, unet(x, t, c).sample, atol=0.1, rtol=0.1)


def test_l2_sp_is_half_the_squared_distance():
    unet = tiny_unet()
    part = l2_sp.L2SP(unet, None)
    now = step_of(unet, None)
    assert part(now).item() == 0
    with torch.no_grad():
        next(unet.parameters()).add_(0.5)
    assert part(now).item() == pytest.approx(0.5 * 0.25 * next(unet.parameters()).numel(), rel=1e-5)
