"""A verdict on somebody's own pictures: failures never count, copies do, and controls decide."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from bench import photographs as measured
from silentbad.data.images import resize, to_tensor
from silentbad.data.targets import Target
from silentbad.measure import failures
from silentbad.measure.calibrate import (
    CEILING,
    GAP,
    MARGIN,
    Scored,
    measured_range,
    null_row,
    nulls_of,
    threshold_of,
)
from silentbad.measure.intervals import as_many_by_chance, fewer_by_chance, over_orders
from silentbad.measure.measure import ComparedMasks
from silentbad.measure.record import (
    ElementThreshold,
    Measurement,
    Range,
    Scores,
    TargetEntry,
    TargetRange,
    Threshold,
)
from silentbad.measure.scores import cell_scores
from silentbad.measure.verdict import verdict_of
from silentbad.report.evidence import range_text
from tests import photographs

SIDE = 64


# -- an instrument on real pictures ------------------------------------------------------------
def judged(entry, whole, element, targets, ranges):
    """The verdict on a record of one measurement."""
    parts = dict(
        threshold=whole, element_threshold=element, targets=targets, ranges=ranges, placebo=None, withheld=None
    )
    return verdict_of(SimpleNamespace(history=[entry], **parts))


class Judge(measured.Judge):
    """The judge of the benchmark, with verdicts on images of the first target."""

    def verdict(self, images: list[Image.Image], **controls: list[Image.Image]):
        """On images of the first target's composed prompt, and of control prompts."""
        target = self.targets[0]
        masks = [None if mask is None else "mask.png" for mask in target.masks]
        entry = TargetEntry(target.target_id, "target.png", masks, "", target.phrases)
        cells = {
            name.replace("_", "-"): cell_scores(self.rows(0, pictures), [target.target_id], self.whole, self.element)
            for name, pictures in {"composed": images, **controls}.items()
        }
        scores = Scores(**vars(cells["composed"]), cells=cells)
        history = Measurement(1, 1, "", raw=scores)
        return judged(history, self.whole, self.element, [entry], self.ranges)


SEEDS = (100, 101, 102, 103)


@pytest.fixture(scope="module")
def judge(tmp_path_factory) -> Judge:
    return Judge(
        [measured.target_of(photographs.make_target(seed), f"photo-{seed}") for seed in SEEDS],
        measured.textures(),
        tmp_path_factory.mktemp("judge"),
    )


@pytest.mark.parametrize("place", range(len(SEEDS)))
def test_no_failure_of_a_photograph_counts_as_recovered(judge, place):
    passed = judge.passing(place, photographs.failures(photographs.make_target(SEEDS[place])))
    assert len(passed) > 10 and not any(passed.values()), passed


@pytest.mark.parametrize("place", range(len(SEEDS)))
def test_copies_of_a_photograph_count_where_it_can_be_told(judge, place):
    passed = judge.passing(place, photographs.copies(photographs.make_target(SEEDS[place])))
    assert all(passed.values()) or not judge.parts(place), passed


def test_every_threshold_lies_between_the_floor_and_the_ceiling(judge):
    for target in judge.ranges:
        assert target.nulls > 40
        for part in (target.whole, *target.elements):
            assert part.floor < part.threshold
            if part.separable:
                wanted = part.floor + MARGIN * (part.ceiling - part.floor)
                assert part.threshold == pytest.approx(wanted) and part.threshold < part.ceiling


def test_every_training_picture_is_a_null(judge):
    kinds = judge.ranges[0].whole.kinds
    assert kinds["training picture"].n == len(photographs.TEXTURES)
    assert {"plain grey", "the mean colour", "blurred", "the whole mirrored"} <= set(kinds)


def test_a_training_picture_shows_a_phrase_in_other_letters_too(monkeypatch):
    """It is no null of that element: the tokenizer reads the two alike."""
    shown = [(torch.zeros(3, 8, 8), ["A red  Ball"])]
    measure = SimpleNamespace(
        targets=[SimpleNamespace(phrases=["a red ball", "a blue box"])],
        training=SimpleNamespace(pictures=lambda most: shown),
    )
    monkeypatch.setattr(failures, "failures", lambda *of_target: ())
    (null,) = nulls_of(measure, 0, SimpleNamespace(picture=None, shares=None, backdrop=None))
    assert null.changed == (1,)


