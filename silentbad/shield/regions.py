"""Groups of records that show the same thing at the same place.

Every record is seen as a view of 32x32 blocks. Three steps, none of which compares all records with all:

1. Windows of 3x3 blocks with some contrast are hashed with their place (locality-sensitive hashing on a grid of random
   offset, Datar 2004). Records that share two buckets and a word are candidates.
2. A pair is verified block by block. It is strong where the common area holds edges in both directions, or covers much
   of the frame: two skies of one blue are not.
3. Strong pairs become groups about the record with the most of them; a group's region is where most members agree.

Legend: N records; V (N,32,32,3) uint8 views; a pair is one number i * N + j with i < j.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

SIDE = 32
WINDOW = 3  # blocks
CONTRAST = 20  # levels between neighbouring blocks that make an edge
STEPS = (4.0, 12.0)  # levels, of the hash's grids: exact copies, and copies that were recompressed
NEAR = 5  # levels by which a block of a copy may differ
EDGES = 4  # in each direction, inside the common area of a strong pair
WIDE, WIDE_EDGES = 0.3, 10  # a common backdrop: share of the frame, edges
SAME = 0.93  # share of the frame from which a pair are near duplicates
WHOLE_RUNS = 24  # a bucket of more records is linked to its next neighbours alone
MOST_WINDOWS = 3_000_000  # hashed together
CHUNK = 4000  # pairs verified together
LEAST = 3  # records of a group
RADII = {0.5: 0.01, 0.8: 0.03, 2.0: 0.3}  # levels: how near copies are, exact to recompressed; least expected by chance
WIDE_RADIUS = 0.8  # of backdrops: they come in one dimension, and by chance lie close
RING, FALL = 2.5, 14.0  # the ring's radius over a group's, and the volume's growth: RING**3 - 1

Step = Callable[[Iterable, str, int], Iterable]  # a progress bar: (items, what, how many) -> items


def silent(items: Iterable, what: str, total: int) -> Iterable:
    return items


def view(pixels: np.ndarray) -> np.ndarray:
    """A picture (64,64,3) as its block means (32,32,3) uint8."""
    return np.rint(pixels.reshape(SIDE, 2, SIDE, 2, 3).mean((1, 3))).astype(np.uint8)


# -- candidates ----------------------------------------------------------------------------------------------
def mixed(h: np.ndarray) -> np.ndarray:
    """The finaliser of MurmurHash3 on uint64."""
    h = h ^ (h >> np.uint64(33))
    h = h * np.uint64(0xFF51AFD7ED558CCD)
    h = h ^ (h >> np.uint64(33))
    h = h * np.uint64(0xC4CEB9FE1A85EC53)
    return h ^ (h >> np.uint64(33))


def hashed(cells: np.ndarray) -> np.ndarray:
    """(n,D) integers -> (n,) uint64."""
    h = np.zeros(len(cells), np.uint64)
    for d in range(cells.shape[1]):
        h = mixed(h ^ (cells[:, d].astype(np.int64) + 1000 * (d + 1)).astype(np.uint64))
    return h


def window_features(windows: np.ndarray) -> np.ndarray:
    """Windows (n,3,3,3) -> (n,11): the blocks' luma, and two mean differences of colour."""
    x = windows.astype(np.float32)
    luma = (x @ np.array([0.3, 0.59, 0.11], np.float32)).reshape(len(x), WINDOW * WINDOW)
    mean = x.mean((1, 2))
    return np.column_stack([luma, mean[:, 0] - mean[:, 1], mean[:, 2] - mean[:, 1]])


