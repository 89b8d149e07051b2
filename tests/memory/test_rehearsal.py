"""Unions of elements, their captions, and what of them counts."""

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image

from silentbad.data.elements import DataInfo
from silentbad.data.loader import collate
from silentbad.errors import UserError
from silentbad.loop.inputs import load_inputs
from silentbad.memory import masks, rehearsal
from silentbad.settings.train import TrainConfig
from tests.conftest import write_data
from tests.world import BOXES, PHRASES, Trainer, World, config, hook, taken


def test_pairwise_shows_both_elements_at_their_places():
    world = World(size=32)
    rehearse = hook(world, "pairwise")
    seen, rehearsals = 0, []
    for row in range(15):
        for draw in range(20):
            fresh = rehearse({"index": row, "role": "element"}, (draw, row))
            rehearsals.append(fresh)
            if fresh is None:
                continue
            seen += 1
            picture, mask = np.asarray(fresh["image"]), np.asarray(fresh["mask"])
            assert fresh["role"] == "rehearsal" and len(fresh["phrases"]) == 2
            assert all(p in fresh["text"] for p in fresh["phrases"])
            union = np.zeros((32, 32), dtype=bool)
            for phrase in fresh["phrases"]:
                i = PHRASES.index(phrase)
                record = world.records[int(world.info.rows[i][0])]
                inside = np.asarray(record["mask"]) > 0
                assert np.array_equal(picture[inside], np.asarray(record["image"])[inside])
                union |= inside
            assert np.array_equal(mask > 127, union)
    assert 0.25 * 300 * 0.7 < seen < 0.25 * 300 * 1.3
    assert taken(rehearsals).largest == (2, 3) and taken(rehearsals).count == seen


def backed_world(masks: bool = True) -> World:
    """A third target: a small thing in the middle of its backdrop's place, and a thing elsewhere."""
    world, g = World(per_element=6, masks=masks, size=32), np.random.default_rng(1)
    boxes = {"a red dot": (12, 12, 20, 20), "a lamp": (0, 0, 6, 6)}
    colours = {"a red dot": (250, 0, 0), "a lamp": (0, 0, 250), "a meadow": (0, 180, 0)}
    for i in range(6):
        for n, phrase in enumerate(colours):
            picture, mask = g.integers(0, 255, (32, 32, 3)), np.zeros((32, 32))
            if phrase in boxes:
                x0, y0, x1, y1 = boxes[phrase]
                mask[y0:y1, x0:x1] = 255
            else:  # something stands before it, at another place each time
                mask[:] = 255
                mask[24:30, 4 * i : 4 * i + 6] = 0
            picture[mask > 0] = colours[phrase]
            said = [phrase, f"a cup {i}"] if phrase == "a meadow" else [phrase]
            world.add(picture, mask if masks else None, said, "element", "t2", str(5 + n))
    world.info = DataInfo(*([r[k] for r in world.records] for k in ("role", "target_id", "element_id", "phrases")))
    return world


@pytest.mark.parametrize("backdrop", [True, False])
def test_a_union_shows_the_backdrop_always_or_as_drawn(backdrop):
    world = backed_world()
    rehearse = hook(world, "pairwise", share=1.0, backdrop=backdrop)
    rows = [row for element in world.info.elements_of["t2"] for row in world.info.rows[element].tolist()]
    unions = [rehearse(world.load(row), (draw, row)) for row in rows for draw in range(5)]
    assert all(union["united"] == (2, 3) for union in unions)
    shown = ["a meadow" in union["phrases"] for union in unions]
    assert all(shown) if backdrop else 0.5 < sum(shown) / len(shown) < 0.85


