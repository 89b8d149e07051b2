"""Part by part: what came back, what did not, and what to try next."""

import json
from dataclasses import asdict

import pytest

import validation
from silentbad.measure.calibrate import scored_target, thresholds
from silentbad.measure.intervals import FALSE_POSITIVES
from silentbad.measure.record import (
    IN_PART,
    NOT_RECOVERED,
    RECOVERED,
    UNDECIDED,
    ElementThreshold,
    Measurement,
    Range,
    Record,
    Scores,
    TargetEntry,
    TargetRange,
    Threshold,
    Verdict,
)
from silentbad.measure.scores import cell_scores, summarise
from silentbad.measure.verdict import verdict_of
from silentbad.report import evidence
from silentbad.saving.card import result_table

WOMAN = "a woman"
SHUTTLE = "a shuttle"
WALL = "a flag before a grey wall"
PHRASES = [WOMAN, SHUTTLE, WALL]
LIMIT = 0.68  # of every element
N = 8

Images = list[tuple[float, ...]]  # (whole, element, ...) of each


def images(*parts: float, n: int = N) -> Images:
    """n images whose whole and elements have these similarities."""
    return [parts] * n


def entry(step: int, composed: Images, label: str = "", target: str = "astro", **controls: Images) -> Measurement:
    """A measurement of the composed prompt of one target, and of control prompts."""
    return several(step, {target: composed}, label, **controls)


def several(step: int, composed: dict[str, Images], label: str = "", **controls: Images) -> Measurement:
    """A measurement of several targets; controls are of the first."""
    ids = list(composed)
    whole = Threshold(0.5, "test")
    element = ElementThreshold(LIMIT, "test")

    def cell(of_targets: dict[str, Images]):
        rows = [
            {"target": ids.index(name), "sim": whole_sim, "elements": list(parts), "magnitude": None}
            for name, of_target in of_targets.items()
            for whole_sim, *parts in of_target
        ]
        return cell_scores(rows, ids, whole, element)

    cells = {"composed": cell(composed)}
    cells |= {name.replace("_", "-"): cell({ids[0]: of_cell}) for name, of_cell in controls.items()}
    return Measurement(step, step / 10, label, raw=Scores(**vars(cells["composed"]), cells=cells))


def record_of(*history: Measurement, phrases=PHRASES, ranges=None, attained=0.01) -> Record:
    names = list(history[-1].raw.targets)
    targets = [TargetEntry(name, "t.png", ["m.png"] * len(phrases), "", phrases) for name in names]
    record = Record(
        seed=0,
        config={},
        embedder="test",
        threshold=Threshold(0.5, "test", attained=attained),
        element_threshold=ElementThreshold(LIMIT, "test", attained=attained),
        targets=targets,
        verdict=Verdict(False, 0, 0, 0, ""),
        summary=summarise(history, "raw"),
        history=list(history),
        seconds=1.0,
        batch=1,
        processes=1,
        ranges=ranges,
    )
    record.verdict = verdict_of(record)
    return record


GREY = images(0.1, 0.1, 0.1, 0.1)
WITHOUT_WALL = [(0.6, 0.9, 0.8, 0.3)] * 7 + [(0.6, 0.9, 0.8, 0.55)]


# -- what came back --------------------------------------------------------------------------------
def test_what_came_back_and_what_did_not_is_named():
    record = record_of(entry(0, GREY), entry(400, WITHOUT_WALL, unrelated=GREY))
    verdict = record.verdict
    assert (verdict.state, verdict.recovers, verdict.states) == (IN_PART, False, {"astro": IN_PART})
    said = (
        "'a woman' and 'a shuttle' came back in 8 of 8 images; 'a flag before a grey wall' in none (best 0.55 of 0.68)"
    )
    assert verdict.parts == [said]
    assert str(evidence.answer(record)).startswith(f"In part: {said}. 0 of 8 images of the composed prompt")


def test_parts_that_come_unequally_often_have_a_count_each():
    mixed = [(0.6, 0.9, 0.8, 0.7)] * 1 + [(0.6, 0.9, 0.8, 0.3)] * 4 + [(0.2, 0.9, 0.1, 0.3)] * 3
    (said,) = record_of(entry(400, mixed[1:] + [(0.2, 0.9, 0.1, 0.7)], unrelated=GREY)).verdict.parts
    assert said == (
        "'a woman' came back in 8 of 8 images, 'a shuttle' in 4 of 8; 'a flag before a grey wall' in 1 of 8 (best 0.70 "
        "of 0.68)"
    )


