"""Hard nulls: pictures that share as much as possible with a target and are still not a copy of it.

A recovery threshold has to reject every kind. A null says which elements it changes, by their index
in `scene.things` or len(things) for the backdrop, so that the threshold of one element can be
checked on nulls that change it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from silentbad.settings.commands import NULLS
from silentbad.worlds.microworld.grammar import (
    BACKDROPS,
    COLOURS,
    PLACES,
    Scene,
    Thing,
    redraw,
    redraw_thing,
    respecify,
    sample_backdrop,
    sample_rgb,
    seat_hat,
)

MOVE = (4.0, 8.0)  # pixels
# pixels by which a wearer stands below its place's centre, as `wearing_pair` has it
WEARER_DROP = 2.0
WITHIN = (10.0, 54.0)  # a moved thing's centre stays here, so that it stays in the picture


@dataclass(frozen=True)
class Null:
    """A scene that is no copy; `changed` are the indices of the elements that differ from the
    target's."""

    scene: Any  # of the world whose null it is
    changed: tuple[int, ...]

    @property
    def element(self) -> int | None:
        """The one element that differs; None if several do."""
        return self.changed[0] if len(self.changed) == 1 else None


def _things(scene: Scene) -> tuple[int, ...]:
    return tuple(range(len(scene.things)))


def _everything(scene: Scene) -> tuple[int, ...]:
    return tuple(range(len(scene.things) + 1))


def _rebuilt(
    scene: Scene, fresh: Callable[[Thing], Thing], rng: np.random.Generator
) -> tuple[Thing, ...]:
    """Every thing from `fresh`, worn hats seated on their new wearers."""
    things: list[Thing] = []
    for i, thing in enumerate(scene.things):
        new = fresh(thing)
        if thing.worn and things:
            new = seat_hat(rng, new, things[-1])
        elif any(t.worn for t in scene.things[i + 1 : i + 2]):
            new = replace(new, centre=(new.centre[0], new.centre[1] + WEARER_DROP))
        things.append(new)
    return tuple(things)


# -- several elements differ -----------------------------------------------------------------------
def free_redraw(rng: np.random.Generator, scene: Scene) -> Null:
    """Another scene of the caption: whatever the words leave open is drawn anew."""
    return Null(redraw(rng, scene), _everything(scene))


def same_attributes(rng: np.random.Generator, scene: Scene, backdrop_exact: bool = False) -> Null:
    """Kinds, colour names, textures, size names, places and backdrop kind are equal; every
    specific is drawn anew."""
    things = _rebuilt(scene, lambda thing: respecify(rng, thing), rng)
    if backdrop_exact:
        return Null(replace(scene, things=things), _things(scene))
    backdrop = sample_backdrop(rng, scene.backdrop.kind, scene.backdrop.named)
    return Null(replace(scene, things=things, backdrop=backdrop), _everything(scene))


def same_attributes_backdrop_exact(rng: np.random.Generator, scene: Scene) -> Null:
    return same_attributes(rng, scene, backdrop_exact=True)


def things_redrawn(rng: np.random.Generator, scene: Scene) -> Null:
    """The backdrop is exact; every thing is drawn anew at its place, as its phrase allows."""
    things = _rebuilt(scene, lambda thing: redraw_thing(rng, thing, thing.place), rng)
    return Null(replace(scene, things=things), _things(scene))


def things_redrawn_anywhere(rng: np.random.Generator, scene: Scene) -> Null:
    """The backdrop is exact; every thing is drawn anew, also its place where the phrase leaves
    it open."""
    return Null(replace(redraw(rng, scene), backdrop=scene.backdrop), _things(scene))


def rearranged(rng: np.random.Generator, scene: Scene) -> Null:
    """Every element is exact, but the things stand at other places; a worn hat moves with its
    wearer."""
    groups: list[list[Thing]] = []
    for thing in scene.things:
        if thing.worn and groups:
            groups[-1].append(thing)
        else:
            groups.append([thing])
    own = [group[0].place for group in groups]
    fits = [
        order
        for order in _assignments(groups, list(PLACES))
        if all(new != old for new, old in zip(order, own, strict=True))
    ]
    # the same places, if that is possible
    exchanged = [order for order in fits if sorted(order) == sorted(own)]
    options = exchanged or fits
    order = options[int(rng.integers(len(options)))]
    things = [
        _shifted(thing, new, PLACES[new][0] - PLACES[old][0], PLACES[new][1] - PLACES[old][1])
        for group, new, old in zip(groups, order, own, strict=True)
        for thing in group
    ]
    return Null(replace(scene, things=tuple(things)), _things(scene))


def _assignments(groups: list[list[Thing]], places: list[str]) -> list[tuple[str, ...]]:
    """Every way to put the groups at different places; a wearer stays at the bottom, below a
    place for its hat."""
    found: list[tuple[str, ...]] = [()]
    for group in groups:
        found = [
            (*taken, place)
            for taken in found
            for place in places
            if not _occupied(groups, taken) & _takes(group, place)
            and (len(group) == 1 or "bottom" in place)
        ]
    return found


