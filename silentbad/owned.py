"""Which folder a command may write into: a lock while it writes, a marker that says which command made the folder.

    with claimed(folder, "audit", key="--output_dir", writes=("validation.json", "report.html")):
        ...                      # nobody else of this program writes there now
        mark(folder, "audit")    # before the first file

The lock is the kernel's (`flock`): it goes with its process, however that ends, so none is ever stale. Where a file
system knows no such locks, the file's own words count: process, host and start time.
"""

import errno
import fcntl
import json
import os
import socket
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from silentbad.errors import UserError
from silentbad.files import from_json, read_json

MARKER = ".silentbad-run"  # JSON: run (an id), kind
LOCK = ".silentbad-lock"  # JSON: pid, host, started (seconds since 1970)
TRIES = 20  # to get hold of a lock file that another process removes at the same moment


# ---------------------------------------------------------------- the lock
@contextmanager
def claimed(
    folder: str | Path,
    kind: str,
    *,
    key: str = "output_dir",
    writes: Iterable[str] | None = None,
    read: Mapping[str, str | None] | None = None,
) -> Iterator[None]:
    """Hold a folder's lock inside; it is made where it is not there, and taken away again where it stays empty. So is a
    marker to which no file was added.

    With `writes`, the names that the command will write, a folder that some other command or person made is refused;
    so is one among the inputs `read` (`refuse_overlap`). Raises UserError where another process holds it, or nothing
    can be written there.
    """
    if read is not None:
        refuse_overlap(folder, read, writes or (), key)
    path = Path(folder)
    made: list[Path] = []
    try:
        with _in_turn():
            made = [p for p in (path, *path.parents) if not _exists(p)]
            before = _names(path)
            handle = _locked(path, key)
    except OSError as error:
        _remove_empty(made)
        lost = os.path.islink(path) and not os.path.exists(path)
        reason = "it is a link that leads nowhere" if lost else error.strerror
        raise UserError(f"{key} {folder}: cannot be written ({reason})") from None
    try:
        if writes is not None:
            refuse_foreign(path, kind, writes, key)
        yield
    finally:
        _release(path / LOCK, handle)
        if _names(path) - before == {MARKER}:  # nothing was written
            (path / MARKER).unlink()
        _remove_empty(made)


@contextmanager
def _in_turn(seconds: float = 5) -> Iterator[None]:
    """One start at a time on this machine: so who makes the folders is who locks them, and takes them away again.

    Where the turn does not come, another program holds the lock of the temporary folder: no reason to wait longer.
    """
    turn, end = os.open(tempfile.gettempdir(), os.O_RDONLY), time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            try:
                fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # no locks on folders there
                break
        yield
    finally:
        os.close(turn)


def _names(folder: Path) -> set[str]:
    """What a folder holds; nothing where there is none."""
    try:
        return set(os.listdir(folder))
    except (OSError, ValueError):
        return set()


def _exists(path: Path) -> bool:
    try:
        return os.path.lexists(path)
    except ValueError:  # a NUL in the name
        return False


def _remove_empty(folders: list[Path]) -> None:
    """Take away folders of ours that hold nothing."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return


def _locked(folder: Path, key: str) -> int:
    """A handle of the folder's lock file, locked."""
    file = folder / LOCK
    if os.path.lexists(file) and (os.path.islink(file) or not os.path.isfile(file)):  # to open a pipe would wait
        raise UserError(f"{key} {folder}: {LOCK} in it is no file of this program; remove it")
    for _ in range(TRIES):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            handle = _open_locked(folder, key)
        except FileNotFoundError:  # the folder was taken away again
            continue
        try:
            if os.path.samestat(os.fstat(handle), os.stat(file)):  # else it was replaced while we waited
                me = {"pid": os.getpid(), "host": socket.gethostname(), "started": _start_of(os.getpid())}
                file.write_text(json.dumps(me), encoding="utf-8")
                return handle
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
    raise UserError(f"{key} {folder}: many runs start there at once; choose another folder for each")


def _open_locked(folder: Path, key: str) -> int:
    """Open the lock file and lock it at once; a `UserError` that names who holds it.

    It is open for reading alone, since a file that is open for writing keeps a disk from being mounted read-only; NFS
    locks only what is open for writing.
    """
    for flags in (os.O_RDONLY, os.O_RDWR):
        handle = os.open(folder / LOCK, flags | os.O_CREAT | os.O_NOFOLLOW, 0o644)  # what a link names is not ours
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except OSError as error:
            holder = _holder(handle)
            taken = error.errno in (errno.EWOULDBLOCK, errno.EACCES)
            if taken or error.errno != errno.EBADF and _lives(holder):
                os.close(handle)
                raise UserError(_in_use(folder, key, holder)) from None
            if error.errno != errno.EBADF:  # no locks on this file system, and nobody there
                return handle
            os.close(handle)
    raise UserError(f"{key} {folder}: {LOCK} cannot be locked; choose a folder on another disk")


