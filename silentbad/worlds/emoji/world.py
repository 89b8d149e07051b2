"""The emoji world as the training of a base sees it."""

from dataclasses import replace

import numpy as np

from silentbad.worlds.emoji.backdrops import BACKDROPS
from silentbad.worlds.emoji.grammar import (
    PLACES,
    SIZES,
    Scene,
    Thing,
    sample_backdrop,
    sample_scene,
    sample_thing,
)
from silentbad.worlds.emoji.nouns import NOUNS
from silentbad.worlds.emoji.nulls import ELEMENT_NULLS, SCENE_NULLS, all_differ, trained_null
from silentbad.worlds.emoji.render import render
from silentbad.worlds.emoji.visible import first
from silentbad.worlds.interface import World, answer

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
