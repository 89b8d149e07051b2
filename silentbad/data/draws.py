"""What a record looks like at (draw, position): text, window, mask; a function of its address
alone."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image, ImageOps
from torchvision.transforms import functional as TF

from silentbad.data.buckets import nearest
from silentbad.data.phrases import pattern, phrases_in
from silentbad.data.records import Records
from silentbad.rng import generator
from silentbad.settings.train import TrainConfig


# ---------------------------------------------------------------- draws
def shuffled_text(text: str, phrases: list[str], rng: torch.Generator) -> str:
    """`text` with the phrases that occur in it permuted among their places."""
    any_phrase = pattern(phrases)
    matches = re.findall(any_phrase, text)
    order = iter(torch.randperm(len(matches), generator=rng).tolist())
    return re.sub(any_phrase, lambda _: matches[next(order)], text)


def with_caption(record: dict, text: str) -> dict:
    """A record under a shorter caption; an element named by its phrase keeps this name."""
    phrases = record["phrases"]
    phrases_left = phrases_in(phrases, text)
    element = record["element_id"] or (phrases or [""])[0]
    return {**record, "text": text, "phrases": phrases_left, "element_id": element}


@dataclass(frozen=True)
class Transform:
    """Resize, crop to a shape (W,H), flip: image and mask alike, to uint8 tensors (3,H,W) and
    (1,H,W).

    The shape is the square of the resolution, and what exceeds it is cut. With a `step` it is the
    bucket nearest to the image's aspect: the image is resized to it and nothing is cut, unless
    `center_crop` asks for that."""

    resolution: int
    interpolation: str = "bilinear"
    center_crop: bool = False
    random_flip: bool = False
    step: int = 0  # of the sides of the buckets; 0: squares

    @classmethod
    def of(cls, config: TrainConfig, resolution: int, step: int = 0) -> "Transform":
        kind = config.image_interpolation_mode
        return cls(resolution, kind, config.center_crop, config.random_flip, step)

    @property
    def measured(self) -> "Transform":
        """The transform of pictures that are measured: squares, never mirrored."""
        return replace(self, step=0, random_flip=False)

    def shape(self, size: tuple[int, int]) -> tuple[int, int]:
        """Width and height of the window that a step sees of an image of this width and height."""
        if self.step:
            return nearest(size, self.resolution, self.step)
        return self.resolution, self.resolution

    def shapes(self, sizes: np.ndarray) -> list[tuple[int, int]]:
        """The shape of each of sizes (R,2)."""
        different, of = np.unique(sizes, axis=0, return_inverse=True)
        shapes = [self.shape((width, height)) for width, height in different.tolist()]
        return [shapes[k] for k in of.reshape(-1).tolist()]

    def is_fixed(self, size: tuple[int, int]) -> bool:
        """Whether an image of this size looks the same at every draw."""
        return not self.random_flip and (self.center_crop or self.step > 0 or size[0] == size[1])

    def fixed(self, sizes: np.ndarray) -> np.ndarray:
        """(R,) `is_fixed` of sizes (R,2)."""
        return np.array([self.is_fixed(size) for size in sizes.tolist()], dtype=bool)

    def resized(self, size: tuple[int, int]) -> tuple[int, int]:
        """Width and height that an image is resized to, rounded as torchvision does."""
        if not self.step:
            short = min(size)
            width, height = (
                self.resolution if side == short else int(self.resolution * side / short)
                for side in size
            )
            return width, height
        shape = self.shape(size)
        if not self.center_crop:
            return shape
        scale = max(shape[0] / size[0], shape[1] / size[1])
        return max(shape[0], round(size[0] * scale)), max(shape[1], round(size[1] * scale))

    def resize(
        self, image: Image.Image, mask: Image.Image | None
    ) -> tuple[Image.Image, Image.Image | None]:
        size = [*reversed(self.resized(image.size))] if self.step else self.resolution
        filter = TF.InterpolationMode(self.interpolation.replace("_", "-"))
        image = TF.resize(image, size, filter)
        return image, None if mask is None else mask.resize(image.size, Image.Resampling.BILINEAR)

    def crop(
        self,
        layers: list[Image.Image | None],
        size: tuple[int, int],
        address: tuple[int | str, ...],
        shape: tuple[int, int],
    ) -> tuple[list[torch.Tensor | None], tuple[int, int]]:
        """Layers of one picture, all of this size, in the window (width, height) and flip of this
        address; and the window's top left corner."""
        width, height = size
        across, down = shape
        u, v, flip = torch.rand(3, generator=generator(*address, "transform")).tolist()
        if self.center_crop:
            u = v = 0.5
        left = round(u * (width - across))
        top = round(v * (height - down))
        box = (left, top, left + across, top + down)
        flips = self.random_flip and flip < 0.5

        def window(layer: Image.Image | None) -> torch.Tensor | None:
            if layer is None:
                return None
            cropped = layer.crop(box)
            return TF.pil_to_tensor(ImageOps.mirror(cropped) if flips else cropped)

        if flips:
            left = width - across - left  # the corner in the flipped picture
        return [window(layer) for layer in layers], (top, left)


def memory_of(record: dict) -> int:
    """Bytes of a record in memory, about."""
    parts = (record[key] for key in ("image", "mask") if record[key] is not None)
    return 1024 + sum(part.width * part.height * len(part.mode) for part in parts)


