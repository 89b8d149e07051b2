"""Tables of several targets in one model, from rows."""

import re

from bench.kept_worlds import MICRO
from bench.many import at_once, by_stage, chart, differences, drawn_prompts, model_by_stage, phrases_of
from silentbad.report.charts import COLOURS

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
    assert lines[2].startswith("| `recommended_2026` | 0 | 2 of 2 | 0.88 ")
    assert lines[3].startswith("| `recommended_2026` | 1 | 0 of 1 | 0.25 ")


def right(shown, unshown):
    return {"2": {kind: [unshown if kind in MICRO.unshown else shown, 10] for kind in MICRO.kinds}}


def test_the_model_after_each_stage_stands_by_kinds():
    rows = sequence([[1.0, 1.0], [1.0, 1.0]])
    rows = [{**row, "sequence": "rehearsed", "right": right(8 - row["stage"], 4)} for row in rows]
    tables = {"sequence.jsonl": rows, "kept.jsonl": [{"arm": "base", "right": right(8, 8)}]}
    lines = model_by_stage(tables.__getitem__).splitlines()
    assert lines[2:] == ["| `rehearsed` | 1 | 1.00 | 0.50 |", "| `rehearsed` | 2 | 0.88 | 0.50 |"]


def test_earlier_composed_prompts_take_a_share_of_what_a_stage_draws(tmp_path):
    (tmp_path / "targets.jsonl").write_text('{"target_id": "7", "prompt": "a whole"}\n')
    lines = drawn_prompts(tmp_path, ["7"], 48, tmp_path / "stage").read_text().splitlines()
    assert len(lines) == 240 and lines.count("a whole") == 48
    assert "a whole" not in drawn_prompts(tmp_path, ["7"], 0, tmp_path / "stage").read_text()


def row(target, step, elements, **more):
    usual = {"targets": PAIR, "unique_phrases": False, "arm": "recommended_long", "steps": 2400, "factor": 40.0}
    usual |= {"seed": 0, "ratio": 0.1, "clean": 1440, "images_per_phrase": 20, "placebo": False, "commit": "0" * 7}
    usual |= {"flags": None}
    scores = {"rate": min(elements), "whole_rate": 1.0, "mean": 0.5, "elements": elements, "element_means": elements}
    return usual | scores | {"target": target, "step": step, "drift": step / 10**5, "seconds": step / 10} | more


def runs(backdrop, **more):
    """Both targets before and after; `backdrop` is the rate of what both call the same."""
    shared = set.intersection(*map(set, phrases_of(PAIR).values()))
    rates = {t: [backdrop if p in shared else 1.0 for p in own] for t, own in phrases_of(PAIR).items()}
    return [row(target, step, rates[target], **more) for target in PAIR.split(",") for step in (0, 2400)]


def test_elements_are_told_by_whether_their_phrase_is_shared():
    line = at_once(lambda _: runs(0.25)).splitlines()[2]
    assert "| 0 of 2 | 0.25 [0.00, 0.94] | 1.00 (3) | 0.25 (4) | 0.25 (2) | 0.70 (5) | 1.00 (2) | " in line
    assert line.endswith("| 0.0240 | 4 |  |")
    line = at_once(lambda _: runs(0.25, unique_phrases=True)).splitlines()[2]
    assert "phrases of one target each" in line and "(7) |  |" in line


def test_what_targets_at_once_leave_is_that_of_the_guidance_where_it_is_least():
    rows = runs(0.25, right={**right(8, 8), "4": right(4, 6)["2"]})
    tables = {"many.jsonl": rows, "kept.jsonl": [{"arm": "base", "right": {**right(8, 8), "4": right(8, 8)["2"]}}]}
    least = sum(6 if kind in MICRO.unshown else 4 for kind in MICRO.kinds) / (8 * len(MICRO.kinds))
    assert f"| {least:.2f} |" in at_once(tables.__getitem__)


def test_arms_are_compared_in_pairs_of_targets():
    rows = runs(0.25) + runs(0.75, arm="recommended_long_context")
    table = differences(lambda _: rows)
    assert "| captions with more of the target's phrases | 2 | +0.50 |" in table


def test_the_decoder_is_compared_at_equal_seconds_and_shares_by_need_elsewhere():
    rows = runs(0.25) + [{**row, "steps": 3600, "step": row["step"] * 1.5} for row in runs(0.5, arm="decoder_long")]
    by_need = runs(1.0, flags='{"memory.sampler.name": "by_need"}')
    table = differences(lambda _: rows + by_need)
    assert table.splitlines()[2:] == ["| the decoder alone, 1.5 times the steps | 2 | +0.25 | +0.15 |"]
    assert at_once(lambda _: rows + by_need) == at_once(lambda _: rows)


def test_the_chart_has_a_point_for_each_run_at_once():
    rows = runs(0.25) + runs(0.5, arm="unions_long") + runs(0.5, unique_phrases=True)
    svg = chart(lambda _: rows)
    of_arm = re.findall(r'm-4 0a4 4.*?fill="(.*?)"', svg)
    assert of_arm == [COLOURS[0], COLOURS[1]] and "more unions" in svg


def test_changes_of_words_are_compared_with_the_arm_that_they_change():
    of_words = runs(0.5, arm="unions_keeping_names", unique_phrases="target")
    of_words += runs(0.75, arm="unions_keeping", unique_phrases="oracle")
    of_words += runs(0.25, arm="unions_keeping", unique_phrases="target")
    lines = differences(lambda _: runs(0.25, arm="unions_keeping") + of_words).splitlines()[2:]
    name = "a name of the target in each phrase"
    assert [line.split(" | ")[:3:2] for line in lines] == [
        ["| the oracle of words", "+0.50"],
        [f"| {name}", "+0.00"],
        [f"| {name}, learnt", "+0.25"],
        [f"| {name}, learnt, over names not learnt", "+0.25"],
    ]


def test_the_base_s_own_pictures_alone_are_compared_with_those_of_the_world():
    rows = runs(0.75, arm="unions_keeping") + runs(0.5, arm="unions_keeping", own_alone=True)
    assert ", clean pictures of the base alone |" in at_once(lambda _: rows)
    assert differences(lambda _: rows).splitlines()[2].startswith("| clean pictures of the base alone | 2 | -0.25 |")
    assert chart(lambda _: rows) == chart(lambda _: runs(0.75, arm="unions_keeping"))


def test_placebo_data_stand_in_the_table_and_are_no_change():
    placebo = runs(0.0, placebo=True)
    assert ", placebo data |" in at_once(lambda _: runs(0.5) + placebo)
    assert differences(lambda _: runs(0.5) + placebo) == differences(lambda _: runs(0.5))
    assert chart(lambda _: runs(0.5) + placebo) == chart(lambda _: runs(0.5))
