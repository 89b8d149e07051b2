"""The table of the scan: the seeds of the present way to search alone."""

from bench.shield_table import table


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
