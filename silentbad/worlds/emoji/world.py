"""The emoji world as the training of a base sees it."""

from silentbad.worlds.emoji.backdrops import BACKDROPS
from silentbad.worlds.emoji.grammar import PLACES, SIZES, Thing, sample_scene
from silentbad.worlds.emoji.nouns import NOUNS
from silentbad.worlds.emoji.render import render
from silentbad.worlds.world import World

FIELDS = {
    "kind": len(NOUNS) + 1,
    "size": len(SIZES) + 1,
    "place": len(PLACES) + 1,
    "backdrop": len(BACKDROPS) + 1,
}


def answers(thing: Thing) -> dict[str, int]:
    """What a phrase says of its thing, as class indices; the last class of a field is "unsaid"."""

    def word_of(name, options, value):
        return list(options).index(value) if name in thing.named else len(options)

    return {
        "kind": NOUNS.index(thing.kind),
        "size": word_of("size", SIZES, thing.size_name),
        "place": word_of("place", PLACES, thing.place),
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