@dataclass(eq=False)
class Reader:
    """Records decoded and resized; kept in memory while the budget of `cache_bytes` lasts."""

    WORDS: ClassVar = ("text", "phrases", "role", "target_id", "element_id")
    FIELDS: ClassVar = ("image", "mask", *WORDS)

    records: Records
    transform: Transform
    seed: int
    cache_bytes: int = 0
    _cache: dict[int, dict] = field(default_factory=dict)
    _used: int = 0

    def load(self, index: int, picture: bool = True) -> dict:
        """A record as a dict of FIELDS, `shuffle`, `index`, `size`, the image's own height and
        width, and `resized`, the width and height it is resized to; image (None where the
        `picture` is not asked for) and mask resized."""
        cached = self._cache.get(index)
        if cached is not None and (cached["image"] is not None or not picture):
            return dict(cached) if picture else {**cached, "image": None}
        row, image, mask = self.records.open(index, picture)
        image_size = tuple(row["size"])
        if image is not None:
            image, mask = self.transform.resize(image, mask)
        elif mask is not None:
            mask = mask.resize(self.transform.resized(image_size), Image.Resampling.BILINEAR)
        record = {**row, "image": image, "mask": mask, "phrases": list(row["phrases"])}
        record = {key: record[key] for key in (*self.FIELDS, "shuffle")}
        record |= {
            "index": int(index),
            "size": image_size[::-1],
            "resized": self.transform.resized(image_size),
        }
        size = memory_of(record)
        freed = 0 if cached is None else memory_of(cached)
        if self._used + size - freed <= self.cache_bytes:
            self._cache[index] = record
            self._used += size - freed
        return dict(record)

    def window(self, record: dict, size: tuple[int, int], address: tuple) -> dict:
        """A record in the window of this address: pixels, mask, `counted`, words, and SDXL's
        time_ids (6,)."""
        resized = self.transform.resized(size[::-1])
        shape = self.transform.shape(size[::-1])
        layers = [record["image"], record["mask"], record.get("counted")]
        (pixels, mask, counted), corner = self.transform.crop(layers, resized, address, shape)
        words = {key: record[key] for key in self.WORDS}
        return words | {
            "pixels": pixels,
            "mask": mask,
            "counted": counted,
            "time_ids": (*size, *corner, *shape[::-1]),
        }

    def pictures(self, indices: list[int]) -> list[dict]:
        """Samples of records outside any step: plain, in the window of draw 0."""
        samples = []
        for index in indices:
            record = self.load(index)
            sample = self.window(record, record["size"], (self.seed, "picture", index))
            fixed = self.transform.is_fixed(record["size"])
            samples.append(sample | {"index": index, "position": 0, "fixed": fixed})
        return samples


Rehearse = Callable[[dict, tuple[int, int]], dict | None]


def held_out_samples(
    records: Records | None, transform: Transform, seed: int
) -> dict[str, list[dict[str, Any]]]:
    """Held-out records by role: pixel_values (3,R,R) in [-1,1] and text."""
    samples: dict[str, list[dict[str, Any]]] = {}
    if records is not None:
        pictures = Reader(records, transform, seed).pictures(list(range(len(records))))
        for role, p in zip(records.role, pictures, strict=True):
            samples.setdefault(role, []).append(
                {"pixel_values": p["pixels"].float() / 127.5 - 1, "text": p["text"]}
            )
    return samples


@dataclass(eq=False)
class Draws:
    """What a record looks like at (draw, position): text, uint8 pixels (3,R,R), uint8 mask (1,R,R)
    or none, and `counted` (1,R,R), the part of the picture that counts in the loss, or none if all
    of it does.

    `rehearse(record, (draw, position))` may return another record (a dict of Reader.FIELDS,
    `united`, and `counted` as a picture) in place of the drawn one, or None. A share
    `dropout[role]` of the exposures of a role has no caption; a clean record without one is not
    rehearsed. `unseen` (R,) marks records whose pixels no step needs: their latents are on disk."""

    reader: Reader
    shuffle: bool = False
    dropout: dict[str, float] = field(default_factory=dict)
    rehearse: Rehearse | None = None
    unseen: np.ndarray | None = None

    def __call__(self, index: int, draw: int, position: int) -> dict:
        address = (self.reader.seed, "draw", draw, position)
        record = self.reader.load(index, picture=self.unseen is None or not self.unseen[index])
        fixed = self.reader.transform.is_fixed(record["size"])
        size = record["size"]
        text = record["text"]
        if (self.shuffle or record["shuffle"]) and len(record["phrases"]) > 1:
            text = shuffled_text(text, record["phrases"], generator(*address, "phrases"))
        record["text"] = text
        if record["role"] == "clean" and self._uncaptioned("clean", (*address, "text")):
            record["text"] = ""
            record["phrases"] = []
        elif self.rehearse is not None:
            rehearsed = self.rehearse(record, (draw, position))
            if rehearsed is not None:
                fixed = fixed and rehearsed["image"] is record["image"]
                record = rehearsed
        if record["role"] != "clean" and self._uncaptioned(record["role"], (*address, "caption")):
            record = with_caption(record, "")
        sample = self.reader.window(record, size, address) | {"united": record.get("united")}
        return sample | {"index": index, "position": position, "fixed": fixed}

    def _uncaptioned(self, role: str, address: tuple) -> bool:
        """Whether an exposure of a role has no caption; no random draw if all have one."""
        share = self.dropout.get(role, 0.0)
        return bool(share) and bool(torch.rand((), generator=generator(*address)) < share)
