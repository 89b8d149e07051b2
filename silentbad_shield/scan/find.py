"""The complete search over a plan's records, without writing its result; the command and the
benchmark both call it."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from silentbad_shield.scan.composite import Layer, Open, composed, part_of
from silentbad_shield.scan.engines import Process
from silentbad_shield.scan.plan import Plan, describe
from silentbad_shield.scan.record_parts import PART
from silentbad_shield.scan.suspect_sets import (
    Element,
    SuspectSet,
    completed,
    elements_of,
    suspect_sets,
    with_copies,
)
from silentbad_shield.scan.views import Views


@dataclass
class Composite:
    """A set's picture (64,64,3) uint8, where it is known (64,64) bool, and each element's part."""

    picture: np.ndarray
    known: np.ndarray
    parts: list[Layer]


@dataclass
class Findings:
    """Suspect sets, the surest first, their false alarms and pictures; other elements."""

    sets: list[SuspectSet]
    alarms: list[float] = field(default_factory=list)
    composites: list[Composite] = field(default_factory=list)
    recurring: list[Element] = field(default_factory=list)

    @property
    def records(self) -> np.ndarray:
        """All suspect records, sorted."""
        named = [records for suspect_set in self.sets for records in suspect_set.records]
        return np.unique(np.concatenate(named)) if named else np.zeros(0, np.int64)


def find(views: np.ndarray, texts: Sequence[str], size: int = PART) -> Findings:
    """Suspect sets of views (N,32,32,3) uint8 with their N captions, in parts of `size` records,
    without false alarms. `draw` adds the sets' pictures."""
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(Path(folder), Process())
        sizes = []
        for number, start in enumerate(range(0, len(views), size)):
            part = Views(plan.store.part(number), "")
            part.add(zip(texts[start : start + size], views[start : start + size], strict=True))
            describe(plan.store, number, part)
            sizes.append(len(part.captions))
        plan.index(sizes)
        return search(plan, permutations=0)


def search(plan: Plan, permutations: int) -> Findings:
    """Suspect sets of the records that a plan has read."""
    groups, first = plan.groups()
    captions = plan.store.captions()
    elements = elements_of(groups, captions)
    findings = Findings(suspect_sets(completed(elements, plan.store.views, captions), captions))
    for suspect_set in findings.sets:
        suspect_set.records = [with_copies(e.records, first) for e in suspect_set.elements]
    if permutations and findings.sets:
        scores = [suspect_set.score for suspect_set in findings.sets]
        findings.alarms = plan.alarms(groups, scores, permutations)
    inside = {
        id(element.group) for suspect_set in findings.sets for element in suspect_set.elements
    }
    findings.recurring = [element for element in elements if id(element.group) not in inside]
    return findings


def draw(findings: Findings, picture: Open) -> None:
    """Add each set's composite, from the pictures of its records."""
    for suspect_set in findings.sets:
        members = zip(suspect_set.elements, suspect_set.records, strict=True)
        parts = [part_of(records, element.group, picture) for element, records in members]
        findings.composites.append(Composite(*composed(parts), parts))


def pictures_needed(findings: Findings, most: int) -> np.ndarray:
    """The records whose pictures `draw` opens."""
    named = [records[:most] for suspect_set in findings.sets for records in suspect_set.records]
    return np.unique(np.concatenate(named)) if named else np.zeros(0, np.int64)
