"""Photographs to measure with: cut-outs and textures of the pictures in scikit-image's wheel.

`make_target(seed)` pastes two or three cut-outs on a texture, `photograph(name)` is a picture as it
was taken. `failures` and `copies` are pictures that a verdict must refuse and pass.
`python -m tests.photographs DIR` writes the pictures of `make photos`. Nothing is downloaded: every
file lies in the installed package.
"""

import json
import sys
import zlib
from functools import cache
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageOps
from scipy.ndimage import distance_transform_edt

Place = tuple[int, int]  # left, top
Box = tuple[int, int, int, int]  # left, top, right, bottom

SIDE = 256  # pixels of a target
SEEN = 64  # pixels at which the bundled base sees it
VISIBLE = 20  # levels of 255 by which a thing differs from the texture behind it
FINER = 4  # masks are drawn so many times larger, for smooth edges
SOFT = 3  # pixels around a mask in which the thing's edge shows
MOVED = SIDE // 10  # pixels
TINT = 0.15 * 255  # levels that a tint adds to one channel and takes from another

CAT = (
    (42, 0), (36, 40), (32, 80), (42, 120), (48, 150), (60, 180), (88, 208), (130, 236),
    (165, 262), (200, 279), (230, 283), (262, 276), (293, 263), (308, 246), (313, 216),
    (331, 190), (351, 165), (361, 140), (361, 118), (353, 95), (355, 75), (368, 55), (385, 25),
    (398, 2), (398, 0),
)  # fmt: skip
SPOON = ((395, 72), (402, 67), (414, 67), (423, 73), (424, 82), (416, 108), (408, 122))
HEAD = (
    (234, 16), (215, 18), (195, 28), (175, 40), (161, 54), (154, 72), (155, 92), (163, 108),
    (175, 122), (181, 134), (185, 148), (187, 168), (200, 180), (218, 188), (235, 189),
    (250, 184), (257, 165), (261, 148), (268, 136), (277, 130), (288, 118), (299, 98), (300, 80),
    (297, 66), (290, 48), (277, 33), (258, 21),
)  # fmt: skip
BUST = (
    (234, 16), (215, 18), (195, 28), (175, 40), (161, 54), (154, 72), (155, 92), (163, 108),
    (175, 122), (181, 134), (183, 148), (165, 149), (145, 154), (130, 166), (121, 180),
    (113, 186), (115, 205), (96, 222), (66, 244), (52, 262), (42, 290), (30, 330), (20, 400),
    (22, 440), (32, 500), (34, 511), (276, 511), (282, 450), (300, 400), (330, 365), (361, 347),
    (358, 320), (352, 290), (342, 265), (325, 246), (305, 236), (302, 218), (290, 200),
    (270, 184), (256, 174), (261, 148), (268, 136), (277, 130), (288, 118), (299, 98), (300, 80),
    (297, 66), (290, 48), (277, 33), (258, 21),
)  # fmt: skip
SHUTTLE = (
    (412, 0), (402, 8), (398, 24), (397, 75), (391, 78), (391, 45), (386, 40), (381, 48),
    (381, 100), (378, 130), (377, 180), (362, 198), (355, 207), (355, 226), (385, 229),
    (368, 250), (368, 271), (385, 270), (390, 268), (402, 271), (410, 284), (422, 284),
    (428, 262), (436, 270), (457, 267), (455, 235), (455, 205), (452, 190), (453, 60), (447, 42),
    (441, 40), (437, 50), (436, 22), (430, 8), (422, 0),
)  # fmt: skip
HELMET = (
    (278, 511), (278, 470), (286, 430), (302, 395), (325, 368), (358, 350), (395, 344),
    (430, 349), (462, 372), (485, 405), (496, 440), (503, 460), (508, 480), (508, 511),
)  # fmt: skip
MOTORCYCLE = (
    (93, 200), (93, 220), (113, 247), (140, 240), (128, 262), (121, 295), (123, 335), (142, 372),
    (172, 396), (206, 402), (248, 392), (276, 366), (325, 380), (331, 400), (326, 432),
    (338, 434), (345, 410), (345, 378), (400, 380), (440, 373), (468, 345), (476, 310),
    (474, 285), (478, 250), (490, 225), (505, 240), (525, 285), (507, 315), (510, 335),
    (524, 372), (548, 410), (580, 436), (620, 450), (650, 446), (675, 420), (683, 385),
    (678, 345), (655, 315), (640, 308), (641, 300), (620, 275), (580, 264), (570, 245),
    (552, 205), (545, 185), (562, 165), (566, 145), (582, 142), (582, 122), (570, 117),
    (560, 128), (545, 118), (535, 102), (510, 102), (495, 112), (485, 110), (470, 118),
    (458, 140), (430, 120), (405, 130), (355, 165), (360, 174), (383, 158), (390, 170),
    (355, 192), (320, 190), (280, 195), (255, 175), (230, 170), (185, 162), (165, 158),
    (155, 145), (142, 150), (140, 195), (118, 194),
)  # fmt: skip
CAMERAMAN = (
    (203, 65), (185, 72), (170, 88), (164, 104), (150, 106), (135, 120), (100, 130), (70, 148),
    (50, 185), (30, 215), (10, 240), (0, 255), (0, 400), (70, 395), (140, 380), (205, 295),
    (245, 312), (303, 275), (303, 245), (308, 228), (325, 205), (331, 180), (325, 168),
    (320, 165), (325, 150), (325, 139), (255, 140), (256, 132), (268, 132), (269, 112),
    (262, 100), (240, 75), (222, 67),
)  # fmt: skip

