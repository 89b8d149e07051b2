"""The range of a detector on a target, and the threshold that lies in it.

A threshold says something only where failures lie below it and copies above it. For somebody's own
pictures both are made from the target (`failures.py`): the floor is the highest failure, the
ceiling is what true copies reach. The threshold lies a third of the way from floor to ceiling:
generated images are worse than copies, and the failures that nobody thought of resemble those that
are made. Where the two are not `GAP` apart the detector cannot tell, and the verdict says so.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from silentbad.measure.intervals import bootstrap_interval
from silentbad.measure.record import (
    ElementThreshold,
    KindThreshold,
    NullScores,
    Range,
    TargetRange,
    Threshold,
)
from silentbad.measure.scores import is_recovered
from silentbad.measure.thresholds import ImageRow, NullRow, Score, by_kind, element_scores

MARGIN = 1 / 3  # of the way from floor to ceiling
GAP = 0.15  # of similarity, the least between them
CEILING = 0.05  # share of true copies that may score less than the ceiling
# An image that is no recovery passes at most so often: of 343 failures that no calibration saw
# none did, 95 %: up to 0.011 (research/instrument.md). The count of a calibration's own failures
# says nothing of it; it differs between training and an audit.
FALSE_POSITIVES = 0.01


def measured_range(
    nulls: dict[str, list[Score]],
    copies: Sequence[float],
    threshold: float | None = None,
    calibrated: bool = False,
) -> Range:
    """The range of one picture or region: similarities of its nulls by kind, and of true copies,
    the first of which is the target itself.

    threshold: used where it is given, else set here. calibrated: it is the quantile of these very
    nulls, some kinds of which may pass at a stated rate, and so is the floor itself."""
    kinds = {kind: null_scores([s for s, _ in scores]) for kind, scores in nulls.items()}
    ceiling = float(np.quantile(copies, CEILING))
    nearest = max(kinds, key=lambda kind: kinds[kind].highest, default="")
    floor = kinds[nearest].highest if kinds else None
    if calibrated and threshold is not None:
        return Range(
            threshold, threshold, nearest, ceiling, copies[0], copies[0] >= threshold, kinds
        )
    separable = floor is not None and ceiling - floor >= GAP
    if threshold is None:
        low = -1.0 if floor is None else floor
        threshold = float(max(low + MARGIN * (ceiling - low), np.nextafter(low, np.inf)))
    elif floor is not None:
        separable = floor < threshold <= copies[0]
    return Range(threshold, floor, nearest, ceiling, copies[0], separable, kinds)


def null_scores(scores: Sequence[float]) -> NullScores:
    """One kind of null: its highest score, and the mean with its bootstrap interval."""
    interval = bootstrap_interval(scores) if len(scores) > 1 else None
    return NullScores(max(scores), float(np.mean(scores)), len(scores), interval)


def target_ranges(
    targets: Sequence[tuple[str, tuple[int, int]]],
    side: int,
    nulls: Sequence[NullRow],
    copies: Sequence[ImageRow],
    thresholds: tuple[Threshold, ElementThreshold] | None,
    threshold: float | None,
    calibrated: bool,
) -> tuple[list[TargetRange], Threshold, ElementThreshold]:
    """The ranges of all targets (id, size), and the thresholds that follow from them.

    thresholds: those of another calibration, which are kept; calibrated: on these very nulls.
    threshold: a given one of the whole.
    """
    ranges: list[TargetRange] = []
    for j, (name, size) in enumerate(targets):
        own_nulls = [row for row in nulls if row["target"] == j]
        own_copies = [row for row in copies if row["target"] == j]
        value = threshold if thresholds is None else thresholds[0].of_target(j)
        kinds = by_kind(own_nulls, whole_scores)
        whole = measured_range(kinds, [row["sim"] for row in own_copies], value, calibrated)
        elements: list[Range | None] = []
        for k, column in enumerate(zip(*(row["elements"] for row in own_copies), strict=True)):
            sims = [score for score in column if score is not None]
            value = None if thresholds is None else thresholds[1].of(j, k)
            kinds = by_kind(own_nulls, partial(element_scores, element=k))
            part = measured_range(kinds, sims, value, calibrated) if sims else None
            elements.append(part)
        ranges.append(
            TargetRange(name, size, side, whole, elements, len(own_nulls), 0, len(own_copies), 0)
        )
    used = thresholds or between(ranges, threshold)
    for j, target in enumerate(ranges):
        target.nulls_passing = sum(row["target"] == j and is_recovered(row, *used) for row in nulls)
        target.copies_passing = sum(
            row["target"] == j and is_recovered(row, *used) for row in copies
        )
    return ranges, *used


def whole_scores(row: NullRow) -> list[float]:
    """The similarity of a null of the whole: one that changes everything. What changes one element
    is told by that element's own threshold; a large picture hides a small one."""
    return [row["sim"]] if row.get("of_whole", row.get("changed") is None) else []


SOURCE = "failures made from the target, and true copies"


def between(
    ranges: Sequence[TargetRange], threshold: float | None
) -> tuple[Threshold, ElementThreshold]:
    """The thresholds of these ranges, of the whole unless one is given; `n` is the number of nulls
    of the target with the fewest."""
    fewest = min(target.nulls for target in ranges)
    of_targets: list[float | None] = [target.whole.threshold for target in ranges]
    highest = max(target.whole.threshold for target in ranges)
    if threshold is None:
        kinds = pooled([target.whole for target in ranges])
        whole = Threshold(
            highest, SOURCE, targets=of_targets, kinds=kinds, n=fewest, attained=FALSE_POSITIVES
        )
    else:
        whole = Threshold(threshold, "given")
    each: list[list[float] | None] = [
        [whole.of_target(j) if part is None else part.threshold for part in target.elements]
        for j, target in enumerate(ranges)
    ]
    parts = [part for target in ranges for part in target.elements if part is not None]
    top = max((part.threshold for part in parts), default=highest)
    element = ElementThreshold(
        top, SOURCE, kinds=pooled(parts), each=each, n=fewest, attained=FALSE_POSITIVES
    )
    return whole, element


def pooled(ranges: Sequence[Range]) -> dict[str, KindThreshold]:
    """Each kind's highest score over all ranges, as a threshold that it asks for."""
    kinds: dict[str, KindThreshold] = {}
    for measured in ranges:
        for kind, scores in measured.kinds.items():
            before = kinds.get(kind)
            value = scores.highest if before is None else max(before.value, scores.highest)
            n = scores.n + (0 if before is None else before.n)
            kinds[kind] = KindThreshold(value, n, 1 / (n + 1), 1 / (n + 1))
    return kinds
