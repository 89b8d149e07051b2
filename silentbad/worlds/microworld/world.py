"""The microworld as the training of a base sees it."""

from silentbad.worlds.microworld.grammar import (
    BACKDROPS,
    COLOURS,
    KINDS,
    PLACES,
    SIZES,
    TEXTURES,
    Thing,
    sample_scene,
)
from silentbad.worlds.microworld.render import render
from silentbad.worlds.world import World, answer

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
)
