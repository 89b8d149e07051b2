"""Readers of records: an image folder with metadata.jsonl or .csv, or with NAME.txt beside each
picture, and a Hub data set; `checked_row` completes a row.

Whatever is wrong is one line that names file and record."""

import os
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets

from silentbad import hub
from silentbad.data.images import (
    _by,
    content_hash,
    inside,
    open_image,
    open_mask,
    picture_files,
    safe_path,
    thumbnails,
)
from silentbad.data.published import SHUFFLE_MARKER
from silentbad.data.schema import (
    RECORD,
    admitted,
    caption,
    caption_beside,
    csv_lines,
    json_lines,
    refuse_misspelt,
)
from silentbad.errors import UserError, iterate_reader, user_errors
from silentbad.files import is_utf8
from silentbad.settings.data import DataSettings

SAVED = ("state.json", "dataset_dict.json")  # what save_to_disk writes
KNOWN_KEYS = ("file_name", "text", "phrases", "role", "target_id", "element_id", "mask")


# ---------------------------------------------------------------- readers: each yields rows
def folder_rows(root: Path) -> Iterator[dict]:
    """Rows of a folder with metadata.jsonl or metadata.csv; without either, with NAME.txt beside
    each picture."""
    names = [name for name in ("metadata.jsonl", "metadata.csv") if (root / name).is_file()]
    if not names:
        yield from captioned_rows(root)
        return
    if len(names) == 2:
        raise UserError(f"{root}: holds metadata.jsonl and metadata.csv; keep one of them")
    path = inside(root, root / names[0], str(root))
    for where, entry in (json_lines if path.suffix == ".jsonl" else csv_lines)(path):
        refuse_misspelt(entry, KNOWN_KEYS, where)
        if "file_name" not in entry:
            raise UserError(f"{where}: no file_name")
        mask = entry.get("mask")
        phrases = entry.get("phrases")
        yield {
            "image": {
                "path": str(safe_path(root, entry["file_name"], where, "file_name")),
                "bytes": None,
            },
            "mask": str(safe_path(root, mask, where, "mask")) if mask else "",
            "text": entry.get("text"),
            "phrases": phrases,
            "role": entry.get("role") or ("element" if phrases else "clean"),
            "target_id": entry.get("target_id"),
            "element_id": entry.get("element_id"),
            "where": where,
        }


def captioned_rows(root: Path) -> Iterator[dict]:
    """Clean rows of a folder of pictures, each with its caption in a text file of the same name."""
    with user_errors(f"cannot read {root}"):
        files = picture_files(root)
    captions = {file: caption_beside(inside(root, file, str(root))) for file in files}
    if not any(captions.values()):
        raise UserError(
            f"{root}: no metadata.jsonl or metadata.csv, no pictures with a caption in "
            f"NAME.txt, and no "
            "poisoning_images/ of the published layout"
        )
    for file, text in captions.items():
        if text is None:
            raise UserError(f"{file}: no caption; write it into {file.with_suffix('.txt').name}")
        yield {
            "image": {"path": str(file), "bytes": None},
            "mask": "",
            "text": text,
            "phrases": None,
            "role": "clean",
            "target_id": None,
            "element_id": None,
            "where": str(file),
        }


@contextmanager
def quietly() -> Iterator[None]:
    """Without the reports of datasets: what it would say of a data set is refused in one line."""
    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)


def hub_table(config: DataSettings) -> datasets.Dataset:
    """The train split of `dataset_name`; its fingerprint changes with the data set's revision."""
    name = config.dataset_name or ""
    with hub.fetching(name, f"dataset_name {name}: cannot load it"), quietly():
        if any(os.path.isfile(os.path.join(name, file)) for file in SAVED):
            held = datasets.load_from_disk(name)
            return held["train"] if isinstance(held, datasets.DatasetDict) else held
        return datasets.load_dataset(
            name, config.dataset_config_name, split="train", cache_dir=config.cache_dir
        )


