"""Write a microworld dataset in the project's own format.

`python -m silentbad.worlds.microworld.make --out DIR --targets cat-hat,3,17` writes

    DIR/metadata.jsonl   element, clean and rehearsal records
    DIR/targets.jsonl    the pictures to recover, never among the records
    DIR/redraws.jsonl    pictures that are no recovery, by kind: the nulls of the recovery threshold

A target is named by its seed, any whole number from 0 on, or `cat-hat`, the flagship. A seed's
target has three or four elements; `7k5` is one of seed 7 with five, and 2 to 5 can be asked for.
Seeds 0-999 are for development, 1000-1999 were used for choosing, 2000-2499 are for reported
results and 2500-2999 for the instrument's own tables."""

import sys

from silentbad.settings import command
from silentbad.settings.commands import MicroworldOptions

if __name__ == "__main__":  # a mistake is said before the seconds that the imports below take
    OPTIONS = command.early(command.options, MicroworldOptions, None, __doc__)

import itertools
import json
import os
import re
import shutil
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from silentbad import owned
from silentbad.data.phrases import shared_lines, shared_phrases
from silentbad.errors import UserError, brief, exit_with, user_errors
from silentbad.files import check_writable, checksum, read_json
from silentbad.measure.thresholds import FEW, Fingerprint, fingerprint, is_copy
from silentbad.progress import Bar
from silentbad.rng import addressed_seed
from silentbad.worlds.microworld.grammar import (
    KINDS,
    PLACES,
    WEARERS,
    Scene,
    Thing,
    redraw,
    respecify,
    sample_backdrop,
    sample_scene,
    sample_thing,
    seat_hat,
    wearing_pair,
)
from silentbad.worlds.microworld.nulls import ENOUGH, STORED, Null, hard_null, turns
from silentbad.worlds.microworld.render import backdrop_mask, render

FLAGSHIP = "cat-hat"
TRIES = 100  # of a null that differs from the others of its kind
WORD_TRIES = 10_000  # of a clean scene in other words than the targets'
# words that any caption may hold
LITTLE = {"a", "an", "at", "the", "in", "on", "under", "before", "wearing"}
REHEARSAL_SEEDS = 2000  # scenes of rehearsal are redraws of targets below


def _rng(*address: int | str) -> np.random.Generator:
    return np.random.default_rng(addressed_seed("microworld", "data", *address))


def _terse(rng: np.random.Generator, thing: Thing) -> Thing:
    """A phrase that names no place and no size: where the thing stands, and how large, is for
    memory to know."""
    return replace(thing, named=frozenset(n for n in ("colour", "texture") if rng.random() < 0.5))


def target_scene(name: str) -> Scene:
    """The scene of a target: two or three things and a backdrop, every one an element, or of
    `SEEDkN` N elements.

    Raises UserError if unknown."""
    found = re.fullmatch("(?:0|[1-9][0-9]{0,17})(?:k([2-5]))?", name)
    if name != FLAGSHIP and not found:
        raise UserError(
            f"--targets: {brief(name)} is neither '{FLAGSHIP}' nor a seed, a whole number below "
            "10^18; 7k5 is seed 7 with five elements, and 2 to 5 can be asked for"
        )
    if name == FLAGSHIP:
        # of the first eight draws the one in which hat and cat are largest
        rng = _rng("target", name, 4)
        cat, hat = wearing_pair(rng, side="left", kind="cat", detail=0.0)
        return Scene((cat, hat), sample_backdrop(rng, "meadow"))
    rng = _rng("target", name)
    kinds = [str(k) for k in rng.permutation([k for k in KINDS if k != "hat"])]
    if found and found[1]:
        places = rng.permutation(list(PLACES))[: int(found[1]) - 1]
        things = [sample_thing(rng, str(place), kind=kinds.pop()) for place in places]
    elif rng.random() < 0.3:
        wearer = next(k for k in kinds if k in WEARERS)
        things = wearing_pair(rng, side=str(rng.choice(("left", "right"))), kind=wearer, detail=0.0)
        kinds.remove(wearer)
        apart = [
            str(p)
            for p in rng.permutation(list(PLACES))
            if p.split()[-1] != things[0].place.split()[-1]
        ]
        things += [sample_thing(rng, p, kind=kinds.pop()) for p in apart[: int(rng.integers(0, 2))]]
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
    near = (
        {thing.place, thing.place.replace("bottom", "top")}
        if _touches_above(scene, element)
        else {thing.place}
    )
    places = [str(p) for p in rng.permutation(list(PLACES)) if p not in near][
        : int(rng.integers(0, 3))
    ]
    others = [sample_thing(rng, place, kind=kinds.pop()) for place in places]
    backdrop = sample_backdrop(rng)
    while backdrop.kind == scene.backdrop.kind:
        backdrop = sample_backdrop(rng)
    things = (*others, thing)
    return Scene(things, backdrop, tuple(int(i) for i in rng.permutation(len(things))))


