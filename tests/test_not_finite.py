"""What is not finite ends a training or an audit in one line that says what it is of."""

import re
import shutil

import pytest
import torch

import train_silentbad
from silentbad.errors import UserError
from silentbad.measure.generation import Sampler, plan
from tests.mistakes import WEIGHTS, tensors
from tests.recoveries import make_hook, some_targets
from tests.tiny import tiny_pipeline
from tests.training import VALIDATION
from validation import RecoveryHook, ValidationConfig

NAN = float("nan")


def test_images_of_a_diverged_model_end_a_training(tmp_path):
    """The line names step and target; the measurements before it stay."""
    hook, pipe = make_hook(tmp_path, threshold=0.5), tiny_pipeline()
    hook.run(0, 0, pipe.unet)
    before = (tmp_path / "validation.json").read_bytes()
    with torch.no_grad():
        next(pipe.unet.parameters()).fill_(NAN)
    said = "^validation at step 7: 6 of 6 images are not finite, .* \\(composed, t0\\); lower learning_rate$"
    with pytest.raises(UserError, match=said):
        hook.run(7, 1, pipe.unet)
    hook.sampler.precision = "bfloat16"
    assert "lower learning_rate or leave bfloat16 (mixed_precision no)" in str(hook.sampler.not_finite("x"))
    assert (tmp_path / "validation.json").read_bytes() == before and len(hook.history) == 1


def test_a_diverged_run_ends_and_its_checkpoints_stay(flags, data, tmp_path, monkeypatch, capsys):
    measure = RecoveryHook.run

    def diverged(hook, step, epoch, unet, *more, **named):
        if step == 3:
            with torch.no_grad():
                next(unet.parameters()).fill_(NAN)
        return measure(hook, step, epoch, unet, *more, **named)

    monkeypatch.setattr(RecoveryHook, "run", diverged)
    settings = VALIDATION | {"validation.targets": data / "targets.jsonl", "validation.steps": 3}
    assert train_silentbad.main(flags(max_train_steps=4, checkpointing_steps=2, **settings)) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: validation at step 3: ") and last.endswith("; lower learning_rate")
    assert [p.name for p in (tmp_path / "run/checkpoints").iterdir()] == ["step-2"]


@pytest.mark.parametrize("caches", [{"disk_cache_gb": 0, "cache_mb": 0}, {}], ids=["live", "cached"])
def test_an_autoencoder_that_overflows_is_named(caches, flags, pipelines, tmp_path, capsys):
    base = shutil.copytree(pipelines["v_prediction"], tmp_path / "pipeline")

    def large(held: dict) -> None:
        held["encoder.conv_out.weight"] *= 1e30
        held["quant_conv.weight"] *= 1e30

    tensors(WEIGHTS["vae"], large)(tmp_path)
    assert train_silentbad.main(flags(pretrained_model_name_or_path=base, max_nonfinite_steps=1, **caches)) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.match(r"error: vae: \S*metadata.jsonl:\d+ gives values that are not finite", line)


def test_an_error_that_is_not_finite_ends_a_training(tmp_path, monkeypatch):
    hook, pipe = make_hook(tmp_path, threshold=0.5), tiny_pipeline()
    monkeypatch.setattr(hook.sampler, "eps_errors", lambda records, places, address: [NAN for _ in places])
    with pytest.raises(UserError, match="^validation at step 0: the error on held-out clean records is not finite"):
        hook.run(0, 0, pipe.unet)


def test_an_audit_refuses_images_that_are_not_finite(tmp_path):
    pipe = tiny_pipeline()
    sampler = Sampler(pipe.components, ValidationConfig(num_inference_steps=1), 0, refuses="--pipeline here")
    with torch.no_grad():
        next(pipe.vae.decoder.parameters()).fill_(NAN)
    with (
        sampler.using(pipe.unet, torch.device("cpu")),
        pytest.raises(UserError, match="^--pipeline here: 2 of 2 images are not finite"),
    ):
        sampler.generate(plan(some_targets(1), 2, 0))


def test_a_similarity_that_is_not_finite_ends_a_validation(tmp_path, monkeypatch):
    hook = make_hook(tmp_path, threshold=0.5)
    monkeypatch.setattr(hook.embedder, "paired", lambda a, b: torch.full((len(a),), NAN))
    with pytest.raises(UserError, match="similarity to target 't0' is not finite"):
        hook.run(0, 0, tiny_pipeline().unet)
