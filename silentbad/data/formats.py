"""Readers of records: `row_source` chooses one, `folder_rows` reads all image folders;
`checked_row` completes a row.

Every error is one line that names file and record. A scan reads folders without torch and datasets:
neither is imported here."""

import hashlib
import itertools
import os
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from silentbad.data import images
from silentbad.data.published import SHUFFLE_MARKER, as_trained, is_published, published_rows
from silentbad.data.schema import (
    RECORD,
    UNCAPTIONED,
    admitted,
    caption_beside,
    csv_lines,
    element_fields,
    json_lines,
    refuse_misspelt,
    row,
    text_lines,
)
from silentbad.errors import UserError, brief, user_errors
from silentbad.files import check_folder
from silentbad.settings.data import DataSettings

METADATA = ("metadata.jsonl", "metadata.csv")
REPEATED = re.compile(r"([0-9]{1,4})_(.+)")  # sd-scripts' folders: repeats, what they show
PACKED = (".arrow", ".parquet", ".tar")  # of a data set that `datasets` reads
ITSELF = "itself"  # as a row's mask: the opaque part of its picture
TABLE = re.compile(r"\.(json.?|csv|tsv)")  # suffixes of what may be meant as metadata
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
def folder_rows(root: Path, columns: Mapping[str, str] | None = None) -> Iterator[dict]:
    """Rows of a folder: of its metadata.jsonl or .csv or of those in train/ (as the imagefolder of
    datasets reads them), of pictures with captions beside them, or of folders N_name/ of pictures
    (sd-scripts), each listed N times.

    `columns` gives other names of metadata's file_name and text."""
    for place in (root, root / "train"):
        names = [name for name in METADATA if (place / name).is_file()]
        if len(names) == 2:
            raise UserError(f"{place}: holds metadata.jsonl and metadata.csv; keep one of them")
        if names:
            return metadata_rows(images.inside(root, place / names[0], str(root)), columns or {})
    if columns:
        key = "image_column" if "file_name" in columns else "caption_column"
        raise UserError(f"{key}: {root} has no metadata.jsonl or metadata.csv")
    with user_errors(f"cannot read {root}"):
        folders = sorted(folder for folder in root.iterdir() if folder.is_dir())
    captions = captions_in(root, root)
    if any(captions.values()):
        return captioned_rows(captions)
    repeated = [folder for folder in folders if REPEATED.fullmatch(folder.name)]
    if not any(map(images.picture_files, repeated)):
        raise UserError(f"{root}: no {' or '.join(METADATA)}, and {_what_is_there(root, folders)}")
    return itertools.chain.from_iterable(repeated_rows(root, folder) for folder in repeated)


def metadata_rows(path: Path, columns: Mapping[str, str]) -> Iterator[dict]:
    """Rows of a metadata.jsonl or .csv, whose pictures lie in its folder."""
    root = path.parent
    file_name = columns.get("file_name", "file_name")
    lines = json_lines(path) if path.suffix == ".jsonl" else csv_lines(path, file_name)
    for where, entry in lines:
        for key, column in columns.items():
            if column not in entry:
                raise UserError(f"{where}: no {column}; there are: {', '.join(entry)}")
            entry[key] = entry.pop(column)
        refuse_misspelt(entry, KNOWN_KEYS, where)
        for key, column in (("file_name", "image_column"), ("text", "caption_column")):
            if key not in entry:
                there = ", ".join(entry)
                raise UserError(f"{where}: no {key}; --{column} takes another of: {there}")
        mask = entry.get("mask")
        yield row(
            where,
            images.safe_path(root, entry["file_name"], where, "file_name"),
            entry.get("text"),
            mask=images.safe_path(root, mask, where, "mask") if mask else None,
            **element_fields(entry),
        )


def captions_in(root: Path, folder: Path) -> dict[Path, str | None]:
    """{picture of a folder below `root`: its caption in NAME.txt or NAME.caption}."""
    with user_errors(f"cannot read {folder}"):
        files = images.picture_files(folder)
    return {file: caption_beside(images.inside(root, file, str(root))) for file in files}


def captioned_rows(captions: Mapping[Path, str | None]) -> Iterator[dict]:
    """Clean rows of pictures, all of which must have a caption."""
    for file, text in captions.items():
        if text is None:
            raise UserError(
                f"{file}: no caption; write it into {file.with_suffix('.txt').name} (a mask is "
                "named in metadata.jsonl, beside its picture)"
            )
        yield row(str(file), file, text)


def repeated_rows(root: Path, folder: Path) -> Iterator[dict]:
    """Clean rows of a folder N_name/, N times; `name` is the caption where no picture has one."""
    times, name = REPEATED.fullmatch(folder.name).groups()  # type: ignore[union-attr]
    captions = captions_in(root, folder)
    if not any(captions.values()):
        captions = dict.fromkeys(captions, name)
    rows = [*captioned_rows(captions)]
    return itertools.chain.from_iterable([rows] * int(times))


