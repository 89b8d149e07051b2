"""Hard nulls: pictures that share as much as possible with a target and are still not a copy of it.

A recovery threshold has to reject every kind. A null says which elements it changes, by their index
in `scene.things` or len(things) for the backdrop, so that the threshold of one element can be
checked on nulls that change it."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from worlds.microworld.grammar import (
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
from worlds.null_pictures import (
    Kinds,
    Null,
    everything,
    one_missing,
    one_moved,
    things_of,
    with_thing,
)

# pixels by which a wearer stands below its place's centre, as `wearing_pair` has it
WEARER_DROP = 2.0


def _rebuilt(
    scene: Scene, fresh: Callable[[Thing], Thing], rng: np.random.Generator
) -> tuple[Thing, ...]:
    """Every thing from `fresh`, worn hats seated on their new wearers."""
    things: list[Thing] = []
    for i, thing in enumerate(scene.things):
        new = fresh(thing)
        if thing.worn and things:
            new = seat_hat(rng, new, things[-1])
        elif scene.wears(i):
            new = replace(new, centre=(new.centre[0], new.centre[1] + WEARER_DROP))
        things.append(new)
    return tuple(things)


# -- several elements differ -----------------------------------------------------------------------
def free_redraw(rng: np.random.Generator, scene: Scene) -> Null:
    """Another scene of the caption: whatever the words leave open is drawn anew."""
    return Null(redraw(rng, scene), everything(scene))


def same_attributes(rng: np.random.Generator, scene: Scene) -> Null:
    """Kinds, colour names, textures, size names, places and backdrop kind are equal; every
    specific is drawn anew."""
    respecified = same_attributes_backdrop_exact(rng, scene).scene
    backdrop = sample_backdrop(rng, scene.backdrop.kind, scene.backdrop.named)
    return Null(replace(respecified, backdrop=backdrop), everything(scene))


def same_attributes_backdrop_exact(rng: np.random.Generator, scene: Scene) -> Null:
    """The same with the target's own backdrop."""
    things = _rebuilt(scene, lambda thing: respecify(rng, thing), rng)
    return Null(replace(scene, things=things), things_of(scene))


def things_redrawn(rng: np.random.Generator, scene: Scene) -> Null:
    """The backdrop is exact; every thing is drawn anew at its place, as its phrase allows."""
    things = _rebuilt(scene, lambda thing: redraw_thing(rng, thing, thing.place), rng)
    return Null(replace(scene, things=things), things_of(scene))


def things_redrawn_anywhere(rng: np.random.Generator, scene: Scene) -> Null:
    """The backdrop is exact; every thing is drawn anew, also its place where the phrase leaves
    it open."""
    return Null(replace(redraw(rng, scene), backdrop=scene.backdrop), things_of(scene))


def rearranged(rng: np.random.Generator, scene: Scene) -> Null:
    """Every element is exact, but the things stand at other places; a worn hat moves with its
    wearer."""
    groups = scene.groups
    old_places = [group[0].place for group in groups]
    fits = [
        order
        for order in itertools.permutations(PLACES, len(groups))
        if _has_room(groups, order)
        and all(new != old for new, old in zip(order, old_places, strict=True))
    ]
    # the same places, if that is possible
    exchanged = [order for order in fits if sorted(order) == sorted(old_places)]
    options = exchanged or fits
    order = options[int(rng.integers(len(options)))]
    things = []
    for group, new, old in zip(groups, order, old_places, strict=True):
        dx = PLACES[new][0] - PLACES[old][0]
        dy = PLACES[new][1] - PLACES[old][1]
        for thing in group:
            centre = (thing.centre[0] + dx, thing.centre[1] + dy)
            things.append(replace(thing, place=new, centre=centre))
    return Null(replace(scene, things=tuple(things)), things_of(scene))


def _has_room(groups: list[list[Thing]], order: Sequence[str]) -> bool:
    """Whether each wearer would stand at the bottom, below a free place for its hat."""
    wearers = [place for group, place in zip(groups, order, strict=True) if len(group) > 1]
    return all("bottom" in p and p.replace("bottom", "top") not in order for p in wearers)


# -- one element differs ---------------------------------------------------------------------------
def one_redrawn(rng: np.random.Generator, scene: Scene, element: int) -> Null:
    """The element is drawn anew where it stands, as its phrase allows; the backdrop keeps its
    kind."""
    if element == len(scene.things):
        backdrop = sample_backdrop(rng, scene.backdrop.kind, scene.backdrop.named)
        return Null(replace(scene, backdrop=backdrop), (element,))
    thing = scene.things[element]
    fresh = redraw_thing(rng, thing, thing.place)
    return with_thing(
        scene, element, seat_hat(rng, fresh, scene.things[element - 1]) if thing.worn else fresh
    )


def one_recoloured(rng: np.random.Generator, scene: Scene, element: int) -> Null:
    """The thing has another colour name; its pose, size and texture are exact."""
    thing = scene.things[element]
    colour = str(rng.choice([c for c in COLOURS if c != thing.colour]))
    return with_thing(scene, element, replace(thing, colour=colour, rgb=sample_rgb(rng, colour)))


def other_backdrop(rng: np.random.Generator, scene: Scene) -> Null:
    """Every thing is exact; the backdrop is of another kind."""
    kind = str(rng.choice([k for k in BACKDROPS if k != scene.backdrop.kind]))
    return Null(
        replace(scene, backdrop=sample_backdrop(rng, kind, scene.backdrop.named)),
        (len(scene.things),),
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
NULL_KINDS = Kinds(SCENE_NULLS, ELEMENT_NULLS, with_backdrop=("redrawn",))
turns = NULL_KINDS.turns
hard_null = NULL_KINDS.draw
# in redraws.jsonl
STORED = ("redraw", "attributes", "redrawn", "recoloured", "missing", "moved", "rearranged")