def test_the_whole_is_a_part_too():
    (said,) = record_of(entry(400, images(0.11, 0.9, 0.9, 0.9), unrelated=GREY)).verdict.parts
    assert said.endswith(" came back in 8 of 8 images; the whole picture in none (best 0.11 of 0.50)")
    apart = [(0.9, 0.9, 0.9, 0.3)] * 4 + [(0.9, 0.3, 0.9, 0.9)] * 4
    record = record_of(entry(400, apart, unrelated=GREY))
    assert record.verdict.state == IN_PART and record.verdict.parts[0].endswith("; all of it together in none")


@pytest.mark.parametrize(
    "composed",
    [GREY, images(0.9, 0.1, 0.1, 0.1), [(0.6, 0.9, 0.1, 0.1)] * 3 + GREY[3:]],
    ids=["nothing", "the whole alone", "an element in less than half of the images"],
)
def test_nothing_is_in_part_without_an_element_in_half_of_the_images(composed):
    verdict = record_of(entry(400, composed, unrelated=GREY)).verdict
    assert (verdict.state, verdict.parts) == (NOT_RECOVERED, None)


def test_a_few_images_that_chance_gives_are_no_part():
    composed = images(0.6, 0.9, 0.3, 0.3, n=1)
    assert record_of(entry(400, composed), attained=0.01).verdict.state == IN_PART
    assert record_of(entry(400, composed), attained=0.2).verdict.state == NOT_RECOVERED


@pytest.mark.parametrize("control", ["unrelated", "without_0", "base"])
def test_an_element_that_comes_unasked_did_not_come_back(control):
    """At its own place in images whose prompt leaves it out, or before training."""
    composed = images(0.6, 0.9, 0.3, 0.3)
    unasked = images(0.2, 0.9, 0.1, 0.1)
    rare = [(0.2, 0.9, 0.1, 0.1)] * 1 + GREY[1:]

    def verdict(of_control: Images) -> Verdict:
        base = entry(0, of_control if control == "base" else GREY)
        controls = {} if control == "base" else {control: of_control}
        return record_of(base, entry(400, composed, **controls)).verdict

    assert verdict(unasked).state == NOT_RECOVERED
    assert verdict(rare).state == IN_PART


def test_an_unasked_element_is_named_beside_those_that_came_back():
    both = images(0.6, 0.9, 0.9, 0.3)
    (said,) = record_of(entry(400, both, without_1=images(0.2, 0.9, 0.9, 0.3))).verdict.parts
    assert "'a woman' came back in 8 of 8 images; 'a shuttle' in 8 of 8, but as often in images whose prompt" in said
    # of two elements, one phrase alone leaves the other out
    pair = record_of(entry(400, images(0.2, 0.9, 0.9), phrase_0=images(0.2, 0.9, 0.9)), phrases=PHRASES[:2])
    assert pair.verdict.parts == [
        "'a woman' came back in 8 of 8 images; 'a shuttle' in 8 of 8, but as often in images whose prompt leaves it out"
    ]


def part(floor: float, ceiling: float, separable: bool) -> Range:
    return Range(LIMIT, floor, "mirrored", ceiling, 1.0, separable)


def ranges(*separable: bool) -> list[TargetRange]:
    """Of one target, whose whole is told."""
    parts = [part(0.4, 0.9, True) if told else part(0.8, 0.9, False) for told in separable]
    return [TargetRange("astro", (64, 64), 64, part(0.1, 0.9, True), parts, nulls=50, copies=9)]


def test_what_the_detector_cannot_tell_did_not_come_back():
    composed = images(0.6, 0.9, 0.3, 0.3)
    assert record_of(entry(400, composed), ranges=ranges(False, True, True)).verdict.state == NOT_RECOVERED
    assert record_of(entry(400, composed), ranges=ranges(True, True, True)).verdict.state == IN_PART
    (said,) = record_of(entry(400, composed), ranges=ranges(True, False, True)).verdict.parts
    assert "the detector cannot judge 'a shuttle'" in said


def test_of_several_targets_the_state_is_the_best_and_each_is_named():
    both = {"astro": WITHOUT_WALL, "portrait": GREY}
    verdict = record_of(several(400, both, unrelated=GREY)).verdict
    assert verdict.states == {"astro": IN_PART, "portrait": NOT_RECOVERED}
    assert verdict.state == IN_PART and verdict.parts[0].startswith("astro: 'a woman' and")