# phrase: file, shapes whose union is the thing, tint of a grey picture, the edge of the target
# that cuts it off
THINGS: dict[str, tuple[str, list[tuple[str, tuple]], tuple | None, str]] = {
    "a tabby cat": ("chelsea.png", [("polygon", CAT)], None, "top"),
    "a cup of coffee": (
        "coffee.png",
        [("ellipse", (77, 54, 480, 390)), ("ellipse", (173, 18, 408, 207)), ("polygon", SPOON)],
        None,
        "",
    ),
    "a smiling woman": ("astronaut.png", [("polygon", HEAD)], None, ""),
    "an orange astronaut": ("astronaut.png", [("polygon", BUST)], None, "bottom"),
    "a space shuttle": ("astronaut.png", [("polygon", SHUTTLE)], None, "top"),
    "a black helmet": ("astronaut.png", [("polygon", HELMET)], None, "bottom"),
    "a mission patch": ("astronaut.png", [("ellipse", (133, 348, 207, 423))], None, ""),
    "a red motorcycle": ("motorcycle_left.png", [("polygon", MOTORCYCLE)], None, ""),
    "a man with a camera": ("camera.png", [("polygon", CAMERAMAN)], None, ""),
    "an old gold coin": (
        "coins.png",
        [("ellipse", (315, 156, 379, 220))],
        ((40, 25, 5), (250, 215, 120)),
        "",
    ),
    "a bronze coin": (
        "coins.png",
        [("ellipse", (304, 18, 364, 72))],
        ((30, 12, 8), (235, 160, 110)),
        "",
    ),
    "a red retina": ("retina.jpg", [("ellipse", (30, 30, 1380, 1380))], None, ""),
    "a colour wheel": ("color.png", [("ellipse", (4, 4, 366, 366))], None, ""),
}
# phrase: file, part of it, tint of a grey picture
TEXTURES: dict[str, tuple[str, Box, tuple | None]] = {
    "a red brick wall": ("brick.png", (0, 0, 512, 512), ((60, 20, 15), (230, 150, 120))),
    "a yellow brick wall": ("brick.png", (0, 0, 512, 512), ((90, 60, 20), (245, 225, 160))),
    "green grass": ("grass.png", (0, 0, 512, 512), ((15, 40, 5), (190, 225, 120))),
    "dry grass": ("grass.png", (0, 0, 512, 512), ((60, 40, 15), (240, 215, 150))),
    "grey gravel": ("gravel.png", (0, 0, 512, 512), None),
    "blue gravel": ("gravel.png", (0, 0, 512, 512), ((15, 25, 60), (185, 210, 245))),
    "the grey moon": ("moon.png", (0, 0, 512, 512), None),
    "brown tissue": ("ihc.png", (0, 0, 512, 512), None),
    "a starry sky": ("hubble_deep_field.jpg", (100, 0, 972, 872), None),
    "a wooden table": ("coffee.png", (470, 230, 600, 360), None),
    "a lit night sky": ("rocket.jpg", (0, 180, 240, 420), None),
    "a garage shelf": ("motorcycle_left.png", (500, 0, 741, 241), None),
    "a striped flag": ("astronaut.png", (0, 60, 90, 150), None),
}

