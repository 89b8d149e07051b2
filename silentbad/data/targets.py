"""Targets: the pictures to be recovered, with the phrases and masks of their elements."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from silentbad.data import published
from silentbad.data.images import PICTURES, inside, open_image, open_mask, safe_path
from silentbad.data.picture_parts import check_phrases, cut_apart
from silentbad.data.schema import TARGET, admitted, check_window, json_lines, refuse_misspelt
from silentbad.errors import UserError, warn
from silentbad.files import no_file


@dataclass
class Target:
    """A picture to be recovered, the phrases of its elements and their masks."""

    target_id: str
    image: Image.Image
    phrases: list[str]
    prompt: str | None = None
    masks: list[Image.Image | None] = field(default_factory=list)
    description: str | None = None  # a full description; a control draws it with the base model
    paraphrases: list[str] = field(default_factory=list)  # of the composed prompt
    where: str = "targets"  # FILE:LINE

    @property
    def composed_prompt(self) -> str:
        return self.prompt if self.prompt is not None else ", ".join(self.phrases)


# ---------------------------------------------------------------- targets
def load_targets(path: str | Path) -> list[Target]:
    """Targets of a targets.jsonl, of a folder that holds one, or of the published layout.

    The published layout takes "folder@100" or "folder@100-109" for some of its numbers.
    """
    if not str(path).strip():
        raise UserError("targets: the path is empty; give a targets.jsonl, or leave the flag out")
    root, numbers = split_numbers(path)
    if published.is_published(root):
        return _published_targets(root, numbers)
    if numbers is not None and os.path.isdir(root) and not os.path.exists(path):
        raise UserError(
            f"targets: @{numbers} takes numbers of the published layout, and {root} has no "
            "poisoning_images/"
        )
    file = inside(root, root / "targets.jsonl", "targets") if os.path.isdir(root) else Path(path)
    if not os.path.isfile(file):
        raise UserError(f"targets: {no_file(file)}")
    if file.suffix.lower() in PICTURES:
        right = "one line a target with target_id, image, phrases"
        raise UserError(f"targets: {file} is a picture; give a targets.jsonl, {right}")
    targets = [_target(file.parent, where, entry) for where, entry in json_lines(file)]
    if not targets:
        raise UserError(f"{file}: holds no target")
    names = [target.target_id for target in targets]
    for name in names:
        if not name.strip():
            raise UserError(f"{file}: a target_id is blank; give each target a name")
        if names.count(name) > 1:
            raise UserError(f"{file}: target_id {name!r} is given twice")
    return targets


def split_numbers(path: str | Path) -> tuple[Path, str | None]:
    """The folder and the numbers of "folder@100-109"; None where it has none."""
    text, at, numbers = str(path).rpartition("@")
    if not at or os.path.isdir(path):
        return Path(path), None
    if re.fullmatch(r"[0-9]{1,18}(-[0-9]{1,18})?", numbers):
        return Path(text), numbers
    if published.is_published(Path(text)) and not os.path.exists(path):
        raise UserError(
            f"targets: @{numbers} is no number and no range of numbers; "
            f"write {text}@100 or {text}@100-109"
        )
    return Path(path), None


def _target(root: Path, where: str, entry: dict) -> Target:
    refuse_misspelt(entry, (*TARGET, "masks"), where)
    fields = admitted(entry, TARGET, where)
    masks = entry.get("masks") or []
    phrases = fields["phrases"]
    check_phrases(phrases, where)
    if not isinstance(masks, list) or (masks and len(masks) != len(phrases)):
        raise UserError(
            f"{where}: masks must list one file or null for each of the {len(phrases)} phrases"
        )
    image = open_image(safe_path(root, fields.pop("image"), where, "image"), where)
    if image.width != image.height:
        warn(
            f"{where}: the image is {image.width}x{image.height} and is compared squashed to a "
            "square; cut it to one"
        )
    opened = [
        open_mask(safe_path(root, mask, where, "masks"), image.size, where) if mask else None
        for mask in masks
    ]
    masks = cut_apart(phrases, opened or [None] * len(phrases), where)
    return Target(image=image, masks=masks, where=where, **fields)


def _published_targets(root: Path, wanted: str | None) -> list[Target]:
    first, _, last = (wanted or "").partition("-")
    ids = range(int(first), int(last or first) + 1) if wanted else published.published_ids(root)
    if not ids:
        raise UserError(f"targets: @{wanted} holds no number; write {root}@{last}-{first}")
    targets = []
    for number in ids:
        path = published.published_image(root, number)
        _, phrases = published.published_captions(root, number)
        image = open_image(path, f"target {number}")
        prompt = published.published_prompt(root, phrases)
        targets.append(
            Target(
                target_id=str(number),
                image=image,
                phrases=phrases,
                prompt=prompt,
                masks=[None] * len(phrases),
            )
        )
    return targets


def check_prompts(targets: list[Target], tokenizer: Any, unrelated: str = "") -> None:
    """Refuse a target with a prompt that the tokenizer's window cuts off: its images would show
    something else. The `unrelated` caption of the controls is checked too."""
    if targets:
        check_window(unrelated, tokenizer, "unrelated")
    for target in targets:
        asked = [("prompt", target.composed_prompt), ("phrases", ", ".join(target.phrases))]
        asked.append(("description", target.description or ""))
        asked += [("paraphrases", text) for text in target.paraphrases]
        for key, text in asked:
            check_window(text, tokenizer, f"{target.where}: {key} of {target.target_id!r}")
