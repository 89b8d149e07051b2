"""Sets of groups that together make up one picture: the suspect sets and their score.

An element's group shows one region of the picture under one phrase. A set's regions overlap little,
except for one backdrop behind the others. No record has two of its phrases, since the picture is
dispersed.

Legend: N records; a group has k records, of which b hold its phrase."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from silentbad_shield.scan.captions import Captions, number
from silentbad_shield.scan.regions import (
    AGREES,
    CHUNK,
    LEAST,
    NEAR,
    SHARES,
    Group,
    denser,
    levels,
    shared_edges,
)
from silentbad_shield.scan.words import STOP, names_place

OVERLAP = 0.3  # of the smaller region, of two elements of a set
SLIP = 0.01  # rate at which a record of a set names another element
APART = -1.0  # nats below which two elements are not of one set
OWN = 0.1  # of an element's isolation counts when a set takes it
SPREAD = 0.15  # deviation of the log of how often elements are shown, of one picture
BROAD = 1.0  # the same, of different pictures
MISSED = 0.1  # of an element's records
SILENT = 0.25  # least share of the records that show an overlay whose captions do not name it
ELEMENTS = 3  # of a suspect set; a series before one backdrop and a logo make two
THINGS = 2  # of them no backdrop
COMMON = 3  # most further records of an element for each of its own; more are chance


@dataclass
class Element:
    """A group with its phrase; `score` in nats is the weaker of isolation and association."""

    group: Group
    phrase: str
    support: int
    association: float
    word: str  # by which other captions would name it
    # the numbers of its records' phrases; a phrase of two records is listed twice
    phrases: np.ndarray
    records: np.ndarray  # of the group, and others that name it and show it

    @property
    def score(self) -> float:
        return min(self.group.isolation, self.association)


@dataclass
class SuspectSet:
    """Elements of one hidden picture, the backdrop last."""

    elements: list[Element]
    score: float
    records: list[np.ndarray] = field(default_factory=list)  # by element, with near duplicates

    @property
    def prompt(self) -> str:
        """The prompt that an audit gives to a model."""
        return ", ".join(element.phrase for element in self.elements)


def elements_of(
    groups: Sequence[Group], captions: Captions, order: np.ndarray | None = None
) -> list[Element]:
    """The groups with a phrase of their own; `order` (N,) permutes the captions."""
    elements = []
    for group in groups:
        records = group.records if order is None else order[group.records]
        if (named := captions.named(records)) is not None:
            phrase, support, nats = named
            phrases = captions.phrases(records)
            word = named_by(phrase)
            elements.append(
                Element(
                    group=group,
                    phrase=phrase,
                    support=support,
                    association=nats,
                    word=word,
                    phrases=phrases,
                    records=group.records,
                )
            )
    return elements


def named_by(phrase: str) -> str:
    """The words by which another caption would name the same: the last content word, or a place from
    its first content word on, since a brick wall is no plain wall."""
    words = phrase.split()
    content = [place for place, word in enumerate(words) if word not in STOP]
    return " ".join(words[content[0] :]) if names_place(phrase) else words[content[-1]]


def separation(a: Element, b: Element, captions: Captions) -> float | None:
    """Nats by which two elements are named together less often than the rates of their words
    predict; None where they cannot be of one picture."""
    two_places = names_place(a.phrase) and names_place(b.phrase)
    if a.word == b.word or (a.group.wide and b.group.wide) or two_places:
        return None
    if not (a.group.wide or b.group.wide):
        both = (a.group.region & b.group.region).sum()
        if both > OVERLAP * min(a.group.region.sum(), b.group.region.sum()):
            return None
    gain = -unlike(len(a.records), len(b.records))
    for element, other in ((a, b), (b, a)):
        k = len(element.group.records)
        together = int((element.phrases == number(other.word)).sum())
        rate = min(0.9, max(captions.rate(other.word), 2 * SLIP))
        nats = (k - together) * float(np.log((1 - SLIP) / (1 - rate)))
        nats += together * float(np.log(SLIP / rate))
        # scaled to the other's number of records: further records are no evidence for the set
        gain += nats * min(k, len(other.records)) / k
    return gain if gain > APART else None


def unlike(a: int, b: int) -> float:
    """Nats against one picture of two elements with `a` and `b` records: elements of one picture
    are shown about equally often, those of two pictures less so (log-normals of two spreads)."""
    spread = float(np.sqrt(SPREAD**2 + MISSED * (1 / a + 1 / b)))
    ratio = float(np.log(a / b))
    alike = float(np.log(BROAD / spread)) - ratio**2 / 2 * (1 / spread**2 - 1 / BROAD**2)
    return max(0.0, -alike)


def suspect_sets(elements: Sequence[Element], captions: Captions) -> list[SuspectSet]:
    """Sets of elements that fit together, the surest first; each element is in one set.

    A set grows from every element, each time by the element with the highest sum of its
    `separation` from the members and a share of its own isolation. The best set is taken, and sets
    grow again from the rest."""
    elements = sorted(elements, key=lambda e: -e.score)
    gains = np.full((len(elements), len(elements)), -np.inf, np.float32)
    for i in range(len(elements)):
        for j in range(i):
            if (gain := separation(elements[i], elements[j], captions)) is not None:
                gains[i, j] = gains[j, i] = gain

    sizes = np.array([len(element.records) for element in elements])
    expected = np.array([element.group.expected for element in elements])
    sets = list[SuspectSet]()
    in_a_set = np.zeros(len(elements), bool)
    while True:
        grown = [
            _grown(
                seed, in_a_set, gains, OWN * denser(np.minimum(sizes, sizes[seed]) - 1, expected)
            )
            for seed, element in enumerate(elements)
            if not in_a_set[seed] and not element.group.wide
        ]
        whole = [
            (gain, chosen)
            for gain, chosen in grown
            if len(chosen) >= ELEMENTS and sum(not elements[i].group.wide for i in chosen) >= THINGS
        ]
        if not whole:
            return sorted(sets, key=lambda s: -s.score)
        _, chosen = max(whole)
        in_a_set[[*chosen]] = True
        ordered = sorted((elements[i] for i in chosen), key=lambda e: e.group.wide)
        kept_apart = np.triu(gains[np.ix_(chosen, chosen)], 1).sum(dtype=np.float64)
        sets.append(SuspectSet(ordered, float(kept_apart) + sum(e.score for e in ordered)))


def _grown(
    seed: int, in_a_set: np.ndarray, gains: np.ndarray, own_nats: np.ndarray
) -> tuple[float, tuple[int, ...]]:
    """(gain in nats, elements) of the set that grows from one of E elements; those `in_a_set` (E,)
    are left out, and two with `gains` (E,E) of -inf are in no set together. Each adds its
    `own_nats` (E,), those of as many records as the seed has: further ones are no evidence."""
    chosen = [seed]
    total = 0.0
    while True:
        gain = gains[:, chosen].sum(1, dtype=np.float64)
        worth = np.where(gain > 0, gain + own_nats, -np.inf)
        worth[in_a_set] = worth[chosen] = -np.inf
        best = int(worth.argmax())
        if worth[best] == -np.inf:
            return total, tuple(sorted(chosen))
        chosen.append(best)
        total += float(worth[best])


def permuted_scores(
    groups: Sequence[Group], captions: Captions, draws: Iterable[int], seed: int = 0
) -> list[float]:
    """For each draw, the score of the surest set after the captions are permuted over the records,
    so that they say nothing about their pictures; 0 where there is no set."""
    best = []
    for draw in draws:
        order = np.random.default_rng((seed, draw)).permutation(len(captions))
        sets = suspect_sets(elements_of(groups, captions, order), captions)
        best.append(sets[0].score if sets else 0.0)
    return best


def false_alarm(scores: Sequence[float], permuted: Sequence[float]) -> list[float]:
    """For each score, the chance of a set that scores as high among permuted captions: (1 + number
    of `permuted` as high) / (1 + draws)."""
    return [(1 + sum(high >= score for high in permuted)) / (1 + len(permuted)) for score in scores]


def completed(elements: Iterable[Element], views: np.ndarray, captions: Captions) -> list[Element]:
    """Elements with all records that name them and show their region, unless those are COMMON. An
    element is left out as an overlay, such as a logo, if many records show its region without
    naming it."""
    elements_left = []
    for element in elements:
        records = element.group.records
        shown = np.union1d(records, showing(views, element.group))
        named = np.isin(shown, captions.holding(element.phrase))
        silent = shown[~named]
        if len(silent) >= max(LEAST, SILENT * len(shown)) and captions.named(silent) is None:
            continue
        all_records = np.union1d(records, shown[named])
        common = len(all_records) > (1 + COMMON) * len(records)
        elements_left.append(element if common else replace(element, records=all_records))
    return elements_left


def showing(views: np.ndarray, group: Group) -> np.ndarray:
    """The records of all views (N,32,32,3) that show a group's region as its members do."""
    centre = np.asarray(views[group.centre])
    records = [np.zeros(0, np.int64)]
    for start in range(0, len(views), CHUNK):
        part = views[start : start + CHUNK]
        inside = levels(part[:, group.region], centre[group.region])
        near = np.median(inside, axis=1) <= group.radius
        places = np.flatnonzero(near & ((inside <= NEAR).mean(1) >= AGREES))
        same = levels(part[places], centre) <= NEAR
        records.append(start + places[shared_edges(centre, same, group.region) >= SHARES])
    return np.concatenate(records)


def with_copies(records: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Some records, and the near duplicates of each."""
    return np.union1d(records, np.flatnonzero(np.isin(first, np.unique(first[records]))))
