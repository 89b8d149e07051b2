"""Files that the project writes: complete or not at all, recognised later, and never in place of a
user's file."""

import difflib
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from silentbad.errors import UserError

SEALED = re.compile(r"([0-9a-f]{32})-(\d+)-(\d+)\.")  # SHA-256, size, time of the last change


def sealed(draft: Path, folder: Path, suffix: str) -> Path:
    """Give a finished file its final name in `folder`, which holds its checksum, size and time
    of change."""
    state = draft.stat()
    file = folder / f"{checksum(draft)}-{state.st_size}-{state.st_mtime_ns}{suffix}"
    draft.replace(file)
    return file


def intact(file: Path) -> bool:
    """Whether a sealed file holds what was written: by size and time of change, by its checksum
    where the time differs."""
    match = SEALED.match(file.name)
    try:
        if match is None or (state := file.stat()).st_size != int(match[2]):
            return False
        return state.st_mtime_ns == int(match[3]) or checksum(file) == match[1]
    except OSError:
        return False


@contextmanager
def scratch_folder() -> Iterator[str]:
    """A temporary folder, removed however the block ends. It is created inside `try`, so that a
    signal cannot leave it behind."""
    folder = Path(tempfile.gettempdir()) / f"silentbad-{uuid4().hex}"
    try:
        folder.mkdir(mode=0o700)
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def replace_text(file: Path, text: str) -> None:
    """Write a text file that readers see whole: the old content or the new."""
    draft = file.with_name(f"{file.name}.tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(file)


def from_json(text: str | bytes, **options: Any) -> Any:
    """json.loads with its `options`; text that is nested too deeply raises ValueError, as invalid
    JSON does."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def is_utf8(text: str) -> bool:
    """Whether a text can be encoded as UTF-8; one with lone surrogates cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_json(file: Path) -> Any:
    """The content of a JSON file. Raises OSError, or ValueError where it is none."""
    return from_json(file.read_text(encoding="utf-8"))


def append_records(entries: list[dict], file: Path) -> None:
    """Append entries to a file of JSON lines by replacing it at once; earlier lines are
    unchanged."""
    place = Path(os.path.realpath(file))
    content = place.read_bytes() if place.exists() else b""
    content += b"\n" if content and not content.endswith(b"\n") else b""
    draft = place.with_name(f".{place.name}.tmp")
    draft.write_bytes(content + "".join(json.dumps(entry) + "\n" for entry in entries).encode())
    draft.replace(place)


def is_lfs_pointer(file: Path) -> bool:
    """Whether a file is a Git LFS pointer, which a clone without LFS has in place of the
    content."""
    try:
        with file.open("rb") as content:
            return content.read(40).startswith(b"version https://git-lfs.github.com/")
    except OSError:
        return False


def sha256(file: Path) -> str:
    """The SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while block := content.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def checksum(file: Path) -> str:
    """The first half of a file's SHA-256."""
    return sha256(file)[:32]


def names_folder(path: str) -> bool:
    """Whether a path cannot be a Hub id."""
    return os.path.isabs(path) or path.startswith((".", "~")) or path.count("/") > 1


def no_file(path: str | os.PathLike, what: str = "file") -> str:
    """The message for a missing file or folder, with the nearest existing name: first with other
    separators or case."""
    written = os.fspath(path)
    if os.path.exists(written):
        kind = "folder" if os.path.isdir(written) else "file"
        return f"no {what} {written}, which is a {kind}"
    folder, name = os.path.split(written.replace("\\", "/"))
    places: dict[str, str] = {}
    for place in _same_folders(folder):
        with suppress(OSError):
            places |= {entry: os.path.join(place, entry) for entry in os.listdir(place)}
    same = [entry for entry in places if entry.casefold() == name.casefold()]
    near = same or difflib.get_close_matches(name, places, n=1, cutoff=0.75)
    advice = f"; did you mean {places[near[0]]}?" if near else ""
    return f"no {what} {written}{advice}"


def _same_folders(folder: str) -> list[str]:
    """A folder, or those of its name in other case."""
    above, name = os.path.split(folder)
    if os.path.isdir(folder or ".") or not name:
        return [folder or "."]
    with suppress(OSError):
        return [
            os.path.join(above, entry)
            for entry in os.listdir(above or ".")
            if entry.casefold() == name.casefold()
        ]
    return []


def check_file(key: str, path: str | os.PathLike | None, right: str = "") -> None:
    """Refuse a file that is given but missing; `right` says what it should contain."""
    if path is not None and not os.path.isfile(path):
        raise UserError(f"{key}: {no_file(path)}{right and f'; {right}'}")


def check_path(key: str, path: str | None) -> None:
    """Refuse a path that is given but is neither a file nor a folder."""
    if path is not None and not os.path.exists(path):
        raise UserError(f"{key}: {no_file(path, 'file or folder')}")


def check_folder(key: str, path: str | os.PathLike | None, right: str = "") -> None:
    """Refuse a folder that is given but missing; `right` says what it should be."""
    if path is not None and not os.path.isdir(path):
        raise UserError(f"{key}: {no_file(path, 'folder')}{right and f'; {right}'}")


def check_local(key: str, path: str | None, what: str = "folder") -> None:
    """Refuse a path that does not exist and cannot be a Hub id."""
    if path and not os.path.exists(path) and (names_folder(path) or "/" not in path):
        raise UserError(f"{key}: {no_file(path, what)}")


def check_writable(path: Path, key: str, folder: bool = False) -> None:
    """Refuse a file, or a `folder`, that cannot be written, before the work that would fill it;
    creates nothing.

    Raises UserError, which begins with `key`."""
    place = os.path.realpath(path)
    if os.path.lexists(place) and not (os.path.isdir(place) or os.path.isfile(place) or folder):
        raise UserError(f"{key}: {path} is not a regular file, so it cannot hold the result")
    if folder != os.path.isdir(place) and os.path.lexists(place):
        raise UserError(
            f"{key}: {path} is {'no folder' if folder else 'a folder; name a file in it'}"
        )
    existing = place
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    if existing != place and not os.path.isdir(existing):
        raise UserError(f"{key}: cannot write {path} ({existing} is no folder)")
    if not os.access(existing, os.W_OK):
        raise UserError(f"{key}: cannot write {path} (Permission denied)")
