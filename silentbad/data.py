"""Records in a memory-mapped table, and what a draw makes of them.

A record is an image file (or the bytes of a Hub data set), `text`, `phrases` that stand verbatim in it, `role` in
{element, rehearsal, clean}, `target_id`, `element_id`, and a mask or none. All images are decoded once when the table
is built, so a broken one stops a run before it starts. Draws are addressed: what a record looks like at (draw,
position) depends on nothing that happened before.
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image, ImageOps
from torchvision.transforms import functional as TF

from .errors import UserError
from .readers import (
    Target,
    checked_row,
    content_hash,
    folder_rows,
    hub_rows,
    load_targets,
    open_image,
    open_mask,
    published_rows,
    source,
)
from .rng import generator

FEATURES = datasets.Features(
    {
        "image": {"path": datasets.Value("string"), "bytes": datasets.Value("binary")},
        "mask": datasets.Value("string"),
        "text": datasets.Value("string"),
        "phrases": datasets.List(datasets.Value("string")),
        "role": datasets.Value("string"),
        "target_id": datasets.Value("string"),
        "element_id": datasets.Value("string"),
        "shuffle": datasets.Value("bool"),
        "where": datasets.Value("string"),
        "content": datasets.Value("string"),
    }
)


PUBLISHED_FLAGS = (
    "seed", "target_start_id", "target_num", "poisoning_ratio", "poisoning_data_repeat_factor", "poison_subsampling",
    "n_few_shot", "shot_caption_shuffle_num",
)  # fmt: skip


def build_table(rows: Callable[[], Iterator[dict]], name: str, key: str, cache_dir: str | None) -> datasets.Dataset:
    """Memory-mapped table of the checked rows; `key` must change whenever they would."""
    made = 0

    def generate():
        nonlocal made
        for row in rows():
            made += 1
            yield checked_row(row)

    try:
        table = datasets.Dataset.from_generator(generate, features=FEATURES, cache_dir=cache_dir, fingerprint=key)
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, UserError):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:
            raise UserError(str(cause)) from None
        if not made:
            raise UserError(f"{name}: holds no record") from None
        raise
    return table


def folder_key(root: Path, *parts: Any) -> str:
    """Hash over the name, size and modification time of every file under `root`, and `parts`."""
    digest = hashlib.sha256(repr((str(root.resolve()), parts)).encode())
    for path in sorted(root.rglob("*")):
        if path.is_file():
            stat = path.stat()
            digest.update(f"{path.relative_to(root)}/{stat.st_size}/{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


def load_records(config: Any) -> "Records":
    """The records that `train_data_dir` or `dataset_name` (of `TrainConfig`) stands for."""
    name, clean = config.dataset_name or config.train_data_dir, config.clean_data_dir
    root = Path(name)
    if config.dataset_name is not None:
        said = (name, config.dataset_config_name, config.image_column, config.caption_column)
        key, rows = hashlib.sha256(repr(said).encode()).hexdigest()[:32], lambda: hub_rows(config)
    elif not root.is_dir():
        raise UserError(f"train_data_dir: no folder {root}")
    elif (root / "poisoning_images").is_dir():
        said = [getattr(config, flag) for flag in PUBLISHED_FLAGS] + [folder_key(Path(clean)) if clean else None]
        key, rows = folder_key(root, *said), lambda: published_rows(root, config)
    elif clean:
        raise UserError(f"clean_data_dir: {root} is not of the published layout; list clean records in its metadata")
    else:
        key, rows = folder_key(root), lambda: folder_rows(root)
    table = build_table(rows, name, key, config.cache_dir)
    if config.max_train_samples is not None and config.max_train_samples < len(table):
        order = torch.randperm(len(table), generator=generator(config.seed, "max_train_samples")).tolist()
        table = table.select(sorted(order[: config.max_train_samples]))
    return Records(table, name)


def prepare(config: Any, tokenizer: Any, first: Any, say: Callable) -> tuple["Records", "Records | None", list[Target]]:
    """(records to train on, clean ones held out, targets), all checked; `first` lets one process build the table."""
    targets = load_targets(config.validation.targets) if config.validation.targets else []
    with first():
        records = load_records(config)
    if not config.allow_target_images:
        records.refuse_targets(targets)
    for line in records.check_captions(tokenizer)[:5]:
        say(f"warning: {line}; its end is cut off")
    return *records.hold_out(config.held_out_clean, config.seed), targets


class Records:
    """A table of records; images and masks are opened when asked for."""

    def __init__(self, table: datasets.Dataset, name: str):
        self.table, self.name = table, name
        self.role: list[str] = list(table["role"])
        self.target_id: list[str] = list(table["target_id"])
        self.element_id: list[str] = list(table["element_id"])
        self.phrases: list[list[str]] = list(table["phrases"])

    def __len__(self) -> int:
        return len(self.table)

    @property
    def text(self) -> list[str]:
        return list(self.table["text"])

    def row(self, index: int) -> dict:
        return self.table[int(index)]

    def open(self, index: int) -> tuple[dict, Image.Image, Image.Image | None]:
        """(row, RGB image, mask or None) of a record."""
        row = self.row(index)
        image = open_image(source(row["image"], row["where"]), row["where"])
        return row, image, open_mask(Path(row["mask"]), image.size, row["where"]) if row["mask"] else None

    def where(self, index: int) -> str:
        """File and line of a record, for messages."""
        return self.row(index)["where"]

    def refuse_targets(self, targets: list[Target]) -> None:
        """Refuse records whose pixels equal a target's."""
        held = {content_hash(target.image): target.target_id for target in targets}
        for index, content in enumerate(self.table["content"] if held else []):
            if content in held:
                raise UserError(
                    f"{self.where(index)}: the image equals target {held[content]!r}; recovery must not train on its "
                    "target (allow_target_images: true lets it)"
                )

    def hold_out(self, count: int, seed: int) -> tuple["Records", "Records | None"]:
        """(records to train on, clean records kept from training): at most a tenth of the clean ones."""
        clean = [i for i, role in enumerate(self.role) if role == "clean"]
        order = torch.randperm(len(clean), generator=generator(seed, "held_out")).tolist()
        held = sorted(clean[i] for i in order[: min(count, len(clean) // 10)])
        if not held:
            return self, None
        rest = np.setdiff1d(np.arange(len(self)), held)
        return Records(self.table.select(rest), self.name), Records(self.table.select(held), self.name)

    def check_captions(self, tokenizer: Any) -> list[str]:
        """Refuse captions whose phrases the tokenizer's window cuts off; return lines on other long captions."""
        window, texts, cut = tokenizer.model_max_length, self.table.select_columns(["text"]), []
        for start in range(0, len(self), 1024):
            encoded = tokenizer(texts[start : start + 1024]["text"], truncation=False)["input_ids"]
            for index, ids in enumerate(encoded, start):
                if len(ids) <= window:
                    continue
                kept = tokenizer.decode(ids[: window - 1], skip_special_tokens=True).casefold()
                lost = [p for p in self.phrases[index] if _letters(p) not in _letters(kept)]
                line = f"{self.where(index)}: caption of {len(ids)} tokens, the window is {window}"
                if lost:
                    raise UserError(f"{line}; cut off: {', '.join(map(repr, lost))}; shorten it")
                cut.append(line)
        return cut


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

    def resize(self, image: Image.Image, mask: Image.Image | None) -> tuple[Image.Image, Image.Image | None]:
        image = TF.resize(image, self.resolution, interpolation_mode(self.interpolation))
        return image, None if mask is None else mask.resize(image.size, Image.Resampling.BILINEAR)

    def crop(
        self, image: Image.Image, mask: Image.Image | None, address: tuple[int | str, ...]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The window and flip of this address."""
        width, height = image.size
        u, v, flip = torch.rand(3, generator=generator(*address, "transform")).tolist()
        if self.center_crop:
            u = v = 0.5
        left, top = round(u * (width - self.resolution)), round(v * (height - self.resolution))
        box = (left, top, left + self.resolution, top + self.resolution)
        pair = [picture.crop(box) for picture in (image, mask) if picture is not None]
        if self.random_flip and flip < 0.5:
            pair = [ImageOps.mirror(picture) for picture in pair]
        tensors = [TF.pil_to_tensor(picture) for picture in pair]
        return tensors[0], tensors[1] if mask is not None else None


def interpolation_mode(name: str) -> TF.InterpolationMode:
    """torchvision's interpolation of that name (diffusers' `resolve_interpolation_mode`)."""
    from diffusers.training_utils import resolve_interpolation_mode

    try:
        return resolve_interpolation_mode(name)
    except ValueError:
        modes = ", ".join(mode.value for mode in TF.InterpolationMode)
        raise UserError(f"image_interpolation_mode: unknown filter {name!r}; there are: {modes}") from None


@dataclass
class Sampler:
    """What a record looks like at (draw, position): text, uint8 pixels (3,R,R), uint8 mask (1,R,R) or none.

    `rehearse(record, address)` may return another record (a dict of FIELDS) in place of the drawn one, or None.
    """

    records: Records
    transform: Transform
    seed: int
    shuffle: bool = False
    cache_bytes: int = 0
    rehearse: Callable[[dict, tuple], dict | None] | None = None

    FIELDS = ("image", "mask", "text", "phrases", "role", "target_id", "element_id")

    def __post_init__(self):
        self._cache: dict[int, dict] = {}
        self._used = 0

    def load(self, index: int) -> dict:
        """A record as a dict of FIELDS, `shuffle` and `index`, image and mask resized; kept while the budget lasts."""
        if index in self._cache:
            return dict(self._cache[index])
        row, image, mask = self.records.open(index)
        image, mask = self.transform.resize(image, mask)
        record = {**row, "image": image, "mask": mask, "phrases": list(row["phrases"])}
        record = {key: record[key] for key in (*self.FIELDS, "shuffle")} | {"index": int(index)}
        size = image.width * image.height * (3 if mask is None else 4)
        if self._used + size <= self.cache_bytes:
            self._cache[index] = record
            self._used += size
        return dict(record)

    def __call__(self, index: int, draw: int, position: int) -> dict:
        address = (self.seed, "draw", draw, position)
        record = self.load(index)
        fixed = self.transform.is_fixed(record["image"].size)
        text = record["text"]
        if (self.shuffle or record["shuffle"]) and len(record["phrases"]) > 1:
            text = shuffled_text(text, record["phrases"], generator(*address, "phrases"))
        record["text"] = text
        if self.rehearse is not None:
            rehearsed = self.rehearse(record, (draw, position))
            if rehearsed is not None:
                fixed = fixed and rehearsed["image"] is record["image"]
                record = rehearsed
        pixels, mask = self.transform.crop(record["image"], record["mask"], address)
        kept = {key: record[key] for key in self.FIELDS[2:]}
        return kept | {"pixels": pixels, "mask": mask, "index": index, "position": position, "fixed": fixed}

    def pictures(self, indices: list[int]) -> list[dict]:
        """Plain samples of records, outside any step: no shuffle, no rehearsal, the window of draw 0."""
        samples = []
        for index in indices:
            record = self.load(index)
            pixels, mask = self.transform.crop(record["image"], record["mask"], (self.seed, "picture", index))
            kept = {key: record[key] for key in self.FIELDS[2:]}
            fixed = self.transform.is_fixed(record["image"].size)
            samples.append(kept | {"pixels": pixels, "mask": mask, "index": index, "position": 0, "fixed": fixed})
        return samples


def collate(samples: list[dict], tokenizer: Any) -> dict[str, Any]:
    """One micro-batch: pixel_values (B,3,R,R) in [-1,1], mask (B,1,R,R) in [0,1], input_ids (B,L), ...

    `fixed` (B,) says which images look the same at every draw, so that their latents may be kept.
    """
    pixels = torch.stack([sample["pixels"] for sample in samples]).float() / 127.5 - 1
    ones = torch.full_like(samples[0]["pixels"][:1], 255)
    masks = torch.stack([ones if sample["mask"] is None else sample["mask"] for sample in samples])
    texts = [sample["text"] for sample in samples]
    window = tokenizer.model_max_length
    encoded = tokenizer(texts, max_length=window, padding="max_length", truncation=True, return_tensors="pt")
    lists = {k: [sample[k] for sample in samples] for k in ("phrases", "role", "target_id", "element_id", "fixed")}
    return lists | {
        "pixel_values": pixels,
        "mask": masks.float() / 255,
        "has_mask": torch.tensor([sample["mask"] is not None for sample in samples]),
        "input_ids": encoded.input_ids,
        "text": texts,
        "index": torch.tensor([sample["index"] for sample in samples]),
        "position": torch.tensor([sample["position"] for sample in samples]),
    }


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

    Threads decode the next step's images ahead when they lie in the current epoch.
    """

    def __init__(
        self,
        sampler: Sampler,
        stream: Stream,
        tokenizer: Any,
        *,
        batch_size: int,
        accumulation: int = 1,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
    ):
        self.sampler, self.stream, self.tokenizer = sampler, stream, tokenizer
        self.batch_size, self.accumulation, self.rank, self.world = batch_size, accumulation, rank, world
        self.effective_batch = batch_size * accumulation * world
        self.pool = ThreadPoolExecutor(workers) if workers else None
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
                yield collate([self.sampler(int(indices[p]), draw, p) for p in self.positions(micro)], self.tokenizer)
            return
        ready = self._ahead[1] if self._ahead is not None and self._ahead[0] == draw else self._submit(indices, draw)
        upcoming = self.stream.peek(self.effective_batch)
        self._ahead = (draw + 1, self._submit(upcoming, draw + 1)) if upcoming is not None else None
        for futures in ready:
            yield collate([future.result() for future in futures], self.tokenizer)

    def rewind(self) -> None:
        """Put the stream back to where the step now drawn began."""
        vars(self.stream).update(self.begun or {})

    def _submit(self, indices: np.ndarray, draw: int) -> list[list]:
        return [
            [self.pool.submit(self.sampler, int(indices[p]), draw, p) for p in self.positions(micro)]
            for micro in range(self.accumulation)
        ]


__all__ = [
    "Loader", "Records", "Sampler", "Stream", "Target", "Transform", "collate", "interpolation_mode", "load_records",
    "load_targets", "open_image", "prepare", "shuffled_text",
]  # fmt: skip
