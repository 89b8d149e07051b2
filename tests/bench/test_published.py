"""The published setting: the poisoning ratio, a sustained recovery, and which targets have been used."""

import subprocess

import numpy as np
import pytest

from bench import layers, spectral
from bench.arms import HALVES, PUBLISHED, PUBLISHED_AT
from bench.published_table import (
    FIRST_TARGETS,
    block_of,
    by_arm,
    figures,
    holm,
    seconds_sooner,
    sign_flips,
    summary,
    sustained,
    table,
    times_sooner,
    usual,
)
from bench.recovery_table import RESULTS, stored
from worlds.microworld.make import target_scene

FROZEN = {  # block of targets -> the commit that freezes its arms and rates
    2000: "53a37f82c1f60f7de9f8aa9f481f4417096f7b44",
    2100: "1a7f77450f8ab8a502f7f51c1ad038937e91429e",
    2450: "2994cf71460d02a76ba208a3ffa54304da2fe16e",
    2500: "c203e699e6765c252f5fa48a52ed44978e32f61e",
    2524: "bfe2538af70331e1a0a1c111d38ce118ba7299d4",
    2732: "20135b913b3dae7faed82120efe436f659298c4d",
    2842: "31fef8341c2c849777ef82f41324223e4fc9edaf",
    2930: "2886866e4eb61f2541846a6a069d37a4e7de50cc",
}


def run(rates, **more):
    shared = {"ratio": 0.1, "target": "7", "arm": "plain", "factor": 8.0, "seed": 0, "steps": 20, "commit": "a" * 40}
    shared |= {"clean": 720, "images_per_phrase": 40, "targets": "7"}
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


def test_a_run_among_more_clean_pictures_is_not_the_usual_one():
    rows = run([0, 1]) + run([0, 1], clean=2000) + run([0, 1], clean=5760, targets="1,2,3,4,5,6,7,8")
    assert [usual(row) for row in rows] == [True, True, False, False, True, True]
    assert not any(usual(row) for row in run([0, 1], settled=3) + run([0, 1], first_images=4))


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


def arm(name, when, steps=100, **more):
    """Runs of an arm, one target each, that recover for good at these steps (None: never)."""
    rows = []
    for target, step in enumerate(when):
        curve = [1.0 if step is not None and 10 * i >= step else 0.0 for i in range(steps // 10 + 1)]
        rows += run(curve, arm=name, target=str(target), steps=steps, **more)
    return rows


def test_a_plain_that_never_recovers_gives_a_lower_bound():
    rows = arm("plain", [None, None, None]) + arm("fast", [10, 20, None], steps=50)
    plain, fast = (by_arm(rows)[key] for key in (("plain", 8.0, 100), ("fast", 8.0, 50)))
    assert np.exp(times_sooner(plain, fast, 100)) == pytest.approx([10, 5, 1])
    logs = times_sooner(plain, fast, 100)
    assert np.exp(seconds_sooner(logs, plain, fast, 2.0)) == pytest.approx([5, 2.5, 1])  # a tie stays one
    line = next(line for line in summary(rows).splitlines() if "`fast`" in line)
    assert f"| {50 ** (1 / 3):.1f} " in line and "| 2 of 3 [" in line
    (line,) = (line for line in summary(rows[:45]).splitlines() if "`fast`" in line)
    assert f">= {50**0.5:.1f} " in line


def test_an_arm_that_never_recovers_has_no_speed_up():
    rows = arm("plain", [None, 50]) + arm("lost", [None, None])
    line = next(line for line in summary(rows).splitlines() if "`lost`" in line)
    assert line.endswith("| - | 1.0000 | - |")


def test_where_plain_recovers_the_ratio_is_no_bound():
    rows = arm("plain", [50, 90]) + arm("fast", [10, 20])  # seen at 50: recovered after 40
    line = next(line for line in summary(rows).splitlines() if "`fast`" in line)
    assert "| 4.0 |" in line and ">=" not in line


def test_a_target_counts_where_most_of_its_seeds_recover():
    rows = arm("plain", [None]) + arm("plain", [10], seed=1) + arm("plain", [10], seed=2)
    assert "| 1 of 1 [" in summary(rows) and "| 1 (3) |" in summary(rows)


def test_signs_and_holm():
    assert sign_flips(np.ones(8)) == pytest.approx(2**-8, rel=0.5) and sign_flips(-np.ones(8)) == 1.0
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06]) and holm([0.9, 0.8]) == [1.0, 1.0]