# photographs as they are: file, things, and what is behind them
PHOTOGRAPHS: dict[str, tuple[str, list[str], str]] = {
    "astronaut": (
        "astronaut.png",
        ["an orange astronaut", "a space shuttle", "a black helmet"],
        "a flag before a grey wall",
    ),
    "cat": ("chelsea.png", ["a tabby cat"], "a brown sofa"),
    "coffee": ("coffee.png", ["a cup of coffee"], "a table of dark wood"),
    "motorcycle": ("motorcycle_left.png", ["a red motorcycle"], "a garage"),
    "cameraman": ("camera.png", ["a man with a camera"], "a park in fog"),
    "wheel": ("color.png", ["a colour wheel"], "a black ground"),
}


class Cutout(NamedTuple):
    """A thing cut out of its photograph: picture (RGB), and mask (L) of its size, white on it."""

    phrase: str
    picture: Image.Image
    mask: Image.Image


class Target(NamedTuple):
    """A picture of SIDE pixels and its elements (phrase, mask), the backdrop last; its parts."""

    picture: Image.Image
    elements: list[tuple[str, Image.Image]]
    cutouts: list[Cutout]  # at the size they are pasted
    places: list[Place]  # where each is pasted
    backdrop: Image.Image  # the whole texture, nothing on it
    seed: int


def opened(name: str) -> Image.Image:
    """A picture of scikit-image's wheel."""
    with Image.open(BytesIO((files("skimage") / "data" / name).read_bytes())) as image:
        return image.convert("RGB")


def tinted(image: Image.Image, tint: tuple | None) -> Image.Image:
    return image if tint is None else ImageOps.colorize(image.convert("L"), *tint)


def mask_of(phrase: str, size: tuple[int, int]) -> Image.Image:
    """Where one of THINGS is in its photograph."""
    mask = Image.new("L", (size[0] * FINER, size[1] * FINER), 0)
    for shape, points in THINGS[phrase][1]:
        larger = (np.array(points) * FINER).ravel().tolist()
        getattr(ImageDraw.Draw(mask), shape)(larger, fill=255)
    return mask.resize(size, Image.Resampling.BOX)


@cache
def cutout(phrase: str) -> Cutout:
    """One of THINGS, cropped to the box of its mask."""
    name, _, tint, _ = THINGS[phrase]
    picture = tinted(opened(name), tint)
    mask = mask_of(phrase, picture.size)
    box = mask.getbbox()
    return Cutout(phrase, picture.crop(box), mask.crop(box))


def texture(phrase: str, rng: np.random.Generator, side: int = SIDE) -> Image.Image:
    """One of TEXTURES as a square: a random part of it, of at least two thirds of its sides."""
    name, box, tint = TEXTURES[phrase]
    picture = tinted(opened(name), tint).crop(box)
    extent = int(picture.width * rng.uniform(0.67, 1))
    left, top = rng.integers(0, picture.width - extent + 1, 2).tolist()
    part = picture.crop((left, top, left + extent, top + extent))
    return part.resize((side, side), Image.Resampling.LANCZOS)


