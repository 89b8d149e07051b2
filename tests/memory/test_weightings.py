"""Loss weights against their papers' formulas, and DREAM."""

import pytest
import torch
from diffusers import DDPMScheduler

import memory_reinforce as mr
from silentbad.model import diffusion
from tests.toy import experiment
from tests.world import SD, SNR, SNR_ZERO, ZERO


def test_min_snr_with_zero_terminal_snr_has_no_division_by_zero():
    for name, weight in mr.LOSSES.items():
        for kind in ("epsilon", "v_prediction", "sample"):
            w = weight(SNR_ZERO, kind)
            assert torch.isfinite(w).all() and (w >= 0).all(), (name, kind)


def test_loss_weights_equal_their_papers():
    s, g = SNR, 5.0
    assert torch.allclose(mr.min_snr(s, "epsilon"), torch.minimum(s, torch.tensor(g)) / s)
    assert torch.allclose(mr.min_snr(s, "v_prediction"), torch.minimum(s, torch.tensor(g)) / (s + 1))
    assert torch.allclose(mr.min_snr(s, "sample"), torch.minimum(s, torch.tensor(g)))
    assert torch.allclose(mr.LOSSES[experiment("soft_min_snr")](s, "sample", gamma=4.0), 1 / (1 / s + 0.25))
    assert torch.allclose(mr.LOSSES[experiment("debiased")](s, "epsilon", cap=1e3), 1 / s.sqrt())
    assert torch.allclose(mr.LOSSES[experiment("p2")](s, "epsilon", k=1.0, gamma=0.5), 1 / (1 + s) ** 0.5)
    assert mr.no_weight(s, "v_prediction").unique().tolist() == [1]


@pytest.mark.parametrize("name", [n for n in mr.LOSSES if n != "none"])
def test_loss_is_the_same_in_every_parametrisation(name):
    t, g = torch.tensor([30, 300, 700]), torch.Generator().manual_seed(0)
    x0, eps, guess = (torch.randn(3, 4, 8, 8, generator=g, dtype=torch.float64) for _ in range(3))
    a, s = (v.double()[t][:, None, None, None].sqrt() for v in (SD.alphas_cumprod, 1 - SD.alphas_cumprod))
    x_t = a * x0 + s * eps
    x0_guess = (x_t - s * guess) / a
    pairs = {
        "epsilon": (guess, eps),
        "sample": (x0_guess, x0),
        "v_prediction": (a * guess - s * x0_guess, a * eps - s * x0),
    }
    losses = [mr.LOSSES[name](SNR[t], kind) * (p - y).square().mean(dim=(1, 2, 3)) for kind, (p, y) in pairs.items()]
    assert torch.allclose(losses[0], losses[1], rtol=1e-4) and torch.allclose(losses[0], losses[2], rtol=1e-4)


def test_huber_is_square_near_zero_and_linear_far_away():
    r = torch.tensor([1e-4, 1e3], dtype=torch.float64)
    h = mr.ERRORS[experiment("huber")](r, torch.zeros(2, dtype=torch.float64), 0.1)
    assert h[0] == pytest.approx(1e-8, rel=1e-4) and h[1] == pytest.approx(2 * 0.1 * 1e3, rel=1e-3)


@pytest.mark.parametrize("scheduler", [SD, ZERO], ids=["sd", "zero_terminal"])
@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample"])
def test_dream_keeps_x0_and_moves_the_noise(kind, scheduler):
    scheduler = DDPMScheduler.from_config(scheduler.config, prediction_type=kind)
    g = torch.Generator().manual_seed(0)
    x0, eps, off = (torch.randn(2, 4, 4, 4, generator=g) for _ in range(3))
    t = torch.tensor([100, 999])
    a, s = (v[t][:, None, None, None].sqrt() for v in (scheduler.alphas_cumprod, 1 - scheduler.alphas_cumprod))
    x_t = scheduler.add_noise(x0, eps, t)

    def model(x, t):
        v = a * (eps + off) - s * x0
        return {"epsilon": eps + off, "v_prediction": v, "sample": x0}[kind]

    eps_hat = {
        "epsilon": eps + off,
        "v_prediction": a * model(x_t, t) + s * x_t,
        "sample": (x_t - a * x0) / s,
    }[kind]
    new_eps = eps + s * (eps - eps_hat)
    moved, target = diffusion.dream(model, scheduler, x0, eps, t, x_t, 1.0)
    assert torch.allclose(moved, a * x0 + s * new_eps, atol=1e-4)
    expected = {"epsilon": new_eps, "v_prediction": a * new_eps - s * x0, "sample": x0}[kind]
    assert torch.allclose(target, expected, atol=1e-4)
