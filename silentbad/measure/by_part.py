"""Which parts of a target the images recover: the whole, and each element at its own place."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from silentbad.measure.intervals import FALSE_POSITIVES, LEVEL, as_many_by_chance, passes_alike
from silentbad.measure.record import CellScores, Range, Record, Scores
from silentbad.measure.scores import images_recovered, latest

WHOLE = "the whole picture"
LEFT_OUT = "in images whose prompt leaves it out"
BEFORE = "in the base model's images"


@dataclass
class Part:
    """A target's images compared with one of its elements, or with the whole."""

    phrase: str  # empty: the whole
    sims: Sequence[float]
    threshold: float
    measured: Range | None  # the scores between which the threshold lies; None: not known
    rate: float  # share of images that reach the threshold by chance
    unasked: str = ""  # the control, in words, that passes about as often; empty: none

    @property
    def name(self) -> str:
        """The name in sentences."""
        return repr(self.phrase) if self.phrase else WHOLE

    @property
    def label(self) -> str:
        """The name in charts."""
        return self.phrase or "the whole"

    @property
    def hits(self) -> int:
        """Images that reach the threshold."""
        return sum(sim >= self.threshold for sim in self.sims)

    @property
    def images(self) -> int:
        """The number of images."""
        return len(self.sims)

    @property
    def best(self) -> float:
        """The highest similarity."""
        return max(self.sims)

    @property
    def mean(self) -> float:
        """The mean similarity."""
        return sum(self.sims) / len(self.sims)

    @property
    def floor(self) -> float | None:
        """The nearest failure."""
        return None if self.measured is None else self.measured.floor

    @property
    def ceiling(self) -> float | None:
        """What true copies reach."""
        return None if self.measured is None else self.measured.ceiling

    @property
    def note(self) -> str:
        """The nearest failure, and whether the detector can tell a copy from it, in words."""
        if self.measured is None:
            return ""
        nearest = self.measured.nearest
        cannot = "the detector cannot tell a copy from a failure" if self.blind else ""
        return "; ".join(filter(None, (cannot, nearest and f"nearest failure: {nearest}")))

    @property
    def reached(self) -> bool:
        """Whether at least half of the images reach the threshold."""
        return 2 * self.hits >= self.images

    @property
    def blind(self) -> bool:
        """Whether the detector cannot tell failures from copies."""
        return self.measured is not None and not self.measured.separable

    @property
    def came_back(self) -> bool:
        """Whether at least half of the images reach the threshold, more than by chance, and no
        control passes about as often."""
        if self.blind or self.unasked or not self.reached:
            return False
        return as_many_by_chance(self.hits, self.images, self.rate) < LEVEL


def parts_of(record: Record, target: int, scores: Scores | None = None) -> list[Part]:
    """The parts of a target in the images of its composed prompt: the whole, then each element with
    a mask. Empty where the target was not measured. `scores`: by default the last measurement's."""
    entry = record.targets[target]
    target_scores = (scores or latest(record.history[-1])).targets.get(entry.target_id)
    if target_scores is None:
        return []
    ranges = record.ranges[target] if record.ranges and target < len(record.ranges) else None
    parts = [
        Part(
            phrase="",
            sims=target_scores.sims,
            threshold=record.threshold.of_target(target),
            measured=None if ranges is None else ranges.whole,
            rate=record.threshold.attained or FALSE_POSITIVES,
        )
    ]
    for k, (phrase, element) in enumerate(zip(entry.phrases, target_scores.elements, strict=False)):
        if not element.sims:
            continue
        part = Part(
            phrase=phrase,
            sims=element.sims,
            threshold=record.element_threshold.of(target, k),
            measured=ranges.elements[k] if ranges and k < len(ranges.elements) else None,
            rate=record.element_threshold.attained or FALSE_POSITIVES,
        )
        part.unasked = _unasked(record, target, k, part)
        parts.append(part)
    return parts


def _unasked(record: Record, target: int, k: int, part: Part) -> str:
    """The control in which element k passes about as often as in `part`: a prompt without its
    phrase, or the base model. Empty: none."""
    for where, cell in _controls(record, target, k):
        sims = _sims(cell, record.targets[target].target_id, k)
        hits = sum(sim >= part.threshold for sim in sims)
        if sims and passes_alike([(part.hits, part.images)], (hits, len(sims)), part.rate):
            return where
    return ""


def _sims(cell: CellScores | None, name: str, k: int) -> list[float]:
    """The similarities to element k of a target's images under a control; none without a mask."""
    scores = cell.targets.get(name) if cell is not None else None
    if scores is None or k >= len(scores.elements):
        return []
    return scores.elements[k].sims or []


def _controls(record: Record, target: int, k: int) -> Iterator[tuple[str, CellScores]]:
    """(name, scores) of the controls of element k: prompts without its phrase, the base model."""
    cells = latest(record.history[-1]).cells or {}
    pair = len(record.targets[target].phrases) == 2
    without = f"phrase-{1 - k}" if pair else f"without-{k}"
    for name in ["unrelated"] if carries(record, target, k) else ["unrelated", without]:
        if name in cells:
            yield LEFT_OUT, cells[name]
    base = record.history[0]
    if base.step == 0 and base.raw is not None and len(record.history) > 1:
        yield BEFORE, base.raw


def carries(record: Record, target: int, k: int) -> bool:
    """Whether phrase k alone brings its element, in two images or more and more often than by
    chance, while neither another phrase alone nor an unrelated caption does.

    If so, it is no reason for doubt that the element also comes without its phrase: a memory
    completes a picture from most of its parts."""
    cells = latest(record.history[-1]).cells or {}
    entry = record.targets[target]
    rate = record.element_threshold.attained or FALSE_POSITIVES

    threshold = record.element_threshold.of(target, k)

    def brings(prompt: str) -> bool:
        sims = _sims(cells.get(prompt), entry.target_id, k)
        hits = sum(sim >= threshold for sim in sims)
        return hits > 1 and as_many_by_chance(hits, len(sims), rate) < LEVEL

    alone = [f"phrase-{i}" for i in range(len(entry.phrases))]
    own = alone.pop(k)
    return brings(own) and not any(map(brings, (*alone, "unrelated")))


def missing_of(parts: Sequence[Part]) -> list[Part]:
    """The elements that did not come back. The whole is listed only if every element came back and
    the whole did not: without an element it cannot come back."""
    elements = [part for part in parts[1:] if not part.came_back]
    return elements or [part for part in parts[:1] if not part.came_back]


# -- in words --------------------------------------------------------------------------------------
def in_words(record: Record, target: int, parts: Sequence[Part]) -> str:
    """The parts that came back and those that did not, in words; empty where none or all did."""
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
    """The parts that came back; parts with the same count are listed together."""
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
        return f"the detector cannot judge {part.name}"
    count = f"{part.name} in {f'{part.hits} of {part.images}' if part.hits else 'none'}"
    if part.unasked:
        return f"{count}, but as often {part.unasked}"
    digits = 2 if round(part.best, 2) != round(part.threshold, 2) else 4
    return f"{count} (best {part.best:.{digits}f} of {part.threshold:.{digits}f})"


def listed(names: Sequence[str]) -> str:
    """Names as a sentence has them: a, b and c."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
