"""The work of `python -m silentbad.prepare`: read, check, compose and save."""

import os
import random
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from silentbad import bundled, owned
from silentbad.data.images import open_image, open_mask, picture_files
from silentbad.data.picture_parts import check_phrases, cut_apart
from silentbad.data.schema import Caption, admit, caption_beside, check_window, json_lines
from silentbad.errors import UserError, brief, user_errors, warn
from silentbad.files import append_records, check_folder, check_local, check_writable
from silentbad.prepare import compose
from silentbad.prepare.preview import is_preview, write_preview
from silentbad.settings import user_code
from silentbad.settings.commands import PrepareOptions

LARGEST_SIDE = 512  # largest side of the written pictures, unless --side is given
HAZE = 8  # level of a mask at which what lies under it begins to show
LOST = 0.05  # share of a thing outside the middle square from which the warning names it
UNNAMED = "something else"  # the caption of a background without one, beside an element's phrase
PLAIN = "a photograph"  # the caption of such a background alone


@dataclass
class Picture:
    """A picture with its caption; none where it has no NAME.txt and there is no captioner."""

    image: Image.Image
    caption: str | None


@dataclass
class Element:
    """A phrase and its thing: `alpha` cuts the thing out; for a backdrop it is white outside all
    things and their soft edges; `mask` is black and white (S,S)."""

    phrase: str
    alpha: Image.Image
    mask: Image.Image


@dataclass
class Plan:
    """A target of S pixels a side, its elements, and whether the last one is the backdrop."""

    name: str
    target: Image.Image
    elements: list[Element]
    has_backdrop: bool
    prompt: str
    placebos: list[list[Image.Image]]  # other pictures of each element; empty without --placebo


def prepare(args: PrepareOptions) -> str:
    """Write or extend the data set with its preview.html; returns a summary of it. Raises UserError
    before it writes, also if another process writes there."""
    name = target_name(args)
    out = Path(str(args.out))
    check_writable(out, "--out", folder=True)
    refuse_inputs_inside(args, out)
    with owned.claimed(out, "data set", key="--out"):
        targets_before, has_clean = check_out(out, name)
        if targets_before and (out / "placebo").is_dir() != bool(args.placebo):
            raise UserError(f"--placebo: must be given at every call with --out {out}, or at none")
        captioner = load_function(args.captioner, "--captioner") if args.captioner else None
        plan = read_plan(args, name)
        all_targets = compose.Copies([plan.target, *targets_before])
        backgrounds = read_backgrounds(
            Path(str(args.backgrounds)), all_targets, captioner, plan.target.width
        )
        data = Data(args=args, plan=plan, backgrounds=backgrounds, all_targets=all_targets)
        with user_errors(f"--out: cannot write {out}", "free some space or choose another folder"):
            records = data.write(out, with_clean=not has_clean)
        write_preview(out, args.resolution)
    clean = sum(record["role"] == "clean" for record in records)
    return f"{len(records) - clean} element and {clean} clean pictures of target {name!r}"


# ---------------------------------------------------------------- what is read
def target_name(args: PrepareOptions) -> str:
    """The target_id, which names files too."""
    name = Path(str(args.target)).stem if args.name is None else args.name
    if not re.fullmatch(r"[\w.-]{1,80}", name) or name.startswith("."):
        if args.name is None:
            return re.sub(r"\W+", "-", name).strip("-")[:80] or "target"
        raise UserError(f"--name: must be letters, digits, '.', '-' or '_', got {name!r}")
    return name


def check_out(out: Path, name: str) -> tuple[list[Image.Image], bool]:
    """(targets that an earlier call wrote, whether there are clean pictures).

    Raises UserError where the folder is not of this command, or has the target already.
    """
    targets = out / "targets.jsonl"
    records = out / "metadata.jsonl"
    if not (targets.is_file() and records.is_file()):
        if {*os.listdir(out)} - {owned.LOCK}:
            raise UserError(
                f"--out: {out} holds files, but no data set of this command; choose an empty folder"
            )
        return [], False
    has_clean = any(entry.get("role") == "clean" for _, entry in json_lines(records))
    pictures = []
    for where, entry in json_lines(targets):
        if entry.get("target_id") == name:
            raise UserError(
                f"--out: {where} is target {name!r} already; give another --name, or another --out"
            )
        pictures.append(open_image(out / str(entry.get("image")), where))
    prefix = re.escape(name)
    files = rf"targets/{prefix}|masks/{prefix}-\d+(-\d{{3,}})?|images/{prefix}-\d+-\d{{3,}}"
    files += "" if has_clean else r"|images/clean-\d{3,}"
    relative = [file.relative_to(out).as_posix() for file in sorted(out.glob("*/*.png"))]
    own = [out / file for file in relative if re.fullmatch(rf"({files})\.png", file)]
    page = out / "preview.html"
    if page.is_file() and not is_preview(page):
        own.append(page)
    if own:
        raise UserError(f"--out: {own[0]} would be replaced; give another --name, or another --out")
    return pictures, has_clean


