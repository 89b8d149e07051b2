"""Sample prompts: read strictly, drawn at validation from their own seeds, and training sees nothing of them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from silentbad.errors import UserError
from silentbad.loop.log import Log
from silentbad.loop.prior import read_prompts
from silentbad.measure.kept import unrelated_prompts
from silentbad.measure.prompts import load_prompts, prompts_due
from silentbad.measure.sheet import NAME, read_draws
from silentbad.report import run_report
from silentbad.saving.checkpoint import read_tensors
from silentbad.settings.train import TrainConfig
from silentbad.settings.validation import ValidationConfig
from silentbad_shield.search.unknown import lines_of
from tests.training import VALIDATION, rows, same
from train_silentbad import main

PROMPTS = ["a red cat", "a <b>hat</b>"]


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"{line}\n" for line in PROMPTS))
    return path


def pixels(folder: Path, step: int, k: int) -> np.ndarray:
    return np.asarray(Image.open(folder / f"samples/sample_prompts/step-{step:06d}-{k}.png")).astype(int)


def test_a_text_file_holds_one_prompt_a_line(tmp_path):
    (tmp_path / "a.txt").write_text("a cat: red, big\n\n a hat \n", encoding="utf-8")
    assert load_prompts(tmp_path / "a.txt") == ["a cat: red, big", "a hat"]


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("a.txt", " \n", "holds 0 prompts"),
        ("a.txt", b"\xff\xfe", "a.txt:1: not UTF-8"),
        ("a.txt", "a cat\na red ball --w 64 --s 4", "a.txt:2: --w would be drawn"),
        ("a.txt", '["a cat", "a dog"]', "a.txt:1: the JSON would be drawn as a prompt"),
        ("a.txt", "# mine\na cat", "a.txt:1: # would be drawn"),
        ("a.jsonl", '{"prompt": "a"}', "a.jsonl:1: the JSON would be drawn as a prompt"),
        ("b.txt", None, "no file"),
    ],
    ids=str,
)
def test_a_wrong_file_is_one_line(name, text, said, tmp_path):
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=said):
        load_prompts(tmp_path / (name if text is not None else "missing"))


def test_what_would_be_cut_off_is_refused(flags, tmp_path, capsys):
    (tmp_path / "long.txt").write_text("cat " * 80)
    assert main(flags(sample_prompts=tmp_path / "long.txt")) == 2
    assert "long.txt:1: the prompt has 82 tokens, the window is 48" in capsys.readouterr().err
    (tmp_path / "objects.txt").write_text('{"prompt": "a"}')
    assert main(flags(sample_prompts=tmp_path / "objects.txt")) == 2
    assert "objects.txt:1: the JSON would be drawn as a prompt" in capsys.readouterr().err


def test_prompts_are_drawn_and_training_sees_nothing(flags, tmp_path, file, monkeypatch):
    """No target is needed; seeds fix the noise; the run goes on bit for bit; the page follows the run."""
    pages = {}
    log = Log.training

    def log_and_read(self, *scalars):
        pages[self.state.step] = (self.folder.path / "report.html").read_text(encoding="utf-8")
        return log(self, *scalars)

    settings = {"max_train_steps": 4, "use_ema": True}
    assert main(flags("plain", **settings)) == 0
    settings |= {"validation.steps": 2, "validation.num_inference_steps": 2}
    with monkeypatch.context() as patched:
        patched.setattr(Log, "training", log_and_read)
        assert main(flags("drawn", sample_prompts=file, report_to="tensorboard", **settings)) == 0
    plain = tmp_path / "plain"
    drawn = tmp_path / "drawn"
    for name in ("unet", "ema"):
        assert same(*(read_tensors(out / f"checkpoints/step-4/{name}.safetensors") for out in (plain, drawn)))
    assert rows(plain) == rows(drawn)
    draws = read_draws(drawn)
    assert [draw.step for draw in draws] == [0, 2, 4]
    assert [image.prompt for image in draws[0].images] == PROMPTS
    assert all((drawn / image.file).is_file() for draw in draws for image in draw.images)
    assert "The run goes on: step 2 of 4" in pages[3] and 'http-equiv="refresh"' in pages[3]
    last = (drawn / "report.html").read_text(encoding="utf-8")
    assert 'http-equiv="refresh"' not in last and last.count(" at step 4") == 2
    assert "a &lt;b&gt;hat&lt;/b&gt;" in last
    assert not list(drawn.glob(".*.draft")) and list((drawn / "logs").rglob("*tfevents*"))


def test_validation_prompts_are_due_after_epochs_and_sample_prompts_on_the_grid():
    config = TrainConfig(validation_prompts=["a hat"], validation_epochs=2, validation=ValidationConfig(steps=4))
    assert [*filter(prompts_due(config, 3), range(13))] == [6, 12]
    both = replace(config, sample_prompts="look.txt")
    assert [*filter(prompts_due(both, 3), range(13))] == [0, 4, 6, 8, 12]
    assert not any(map(prompts_due(TrainConfig(), 3), range(13)))


def test_a_hook_that_measures_at_other_steps_draws_no_prompts(flags, tmp_path, file):
    (tmp_path / "mine.py").write_text(
        "from silentbad.loop.hooks import Hook\n"
        "class Odd(Hook):\n"
        "    def __init__(self, context):\n"
        "        pass\n"
        "    def should_run(self, step, asked=False, final=False):\n"
        "        return step % 2 == 1\n"
    )
    settings = {"max_train_steps": 4, "validation.steps": 4, "validation.num_inference_steps": 1}
    assert main(flags("run", sample_prompts=file, hooks=f"{tmp_path}/mine.py:Odd", **settings)) == 0
    assert [draw.step for draw in read_draws(tmp_path / "run")] == [0, 4]


def test_a_number_means_the_same_noise_in_every_run(flags, data, tmp_path, file, capsys):
    """Whatever the run's own seed, and beside targets; a damaged list is a note in the page."""
    (tmp_path / "other.txt").write_text("a cup\na <b>hat</b>\n")
    settings = {"max_train_steps": 1, "validation.steps": 2, "validation.num_inference_steps": 1}
    assert main(flags("a", sample_prompts=file, **settings)) == 0
    assert "data: 16 records (8 element, 8 clean), 8 with a mask, 8 with phrases\n" in capsys.readouterr().out
    targets = {**VALIDATION, "validation.targets": data / "targets.jsonl"}
    assert main(flags("b", seed=3, sample_prompts=tmp_path / "other.txt", **settings | targets)) == 0
    a, b = (pixels(tmp_path / out, 0, 1) for out in "ab")
    assert np.abs(a - b).max() == 0
    file.write_text(f"{PROMPTS[0]}\n")
    again = {**settings, "max_train_steps": 2, "resume_from_checkpoint": "latest"}
    assert main(flags("a", sample_prompts=file, **again)) == 0
    assert [(draw.step, len(draw.images)) for draw in read_draws(tmp_path / "a")] == [(0, 2), (1, 2), (2, 1)]
    assert "Sample prompts" in run_report.render(tmp_path / "b")
    (tmp_path / "b" / NAME).write_text('[{"step": "x"}]')
    assert f"{NAME} could not be read" in run_report.render(tmp_path / "b")


TABLES = {"x.csv": "prompt\na cat\n", "y.txt": "phrase,seed\na cat,1\n", "z.txt": '{"prompt": "a cat"}\n'}
READERS = {
    "sample_prompts": lambda file: load_prompts(file),
    "prior_preservation.prompts": lambda file: read_prompts(str(file), None),
    "validation.prompts": lambda file: unrelated_prompts(ValidationConfig(prompts=str(file)), [], [], None),
    "--phrases": lambda file: lines_of(str(file), "phrases"),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", TABLES)
def test_a_table_in_place_of_prompts_is_refused_by_every_reader(name, reader, tmp_path):
    (tmp_path / name).write_text(TABLES[name])
    with pytest.raises(UserError, match=f"{name}.*would be drawn as a prompt"):
        READERS[reader](tmp_path / name)
