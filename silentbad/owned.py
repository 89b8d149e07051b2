"""Which folder a command may write into: a lock while it writes, a marker that says which command
made the folder.

with claimed(folder, "audit", key="--output_dir", writes=("validation.json", "report.html")):
    ...                      # nobody else of this program writes there now
    mark(folder, "audit")    # before the first file"""

import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from silentbad.errors import UserError
from silentbad.files import read_json, replace_text

MARKER = ".silentbad-run"  # JSON: run (an id), kind
LOCK = ".silentbad-lock"
DAMAGED = "damaged"  # of a marker that does not say what made the folder


@contextmanager
def claimed(
    folder: str | Path,
    kind: str,
    *,
    key: str = "output_dir",
    writes: Iterable[str] | None = None,
    read: Mapping[str, str | None] | None = None,
) -> Iterator[None]:
    """Lock a folder for the block. A folder that this call made is removed if no file was added to
    it.

    With `writes`, the names that the command will write, a folder of another command or person is
    refused; with `read`, so is one among these inputs (`refuse_overlap`). Raises UserError where
    another process holds the lock, or nothing can be written there."""
    if read is not None:
        refuse_overlap(folder, read, writes or (), key)
    path = Path(folder)
    created = [place for place in (path, *path.parents) if not os.path.lexists(place)]
    lock = FileLock(path / LOCK)
    try:
        path.mkdir(parents=True, exist_ok=True)
        before = {*os.listdir(path)}
        lock.acquire(timeout=0)
    except Timeout:
        instead = "wait for it, stop it, or choose another folder"
        raise UserError(f"{key} {folder}: is being written by another process; {instead}") from None
    except OSError as error:
        _remove_empty(created)
        raise UserError(f"{key} {folder}: cannot be written ({error.strerror})") from None
    try:
        if writes is not None:
            refuse_foreign(path, kind, writes, key)
        yield
    finally:
        with suppress(OSError):  # someone took the folder away
            (path / LOCK).unlink()
            if {*os.listdir(path)} - before == {MARKER}:  # nothing was written
                (path / MARKER).unlink()
        lock.release()
        _remove_empty(created)


def _remove_empty(folders: list[Path]) -> None:
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


# ---------------------------------------------------------------- the marker
def mark(folder: Path, kind: str) -> None:
    """Say which command made a folder; an earlier marker of the same kind stays."""
    if kind_of(folder) != kind:
        replace_text(folder / MARKER, json.dumps({"run": uuid.uuid4().hex, "kind": kind}) + "\n")


def kind_of(folder: Path) -> str | None:
    """Which command made a folder ("training", "audit", ...); None where none of this program
    did."""
    if not (folder / MARKER).is_file():
        return None
    try:
        return str(read_json(folder / MARKER)["kind"])
    except (OSError, ValueError, TypeError, KeyError):
        return DAMAGED


def refuse_foreign(folder: Path, kind: str, writes: Iterable[str], key: str = "output_dir") -> None:
    """Refuse a folder in which a command of `kind` would replace what it did not write."""
    made_by = kind_of(folder)
    if made_by is None:
        if there := [name for name in writes if os.path.lexists(folder / name)]:
            raise UserError(
                f"{key} {folder}: holds {there[0]}, which no {kind} wrote; choose an empty folder"
            )
    elif made_by == DAMAGED:
        raise UserError(
            f"{key} {folder}: {MARKER} in it is damaged; delete it if the folder is of {kind}"
        )
    elif made_by != kind:
        raise UserError(
            f"{key} {folder}: is the folder of another command ({made_by}); choose another folder"
        )


# ---------------------------------------------------------------- apart from what is read
def refuse_overlap(
    folder: str | Path,
    read: Mapping[str, str | None],
    writes: Iterable[str],
    key: str = "output_dir",
) -> None:
    """Refuse an output folder that is, or lies inside, a folder that is read, and inputs that lie
    where it writes.

    `read` maps each input's key to its file or folder; one that is neither (a Hub id) is skipped.
    Links are followed."""
    out = resolved(folder, key)
    written = [out / name for name in writes]
    for name, source in read.items():
        if source is None or not os.path.lexists(source):
            continue
        path = resolved(source, name)
        inside = path.is_dir() and (out == path or path in out.parents)
        if inside or out == path.parent and path.is_file() and path.name in writes:
            raise UserError(
                f"{key} {folder}: lies in {name} {source}, which is read; "
                f"choose a folder outside it"
            )
        beside = path.suffix == ".jsonl" and (out == path.parent or path.parent in out.parents)
        if beside and kind_of(out) is None and out.is_dir() and os.listdir(out):
            raise UserError(
                f"{key} {folder}: holds files beside {name} {source}, which is read; "
                f"choose an empty folder"
            )
        if any(path == place or place in path.parents for place in written):
            raise UserError(
                f"{key} {folder}: would replace {name} {source}, which is read; "
                f"choose another folder"
            )


def resolved(path: str | Path, key: str) -> Path:
    """Where a path leads."""
    try:
        return Path(path).resolve()
    except (OSError, RuntimeError) as error:  # Python raises it for circular links
        raise UserError(f"{key} {path}: cannot be resolved ({error})") from None