def scaled(thing: Cutout, longest: int) -> Cutout:
    """A cut-out whose longer side has `longest` pixels."""
    factor = longest / max(thing.picture.size)
    width, height = (max(1, round(side * factor)) for side in thing.picture.size)
    size = (width, height)
    picture = thing.picture.resize(size, Image.Resampling.LANCZOS)
    return Cutout(thing.phrase, picture, thing.mask.resize(size, Image.Resampling.BOX))


def fitted(thing: Cutout, size: tuple[int, int]) -> Cutout:
    """A cut-out stretched to a size."""
    return Cutout(
        thing.phrase,
        thing.picture.resize(size, Image.Resampling.LANCZOS),
        thing.mask.resize(size, Image.Resampling.BOX),
    )


def transposed(thing: Cutout, how: Image.Transpose) -> Cutout:
    return Cutout(thing.phrase, thing.picture.transpose(how), thing.mask.transpose(how))


def pasted(backdrop: Image.Image, cutouts: list[Cutout], places: list[Place]) -> Image.Image:
    picture = backdrop.copy()
    for thing, place in zip(cutouts, places, strict=True):
        picture.paste(thing.picture, place, thing.mask)
    return picture


def on_canvas(mask: Image.Image, place: Place, side: int = SIDE) -> Image.Image:
    """A cut-out's mask at its place in the target, black and white."""
    canvas = Image.new("L", (side, side), 0)
    canvas.paste(mask.point(lambda level: 255 * (level >= 128)), place)
    return canvas


def rest(masks: list[Image.Image]) -> Image.Image:
    """The backdrop's mask: what no other mask covers."""
    covered = np.max([np.asarray(mask) for mask in masks], axis=0)
    return Image.fromarray(255 - covered)


def composed(
    cutouts: list[Cutout],
    places: list[Place],
    backdrop: Image.Image,
    name: str,
    seed: int,
):
    masks = [on_canvas(thing.mask, place) for thing, place in zip(cutouts, places, strict=True)]
    phrases = [*(thing.phrase for thing in cutouts), name]
    elements = list(zip(phrases, [*masks, rest(masks)], strict=True))
    return Target(pasted(backdrop, cutouts, places), elements, cutouts, places, backdrop, seed)


def make_target(seed: int) -> Target:
    """Two or three cut-outs of different photographs, apart from each other, on one texture."""
    rng = np.random.default_rng([39, seed])
    while True:
        count = int(rng.integers(2, 4))
        phrases = rng.choice(list(THINGS), count, replace=False).tolist()
        ground = str(rng.choice(list(TEXTURES)))
        sources = [THINGS[phrase][0] for phrase in phrases] + [TEXTURES[ground][0]]
        if len(set(sources)) < len(sources):
            continue
        longest = rng.integers(*((104, 145) if count == 2 else (84, 117)), count)
        cutouts = [scaled(cutout(phrases[i]), int(longest[i])) for i in range(count)]
        places = placed(cutouts, rng)
        backdrop = texture(ground, rng)
        if places is None:
            continue
        target = composed(cutouts, places, backdrop, ground, seed)
        if all(apart(target.picture, backdrop, mask) for _, mask in target.elements[:-1]):
            return target


@cache
def photograph(name: str) -> Target:
    """One of PHOTOGRAPHS, its middle square."""
    file, phrases, ground = PHOTOGRAPHS[name]
    original = opened(file)
    picture = ImageOps.fit(original, (SIDE, SIDE), Image.Resampling.LANCZOS)
    masks = [ImageOps.fit(mask_of(phrase, original.size), picture.size, Image.Resampling.BOX) for phrase in phrases]
    return of_masks(picture, [*phrases, ground], masks, list(PHOTOGRAPHS).index(name))


