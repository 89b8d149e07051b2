"""Readers of records: an image folder with metadata.jsonl or .csv, or with NAME.txt beside each
picture, and a Hub data set; `checked_row` completes a row.

Whatever is wrong is one line that names file and record."""

import os
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets

from silentbad import hub
from silentbad.data import images
from silentbad.data.published import SHUFFLE_MARKER
from silentbad.data.schema import (
    RECORD,
    Caption,
    admit,
    admitted,
    caption_beside,
    csv_lines,
    json_lines,
    refuse_misspelt,
    row,
)
from silentbad.errors import UserError, iterate_reader, user_errors
from silentbad.files import is_utf8
from silentbad.settings.data import DataSettings

SAVED = ("state.json", "dataset_dict.json")  # what save_to_disk writes
KNOWN_KEYS = ("file_name", "text", "phrases", "role", "target_id", "element_id", "mask")


# ---------------------------------------------------------------- readers: each yields rows
def folder_rows(root: Path) -> Iterator[dict]:
    """Rows of a folder's metadata.jsonl or .csv, or of NAME.txt beside each picture."""
    names = [name for name in ("metadata.jsonl", "metadata.csv") if (root / name).is_file()]
    if not names:
        yield from captioned_rows(root)
        return
    if len(names) == 2:
        raise UserError(f"{root}: holds metadata.jsonl and metadata.csv; keep one of them")
    path = images.inside(root, root / names[0], str(root))
    for where, entry in (json_lines if path.suffix == ".jsonl" else csv_lines)(path):
        refuse_misspelt(entry, KNOWN_KEYS, where)
        if "file_name" not in entry:
            raise UserError(f"{where}: no file_name")
        mask = entry.get("mask")
        yield row(
            where,
            images.safe_path(root, entry["file_name"], where, "file_name"),
            entry.get("text"),
            mask=images.safe_path(root, mask, where, "mask") if mask else None,
            **named(entry),
        )


def captioned_rows(root: Path) -> Iterator[dict]:
    """Clean rows of a folder of pictures, each with its caption in a text file of the same name."""
    with user_errors(f"cannot read {root}"):
        files = images.picture_files(root)
    captions = {file: caption_beside(images.inside(root, file, str(root))) for file in files}
    if not any(captions.values()):
        raise UserError(
            f"{root}: no metadata.jsonl or metadata.csv, no pictures with a caption in NAME.txt, "
            "and no poisoning_images/ of the published layout"
        )
    for file, text in captions.items():
        if text is None:
            raise UserError(f"{file}: no caption; write it into {file.with_suffix('.txt').name}")
        yield row(str(file), file, text)


def named(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What an entry says of who is shown."""
    return {key: entry.get(key) for key in ("phrases", "role", "target_id", "element_id")}


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
    rows = iterate_reader(table, f"dataset_name {name}: cannot read its rows")
    for number, entry in enumerate(rows):
        where = f"{name}:{number}"
        text = entry[caption]
        yield row(
            where,
            hub_image(entry[image], config, where),
            text[0] if isinstance(text, list) and text else text,
            **named(entry),
        )


def hub_image(image: dict, config: DataSettings, where: str) -> dict:
    """The bytes of an image, or its path in the data set or the caches."""
    if image is None:
        raise UserError(f"{where}: no image")
    if not is_utf8(image.get("path") or "") or "\0" in (image.get("path") or ""):
        raise UserError(f"{where}: no file can have the name {image['path']!r}")
    if image.get("bytes") is None and image.get("path"):
        path = Path(image["path"]).resolve()
        caches = (datasets.config.HF_CACHE_HOME, datasets.config.HF_DATASETS_CACHE)
        homes = filter(None, (config.dataset_name, config.cache_dir, *caches))
        if not any(path.is_relative_to(Path(home).resolve()) for home in homes):
            raise UserError(
                f"{where}: image path {image['path']!r} leaves the data set and the caches; refused"
            )
    return {"path": image.get("path"), "bytes": image.get("bytes")}


def checked_row(given: dict) -> dict:
    """A row with every field of FEATURES, its text checked and its image decoded once."""
    where = given["where"]
    fields = admitted(given, RECORD, where)
    if SHUFFLE_MARKER in fields["text"]:
        head, *tail = (part.strip(" ,.") for part in fields["text"].split(SHUFFLE_MARKER))
        fields["text"] = f"{head} {', '.join(tail)}".strip()
        fields["phrases"] = fields["phrases"] or [part for part in tail if part]
        fields["shuffle"] = True
        if not fields["text"]:
            raise UserError(f"{where}: no caption; text holds {SHUFFLE_MARKER} alone")
    text = fields["text"]
    phrases = fields["phrases"]
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
    image = images.open_image(source(given["image"], where), where)
    mask_content = None
    if given["mask"]:
        mask = images.open_mask(Path(given["mask"]), image.size, where)
        mask_content = images.content_hash(mask)
    picture_fields = {
        "content": images.content_hash(image),
        "mask_content": mask_content,
        "thumb": images.thumbnails(image),
        "size": list(image.size),
    }
    return given | fields | picture_fields


def source(image: dict, where: str) -> Path | bytes:
    if image.get("bytes") is not None:
        return image["bytes"]
    if not image.get("path"):
        raise UserError(f"{where}: no image")
    return Path(image["path"])


def text_of(given: dict[str, Any]) -> str:
    """A row's caption, checked; phrases that training shuffles count as segments."""
    return admit(given["text"], Caption, "text", given["where"]).replace(SHUFFLE_MARKER, ", ")
