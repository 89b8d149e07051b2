"""Tables of several targets in one model, from rows."""

from bench.many import at_once, by_stage, differences, phrases_of

PAIR = "102,106"  # "a yellow house, on a green meadow" is said of both


def sequence(rates):
    """Rows by stage and target, each element at the rate of the whole."""
    return [
        {"stage": stage, "place": place, "target": str(place), "rate": rate, "elements": [rate]}
        for stage, row in enumerate(rates)
        for place, rate in enumerate(row)
    ]


def test_a_target_is_counted_from_its_own_stage_on():
    lines = by_stage(lambda _: sequence([[1.0, 0.9], [0.25, 0.75]])).splitlines()
    assert lines[2].startswith("| 0 | 2 of 2 | 0.88 ") and lines[3].startswith("| 1 | 0 of 1 | 0.25 ")


def row(target, step, elements, **more):
    usual = {"targets": PAIR, "unique_phrases": False, "arm": "recommended_long", "steps": 2400, "factor": 40.0}
    usual |= {"seed": 0, "ratio": 0.1, "clean": 1440, "images_per_phrase": 20, "placebo": False, "commit": "0" * 7}
    scores = {"rate": min(elements), "whole_rate": 1.0, "mean": 0.5, "elements": elements, "element_means": elements}
    return usual | scores | {"target": target, "step": step, "drift": step / 10**5, "seconds": step / 10} | more


def runs(backdrop, **more):
    """Both targets before and after; `backdrop` is the rate of what both call the same."""
    shared = set.intersection(*map(set, phrases_of(PAIR).values()))
    rates = {t: [backdrop if p in shared else 1.0 for p in own] for t, own in phrases_of(PAIR).items()}
    return [row(target, step, rates[target], **more) for target in PAIR.split(",") for step in (0, 2400)]


def test_elements_are_told_by_whether_their_phrase_is_shared():
    line = at_once(lambda _: runs(0.25)).splitlines()[2]
    assert "| 0 of 2 | 0.25 [0.25, 0.25] | 1.00 (3) | 0.25 (4) | 0.25 (2) | 0.70 (5) | 0.0240 | 4 |" in line
    line = at_once(lambda _: runs(0.25, unique_phrases=True)).splitlines()[2]
    assert "phrases of one target each" in line and "(7) |  |" in line


def test_arms_are_compared_in_pairs_of_targets():
    rows = runs(0.25) + runs(0.75, arm="recommended_long_context")
    table = differences(lambda _: rows)
    assert "| captions with more of the target's phrases | 2 | +0.50 [+0.50, +0.50] |" in table
