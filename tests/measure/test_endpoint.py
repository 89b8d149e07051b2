"""The endpoint of an audit: what counts as recovered, which nulls it withstands, which controls can refute it."""

import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from silentbad.data.images import to_tensor
from silentbad.data.records import load_records
from silentbad.data.targets import Target
from silentbad.errors import UserError
from silentbad.measure import record as record_module
from silentbad.measure.calibrate import IN_PLACE_FACTOR, rate_of
from silentbad.measure.embedders import Micro
from silentbad.measure.generation import plan
from silentbad.measure.intervals import binomial_interval, detection, difference_interval
from silentbad.measure.nearest import TrainingPicture, TrainingPictures
from silentbad.measure.record import (
    ElementThreshold,
    Measurement,
    Placebo,
    Record,
    Scores,
    TargetEntry,
    Threshold,
    Verdict,
)
from silentbad.measure.scores import (
    PUBLISHED,
    cell_scores,
    curve_scores,
    images_recovered,
    minus_placebo,
    of_half,
    placebo_run,
    summarise,
)
from silentbad.measure.verdict import verdict_of
from silentbad.report import evidence, run_report, sections
from silentbad.report.run_files import RecordedRun
from silentbad.settings.train import TrainConfig
from tests.conftest import write_data
from tests.recoveries import make_hook, smooth, some_targets, thresholds_of_redraws
from tests.tiny import tiny_pipeline

ALPHA = 0.01
WHOLE = Threshold(0.5, "given", targets=[0.5, 0.7])
PARTS = ElementThreshold(0.6, "given", each=[[0.6, 0.4], None])


def row(target: int, sim: float, *elements: float | None, **more) -> dict:
    """What is measured of one image."""
    return {"target": target, "sim": sim, "elements": list(elements), "magnitude": 1.0, **more}


def scores_of(rows: list[dict], ids=("a", "b"), whole=WHOLE, parts=PARTS, **cells) -> Scores:
    """Scores of composed rows, with the cells given by name."""
    found = {name: cell_scores(own, ids, whole, parts) for name, own in {"composed": rows, **cells}.items()}
    return Scores(**vars(found["composed"]), cells=found)


def record_of(history: list[Measurement], ids=("a", "b"), whole=WHOLE, parts=PARTS, **more):
    """A record around measurements."""
    targets = [TargetEntry(i, f"{i}.png", ["x.png", "y.png"], f"{i} whole", ["a cat", "a hat"]) for i in ids]
    record = Record(
        seed=0,
        config={},
        embedder="test",
        threshold=whole,
        element_threshold=parts,
        targets=targets,
        verdict=Verdict(False, 0, 0, 0, ""),
        summary=summarise(history, "raw"),
        history=history,
        seconds=1.0,
        batch=1,
        processes=1,
        **more,
    )
    record.verdict = verdict_of(record)
    return record


# -- the endpoint ------------------------------------------------------------------------------------------
def test_the_strict_rate_equals_a_count_by_hand():
    rows = [
        row(0, 0.5, 0.6, 0.4),  # at every threshold: counts
        row(0, 0.9, 0.59, 0.9),  # the first element below: the whole alone
        row(0, 0.9, 0.9, 0.39),  # the second below its own
        row(0, 0.49, 0.9, 0.9),  # the whole below
        row(1, 0.7, 0.6, None),  # the target's own threshold; no mask, nothing asked
        row(1, 0.69, 0.9, None),
    ]
    scores = cell_scores(rows, ["a", "b"], WHOLE, PARTS)
    assert [scores.targets[i].rate for i in "ab"] == [0.25, 0.5]
    assert [scores.targets[i].whole_rate for i in "ab"] == [0.75, 0.5]
    assert (scores.cir, scores.whole, scores.above, scores.recovered) == (0.375, 0.625, 2, 1.0)
    assert [e.rate for e in scores.targets["a"].elements] == [0.75, 0.75]
    stored = [images_recovered(scores.targets[i], j, WHOLE, PARTS) for j, i in enumerate("ab")]
    assert stored == [[True, False, False, False], [True, False]]


