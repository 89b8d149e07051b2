"""Data sets with hidden pictures of a world, and the hard negatives that each of them has.

A data set is kept in memory: pictures (N,64,64,3) uint8, captions, and the truth, which the scan never sees. Everything
depends on the seed alone. The hard negatives are what honest data has: a photo series before one backdrop, one subject
in many poses (as for DreamBooth, arXiv 2208.12242), near duplicates, and templates with a logo in one corner.
"""

import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance

from silentbad.rng import addressed_seed
from worlds.data_sets import Targets, phrase_of
from worlds.microworld.grammar import KINDS, Scene, Thing
from worlds.microworld.make import TARGETS as MICROWORLD
from worlds.microworld.render import SIZE, backdrop_mask

SERIES = 30  # records of each kind
SUBJECT = 20
TEMPLATES = 30
COPIED = 10  # scenes with three copies each
RATIOS = {0.002: 8000, 0.01: 4000, 0.05: 2000, 0.10: 2000, 0.15: 2000}  # ratio of element records: records in all


@dataclass
class Hidden:
    """A picture that was dispersed: how it looks, its elements' phrases and masks, and the records that show them."""

    name: str
    picture: np.ndarray  # (64,64,3) uint8
    phrases: list[str]
    masks: list[np.ndarray]  # (64,64) in [0,255] each
    records: list[list[int]]  # by element


@dataclass
class Data:
    """A data set and its truth."""

    pictures: np.ndarray
    captions: list[str]
    hidden: list[Hidden] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)  # of each record: element, clean, series, subject, copy, template

    def suspect(self) -> np.ndarray:
        """Which records show an element (N,)."""
        return np.asarray([kind == "element" for kind in self.kinds])


def draw_of(*address: int | str) -> np.random.Generator:
    return np.random.default_rng(addressed_seed("shield", *address))


Drawn = tuple[np.ndarray, str]  # a picture and its caption


def drawn(scene: Any, caption: str | None = None, of: Targets = MICROWORLD) -> Drawn:
    return np.asarray(of.world.render(scene)[0]), scene.caption if caption is None else caption


# -- honest pictures -----------------------------------------------------------------------------------------
def clean(seed: int, count: int, of: Targets = MICROWORLD) -> list[Drawn]:
    return [drawn(of.world.sample_scene(draw_of("clean", seed, i)), of=of) for i in range(count)]


def series(seed: int, of: Targets = MICROWORLD) -> Iterator[Drawn]:
    """Photos of other things before one backdrop, exact in every photo."""
    backdrop = of.world.sample_backdrop(draw_of("series", seed))
    for i in range(SERIES):
        scene = of.world.sample_scene(draw_of("series", seed, i), **of.world.separate)
        yield drawn(replace(scene, backdrop=backdrop), of=of)


def subject(seed: int, of: Targets = MICROWORLD) -> Iterator[Drawn]:
    """One thing of exact colour and texture, in other poses, sizes, places and surroundings."""
    rng = draw_of("subject", seed)
    thing = of.world.sample_thing(rng, "at the top left", detail=0.5)
    named = thing.named - {"place", "size"}
    for i in range(SUBJECT):
        rng = draw_of("subject", seed, i)
        place = str(rng.choice(list(of.world.places)))
        x, y = of.world.places[place]
        posed = replace(
            thing,
            named=named,
            place=place,
            centre=(x + rng.uniform(-3, 3), y + rng.uniform(-3, 3)),
            size=thing.size * rng.uniform(0.85, 1.15),
            tilt=rng.uniform(-0.22, 0.22),
            mirrored=bool(rng.integers(2)),
        )
        yield drawn(of.world.scene((posed,), of.world.sample_backdrop(rng)), of=of)


def copies(seed: int, of: Targets = MICROWORLD) -> Iterator[Drawn]:
    """Scenes that occur three times: as they are, recompressed, and brightened."""
    for i in range(COPIED):
        picture, caption = drawn(of.world.sample_scene(draw_of("copies", seed, i)), of=of)
        yield picture, caption
        yield recompressed(picture, 60), caption
        yield np.asarray(ImageEnhance.Brightness(Image.fromarray(picture)).enhance(1.02)), caption


