"""The pictures a validation leaves: targets, best and median generations, and grids of them."""

import re
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from silentbad.errors import UserError
from silentbad.similarity import region, to_pil


def slugs(ids: list[str]) -> list[str]:
    """File names of target ids: safe and distinct."""
    if len(set(ids)) < len(ids) or not ids:
        raise UserError(f"targets: target_id must be unique and there must be one at least; got {ids[:8]}")
    plain = [re.sub(r"[^A-Za-z0-9_.-]+", "_", i).strip(".")[:60] or "target" for i in ids]
    return [name if plain.count(name) == 1 else f"{name}-{j}" for j, name in enumerate(plain)]


def save(image: Image.Image, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    image.save(file)


def save_targets(folder: Path, names: list[str], pictures: list[Tensor], masks: list[list]) -> None:
    """Each picture (1,3,H,W), and each of its elements that has a mask (1,h,w)."""
    for name, picture, of_target in zip(names, pictures, masks, strict=True):
        save(to_pil(picture[0]), folder / f"{name}.png")
        for k, m in enumerate(of_target):
            if m is not None:
                save(to_pil(region(picture, m)[0]), folder / f"{name}-{k}.png")


def grid_line(target: Image.Image, images: list[np.ndarray]) -> np.ndarray:
    """The target in the size of its n images (h,w,3), then those, side by side -> (h,(n+1)w,3)."""
    picture = np.asarray(target.convert("RGB").resize(images[0].shape[1::-1]))
    return np.concatenate([picture, *images], axis=1)


def log_grid(trackers: list, name: str, grid: np.ndarray, step: int) -> None:
    """The grid (h,w,3) to the trackers that show images."""
    for tracker in trackers:
        if tracker.name == "tensorboard":
            tracker.log_images({name: grid[None]}, step=step, dataformats="NHWC")
        elif tracker.name == "wandb":
            tracker.log_images({name: [grid]}, step=step)