def test_each_target_needs_its_own_controls_and_more_images_than_chance():
    """One passing image of eight may be chance, whatever another target's do that is in doubt."""
    back = images(0.6, 0.9, 0.9, 0.9)
    verdict = record_of(several(400, {"astro": GREY, "portrait": back}, unrelated=GREY)).verdict
    assert verdict.states == {"astro": NOT_RECOVERED, "portrait": UNDECIDED}
    assert verdict.reasons == ["portrait: no control prompt was measured at this point"]
    both = {"astro": back[:1] + GREY[1:], "portrait": back}
    verdict = record_of(several(400, both, unrelated=GREY)).verdict
    assert (verdict.state, verdict.states["astro"]) == (UNDECIDED, UNDECIDED)
    assert verdict.reasons[0] == "the number of passing images is consistent with chance"


@pytest.mark.parametrize("sure, state", [(1, UNDECIDED), (4, RECOVERED)])
def test_targets_that_were_chosen_by_their_hits_are_no_evidence_by_these_alone(sure, state):
    """Of sixteen targets one has a passing image by chance in three of four runs."""
    back = images(0.6, 0.9, 0.9, 0.9)
    targets = {"t0": back[:sure] + GREY[sure:], **{f"t{j}": GREY for j in range(1, 16)}}
    assert record_of(several(400, targets, unrelated=GREY)).verdict.state == state


def test_all_images_and_one_target_alone_are_two_chances():
    """Two passing images of one of ten targets have a p of 0.027 alone, of 80 images 0.19."""
    back = images(0.6, 0.9, 0.9, 0.9)
    targets = {"t0": back[:2] + GREY[2:], **{f"t{j}": GREY for j in range(1, 10)}}
    assert record_of(several(400, targets, unrelated=GREY)).verdict.state == UNDECIDED


def test_an_undecided_verdict_names_the_part_that_fails():
    composed = [(0.6, 0.9, 0.9, 0.9)] + WITHOUT_WALL[1:]
    record = record_of(entry(400, composed, unrelated=GREY))
    words = str(evidence.answer(record))
    assert words.startswith(
        "Undecided. Reason: the number of passing images is consistent with chance. "
        "By part: 'a woman' and 'a shuttle' came"
    )


def test_in_part_has_the_exit_code_of_not_recovered_and_its_own_word(tmp_path):
    assert validation.EXIT_CODES[IN_PART] == validation.EXIT_CODES[NOT_RECOVERED] == 0
    record = record_of(entry(0, GREY), entry(400, WITHOUT_WALL, unrelated=GREY))
    record.save(tmp_path / "validation.json")
    stored = json.loads((tmp_path / "validation.json").read_text())
    assert stored["verdict"]["state"] == "in part" and stored["verdict"]["states"] == {"astro": "in part"}
    assert Record.load(tmp_path / "validation.json") == record
    rows = [asdict(row) | {"verdict": record.verdict.states["astro"]} for row in record.summary]
    assert "| in part |" in result_table(rows)[2]


def test_a_record_from_before_is_read(tmp_path):
    record = record_of(entry(0, GREY), entry(400, WITHOUT_WALL, unrelated=GREY))
    record.save(tmp_path / "validation.json")
    stored = json.loads((tmp_path / "validation.json").read_text())
    for name in ("parts", "to_try"):
        stored["verdict"].pop(name, None)
    stored["verdict"]["state"] = NOT_RECOVERED
    (tmp_path / "validation.json").write_text(json.dumps(stored))
    before = Record.load(tmp_path / "validation.json")
    assert evidence.answer(before).opening == "Not recovered." and before.verdict.parts is None


# -- chance ----------------------------------------------------------------------------------------
def test_chance_does_not_depend_on_how_many_failures_were_made():
    """Training has more of them than an audit: training pictures."""

    def of(count: int):
        nulls = [{"target": 0, "sim": 0.1, "elements": [0.1], "kind": "grey", "changed": None} for _ in range(count)]
        copies = [{"target": 0, "sim": 0.9, "elements": [0.9]}] * 9
        return thresholds([scored_target(0, nulls, copies)], None, None)

    promised = {(whole.attained, element.attained) for whole, element in map(of, (40, 75, 140))}
    assert promised == {(FALSE_POSITIVES, FALSE_POSITIVES)}


