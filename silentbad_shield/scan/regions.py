"""Groups of records that show the same thing at the same place.

Every record is seen as a view of 32x32 blocks. Two steps, on the candidate pairs of
silentbad_shield/scan/candidates.py:

1. A pair is verified block by block. It is strong where the common area holds edges in both
   directions, or covers much of the frame: two skies of one blue are not. Fewer edges do where the
   captions share a rare phrase as well.
2. Strong pairs become groups about the record with the most of them; a group's region is where most
   members agree.

Legend: N records; V (N,32,32,3) uint8 views; a pair is one number i * N + j with i < j."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

SIDE = 32
CONTRAST = 20  # levels between neighbouring blocks that make an edge
NEAR = 5  # levels by which a block of a copy may differ
EDGES = 4  # in each direction, inside the common area of a strong pair
FEW_EDGES = 2  # the same of a pair whose captions share a rare phrase
FEW_EDGES_BOTH = 8  # and across and down together
WIDE = 0.3  # share of the frame that makes a common backdrop
WIDE_EDGES = 10  # of a backdrop
FAINT = 6  # levels of an edge in grass
FAINT_EDGES = 100  # of a backdrop that has too few edges
SAME = 0.93  # share of the frame from which a pair are near duplicates
CHUNK = 1000  # pairs verified together
LEAST = 3  # records of a group
FIRST_BLOCK = 512  # centres whose groups are gathered together first
LAST_BLOCK = 1 << 16  # at most
SURE = 6.0  # nats: least isolation of a group, and least association of its phrase
# records of the data that SURE and RADII were chosen on; half have at most one neighbour
CHOSEN_AT = 8000
# levels: how near copies are, exact to recompressed; least expected by chance
RADII = {0.5: 0.01, 0.8: 0.03, 2.0: 0.3}
MOST_ALIKE = 200  # neighbours of a record that are compared with each other
WIDE_RADIUS = 0.8  # of backdrops: they come in one dimension, and by chance lie close
ROUNDS = 3  # of a group's region and members, each from the other
MOST = 0.6  # of the members agree in each block of the region
SMALLEST = 8  # blocks of a region
AGREES = 0.7  # of the region's blocks a member has in common
SHARES = 0.5  # of the region's edges a member has in common
CLEARLY = 1.25  # times as isolated, before a larger radius counts
RING = 2.5  # the ring's radius over a group's
FALL = 14.0  # about the volume's growth, RING**3 - 1


def view(pixels: np.ndarray) -> np.ndarray:
    """A picture (64,64,3) as its block means (32,32,3) uint8."""
    return np.rint(pixels.reshape(SIDE, 2, SIDE, 2, 3).mean((1, 3))).astype(np.uint8)


# -- pairs -----------------------------------------------------------------------------------------
@dataclass
class Strong:
    """Verified pairs (P,), and the near duplicates among the candidates."""

    pairs: np.ndarray
    copies: np.ndarray


def levels(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How much (...) uint8 two arrays of colours (...,3) differ, by channel at most."""
    difference = np.maximum(a, b) - np.minimum(a, b)
    return np.maximum(np.maximum(difference[..., 0], difference[..., 1]), difference[..., 2])


def steps(a: np.ndarray, contrast: int = CONTRAST) -> tuple[np.ndarray, np.ndarray]:
    """Where views (...,32,32,3) have contrast: across (...,32,31), down (...,31,32)."""
    across = levels(a[..., 1:, :], a[..., :-1, :])
    down = levels(a[..., 1:, :, :], a[..., :-1, :, :])
    return across >= contrast, down >= contrast


