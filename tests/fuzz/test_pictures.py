"""Mutated pictures: each is read within bounds, or refused in one line. A seed makes the same picture again."""

import contextlib
import os

import pytest

from silentbad.data.images import MAX_PIXELS, open_image, open_mask, thumbnails
from tests.fuzz.judge import tally, timed
from tests.fuzz.mutations import mutated
from tests.fuzz.pictures import sources

QUICK = 600
LONG = 100_000


@contextlib.contextmanager
def silent_decoders():
    """libtiff writes its warnings past Python to the standard error."""
    standard_error = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(standard_error, 2)
        os.close(standard_error)
        os.close(nowhere)


def test_the_sources_are_pictures():
    for name, content in sources().items():
        if name != "PNG wide":
            assert open_image(content, name).mode == "RGB"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files that Pillow leaves open
def test_mutated_pictures_are_read_or_refused(fuzz, tmp_path):
    counts = tally("pictures")
    pictures = [*sources().items()]
    file = tmp_path / "mask"
    with silent_decoders():
        for seed in fuzz.seeds(QUICK, LONG):
            name, content = pictures[seed % len(pictures)]
            content, touched = mutated(content, seed)
            counts.mutated += touched
            with timed(counts, f"{name}, seed {seed}"):
                if seed % 7:
                    image = open_image(content, "where")
                    assert image.mode == "RGB" and image.width * image.height <= MAX_PIXELS
                    if image.width * image.height < 10_000:
                        thumbnails(image)
                else:
                    file.write_bytes(content)
                    assert open_mask(file, (13, 9), "where").mode == "L"
    counts.settle()