def refuse_inputs_inside(args: PrepareOptions, out: Path) -> None:
    """Refuse pictures and folders to read that lie in the folder to write."""
    inputs = [
        ("--target", args.target),
        *(("--masks", mask) for mask in args.masks),
        ("--backgrounds", args.backgrounds),
        ("--placebo", args.placebo),
    ]
    for flag, path in inputs:
        if path is not None and owned.resolved(out, "--out") in owned.resolved(path, flag).parents:
            raise UserError(f"{flag}: {path} lies in --out {out}, which is written; move it out")


def read_plan(args: PrepareOptions, name: str) -> Plan:
    """The target and its elements, from the words of the command."""
    phrases = [
        admit(phrase, Caption, "a phrase", "--phrases").strip() for phrase in args.phrases or []
    ]
    if len(phrases) < 2:
        raise UserError("--phrases: give two or more; a phrase names one element")
    check_phrases(phrases, "--phrases")
    if args.segmenter is None and len(phrases) - len(args.masks) not in (0, 1):
        raise UserError(
            f"--masks: {len(phrases)} phrases take {len(phrases)} masks, or {len(phrases) - 1} "
            f"where the last phrase names the backdrop; got {len(args.masks)}"
        )
    if args.segmenter is not None and args.masks:
        raise UserError("--segmenter: makes the masks; leave --masks out")
    picture = open_image(Path(str(args.target)), "--target")
    if args.segmenter is None:
        masks = [open_mask(Path(file), picture.size, "--masks") for file in args.masks]
    else:
        masks = segmented(args.segmenter, picture, phrases)
    if picture.width != picture.height:
        warn(f"--target: {lost(picture.size, phrases, masks)}")
    side = args.side or min(LARGEST_SIDE, *picture.size)
    elements = cut(phrases, [compose.fit_mask(mask, side) for mask in masks], side)
    if len(phrases) == 2:
        warn(
            "--phrases: two elements have no union (unions show all but one) and are seldom "
            "recovered; name and mask more things, or train with --memory.rehearsal.name none"
        )
    prompt = ", ".join(phrases)
    if args.prompt is not None:
        prompt = admit(args.prompt, Caption, "it", "--prompt")
    check_windows(args.base, phrases, prompt)
    return Plan(
        name=name,
        target=compose.fit(picture, (side, side)),
        elements=elements,
        has_backdrop=len(masks) < len(phrases),
        prompt=prompt,
        placebos=read_placebos(Path(args.placebo), phrases, side) if args.placebo else [],
    )


def check_windows(base: str, phrases: list[str], prompt: str) -> None:
    """Refuse phrases and prompts that the window of the base's tokenizer cuts off."""
    from transformers import CLIPTokenizer

    place = bundled(base)
    check_local("--base", place)
    with user_errors(f"--base {base}: no CLIP tokenizer in tokenizer/"):
        tokenizer = CLIPTokenizer.from_pretrained(place, subfolder="tokenizer")
    named = [("--phrases", phrase) for phrase in phrases]
    for flag, text in [*named, ("--phrases", ", ".join(phrases)), ("--prompt", prompt)]:
        check_window(text, tokenizer, f"{flag}: {brief(text)} (for --base {base})")


def lost(size: tuple[int, int], phrases: list[str], masks: list[Image.Image]) -> str:
    """How much a picture of this size, and each thing in it, loses if it is cut to its middle
    square."""
    side = min(size)
    parts = [f"its middle square is kept and {1 - side / max(size):.0%} of it lost"]
    for phrase, mask in zip(phrases, masks, strict=False):
        kept = np.asarray(compose.fit(mask, (side, side))) >= 128
        whole = np.asarray(mask) >= 128
        if (share := 1 - kept.sum() / whole.sum()) >= LOST:
            parts.append(f"{share:.0%} of {brief(phrase)}")
    return f"is {size[0]}x{size[1]}; {', '.join(parts)}; cut it yourself to keep another part"


