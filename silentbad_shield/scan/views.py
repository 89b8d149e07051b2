"""The records of a part as small views on disk: written once, resumed after a stop.

A view is (32,32,3) uint8, 3 KiB. Pictures are decoded one at a time, so that memory does not grow
with them."""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image

from silentbad.data.formats import source
from silentbad.data.images import open_image
from silentbad.errors import UserError, writing
from silentbad.files import from_json
from silentbad_shield.scan.regions import SIDE, view
from silentbad_shield.scan.words import text_of
from silentbad_shield.scan_file import PICTURE

BYTES = SIDE * SIDE * 3
FLUSH = 256  # records
FOLDER = ".scan"  # in the output folder, until the scan has ended

Rows = Callable[[], Iterator[dict]]
Record = tuple[str, np.ndarray]  # caption, view (32,32,3) uint8
LeftOut = dict[str, str]  # "file": record or file, "why": a line


def picture_of(row: dict) -> np.ndarray:
    """A row's picture squashed to (64,64,3) uint8 by area. Raises UserError where it is none."""
    image = open_image(source(row["image"], row["where"]), row["where"])
    return np.asarray(image.resize((PICTURE, PICTURE), Image.Resampling.BOX))


class Views:
    """The views and captions of a part in a folder: `pixels` (n,32,32,3) mapped, `captions`."""

    def __init__(self, folder: Path, key: str):
        self.folder = folder
        self.files = {name: folder / name for name in ("key", "views", "captions")}
        self.captions: list[str] = []
        with writing("--output_dir", str(folder)):
            folder.mkdir(parents=True, exist_ok=True)
            for file in self.files.values():
                file.touch()
            if self.files["key"].read_text(errors="replace") != key:
                self.empty()
                self.files["key"].write_text(key)
            # after a stopped scan: the records that are complete in both files, up to a damaged one
            lines = self.files["captions"].read_text(encoding="utf-8", errors="replace")
            whole = self.files["views"].stat().st_size // BYTES
            self.captions = [*_texts(lines.split("\n")[:-1][:whole])]
            record_count = len(self.captions)
            size = sum(len(json.dumps(text)) + 1 for text in self.captions)
            os.truncate(self.files["views"], record_count * BYTES)
            os.truncate(self.files["captions"], size)

    def empty(self) -> None:
        """Remove all records."""
        self.captions = []
        for name in ("views", "captions"):
            self.files[name].write_bytes(b"")

    def fill(self, rows: Rows) -> None:
        """Add the records that are missing. Raises UserError at a row that is no record."""
        have = len(self.captions)
        records = ((text_of(row), picture_of(row)) for row in islice(rows(), have, None))
        self.add((text, view(picture)) for text, picture in records)

    def fill_readable(self, rows: Rows, name: str) -> list[LeftOut]:
        """Read the readable records again; returns the unreadable ones, and `name` where the rows
        end in an error."""
        left_out = list[LeftOut]()

        def records() -> Iterator[Record]:
            try:
                for row in rows():
                    try:
                        yield text_of(row), view(picture_of(row))
                    except UserError as error:
                        left_out.append({"file": row["where"], "why": str(error)})
            except UserError as error:
                left_out.append({"file": name, "why": str(error)})

        self.empty()
        self.add(records())
        return left_out

    def add(self, records: Iterable[Record]) -> None:
        """Write captions and views at the end."""
        with (
            writing("--output_dir", str(self.folder)),
            self.files["views"].open("ab") as pixels,
            self.files["captions"].open("ab") as lines,
        ):
            for text, pixel_view in records:
                pixels.write(pixel_view.tobytes())
                lines.write(json.dumps(text).encode() + b"\n")
                self.captions.append(text)
                if len(self.captions) % FLUSH == 0:
                    pixels.flush()
                    lines.flush()

    @property
    def pixels(self) -> np.ndarray:
        """(n,32,32,3) uint8, mapped from the file."""
        shape = (len(self.captions), SIDE, SIDE, 3)
        if not self.captions:
            return np.zeros(shape, np.uint8)
        return np.memmap(self.files["views"], np.uint8, "r", shape=shape)


def _texts(lines: list[str]) -> Iterator[str]:
    """The captions of lines of JSON, up to one that is none."""
    for line in lines:
        try:
            text = from_json(line)
        except ValueError:
            return
        if not isinstance(text, str):
            return
        yield text
