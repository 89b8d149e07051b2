"""How a threshold is set, from pictures to a number: read `calibrate` first, which
`validation.RecoveryHook.run` calls before anything is measured.

1. Null pictures must not count as recovered. They are those of redraws.jsonl (`redraws.py`), or
   else failures made from the target (`failures.py`) and pictures of the training set.
2. True copies must count: the target moved, lighter, with noise.
3. Both are compared with the target and with each of its elements, as a model's images are
   (`Measure.similar`).
4. The floor is the highest null, the ceiling what 95 % of the copies reach. The threshold lies a
   third of the way from floor to ceiling: generated images are worse than copies, and failures that
   nobody thought of resemble those that are made. Where floor and ceiling are less than GAP apart,
   the detector cannot tell failures from copies, and the verdict says so.
5. There are many redraws, and some are by chance as similar as a copy. For each kind of them the
   quantile at its false-positive rate is taken. The threshold is the highest of these; the report
   shows it as the floor too. (4 and 5: `threshold_of`.)
6. `validation.threshold` replaces the thresholds of wholes alone. An element without a mask has the
   threshold of its whole. The verdict uses those of each target and element (`Threshold.of_target`,
   `ElementThreshold.of`); `value` is the highest of them.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from torch import Tensor

from silentbad.data.images import open_image, to_tensor
from silentbad.data.picture_parts import as_read
from silentbad.measure import failures
from silentbad.measure.failures import Canvas, Null, Other, canvas_of
from silentbad.measure.intervals import FALSE_POSITIVES
from silentbad.measure.measure import DECODED, RAW, ComparedMasks, Measure
from silentbad.measure.record import ElementThreshold, Range, TargetRange, Threshold
from silentbad.measure.scores import ImageRow, null_scores
from silentbad.measure.similarity_cache import key, remembered
from silentbad.progress import Bar

MARGIN = 1 / 3  # of the way from floor to ceiling
GAP = 0.15  # least difference of similarity between floor and ceiling that tells them apart
CEILING = 0.05  # share of true copies that may score less than the ceiling
IN_PLACE = ("redrawn", "moved")  # one element is drawn anew at its place, or moved by some pixels
# by chance such a redraw differs as little as a copy, so its rate may be this many times higher
IN_PLACE_FACTOR = 5
MOST_SHOWN = 64  # at most so many training pictures are nulls
TRAINING = "training picture"  # kind of a null
NOTHING = -1.0  # the lowest similarity
# where the null pictures come from, as the report says it
REDRAWS = "redraws of the captions"
FAILURES = "failures made from the target, and true copies"


class NullRow(ImageRow, total=False):
    """The row of a null picture."""

    kind: str
    changed: tuple[int, ...] | None  # the elements that it changes; None: all
    of_whole: bool  # whether it is a null of the whole; by default yes


@dataclass
class Scored:
    """Similarities of nulls, by kind, and of true copies to one picture or region. The first copy
    is the target itself."""

    of_element: bool
    nulls: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    copies: list[float] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Nulls of all kinds."""
        return sum(map(len, self.nulls.values()))


class ScoredTarget(NamedTuple):
    """The similarities to a target and to each of its elements (None without a mask)."""

    whole: Scored
    elements: list[Scored | None]


def calibrate(measure: Measure) -> tuple[Threshold, ElementThreshold, list[TargetRange]]:
    """The thresholds of wholes and of elements, and the ranges that they lie in; the same on all
    ranks."""
    given = measure.config.threshold
    canvases = [
        canvas_of(target, masks, measure.sampler.side)
        for target, masks in zip(measure.targets, measure.masks, strict=True)
    ]
    if measure.uses_redraws:
        rate = measure.config.false_positive_rate
        nulls = of_redraws(measure)
    else:
        rate = None
        nulls = of_failures(measure, canvases)
    copies = of_copies(measure, canvases)
    scored = [scored_target(j, nulls, copies) for j in range(len(canvases))]
    whole, element = thresholds(scored, rate, given)

    ranges = []
    for j, (target, parts) in enumerate(zip(measure.targets, scored, strict=True)):
        of_elements = [
            None if part is None else measured_range(part, element.of(j, k), rate)
            for k, part in enumerate(parts.elements)
        ]
        ranges.append(
            TargetRange(
                target_id=target.target_id,
                size=target.image.size,
                side=measure.sampler.side,
                whole=measured_range(
                    parts.whole, whole.of_target(j), rate, given=given is not None
                ),
                elements=of_elements,
                nulls=sum(row["target"] == j for row in nulls),
                copies=len(parts.whole.copies),
            )
        )
    return whole, element, ranges


