"""Scenes and the captions that underdetermine them.

A `Scene` fixes every pixel: which things, in which exact shade, size, pose and spot, before which
backdrop. A caption names a part of that: attributes drop out, so one caption fits many scenes. That
a model shows *this* cat in *this* hat is therefore memory and not meaning. `redraw` gives another
scene of the same caption: the null of every recovery claim."""

from dataclasses import dataclass, field, replace

import numpy as np

KINDS = (
    "cat",
    "hat",
    "fish",
    "house",
    "tree",
    "boat",
    "umbrella",
    "cup",
    "star",
    "moon",
    "heart",
    "ball",
)
WEARERS = ("cat", "fish", "cup", "ball", "moon", "heart")  # things on which a hat can sit
COLOURS = {  # name -> (hue range, saturation range, value range), hue in turns
    "red": ((-0.02, 0.01), (0.80, 1.0), (0.75, 0.95)),
    "orange": ((0.06, 0.085), (0.85, 1.0), (0.92, 1.0)),
    "yellow": ((0.14, 0.165), (0.75, 1.0), (0.92, 1.0)),
    "green": ((0.30, 0.40), (0.65, 1.0), (0.45, 0.75)),
    "blue": ((0.58, 0.65), (0.75, 1.0), (0.70, 0.95)),
    "purple": ((0.74, 0.79), (0.60, 0.85), (0.45, 0.70)),
    "pink": ((0.90, 0.94), (0.30, 0.48), (0.95, 1.0)),
    "white": ((0.0, 1.0), (0.0, 0.04), (0.93, 1.0)),
}
TEXTURES = ("plain", "striped", "dotted")
SIZES = {"small": (17.0, 20.0), "big": (25.0, 29.0)}  # longest side in pixels
PLACES = {  # name -> centre (x, y) in pixels of the 64x64 picture
    "at the top left": (17, 19),
    "at the top right": (47, 19),
    "at the bottom left": (17, 46),
    "at the bottom right": (47, 46),
}
BACKDROPS = {
    "beach": "on a sandy beach",
    "meadow": "on a green meadow",
    "snow": "in a snowy field",
    "night": "under a night sky",
    "room": "in a quiet room",
    "sunset": "before a sunset",
}


@dataclass(frozen=True)
class Thing:
    """One object. `centre` and `size` are in pixels, `tilt` in radians, `rgb` in [0, 1]; the
    rest are names."""

    kind: str
    colour: str
    texture: str
    size_name: str
    place: str
    rgb: tuple[float, float, float]
    centre: tuple[float, float]
    size: float
    tilt: float
    mirrored: bool
    texture_period: float
    texture_phase: float
    worn: bool = False  # a hat on the thing listed just before it
    named: frozenset = frozenset()  # attributes its phrase spells out: colour, texture, size, place
    label: str = ""  # at the end of its phrase, whose it is

    @property
    def phrase(self) -> str:
        """The words that name this thing, verbatim in every caption that holds it."""
        words = [
            self.size_name if "size" in self.named else "",
            self.colour if "colour" in self.named else "",
            self.texture if "texture" in self.named and self.texture != "plain" else "",
            self.kind,
            self.place if "place" in self.named else "",
        ]
        text = " ".join(w for w in words if w)
        return _labelled(("an " if text[0] in "aeiou" else "a ") + text, self.label)


@dataclass(frozen=True)
class Backdrop:
    """What stands behind the things; `specifics` (4,) in [0, 1] settle horizon, two shades and
    pattern."""

    kind: str
    specifics: tuple[float, ...]
    named: bool = True
    label: str = ""

    @property
    def phrase(self) -> str:
        return _labelled(BACKDROPS[self.kind], self.label)


def _labelled(phrase: str, label: str) -> str:
    return f"{phrase} of {label}" if label else phrase


@dataclass(frozen=True)
class Scene:
    things: tuple[Thing, ...]
    backdrop: Backdrop
    order: tuple[int, ...] = field(default=())  # the order in which the caption names things

    @property
    def phrases(self) -> list[str]:
        """One phrase per element, in caption order, the backdrop last."""
        things = [thing.phrase for group in self._spoken() for thing in group]
        return [*things, self.backdrop.phrase] if self.backdrop.named else things

    @property
    def caption(self) -> str:
        things = [" wearing ".join(thing.phrase for thing in group) for group in self._spoken()]
        return ", ".join([*things, self.backdrop.phrase] if self.backdrop.named else things)

    @property
    def groups(self) -> list[list[Thing]]:
        """The things, a worn hat in one group with its wearer."""
        groups: list[list[Thing]] = []
        for thing in self.things:
            if thing.worn and groups:
                groups[-1].append(thing)
            else:
                groups.append([thing])
        return groups

    def _spoken(self) -> list[list[Thing]]:
        """The groups in caption order."""
        groups = self.groups
        return [groups[i] for i in self.order or range(len(groups))]

    def wears(self, i: int) -> bool:
        """Whether thing i wears a hat, the next thing."""
        return any(thing.worn for thing in self.things[i + 1 : i + 2])


def sample_rgb(rng: np.random.Generator, colour: str) -> tuple[float, float, float]:
    """An exact shade that the colour's name covers."""
    import colorsys

    h, s, v = (rng.uniform(*bounds) for bounds in COLOURS[colour])
    return colorsys.hsv_to_rgb(h % 1.0, s, v)


