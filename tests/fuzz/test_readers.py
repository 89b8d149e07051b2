"""Mutated bytes of every file that is read: each reader returns, or refuses in one line."""

import contextlib
import io

import pytest

from tests.fuzz.judge import tally, timed
from tests.fuzz.mutations import mutated
from tests.fuzz.readers import READERS, prepared

QUICK = 1  # cases of each reader, times its weight
LONG = 700


@pytest.fixture(scope="module")
def inputs(good, tmp_path_factory):
    return prepared(good, tmp_path_factory.mktemp("readers") / "inputs")


@pytest.mark.parametrize("name", READERS)
def test_mutated_bytes_are_read_or_refused(name, inputs, fuzz):
    reader = READERS[name]
    counts = tally(name)
    (file,) = inputs.glob(reader.name)
    whole = file.read_bytes()
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        reader.read(inputs)
        file.write_bytes(whole)
        for seed in fuzz.seeds(QUICK * reader.weight, LONG * reader.weight):
            content, touched = mutated(whole, f"{name}-{seed}")
            counts.mutated += touched
            file.write_bytes(content)
            with timed(counts, f"{name}, seed {seed}"):
                reader.read(inputs)
    file.write_bytes(whole)
    counts.settle()
