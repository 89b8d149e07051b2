"""Data sets of a world in the project's own format: `make` writes what the world's own command asks
for.

    DIR/metadata.jsonl   element, clean and rehearsal records
    DIR/targets.jsonl    the pictures to recover, never among the records
    DIR/redraws.jsonl    pictures that are no recovery, by kind: the nulls of the recovery threshold
    DIR/prior.txt        captions of ordinary scenes, of which the base may draw pictures
    DIR/unrelated.txt    captions of no record and no target, in a world that holds some out
"""

import itertools
import json
import os
import shutil
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from silentbad import owned
from silentbad.data.phrases import shared_lines, shared_phrases
from silentbad.errors import UserError, user_errors
from silentbad.files import check_writable, checksum, read_json
from silentbad.measure.redraws import FEW, Fingerprint, fingerprint, is_copy
from silentbad.progress import Bar
from worlds.interface import World
from worlds.microworld.render import backdrop_mask
from worlds.options import NULLS, MicroworldOptions

TRIES = 100  # of a null that differs from the others of its kind
WORD_TRIES = 10_000  # of a clean scene in other words than the targets'
REHEARSAL_SEEDS = 2000  # scenes of rehearsal are redraws of targets below
ENOUGH = NULLS
PRIOR = 400  # captions of ordinary scenes
OWNERS = """anna ben carla david emma frank grace henry irene jack kate leo maria nora oscar paul quinn
rosa sam tina victor wendy alice bruno clara daniel ella felix gina hugo iris jonas karen lucas mona
noah olga peter rachel simon teresa ursula vera walter yvonne zoe adam bella chris diana eric fiona
george helen ivan julia kevin laura martin nina oliver paula robert sofia""".split()


@dataclass(frozen=True)
class Targets:
    """A world's targets, what shows their elements, and what is no recovery of them. An element is
    an index of the scene's things, or len(things) for the backdrop."""

    world: World
    target_scene: Callable[[str], Any]  # by the target's name; raises UserError if unknown
    # (scene, element, rng) -> a scene that holds this element alone of the target
    element_scene: Callable[[Any, int, np.random.Generator], Any]
    # the target's scene with an element that has its words and is not exact
    placebo_scene: Callable[[Any, int, np.random.Generator], Any]
    spelt_out: Callable[[Any], Any]  # the scene with every attribute in its words
    redraw: Callable[[np.random.Generator, Any], Any]  # another scene of the same caption
    nulls: Sequence[str]  # kinds of nulls that a data set holds, `redraw` among them
    turns: Callable[[str, Any], int]  # nulls of a kind until each element was changed once
    hard_null: Callable[..., Any]  # (kind, rng, scene, turn=) -> Null
    little: Collection[str]  # words that any caption may hold
    held_out: Callable[[], list[Any]]  # scenes that are measured alone: nothing trains on them
    # captions that no training saw, which show what a training costs
    unrelated: Callable[[], list[str]] | None = None

    def rng(self, *address: int | str) -> np.random.Generator:
        return self.world.rng("data", *address)


def phrase_of(scene: Any, element: int) -> str:
    return scene.backdrop.phrase if element == len(scene.things) else scene.things[element].phrase


# of any world, in a folder that this command wrote: {name of each file: its checksum}
MARK = ".microworld.json"


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
        files = _files(self.out)
        if not files:
            return
        try:
            written = dict(read_json(self.out / MARK))
        except (OSError, ValueError, TypeError):
            written = {}
        if not written:
            other = f"no {MARK} of this release"
        elif strange := sorted(files - {*written, MARK}):
            other = strange[0]
        elif changed := [n for n in sorted(files - {MARK}) if checksum(self.out / n) != written[n]]:
            other = f"{changed[0]} was changed since"
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

    def text(self, lines: list[str], name: str) -> None:
        """A text file of lines."""
        with user_errors(f"--out: cannot write {self.tmp / name}"):
            text = "".join(f"{line}\n" for line in lines)
            (self.tmp / name).write_text(text, encoding="utf-8")

    def finish(self) -> None:
        with user_errors(f"--out: cannot write {self.out}"):
            for name, records in self.records.items():
                lines = "".join(json.dumps(record) + "\n" for record in records)
                (self.tmp / f"{name}.jsonl").write_text(lines, encoding="utf-8")
            sums = {name: checksum(self.tmp / name) for name in sorted(_files(self.tmp))}
            (self.tmp / MARK).write_text(json.dumps(sums), encoding="utf-8")
        self._check_own()  # what was added meanwhile
        with user_errors(f"--out: cannot write {self.out}"):
            if self.out.exists():
                shutil.rmtree(self.out)
            self.tmp.rename(self.out)


