"""Targets: read, checked, refused in one line."""

import json

import pytest
from PIL import Image

from silentbad.data.schema import json_lines
from silentbad.data.targets import load_targets
from silentbad.errors import UserError
from silentbad.measure.redraws import load_redraws
from tests.folders import folder
from tests.recoveries import smooth, some_targets


def test_targets(data):
    (target,) = load_targets(data / "targets.jsonl")
    assert target.composed_prompt == "a red cat, a blue hat" and target.masks == [None, None]
    assert load_targets(data)[0].target_id == "t0"


def test_a_folder_may_have_an_at_in_its_name(data):
    assert load_targets(data.rename(data.with_name("set@2")))[0].target_id == "t0"


def test_target_id_zero_is_an_id(tmp_path):
    root = folder(tmp_path / "d", {"target_id": 0, "image": "a.png", "phrases": ["x"]}, name="targets.jsonl")
    assert load_targets(root)[0].target_id == "0"


BAD_TARGETS = {
    "no target_id": ({"image": "a.png", "phrases": ["x"]}, "target_id is missing"),
    "an empty target_id": ({"target_id": "", "image": "a.png", "phrases": ["x"]}, "target_id is missing"),
    "target_id is a list": ({"target_id": [1], "image": "a.png", "phrases": ["x"]}, "target_id must be str"),
    "no phrases": ({"target_id": "t", "image": "a.png"}, "phrases is missing"),
    "phrases are text": ({"target_id": "t", "image": "a.png", "phrases": "x"}, "list of str"),
    "an empty prompt": ({"target_id": "t", "image": "a.png", "phrases": ["x"], "prompt": " "}, "prompt"),
    "masks do not match": ({"target_id": "t", "image": "a.png", "phrases": ["x"], "masks": ["a.png"] * 2}, "masks"),
    "image leaves the folder": ({"target_id": "t", "image": "../a.png", "phrases": ["x"]}, "leaves"),
    "no such image": ({"target_id": "t", "image": "b.png", "phrases": ["x"]}, "no file"),
}


@pytest.mark.parametrize("case", BAD_TARGETS)
def test_a_bad_target_is_one_line(case, tmp_path):
    row, expected = BAD_TARGETS[case]
    root = folder(tmp_path / "d", row, name="targets.jsonl")
    with pytest.raises(UserError, match="targets.jsonl:1") as refused:
        load_targets(root)
    assert expected in str(refused.value)


def test_no_targets_and_twice_the_same(tmp_path):
    good = {"target_id": "t", "image": "a.png", "phrases": ["x"]}
    with pytest.raises(UserError, match="no file"):
        load_targets(tmp_path)
    with pytest.raises(UserError, match="holds no target"):
        load_targets(folder(tmp_path / "d", name="targets.jsonl"))
    with pytest.raises(UserError, match="is given twice"):
        load_targets(folder(tmp_path / "e", good, good, name="targets.jsonl"))


def test_a_mark_of_encoding_and_empty_lines_are_no_records(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf\r\n{"a": 1}\r\n\r\n{"a": 2}\r\n')
    assert [(where[-2:], entry) for where, entry in json_lines(file)] == [(":2", {"a": 1}), (":4", {"a": 2})]


def test_a_recompressed_target_is_no_redraw_but_a_near_one_is(tmp_path):
    target, root = smooth("target", 0, side=64), tmp_path
    near = target.copy()
    near.paste((255, 0, 0), (20, 20, 40, 40))
    near.save(root / "near.png")
    target.resize((128, 128), Image.Resampling.BICUBIC).save(root / "copy.jpg", quality=95)
    targets = [some_targets(1)[0]]
    targets[0].image = target
    for name, copied in (("near.png", False), ("copy.jpg", True)):
        (root / "redraws.jsonl").write_text(json.dumps({"target_id": "t0", "image": name}))
        if copied:
            with pytest.raises(UserError, match="redraws.jsonl:1: .* is target 't0' itself"):
                load_redraws(str(root), targets, decode=True)
        else:
            assert len(load_redraws(str(root), targets, decode=True)) == 1
