"""What can be told apart: a criterion on pixels alone, so that no detector decides what counts as a
null of its own."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np

from worlds.emoji.grammar import Scene
from worlds.emoji.render import render
from worlds.microworld.render import backdrop_mask

# Levels of 255 by which an element of a null differs at least: 95 % of true copies, through the
# base's autoencoder, differ from their target by less (research/emoji.md, "What looks the same").
THING = 28.0
BACKDROP = 16.0
REACH = 1  # pixels that a copy may stand off
FINE = 2  # pixels of a side that are averaged: an autoencoder loses what is finer
TRIES = 20  # draws before the last one counts
Drawn = TypeVar("Drawn")


@lru_cache(maxsize=64)
def pixels(scene: Scene) -> np.ndarray:
    """(64,64,3), float."""
    return np.asarray(render(scene)[0], np.float32)


@lru_cache(maxsize=64)
def regions(scene: Scene) -> list[np.ndarray]:
    """Where each element shows, the backdrop last; (64,64) in {0,1} each."""
    masks = render(scene)[1]
    return [(np.asarray(m) > 127).astype(np.float32) for m in (*masks, backdrop_mask(masks))]


def coarse(x: np.ndarray) -> np.ndarray:
    """(H,W,C) -> means of FINE x FINE pixels."""
    height, width, channels = x.shape
    return x.reshape(height // FINE, FINE, width // FINE, FINE, channels).mean((1, 3))


def difference(picture: np.ndarray, target: np.ndarray, region: np.ndarray) -> float:
    """The root mean square of the difference over a region (H,W), in levels of 255, without details
    below FINE pixels, at the best alignment within REACH. picture, target (H,W,3). 0 where the
    region is empty."""
    height, width = region.shape
    padded = np.pad(picture, ((REACH, REACH), (REACH, REACH), (0, 0)), "edge")
    share = coarse(region[..., None])
    total = 3 * max(float(share.sum()), 1e-6)
    errors = []
    for y in range(2 * REACH + 1):
        for x in range(2 * REACH + 1):
            error = (padded[y : y + height, x : x + width] - target) * region[..., None]
            mean = coarse(error) / np.maximum(share, 1e-6)
            errors.append(float((share * mean**2).sum() / total))
    return min(errors) ** 0.5


def differs(scene: Scene, target: Scene, elements: Sequence[int]) -> bool:
    """Whether each of these elements of the target looks different in the scene."""
    last = len(target.things)
    return all(
        difference(pixels(scene), pixels(target), regions(target)[element])
        >= (BACKDROP if element == last else THING)
        for element in elements
    )


def first(fresh: Callable[[], Drawn], fits: Callable[[Drawn], bool]) -> Drawn:
    """The first draw that fits, or the last of TRIES."""
    drawn = fresh()
    for _ in range(TRIES - 1):
        if fits(drawn):
            break
        drawn = fresh()
    return drawn
