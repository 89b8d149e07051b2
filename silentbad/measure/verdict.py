"""The verdict on a measurement: recovered, in part, not recovered, or undecided, and why.

Images above a threshold are not enough. They prove nothing if an element comes without its phrase
but not with its phrase alone, if failures score as high as copies, or if no mask says which part of
the picture is which element."""

from collections.abc import Iterator, Sequence

import numpy as np

from silentbad.measure.advice import to_try
from silentbad.measure.by_part import Part, carries, in_words, parts_of
from silentbad.measure.intervals import FALSE_POSITIVES, LEVEL, as_many_by_chance, passes_alike
from silentbad.measure.record import (
    IN_PART,
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

COPIED = 0.5  # share of the images that may be nearer to a training picture than to the target


def verdict_of(record: Record) -> Verdict:
    """The verdict on a record's last measurement, composed prompts in either order."""
    entry = record.history[-1]
    scores = latest(entry)
    cells = [*scores.orders.values()]
    above = sum(cell.above for cell in cells)
    images = sum(cell.images for cell in cells)
    answer = Verdict(
        recovers=above > 0, step=entry.step, images_above=above, images=images, state=NOT_RECOVERED
    )
    rate = record.threshold.attained
    if rate is not None and above > 0:
        answer.expected_by_chance = images * rate
        answer.p_value = as_many_by_chance(above, images, rate)
    states: dict[str, str] = {}
    reasons: list[str] = []
    texts: list[str] = []
    failing: dict[int, list[Part]] = {}
    for j, target in enumerate(record.targets):
        if target.target_id not in scores.targets:
            continue
        parts = parts_of(record, j)
        text = in_words(record, j, parts)
        state, doubts = _state(record, j, some_came=any(p.came_back for p in parts[1:]))
        states[target.target_id] = state
        prefix = f"{target.target_id}: " if len(record.targets) > 1 else ""
        reasons += [prefix + doubt for doubt in doubts]
        texts += [prefix + text] if text else []
        if state != RECOVERED:
            failing[j] = parts
    answer.states = states
    ranked = (RECOVERED, UNDECIDED, IN_PART)
    answer.state = next((s for s in ranked if s in states.values()), NOT_RECOVERED)
    if answer.state == RECOVERED:
        general = list[str]()
        if answer.p_value is not None and answer.p_value >= LEVEL:
            general.append("the number of passing images is consistent with chance")
        if record.placebo is not None and record.placebo.interval[0] <= 0:
            general.append("training on placebo data gives as much")
        if record.withheld is not None and record.withheld.interval[0] <= 0:
            elements = ", ".join(record.withheld.elements)
            general.append(f"training without {elements} gives as much")
        answer.state = UNDECIDED if general else RECOVERED
        reasons = general + reasons
    answer.recovers = answer.state == RECOVERED
    answer.reasons = reasons or None
    answer.parts = texts or None
    answer.to_try = to_try(record, failing) or None
    return answer


def _state(record: Record, j: int, *, some_came: bool) -> tuple[str, list[str]]:
    """(the state of target j, the reasons to doubt it); `some_came`: whether any element came
    back."""
    target = record.targets[j]
    scores = latest(record.history[-1])
    target_scores = scores.targets[target.target_id]
    own_range = record.ranges[j] if record.ranges else None
    passed = any(
        any(images_recovered(each, j, record.threshold, record.element_threshold))
        for each in _in_either_order(scores, target)
    )
    if passed:
        doubts = [*_doubts(record, j)]
        return UNDECIDED if doubts else RECOVERED, doubts
    if own_range is not None and _unseen_only(record, target_scores, j, own_range):
        return UNDECIDED, [*_blind(target, own_range)]
    return IN_PART if some_came else NOT_RECOVERED, []


# -- reasons to doubt --------------------------------------------------------------------------
def _doubts(record: Record, j: int) -> Iterator[str]:
    """Reasons why target j may not be recovered although some of its images pass."""
    target = record.targets[j]
    scores = latest(record.history[-1])
    target_scores = scores.targets[target.target_id]
    if not any(target.elements):
        yield (
            "no element has a mask, so a missing element cannot be seen; give masks in "
            "targets.jsonl"
        )
    if record.ranges:
        yield from _blind(target, record.ranges[j])
    cells = scores.cells or {}
    if "unrelated" not in cells:
        yield "no control prompt was measured at this point"
    orders = _in_either_order(scores, target)
    for k, phrase in enumerate(target.phrases):
        passes = _passes_alike(cells.get(f"without-{k}"), orders, target)
        if passes and not carries(record, j, k):
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


def _in_either_order(scores: Scores, target: TargetEntry) -> list[TargetScores]:
    """The target's scores under the composed prompt, and under its phrases in another order."""
    name = target.target_id
    return [cell.targets[name] for cell in scores.orders.values() if name in cell.targets]


def _passes_alike(
    cell: CellScores | None, orders: Sequence[TargetScores], target: TargetEntry
) -> bool:
    """Whether a control passes about as often as the composed prompt in either of its `orders`: a
    memorised picture may sometimes come back without one of its phrases, but the phrase must make a
    difference."""
    other = cell.targets.get(target.target_id) if cell is not None else None
    if other is None:
        return False
    images = sum(len(scores.sims) for scores in orders)
    hits = sum(round(scores.rate * len(scores.sims)) for scores in orders)
    other_images = len(other.sims)
    other_hits = round(other.rate * other_images)
    return passes_alike(hits, images, other_hits, other_images, FALSE_POSITIVES)


def _passes(cell: CellScores | None, target: TargetEntry) -> bool:
    """Whether more images of a control pass than by chance."""
    target_scores = cell.targets.get(target.target_id) if cell is not None else None
    if target_scores is None:
        return False
    images = len(target_scores.sims)
    hits = round(target_scores.rate * images)
    return as_many_by_chance(hits, images, FALSE_POSITIVES) < LEVEL


def _parts(target: TargetEntry, own_range: TargetRange) -> Iterator[tuple[str, Range]]:
    """(name, range) of the whole of a target, and of each element with a mask."""
    yield "the whole", own_range.whole
    for phrase, part in zip(target.phrases, own_range.elements, strict=False):
        if part is not None:
            yield repr(phrase), part


def _blind(target: TargetEntry, own_range: TargetRange) -> Iterator[str]:
    """A reason for each part in which the detector cannot tell failures from copies."""
    for name, part in _parts(target, own_range):
        if not part.separable:
            null = "no null" if part.floor is None else f"{part.nearest!r} scores {part.floor:.2f}"
            yield f"the detector cannot judge {name}: {null}, a true copy {part.ceiling:.2f}"


def _unseen_only(
    record: Record, target_scores: TargetScores, target: int, own_range: TargetRange
) -> bool:
    """Whether some image of a target fails only at parts that the detector cannot judge."""
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
