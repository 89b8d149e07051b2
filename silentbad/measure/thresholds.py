"""The similarities from which an image counts as recovered: given, or calibrated on images that
are no recovery. For pictures of one's own they lie between those images and true copies
(silentbad/measure/ranges.py)."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np
from PIL import Image

from silentbad.data.images import content_hash, inside, open_image, safe_path
from silentbad.data.schema import REDRAW, admitted, json_lines, refuse_misspelt
from silentbad.data.targets import Target
from silentbad.errors import UserError, brief, warn
from silentbad.files import check_file
from silentbad.measure.intervals import CONFIDENCE, TAIL, binomial_cdf
from silentbad.measure.record import ElementThreshold, KindThreshold, Threshold


class ImageRow(TypedDict):
    """Similarities of an image to its target, and of each element (None without a mask)."""

    target: int
    sim: float
    elements: list[float | None]


class NullRow(ImageRow, total=False):
    """Of an image that is no recovery."""

    kind: str
    changed: tuple[int, ...] | None  # the elements that it changes; None: all
    of_whole: bool  # whether it tells of the whole; by default where it changes all


def calibrate_threshold(
    null: Sequence[float] | np.ndarray,
    false_positive_rate: float,
    groups: Sequence[object] | np.ndarray | None = None,
    source: str = "null images",
) -> Threshold:
    """Threshold that a fresh null score exceeds with probability at most alpha, with its interval.

    null (n,) similarities of images that are no recovery, groups (n,) their targets. The value is
    the conformal order statistic ceil((n+1)(1-alpha)), so the rate holds on average over null sets;
    with fewer than 1/alpha - 1 scores it is the largest, and `attained` = 1/(n+1) says what that is
    worth. The interval of the 1-alpha quantile is from order statistics (distribution-free, scores
    independent); `held_out` is the rate on each target under a threshold from the others: it sees
    the dependence inside a target."""
    scores = np.asarray(null, dtype=float)
    n = len(scores)
    alpha = false_positive_rate
    if n == 0 or not 0 < alpha < 1:
        raise UserError(
            f"calibration needs null scores and 0 < rate < 1; got {n} scores and rate {alpha}"
        )

    def order_statistic(x: np.ndarray) -> float:
        k = int(np.ceil((len(x) + 1) * (1 - alpha) - 1e-9))
        # recovered means >=, so just above it
        return float(np.nextafter(np.sort(x)[min(k, len(x)) - 1], np.inf))

    ordered = np.sort(scores)
    cdf = binomial_cdf(n, 1 - alpha)
    low = int(np.searchsorted(cdf, TAIL))  # of the count below the quantile
    high = int(np.searchsorted(cdf, 1 - TAIL))
    held_out = None
    if groups is not None and len(set(groups)) > 1:
        labels = np.asarray(groups)
        rates = [
            np.mean(scores[labels == g] >= order_statistic(scores[labels != g]))
            for g in sorted(set(labels.tolist()))
        ]
        held_out = float(np.mean(rates))
    return Threshold(
        value=order_statistic(scores),
        source=source,
        low=float(ordered[max(low - 1, 0)]) if low > 0 else None,
        high=float(ordered[high]) if high < n else None,
        n=n,
        false_positive_rate=alpha,
        attained=max(alpha, 1 / (n + 1)),
        confidence=CONFIDENCE,
        held_out=held_out,
    )


IN_PLACE = ("redrawn", "moved")  # one element anew at its place, or moved by some pixels
# such a null can by chance come within what a copy may suffer: its rate may be so much higher
IN_PLACE_FACTOR = 5


def rate_of(kind: str, false_positive_rate: float, of_element: bool) -> float:
    """False positives that nulls of a kind may have. Seen alone, each element of `attributes` is
    redrawn in place."""
    in_place = kind in IN_PLACE or (of_element and kind == "attributes")
    return min(IN_PLACE_FACTOR * false_positive_rate, 0.5) if in_place else false_positive_rate


Score = tuple[float, int]  # similarity, target


def by_kind(
    rows: Iterable[NullRow], scores: Callable[[NullRow], Iterable[float]]
) -> dict[str, list[Score]]:
    """The scores of null rows, by kind."""
    kinds: dict[str, list[Score]] = {}
    for row in rows:
        for score in scores(row):
            kinds.setdefault(row.get("kind", "redraw"), []).append((score, row["target"]))
    return kinds


def element_scores(row: NullRow, element: int | None = None) -> list[float]:
    """The similarities of a null's elements (or of one), of those that it changes."""
    changed = row.get("changed")
    return [
        score
        for k, score in enumerate(row["elements"])
        if score is not None and element in (None, k) and (changed is None or k in changed)
    ]


