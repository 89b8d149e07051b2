"""Memory that runs out, of the device or of this machine: fewer at once, or one line with what helps."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

import validation
from silentbad.device import in_batches
from silentbad.errors import say_no_memory
from silentbad.localise import __main__ as localise
from silentbad.loop import prior
from silentbad.measure.generation import Sampler
from silentbad.model import pipeline
from silentbad.model.encoder import Encoder
from silentbad_shield.search import unknown
from tests.training import VALIDATION
from train_silentbad import main

ERRORS = {
    "device": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."),
    "context": RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ..."),
    "machine": RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you ..."),
    "Python": MemoryError(),
}
EACH = pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
DEVICE = ERRORS["device"]


def runs_out(error, *arguments, **named):
    raise error


def beyond(limit: int, usual, error=DEVICE):
    """`usual`, whose first argument may hold so many items."""

    def work(items, *more):
        if len(items) > limit:
            raise error
        return usual(items, *more)

    return work


def line_of(capsys) -> str:
    """The one line of a command, after warnings and progress."""
    *before, last = capsys.readouterr().err.splitlines()
    assert not any("Traceback" in line or line.startswith("error") for line in before)
    return last


def test_a_batch_is_halved_until_it_fits():
    sizes = []
    results = list(in_batches(list(range(10)), 8, beyond(3, sum), sizes.append))
    assert sizes == [4, 2] and results == [([i, i + 1], 2 * i + 1) for i in range(0, 10, 2)]
    with pytest.raises(RuntimeError, match="out of memory"):
        list(in_batches([1], 8, beyond(0, sum)))


# ---------------------------------------------------------------- training
@pytest.mark.parametrize("place, name", [("update", "device"), *(("build", name) for name in ERRORS)])
def test_models_and_updates(place, name, flags, monkeypatch, capsys):
    monkeypatch.setattr(f"train_silentbad.{place}", partial(runs_out, ERRORS[name]))
    assert main(flags(max_train_steps=1)) == 2
    line = line_of(capsys)
    assert line.startswith("error: pretrained_model_name_or_path (command line): memory ran out (")
    assert "; set lora.rank, train_layers, mixed_precision, use_8bit_adam, gradient_checkpointing" in line


SET = {"lora.rank": 2, "train_layers": '["up*"]', "mixed_precision": "bf16", "gradient_checkpointing": True}


@pytest.mark.parametrize(
    "changes, advice",
    [
        ({"lora.rank": 2}, "set train_layers, mixed_precision, gradient_checkpointing"),
        ({"use_8bit_adam": True, "train_layers": '["up*"]'}, "set lora.rank, mixed_precision, gradient_checkpointing"),
        ({"use_ema": True, **SET}, "set offload_ema"),
        (SET, "take a smaller base or a larger device"),
    ],
    ids=["adapters", "8-bit", "average", "all"],
)
def test_what_is_set_is_no_advice(changes, advice, flags, monkeypatch, capsys):
    monkeypatch.setattr("train_silentbad.build", partial(runs_out, DEVICE))
    assert main(flags(**changes)) == 2
    assert line_of(capsys).endswith(f"; {advice}")


@pytest.mark.parametrize(
    "changes, flag, advice",
    [
        ({"train_batch_size": 2}, "train_batch_size", "lower it, or set max_batch_size"),
        ({"train_batch_size": 1, "lora.rank": 2}, "resolution", "lower it, or set train_layers, mixed_precision"),
        ({"train_batch_size": 2, "max_batch_size": 1}, "resolution", "lower it, or set lora.rank"),
    ],
)
def test_a_step(changes, flag, advice, flags, monkeypatch, capsys):
    monkeypatch.setattr("train_silentbad.part_step", partial(runs_out, DEVICE))
    assert main(flags(**changes)) == 2
    line = line_of(capsys)
    assert line.startswith(f"error: {flag}") and f"; {advice}" in line


@pytest.mark.parametrize("method, flag", [("moments", "resolution"), ("states", "mixed_precision")])
@pytest.mark.parametrize("limit", [1, 0])
def test_caching_takes_what_fits(limit, method, flag, flags, tmp_path, monkeypatch, capsys):
    usual = getattr(Encoder, method)
    monkeypatch.setattr(Encoder, method, lambda self, x: beyond(limit, partial(usual, self))(x))
    assert main(flags(max_train_steps=1, cache_dir=tmp_path / "cache")) == (0 if limit else 2)
    if not limit:
        line = line_of(capsys)
        assert line.startswith(f"error: {flag}: memory ran out (CUDA out of memory.") and "half precision" in line


@pytest.mark.parametrize("method, flag", [("moments", "resolution"), ("states", "pretrained_model_name_or_path")])
def test_caching_in_half_precision(method, flag, flags, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Encoder, method, partial(runs_out, DEVICE))
    assert main(flags(mixed_precision="bf16", cache_dir=tmp_path / "cache")) == 2
    line = line_of(capsys)
    assert line.startswith(f"error: {flag}") and "half precision" not in line


@pytest.mark.parametrize("drawn", ["targets", "sample prompts", "prompts", "a dry run"])
def test_drawing_while_training(drawn, flags, data, tmp_path, monkeypatch, capsys):
    (tmp_path / "prompts.txt").write_text("a red cat\n")
    settings = {
        "targets": VALIDATION | {"validation.targets": data / "targets.jsonl"},
        "sample prompts": {"sample_prompts": tmp_path / "prompts.txt", "validation.num_inference_steps": 1},
        "prompts": {"validation_prompts": '["a red cat"]'},
        "a dry run": {"validation_prompts": '["a red cat"]', "dry_run": True},
    }[drawn]
    monkeypatch.setattr(Sampler, "generate", partial(runs_out, DEVICE))
    monkeypatch.setattr(pipeline, "draw_images", partial(runs_out, DEVICE))
    assert main(flags(max_train_steps=1, **settings)) == 2
    line = line_of(capsys)
    assert line.startswith("error: validation.resolution: memory ran out (") and line.endswith("(mixed_precision)")


# ---------------------------------------------------------------- the other commands
@EACH
@pytest.mark.parametrize("searches", [False, True], ids=["targets", "search"])
def test_an_audit(error, searches, data, pipelines, tmp_path, monkeypatch, capsys):
    (tmp_path / "phrases.txt").write_text("a cat\na hat\n")
    monkeypatch.setattr(Sampler, "generate", partial(runs_out, error))
    monkeypatch.setattr(unknown, "probed", partial(runs_out, error))
    asked = {"phrases": tmp_path / "phrases.txt"} if searches else {"targets": data / "targets.jsonl"}
    asked |= {"pipeline": pipelines["v_prediction"], "output_dir": tmp_path / "out", "embedder": "ssim"}
    main = unknown.main if searches else validation.main
    assert main([f"--{key}={value}" for key, value in asked.items()]) == 2
    line = line_of(capsys)
    assert line.startswith("error: --dtype: memory ran out (") and line.endswith(
        "; take bfloat16, or a lower --resolution"
    )


def test_an_audit_in_half_precision(data, pipelines, monkeypatch, capsys):
    monkeypatch.setattr(validation, "audit", partial(runs_out, DEVICE))
    asked = {"targets": data / "targets.jsonl", "pipeline": pipelines["v_prediction"], "dtype": "bfloat16"}
    assert validation.main([f"--{key}={value}" for key, value in asked.items()]) == 2
    line = line_of(capsys)
    assert line.startswith("error: --resolution: memory ran out (") and "; lower it, or take a " in line


@EACH
def test_localise(error, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(localise.Record, "load", lambda file, key: None)
    monkeypatch.setattr(localise, "Subject", partial(runs_out, error))
    given = SimpleNamespace(run=tmp_path, trained=None, images=16, base_key="--base")
    assert localise.main(options=given) == 2
    line = line_of(capsys)
    assert line.startswith("error: RUN: memory ran out (") and line.endswith("; take a machine with more memory")


@pytest.mark.parametrize("limit, name", [(2, "device"), *((0, name) for name in ERRORS)])
def test_the_base_s_own_pictures(limit, name, flags, tmp_path, monkeypatch, capsys):
    usual = prior.BaseSampler.generate
    monkeypatch.setattr(
        prior.BaseSampler,
        "generate",
        lambda sampler, items: beyond(limit, lambda items: usual(sampler, items), ERRORS[name])(items),
    )
    own = {"prior_preservation.num_images": 5, "prior_preservation.num_inference_steps": 1}
    code = main(flags(**own, cache_dir=tmp_path / "cache", max_train_steps=1))
    drawn = list((tmp_path / "cache").glob("silentbad/prior-*/*.png"))
    if limit:
        assert code == 0 and len(drawn) == 5
    else:
        line = line_of(capsys)
        assert code == 2 and not drawn
        assert line.startswith("error: prior_preservation.num_images (command line): memory ran out (")


@pytest.mark.parametrize(
    "name, advice", [("device", "a larger one"), ("context", "a larger one"), ("Python", "ulimit")]
)
def test_where_no_flag_is_to_blame(name, advice, capsys):
    say_no_memory(type(ERRORS[name]), ERRORS[name], None)
    line = line_of(capsys)
    assert line.startswith("error: memory ran out (") and advice in line