def shared(records: np.ndarray, keys: np.ndarray, n: int) -> np.ndarray:
    """Pairs of records with equal keys: all of a small bucket, of a large one each with its next three."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    sizes = np.diff(np.r_[starts, len(ordered)])
    left = np.repeat(sizes, sizes) - (np.arange(len(ordered)) - np.repeat(starts, sizes)) - 1  # later in its bucket
    size = np.repeat(sizes, sizes)
    at, found = np.flatnonzero(left), []
    for d in range(1, WHOLE_RUNS):
        at = at[(left[at] >= d) & ((size[at] <= WHOLE_RUNS) | (d <= 3))]
        if not len(at):
            break
        a, b = records[order[at]], records[order[at + d]]
        found.append(np.minimum(a, b) * n + np.maximum(a, b))
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def candidates(views: np.ndarray, words: np.ndarray, bar: Step = silent, seed: int = 0) -> np.ndarray:
    """Pairs of records that share a word and at least two windows at the same place."""
    n, across = len(views), SIDE - WINDOW + 1
    rng = np.random.default_rng(seed)
    once, twice = np.zeros(0, np.int64), np.zeros(0, np.int64)
    width = max(1, min(across, MOST_WINDOWS // max(1, n)))
    for y in bar(range(across), "windows", across):
        band = np.asarray(views[:, y : y + WINDOW])
        found = []
        for left in range(0, across, width):
            part = band[:, :, left : left + width + WINDOW - 1]
            windows = np.lib.stride_tricks.sliding_window_view(part, WINDOW, axis=2)  # (n,3,w,RGB,3)
            spread = windows.max((1, 4)).astype(np.int16) - windows.min((1, 4))
            records, x = np.nonzero(spread.max(2) >= CONTRAST)
            features = window_features(windows[records, :, x].transpose(0, 1, 3, 2))
            for step in STEPS:
                cells = np.floor((features + rng.uniform(0, step, features.shape[1])) / step)
                found.append(shared(records, hashed(np.column_stack([cells, x])), n))
        # a pair counts once a place and grid; two of them make a candidate
        pairs, counts = np.unique(np.concatenate(found), return_counts=True)
        common = (words[pairs // n] & words[pairs % n]).any(1)
        pairs, counts = pairs[common], counts[common]
        again = np.isin(pairs, once, assume_unique=True)
        twice = np.union1d(twice, pairs[(counts >= 2) | again])
        once = np.union1d(once, pairs)
    return twice


# -- pairs ---------------------------------------------------------------------------------------------------
@dataclass
class Strong:
    """Verified pairs (P,), and the near duplicates among the candidates."""

    pairs: np.ndarray
    copies: np.ndarray


def agreement(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Blocks (...,32,32) where two views are the same picture."""
    return np.abs(a.astype(np.int16) - b).max(-1) <= NEAR