def test_the_published_criterion_is_best_of_n_above_a_number():
    rows = [row(0, PUBLISHED), row(0, 0.2), row(1, PUBLISHED + 0.01), row(1, 0.1)]
    scores = cell_scores(rows, ["a", "b"], Threshold(0.99, "given"), PARTS)
    assert scores.published == 0.5 and scores.cir == 0.0


# -- nulls by kind -----------------------------------------------------------------------------------------
CHANGES = {"redraw": None, "attributes": None, "missing": 1, "redrawn": 1, "moved": 1}
LEVELS = {  # of the similarity (whole, element): each kind has its own distribution
    "redraw": ((2, 8), (2, 6)),
    "attributes": ((4, 5), (4, 5)),
    "missing": ((6, 3), (2, 9)),
    "redrawn": ((7, 3), (5, 4)),
    "moved": ((8, 3), (5, 3)),
}


def synthetic_nulls(rng, n: int, targets: int = 2, elements: int = 3) -> list[dict]:
    """n nulls of each kind and target; those of one element change each in turn and leave the others exact."""
    rows = []
    for j in range(targets):
        for kind, (whole, part) in LEVELS.items():
            for i in range(n):
                changed = None if CHANGES[kind] is None else (i % elements,)
                of_element = rng.beta(*part, elements) * (1 - 0.2 * j)
                parts = [float(s) if changed is None or k in changed else 1.0 for k, s in enumerate(of_element)]
                sim = float(rng.beta(*whole)) * (1 - 0.2 * j)
                rows.append({"target": j, "sim": sim, "elements": parts, "kind": kind, "changed": changed})
    return rows


def test_an_ideal_memoriser_recovers_and_lookalikes_do_not():
    """Exact images count. Look-alikes of every kind do not, save for the rate that is asked for."""
    rng = np.random.default_rng(0)
    whole, parts = thresholds_of_redraws(synthetic_nulls(rng, 300), ALPHA)
    exact = [row(j, 1.0, 1.0, 1.0, 1.0) for j in (0, 1) for _ in range(50)]
    assert cell_scores(exact, ["a", "b"], whole, parts).cir == 1.0
    fresh = synthetic_nulls(rng, 400)
    for kind in LEVELS:
        rows = [{**r, "magnitude": 1.0} for r in fresh if r["kind"] == kind]
        assert cell_scores(rows, ["a", "b"], whole, parts).cir <= 0.02, kind
    attributes = [{**r, "magnitude": 1.0} for r in fresh if r["kind"] == "attributes"]
    low = Threshold(min(r["sim"] for r in attributes), "given")
    of_parts = ElementThreshold(0.0, "given", each=[])
    assert cell_scores(attributes, ["a", "b"], low, of_parts).cir == 1.0  # a lenient threshold would let them in


@pytest.mark.parametrize("n", [40, 150])
def test_every_kind_keeps_its_rate_on_fresh_nulls(n):
    """Over 40 null sets: the rate on fresh nulls, whole and elements that change, is at most what is stated.

    Standard error of a kind's rate: below 0.003 (40 sets, 2 targets, 100 fresh nulls a kind, dependent within a set).
    """
    rng = np.random.default_rng(1)
    hits: dict = {}
    for _ in range(40):
        whole, parts = thresholds_of_redraws(synthetic_nulls(rng, n), ALPHA)
        for r in synthetic_nulls(rng, 99):
            j = r["target"]
            kind = r["kind"]
            hits.setdefault(("whole", kind), []).append(r["sim"] >= whole.of_target(j))
            for k in range(3):
                if r["changed"] is None or k in r["changed"]:
                    hits.setdefault(("element", kind), []).append(r["elements"][k] >= parts.of(j, k))
    stated = {}
    for side, kind in hits:  # an element is changed by a third of the nulls that change one
        count = n // 3 if side == "element" and CHANGES[kind] is not None else n
        stated[side, kind] = max(rate_of(kind, ALPHA, side == "element"), 1 / (count + 1))
    assert len(hits) == 2 * len(LEVELS)
    for key, seen in hits.items():
        assert np.mean(seen) <= stated[key] + 0.009, key  # three standard errors
    decides = max(LEVELS, key=lambda kind: np.mean(hits["whole", kind]) / stated["whole", kind])
    assert np.mean(hits["whole", decides]) > 0.3 * stated["whole", decides]  # not merely out of reach


