"""How near the training data comes to a target: a copy among the pictures is found, element pictures are none."""

import json
import shutil

import pytest

from bench import stealth
from worlds.microworld import make


@pytest.mark.thorough
def test_a_copy_in_the_data_is_found(tmp_path, monkeypatch):
    data = tmp_path / "data"
    few = ["--images_per_phrase", "2", "--clean", "3", "--redraws", "40"]
    make.main(["--out", str(data), "--targets", "105", *few])
    monkeypatch.setattr(stealth, "data_of", lambda *_: data)
    before = stealth.measure("105")
    assert before["clean"]["pictures"] == 3 and before["element"]["pictures"] == 8
    assert before["clean"]["recovered"] == before["element"]["recovered"] == 0 and before["element"]["elements"] == 1
    shutil.copy(data / "targets" / "105.png", data / "images" / "copy.png")
    with (data / "metadata.jsonl").open("a") as file:
        file.write(json.dumps({"file_name": "images/copy.png", "text": "a copy", "role": "clean"}) + "\n")
    after = stealth.measure("105")
    assert (after["clean"]["recovered"], after["clean"]["elements"]) == (1, 4) and after["clean"]["nearest"] > 0.9
    assert "| clean | 4 | 1 |" in stealth.table([after]) and "1 of 4 |" in stealth.table([after])
