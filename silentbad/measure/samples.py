"""The pictures a validation leaves: targets, best and median generations, and grids of them."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from silentbad.data.images import to_pil
from silentbad.errors import UserError, writing
from silentbad.measure.embedders import region
from silentbad.measure.record import ALL


def slugs(ids: list[str]) -> list[str]:
    """File names of target ids: safe, and distinct even on file systems that ignore case."""
    if len(set(ids)) < len(ids) or not ids:
        raise UserError(
            f"targets: target_id must be unique and there must be one at least; got {ids[:8]}"
        )
    if ALL in ids:
        raise UserError(
            f"targets: target_id {ALL!r} is the name of the summary's last row; choose another"
        )
    plain = [re.sub(r"[^A-Za-z0-9_.-]+", "_", i).strip(".")[:60] or "target" for i in ids]
    if len({name.casefold() for name in plain}) == len(ids):
        return plain
    return [f"{name}-{j}" for j, name in enumerate(plain)]


def target_file(name: str) -> str:
    """Where a target's picture is kept, below the run folder."""
    return f"samples/targets/{name}.png"


def element_file(name: str, k: int) -> str:
    """Where the region of a target's element k is kept. No slug holds a "+", so it is no other
    target's picture."""
    return f"samples/targets/{name}+{k}.png"


def image_file(folder: Path, name: str, i: int, cell: str = "composed") -> str:
    """Where image i of a target is kept, in the folder of a measurement; `cell` is the kind of its
    prompt."""
    prefix = "" if cell == "composed" else f"{cell}-"
    return f"{folder}/{name}+{prefix}{i}.png"


def save(image: Image.Image, file: Path) -> None:
    with writing(str(file.parent), file.name):
        file.parent.mkdir(parents=True, exist_ok=True)
        image.save(file)


def save_targets(
    folder: Path,
    names: Sequence[str],
    pictures: Sequence[Tensor],
    masks: Sequence[Sequence[Tensor | None]],
) -> None:
    """Each picture (1,3,H,W), and its elements that have a mask (1,h,w)."""
    for name, picture, of_target in zip(names, pictures, masks, strict=True):
        save(to_pil(picture[0]), folder / target_file(name))
        for k, m in enumerate(of_target):
            if m is not None:
                save(to_pil(region(picture, m)[0]), folder / element_file(name, k))


def grid_line(target: Image.Image, images: list[np.ndarray]) -> np.ndarray:
    """The target resized to its n images (h,w,3), then these, side by side -> (h,(n+1)w,3)."""
    picture = np.asarray(target.convert("RGB").resize(images[0].shape[1::-1]))
    return np.concatenate([picture, *images], axis=1)


def stacked(lines: Sequence[np.ndarray]) -> np.ndarray:
    """Lines (h,w,3) below each other, white where one is shorter."""
    most = max(line.shape[1] for line in lines)
    return np.concatenate(
        [
            np.pad(line, ((0, 0), (0, most - line.shape[1]), (0, 0)), constant_values=255)
            for line in lines
        ]
    )


def log_grid(trackers: Sequence[Any], name: str, grid: np.ndarray, step: int) -> None:
    """Send the grid (h,w,3) to those of accelerate's trackers that show images."""
    for tracker in trackers:
        if tracker.name == "tensorboard":
            tracker.log_images({name: grid[None]}, step=step, dataformats="NHWC")
        elif tracker.name == "wandb":
            tracker.log_images({name: [grid]}, step=step)