@pytest.mark.parametrize("masks", [True, False])
def test_a_backdrop_never_covers_the_thing_before_it(masks):
    world = backed_world(masks)
    estimated = {}
    if not masks:
        trainer = Trainer(config(rehearsal="pairwise", region="estimated"), world=world)
        estimated = trainer.memory.rehearse.others.masks
    rehearse = hook(world, "pairwise", estimated)
    rows = [r for i in world.info.elements_of["t2"] for r in world.info.rows[i].tolist()]
    unions = [f for r in rows for draw in range(40) if (f := rehearse(world.load(r), (draw, r)))]
    both = [f for f in unions if {"a red dot", "a meadow"} <= set(f["phrases"])]
    assert len(both) > 40
    for f in both:
        picture = np.asarray(f["image"]).astype(int)
        assert np.abs(picture[14:18, 14:18] - (250, 0, 0)).max() == 0
        assert np.abs(picture[2:8, 22:30] - (0, 180, 0)).max() == 0
        (cup,) = f["phrases"][2:]  # what else stands on the meadow is still to be seen, and said after the elements
        assert cup.startswith("a cup") and f["text"].endswith(f", {cup}")
    assert {f["phrases"][0] for f in both} == {"a red dot", "a meadow"}


def test_a_picture_of_another_size_is_fitted_to_the_drawn_one():
    world = World()
    for r in world.records[5:15]:  # the elements it may be joined to
        r["image"], r["mask"] = (r[k].resize((48, 32), Image.Resampling.NEAREST) for k in ("image", "mask"))
    rehearse = hook(world, "pairwise")
    unions = [f for draw in range(40) if (f := rehearse(world.load(0), (draw, 0)))]
    assert unions and {(f["image"].size, f["mask"].size) for f in unions} == {((16, 16), (16, 16))}


def test_joint_captions_count_only_what_they_show():
    world = World(size=32)
    rehearse = hook(world, "joint_captions")
    fresh = [rehearse(world.load(row), (draw, row)) for row in range(25) for draw in range(20)]
    rehearsals = [(row, f) for row, f in zip(np.repeat(np.arange(25), 20), fresh, strict=True) if f is not None]
    assert {f["target_id"] for _, f in rehearsals} == {"t0"}  # of two elements a caption may name one
    assert 0.5 * 300 * 0.8 < len(rehearsals) < 0.5 * 300 * 1.2 and taken(fresh).largest == (2, 3)
    for row, f in rehearsals:
        shown = world.records[row]
        assert f["image"] is shown["image"] and f["role"] == "element" and f["element_id"] == shown["element_id"]
        assert len(f["phrases"]) == 2 and shown["phrases"][0] in f["phrases"] and f["text"] == ", ".join(f["phrases"])
        mask, counted = (np.asarray(f[key]) > 0 for key in ("mask", "counted"))
        named = next(p for p in f["phrases"] if p != shown["phrases"][0])
        place = np.asarray(world.records[int(world.info.rows[PHRASES.index(named)][0])]["mask"]) > 0
        assert np.array_equal(mask, np.asarray(shown["mask"]) > 0)
        assert np.array_equal(counted, ~place | mask)
    orders = {tuple(f["phrases"]) for _, f in rehearsals}
    assert all(order[::-1] in orders for order in orders)


def test_pairwise_captions_are_unions_and_captions_of_the_rest():
    world = World(size=32)
    rehearse, pairs = hook(world, "pairwise_captions"), hook(world, "pairwise")
    rehearsals = united = 0
    for row in range(15):
        for draw in range(20):
            fresh, pair = rehearse(world.load(row), (draw, row)), pairs(world.load(row), (draw, row))
            assert pair is None or fresh["image"].tobytes() == pair["image"].tobytes()
            rehearsals, united = rehearsals + (fresh is not None), united + (pair is not None)
    assert 0.4 < (rehearsals - united) / (300 - united) < 0.6


def test_joint_captions_name_two_to_one_less_than_all():
    world, said = World(size=32), set()
    world.add(np.zeros((32, 32, 3)), np.eye(32) * 255, ["a small cup"], "element", "t0", "9")  # t0's fourth element
    world.info = DataInfo(*([r[k] for r in world.records] for k in ("role", "target_id", "element_id", "phrases")))
    rehearse = hook(world, "joint_captions")
    for draw in range(60):
        fresh = rehearse(world.load(0), (draw, 0))
        said |= {len(fresh["phrases"])} if fresh else set()
    assert said == {2, 3}


