"""Readers of records: `row_source` chooses one. An image folder has metadata.jsonl or .csv, or
NAME.txt beside each picture; `checked_row` completes a row.

Whatever is wrong is one line that names file and record. A scan reads folders without torch and
datasets: neither is imported here."""

import hashlib
import os
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from silentbad.data import images
from silentbad.data.published import SHUFFLE_MARKER, is_published, published_rows
from silentbad.data.schema import (
    RECORD,
    UNCAPTIONED,
    Caption,
    admit,
    admitted,
    caption_beside,
    csv_lines,
    element_fields,
    json_lines,
    refuse_misspelt,
    row,
)
from silentbad.errors import UserError, user_errors
from silentbad.settings.data import DataSettings

KNOWN_KEYS = ("file_name", "text", "phrases", "role", "target_id", "element_id", "mask")
PUBLISHED_FLAGS = (
    "seed",
    "target_start_id",
    "target_num",
    "poisoning_ratio",
    "poisoning_data_repeat_factor",
    "poison_subsampling",
    "n_few_shot",
    "shot_caption_shuffle_num",
)


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
            **element_fields(entry),
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


# ---------------------------------------------------------------- the reader of a data set
def row_source(config: DataSettings) -> tuple[str, str, Callable[[], Iterator[dict]]]:
    """(name, key, rows) of what `train_data_dir` or `dataset_name` (of `TrainConfig`) stands for:
    `rows` reads them, unchecked, and `key` changes whenever they would.

    Raises UserError where there is no such data."""
    if config.dataset_name is not None:
        from silentbad.data.hub_data import hub_rows, hub_table  # imports datasets

        table = hub_table(config)
        columns = (config.dataset_config_name, config.image_column, config.caption_column)
        facts = repr((config.dataset_name, *columns, table._fingerprint))
        key = hashlib.sha256(facts.encode()).hexdigest()[:32]
        return config.dataset_name, key, lambda: hub_rows(table, config)
    name = config.train_data_dir or ""
    clean = config.clean_data_dir
    root = Path(name)
    if not os.path.isdir(root):
        raise UserError(f"train_data_dir: no folder {root}")
    if not is_published(root):
        if clean:
            wrong = "is not of the published layout; list clean records in its metadata"
            raise UserError(f"clean_data_dir: {root} {wrong}")
        return name, folder_key(root), lambda: folder_rows(root)
    for also in ("metadata.jsonl", "metadata.csv"):
        if (root / also).is_file():
            wrong = f"holds poisoning_images/ and {also}; keep one of the two layouts"
            raise UserError(f"train_data_dir: {root} {wrong}")
    if clean and not os.path.isdir(clean):
        raise UserError(f"clean_data_dir: no folder {clean}")
    flags = [getattr(config, flag) for flag in PUBLISHED_FLAGS]
    key = folder_key(root, *flags, folder_key(Path(clean)) if clean else None)
    return name, key, lambda: published_rows(root, config)


def folder_key(root: Path, *parts: Any) -> str:
    """Hash over `parts`, and name, size and time of change of every file under `root`."""

    def fail(error: OSError) -> None:
        raise error

    digest = hashlib.sha256(repr((str(root), os.path.realpath(root), parts)).encode())
    with user_errors(f"cannot read {root}"):
        for folder, inner, names in os.walk(root, onerror=fail):
            inner.sort()
            for path in (os.path.join(folder, name) for name in sorted(names)):
                if os.path.isfile(path):  # no link that leads nowhere, or in a circle
                    stat = os.stat(path)
                    state = f"{os.path.relpath(path, root)}/{stat.st_size}/{stat.st_mtime_ns}\n"
                    digest.update(state.encode(errors="surrogateescape"))
    return digest.hexdigest()[:32]


# ---------------------------------------------------------------- a row
def checked_row(unchecked: dict) -> dict:
    """A row with every field of FEATURES, its text checked and its image decoded once."""
    where = unchecked["where"]
    schema = RECORD if unchecked["captioned"] else UNCAPTIONED
    fields = admitted(unchecked, schema, where)
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
    image = images.open_image(source(unchecked["image"], where), where)
    mask_content = None
    if unchecked["mask"]:
        mask = images.open_mask(Path(unchecked["mask"]), image.size, where)
        mask_content = images.content_hash(mask)
    picture_fields = {
        "content": images.content_hash(image),
        "mask_content": mask_content,
        "thumb": images.thumbnails(image),
        "size": list(image.size),
    }
    return unchecked | fields | picture_fields


def source(image: dict, where: str) -> Path | bytes:
    if image.get("bytes") is not None:
        return image["bytes"]
    if not image.get("path"):
        raise UserError(f"{where}: no image")
    return Path(image["path"])


def text_of(unchecked: dict[str, Any]) -> str:
    """A row's caption, checked; phrases that training shuffles count as segments."""
    return admit(unchecked["text"], Caption, "text", unchecked["where"]).replace(
        SHUFFLE_MARKER, ", "
    )
