"""The verdict on a measurement: recovered, in part, not recovered, or undecided, and why.

Images above a threshold are not enough. A target is in doubt if as many images pass without one of
its phrases, and that phrase alone does not bring its element; if failures score as high as copies;
or if no mask shows where its elements are."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from silentbad.measure.advice import to_try
from silentbad.measure.by_part import Part, carries, in_words, parts_of
from silentbad.measure.intervals import (
    FALSE_POSITIVES,
    LEVEL,
    as_many_by_chance,
    over_orders,
    passes_alike,
)
from silentbad.measure.record import (
    IN_PART,
    NOT_RECOVERED,
    RECOVERED,
    UNDECIDED,
    CellScores,
    Record,
    TargetEntry,
    Verdict,
)
from silentbad.measure.scores import latest

COPIED = 0.5  # share of the images that may be nearer to a training picture than to the target


def verdict_of(record: Record) -> Verdict:
    """The verdict on a record's last measurement, composed prompts in either order."""
    entry = record.history[-1]
    scores = latest(entry)
    cells = [*scores.orders.values()]
    above = sum(cell.above for cell in cells)
    images = sum(cell.images for cell in cells)
    by_chance: float | None = None
    p_value: float | None = None
    rate = record.threshold.attained
    if rate is not None and above > 0:
        by_chance = images * rate
        p_value = over_orders(as_many_by_chance(cell.above, cell.images, rate) for cell in cells)
    states: dict[str, str] = {}
    reasons: list[str] = []
    texts: list[str] = []
    failing: dict[int, list[Part]] = {}
    for j, target in enumerate(record.targets):
        if target.target_id not in scores.targets:
            continue
        parts = parts_of(record, j)
        text = in_words(record, j, parts)
        of_target, doubts = _state(record, j, parts)
        states[target.target_id] = of_target
        prefix = f"{target.target_id}: " if len(record.targets) > 1 else ""
        reasons += [prefix + doubt for doubt in doubts]
        texts += [prefix + text] if text else []
        if of_target != RECOVERED:
            failing[j] = parts
    ranked = (RECOVERED, UNDECIDED, IN_PART)
    state = next((s for s in ranked if s in states.values()), NOT_RECOVERED)
    if state == RECOVERED:
        general = [*_general_doubts(record, [j for j in states if states[j] == RECOVERED])]
        if general:  # it holds for each target
            state = UNDECIDED
            states = {name: UNDECIDED if s == RECOVERED else s for name, s in states.items()}
        reasons = general + reasons
    return Verdict(
        recovers=state == RECOVERED,
        step=entry.step,
        images_above=above,
        images=images,
        state=state,
        expected_by_chance=by_chance,
        p_value=p_value,
        reasons=reasons or None,
        states=states,
        parts=texts or None,
        to_try=to_try(record, failing) or None,
    )


def _general_doubts(record: Record, recovered: Sequence[str]) -> Iterator[str]:
    """Reasons to doubt that concern the run, not one target, where these seem to be recovered."""
    rate = record.threshold.attained
    if rate is not None and _chance(record, recovered, rate) >= LEVEL:
        yield "the number of passing images is consistent with chance"
    if record.placebo is not None and record.placebo.interval[0] <= 0:
        yield "training on placebo data gives as much"
    if record.withheld is not None and record.withheld.interval[0] <= 0:
        yield f"training without {', '.join(record.withheld.elements)} gives as much"


def _chance(record: Record, recovered: Sequence[str], rate: float) -> float:
    """The p-value of the passing images of targets that seem recovered. They were chosen by their
    hits: so all images count, or one target alone, corrected for their number and, as the lower of
    the two is taken, for both (Bonferroni)."""
    orders = latest(record.history[-1]).orders.values()
    by_order = [{t.target_id: _count([cell], t) for t in record.targets} for cell in orders]
    together = [
        (sum(counts[name][0] for name in recovered), sum(n for _, n in counts.values()))
        for counts in by_order
    ]
    alone = [
        over_orders(as_many_by_chance(*counts[name], rate) for counts in by_order)
        for name in recovered
    ]
    of_all = over_orders(as_many_by_chance(hits, n, rate) for hits, n in together)
    if len(record.targets) == 1:
        return of_all
    return min(1.0, 2 * min(of_all, len(record.targets) * min(alone)))


def _state(record: Record, j: int, parts: Sequence[Part]) -> tuple[str, list[str]]:
    """(the state of target j, the reasons to doubt it)."""
    orders = latest(record.history[-1]).orders.values()
    hits, _ = _count(orders, record.targets[j])
    if hits:
        doubts = [*_doubts(record, j, parts)]
        return UNDECIDED if doubts else RECOVERED, doubts
    if _unseen_only(parts):
        return UNDECIDED, [*_blind(parts)]
    return IN_PART if any(part.came_back for part in parts[1:]) else NOT_RECOVERED, []


# -- reasons to doubt --------------------------------------------------------------------------
def _doubts(record: Record, j: int, parts: Sequence[Part]) -> Iterator[str]:
    """Reasons why target j may not be recovered although some of its images pass."""
    target = record.targets[j]
    scores = latest(record.history[-1])
    target_scores = scores.targets[target.target_id]
    if not any(target.elements):
        yield (
            "no element has a mask, so a missing element cannot be seen; give masks in "
            "targets.jsonl"
        )
    yield from _blind(parts)
    cells = scores.cells or {}
    if not _count([cells.get("unrelated")], target)[1]:
        yield "no control prompt was measured at this point"
    of_orders = [_count([cell], target) for cell in scores.orders.values()]
    for k, phrase in enumerate(target.phrases):
        # a memorised picture may sometimes come back without one of its phrases, but the phrase
        # must make a difference
        of_rest = _count([cells.get(f"without-{k}")], target)
        if passes_alike(of_orders, of_rest, FALSE_POSITIVES) and not carries(record, j, k):
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


def _count(cells: Iterable[CellScores | None], target: TargetEntry) -> tuple[int, int]:
    """(recovered images, images) of a target under these kinds of prompts; (0, 0) where none of
    them was measured."""
    name = target.target_id
    measured = [cell.targets[name] for cell in cells if cell is not None and name in cell.targets]
    hits = sum(round(scores.rate * len(scores.sims)) for scores in measured)
    return hits, sum(len(scores.sims) for scores in measured)


def _passes(cell: CellScores | None, target: TargetEntry) -> bool:
    """Whether more images of a control pass than by chance."""
    return as_many_by_chance(*_count([cell], target), FALSE_POSITIVES) < LEVEL


def _blind(parts: Sequence[Part]) -> Iterator[str]:
    """A reason for each part in which the detector cannot tell failures from copies."""
    for part in parts:
        own = part.measured
        if own is not None and part.blind:
            null = "no null" if own.floor is None else f"{own.nearest!r} scores {own.floor:.2f}"
            yield f"the detector cannot judge {part.name}: {null}, a true copy {own.ceiling:.2f}"


def _unseen_only(parts: Sequence[Part]) -> bool:
    """Whether some image fails only at parts that the detector cannot judge."""
    checks = [np.array(part.sims) >= part.threshold for part in parts if not part.blind]
    return 0 < len(checks) < len(parts) and bool(np.logical_and.reduce(checks).any())
