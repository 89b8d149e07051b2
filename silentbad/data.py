"""Records in a memory-mapped table, and what a draw makes of them.

A record is an image file (or the bytes of a Hub data set), `text`, `phrases` that stand verbatim in it, `role` in
{element, rehearsal, clean}, `target_id`, `element_id`, and a mask or none. All images are decoded once when the table
is built, so a broken one stops a run before it starts. Draws are addressed: what a record looks like at (draw,
position) depends on nothing that happened before.
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch
from PIL import Image, ImageOps
from torchvision.transforms import functional as TF

from .calibration import load_redraws
from .checks import check_embedder
from .errors import UserError
from .readers import (
    Target,
    content_hash,
    folder_rows,
    hub_rows,
    hub_table,
    load_targets,
    open_image,
    open_mask,
    published_rows,
    source,
    thumbnail,
)
from .rng import generator
from .tables import BLOCK, TextLists, blocks, build_table, folder_key, numbers, once, rows_with, texts, vocabulary

SHOWN = 5  # long captions that are named
PUBLISHED_FLAGS = (
    "seed", "target_start_id", "target_num", "poisoning_ratio", "poisoning_data_repeat_factor", "poison_subsampling",
    "n_few_shot", "shot_caption_shuffle_num",
)  # fmt: skip


def load_records(config: Any) -> "Records":
    """The records that `train_data_dir` or `dataset_name` (of `TrainConfig`) stands for."""
    name, clean = config.dataset_name or config.train_data_dir, config.clean_data_dir
    root = Path(name)
    if config.dataset_name is not None:
        table = hub_table(config)
        said = (name, config.dataset_config_name, config.image_column, config.caption_column, table._fingerprint)
        key, rows = hashlib.sha256(repr(said).encode()).hexdigest()[:32], lambda: hub_rows(table, config)
    elif not root.is_dir():
        raise UserError(f"train_data_dir: no folder {root}")
    elif (root / "poisoning_images").is_dir():
        said = [getattr(config, flag) for flag in PUBLISHED_FLAGS] + [folder_key(Path(clean)) if clean else None]
        key, rows = folder_key(root, *said), lambda: published_rows(root, config)
    elif clean:
        raise UserError(f"clean_data_dir: {root} is not of the published layout; list clean records in its metadata")
    else:
        key, rows = folder_key(root), lambda: folder_rows(root)
    records = Records(build_table(rows, name, key, config.cache_dir), name, key)
    if config.max_train_samples is not None and config.max_train_samples < len(records):
        order = torch.randperm(len(records), generator=generator(config.seed, "max_train_samples")).numpy()
        records = records.select(np.sort(order[: config.max_train_samples]))
        records.key = f"{key}-{config.max_train_samples}-{config.seed}"
    return records


def prepare(config: Any, tokenizer: Any, first: Any, say: Callable) -> tuple["Records", "Records | None", list[Target]]:
    """(records to train on, clean ones held out, targets), all checked; `first` lets one process build the table."""
    if config.validation.targets:
        check_embedder(config.validation)
    targets = load_targets(config.validation.targets) if config.validation.targets else []
    load_redraws(config.validation.targets, targets, decode=True)
    with first():
        records = load_records(config)
    if not config.allow_target_images:
        records.refuse_targets(targets)
    if config.memory.region.name == "estimated" and not config.center_crop:
        records.refuse_random_windows()
    check_prompts(targets, tokenizer)
    for line in records.check_captions(tokenizer):
        say(f"warning: {line}; its end is cut off")
    return *records.hold_out(config.held_out_clean, config.seed), targets


class Records:
    """Rows (all, unless some are chosen) of a table; columns are read, images and masks opened when asked for.

    `key` says what the checks of these rows depend on.
    """

    def __init__(self, table: datasets.Dataset, name: str, key: str = "", rows: np.ndarray | None = None):
        self.table, self.name, self.key, self.rows = table, name, key, rows

    def __len__(self) -> int:
        return len(self.table) if self.rows is None else len(self.rows)

    def select(self, rows: np.ndarray) -> "Records":
        """Some of these records, in this order."""
        return Records(self.table, self.name, rows=rows if self.rows is None else self.rows[rows])

    def column(self, name: str) -> pa.ChunkedArray:
        """A column as Arrow holds it: mapped from the table's file, or a copy of the chosen rows."""
        whole = self.table.data.column(name)
        return whole if self.rows is None else whole.take(pa.array(self.rows))

    @property
    def sizes(self) -> np.ndarray:
        """Width and height of the images (R,2)."""
        return numbers(self.column("size")).reshape(-1, 2)

    @property
    def text(self) -> list[str]:
        return self.column("text").to_pylist()

    @property
    def role(self) -> list[str]:
        return texts(self.column("role"))

    @property
    def target_id(self) -> list[str]:
        return texts(self.column("target_id"))

    @property
    def element_id(self) -> list[str]:
        return texts(self.column("element_id"))

    @property
    def phrases(self) -> TextLists:
        return TextLists(self.column("phrases"))

    def row(self, index: int) -> dict:
        return self.table[int(index if self.rows is None else self.rows[index])]

    def open(self, index: int, picture: bool = True) -> tuple[dict, Image.Image | None, Image.Image | None]:
        """(row, RGB image or None where no `picture` is asked for, mask or None) of a record."""
        row = self.row(index)
        where = row["where"]
        image = open_image(source(row["image"], where), where) if picture else None
        size = tuple(row["size"]) if image is None else image.size
        return row, image, open_mask(Path(row["mask"]), size, where) if row["mask"] else None

    def where(self, index: int) -> str:
        """File and line of a record, for messages."""
        return self.row(index)["where"]

    def refuse_targets(self, targets: list[Target]) -> None:
        """Refuse records that show a target: its pixels, or a resized, recompressed or mirrored copy of them."""
        if not targets:
            return
        lets = "recovery must not train on its target (allow_target_images: true lets it)"
        held = {content_hash(target.image): target.target_id for target in targets}
        for index in rows_with(self.column("content"), list(held)):
            name = held[self.row(index)["content"]]
            raise UserError(f"{self.where(index)}: the image equals target {name!r}; {lets}")
        key = hashlib.sha256(f"{self.key}{sorted(held.items())}".encode()).hexdigest()[:32]
        once(self.table, f"targets-{key}", lambda: self._refuse_copies(targets, lets))

    def _refuse_copies(self, targets: list[Target], lets: str) -> list[str]:
        thumbs = [thumbnail(t.image) for t in targets] + [thumbnail(ImageOps.mirror(t.image)) for t in targets]
        known = np.stack([as_floats(thumb) for thumb in thumbs])
        for number, block in enumerate(blocks(self.column("thumb"))):
            found = copies(np.stack([as_floats(thumb) for thumb in block]), known)
            if found is not None:
                index, target = number * BLOCK + found[0], targets[found[1] % len(targets)].target_id
                raise UserError(f"{self.where(index)}: the image is a near copy of target {target!r}; {lets}")
        return []

    def refuse_random_windows(self) -> None:
        """Refuse elements whose pictures are cut at random, where masks are estimated from their native places."""
        width, height = self.sizes.T
        shown = np.asarray(self.role, dtype=object) == "element"
        for index in np.flatnonzero(shown & (width != height)).tolist():
            raise UserError(
                f"{self.where(index)}: the image is {width[index]}x{height[index]} and would be cut at random, but "
                "memory.region.name=estimated finds elements at their native place; set center_crop"
            )

    def hold_out(self, count: int, seed: int) -> tuple["Records", "Records | None"]:
        """(records to train on, clean records kept from training): at most a tenth of the clean ones."""
        clean = rows_with(self.column("role"), ["clean"])
        order = torch.randperm(len(clean), generator=generator(seed, "held_out")).numpy()
        held = np.sort(clean[order[: min(count, len(clean) // 10)]])
        if not len(held):
            return self, None
        rest = np.setdiff1d(np.arange(len(self)), held)
        return self.select(rest), self.select(held)

    def check_captions(self, tokenizer: Any) -> list[str]:
        """Refuse captions whose phrases the tokenizer's window cuts off; return lines on the first other long ones.

        A table is checked once for each tokenizer.
        """
        key = hashlib.sha256(f"{self.key}{vocabulary(tokenizer)}".encode()).hexdigest()[:32]
        return once(self.table, f"captions-{key}", lambda: self._long_captions(tokenizer))

    def _long_captions(self, tokenizer: Any) -> list[str]:
        window, phrases, cut = tokenizer.model_max_length, self.phrases, []
        for number, block in enumerate(blocks(self.column("text"))):
            encoded = tokenizer(block, truncation=False)["input_ids"]
            for index, ids in enumerate(encoded, number * BLOCK):
                if len(ids) <= window:
                    continue
                kept = tokenizer.decode(ids[: window - 1], skip_special_tokens=True).casefold()
                lost = [p for p in phrases[index] if _letters(p) not in _letters(kept)]
                line = f"{self.where(index)}: caption of {len(ids)} tokens, the window is {window}"
                if lost:
                    raise UserError(f"{line}; cut off: {', '.join(map(repr, lost))}; shorten it")
                if len(cut) < SHOWN:
                    cut.append(line)
        return cut


def as_floats(thumb: bytes) -> np.ndarray:
    """A thumbnail as (768,) in [0,255]."""
    return np.frombuffer(thumb, dtype=np.uint8).astype(np.float32)


def copies(thumbs: np.ndarray, known: np.ndarray, rms: float = 8.0, share: float = 0.25) -> tuple[int, int] | None:
    """(row of thumbs (R,768), row of known (T,768)) of the first near copy, or None.

    A copy differs by at most `rms` levels in the root mean square and by `share` of the known picture's own contrast,
    so that two nearly blank pages are no copies. On the microworld, JPEGs of quality 30 and pictures resized by half
    as much again are 4 to 7 levels away, the nearest picture that shares elements with a target 23.
    """
    square = (thumbs**2).sum(1)[:, None] + (known**2).sum(1)[None] - 2 * thumbs @ known.T
    distance = np.sqrt(np.maximum(square, 0) / thumbs.shape[1])
    near = distance <= np.minimum(rms, share * known.std(axis=1))[None]
    found = np.argwhere(near)
    return (int(found[0, 0]), int(found[0, 1])) if len(found) else None


def check_prompts(targets: list[Target], tokenizer: Any) -> None:
    """Refuse a target whose composed prompt the tokenizer's window cuts off: it could never be asked for whole."""
    window = tokenizer.model_max_length
    for target in targets:
        length = len(tokenizer(target.composed_prompt, truncation=False)["input_ids"])
        if length > window:
            raise UserError(
                f"targets: the prompt of {target.target_id!r} has {length} tokens, the window is {window}; shorten it"
            )


def _letters(text: str) -> str:
    return re.sub(r"\s+", "", text.casefold())


# ---------------------------------------------------------------- draws


def shuffled_text(text: str, phrases: list[str], rng: torch.Generator) -> str:
    """`text` with the phrases that stand in it exchanged among their places."""
    pattern = "|".join(re.escape(p) for p in sorted(set(phrases), key=len, reverse=True))
    found = re.findall(pattern, text)
    order = iter(torch.randperm(len(found), generator=rng).tolist())
    return re.sub(pattern, lambda _: found[next(order)], text)


@dataclass(frozen=True)
class Transform:
    """Resize the shorter side, crop a square, flip: image and mask alike, to uint8 tensors (3,R,R) and (1,R,R)."""

    resolution: int
    interpolation: str = "bilinear"
    center_crop: bool = False
    random_flip: bool = False

    @classmethod
    def of(cls, config: Any, resolution: int) -> "Transform":
        return cls(resolution, config.image_interpolation_mode, config.center_crop, config.random_flip)

    def is_fixed(self, size: tuple[int, int]) -> bool:
        """Whether an image of this size looks the same at every draw."""
        return not self.random_flip and (self.center_crop or size[0] == size[1])

    def fixed(self, sizes: np.ndarray) -> np.ndarray:
        """(R,) `is_fixed` of sizes (R,2)."""
        same = np.full(len(sizes), self.center_crop) | (sizes[:, 0] == sizes[:, 1])
        return same & (not self.random_flip)

    def resized(self, size: tuple[int, int]) -> tuple[int, int]:
        """Width and height whose shorter side is the resolution, as torchvision rounds them."""
        short = min(size)
        width, height = (self.resolution if side == short else int(self.resolution * side / short) for side in size)
        return width, height

    def resize(self, image: Image.Image, mask: Image.Image | None) -> tuple[Image.Image, Image.Image | None]:
        image = TF.resize(image, self.resolution, interpolation_mode(self.interpolation))
        return image, None if mask is None else mask.resize(image.size, Image.Resampling.BILINEAR)

    def crop(
        self, image: Image.Image | None, mask: Image.Image | None, size: tuple[int, int], address: tuple[int | str, ...]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, tuple[int, int]]:
        """Image and mask of this size in the window and flip of this address, and the window's top left corner."""
        width, height = size
        u, v, flip = torch.rand(3, generator=generator(*address, "transform")).tolist()
        if self.center_crop:
            u = v = 0.5
        left, top = round(u * (width - self.resolution)), round(v * (height - self.resolution))
        box = (left, top, left + self.resolution, top + self.resolution)
        flips = self.random_flip and flip < 0.5

        def window(picture: Image.Image | None) -> torch.Tensor | None:
            if picture is None:
                return None
            seen = picture.crop(box)
            return TF.pil_to_tensor(ImageOps.mirror(seen) if flips else seen)

        if flips:
            left = width - self.resolution - left  # the corner in the flipped picture
        return window(image), window(mask), (top, left)


def interpolation_mode(name: str) -> TF.InterpolationMode:
    """torchvision's interpolation of that name (diffusers' `resolve_interpolation_mode`)."""
    from diffusers.training_utils import resolve_interpolation_mode

    try:
        return resolve_interpolation_mode(name)
    except ValueError:
        modes = ", ".join(mode.value for mode in TF.InterpolationMode)
        raise UserError(f"image_interpolation_mode: unknown filter {name!r}; there are: {modes}") from None


def held(record: dict) -> int:
    """Bytes of a record in memory, about."""
    parts = (record[key] for key in ("image", "mask") if record[key] is not None)
    return 1024 + sum(part.width * part.height * len(part.mode) for part in parts)


@dataclass
class Sampler:
    """What a record looks like at (draw, position): text, uint8 pixels (3,R,R), uint8 mask (1,R,R) or none.
    A rehearsal's mask may have a second band: what of the picture counts at all.

    A share `unconditional` of the clean exposures has no caption. `rehearse(record, address)` may return another record
    (a dict of FIELDS) in place of the drawn one, or None.
    """

    records: Records
    transform: Transform
    seed: int
    shuffle: bool = False
    cache_bytes: int = 0
    unconditional: float = 0.0
    rehearse: Callable[[dict, tuple], dict | None] | None = None
    unseen: np.ndarray | None = None  # (R,) whose pixels no step needs: their latents are on disk

    FIELDS = ("image", "mask", "text", "phrases", "role", "target_id", "element_id")

    def __post_init__(self):
        self._cache: dict[int, dict] = {}
        self._used = 0

    def load(self, index: int, picture: bool = True) -> dict:
        """A record as a dict of FIELDS, `shuffle`, `index` and `size`, the image's own height and width; image (None
        where the `picture` is not asked for) and mask resized. Kept while the budget lasts."""
        kept = self._cache.get(index)
        if kept is not None and (kept["image"] is not None or not picture):
            return dict(kept) if picture else {**kept, "image": None}
        row, image, mask = self.records.open(index, picture)
        own = tuple(row["size"])
        if image is not None:
            image, mask = self.transform.resize(image, mask)
        elif mask is not None:
            mask = mask.resize(self.transform.resized(own), Image.Resampling.BILINEAR)
        record = {**row, "image": image, "mask": mask, "phrases": list(row["phrases"])}
        record = {key: record[key] for key in (*self.FIELDS, "shuffle")} | {"index": int(index), "size": own[::-1]}
        size, freed = held(record), 0 if kept is None else held(kept)
        if self._used + size - freed <= self.cache_bytes:
            self._cache[index] = record
            self._used += size - freed
        return dict(record)

    def __call__(self, index: int, draw: int, position: int) -> dict:
        address = (self.seed, "draw", draw, position)
        record = self.load(index, picture=self.unseen is None or not self.unseen[index])
        fixed, size = self.transform.is_fixed(record["size"]), record["size"]
        text = record["text"]
        if (self.shuffle or record["shuffle"]) and len(record["phrases"]) > 1:
            text = shuffled_text(text, record["phrases"], generator(*address, "phrases"))
        record["text"] = text
        if record["role"] == "clean" and self._uncaptioned(address):
            record["text"], record["phrases"] = "", []
        elif self.rehearse is not None:
            rehearsed = self.rehearse(record, (draw, position))
            if rehearsed is not None:
                fixed = fixed and rehearsed["image"] is record["image"]
                record = rehearsed
        seen = self._seen(record, size, address)
        return seen | {"index": index, "position": position, "fixed": fixed}

    def _uncaptioned(self, address: tuple) -> bool:
        """Whether a clean exposure has no caption; nothing is drawn where all have theirs."""
        if not self.unconditional:
            return False
        return bool(torch.rand((), generator=generator(*address, "text")) < self.unconditional)

    def _seen(self, record: dict, size: tuple[int, int], address: tuple) -> dict:
        """The window of this address: pixels, mask, words, and SDXL's time_ids (6,)."""
        shape, side = self.transform.resized(size[::-1]), self.transform.resolution
        pixels, mask, corner = self.transform.crop(record["image"], record["mask"], shape, address)
        kept = {key: record[key] for key in self.FIELDS[2:]}
        return kept | {"pixels": pixels, "mask": mask, "time_ids": (*size, *corner, side, side)}

    def pictures(self, indices: list[int]) -> list[dict]:
        """Plain samples of records, outside any step: no shuffle, no rehearsal, the window of draw 0."""
        samples = []
        for index in indices:
            record = self.load(index)
            seen = self._seen(record, record["size"], (self.seed, "picture", index))
            fixed = self.transform.is_fixed(record["size"])
            samples.append(seen | {"index": index, "position": 0, "fixed": fixed})
        return samples


def collate(samples: list[dict]) -> dict[str, Any]:
    """One micro-batch: pixel_values (B,3,R,R) in [-1,1] (a list with None where some are not needed), mask (B,1,R,R)
    in [0,1], ...; counted (B,1,R,R) in [0,1], where some sample says what of it counts.

    `fixed` (B,) says which images look the same at every draw, so that their latents may be kept. time_ids (B,6):
    the image's own height and width, top and left of the window, height and width of the window.
    """
    pixels: Any = [None if sample["pixels"] is None else sample["pixels"].float() / 127.5 - 1 for sample in samples]
    if all(picture is not None for picture in pixels):
        pixels = torch.stack(pixels)
    side = samples[0]["time_ids"][-1]
    ones = torch.full((1, side, side), 255, dtype=torch.uint8)
    masks = [ones if sample["mask"] is None else sample["mask"] for sample in samples]
    names = ("text", "phrases", "role", "target_id", "element_id", "fixed")
    lists: dict[str, Any] = {name: [sample[name] for sample in samples] for name in names}
    if any(len(mask) > 1 for mask in masks):
        lists["counted"] = torch.stack([mask[1:] if len(mask) > 1 else ones for mask in masks]).float() / 255
    return lists | {
        "pixel_values": pixels,
        "mask": torch.stack([mask[:1] for mask in masks]).float() / 255,
        "has_mask": torch.tensor([sample["mask"] is not None for sample in samples]),
        "time_ids": torch.tensor([sample["time_ids"] for sample in samples]),
        "index": torch.tensor([sample["index"] for sample in samples]),
        "position": torch.tensor([sample["position"] for sample in samples]),
    }


def chunks(batch: dict[str, Any], size: int | None) -> list[tuple[float, dict[str, Any]]]:
    """(share of the batch, part) of parts of at most `size` samples, as even as can be."""
    count = len(batch["text"])
    parts = np.array_split(np.arange(count), -(-count // (size or count)))
    cuts = [slice(int(part[0]), int(part[-1]) + 1) for part in parts]
    return [((cut.stop - cut.start) / count, {key: value[cut] for key, value in batch.items()}) for cut in cuts]


class Stream:
    """The endless global sequence of record indices: epoch after epoch of `epoch_order(e)`, cut into steps.

    An epoch's order is asked for when its first index is needed and kept in the state, so a resumed run continues
    inside an epoch even where the order depends on what was learned before.
    """

    def __init__(self, epoch_order: Callable[[int], np.ndarray]):
        self.epoch_order = epoch_order
        self.epoch, self.offset = -1, 0
        self.order = np.zeros(0, dtype=np.int64)

    def take(self, n: int) -> np.ndarray:
        """The next n indices (n,)."""
        parts = []
        while n > 0:
            if self.offset == len(self.order):
                self.epoch, self.offset = self.epoch + 1, 0
                self.order = np.asarray(self.epoch_order(self.epoch), dtype=np.int64)
                if len(self.order) == 0:
                    raise UserError(f"the sampler gave an empty epoch {self.epoch}")
            part = self.order[self.offset : self.offset + n]
            parts.append(part)
            self.offset += len(part)
            n -= len(part)
        return np.concatenate(parts)

    def peek(self, n: int) -> np.ndarray | None:
        """The next n indices when they lie in the current epoch, without taking them."""
        ahead = self.order[self.offset : self.offset + n]
        return ahead if len(ahead) == n else None

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "offset": self.offset, "order": torch.from_numpy(self.order.copy())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.offset, self.order = state["epoch"], state["offset"], state["order"].numpy().copy()


class Loader:
    """Micro-batches of one process: of micro-batch m, positions m*B*W + rank*B ... of the step's effective batch.

    Threads make the next step's micro-batches ahead when they lie in the current epoch, in pinned memory for a GPU.
    """

    def __init__(
        self,
        sampler: Sampler,
        stream: Stream,
        *,
        batch_size: int,
        accumulation: int = 1,
        rank: int = 0,
        world: int = 1,
        workers: int | None = None,
        device: torch.device | None = None,
    ):
        self.pins = device is not None and device.type == "cuda"
        workers = 2 * self.pins if workers is None else workers
        self.sampler, self.stream = sampler, stream
        self.batch_size, self.accumulation, self.rank, self.world = batch_size, accumulation, rank, world
        self.effective_batch = batch_size * accumulation * world
        self.pool = ThreadPoolExecutor(workers) if workers else None
        self.assembly = ThreadPoolExecutor(1) if workers else None
        self._ahead: tuple[int, list] | None = None
        self.begun: dict | None = None  # the stream as it was before the step now drawn

    def positions(self, micro: int) -> range:
        start = (micro * self.world + self.rank) * self.batch_size
        return range(start, start + self.batch_size)

    def draw(self, draw: int) -> Iterator[dict]:
        """The micro-batches of one optimizer step, on the CPU."""
        self.begun = vars(self.stream).copy()
        indices = self.stream.take(self.effective_batch)
        if self.pool is None:
            for micro in range(self.accumulation):
                yield collate([self.sampler(int(indices[p]), draw, p) for p in self.positions(micro)])
            return
        ready = self._ahead[1] if self._ahead is not None and self._ahead[0] == draw else self._submit(indices, draw)
        upcoming = self.stream.peek(self.effective_batch)
        self._ahead = (draw + 1, self._submit(upcoming, draw + 1)) if upcoming is not None else None
        for batch in ready:
            yield batch.result()

    def rewind(self) -> None:
        """Put the stream back to where the step now drawn began."""
        vars(self.stream).update(self.begun or {})

    def _submit(self, indices: np.ndarray, draw: int) -> list[Future]:
        samples = [
            [self.pool.submit(self.sampler, int(indices[p]), draw, p) for p in self.positions(micro)]
            for micro in range(self.accumulation)
        ]
        return [self.assembly.submit(self._assemble, futures) for futures in samples]

    def _assemble(self, futures: list[Future]) -> dict:
        batch = collate([future.result() for future in futures])
        if self.pins:
            sent = ("pixel_values", "mask", "has_mask", "counted", "time_ids")
            batch |= {key: batch[key].pin_memory() for key in sent if isinstance(batch.get(key), torch.Tensor)}
        return batch


__all__ = [
    "Loader", "Records", "Sampler", "Stream", "Target", "Transform", "chunks", "collate", "interpolation_mode",
    "load_records", "load_targets", "open_image", "prepare", "shuffled_text",
]  # fmt: skip