def strictest(
    scores: dict[str, list[Score]], rate: float, source: str, of_element: bool
) -> Threshold:
    """The highest threshold that any kind asks for: so each kind keeps its own rate.

    scores {kind: [(similarity, target)]}; the interval and the counts are those of the kind that
    decides."""
    of_kinds = {
        kind: calibrate_threshold(
            [s for s, _ in rows],
            rate_of(kind, rate, of_element),
            [j for _, j in rows],
            source=source,
        )
        for kind, rows in scores.items()
        if rows
    }
    if not of_kinds:
        raise UserError(f"calibration needs null scores; {source} gives none")
    highest = max(of_kinds.values(), key=lambda threshold: threshold.value)
    kinds = {
        kind: KindThreshold(t.value, t.n or 0, t.false_positive_rate or rate, t.attained or rate)
        for kind, t in of_kinds.items()
    }
    return replace(highest, false_positive_rate=rate, kinds=kinds)


def with_attained_rates(pooled: Threshold, in_use: Sequence[Threshold | None]) -> Threshold:
    """`pooled` with the rates that the thresholds in use can promise.

    in_use: the threshold of each target (or element), None where it uses the pooled one. A kind's
    `attained` becomes the mean over them, since n nulls of a kind promise no less than 1/(n+1);
    `attained` the highest of the kinds that have no allowance."""
    kinds = dict[str, KindThreshold]()
    for name, kind in (pooled.kinds or {}).items():
        used = [kind if t is None else (t.kinds or {}).get(name) for t in in_use]
        promised = [k.attained for k in used if k is not None]
        kinds[name] = replace(
            kind, attained=float(np.mean(promised)) if promised else kind.attained
        )
    plain = [k.attained for k in kinds.values() if k.rate == pooled.false_positive_rate]
    return replace(pooled, kinds=kinds, attained=max(plain) if plain else pooled.attained)


def thresholds(
    null: Sequence[NullRow], value: float | None, false_positive_rate: float, source: str
) -> tuple[Threshold, ElementThreshold]:
    """(of the whole, of elements): given, or calibrated on null rows; elements without nulls use
    the whole's.

    Every kind of null keeps its own rate. A null tells of an element only where it changes it
    (`changed`; None: all of them). How alike two backdrops are says little about two fish, so each
    target and each of its elements has its own threshold where its nulls, of all kinds, are enough
    for the rate; otherwise that of all together. A kind with few nulls keeps the rate that so many
    can promise: `attained` of the kind says which."""

    def strict(scores: dict[str, list[Score]], of_element: bool) -> Threshold:
        return strictest(scores, false_positive_rate, source, of_element)

    def strict_if_enough(scores: dict[str, list[Score]], of_element: bool) -> Threshold | None:
        enough = sum(map(len, scores.values())) >= 1 / false_positive_rate - 1
        return strict(scores, of_element) if enough else None

    def of_whole(row: NullRow) -> list[float]:
        return [row["sim"]]

    targets = range(max((row["target"] for row in null), default=-1) + 1)
    rows_of = [[row for row in null if row["target"] == j] for j in targets]
    if value is not None:
        whole = Threshold(value, "given")
    else:
        each_whole = [strict_if_enough(by_kind(rows, of_whole), False) for rows in rows_of]
        whole = with_attained_rates(strict(by_kind(null, of_whole), False), each_whole)
        whole.targets = [None if t is None else t.value for t in each_whole]
    pooled = by_kind(null, element_scores)
    element = strict(pooled, True) if pooled else replace(whole, kinds=None)
    each: list[list[float] | None] = []
    parts: list[Threshold | None] = []
    for rows in rows_of:
        of_target: list[float] = []
        for k in range(len(rows[0]["elements"]) if rows else 0):
            scores = by_kind(rows, partial(element_scores, element=k))
            part = strict_if_enough(scores, True)
            of_target.append(element.value if part is None else part.value)
            parts += [part] if scores else []
        each.append(of_target if rows else None)
    element = with_attained_rates(element, parts) if pooled else element
    return whole, ElementThreshold(**{**vars(element), "targets": None}, each=each)


