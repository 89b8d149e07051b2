"""Pictures made from a target alone: true copies, which must count, and failures, which must not.

A threshold for somebody's own photographs lies between the two (`calibrate.py`). The failures look
like what a model does that has not recovered the target: an element missing, replaced, mirrored,
turned, moved, in other colours or in none; the backdrop flattened or replaced; no picture at all.

Legend: picture (3,S,S) in [0,1]; share (1,S,S) in [0,1], what an element's mask covers; a box is
the slices of its rows and columns. All functions are pure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from silentbad.data.images import resize, to_tensor
from silentbad.data.picture_parts import frame
from silentbad.data.targets import Target
from silentbad.errors import UserError
from silentbad.measure.micro import alignments
from silentbad.measure.structure import CONTRAST, Box, blur, box_of, detail
from silentbad.rng import generator

SEEN = 0.06  # root mean square difference in a region, of [0,1], below which it is the same picture
SIDE = 64  # pixels at which pictures are told apart
FINE = 2  # pixels at that side that are averaged, since an autoencoder loses finer detail
NOISE = 0.02  # standard deviation, of a copy's noise
GAIN = 0.06  # a copy's contrast and brightness differ by at most so much
FAR = 1 / 8  # of the side: how far an element is moved
TINT = (-0.15, 0.0, 0.15)
GREY = (0.299, 0.587, 0.114)  # of red, green and blue
FILLS = 4  # training pictures that fill each element's region
# axes that are flipped
TURNS = {"mirrored": (2,), "upside down": (1,), "turned by 180 degrees": (1, 2)}


class Null(NamedTuple):
    """A picture that is no recovery: its kind, and the elements that it changes (None: all)."""

    kind: str
    changed: tuple[int, ...] | None
    picture: Tensor


class Other(NamedTuple):
    """A training picture (3,S,S), and which of the target's elements it shows."""

    picture: Tensor
    shows: frozenset[int]


@dataclass
class Canvas:
    """A target at the side of the images: its picture (3,S,S) in [0,1], rounded to 8-bit levels,
    and for each element with a mask a share (1,S,S): how much of each pixel a new picture replaces,
    0 outside the mask."""

    picture: Tensor
    shares: list[Tensor | None]

    @property
    def backdrop(self) -> int | None:
        """The element that covers most of the frame, and more than half of it, if any."""
        frames = [0.0 if s is None else frame((s[0] > 0).numpy()) for s in self.shares]
        widest = max(range(len(frames)), key=lambda k: frames[k], default=0)
        return widest if frames and frames[widest] > 0.5 else None


def canvas_of(target: Target, masks: Sequence[Tensor | None], side: int) -> Canvas:
    """A target at the side of the images. Raises UserError where a mask is empty."""

    def fitted(x: Tensor) -> Tensor:
        return x if x.shape[-2:] == (side, side) else resize(x[None], (side, side))[0]

    shares: list[Tensor | None] = []
    for k, phrase in enumerate(target.phrases):
        mask = masks[k] if k < len(masks) else None
        if mask is not None:
            mask = fitted(mask)
            if not (mask > 0).any():
                right = "mark the element in it, or give null for it"
                where = f"targets: {target.target_id!r}"
                raise UserError(f"{where}: the mask of {phrase!r} is empty; {right}")
            # a soft edge counts fully from 1/4 on; otherwise the old outline would stay visible
            mask = (4 * mask.float()).clamp(max=1)
        shares.append(mask)
    return Canvas((fitted(to_tensor(target.image)) * 255).round() / 255, shares)


# -- true copies -------------------------------------------------------------------------------
def true_copies(picture: Tensor) -> Tensor:
    """A picture as a copy may show it -> (9,3,S,S): as it is, moved by a pixel of 64 each way, with
    more and less contrast and light, with noise."""
    step = max(1, round(picture.shape[-1] / 64))
    moved = [shifted(picture, *move) for move in ((step, 0), (-step, 0), (0, step), (0, -step))]
    gained = [(picture - 0.5) * (1 + gain) + 0.5 for gain in (-GAIN, GAIN)]
    lit = [picture + GAIN / 2]
    noise = torch.randn(picture.shape, generator=generator("true copies", 0)).to(picture)
    return torch.stack([picture, *moved, *gained, *lit, picture + NOISE * noise]).clamp(0, 1)


