"""Scenes of nouns that somebody else drew, and the captions that underdetermine them.

A `Scene` fixes every pixel: whose drawing of each noun, in which size, pose and spot, before which
backdrop. A caption names the noun, and at times size and place. So "a cat, a top hat" fits a cat by
any artist: that a model shows *this* artist's cat is memory and not meaning. No word says who drew
a thing."""

from dataclasses import dataclass, field, replace

import numpy as np

from worlds.emoji.backdrops import BACKDROPS
from worlds.emoji.nouns import NOUNS, words
from worlds.emoji.sets import SETS, TRAINED

SIZES = {"small": (19.0, 22.0), "big": (26.0, 30.0)}  # longest side in pixels
PLACES = {  # name -> centre (x, y) in pixels of the 64x64 picture
    "at the top left": (17, 18),
    "at the top right": (47, 18),
    "at the bottom left": (17, 46),
    "at the bottom right": (47, 46),
}
MOST = 4  # things of a scene


@dataclass(frozen=True)
class Thing:
    """One drawing. `centre` and `size` are in pixels, `tilt` in radians, `hue` in turns from the
    artist's own colours; the rest are names."""

    kind: str
    artist: str
    size_name: str
    place: str
    centre: tuple[float, float]
    size: float
    tilt: float
    mirrored: bool
    hue: float = 0.0
    named: frozenset = frozenset()  # attributes its phrase spells out: size, place
    label: str = ""  # at the end of its phrase, whose it is

    @property
    def phrase(self) -> str:
        """The words that name this thing, verbatim in every caption that holds it."""
        noun = words(self.kind)
        if "size" in self.named:
            bare = noun.split(" ", 1)[1]
            noun = f"{'some' if noun.startswith('some') else 'a'} {self.size_name} {bare}"
        if "place" in self.named:
            noun += f" {self.place}"
        return f"{noun} of {self.label}" if self.label else noun


@dataclass(frozen=True)
class Backdrop:
    """What stands behind the things; `specifics` (4,) in [0, 1] settle colours and pattern."""

    kind: str
    specifics: tuple[float, ...]
    named: bool = True
    label: str = ""

    @property
    def phrase(self) -> str:
        phrase = BACKDROPS[self.kind].phrase
        return f"{phrase} of {self.label}" if self.label else phrase


FORMS = 4  # ways to say the same phrases


@dataclass(frozen=True)
class Scene:
    things: tuple[Thing, ...]
    backdrop: Backdrop
    order: tuple[int, ...] = field(default=())  # the order in which the caption names things
    form: int = 0

    @property
    def phrases(self) -> list[str]:
        """One phrase per element, in caption order."""
        things = [self.things[i].phrase for i in self.order or range(len(self.things))]
        if not self.backdrop.named:
            return things
        return (
            [self.backdrop.phrase, *things] if self.form == 2 else [*things, self.backdrop.phrase]
        )

    @property
    def caption(self) -> str:
        things = [self.things[i].phrase for i in self.order or range(len(self.things))]
        backdrop = [self.backdrop.phrase] if self.backdrop.named else []
        match self.form:
            case 1:
                return " ".join([" and ".join(things), *backdrop])
            case 2:
                return ", ".join([*backdrop, *things])
            case 3:
                return " ".join(["a picture of", " and ".join(things), *backdrop])
        return ", ".join([*things, *backdrop])


# -- things and backdrops --------------------------------------------------------------------------
def pose(rng: np.random.Generator, thing: Thing) -> Thing:
    """The same drawing in another spot, size, tilt and side, within its names."""
    x, y = PLACES[thing.place]
    return replace(
        thing,
        centre=(x + rng.uniform(-3, 3), y + rng.uniform(-3, 3)),
        size=rng.uniform(*SIZES[thing.size_name]),
        tilt=rng.uniform(-0.25, 0.25),
        mirrored=bool(rng.integers(2)),
    )


def other_artist(
    rng: np.random.Generator, thing: Thing, artists: tuple[str, ...] = tuple(SETS)
) -> Thing:
    """The same noun in the same pose by somebody else."""
    others = [artist for artist in artists if artist != thing.artist]
    return replace(thing, artist=str(rng.choice(others)), hue=0.0)


def respecify(rng: np.random.Generator, thing: Thing) -> Thing:
    """The same words, other pixels: somebody else's drawing in another pose."""
    return pose(rng, other_artist(rng, thing))


def sample_thing(
    rng: np.random.Generator,
    place: str,
    *,
    kind: str | None = None,
    artist: str | None = None,
    detail: float = 0.4,
) -> Thing:
    """A thing at a named place, by an artist that the base knows; each attribute enters its phrase
    with probability `detail`."""
    blank = Thing(
        kind=kind or str(rng.choice(NOUNS)),
        artist=artist or str(rng.choice(TRAINED)),
        size_name=str(rng.choice(list(SIZES), p=(0.35, 0.65))),
        place=place,
        centre=(0.0, 0.0),
        size=0.0,
        tilt=0.0,
        mirrored=False,
        named=frozenset(name for name in ("size", "place") if rng.random() < detail),
    )
    return pose(rng, blank)


def sample_backdrop(
    rng: np.random.Generator, kind: str | None = None, named: bool = True
) -> Backdrop:
    kind = kind or str(rng.choice(list(BACKDROPS)))
    return Backdrop(kind, tuple(rng.random(4).tolist()), named)


def wording(rng: np.random.Generator, things: int) -> dict:
    """In which order and form a caption names its things."""
    return {
        "order": tuple(int(i) for i in rng.permutation(things)),
        "form": int(rng.integers(FORMS)),
    }


# -- scenes ----------------------------------------------------------------------------------------
def sample_scene(
    rng: np.random.Generator,
    *,
    detail: float | None = None,
    count: int | None = None,
    max_count: int = MOST,
) -> Scene:
    """A scene of 1 to `max_count` different nouns at different places. `detail` is drawn per scene
    by default, so that terse and exact captions both occur."""
    detail = float(rng.choice((0.2, 0.6, 1.0))) if detail is None else detail
    count = int(rng.integers(1, max_count + 1)) if count is None else count
    places = [str(place) for place in rng.permutation(list(PLACES))[:count]]
    kinds = [str(kind) for kind in rng.choice(NOUNS, count, replace=False)]
    things = tuple(
        sample_thing(rng, place, kind=kind, detail=detail)
        for place, kind in zip(places, kinds, strict=True)
    )
    backdrop = sample_backdrop(rng, named=bool(rng.random() < 0.9))
    return Scene(things, backdrop, **wording(rng, count))


def redraw_thing(rng: np.random.Generator, thing: Thing, place: str) -> Thing:
    """Another thing of the same phrase at `place`: what the phrase leaves open is drawn anew, by
    somebody else."""
    size = thing.size_name if "size" in thing.named else str(rng.choice(list(SIZES)))
    return respecify(rng, replace(thing, size_name=size, place=place))


def redraw(rng: np.random.Generator, scene: Scene) -> Scene:
    """Another scene of the same caption: what the caption leaves open is drawn afresh."""
    occupied = {thing.place for thing in scene.things if "place" in thing.named}
    free = [str(p) for p in rng.permutation(list(PLACES)) if p not in occupied]
    things = tuple(
        redraw_thing(rng, thing, thing.place if "place" in thing.named else free.pop())
        for thing in scene.things
    )
    kind = scene.backdrop.kind if scene.backdrop.named else None
    backdrop = replace(sample_backdrop(rng, kind, scene.backdrop.named), label=scene.backdrop.label)
    return replace(scene, things=things, backdrop=backdrop)
