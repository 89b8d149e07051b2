"""A limit on what a training must keep: it ends the run, and best/ holds the best pipeline within it."""

import hashlib
import itertools
import json
import re
from dataclasses import replace

import pytest

from silentbad.errors import UserError
from silentbad.measure.limit import Limit
from silentbad.measure.record import Record
from silentbad.settings.validation import ValidationConfig
from tests.recoveries import make_hook, shifted, some_targets
from tests.tiny import tiny_pipeline
from tests.training import VALIDATION, rows
from train_silentbad import main

# by step: what a scripted run keeps
KEPT = {2: 0.9, 4: 0.95, 6: 0.3, 8: 0.99}


@pytest.fixture
def limited(flags, data):
    """argv of a run with a limit, changed by keywords."""

    def make(**changes):
        validation = VALIDATION | {"validation.targets": data / "targets.jsonl", "validation.unrelated_images": 2}
        return flags(
            **{**validation, "validation.keep": 0.8, "max_train_steps": 8, "checkpointing_steps": 2, **changes}
        )

    return make


@pytest.fixture
def scripted(monkeypatch):
    monkeypatch.setattr(Limit, "kept", lambda self, entry: KEPT.get(entry.step))


def step_of(card) -> int:
    return int(re.search(r"for (\d+) steps", card.read_text())[1])


def test_training_stops_where_too_little_is_kept_and_a_resume_stays_there(limited, tmp_path, capsys):
    argv = limited(learning_rate=0.05, **{"validation.keep_by": "pixels"})
    assert main(argv) == 0
    said = capsys.readouterr().out
    assert re.search(r"step 2 of 8: -?\d\.\d\d of the base is kept by pixels, less than keep 0.8; .* at step 2", said)
    assert "best/ was not written: no measured point keeps 0.8 of the base by pixels" in said
    out = tmp_path / "run"
    assert json.loads((out / "finished.json").read_text()) == {"step": 2}
    assert not (out / "best").exists() and (out / "pipeline/unet").is_dir()
    assert main([*argv, "--resume_from_checkpoint=latest"]) == 0
    assert [row["step"] for row in rows(out)] == [1, 2]
    record = Record.load(out / "validation.json")
    change = record.history[-1].raw.kept.change["pixels"]
    assert Limit(0.8, "pixels").kept(record.history[-1]) == pytest.approx(1 - change) and change > 0.2


def test_the_size_of_the_change_is_measured_at_every_point_where_it_is_the_limit(limited, tmp_path, capsys):
    limit = {"validation.keep": 0.99, "validation.keep_by": "size", "learning_rate": 0.05}
    assert main(limited(**limit, best_by="strict_rate")) == 0
    assert "of the base is kept by size, less than keep 0.99" in capsys.readouterr().out
    last = Record.load(tmp_path / "run/validation.json").history[-1]
    assert last.step == 2 and max(stage.norm for stage in last.raw.kept.size.values()) > 0.01


@pytest.mark.parametrize("save_best", [True, False])
def test_best_is_the_best_of_those_that_keep_the_limit(limited, scripted, save_best, tmp_path, capsys):
    assert main(limited(save_best=save_best)) == 0
    assert "0.30 of the base is kept by pixels" in (said := capsys.readouterr().out)
    assert "best/ holds the best pipeline that keeps 0.8 of the base by pixels" in said
    out = tmp_path / "run"
    means = {row["step"]: row["val/mean"] for row in rows(out, validation=True)}
    assert [*means] == [0, 2, 4, 6]
    assert step_of(out / "best/README.md") == max((2, 4), key=means.get)


def test_a_resume_knows_the_best_of_before(limited, scripted, tmp_path):
    assert main(limited(max_train_steps=4)) == 0
    out = tmp_path / "run"
    best = step_of(out / "best/README.md")
    assert main(limited(resume_from_checkpoint="latest")) == 0
    assert [row["step"] for row in rows(out)] == [1, 2, 3, 4, 5, 6]
    assert step_of(out / "best/README.md") == best