def edges(a: np.ndarray, inside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Steps of contrast of views (n,32,32,3) between neighbours that both lie inside (n,32,32): across, down (n,)."""
    a = a.astype(np.int16)
    across = (np.abs(np.diff(a, axis=2)).max(-1) >= CONTRAST) & inside[:, :, 1:] & inside[:, :, :-1]
    down = (np.abs(np.diff(a, axis=1)).max(-1) >= CONTRAST) & inside[:, 1:] & inside[:, :-1]
    return across.sum((1, 2)), down.sum((1, 2))


def shared_edges(own: np.ndarray, same: np.ndarray, region: np.ndarray) -> np.ndarray:
    """Which share (n,) of the edges that a view (32,32,3) has in a region lies where others `same` (n,32,32) agree: two
    rooms with one wall and two floors share none."""
    across = (np.abs(np.diff(own, axis=1)).max(-1) >= CONTRAST) & region[:, 1:] & region[:, :-1]
    down = (np.abs(np.diff(own, axis=0)).max(-1) >= CONTRAST) & region[1:] & region[:-1]
    count = across.sum() + down.sum()
    if not count:
        return np.ones(len(same))
    held = (same[:, :, 1:] & same[:, :, :-1])[:, across].sum(1) + (same[:, 1:] & same[:, :-1])[:, down].sum(1)
    return held / count


def verified(views: np.ndarray, pairs: np.ndarray, bar: Step = silent) -> Strong:
    """The pairs whose common area is no coincidence of two colours."""
    n, strong, copies = len(views), [], []
    for start in bar(range(0, len(pairs), CHUNK), "pairs", -(-len(pairs) // CHUNK)):
        part = pairs[start : start + CHUNK]
        a = np.asarray(views[part // n]).astype(np.int16)
        difference = np.abs(a - views[part % n]).max(-1)
        same = difference <= NEAR
        across, down = edges(a, same)
        share = same.mean((1, 2))
        mean = (difference * same).sum((1, 2)) / np.maximum(1, same.sum((1, 2)))
        wide = (share >= WIDE) & (across + down >= WIDE_EDGES) & (mean <= RING * WIDE_RADIUS)
        copies.append(part[share >= SAME])
        strong.append(part[((np.minimum(across, down) >= EDGES) | wide) & (share < SAME)])
    none = np.zeros(0, np.int64)
    return Strong(np.concatenate([none, *strong]), np.concatenate([none, *copies]))


# -- groups --------------------------------------------------------------------------------------------------
@dataclass
class Group:
    """Records that show the same at one place.

    `region` (32,32) the blocks where they do; `centre` the record that stands for them; `radius` how far from it the
    others lie, in levels; `isolation` in nats, how much denser they lie than the records around; `wide`: a backdrop.
    """

    records: np.ndarray
    region: np.ndarray
    centre: int
    radius: float
    isolation: float
    wide: bool

    @property
    def share(self) -> float:
        """Of the frame."""
        return float(self.region.mean())


def duplicates(n: int, copies: np.ndarray) -> np.ndarray:
    """(n,) the first record of each record's near duplicates; itself where it has none."""
    first = np.arange(n)

    def root(i: int) -> int:
        while first[i] != i:
            first[i] = first[first[i]]
            i = int(first[i])
        return i

    for pair in copies:
        a, b = root(int(pair // n)), root(int(pair % n))
        first[max(a, b)] = min(a, b)
    return np.asarray([root(i) for i in range(n)])


def groups(views: np.ndarray, strong: Strong) -> tuple[list[Group], np.ndarray]:
    """Groups of at least LEAST records, and each record's first near duplicate (N,).

    A record may belong to one wide group and to one of another kind.
    """
    n = len(views)
    first = duplicates(n, strong.copies)
    i, j = first[strong.pairs // n], first[strong.pairs % n]
    near: dict[int, set[int]] = {}
    for a, b in zip(i.tolist(), j.tolist(), strict=True):
        if a != b:
            near.setdefault(a, set()).add(b)
            near.setdefault(b, set()).add(a)
    made, tried = [], set()
    queue = sorted(near, key=lambda record: (-len(near[record]), record))
    for centre in queue:
        if centre in tried or len(near[centre]) + 1 < LEAST:
            continue
        tried.add(centre)
        group = gathered(views, centre, sorted(near[centre]))
        if group is not None:
            tried.update(group.records.tolist())
            made.append(group)
    return merged(views, made), first


def gathered(views: np.ndarray, centre: int, others: list[int], rounds: int = 3) -> Group | None:
    """The group about a record: its region is where most agree with it, its members agree in most of the region.

    Copies lie closer together than honest neighbours. Of the RADII, the one counts within which the members exceed
    most what the ring around it lets expect (Chernoff's bound on the Poisson tail).
    """
    own = np.asarray(views[centre]).astype(np.int16)
    difference = np.abs(np.asarray(views[others]).astype(np.int16) - own).max(-1)
    same = difference <= NEAR
    best: Group | None = None
    for radius, chance in RADII.items():
        kept = np.ones(len(others), bool)
        for _ in range(rounds):
            if kept.sum() + 1 < LEAST:
                break
            region = same[kept].mean(0) >= 0.6
            if region.sum() < 8:
                kept[:] = False
                break
            agrees = (same[:, region].mean(1) >= 0.7) & (shared_edges(own, same, region) >= 0.5)
            far = (difference * same)[:, region].sum(1) / np.maximum(1, same[:, region].sum(1))
            kept = agrees & (far <= radius)
        inside = int(kept.sum())
        if inside + 1 < LEAST:
            continue
        expected = max(chance, float((agrees & (far > radius) & (far <= RING * radius)).sum()) / FALL)
        isolation = inside * np.log(inside / expected) - inside + expected if inside > expected else 0.0
        if best is None or isolation > 1.25 * best.isolation:
            members = np.sort(np.r_[centre, np.asarray(others)[kept]])
            wide = bool(region.mean() >= WIDE or min(edges(own[None], region[None]))[0] < EDGES)
            if radius <= WIDE_RADIUS or not wide:
                best = Group(members, region, centre, radius, float(isolation), wide)
    return best


def merged(views: np.ndarray, made: list[Group]) -> list[Group]:
    """The most isolated of groups that share records; groups of one thing at one place become one, for words, or what
    stands before it, had kept their records apart.

    A group is compared with those kept that share a record or half of the smaller region: all others are no match.
    """
    kept: list[Group] = []
    regions = np.zeros((len(made), SIDE * SIDE), np.float32)  # of those kept; none of a backdrop
    sizes, of_record = np.zeros(len(made)), dict[int, set[int]]()
    for group in sorted(made, key=lambda g: -g.isolation):
        region, k = group.region.ravel() & (not group.wide), len(kept)
        common = regions[:k] @ region.astype(np.float32)
        near = (common > 0) & (common >= 0.5 * np.minimum(sizes[:k], region.sum()))
        sharing = {place for record in group.records.tolist() for place in of_record.get(record, ())}
        for place in sorted(sharing.union(np.flatnonzero(near).tolist())):
            other = kept[place]
            if group.wide == other.wide and np.isin(group.records, other.records).mean() > 0.3:
                break
            if near[place] and _one_thing(views, group, other):
                other.records = np.union1d(other.records, group.records)
                other.isolation = max(other.isolation, group.isolation)
                break
        else:
            place, regions[k], sizes[k] = k, region, region.sum()
            kept.append(group)
        for record in kept[place].records.tolist():
            of_record.setdefault(record, set()).add(place)
    return kept


def _one_thing(views: np.ndarray, group: Group, other: Group) -> bool:
    """Whether the centres of two groups show the same where their regions meet."""
    both, same = group.region & other.region, agreement(views[group.centre], views[other.centre])
    own = np.asarray(views[other.centre]).astype(np.int16)
    return bool(same[both].mean() >= 0.8 and shared_edges(own, same[None], both)[0] >= 0.5)
