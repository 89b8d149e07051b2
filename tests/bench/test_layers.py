"""The benchmarks of layers that train and of spectral updates run, on the bundled UNet."""

import json

import pytest

from bench import layers, spectral
from bench.kept import MICRO

SETTING = {"ratio": 0.1, "seed": 0, "factor": 40.0, "placebo": False, "commit": "c" * 40, "steps": 200}


def run(target: str, arm: str, rate: float, drift: float) -> list[dict]:
    """The rows of one run, before and after training."""
    shown = {"whole_rate": rate, "mean": rate, "elements": [rate], "element_means": [rate]}
    row = {
        **SETTING,
        "target": target,
        "targets": target,
        "arm": arm,
        "rate": rate,
        **shown,
        "drift": drift,
        "seconds": 100.0,
        "step": 200,
    }
    return [row | {"step": 0, "drift": 0.0, "rate": 0.0, "seconds": 0.0}, row]


def test_the_decoder_is_compared_in_pairs_and_the_halves_are_one_arm():
    rows = [row for t in "12" for row in run(t, "recommended", 1.0, 0.04) + run(t, "decoder", 0.9, 0.02)]
    rows += run("1", "half_0", 0.5, 0.04) + run("2", "half_1", 0.25, 0.04)
    lines = {line.split(" | ")[0].strip("| "): line for line in layers.compared(rows).splitlines()[2:]}
    assert "-0.10" in lines["all layers"] and "| 0.50 |" in lines["all layers"]
    assert "| 2 | +0.53" in lines[layers.TRAINS[layers.HALF]]
    assert "| 2 (2) | 1 of 2 | 0.38" in layers.outcomes(rows)


def test_times_to_recovery_are_compared_in_pairs_of_targets():
    """The last evaluation below of what is held against, the first above of the other; seconds by what a step costs."""
    rows = []
    for target in ("2842", "2843"):
        for arm, steps, below, above in (("adamw", 400, 160, 200), ("decoder", 200, 60, 80)):
            start, last = (row | {"steps": steps} for row in run(target, arm, 1.0, 0.04))
            rows += [start, start | {"step": below}, last | {"step": above}, last | {"step": steps}]
    costs = {"all, AdamW alone": 0.5, "decoder": 0.75}
    lines = layers.sooner(rows, {"arms": {name: {"ratio": cost} for name, cost in costs.items()}}).splitlines()
    assert lines[2].startswith("| all layers, AdamW | 2 of 2 |")
    assert "| 2.0 | 1.50 | 1.3 |" in lines[3]
    assert len({line.count("|") for line in lines}) == 1
    assert layers.arms_of(rows) == {}
    lost = [row | {"rate": 0.0} if row["target"] == "2843" else row for row in rows]
    line = layers.sooner(lost, {"arms": {name: {"ratio": cost} for name, cost in costs.items()}}).splitlines()[3]
    assert "| 1 of 2 |" in line and ">=" not in line  # neither recovers the second target


@pytest.mark.thorough
def test_fewer_layers_cost_less(capsys):
    ratios = layers.main(["--smoke", "--batch", "2"])
    assert ratios.keys() == layers.ARMS.keys()
    assert ratios["all"] == 1 and ratios["up1"] < 0.9
    assert "| 54% |" in capsys.readouterr().out


@pytest.mark.thorough
def test_spectral_updates_are_timed():
    ratios = spectral.main(["--smoke"])
    assert ratios.keys() == spectral.ARMS.keys() and ratios["default"] == 1
    assert ratios["AdamW for time, proj"] < 1


def test_cheaper_spectral_updates_are_compared_in_pairs_of_targets():
    rows = [row for t in "12" for row in run(t, "recommended", 1.0, 0.04) + run(t, spectral.CHEAPER, 0.75, 0.04)]
    rows += run("3", "recommended", 0.0, 0.04)
    lines = spectral.recovery(rows).splitlines()
    assert "| 2 | 1.00 |" in lines[2]
    assert "| difference | 2 | -0.25 |" in lines[4]


def test_groups_of_rows_are_compared_with_whole_matrices_at_each_rate():
    right = {"right": {"2": {kind: [1, 2] for kind in MICRO.kinds}}}
    rows = run("1", spectral.WHOLE, 1.0, 0.04) + run("2", spectral.WHOLE, 0.5, 0.04)
    for factor, rates in ((40.0, (1.0, 0.4)), (28.0, (0.0, 0.5))):
        for target, rate in zip("12", rates, strict=True):
            rows += [row | {"factor": factor} for row in run(target, spectral.GROUPS, rate, 0.04)]
    lines = spectral.row_groups([row | right for row in rows]).splitlines()[2:]
    assert lines[0].startswith("| whole matrices | 40 | 2 | 2 | 0.75")
    assert lines[0].endswith("| 0.50 |  |  |")
    assert lines[1].startswith("| two groups of rows | 28 | 2 | 1 |") and "| -0.50 | 1.40 |" in lines[1]
    assert "| -0.05 | 0.14 |" in lines[2]


@pytest.mark.thorough
def test_the_stored_operations_are_those_of_the_shapes():
    assert json.loads(spectral.OPERATIONS.read_text()) == spectral.counted()