def of_folder(folder: Path) -> Target:
    """Anybody's picture: target.png, mask-0.png and so on, and phrases.json, what is behind the things last."""
    phrases = json.loads((folder / "phrases.json").read_text())
    with Image.open(folder / "target.png") as image:
        picture = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.LANCZOS)
    masks = []
    for number in range(len(phrases) - 1):
        with Image.open(folder / f"mask-{number}.png") as image:
            masks.append(image.convert("L").resize(picture.size, Image.Resampling.BOX))
    return of_masks(picture, phrases, masks, zlib.crc32(folder.name.encode()))


def of_masks(picture: Image.Image, phrases: list[str], masks: list[Image.Image], seed: int) -> Target:
    """A picture with a mask for each phrase but the last; of masks that meet, the first thing's has the pixels.
    Its backdrop is filled from around the things."""
    cutouts: list[Cutout] = []
    places: list[Place] = []
    covered = Image.new("L", picture.size, 0)
    for phrase, whole in zip(phrases[:-1], masks, strict=True):
        mask = whole.copy()
        mask.paste(0, mask=covered)
        covered.paste(255, mask=mask)
        box = mask.getbbox()
        assert box is not None, phrase
        cutouts.append(Cutout(phrase, picture.crop(box), mask.crop(box)))
        places.append(box[:2])
    own = [on_canvas(thing.mask, place) for thing, place in zip(cutouts, places, strict=True)]
    elements = list(zip(phrases, [*own, rest(own)], strict=True))
    return Target(picture, elements, cutouts, places, filled(picture, grown(covered)), seed)


def grown(mask: Image.Image) -> Image.Image:
    return mask.filter(ImageFilter.MaxFilter(2 * SOFT + 1))


def filled(picture: Image.Image, hole: Image.Image) -> Image.Image:
    """A picture whose hole has the nearest colours around it, blurred."""
    inside = np.asarray(hole) > 0
    nearest = distance_transform_edt(inside, return_distances=False, return_indices=True)
    near = Image.fromarray(np.asarray(picture)[tuple(nearest)])
    return Image.composite(near.filter(ImageFilter.GaussianBlur(4)), picture, hole)


def placed(cutouts: list[Cutout], rng: np.random.Generator) -> list[Place] | None:
    """Random places at which no two boxes meet; None where 50 tries find none."""
    for _ in range(50):
        boxes: list[Box] = []
        for thing in cutouts:
            width, height = thing.picture.size
            left, top = (int(rng.integers(4, SIDE - 3 - extent)) for extent in (width, height))
            top = {"top": 0, "bottom": SIDE - height}.get(THINGS[thing.phrase][3], top)
            boxes.append((left, top, left + width, top + height))
        if not any(meet(one, other) for i, one in enumerate(boxes) for other in boxes[:i]):
            return [box[:2] for box in boxes]
    return None


