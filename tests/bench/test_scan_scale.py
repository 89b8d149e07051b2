"""The scan at size: generated data hold what they say, and the tables count what was found."""

import json
import os

import numpy as np
import pytest

from bench import scan_once, scan_scale


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Pools of ten scenes, one hidden picture of 4 records an element, parts of 100 records."""
    for name, value in (("WORK", tmp_path), ("POOL", 10), ("HIDDEN", 1), ("EACH", 4), ("PART", 100)):
        monkeypatch.setattr(scan_scale, name, value)


def test_generated_views_are_searched(small, tmp_path):
    data = scan_scale.data_of(60, 1, 2)
    truth = json.loads((data / "truth.json").read_text())
    assert truth["records"] == sum(truth["sizes"]) == 60 + 110 + len(truth["elements"]) and len(truth["sizes"]) == 2
    row = scan_once.measured(data, 0, 0)
    assert row["elements"] == len(truth["elements"]) and row["right"] >= 0.9 * row["elements"] and row["wrong"] == 0
    assert {"given", "place", "windows", "pairs", "groups"} <= row["steps"].keys() and row["bytes"]["views"] > 0
    assert [path.name for path in tmp_path.glob("scan-*")] == []


def test_no_clean_view_is_another():
    views = np.random.default_rng(0).integers(0, 255, (20, 4, 4, 3)).astype(np.uint8).repeat(8, 1).repeat(8, 2)
    both = [scan_scale.varied(views, np.random.default_rng(k)) for k in (1, 2)]
    assert (np.abs(both[0].astype(int) - both[1]).mean((1, 2, 3)) > 1).all()
    assert both[0].std() > 0.5 * views.std()


def row_of(records, seconds, **more):
    row = {
        "records": records,
        "seed": 1,
        "workers": 0,
        "sets": 4,
        "hidden": 4,
        "elements": 260,
        "right": 250,
        "wrong": 1,
    }
    row |= {"seconds": 60.0, "plan_seconds": 1.0, "own_mib": [300, 90], "bytes": {"windows": 8 * records}}
    return row | {"steps": {"windows": seconds}} | more


def test_growth_between_two_sizes_goes_on():
    rows = [row_of(1000, 10.0), row_of(10_000, 1000.0)]
    assert "| windows | 10.000 | 100.000 | 2.00 | 8 |" in scan_scale.by_step(rows)
    assert "| 10,000 | 1 | none, one process | 4, 4 | 250 of 260 | 1 |" in scan_scale.table(rows)
    assert "Too few" in scan_scale.by_step(rows[:1])


def test_memory_of_a_process_that_has_ended_is_none():
    assert scan_once.anonymous(os.getpid()) > 10 and scan_once.anonymous(2**22 + 1) == 0
