"""What a scan holds in memory does not grow with the pairs, and what lies on disk is counted exactly."""

import tracemalloc

import numpy as np
import pytest

from silentbad_shield.scan import candidates, plan, regions
from silentbad_shield.scan.find import find
from silentbad_shield.scan.words import phrases_of
from tests.shield import in_memory
from tests.shield.in_memory import captions_of


@pytest.fixture
def small(monkeypatch):
    """Blocks so small that few pictures fill several."""
    for module, name, size in (
        (candidates, "MOST_WINDOWS", 1 << 13),
        (candidates, "BLOCK", 1 << 12),
        (regions, "CHUNK", 50),
        (plan, "AT_ONCE", 1 << 14),
    ):
        monkeypatch.setattr(module, name, size)


def test_phrases_on_disk_are_those_of_the_captions(small):
    texts = ["a red cat, on a beach", "", "a red cat", "a blue house", "a red cat, under a tree"] * 30
    captions = captions_of(texts)
    for phrase in ("a red cat", "blue house", "beach"):
        assert captions.holding(phrase).tolist() == [i for i, text in enumerate(texts) if phrase in phrases_of(text)]
        assert captions.rate(phrase) == len(captions.holding(phrase)) / len(texts)
    assert captions.named(np.arange(3, 150, 5))[0] == "a blue house" and captions.named(np.arange(0, 150, 7)) is None


def pictures(n):
    """Pictures of few coarse colours, which agree by chance in many windows."""
    rng = np.random.default_rng(n)
    return rng.choice(np.array([0, 80, 160, 240], np.uint8), (n, 4, 4, 3)).repeat(8, 1).repeat(8, 2)


def held_by(n, tmp_path):
    """(bytes at the peak of a search, how many candidate pairs it has); of two searches the lower, for threads that
    earlier tests left in this process allocate too."""
    texts = [f"a {'red blue green'.split()[i % 3]} thing" for i in range(n)]
    np.save(tmp_path / "views.npy", pictures(n))
    views = np.load(tmp_path / "views.npy", mmap_mode="r")
    pairs = in_memory.candidates(views, np.ones((n, 4), np.uint64))
    peaks = []
    for _ in range(2):
        tracemalloc.start()
        find(views, texts, size=250)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    return min(peaks), len(pairs)


@pytest.mark.thorough
def test_memory_does_not_grow_with_the_pictures(small, tmp_path):
    few, many = held_by(300, tmp_path), held_by(1000, tmp_path)
    assert many[1] > 8 * few[1]
    assert (many[0] - few[0]) / 700 < 300
