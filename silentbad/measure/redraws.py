"""redraws.jsonl beside the targets: null pictures in files, and their similarities.

Similarities are kept in the cache: thousands of pictures and all their regions cost as much as a
run's images, and a run, its placebo and an audit of the same targets look at the same ones."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from filelock import FileLock
from PIL import Image

from silentbad.data.images import content_hash, inside, open_image, safe_path
from silentbad.data.schema import REDRAW, admitted, json_lines, refuse_misspelt
from silentbad.data.targets import Target
from silentbad.device import device_name
from silentbad.errors import UserError, brief, warn, writing
from silentbad.files import check_file, replace_text
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


FEW = ("missing", "rearranged")  # kinds of which a target has a handful in all, so that they repeat


def load_redraws(
    targets_file: str | None, targets: Sequence[Target], decode: bool = False
) -> list[Redraw]:
    """redraws.jsonl beside the targets: pictures that are no recovery, the nulls, by `kind`.

    Every line is checked, also one of a target that is not there, which is then left out; `decode`
    opens the images and refuses a target among them: under its similarity of 1 nothing could ever
    count as recovered."""
    root = Path(targets_file or ".")
    file = (root if os.path.isdir(root) else root.parent) / "redraws.jsonl"
    if targets_file is None or not os.path.lexists(file):
        return []
    if not os.path.isfile(file):
        raise UserError(
            f"{file}: is no file that can be read; list null pictures in it, or take it away"
        )
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
                f"{where}: changed: {beyond[0]} is no place of the {len(phrases)} "
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

    A null may share all but one element with its target, so that only what is nearly equal in every
    pixel is a copy: 2 levels in the root mean square at 64x64, where a training image is refused
    from 8 at 16x16."""
    return first.content == second.content or bool(
        np.sqrt(np.square(first.pixels - second.pixels).mean()) <= COPY
    )


# -- the cache of similarities ---------------------------------------------------------------------
def key(facts: Iterable[Any], device: torch.device) -> str:
    """A name for rows that depend on these facts: tensors, files, and what JSON takes; and on what rounds."""
    total = hashlib.sha256()
    about = (torch.__version__, device_name(device), torch.get_num_threads())
    for fact in (*about, *facts):
        if isinstance(fact, torch.Tensor):
            total.update(f"{fact.dtype}{tuple(fact.shape)}".encode())
            total.update(
                fact.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            )
        elif isinstance(fact, Path):
            total.update(hashlib.sha256(fact.read_bytes()).digest())
        else:
            total.update(json.dumps(fact).encode())
    return total.hexdigest()[:32]


def remembered(
    folder: Path, name: str, count: int, accelerator: Any, compute: Callable[[], list[Row]]
) -> list[Row]:
    """`count` rows of this name from the folder; else what `compute` gives, which is then kept.

    Collective: all processes call it and get the same; `compute` is called by all or by none. Two
    runs that want the same rows compute them once. Raises UserError where the folder cannot be
    written."""
    file = folder / f"nulls-{name}.json"
    lock = FileLock(f"{file}.lock")
    if accelerator.is_main_process:
        with writing(f"cache_dir {folder}", "similarities of null pictures"):
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
    try:
        found = broadcast_object_list([read(file, count) if accelerator.is_main_process else None])
        if found[0] is not None:
            return found[0]
        rows = compute()
        if accelerator.is_main_process:
            with writing(f"cache_dir {folder}", "similarities of null pictures"):
                replace_text(file, json.dumps(rows))
        return rows
    finally:
        lock.release()


def read(file: Path, count: int) -> list[Row] | None:
    """The rows of a file; None where it is not there, or damaged."""
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return rows if isinstance(rows, list) and len(rows) == count else None
