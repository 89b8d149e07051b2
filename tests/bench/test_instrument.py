"""The copy detector as an instrument: what passes, what does not, and the second judge."""

import argparse
import json

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL

from bench import instrument
from bench.instrument import (
    BASE,
    TESTED,
    AlignedSSIM,
    Detector,
    Target,
    agreement,
    auc,
    by_kind,
    measure,
    passed,
    pictures_of,
    scored,
)
from silentbad.measure.intervals import binomial_interval
from worlds.microworld.copies import shifted

PICTURES, CALIBRATION = 8, 20  # of each kind per target
NAMES = ("1", "3")
DETECTOR = Detector()


@pytest.fixture(scope="module")
def measured() -> dict[str, dict]:
    vae = AutoencoderKL.from_pretrained(BASE / "vae").eval()
    args = argparse.Namespace(calibration=CALIBRATION, pictures=PICTURES)
    found = {}
    for name in NAMES:
        target = Target(name)
        null, rows = (scored(DETECTOR, target, part) for part in pictures_of(target, vae, None, args))
        found[name] = measure(by_kind, target, null, rows)
    return found


def share(measured: dict, kind: str, level: str) -> float:
    return float(np.mean([np.divide(*m["passed"][kind][level]) for m in measured.values()]))


@pytest.mark.parametrize("kind", TESTED)
def test_hard_nulls_do_not_pass_strictly(measured, kind):
    """16 pictures a kind. At a rate of 1 %, two or more pass once in 90 tries; at 5 %, four or more once in 140."""
    allowed = 1 if TESTED[kind] == 0.01 else 3
    assert share(measured, kind, "strict") <= allowed / (len(NAMES) * PICTURES)


def test_true_copies_pass_whole_and_by_element(measured):
    """16 copies; at a rate of 0.95, fewer than 13 are seen once in 140 tries."""
    assert share(measured, "copy", "whole") >= 0.8
    assert share(measured, "copy", "strict") >= 0.8


def test_an_exact_picture_passes_and_scores_one():
    target = Target("4")
    for judge in (DETECTOR, AlignedSSIM()):
        (row,) = instrument.rows_of(judge, target, target.image)
        assert row["sim"] == pytest.approx(1, abs=1e-5)
        assert row["elements"] == pytest.approx([1] * len(target.masks), abs=1e-5)


def test_a_shift_of_one_pixel_is_no_difference():
    target = Target("4")
    moved = shifted(target.image.repeat(2, 1, 1, 1), torch.tensor([[1, -1], [0, 1]]))
    twice = shifted(shifted(target.image, torch.tensor([[1, 0]])), torch.tensor([[1, 0]]))
    assert DETECTOR.scores(target.image, moved, target.masks).min() > 0.999
    assert DETECTOR.scores(target.image, twice, target.masks).max() < 0.95


def test_a_change_outside_an_element_leaves_its_score():
    target = Target("2")
    x, changed = target.nulls("recoloured", 6, "test")
    for row in instrument.rows_of(DETECTOR, target, x, changed):
        (element,) = row["changed"]
        others = [s for k, s in enumerate(row["elements"][:-1]) if k != element]
        assert min(others) > row["elements"][element] + 0.2


def test_structural_similarity_aligns_within_one_pixel():
    target, judge = Target("2"), AlignedSSIM()
    one = shifted(target.image.repeat(2, 1, 1, 1), torch.tensor([[1, -1], [0, 0]]))
    two = shifted(one[:1], torch.tensor([[1, -1]]))
    near, same = judge.scores(target.image, one, target.masks)[1].tolist()  # a thing, away from the border
    far = judge.scores(target.image, two, target.masks)[1].item()
    assert near == pytest.approx(same, abs=1e-3) and far < 0.9


def test_thresholds_by_kind_hold_on_the_worst_kind():
    rng = np.random.default_rng(0)

    def rows(centre, changed):
        return [{"sim": s, "elements": [s, 0.99], "changed": changed} for s in rng.normal(centre, 0.01, 200).tolist()]

    null = {"redraw": rows(0.1, (0, 1)), "missing": rows(0.5, (0,))}
    whole, (first, second) = by_kind(null)
    assert 0.5 < whole < 0.55 and whole == first  # of the harder kind
    assert second == pytest.approx(0.99)  # from redraws alone: the others do not change this element


def test_strict_needs_the_whole_and_every_element():
    row = {"sim": 0.8, "elements": [0.9, 0.4], "changed": ()}
    yes, no = passed(row, (0.7, [0.8, 0.3])), passed(row, (0.7, [0.8, 0.5]))
    assert yes == {"whole": [True], "element": [True, True], "strict": [True], "each": [True, True]}
    assert no == {"whole": [True], "element": [True, False], "strict": [False], "each": [True, False]}
    assert passed(row, (0.9, [0.8, 0.3]))["strict"] == [False]
    assert passed({**row, "changed": (1,)}, (0.7, [0.95, 0.3]))["element"] == [True]  # asked of the changed one alone


def test_agreement_counts_both_judges_verdicts():
    yes, no = {"each": [True, True]}, {"each": [False, True]}
    found = agreement({"copy": [yes, yes], "missing": [no]}, {"copy": [yes, no], "missing": [no]}, {"missing": [(0,)]})
    assert found["things of copies"] == [1, 1, 0, 0] and found["backdrops of copies"] == [2, 0, 0, 0]
    assert found["things of nulls"] == [0, 0, 0, 1] and found["backdrops of nulls"] == [0, 0, 0, 0]


def test_auc_is_the_share_of_ordered_pairs():
    assert auc([0.9, 0.5], [0.1, 0.5]) == pytest.approx(3.5 / 4)


def test_an_interval_is_over_targets_or_pictures_where_these_agree():
    def results(*counts):
        return {
            "targets": {str(n): {"columns": {"new": {"passed": {"copy": {"strict": c}}}}} for n, c in enumerate(counts)}
        }

    rate, low, high, pictures = instrument.rate_of(results([0, 25], [5, 25]), "new", "copy", "strict")
    assert (rate, low, high, pictures) == (0.1, 0.0, 0.2, 50)
    assert instrument.rate_of(results([0, 25], [0, 25]), "new", "copy", "strict") == (
        0.0,
        *binomial_interval(0, 50),
        50,
    )
    assert instrument.rate_of(results([0, 0]), "new", "copy", "strict") is None


def test_the_stored_table_meets_its_bars():
    results = json.loads((instrument.RESULTS / "instrument.json").read_text())
    if (done := len(results["targets"])) < len(instrument.REPORTED):
        pytest.skip(
            f"{done} of {len(instrument.REPORTED)} targets are measured; python -m bench.instrument --reported goes on"
        )
    for kind, bar in TESTED.items():
        rate = instrument.rate_of(results, "new", kind, "strict")[0]
        assert bar is None or rate <= bar, (kind, rate)
    for level in ("whole", "element"):
        assert instrument.rate_of(results, "new", "copy", level)[0] >= 0.95, level
