"""The picture of a run."""

import json

import pytest
from PIL import Image

from silentbad.errors import UserError
from silentbad.figures import GAP, LABEL, TILE, strip


def test_a_row_a_target_and_a_column_a_step(tmp_path):
    for name, colour in (("t", "red"), ("e", "green"), ("g", "blue")):
        Image.new("RGB", (16, 16), colour).save(tmp_path / f"{name}.png")
    scores = {"targets": {"a": {"median": {"file": "g.png"}, "best": {"file": "g.png"}}}}
    history = [{"step": step, "raw": scores} for step in range(0, 100, 10)]
    targets = [{"target_id": "a", "image": "t.png", "elements": ["e.png", None]}]
    (tmp_path / "validation.json").write_text(json.dumps({"targets": targets, "history": history}))
    sheet = strip(tmp_path, columns=3)
    assert sheet.size == (6 * (TILE + GAP) + 2 * GAP, TILE + GAP + LABEL)
    middle = LABEL + TILE // 2
    assert sheet.getpixel((TILE // 2, middle)) == (0, 128, 0)
    assert sheet.getpixel((2 * (TILE + GAP) + GAP + TILE // 2, middle)) == (255, 0, 0)
    assert sheet.getpixel((5 * (TILE + GAP) + 2 * GAP + TILE // 2, middle)) == (0, 0, 255)


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(UserError, match="is it a run folder"):
        strip(tmp_path)
