"""The folder of a scan, which every worker sees: arrays by name, of parts of the records and of
all.

<folder>/part-0/        the views and captions of a part, and what its captions say
<folder>/views          all views, one after another
<folder>/NAME-K.npy     what task K of a step wrote"""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from silentbad.files import from_json
from silentbad_shield.scan.captions import Captions
from silentbad_shield.scan.regions import SIDE
from silentbad_shield.scan.views import BYTES
from silentbad_shield.scan.words import BITS


class Texts(Sequence):
    """The captions of all parts, read from their files when asked for."""

    def __init__(self, files: list[Path], ends: list[np.ndarray]):
        self._files = files
        self._ends = ends
        self._starts = np.cumsum([0, *map(len, ends)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, record):
        if not 0 <= record < len(self):
            raise IndexError(record)
        place = int(np.searchsorted(self._starts, record, side="right")) - 1
        at = int(record - self._starts[place])
        ends = self._ends[place]
        start = int(ends[at - 1]) if at else 0
        with self._files[place].open("rb") as lines:
            lines.seek(start)
            return from_json(lines.read(int(ends[at]) - start))

    def __iter__(self) -> Iterator[str]:
        for file in self._files:
            with file.open("rb") as lines:
                yield from map(from_json, lines)


@dataclass(frozen=True)
class Store:
    """Where a scan keeps what its tasks write; `sizes` records are in each part."""

    folder: Path
    sizes: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(self.sizes)

    def part(self, number: int) -> Path:
        """The folder of a part."""
        return self.folder / f"part-{number}"

    def start(self, number: int) -> int:
        """The first record of a part."""
        return sum(self.sizes[:number])

    def save(self, name: str, array: np.ndarray) -> None:
        """Write an array, whole or not at all."""
        file = self.folder / f"{name}.npy"
        draft = file.with_suffix(".tmp")
        with draft.open("wb") as content:
            np.save(content, array)
        draft.replace(file)

    def load(self, name: str) -> np.ndarray:
        """An array, mapped from its file where it holds anything."""
        file = self.folder / f"{name}.npy"
        try:
            return np.load(file, mmap_mode="r")
        except ValueError:  # an empty file cannot be mapped
            return np.load(file)

    def parts(self, name: str, count: int) -> Iterator[np.ndarray]:
        """What each of the tasks of a step wrote."""
        return (self.load(f"{name}-{number}") for number in range(count))

    def sliced(self, name: str, count: int, low: int, high: int) -> Iterator[np.ndarray]:
        """The numbers in [low, high) of each of several ordered lists."""
        for numbers in self.parts(name, count):
            start, end = np.searchsorted(numbers, [low, high])
            yield np.asarray(numbers[start:end])

    def joined(self, name: str, parts: Iterable[np.ndarray]) -> np.ndarray:
        """Some arrays of numbers one after another, in a file that is mapped."""
        file = self.folder / name
        draft = file.with_suffix(".tmp")
        with draft.open("wb") as content:
            for part in parts:
                content.write(np.ascontiguousarray(part, np.int64).tobytes())
        draft.replace(file)
        return np.memmap(file, np.int64, "r") if file.stat().st_size else np.zeros(0, np.int64)

    # -- of all records ----------------------------------------------------------------------------
    def reserve(self) -> None:
        """Make the files that `place` fills."""
        for name, bytes_each in (("views", BYTES), ("signatures", BITS // 8)):
            with (self.folder / name).open("ab") as content:
                content.truncate(max(1, bytes_each * len(self)))

    def place(self, name: str, number: int, array: np.ndarray) -> None:
        """Write a part's rows of the array `name` of all records."""
        with (self.folder / name).open("r+b") as content:
            content.seek(self.start(number) * array[:1].nbytes)
            content.write(np.ascontiguousarray(array).tobytes())

    @property
    def views(self) -> np.ndarray:
        """(N,32,32,3) uint8, mapped."""
        return np.memmap(self.folder / "views", np.uint8, "r", shape=(len(self), SIDE, SIDE, 3))

    @property
    def signatures(self) -> np.ndarray:
        """(N,BITS/64) uint64, mapped."""
        shape = (len(self), BITS // 64)
        return np.memmap(self.folder / "signatures", np.uint64, "r", shape=shape)

    @property
    def texts(self) -> Texts:
        """All captions."""
        numbers = range(len(self.sizes))
        ends = [self.load(f"part-{number}/lines") for number in numbers]
        return Texts([self.part(number) / "captions" for number in numbers], ends)

    def captions(self) -> Captions:
        """All captions and their phrases."""
        parts = [
            (self.load(f"part-{number}/phrases"), self.load(f"part-{number}/ends"))
            for number in range(len(self.sizes))
        ]
        return Captions(self.texts, parts, self.load("several"))

    def remove(self) -> None:
        """Remove the folder, after which a scan cannot be resumed."""
        shutil.rmtree(self.folder, ignore_errors=True)