# -- pictures and their similarities ---------------------------------------------------------------
def of_copies(measure: Measure, canvases: Sequence[Canvas]) -> list[ImageRow]:
    """Rows of true copies, through the autoencoder; the plain one of each target first."""
    rows: list[Any] = []
    for j, drawn in enumerate(canvases):
        pictures = measure.sampler.round_trip(failures.true_copies(drawn.picture))
        rows += measure.similar(pictures.to(measure.accelerator.device), [j] * len(pictures))
    return rows


def nulls_of(measure: Measure, j: int, drawn: Canvas) -> Iterator[Null]:
    """Failures made from target j, and training pictures that lack some of its elements."""
    phrases = [as_read(phrase) for phrase in measure.targets[j].phrases]
    others = list[Other]()
    for picture, of_picture in measure.training.pictures(MOST_SHOWN):
        named = set(map(as_read, of_picture))
        shown = frozenset(k for k, phrase in enumerate(phrases) if phrase in named)
        others.append(Other(picture, shown))
    yield from failures.failures(drawn.picture, drawn.shares, drawn.backdrop, others)
    for other in others:
        changed = tuple(k for k in range(len(phrases)) if k not in other.shows)
        if changed:
            yield Null(TRAINING, changed, other.picture)


def of_failures(measure: Measure, canvases: Sequence[Canvas]) -> list[NullRow]:
    """Rows of each target's failures and of training pictures, through the autoencoder. One
    target's pictures are held at a time."""
    return [row for j, drawn in enumerate(canvases) for row in failures_of(measure, j, drawn)]


def failures_of(measure: Measure, j: int, drawn: Canvas) -> list[NullRow]:
    """`of_failures` of target j."""
    device = measure.accelerator.device
    nulls = [*nulls_of(measure, j, drawn)]
    target = measure.sampler.round_trip(drawn.picture[None])[0].to(device)
    places = measure.share(len(nulls))
    rows: list[tuple[int, NullRow | None]] = []
    with Bar(
        total=len(places),
        desc=f"Failures of {measure.targets[j].target_id}",
        leave=False,
        disable=not measure.accelerator.is_local_main_process,
    ) as bar:
        for start in range(0, len(places), measure.config.max_batch):
            part = places[start : start + measure.config.max_batch]
            batch = torch.stack([nulls[i].picture for i in part])
            decoded = measure.sampler.round_trip(batch, bar).to(device)
            similar = measure.similar(decoded, [j] * len(part))
            for i, picture, row in zip(part, decoded, similar, strict=True):
                pairs = [(drawn.picture, nulls[i].picture), (target, picture)]
                rows.append((i, null_row(measure.compared[j], row, nulls[i], pairs)))
    return [row for row in measure.gather(rows) if row is not None]


def of_redraws(measure: Measure) -> list[NullRow]:
    """Rows of redraws; similarities come from the cache where they are in it."""
    facts: list[Any] = [
        measure.embedder.describe(),
        measure.reference,
        [measure.config.max_batch, measure.accelerator.num_processes],
    ]
    for of_targets in (measure.references(RAW), measure.references(DECODED)):
        facts += of_targets.wholes
        facts += [feature for features in of_targets.elements for feature in features]
    facts += [mask for masks in measure.masks for mask in masks]
    for redraw in measure.redraws:
        facts += [redraw.target, redraw.file]
    rows = remembered(
        Path(measure.cache_dir or datasets.config.HF_DATASETS_CACHE) / "silentbad",
        key(facts, measure.accelerator.device),
        len(measure.redraws),
        measure.accelerator,
        lambda: similarities(measure),
    )
    return [
        row | {"kind": redraw.kind, "changed": redraw.changed}
        for row, redraw in zip(rows, measure.redraws, strict=True)
    ]


