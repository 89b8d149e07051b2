"""The emoji world as the training of a base sees it."""

from silentbad.worlds.emoji.backdrops import BACKDROPS
from silentbad.worlds.emoji.grammar import PLACES, SIZES, Thing, sample_scene
from silentbad.worlds.emoji.nouns import NOUNS
from silentbad.worlds.emoji.render import render
from silentbad.worlds.world import World, answer

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
)
