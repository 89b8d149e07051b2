"""A cache for the similarities of redraws. To compute them for thousands of pictures and all their
regions costs as much as a run's images; a run, its placebo run and an audit of the same targets
need the same ones."""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from silentbad.device import device_name
from silentbad.distributed.main_process import on_main
from silentbad.errors import writing
from silentbad.files import replace_text


def key(facts: Iterable[Any], device: torch.device) -> str:
    """A name for rows that depend on these facts (tensors, files, JSON values), and on what changes
    rounding: the version of torch, the device, the number of threads."""
    total = hashlib.sha256()
    for fact in (torch.__version__, device_name(device), torch.get_num_threads(), *facts):
        if isinstance(fact, torch.Tensor):
            total.update(f"{fact.dtype}{tuple(fact.shape)}".encode())
            total.update(
                fact.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            )
        elif isinstance(fact, Path):
            total.update(hashlib.sha256(fact.read_bytes()).digest())
        else:
            total.update(json.dumps(fact).encode())
    return total.hexdigest()[:32]


def remembered(
    folder: Path, name: str, count: int, accelerator: Any, compute: Callable[[], list[Any]]
) -> list[Any]:
    """The `count` rows of this name from the folder; if there are none, `compute` makes them and
    they are saved.

    Collective: all processes call it and get the same; `compute` is called by all or by none. Two
    runs that want the same rows compute them once. Raises UserError where the folder cannot be
    written."""
    file = folder / f"nulls-{name}.json"
    lock = FileLock(f"{file}.lock")
    if accelerator.is_main_process:
        with writing(f"cache_dir {folder}", "similarities of null pictures"):
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
    try:
        cached = on_main(accelerator.is_main_process, lambda: read(file, count))
        if cached is not None:
            return cached
        rows = compute()
        if accelerator.is_main_process:
            with writing(f"cache_dir {folder}", "similarities of null pictures"):
                replace_text(file, json.dumps(rows))
        return rows
    finally:
        lock.release()


def read(file: Path, count: int) -> list[Any] | None:
    """The rows of a file; None where it is not there, or damaged."""
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return rows if isinstance(rows, list) and len(rows) == count else None
