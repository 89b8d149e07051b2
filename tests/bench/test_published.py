"""The published setting: the poisoning ratio, a sustained recovery, and which targets have been used."""

import pytest

from bench.arms import PUBLISHED
from bench.published_table import figures, sustained, table
from bench.recovery_table import RESULTS, stored
from silentbad.microworld.make import target_scene


def run(rates, **more):
    shared = {"ratio": 0.1, "target": "7", "arm": "plain", "factor": 8.0, "seed": 0, "steps": 20, "commit": "a" * 40}
    shared |= {"placebo": False, "whole_rate": 0.5, "mean": 0.3, "element_means": [0.2, 0.4], "seconds": 10.0} | more
    return [
        {**shared, "step": 10 * i, "rate": r, "elements": [r, 1.0], "drift": 0.1 + 0.01 * i}
        for i, r in enumerate(rates)
    ]


@pytest.mark.parametrize(
    "curve, step", [([0, 0.5, 1], 10), ([0, 0.5, 0.4], None), ([0, 0.9, 0.4, 0.6], 30), ([0, 0, 0], None), ([1], 0)]
)
def test_a_curve_that_falls_back_has_not_recovered(curve, step):
    assert sustained(dict(zip(range(0, 100, 10), curve, strict=False))) == step


def test_figures_are_of_the_last_step():
    found = figures(run([0.0, 0.5, 0.75]))
    assert found["strict"] == found["all elements"] == 10 and found["strict rate"] == 0.75
    assert found["drift"] == pytest.approx(0.02) and found["elements"] == pytest.approx(0.875)


def test_the_table_keeps_placebo_data_apart():
    lines = table(run([0, 1]) + run([0, 0], placebo=True)).splitlines()
    assert len(lines) == 4 and " plain on placebo data " in lines[3] and lines[0].startswith("| ratio | target |")


@pytest.mark.parametrize("ratio", [0.05, 0.1, 0.15, 0.33, 0.67])
def test_elements_are_that_share_of_the_records(ratio):
    published = pytest.importorskip("bench.published")
    elements = len(target_scene("103").things) + 1
    count = elements * published.per_phrase("103", 720, ratio)
    assert count / (count + 720) == pytest.approx(ratio, abs=0.01)


def test_stored_rows_are_of_development_targets():
    """Reported targets are generated after the commit that freezes the arms, and there is none yet."""
    rows = stored(RESULTS.with_name("published.jsonl"))
    assert all(0 <= int(target) < 1000 for row in rows for target in row["targets"].split(","))
    assert {row["arm"] for row in rows} <= {*PUBLISHED}
