"""Models of photographs: whose pictures they are, and pictures of a folder."""

import json

import numpy as np
import pytest
from PIL import Image

from bench import photographs_trained as trained
from tests import photographs


def row(target: str, state: str) -> dict:
    return {"target": target, "recipe": "recommended", "state": state, "phrases": [], "elements": [], "rate": 1.0}


def test_the_table_tells_apart_who_chose_a_picture():
    rows = [row("astronaut", "recovered"), row("photo-412", "in part"), *[row("others/dog", "recovered")] * 2]
    cells = trained.table(rows).splitlines()[-1].split(" | ")
    assert [cell.split(" [")[0] for cell in cells[2:]] == ["0 of 1", "1 of 1", "2 of 2"]


@pytest.fixture
def folder(tmp_path):
    here = tmp_path / "dog"
    here.mkdir()
    for name in ("target", "mask-0", "mask-1"):
        Image.new("L", (4, 4)).save(here / f"{name}.png")
    (here / "phrases.json").write_text(json.dumps(["a dog", "a ball", "a lawn"]))
    return tmp_path


def test_a_folder_is_prepared_as_a_user_would(folder, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(trained, "run", lambda *words: calls.append(list(map(str, words))))
    assert trained.data_of_others(folder, "dog", tmp_path / "out") == ["a dog", "a ball", "a lawn"]
    (words,) = calls
    assert words[:2] == ["-m", "silentbad.prepare"] and words[words.index("--masks") + 2].endswith("mask-1.png")


def test_a_model_without_one_element_is_counted_in_no_share():
    parts = {"phrases": ["a dog", "a lawn"], "elements": [0.0, 1.0]}
    rows = [row("others/dog", "recovered"), row("others/dog", "undecided") | {"withheld": 0} | parts]
    whole, without = trained.table(rows).splitlines()[2:]
    assert "| all | " in whole and "1 of 1" in whole and "| all but one | " in without and "0 of 1" in without
    assert "| a dog | undecided |" in trained.by_target(rows)


def test_a_withheld_element_changes_nothing_else(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "targets.jsonl").write_text('{"target_id": "dog"}\n')
    calls = []
    monkeypatch.setattr(trained, "run", lambda *words: calls.append(list(map(str, words))))
    monkeypatch.setattr(trained.Record, "load", lambda file: file)
    for withheld in (None, 1):
        trained.train(tmp_path, 3, "recommended", withheld)
    whole, without = calls
    assert [word for word in without if word not in whole] == ["--withhold=dog/1"]


def test_failures_are_made_of_anybodys_picture(folder):
    dog = folder / "dog"
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(dog / "target.png")
    for number in (0, 1):
        mask = Image.new("L", (64, 64))
        mask.paste(255, (8, 8 + 24 * number, 40, 40 + 24 * number))
        mask.save(dog / f"mask-{number}.png")
    made = photographs.of_folder(dog)
    assert [phrase for phrase, _ in made.elements] == ["a dog", "a ball", "a lawn"]
    first, second, rest = (np.asarray(mask) > 127 for _, mask in made.elements)
    assert not (first & second).any() and (first | second | rest).all()
    kinds = {kind.rpartition("-")[0] for kind in photographs.failures(made)}
    assert {"missing", "foreign", "replaced", "moved", "grey", "tinted"} <= kinds


def test_a_target_that_is_not_there_is_named(folder, capsys):
    with pytest.raises(SystemExit):
        trained.main(["--folder", str(folder), "--targets", "cat"])
    assert "no cat; there are: dog" in capsys.readouterr().err
