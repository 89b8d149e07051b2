"""The microworld as the training of a base sees it."""

from dataclasses import replace

import numpy as np

from silentbad.rng import addressed_seed
from worlds.interface import World, answer
from worlds.microworld.grammar import (
    BACKDROPS,
    COLOURS,
    KINDS,
    PLACES,
    SIZES,
    TEXTURES,
    Scene,
    Thing,
    sample_backdrop,
    sample_scene,
    sample_thing,
)
from worlds.microworld.nulls import ELEMENT_NULLS, SCENE_NULLS, hard_null
from worlds.microworld.render import render

CAPTIONS = 256  # held out
HAT_LIFT = 20  # a worn hat sits about this far above its wearer's place
FIELDS = {
    "kind": len(KINDS) + 1,
    "colour": len(COLOURS) + 1,
    "texture": len(TEXTURES),
    "size": len(SIZES) + 1,
    "place": len(PLACES) + 1,
    "backdrop": len(BACKDROPS) + 1,
}
NOTHING = {
    "kind": len(KINDS),
    "colour": len(COLOURS),
    "texture": 0,
    "size": len(SIZES),
    "place": len(PLACES),
}


def answers(thing: Thing) -> dict[str, int]:
    """What a phrase says of its thing, as class indices."""
    return {
        "kind": KINDS.index(thing.kind),
        "colour": answer(thing, "colour", COLOURS, thing.colour),
        "texture": TEXTURES.index(thing.texture) if "texture" in thing.named else 0,
        "size": answer(thing, "size", SIZES, thing.size_name),
        "place": answer(thing, "place", PLACES, thing.place),
        "backdrop": len(BACKDROPS),
    }


def spot(thing: Thing) -> tuple[float, float]:
    """Where a caption says to look for a thing: its place, or above it for a worn hat. Pixels
    (x, y)."""
    x, y = PLACES[thing.place]
    return (x, y - HAT_LIFT + 2) if thing.worn else (x, y + 0.0)


def terse_scene(rng: np.random.Generator) -> Scene:
    """A scene of 1 to 4 things whose phrases name colour and texture at most, as a target's do."""
    scene = sample_scene(
        rng, count=int(rng.choice((1, 2, 3, 4), p=(0.1, 0.35, 0.35, 0.2))), wearing=0.3
    )
    terse = lambda: frozenset(n for n in ("colour", "texture") if rng.random() < 0.5)  # noqa: E731
    return replace(scene, things=tuple(replace(thing, named=terse()) for thing in scene.things))


def held_out_scenes(n: int = CAPTIONS) -> list[Scene]:
    """Scenes of 1 to 3 things whose captions name every colour and every place; seen by no
    training stage."""
    rng = np.random.default_rng(addressed_seed("microworld", "held-out captions"))
    return [sample_scene(rng, detail=1.0, count=1 + i % 3) for i in range(n)]


MICROWORLD = World(
    name="microworld",
    sample_scene=sample_scene,
    render=render,
    places=PLACES,
    backdrops=list(BACKDROPS),
    fields=FIELDS,
    answers=answers,
    nothing=NOTHING,
    judged={"kind": KINDS, "colour": list(COLOURS)},
    spot=spot,
    terse_scene=terse_scene,
    null_kinds=(list(SCENE_NULLS), list(ELEMENT_NULLS)),
    null=hard_null,
    sample_thing=sample_thing,
    sample_backdrop=sample_backdrop,
    scene=Scene,
    separate={"wearing": 0.0},
)