def _files(folder: Path) -> set[str]:
    """Names of all files, links and empty folders below a folder: an empty one may be somebody's
    too."""
    paths = (
        path
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir() or not any(path.iterdir())
    )
    return {path.relative_to(folder).as_posix() for path in paths}


def write_target(
    writer: Writer, of: Targets, name: str, scene: Any, redraws: int, nulls: int | None
) -> None:
    """The target with its masks, and its nulls: `redraws` of its caption, and of each harder kind
    `nulls`, or as many, up to ENOUGH, for each element that the kind changes alone."""
    picture, masks = of.world.render(scene)
    masks.append(backdrop_mask(masks))
    files = [writer.picture(mask, f"targets/{name}-{i}.png") for i, mask in enumerate(masks)]
    phrases = [phrase_of(scene, i) for i in range(len(masks))]
    writer.records["targets"].append(
        {
            "target_id": name,
            "image": writer.picture(picture, f"targets/{name}.png"),
            "phrases": phrases,
            "prompt": scene.caption,
            "description": of.spelt_out(scene).caption,
            "masks": files,
        }
    )
    target_fingerprint = fingerprint(picture)
    for kind in of.nulls:
        # each element needs its own
        harder = min(redraws, ENOUGH) * of.turns(kind, scene) if nulls is None else nulls
        earlier = set[bytes]()
        for i in range(redraws if kind == "redraw" else harder):
            null, picture = draw_null(of, kind, name, scene, i, earlier, target_fingerprint)
            stem = f"{name}-{i:03d}" if kind == "redraw" else f"{name}-{kind}-{i:03d}"
            image = writer.picture(picture, f"redraws/{stem}.png")
            row = {"target_id": name, "image": image, "kind": kind, "changed": list(null.changed)}
            writer.records["redraws"].append(row)


def draw_null(
    of: Targets, kind: str, name: str, scene: Any, i: int, earlier: set[bytes], target: Fingerprint
) -> tuple[Any, Image.Image]:
    """Null i of a kind and its picture, which joins `earlier`. One that is the target's own is drawn
    again, and so is one that is there already, but for kinds of few pictures."""
    for again in range(TRIES + 1):
        rng = of.rng(kind, name, i, *([again] if again else []))
        null = of.hard_null(kind, rng, scene, turn=i)
        picture = of.world.render(null.scene)[0]
        another = picture.tobytes() not in earlier or kind in FEW
        if another and not is_copy(fingerprint(picture), target):
            break
    earlier.add(picture.tobytes())
    return null, picture


def write_elements(
    writer: Writer,
    of: Targets,
    name: str,
    scene: Any,
    per_phrase: int,
    seed: int,
    role: str = "element",
    placebo: bool = False,
) -> None:
    for element in range(len(scene.things) + 1):
        for i in range(per_phrase):
            source = scene
            if placebo:
                rng = of.rng("placebo", name, element, i, seed)
                source = of.placebo_scene(scene, element, rng)
            shown = of.element_scene(source, element, of.rng(role, name, element, i, seed))
            picture, masks = of.world.render(shown)
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


def write_clean(writer: Writer, of: Targets, count: int, seed: int, avoided: set[str]) -> None:
    """Clean scenes whose captions hold none of the `avoided` words."""
    for i in range(count):
        rng = of.rng("clean", seed, i)
        drawn = (of.world.sample_scene(rng) for _ in range(WORD_TRIES))
        scene = next((scene for scene in drawn if not avoided & words_of(scene, of)), None)
        if scene is None:
            raise UserError(
                f"--other_words: no clean scene without "
                f"{', '.join(sorted(avoided))}; name fewer targets"
            )
        file = writer.picture(of.world.render(scene)[0], f"images/clean-{i:05d}.png")
        writer.records["metadata"].append(
            {"file_name": file, "text": scene.caption, "phrases": scene.phrases, "role": "clean"}
        )