def test_an_element_has_each_kind_of_failure(judge):
    thing = judge.ranges[0].elements[0].kinds
    backdrop = judge.ranges[0].elements[-1].kinds
    assert {"missing", "mirrored", "upside down", "moved", "in grey", "tinted", "another element"} <= set(thing)
    assert {"filled from a training picture", "in grey", "tinted"} <= set(backdrop)
    assert "missing" not in backdrop and "moved" not in backdrop


# -- the example of the README -----------------------------------------------------------------
def ball_and_box(ball: bool = True, box: bool = True) -> Image.Image:
    picture = Image.new("RGB", (SIDE, SIDE), (120, 175, 95))
    if ball:
        ImageDraw.Draw(picture).ellipse((6, 6, 34, 34), fill=(208, 40, 40))
    if box:
        ImageDraw.Draw(picture).rectangle((32, 30, 60, 58), fill=(45, 70, 200))
    return picture


def ball_box_masks() -> list[Image.Image]:
    ball, box, field = (Image.new("L", (SIDE, SIDE), 0) for _ in range(3))
    ImageDraw.Draw(ball).ellipse((6, 6, 34, 34), fill=255)
    ImageDraw.Draw(box).rectangle((32, 30, 60, 58), fill=255)
    ball.paste(0, mask=box)
    field.paste(255, mask=Image.eval(Image.fromarray(np.maximum(*map(np.asarray, (ball, box)))), lambda v: 255 - v))
    return [ball, box, field]


PHRASES = ["a red ball", "a blue box", "on a green field"]
GREY = Image.new("RGB", (SIDE, SIDE), (128, 128, 128))


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> Judge:
    target = Target("ball-box", ball_and_box(), PHRASES, masks=list(ball_box_masks()))
    return Judge([target], measured.textures(), tmp_path_factory.mktemp("example"))


def test_the_right_images_are_recovered(example):
    answer = example.verdict([ball_and_box()] * 8, without_1=[ball_and_box(box=False)] * 8, unrelated=[GREY] * 8)
    assert (answer.state, answer.recovers, answer.reasons) == ("recovered", True, None)


def test_either_order_of_the_phrases_counts(example):
    answer = example.verdict([GREY] * 8, shuffled=[ball_and_box()] * 8, unrelated=[GREY] * 8)
    assert (answer.state, answer.images_above, answer.images) == ("recovered", 8, 16)


@pytest.mark.parametrize("image", [ball_and_box(False, False), GREY])
def test_images_without_the_things_are_not_recovered(example, image):
    answer = example.verdict([image] * 8, unrelated=[GREY] * 8)
    assert (answer.state, answer.images_above) == ("not recovered", 0)


@pytest.mark.parametrize("there, missing", [("ball", "a blue box"), ("box", "a red ball")])
def test_images_without_an_element_are_recovered_in_part(example, there, missing):
    image = ball_and_box(**{"ball": False, "box": False, there: True})
    answer = example.verdict([image] * 8, unrelated=[GREY] * 8)
    assert (answer.state, answer.recovers, answer.images_above) == ("in part", False, 0)
    (said,) = answer.parts
    assert there in said.split(";")[0] and f"; {missing!r} in none (best 0.0" in said


def test_an_element_without_its_phrase_is_undecided(example):
    answer = example.verdict([ball_and_box()] * 8, without_1=[ball_and_box()] * 8, unrelated=[GREY] * 8)
    assert answer.state == "undecided" and not answer.recovers
    assert answer.reasons == ["'a blue box' passes in images whose prompt leaves it out"]