def test_joint_captions_work_on_estimated_masks():
    world = World(masks=False, per_element=6)
    trainer = Trainer(config(rehearsal="joint_captions", region="estimated"), world=world)
    rehearse = trainer.memory.rehearse
    fresh = [rehearse(world.load(row), (draw, row)) for row in range(18) for draw in range(4)]
    rehearsals = [f for f in fresh if f is not None]
    assert rehearsals
    for f in rehearsals:
        mask, counted = (np.asarray(f[key]) > 127 for key in ("mask", "counted"))
        assert (counted | ~mask).all() and not counted.all() and mask.any()
    wide = world.load(0) | {"image": Image.new("RGB", (48, 16))}
    assert {f["mask"].size for d in range(20) if (f := rehearse(dict(wide), (d, 0)))} == {(48, 16)}
    trainer.train(3)


def test_the_loss_does_not_see_what_does_not_count():
    memory = Trainer(config(rehearsal="joint_captions", region="mask")).memory
    counted = torch.ones(1, 1, 16, 16)
    counted[..., 8:, :] = 0
    batch = {"mask": torch.ones(1, 1, 16, 16), "has_mask": torch.tensor([True]), "role": ["element"]}
    pred, t, w = torch.zeros(1, 4, 8, 8), torch.tensor([5]), torch.ones(1)
    target = torch.zeros(1, 4, 8, 8)
    target[..., 4:, :] = 9
    assert float(memory.loss_per_sample(pred, target, t, w, batch)) > 0
    assert float(memory.loss_per_sample(pred, target, t, w, batch | {"counted": counted})) == 0
    assert float(memory.loss_per_sample(pred, target, t, w, batch | {"counted": 0 * counted})) == 0


def test_what_does_not_count_has_no_loss():
    mask, counted = torch.zeros(1, 1, 8, 8), torch.ones(1, 1, 8, 8)
    mask[..., :2, :2], counted[..., 4:, :] = 1, 0
    weight = masks.counted_only(masks.given_mask(mask, torch.tensor([True]), None, (4, 4)), counted)
    assert (weight[..., 2:, :] == 0).all() and float(weight.mean()) == pytest.approx(1)
    assert float(weight[..., 0, 0] / weight[..., 1, 1]) == pytest.approx(5)


def test_collate_tells_the_mask_from_what_counts():
    mask = torch.tensor([[[255, 0], [0, 0]]], dtype=torch.uint8)
    counted = torch.tensor([[[255, 255], [0, 0]]], dtype=torch.uint8)
    words = {"text": "", "phrases": [], "role": "", "target_id": "", "element_id": "", "fixed": True, "index": 0}
    plain = words | {"pixels": torch.zeros(3, 2, 2), "mask": None, "time_ids": (2, 2, 0, 0, 2, 2), "position": 0}
    batch = collate([plain, plain | {"mask": mask, "counted": counted}])
    assert batch["mask"].tolist() == [[[[1, 1], [1, 1]]], [[[1, 0], [0, 0]]]]
    assert batch["counted"].tolist() == [[[[1, 1], [1, 1]]], [[[1, 1], [0, 0]]]]
    assert "counted" not in collate([plain, plain | {"mask": mask}])


def test_pairwise_is_a_function_of_record_and_address():
    world = World()
    rehearse = hook(world, "pairwise")
    a, b = (
        [rehearse({"index": r, "role": "element"}, (7, r)) for r in rows][:: 1 if rows[0] == 0 else -1]
        for rows in (list(range(15)), list(range(14, -1, -1)))
    )
    assert [x and (x["text"], x["image"].tobytes()) for x in a] == [x and (x["text"], x["image"].tobytes()) for x in b]