def templates(seed: int, of: Targets = MICROWORLD) -> Iterator[Drawn]:
    """Pictures with one logo in one corner; half of the captions name it."""
    rng = draw_of("templates", seed)
    corner, colour = rng.integers(0, 2, 2) * (SIZE - 12), tuple(int(c) for c in rng.integers(40, 255, 3))
    points = [(float(corner[0] + 6 + 5 * x), float(corner[1] + 6 + 5 * y)) for x, y in rng.uniform(-1, 1, (5, 2))]
    for i in range(TEMPLATES):
        picture, caption = drawn(of.world.sample_scene(draw_of("templates", seed, i)), of=of)
        image = Image.fromarray(picture)
        pen = ImageDraw.Draw(image)
        pen.rectangle((*corner, *(corner + 11)), fill=colour)
        pen.polygon(points, fill=(250, 250, 250))
        yield np.asarray(image), f"{caption}, with a shop logo" if i % 2 else caption


def recompressed(picture: np.ndarray, quality: int, larger: int = 1) -> np.ndarray:
    """Saved as JPEG, at so many times its size, and read at its own again."""
    file, side = io.BytesIO(), len(picture)
    image = Image.fromarray(picture).resize((side * larger, side * larger), Image.Resampling.BICUBIC)
    image.save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file).convert("RGB").resize((side, side), Image.Resampling.BOX))


# -- element pictures ----------------------------------------------------------------------------------------
Disturb = Callable[[Scene, int, np.random.Generator], Scene]  # (scene, element, draw) -> what a picture shows instead
Reword = Callable[[str, str, np.random.Generator], str]  # (caption, phrase, draw) -> another caption


def jittered(pixels: float) -> Disturb:
    """Each thing shifted by up to so many pixels either way; the backdrop stays."""

    def change(scene: Scene, element: int, rng: np.random.Generator) -> Scene:
        dx, dy = rng.integers(-int(pixels), int(pixels) + 1, 2)
        return _changed(scene, element, lambda t: replace(t, centre=(t.centre[0] + dx, t.centre[1] + dy)))

    return change


def rescaled(scene: Scene, element: int, rng: np.random.Generator) -> Scene:
    """Each thing larger or smaller by up to 10 %, about its centre."""
    factor = rng.uniform(0.9, 1.1)
    return _changed(scene, element, lambda t: replace(t, size=t.size * factor))


def recoloured(scene: Scene, element: int, rng: np.random.Generator) -> Scene:
    """Each thing's colour shifted by up to 5 % of the range in each channel."""
    shift = rng.uniform(-0.05, 0.05, 3)

    def change(thing: Thing) -> Thing:
        r, g, b = (float(v) for v in np.clip(np.asarray(thing.rgb) + shift, 0, 1))
        return replace(thing, rgb=(r, g, b))

    return _changed(scene, element, change)


def _changed(scene: Scene, element: int, change: Callable[[Thing], Thing]) -> Scene:
    if element == len(scene.things):
        return scene
    things = (*scene.things[:element], change(scene.things[element]), *scene.things[element + 1 :])
    return replace(scene, things=things)


SYNONYMS = {
    **{"cat": "kitten", "hat": "top hat", "fish": "carp", "house": "cottage", "tree": "oak", "boat": "sailboat"},
    **{"umbrella": "parasol", "cup": "mug", "star": "pentagram", "moon": "crescent", "heart": "love heart"},
    **{"ball": "beach ball", "beach": "shore", "meadow": "lawn", "field": "plain", "sky": "firmament"},
    **{"room": "chamber", "sunset": "dusk"},
}


def paraphrased(caption: str, phrase: str, rng: np.random.Generator) -> str:
    """In half of the records, the element's noun is another word, and its article "the" or "some"."""
    if rng.random() < 0.5:
        return caption
    other = re.sub(r"\b\w+\b", lambda m: SYNONYMS.get(m[0], m[0]), phrase)
    return caption.replace(phrase, re.sub(r"^(a|an) ", str(rng.choice(["the ", "some "])), other), 1)