class Redraw(NamedTuple):
    """A null picture of a target: its kind, and the elements that it changes (None: all)."""

    target: int
    file: Path
    kind: str
    changed: tuple[int, ...] | None


FEW = ("missing", "rearranged")  # kinds of which a target has a handful in all, so that they repeat


def load_redraws(
    targets_file: str | None, targets: Sequence[Target], decode: bool = False
) -> list[Redraw]:
    """redraws.jsonl beside the targets: pictures that are no recovery, the nulls, by `kind`.

    Every line is checked, also one of a target that is not there, which is then left out; `decode`
    opens the images and refuses a target among them: under its similarity of 1 nothing could ever
    count as recovered."""
    root = Path(targets_file or ".")
    file = (root if os.path.isdir(root) else root.parent) / "redraws.jsonl"
    if targets_file is None or not os.path.lexists(file):
        return []
    if not os.path.isfile(file):
        raise UserError(
            f"{file}: is no file that can be read; list null pictures in it, or take it away"
        )
    inside(file.parent, file, str(file.parent))
    index = {t.target_id: j for j, t in enumerate(targets)}
    prints = [fingerprint(t.image) for t in targets] if decode else []
    redraws: list[Redraw] = []
    others: list[str] = []
    first_lines: dict[tuple, str] = {}
    for where, entry in json_lines(file):
        refuse_misspelt(entry, REDRAW, where)
        redraw = admitted(entry, REDRAW, where)
        image = safe_path(file.parent, redraw["image"], where, "image")
        j = index.get(redraw["target_id"])
        if j is None:
            others.append(redraw["target_id"])
            continue
        check_file(where, image)
        phrases = targets[j].phrases
        if beyond := [k for k in redraw["changed"] or () if k >= len(phrases)]:
            raise UserError(
                f"{where}: changed: {beyond[0]} is no place of the {len(phrases)} "
                f"phrases, counted from 0"
            )
        if decode:
            null = fingerprint(open_image(image, where))
            if is_copy(null, prints[j]):
                raise UserError(
                    f"{where}: the image is target {targets[j].target_id!r} itself; a null image "
                    f"must be another picture"
                )
            first = first_lines.setdefault((j, redraw["kind"], null.content), where)
            if first != where and redraw["kind"] not in FEW:
                raise UserError(f"{where}: the same picture as {first}; list each null image once")
        redraws.append(Redraw(j, image, redraw["kind"], redraw["changed"]))
    if decode and others and not redraws:
        warn(
            f"{file}: is of other targets ({brief(others[0])}, ...); no null picture is "
            f"taken from it"
        )
    return redraws


COPY = 2.0  # levels of 255


class Fingerprint(NamedTuple):
    """Content hash and the RGB image squashed to 64x64 (64,64,3)."""

    content: str
    pixels: np.ndarray


def fingerprint(image: Image.Image) -> Fingerprint:
    small = image.resize((64, 64), Image.Resampling.BOX)
    return Fingerprint(content_hash(image), np.asarray(small, dtype=np.float32))


def is_copy(first: Fingerprint, second: Fingerprint) -> bool:
    """Whether two pictures are the same, resized or recompressed.

    A null may share all but one element with its target, so that only what is nearly equal in every
    pixel is a copy: 2 levels in the root mean square at 64x64, where a training image is refused
    from 8 at 16x16."""
    return first.content == second.content or bool(
        np.sqrt(np.square(first.pixels - second.pixels).mean()) <= COPY
    )
