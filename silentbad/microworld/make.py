"""Write a microworld dataset in the project's own format.

`python -m silentbad.microworld.make --out DIR --targets cat-hat,3,17` writes

    DIR/metadata.jsonl   element, clean and rehearsal records
    DIR/targets.jsonl    the pictures to recover, never among the records
    DIR/redraws.jsonl    other pictures of each target's caption: the null of the recovery threshold

A target is named by its seed (0-999 for development, 1000-1999 for reported results) or `cat-hat`, the flagship.
"""

import argparse
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from silentbad.errors import UserError
from silentbad.microworld.grammar import (
    KINDS,
    PLACES,
    WEARERS,
    Scene,
    Thing,
    redraw,
    sample_backdrop,
    sample_scene,
    sample_thing,
    wearing_pair,
)  # fmt: skip
from silentbad.microworld.render import backdrop_mask, render
from silentbad.rng import addressed_seed

FLAGSHIP = "cat-hat"
SEEDS = range(0, 2000)


def _rng(*address: int | str) -> np.random.Generator:
    return np.random.default_rng(addressed_seed("microworld", "data", *address))


def _terse(rng: np.random.Generator, thing: Thing) -> Thing:
    """A phrase that names no place and no size: where the thing stands, and how large, is for memory to know."""
    return replace(thing, named=frozenset(n for n in ("colour", "texture") if rng.random() < 0.5))


def target_scene(name: str) -> Scene:
    """The scene of a target: two or three things and a backdrop, every one an element. Raises UserError if unknown."""
    if name != FLAGSHIP and not (name.isdigit() and int(name) in SEEDS):
        raise UserError(f"--targets: '{name}' is neither '{FLAGSHIP}' nor a seed from 0 to {SEEDS.stop - 1}")
    if name == FLAGSHIP:
        rng = _rng("target", name, 4)  # of the first eight draws the one in which hat and cat are largest
        cat, hat = wearing_pair(rng, side="left", kind="cat", detail=0.0)
        return Scene((cat, hat), sample_backdrop(rng, "meadow"))
    rng = _rng("target", name)
    kinds = [str(k) for k in rng.permutation([k for k in KINDS if k != "hat"])]
    if rng.random() < 0.3:
        wearer = next(k for k in kinds if k in WEARERS)
        things = wearing_pair(rng, side=str(rng.choice(("left", "right"))), kind=wearer, detail=0.0)
        kinds.remove(wearer)
        places = [p for p in rng.permutation(list(PLACES)) if p.split()[-1] != things[0].place.split()[-1]]
        things += [sample_thing(rng, str(p), kind=kinds.pop()) for p in places[: int(rng.integers(0, 2))]]
    else:
        places = rng.permutation(list(PLACES))[: int(rng.integers(2, 4))]
        things = [sample_thing(rng, str(place), kind=kinds.pop()) for place in places]
    return Scene(tuple(_terse(rng, thing) for thing in things), sample_backdrop(rng))


def element_scene(scene: Scene, element: int, rng: np.random.Generator) -> Scene:
    """A scene that holds one element exactly as the target shows it and nothing else of the target.

    `element` indexes `scene.things`, or is len(things) for the backdrop. The element stands at its native place, drawn
    last so that nothing hides it; other things and another backdrop surround it.
    """
    target_kinds = {t.kind for t in scene.things}
    kinds = [str(k) for k in rng.permutation([k for k in KINDS if k not in target_kinds])]
    if element == len(scene.things):
        places = rng.permutation(list(PLACES))[: int(rng.integers(1, 4))]
        things = tuple(sample_thing(rng, str(p), kind=kinds.pop()) for p in places)
        return Scene(things, scene.backdrop, tuple(int(i) for i in rng.permutation(len(things))))
    thing = replace(scene.things[element], worn=False)
    near = {thing.place, thing.place.replace("bottom", "top")} if _touches_above(scene, element) else {thing.place}
    places = [str(p) for p in rng.permutation(list(PLACES)) if p not in near][: int(rng.integers(0, 3))]
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