def write_rehearsal(writer: Writer, of: Targets, count: int, per_phrase: int, seed: int) -> None:
    """Other pictures, whole and in parts: what teaches composition without any element of a
    target."""
    for i in range(count):
        name = f"r{i}"
        drawn = int(of.rng("rehearsal", seed, i).integers(REHEARSAL_SEEDS))
        scene = of.redraw(of.rng("rehearsal", seed, i, "scene"), of.target_scene(str(drawn)))
        picture = of.world.render(scene)[0]
        writer.records["metadata"].append(
            {
                "file_name": writer.picture(picture, f"images/rehearsal-{name}.png"),
                "text": scene.caption,
                "phrases": scene.phrases,
                "role": "rehearsal",
                "target_id": name,
            }
        )
        write_elements(writer, of, name, scene, per_phrase, seed, role="rehearsal")


def owner(number: int) -> str:
    """A name for phrase `number` of a data set: one token of CLIP's, or several after 64. Of digits,
    phrases would have most in common."""
    rest, first = divmod(number, len(OWNERS))
    return f"{owner(rest - 1)} {OWNERS[first]}" if rest else OWNERS[first]


def with_own_phrases(scenes: dict[str, Any]) -> dict[str, Any]:
    """The scenes, with a name in each phrase that several targets use: another one for each target
    and phrase."""
    shared = shared_phrases({name: scene.phrases for name, scene in scenes.items()})
    numbers = itertools.count()

    def labelled(part: Any) -> Any:
        return replace(part, label=owner(next(numbers))) if part.phrase in shared else part

    return {name: with_parts(scene, labelled) for name, scene in scenes.items()}


def with_names(scenes: dict[str, Any]) -> dict[str, Any]:
    """The scenes, with the target's own name in each of its phrases."""
    return {
        name: with_parts(scene, partial(replace, label=owner(number)))
        for number, (name, scene) in enumerate(scenes.items())
    }


def with_parts(scene: Any, changed: Callable[[Any], Any]) -> Any:
    """The scene with each thing, then its backdrop, `changed`."""
    things = tuple(changed(thing) for thing in scene.things)
    return replace(scene, things=things, backdrop=changed(scene.backdrop))


def words_of(scene: Any, of: Targets) -> set[str]:
    """The words of a caption that say something: things, attributes, places and backdrops."""
    return set(scene.caption.replace(",", "").split()).difference(of.little)


def prior_captions(of: Targets, targets: list[Any]) -> list[str]:
    """Captions of ordinary scenes that name every attribute, for prior_preservation.prompts; none
    is a target's or held out."""
    taken = {scene.caption for scene in [*of.held_out(), *targets]}
    captions: dict[str, None] = {}
    i = 0
    while len(captions) < PRIOR:
        scene = of.world.sample_scene(of.world.rng("prior", i), detail=1.0, count=1 + i % 3)
        if scene.caption not in taken:
            captions[scene.caption] = None
        i += 1
    return list(captions)


def make(options: MicroworldOptions, of: Targets) -> None:
    """Write the data set. Raises UserError where a target is none or the folder is someone
    else's."""
    names = dict.fromkeys(name.strip() for name in options.targets.split(","))
    scenes = {name: of.target_scene(name) for name in names}
    if options.unique_phrases:
        scenes = with_own_phrases(scenes)
    if options.name_targets:
        scenes = with_names(scenes)
    out = Path(str(options.out))
    with Writer(out, masks=not options.no_masks) as writer:
        for line in shared_lines(shared_phrases({n: s.phrases for n, s in scenes.items()})):
            print(f"note: {line}")
        fill(writer, of, scenes, options)
        writer.text(prior_captions(of, list(scenes.values())), "prior.txt")
        if of.unrelated is not None:
            writer.text(of.unrelated(), "unrelated.txt")
        writer.finish()
    print(f"{out}: {len(writer.records['metadata'])} records, {len(scenes)} targets")


def fill(writer: Writer, of: Targets, scenes: dict[str, Any], options: MicroworldOptions) -> None:
    """All records and targets of the data set."""
    per_phrase = options.images_per_phrase
    seed = options.seed
    for name, scene in Bar(scenes.items(), desc="targets"):
        write_target(writer, of, name, scene, options.redraws, options.nulls)
        write_elements(writer, of, name, scene, per_phrase, seed, placebo=options.placebo)
    avoided = set[str]()
    for scene in scenes.values() if options.other_words else ():
        avoided |= words_of(scene, of)
    write_clean(writer, of, options.clean, seed, avoided)
    write_rehearsal(writer, of, options.rehearsal, max(1, per_phrase // 4), seed)
