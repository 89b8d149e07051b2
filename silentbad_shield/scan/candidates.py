"""Pairs of records that may show the same thing at the same place, without comparing all records
with all.

Windows of 3x3 blocks with some contrast are hashed with their place (locality-sensitive hashing on
a grid of random offset, Datar 2004). Records that share two windows and a word are candidates.
Each place in the frame is a task of its own, for windows meet at one place only.

Legend: N records; V (N,32,32,3) uint8 views; a pair is one number i * N + j with i < j."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from silentbad_shield.scan.regions import CONTRAST, SIDE

WINDOW = 3  # blocks
ACROSS = SIDE - WINDOW + 1  # windows in a row of the frame
FEATURES = WINDOW * WINDOW + 2  # of a window: its blocks' luma, and two mean differences of colour
STEPS = (4.0, 12.0)  # levels, of the hash's grids: exact copies, and copies that were recompressed
LUMA = [np.float32(weight) for weight in (0.3, 0.59, 0.11)]
FACTORS = np.random.default_rng(0).integers(1 << 62, size=FEATURES + 1).astype(
    np.uint64
) * np.uint64(2) + np.uint64(1)
WHOLE_RUNS = 24  # a bucket of more records is linked to its next neighbours alone
MOST_WINDOWS = 1 << 19  # whose buckets are formed together
BLOCK = 1 << 16  # windows hashed together


def sums(a: np.ndarray) -> np.ndarray:
    """(n,3,w+2) -> (n,w): sums over windows."""
    rows = a.sum(1)
    return rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:]


def spread(band: np.ndarray) -> np.ndarray:
    """(n,3,w+2,3) uint8 -> (n,w): the largest range of a colour in each window."""
    high = band.max(1)
    low = band.min(1)
    high = np.maximum(np.maximum(high[:, :-2], high[:, 1:-1]), high[:, 2:])
    low = np.minimum(np.minimum(low[:, :-2], low[:, 1:-1]), low[:, 2:])
    return (high - low).max(-1)


def hashed(band: np.ndarray, offsets: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """A band of views (n,3,w+2,3) -> records (k,) with a window of contrast, keys (grids,k) uint64.

    A key is a multilinear hash of the window's cells on a grid and of its place in the band."""
    records, x = np.nonzero(spread(band) >= CONTRAST)
    red, green, blue = np.moveaxis(band.astype(np.int16), -1, 0)
    # one product and sum after another: a matrix product rounds by the size of the block
    grey = red * LUMA[0] + green * LUMA[1] + blue * LUMA[2]
    luma = np.lib.stride_tricks.sliding_window_view(grey, WINDOW, axis=2)  # (n,3,w,3)
    features = [luma[records, i, x, j] for i in range(WINDOW) for j in range(WINDOW)]
    features += [
        (sums(colour - green)[records, x] / np.float32(WINDOW * WINDOW)) for colour in (red, blue)
    ]
    keys = np.empty((len(STEPS), len(x)), np.uint64)
    for key, step, offset in zip(keys, STEPS, offsets, strict=True):
        key[:] = x.astype(np.uint64) * FACTORS[-1]
        for feature, shift, factor in zip(features, offset, FACTORS, strict=False):
            cells = np.floor((feature + np.float32(shift)) / np.float32(step))
            key += cells.astype(np.int64).astype(np.uint64) * factor
    return records, keys


def shared(records: np.ndarray, keys: np.ndarray, n: int) -> np.ndarray:
    """Pairs of records with equal keys: all of a small bucket, of a large one neighbours."""
    bits = np.uint64(max(1, len(keys) - 1).bit_length())
    # keys that collide are verified later
    ordered = np.sort((keys << bits) | np.arange(len(keys), dtype=np.uint64))
    order = (ordered & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int64)
    ordered >>= bits
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    sizes = np.diff(np.r_[starts, len(ordered)])
    left = np.repeat(starts + sizes - 1, sizes) - np.arange(len(ordered))  # later in its bucket
    size = np.repeat(sizes, sizes)
    at = np.flatnonzero(left)
    pairs = []
    for d in range(1, WHOLE_RUNS):
        at = at[(left[at] >= d) & ((size[at] <= WHOLE_RUNS) | (d <= 3))]
        if not len(at):
            break
        a = records[order[at]]
        b = records[order[at + d]]
        pairs.append(np.minimum(a, b) * n + np.maximum(a, b))
    return np.concatenate(pairs) if pairs else np.zeros(0, np.int64)


@dataclass(frozen=True)
class Places:
    """Windows of one row `y` of the frame, at the places [left, left + width)."""

    y: int
    left: int
    width: int

    @property
    def rows(self) -> slice:
        """The rows of a view that the windows cover."""
        return slice(self.y, self.y + WINDOW)

    @property
    def columns(self) -> slice:
        """The columns of a view that the windows cover."""
        return slice(self.left, self.left + self.width + WINDOW - 1)


def places(n: int) -> list[Places]:
    """All windows of the frame, as many together as N records allow."""
    width = max(1, min(ACROSS, MOST_WINDOWS // max(1, n)))
    return [
        Places(y, left, min(width, ACROSS - left))
        for y in range(ACROSS)
        for left in range(0, ACROSS, width)
    ]


def offsets(seed: int) -> list[list[np.ndarray]]:
    """Random offsets of the hash grids, by row of the frame."""
    rng = np.random.default_rng(seed)
    return [[rng.uniform(0, step, FEATURES) for step in STEPS] for _ in range(ACROSS)]


def window_pairs(
    bands: Iterable[np.ndarray],
    grids: list[np.ndarray],
    words: np.ndarray,
) -> np.ndarray:
    """Pairs of records with a word in common that share a window of some places, in ascending
    order; twice where they share more. `bands` are those places of all views in turn, (n,3,w+2,3)
    each; `grids` the offsets of their row; `words` (N,W) uint64 signatures."""
    n = len(words)
    records = [np.zeros(0, np.int64)]
    keys = [np.zeros((len(STEPS), 0), np.uint64)]
    start = 0
    for band in bands:
        in_band, hashes = hashed(band, grids)
        records.append(start + in_band)
        keys.append(hashes)
        start += len(band)
    all_records = np.concatenate(records)
    hashes = np.concatenate(keys, axis=1)
    del records, keys
    raw_pairs = np.concatenate([shared(all_records, of_grid, n) for of_grid in hashes])
    pairs, counts = np.unique(raw_pairs, return_counts=True)
    common = (words[pairs // n] & words[pairs % n]).any(1)
    return np.repeat(pairs[common], np.minimum(counts[common], 2))


def in_blocks(band: np.ndarray) -> Iterator[np.ndarray]:
    """A band of views (n,3,w+2,3), a block of records at a time."""
    block = max(1, BLOCK // (band.shape[2] - WINDOW + 1))
    return (
        np.ascontiguousarray(band[start : start + block]) for start in range(0, len(band), block)
    )


def twice(parts: Iterable[np.ndarray]) -> np.ndarray:
    """Numbers that several lists hold, or one holds twice, in ascending order."""
    values, counts = np.unique(np.concatenate([np.zeros(0, np.int64), *parts]), return_counts=True)
    return values[counts >= 2]
