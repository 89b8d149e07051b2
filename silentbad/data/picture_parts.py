"""Checks of the elements of one picture, for `prepare`, targets.jsonl and metadata: the tokenizer
must distinguish their phrases, and each mask must cover one thing."""

import unicodedata
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from typing import Any

import numpy as np
from PIL import Image, ImageChops

from silentbad.errors import UserError, brief, warn

Masks = Sequence[Image.Image | None]  # greyscale, of one size; None: of no mask
Regions = dict[str, np.ndarray]  # where each mask (H,W) is white, by phrase

SAME = 0.95  # masks are the same if both cover this share of their union
NESTED = 0.25  # one of two masks lies in the other if they share this part of the smaller one
LEFT = 0.05  # least share of a mask that the earlier masks leave free
WIDEST = 0.95  # largest share of the picture that a thing covers
FRAME = 0.75  # share of the outermost pixels: a backdrop covers more, a thing less


# ---------------------------------------------------------------- phrases
def as_read(phrase: str) -> str:
    """A phrase as CLIP's tokenizer reads it: small letters, single blanks, composed accents."""
    return " ".join(unicodedata.normalize("NFC", phrase).lower().split())


def check_phrases(phrases: Sequence[str], where: str) -> None:
    """Refuse phrases of one picture that are the same to the tokenizer."""
    first: dict[str, str] = {}
    for phrase in phrases:
        key = as_read(phrase)
        if key in first:
            wrong = f"phrase {brief(phrase)} is given twice"
            if first[key] != phrase:
                wrong = f"{brief(first[key])} and {brief(phrase)} are one phrase to the tokenizer"
            raise UserError(f"{where}: {wrong}; each names one element")
        first[key] = phrase


# ---------------------------------------------------------------- masks
def cut_apart(
    phrases: Sequence[str], masks: Masks, where: str, *, rest: bool = False, slight: bool = False
) -> list[Image.Image | None]:
    """The masks, each without the pixels of earlier masks: the earlier phrase gets them.

    Warns if one mask lies in another. Masks that overlap only a little keep the shared pixels,
    unless `slight` is set. `rest`: the area outside all masks is the backdrop, so each mask is of a
    thing. Raises UserError where masks are the same, of nearly everything, inverted, or all
    covered."""
    regions = regions_of(phrases, masks)
    for fault in faults(regions, rest):
        raise UserError(f"{where}: {fault}")
    for line in overlaps(regions):
        warn(f"{where}: {line}; the earlier phrase has the pixels")
    for line in alone_around(regions):
        warn(f"{where}: {line}")
    apart: list[Image.Image | None] = []
    before: list[np.ndarray] = []
    for mask in masks:
        if mask is not None:
            covered = region(mask)
            for other in before:
                if slight or shared(other, covered) > NESTED:
                    mask = ImageChops.multiply(mask, Image.fromarray(np.uint8(255) * ~other))
            before.append(covered)
        apart.append(mask)
    return apart


def faults(regions: Regions, rest: bool) -> Iterator[str]:
    """What is wrong with the masks of one picture; `rest`: each is of a thing."""
    yield from same(regions)
    yield from around_twice(regions)
    taken: Any = np.False_
    before: dict[str, np.ndarray] = {}
    for name, covered in regions.items():
        nested = [other for other in before if shared(before[other], covered) > NESTED]
        if rest and surrounds(covered):
            yield (
                f"the mask of {name} covers the edges of the picture, as a backdrop does; is it "
                f"inverted? white is the thing"
            )
        elif rest and covered.mean() > WIDEST:
            yield f"the mask of {name} covers {covered.mean():.0%} of the picture; mark one thing"
        elif nested and (covered & ~taken).sum() < LEFT * covered.sum():
            yield (
                f"{name} lies in the mask of {nested[-1]}, which is named before it and has the "
                f"pixels; name {name} first, or correct an inverted mask"
            )
        taken |= covered
        before[name] = covered


def around_twice(regions: Regions) -> Iterator[str]:
    """A line if two masks cover the edges: only one of them can be the backdrop's."""
    around = [name for name, covered in regions.items() if surrounds(covered)]
    for other, name in pairwise(around):
        yield (
            f"the mask of {name} covers the edges of the picture, and so does that of {other}; is "
            f"it inverted? white is the thing"
        )


def same(regions: Regions) -> Iterator[str]:
    """A line on each two masks that are the same."""
    for (name, covered), (other, too) in combinations(regions.items(), 2):
        if (covered & too).sum() > SAME * (covered | too).sum():
            yield f"the masks of {name} and {other} are the same; give each thing its own"


def overlaps(regions: Regions) -> Iterator[str]:
    """A line on each pair of masks of which one lies in the other, partly or wholly."""
    for (name, covered), (later, other) in combinations(regions.items(), 2):
        if shared(covered, other) > NESTED:
            share = shared(covered, other)
            yield f"the masks of {name} and {later} share {share:.0%} of the smaller one"


def alone_around(regions: Regions) -> Iterator[str]:
    """A line on a picture's only mask if it surrounds something, as an inverted mask does."""
    for name, covered in regions.items() if len(regions) == 1 else ():
        if surrounds(covered) and not covered.all():
            yield (
                f"the mask of {name} covers the edges of the picture, and no mask its middle; is "
                f"it inverted? white is the thing"
            )


def regions_of(phrases: Sequence[str], masks: Masks) -> Regions:
    """Where each mask (H,W) is white, by phrase; without those that are None."""
    return {
        brief(phrase): region(mask)
        for phrase, mask in zip(phrases, masks, strict=False)
        if mask is not None
    }


def region(mask: Image.Image) -> np.ndarray:
    """Where a mask is white (H,W)."""
    return np.asarray(mask) >= 128


def shared(first: np.ndarray, second: np.ndarray) -> float:
    """How much of the smaller of two regions the other covers."""
    return float((first & second).sum() / max(1, min(first.sum(), second.sum())))


def surrounds(covered: np.ndarray) -> bool:
    """Whether a region covers the picture's edges, as a backdrop does and a thing does not."""
    return frame(covered) > FRAME


def frame(covered: np.ndarray) -> float:
    """The share of the outermost pixels that a region covers."""
    lines = (covered[0], covered[-1], covered[:, 0], covered[:, -1])
    return float(np.concatenate(lines).mean())
