"""The emoji world as the training of a base sees it."""

from dataclasses import replace

import numpy as np

from worlds.emoji.backdrops import BACKDROPS
from worlds.emoji.grammar import (
    PLACES,
    SIZES,
    Scene,
    Thing,
    sample_backdrop,
    sample_scene,
    sample_thing,
)
from worlds.emoji.nouns import NOUNS
from worlds.emoji.nulls import ELEMENT_NULLS, SCENE_NULLS, all_differ, trained_null
from worlds.emoji.render import render
from worlds.emoji.visible import first
from worlds.interface import World, answer

CAPTIONS = 400  # held out
MOST_MEASURED = 3  # things of a held-out scene
FIELDS = {
    "kind": len(NOUNS) + 1,
    "size": len(SIZES) + 1,
    "place": len(PLACES) + 1,
    "backdrop": len(BACKDROPS) + 1,
}


def answers(thing: Thing) -> dict[str, int]:
    """What a phrase says of its thing, as class indices."""
    return {
        "kind": NOUNS.index(thing.kind),
        "size": answer(thing, "size", SIZES, thing.size_name),
        "place": answer(thing, "place", PLACES, thing.place),
        "backdrop": len(BACKDROPS),
    }


def terse_scene(rng: np.random.Generator) -> Scene:
    """A scene of 1 to 4 things whose phrases name the size at most, as a target's do; each thing
    stands out from the backdrop and looks different in another pose."""

    def fresh() -> Scene:
        scene = sample_scene(rng, detail=0.3)
        named = [thing.named & {"size"} for thing in scene.things]
        things = (replace(t, named=n) for t, n in zip(scene.things, named, strict=True))
        return replace(scene, things=tuple(things))

    return first(fresh, lambda scene: all_differ(rng, scene, ("missing", "pose")))


EMOJI = World(
    name="emoji",
    sample_scene=sample_scene,
    render=render,
    places=PLACES,
    backdrops=list(BACKDROPS),
    fields=FIELDS,
    answers=answers,
    nothing={"kind": len(NOUNS), "size": len(SIZES), "place": len(PLACES)},
    judged={"kind": NOUNS},
    spot=lambda thing: PLACES[thing.place],
    terse_scene=terse_scene,
    null_kinds=(list(SCENE_NULLS), list(ELEMENT_NULLS)),
    null=trained_null,
    sample_thing=sample_thing,
    sample_backdrop=sample_backdrop,
    scene=Scene,
)


def held_out_scenes(n: int = CAPTIONS) -> list[Scene]:
    """Scenes of 1 to 3 things whose captions name every size and place; seen by no training stage.
    Every noun comes first in as many of them."""
    scenes = []
    for i in range(n):
        scene = sample_scene(
            EMOJI.rng("held-out captions", i), detail=1.0, count=1 + i % MOST_MEASURED
        )
        noun = NOUNS[i % len(NOUNS)]
        others = [thing for thing in scene.things[1:] if thing.kind != noun]
        things = (replace(scene.things[0], kind=noun), *others)
        scenes.append(replace(scene, things=things, order=()))
    return scenes
