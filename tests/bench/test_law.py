"""The law of bench/law.py on rates that are made up, and on the stored rows."""

import json
from functools import cache

import numpy as np
import pytest

from bench import law
from bench.many import areas
from bench.recovery_table import stored
from silentbad.memory.law import COEFFICIENTS, Facts, expected_rate, features

ALONE = Facts(exposures=1000, targets=1, sharing=1, backdrop=False, area=0.08, elements=4, own_pictures=False)


@pytest.fixture(scope="module")
def read():
    return cache(lambda name: stored(law.PREDICTED.with_name(name)))


def test_the_fit_finds_the_coefficients_of_its_own_rates():
    x = np.column_stack([np.ones(400), np.random.default_rng(0).normal(size=(400, 3))])
    w = np.array([0.5, -1.0, 2.0, 0.0])
    assert np.allclose(law.fit(x, law.expected(w, x)), w, atol=1e-3)


def test_the_coefficients_are_those_of_the_stored_rows(read):
    cases = law.fitted(read)
    assert len(cases) == 921
    assert np.allclose(law.fit(*law.matrix(cases)), [*COEFFICIENTS.values()], atol=0.1)


def test_the_second_reading_is_that_of_the_stored_rows(read):
    x, rates = law.matrix(law.fitted(read))
    places, thresholds = law.with_thresholds(read)
    assert len(places) == len(thresholds) >= 82
    by_law = law.expected(law.fit(x, rates), x[places])
    assert np.allclose(law.fit(law.second_features(by_law, thresholds), rates[places]), law.SECOND, atol=0.2)


def test_the_stored_predictions_are_made_by_the_law():
    assert stored(law.PREDICTED) == json.loads(json.dumps(list(law.predictions())))


def test_an_element_is_harder_where_it_is_small_shared_rare_or_a_backdrop():
    rate = expected_rate(ALONE)
    assert 0.9 < rate < 1
    for change in ({"area": 0.03}, {"exposures": 300}, {"backdrop": True}, {"targets": 16}, {"sharing": 2}):
        assert expected_rate(ALONE._replace(**change)) < rate
    assert len(features(ALONE)) == len(COEFFICIENTS)


def test_areas_of_a_target_fill_its_picture():
    assert sum(areas("103")) == pytest.approx(1, abs=0.02)
    assert areas("103")[-1] > 0.5


def test_facts_count_pictures_and_shared_phrases():
    flags = {"memory.sampler.clean_ratio": "1.0", "train_batch_size": "32"}
    facts = law.facts_of("103", "103", flags, steps=100)
    assert [f.backdrop for f in facts] == [False] * (len(facts) - 1) + [True]
    assert sum(f.exposures for f in facts) == pytest.approx(1600)
    shared = law.facts_of("102", "102,103,104,106", flags, steps=100)
    assert max(f.sharing for f in shared) > 1 and shared[0].targets == 4


def test_fresh_targets_are_compared_once_they_have_rows(read):
    assert law.fresh(lambda name: [] if name != law.PREDICTED.name else read(name)).count("not run yet") == 4
    block = law.FRESH[0]
    rows = [
        {"arm": block.arm, "steps": 400, "target": target, "rate": 0.5, "elements": [1.0] * len(areas(target))}
        for target in block.runs
    ]
    rows[0]["elements"][0] = 0.25
    made_up = {block.file: rows, "many.jsonl": [], law.PREDICTED.name: read(law.PREDICTED.name)}
    line = law.fresh(made_up.__getitem__).splitlines()[2]
    assert "(16)" in line and "(1)" in line and line.rstrip(" |").endswith("0.50")
    for row in rows:
        row["thresholds"] = [0.9 if rate < 1 else 0.2 for rate in row["elements"]]
    first, second = law.fresh(made_up.__getitem__).splitlines()[2:4]
    assert first == line and "one at a time, with thresholds" in second and " 1.00 [" in second


def test_shares_by_need_are_compared_with_equal_ones_on_the_same_targets(read):
    targets = law.FRESH[1].runs[0]
    run = {"targets": targets, "arm": "recommended_long", "step": 9600, "steps": 9600}
    named = law.phrases_of(targets)
    rows = [
        {**run, "target": target, "rate": rate, "elements": [rate] * len(phrases), "flags": flags}
        for target, phrases in named.items()
        for rate, flags in ((0.25, None), (0.75, law.shares_flags(read, "own")))
    ]
    rows += [row | {"arm": "recommended", "rate": 0.0} for row in rows]
    made_up = {"many.jsonl": rows, law.PREDICTED.name: read(law.PREDICTED.name)}
    equal, by_need, shuffled = law.need(made_up.__getitem__).splitlines()[2:]
    assert equal.startswith("| equal | 0.58 | 0 of 16 | 0.25 ") and "+0.50 [+0.50, +0.50]" in by_need
    assert "| 16 of 16 | 0.75 " in by_need and shuffled.endswith("| not run |  |  |  |")


def test_the_rates_of_the_control_are_the_same_in_another_order(read):
    own, shuffled = (
        json.loads(json.loads(law.shares_flags(read, whose))["memory.sampler.options"])["rates"]
        for whose in ("own", "shuffled")
    )
    assert own != shuffled and sorted(own) == sorted(shuffled) and len(own) == 54
