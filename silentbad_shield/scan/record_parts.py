"""The data of a scan in parts, which workers read by themselves.

A part is a file of listed rows, a range of a Hub data set's table, a WebDataset tar, or a Parquet
file. Parts follow one another as the records do, so a record has the same number whatever the
parts."""

import json
import os
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from silentbad.data.formats import folder_key, row_source
from silentbad.data.schema import row
from silentbad.errors import UserError, user_errors
from silentbad.files import from_json
from silentbad.settings.data import DataSettings

PART = 10_000  # records
SHARDS = (".tar", ".parquet")
PICTURES = ("png", "jpg", "jpeg", "webp", "bmp", "gif", "tif", "tiff")  # columns of a tar
READ = 64  # rows of a Parquet file in memory
Rows = Iterator[dict]


@dataclass(frozen=True)
class RecordPart:
    """Some records of a data set: a `file`, or the rows [start, stop) of a Hub data set."""

    kind: str  # "listed", "table", ".tar", ".parquet"
    settings: DataSettings
    file: Path | None = None
    start: int = 0
    stop: int = 0

    def rows(self) -> Rows:
        """Its rows, unchecked, as `silentbad.data.schema.row` makes them. Raises UserError where
        the file is damaged, after the rows before."""
        return READERS[self.kind](self)


def shards(settings: DataSettings) -> list[Path]:
    """The tars or Parquet files of a local `dataset_name`, where it holds nothing else."""
    name = settings.dataset_name or ""
    if not os.path.isdir(name) or settings.dataset_config_name:
        return []
    files = sorted(path for path in Path(name).iterdir() if not path.name.startswith("."))
    suffixes = {path.suffix for path in files}
    plain = len(suffixes) == 1 and suffixes <= {*SHARDS} and all(map(Path.is_file, files))
    other = any(word in path.stem for path in files for word in ("test", "valid", "dev", "eval"))
    return files if plain and not other else []


def key_of(settings: DataSettings) -> tuple[str, Callable[[], Rows] | None]:
    """(a key that changes with the data, its rows); the rows of shards are read by part. Raises
    UserError where there is no such data."""
    if shards(settings):
        columns = (settings.image_column, settings.caption_column)
        return folder_key(Path(settings.dataset_name or ""), *columns), None
    _, key, rows = row_source(settings)
    return key, rows


def parts_of(
    settings: DataSettings, rows: Callable[[], Rows] | None, folder: Path, size: int = PART
) -> list[RecordPart]:
    """The parts of the data, of `size` records where they are listed; lists are written into
    `folder`. Raises UserError at metadata that cannot be read."""
    if rows is None:
        return [RecordPart(file.suffix, settings, file) for file in shards(settings)]
    if settings.dataset_name is not None:
        from silentbad.data.hub_data import hub_table

        count = len(hub_table(settings))
        starts = range(0, count, size)
        return [
            RecordPart(
                kind="table", settings=settings, file=None, start=at, stop=min(at + size, count)
            )
            for at in starts
        ]
    folder.mkdir(parents=True, exist_ok=True)
    parts = list[RecordPart]()
    listing = rows()
    while block := list(islice(listing, size)):
        file = folder / f"{len(parts):06d}.jsonl"
        file.write_text("".join(json.dumps(entry) + "\n" for entry in block))
        parts.append(RecordPart("listed", settings, file))
    return parts


# ---------------------------------------------------------------- readers by kind
def listed_rows(part: RecordPart) -> Rows:
    """Rows of a list that `parts_of` wrote."""
    with Path(str(part.file)).open() as lines:
        yield from map(from_json, lines)


def table_rows(part: RecordPart) -> Rows:
    """Rows of a range of a Hub data set."""
    from silentbad.data.hub_data import hub_rows, hub_table

    table = hub_table(part.settings).select(range(part.start, part.stop))
    name = part.settings.dataset_name
    for number, entry in enumerate(hub_rows(table, part.settings), part.start):
        yield entry | {"where": f"{name}:{number}"}


def tar_rows(part: RecordPart) -> Rows:
    """Rows of a WebDataset tar: files of one name but for what follows its first dot are a record's
    columns (https://github.com/webdataset/webdataset)."""
    with user_errors(f"cannot read {part.file}"), tarfile.open(part.file) as archive:
        name = ""
        columns = dict[str, bytes]()
        for member in archive:
            if not member.isfile():
                continue
            folder, _, file = member.name.rpartition("/")
            stem, _, column = file.partition(".")
            if (key := f"{folder}/{stem}") != name:
                yield from _tar_row(part, name, columns)
                name = key
                columns = {}
            content = archive.extractfile(member)
            columns[column.lower()] = content.read() if content else b""
        yield from _tar_row(part, name, columns)


def _tar_row(part: RecordPart, name: str, columns: dict[str, bytes]) -> Rows:
    """The row of a record's columns; none of no column."""
    if not columns:
        return
    where = f"{part.file}:{name.strip('/')}"
    image = part.settings.image_column or next((c for c in PICTURES if c in columns), "image")
    caption = part.settings.caption_column or "txt"
    text: Any = columns.get(caption)
    if text is None and "json" in columns:
        try:
            entry = from_json(columns["json"])
        except ValueError:
            entry = {}
        text = entry.get(part.settings.caption_column or "caption")
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    yield row(where, {"path": f"{name}.{image}", "bytes": columns.get(image, b"")}, text)


def parquet_rows(part: RecordPart) -> Rows:
    """Rows of a Parquet file, whose pictures are bytes or {"bytes", "path"}."""
    import pyarrow.parquet as pq

    image = part.settings.image_column or "image"
    caption = part.settings.caption_column or "text"
    with user_errors(f"cannot read {part.file}"), pq.ParquetFile(part.file) as table:
        for key, column in (("image_column", image), ("caption_column", caption)):
            if column not in table.schema_arrow.names:
                raise UserError(f"{key}: {part.file} has no column {column!r}")
        number = 0
        for batch in table.iter_batches(READ, columns=[image, caption]):
            for entry in batch.to_pylist():
                content = entry[image]
                if isinstance(content, dict):
                    content = content.get("bytes")
                picture = {"path": None, "bytes": content if isinstance(content, bytes) else b""}
                yield row(f"{part.file}:{number}", picture, entry[caption])
                number += 1


READERS: dict[str, Callable[[RecordPart], Rows]] = {
    "listed": listed_rows,
    "table": table_rows,
    ".tar": tar_rows,
    ".parquet": parquet_rows,
}
