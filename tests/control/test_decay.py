"""Decay to the base: its formula, and that a resume knows the base."""

import pytest
import torch
from safetensors.torch import load_file

from silentbad.control.decay import DecayToBase
from train_silentbad import main


def test_weights_decay_to_what_they_were_by_the_schedule():
    weights = [torch.nn.Parameter(torch.full((2,), value)) for value in (1.0, 3.0)]
    groups = [{"params": [weight], "lr": lr} for weight, lr in zip(weights, (0.1, 0.01), strict=True)]
    optimizer = torch.optim.SGD(groups)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step == 0 else 0.5)
    decay = DecayToBase(optimizer, 0.2)
    with torch.no_grad():
        for weight in weights:
            weight += 1.0
    decay.after_step(1, skipped=True)
    assert weights[0].tolist() == [2.0, 2.0]
    decay.after_step(1)
    torch.testing.assert_close(weights[0].data, torch.full((2,), 1.8))
    torch.testing.assert_close(weights[1].data, torch.full((2,), 3.8))
    optimizer.step()
    scheduler.step()
    decay.after_step(2)
    torch.testing.assert_close(weights[0].data, torch.full((2,), 1.8 - 0.1 * 0.8))


@pytest.mark.parametrize("lora", [{}, {"lora.rank": 2}], ids=["weights", "adapters"])
def test_a_resume_decays_to_the_base_and_not_to_its_checkpoint(lora, flags, tmp_path):
    settings = {"learning_rate": 1e-2, "max_train_steps": 4, "checkpointing_steps": 2, "decay_to_base": 1.0, **lora}
    whole = tmp_path / "whole"
    assert main(flags(output_dir=whole, **settings)) == 0
    half = whole / "checkpoints/step-2"
    assert main(flags(output_dir=tmp_path / "again", resume_from_checkpoint=half, **settings)) == 0
    kept = "lora/pytorch_lora_weights.safetensors" if lora else "pipeline/unet/*.safetensors"
    weights, resumed = (load_file(next(run.glob(kept))) for run in (whole, tmp_path / "again"))
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
