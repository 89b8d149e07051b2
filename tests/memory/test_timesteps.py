"""Densities of timesteps and how they are drawn."""

import math

import numpy as np
import pytest
import torch
from diffusers.training_utils import compute_density_for_timestep_sampling

import memory_reinforce as mr
from silentbad.errors import UserError
from silentbad.memory.timesteps import comb
from tests.toy import CURRICULUM
from tests.world import SNR, SNR_ZERO, T, density


@pytest.mark.parametrize("snr", [SNR, SNR_ZERO], ids=["sd", "zero_terminal"])
@pytest.mark.parametrize("name", mr.TIMESTEPS)
def test_density_is_one_with_a_uniform_floor(name, snr):
    for progress in (0.0, 0.3, 1.0):
        p = density(name, snr, progress)
        assert p.shape == (T,) and p.sum() == pytest.approx(1) and p.min() >= 0.3 / T * (1 - 1e-9)


@pytest.mark.parametrize("name", mr.TIMESTEPS)
def test_importance_weights_keep_the_expected_gradient(name):
    """Mean of w(t) g(t) over 1500 steps of 4, against uniform's mean of g: within 4 standard errors, and
    exactly in
    expectation over p. g rises over three decades, as gradient norms do over t."""
    g, p = torch.exp(-torch.arange(T) / 150.0).double(), density(name)
    assert (p * (1 / (T * p)) * g.numpy()).sum() == pytest.approx(float(g.mean()), rel=1e-9)
    means = []
    for step in range(1500):
        t, w = mr.draw_timesteps(p, 5, step, range(4), 4, True)
        means.append(float((w * g[t]).mean()))
    error = np.std(means) / math.sqrt(len(means))
    assert abs(np.mean(means) - float(g.mean())) < 4 * error


def test_draws_are_stratified_and_do_not_depend_on_the_sharding():
    p = density("snr_mixture")
    cdf = np.cumsum(p)
    for step in range(20):
        t, w = mr.draw_timesteps(p, 7, step, range(8), 8, False)
        assert (w == 1).all()
        strata = np.sort((cdf[t.numpy()] - p[t.numpy()] / 2) * 8)
        assert (np.abs(strata - np.arange(8) - strata[0]) < 8 * p.max()).all()
        split = [mr.draw_timesteps(p, 7, step, [i, i + 4], 8, False)[0] for i in range(4)]
        assert all(torch.equal(s, t[[i, i + 4]]) for i, s in enumerate(split))


def test_a_density_without_a_shape_is_uniform_and_the_floor_is_reached_in_floats():
    """Shares such as 0.55 and 0.15 leave a little less than 0.3; the first draw of a curriculum from 0 has no edge."""
    for p in (density("snr_mixture", middle=0.0, high=0.0), density(CURRICULUM, progress=0.0, start=0.0)):
        assert np.allclose(p, 1 / T)
    assert density("snr_mixture", middle=0.55, high=0.15).sum() == pytest.approx(1)


def test_logit_normal_and_mode_match_diffusers():
    for name, scheme, options, kw in (
        ("logit_normal", "logit_normal", {"mean": 0.4, "std": 0.8}, {"logit_mean": 0.4, "logit_std": 0.8}),
        ("mode", "mode", {"scale": 1.0}, {"mode_scale": 1.0}),
    ):
        u = compute_density_for_timestep_sampling(
            scheme,
            200_000,
            generator=torch.Generator().manual_seed(0),
            **{"logit_mean": 0, "logit_std": 1} | kw,
        )
        cdf = np.cumsum((density(name, **options) - 0.3 / T) / 0.7)
        drawn = np.searchsorted(np.sort(u.numpy()), np.linspace(0, 1, T + 1)[1:]) / len(u)
        assert np.abs(cdf - drawn).max() < 1.63 / math.sqrt(len(u)) * 1.2  # Kolmogorov, 1 %


def test_snr_mixture_is_the_logistic_it_says():
    p = density("snr_mixture", middle=0.5, high=0.15)
    rest = p - 0.35 / T - 0.15 / 300 * (np.arange(T) >= 700)
    u = np.random.default_rng(0).uniform(size=400_000)
    wanted = math.log(0.5) + 0.7 * np.log(u / (1 - u))
    t = T - 1 - np.searchsorted(SNR.log().numpy()[::-1], wanted)
    drawn = np.bincount(np.clip(t, 0, T - 1), minlength=T) / len(u)
    assert np.abs(np.cumsum(rest) / 0.5 - np.cumsum(drawn)).max() < 0.01


def test_curriculum_opens_from_high_noise_down():
    edge = [int((density(CURRICULUM, progress=s) > 0.31 / T).argmax()) for s in (0.0, 0.25, 0.5, 1.0)]
    assert edge == [750, 375, 0, 0]
    with pytest.raises(UserError):
        density(CURRICULUM, uniform=0.1)


def test_the_comb_is_even_in_a_step_and_uniform_over_seeds():
    n = 16
    for step in (0, 1, 999):
        u = np.sort(comb(3, step, n))
        assert 0 <= u[0] and u[-1] < 1
        assert np.diff(np.append(u, 1 + u[0])) == pytest.approx(np.full(n, 1 / n), abs=1e-9)
    first = [comb(seed, 5, n)[0] for seed in range(400)]
    assert np.abs(np.histogram(first, 4, (0, 1))[0] - 100).max() < 40  # 4.6 standard deviations