def test_a_phrase_that_brings_its_element_alone_may_be_left_out(example):
    """The others complete the picture; but not where every caption brings it."""
    box = ball_and_box(ball=False)
    whole = [ball_and_box()] * 8
    for alone, other, unrelated, state in (
        ([box] * 8, GREY, GREY, "recovered"),
        ([box] * 2 + [GREY] * 6, GREY, GREY, "recovered"),
        ([box] + [GREY] * 7, GREY, GREY, "undecided"),
        ([box], GREY, GREY, "undecided"),  # one image may be chance
        ([box] * 8, box, GREY, "undecided"),
        ([box] * 8, GREY, box, "undecided"),
    ):
        controls = dict(phrase_0=[other] * 8, phrase_1=alone, unrelated=[unrelated] * 8)
        answer = example.verdict(whole, without_1=whole, **controls)
        assert answer.state == state and (state == "undecided" or answer.parts is None), controls
    everything = example.verdict(whole, without_1=whole, phrase_1=whole, unrelated=[GREY] * 8)
    assert everything.reasons == ["images of 'a blue box' alone pass"]


def test_images_in_either_order_say_whether_a_phrase_makes_a_difference(example):
    rest = [ball_and_box()] * 3 + [ball_and_box(box=False)] * 5
    most = [ball_and_box()] * 7 + [GREY]
    answer = example.verdict(most, without_1=rest, unrelated=[GREY] * 8)
    assert answer.state == "undecided"  # 7 of 8 and 3 of 8 may be alike; 8 of 8 may not, of two orders
    assert example.verdict(most, shuffled=[ball_and_box()] * 8, without_1=rest, unrelated=[GREY] * 8).recovers


def test_images_of_the_same_noise_in_another_order_are_no_more_evidence(example):
    """Seven of eight and three of eight stay alike where another order repeats the seven."""
    rest = [ball_and_box()] * 3 + [ball_and_box(box=False)] * 5
    most = [ball_and_box()] * 7 + [GREY]
    assert example.verdict(most, shuffled=most, without_1=rest, unrelated=[GREY] * 8).state == "undecided"


def test_one_lucky_noise_in_both_orders_counts_once():
    assert over_orders([as_many_by_chance(1, 8, 0.01)] * 2) == pytest.approx(2 * (1 - 0.99**8))
    assert over_orders([1.0, 1.0]) == 1 and over_orders([0.03]) == 0.03


def test_a_phrase_that_comes_back_now_and_then_does_not_decide(example):
    rest = [ball_and_box()] * 2 + [ball_and_box(box=False)] * 6
    answer = example.verdict([ball_and_box()] * 8, without_1=rest, unrelated=[GREY] * 8)
    assert answer.state == "recovered"


def test_one_phrase_or_an_unrelated_caption_is_undecided(example):
    answer = example.verdict([ball_and_box()] * 8, phrase_0=[ball_and_box()] * 2 + [GREY] * 6, unrelated=[GREY] * 8)
    assert answer.reasons == ["images of 'a red ball' alone pass"]
    answer = example.verdict([ball_and_box()] * 8, unrelated=[ball_and_box()] * 8)
    assert answer.reasons == ["images of an unrelated caption pass"]


def test_without_control_prompts_nothing_is_decided(example):
    answer = example.verdict([ball_and_box()] * 8)
    assert answer.state == "undecided" and "no control prompt" in answer.reasons[0]


def test_without_masks_a_missing_element_cannot_be_seen(tmp_path):
    target = Target("ball-box", ball_and_box(), PHRASES, masks=[None] * 3)
    whole = [ball_and_box()] * 8
    controls = dict(without_1=whole, phrase_1=whole, unrelated=[GREY] * 8)
    answer = Judge([target], measured.textures(), tmp_path).verdict(whole, **controls)
    assert answer.state == "undecided" and "no element has a mask" in answer.reasons[0]
    assert "'a blue box' passes in images whose prompt leaves it out" in answer.reasons


