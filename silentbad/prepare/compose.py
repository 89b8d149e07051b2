"""Pictures that show one element of a target at its native place, and pictures that show none.

Pictures are RGB squares of S pixels a side, masks L of the same size. Each draw takes a
`random.Random` of its own, so a picture depends on its seed and its place in the data alone.
"""

import random
from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFilter, ImageOps

from silentbad.data.images import RIM, as_floats, copies, thumbnail, thumbnails, views
from silentbad.errors import UserError

Composed = tuple[Image.Image, Image.Image]  # picture, mask

TRIES = 20  # attempts at a picture that is no near copy of the target
# Margin of a cover around the hole, as a share of the side: least, most. The strip around a thing
# that it hides is never learnt, so it lies inside the rim that is not judged.
MARGINS = (0.0, RIM / 2)


def fit(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The middle of a picture or a mask, as large as its shape allows, at this size."""
    return ImageOps.fit(image, size, Image.Resampling.LANCZOS)


def fit_mask(mask: Image.Image, side: int) -> Image.Image:
    """`fit` of a mask to a square, without the ripples of a sharper filter, which reach far."""
    return ImageOps.fit(mask, (side, side), Image.Resampling.BILINEAR)


def shrunk(image: Image.Image, side: int) -> Image.Image:
    """A picture, reduced to the size that its parts of S = `side` pixels need: hundreds of
    photographs are in memory at once."""
    factor = min(image.size) / (2 * side)
    if factor <= 1:
        return image
    size = (round(image.width / factor), round(image.height / factor))
    return image.resize(size, Image.Resampling.LANCZOS)


def hard(mask: Image.Image) -> Image.Image:
    """A mask in black and white."""
    return mask.point(lambda level: 255 * (level >= 128))


def rest(masks: Sequence[Image.Image], side: int) -> Image.Image:
    """The area that none of the masks covers."""
    covered = Image.new("L", (side, side), 0)
    for mask in masks:
        covered = ImageChops.lighter(covered, mask)
    return ImageChops.invert(covered)


def window(background: Image.Image, side: int, draw: random.Random) -> Image.Image:
    """A random square part of a picture, of at least half its shorter side; half are mirrored."""
    extent = draw.randint(min(background.size) // 2, min(background.size))
    left = draw.randint(0, background.width - extent)
    top = draw.randint(0, background.height - extent)
    part = background.crop((left, top, left + extent, top + extent))
    part = part.resize((side, side), Image.Resampling.LANCZOS)
    return ImageOps.mirror(part) if draw.random() < 0.5 else part


def grown(mask: Image.Image, pixels: int) -> Image.Image:
    """A mask that reaches so many pixels further on every side."""
    for _ in range(pixels):  # one large filter takes a hundred times as long
        mask = mask.filter(ImageFilter.MaxFilter(3))
    return mask


def cover(hole: Image.Image, draw: random.Random, attempt: int = 0) -> Image.Image:
    """A mask that covers a hole with its soft edge, and a pixel or a little more around it: the
    thing is hidden, and the backdrop is visible up to it. It also covers a rectangle at a random
    place, which grows with each attempt."""
    side = hole.width
    least, most = (max(1, round(margin * side)) for margin in MARGINS)
    touched = hole.point(lambda level: 255 * (level > 0))
    hidden = ImageChops.lighter(touched, grown(hard(hole), draw.randint(least, most)))
    width = min(side, round(draw.uniform(0.2, 0.33) * (1 + attempt / 10) * side))
    left = draw.randint(0, side - width)
    top = draw.randint(0, side - width)
    ImageDraw.Draw(hidden).rectangle((left, top, left + width, top + width), fill=255)
    return hidden


def element_picture(
    source: Image.Image,
    alpha: Image.Image,
    background: Image.Image,
    draw: random.Random,
    attempt: int = 0,
) -> Composed:
    """(picture, mask): the pixels of `source` under `alpha`, before a part of a background."""
    return Image.composite(source, window(background, source.width, draw), alpha), hard(alpha)


def backdrop_picture(
    source: Image.Image,
    backdrop: Image.Image,
    background: Image.Image,
    draw: random.Random,
    attempt: int = 0,
) -> Composed:
    """(picture, mask of what it shows of the backdrop): `source` with a part of a background over
    all that is not backdrop."""
    hidden = cover(ImageChops.invert(backdrop), draw, attempt)
    picture = Image.composite(window(background, source.width, draw), source, hidden)
    return picture, ImageChops.multiply(backdrop, ImageChops.invert(hidden))


class Copies:
    """The targets that no picture of the data may show: the check that training makes."""

    def __init__(self, targets: Sequence[Image.Image]):
        self.known = np.concatenate(
            [as_floats(thumbnail(view)) for target in targets for view in views(target)]
        )

    def shows(self, picture: Image.Image) -> bool:
        """Whether a picture is a near copy of a target."""
        return copies(as_floats(thumbnails(picture)), self.known) is not None

    def avoided(self, compose: Callable[[int], Composed], what: str) -> Composed:
        """`compose(attempt)`, a picture and its mask, composed again while it is a near copy.

        Raises UserError after TRIES.
        """
        for attempt in range(TRIES):
            composed = compose(attempt)
            if not self.shows(composed[0]):
                return composed
        raise UserError(
            f"{what}: its pictures are near copies of the target, because the other elements are "
            "too small; recovery must not train on its target, so give masks that cover more of it"
        )