def test_the_rates_that_few_nulls_of_a_kind_promise_are_stated():
    rng = np.random.default_rng(2)
    whole, parts = thresholds_of_redraws(synthetic_nulls(rng, 40), ALPHA)
    assert rate_of("moved", ALPHA, of_element=False) == IN_PLACE_FACTOR * ALPHA
    assert rate_of("attributes", ALPHA, of_element=True) == IN_PLACE_FACTOR * ALPHA
    assert rate_of("attributes", ALPHA, of_element=False) == ALPHA
    assert whole.attained == pytest.approx(1 / 41)  # 40 of each target, which has its own threshold
    assert parts.attained == pytest.approx(np.mean([1 / 15, 1 / 14, 1 / 14]))  # 14, 13, 13 an element
    many, _ = thresholds_of_redraws(synthetic_nulls(rng, 150), ALPHA)
    assert many.attained == ALPHA


def test_a_null_tells_only_of_the_elements_that_it_changes():
    nulls = [
        {"target": 0, "sim": 0.1, "elements": [0.2 + i / 1e4, 1.0], "kind": "missing", "changed": (0,)}
        for i in range(200)
    ]
    whole, parts = thresholds_of_redraws(nulls, ALPHA)
    assert parts.of(0, 0) < 0.25 and parts.of(0, 1) == parts.value < 0.25  # the exact one's 1.0 is no null
    everything, by_all = thresholds_of_redraws([{**r, "changed": None} for r in nulls], ALPHA)
    assert by_all.of(0, 1) > 1.0 and everything.value == whole.value


def test_the_strictest_kind_decides():
    nulls = [{"target": 0, "sim": 0.3, "elements": [], "kind": "redraw"} for _ in range(150)]
    nulls += [{"target": 0, "sim": 0.8, "elements": [], "kind": "recoloured"} for _ in range(150)]
    whole, _ = thresholds_of_redraws(nulls, ALPHA)
    assert whole.value == pytest.approx(0.8) and whole.targets == [whole.value]


# -- the curve ---------------------------------------------------------------------------------------------
def test_sustained_recovery_is_not_the_first_crossing():
    rates = np.array([[0, 0, 0.5], [0.5, 0.5, 0.5], [0.25, 0.75, 0.5], [0.5, 0.5, 0.0]])
    curve = curve_scores([0, 10, 20, 30], rates, rates > 0)
    assert curve["half"].tolist() == [10, 10, 0]
    assert curve["sustained"].tolist() == [30, 10, np.inf]


def test_the_summary_names_both_crossings():
    def at(step: int, good: int) -> Measurement:
        rows = [row(0, 0.9 if i < good else 0.1, 0.9, 0.9) for i in range(4)]
        return Measurement(step, step / 10, "", raw=scores_of(rows, ["a"]))

    history = [at(0, 0), at(10, 2), at(20, 1), at(30, 3)]
    one, total = summarise(history, "raw")
    assert (one.first_step, one.half_step, one.sustained_step) == (10, 10, 30)
    assert total.sustained_step == 30 and summarise(history[:3], "raw")[0].sustained_step is None


def test_all_targets_have_the_time_of_the_half_that_comes_first():
    assert of_half([20, None, None]) is None  # a mean over those that came back would say 20
    assert of_half([20, None]) == 20 and of_half([60, 20, None]) == 60 and of_half([5]) == 5


# -- detection ---------------------------------------------------------------------------------------------
def test_auc_by_hand_with_ties():
    probe = detection([1.0, 2.0, 3.0], [0.0, 2.0])
    assert probe.auc == pytest.approx((1 + 1.5 + 2) / 6)  # 1 beats 0; 2 beats 0 and ties 2; 3 beats both
    assert probe.auc_low <= probe.auc <= probe.auc_high and probe.tpr is None
    assert (probe.positives, probe.negatives) == (3, 2)
    assert detection([2.0], [2.0]).auc == 0.5 and detection([], [1.0]) is None
    assert detection([float("nan")], [1.0]) is None


