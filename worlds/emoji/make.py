"""Write a data set of the emoji world in the project's own format.

`python -m worlds.emoji.make --out DIR --targets 3,17` writes what the microworld's
command writes (`worlds.microworld.make`), with the same options.

A target is named by its seed, any whole number from 0 on: two or three nouns, each by another
artist, one of them by the artist that the base has not seen. Every thing stands out from its
backdrop. Seeds 0-999 are for development, 2700-2731 are reported."""

import sys

from silentbad.settings import startup
from worlds.options import EmojiOptions

if __name__ == "__main__":  # a mistake is said before the seconds that the imports below take
    OPTIONS = startup.early(startup.options, EmojiOptions, None, __doc__)

import re
from dataclasses import replace

import numpy as np

from silentbad.errors import UserError, brief, exit_with
from worlds.data_sets import Targets, make
from worlds.emoji.grammar import (
    PLACES,
    SIZES,
    Scene,
    other_artist,
    pose,
    redraw,
    sample_backdrop,
    sample_thing,
    wording,
)
from worlds.emoji.nouns import NOUNS
from worlds.emoji.nulls import STORED, all_differ, hard_null, turns
from worlds.emoji.sets import HELD_OUT, SETS, TRAINED, artist
from worlds.emoji.visible import differs, first
from worlds.emoji.world import EMOJI, held_out_scenes

NAMES_SIZE = 0.3  # of a target's phrases
NEEDED = ("missing", "artist", "pose")  # nulls that each thing of a target has


def target_scene(name: str) -> Scene:
    """The scene of a target: two or three things and a backdrop, every one an element. A phrase
    names no place: where the thing stands is for memory to know. Each thing stands out from the
    backdrop and looks different by another artist and in another pose. Raises UserError if
    unknown."""
    if not re.fullmatch("0|[1-9][0-9]{0,17}", name):
        raise UserError(f"--targets: {brief(name)} is no seed, a whole number below 10^18")
    rng = EMOJI.rng("data", "target", name)
    return first(lambda: drawn_target(rng), lambda scene: all_differ(rng, scene, NEEDED))


def drawn_target(rng: np.random.Generator) -> Scene:
    """What a target may be, visible or not."""
    count = int(rng.integers(2, 4))
    kinds = rng.choice(NOUNS, count, replace=False)
    places = rng.permutation(list(PLACES))[:count]
    artists = rng.permutation([HELD_OUT, *rng.permutation(TRAINED)[: count - 1]])
    things = []
    for kind, place, by in zip(kinds, places, artists, strict=True):
        thing = sample_thing(rng, str(place), kind=str(kind), artist=str(by))
        named = frozenset({"size"} if rng.random() < NAMES_SIZE else ())
        things.append(replace(thing, named=named))
    return Scene(tuple(things), sample_backdrop(rng))


def element_scene(scene: Scene, element: int, rng: np.random.Generator) -> Scene:
    """A scene that holds one element exactly as the target shows it and nothing else of the target.

    `element` indexes `scene.things`, or is len(things) for the backdrop. The element stands at its
    own place, drawn last so that nothing hides it; other nouns and another backdrop surround it."""
    target_kinds = {thing.kind for thing in scene.things}
    kinds = [str(k) for k in rng.permutation([k for k in NOUNS if k not in target_kinds])]
    places = [str(p) for p in rng.permutation(list(PLACES))]
    if element == len(scene.things):
        count = int(rng.integers(1, 4))
        others = [sample_thing(rng, place, kind=kinds.pop()) for place in places[:count]]
        return Scene(tuple(others), scene.backdrop, **wording(rng, count))
    thing = scene.things[element]
    count = int(rng.integers(0, 3))
    free = [place for place in places if place != thing.place][:count]
    others = [sample_thing(rng, place, kind=kinds.pop()) for place in free]
    backdrop = sample_backdrop(rng)
    while backdrop.kind == scene.backdrop.kind:
        backdrop = sample_backdrop(rng)
    return Scene((*others, thing), backdrop, **wording(rng, count + 1))


def placebo_scene(scene: Scene, element: int, rng: np.random.Generator) -> Scene:
    """The target's scene with this element by another artist that the base knows, in another pose:
    its words, never the exact element, nor one that looks like it."""

    def fresh() -> Scene:
        if element == len(scene.things):
            drawn = sample_backdrop(rng, scene.backdrop.kind, scene.backdrop.named)
            return replace(scene, backdrop=replace(drawn, label=scene.backdrop.label))
        thing = pose(rng, other_artist(rng, scene.things[element], TRAINED))
        return replace(scene, things=(*scene.things[:element], thing, *scene.things[element + 1 :]))

    return first(fresh, lambda placebo: differs(placebo, scene, (element,)))


def spelt_out(scene: Scene) -> Scene:
    """The scene with size and place of every thing in its words."""
    named = frozenset(("size", "place"))
    things = tuple(replace(thing, named=named, label="") for thing in scene.things)
    return replace(scene, things=things, backdrop=replace(scene.backdrop, named=True, label=""))


TARGETS = Targets(
    world=EMOJI,
    target_scene=target_scene,
    element_scene=element_scene,
    placebo_scene=placebo_scene,
    spelt_out=spelt_out,
    redraw=redraw,
    nulls=STORED,
    turns=turns,
    hard_null=hard_null,
    held_out=held_out_scenes,
    little={"a", "an", "some", "and", "picture", "of", "on", "in", "the", "before", "under", "at"}
    | {*SIZES},
)


def main(argv: list[str] | None = None, options: EmojiOptions | None = None) -> None:
    """Raises SystemExit(2) after a mistake."""
    try:
        options = options or startup.options(EmojiOptions, argv, __doc__)
        for name in SETS:
            artist(name)  # a package that is missing is said before anything is written
        make(options, TARGETS)
    except UserError as error:
        sys.exit(startup.refused(error))


if __name__ == "__main__":
    exit_with(lambda: main(options=OPTIONS))