def _in_use(folder: Path, key: str, holder: dict[str, Any]) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["started"])) if "started" in holder else "now"
    who = f"process {holder['pid']} on {holder['host']}, since {since}" if "pid" in holder else "another process"
    return f"{key} {folder}: is being written by {who}; wait for it, stop it, or choose another folder"


def _holder(handle: int) -> dict[str, Any]:
    """What a lock file says; nothing where it cannot be read, or does not say all."""
    try:
        lock = from_json(os.pread(handle, 1000, 0))
        return {"pid": int(lock["pid"]), "host": str(lock["host"])[:100], "started": float(lock["started"])}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def _lives(holder: dict[str, Any]) -> bool:
    """Whether the process that a lock file names runs still; one of another host counts as living for a day."""
    if not holder:
        return False
    if holder["host"] != socket.gethostname():
        return time.time() - holder["started"] < 24 * 3600
    return abs(_start_of(holder["pid"]) - holder["started"]) < 2


def _start_of(pid: int) -> float:
    """When a process started, in seconds since 1970; minus infinity where there is none."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return float("-inf")


def _release(path: Path, handle: int) -> None:
    """Take the lock file away, if it is the one we hold."""
    try:
        if os.path.samestat(os.fstat(handle), os.stat(path)):
            path.unlink()
    except OSError:
        pass
    os.close(handle)


# ---------------------------------------------------------------- the marker
def mark(folder: Path, kind: str) -> None:
    """Say which command made a folder; an earlier marker of the same kind stays."""
    if kind_of(folder) == kind and (folder / MARKER).is_file():
        return
    draft = folder / f"{MARKER}.tmp"
    draft.write_text(json.dumps({"run": uuid.uuid4().hex, "kind": kind}) + "\n", encoding="utf-8")
    draft.replace(folder / MARKER)


DAMAGED = "damaged"  # of a marker that does not say what made the folder


def kind_of(folder: Path) -> str | None:
    """Which command made a folder ("training", "audit", ...); None where none of this program did.

    Folders from before the marker are known by what only a run writes.
    """
    if (folder / MARKER).is_file():
        return str(_json(folder / MARKER).get("kind", DAMAGED))
    if "versions" in _json(folder / "run.json"):
        return "training"
    return "audit" if {"embedder", "targets"} <= set(_json(folder / "validation.json")) else None


def _json(file: Path) -> dict[str, Any]:
    try:
        values = read_json(file) if file.is_file() else {}  # a pipe would never end
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def refuse_foreign(folder: Path, kind: str, writes: Iterable[str], key: str = "output_dir") -> None:
    """Refuse a folder in which a command of `kind` would replace what it did not write."""
    made_by = kind_of(folder)
    if made_by is None:
        if there := [name for name in writes if os.path.lexists(folder / name)]:
            raise UserError(f"{key} {folder}: holds {there[0]}, which no {kind} wrote; choose an empty folder")
    elif made_by == DAMAGED:
        raise UserError(f"{key} {folder}: {MARKER} in it is damaged; delete it if the folder is of {kind}")
    elif made_by != kind:
        raise UserError(f"{key} {folder}: is the folder of another command ({made_by}); choose another folder")


# ---------------------------------------------------------------- apart from what is read
def refuse_overlap(
    folder: str | Path, read: Mapping[str, str | None], writes: Iterable[str], key: str = "output_dir"
) -> None:
    """Refuse an output folder that is, or lies inside, a folder that is read, and inputs that lie where it writes.

    `read` maps each input's key to its file or folder; one that is neither (a Hub id) is passed over. Links count as
    what they lead to.
    """
    out = resolved(folder, key)
    written = [out / name for name in writes]
    for name, given in read.items():
        if given is None or not os.path.lexists(given):
            continue
        path = resolved(given, name)
        inside = path.is_dir() and (out == path or path in out.parents)
        if inside or out == path.parent and path.is_file() and path.name in writes:
            raise UserError(f"{key} {folder}: lies in {name} {given}, which is read; choose a folder outside it")
        beside = path.suffix == ".jsonl" and (out == path.parent or path.parent in out.parents)
        if beside and kind_of(out) is None and _names(out):
            raise UserError(f"{key} {folder}: holds files beside {name} {given}, which is read; choose an empty folder")
        if any(path == place or place in path.parents for place in written):
            raise UserError(f"{key} {folder}: would replace {name} {given}, which is read; choose another folder")


def resolved(path: str | Path, key: str) -> Path:
    """Where a path leads."""
    try:
        return Path(path).resolve()
    except (OSError, RuntimeError) as error:  # Python's word for links in a circle
        raise UserError(f"{key} {path}: leads nowhere ({error})") from None