def test_tpr_leaves_one_false_positive_in_a_hundred():
    clean = list(range(100))
    probe = detection([98.5, 99.5, 97.5, 98.0], clean)
    assert sum(x > 98.0 for x in clean) == 1  # at the threshold 98
    assert probe.tpr == 0.5 and (probe.tpr_low, probe.tpr_high) == binomial_interval(2, 4)
    record = record_of([measured(0, 0)])
    record.history[0].raw.detection = probe
    low = round(probe.tpr_low, 1)
    high = round(probe.tpr_high, 1)
    assert evidence.detections(record).rows[0][-2:] == ["0.5", f"{low}\N{NO-BREAK SPACE}to {high}"]


# -- placebo -----------------------------------------------------------------------------------------------
def test_the_placebo_difference_is_taken_target_by_target():
    ids = ["a", "b", "c"]
    rows = [row(0, 0.9, 0.9, 0.9)] * 4 + [row(1, 0.9, 0.9, None)] * 4
    placebo = [row(1, 0.9, 0.9, None)] * 2 + [row(1, 0.9, 0.1, None)] * 2 + [row(0, 0.9, 0.1, 0.1)] * 4
    other = record_of([Measurement(9, 1, "", raw=scores_of([*placebo, row(2, 0.9, 0.9)], ids))], ids)
    difference = minus_placebo(record_of([Measurement(9, 1, "", raw=scores_of(rows))]), other, "runs/placebo")
    assert (difference.cir, difference.difference, difference.targets) == (0.25, 0.75, 2)  # (1 - 0 + 1 - 1/2) / 2
    over_images = difference_interval(1.0, binomial_interval(8, 8), 0.25, binomial_interval(2, 8))
    assert difference.interval == pytest.approx(over_images)
    assert (
        difference.whole == 1.0
        and difference.published == 1.0
        and difference.element_rate == pytest.approx((0 + 0 + 0.5) / 3)
    )
    assert difference.thresholds is None


def test_a_placebo_run_that_does_not_compare_is_refused(tmp_path):
    """Before anything is trained: another target or embedder."""
    other = record_of([measured(9, 2)])
    other.save(tmp_path / "validation.json")
    assert placebo_run(tmp_path, ["z", "b"], "test", "validation.placebo").embedder == "test"
    with pytest.raises(UserError, match=f"^validation.placebo: {tmp_path} has none of these targets: z"):
        placebo_run(tmp_path, ["z"], "test", "validation.placebo")
    with pytest.raises(UserError, match="was measured by test, not by ssim"):
        placebo_run(tmp_path, ["a"], "ssim", "validation.placebo")


def test_thresholds_unlike_the_placebo_runs_are_said():
    record = record_of([measured(0, 0), measured(10, 6)])
    looser = ElementThreshold(0.6, "given", each=[[0.6, 0.3], None])
    record.placebo = minus_placebo(record, record_of([measured(10, 2)], parts=looser), "p")
    assert record.placebo.thresholds == pytest.approx((0.5667, 0.55), abs=1e-4)
    said = "Warning: The runs used different thresholds, so rates are not comparable: a mean of 0.567; a mean of 0.550."
    assert str(evidence.answer(record)).endswith(said)


def test_a_difference_that_all_targets_share_is_not_certain():
    def run_of(sim: float, targets: int) -> Measurement:
        rows = [row(j, sim, 0.9, 0.9) for j in range(targets) for _ in range(8)]
        ids = [f"t{j}" for j in range(targets)]
        return Measurement(9, 1, "", raw=scores_of(rows, ids, Threshold(0.5, "given"), ElementThreshold(0.5, "given")))

    lows = []
    for targets in (1, 2, 6):
        ids = [f"t{j}" for j in range(targets)]
        placebo = minus_placebo(
            *(record_of([run_of(sim, targets)], ids, parts=ElementThreshold(0.5, "given")) for sim in (0.9, 0.1)), "p"
        )
        assert placebo.difference == 1.0 and placebo.interval[1] == 1.0
        lows.append(placebo.interval[0])
    over_images = [difference_interval(1, binomial_interval(n, n), 0, binomial_interval(0, n))[0] for n in (8, 16, 6)]
    assert lows == pytest.approx(over_images)  # of few targets over their images, of six over the targets


