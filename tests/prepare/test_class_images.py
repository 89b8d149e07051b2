"""Class images made by the base model."""

import json

import numpy as np
import pytest
from PIL import Image

from silentbad import owned
from silentbad.errors import UserError
from silentbad.prepare.class_images import main, write_class_images


def test_a_prompt_that_no_caption_can_be_is_refused(tmp_path, capsys):
    (tmp_path / "p.txt").write_bytes(b"a cat\na\0dog\n")
    assert main(["--pipeline", ".", "--prompts", str(tmp_path / "p.txt"), "--out", str(tmp_path)]) == 2
    assert "p.txt:2: a prompt must be text without NUL" in capsys.readouterr().err


def test_json_is_no_prompt(tmp_path, capsys):
    (tmp_path / "p.txt").write_text('{"prompt": "a cat"}\n')
    assert main(["--pipeline", ".", "--prompts", str(tmp_path / "p.txt"), "--out", str(tmp_path)]) == 2
    assert "p.txt:1: the JSON would be drawn as a prompt; give one prompt a line" in capsys.readouterr().err


def test_a_model_folder_is_no_place_for_pictures(tmp_path, capsys):
    (tmp_path / "model_index.json").write_text("{}")
    (tmp_path / "prompts.txt").write_text("a cat")
    assert main(["--pipeline", ".", "--prompts", str(tmp_path / "prompts.txt"), "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith("is a model folder; give the folder of the training data\n")


def test_two_commands_at_one_folder_take_turns(tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("a cat")
    arguments = ["--pipeline", ".", "--prompts", str(tmp_path / "prompts.txt"), "--out", str(tmp_path / "data")]
    with owned.claimed(tmp_path / "data", "class images", key="--out"):
        assert main(arguments) == 2
    assert "is being written by" in capsys.readouterr().err


def test_class_images_become_clean_records(pipe, tmp_path):
    earlier = b'{"file_name": "a.png"}\r\n{"file_name": "b.png"}'
    (tmp_path / "records").write_bytes(earlier)
    (tmp_path / "metadata.jsonl").symlink_to("records")
    prompts = ["a star", "a moon"]
    write_class_images(pipe, prompts, 3, tmp_path, batch=2, steps=2)
    assert (tmp_path / "metadata.jsonl").is_symlink() and (tmp_path / "records").read_bytes().startswith(earlier)
    lines = [json.loads(line) for line in (tmp_path / "metadata.jsonl").read_text().splitlines()]
    assert [r.get("text") for r in lines] == [None, None, "a star", "a moon", "a star"]
    assert all(r["role"] == "clean" and (tmp_path / r["file_name"]).is_file() for r in lines[2:])
    again = write_class_images(pipe, prompts, 3, tmp_path / "b", batch=3, steps=2)
    for r in again:  # a picture does not depend on the batch it was drawn in, but for rounding
        a, b = (np.asarray(Image.open(d / r["file_name"])).astype(int) for d in (tmp_path, tmp_path / "b"))
        assert np.abs(a - b).max() <= 1
    with pytest.raises(UserError):
        write_class_images(pipe, prompts, 1, tmp_path)
