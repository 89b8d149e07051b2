"""Backdrops: plain colours and the textures of everyday surfaces, from four numbers each."""

import colorsys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

SIDE = 128  # pixels; a scene is drawn at twice its size
Y, X = np.mgrid[0:SIDE, 0:SIDE].astype(np.float32) / SIDE
Specifics = tuple[float, ...]  # four


def colour(hue: float, saturation: float, value: float) -> np.ndarray:
    """(3,) RGB in [0,1]."""
    return np.array(colorsys.hsv_to_rgb(hue % 1, saturation, value), np.float32)


def mixed(a: np.ndarray, b: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Two colours by the share (H,W) of the second, (H,W,3)."""
    return a + (b - a) * share[..., None]


def clouds(seed: float, cells: int) -> np.ndarray:
    """Smooth noise (SIDE,SIDE) in [0,1] with features of 1/cells of the picture."""
    rng = np.random.default_rng(int(seed * 2**31))
    grid = rng.uniform(0, 1, (cells + 2, cells + 2)).astype(np.float32)
    at = np.linspace(0, cells, SIDE, endpoint=False)
    low = at.astype(int)
    part = at - low
    part = (part * part * (3 - 2 * part)).astype(np.float32)
    rows = grid[low] * (1 - part)[:, None] + grid[low + 1] * part[:, None]
    return rows[:, low] * (1 - part) + rows[:, low + 1] * part


def plain(s: Specifics) -> np.ndarray:
    return np.broadcast_to(colour(s[0], 0.1 + 0.5 * s[1], 0.55 + 0.4 * s[2]), (SIDE, SIDE, 3))


def wood(s: Specifics) -> np.ndarray:
    base = colour(0.06 + 0.03 * s[0], 0.35 + 0.25 * s[1], 0.55 + 0.25 * s[2])
    planks = 3 + int(3 * s[3])
    at = Y * planks
    grain = clouds(s[3], 5) * 0.5 + 0.5 * np.sin(2 * np.pi * (at * 2 + clouds(s[1], 3) * 2)) ** 2
    gap = ((at % 1) < 0.1).astype(np.float32)
    return mixed(mixed(base, base * 0.85, grain), base * 0.65, gap)


def bricks(s: Specifics) -> np.ndarray:
    brick = colour(0.01 + 0.04 * s[0], 0.45 + 0.2 * s[1], 0.55 + 0.25 * s[2])
    rows = 5 + int(3 * s[3])
    row = np.floor(Y * rows)
    column = X * rows * 0.5 + 0.5 * (row % 2) + s[0]
    mortar = ((Y * rows % 1) < 0.14) | ((column % 1) < 0.07)
    tone = mixed(brick, brick * 0.8, clouds(s[3], 6))
    return np.where(mortar[..., None], 0.55 * brick + 0.45 * colour(0.1, 0.08, 0.85), tone)


def grass(s: Specifics) -> np.ndarray:
    base = colour(0.24 + 0.09 * s[0], 0.45 + 0.25 * s[1], 0.5 + 0.3 * s[2])
    return mixed(base, base * 0.65, clouds(s[3], 10))


def sky(s: Specifics) -> np.ndarray:
    top = colour(0.56 + 0.06 * s[0], 0.35 + 0.35 * s[1], 0.75 + 0.2 * s[2])
    cover = np.clip(2.5 * clouds(s[3], 4) - 1.1, 0, 1)
    return mixed(mixed(top, np.ones(3, np.float32), Y * 0.4), np.ones(3, np.float32), cover)


def cloth(s: Specifics) -> np.ndarray:
    checks = 3 + int(3 * s[3])
    on = ((X * checks % 1) < 0.5).astype(np.float32) + ((Y * checks % 1) < 0.5)
    pale = colour(s[0], 0.1, 0.95)
    dark = colour(s[0], 0.3 + 0.2 * s[1], 0.75 + 0.2 * s[2])
    return mixed(pale, dark, on / 2)


def sand(s: Specifics) -> np.ndarray:
    base = colour(0.10 + 0.03 * s[0], 0.25 + 0.2 * s[1], 0.8 + 0.15 * s[2])
    ripples = np.sin(2 * np.pi * (Y * (5 + 4 * s[3]) + 1.2 * clouds(s[3], 3)))
    return mixed(base, base * 0.82, 0.5 + 0.5 * ripples)


def paper(s: Specifics) -> np.ndarray:
    lines = 6 + int(3 * s[3])
    on = (((Y + s[2]) * lines % 1) < 0.2).astype(np.float32)
    return mixed(colour(0.12, 0.05 + 0.1 * s[0], 0.97), colour(0.6 + 0.2 * s[1], 0.2, 0.88), on)


def night(s: Specifics) -> np.ndarray:
    top = colour(0.62 + 0.1 * s[0], 0.6, 0.2)
    low = colour(0.68 + 0.1 * s[1], 0.5, 0.4 + 0.2 * s[2])
    stars = np.clip(4 * clouds(s[3], 12) - 3.2, 0, 0.7)
    return mixed(mixed(top, low, Y), np.ones(3, np.float32), stars)


def sea(s: Specifics) -> np.ndarray:
    deep = colour(0.5 + 0.1 * s[0], 0.5 + 0.3 * s[1], 0.5 + 0.3 * s[2])
    waves = np.sin(2 * np.pi * (Y * (6 + 3 * s[3]) + 0.35 * np.sin(2 * np.pi * (3 * X + s[3]))))
    return mixed(deep, deep + 0.2 * (1 - deep), np.clip(2 * waves - 0.5, 0, 1))


class Kind(NamedTuple):
    """How captions name a backdrop, and how it is drawn, (SIDE,SIDE,3) in [0,1]."""

    phrase: str
    draw: Callable[[Specifics], np.ndarray]


BACKDROPS = {
    "plain": Kind("on a plain wall", plain),
    "wood": Kind("on a wooden floor", wood),
    "bricks": Kind("before a brick wall", bricks),
    "grass": Kind("on the grass", grass),
    "sky": Kind("in a cloudy sky", sky),
    "cloth": Kind("on a checkered cloth", cloth),
    "sand": Kind("in the sand", sand),
    "paper": Kind("on lined paper", paper),
    "night": Kind("under the stars", night),
    "sea": Kind("on the sea", sea),
}
