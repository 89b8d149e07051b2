"""A hook that keeps a scan's suspects out of training:

    --hooks silentbad_shield.guard:Drop
    --hook_options '{silentbad_shield.guard:Drop: {scan: runs/scan/scan.json}}'

docs/shield.md says which records these are. Legend: N scanned records; a row is a record's number
in the scan, which is its row in the table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from silentbad.data.records import Records
from silentbad.data.table import blocks
from silentbad.errors import UserError, warn
from silentbad.loop.hooks import Hook, HookContext
from silentbad_shield import scan_file
from silentbad_shield.options import ADVICE

KEY = "hook_options"  # the setting that names the scan


@dataclass
class Suspects:
    """A scan.json: the suspect rows and their captions."""

    file: Path
    count: int
    captions: str | None  # a digest of all N
    text: dict[int, str]

    @classmethod
    def read(cls, file: Path) -> "Suspects":
        """Raises UserError where the file is no scan.json."""
        scan = scan_file.read(file, KEY)
        if scan.records is None:
            raise UserError(f"{KEY}: {file} is no scan.json (no records); {ADVICE}")
        text = {row.index: row.text for row in scan.suspects}
        return cls(file=file, count=scan.records, captions=scan.captions, text=text)

    def check(self, records: Records) -> None:
        """Refuse records that are not those that were scanned."""
        texts = records.column("text")
        count = len(records)
        same = all(0 <= i < count and texts[i].as_py() == text for i, text in self.text.items())
        if self.captions is not None:  # an earlier release wrote only suspects' captions
            same = same and self.captions == scan_file.digest(
                text for block in blocks(texts) for text in block
            )
        if self.count != count or not same:
            advice = (
                "scan this data again"
                if records.rows is None
                else "max_train_samples selects some of them, leave it out"
            )
            raise UserError(
                f"{KEY}: {self.file} is of other data ({self.count} records, here {count}, "
                f"or other captions); {advice}"
            )


class Drop(Hook):
    """Leaves the suspect records of the scan out of training."""

    def __init__(self, context: HookContext, *, scan: str):
        pass

    @staticmethod
    def kept(records: Records, options: Mapping[str, Any]) -> np.ndarray:
        """(N,) bool: False for the suspects. Raises UserError where the scan is of other data, or
        suspects every record."""
        suspects = Suspects.read(Path(options["scan"]))
        suspects.check(records)
        if not suspects.text:
            warn(f"{KEY}: {suspects.file} names no suspect; no record is left out")
        kept = ~np.isin(np.arange(suspects.count), list(suspects.text))
        if not kept.any():
            raise UserError(f"{KEY}: {suspects.file} suspects every record; none is left")
        return kept