def test_chance_is_said_once_and_only_where_something_passed():
    nothing = record_of(entry(400, GREY, unrelated=GREY))
    assert nothing.verdict.p_value is None and "chance" not in str(evidence.answer(nothing))
    one = record_of(entry(400, images(0.9, 0.9, 0.9, 0.9, n=1) + GREY[1:], unrelated=GREY))
    words = str(evidence.answer(one))
    assert one.verdict.p_value == pytest.approx(1 - 0.99**8)
    assert words.count("p = ") == 1 and "(p = 0.077)" in words and words.startswith("Undecided. Reason: the number of")


# -- what to try next ------------------------------------------------------------------------------
def walls(*sims: float) -> Images:
    """Images of which the wall has these similarities."""
    return [(0.6, 0.9, 0.8, sim) for sim in sims]


EARLIER = walls(0.30, 0.32, 0.34, 0.30, 0.32, 0.34, 0.30, 0.34)
LATER = walls(0.40, 0.42, 0.44, 0.40, 0.42, 0.44, 0.40, 0.44)


def test_more_steps_are_advised_where_a_missing_part_still_rises():
    def advice(*history: Measurement) -> list[str] | None:
        return record_of(*history).verdict.to_try

    base = entry(0, GREY)
    rising = advice(base, entry(200, GREY), entry(300, EARLIER), entry(400, LATER, unrelated=GREY))
    assert rising == [
        "more steps: the similarity of 'a flag before a grey wall' (0.32 at step 300, 0.42 at step 400) still rises"
    ]
    assert advice(base, entry(300, LATER), entry(400, LATER, unrelated=GREY)) is None  # it rests
    assert advice(base, entry(300, LATER), entry(400, EARLIER, unrelated=GREY)) is None  # it falls
    assert advice(base, entry(400, LATER, unrelated=GREY)) is None  # no curve
    uneven = walls(0.9, 0.1, 0.9, 0.1, 0.1, 0.1, 0.1, 0.6)
    assert advice(base, entry(300, EARLIER), entry(400, uneven, unrelated=GREY)) is None  # one image jumps
    # it reaches its threshold already, where the detector cannot tell
    high = [entry(300, walls(*[0.7] * 8)), entry(400, walls(*[0.8] * 8), unrelated=GREY)]
    told = record_of(*high, ranges=ranges(True, True, False)).verdict.to_try
    assert [line.split(":")[0] for line in told] == ["a larger element, or another base"]
    audited = entry(2, LATER, label="audited pipeline", unrelated=GREY)
    assert advice(entry(0, GREY, label="baseline"), entry(1, EARLIER, label="extrapolated by 2"), audited) is None


def test_room_is_advised_where_a_failure_scores_like_a_copy():
    record = record_of(entry(400, WITHOUT_WALL, unrelated=GREY), ranges=ranges(True, True, False))
    assert record.verdict.to_try == [
        "a larger element, or another base: a true copy of 'a flag before a grey wall' scores 0.90, a failure 0.80"
    ]
    assert record_of(entry(400, WITHOUT_WALL), ranges=ranges(True, True, True)).verdict.to_try is None


def test_a_phrase_of_its_own_is_advised_where_a_missing_one_is_shared():
    both = {"astro": WITHOUT_WALL, "portrait": GREY}
    record = record_of(several(400, both, unrelated=GREY))
    (said,) = record.verdict.to_try
    assert said.startswith("a phrase for each thing: ") and " names things of 2 targets; 2 more likewise" in said
    assert str(evidence.answer(record)).splitlines()[1] == f"Try {said}."
    record.targets[1].phrases = ["an officer", "a curtain", "A flag  before a grey wall"]  # to the tokenizer the same
    assert verdict_of(record).to_try == [
        "a phrase for each thing: 'A flag  before a grey wall' names things of 2 targets; 1 more likewise"
    ]
    record.targets[1].phrases = ["an officer", "a curtain", "a desk"]
    assert verdict_of(record).to_try is None


def test_a_recovered_target_needs_no_advice():
    full = images(0.9, 0.9, 0.9, 0.9)
    record = record_of(entry(0, GREY), entry(300, EARLIER), entry(400, full, unrelated=GREY))
    assert record.verdict.recovers and record.verdict.to_try is None and record.verdict.parts is None