@pytest.mark.parametrize("limit", [None, 0.8])
def test_a_resume_with_a_limit_forgets_a_best_without_one(limit, limited, scripted, tmp_path, monkeypatch):
    """Whatever scored best before was never asked what it keeps; the scores fall."""
    scores = itertools.count(0, -1)
    monkeypatch.setattr("train_silentbad.best_score", lambda *_: next(scores))
    first = {"validation.keep": None, "save_best": True, "validation.unrelated_images": 2}
    assert main(limited(**{**first, "validation.steps": 2}, max_train_steps=2)) == 0
    out = tmp_path / "run"
    assert step_of(out / "best/README.md") == 0
    again = {"validation.keep": limit, "resume_from_checkpoint": "latest", "validation.steps": 2}
    assert main(limited(**{**first, **again}, max_train_steps=4)) == 0
    assert (step_of(out / "best/README.md") > 0) == (limit is not None)


def test_without_a_limit_nothing_stops_and_unrelated_prompts_are_drawn_twice(limited, tmp_path):
    assert main(limited(max_train_steps=4, learning_rate=0.05, **{"validation.keep": None})) == 0
    record = Record.load(tmp_path / "run/validation.json")
    assert [entry.step for entry in record.history if entry.raw.kept] == [0, 4]
    assert record.history[-1].raw.kept.size["mid"].norm > 0 and not (tmp_path / "run/best").exists()
    assert len(record.unrelated) == 2 and len([*(tmp_path / "run/samples/unrelated").iterdir()]) == 4


def test_the_averaged_weights_decide_where_there_are_some(tmp_path):
    from diffusers.training_utils import EMAModel

    pipe = tiny_pipeline()
    ema = EMAModel(pipe.unet.parameters())
    hook = make_hook(tmp_path, pipe, keep=0.9, keep_by="pixels", unrelated_images=2)
    hook.run(0, 0, pipe.unet)
    assert not hook.keeps() and hook.stops() is None, "the base itself"
    hook.run(5, 1, shifted(pipe.unet, 0.1), ema)
    entry = hook.history[-1]
    assert entry.raw.kept.change["pixels"] > 0.1 > entry.ema.kept.change["pixels"]
    assert hook.keeps() and hook.stops() is None
    hook.run(10, 2, pipe.unet)
    assert not hook.keeps() and "less than keep 0.9" in hook.stops()
    again = make_hook(tmp_path, pipe, keep=0.9, keep_by="pixels", unrelated_images=2)
    again.load_state_dict(json.loads(json.dumps(hook.state_dict())))
    assert again.stops() == hook.stops()


@pytest.mark.parametrize(
    "by, why", [("bleeding", "no element has a mask"), ("size", "the base.s weights cannot be read")]
)
def test_a_limit_by_what_is_not_measured_is_refused(by, why, tmp_path):
    targets = [replace(target, masks=[None] * len(target.phrases)) for target in some_targets()]
    hook = make_hook(tmp_path, targets=targets, keep=0.9, keep_by=by, unrelated_images=2)
    hook.measure.base = None
    with pytest.raises(UserError, match=f"^validation.keep: {why}"):
        hook.run(0, 0, tiny_pipeline().unet)


def test_no_limit_of_a_configuration_without_one():
    assert Limit.of(ValidationConfig()) is None
    assert Limit.of(ValidationConfig(keep=0.5, judge="a.py:b")) == Limit(0.5, "words")


def test_a_judge_is_recorded_and_another_is_refused_on_resume(limited, tmp_path, capsys):
    judge = tmp_path / "mine.py"
    judge.write_text("def right(captions, images): return [(1, 2)] * len(captions)\n")
    options = {"validation.judge": f"{judge}:right", "max_train_steps": 2}
    assert main(limited(**options)) == 0
    out = tmp_path / "run"
    entry = json.loads((out / "run.json").read_text())["own_code"][f"{judge}:right"]
    assert entry == {"file": str(judge), "sha256": hashlib.sha256(judge.read_bytes()).hexdigest()}
    words = Record.load(out / "validation.json").history[-1].raw.kept.words
    assert (words.trained, words.base, words.by, words.named) == (0.5, 0.5, "mine.py:right", 4)
    assert "Kept: things right 0.50 (base 0.50), of 4" in capsys.readouterr().out
    for page in (out / "report.html", out / "pipeline/README.md"):
        assert "Kept: things right 0.50 (base 0.50), of 4" in page.read_text()
    judge.write_text("def right(captions, images): return [(2, 2)] * len(captions)\n")
    assert main(limited(**options | {"max_train_steps": 4, "resume_from_checkpoint": "latest"})) == 2
    assert "mine.py:right" in capsys.readouterr().err
