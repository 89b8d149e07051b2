"""Timesteps by what is left to learn at each, as a hook."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from experiments.learning_progress import BINS, LearningProgress
from tests.toy import experiment
from tests.training import step_once

T = 1000


def hook(every: int = 1) -> LearningProgress:
    scheduler = SimpleNamespace(config=SimpleNamespace(num_train_timesteps=T))
    context = SimpleNamespace(scheduler=scheduler, config=SimpleNamespace(seed=0), device=torch.device("cpu"))
    return LearningProgress(context, every=every)


def trained(progress: LearningProgress, step: int, scales: np.ndarray) -> None:
    """A step whose losses are those of their bins, whichever timesteps are drawn."""
    t, weights = progress.timesteps(step, list(range(4 * T)), 4 * T, {})
    of_bins = torch.from_numpy(scales)[t * BINS // T]
    progress.weight_losses(of_bins * weights, [])
    progress.after_step(step)


def test_what_still_falls_is_drawn_less_and_what_does_not_more():
    progress = hook()
    assert np.allclose(progress.density(), 1 / T)
    start = 1 + np.arange(BINS)  # a loss that depends on t above all
    learnt = start * np.where(np.arange(BINS) < 10, 0.25, 1.0)
    for step in range(6):
        trained(progress, step, start if step < 2 else learnt)
    p = progress.density()
    assert p.sum() == pytest.approx(1) and p[-1] > 1.5 * p[0]
    again = hook()
    again.load_state_dict(progress.state_dict())
    for each in (progress, again):
        trained(each, 6, learnt)
    assert np.array_equal(progress.density(), again.density())


def test_a_skipped_step_says_nothing_of_its_losses():
    progress = hook(every=50)
    progress.timesteps(0, [0, 1], 2, {})
    progress.weight_losses(torch.tensor([torch.inf, 1.0]), [])
    progress.after_step(1, skipped=True)
    assert not progress.sums.any() and not progress.step_sums.any()


def test_a_run_draws_by_it(build):
    place = experiment("learning_progress", "LearningProgress")
    run = build(train_batch_size=4, hooks=place, hook_options=f'{{"{place}": {{"every": 2}}}}')
    for _ in range(4):
        step_once(run)
    (progress,) = (each for each in run.hooks if type(each).__name__ == "LearningProgress")
    assert not np.isnan(progress.now).all()
