"""A noise window for each element, by its size and contrast."""

import numpy as np
import pytest
import torch

from experiments.noise_window import NoiseWindow, separation
from silentbad.memory.timesteps import snr_mixture
from tests.toy import experiment
from tests.training import step_once

PLACE = experiment("noise_window", "NoiseWindow")


def thing(side: int, level: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """A square of so many pixels on black, and its mask."""
    mask = torch.zeros(1, 64, 64)
    mask[:, :side, :side] = 1
    return level * mask.expand(3, -1, -1), mask


def window_in(run) -> NoiseWindow:
    (hook,) = (each for each in run.hooks if type(each).__name__ == "NoiseWindow")
    return hook


def test_what_is_small_or_pale_sets_a_picture_less_apart():
    assert separation(*thing(32)) == pytest.approx(0.25)
    assert separation(*thing(32, 0.5)) == pytest.approx(0.125)
    assert separation(*thing(8)) == pytest.approx(1 / 64)


def test_what_is_small_is_shown_at_less_noise(build):
    window = window_in(build(hooks=PLACE))
    window.separations = {"t/hat": 0.01, "t/cat": 0.09}
    low, high = (window.density("element", key) @ np.log(window.snr + 1e-9) for key in ("t/hat", "t/cat"))
    assert low > high + 0.5

    def centres() -> tuple[float, float]:
        return window.centre_of("t/hat"), window.centre_of("t/cat")

    assert centres() == pytest.approx((9, 1))
    window.shuffled = True
    assert centres() == pytest.approx((1, 9))
    window.power = -1.0
    assert centres() == pytest.approx((9, 1))
    window.power = 0.0
    assert centres() == pytest.approx((3, 3))


def test_clean_pictures_are_shown_at_all_noise_levels_alike(build):
    run, plain = build(hooks=PLACE), build()
    batch = next(iter(run.loader.draw(0)))
    positions = batch["position"].tolist()
    (t, w), (u, v) = (of.timesteps(0, positions, len(positions), batch) for of in (window_in(run), plain.memory))
    clean = torch.tensor([role == "clean" for role in batch["role"]])
    assert 0 < clean.sum() < len(clean)
    assert torch.equal(t[clean], u[clean]) and torch.equal(w[clean], v[clean])
    assert not torch.equal(t[~clean], u[~clean])


def test_a_run_measures_its_elements_and_draws_by_them(build):
    run = build(train_batch_size=8, hooks=PLACE)
    assert list(window_in(run).separations) == run.memory.info.keys
    step_once(run)


def test_at_power_nought_all_are_shown_as_by_snr_mixture(build):
    window = window_in(build(hooks=PLACE))
    expected = snr_mixture(window.snr, 0.0, centre=3.0, width=1.0, high=0.1)
    assert np.allclose(window.density("rehearsal", ""), expected)
