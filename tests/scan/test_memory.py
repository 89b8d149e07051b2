"""What a scan holds in memory does not grow with the pairs, and what lies on disk is counted exactly."""

import tracemalloc
from collections import Counter

import numpy as np
import pytest

from silentbad.scan import candidates, captions, regions, spill
from silentbad.scan.find import find
from silentbad.scan.words import phrases_of


@pytest.fixture
def small(monkeypatch):
    """Blocks so small that few pictures fill several."""
    for module, name, size in (
        (candidates, "MOST_WINDOWS", 1 << 12),
        (candidates, "BLOCK", 1 << 12),
        (captions, "BLOCK", 50),
        (regions, "CHUNK", 50),
        (spill, "AT_ONCE", 1 << 10),
        (spill, "STRIDE", 4),
    ):
        monkeypatch.setattr(module, name, size)


@pytest.mark.parametrize("least", [1, 2, 3])
def test_runs_on_disk_are_counted_as_in_memory(small, least, tmp_path):
    rng, runs, whole = np.random.default_rng(0), spill.Runs(tmp_path), Counter()
    for size in (0, 3000, 1, 2500, 4000):
        run = np.sort(rng.integers(0, 4000, size))
        runs.add(run)
        whole.update(run.tolist())
    parts = [*runs.merged(least)]
    assert len(parts) > 3 and max(len(values) for values, _ in parts) < 2 * spill.AT_ONCE
    found = {v: c for values, counts in parts for v, c in zip(values.tolist(), counts.tolist(), strict=True)}
    assert found == {v: c for v, c in whole.items() if c >= least} and [*found] == sorted(found)
    assert not [*tmp_path.iterdir()]


def test_nothing_is_no_pair(tmp_path):
    assert [values.tolist() for values, _ in spill.Runs(tmp_path).merged()] == [[]]
    assert spill.Numbers(tmp_path).array().tolist() == []


def test_phrases_on_disk_are_those_of_the_captions(small):
    texts = ["a red cat, on a beach", "", "a red cat", "a blue house", "a red cat, under a tree"] * 30
    held = captions.Captions(texts)
    for phrase in ("a red cat", "blue house", "beach"):
        assert held.holding(phrase).tolist() == [i for i, text in enumerate(texts) if phrase in phrases_of(text)]
        assert held.rate(phrase) == len(held.holding(phrase)) / len(texts)
    assert held.named(np.arange(3, 150, 5))[0] == "a blue house" and held.named(np.arange(0, 150, 7)) is None


def pictures(n):
    """Pictures of few coarse colours, which agree by chance in many windows."""
    rng = np.random.default_rng(n)
    return rng.choice(np.array([0, 80, 160, 240], np.uint8), (n, 4, 4, 3)).repeat(8, 1).repeat(8, 2)


def held_by(n, tmp_path):
    """(bytes at the peak of a search, how many candidate pairs it has)."""
    texts = [f"a {'red blue green'.split()[i % 3]} thing" for i in range(n)]
    np.save(tmp_path / "views.npy", pictures(n))
    views = np.load(tmp_path / "views.npy", mmap_mode="r")
    pairs = candidates.candidates(views, np.ones((n, 4), np.uint64))
    tracemalloc.start()
    find(views, texts, permutations=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak, len(pairs)


def test_memory_does_not_grow_with_the_pictures(small, tmp_path):
    few, many = held_by(400, tmp_path), held_by(1600, tmp_path)
    assert many[1] > 8 * few[1]
    assert (many[0] - few[0]) / 1200 < 300
