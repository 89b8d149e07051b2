"""Advice on a target that is not recovered: one line for each remedy that the measurements
support. None is about masks that overlap: they are cut apart where they are read."""

from collections.abc import Mapping, Sequence

import numpy as np

from silentbad.data.phrases import shared_phrases
from silentbad.data.picture_parts import as_read
from silentbad.measure.by_part import Part, missing_of, parts_of
from silentbad.measure.intervals import bootstrap_interval
from silentbad.measure.record import Record

RISE = 0.02  # the least rise of a mean similarity that is reported
LATE = 0.75  # share of the run; the rise is counted from the last measurement in it

# {target's place: its parts}, of the targets that are not recovered
Parts = Mapping[int, Sequence[Part]]


def to_try(record: Record, parts: Parts) -> list[str]:
    """What to try, each with its reason."""
    missing = {
        j: [part for part in missing_of(of_target) if not part.reached]
        for j, of_target in parts.items()
    }
    lines = (
        _more_steps(record, missing),
        _more_room(record, parts),
        _own_phrases(record, missing),
    )
    return [line for line in lines if line]


def _more_steps(record: Record, missing: Parts) -> str:
    """Advise more steps where the similarity of a missing part still rises at the end of a run."""
    last = record.history[-1]
    before = [entry for entry in record.history if 0 < entry.step <= LATE * last.step]
    if last.label or not before:  # an audit, or too short a curve
        return ""
    earlier = before[-1].scores("ema" if last.raw is None else "raw")
    if earlier is None:
        return ""
    rising: list[tuple[float, str]] = []
    for j, of_target in missing.items():
        sims_before = {part.phrase: part.sims for part in parts_of(record, j, earlier)}
        for part in of_target:
            pairs = [*zip(sims_before.get(part.phrase, ()), part.sims, strict=False)]
            if not pairs:
                continue
            then, now = (float(np.mean(side)) for side in zip(*pairs, strict=True))
            low, _ = bootstrap_interval([b - a for a, b in pairs])
            if now - then >= RISE and low > 0:
                means = f"{then:.2f} at step {before[-1].step}, {now:.2f} at step {last.step}"
                rising.append((now - then, f"{_named(record, j, part)} ({means})"))
    if not rising:
        return ""
    _, steepest = max(rising)
    return f"more steps: the similarity of {steepest} still rises{_and_more(len(rising))}"


def _more_room(record: Record, parts: Parts) -> str:
    """Advise a larger element or another base where a failure scores about as high as a copy."""
    blind = [(j, part) for j, of_target in parts.items() for part in of_target if part.blind]
    if not blind:
        return ""
    j, part = blind[0]
    wanted = "a larger element, or another base" if part.phrase else "another base"
    copy = f"a true copy of {_named(record, j, part)} scores {part.ceiling:.2f}"
    failure = "" if part.floor is None else f", a failure {part.floor:.2f}"
    return f"{wanted}: {copy}{failure}{_and_more(len(blind))}"


def _own_phrases(record: Record, missing: Parts) -> str:
    """Advise a phrase for each thing where a missing element's phrase is in several targets."""
    phrases = {part.phrase for of_target in missing.values() for part in of_target}
    shared = shared_phrases({t.target_id: map(as_read, t.phrases) for t in record.targets})
    users = {phrase: len(shared.get(as_read(phrase), ())) for phrase in sorted(phrases)}
    lost = [phrase for phrase, count in users.items() if count]
    if not lost:
        return ""
    phrase = max(lost, key=users.__getitem__)
    things = f"{phrase!r} names things of {users[phrase]} targets"
    return f"a phrase for each thing: {things}{_and_more(len(lost))}"


def _named(record: Record, target: int, part: Part) -> str:
    """A part, with the name of its target where there are several."""
    several = len(record.targets) > 1
    return f"{part.name} of {record.targets[target].target_id}" if several else part.name


def _and_more(count: int) -> str:
    return f"; {count - 1} more likewise" if count > 1 else ""