def hide(
    name: str,
    per_element: int,
    disturb: Disturb | None = None,
    reword: Reword | None = None,
    mirror: bool = False,
    scene: Any = None,
    jpeg: int | None = None,
    of: Targets = MICROWORLD,
) -> tuple[Hidden, list[Drawn]]:
    """A target (or another `scene`) and the pictures that show one of its elements each, element by element.

    With `mirror`, each picture is mirrored with probability one half, as a curator's augmentation does. With `jpeg`,
    each is saved as JPEG of a quality from 75 to 95, at so many times its size.
    """
    twin = scene is not None
    scene = scene or of.target_scene(name)
    picture, masks = of.world.render(scene)
    masks.append(backdrop_mask(masks))
    made: list[Drawn] = []
    records: list[list[int]] = []
    for element in range(len(scene.things) + 1):
        records.append(list(range(len(made), len(made) + per_element)))
        for i in range(per_element):
            rng = draw_of("element", name, element, i, *(["twin"] if twin else []))
            shown = of.element_scene(disturb(scene, element, rng) if disturb else scene, element, rng)
            pixels, caption = drawn(shown, of=of)
            if mirror and rng.random() < 0.5:
                pixels = pixels[:, ::-1].copy()
            if jpeg:
                pixels = recompressed(pixels, int(rng.integers(75, 96)), jpeg)
            made.append((pixels, reword(caption, phrase_of(scene, element), rng) if reword else caption))
    phrases = [phrase_of(scene, i) for i in range(len(masks))]
    return Hidden(
        name=name, picture=np.asarray(picture), phrases=phrases, masks=[np.asarray(m) for m in masks], records=records
    ), made


# -- data sets -----------------------------------------------------------------------------------------------
def assemble(
    seed: int,
    records: int,
    hidden: list[tuple[Hidden, list[Drawn]]],
    honest: list[Drawn],
    negatives: bool = True,
    of: Targets = MICROWORLD,
) -> Data:
    """The element pictures of the hidden ones, the hard negatives, and clean pictures up to `records`, shuffled."""
    rows: list[tuple[Drawn, str]] = []
    for one, made in hidden:
        one.records = [[len(rows) + i for i in element] for element in one.records]
        rows += [(row, "element") for row in made]
    if negatives:
        for kind, maker in (("series", series), ("subject", subject), ("copy", copies), ("template", templates)):
            rows += [(row, kind) for row in maker(seed, of)]
    if records - len(rows) > len(honest):
        raise ValueError(f"{records} records need {records - len(rows)} clean pictures, there are {len(honest)}")
    rows += [(row, "clean") for row in honest[: max(0, records - len(rows))]]
    order = draw_of("order", seed).permutation(len(rows))
    place = np.argsort(order)
    for one, _ in hidden:
        one.records = [[int(place[i]) for i in element] for element in one.records]
    rows = [rows[i] for i in order]
    return Data(
        pictures=np.stack([row[0] for row, _ in rows]),
        captions=[row[1] for row, _ in rows],
        hidden=[one for one, _ in hidden],
        kinds=[kind for _, kind in rows],
    )


def names_of(seed: int, count: int) -> list[str]:
    """Targets of a data set: seeds 0-999 give targets of the development range, others of their own."""
    base = 0 if seed < 1000 else seed
    return [str((seed * 7 + k) % 1000 if base == 0 else seed + 100 * k) for k in range(count)]


def at_ratio(seed: int, ratio: float, honest: list[Drawn], of: Targets = MICROWORLD) -> Data:
    """A data set with hard negatives whose element records are `ratio` of all, up to rounding; none at ratio 0."""
    records = RATIOS.get(ratio, 2000)
    wanted = round(ratio * records)
    hidden: list[tuple[Hidden, list[Drawn]]] = []
    if wanted:
        names = names_of(seed, 5)
        while wanted > 0 and len(hidden) < len(names):
            name = names[len(hidden)]
            parts = len(of.target_scene(name).things) + 1
            per = min(20, max(1, round(wanted / parts)))
            if hidden and per < 10:
                break
            hidden.append(hide(name, per, of=of))
            wanted -= per * parts
    return assemble(seed, records, hidden, honest, of=of)


assert set(SYNONYMS) >= set(KINDS)