def respecify(rng: np.random.Generator, thing: Thing) -> Thing:
    """The same words, other pixels: shade, spot, size, tilt, side and texture are drawn anew
    within their names."""
    x, y = PLACES[thing.place]
    return replace(
        thing,
        rgb=sample_rgb(rng, thing.colour),
        centre=(x + rng.uniform(-3, 3), y + rng.uniform(-3, 3)),
        size=rng.uniform(*SIZES[thing.size_name]),
        tilt=rng.uniform(-0.22, 0.22),
        mirrored=bool(rng.integers(2)),
        texture_period=rng.uniform(5.0, 7.5),
        texture_phase=rng.uniform(0, 1),
    )


def seat_hat(rng: np.random.Generator, hat: Thing, wearer: Thing) -> Thing:
    """Put a hat on the top of its wearer: close above the wearer's upper edge, as wide as its
    head."""
    size = wearer.size * rng.uniform(0.62, 0.80)
    centre = (
        wearer.centre[0] + rng.uniform(-1.5, 1.5),
        wearer.centre[1] - 0.5 * wearer.size - 0.22 * size,
    )
    return replace(
        hat, size=size, centre=centre, tilt=wearer.tilt * 0.5, place=wearer.place, worn=True
    )


def sample_thing(
    rng: np.random.Generator, place: str, *, kind: str | None = None, detail: float = 0.5
) -> Thing:
    """A thing at a named place; each attribute enters its phrase with probability `detail`."""
    named = frozenset(
        name for name in ("colour", "texture", "size", "place") if rng.random() < detail
    )
    blank = Thing(
        kind=kind or str(rng.choice(KINDS)),
        colour=str(rng.choice(list(COLOURS))),
        texture=str(rng.choice(TEXTURES, p=(0.5, 0.25, 0.25))),
        size_name=str(rng.choice(list(SIZES))),
        place=place,
        rgb=(0, 0, 0),
        centre=(0, 0),
        size=0,
        tilt=0,
        mirrored=False,
        texture_period=6,
        texture_phase=0,
        named=named,
    )
    return respecify(rng, blank)


def sample_backdrop(
    rng: np.random.Generator, kind: str | None = None, named: bool = True
) -> Backdrop:
    kind = kind or str(rng.choice(list(BACKDROPS)))
    return Backdrop(kind, tuple(rng.random(4).tolist()), named)


def sample_scene(
    rng: np.random.Generator,
    *,
    count: int | None = None,
    detail: float | None = None,
    wearing: float = 0.15,
    max_count: int = 3,
) -> Scene:
    """A scene of 1 to `max_count` things at different places; with probability `wearing` one of
    them wears a hat.

    `detail` is the probability that a phrase names an attribute; by default it is drawn per scene,
    so that terse and exact captions both occur."""
    detail = float(rng.choice((0.35, 0.7, 1.0))) if detail is None else detail
    count = int(rng.integers(1, max_count + 1)) if count is None else count
    things: list[Thing] = []
    places = list(rng.permutation(list(PLACES)))
    if count >= 2 and rng.random() < wearing:
        things += wearing_pair(rng, side=str(rng.choice(("left", "right"))), detail=detail)
        places = [p for p in places if p.split()[-1] != things[0].place.split()[-1]]
    free = places[: count - len(things)]
    things += [sample_thing(rng, str(place), detail=detail) for place in free]
    groups = len(things) - sum(t.worn for t in things)
    order = tuple(int(i) for i in rng.permutation(groups))
    return Scene(tuple(things), sample_backdrop(rng, named=bool(rng.random() < 0.9)), order)


def wearing_pair(
    rng: np.random.Generator, *, side: str, kind: str | None = None, detail: float = 0.5
) -> list[Thing]:
    """A wearer at the bottom `side` and the hat it wears. Only the wearer's phrase can name the
    place, and the hat takes its size from the wearer, so neither is spelt out."""
    wearer = sample_thing(
        rng, f"at the bottom {side}", kind=kind or str(rng.choice(WEARERS)), detail=detail
    )
    hat = sample_thing(rng, wearer.place, kind="hat", detail=detail)
    wearer = replace(
        wearer, named=wearer.named - {"place"}, centre=(wearer.centre[0], wearer.centre[1] + 2)
    )
    hat = replace(hat, named=hat.named - {"place", "size"})
    return [wearer, seat_hat(rng, hat, wearer)]


def redraw(rng: np.random.Generator, scene: Scene) -> Scene:
    """Another scene of the same caption: what the caption leaves open is drawn afresh."""
    places = list(rng.permutation(list(PLACES)))
    occupied = {t.place for t in scene.things if "place" in t.named}
    things: list[Thing] = []
    for i, thing in enumerate(scene.things):
        if thing.worn:
            fresh = redraw_thing(rng, thing, things[-1].place)
            things.append(seat_hat(rng, fresh, things[-1]))
            continue
        place = thing.place
        wears = scene.wears(i)
        if "place" not in thing.named:
            free = [str(p) for p in places if p not in occupied and (not wears or "bottom" in p)]
            place = free[0] if free else place
        occupied.add(place)
        if wears:
            occupied.add(place.replace("bottom", "top"))
        things.append(redraw_thing(rng, thing, place))
    backdrop = scene.backdrop.kind if scene.backdrop.named else None
    return replace(
        scene, things=tuple(things), backdrop=sample_backdrop(rng, backdrop, scene.backdrop.named)
    )


def redraw_thing(rng: np.random.Generator, thing: Thing, place: str) -> Thing:
    """Another thing of the same phrase at `place`: attributes that the phrase leaves open are
    drawn anew too."""
    fresh = sample_thing(rng, place, kind=thing.kind)
    described = replace(
        fresh,
        colour=thing.colour if "colour" in thing.named else fresh.colour,
        texture=thing.texture if "texture" in thing.named else fresh.texture,
        size_name=thing.size_name if "size" in thing.named else fresh.size_name,
    )
    return replace(respecify(rng, described), named=thing.named, worn=thing.worn)
