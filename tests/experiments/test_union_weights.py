"""Unions whose elements weigh by their areas."""

import numpy as np
import pytest
import torch

from experiments.union_weights import union_weights
from silentbad.memory.masks import counted_only, region_weight
from silentbad.memory.rehearsal import Others
from tests.memory.test_rehearsal import backed_world


def unions(power: float, shuffled: bool = False) -> list[dict]:
    """Unions of a small thing before its backdrop, each the same for every power."""
    world = backed_world()
    others = Others(world.info, world.load, {})
    row = int(world.info.rows[world.info.keys.index("t2/7")][0])
    drawn = (
        union_weights(world.load(row), torch.Generator().manual_seed(n), others, power=power, shuffled=shuffled)
        for n in range(60)
    )
    return [union for union in drawn if union and "a red dot" in union["phrases"]]


def loss_share(union: dict) -> float:
    """The small thing's part of the union's loss, where the error is one everywhere."""
    mask = torch.from_numpy(np.asarray(union["mask"]) / 255.0)[None, None]
    counted = torch.from_numpy(np.asarray(union["counted"]) / 255.0)[None, None]
    weight = counted_only(region_weight(mask, (32, 32), 0.05), counted) * (mask > 0)
    return float(weight[..., 12:20, 12:20].sum() / weight.sum())


def test_each_element_of_a_union_has_an_equal_part_of_the_loss():
    equal, as_it_is, inverse = (loss_share(unions(power)[0]) for power in (1.0, 0.0, -1.0))
    assert equal == pytest.approx(0.5, abs=0.02)
    assert as_it_is == pytest.approx(64 / (32 * 32 - 36), abs=0.01)
    assert inverse < as_it_is


def test_shuffled_areas_are_sometimes_the_wrong_ones():
    shares = [loss_share(union) for union in unions(1.0, shuffled=True)]
    assert min(shares) < 0.1 < 0.4 < max(shares)