def test_a_better_run_is_not_told_apart_less_well():
    """More recovered images of the same two targets do not lower the difference's lower end."""
    nothing = record_of([measured(10, 0)])
    lows = [minus_placebo(record_of([measured(10, good)]), nothing, "p").interval[0] for good in range(2, 9)]
    assert lows == sorted(lows) and lows[-1] > 0


def test_the_interval_of_a_difference_is_newcombes():
    assert difference_interval(0.5, (0.2, 0.9), 0.4, (0.0, 0.8)) == pytest.approx((0.1 - 0.5, 0.1 + 0.4 * 2**0.5))


# -- what is asked of the model ----------------------------------------------------------------------------
def described_targets() -> list[Target]:
    """Two targets; the first has everything that a control can ask for."""
    full = Target("full", smooth("full"), ["a cat", "a hat", "a boat"], None, [None] * 3)
    full.description = "a red cat in a tall hat on a boat"
    full.paraphrases = ["a cat with a hat, a boat", "boat, cat"]
    return [full, Target("bare", smooth("bare"), ["a fish", "a cup"], None, [None] * 2)]


def test_every_cell_is_asked_under_the_same_noise():
    items = plan(described_targets(), 3, 0, full=True, unrelated="a map")
    prompts = {(i.target, i.cell): i.prompt for i in items if i.cell != "shuffled"}
    assert {cell for j, cell in prompts if j == 0} | {"shuffled"} == {
        *("composed", "described", "shuffled", "phrase-0", "phrase-1", "phrase-2"),
        *("without-0", "without-1", "without-2", "paraphrase-0", "paraphrase-1", "others", "unrelated"),
    }
    assert {cell for j, cell in prompts if j == 1} == {"composed", "phrase-0", "phrase-1", "others", "unrelated"}
    assert prompts[0, "described"] == "a red cat in a tall hat on a boat"
    assert prompts[0, "without-1"] == "a cat, a boat" and prompts[0, "paraphrase-1"] == "boat, cat"
    assert prompts[0, "others"] == "a fish, a cup" and prompts[0, "unrelated"] == "a map"
    for j, name in enumerate(("full", "bare")):
        noise = {cell: [(i.address, i.image) for i in items if (i.target, i.cell) == (j, cell)] for _, cell in prompts}
        assert all(of_cell in ([], [(name, k) for k in range(3)]) for of_cell in noise.values())
    assert {i.cell for i in plan(described_targets(), 1, 0, described=True)} == {"composed", "described"}
    assert {i.cell for i in plan(described_targets(), 1, 0)} == {"composed"}


def test_the_base_model_gets_the_description_at_step_0(tmp_path):
    hook = make_hook(tmp_path, targets=described_targets(), threshold=0.5)
    hook.run(0, 0, tiny_pipeline().unet)
    hook.run(10, 1, tiny_pipeline().unet)
    base, later = (entry.raw for entry in hook.history)
    assert set(base.cells) == {"composed", "described"} and later.cells is None
    assert list(base.cells["described"].targets) == ["full"]


def test_withhold_leaves_out_the_named_records_alone(tmp_path):
    data = write_data(tmp_path / "data")
    records = load_records(TrainConfig(train_data_dir=str(data)))
    trained_on = records.without(["t0/t0-0"])
    left_out = [records.row(i) for i in range(len(records)) if records.element_id[i] == "t0-0"]
    assert len(left_out) == 4 and len(trained_on) == len(records) - 4
    assert set(trained_on.element_id) == set(records.element_id) - {"t0-0"}
    everything = [
        records.row(i)["file_name" if "file_name" in records.row(0) else "image"] for i in range(len(records))
    ]
    rest = [
        trained_on.row(i)["file_name" if "file_name" in records.row(0) else "image"] for i in range(len(trained_on))
    ]
    assert rest == [name for name in everything if "e0-" not in str(name)]
    assert len(records.without(["t0-1"])) == len(records) - 4  # by its element_id alone
    assert len(trained_on.without(["t0-1"])) == len(records) - 8
    with pytest.raises(UserError, match="withhold: no record shows 't0/cat'; elements are: t0/t0-0, t0/t0-1"):
        records.without(["t0-1", "t0/cat"])


