"""Pictures that somebody else drew, judged without a model."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageEnhance

import validation
from silentbad.data.images import resize, to_pil, to_tensor
from silentbad.data.targets import load_targets
from silentbad.errors import UserError
from silentbad.measure.given import GivenPictures, given_pictures
from silentbad.measure.samples import stacked
from silentbad.model.gate import Source
from silentbad.model.latents import round_trip
from silentbad.model.pipeline import load_autoencoder
from tests.photographs import failures, make_target

ROOT = Path(__file__).parents[2]
BASE = ROOT / "assets/micro-sd"
PHOTOGRAPH = make_target(300)  # a motorcycle and a cat on grass
PHRASES = [phrase for phrase, _ in PHOTOGRAPH.elements]


def write(folder: Path, *pictures: Image.Image) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for k, picture in enumerate(pictures):
        picture.save(folder / f"{k}.png")


def noise(seed: int, side: int = 64) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """The photograph's targets.jsonl."""
    folder = tmp_path_factory.mktemp("target")
    PHOTOGRAPH.picture.save(folder / "t.png")
    masks = [f"mask-{k}.png" for k in range(len(PHRASES))]
    for name, (_, mask) in zip(masks, PHOTOGRAPH.elements, strict=True):
        mask.save(folder / name)
    line = {"target_id": "photo", "image": "t.png", "phrases": PHRASES, "masks": masks}
    (folder / "targets.jsonl").write_text(json.dumps(line))
    return folder / "targets.jsonl"


def judged(target: Path, folder: Path, out: Path, *more: str) -> int:
    words = ["--pictures", str(folder), "--targets", str(target), "--output_dir", str(out)]
    return validation.main([*words, "--resolution", "64", *more])


def verdict(out: Path) -> dict:
    return json.loads((out / "validation.json").read_text())["verdict"]


def test_targets_with_unequally_many_pictures_stand_in_one_grid():
    grid = stacked([np.zeros((2, 6, 3), np.uint8), np.zeros((2, 4, 3), np.uint8)])
    assert grid.shape == (4, 6, 3) and grid[2:, 4:].min() == 255 and grid[:, :4].max() == 0


def test_copies_are_recovered_where_a_control_shows_something_else(target, tmp_path, capsys):
    picture = PHOTOGRAPH.picture
    copies = [picture, ImageEnhance.Brightness(picture).enhance(1.03), picture.resize((64, 64))]
    write(tmp_path / "drawn", *copies, noise(0))
    assert judged(target, tmp_path / "drawn", tmp_path / "alone") == 4
    assert "no control prompt was measured" in verdict(tmp_path / "alone")["reasons"][0]
    assert "targets are compared as they are" in capsys.readouterr().out
    write(tmp_path / "drawn" / "unrelated", noise(1), noise(2))
    assert judged(target, tmp_path / "drawn", tmp_path / "controlled") == 3
    found = verdict(tmp_path / "controlled")
    assert (found["images_above"], found["images"], found["state"]) == (3, 4, "recovered")
    page = (tmp_path / "controlled" / "report.html").read_text()
    assert "unrelated caption" in page and "given pictures" in page


def test_a_picture_without_an_element_is_none(target, tmp_path):
    missing = failures(PHOTOGRAPH)["missing-1"]
    write(tmp_path / "drawn", missing)
    assert judged(target, tmp_path / "drawn", tmp_path / "out", "--pipeline", str(BASE)) == 0
    record = json.loads((tmp_path / "out" / "validation.json").read_text())
    assert record["reference"] == "decoded" and record["verdict"]["images_above"] == 0


def test_what_the_autoencoder_leaves_of_a_copy_is_one(target, tmp_path):
    vae = load_autoencoder(Source(str(BASE)), "float32", "cpu")
    decoded = round_trip(vae, resize(to_tensor(PHOTOGRAPH.picture)[None], (64, 64)))[0]
    write(tmp_path / "drawn", to_pil(decoded))
    write(tmp_path / "drawn" / "unrelated", noise(1), noise(2))
    assert judged(target, tmp_path / "drawn", tmp_path / "out", "--pipeline", str(BASE)) == 3


def test_each_target_has_a_folder_and_a_control_its_name(target, tmp_path):
    (one,) = load_targets(target)
    two = replace(one, target_id="other")
    folder = tmp_path / "drawn"
    write(folder / "other", noise(0))
    with pytest.raises(UserError, match="--pictures: no folder .*photo; each target has one"):
        given_pictures(folder, [one, two])
    write(folder / "photo", noise(1), noise(2))
    write(folder / "photo" / "without-0", noise(3))
    given = given_pictures(folder, [one, two])
    assert [(item.cell, item.target, item.image) for item, _ in given] == [
        *(("composed", 0, 0), ("composed", 0, 1), ("without-0", 0, 0)),
        ("composed", 1, 0),
    ]
    write(folder / "other" / "unrelatd", noise(4))
    with pytest.raises(UserError, match="unrelatd is no control's folder; did you mean unrelated"):
        given_pictures(folder, [one, two])
    (folder / "empty" / "unrelated").mkdir(parents=True)
    with pytest.raises(UserError, match="empty holds no picture"):
        given_pictures(folder / "empty", [one])


MISTAKES = {
    "--guidance_scale 2": "--guidance_scale: does not act on pictures that are given",
    "--baseline x": "--baseline: does not act on pictures that are given",
    "--phrases x": "use silentbad-search",
    "--pipeline ./none": "--pipeline: no folder ./none",
    "--reference raw": "key 'reference' (command line) is gone: beside redraws.jsonl",
    "--resolution 60 --pipeline assets/micro-sd": "--resolution: 60 is not a multiple of 8",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_line(words, target, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    write(tmp_path / "drawn", PHOTOGRAPH.picture)
    assert judged(target, tmp_path / "drawn", tmp_path / "out", *words.split()) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and MISTAKES[words] in error
    assert not (tmp_path / "out").exists()


def test_a_picture_of_another_shape_is_said(target, tmp_path, capsys):
    (whole,) = load_targets(target)
    write(tmp_path / "drawn", PHOTOGRAPH.picture, PHOTOGRAPH.picture.resize((96, 64)))
    given = given_pictures(tmp_path / "drawn", [whole])
    assert GivenPictures(given, [whole], 8).side == 64
    assert "--pictures: 1 have another shape" in capsys.readouterr().err
