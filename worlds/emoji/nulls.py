"""Hard nulls: pictures that share as much as possible with a target and are still not a copy of it.

Names as in the microworld where the idea is the same. Two are this world's own: `artist`,
everything equal but whose drawing one thing is, and `pose`, the same drawing in another pose. A
null that looks like the target (`visible.differs`) is drawn again: two artists may draw the same
grey wrench."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from worlds.emoji.backdrops import BACKDROPS
from worlds.emoji.grammar import (
    PLACES,
    Scene,
    Thing,
    other_artist,
    pose,
    redraw,
    redraw_thing,
    respecify,
    sample_backdrop,
)
from worlds.emoji.sets import HELD_OUT
from worlds.emoji.visible import differs, first
from worlds.null_pictures import (
    Kinds,
    Null,
    everything,
    one_missing,
    one_moved,
    things_of,
    with_thing,
)

TILT = (0.3, 0.5)  # radians, to the other side, of a drawing in another pose
TURN = (0.25, 0.75)  # of a recoloured thing's hues
JITTER = 0.5  # pixels that somebody else's drawing may stand off: there are few artists


def _other_backdrop(rng: np.random.Generator, scene: Scene, kind: str) -> Scene:
    """The scene before another backdrop of this kind."""
    return replace(scene, backdrop=sample_backdrop(rng, kind, scene.backdrop.named))


def _in_its_pose(rng: np.random.Generator, thing: Thing) -> Thing:
    """Somebody else's drawing of the noun where the thing stands, off by half a pixel at most."""
    x, y = thing.centre
    return replace(
        other_artist(rng, thing),
        centre=(x + rng.uniform(-JITTER, JITTER), y + rng.uniform(-JITTER, JITTER)),
        size=thing.size + rng.uniform(-JITTER, JITTER),
    )


# -- several elements differ -----------------------------------------------------------------------
def free_redraw(rng: np.random.Generator, scene: Scene) -> Null:
    """Another scene of the caption: whatever the words leave open is drawn anew."""
    return Null(redraw(rng, scene), everything(scene))


def same_attributes(rng: np.random.Generator, scene: Scene) -> Null:
    """The same nouns, size names, places and kind of backdrop; other artists in other poses."""
    things = tuple(respecify(rng, thing) for thing in scene.things)
    drawn = _other_backdrop(rng, replace(scene, things=things), scene.backdrop.kind)
    return Null(drawn, everything(scene))


def other_artists(rng: np.random.Generator, scene: Scene) -> Null:
    """Everything is exact, but every thing is somebody else's drawing, in the target's pose."""
    return Null(
        replace(scene, things=tuple(_in_its_pose(rng, thing) for thing in scene.things)),
        things_of(scene),
    )


def rearranged(rng: np.random.Generator, scene: Scene) -> Null:
    """Every element is exact, but no thing stands at its place: at the others' places, if there are
    others."""
    old_places = [thing.place for thing in scene.things]
    places = (
        old_places if len(old_places) > 1 else [place for place in PLACES if place != old_places[0]]
    )
    step = 1 + int(rng.integers(max(1, len(places) - 1)))
    things = []
    for i, thing in enumerate(scene.things):
        place = places[(i + step) % len(places)]
        dx, dy = (new - old for new, old in zip(PLACES[place], PLACES[thing.place], strict=True))
        centre = (thing.centre[0] + dx, thing.centre[1] + dy)
        things.append(replace(thing, place=place, centre=centre))
    return Null(replace(scene, things=tuple(things)), things_of(scene))


def other_backdrop(rng: np.random.Generator, scene: Scene) -> Null:
    """Every thing is exact; the backdrop is of another kind."""
    kind = str(rng.choice([kind for kind in BACKDROPS if kind != scene.backdrop.kind]))
    return Null(_other_backdrop(rng, scene, kind), (len(scene.things),))


# -- one element differs ---------------------------------------------------------------------------
def one_redrawn(rng: np.random.Generator, scene: Scene, element: int) -> Null:
    """The element is drawn anew where it stands, by somebody else; the backdrop keeps its kind."""
    if element == len(scene.things):
        return Null(_other_backdrop(rng, scene, scene.backdrop.kind), (element,))
    thing = scene.things[element]
    return with_thing(scene, element, redraw_thing(rng, thing, thing.place))


def one_by_another_artist(rng: np.random.Generator, scene: Scene, element: int) -> Null:
    """The thing is somebody else's drawing of the same noun, in the target's pose."""
    return with_thing(scene, element, _in_its_pose(rng, scene.things[element]))


def one_in_another_pose(rng: np.random.Generator, scene: Scene, element: int) -> Null:
    """The same drawing, turned over, tilted to the other side and of another size."""
    thing = scene.things[element]
    posed = replace(pose(rng, thing), centre=thing.centre, mirrored=not thing.mirrored)
    side = -1 if thing.tilt > 0 else 1
    return with_thing(scene, element, replace(posed, tilt=side * rng.uniform(*TILT)))


def one_recoloured(rng: np.random.Generator, scene: Scene, element: int) -> Null:
    """The thing in other colours; its drawing and pose are exact."""
    return with_thing(scene, element, replace(scene.things[element], hue=float(rng.uniform(*TURN))))


# -- by name ---------------------------------------------------------------------------------------
SCENE_NULLS: dict[str, Callable[[np.random.Generator, Scene], Null]] = {
    "redraw": free_redraw,
    "attributes": same_attributes,
    "artists": other_artists,
    "rearranged": rearranged,
    "other_backdrop": other_backdrop,
}
ELEMENT_NULLS: dict[str, Callable[[np.random.Generator, Scene, int], Null]] = {
    "redrawn": one_redrawn,
    "artist": one_by_another_artist,
    "pose": one_in_another_pose,
    "recoloured": one_recoloured,
    "missing": one_missing,
    "moved": one_moved,
}
NULL_KINDS = Kinds(SCENE_NULLS, ELEMENT_NULLS, with_backdrop=("redrawn",))
turns = NULL_KINDS.turns
# in redraws.jsonl; `artist`, the hardest, is among them
STORED = (
    *("redraw", "attributes", "redrawn", "artist", "pose"),
    *("recoloured", "missing", "moved", "rearranged"),
)


def hard_null(kind: str, rng: np.random.Generator, scene: Scene, turn: int | None = None) -> Null:
    """A null of the kind, each element that it changes visibly another; after TRIES draws the last
    one. Kinds with one changed element take the elements by turns, or one at random. Raises
    KeyError for an unknown kind."""
    return first(
        lambda: NULL_KINDS.draw(kind, rng, scene, turn), lambda null: _visible(null, scene)
    )


def trained_null(kind: str, rng: np.random.Generator, scene: Scene) -> Null:
    """A null of the kind without a drawing by the artist that is held out: what a detector is
    trained on."""

    def fresh() -> Null:
        while True:
            null = NULL_KINDS.draw(kind, rng, scene)
            if all(thing.artist != HELD_OUT for thing in null.scene.things):
                return null

    return first(fresh, lambda null: _visible(null, scene))


def _visible(null: Null, scene: Scene) -> bool:
    return differs(null.scene, scene, null.changed)


def all_differ(rng: np.random.Generator, scene: Scene, kinds: tuple[str, ...]) -> bool:
    """Whether each thing has nulls of these kinds that look different: without `missing` it does
    not stand out from its backdrop, without `pose` it is round."""
    return all(
        _visible(hard_null(kind, rng, scene, thing), scene)
        for kind in kinds
        for thing in things_of(scene)
    )