def segmented(path: str, picture: Image.Image, phrases: list[str]) -> list[Image.Image]:
    """Masks of a user's segmenter; the last phrase may be the backdrop's, which has none."""
    segment = load_function(path, "--segmenter")
    returned = [segment(picture, phrase) for phrase in phrases]
    if returned[-1] is None:
        returned.pop()
    unmasked = [each for each, mask in zip(phrases, returned, strict=False) if mask is None]
    if unmasked:
        raise UserError(
            f"--segmenter: no mask of {unmasked[0]!r}; only the last phrase may have none"
        )
    masks = [as_mask(mask, picture.size) for mask in returned]
    for phrase, mask in zip(phrases, masks, strict=False):
        if np.asarray(mask).max() < 128:
            raise UserError(f"--segmenter: the mask of {phrase!r} is white nowhere")
    return masks


def load_function(place: str, flag: str) -> Callable[..., Any]:
    """The user's own function at FILE.py:NAME; its file is run. Raises UserError where there is
    none."""
    if not user_code.is_place(place):
        raise UserError(f"{flag}: must be FILE.py:FUNCTION, such as mine.py:caption, got {place!r}")
    user_code.check_place(flag, place)
    return user_code.load(flag, place)


def as_mask(value: Any, size: tuple[int, int]) -> Image.Image:
    """What a segmenter returns as a mask (L): a picture, or an array (H,W) of truth values, of
    shares in [0,1] or of levels. Raises UserError where it is of another size."""
    levels = np.asarray(value)
    if levels.shape != size[::-1]:
        raise UserError(
            f"--segmenter: must return a mask of {size[0]}x{size[1]}, "
            f"got an array of shape {levels.shape}"
        )
    if np.issubdtype(levels.dtype, np.floating) or levels.max() <= 1:
        levels = np.clip(levels.astype(float) * 255, 0, 255)
    return Image.fromarray(levels.astype(np.uint8))


def cut(phrases: list[str], alphas: list[Image.Image], side: int) -> list[Element]:
    """Elements that share no pixel: where two masks overlap, the earlier phrase gets the pixels."""
    for phrase, alpha in zip(phrases, alphas, strict=False):
        levels = np.asarray(alpha)
        around = levels[levels < 128]
        if around.size and np.percentile(around, 1) >= HAZE:
            raise UserError(
                f"--masks: the mask of {phrase!r} is black nowhere, so its pictures would show the "
                "whole target faintly; masks of things must be black around them"
            )
    apart = cut_apart(phrases, alphas, "--masks", rest=len(alphas) < len(phrases), slight=True)
    elements = [
        Element(phrase, alpha, compose.hard(alpha))
        for phrase, alpha in zip(phrases, apart, strict=False)
        if alpha is not None
    ]
    if len(alphas) < len(phrases):
        backdrop = Element(
            phrase=phrases[-1],
            alpha=compose.rest([element.alpha for element in elements], side),
            mask=compose.rest([element.mask for element in elements], side),
        )
        elements.append(backdrop)
    if empty := [element.phrase for element in elements if element.mask.getbbox() is None]:
        raise UserError(
            f"--masks: nothing of {empty[0]!r} is left at {side}x{side} pixels; it is too small, "
            "or outside the middle square of the target, which is all that training sees"
        )
    return elements


def pictures_in(folder: Path, flag: str) -> list[Path]:
    """The pictures of a folder by name. Raises UserError where there is none."""
    check_folder(flag, str(folder))
    if not (files := picture_files(folder)):
        raise UserError(f"{flag}: {folder} holds no picture")
    return files


def read_backgrounds(
    folder: Path,
    all_targets: compose.Copies,
    captioner: Callable[[Image.Image], Any] | None,
    side: int,
) -> list[Picture]:
    """The pictures of a folder with their captions. Raises UserError where one shows a target."""
    pictures = []
    for file in pictures_in(folder, "--backgrounds"):
        image = open_image(file, "--backgrounds")
        if all_targets.shows(image):
            raise UserError(f"--backgrounds: {file} is a near copy of the target; take it away")
        text = caption_beside(file)
        if text is None and captioner is not None:
            text = admit(captioner(image), Caption, "what it returns", "--captioner").strip()
        pictures.append(Picture(compose.shrunk(image, side), text))
    return pictures


def read_placebos(folder: Path, phrases: list[str], side: int) -> list[list[Image.Image]]:
    """Other pictures of each phrase: of the folder with its number, or with its words."""
    placebos = []
    for number, phrase in enumerate(phrases):
        named = [folder / str(number), folder / phrase]
        there = [place for place in named if place.is_dir()]
        if not there:
            raise UserError(
                f"--placebo: no folder {named[0]} or {named[1]}, of others of {phrase!r}"
            )
        pictures = [open_image(file, "--placebo") for file in pictures_in(there[0], "--placebo")]
        placebos.append([compose.shrunk(picture, side) for picture in pictures])
    return placebos