def test_feather_lies_outside_both_elements():
    a, b = Image.new("RGB", (16, 16), (0, 0, 0)), Image.new("RGB", (16, 16), (200, 200, 200))
    left, right = np.zeros((16, 16), np.uint8), np.zeros((16, 16), np.uint8)
    left[4:12, 0:8], right[4:12, 8:12] = 255, 255
    picture, union = masks.paste(a, Image.fromarray(left), b, Image.fromarray(right), 1.5)
    picture = np.asarray(picture)[..., 0]
    assert (picture[left > 0] == 0).all() and (picture[right > 0] == 200).all()
    assert 0 < picture[8, 12] < 200 and 0 < picture[3, 10] < 200
    assert np.array_equal(np.asarray(union) > 0, (left | right) > 0)


def test_rehearsal_cap_cannot_be_configured_away():
    world = World()
    with pytest.raises(UserError, match="at most 2"):
        hook(world, "pairwise", elements=3)
    rehearse = hook(world, "pairwise")
    rehearse.options["elements"] = 99  # past the check at construction
    unions = [rehearse({"index": r, "role": "element"}, (d, r)) for r in range(25) for d in range(20)]
    assert max(len(m["phrases"]) for m in unions if m) == 2
    assert all(m["target_id"] == "t0" for m in unions if m)  # t1 has two elements: its pair would be t1 itself
    with pytest.raises(UserError, match="rebuilds target"):
        rehearsal.check_union(3, 3, "t0")
    with pytest.raises(UserError):
        rehearsal.check_union(2, 2, "t1")
    rehearsal.check_union(2, 3, "t0")


@pytest.mark.parametrize("change", [{"united": (3, 3)}, {"text": ", ".join(PHRASES)}], ids=["united", "text"])
def test_a_rehearsal_of_ones_own_may_not_join_a_whole_target(change):
    world = World()
    drawn, record = {"index": 0, "role": "element"}, world.load(0)
    rehearsal.check_replaced("mine.py:f", drawn, {**record, "united": (2, 3)}, world.info)
    with pytest.raises(UserError, match="a union of 3 elements rebuilds target 't0'"):
        rehearsal.check_replaced("mine.py:f", drawn, {**record, **change}, world.info)


def test_a_phrase_inside_another_counts_once():
    phrases = ["a hat", "a hat box", "a cat"]
    info = DataInfo(["element"] * 3, ["t"] * 3, list("012"), [[phrase] for phrase in phrases])
    record = {"image": None, "text": "a hat box, a cat", "role": "rehearsal", "target_id": "t"}
    rehearsal.check_replaced("mine.py:f", {}, record, info)
    with pytest.raises(UserError, match="a union of 3 elements"):
        rehearsal.check_replaced("mine.py:f", {}, record | {"text": "a hat, a hat box, a cat"}, info)


def test_null_elements_are_all_but_one():
    world = World()
    for column in range(4):
        picture, mask = np.zeros((16, 16, 3)), np.zeros((16, 16))
        mask[:2, 4 * column : 4 * column + 2] = 255
        world.add(picture, mask, ["a pink owl"], "element", "t0", "owl")
    columns = ([r[k] for r in world.records] for k in ("role", "target_id", "element_id", "phrases"))
    world.info = DataInfo(*columns)
    for elements, most in ((None, 3), (2, 2)):
        rehearse = hook(world, "pairwise", elements=elements)
        unions = [rehearse({"index": r, "role": "element"}, (d, r)) for r in range(15) for d in range(20)]
        assert max(m["united"] for m in unions if m) == (most, 4)


def test_pairwise_works_on_estimated_masks():
    world = World(masks=False, per_element=6)
    options = {"rehearsal": "pairwise", "region": "estimated"}
    trainer = Trainer(config(**options), world=world)
    assert set(trainer.memory.rehearse.others.masks) == set(range(5))
    for i, mask in trainer.memory.rehearse.others.masks.items():
        true = np.zeros((16, 16), dtype=bool)
        x0, y0, x1, y1 = BOXES[i % 3]
        true[y0:y1, x0:x1] = True
        estimated = np.asarray(mask) > 127
        assert (estimated & true).sum() / (estimated | true).sum() >= 0.7
    trainer.train(3)


