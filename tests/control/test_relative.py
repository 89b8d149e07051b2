"""The relative unit: its ratio, that it follows the size of a weight, what an adapter moves; and the meter."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from silentbad.control.relative import FLOOR, RelativeChange, RelativeRate, Weight, weights_of
from silentbad.control.spectral import SpectralAdamW, split
from silentbad.model import lora
from silentbad.settings.train import LoraSettings
from tests.tiny import tiny_unet
from tests.training import checked, rows, step_once, weights
from train_silentbad import UserError, main

RATE = 1e-2


def adamw(model: nn.Module, decay: float) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=RATE, weight_decay=decay)


def spectral(model: nn.Module, decay: float) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return SpectralAdamW(split([{"params": trained, "name": "all"}], model), lr=RATE, weight_decay=decay)


OPTIMIZERS = {"AdamW": adamw, "spectral": spectral}


def unet_of(kind: str | None) -> nn.Module:
    torch.manual_seed(0)
    unet = tiny_unet()
    if kind is not None:
        lora.add("unet", unet, LoraSettings(rank=4, kind=kind, targets=["attn", "xattn", "resnet"]), 0)
    return unet


def set_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.randn(p.shape, generator=generator)


def ratios(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> list[float]:
    """RMS of the next update over RMS of each weight, in double precision."""
    moving = weights_of(model)
    before = [weight.value().double().clone() for weight in moving]
    size = [max(float(weight.tensor.detach().double().square().mean().sqrt()), FLOOR) for weight in moving]
    set_gradients(model, seed)
    optimizer.step()
    moved = [(weight.value() - old).square().mean().sqrt() for weight, old in zip(moving, before, strict=True)]
    return [float(rms) / of for rms, of in zip(moved, size, strict=True)]


@pytest.mark.parametrize("kind", [None, "lora", "dora", "lokr"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_update_has_the_asked_ratio(name, kind):
    """The first and the third: AdamW's own updates differ in size between them, and an adapter's B begins as zeros."""
    unet = unet_of(kind)
    optimizer = OPTIMIZERS[name](unet, 0.0)
    RelativeRate(unet, optimizer)
    for seed in (1, 2, 3):
        assert ratios(unet, optimizer, seed) == pytest.approx([RATE] * len(weights_of(unet)), rel=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_four_times_the_weights_move_four_times_as_far(name):
    changes = []
    for scale in (1.0, 4.0):
        unet = unet_of(None)
        layer = unet.mid_block.resnets[0].conv1
        with torch.no_grad():
            layer.weight *= scale
        optimizer = OPTIMIZERS[name](unet, 0.0)
        RelativeRate(unet, optimizer)
        before = {name: p.detach().clone() for name, p in unet.named_parameters()}
        set_gradients(unet, 1)
        optimizer.step()
        changes.append({name: p.detach() - before[name] for name, p in unet.named_parameters()})
    for name, one, other in ((name, changes[0][name], changes[1][name]) for name in changes[0]):
        scale = 4.0 if name == "mid_block.resnets.0.conv1.weight" else 1.0
        torch.testing.assert_close(other, scale * one, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("skipped", [0.0, 1.0])
def test_an_update_that_the_scaler_skips_decays_nothing(skipped):
    weight = nn.Parameter(torch.full((4, 4), 2.0))
    optimizer = torch.optim.AdamW([weight], lr=RATE, weight_decay=0.5, fused=True)
    RelativeRate(nn.ParameterList([weight]), optimizer)
    weight.grad = torch.full((4, 4), torch.inf if skipped else 1.0)
    optimizer.found_inf = torch.tensor(skipped)
    optimizer.step()
    left = 2.0 if skipped else 2.0 * (1 - RATE - 0.5 * RATE)
    torch.testing.assert_close(weight.data, torch.full((4, 4), left))


def test_a_weight_of_zeros_moves_and_one_without_a_gradient_only_decays():
    weights = [nn.Parameter(torch.zeros(40, 40)), nn.Parameter(torch.full((5,), 2.0))]
    model = nn.ParameterList(weights)
    optimizer = torch.optim.AdamW(weights, lr=RATE, weight_decay=0.5)
    RelativeRate(model, optimizer)
    weights[0].grad = torch.randn(40, 40, generator=torch.Generator().manual_seed(0))
    weights[1].grad = torch.zeros(5)
    optimizer.step()
    assert float(weights[0].detach().square().mean().sqrt()) == pytest.approx(RATE * FLOOR, rel=1e-5)
    torch.testing.assert_close(weights[1].data, torch.full((5,), 2.0 * (1 - 0.5 * RATE)))
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


@pytest.mark.parametrize(
    "changes",
    [{}, {"gradient_control.spectral": True}, {"lora.rank": 2}, {"gradient_control.name": "experiments/gsnr.py:gsnr"}],
    ids=["weights", "spectral", "adapters", "rates by layer"],
)
def test_a_run_of_it_resumes_to_the_bit(changes, flags, tmp_path):
    settings = {
        "learning_rate_unit": "relative",
        "learning_rate": 1e-2,
        "lr_scheduler": "cosine",
        "decay_to_base": 1.0,
        "max_train_steps": 4,
        "checkpointing_steps": 2,
        "log_every": 1,
        **changes,
    }
    whole, again = tmp_path / "whole", tmp_path / "again"
    assert main(flags(output_dir=whole, **settings)) == 0
    assert main(flags(output_dir=again, resume_from_checkpoint=whole / "checkpoints/step-2", **settings)) == 0
    kept = "lora/pytorch_lora_weights.safetensors" if "lora.rank" in changes else "pipeline/unet/*.safetensors"
    ends = [load_file(next(run.glob(kept))) for run in (whole, again)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    last, resumed = (rows(run)[-1] for run in (whole, again))
    changed = [name for name in last if "change/" in name]
    assert changed and all(last[name] == resumed[name] for name in changed)


def test_the_schedule_and_a_rules_multipliers_scale_the_ratio(build):
    run = build(
        learning_rate_unit="relative",
        adam_weight_decay=0,
        **{"gradient_control.name": "experiments/prior.py:prior", "gradient_control.warmup": 0},
    )
    name = run.control.groups.names[0]
    run.control.multipliers[name] = 2.0
    before = weights(run)
    step_once(run)
    after = weights(run)
    doubled = set(run.control.groups.members[name])
    for tensor, old in before.items():
        size = max(float(old.double().square().mean().sqrt()), FLOOR)
        ratio = float((after[tensor].double() - old).square().mean().sqrt()) / size
        factor = 2.0 if any(member.endswith(tensor) for member in doubled) else 1.0
        assert ratio == pytest.approx(1e-3 * factor, rel=1e-3) or ratio == 0, tensor


@pytest.mark.parametrize("name", ["sd15_full", "sd15_lora", "sd21_full", "sdxl_lora", "sd3"])
def test_the_configurations_of_stable_diffusion_take_the_unit(name, data, pipelines):
    file = Path(__file__).parents[2] / "configs" / f"{name}.yaml"
    base = pipelines["sd3" if name == "sd3" else "v_prediction"]
    argv = ["--config", str(file), "--train_data_dir", str(data), "--pretrained_model_name_or_path", str(base)]
    argv += ["--validation.targets", str(data / "targets.jsonl"), "--validation.embedder", "ssim"]
    assert checked([*argv, "--learning_rate_unit", "relative"]).learning_rate_unit == "relative"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"learning_rate_unit": "relativ"}, "learning_rate_unit .*must be absolute or relative, got 'relativ'"),
        (
            {"learning_rate_unit": "relative", "optimizer": "SGD"},
            "learning_rate_unit .*is for optimizer AdamW, not for optimizer SGD",
        ),
        ({"learning_rate_unit": "relative", "learning_rate": 0}, "learning_rate"),
    ],
)
def test_what_it_cannot_act_on_is_one_line(flags, changes, message):
    with pytest.raises(UserError, match=message):
        checked(flags(**changes))


# ---------------------------------------------------------------- the meter
def test_the_meter_reads_the_change_so_far_and_of_the_last_update():
    linear = nn.Linear(8, 8)
    model = nn.ModuleDict({"mid_block": nn.ModuleDict({"ff": linear}), "conv_in": nn.Linear(3, 3)})
    start = [p.detach().clone() for p in linear.parameters()]
    meter = RelativeChange(model, every=10, total=25)
    for step in range(10):
        meter.before_step(step)
        with torch.no_grad():
            linear.weight += 0.1
    norm = math.sqrt(sum(float(p.square().sum()) for p in start))
    row = meter.meters()
    assert set(row) == {"change/mid", "step_change/mid", "change/stem", "step_change/stem"}
    assert float(row["change/mid"]) == pytest.approx(math.sqrt(64 * 1.0**2) / norm, rel=1e-4)
    assert float(row["step_change/mid"]) == pytest.approx(math.sqrt(64 * 0.1**2) / norm, rel=1e-4)
    assert float(row["change/stem"]) == 0.0


def test_a_sample_of_a_large_weight_tells_its_change():
    weight = nn.Parameter(torch.randn(500, 300, generator=torch.Generator().manual_seed(1)))
    model = nn.ModuleDict({"conv_in": nn.ParameterDict({"weight": weight})})
    meter = RelativeChange(model, every=1, total=1)
    with torch.no_grad():
        before = weight.clone()
        weight += torch.randn(500, 300, generator=torch.Generator().manual_seed(0))
        exact = float((weight - before).norm() / before.norm())
    assert float(meter.meters()["change/stem"]) == pytest.approx(exact, rel=0.05)


def test_of_an_adapter_the_change_is_its_products():
    unet = unet_of("lora")
    meter = RelativeChange(unet, every=1, total=1)
    adapted: list[Weight] = [weight for weight in weights_of(unet) if weight.stage == "mid"]
    with torch.no_grad():
        for weight in adapted:
            for factor in weight.factors:
                factor += 0.01
    change, frozen = ([f(w).norm() ** 2 for w in adapted] for f in (lambda w: w.value(), lambda w: w.tensor.detach()))
    exact = float((sum(change) / sum(frozen)) ** 0.5)
    assert float(meter.meters()["change/mid"]) == pytest.approx(exact, rel=0.02)


def test_every_run_says_how_far_its_weights_moved(flags, tmp_path):
    assert main(flags("run", max_train_steps=3, log_every=2)) == 0
    logged = rows(tmp_path / "run")
    assert [row["step"] for row in logged] == [2, 3]
    assert all(0 < row["step_change/mid"] < row["change/mid"] < 1 for row in logged)