def hub_rows(table: datasets.Dataset, config: DataSettings) -> Iterator[dict]:
    """Rows of a Hub data set's table; extra record columns are used where present."""
    name = config.dataset_name
    columns = table.column_names
    image, caption = config.image_column or "image", config.caption_column or "text"
    for key, column in (("image_column", image), ("caption_column", caption)):
        if column not in columns:
            raise UserError(
                f"{key}: {name} has no column {column!r}; there are: {', '.join(columns)}"
            )
    if not isinstance(table.features[image], datasets.Image):
        raise UserError(f"image_column: {name}.{image} holds no images")
    table = table.cast_column(image, datasets.Image(decode=False))
    for number, entry in enumerate(
        iterate_reader(table, f"dataset_name {name}: cannot read its rows")
    ):
        text = entry[caption]
        phrases = entry.get("phrases") or []
        yield {
            "image": hub_image(entry[image], config, f"{name}:{number}"),
            "mask": "",
            "text": text[0] if isinstance(text, list) and text else text,
            "phrases": phrases,
            "role": entry.get("role") or ("element" if phrases else "clean"),
            "target_id": entry.get("target_id"),
            "element_id": entry.get("element_id"),
            "where": f"{name}:{number}",
        }


def hub_image(image: dict, config: DataSettings, where: str) -> dict:
    """The bytes of an image, or its path: into a local data set or the caches, since a Hub table
    may name any file."""
    if image is None:
        raise UserError(f"{where}: no image")
    if not is_utf8(image.get("path") or "") or "\0" in (image.get("path") or ""):
        raise UserError(f"{where}: no file can have the name {image['path']!r}")
    if image.get("bytes") is None and image.get("path"):
        caches = (
            config.cache_dir,
            datasets.config.HF_CACHE_HOME,
            datasets.config.HF_DATASETS_CACHE,
        )
        path = Path(image["path"]).resolve()
        if not any(
            path.is_relative_to(Path(home).resolve())
            for home in (config.dataset_name, *caches)
            if home
        ):
            raise UserError(
                f"{where}: image path {image['path']!r} leaves the data set and the caches; refused"
            )
    return {"path": image.get("path"), "bytes": image.get("bytes")}


def checked_row(row: dict) -> dict:
    """A row with every field of FEATURES, its text checked and its image decoded once."""
    where = row["where"]
    fields = admitted(row, RECORD, where)
    text, phrases, shuffle = fields["text"], fields["phrases"], bool(row.get("shuffle"))
    if SHUFFLE_MARKER in text:
        head, *tail = (part.strip(" ,.") for part in text.split(SHUFFLE_MARKER))
        phrases, shuffle, text = (
            phrases or [part for part in tail if part],
            True,
            f"{head} {', '.join(tail)}".strip(),
        )
        if not text:
            raise UserError(f"{where}: no caption; text holds {SHUFFLE_MARKER} alone")
    for phrase in phrases:
        if phrase not in text:
            composed = unicodedata.normalize("NFC", phrase) in unicodedata.normalize("NFC", text)
            why = "; they differ in Unicode composition, save both in NFC" if composed else ""
            raise UserError(
                f"{where}: phrase {phrase!r} does not stand in its caption {text!r}{why}"
            )
    if fields["role"] == "element" and not (phrases or fields["element_id"]):
        raise UserError(
            f"{where}: role element needs phrases or element_id, which say what element it shows"
        )
    size, content, thumb = inspect_image(source(row["image"], where), where)
    if min(size) < 2:
        raise UserError(f"{where}: the image is {_by(size)} pixels")
    if row["mask"]:
        open_mask(Path(row["mask"]), size, where)
    found = {"text": text, "phrases": phrases, "shuffle": shuffle}
    return row | fields | found | {"content": content, "thumb": thumb, "size": list(size)}


def inspect_image(source: Path | bytes, where: str) -> tuple[tuple[int, int], str, bytes]:
    """(size, content hash, thumbnails) of an image; a file listed again is decoded again only if
    it has changed."""
    state = None
    if isinstance(source, Path) and os.path.isfile(source):
        stat = source.stat()
        state = (str(source), stat.st_size, stat.st_mtime_ns)
        if state in _LOOKED_AT:
            return _LOOKED_AT[state]
    image = open_image(source, where)
    found = image.size, content_hash(image), thumbnails(image)
    if state is not None:
        if len(_LOOKED_AT) >= 4096:
            _LOOKED_AT.clear()
        _LOOKED_AT[state] = found
    return found


_LOOKED_AT: dict[tuple, tuple] = {}


def source(image: dict, where: str) -> Path | bytes:
    if image.get("bytes") is not None:
        return image["bytes"]
    if not image.get("path"):
        raise UserError(f"{where}: no image")
    return Path(image["path"])


def text_of(row: dict[str, Any]) -> str:
    """A row's caption, checked; phrases that training shuffles count as segments."""
    return admitted(row, {"text": caption}, row["where"])["text"].replace(SHUFFLE_MARKER, ", ")
