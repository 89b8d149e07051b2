"""Checkpoints that are whole or absent: temporary folder, manifest with sizes and SHA-256, sync,
rename.

A folder `step-N` counts only with a manifest of this FORMAT that its files match. An old folder is
deleted only after the new one is in place. State is read back with `weights_only=True`; tensors of
models are safetensors."""

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from silentbad.errors import UserError, user_errors, warn
from silentbad.files import read_json, sha256

MANIFEST = "manifest.json"
STATE = "state.pt"
FORMAT = 4  # of a checkpoint's files; raise it for a change that older code would misread
STEP = re.compile(r"step-\d+")


def save(folder: Path, write: Callable[[Path], None], info: dict[str, Any] | None = None) -> None:
    """Let `write` fill a temporary folder, then put it in place of `folder`; an earlier folder
    is replaced only then.

    With `info`, the folder gets a manifest that holds it."""
    temporary = folder.parent / f".{folder.name}.tmp"
    old = folder.parent / f".{folder.name}.old"
    for leftover in (temporary, old):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        write(temporary)
        if info is not None:
            _write_manifest(temporary, info)
            for path in {*_files(folder)} - written(folder):  # files that the user added
                place = temporary / path.relative_to(folder)
                place.parent.mkdir(parents=True, exist_ok=True)
                if not place.exists():
                    shutil.copy2(path, place)
        for path in (*temporary.rglob("*"), temporary):
            _sync(path)
        if folder.exists():
            folder.rename(old)
        temporary.rename(folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _write_manifest(folder: Path, info: dict[str, Any]) -> None:
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = json.dumps({"format": FORMAT, **info, "files": files}, indent=1)
    (folder / MANIFEST).write_text(manifest)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def foreign(folder: Path) -> str | None:
    """A message where a checkpoint has another format than this program's; else None."""
    try:
        written = read_json(folder / MANIFEST).get("format", 1)  # the first format had no number
    except (OSError, ValueError, AttributeError):
        return None
    if written == FORMAT:
        return None
    return f"its format is version {written}, this program reads version {FORMAT}"


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
    return sorted((p for p in root.glob("step-*") if STEP.fullmatch(p.name)), key=number)


def number(folder: Path) -> int:
    """N of step-N."""
    return int(folder.name.partition("-")[2])


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

    If the newest checkpoint has another format, it is refused, not skipped: to resume from an older
    one would lose the newest one's steps."""
    if asked == "latest":
        newest = steps(root)[-1:]
        if newest and (other := foreign(newest[0])) is not None:
            right = "resume with the release that wrote it"
            raise UserError(f"resume_from_checkpoint {newest[0]}: {other}; {right}")
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
        others = [p for p in steps(root) if p != keep and written(p)]
        for folder in others[: -(limit - 1) or None]:
            remove(folder)


def remove(folder: Path) -> None:
    """Delete a checkpoint; files in it that the user added stay."""
    ours = written(folder)
    if len(ours) == len(_files(folder)):
        shutil.rmtree(folder, ignore_errors=True)
    for path in ours:
        path.unlink(missing_ok=True)


def written(folder: Path) -> set[Path]:
    """The files of a checkpoint that its manifest names. Where the manifest is lost: all files if
    there is a state, else none."""
    files = _files(folder)
    try:
        named = {*read_json(folder / MANIFEST)["files"], MANIFEST}
    except (OSError, ValueError, KeyError, TypeError):
        return {*files} if (folder / STATE).is_file() else set()
    return {path for path in files if path.relative_to(folder).as_posix() in named}


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Safetensors; from any device."""
    save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, path)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Safetensors onto the CPU. Raises UserError where the file cannot be read."""
    with user_errors(f"{path}: cannot be read", kinds=(SafetensorError, OSError)):
        return load_file(path)


def read_state(path: Path) -> dict[str, Any]:
    """State of tensors and plain values; anything that would run code is refused."""
    failed = f"{path}: cannot be read"
    more = "holds more than tensors and plain values, so not loaded"
    with user_errors(failed), user_errors(failed, kinds=pickle.UnpicklingError, reason=more):
        return torch.load(path, map_location="cpu", weights_only=True)


def explain_mismatch(folder: Path | str, name: str) -> AbstractContextManager[None]:
    """Turn the error of a state that does not fit this run into one line, without a traceback."""
    wrong = f"{folder}: the state of {name!r} does not fit this run"
    kinds = (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError)
    return user_errors(wrong, "resume with its config.yaml and data", kinds)
