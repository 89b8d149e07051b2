"""The hidden picture, put together from its elements' records at full resolution.

A thing's pixels are those that its records agree on. At its outline each record shows a mixture of
the thing and of what lies behind: x = c F + (1 - c) B, where the thing's colour F and its cover c
are the same in all records and B is not. So over the records x varies 1 - c times as much as B,
which a pixel beside the thing shows. That gives c and c F, and the thing is laid over the picture's
own backdrop with them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from silentbad_shield.scan.regions import NEAR, Group, levels

MOST = 24  # pictures that an element is taken from
AGREED = 2 / 3  # of the pictures have a thing's pixel
BEHIND = 0.2  # of the pictures have a backdrop's pixel; things hide it in the others
MARGIN = 2  # pixels about what is agreed on that a thing may cover in part
REACH = 3  # pixels beyond the blocks of its region where a thing may still be agreed on
FIT = 0.5  # least r^2 of a pixel with one behind the thing
FAINT = 0.1  # cover below which a pixel counts as not covered
Open = Callable[[int], np.ndarray]  # record -> picture (64,64,3) uint8


@dataclass
class Layer:
    """An element's pixels (64,64,3) uint8 and how much of each it covers (64,64), from 0 to 1."""

    pixels: np.ndarray
    cover: np.ndarray

    @property
    def region(self) -> np.ndarray:
        """The pixels (64,64) bool of which it covers at least half."""
        return self.cover >= 0.5


def grown(mask: np.ndarray, pixels: int = 1) -> np.ndarray:
    """A mask (64,64) and so many pixels around it."""
    side = 2 * pixels + 1
    return np.asarray(
        np.lib.stride_tricks.sliding_window_view(np.pad(mask, pixels), (side, side)).any((2, 3))
    )


def part_of(records: np.ndarray, group: Group, picture: Open) -> Layer:
    """An element from the pictures of its records."""
    stack = np.stack([picture(int(i)) for i in records[:MOST]])
    like = np.stack([(levels(stack, shown) <= 2 * NEAR).sum(0) for shown in stack])  # (n,64,64)
    pixels = np.take_along_axis(stack, like.argmax(0)[None, ..., None], 0)[0]
    share = like.max(0) / len(stack)
    if group.wide:
        return Layer(pixels, ((share >= BEHIND) & (like.max(0) >= 2)).astype(float))
    agreed = share >= AGREED
    core = grown(np.kron(group.region, np.ones((2, 2), bool))) & agreed
    for _ in range(REACH):
        core |= grown(core) & agreed
    return with_outline(stack, pixels, core)


def with_outline(stack: np.ndarray, pixels: np.ndarray, core: np.ndarray) -> Layer:
    """A thing that covers `core` (64,64), with the pixels around it that it covers in part. The
    pixel beyond that explains most of a pixel's variance shows what lies behind it."""
    pixels = pixels.copy()
    cover = core.astype(float)
    wide = grown(core, MARGIN)
    band = wide & ~core
    outside = ~wide
    if not band.any() or not outside.any():
        return Layer(pixels, cover)
    mean = stack.mean(0)
    deviation = np.moveaxis(stack - mean, 0, 2).reshape(*core.shape, -1)  # (64,64,n*3)
    in_band = deviation[band]
    behind = deviation[outside]
    common = np.maximum(0, in_band @ behind.T)
    variance = (behind**2).sum(1)
    fit = common**2 / np.maximum(1, (in_band**2).sum(1)[:, None] * variance)
    best = fit.argmax(1)
    rows = np.arange(len(in_band))
    through = np.minimum(1, common[rows, best] / np.maximum(1, variance[best]))
    covered = np.where((fit[rows, best] >= FIT) & (through <= 1 - FAINT), 1 - through, 0)
    mixed = mean[band] - through[:, None] * mean[outside][best]  # cover times colour
    cover[band] = covered
    pixels[band] = np.rint(np.clip(mixed / np.maximum(FAINT, covered)[:, None], 0, 255))
    return Layer(pixels, cover)


def composed(parts: Sequence[Layer]) -> tuple[np.ndarray, np.ndarray]:
    """(picture (64,64,3) uint8, where something is known (64,64) bool) of a set's parts, the
    backdrop last in the list and behind the others; grey where nothing is known."""
    canvas = np.full((64, 64, 3), 128.0)
    covered = np.zeros((64, 64), bool)
    for part in reversed(parts):
        cover = np.where(covered, part.cover, part.region)[..., None]
        canvas = cover * part.pixels + (1 - cover) * canvas
        covered |= part.region
    return np.rint(canvas).astype(np.uint8), covered
