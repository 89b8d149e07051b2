"""The phrases of all captions: which records hold one, and which belongs to a group of records.

Phrases are known by 64-bit numbers. Those of each caption lie on disk; in memory are the counts of
those that several captions hold, since no other names a group."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from silentbad.scan.regions import LEAST, SURE
from silentbad.scan.spill import Numbers, Runs
from silentbad.scan.words import association, phrases_of

HELD = 0.4  # of a group's records hold its phrase; the others may say it in other words
RARE = 0.03  # of the records hold a rare phrase at most
BLOCK = 2048  # captions numbered together


def number(phrase: str) -> int:
    """The same within a process; two phrases of one number are as good as impossible."""
    return hash(phrase)


class Captions:
    """Captions, and how many hold a phrase or a word."""

    def __init__(self, captions: Sequence[str], folder: Path | None = None):
        self.texts = captions
        numbers = Numbers(folder)
        runs = Runs(folder)
        sizes = np.zeros(len(captions), np.int64)
        for start in range(0, len(captions), BLOCK):
            each = [list(map(number, phrases_of(text))) for text in captions[start : start + BLOCK]]
            sizes[start : start + BLOCK] = [len(one) for one in each]
            part = np.asarray([one for phrases in each for one in phrases], np.int64)
            numbers.add(part)
            runs.add(np.sort(part))
        self._numbers = numbers.array()
        self._ends = np.cumsum(sizes)
        values, counts = zip(*runs.merged(LEAST), strict=True)
        self._values = np.concatenate(values)
        self._counts = np.concatenate(counts)

    def __len__(self) -> int:
        return len(self.texts)

    def phrases(self, records: np.ndarray) -> np.ndarray:
        """The numbers of the records' phrases."""
        starts = np.where(records > 0, self._ends[records - 1], 0)
        parts = [
            self._numbers[a:b]
            for a, b in zip(starts.tolist(), self._ends[records].tolist(), strict=True)
        ]
        return np.concatenate(parts)

    def share_rare_phrase(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Which pairs of records (P,), (P,) share a rare phrase: (P,) bool."""
        shared = np.zeros(len(a), bool)
        for k, (one, other) in enumerate(zip(a, b, strict=True)):
            common = np.intersect1d(self.phrases(one[None]), self.phrases(other[None]))
            places = np.searchsorted(self._values, common).clip(max=len(self._values) - 1)
            # of several captions, else nothing is counted of it
            several = self._values[places] == common
            shared[k] = bool((self._counts[places[several]] <= RARE * len(self)).any())
        return shared

    def holding(self, phrase: str) -> np.ndarray:
        """The records whose captions hold a phrase."""
        return np.searchsorted(
            self._ends, np.flatnonzero(self._numbers == number(phrase)), side="right"
        )

    def rate(self, phrase: str) -> float:
        """The share of the records that hold a phrase, which several do."""
        return int(self._counts[np.searchsorted(self._values, number(phrase))]) / len(self)

    def named(self, records: np.ndarray) -> tuple[str, int, float] | None:
        """(phrase, how many of the records hold it, association in nats) of the phrase that belongs
        to them most; None where none does surely. Of two that fit alike, the longer one counts."""
        k = len(records)
        held, support = np.unique(self.phrases(records), return_counts=True)
        often = support >= max(LEAST, HELD * k)
        held, support = held[often], support[often]
        counts = self._counts[np.searchsorted(self._values, held)]
        nats = [
            association(b, k, c - b, len(self) - k)
            for b, c in zip(support.tolist(), counts.tolist(), strict=True)
        ]
        scored = zip(held.tolist(), support.tolist(), nats, strict=True)
        sure = {n: (b, gain) for n, b, gain in scored if gain >= SURE}
        if not sure:
            return None
        texts = {text for record in records for text in phrases_of(self.texts[record])}
        spelt = [text for text in texts if number(text) in sure]

        def worth(text: str) -> tuple[float, str]:
            return sure[number(text)][1] * (1 + 0.02 * len(text.split())), text

        best = max(spelt, key=worth)
        return best, *sure[number(best)]
