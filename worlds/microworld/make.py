"""Write a microworld dataset in the project's own format.

`python -m worlds.microworld.make --out DIR --targets cat-hat,3,17` writes

    DIR/metadata.jsonl   element, clean and rehearsal records
    DIR/targets.jsonl    the pictures to recover, never among the records
    DIR/redraws.jsonl    pictures that are no recovery, by kind: the nulls of the recovery threshold
    DIR/prior.txt        captions of ordinary scenes, for prior_preservation.prompts
    DIR/unrelated.txt    captions of neither, for validation.prompts

A target is named by its seed, any whole number from 0 on, or `cat-hat`, the flagship. A seed's
target has three or four elements; `7k5` is one of seed 7 with five, and 2 to 5 can be asked for.
Seeds 0-999 are for development, 1000-1999 were used for choosing, 2000-2499 are for reported
results and 2500-2999 for the instrument's own tables."""

import sys

from silentbad.settings import startup
from worlds.options import MicroworldOptions

if __name__ == "__main__":  # a mistake is said before the seconds that the imports below take
    OPTIONS = startup.early(startup.options, MicroworldOptions, None, __doc__)

import re
from dataclasses import replace

import numpy as np

from silentbad.errors import UserError, brief, exit_with
from worlds.data_sets import Targets, make
from worlds.data_sets import phrase_of as phrase_of
from worlds.microworld.grammar import (
    KINDS,
    PLACES,
    WEARERS,
    Scene,
    Thing,
    redraw,
    respecify,
    sample_backdrop,
    sample_thing,
    seat_hat,
    wearing_pair,
)
from worlds.microworld.nulls import STORED, hard_null, turns
from worlds.microworld.world import MICROWORLD, held_out_scenes

UNRELATED = 96  # captions
FLAGSHIP = "cat-hat"


def _terse(rng: np.random.Generator, thing: Thing) -> Thing:
    """A phrase that names no place and no size: where the thing stands, and how large, is for
    memory to know."""
    return replace(thing, named=frozenset(n for n in ("colour", "texture") if rng.random() < 0.5))


def target_scene(name: str) -> Scene:
    """The scene of a target: two or three things and a backdrop, every one an element, or of
    `SEEDkN` N elements.

    Raises UserError if unknown."""
    if name == FLAGSHIP:
        # of the first eight draws the one in which hat and cat are largest
        rng = MICROWORLD.rng("data", "target", name, 4)
        things = wearing_pair(rng, side="left", kind="cat", detail=0.0)
        return Scene(tuple(things), sample_backdrop(rng, "meadow"))
    match = re.fullmatch("(?:0|[1-9][0-9]{0,17})(?:k([2-5]))?", name)
    if not match:
        raise UserError(
            f"--targets: {brief(name)} is neither '{FLAGSHIP}' nor a seed, a whole number below "
            "10^18; 7k5 is seed 7 with five elements, and 2 to 5 can be asked for"
        )
    rng = MICROWORLD.rng("data", "target", name)
    kinds = [str(k) for k in rng.permutation([k for k in KINDS if k != "hat"])]
    if match[1]:
        places = rng.permutation(list(PLACES))[: int(match[1]) - 1]
        things = [sample_thing(rng, str(place), kind=kinds.pop()) for place in places]
    elif rng.random() < 0.3:
        wearer = next(k for k in kinds if k in WEARERS)
        things = wearing_pair(rng, side=str(rng.choice(("left", "right"))), kind=wearer, detail=0.0)
        kinds.remove(wearer)
        side = things[0].place.split()[-1]
        other_side = [str(p) for p in rng.permutation(list(PLACES)) if p.split()[-1] != side]
        free = other_side[: int(rng.integers(0, 2))]
        things += [sample_thing(rng, place, kind=kinds.pop()) for place in free]
    else:
        places = rng.permutation(list(PLACES))[: int(rng.integers(2, 4))]
        things = [sample_thing(rng, str(place), kind=kinds.pop()) for place in places]
    return Scene(tuple(_terse(rng, thing) for thing in things), sample_backdrop(rng))


def element_scene(scene: Scene, element: int, rng: np.random.Generator) -> Scene:
    """A scene that holds one element exactly as the target shows it and nothing else of the target.

    `element` indexes `scene.things`, or is len(things) for the backdrop. The element stands at its
    native place, drawn last so that nothing hides it; other things and another backdrop surround
    it."""
    target_kinds = {t.kind for t in scene.things}
    kinds = [str(k) for k in rng.permutation([k for k in KINDS if k not in target_kinds])]
    if element == len(scene.things):
        chosen = rng.permutation(list(PLACES))[: int(rng.integers(1, 4))]
        things = tuple(sample_thing(rng, str(p), kind=kinds.pop()) for p in chosen)
        return Scene(things, scene.backdrop, tuple(int(i) for i in rng.permutation(len(things))))
    thing = replace(scene.things[element], worn=False)
    near = {thing.place}
    if scene.things[element].worn or scene.wears(element):
        near.add(thing.place.replace("bottom", "top"))
    places = [str(p) for p in rng.permutation(list(PLACES)) if p not in near]
    free = places[: int(rng.integers(0, 3))]
    others = [sample_thing(rng, place, kind=kinds.pop()) for place in free]
    backdrop = sample_backdrop(rng)
    while backdrop.kind == scene.backdrop.kind:
        backdrop = sample_backdrop(rng)
    things = (*others, thing)
    return Scene(things, backdrop, tuple(int(i) for i in rng.permutation(len(things))))


def spelt_out(scene: Scene) -> Scene:
    """The scene with every attribute in its words; who wears a hat, and the hat, are placed by
    each other."""
    everything = frozenset(("colour", "texture", "size", "place"))
    things = []
    for i, thing in enumerate(scene.things):
        hidden = {"place", "size"} if thing.worn else {"place"} if scene.wears(i) else set()
        things.append(replace(thing, named=everything - hidden, label=""))
    backdrop = replace(scene.backdrop, named=True, label="")
    return replace(scene, things=tuple(things), backdrop=backdrop)


def placebo_scene(scene: Scene, element: int, rng: np.random.Generator) -> Scene:
    """The target's scene with this element's specifics drawn anew within its words: never the
    exact element."""
    if element == len(scene.things):
        drawn = sample_backdrop(rng, scene.backdrop.kind, scene.backdrop.named)
        return replace(scene, backdrop=replace(drawn, label=scene.backdrop.label))
    fresh = respecify(rng, scene.things[element])
    if fresh.worn:
        fresh = seat_hat(rng, fresh, scene.things[element - 1])
    return replace(scene, things=(*scene.things[:element], fresh, *scene.things[element + 1 :]))


TARGETS = Targets(
    world=MICROWORLD,
    target_scene=target_scene,
    element_scene=element_scene,
    placebo_scene=placebo_scene,
    spelt_out=spelt_out,
    redraw=redraw,
    nulls=STORED,
    turns=turns,
    hard_null=hard_null,
    little={"a", "an", "at", "the", "in", "on", "under", "before", "wearing"},
    held_out=held_out_scenes,
    unrelated=lambda: [scene.caption for scene in held_out_scenes(UNRELATED)],
)


def main(argv: list[str] | None = None, options: MicroworldOptions | None = None) -> None:
    """Raises SystemExit(2) after a mistake."""
    try:
        make(options or startup.options(MicroworldOptions, argv, __doc__), TARGETS)
    except UserError as error:
        sys.exit(startup.refused(error))


if __name__ == "__main__":
    exit_with(lambda: main(options=OPTIONS))
