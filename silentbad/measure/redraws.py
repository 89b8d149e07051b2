"""redraws.jsonl beside the targets: null pictures in files."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from silentbad.data.images import content_hash, inside, open_image, safe_path
from silentbad.data.schema import REDRAW, admitted, json_lines, refuse_misspelt
from silentbad.data.targets import Target, split_numbers
from silentbad.errors import UserError, brief, warn
from silentbad.files import check_file
from silentbad.settings.rules import Facts, check_measurement
from silentbad.settings.validation import ValidationConfig

Row = dict[str, Any]


# -- the file --------------------------------------------------------------------------------------
class Redraw(NamedTuple):
    """A null picture of a target: its kind, and the elements that it changes (None: all)."""

    target: int
    file: Path
    kind: str
    changed: tuple[int, ...] | None


FEW = ("missing", "rearranged")  # kinds with so few pictures for a target that they may repeat


def load_redraws(
    targets_file: str | None, targets: Sequence[Target], decode: bool = False
) -> list[Redraw]:
    """The null pictures that redraws.jsonl beside the targets lists, each with its `kind`.

    Every line is checked, also a line of an unknown target, which is then left out. `decode` opens
    the images and refuses one that is the target itself: with its similarity of 1 among the nulls,
    nothing could ever count as recovered."""
    root, _ = split_numbers(targets_file or ".")
    file = (root if os.path.isdir(root) else root.parent) / "redraws.jsonl"
    if targets_file is None or not os.path.lexists(file):
        return []
    if not os.path.isfile(file):
        raise UserError(f"{file}: is no readable file; list null pictures in it, or remove it")
    inside(file.parent, file, str(file.parent))
    index = {t.target_id: j for j, t in enumerate(targets)}
    prints = [fingerprint(t.image) for t in targets] if decode else []
    redraws: list[Redraw] = []
    others: list[str] = []
    first_lines: dict[tuple, str] = {}
    for where, entry in json_lines(file):
        refuse_misspelt(entry, REDRAW, where)
        redraw = admitted(entry, REDRAW, where)
        image = safe_path(file.parent, redraw["image"], where, "image")
        j = index.get(redraw["target_id"])
        if j is None:
            others.append(redraw["target_id"])
            continue
        check_file(where, image)
        phrases = targets[j].phrases
        if beyond := [k for k in redraw["changed"] or () if k >= len(phrases)]:
            raise UserError(
                f"{where}: changed: {beyond[0]} is no index of the {len(phrases)} "
                f"phrases, counted from 0"
            )
        if decode:
            null = fingerprint(open_image(image, where))
            if is_copy(null, prints[j]):
                raise UserError(
                    f"{where}: the image is target {targets[j].target_id!r} itself; a null image "
                    f"must be another picture"
                )
            first = first_lines.setdefault((j, redraw["kind"], null.content), where)
            if first != where and redraw["kind"] not in FEW:
                raise UserError(f"{where}: the same picture as {first}; list each null image once")
        redraws.append(Redraw(target=j, file=image, kind=redraw["kind"], changed=redraw["changed"]))
    if decode and others and not redraws:
        warn(
            f"{file}: is of other targets ({brief(others[0])}, ...); no null picture is "
            f"taken from it"
        )
    return redraws


def uses_redraws(
    config: ValidationConfig, targets: Sequence[Target], listed: bool, prefix: str = "validation."
) -> bool:
    """Whether redraws are the nulls; `listed`: whether redraws.jsonl has some.

    Raises UserError where what `calibration` asks for is not there, or an option has no effect."""
    masked = any(mask is not None for target in targets for mask in target.masks or [])
    check_measurement(config, Facts(redraws=listed, masks=masked), prefix)
    return listed and config.calibration != "failures"


# -- a null is no copy -----------------------------------------------------------------------------
COPY = 2.0  # levels of 255


class Fingerprint(NamedTuple):
    """Content hash and the RGB image squashed to 64x64 (64,64,3)."""

    content: str
    pixels: np.ndarray


def fingerprint(image: Image.Image) -> Fingerprint:
    small = image.resize((64, 64), Image.Resampling.BOX)
    return Fingerprint(content_hash(image), np.asarray(small, dtype=np.float32))


def is_copy(first: Fingerprint, second: Fingerprint) -> bool:
    """Whether two pictures are the same, resized or recompressed.

    A null may share all but one element with its target. So only pictures that are nearly equal in
    every pixel are copies: at most 2 levels of root mean square difference at 64x64. For training
    images the limit is 8 levels at 16x16."""
    return bool(np.sqrt(np.square(first.pixels - second.pixels).mean()) <= COPY)
