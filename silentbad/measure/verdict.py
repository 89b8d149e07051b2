"""What a measurement allows to say: recovered, not recovered, or undecided, and why.

Images above a threshold are not enough. Where a prompt that leaves an element out gives it all the
same, where failures score as high as copies, or where nobody said which part of the picture is
which element, the images prove nothing."""

from collections.abc import Iterator

import numpy as np

from silentbad.measure.intervals import binomial_cdf, fewer_by_chance
from silentbad.measure.record import (
    NOT_RECOVERED,
    RECOVERED,
    UNDECIDED,
    CellScores,
    Range,
    Record,
    Scores,
    TargetEntry,
    TargetRange,
    TargetScores,
    Verdict,
)
from silentbad.measure.scores import images_recovered, latest

LEVEL = 0.05  # p-values below it count as told from chance
RATE = 0.01  # false positives of an image, where the thresholds promise no better
COPIED = 0.5  # share of the images that may be nearer to a training picture than to the target


def verdict_of(record: Record) -> Verdict:
    """The verdict on a record's last measurement, composed prompts in either order."""
    entry = record.history[-1]
    scores = latest(entry)
    shuffled = (scores.cells or {}).get("shuffled")
    cells: list[CellScores] = [scores, shuffled] if shuffled else [scores]
    above = sum(cell.above for cell in cells)
    images = sum(cell.images for cell in cells)
    answer = Verdict(above > 0, entry.step, above, images, NOT_RECOVERED)
    if (rate := record.threshold.attained) is not None:
        answer.expected_by_chance = images * rate
        answer.p_value = chance(above, images, rate)
    states: dict[str, str] = {}
    reasons: list[str] = []
    for j, target in enumerate(record.targets):
        target_scores = scores.targets.get(target.target_id)
        if target_scores is None:
            continue
        own_range = record.ranges[j] if record.ranges else None
        passed = any(
            any(images_recovered(each, j, record.threshold, record.element_threshold))
            for cell in cells
            if (each := cell.targets.get(target.target_id)) is not None
        )
        state = NOT_RECOVERED
        doubts = list[str]()
        if passed:
            state = RECOVERED
            doubts = [*_doubts(target, target_scores, scores, own_range)]
        elif own_range is not None and _unseen_only(record, target_scores, j, own_range):
            doubts = [*_blind(target, own_range)]
        states[target.target_id] = UNDECIDED if doubts else state
        prefix = f"{target.target_id}: " if len(record.targets) > 1 else ""
        reasons += [prefix + doubt for doubt in doubts]
    answer.states = states
    answer.state = next((s for s in (RECOVERED, UNDECIDED) if s in states.values()), NOT_RECOVERED)
    if answer.state == RECOVERED:
        general = list[str]()
        if answer.p_value is not None and answer.p_value >= LEVEL:
            general.append(f"so few images may pass by chance (p = {answer.p_value:.2g})")
        if record.placebo is not None and record.placebo.interval[0] <= 0:
            general.append("training on placebo data gives as much")
        if record.withheld is not None and record.withheld.interval[0] <= 0:
            elements = ", ".join(record.withheld.elements)
            general.append(f"training without {elements} gives as much")
        answer.state = UNDECIDED if general else RECOVERED
        reasons = general + reasons
    answer.recovers = answer.state == RECOVERED
    answer.reasons = reasons or None
    return answer


def chance(above: int, images: int, rate: float) -> float:
    """The probability of so many images above the threshold, or more, by chance."""
    return 1.0 if above == 0 else max(float(1 - binomial_cdf(images, rate)[above - 1]), 0.0)


# -- reasons to doubt --------------------------------------------------------------------------
def _doubts(
    target: TargetEntry, target_scores: TargetScores, scores: Scores, own_range: TargetRange | None
) -> Iterator[str]:
    """Why a target of which images pass may not be recovered all the same."""
    if not any(target.elements):
        yield (
            "no element has a mask, so a missing element cannot be seen; give masks in "
            "targets.jsonl"
        )
    if own_range is not None:
        yield from _blind(target, own_range)
    cells = scores.cells or {}
    if "unrelated" not in cells:
        yield "no control prompt was measured at this point"
    for k, phrase in enumerate(target.phrases):
        if _passes_alike(cells.get(f"without-{k}"), target_scores, target):
            yield f"{phrase!r} passes in images whose prompt leaves it out"
        if len(target.phrases) > 1 and _passes(cells.get(f"phrase-{k}"), target):
            yield f"images of {phrase!r} alone pass"
    if _passes(cells.get("unrelated"), target):
        yield "images of an unrelated caption pass"
    if target_scores.nearest:
        pairs = zip(target_scores.nearest, target_scores.sims, strict=True)
        nearer = float(np.mean([near > sim for near, sim in pairs]))
        if nearer > COPIED:
            yield (
                f"{nearer:.0%} of the images are nearer to a training picture "
                f"({target_scores.nearest_record})"
            )


def _passes_alike(cell: CellScores | None, composed: TargetScores, target: TargetEntry) -> bool:
    """Whether a control passes more often than by chance, and not clearly less often than the
    composed prompt (Fisher's exact test): a remembered picture may come back now and then without
    one of its phrases, but the phrase must count for something."""
    if cell is None or not _passes(cell, target):
        return False
    other = cell.targets[target.target_id]
    hits = [round(scores.rate * len(scores.sims)) for scores in (composed, other)]
    sizes = [len(scores.sims) for scores in (composed, other)]
    return fewer_by_chance(hits[1], sizes[1], hits[0], sizes[0]) >= LEVEL


def _passes(cell: CellScores | None, target: TargetEntry) -> bool:
    """Whether more images of a control pass than chance gives."""
    target_scores = cell.targets.get(target.target_id) if cell is not None else None
    if target_scores is None:
        return False
    images = len(target_scores.sims)
    return chance(round(target_scores.rate * images), images, RATE) < LEVEL


def _parts(target: TargetEntry, own_range: TargetRange) -> Iterator[tuple[str, Range]]:
    """The ranges of a target by what they are of."""
    yield "the whole", own_range.whole
    for phrase, part in zip(target.phrases, own_range.elements, strict=False):
        if part is not None:
            yield repr(phrase), part


def _blind(target: TargetEntry, own_range: TargetRange) -> Iterator[str]:
    """Where the detector cannot tell failures from copies."""
    for name, part in _parts(target, own_range):
        if not part.separable:
            null = "no null" if part.floor is None else f"{part.nearest!r} scores {part.floor:.2f}"
            yield f"the detector cannot tell {name}: {null}, a true copy {part.ceiling:.2f}"


def _unseen_only(
    record: Record, target_scores: TargetScores, target: int, own_range: TargetRange
) -> bool:
    """Whether some image of a target fails only where the detector cannot tell."""
    checks: list[np.ndarray] = []
    if own_range.whole.separable:
        checks.append(np.array(target_scores.sims) >= record.threshold.of_target(target))
    for k, (element, part) in enumerate(
        zip(target_scores.elements, own_range.elements, strict=False)
    ):
        if element.sims and part is not None and part.separable:
            checks.append(np.array(element.sims) >= record.element_threshold.of(target, k))
    blind = len(checks) < 1 + sum(part is not None for part in own_range.elements)
    return blind and bool(checks) and bool(np.logical_and.reduce(checks).any())
