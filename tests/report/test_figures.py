"""The picture of a run."""

import json
import shutil

import pytest
from PIL import Image

from silentbad.errors import UserError
from silentbad.report.figures import GAP, LABEL, TILE, main, strip
from tests.recoveries import make_hook
from tests.tiny import tiny_pipeline


def validated(folder, points: int):
    """A run folder with so many measurements."""
    hook = make_hook(folder, threshold=0.5)
    unet = tiny_pipeline().unet
    for step in range(points):
        hook.run(step, step, unet)
    return folder


def test_a_row_a_target_and_a_column_a_step(tmp_path):
    run = validated(tmp_path / "run", 5)
    content = json.loads((run / "validation.json").read_text())
    elements = max(len(target["elements"]) for target in content["targets"])
    sheet = strip(run, columns=3)
    assert sheet.size == ((elements + 4) * (TILE + GAP) + 2 * GAP, len(content["targets"]) * (TILE + GAP) + LABEL)
    Image.new("RGB", (16, 16), "red").save(run / content["targets"][0]["image"])
    last = content["history"][-1]
    scores = (last.get("ema") or last["raw"])["targets"][content["targets"][0]["target_id"]]
    Image.new("RGB", (16, 16), "blue").save(run / scores["median"]["file"])
    sheet = strip(run, columns=3)
    middle = LABEL + TILE // 2
    assert sheet.getpixel((elements * (TILE + GAP) + GAP + TILE // 2, middle)) == (255, 0, 0)
    assert sheet.getpixel(((elements + 3) * (TILE + GAP) + 2 * GAP + TILE // 2, middle)) == (0, 0, 255)


def test_a_run_whose_images_are_gone_is_named(tmp_path):
    run = validated(tmp_path / "run", 1)
    for step in (run / "samples").glob("step-*"):
        shutil.rmtree(step)
    with pytest.raises(UserError, match="holds none of the images"):
        strip(run)


def test_a_picture_that_is_gone_is_named(tmp_path, capsys):
    run = validated(tmp_path / "run", 1)
    name = json.loads((run / "validation.json").read_text())["targets"][0]["image"]
    (run / name).unlink()
    strip(run)
    assert f"lacks {name}; left empty" in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(UserError, match="is it a run folder"):
        strip(tmp_path)


@pytest.mark.parametrize("out", ["", "file/sheet.png", "folder", "sheet.txt"])
def test_an_output_that_cannot_be_written_is_noticed_first(out, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr("silentbad.report.figures.strip", lambda *_: pytest.fail("worked first"))
    assert main([str(tmp_path), "--out", str(tmp_path / out)]) == 2
    assert capsys.readouterr().err.startswith("error: --out: ")


def test_a_name_that_is_too_long_is_refused_with_the_flags(tmp_path, capsys):
    assert main([str(tmp_path), "--out", str(tmp_path / ("n" * 300 + ".png"))]) == 2
    assert capsys.readouterr().err.startswith("error: out (command line): must be a path")


def test_a_picture_outside_the_run_is_refused(tmp_path):
    run = validated(tmp_path / "run", 1)
    content = json.loads((run / "validation.json").read_text())
    Image.new("RGB", (8, 8)).save(tmp_path / "outside.png")
    content["targets"][0]["image"] = "../outside.png"
    (run / "validation.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="leaves"):
        strip(run)


def test_a_disk_that_is_full_leaves_the_earlier_picture(tmp_path, monkeypatch, capsys):
    run = validated(tmp_path / "run", 1)
    out = tmp_path / "sheet.png"
    assert main([str(run), "--out", str(out)]) == 0
    before = out.read_bytes()

    def full(picture, file, **_):
        file.write_bytes(b"cut")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    assert main([str(run), "--out", str(out)]) == 2 and "No space left" in capsys.readouterr().err
    assert out.read_bytes() == before and {*tmp_path.iterdir()} == {run, out}
