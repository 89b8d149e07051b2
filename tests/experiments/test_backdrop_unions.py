"""Unions that show the backdrop always, or never."""

import pytest
import torch

from experiments.backdrop_unions import backdrop_unions
from silentbad.memory.rehearsal import Others, pairwise
from tests.memory.test_rehearsal import backed_world

OF_TARGET = ("t2/5", "t2/6", "t2/7")


def unions(draw, **options):
    """What a rehearsal makes of the records of a target with a backdrop."""
    world = backed_world()
    others = Others(world.info, world.load, {})
    rows = [int(row) for key in OF_TARGET for row in world.info.rows[world.info.keys.index(key)]]
    for n in range(20):
        for row in rows:
            yield draw(world.load(row), torch.Generator().manual_seed(1000 * n + row), others, **options)


@pytest.mark.parametrize("shown", [True, False])
def test_each_union_shows_the_backdrop_or_none_does(shown):
    made = [union for union in unions(backdrop_unions, shown=shown) if union]
    assert len(made) > 40 and all(("a meadow" in union["phrases"]) == shown for union in made)
    assert {union["united"] for union in made} == {(2, 3)}


def test_there_are_as_many_as_without_the_choice():
    counts = [sum(map(bool, unions(draw))) for draw in (pairwise, backdrop_unions)]
    assert counts[0] == counts[1]
