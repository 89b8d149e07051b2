"""Words and phrases of captions, and how surely a phrase belongs to a group of records.

A phrase is an n-gram of a caption's segment (what stands between punctuation), so no parser and no
metadata is needed. Legend: N records; a group has k of them, and b of those hold the phrase."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from silentbad.data.schema import Caption, admit

STOP = frozenset(
    "a an the at in on of with and or under before behind beside by to for from is are it its "
    "this that these those some his her their there as into over near".split()
)
LONGEST = 6  # tokens of a phrase
BITS = 256  # of a record's word signature
COMMON = 0.5  # a word in a larger share of the records is ignored
# first words of phrases that name a place
PLACES = frozenset("on in under before at behind beside near over by inside".split())
MOST_TOKENS = 80  # of a caption that are looked at


def text_of(unchecked: dict[str, Any]) -> str:
    """A row's caption, checked; the marker before phrases that training shuffles parts segments."""
    return admit(unchecked["text"], Caption, "text", unchecked["where"])


def segments(caption: str) -> list[list[str]]:
    """The tokens between punctuation, in lower case."""
    parts = re.split(r"[^\w\s'-]+|\s-+\s", caption.lower()[:4000])
    return [tokens for part in parts if (tokens := re.findall(r"[\w'-]+", part)[:MOST_TOKENS])]


def names_place(phrase: str) -> bool:
    """Whether a phrase names a place; a picture has one such phrase at most."""
    return phrase.split()[0].lower() in PLACES


def content_words(caption: str) -> set[str]:
    """The words of a caption that are no stop words."""
    return {word for tokens in segments(caption) for word in tokens} - STOP


def phrases_of(caption: str) -> set[str]:
    """N-grams of up to LONGEST tokens that end in a content word and have at most one stop word
    in front."""
    phrases = set()
    for tokens in segments(caption):
        for end, last in enumerate(tokens):
            if last in STOP:
                continue
            for start in range(max(0, end - LONGEST + 1), end + 1):
                if tokens[start] not in STOP or start < end:
                    phrases.add(" ".join(tokens[start : end + 1]))
    return phrases


def word_counts(captions: Iterable[str]) -> Counter[str]:
    """How many captions hold each content word."""
    return Counter(word for caption in captions for word in content_words(caption))


def signatures(captions: Sequence[str], counts: Mapping[str, int], records: int) -> np.ndarray:
    """(n, BITS/64) uint64 of n captions, by which records without a common word are recognised: a
    bit for each word that recurs among all `records` but is not in most of them."""
    most = max(3, COMMON * records)
    recurring = (word for word, count in counts.items() if 3 <= count <= most)
    place = {word: i % BITS for i, word in enumerate(sorted(recurring))}
    rows = np.zeros((len(captions), BITS // 64), np.uint64)
    for row, caption in zip(rows, captions, strict=True):
        for word in content_words(caption):
            if (bit := place.get(word)) is not None:
                row[bit // 64] |= np.uint64(1) << np.uint64(bit % 64)
    return rows


def association(b: int, k: int, outside: int, n: int) -> float:
    """How surely a phrase belongs to a group, in nats: k KL(b/k || f), f the phrase's rate outside;
    0 where it is no more common inside. The bound of Chernoff on the binomial tail P(X >= b)."""
    f = (outside + 1) / (n + 2)
    p = b / k
    if p <= f:
        return 0.0
    rest = (1 - p) * np.log((1 - p) / (1 - f)) if p < 1 else 0.0
    return float(k * (p * np.log(p / f) + rest))
