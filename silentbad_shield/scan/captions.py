"""The phrases of all captions: which records hold one, and which belongs to a group of records.

Phrases are known by 64-bit numbers. Only those that several captions hold are counted, since no
other names a group."""

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np

from silentbad_shield.scan.regions import LEAST, surely
from silentbad_shield.scan.words import association, phrases_of

HELD = 0.4  # of a group's records hold its phrase; the others may say it in other words
RARE = 0.03  # of the records hold a rare phrase at most


def number(phrase: str) -> int:
    """A phrase's 64-bit number, the same in every process. A collision is practically
    impossible."""
    digest = blake2b(phrase.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def numbers_of(texts: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
    """(numbers of the phrases of each caption in turn, where each caption's end (n,))."""
    numbers = list[int]()
    ends = list[int]()
    for text in texts:
        numbers += map(number, phrases_of(text))
        ends.append(len(numbers))
    return np.asarray(numbers, np.int64), np.asarray(ends, np.int64)


def counted(numbers: Iterable[np.ndarray], counts: Iterable[np.ndarray]) -> np.ndarray:
    """(2,m): the distinct numbers in ascending order, and the sum of each one's counts."""
    values, inverse = np.unique(
        np.concatenate([np.zeros(0, np.int64), *numbers]), return_inverse=True
    )
    sums = np.zeros(len(values), np.int64)
    np.add.at(sums, inverse, np.concatenate([np.zeros(0, np.int64), *counts]))
    return np.stack([values, sums])


class Captions:
    """Captions, and how many hold a phrase.

    `parts` are the results of `numbers_of` for the parts of the data in order; `several` (2,m) are
    the numbers of phrases in at least LEAST captions, and in how many."""

    def __init__(
        self,
        texts: Sequence[str],
        parts: Sequence[tuple[np.ndarray, np.ndarray]],
        several: np.ndarray,
    ):
        self.texts = texts
        self._parts = parts
        self._starts = np.cumsum([0, *(len(ends) for _, ends in parts)])
        self._values, self._counts = several

    def __len__(self) -> int:
        return len(self.texts)

    def phrases(self, records: np.ndarray) -> np.ndarray:
        """The numbers of the records' phrases."""
        phrase_numbers = [np.zeros(0, np.int64)]
        places = np.searchsorted(self._starts, records, side="right") - 1
        for place, record in zip(places.tolist(), np.asarray(records).tolist(), strict=True):
            numbers, ends = self._parts[place]
            at = record - int(self._starts[place])
            phrase_numbers.append(numbers[ends[at - 1] if at else 0 : ends[at]])
        return np.concatenate(phrase_numbers)

    def share_rare_phrase(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Which pairs of records (P,), (P,) share a rare phrase: (P,) bool."""
        shared = np.zeros(len(a), bool)
        if not len(self._values):
            return shared
        for k, (record, other) in enumerate(zip(a, b, strict=True)):
            common = np.intersect1d(self.phrases(record[None]), self.phrases(other[None]))
            places = np.searchsorted(self._values, common).clip(max=len(self._values) - 1)
            # only phrases of several captions are counted
            several = self._values[places] == common
            shared[k] = bool((self._counts[places[several]] <= RARE * len(self)).any())
        return shared

    def holding(self, phrase: str) -> np.ndarray:
        """The records whose captions hold a phrase."""
        records = [np.zeros(0, np.int64)]
        wanted = number(phrase)
        for (numbers, ends), start in zip(self._parts, self._starts.tolist(), strict=False):
            records.append(
                start + np.searchsorted(ends, np.flatnonzero(numbers == wanted), side="right")
            )
        return np.concatenate(records)

    def rate(self, phrase: str) -> float:
        """The share of the captions that hold a phrase; at least LEAST of them must."""
        return int(self._counts[np.searchsorted(self._values, number(phrase))]) / len(self)

    def named(self, records: np.ndarray) -> tuple[str, int, float] | None:
        """(phrase, how many of the records hold it, association in nats) of the phrase with the
        strongest association; None where none is sure. Of two that fit equally, the longer one is
        taken."""
        k = len(records)
        phrases, support = np.unique(self.phrases(records), return_counts=True)
        often = support >= max(LEAST, HELD * k)
        counts = self._counts[np.searchsorted(self._values, phrases[often])]
        sure = {}
        candidates = zip(phrases[often].tolist(), support[often].tolist(), counts, strict=True)
        for phrase, b, count in candidates:
            nats = association(b, k, int(count) - b, len(self) - k)
            if nats >= surely(len(self)):
                sure[phrase] = (b, nats)
        if not sure:
            return None
        texts = {text for record in records for text in phrases_of(self.texts[record])}
        spelt = [text for text in texts if number(text) in sure]

        def worth(text: str) -> tuple[float, str]:
            return sure[number(text)][1] * (1 + 0.02 * len(text.split())), text

        best = max(spelt, key=worth)
        return best, *sure[number(best)]
