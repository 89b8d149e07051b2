"""A published detector beside the bundled one: the tables, and which targets the stored rows are of."""

import pytest

from bench import sscd
from bench.recovery_table import stored


def row(target, kind, value):
    names = ("sscd raw", "sscd decoded", "bundled raw", "bundled decoded")
    return {"world": "microworld", "target": target, "kind": kind, **dict.fromkeys(names, value)}


def test_a_kind_is_told_from_copies_where_copies_score_above_it():
    rows = [row("7", sscd.COPY, 0.8), row("7", "worse", 0.4), row("7", "better", 0.9), row("7", "worse", 0.6)]
    worse, better = (sscd.line(kind, rows) for kind in ("worse", "better"))
    assert worse[:6] == ["worse", "2 (1)", "0.50", "0.50", "0.50", "0.50"]
    assert (worse[-1], better[-1]) == ("1.00", "0.00") and sscd.line(sscd.COPY, rows)[-1] == ""


@pytest.mark.parametrize("world", sscd.TARGETS)
def test_stored_rows_are_of_the_targets_that_were_fixed_before(world):
    rows = [row for row in stored(sscd.RESULTS) if row["world"] == world]
    assert {row["target"] for row in rows} == {str(seed) for seed in sscd.TARGETS[world]}
    assert len({row["sscd"] for row in rows}) == 1 and "SHA-256" in rows[0]["sscd"]
