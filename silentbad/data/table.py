"""Arrow tables of records on disk: built once for each state of their folder, memory-mapped, read
by column.

R records; nothing here holds more than a few bytes of each in memory."""

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets.arrow_writer import ArrowWriter
from filelock import FileLock

from silentbad.data.formats import checked_row
from silentbad.errors import UserError, user_errors
from silentbad.files import intact, read_json, sealed

BLOCK = 4096
FORMAT = 5  # of the table's file and of the checks cached beside it

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
        "mask_content": datasets.Value("string"),
        "thumb": datasets.Value("binary"),
        "size": datasets.List(datasets.Value("int32")),
        "remark": datasets.Value("string"),
    }
)


def build_table(
    rows: Callable[[], Iterator[dict]], name: str, key: str, cache_dir: str | None
) -> datasets.Dataset:
    """Memory-mapped table of the checked rows; `key` must change when the rows change.

    It is kept as one sealed file (silentbad.files) in the cache; a damaged one is built again, with
    a message. Errors of `rows` are raised unchanged."""
    home = Path(cache_dir or datasets.config.HF_DATASETS_CACHE) / "silentbad-records"
    folder = home / hashlib.sha256(f"{FORMAT}{key}{FEATURES}".encode()).hexdigest()[:32]
    failed = f"cache_dir: cannot keep the table of records in {folder}"
    with user_errors(failed, "choose another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / "lock")
        lock.acquire()
    try:
        table = _cached(folder)
        return _build(rows, name, folder, failed) if table is None else table
    finally:
        lock.release()


def _cached(folder: Path) -> datasets.Dataset | None:
    """The table in a folder of the cache, or None if there is no undamaged one."""
    for file in sorted(folder.glob("*.arrow")):
        if intact(file):
            with suppress(Exception):  # of whatever kind: it is made anew
                table = datasets.Dataset.from_file(str(file))
                if table.features == FEATURES and len(table):
                    return table
        print(f"cache: the table of records {file} is damaged; it is made anew")
        with user_errors(f"cache_dir: {file} is damaged and cannot be removed", "remove it"):
            file.unlink(missing_ok=True)
            for beside in folder.glob("*.json"):  # its cached checks
                beside.unlink(missing_ok=True)
    return None


def _build(
    rows: Callable[[], Iterator[dict]], name: str, folder: Path, failed: str
) -> datasets.Dataset:
    """The table of these rows, written to a folder of the cache."""
    for leftover in folder.glob(".*"):  # of a build that was killed
        leftover.unlink(missing_ok=True)
    draft = folder / f".{uuid.uuid4().hex}"
    advice = "free some space or choose another folder"
    try:
        with user_errors(failed, advice):
            writer = ArrowWriter(path=str(draft), features=FEATURES)
        try:
            for row in rows():
                checked = {key: value for key, value in checked_row(row).items() if key in FEATURES}
                with user_errors(failed, advice):
                    writer.write(checked)
            if not len(writer):
                raise UserError(f"{name}: holds no record")
            with user_errors(failed, advice):
                writer.finalize()
        finally:
            with suppress(Exception):  # on a disk that is full it fails too, and would hide why
                writer.close()
        with user_errors(failed):
            return datasets.Dataset.from_file(str(sealed(draft, folder, ".arrow")))
    finally:
        draft.unlink(missing_ok=True)


# ---------------------------------------------------------------- columns
def texts(values: pa.ChunkedArray) -> list[str]:
    """A column of few different texts, each stored once."""
    return _shared(values).tolist()


def _shared(values: pa.ChunkedArray) -> np.ndarray:
    """Texts as an object array whose equal entries are one object."""
    coded = values.dictionary_encode().unify_dictionaries()
    if not coded.num_chunks:
        return np.zeros(0, dtype=object)
    words = np.asarray(coded.chunk(0).dictionary.to_pylist(), dtype=object)
    texts = words[
        np.concatenate([chunk.indices.to_numpy(zero_copy_only=False) for chunk in coded.chunks])
    ]
    pa.default_memory_pool().release_unused()  # else Arrow keeps the column's memory
    return texts


def numbers(values: pa.ChunkedArray) -> np.ndarray:
    """A column of lists of numbers, one after the other."""
    return pc.list_flatten(values).to_numpy()


def blocks(values: pa.ChunkedArray) -> Iterator[list]:
    """A column as lists of BLOCK Python values, so that never all are in memory."""
    for start in range(0, len(values), BLOCK):
        yield values.slice(start, BLOCK).to_pylist()


class TextLists:
    """A column of lists of few different texts: offsets (R+1,) into one array of them."""

    def __init__(self, lists: pa.ChunkedArray):
        counts = [
            pc.list_value_length(chunk).to_numpy(zero_copy_only=False) for chunk in lists.chunks
        ]
        self.offsets = np.concatenate([[0], *counts]).cumsum()
        self.values = _shared(pc.list_flatten(lists))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> list[str]:
        if index >= len(self):
            raise IndexError(index)
        return self.values[self.offsets[index] : self.offsets[index + 1]].tolist()


def rows_with(values: pa.ChunkedArray, wanted: list[str]) -> np.ndarray:
    """The rows whose text is one of `wanted`."""
    return np.flatnonzero(pc.is_in(values, value_set=pa.array(wanted, pa.string())).to_numpy())


def vocabulary(tokenizer: Any) -> str:
    """Hash over the window and the tokens of a tokenizer, on which its output depends."""
    digest = hashlib.sha256(str(tokenizer.model_max_length).encode())
    # the fast tokenizers list them in any order
    for token, number in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{number}/{token}\n".encode())
    return digest.hexdigest()


def cached_check(table: datasets.Dataset, key: str, work: Callable[[], list[str]]) -> list[str]:
    """`work()`, kept beside the table's file under `key`: a later start reads it there."""
    if not table.cache_files:
        return work()
    file = Path(table.cache_files[0]["filename"]).parent / f"{key}.json"
    with suppress(OSError, ValueError):  # not there yet, or damaged: worked out anew
        stored = read_json(file)
        if isinstance(stored, list) and all(isinstance(line, str) for line in stored):
            return stored
    lines = work()
    draft = file.with_suffix(f".{os.getpid()}")
    with user_errors(f"cache_dir: cannot write {file}", "choose another folder"):
        draft.write_text(json.dumps(lines), encoding="utf-8")
        draft.replace(file)
    return lines