def _touches_above(scene: Scene, element: int) -> bool:
    following = scene.things[element + 1 : element + 2]
    return scene.things[element].worn or any(t.worn for t in following)


def phrase_of(scene: Scene, element: int) -> str:
    return scene.backdrop.phrase if element == len(scene.things) else scene.things[element].phrase


MARK = ".microworld.json"  # in a folder that this command wrote: {name of each file: its checksum}


class Writer:
    """Writes pictures and records into a temporary folder that takes the final name only when all
    is there.

    A data set that this command wrote is replaced; a folder with any other file in it is refused
    (UserError)."""

    def __init__(self, out: Path, masks: bool = True):
        # a link's folder is replaced, the link stays
        self.out = Path(os.path.realpath(out))
        self.masks = masks
        check_writable(self.out, "--out", folder=True)
        self._check_own()
        # held while its data/ is written
        self.draft = self.out.parent / f".{self.out.name[:40]}.microworld"
        self.tmp = self.draft / "data"
        self.held = ExitStack()
        self.records: dict[str, list[dict]] = {"metadata": [], "targets": [], "redraws": []}

    def __enter__(self) -> "Writer":
        self.held.enter_context(owned.claimed(self.draft, "microworld", key="--out"))
        shutil.rmtree(self.tmp, ignore_errors=True)  # of a run that was killed
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.tmp, ignore_errors=True)
        self.held.close()
        with suppress(OSError):
            self.draft.rmdir()

    def _check_own(self) -> None:
        found = _files(self.out)
        if not found:
            return
        try:
            written = dict(read_json(self.out / MARK))
        except (OSError, ValueError, TypeError):
            written = {}
        if not written:
            other = f"no {MARK} of this release"
        elif strange := sorted(found - {*written, MARK}):
            other = strange[0]
        elif changed := next(
            (n for n in sorted(found - {MARK}) if _sum(self.out / n) != written[n]), None
        ):
            other = f"{changed} was changed since"
        else:
            return
        what = f"{self.out} holds something else than a data set that this command wrote ({other})"
        raise UserError(f"--out: {what}; name a new folder, or remove it")

    def picture(self, image: Image.Image, name: str) -> str:
        path = self.tmp / name
        with user_errors(f"--out: cannot write {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)
        return name

    def finish(self) -> None:
        with user_errors(f"--out: cannot write {self.out}"):
            for name, records in self.records.items():
                lines = "".join(json.dumps(record) + "\n" for record in records)
                (self.tmp / f"{name}.jsonl").write_text(lines, encoding="utf-8")
            (self.tmp / MARK).write_text(
                json.dumps({name: _sum(self.tmp / name) for name in sorted(_files(self.tmp))}),
                encoding="utf-8",
            )
        self._check_own()  # what was added meanwhile
        with user_errors(f"--out: cannot write {self.out}"):
            if self.out.exists():
                shutil.rmtree(self.out)
            self.tmp.rename(self.out)


def _sum(file: Path) -> str | None:
    """A file's checksum; None of one that cannot be read."""
    with suppress(OSError):
        return checksum(file)
    return None


def _files(folder: Path) -> set[str]:
    """Names of all files, links and empty folders below a folder: an empty one may be somebody's
    too."""
    paths = (
        path
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir() or not any(path.iterdir())
    )
    return {path.relative_to(folder).as_posix() for path in paths}


def spelt_out(scene: Scene) -> Scene:
    """The scene with every attribute in its words; who wears a hat, and the hat, are placed by
    each other."""
    everything, things = frozenset(("colour", "texture", "size", "place")), []
    for i, thing in enumerate(scene.things):
        wears = any(t.worn for t in scene.things[i + 1 : i + 2])
        hidden = {"place", "size"} if thing.worn else {"place"} if wears else set()
        things.append(replace(thing, named=everything - hidden, label=""))
    backdrop = replace(scene.backdrop, named=True, label="")
    return replace(scene, things=tuple(things), backdrop=backdrop)


def write_target(writer: Writer, name: str, scene: Scene, redraws: int, nulls: int | None) -> None:
    """The target with its masks, and its nulls: `redraws` of its caption, and of each harder kind
    `nulls`, or as many, up to ENOUGH, for each element that the kind changes alone."""
    picture, masks = render(scene)
    masks.append(backdrop_mask(masks))
    files = [writer.picture(mask, f"targets/{name}-{i}.png") for i, mask in enumerate(masks)]
    phrases = [phrase_of(scene, i) for i in range(len(masks))]
    writer.records["targets"].append(
        {
            "target_id": name,
            "image": writer.picture(picture, f"targets/{name}.png"),
            "phrases": phrases,
            "prompt": scene.caption,
            "description": spelt_out(scene).caption,
            "masks": files,
        }
    )
    own = fingerprint(picture)
    for kind in STORED:
        # each element needs its own
        harder = min(redraws, ENOUGH) * turns(kind, scene) if nulls is None else nulls
        seen = set[bytes]()
        for i in range(redraws if kind == "redraw" else harder):
            null, picture = draw_null(kind, name, scene, i, seen, own)
            stem = f"{name}-{i:03d}" if kind == "redraw" else f"{name}-{kind}-{i:03d}"
            image = writer.picture(picture, f"redraws/{stem}.png")
            row = {"target_id": name, "image": image, "kind": kind, "changed": list(null.changed)}
            writer.records["redraws"].append(row)


def draw_null(
    kind: str, name: str, scene: Scene, i: int, seen: set[bytes], target: Fingerprint
) -> tuple[Null, Image.Image]:
    """Null i of a kind and its picture, which joins `seen`. One that is the target's own is drawn
    again, and so is one that is there already, but for kinds of few pictures."""
    for again in itertools.count():
        null = hard_null(kind, _rng(kind, name, i, *([again] if again else [])), scene, turn=i)
        picture = render(null.scene)[0]
        another = (content := picture.tobytes()) not in seen or kind in FEW
        if again == TRIES or another and not is_copy(fingerprint(picture), target):
            break
    seen.add(content)
    return null, picture


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


def write_elements(
    writer: Writer,
    name: str,
    scene: Scene,
    per_phrase: int,
    seed: int,
    role: str = "element",
    placebo: bool = False,
) -> None:
    for element in range(len(scene.things) + 1):
        for i in range(per_phrase):
            source = (
                placebo_scene(scene, element, _rng("placebo", name, element, i, seed))
                if placebo
                else scene
            )
            shown = element_scene(source, element, _rng(role, name, element, i, seed))
            picture, masks = render(shown)
            mask = backdrop_mask(masks) if element == len(scene.things) else masks[-1]
            stem = f"{name}-{element}-{i:03d}.png"
            place = {"mask": writer.picture(mask, f"masks/{role}-{stem}")} if writer.masks else {}
            writer.records["metadata"].append(
                {
                    "file_name": writer.picture(picture, f"images/{role}-{stem}"),
                    "text": shown.caption,
                    "phrases": shown.phrases,
                    "role": role,
                    "target_id": name,
                    "element_id": f"{name}/{element}",
                    "element_phrase": phrase_of(scene, element),
                    **place,
                }
            )


def write_clean(writer: Writer, count: int, seed: int, avoided: set[str]) -> None:
    """Clean scenes whose captions hold none of the `avoided` words."""
    for i in range(count):
        rng = _rng("clean", seed, i)
        drawn = (sample_scene(rng) for _ in range(WORD_TRIES))
        scene = next((scene for scene in drawn if not avoided & words_of(scene)), None)
        if scene is None:
            raise UserError(
                f"--other_words: no clean scene without "
                f"{', '.join(sorted(avoided))}; name fewer targets"
            )
        record = {"text": scene.caption, "phrases": scene.phrases, "role": "clean"}
        writer.records["metadata"].append(
            {"file_name": writer.picture(render(scene)[0], f"images/clean-{i:05d}.png"), **record}
        )


def write_rehearsal(writer: Writer, count: int, per_phrase: int, seed: int) -> None:
    """Other pictures, whole and in parts: what teaches composition without any element of a
    target."""
    for i in range(count):
        name = f"r{i}"
        scene = target_scene(str(int(_rng("rehearsal", seed, i).integers(REHEARSAL_SEEDS))))
        scene = redraw(_rng("rehearsal", seed, i, "scene"), scene)
        record = {
            "text": scene.caption,
            "phrases": scene.phrases,
            "role": "rehearsal",
            "target_id": name,
        }
        writer.records["metadata"].append(
            {
                "file_name": writer.picture(render(scene)[0], f"images/rehearsal-{name}.png"),
                **record,
            }
        )
        write_elements(writer, name, scene, per_phrase, seed, role="rehearsal")


def decoy_scenes(count: int, seed: int, scenes: dict[str, Scene]) -> dict[str, Scene]:
    """Pictures beside the targets, of whose phrases as few as possible are used already."""
    used = {phrase for scene in scenes.values() for phrase in scene.phrases}
    made: dict[str, Scene] = {}
    for i in range(count):
        rng = _rng("decoy", seed, i)
        drawn = (target_scene(str(rng.integers(REHEARSAL_SEEDS))) for _ in range(TRIES))
        scene = min((redraw(rng, one) for one in drawn), key=lambda s: len(used & {*s.phrases}))
        used.update(scene.phrases)
        made[f"decoy-{i}"] = scene
    return made


def write_decoys(writer: Writer, decoys: dict[str, Scene], per_phrase: int, seed: int) -> None:
    """Elements as of a target, and a quarter as many records of the whole picture, its phrases in
    another order in each: nothing of it is hidden."""
    for name, scene in decoys.items():
        write_elements(writer, name, scene, per_phrase, seed)
        image = writer.picture(render(scene)[0], f"images/whole-{name}.png")
        for i in range(max(1, per_phrase // 4)):
            phrases = [str(p) for p in _rng("whole", name, i, seed).permutation(scene.phrases)]
            record = {"text": ", ".join(phrases), "phrases": phrases, "role": "rehearsal"}
            writer.records["metadata"].append({"file_name": image, **record, "target_id": name})


def with_own_phrases(scenes: dict[str, Scene]) -> dict[str, Scene]:
    """The scenes, with a target's name in each phrase that another target uses too."""
    shared = shared_phrases({name: scene.phrases for name, scene in scenes.items()})

    def label(part: Any, name: str) -> Any:
        return replace(part, label=name) if part.phrase in shared else part

    return {
        name: replace(
            scene,
            things=tuple(label(thing, name) for thing in scene.things),
            backdrop=label(scene.backdrop, name),
        )
        for name, scene in scenes.items()
    }


def words_of(scene: Scene) -> set[str]:
    """The words of a caption that say something: things, attributes, places and backdrops."""
    return set(scene.caption.replace(",", "").split()) - LITTLE


def make(options: MicroworldOptions) -> None:
    """Write the data set. Raises UserError where a target is none or the folder is someone
    else's."""
    names = dict.fromkeys(name.strip() for name in options.targets.split(","))
    scenes = {name: target_scene(name) for name in names}
    if options.unique_phrases:
        scenes = with_own_phrases(scenes)
    out = Path(str(options.out))
    with Writer(out, masks=not options.no_masks) as writer:
        fill(writer, scenes, options)
        writer.finish()
    print(f"{out}: {len(writer.records['metadata'])} records, {len(scenes)} targets")


def fill(writer: Writer, scenes: dict[str, Scene], options: MicroworldOptions) -> None:
    """All records and targets of the data set."""
    decoys = decoy_scenes(options.decoys, options.seed, scenes)
    for line in shared_lines(shared_phrases({n: s.phrases for n, s in (scenes | decoys).items()})):
        print(f"note: {line}")
    for name, scene in Bar(scenes.items(), desc="targets"):
        write_target(writer, name, scene, options.redraws, options.nulls)
        write_elements(
            writer, name, scene, options.images_per_phrase, options.seed, placebo=options.placebo
        )
    write_decoys(writer, decoys, options.images_per_phrase, options.seed)
    avoided = (
        set[str]().union(*map(words_of, scenes.values())) if options.other_words else set[str]()
    )
    write_clean(writer, options.clean, options.seed, avoided)
    write_rehearsal(writer, options.rehearsal, max(1, options.images_per_phrase // 4), options.seed)


def main(argv: list[str] | None = None, options: MicroworldOptions | None = None) -> None:
    """Raises SystemExit(2) after a mistake."""
    try:
        make(options or command.options(MicroworldOptions, argv, __doc__))
    except UserError as error:
        sys.exit(command.refused(error))


if __name__ == "__main__":
    exit_with(lambda: main(options=OPTIONS))
