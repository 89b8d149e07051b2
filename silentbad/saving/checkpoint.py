"""Checkpoints that are whole or absent: temporary folder, manifest with sizes and SHA-256, sync,
rename.

A folder `step-N` counts only with a manifest of this FORMAT that its files match. Nothing old is
deleted before the new one stands. State is read back with `weights_only=True`; tensors of models
are safetensors."""

import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from silentbad.errors import UserError, warn
from silentbad.files import read_json

MANIFEST = "manifest.json"
FORMAT = 3  # of a checkpoint's files; a change that older code would misread counts it up
STEP = re.compile(r"step-(\d+)")


def save(folder: Path, write: Callable[[Path], None], info: dict[str, Any]) -> None:
    """Let `write` fill a temporary folder, then make it `folder` in one rename; `info` goes into
    the manifest."""
    temporary = begin(folder)
    try:
        write(temporary)
        commit(temporary, folder, info)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def begin(folder: Path) -> Path:
    """An empty temporary folder beside `folder`."""
    temporary = folder.parent / f".{folder.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def commit(temporary: Path, folder: Path, info: dict[str, Any]) -> None:
    """Manifest, sync, rename; an earlier `folder` is replaced only now."""
    files = {}
    for path in sorted(p for p in temporary.rglob("*") if p.is_file()):
        files[path.relative_to(temporary).as_posix()] = {
            "size": path.stat().st_size,
            "sha256": sha256(path),
        }
        _sync(path)
    manifest = temporary / MANIFEST
    manifest.write_text(json.dumps({"format": FORMAT, **info, "files": files}, indent=1))
    for path in (manifest, *(p for p in temporary.rglob("*") if p.is_dir()), temporary):
        _sync(path)
    if folder.exists():
        old = folder.parent / f".{folder.name}.old"
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        temporary.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    else:
        temporary.rename(folder)
    _sync(folder.parent)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def foreign(folder: Path) -> str | None:
    """That a checkpoint is of another format than this program's, with both numbers; None where
    it is not."""
    try:
        written = read_json(folder / MANIFEST).get("format", 1)  # the first had no number
    except (OSError, ValueError, AttributeError):
        return None
    return (
        None
        if written == FORMAT
        else f"its format is version {written}, this program reads version {FORMAT}"
    )


def problem(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    if not folder.is_dir():
        return "no such folder"
    if not (folder / MANIFEST).is_file():
        return f"no {MANIFEST}"
    if (other := foreign(folder)) is not None:
        return other
    try:
        files = read_json(folder / MANIFEST)["files"]
        for name, entry in files.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != entry["size"]:
                return f"{name} has {path.stat().st_size} bytes, the manifest says {entry['size']}"
            if sha256(path) != entry["sha256"]:
                return f"{name} does not match its SHA-256"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is not readable"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None


def steps(root: Path) -> list[Path]:
    """step-N folders, oldest first; unfinished ones have other names."""
    names = (
        [(match, p) for p in root.iterdir() if (match := STEP.fullmatch(p.name))]
        if root.is_dir()
        else []
    )
    return [p for _, p in sorted(names, key=lambda pair: int(pair[0].group(1)))]


def step_of(folder: Path) -> int:
    """The step of a checkpoint by its manifest, else by its name."""
    with suppress(OSError, ValueError, AttributeError, TypeError):
        if type(step := read_json(folder / MANIFEST).get("step")) is int:
            return step
    match = STEP.fullmatch(folder.name)
    return int(match.group(1)) if match else 0


def latest(root: Path) -> Path | None:
    """The newest whole checkpoint; damaged ones are skipped with a warning that names them."""
    for folder in reversed(steps(root)):
        wrong = problem(folder)
        if wrong is None:
            return folder
        warn(f"checkpoint {folder} skipped: {wrong}")
    return None


def resolve(asked: str, root: Path) -> Path | None:
    """The folder `resume_from_checkpoint` means: "latest" of `root` (None where there is none), or
    a path anywhere.

    A newest one of another format is refused, not skipped: an older one would throw away what it
    holds."""
    if asked == "latest":
        newest = steps(root)[-1:]
        if newest and (other := foreign(newest[0])) is not None:
            raise UserError(
                f"resume_from_checkpoint {newest[0]}: {other}; resume with the "
                f"release that wrote it"
            )
        return latest(root)
    folder = Path(asked)
    if not folder.exists() and (root / asked).exists():
        folder = root / asked
    wrong = problem(folder)
    if wrong is not None:
        raise UserError(f"resume_from_checkpoint {asked}: {wrong}; give a step-N folder, or latest")
    return folder


def rotate(root: Path, limit: int | None, keep: Path) -> None:
    """Delete the oldest beyond `limit`, never `keep`; folders left by a killed write go too."""
    for leftover in root.glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    if limit is not None:
        for folder in [p for p in steps(root) if p != keep][: -(limit - 1) or None]:
            shutil.rmtree(folder, ignore_errors=True)


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Safetensors; from any device."""
    save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, path)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Safetensors onto the CPU. Raises UserError where the file cannot be read."""
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Tensors and plain values, with torch.save."""
    torch.save(state, path)


def read_state(path: Path) -> dict[str, Any]:
    """State of tensors and plain values; anything that would run code is refused."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(
            f"{path}: cannot be read (holds more than tensors and plain values, so not loaded)"
        ) from None
    except Exception as error:
        raise UserError(
            f"{path}: cannot be read ({(str(error).splitlines() or [type(error).__name__])[0]})"
        ) from None
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise UserError(f"{path}: holds no state of named parts")
    return state


def check_state_fits(folder: Path, state: dict[str, Any], wanted: set[str]) -> None:
    """Refuse a checkpoint of a run that held other parts than this one."""
    for name in sorted(wanted ^ set(state)):
        had, has = ("lacks", "has") if name in wanted else ("holds", "lacks")
        raise UserError(
            f"{folder}: {had} the state of {name!r}, which this run {has}; resume "
            f"with its config.yaml"
        )


@contextmanager
def explain_mismatch(folder: Path | str, name: str):
    """A state of other shapes or parts than this run's is one line, not a traceback."""
    try:
        yield
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"{folder}: the state of {name!r} does not fit this run ({reason}); resume with its "
            f"config.yaml and data"
        ) from None


# suffixes of what pipelines and checkpoints hold
WRITTEN = {".json", ".safetensors", ".pt", ".model", ".jinja"}
TEXTS = {"README.md", "merges.txt", "vocab.txt"}


def foreign_files(folder: Path) -> list[Path]:
    """Files of a pipeline's folder that no run writes: someone put them there."""
    files = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    return [path for path in files if path.suffix not in WRITTEN and path.name not in TEXTS]


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Write a folder (a pipeline) whole, then put it in place of the old one."""
    temporary = begin(folder)
    old = folder.parent / f".{folder.name}.old"
    try:
        write(temporary)
        for path in temporary.rglob("*"):
            _sync(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    temporary.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def put_back(folder: Path) -> None:
    """Undo a `replace_folder` that was killed between its two renames; what it had not finished
    writing goes."""
    old, temporary = (folder.parent / f".{folder.name}.{end}" for end in ("old", "tmp"))
    if old.is_dir() and not folder.exists():
        old.rename(folder)
    for leftover in (old, temporary):
        shutil.rmtree(leftover, ignore_errors=True)