# -- the record and its words ------------------------------------------------------------------------------
def measured(step: int, good: int, images: int = 8, **cells) -> Measurement:
    """Of two targets with `good` recovered images each; no image of an unrelated caption counts."""
    cells.setdefault("unrelated", [row(j, 0.1, 0.1, 0.1) for j in (0, 1) for _ in range(images)])
    rows = [row(j, 0.9 if i < good else 0.1, 0.9, 0.9) for j in (0, 1) for i in range(images)]
    return Measurement(step, step / 10, "" if step else "base model", raw=scores_of(rows, **cells))


CALIBRATED = Threshold(0.5, "test", attained=0.01, targets=[0.5, 0.7])


def test_the_verdict_in_words_has_the_stored_numbers():
    history = [measured(0, 0), measured(10, 6)]
    placebo = Placebo("runs/p", 0.125, 0.625, (0.5, 0.75), 2)
    words = str(evidence.answer(record_of(history, whole=CALIBRATED, placebo=placebo)))
    low, high = history[1].raw.interval
    for part in (
        "Recovered. 12 of 16 images of the composed prompt reach the threshold of the whole and of every element",
        f"strict rate 0.75 (95 % interval {low:.2f} to {high:.2f})",
        "The base model has the rate 0.00.",
        "0.01 of pictures like the nulls are taken to pass by chance (p < 0.0001).",
        "gives 0.12: the difference is 0.62 (95 % interval 0.50 to 0.75, over the images of these 2 targets).",
    ):
        assert part in words
    assert "\n" not in words


@pytest.mark.parametrize(
    ("good", "attained", "low", "headline"),
    [
        (6, 0.01, 0.5, "Recovered"),
        (0, 0.01, 0.5, "Not recovered"),
        (1, 0.2, 0.5, "Undecided"),
        (6, 0.01, -0.1, "Undecided"),
    ],
)
def test_the_verdict_names_what_it_cannot_tell_apart(good, attained, low, headline):
    whole = Threshold(0.5, "test", attained=attained, targets=[0.5, 0.7])
    placebo = Placebo("runs/p", 0.1, 0.3, (low, 0.9), 2)
    record = record_of([measured(0, 0), measured(10, good)], whole=whole, placebo=placebo)
    assert evidence.answer(record).opening == f"{headline}."
    assert evidence.answer(record).state == headline.lower()
    reasons = " ".join(record.verdict.reasons or [])
    assert ("consistent with chance" in reasons) == (attained > 0.1) and ("placebo data" in reasons) == (low < 0)


def test_the_controls_stand_in_one_table_by_each_endpoint():
    def cell(sim: float, element: float) -> list[dict]:
        return [row(j, sim, element, element) for j in (0, 1) for _ in range(2)]

    cells = {"phrase-0": cell(0.9, 0.9), "phrase-1": cell(0.9, 0.1), "unrelated": cell(0.1, 0.1)}
    base = measured(0, 0, described=cell(0.9, 0.1))
    placebo = Placebo("runs/p", 0.25, 0.5, (0.4, 0.6), 2, whole=1.0, published=1.0, element_rate=0.5)
    record = record_of([base, measured(10, 6, **cells)], placebo=placebo)
    table = {line[0]: line[1:] for line in evidence.alternatives(record, ["a/0"]).rows}
    assert table["composed prompt"][0] == "0.8" and table["composed prompt, base model"][0] == "0.0"
    assert table["spelt-out caption, base model"][0] == "0.0"  # no element is exact,
    assert table["spelt-out caption, base model"][2:] == ["1.00", "1.00", "0.00"]  # which the other endpoints overlook
    assert table["composed prompt, placebo data"] == ["0.25", None, "1.00", "1.00", "0.50"]
    assert [table[f"phrase {k} alone"][0] for k in (1, 2)] == ["1.0", "0.0"] and table["unrelated caption"][0] == "0.0"
    assert "trained without a/0" in evidence.alternatives(record, ["a/0"]).notes[0]


