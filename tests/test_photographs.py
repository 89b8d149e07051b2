"""The photographs that verdicts are tried on: targets, failures and copies of them."""

import numpy as np
import pytest

from tests.photographs import SIDE, THINGS, copies, failures, make_target, seen

SEEDS = range(6)


@pytest.mark.parametrize("seed", SEEDS)
def test_masks_cover_the_target_once(seed):
    target = make_target(seed)
    masks = np.stack([np.asarray(mask) for _, mask in target.elements])
    assert target.picture.size == (SIDE, SIDE) and set(np.unique(masks)) == {0, 255}
    assert ((masks == 255).sum(0) == 1).all()
    assert (masks == 255).mean((1, 2)).min() > 0.02
    assert len({phrase for phrase, _ in target.elements}) == len(target.elements) in (3, 4)


def test_a_seed_gives_the_same_target():
    one, again, other = make_target(3), make_target(3), make_target(4)
    assert one.picture.tobytes() == again.picture.tobytes() != other.picture.tobytes()
    for pictures in (failures, copies):
        first = [(kind, picture.tobytes()) for kind, picture in pictures(one).items()]
        assert first == [(kind, picture.tobytes()) for kind, picture in pictures(again).items()]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_failure_changes_its_element_and_copies_none(seed):
    target = make_target(seed)
    things = len(target.cutouts)
    pictures = failures(target)
    assert len(pictures) == 5 * things + 2
    for kind, picture in pictures.items():
        changed = np.abs(seen(picture) - seen(target.picture)).mean(2)
        place = int(kind.rpartition("-")[2])
        weights = [seen(mask)[..., 0] for _, mask in target.elements]
        means = [(changed * weight).sum() / weight.sum() for weight in weights]
        assert int(np.argmax(means)) == place, kind
    for kind, picture in copies(target).items():
        assert np.abs(seen(picture) - seen(target.picture)).mean() < 25, kind


def test_every_thing_occurs():
    phrases = {phrase for seed in range(40) for phrase, _ in make_target(seed).elements}
    assert set(THINGS) <= phrases