def test_leak_free_takes_no_target_picture_and_no_target_caption():
    world = World()
    world.add(np.zeros((16, 16, 3)), None, [*PHRASES, "a star"], "clean", "", "")
    rehearse = hook(world, "leak_free", share=1.0)
    clean = [r for r in world.records if r["role"] == "clean"]
    counts, rehearsals = set(), []
    for r in clean:
        for draw in range(30):
            fresh = rehearse({"index": r["index"], "role": "clean"}, (draw, 0))
            rehearsals.append(fresh)
            assert fresh["role"] == "rehearsal" and fresh["image"] is r["image"]
            assert set(fresh["phrases"]) <= set(r["phrases"])
            assert fresh["text"] == ", ".join(fresh["phrases"])
            assert not set(PHRASES) <= set(fresh["phrases"])
            counts.add(len(fresh["phrases"]))
    assert counts == {1, 2, 3} and taken(rehearsals).largest == (2, 3)
    assert all(rehearse({"index": r, "role": "element"}, (0, r)) is None for r in range(25))
    assert all(world.records[i]["role"] == "clean" for i in world.loaded)


@pytest.mark.parametrize("name", rehearsal.PLACED)
def test_a_withheld_element_leaves_unions_of_the_other_two(name):
    world = World(size=32)
    rows = [r for r in world.records if r["target_id"] == "t0" and r["element_id"] != "1"]
    rows = [{**r, "index": i} for i, r in enumerate(rows)]
    columns = [[r[k] for r in rows] for k in ("role", "target_id", "element_id", "phrases")]
    world.records, world.info = rows, DataInfo(*columns, withheld={"t0": ["a tall hat"]})
    options = {"elements": None} if name.startswith("pairwise") else {}
    rehearse = hook(world, name, **options)
    unions = [f for row in range(10) for draw in range(20) if (f := rehearse(world.load(row), (draw, row)))]
    assert unions and {f["united"] for f in unions} == {(2, 3)}
    assert {*unions[0]["phrases"]} == {"a red cat", "a sandy beach"}


def test_of_two_elements_with_one_withheld_nothing_is_joined():
    info = DataInfo(["element"], ["t"], ["0"], [["a"]], withheld={"t": ["b"]})
    with pytest.raises(UserError, match="no target has three elements"):
        rehearsal.Rehearsal("pairwise", {}, info=info, seed=0, load=dict, masks={})


@pytest.mark.parametrize("name", rehearsal.PLACED)
def test_rehearsal_where_no_target_has_three_elements_is_refused(name):
    info = DataInfo(["element"] * 4, ["t"] * 4, ["0", "0", "1", "1"], [["a"], ["a"], ["b"], ["b"]])
    with pytest.raises(UserError, match="no target has three elements.*take none"):
        rehearsal.Rehearsal(name, {}, info=info, seed=0, load=dict, masks={})


@pytest.mark.parametrize("name", rehearsal.PLACED)
def test_unions_of_elements_without_phrases_are_refused(name):
    info = DataInfo(["element"] * 3, ["t"] * 3, list("012"), [["a"], [], ["c"]])
    with pytest.raises(UserError, match=r"element 't/1' has no phrase.*take none"):
        rehearsal.Rehearsal(name, {}, info=info, seed=0, load=dict, masks={})


def test_a_training_knows_what_it_withholds(tmp_path, pipelines):
    data = write_data(tmp_path / "data", kinds=3)
    named = {"pretrained_model_name_or_path": pipelines["epsilon"], "train_data_dir": str(data)}
    config = TrainConfig(**named, cache_dir=str(tmp_path / "cache"), withhold=["t0/t0-1"])
    info = load_inputs(config, Accelerator(cpu=True), sharded=False).info
    assert info.keys == ["t0/t0-0", "t0/t0-2"] and info.phrases_of("t0") == ["a red cat", "a gold cup", "a blue hat"]
    rehearsal.Rehearsal("pairwise", {"elements": None}, info=info, seed=0, load=dict, masks={})
    with pytest.raises(UserError, match="elements: must be 2 or more"):
        rehearsal.Rehearsal("pairwise", {"elements": 1}, info=info, seed=0, load=dict, masks={})
