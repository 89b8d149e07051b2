"""The carry-over of a rate: the table's ratio."""

import json

from bench.carry import table


def run(base: str | None, unit: str, target: str, recovers_at: int | None) -> list[dict]:
    """Rows of a run with evaluations at 0, 20, 40 and 60."""
    shared = {
        "flags": json.dumps({"learning_rate_unit": unit}),
        "target": target,
        "whole_rate": 0.0,
        "mean": 0.0,
        "elements": [0.0],
        "element_means": [0.0],
        "drift": 0.0,
        "seconds": 1.0,
        **({} if base is None else {"base": base}),
    }
    back = [step for step in (20, 40, 60) if recovers_at is not None and step >= recovers_at]
    return [{**shared, "step": step, "rate": 1.0 if step in back else 0.25} for step in (0, 20, 40, 60)]


def test_steps_are_compared_target_by_target_within_a_unit():
    rows = run(None, "absolute", "1", 20) + run(None, "absolute", "2", 40)
    rows += run("quarter", "absolute", "1", 40) + run("quarter", "absolute", "2", None)
    rows += run(None, "relative", "1", 40) + run("four", "relative", "1", 40)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table(rows).splitlines()[2:]]
    assert lines == [
        ["a quarter", "absolute", "2", "1", "40", "2.00"],
        ["bundled", "absolute", "2", "2", "30", "1.00"],
        ["bundled", "relative", "1", "1", "40", "1.00"],
        ["four times", "relative", "1", "1", "40", "1.00"],
    ]
