"""The whole search over views and captions, without files: what the command and the benchmark
both call."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from silentbad.scan.candidates import candidates
from silentbad.scan.captions import Captions
from silentbad.scan.composite import Layer, Open, composed, part_of
from silentbad.scan.regions import groups, verified
from silentbad.scan.sets import (
    Element,
    SuspectSet,
    all_records,
    elements_of,
    false_alarm,
    suspect_sets,
)
from silentbad.scan.words import Words


@dataclass
class Composite:
    """A set's picture (64,64,3) uint8, where it is known (64,64) bool, and each element's part."""

    picture: np.ndarray
    known: np.ndarray
    parts: list[Layer]


@dataclass
class Found:
    """Suspect sets, the surest first, their false alarms and pictures; other elements."""

    sets: list[SuspectSet]
    alarms: list[float] = field(default_factory=list)
    composites: list[Composite] = field(default_factory=list)
    recurring: list[Element] = field(default_factory=list)

    @property
    def records(self) -> np.ndarray:
        """All suspect records, sorted."""
        named = [records for one in self.sets for records in one.records]
        return np.unique(np.concatenate(named)) if named else np.zeros(0, np.int64)


def find(
    views: np.ndarray,
    texts: Sequence[str],
    permutations: int = 99,
    seed: int = 0,
    folder: Path | None = None,
) -> Found:
    """Suspect sets of views (N,32,32,3) uint8 with their N captions; pairs of records are kept on
    disk, in `folder`. `draw` adds the sets' pictures."""
    words = Words()
    for text in texts:
        words.add(text)
    pairs = candidates(views, words.signatures(texts), seed, folder)
    captions = Captions(texts, folder)
    record_groups, first = groups(
        views, verified(views, pairs, captions.share_rare_phrase, folder), folder
    )
    findings = Found(suspect_sets(record_groups, captions))
    for suspect_set in findings.sets:
        all_records(suspect_set, views, captions, first)
    if permutations and findings.sets:
        scores = [suspect_set.score for suspect_set in findings.sets]
        findings.alarms = false_alarm(record_groups, captions, scores, permutations, seed)
    inside = {
        id(element.group) for suspect_set in findings.sets for element in suspect_set.elements
    }
    findings.recurring = [
        e for e in elements_of(record_groups, captions) if id(e.group) not in inside
    ]
    return findings


def draw(findings: Found, picture: Open) -> None:
    """Add each set's composite, from the pictures of its records."""
    for suspect_set in findings.sets:
        members = zip(suspect_set.elements, suspect_set.records, strict=True)
        parts = [part_of(records, element.group, picture) for element, records in members]
        findings.composites.append(Composite(*composed(parts), parts))


def pictures_needed(findings: Found, most: int) -> np.ndarray:
    """The records whose pictures `draw` opens."""
    named = [records[:most] for suspect_set in findings.sets for records in suspect_set.records]
    return np.unique(np.concatenate(named)) if named else np.zeros(0, np.int64)