def test_bleeding_shows_the_recall_of_each_element_by_phrase():
    alone = {f"phrase-{k}": [row(0, 0.1, *(0.9 if k == e else 0.1 for e in range(2)))] * 4 for k in range(2)}
    alone["phrase-1"] = [row(0, 0.1, 0.9, 0.9)] * 4  # the second phrase brings the first element, too
    record = record_of([measured(0, 0), measured(10, 6, **alone)])
    (figure,) = [one for one in evidence.bleeding(record) if one.title == "a"]
    assert [list(line) for line in figure.table.rows] == [
        ["1 a cat", "1.00", "0.00"],
        ["2 a hat", "1.00", "1.00"],
        ["all together", "1.00", "1.00"],
    ]
    assert figure.svg.count("<rect") == 6 and figure.svg.count(">0.00<") == 1


def test_the_terminal_ends_in_the_verdict(tmp_path, capsys):
    hook = make_hook(tmp_path, threshold=0.99)
    hook.run(0, 0, tiny_pipeline().unet)
    hook.run(10, 1, tiny_pipeline().unet, final=True)
    print(hook.table())
    *verdict, kept = capsys.readouterr().out.strip().splitlines()[-4:]
    assert verdict[0].startswith("Not recovered. 0 of 6 images of the composed prompt")
    assert verdict[1].startswith("Try another base: a true copy of the whole picture of t0 scores ")
    assert verdict[2] == "Try a phrase for each thing: 'a red cat' names things of 2 targets."
    assert kept.startswith("Kept: 0 % changed on unrelated prompts")
    assert "\n".join(verdict) == str(evidence.answer(Record.load(tmp_path / "validation.json")))


def test_every_image_of_the_last_measurement_is_kept(tmp_path):
    hook = make_hook(tmp_path, threshold=0.5)
    for step in (0, 10):
        hook.run(step, step / 10, tiny_pipeline().unet)
        stored = Record.load(tmp_path / "validation.json").history
        last = [target.pictures for target in stored[-1].raw.targets.values()]
        wanted = [f"samples/step-{step:06d}-raw/{name}+{i}.png" for name in ("t0", "t1") for i in range(3)]
        assert sum(last, []) == wanted
        assert sorted(str(f.relative_to(tmp_path)) for f in tmp_path.glob("samples/step-*/*+*.png")) == wanted
    assert [target.pictures for target in stored[0].raw.targets.values()] == [None, None]


def test_images_of_the_phrases_in_another_order_are_kept_too(tmp_path):
    """The verdict counts them."""
    hook = make_hook(tmp_path, threshold=0.5, controls="always")
    for step in (10, 20):
        hook.run(step, step / 10, tiny_pipeline().unet)
    before, last = (entry.raw.cells for entry in Record.load(tmp_path / "validation.json").history)
    wanted = [f"samples/step-000020-raw/{name}+shuffled-{i}.png" for name in ("t0", "t1") for i in range(3)]
    assert [file for target in last["shuffled"].targets.values() for file in target.pictures] == wanted
    assert sorted(str(f.relative_to(tmp_path)) for f in tmp_path.glob("samples/step-*/*+shuffled*.png")) == wanted
    images = [np.asarray(Image.open(tmp_path / file)) for file in (wanted[0], wanted[0].replace("shuffled-", ""))]
    assert not np.array_equal(*images)  # of another prompt
    assert {target.pictures for cell in before.values() for target in cell.targets.values()} == {None}


