"""The table of the scan: the seeds of the present way to search alone."""

import pytest

from bench.shield_table import rate_over_sets, table


def seed(f1, **more):
    rival = {name: {"f1": 0.0} for name in ("whole pictures", "quarters")}
    one = {"records": 100, "precision": f1, "recall": f1, "f1": f1, "found": 1, "hidden": 1, "sets": 1, "seconds": 2.0}
    honest = {"sets": 0}
    return {"ratios": {"0": honest, "0.1": one | {"rival": rival, "composite": {"reached": [True, False]}}}, **more}


def test_seeds_of_earlier_code_are_left_out():
    seeds = {"3000": seed(0.5), "3001": seed(0.7), "3042": seed(0.9, code="abc1234")}
    now = table({"commit": "old", "seeds": seeds})
    assert "Seeds: 3042 (1)." in now and "Code: abc1234." in now and "| 0.90 |" in now and "0 of 1 [" in now
    assert "3000" not in now and now.count("CopyrightShield") == 1 and "change" not in now
    del seeds["3042"]
    before = table({"commit": "old", "seeds": seeds})
    assert "Seeds: 3000-3001 (2)." in before and "Code: old." in before and "2 of 4 [" in before


@pytest.mark.parametrize(
    "sets, said",
    [
        ([(1, 1)] * 9 + [(0, 1)], "9 of 10 [0.55, 1.00]"),  # one in each set: binomial
        ([(4, 4)] * 5, "20 of 20 [0.48, 1.00]"),  # as much as five sets say, not twenty elements
        ([(4, 4)] * 4 + [(0, 4)] * 4, "16 of 32 [0.12, 0.88]"),
        ([(3, 4)], "3 of 4"),
    ],
)
def test_what_shares_a_data_set_is_no_independent_trial(sets, said):
    assert rate_over_sets(sets) == said
