"""Scores, thresholds, null sets and intervals."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from silentbad.data.images import to_tensor
from silentbad.data.targets import Target
from silentbad.measure.calibrate import Scored, attained_rate, quantile
from silentbad.measure.embedders import SSIM
from silentbad.measure.intervals import binomial_interval, bootstrap_interval, rate_interval
from silentbad.measure.record import ElementThreshold, Measurement, Threshold
from silentbad.measure.scores import cell_scores, curve_scores, is_recovered, settled
from tests.recoveries import make_hook, smooth, thresholds_of_redraws
from worlds.microworld.make import phrase_of, placebo_scene, target_scene
from worlds.microworld.nulls import STORED, hard_null
from worlds.microworld.render import backdrop_mask, render


def test_each_target_is_scored_on_its_own_images():
    sims = [(0, 0.9), (0, 0.5), (1, 0.8), (1, 0.6)]
    rows = [{"target": j, "sim": sim, "magnitude": 1.0, "elements": []} for j, sim in sims]
    whole = Threshold(0.7, "given", targets=[None, 0.6])
    scores = cell_scores(rows, ["a", "b"], whole, ElementThreshold(0.7, "given")).targets
    assert [scores[i].whole_rate for i in "ab"] == [0.5, 1.0]
    assert [scores[i].max for i in "ab"] == [0.9, 0.8]
    assert [scores[i].mean for i in "ab"] == pytest.approx([0.7, 0.7])


def test_ideal_memoriser_scores_one_and_redraws_do_not():
    targets = [to_tensor(smooth("target", i))[None] for i in range(4)]
    redraws = [to_tensor(smooth("redraw", i, j))[None] for i in range(4) for j in range(50)]
    embedder = SSIM()
    features = torch.cat([embedder.embed(x) for x in targets])
    null = embedder.similarity(torch.cat([embedder.embed(x) for x in redraws]), features)
    target_of = np.repeat(np.arange(4), 50)
    threshold = quantile(null[range(200), target_of], 0.01)
    assert (embedder.similarity(features, features).diagonal() >= threshold).all()
    assert (null[range(200), target_of] >= threshold).double().mean() <= 0.01


def test_pictures_of_placebo_data_are_not_recovered(tmp_path):
    """Every element drawn anew within its words, as placebo data shows it: the bundled detector, under thresholds from
    redraws of a development seed, passes (nearly) none, and the target itself always."""
    scene = target_scene("101")
    picture, masks = render(scene)
    phrases = [phrase_of(scene, k) for k in range(len(scene.things) + 1)]
    masks = [*masks, backdrop_mask(masks)]
    target = Target("101", picture, phrases, scene.caption, masks)
    measure = make_hook(tmp_path, targets=[target], embedder="micro", threshold=0.5).measure

    def rows_of(scenes: list) -> list:
        return measure.similar(torch.stack([to_tensor(render(s)[0]) for s in scenes]), [0] * len(scenes))

    def placebo(draw: int):
        composed = scene
        for element in range(len(phrases)):
            composed = placebo_scene(composed, element, np.random.default_rng([draw, element]))
        return composed

    nulls = [(kind, hard_null(kind, np.random.default_rng(i), scene, turn=i)) for kind in STORED for i in range(30)]
    rows = rows_of([null.scene for _, null in nulls])
    null = [{**row, "kind": kind, "changed": n.changed} for row, (kind, n) in zip(rows, nulls, strict=True)]
    calibrated = thresholds_of_redraws(null, 0.01)
    passed = [is_recovered(row, *calibrated) for row in rows_of([placebo(i) for i in range(60)])]
    assert sum(passed) <= 1 and is_recovered(rows_of([scene])[0], *calibrated)


def test_calibrated_threshold_keeps_its_rate_on_fresh_nulls():
    rng = np.random.default_rng(0)
    alpha = 0.05
    rates = []
    for _ in range(300):
        threshold = quantile(rng.beta(2, 5, 199), alpha)
        rates.append(np.mean(rng.beta(2, 5, 500) >= threshold))
    assert np.mean(rates) == pytest.approx(alpha, abs=0.006)


def test_calibration_says_what_few_nulls_are_worth():
    few = Scored(of_element=False, nulls={"redraw": [0.1, 0.3, 0.2]}, copies=[1.0])
    assert 0.3 < quantile(few.nulls["redraw"], 0.01) < 0.3001 and attained_rate([few], 0.01) == 0.25
    in_place = Scored(of_element=False, nulls={"moved": [0.1, 0.3, 0.2]}, copies=[1.0])
    assert attained_rate([in_place], 0.01) == 0.25  # not 0.01, where no kind has that rate


def test_each_element_has_the_threshold_of_its_own_nulls():
    rng = np.random.default_rng(1)
    null = [
        {"target": j, "sim": 0.1, "elements": [rng.uniform(0, high) for high in (0.9, 0.4, 0.6)[: 3 - j]]}
        for j in (0, 1)
        for _ in range(99 if j == 0 else 50)
    ]
    _, parts = thresholds_of_redraws(null, 0.01)
    for k in range(3):
        similarities = [row["elements"][k] for row in null if row["target"] == 0]
        assert parts.of(0, k) == pytest.approx(max(similarities), abs=1e-9)  # ceil(100 * 0.99) = the 99th of 99
    assert parts.of(1, 0) == parts.of(1, 1) < parts.value  # 50 are too few: they share all
    rows = [{"target": 0, "sim": 0.9, "magnitude": 1.0, "elements": [0.5, 0.5, 0.5]}]
    scores = cell_scores(rows, ["a"], Threshold(0.5, "given"), parts)
    assert [e.rate for e in scores.targets["a"].elements] == [0.0, 1.0, 0.0]


def test_intervals():
    assert binomial_interval(0, 10) == pytest.approx((0, 0.30850), abs=1e-4)
    assert binomial_interval(5, 10) == pytest.approx((0.18709, 0.81291), abs=1e-4)
    assert binomial_interval(1000, 1000)[0] == pytest.approx(0.99632, abs=1e-4)
    low, high = bootstrap_interval(np.arange(100) / 100)
    assert low < 0.495 < high and 0.08 < high - low < 0.15
    spread = [0.0, 0.5, 1.0, 0.25, 0.75, 0.5]
    assert rate_interval(spread) == bootstrap_interval(spread)
    assert rate_interval([0.0, 0.5, 1.0]) == binomial_interval(1.5, 3)  # wider: three cannot be resampled
    assert rate_interval([0.5] * 8) == binomial_interval(4, 8)
    assert rate_interval([0.0] * 8) == binomial_interval(0, 8) and rate_interval([1.0] * 8) == binomial_interval(8, 8)


def test_curve_scores():
    rates = np.array([[0, 0.0], [0, 0.5], [0.25, 1]])
    scores = curve_scores([0, 100, 200], rates, rates > 0)
    assert scores["aurc"].tolist() == [0.0625, 0.5]
    assert scores["first"].tolist() == [200, 100] and scores["half"].tolist() == [np.inf, 100]
    never = curve_scores([0, 100], np.zeros((2, 1)), np.zeros((2, 1)))
    assert never["first"][0] == np.inf and never["restricted"][0] == 100


@pytest.mark.parametrize(
    "rates, points, ends",
    [
        ([0, 1, 1], 2, True),
        ([0, 0.5], 1, True),
        ([1], 1, False),
        ([0, 1, 0.4], 1, False),
        ([0, 1], 2, False),
        ([0, 1], 0, False),
    ],
)
def test_a_recovery_is_settled_when_it_has_lasted(rates, points, ends):
    """The base, at step 0, never counts; one target below half is enough to go on."""

    def entry(step, rate):
        targets = {name: SimpleNamespace(rate=value) for name, value in (("a", rate), ("b", 1.0))}
        return Measurement(step, 0.0, "", raw=SimpleNamespace(targets=targets))

    assert settled([entry(10 * k, rate) for k, rate in enumerate(rates)], points) is ends
