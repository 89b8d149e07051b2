"""What came back of a target, part by part: each element at its own place, and the whole."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from silentbad.measure.intervals import LEVEL, as_many_by_chance, passes_alike
from silentbad.measure.ranges import FALSE_POSITIVES
from silentbad.measure.record import CellScores, Range, Record
from silentbad.measure.scores import images_recovered, latest

WHOLE = "the whole picture"
LEFT_OUT = "in images whose prompt leaves it out"
BEFORE = "in the base model's images"


@dataclass
class Part:
    """How many of a target's images reach the threshold of an element, or of the whole."""

    phrase: str  # empty: the whole
    hits: int
    images: int
    best: float
    threshold: float
    sims: Sequence[float]
    told: Range | None  # between which scores the detector tells; None: not known
    rate: float  # of hits by chance
    unasked: str = ""  # where it passes about as often, though nobody asked for it

    @property
    def name(self) -> str:
        """As sentences have it."""
        return repr(self.phrase) if self.phrase else WHOLE

    @property
    def reached(self) -> bool:
        """Whether at least half of the images reach the threshold."""
        return 2 * self.hits >= self.images

    @property
    def blind(self) -> bool:
        """Whether the detector cannot tell failures from copies."""
        return self.told is not None and not self.told.separable

    @property
    def came_back(self) -> bool:
        """Whether the images show it, more often than chance gives, and only where it is asked
        for."""
        if self.blind or self.unasked or not self.reached:
            return False
        return as_many_by_chance(self.hits, self.images, self.rate) < LEVEL


def parts_of(record: Record, target: int) -> list[Part]:
    """The whole of a target, then each element with a mask, in the last images of its composed
    prompt; empty where it has none."""
    entry = record.targets[target]
    target_scores = latest(record.history[-1]).targets.get(entry.target_id)
    if target_scores is None:
        return []
    told = record.ranges[target] if record.ranges and target < len(record.ranges) else None
    threshold = record.threshold.of_target(target)
    rate = record.threshold.attained or FALSE_POSITIVES
    whole = None if told is None else told.whole
    parts = [_part("", target_scores.sims, threshold, whole, rate)]
    for k, (phrase, element) in enumerate(zip(entry.phrases, target_scores.elements, strict=False)):
        if not element.sims:
            continue
        told_of_element = told.elements[k] if told and k < len(told.elements) else None
        threshold = record.element_threshold.of(target, k)
        rate = record.element_threshold.attained or FALSE_POSITIVES
        part = _part(phrase, element.sims, threshold, told_of_element, rate)
        part.unasked = _unasked(record, target, k, part)
        parts.append(part)
    return parts


def _part(
    phrase: str, sims: Sequence[float], threshold: float, told: Range | None, rate: float
) -> Part:
    hits = sum(sim >= threshold for sim in sims)
    return Part(phrase, hits, len(sims), max(sims), threshold, sims, told, rate)


def _unasked(record: Record, target: int, k: int, part: Part) -> str:
    """Where element k passes about as often without its phrase, or before training; empty:
    nowhere."""
    name = record.targets[target].target_id
    for where, cell in _controls(record, k, len(record.targets[target].phrases)):
        scores = cell.targets.get(name)
        sims = scores.elements[k].sims if scores is not None else None
        if sims:
            hits = sum(sim >= part.threshold for sim in sims)
            if passes_alike(part.hits, part.images, hits, len(sims), part.rate):
                return where
    return ""


def _controls(record: Record, k: int, phrases: int) -> Iterator[tuple[str, CellScores]]:
    """Images that nobody asked to show element k: of prompts without its phrase, and the base's."""
    cells = latest(record.history[-1]).cells or {}
    without = f"phrase-{1 - k}" if phrases == 2 else f"without-{k}"
    for name in ("unrelated", without):
        if name in cells:
            yield LEFT_OUT, cells[name]
    base = record.history[0]
    if base.step == 0 and base.raw is not None and len(record.history) > 1:
        yield BEFORE, base.raw


def missing_of(parts: Sequence[Part]) -> list[Part]:
    """The elements that did not come back; the whole where it alone did not: without an element it
    cannot."""
    elements = [part for part in parts[1:] if not part.came_back]
    return elements or [part for part in parts[:1] if not part.came_back]


# -- in words --------------------------------------------------------------------------------------
def in_words(record: Record, target: int, parts: Sequence[Part]) -> str:
    """What came back and what did not; empty where nothing came back, or all of it did."""
    came = [part for part in parts[1:] if part.came_back]
    if not came:
        return ""
    if missing := missing_of(parts):
        return f"{_came(came)}; {', '.join(map(_missed, missing))}"
    scores = latest(record.history[-1]).targets[record.targets[target].target_id]
    hits = images_recovered(scores, target, record.threshold, record.element_threshold)
    together = f"all of it together in {sum(hits) or 'none'}"
    return "" if 2 * sum(hits) >= len(hits) else f"{_came(came)}; {together}"


def _came(came: Sequence[Part]) -> str:
    """The parts that came back; those that did as often share a count."""
    counts = list(dict.fromkeys((part.hits, part.images) for part in came))
    texts = list[str]()
    for hits, images in counts:
        names = listed([part.name for part in came if (part.hits, part.images) == (hits, images)])
        texts.append(
            f"{names} in {hits} of {images}"
            if texts
            else f"{names} came back in {hits} of {images} images"
        )
    return ", ".join(texts)


def _missed(part: Part) -> str:
    """A part that did not come back, and how near its best image is."""
    if part.blind:
        return f"of {part.name} the detector cannot tell"
    count = f"{part.name} in {f'{part.hits} of {part.images}' if part.hits else 'none'}"
    if part.unasked:
        return f"{count}, but as often {part.unasked}"
    digits = 2 if round(part.best, 2) != round(part.threshold, 2) else 4
    return f"{count} (best {part.best:.{digits}f} of {part.threshold:.{digits}f})"


def listed(names: Sequence[str]) -> str:
    """Names as a sentence has them: a, b and c."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
