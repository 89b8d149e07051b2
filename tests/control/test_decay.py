"""Decay to the base: its formula, and that a resume knows the base."""

import pytest
import torch
from safetensors.torch import load_file

from silentbad.control.decay import DecayToBase
from train_silentbad import main


def test_each_group_decays_by_its_rate_to_what_it_was():
    weights = [torch.nn.Parameter(torch.full((2,), value)) for value in (1.0, 3.0)]
    groups = [{"params": [weight], "lr": lr} for weight, lr in zip(weights, (0.1, 0.01), strict=True)]
    optimizer = torch.optim.SGD(groups)
    decay = DecayToBase(optimizer, 2.0)
    with torch.no_grad():
        for weight in weights:
            weight += 1.0
    decay.after_step(1, skipped=True)
    assert weights[0].tolist() == [2.0, 2.0]
    decay.after_step(1)
    torch.testing.assert_close(weights[0].data, torch.full((2,), 2.0 - 0.1 * 2))
    torch.testing.assert_close(weights[1].data, torch.full((2,), 4.0 - 0.01 * 2))
    optimizer.param_groups[0]["lr"] = 0.9  # of 1.8 the whole way and no further
    decay.after_step(2)
    torch.testing.assert_close(weights[0].data, torch.ones(2))


@pytest.mark.parametrize("lora", [{}, {"lora.rank": 2}], ids=["weights", "adapters"])
def test_a_resume_decays_to_the_base_and_not_to_its_checkpoint(lora, flags, tmp_path):
    settings = {"learning_rate": 1e-2, "checkpointing_steps": 2, **lora}
    whole = tmp_path / "whole"
    assert main(flags(output_dir=whole, decay_to_base=50.0, max_train_steps=4, **settings)) == 0
    parts = tmp_path / "parts"
    assert main(flags(output_dir=parts, decay_to_base=50.0, max_train_steps=2, **settings)) == 0
    more = {"max_train_steps": 4, "resume_from_checkpoint": "latest"}
    assert main(flags(output_dir=parts, decay_to_base=50.0, **settings, **more)) == 0
    kept = "lora/pytorch_lora_weights.safetensors" if lora else "pipeline/unet/*.safetensors"
    files = [next(run.glob(kept)) for run in (whole, parts)]
    weights, resumed = map(load_file, files)
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
