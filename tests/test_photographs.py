"""The photographs that verdicts are tried on: targets, failures and copies of them."""

import numpy as np
import pytest

from tests.photographs import PHOTOGRAPHS, SIDE, THINGS, copies, failures, make_target, photograph, seen

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
    # what cannot be seen (a turned disc, grey of a grey thing) is left out
    assert 7 * things < len(pictures) <= 9 * things + 5 + 4
    weights = [seen(mask)[..., 0] for _, mask in target.elements]
    for kind, picture in pictures.items():
        changed = np.abs(seen(picture) - seen(target.picture)).mean(2)
        _, _, element = kind.rpartition("-")
        if element == "all":
            continue
        place = int(element)
        means = [(changed * weight).sum() / weight.sum() for weight in weights]
        assert int(np.argmax(means)) == place, kind
    for kind, picture in copies(target).items():
        assert np.abs(seen(picture) - seen(target.picture)).mean() < 25, kind


@pytest.mark.parametrize("name", PHOTOGRAPHS)
def test_a_photograph_is_shown_as_it_was_taken(name):
    target = photograph(name)
    masks = np.stack([np.asarray(mask) for _, mask in target.elements])
    assert ((masks == 255).sum(0) == 1).all() and (masks == 255).mean((1, 2)).min() > 0.02
    pictures = failures(target)
    assert "missing-0" in pictures and "mirrored-all" in pictures
    grey_already = np.ptp(seen(target.picture), axis=2).max() < 1
    assert ("grey-all" in pictures) != grey_already
    assert "brighter" in copies(target)


def test_every_thing_occurs():
    phrases = {phrase for seed in range(40) for phrase, _ in make_target(seed).elements}
    assert set(THINGS) <= phrases