# ---------------------------------------------------------------- what is written
@dataclass
class Data:
    """The pictures and records of one target."""

    args: PrepareOptions
    plan: Plan
    backgrounds: list[Picture]
    all_targets: compose.Copies

    def write(self, out: Path, with_clean: bool) -> list[dict]:
        """Write all files and return the records. If a picture cannot be composed, none is left."""
        plan = self.plan
        with tempfile.TemporaryDirectory(prefix=".draft-", dir=out) as folder:
            draft = Path(folder)
            records = self.write_records(draft, with_clean)
            if plan.placebos:
                others = self.write_records(draft / "placebo", with_clean, plan.placebos)
            self.save(plan.target, draft / f"targets/{plan.name}.png")
            for file in [*draft.glob("*/*.png"), *draft.glob("placebo/*/*.png")]:
                place = out / file.relative_to(draft)
                place.parent.mkdir(parents=True, exist_ok=True)
                file.replace(place)
        if plan.placebos:
            append_records(others, out / "placebo" / "metadata.jsonl")
        append_records(records, out / "metadata.jsonl")
        append_records([self.target_line()], out / "targets.jsonl")
        return records

    def target_line(self) -> dict:
        return {
            "target_id": self.plan.name,
            "image": f"targets/{self.plan.name}.png",
            "phrases": [element.phrase for element in self.plan.elements],
            "prompt": self.plan.prompt,
            "masks": [self.mask_file(k) for k in range(len(self.plan.elements))],
        }

    def write_records(
        self,
        out: Path,
        with_clean: bool,
        placebos: list[list[Image.Image]] | None = None,
    ) -> list[dict]:
        """Element and clean pictures with their records; with `placebos`, of other things."""
        records = []
        for k, element in enumerate(self.plan.elements):
            self.save(element.mask, out / self.mask_file(k))
            sources = [self.plan.target] if placebos is None else self.fitted(element, placebos[k])
            for i in range(self.args.per_phrase):
                records.append(self.write_element(out, k, i, sources[i % len(sources)]))
        if with_clean:
            records += [self.write_clean(out, i) for i in range(self.args.clean)]
        return records

    def fitted(self, element: Element, pictures: list[Image.Image]) -> list[Image.Image]:
        """Other things in an element's place: each picture covers the box of its soft mask."""
        seen = element.alpha.point(lambda level: 255 * (level >= HAZE))
        box = seen.getbbox() or (0, 0, *seen.size)
        size = (box[2] - box[0], box[3] - box[1])
        placed = []
        for picture in pictures:
            canvas = Image.new("RGB", self.plan.target.size)
            canvas.paste(compose.fit(picture, size), box[:2])
            placed.append(canvas)
        return placed

    def write_element(self, out: Path, k: int, i: int, source: Image.Image) -> dict:
        """Picture i of element k, and its record."""
        plan = self.plan
        element = plan.elements[k]
        background = self.backgrounds[(i + k) % len(self.backgrounds)]
        is_backdrop = plan.has_backdrop and k == len(plan.elements) - 1
        composer = compose.backdrop_picture if is_backdrop else compose.element_picture
        picture, mask = self.all_targets.avoided(
            partial(composer, source, element.alpha, background.image, self.draw(plan.name, k, i)),
            f"--masks: {element.phrase!r}",
        )
        file = f"images/{plan.name}-{k}-{i:03}.png"
        self.save(picture, out / file)
        mask_file = self.mask_file(k)
        if mask.getbbox() is None:
            raise UserError(
                f"--masks: no part of {element.phrase!r} is left to see; masks of things must be "
                "black around them"
            )
        if is_backdrop:
            mask_file = f"masks/{plan.name}-{k}-{i:03}.png"
            self.save(mask, out / mask_file)
        return {
            "file_name": file,
            "text": f"{element.phrase}, {background.caption or UNNAMED}",
            "phrases": [element.phrase],
            "role": "element",
            "target_id": plan.name,
            "element_id": f"{plan.name}/{k}",
            "mask": mask_file,
        }

    def write_clean(self, out: Path, i: int) -> dict:
        """Clean picture i, a part of a background, and its record."""
        background = self.backgrounds[i % len(self.backgrounds)]
        file = f"images/clean-{i:03}.png"
        picture = compose.window(background.image, self.plan.target.width, self.draw("clean", i))
        self.save(picture, out / file)
        return {"file_name": file, "text": background.caption or PLAIN, "role": "clean"}

    def mask_file(self, k: int) -> str:
        return f"masks/{self.plan.name}-{k}.png"

    def draw(self, *address: str | int) -> random.Random:
        return random.Random("/".join(map(str, (self.args.seed, *address))))

    def save(self, picture: Image.Image, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        picture.save(file)