def test_what_looks_the_same_is_no_failure(example):
    """A ball is its own mirror image."""
    ball, box, field = (part.kinds for part in example.ranges[0].elements)
    assert not {"mirrored", "upside down", "turned by 180 degrees"} & {*ball, *box}
    assert {"missing", "moved", "in grey", "tinted", "recoloured"} <= {*ball} and "mirrored" not in field
    grey = torch.full((3, SIDE, SIDE), 0.5)
    assert not failures.differs(grey, grey + failures.SEEN / 2)
    assert failures.differs(grey, grey + 2 * failures.SEEN)


def test_a_picture_moved_by_a_pixel_is_the_same_and_one_without_its_bricks_is_not():
    picture = resize(to_tensor(photographs.make_target(100).picture)[None], (SIDE, SIDE))[0]
    assert failures.difference(picture, failures.shifted(picture, 1, 0)) < 0.02
    assert failures.difference(picture, failures.shifted(picture, 3, 0)) > failures.SEEN
    bricks = to_tensor(photographs.texture("a yellow brick wall", np.random.default_rng(1)))[None]
    bricks = resize(bricks, (SIDE, SIDE))[0]
    flat = bricks.mean((1, 2), keepdim=True).expand_as(bricks)
    assert failures.difference(bricks, flat) < failures.SEEN and failures.differs(bricks, flat)
    assert not failures.differs(flat, flat + 0.01)


def test_a_failure_tells_of_what_looks_different_alone():
    left = torch.zeros(1, SIDE, SIDE)
    left[..., :32] = 1
    compared = ComparedMasks(None, [left, 1 - left])
    target = torch.full((3, SIDE, SIDE), 0.5)
    row = {"target": 0, "sim": 0.9, "elements": [0.9, 0.4]}
    mirrored = failures.Null("mirrored", (0,), target)
    assert null_row(compared, row, mirrored, [(target, target)]) is None
    changed = failures.Null("the whole in grey", None, target * left + 0.2 * (1 - left))
    pairs = [(target, changed.picture)]
    assert null_row(compared, row, changed, pairs)["elements"] == [None, 0.4]
    pairs.append((target, target))  # the autoencoder leaves nothing of the change
    assert null_row(compared, row, changed, pairs) is None


def test_what_has_little_colour_is_told_from_its_recolouring(tmp_path):
    """A grey cup and white paper on a table."""
    picture = Image.new("RGB", (SIDE, SIDE), (150, 120, 90))
    masks = [Image.new("L", (SIDE, SIDE), 0) for _ in range(2)]
    for mask, box, level in zip(masks, ((6, 6, 28, 28), (34, 34, 60, 60)), (120, 240), strict=True):
        ImageDraw.Draw(mask).rectangle(box, fill=255)
        ImageDraw.Draw(picture).rectangle(box, fill=(level,) * 3)
        ImageDraw.Draw(picture).line((box[0] + 4, box[1] + 6, box[2] - 4, box[3] - 12), fill=(20, 20, 20), width=3)
    masks.append(Image.fromarray(255 - np.maximum(*map(np.asarray, masks))))
    target = Target("cup", picture, ["a grey cup", "white paper", "a table"], masks=list(masks))
    cup, paper, _ = Judge([target], measured.textures(), tmp_path).ranges[0].elements
    for part in (cup, paper):
        assert part.separable and "recoloured" not in part.nearest
        assert part.floor < 0.8


def test_both_references_are_logged(example):
    rows = example.rows(0, [ball_and_box()])
    scores = cell_scores(rows, ["ball-box"], example.whole, example.element).targets["ball-box"]
    assert scores.sims == scores.decoded > scores.raw


# -- its parts ---------------------------------------------------------------------------------
def part_of(*, given: float | None = None, **nulls: list[float]) -> Range:
    """The range of a part whose nine copies score 0.9."""
    part = Scored(of_element=False, nulls=nulls, copies=[0.9] * 9)
    return measured_range(part, threshold_of(part, None) if given is None else given, given=given is not None)


def test_a_range_without_room_does_not_part():
    detected = part_of(mirrored=[0.8], grey=[0.1])
    assert (detected.floor, detected.nearest, detected.separable) == (0.8, "mirrored", False)
    assert detected.threshold > 0.8 and detected.ceiling == pytest.approx(0.9) and 0.9 - 0.8 < GAP
    assert part_of(grey=[0.1]).separable
    assert CEILING == 0.05


