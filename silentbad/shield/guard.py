"""Keep what a scan found out of training: `--guard.name drop --guard.scan runs/scan/scan.json`."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from silentbad.data.records import Records
from silentbad.errors import UserError, reading
from silentbad.options import Location


@dataclass
class GuardConfig:
    """What stands between the data and training."""

    name: Literal["none", "drop"] = "none"  # drop: the suspect records of a scan are not trained on
    scan: Location | None = None  # drop: the scan.json that names them


def check_guard(config: GuardConfig) -> None:
    """Refuse a guard without its scan, or a scan without a guard, before anything loads."""
    if config.name == "drop" and config.scan is None:
        raise UserError("guard.scan: is missing; guard.name=drop needs the scan.json of `python -m silentbad.scan`")
    if config.name == "none" and config.scan is not None:
        raise UserError("guard.scan: has no effect with guard.name=none; set guard.name=drop")


def suspects(file: Path) -> tuple[int, dict[int, str]]:
    """(records scanned, {suspect record: its caption}) of a scan.json. Raises UserError where it is none."""
    if not file.is_file():
        raise UserError(f"guard.scan: no file {file}")
    with reading(f"guard.scan: {file} is no scan.json", "make it with `python -m silentbad.scan`"):
        data = json.loads(file.read_text(encoding="utf-8"))
        return int(data["records"]), {int(row["index"]): str(row["text"]) for row in data["suspects"]}


def guarded(records: Records, config: GuardConfig) -> Records:
    """The records without those that the scan suspects, all of them where nothing guards.

    Raises UserError where the scan is of other data, or leaves nothing.
    """
    if config.name == "none":
        return records
    count, found = suspects(Path(str(config.scan)))
    texts = records.column("text")
    same = count == len(records) and all(0 <= i < count and texts[i].as_py() == text for i, text in found.items())
    if not same:
        raise UserError(
            f"guard.scan: {config.scan} is of other data ({count} records, here {len(records)}, or other captions); "
            "scan this data again"
        )
    rows = np.setdiff1d(np.arange(len(records)), np.fromiter(found, np.int64, len(found)))
    if not len(rows):
        raise UserError(f"guard.scan: {config.scan} suspects every record; nothing is left to train on")
    kept = records.select(rows)
    kept.key = f"{records.key}-guard-{hashlib.sha256(repr(sorted(found)).encode()).hexdigest()[:16]}"
    return kept
