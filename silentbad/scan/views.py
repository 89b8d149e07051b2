"""Every record as a small view on disk: written once, resumed after a stop, mapped into memory.

A view is (32,32,3) uint8, 3 KiB. Pictures are decoded one at a time, so that memory does not grow
with them."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
from PIL import Image

from silentbad.data.formats import source, text_of
from silentbad.data.images import open_image
from silentbad.data.scan_file import PICTURE
from silentbad.errors import UserError, writing
from silentbad.files import from_json
from silentbad.progress import Bar
from silentbad.scan.regions import SIDE, view

BYTES = SIDE * SIDE * 3
FLUSH = 256  # records
FOLDER = ".scan"  # in the output folder, until the scan has ended

Rows = Callable[[], Iterator[dict]]


def picture_of(row: dict) -> np.ndarray:
    """A row's picture squashed to (64,64,3) uint8 by area. Raises UserError where it is none."""
    image = open_image(source(row["image"], row["where"]), row["where"])
    return np.asarray(image.resize((PICTURE, PICTURE), Image.Resampling.BOX))


class Views:
    """The views and captions of a data set in a folder: `pixels` (N,32,32,3) mapped, `captions`."""

    def __init__(self, folder: Path, key: str):
        self.folder = folder
        self.files = {name: folder / name for name in ("key", "views", "captions")}
        with writing("--output_dir", str(folder)):
            folder.mkdir(parents=True, exist_ok=True)
            for file in self.files.values():
                file.touch()
            if self.files["key"].read_text(errors="replace") != key:
                self.files["views"].write_bytes(b"")
                self.files["captions"].write_bytes(b"")
                self.files["key"].write_text(key)
            # of a stopped scan: the records that both files hold whole, up to a damaged one
            lines = self.files["captions"].read_text(encoding="utf-8", errors="replace")
            whole = self.files["views"].stat().st_size // BYTES
            self.captions = [*_texts(lines.split("\n")[:-1][:whole])]
            kept = len(self.captions)
            size = sum(len(json.dumps(text)) + 1 for text in self.captions)
            os.truncate(self.files["views"], kept * BYTES)
            os.truncate(self.files["captions"], size)

    def fill(self, rows: Rows) -> None:
        """Add what is missing. Raises UserError at a row that is no record, or without one."""
        have = len(self.captions)
        with (
            writing("--output_dir", str(self.folder)),
            self.files["views"].open("ab") as pixels,
            self.files["captions"].open("ab") as lines,
        ):
            for number, row in enumerate(Bar(rows(), desc="pictures")):
                if number < have:
                    continue
                text, picture = text_of(row), picture_of(row)
                pixels.write(view(picture).tobytes())
                lines.write(json.dumps(text).encode() + b"\n")
                self.captions.append(text)
                if number % FLUSH == 0:
                    pixels.flush()
                    lines.flush()
        if not self.captions:
            raise UserError("train_data_dir: holds no record")

    @property
    def pixels(self) -> np.ndarray:
        """(N,32,32,3) uint8, mapped from the file."""
        shape = (len(self.captions), SIDE, SIDE, 3)
        return np.memmap(self.files["views"], np.uint8, "r", shape=shape)

    def remove(self) -> None:
        """Nothing is left to resume; a file of someone else stays, and its folder with it."""
        for file in self.files.values():
            file.unlink(missing_ok=True)
        with suppress(OSError):
            os.rmdir(self.folder)


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