# Evaluated less often than frozen, to save time (research/protocol.md): four and eight at once, and plain to 4000.
COARSER = {(800, 200), (1600, 400), (3200, 1600), (4800, 1200), (4000, 250)}
ALSO = {  # to see whether they arrive at all, in pairs with `recommended_long`, beside the decoder
    "plain": {(4000, 250)},
    "replay": {(1800, 100)},
    "recommended": {(200, 50), (200, 200)},
    "recommended_leak_free": {(200, 200)},
    "decoder": {(200, 20)},  # its time to recovery
    "recommended_long": {
        *((600, 200), (600, 600)),  # more seeds, more clean pictures; beside `decoder_long`
        *((1200, 1200), (2400, 2400), (9600, 9600)),  # 8, 16 and 64 targets at once at equal exposures
    },
}


def test_a_target_of_k_elements_is_of_its_seeds_block():
    assert block_of({"targets": "2101k5,2102"}) == 2100 and block_of({"targets": "7k2"}) == 0


STORED = {  # rows of commands that left -> the targets that they may have, the commit that fixes them
    "strength.jsonl": (range(2200, 2212), "82e2a3520879fcb7b897be4083b2e066c23bff5e"),
    "layerwise.jsonl": (range(2300, 2312), "9e379b12584afcb6fb522477346246355e0dbd54"),
    "nulls.jsonl": (range(2400, 2424), "32c3b93099bee9ee4c2e4ae7b5f301410a671f09"),
    "between.jsonl": (range(2474, 2480), "552d74642ee176c63bf988b53042fb72013500b1"),
    "contrast.jsonl": (range(2684, 2692), "c60081b4269151e77c446617252879e9bcd97536"),
}


@pytest.mark.parametrize("file", STORED)
def test_rows_of_a_command_that_left_are_of_what_was_fixed_before(file):
    targets, frozen = STORED[file]
    rows = stored(RESULTS.with_name(file))
    assert rows and {int(row["target"].partition("k")[0]) for row in rows} <= {*targets}
    descend(frozen, rows)


def descend(frozen: str, rows: list[dict]) -> None:
    """The rows are of commits after the one that freezes what they measure."""
    for commit in sorted({row["commit"] for row in rows}):
        if subprocess.run(["git", "cat-file", "-e", commit], capture_output=True).returncode:
            pytest.skip("a clone without history")
        found = subprocess.run(["git", "merge-base", "--is-ancestor", frozen, commit], capture_output=True)
        assert found.returncode == 0, f"{commit} does not descend from {frozen}"


OTHER_RATES = {
    ("recommended", 24.0),  # to have drift near the decoder's, frozen with it
    *(("recommended_row_groups", rate) for rate in (28.0, 56.0)),
    ("recommended_three_steps", 28.0),  # a control, begun when the other figures were known
}


def test_reported_rows_are_of_frozen_code():
    """Targets from 2000 on are generated after the commit that freezes protocol, arms and rates."""
    rows = stored(RESULTS.with_name("published.jsonl")) + stored(layers.RUNS) + stored(spectral.RUNS)
    arms = {*PUBLISHED, *HALVES, "contrast", "contrast_placebo"}  # the last two left
    assert {row["arm"] for row in rows} <= arms and {*PUBLISHED_AT} <= arms and {*FROZEN} == {*FIRST_TARGETS}
    reported = [row for row in rows if max(map(int, row["targets"].split(","))) >= 1000]
    for row in reported:
        first = block_of(row)
        assert first and all(first <= int(target) < first + 48 for target in row["targets"].split(","))
        if row["arm"] in PUBLISHED_AT and not row["flags"]:
            factor, steps, every = PUBLISHED_AT[row["arm"]]
            together = row["targets"].count(",") + 1  # at equal exposures a target
            lengths = {(steps * together, every * together)} | ALSO.get(row["arm"], set())
            lengths |= COARSER if together > 1 or row["steps"] == 4000 else set()
            assert row["factor"] == factor or (row["arm"], row["factor"]) in OTHER_RATES
            assert (row["steps"], row["every"]) in lengths
    for block in FIRST_TARGETS:
        descend(FROZEN[block], [row for row in reported if block_of(row) == block])