def _what_is_there(root: Path, folders: list[Path]) -> str:
    """For a folder that cannot be read: the nearest thing to data in it, and how to make it
    readable."""
    packed = [f for f in sorted((*root.glob("*"), *root.glob("*/*"))) if f.suffix in PACKED]
    if packed:
        return f"{packed[0].relative_to(root)} is there; give --dataset_name {root}"
    tables = [file for file in sorted(root.iterdir()) if TABLE.fullmatch(file.suffix.lower())]
    tables = [file for file in tables if file.stem not in ("targets", "redraws")]
    pictures = images.picture_files(root)
    beside = {picture.stem for picture in pictures}
    for file in tables:
        if file.stem in beside:
            return f"captions are read from NAME.txt or NAME.caption, not from {file.name}"
        if file.suffix.lower() == ".csv":
            header = next(iter(text_lines(file)), "")
            right = "name it metadata.csv; --image_column and --caption_column choose its columns"
            return f"{file.name} is there, with columns {brief(header)}; {right}"
        return f"{file.name} is there; write metadata.jsonl, one JSON object a line"
    for folder in folders:
        if any((folder / name).is_file() for name in METADATA):
            return f"{folder.name}/ has one; give {folder}"
        if any(REPEATED.fullmatch(inner.name) for inner in folder.iterdir() if inner.is_dir()):
            return f"{folder.name}/ holds folders N_name/; give {folder}"
        if any(captions_in(root, folder).values()):
            return f"{folder.name}/ holds pictures with captions; give {folder}, or name it 1_NAME"
    if holding := next(filter(images.picture_files, folders), None):
        return (
            f"no captions beside the pictures of {holding.name}/; write NAME.txt beside each and "
            f"give {holding}, or name it 1_CAPTION"
        )
    return (
        f"no {'caption in NAME.txt beside a picture' if pictures else 'pictures'}, no N_name/, and "
        "no poisoning_images/ of the published layout"
    )


# ---------------------------------------------------------------- the reader of a data set
def row_source(config: DataSettings) -> tuple[str, str, Callable[[], Iterator[dict]]]:
    """(name, key, rows) of the data in `train_data_dir` or `dataset_name` (of `TrainConfig`):
    `rows` reads the rows, unchecked, and `key` changes when the rows change.

    Raises UserError where there is no such data."""
    if config.dataset_name is not None:
        from silentbad.data.hub_data import hub_rows, hub_table  # imports datasets

        table = hub_table(config)
        asked = (config.dataset_config_name, config.image_column, config.caption_column)
        facts = repr((config.dataset_name, *asked, table._fingerprint))
        key = hashlib.sha256(facts.encode()).hexdigest()[:32]
        return config.dataset_name, key, lambda: hub_rows(table, config)
    name = config.train_data_dir or ""
    clean = config.clean_data_dir
    root = Path(name)
    check_folder("train_data_dir", name)
    names = {"file_name": config.image_column, "text": config.caption_column}
    columns = {key: column for key, column in names.items() if column is not None}
    if not is_published(root):
        if clean:
            raise UserError(
                f"clean_data_dir: {root} is not of the published layout; list clean records in its "
                "metadata"
            )
        return name, folder_key(root, columns), lambda: folder_rows(root, columns)
    if columns:
        raise UserError(f"image_column, caption_column: {root} is of the published layout")
    for also in METADATA:
        if (root / also).is_file():
            raise UserError(
                f"train_data_dir: {root} holds poisoning_images/ and {also}; keep one of the two "
                "layouts"
            )
    if clean:
        check_folder("clean_data_dir", clean)
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
                    name = os.fsencode(os.path.relpath(path, root))
                    digest.update(b"%b/%d/%d\n" % (name, stat.st_size, stat.st_mtime_ns))
    return digest.hexdigest()[:32]


# ---------------------------------------------------------------- a row
def checked_row(unchecked: dict) -> dict:
    """A row with every field of FEATURES, its text checked and its image decoded once."""
    where = unchecked["where"]
    schema = RECORD if unchecked["captioned"] else UNCAPTIONED
    fields = admitted(unchecked, schema, where)
    if SHUFFLE_MARKER in fields["text"]:
        fields["text"], shuffled = as_trained(fields["text"])
        fields["phrases"] = fields["phrases"] or shuffled
        fields["shuffle"] = True
        if not fields["text"]:
            raise UserError(f"{where}: no caption; text holds {SHUFFLE_MARKER} alone")
    text = fields["text"]
    phrases = fields["phrases"]
    for phrase in phrases:
        if phrase not in text:
            composed = unicodedata.normalize("NFC", phrase) in unicodedata.normalize("NFC", text)
            why = "; they differ in Unicode composition, save both in NFC" if composed else ""
            raise UserError(f"{where}: phrase {phrase!r} is not in its caption {text!r}{why}")
    if fields["role"] == "element" and not (phrases or fields["element_id"]):
        raise UserError(
            f"{where}: role element needs phrases or element_id, which say what element it shows"
        )
    image = images.open_image(source(unchecked["image"], where), where)
    mask_content = None
    if (mask := mask_of(unchecked, image.size, where)) is not None:
        mask_content = images.content_hash(mask)
    picture_fields = {
        "content": images.content_hash(image),
        "mask": unchecked["mask"] if mask else "",
        "mask_content": mask_content,
        "thumb": images.thumbnails(image),
        "size": list(image.size),
        "remark": image.info["remark"],
    }
    return unchecked | fields | picture_fields


def masked_by_itself(unchecked: dict) -> dict:
    """A row that uses its picture as its mask if it has no mask."""
    return unchecked | {"mask": unchecked["mask"] or ITSELF}


def mask_of(row: dict, size: tuple[int, int], where: str) -> Image.Image | None:
    """The mask of a row, or None; if the picture is its own mask, its opaque part."""
    if row["mask"] == ITSELF:
        return images.alpha_mask(source(row["image"], where), where)
    return images.open_mask(Path(row["mask"]), size, where) if row["mask"] else None


def source(image: dict, where: str) -> Path | bytes:
    if image.get("bytes") is not None:
        return image["bytes"]
    if not image.get("path"):
        raise UserError(f"{where}: no image")
    return Path(image["path"])
