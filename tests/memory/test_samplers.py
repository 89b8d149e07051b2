"""Which records an epoch shows, in which order."""

import copy

import numpy as np
import pytest

import memory_reinforce as mr
from silentbad.data.elements import Epochs, apportion, epoch_order
from tests.toy import experiment
from tests.world import PROBED, Trainer, World, config


@pytest.mark.parametrize("name", mr.SAMPLERS)
def test_clean_to_element_ratio_is_exact(name):
    info, history = World(per_element=4, clean=3).info, np.random.default_rng(0).uniform(0, 1, (3, 5))
    for ratio in (0.0, 0.25, 1.0, 2.3):
        sampler = Epochs(mr.SAMPLERS[name], info, 3, ratio, lambda: history)
        for epoch in range(4):
            order = sampler.epoch(epoch)
            roles = info.roles[order]
            assert (roles == "element").sum() == 20
            assert (roles == "clean").sum() == round(ratio * 20)
            assert np.array_equal(order, sampler.epoch(epoch))
        assert not np.array_equal(sampler.epoch(0), sampler.epoch(1))


def test_uniform_shows_every_record_once():
    info = World().info
    q = mr.uniform(np.zeros((0, 5)), np.asarray([len(r) for r in info.rows]), 0)
    for epoch in range(5):
        assert np.array_equal(np.sort(epoch_order(info, q, 0, epoch, None)), np.arange(len(info.roles)))


def test_clean_records_are_taken_in_turn_across_epochs():
    info = World(per_element=1, clean=7).info
    q = np.full(5, 0.2)
    seen = np.concatenate([epoch_order(info, q, 0, e, 0.6) for e in range(7)])
    counts = np.bincount(seen[info.roles[seen] == "clean"], minlength=len(info.roles))[-7:]
    assert counts.tolist() == [3] * 7


def test_weakest_first_is_the_marginal_value():
    rho = np.asarray([[0.2, 0.5, 0.9]])
    p = 1 / (1 + np.exp(-(rho[0] - 0.5) / 0.15))
    expected = 0.3 / 3 + 0.7 * (1 / p) / (1 / p).sum()
    assert np.allclose(mr.weakest_first(rho, np.ones(3), 0), expected)
    assert np.allclose(mr.weakest_first(rho, np.ones(3), 0, alpha=0.0), 1 / 3)
    assert np.isfinite(mr.weakest_first(np.asarray([[-1e3, 0.5, 1.0]]), np.ones(3), 0)).all()
    q = mr.weakest_first(np.asarray([[0.0] + [1.0] * 19]), np.ones(20), 0, cap=4.0)
    assert q.max() == pytest.approx(4 / 20) and q.sum() == pytest.approx(1)


def test_leitner_shows_a_recalled_element_every_other_epoch():
    rho = np.asarray([[0.1, 0.9, 0.9], [0.1, 0.2, 0.9]])
    shown = np.asarray([mr.SAMPLERS[experiment("leitner")](rho, np.ones(3), e, boxes=3) > 0 for e in range(4)])
    assert shown.tolist() == [[True] * 3, [True, True, False], [True, True, False], [True, True, False]]
    assert mr.SAMPLERS[experiment("leitner")](rho[:1], np.ones(3), 1).tolist() == [1, 0, 0]


def test_apportion_sums_exactly_and_is_fair():
    q = np.asarray([0.11, 0.28, 0.61])
    counts = np.asarray([apportion(q, 7, u) for u in np.linspace(0, 1, 2000, endpoint=False)])
    assert (counts.sum(axis=1) == 7).all()
    assert np.allclose(counts.mean(axis=0), 7 * q, atol=5e-3)
    assert (np.abs(counts - 7 * q) < 1).all()


def test_resume_mid_epoch_gives_the_same_remaining_stream():
    trainer = Trainer(config(sampler="weakest_first", phrase_memory=PROBED))
    sampler = trainer.memory.epochs
    first = sampler.epoch(1)
    state = copy.deepcopy(trainer.memory.state_dict())
    trainer.memory.phrases.history.append({"step": 9, "rho": [0.9, 0.1, 0.9, 0.9, 0.9]})
    assert np.array_equal(sampler.epoch(1), first)
    other = Trainer(config(sampler="weakest_first", phrase_memory=PROBED))
    other.memory.phrases.history.append({"step": 9, "rho": [0.9, 0.1, 0.9, 0.9, 0.9]})
    assert not np.array_equal(other.memory.epochs.epoch(1), first)
    other.memory.load_state_dict(state)
    assert np.array_equal(other.memory.epochs.epoch(1), first)