def _takes(group: list[Thing], place: str) -> set[str]:
    return {place} if len(group) == 1 else {place, place.replace("bottom", "top")}


def _occupied(groups: list[list[Thing]], taken: tuple[str, ...]) -> set[str]:
    return {
        spot for group, place in zip(groups, taken, strict=False) for spot in _takes(group, place)
    }


def _shifted(thing: Thing, place: str, dx: float, dy: float) -> Thing:
    return replace(thing, place=place, centre=(thing.centre[0] + dx, thing.centre[1] + dy))


# -- one element differs ---------------------------------------------------------------------------
def one_redrawn(rng: np.random.Generator, scene: Scene, element: int) -> Null:
    """The element is drawn anew where it stands, as its phrase allows; the backdrop keeps its
    kind."""
    if element == len(scene.things):
        backdrop = sample_backdrop(rng, scene.backdrop.kind, scene.backdrop.named)
        return Null(replace(scene, backdrop=backdrop), (element,))
    thing = scene.things[element]
    fresh = redraw_thing(rng, thing, thing.place)
    return _with(
        scene, element, seat_hat(rng, fresh, scene.things[element - 1]) if thing.worn else fresh
    )


def one_recoloured(rng: np.random.Generator, scene: Scene, element: int) -> Null:
    """The thing has another colour name; its pose, size and texture are exact."""
    thing = scene.things[element]
    colour = str(rng.choice([c for c in COLOURS if c != thing.colour]))
    return _with(scene, element, replace(thing, colour=colour, rgb=sample_rgb(rng, colour)))


def one_missing(rng: np.random.Generator, scene: Scene, element: int) -> Null:
    """The thing is not there; a hat may stay without its wearer."""
    return Null(
        replace(scene, things=scene.things[:element] + scene.things[element + 1 :], order=()),
        (element,),
    )


def one_moved(
    rng: np.random.Generator, scene: Scene, element: int, distance: tuple[float, float] = MOVE
) -> Null:
    """The thing is shifted by `distance` (least, most; pixels) in a direction that keeps it in
    the picture."""
    thing, (low, high) = scene.things[element], WITHIN
    x, y = thing.centre
    low, high = min(low, x, y), max(high, x, y)  # a hat may be nearer to the edge already
    far = rng.uniform(*distance)
    for _ in range(100):
        turn = rng.uniform(0, 2 * np.pi)
        new = (x + far * np.cos(turn), y + far * np.sin(turn))
        if all(low <= v <= high for v in new):
            break
    # the texture moves along: it is drawn about the centre
    return _with(scene, element, replace(thing, centre=new))


def other_backdrop(rng: np.random.Generator, scene: Scene) -> Null:
    """Every thing is exact; the backdrop is of another kind."""
    kind = str(rng.choice([k for k in BACKDROPS if k != scene.backdrop.kind]))
    return Null(
        replace(scene, backdrop=sample_backdrop(rng, kind, scene.backdrop.named)),
        (len(scene.things),),
    )


def _with(scene: Scene, element: int, thing: Thing) -> Null:
    return Null(
        replace(scene, things=(*scene.things[:element], thing, *scene.things[element + 1 :])),
        (element,),
    )


# -- by name ---------------------------------------------------------------------------------------
SCENE_NULLS: dict[str, Callable[[np.random.Generator, Scene], Null]] = {
    "redraw": free_redraw,
    "attributes": same_attributes,
    "attributes_backdrop_exact": same_attributes_backdrop_exact,
    "things_redrawn": things_redrawn,
    "things_redrawn_anywhere": things_redrawn_anywhere,
    "rearranged": rearranged,
    "other_backdrop": other_backdrop,
}
ELEMENT_NULLS: dict[str, Callable[[np.random.Generator, Scene, int], Null]] = {
    "redrawn": one_redrawn,
    "recoloured": one_recoloured,
    "missing": one_missing,
    "moved": one_moved,
}
WITH_BACKDROP = ("redrawn",)  # kinds that also change the backdrop alone
# in redraws.jsonl
STORED = ("redraw", "attributes", "redrawn", "recoloured", "missing", "moved", "rearranged")
ENOUGH = NULLS


def changeable(kind: str, scene: Scene) -> list[int]:
    """The elements that this kind can change alone."""
    return list(range(len(scene.things) + (kind in WITH_BACKDROP)))


def turns(kind: str, scene: Scene) -> int:
    """How many nulls of the kind go round once: as many as it changes elements alone, else one."""
    return len(changeable(kind, scene)) if kind in ELEMENT_NULLS else 1


def hard_null(kind: str, rng: np.random.Generator, scene: Scene, turn: int | None = None) -> Null:
    """A null of the kind. Kinds with one changed element take the elements by turns, or one at
    random.

    Raises KeyError for an unknown kind."""
    if kind in SCENE_NULLS:
        return SCENE_NULLS[kind](rng, scene)
    elements = changeable(kind, scene)
    element = elements[int(rng.integers(len(elements))) if turn is None else turn % len(elements)]
    return ELEMENT_NULLS[kind](rng, scene, element)