def test_a_threshold_that_is_given_is_kept_and_judged():
    detected = part_of(given=0.5, mirrored=[0.6])
    assert detected.threshold == 0.5 and not detected.separable  # a failure passes it


def test_each_kind_of_null_has_its_mean_with_an_interval():
    kinds = part_of(mirrored=[0.2, 0.4, 0.6], grey=[0.1]).kinds
    low, high = kinds["mirrored"].interval
    assert 0.2 <= low < kinds["mirrored"].mean < high <= 0.6 and kinds["grey"].interval is None


def test_where_only_the_blind_part_fails_the_answer_is_undecided():
    def part(floor: float, separable: bool) -> Range:
        return Range(floor + 0.05, floor, "mirrored", floor + 0.1, 1.0, separable)

    target_range = TargetRange("a", (64, 64), 64, part(0.3, True), [part(0.8, False)], nulls=50, copies=9)
    whole = Threshold(0.35, "test", attained=0.01, targets=[0.35])
    element = ElementThreshold(0.85, "test", each=[[0.85]])
    rows = [{"target": 0, "sim": 0.9, "elements": [0.7], "magnitude": None}] * 8
    scores = Scores(**vars(cell_scores(rows, ["a"], whole, element)))
    entry = TargetEntry("a", "a.png", ["m.png"], "", ["a ball"])
    answer = judged(Measurement(1, 1, "", raw=scores), whole, element, [entry], [target_range])
    assert answer.state == "undecided" and answer.images_above == 0
    assert answer.reasons == ["the detector cannot judge 'a ball': 'mirrored' scores 0.80, a true copy 0.90"]


def test_true_copies_are_close_and_moved_at_most_a_pixel_of_64():
    picture = resize(to_tensor(photographs.make_target(100).picture)[None], (SIDE, SIDE))[0]
    copies = failures.true_copies(picture)
    assert torch.equal(copies[0], picture) and len(copies) == 9
    assert torch.equal(copies[1][:, 1:], picture[:, :-1])
    assert (copies - picture).square().mean((1, 2, 3)).sqrt().max() < 0.15


def test_fishers_test_against_a_table_by_hand():
    assert fewer_by_chance(3, 8, 8, 8) == pytest.approx(56 / 4368)
    assert fewer_by_chance(8, 8, 8, 8) == pytest.approx(1)
    assert fewer_by_chance(0, 8, 8, 8) == pytest.approx(1 / 12870)


def test_no_region_is_filled_with_its_own_element():
    picture = torch.zeros(3, 16, 16)
    share = torch.zeros(1, 16, 16)
    share[:, 4:12, 4:12] = 1
    white = torch.ones(3, 16, 16)
    red = torch.tensor([1.0, 0, 0]).view(3, 1, 1).expand(3, 16, 16)
    others = [failures.Other(white, frozenset({0})), failures.Other(red, frozenset())]
    filled = [
        null.picture
        for null in failures.failures(picture, [share], None, others)
        if null.kind == "filled from a training picture"
    ]
    assert [one[:, 8, 8].tolist() for one in filled] == [[1, 0, 0]]


def test_an_element_too_small_to_see_fills_no_place():
    picture = torch.rand(3, 16, 16)
    thing, dot = torch.zeros(2, 1, 16, 16)
    thing[:, 4:12, 4:12], dot[:, 0, 0] = 1, 0.1
    kinds = {null.kind for null in failures.failures(picture, [thing, dot], None)}
    assert "missing" in kinds and "another element" not in kinds


def test_a_null_without_a_kind_is_the_floor_and_has_no_empty_name():
    scored = Scored(of_element=False, nulls={"": [0.35], "redraw": [0.2]}, copies=[0.9])
    measured = measured_range(scored, threshold_of(scored, None))
    assert measured.floor == pytest.approx(0.35)
    assert "the nearest null 0.35" in range_text(measured) and "()" not in range_text(measured)
