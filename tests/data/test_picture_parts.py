"""Phrases and masks of one picture, judged where they enter."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image, ImageChops

from silentbad.data.picture_parts import check_phrases, cut_apart
from silentbad.data.targets import load_targets
from silentbad.errors import UserError
from tests.conftest import write_data
from tests.folders import records

SIDE = 20


def box(left: int, top: int, right: int, bottom: int) -> Image.Image:
    mask = Image.new("L", (SIDE, SIDE), 0)
    mask.paste(255, (left, top, right, bottom))
    return mask


CUP = box(4, 4, 8, 8)
SAUCER = box(2, 2, 12, 10)
LAMP = box(13, 3, 17, 17)
FULL = box(0, 0, SIDE, SIDE)
PAIRS = {  # (masks, the line)
    "the same": ([CUP, box(4, 4, 8, 8)], "the masks of 'a' and 'b' are the same"),
    "both inverted": (
        [ImageChops.invert(CUP), ImageChops.invert(LAMP)],
        "'b' covers the edges .* so does that of 'a'",
    ),
    "the first inverted": ([ImageChops.invert(LAMP), CUP], "'b' lies in the mask of 'a'.* name 'b' first"),
    "the outer first": ([SAUCER, CUP], "'b' lies in the mask of 'a'"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_masks_that_name_no_two_things_are_refused(name):
    masks, line = PAIRS[name]
    with pytest.raises(UserError, match=f"here: .*{line}"):
        cut_apart(["a", "b"], masks, "here")


def test_a_backdrop_covers_the_edges_and_a_thing_does_not():
    backdrop = ImageChops.invert(ImageChops.lighter(CUP, LAMP))
    assert cut_apart(["a", "b", "c"], [CUP, LAMP, backdrop], "here") == [CUP, LAMP, backdrop]
    with pytest.raises(UserError, match="'a' covers the edges of the picture, as a backdrop does; is it inverted"):
        cut_apart(["a", "b"], [ImageChops.invert(CUP)], "here", rest=True)
    wide = Image.new("L", (100, 100), 0)
    wide.paste(255, (1, 1, 99, 99))
    with pytest.raises(UserError, match="'a' covers 96% of the picture; mark one thing"):
        cut_apart(["a", "b"], [wide], "here", rest=True)


def test_an_only_mask_that_surrounds_something_is_asked_about(capsys):
    speck = ImageChops.invert(Image.new("L", (100, 100), 0))
    speck.paste(0, (40, 40, 60, 50))  # 98 % are white
    cut_apart(["a", "b"], [ImageChops.invert(LAMP), None], "here")
    cut_apart(["a", "b"], [speck, None], "here")
    line = "here: the mask of 'a' covers the edges of the picture, and no mask its middle; is it inverted?"
    assert capsys.readouterr().err == f"warning: {line} white is the thing\n" * 2
    cut_apart(["a", "b"], [LAMP, ImageChops.invert(LAMP)], "here")
    cut_apart(["a", "b"], [FULL, None], "here")
    assert not capsys.readouterr().err


def test_nested_masks_are_cut_apart_with_one_line(capsys):
    inner, outer = cut_apart(["a cup", "a saucer"], [CUP, SAUCER], "here")
    line = "here: the masks of 'a cup' and 'a saucer' share 100% of the smaller one; the earlier phrase has the pixels"
    assert capsys.readouterr().err == f"warning: {line}\n"
    assert inner == CUP and (np.asarray(outer) > 0).sum() == 10 * 8 - 4 * 4
    assert not (np.asarray(outer) & np.asarray(inner)).any()


def test_masks_that_touch_stay_as_they_are_unless_asked(capsys):
    beside = box(7, 4, 12, 10)  # a row of 4 pixels of 16 and of 30
    assert cut_apart(["a", "b"], [CUP, beside], "here") == [CUP, beside]
    apart = cut_apart(["a", "b"], [CUP, beside], "here", slight=True)
    assert (np.asarray(apart[1]) > 0).sum() == 30 - 4 and not capsys.readouterr().err


def test_phrases_that_the_tokenizer_reads_alike_are_one():
    check_phrases(["a cat", "a cats", "a, cat"], "here")
    for same in ("A cat", " a  cat", "a cat"):
        with pytest.raises(UserError, match="each names one element"):
            check_phrases(["a cat", same], "here")
    with pytest.raises(UserError, match="one phrase to the tokenizer"):
        check_phrases(["caf\u00e9", "cafe\u0301"], "here")


def write_targets(folder, **fields):
    folder.mkdir()
    Image.new("RGB", (SIDE, SIDE), "teal").save(folder / "t.png")
    for name, mask in {"cup": CUP, "saucer": SAUCER, "full": FULL}.items():
        mask.save(folder / f"{name}.png")
    entry = {"target_id": "t", "image": "t.png", "phrases": ["a cup", "a saucer"], **fields}
    (folder / "targets.jsonl").write_text(json.dumps(entry))
    return folder


def test_targets_are_judged_where_they_are_read(tmp_path, capsys):
    (target,) = load_targets(write_targets(tmp_path / "nested", masks=["cup.png", "saucer.png"]))
    assert "targets.jsonl:1: the masks of 'a cup' and 'a saucer' share 100%" in capsys.readouterr().err
    assert (np.asarray(target.masks[1]) > 0).sum() == 64
    for fields, line in (
        ({"masks": ["saucer.png", "cup.png"]}, "'a saucer' lies in the mask of 'a cup'"),
        ({"masks": [None, "full.png"]}, "is white all over"),
        ({"phrases": ["Burger", "burger"]}, "'Burger' and 'burger' are one phrase"),
    ):
        with pytest.raises(UserError, match=line):
            load_targets(write_targets(tmp_path / line[:4].replace("'", "x"), **fields))


def test_a_target_that_is_no_square_is_said(tmp_path, capsys):
    folder = write_targets(tmp_path / "wide", masks=[])
    Image.new("RGB", (30, SIDE), "teal").save(folder / "t.png")
    load_targets(folder)
    assert "the image is 30x20 and is compared squashed to a square" in capsys.readouterr().err


def test_metadata_are_judged_by_the_same_rules(tmp_path):
    data = write_data(tmp_path / "data")
    assert records(data).check_parts() == []
    lines = [json.loads(line) for line in (data / "metadata.jsonl").read_text().splitlines()]
    shown = [line for line in lines if line.get("target_id") == "t0"]
    other = next(line for line in shown if line["element_id"] != shown[0]["element_id"])
    shutil.copy(data / shown[0]["mask"], data / other["mask"])
    (line,) = records(data).check_parts()[:1]
    assert "target 't0': the masks of" in line and "are the same" in line
    for line in lines:
        if line.get("element_id") == other["element_id"]:
            line["text"] = line["text"].replace(line["phrases"][0], shown[0]["phrases"][0].upper())
            line["phrases"] = [shown[0]["phrases"][0].upper()]
    (data / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match="target 't0': .* are one phrase to the tokenizer"):
        records(data).check_parts()


def test_two_elements_whose_masks_surround_the_picture_are_asked_about(tmp_path):
    data = write_data(tmp_path / "data")
    lines = [json.loads(line) for line in (data / "metadata.jsonl").read_text().splitlines()]
    first, *others = [line for line in lines if line.get("target_id") == "t0"]
    second = next(line for line in others if line["element_id"] != first["element_id"])
    for line in (first, second):
        with Image.open(data / line["mask"]) as mask:
            ImageChops.invert(mask.convert("L")).save(data / line["mask"])
    (line,) = records(data).check_parts()
    assert "target 't0': the mask of" in line and "covers the edges of the picture, and so does that of" in line
