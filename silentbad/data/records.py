"""Records in a memory-mapped table, and the checks of them.

A record is an image file (or the bytes of a Hub data set), `text`, `phrases` that occur verbatim in
it, `role` in {element, rehearsal, clean}, `target_id`, `element_id`, and a mask or none. All images
are decoded once when the table is built, so a broken one stops a run before it starts. Draws are
addressed: the look of a record at (draw, position) does not depend on earlier draws."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image

from silentbad.data import images
from silentbad.data.elements import DataInfo
from silentbad.data.formats import mask_of, masked_by_itself, row_source, source
from silentbad.data.picture_parts import around_twice, as_read, check_phrases, regions_of, same
from silentbad.data.schema import ROLES
from silentbad.data.table import (
    BLOCK,
    TextLists,
    blocks,
    build_table,
    cached_check,
    numbers,
    rows_with,
    texts,
    vocabulary,
)
from silentbad.data.targets import Target
from silentbad.errors import UserError
from silentbad.rng import permutation
from silentbad.settings.train import TrainConfig

SHOWN = 5  # long captions that are named
REMARKS = {
    images.TRANSPARENT: "transparent parts are trained on as white",
    images.FRAMES: "only the first frame is trained on",
}


def load_records(config: TrainConfig) -> "Records":
    """The records in `train_data_dir` or `dataset_name` (of `TrainConfig`)."""
    name, key, rows = row_source(config)
    if config.alpha_as_mask:
        plain = rows
        key = f"{key}-own-alpha"
        rows = lambda: map(masked_by_itself, plain())  # noqa: E731
    records = Records(build_table(rows, name, key, config.cache_dir), name, key)
    if config.max_train_samples is not None and config.max_train_samples < len(records):
        order = permutation(len(records), config.seed, "max_train_samples")
        chosen = np.sort(order[: config.max_train_samples])
        return records.select(chosen, f"{key}-{config.max_train_samples}-{config.seed}")
    return records


def refuse_changed(image: Image.Image | None, content: str, what: str) -> None:
    """Refuse a picture that changed after the table was built."""
    if image is None or images.content_hash(image) != content:
        raise UserError(f"{what} has changed since this command started; start again")


@dataclass(eq=False)
class Records:
    """Rows (all, unless some are chosen) of a table; columns are read, images and masks opened when
    asked for.

    `key` identifies everything that the checks of these rows depend on."""

    table: datasets.Dataset
    name: str
    key: str = ""
    rows: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.table) if self.rows is None else len(self.rows)

    def select(self, rows: np.ndarray, key: str = "") -> "Records":
        """Some of these records, in this order; `key` is their own."""
        return Records(table=self.table, name=self.name, key=key, rows=self.numbers[rows])

    def joined(self, others: "Records") -> "Records":
        """These records, and others behind them."""
        table = datasets.concatenate_datasets([self.table, others.table])
        rows = np.concatenate([self.numbers, len(self.table) + others.numbers])
        return Records(table=table, name=self.name, key=f"{self.key}-and-{others.key}", rows=rows)

    def column(self, name: str) -> pa.ChunkedArray:
        """A column as Arrow holds it: mapped, or a copy of the chosen rows."""
        whole = self.table.data.column(name)
        return whole if self.rows is None else whole.take(pa.array(self.rows))

    @property
    def numbers(self) -> np.ndarray:
        """The rows of the table (R,) that these records are."""
        return np.arange(len(self.table)) if self.rows is None else self.rows

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

    @property
    def masked(self) -> int:
        """How many have a mask."""
        return pc.sum(pc.greater(pc.binary_length(self.column("mask")), 0)).as_py() or 0

    def info(self, withheld: dict[str, list[str]] | None = None) -> DataInfo:
        """The element that each record shows; `withheld` {target: phrases} of elements left out."""
        columns = (self.role, self.target_id, self.element_id, self.phrases)
        return DataInfo(*columns, withheld=withheld)

    def census(self) -> str:
        """How many records there are, by role, with a mask, and with phrases: one line."""
        counted = pc.value_counts(self.column("role")).to_pylist()
        count_of = {entry["values"]: entry["counts"] for entry in counted}
        roles = ", ".join(f"{count_of[role]} {role}" for role in ROLES if role in count_of)
        named = pc.sum(pc.greater(pc.list_value_length(self.column("phrases")), 0)).as_py() or 0
        return f"{len(self)} records ({roles}), {self.masked} with a mask, {named} with phrases"

    def remarks(self) -> Iterator[str]:
        """A line on the pictures that are transparent in part, and on those of several frames."""
        for kind, remark in REMARKS.items():
            rows = np.flatnonzero(pc.match_substring(self.column("remark"), kind).to_numpy())
            if len(rows):
                yield f"{len(rows)} records: {remark}; first {self.where(int(rows[0]))}"

    def not_used(self) -> Iterator[str]:
        """A line on the unused pictures: those that no row names in the folders of the table's
        pictures, and those with captions in their subfolders. Another on pictures of formats that
        are not read."""
        used = pc.struct_field(self.table.data.column("image"), "path")
        folders = pc.unique(pc.replace_substring_regex(used, "/[^/]*$", "")).to_pylist()
        real = [Path(folder) for folder in folders if folder and Path(folder).is_dir()]
        there = [str(file) for folder in real for file in images.picture_files(folder)]
        below = [p for folder in real for p in sorted(folder.iterdir()) if p.is_dir()]
        inside = [file for p in below if p.name[0] != "." for file in images.picture_files(p)]
        there += [str(file) for file in inside if file.with_suffix(".txt").is_file()]
        named = [used, self.table.data.column("mask")]
        is_used = np.zeros(len(there), dtype=bool)
        for column in named:
            is_used |= pc.is_in(pa.array(there, pa.string()), value_set=column).to_numpy(False)
        left = [file for file, known in zip(there, is_used, strict=True) if not known]
        if left:
            yield f"{len(left)} pictures belong to no record and are not used; first {left[0]}"
        unread = [f for folder in real for f in images.picture_files(folder, images.UNREAD)]
        if unread:
            yield f"{len(unread)} pictures are of a format that is not read; first {unread[0]}"

    def row(self, index: int) -> dict:
        return self.table[int(index if self.rows is None else self.rows[index])]

    def open(
        self, index: int, picture: bool = True
    ) -> tuple[dict, Image.Image | None, Image.Image | None]:
        """(row, RGB image or None where no `picture` is asked for, mask or None) of a record."""
        row = self.row(index)
        where = row["where"]
        image = mask = None
        if picture:
            image = images.open_image(source(row["image"], where), where)
            refuse_changed(image, row["content"], f"{where}: the image")
        if row["mask"]:
            size = tuple(row["size"]) if image is None else image.size
            mask = mask_of(row, size, where)
            refuse_changed(mask, row["mask_content"], f"{where}: mask {row['mask']}")
        return row, image, mask

    def where(self, index: int) -> str:
        """File and line of a record, for messages."""
        return self.row(index)["where"]

    def refuse_targets(self, targets: list[Target]) -> None:
        """Refuse records that show a target, or a changed copy of it."""
        if not targets:
            return
        reason = "recovery must not train on its target (allow_target_images: true permits it)"
        target_of = {images.content_hash(target.image): target.target_id for target in targets}
        for index in rows_with(self.column("content"), list(target_of)):
            name = target_of[self.row(index)["content"]]
            raise UserError(f"{self.where(index)}: the image equals target {name!r}; {reason}")

        def refuse_copies() -> list[str]:
            shown = [(t.target_id, view) for t in targets for view in images.views(t.image)]
            target_thumbs = np.concatenate(
                [images.as_floats(images.thumbnail(view)) for _, view in shown]
            )
            for number, block in enumerate(blocks(self.column("thumb"))):
                thumbs = [images.as_floats(each) for each in block]
                copy = images.copies(np.concatenate(thumbs), target_thumbs)
                if copy is not None:
                    row = np.repeat(np.arange(len(thumbs)), list(map(len, thumbs)))[copy[0]]
                    where = self.where(number * BLOCK + int(row))
                    name = shown[copy[1]][0]
                    raise UserError(
                        f"{where}: the image is a near copy of target {name!r}; {reason}"
                    )
            return []

        key = hashlib.sha256(f"{self.key}{sorted(target_of.items())}".encode()).hexdigest()[:32]
        cached_check(self.table, f"targets-{key}", refuse_copies)

    def unmatched_targets(self, targets: list[Target]) -> list[str]:
        """A line each on element records without a target here, and on phrases never shown."""
        if not targets:
            return []
        validated = {t.target_id for t in targets}
        target_ids = self.target_id
        shown: dict[str, set[str]] = {}  # by target
        others = []
        phrases = self.phrases
        for k in np.flatnonzero(np.asarray(self.role, dtype=object) == "element").tolist():
            shown.setdefault(target_ids[k], set()).update(map(as_read, phrases[k]))
            if target_ids[k] not in validated:
                others.append(target_ids[k])
        named = ", ".join(map(repr, sorted(set(others))[:SHOWN]))
        lines = [
            f"{len(others)} element records are of no target that is validated: target_id {named}"
        ]
        return lines[: len(others)] + [
            f"target {target.target_id!r}: no element record has its phrase {phrase!r}, asked "
            f"for and never shown"
            for target in targets
            for phrase in target.phrases
            if target.target_id in shown and as_read(phrase) not in shown[target.target_id]
        ]

    def check_parts(self) -> list[str]:
        """Refuse elements of one target that have the same phrase; return a line on each two masks
        that are the same or both cover the edges, among the first records of the elements.

        A table is checked once."""
        key = hashlib.sha256(self.key.encode()).hexdigest()[:32]
        return cached_check(self.table, f"parts-{key}", lambda: [*self._faults_of_parts()])

    def _faults_of_parts(self) -> Iterator[str]:
        info = self.info()
        for target, elements in info.elements_of.items():
            named = {info.phrase[i]: int(info.rows[i][0]) for i in elements if info.phrase[i]}
            where = f"{self.where(int(info.rows[elements[-1]][0]))}: target {target!r}"
            check_phrases([info.phrase[i] for i in elements if info.phrase[i]], where)
            masks = [self.open(row, picture=False)[2] for row in named.values()]
            if len({mask.size for mask in masks if mask is not None}) == 1:
                regions = regions_of([*named], masks)  # of other pictures: one may lie in another
                for line in (*same(regions), *around_twice(regions)):
                    yield f"{where}: {line}"

    def refuse_random_windows(self) -> None:
        """Refuse random windows of elements whose masks are estimated from their places."""
        width, height = self.sizes.T
        shown = np.asarray(self.role, dtype=object) == "element"
        for index in np.flatnonzero(shown & (width != height)).tolist():
            raise UserError(
                f"{self.where(index)}: the image is {width[index]}x{height[index]} and would be "
                f"cut at random, but "
                "memory.region.name=estimated finds elements at their native place; set center_crop"
            )

    def without(self, elements: list[str]) -> "Records":
        """The records without those of some elements, named as in `DataInfo.keys`, with their
        target or without it.

        Raises UserError where no record shows one of them."""
        rest = np.flatnonzero(~self._shows(elements))
        return self.select(rest, f"{self.key}-without-{sorted(elements)}")

    def showing(self, elements: list[str]) -> "Records":
        """The records of these elements alone, named likewise."""
        return self.select(np.flatnonzero(self._shows(elements)))

    def _shows(self, elements: list[str]) -> np.ndarray:
        """Whether each record (R,) shows one of these elements."""
        info = self.info()
        shows = np.zeros(len(self), dtype=bool)
        for name in elements:
            of_name = [
                rows
                for key, target, rows in zip(info.keys, info.target, info.rows, strict=True)
                if name in (key, key.removeprefix(f"{target}/"))
            ]
            if not of_name:
                others = ", ".join(sorted(info.keys)[:8])
                raise UserError(f"withhold: no record shows {name!r}; elements are: {others}")
            shows[np.concatenate(of_name)] = True
        return shows

    def hold_out(self, clean: int, elements: int, seed: int) -> tuple["Records", "Records | None"]:
        """(records to train on, those kept from training): so many clean ones, at most a tenth of
        them, and so many of each element, at most a quarter of its own. A picture that is listed
        several times counts once, and is kept from training wherever it is listed."""
        contents = self.column("content")
        picture = pc.index_in(contents, value_set=pc.unique(contents)).to_numpy()  # of each record

        def drawn(rows: np.ndarray, count: int, share: int, *address: str) -> np.ndarray:
            rows = rows[np.sort(np.unique(picture[rows], return_index=True)[1])]
            order = permutation(len(rows), seed, "held_out", *address)
            return rows[order[: min(count, len(rows) // share)]]

        parts = [drawn(rows_with(self.column("role"), ["clean"]), clean, 10)]
        if elements:
            info = self.info()
            of_elements = zip(info.keys, info.rows, strict=True)
            parts += [drawn(rows, elements, 4, key) for key, rows in of_elements]
        held_out = np.sort(np.concatenate(parts))
        if not len(held_out):
            return self, None
        rest = np.flatnonzero(~np.isin(picture, picture[held_out]))
        return self.select(rest), self.select(held_out)

    def check_captions(self, tokenizer: Any) -> list[str]:
        """Refuse captions whose phrases the tokenizer's window cuts off; return lines on the first
        other long ones.

        A table is checked once for each tokenizer."""
        key = hashlib.sha256(f"{self.key}{vocabulary(tokenizer)}".encode()).hexdigest()[:32]
        return cached_check(self.table, f"captions-{key}", lambda: self._long_captions(tokenizer))

    def _long_captions(self, tokenizer: Any) -> list[str]:
        window = tokenizer.model_max_length
        phrases = self.phrases
        cut: list[str] = []
        for number, block in enumerate(blocks(self.column("text"))):
            encoded = tokenizer(block, truncation=False, verbose=False)["input_ids"]
            for index, ids in enumerate(encoded, number * BLOCK):
                if len(ids) <= window:
                    continue
                text_left = tokenizer.decode(ids[: window - 1], skip_special_tokens=True).casefold()
                lost = [p for p in phrases[index] if _letters(p) not in _letters(text_left)]
                line = f"{self.where(index)}: caption of {len(ids)} tokens, the window is {window}"
                if lost:
                    raise UserError(f"{line}; cut off: {', '.join(map(repr, lost))}; shorten it")
                if len(cut) < SHOWN:
                    cut.append(line)
        return cut


def _letters(text: str) -> str:
    return re.sub(r"\s+", "", text.casefold())