def similarities(measure: Measure) -> list[dict[str, Any]]:
    """The similarities of each redraw, computed in batches of one target and size."""
    redraws = measure.redraws
    rows: list[tuple[int, Any]] = []
    batches: dict[tuple[int, int], list[int]] = defaultdict(list)
    for place, i in enumerate(measure.share(len(redraws))):
        batches[redraws[i].target, place // measure.config.max_batch].append(i)
    for (target, _), part in batches.items():
        by_size: dict[torch.Size, dict[int, torch.Tensor]] = defaultdict(dict)
        for i in part:
            image = to_tensor(open_image(redraws[i].file, "redraws.jsonl"))
            by_size[image.shape][i] = image
        for images in by_size.values():
            similar = measure.similar(torch.stack([*images.values()]), [target] * len(images))
            rows += zip(images, similar, strict=True)
    return measure.gather(rows)


def null_row(
    compared: ComparedMasks, row: dict[str, Any], null: Null, pairs: Sequence[tuple[Tensor, Tensor]]
) -> NullRow | None:
    """The row of a failure. `pairs`: (target, failure), (3,S,S) each, as made and after the
    autoencoder.

    An element that the failure changes gets no similarity if it looks the same in either pair.
    None where all that it changes looks the same, since that is no failure."""

    def differs(mask: Tensor | None) -> bool:
        return all(failures.differs(target, picture, mask) for target, picture in pairs)

    elements = list[float | None](row["elements"])
    changed = [k for k in range(len(elements)) if null.changed is None or k in null.changed]
    masked = [k for k in changed if compared.elements[k] is not None]
    same = [k for k in masked if not differs(compared.elements[k])]
    of_whole = (null.changed is None or null.kind == TRAINING) and differs(compared.whole)
    if not of_whole and len(same) == len(changed):
        return None
    for k in same:
        elements[k] = None
    return NullRow(
        target=row["target"],
        sim=row["sim"],
        elements=elements,
        kind=null.kind,
        changed=null.changed,
        of_whole=of_whole,
    )


# -- from similarities to a threshold and a range --------------------------------------------------
def scored_target(j: int, nulls: Sequence[NullRow], copies: Sequence[ImageRow]) -> ScoredTarget:
    """The similarities to target j and to its elements.

    A null counts for an element only if it changes that element."""
    own_copies = [row for row in copies if row["target"] == j]
    whole = Scored(of_element=False, copies=[row["sim"] for row in own_copies])
    elements: list[Scored | None] = []
    for column in zip(*(row["elements"] for row in own_copies), strict=True):
        sims = [similarity for similarity in column if similarity is not None]
        elements.append(Scored(of_element=True, copies=sims) if sims else None)
    for row in nulls:
        if row["target"] != j:
            continue
        kind = row.get("kind", "redraw")
        changed = row.get("changed")
        if row.get("of_whole", True):
            whole.nulls[kind].append(row["sim"])
        for k, (element, similarity) in enumerate(zip(elements, row["elements"], strict=True)):
            changes = changed is None or k in changed
            if element is not None and similarity is not None and changes:
                element.nulls[kind].append(similarity)
    return ScoredTarget(whole, elements)


def thresholds(
    scored: Sequence[ScoredTarget], rate: float | None, given: float | None
) -> tuple[Threshold, ElementThreshold]:
    """(the thresholds of wholes, those of elements). With a `rate` they are quantiles of the nulls,
    without one they lie between failures and copies. A `given` number replaces those of wholes.

    Each target and each element has a threshold of its own, from its own nulls where they are
    enough. An element without a mask, or without any null to take a quantile of, has that of its
    whole."""
    source = FAILURES if rate is None else REDRAWS
    wholes = enough([target.whole for target in scored], rate)
    if given is not None:
        whole = Threshold(given, "given")
    else:
        values = [threshold_of(part, rate) for part in wholes]
        whole = Threshold(
            value=max(values),
            source=source,
            n=min(part.count for part in wholes),
            attained=attained_rate(wholes, rate),
            targets=list(values),
        )
    elements = enough([p for target in scored for p in target.elements if p is not None], rate)
    of_elements = [threshold_of(part, rate) for part in elements]
    highest = max(of_elements, default=NOTHING)
    left = iter(of_elements)
    each: list[list[float] | None] = []
    for j, target in enumerate(scored):
        own = [NOTHING if part is None else next(left) for part in target.elements]
        each.append([whole.of_target(j) if value == NOTHING else value for value in own])
    element = ElementThreshold(
        value=whole.value if highest == NOTHING else highest,
        source=source,
        n=min((part.count for part in elements), default=None),
        attained=attained_rate(elements or wholes, rate),
        each=each,
    )
    return whole, element


def enough(parts: Sequence[Scored], rate: float | None) -> list[Scored]:
    """Each part with its own nulls, or with those of all parts where its own are too few for a
    quantile at this rate."""
    if rate is None:
        return list(parts)
    together = Scored(of_element=any(part.of_element for part in parts))
    for part in parts:
        for kind, sims in part.nulls.items():
            together.nulls[kind] += sims
    return [part if part.count >= 1 / rate - 1 else together for part in parts]


def threshold_of(part: Scored, rate: float | None) -> float:
    """The threshold from the nulls and copies of one part; NOTHING for quantiles without a null."""
    if rate is not None:
        quantiles = [
            quantile(sims, rate_of(kind, rate, part.of_element))
            for kind, sims in part.nulls.items()
        ]
        return max(quantiles, default=NOTHING)
    floor = max(map(max, part.nulls.values()), default=NOTHING)
    ceiling = float(np.quantile(part.copies, CEILING))
    return float(max(floor + MARGIN * (ceiling - floor), np.nextafter(floor, np.inf)))


def quantile(nulls: Sequence[float], rate: float) -> float:
    """The threshold that a fresh null exceeds with probability at most `rate`, on average over null
    sets: just above the conformal order statistic ceil((n+1)(1-rate)), at most the largest."""
    n = len(nulls)
    k = int(np.ceil((n + 1) * (1 - rate) - 1e-9))
    return float(np.nextafter(np.sort(nulls)[min(k, n) - 1], np.inf))  # recovered means >=


def rate_of(kind: str, rate: float, of_element: bool) -> float:
    """The false-positive rate allowed for redraws of a kind. Each element of an `attributes`
    redraw, seen alone, is redrawn in place."""
    in_place = kind in IN_PLACE or (of_element and kind == "attributes")
    return min(IN_PLACE_FACTOR * rate, 0.5) if in_place else rate


def attained_rate(parts: Sequence[Scored], rate: float | None) -> float:
    """The false-positive rate that the nulls can show: `rate`, but n nulls cannot show one below
    1/(n+1). Averaged over the parts by kind; the highest kind counts. Kinds with a higher rate of
    their own are left out where there are others."""
    if rate is None:
        return FALSE_POSITIVES
    shown: dict[str, list[float]] = defaultdict(list)
    in_place: dict[str, list[float]] = defaultdict(list)
    for part in parts:
        for kind, sims in part.nulls.items():
            allowed = rate_of(kind, rate, part.of_element)
            of_kinds = shown if allowed == rate else in_place
            of_kinds[kind].append(max(allowed, 1 / (len(sims) + 1)))
    kinds = shown or in_place
    return max((float(np.mean(rates)) for rates in kinds.values()), default=rate)


def measured_range(
    part: Scored, threshold: float, rate: float | None = None, *, given: bool = False
) -> Range:
    """The range of one picture or region. `given`: the user set the threshold."""
    kinds = {kind: null_scores(sims) for kind, sims in part.nulls.items()}
    nearest = max(kinds, key=lambda kind: kinds[kind].highest, default="")
    floor = kinds[nearest].highest if kinds else None
    ceiling = float(np.quantile(part.copies, CEILING))
    perfect = part.copies[0]
    if rate is not None:  # some kinds may pass at a stated rate
        floor = threshold
        separable = perfect >= threshold
    elif given:
        separable = floor is None or floor < threshold <= perfect
    else:
        separable = floor is not None and ceiling - floor >= GAP
    return Range(
        threshold=threshold,
        floor=floor,
        nearest=nearest,
        ceiling=ceiling,
        perfect=perfect,
        separable=separable,
        kinds=kinds,
    )