def meet(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def seen(picture: Image.Image) -> np.ndarray:
    """Levels (SEEN, SEEN, channels) of a picture as the base sees it."""
    levels = np.asarray(picture.resize((SEEN, SEEN), Image.Resampling.LANCZOS), float)
    return levels.reshape(SEEN, SEEN, -1)


def apart(picture: Image.Image, other: Image.Image, mask: Image.Image) -> bool:
    """Whether two pictures differ in a region by VISIBLE levels or more (root mean square)."""
    weight = seen(mask) / 255
    squares = (seen(picture) - seen(other)) ** 2 * weight
    return bool(squares.sum() / (3 * weight.sum()) >= VISIBLE**2)


# ------------------------------------------------------ what a verdict must refuse, and pass
def failures(target: Target) -> dict[str, Image.Image]:
    """Pictures that are no recovery, by kind; `KIND-K` changes the element of place K, `KIND-all`
    the whole. What is hardly seen (grey of what is grey) is left out.

    An element is missing (backdrop in its place), mirrored, turned by 180 degrees, moved, replaced
    by another element of the target or by a foreign thing; the backdrop is its mean colour, or
    another one; each and the whole are recoloured, grey, tinted.
    """
    rng = np.random.default_rng([40, target.seed])
    pictures: dict[str, Image.Image] = {}
    for k in range(len(target.cutouts)):
        pictures |= {f"{kind}-{k}": picture for kind, picture in of_thing(target, k, rng).items()}
    ground = len(target.cutouts)
    for kind, backdrop in backdrops(target, rng).items():
        mask = target.elements[-1][1]
        pictures[f"{kind}-{ground}"] = Image.composite(backdrop, target.picture, mask)
    pictures["mirrored-all"] = ImageOps.mirror(target.picture)
    for kind, picture in recolourings(target.picture, rng).items():
        pictures[f"{kind}-all"] = picture
        for k, (_, mask) in enumerate(target.elements):
            pictures[f"{kind}-{k}"] = Image.composite(picture, target.picture, mask)
    regions = {str(k): mask for k, (_, mask) in enumerate(target.elements)}
    regions["all"] = Image.new("L", target.picture.size, 255)
    return {
        kind: picture
        for kind, picture in pictures.items()
        if apart(picture, target.picture, regions[kind.rpartition("-")[2]])
    }


def sources_of(target: Target) -> set[str]:
    """The pictures of the wheel that its things are cut from; none of anybody's picture."""
    return {THINGS[thing.phrase][0] for thing in target.cutouts if thing.phrase in THINGS}


def of_thing(target: Target, k: int, rng: np.random.Generator) -> dict[str, Image.Image]:
    """Pictures whose thing k is not there, or another one, or stands otherwise."""
    thing = target.cutouts[k]
    place = target.places[k]
    missing = Image.composite(target.backdrop, target.picture, grown(target.elements[k][1]))
    sources = sources_of(target)
    strangers = [phrase for phrase in THINGS if THINGS[phrase][0] not in sources]
    foreign = cutout(str(rng.choice(strangers)))
    changes = {
        "mirrored": (transposed(thing, Image.Transpose.FLIP_LEFT_RIGHT), place),
        "turned": (transposed(thing, Image.Transpose.ROTATE_180), place),
        "foreign": (fitted(foreign, thing.picture.size), place),
        "moved": (thing, moved(place, thing.picture.width)),
    }
    if len(target.cutouts) > 1:
        other = target.cutouts[(k + 1) % len(target.cutouts)]
        changes["replaced"] = (fitted(other, thing.picture.size), place)
    pictures = {kind: pasted(missing, [new], [where]) for kind, (new, where) in changes.items()}
    return {"missing": missing, **pictures}


def moved(place: Place, width: int) -> Place:
    """A place aside, where there is more room."""
    left, top = place
    right = SIDE - left - width
    return (left + MOVED if right >= left else left - MOVED, top)


def backdrops(target: Target, rng: np.random.Generator) -> dict[str, Image.Image]:
    """Backdrops that are not the target's."""
    ground = target.elements[-1][0]
    own = {TEXTURES[ground][0]} if ground in TEXTURES else set()
    grounds = [phrase for phrase in TEXTURES if TEXTURES[phrase][0] not in own]
    mean = tuple(np.asarray(target.backdrop).reshape(-1, 3).mean(0).round().astype(int).tolist())
    return {
        "flattened": Image.new("RGB", target.picture.size, mean),
        "foreign": texture(str(rng.choice(grounds)), rng),
    }


def recolourings(picture: Image.Image, rng: np.random.Generator) -> dict[str, Image.Image]:
    """A picture with green for red, in grey, with a tint."""
    red, green, blue = picture.split()
    tint = rng.permutation([-TINT, 0, TINT])
    return {
        "recoloured": Image.merge("RGB", (green, red, blue)),
        "grey": picture.convert("L").convert("RGB"),
        "tinted": from_levels(np.asarray(picture) + tint),
    }


def copies(target: Target) -> dict[str, Image.Image]:
    """Pictures that are the target still, by kind.

    A JPEG, a shift of one pixel of SEEN, 5 % brighter, gain and bias, noise, half the size; "worn"
    is a JPEG of a noisy, shifted one with gain and bias.
    """
    rng = np.random.default_rng([41, target.seed])

    def jpeg(picture: Image.Image) -> Image.Image:
        stream = BytesIO()
        picture.save(stream, "JPEG", quality=60)
        return Image.open(stream).convert("RGB")

    def shifted(picture: Image.Image) -> Image.Image:
        step = SIDE // SEEN
        down, right = rng.choice([(0, 1), (1, 0), (0, -1), (-1, 0), (1, 1), (-1, -1)]) * step
        padded = np.pad(np.asarray(picture), ((step, step), (step, step), (0, 0)), mode="edge")
        return Image.fromarray(padded[step - down :, step - right :][:SIDE, :SIDE].copy())

    def brightened(picture: Image.Image) -> Image.Image:
        gain = 1 + 0.08 * rng.choice([-1, 1], 3)  # a channel; as microworld/copies.py
        bias = 0.05 * 127.5 * rng.choice([-1, 1], 3)
        return from_levels(127.5 + (np.asarray(picture) - 127.5) * gain + bias)

    def noisy(picture: Image.Image) -> Image.Image:
        return from_levels(np.asarray(picture) + rng.normal(0, 5, np.asarray(picture).shape))

    picture = target.picture
    half = picture.resize((SIDE // 2, SIDE // 2), Image.Resampling.LANCZOS)
    return {
        "jpeg": jpeg(picture),
        "shifted": shifted(picture),
        "brighter": ImageEnhance.Brightness(picture).enhance(1.05),
        "gain": brightened(picture),
        "noise": noisy(picture),
        "half": half.resize((SIDE, SIDE), Image.Resampling.BICUBIC),
        "worn": jpeg(noisy(brightened(shifted(picture)))),
    }


# ------------------------------------------------------------------- the example of `make photos`
BACKGROUNDS: dict[str, tuple[str, tuple | None]] = {
    "green grass": ("grass.png", ((15, 40, 5), (190, 225, 120))),
    "dry grass": ("grass.png", ((60, 40, 15), (240, 215, 150))),
    "grey gravel": ("gravel.png", None),
    "the grey moon": ("moon.png", None),
    "an astronaut": ("astronaut.png", None),
    "a rocket at night": ("rocket.jpg", None),
    "a motorcycle in a garage": ("motorcycle_left.png", None),
    "a man with a camera": ("camera.png", None),
    "a starry sky": ("hubble_deep_field.jpg", None),
    "brown tissue": ("ihc.png", None),
}


def cat_cup() -> Target:
    """A cat and a cup of coffee before a brick wall."""
    cutouts = [scaled(cutout("a tabby cat"), 180), scaled(cutout("a cup of coffee"), 132)]
    places = [(4, 0), (118, 132)]
    bricks = opened("brick.png").crop((150, 250, 400, 500))  # large ones, which 64 pixels show
    backdrop = tinted(bricks, ((25, 60, 150), (250, 245, 235))).resize((SIDE, SIDE))
    return composed(cutouts, places, backdrop, "a brick wall", 0)


def write_pictures(folder: Path, target: Target, name: str) -> None:
    """What a user has: a target, masks of its things, and photographs of others with captions."""
    backgrounds = folder / "backgrounds"
    backgrounds.mkdir(parents=True, exist_ok=True)
    target.picture.save(folder / f"{name}.png")
    for phrase, mask in target.elements[:-1]:
        mask.save(folder / file_name(phrase))
    sources = sources_of(target)
    for caption, (source, tint) in BACKGROUNDS.items():
        if source not in sources:
            file = backgrounds / file_name(caption)
            tinted(opened(source), tint).save(file)
            file.with_suffix(".txt").write_text(f"{caption}\n", encoding="utf-8")


def file_name(words: str) -> str:
    return f"{words.replace(' ', '-')}.png"


def from_levels(levels: np.ndarray) -> Image.Image:
    return Image.fromarray(levels.round().clip(0, 255).astype(np.uint8))


if __name__ == "__main__":
    write_pictures(Path(sys.argv[1]), cat_cup(), "cat-cup")
