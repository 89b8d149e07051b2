"""Sorted whole numbers on disk: more pairs of records than memory holds, merged range by range."""

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

AT_ONCE = 1 << 20  # numbers held in memory while runs are merged
STRIDE = 64  # every so many, one number of a run helps to choose the ranges


class Numbers:
    """int64 numbers in a file without a name, which ends with the process."""

    def __init__(self, folder: Path | None = None, parts: Iterable[np.ndarray] = ()):
        self._file = tempfile.TemporaryFile(dir=folder)
        self._size = 0
        for part in parts:
            self.add(part)

    def add(self, values: np.ndarray) -> None:
        self._file.write(values.astype(np.int64).tobytes())
        self._size += len(values)

    def array(self) -> np.ndarray:
        """All of them, mapped from the file, which takes no more."""
        with self._file:
            self._file.flush()
            return (
                np.memmap(self._file, np.int64, "r", shape=(self._size,))
                if self._size
                else np.zeros(0, np.int64)
            )


class Runs:
    """Numbers added in sorted runs."""

    def __init__(self, folder: Path | None = None):
        self._numbers = Numbers(folder)
        self._ends = list[int]()

    def add(self, values: np.ndarray) -> None:
        """A run, in ascending order."""
        if len(values):
            self._numbers.add(values)
            self._ends.append(len(values) + (self._ends[-1] if self._ends else 0))

    def merged(self, least: int = 1) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """In ascending order, each number that was added at least so often, and how often."""
        runs = np.split(self._numbers.array(), self._ends[:-1])
        sample = np.sort(np.concatenate([run[::STRIDE] for run in runs]))
        starts = [0] * len(runs)
        for bound in [*sample[AT_ONCE // STRIDE :: AT_ONCE // STRIDE].tolist(), None]:
            ends = [len(run) if bound is None else int(np.searchsorted(run, bound)) for run in runs]
            parts = [run[start:end] for run, start, end in zip(runs, starts, ends, strict=True)]
            values, counts = np.unique(np.concatenate(parts), return_counts=True)
            yield values[counts >= least], counts[counts >= least]
            starts = ends