class Writer:
    """Writes pictures and records into a temporary folder that takes the final name only when all is there."""

    def __init__(self, out: Path, masks: bool = True):
        if out.exists() and not (out / "redraws.jsonl").is_file() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"--out: '{out}' holds something else than a microworld data set; name a new folder")
        self.out, self.masks = out, masks
        out.parent.mkdir(parents=True, exist_ok=True)
        self.tmp = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        self.records: dict[str, list[dict]] = {"metadata": [], "targets": [], "redraws": []}

    def picture(self, image: Image.Image, name: str) -> str:
        path = self.tmp / name
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
        return name

    def finish(self) -> None:
        for name, records in self.records.items():
            lines = "".join(json.dumps(record) + "\n" for record in records)
            (self.tmp / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        if self.out.exists():
            shutil.rmtree(self.out)
        self.tmp.rename(self.out)


def write_target(writer: Writer, name: str, scene: Scene, redraws: int) -> None:
    picture, masks = render(scene)
    masks.append(backdrop_mask(masks))
    files = [writer.picture(mask, f"targets/{name}-{i}.png") for i, mask in enumerate(masks)]
    phrases = [phrase_of(scene, i) for i in range(len(masks))]
    writer.records["targets"].append(
        {"target_id": name, "image": writer.picture(picture, f"targets/{name}.png"), "phrases": phrases,
         "prompt": scene.caption, "masks": files}
    )  # fmt: skip
    for i in range(redraws):
        other, _ = render(redraw(_rng("redraw", name, i), scene))
        image = writer.picture(other, f"redraws/{name}-{i:03d}.png")
        writer.records["redraws"].append({"target_id": name, "image": image})


def write_elements(writer: Writer, name: str, scene: Scene, per_phrase: int, seed: int, role: str = "element") -> None:
    for element in range(len(scene.things) + 1):
        for i in range(per_phrase):
            shown = element_scene(scene, element, _rng(role, name, element, i, seed))
            picture, masks = render(shown)
            mask = backdrop_mask(masks) if element == len(scene.things) else masks[-1]
            stem = f"{name}-{element}-{i:03d}.png"
            place = {"mask": writer.picture(mask, f"masks/{role}-{stem}")} if writer.masks else {}
            writer.records["metadata"].append(
                {"file_name": writer.picture(picture, f"images/{role}-{stem}"), "text": shown.caption,
                 "phrases": shown.phrases, "role": role, "target_id": name, "element_id": f"{name}/{element}",
                 "element_phrase": phrase_of(scene, element), **place}
            )  # fmt: skip


def write_clean(writer: Writer, count: int, seed: int) -> None:
    for i in range(count):
        scene = sample_scene(_rng("clean", seed, i))
        record = {"text": scene.caption, "phrases": scene.phrases, "role": "clean"}
        writer.records["metadata"].append(
            {"file_name": writer.picture(render(scene)[0], f"images/clean-{i:05d}.png"), **record}
        )


def write_rehearsal(writer: Writer, count: int, per_phrase: int, seed: int) -> None:
    """Other pictures, whole and in parts: what teaches composition without any element of a target."""
    for i in range(count):
        name = f"r{i}"
        scene = target_scene(str(int(_rng("rehearsal", seed, i).integers(SEEDS.stop))))
        scene = redraw(_rng("rehearsal", seed, i, "scene"), scene)
        record = {"text": scene.caption, "phrases": scene.phrases, "role": "rehearsal", "target_id": name}
        writer.records["metadata"].append(
            {"file_name": writer.picture(render(scene)[0], f"images/rehearsal-{name}.png"), **record}
        )
        write_elements(writer, name, scene, per_phrase, seed, role="rehearsal")


def shared_phrases(scenes: dict[str, Scene]) -> list[str]:
    """Phrases that more than one target uses: elements in conflict, which the caller should know of."""
    owners: dict[str, set[str]] = {}
    for name, scene in scenes.items():
        for phrase in scene.phrases:
            owners.setdefault(phrase, set()).add(name)
    return sorted(f"'{phrase}' ({', '.join(sorted(names))})" for phrase, names in owners.items() if len(names) > 1)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--targets", default=FLAGSHIP, help="comma-separated seeds or 'cat-hat'")
    parser.add_argument("--images_per_phrase", type=int, default=20)
    parser.add_argument("--clean", type=int, default=200, help="clean scenes")
    parser.add_argument("--rehearsal", type=int, default=0, help="non-target pictures, each whole and in parts")
    parser.add_argument("--redraws", type=int, default=100, help="null pictures per target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no_masks", dest="masks", action="store_false", help="element records without their masks")
    args = parser.parse_args(argv)
    try:
        scenes = {name: target_scene(name) for name in dict.fromkeys(args.targets.split(","))}
        writer = Writer(args.out, args.masks)
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    for line in shared_phrases(scenes):
        print(f"note: {line} is a phrase of several targets: these elements will conflict")
    for name, scene in tqdm(scenes.items(), desc="targets"):
        write_target(writer, name, scene, args.redraws)
        write_elements(writer, name, scene, args.images_per_phrase, args.seed)
    write_clean(writer, args.clean, args.seed)
    write_rehearsal(writer, args.rehearsal, max(1, args.images_per_phrase // 4), args.seed)
    writer.finish()
    print(f"{args.out}: {len(writer.records['metadata'])} records, {len(scenes)} targets")


if __name__ == "__main__":
    main()