def between(inside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which neighbours both lie inside (...,32,32): across, down, as `steps`."""
    return inside[..., 1:] & inside[..., :-1], inside[..., 1:, :] & inside[..., :-1, :]


def edges(
    a: np.ndarray, inside: np.ndarray, contrast: int = CONTRAST
) -> tuple[np.ndarray, np.ndarray]:
    """How many steps views (n,32,32,3) have inside (n,32,32): across, down (n,)."""
    return tuple(
        (step & both).sum((1, 2))
        for step, both in zip(steps(a, contrast), between(inside), strict=True)
    )


def shared_edges(centre_view: np.ndarray, same: np.ndarray, region: np.ndarray) -> np.ndarray:
    """The share (n,) of a view's (32,32,3) edges in a region at which others agree with it, `same`
    (n,32,32): two rooms with one wall and two floors share none. Where a view has hardly any edges,
    faint ones count too."""
    inside = between(region)
    for contrast in (CONTRAST, FAINT):
        across, down = (
            step & both for step, both in zip(steps(centre_view, contrast), inside, strict=True)
        )
        count = across.sum() + down.sum()
        if count >= FEW_EDGES_BOTH:
            break
    if not count:
        return np.ones(len(same))
    held_across, held_down = between(same)
    return (held_across[:, across].sum(1) + held_down[:, down].sum(1)) / count


# records (P,), records (P,) -> share a rare phrase (P,) bool
Kin = Callable[[np.ndarray, np.ndarray], np.ndarray]


def verified(views: np.ndarray, pairs: np.ndarray, kin: Kin) -> Strong:
    """The pairs whose common area is more than two equal colours by chance."""
    n = len(views)
    strong = [np.zeros(0, np.int64)]
    copies = [np.zeros(0, np.int64)]
    for start in range(0, len(pairs), CHUNK):
        part = np.asarray(pairs[start : start + CHUNK])
        a = np.asarray(views[part // n])
        difference = levels(a, views[part % n])
        same = difference <= NEAR
        across, down = edges(a, same)
        share = same.mean((1, 2))
        mean = (difference * same).sum((1, 2)) / np.maximum(1, same.sum((1, 2)))
        wide = (share >= WIDE) & (mean <= RING * WIDE_RADIUS)
        faint = wide & (across + down < WIDE_EDGES)
        wide[faint] = np.add(*edges(a[faint], same[faint], FAINT)) >= FAINT_EDGES
        both = wide | (np.minimum(across, down) >= EDGES)
        few = (
            ~both
            & (np.minimum(across, down) >= FEW_EDGES)
            & (across + down >= FEW_EDGES_BOTH)
            & (share < WIDE)
        )
        both[few] = kin(part[few] // n, part[few] % n)
        copies.append(part[share >= SAME])
        strong.append(part[both & (share < SAME)])
    return Strong(np.concatenate(strong), np.concatenate(copies))


# -- groups ----------------------------------------------------------------------------------------
@dataclass
class Group:
    """Records that show the same at one place.

    `region` (32,32) the blocks where they do; `centre` the record that stands for them; `radius`
    how far from it the others lie, in levels; `expected` how many would lie so near by chance;
    `isolation` in nats, how much denser they lie than the records around; `wide`: a backdrop."""

    records: np.ndarray
    region: np.ndarray
    centre: int
    radius: float
    expected: float
    isolation: float
    wide: bool

    @property
    def share(self) -> float:
        """The region's share of the frame."""
        return float(self.region.mean())

    def as_json(self) -> dict[str, Any]:
        """All of it, for `from_json`."""
        arrays = {
            "records": self.records.tolist(),
            "region": np.packbits(self.region).tobytes().hex(),
        }
        return {**vars(self), **arrays}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> "Group":
        """The same group."""
        bits = np.frombuffer(bytes.fromhex(row["region"]), np.uint8)
        arrays = {
            "records": np.asarray(row["records"]),
            "region": np.unpackbits(bits).reshape(SIDE, SIDE).astype(bool),
        }
        return cls(**{**row, **arrays})


def duplicates(n: int, copies: np.ndarray) -> np.ndarray:
    """(n,) the first record of each record's near duplicates; itself where it has none."""
    first = np.arange(n)

    def root(i: int) -> int:
        while first[i] != i:
            first[i] = first[first[i]]
            i = int(first[i])
        return i

    for pair in copies:
        a = root(int(pair // n))
        b = root(int(pair % n))
        first[max(a, b)] = min(a, b)
    return np.asarray([root(i) for i in range(n)])


def linked(pairs: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Strong pairs (P,) between the first of near duplicates, as i * N + j both ways, each once, in
    ascending order."""
    n = len(first)
    a = first[pairs // n]
    b = first[pairs % n]
    distinct = a != b
    a = a[distinct]
    b = b[distinct]
    return np.unique(np.concatenate([a * n + b, b * n + a]))


def starts_of(links: np.ndarray, n: int) -> np.ndarray:
    """(N+1,) where the links of each of N records begin, and where the last ones end."""
    return np.searchsorted(links, np.arange(n + 1) * n)


@dataclass(frozen=True)
class Chance:
    """How many neighbours a record has by chance among `records`: `density` times as many as in the
    data that the constants were chosen on."""

    records: int
    density: float = 1.0

    @classmethod
    def among(cls, counts: np.ndarray) -> "Chance":
        """An estimate from the number of neighbours `counts` (N,) of each record. Few records show
        an element, so the median is due to chance. It grows with N; growth beyond twice that of N
        is not chance but pictures of one kind."""
        most = max(1.0, 2 * len(counts) / CHOSEN_AT)
        return cls(len(counts), float(np.clip(np.median(counts), 1.0, most)) if len(counts) else 1)

    @property
    def sure(self) -> float:
        """Nats that count as sure among these records (`surely`)."""
        return surely(self.records)

    @property
    def fewest(self) -> int:
        """The fewest neighbours that can be sure, where chance gives the least number of
        neighbours."""
        expected = np.array([min(RADII.values()) * self.density])
        inside = LEAST - 1
        while denser(np.array([float(inside)]), expected)[0] < self.sure:
            inside += 1
        return inside


def surely(records: int) -> float:
    """Nats that count as sure among so many records: more records are more tests (Bonferroni)."""
    return SURE + float(np.log(max(1.0, records / CHOSEN_AT)))


# centres -> the group about each, or None
Gather = Callable[[list[int]], "list[Group | None]"]


def centred(counts: np.ndarray, gather: Gather, fewest: int) -> list[Group]:
    """Groups about the records with most neighbours `counts` (N,), at least `fewest`. A member of
    one group is no centre of another. Centres are gathered in blocks of growing size; the result is
    the same as one by one, since a centre in an earlier group of its block is dropped."""
    groups_so_far = list[Group]()
    tried = np.zeros(len(counts), bool)
    order = np.argsort(-counts, kind="stable")
    order = order[counts[order] >= fewest]
    start = 0
    size = FIRST_BLOCK
    while start < len(order):
        block = [int(centre) for centre in order[start : start + size] if not tried[centre]]
        for centre, group in zip(block, gather(block), strict=True):
            if group is not None and not tried[centre]:
                tried[group.records] = True
                groups_so_far.append(group)
        start += size
        size = min(2 * size, LAST_BLOCK)
    return groups_so_far


def differences(views: np.ndarray, records: np.ndarray, centre_view: np.ndarray) -> np.ndarray:
    """(n,32,32) uint8: how far the views of n records are from one view, read a few at a time."""
    parts = [
        levels(views[records[i : i + CHUNK]], centre_view) for i in range(0, len(records), CHUNK)
    ]
    return np.concatenate([np.zeros((0, SIDE, SIDE), np.uint8), *parts])


def gathered(views: np.ndarray, centre: int, others: np.ndarray, density: float) -> Group | None:
    """The group about a record, from the records that it has a strong pair with. If these agree
    with it at different places, the group starts from the largest set with one place."""
    centre_view = np.asarray(views[centre])
    difference = differences(views, others, centre_view)
    group = grouped(centre_view, centre, others, difference, np.ones(len(others), bool), density)
    if group is None and LEAST <= len(others) <= MOST_ALIKE:
        group = grouped(centre_view, centre, others, difference, alike(difference <= NEAR), density)
    return group


def alike(same: np.ndarray) -> np.ndarray:
    """(n,) bool: the largest set of regions (n,32,32) that share half of their union with one of
    them."""
    flat = same.reshape(len(same), -1).astype(np.float32)
    common = flat @ flat.T
    size = flat.sum(1)
    near = common >= 0.5 * (size[:, None] + size - common)
    return np.asarray(near[near.sum(1).argmax()])


def grouped(
    centre_view: np.ndarray,
    centre: int,
    others: np.ndarray,
    difference: np.ndarray,
    start: np.ndarray,
    density: float,
) -> Group | None:
    """The group about a record with the view `centre_view` (32,32,3): its region is where most
    agree with it, its members agree in most of the region. `difference` (n,32,32) is how far
    `others` (n,) are from it; `start` (n,) says which come first.

    Copies lie closer together than honest neighbours. The radius of RADII is taken at which the
    members most exceed the expected number (Chernoff's bound on the Poisson tail). That number is
    expected from the ring around the group, or from chance at this `density` if that is higher.
    """
    same = difference <= NEAR
    near = difference * same
    best: Group | None = None
    for radius, chance in RADII.items():
        if (within := members_within(radius, centre_view, same, near, start)) is None:
            continue
        region, members, ring = within
        expected = max(chance * density, ring / FALL)
        isolation = float(denser(np.array([members.sum()]), np.array([expected]))[0])
        if best is not None and isolation <= CLEARLY * best.isolation:
            continue
        few_edges = min(edges(centre_view[None], region[None]))[0] < FEW_EDGES
        wide = bool(region.mean() >= WIDE or few_edges)
        if radius <= WIDE_RADIUS or not wide:
            records = np.sort(np.r_[centre, others[members]])
            best = Group(
                records=records,
                region=region,
                centre=centre,
                radius=radius,
                expected=expected,
                isolation=isolation,
                wide=wide,
            )
    return best


def members_within(
    radius: float,
    centre_view: np.ndarray,
    same: np.ndarray,
    near: np.ndarray,
    start: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, int] | None:
    """(region (32,32), members (n,), records in the ring around them) of the group within a radius
    in levels, as in `grouped`; None where too few records or too few blocks agree. `same` (n,32,32)
    is where others agree with the centre, `near` how far they are from it there."""
    members = start
    for _ in range(ROUNDS):
        if members.sum() + 1 < LEAST:
            return None
        region = same[members].mean(0) >= MOST
        if region.sum() < SMALLEST:
            return None
        agrees = (same[:, region].mean(1) >= AGREES) & (
            shared_edges(centre_view, same, region) >= SHARES
        )
        distance = near[:, region].sum(1) / np.maximum(1, same[:, region].sum(1))
        members = agrees & (distance <= radius)
    if members.sum() + 1 < LEAST:
        return None
    ring = agrees & (distance > radius) & (distance <= RING * radius)
    return region, members, int(ring.sum())


def denser(inside: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """(n,) nats by which so many records exceed chance: Chernoff's bound (Poisson)."""
    inside = np.maximum(inside, expected)
    return inside * np.log(inside / expected) - inside + expected


def merged(views: np.ndarray, unmerged: list[Group], sure: float) -> list[Group]:
    """Of groups that share records, the most isolated one. Groups of one thing at one place are
    joined: different words, or things in front of it, had separated their records.

    A group below `sure` is only joined to another. It is dropped if its isolation is less than the
    number of records gives by chance."""
    chance = sure - SURE
    candidates = [group for group in unmerged if group.isolation >= chance]
    distinct = Distinct(views, sum(group.isolation >= sure for group in candidates))
    for group in sorted(candidates, key=lambda g: -g.isolation):
        place = distinct.match(group)
        if place is not None and not _of_one_set(group, distinct.groups[place]):
            distinct.join(place, group)
        elif place is None and group.isolation >= sure:
            distinct.append(group)
    return distinct.groups


class Distinct:
    """At most `most` groups of different things, with tables that find the few to compare with."""

    def __init__(self, views: np.ndarray, most: int):
        self.views = views
        self.groups: list[Group] = []
        self.regions = np.zeros((most, SIDE * SIDE // 64), np.uint64)  # a bit for each block
        self.sizes = np.zeros(most)
        self.of_record: dict[int, set[int]] = {}

    def match(self, group: Group) -> int | None:
        """The place of the first group that shares many of the group's records or shows its thing.
        Only groups that share a record, or half of the smaller region, are compared."""
        k = len(self.groups)
        region = _bits(group)
        common = np.bitwise_count(self.regions[:k] & region).sum(1)
        smaller = np.minimum(self.sizes[:k], np.bitwise_count(region).sum())
        near = (common > 0) & (common >= 0.5 * smaller)
        sharing = {
            place for record in group.records.tolist() for place in self.of_record.get(record, ())
        }
        for place in sorted(sharing.union(np.flatnonzero(near).tolist())):
            other = self.groups[place]
            if _of_one_set(group, other) or (near[place] and _one_thing(self.views, group, other)):
                return place
        return None

    def append(self, group: Group) -> None:
        """Keep a group as one more."""
        place = len(self.groups)
        self.regions[place] = _bits(group)
        self.sizes[place] = np.bitwise_count(self.regions[place]).sum()
        self.groups.append(group)
        self._note_records(place)

    def join(self, place: int, group: Group) -> None:
        """Add a group's records to the one that shows the same thing."""
        other = self.groups[place]
        other.records = np.union1d(other.records, group.records)
        other.isolation = max(other.isolation, group.isolation)
        self._note_records(place)

    def _note_records(self, place: int) -> None:
        for record in self.groups[place].records.tolist():
            self.of_record.setdefault(record, set()).add(place)


def _bits(group: Group) -> np.ndarray:
    """The blocks of a group's region as bits; none for a backdrop, which is compared by records
    alone."""
    return np.packbits(group.region & (not group.wide)).view(np.uint64)


def _of_one_set(group: Group, other: Group) -> bool:
    """Whether more than 0.3 of a group's records are in another group, both backdrops or
    neither."""
    return group.wide == other.wide and bool(np.isin(group.records, other.records).mean() > 0.3)


def _one_thing(views: np.ndarray, group: Group, other: Group) -> bool:
    """Whether the centres of two groups look the same where their regions overlap."""
    both = group.region & other.region
    same = levels(views[group.centre], views[other.centre]) <= NEAR
    other_view = np.asarray(views[other.centre])
    return bool(same[both].mean() >= 0.8 and shared_edges(other_view, same[None], both)[0] >= 0.5)