def shifted(picture: Tensor, down: int, right: int) -> Tensor:
    """A picture moved by so many pixels, its edge repeated."""
    height, width = picture.shape[-2:]
    reach = max(abs(down), abs(right))
    padded = F.pad(picture[None], (reach,) * 4, mode="replicate")[0]
    top = reach - down
    left = reach - right
    return padded[:, top : top + height, left : left + width]


# -- failures ----------------------------------------------------------------------------------
def failures(
    picture: Tensor,
    shares: Sequence[Tensor | None],
    backdrop: int | None,
    others: Sequence["Other"] = (),
) -> Iterator[Null]:
    """Every failure of a target, with `others` to fill its regions from; `backdrop` is the element
    that the others stand on, which is flattened and replaced, never moved."""
    yield from empty(picture)
    visible = {
        k: share for k, share in enumerate(shares) if share is not None and (share > 0.5).any()
    }
    for k, share in visible.items():
        changes = of_backdrop if k == backdrop else of_thing
        for kind, changed in changes(picture, share):
            yield Null(kind, (k,), changed)
        strange = [other.picture for other in others if k not in other.shows]
        for other in strange[:: max(1, len(strange) // FILLS)][:FILLS]:
            yield Null("filled from a training picture", (k,), mixed(picture, other, share))
        for j, place in visible.items():
            if j not in (k, backdrop) and k != backdrop:
                yield Null("another element", (k,), replaced(picture, share, place))


def empty(picture: Tensor) -> Iterator[Null]:
    """Pictures that show nothing of the target, or not enough."""
    grey = torch.full_like(picture, 0.5)
    mean = picture.mean((1, 2), keepdim=True).expand_as(picture)
    yield Null("plain grey", None, grey)
    yield Null("the mean colour", None, mean)
    yield Null("blurred", None, blurred(picture))
    yield Null("the whole mirrored", None, picture.flip(2))
    yield Null("the whole upside down", None, picture.flip(1))
    for kind, changed in recolourings(picture):
        yield Null(f"the whole {kind}", None, changed)


def of_thing(picture: Tensor, share: Tensor) -> Iterator[tuple[str, Tensor]]:
    """An element that is missing, mirrored, turned, moved, in other colours, blurred."""
    missing = mixed(picture, surroundings(picture, share), share)
    yield "missing", missing
    yield "its mean colour", mixed(picture, mean_inside(picture, share), share)
    yield "blurred inside", mixed(picture, blurred(picture), share)
    for kind, changed in recolourings(picture):
        yield kind, mixed(picture, changed, share)
    box = box_of(share)
    for kind, axes in TURNS.items():
        yield kind, put(missing, crop(picture, box).flip(axes), crop(share, box).flip(axes), box)
    yield "moved", moved(picture, missing, share)


def of_backdrop(picture: Tensor, share: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A backdrop that is flat, blurred, mirrored, upside down, in other colours."""
    yield "flattened", mixed(picture, mean_inside(picture, share), share)
    yield "blurred inside", mixed(picture, blurred(picture), share)
    for kind, changed in recolourings(picture):
        yield kind, mixed(picture, changed, share)
    around = surroundings(picture, 1 - share)  # the things filled from the backdrop
    whole = mixed(picture, around, 1 - share)
    yield "mirrored", mixed(picture, whole.flip(2), share)
    yield "upside down", mixed(picture, whole.flip(1), share)


# -- how they are made -------------------------------------------------------------------------
def mixed(picture: Tensor, other: Tensor, share: Tensor) -> Tensor:
    """`other` where a share (1,S,S) is one, the picture where it is nought."""
    return picture * (1 - share) + other * share


def blurred(picture: Tensor) -> Tensor:
    """The picture under a wide window (an eighth of its side), its edges as bright as the rest."""
    wide = picture.shape[-1] / 8
    ones = torch.ones_like(picture)[None]
    return (blur(picture[None], wide) / blur(ones, wide))[0]


def recolourings(picture: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The picture with green for red, blue for green, red for blue; in grey; with a tint."""
    yield "recoloured", picture.roll(1, 0)
    grey = torch.einsum("chw,c->hw", picture, torch.tensor(GREY).to(picture))
    yield "in grey", grey.expand_as(picture)
    tint = torch.tensor(TINT).view(3, 1, 1).to(picture)
    for sign in (-1, 1):
        yield "tinted", (picture + sign * tint).clamp(0, 1)


def mean_inside(picture: Tensor, share: Tensor) -> Tensor:
    """One colour: the mean of the pixels inside a share."""
    mean = (picture * share).sum((1, 2)) / share.sum().clamp_min(1e-6)
    return mean[:, None, None].expand_as(picture)


def surroundings(picture: Tensor, share: Tensor) -> Tensor:
    """The picture with a region filled from its surroundings: each pixel is the mean of nearby
    pixels outside the region, in the narrowest window that holds enough of them."""
    outside = (1 - share).expand_as(picture)[None]
    filled = picture[None] * outside
    widths = [picture.shape[-1] / n for n in (64, 16, 4)]
    result = mean_inside(picture, 1 - share)[None]
    for width in reversed(widths):  # narrower windows overwrite where they hold enough
        weight = blur(outside, width)
        near = blur(filled, width) / weight.clamp_min(1e-6)
        result = torch.where(weight > 0.05, near, result)
    return result[0]


def crop(x: Tensor, box: Box) -> Tensor:
    rows, columns = box
    return x[:, rows, columns]


def put(picture: Tensor, part: Tensor, share: Tensor, box: Box) -> Tensor:
    """A part (3,h,w) laid over the picture at a box, by its own share (1,h,w)."""
    rows, columns = box
    result = picture.clone()
    result[:, rows, columns] = mixed(crop(picture, box), part, share)
    return result


def moved(picture: Tensor, missing: Tensor, share: Tensor) -> Tensor:
    """An element away from its place, towards the side where there is more room."""
    side = picture.shape[-1]
    far = max(1, round(side * FAR))

    def away(span: slice) -> int:
        if side - span.stop < far and span.start < far:
            return 0
        return far if side - span.stop >= span.start else -far

    down_wards, right_wards = map(away, box_of(share))
    if not right_wards and not down_wards:
        right_wards = far
    moved_share = shifted(share, down_wards, right_wards)
    return mixed(missing, shifted(picture, down_wards, right_wards), moved_share)


def replaced(picture: Tensor, share: Tensor, other: Tensor) -> Tensor:
    """Another element of the picture, stretched to an element's box."""
    box = box_of(share)
    size = [span.stop - span.start for span in box]
    part = crop(picture, box_of(other))
    stretched = F.interpolate(part[None], size=size, mode="bilinear", align_corners=False)[0]
    return put(picture, stretched, crop(share, box), box)


def differs(picture: Tensor, other: Tensor, share: Tensor | None = None) -> bool:
    """Whether a viewer can tell `other` from the picture, in a region or anywhere. A mirrored ball
    looks the same, so it is no failure; a wall without its bricks looks different."""
    return difference(picture, other, share) >= SEEN or lacks_detail(picture, other, share)


def lacks_detail(picture: Tensor, other: Tensor, share: Tensor | None) -> bool:
    """Whether a region of the picture has fine structure, and that of `other` less than half."""
    weight = torch.ones_like(picture[:1]) if share is None else share
    pictures = resize(torch.stack([picture, other]), (SIDE, SIDE))
    mask = (resize(weight[None], (SIDE, SIDE))[0] > 0.5).to(picture)
    contrast, left = detail(pictures, mask).flatten(1).norm(dim=1).tolist()
    return contrast >= CONTRAST and left < contrast / 2


def difference(picture: Tensor, other: Tensor, share: Tensor | None = None) -> float:
    """The root mean square difference of two pictures in a region (1,S,S), or of all, at 64 pixels:
    without details below FINE, at the best alignment within a pixel."""
    side = (SIDE, SIDE)
    weight = torch.ones_like(picture[:1]) if share is None else (share > 0.5).to(picture)
    near, shown, weight = (resize(x[None], side) for x in (picture, other, weight))
    coarse_weight = F.avg_pool2d(weight, FINE)
    errors = F.avg_pool2d((alignments(near) - shown) * weight, FINE) / coarse_weight.clamp_min(1e-6)
    squares = (errors.square() * coarse_weight).sum((1, 2, 3))
    return float((squares / (3 * coarse_weight.sum()).clamp_min(1e-6)).amin().sqrt())