def test_a_target_of_one_phrase_has_images_in_one_order(tmp_path):
    targets = some_targets()
    targets[1].phrases = targets[1].phrases[:1]
    targets[1].masks = targets[1].masks[:1]
    hook = make_hook(tmp_path, targets=targets, threshold=0.5, controls="always")
    hook.run(10, 1, tiny_pipeline().unet)
    scores = Record.load(tmp_path / "validation.json").history[-1].raw
    assert [*scores.cells["shuffled"].targets] == ["t0"] and all(t.pictures for t in scores.targets.values())


def test_the_best_picture_is_a_recovered_one_where_there_is_one(tmp_path):
    hook = make_hook(tmp_path, threshold=-1.0)
    hook.run(0, 0, tiny_pipeline().unet)
    for name, scores in hook.history[0].raw.targets.items():
        hits = images_recovered(scores, ["t0", "t1"].index(name), hook.threshold, hook.element_threshold)
        recovered = [s for s, hit in zip(scores.sims, hits, strict=True) if hit]
        assert scores.best.sim == max(recovered or scores.sims)
    assert torch.is_grad_enabled()


# -- documents ---------------------------------------------------------------------------------------------
def test_every_field_of_the_record_is_in_the_documents():
    root = Path(run_report.__file__).parents[2]
    record = (root / "research" / "record.md").read_text(encoding="utf-8")
    metrics = (root / "docs" / "metrics.md").read_text(encoding="utf-8")
    documented = {*re.findall(r"\w+", record), *re.findall(r"`(\w+)`", metrics)}
    classes = [kind for kind in vars(record_module).values() if isinstance(kind, type) and is_dataclass(kind)]
    named = {f"{kind.__name__}.{one.name}" for kind in classes for one in fields(kind) if one.name not in documented}
    assert len(classes) > 10 and not named


# -- beyond the rate ---------------------------------------------------------------------------------------
def test_a_copied_training_picture_is_named(tmp_path):
    """Images that are a training picture are nearest to it; the base model's give the null level."""
    targets = some_targets(1)
    shown = to_tensor(smooth("shown", 2))
    hook = make_hook(tmp_path, targets=targets, threshold=0.9)

    def generate(items):
        copied = [shown if hook.measured(0) else to_tensor(smooth("other", *i[:3])) for i in items]
        return torch.stack(copied), torch.ones(len(items))

    hook.sampler.generate = generate
    hook.run(0, 0, tiny_pipeline().unet)
    hook.run(10, 1, tiny_pipeline().unet, final=True)
    scores = hook.history[-1].raw.targets["t0"]
    assert scores.nearest == pytest.approx([1] * 3) and scores.nearest_record == "record 2"
    table = evidence.composed_or_copied(hook.record())
    level, above, copied = table.rows[0][3:]
    assert float(level) < 0.9 and above == copied == "1.00" and table.notes == ["nearest: record 2"]


def test_a_training_picture_is_compared_as_a_target_is():
    """A tint lowers the similarity to the picture that has it not, in the data as among the targets."""
    embedder = Micro(None)
    picture = to_tensor(smooth("shown", 2))
    tinted = (picture + torch.tensor([0.15, 0, -0.15]).view(3, 1, 1)).clamp(0, 1)[None]
    training = TrainingPictures([TrainingPicture("one", picture, ())], embedder, 64)
    ((near, _),) = training.nearest(tinted, None)
    to_target = embedder.similarity(embedder.embed(tinted), embedder.reference(picture[None])).item()
    assert near == pytest.approx(to_target, abs=0.02) and near < 0.7
    assert training.nearest(picture[None], None)[0][0] == pytest.approx(1, abs=0.02)


def test_the_error_of_elements_stands_beside_the_clean_one(tmp_path):
    """Two roles, two errors at noise of their own; the report draws both and their gap."""
    hook = make_hook(tmp_path, threshold=0.9)
    hook.run(0, 0, tiny_pipeline().unet)
    drift = hook.history[0].raw.drift
    assert drift["clean_eps_mse"] != drift["element_eps_mse"] > 0
    (figure,) = sections.errors(RecordedRun(tmp_path))
    assert all(f"{name}, raw weights" in str(figure) for name in ("clean", "element", "gap"))
