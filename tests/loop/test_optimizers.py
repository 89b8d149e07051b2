"""Optimizers by name, groups without decay, the norm of a gradient, the weights an averaging optimizer measures."""

import math
from pathlib import Path

import pytest
import torch

from silentbad.errors import UserError
from silentbad.loop import optimizers
from silentbad.model.averaging import averaged
from silentbad.model.groups import group_of
from silentbad.saving import checkpoint
from tests.toy import GSNR, PRIOR
from tests.training import VALIDATION, checked, rows, same, step_once, weights
from train_silentbad import Config, main

SHRUNK = "experiments.shrinkage.ShrunkAdamW"
EXTRAS = {"schedulefree.AdamWScheduleFree": {}, "prodigyopt.Prodigy": {"learning_rate": 1.0}, SHRUNK: {}}
OWN = ("spectral", SHRUNK)  # updates of our own


def extra(path: str) -> dict:
    """Settings of an optional optimizer, or a skip where its package is not installed."""
    if path == "spectral":
        return {"gradient_control.spectral": True}
    package = path.split(".")[0]
    pytest.importorskip(package, reason=f"pip install {package}")
    return {"optimizer": path, **EXTRAS[path]}


# ---------------------------------------------------------------- the norm


def test_the_norm_equals_torchs():
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(n)) for n in (3, 50, 7)]
    for p in parameters[:2]:
        p.grad = torch.randn_like(p)
    norms = optimizers.gradient_norms(parameters)
    assert norms.shape == (3,) and norms[2] == 0
    expected = torch.nn.utils.get_total_norm([p.grad for p in parameters[:2]])
    torch.testing.assert_close(torch.linalg.vector_norm(norms), expected)


def test_gradients_below_the_limit_are_left_alone(build, monkeypatch):
    run, clipped = build(), []
    clip = torch.nn.utils.clip_grads_with_norm_
    monkeypatch.setattr(
        torch.nn.utils,
        "clip_grads_with_norm_",
        lambda parameters, limit, *more, **named: clipped.append(limit) or clip(parameters, limit, *more, **named),
    )
    for run.config.max_grad_norm in (1e6, 1e-6):
        step_once(run)
    assert clipped == [1e-6]


@pytest.mark.parametrize(
    "changes, passes",
    [
        ({}, 1),
        ({"gradient_control.name": GSNR}, 1),
        ({"gradient_control.name": "mean_abs", "gradient_control.apply": "gradient"}, 2),
    ],
    ids=["uniform", "gsnr", "gradients scaled"],
)
def test_a_step_passes_over_the_gradients_once_for_their_norm(build, monkeypatch, changes, passes):
    run, counted, norm = build(**changes), [], torch._foreach_norm
    run.control.config.refresh = 10**6  # a refresh takes the norms of the weights too

    def count(tensors, *arguments, **keywords):
        counted.append(len(tensors))
        return norm(tensors, *arguments, **keywords)

    monkeypatch.setattr(torch, "_foreach_norm", count)
    step_once(run)
    assert len(counted) == passes


# ---------------------------------------------------------------- by name and by import path


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"optimizer": "AdmW"}, "no torch optimizer"),
        ({"optimizer": "nowhere.Adam"}, "no module named nowhere; a class in a file of your own is nowhere.py:Adam"),
        ({"optimizer": "os.path"}, "no torch optimizer"),
        ({"optimizer_options": {"betta": 1}}, "takes no 'betta'"),
        ({"optimizer_options": {"amsgrad": "maybe"}}, "optimizer_options: amsgrad must be bool, got 'maybe'"),
        (
            {"gradient_control.spectral": True, "optimizer_options": {"iteration": "polar"}},
            "iteration must be newton_schulz, newton_schulz_3 or polar_express, got 'polar'",
        ),
    ],
    ids=str,
)
def test_what_is_no_optimizer_is_one_line(flags, changes, message):
    options = changes.pop("optimizer_options", {})
    argv = flags(**changes, **{f"optimizer_options.{key}": value for key, value in options.items()})
    with pytest.raises(UserError, match=message):
        checked(argv)


class Untyped(torch.optim.SGD):
    """Looks at `power` when it steps, and says nothing about its type."""

    def __init__(self, params, lr, power=1):
        super().__init__(params, lr)
        self.power = power

    def step(self, closure=None):
        torch.zeros(2) ** self.power
        super().step()


def test_what_an_optimizer_looks_at_in_its_step_is_one_line():
    config = Config(optimizer=f"{__name__}.Untyped", optimizer_options={"power": {"a": 1}})
    groups = [{"params": [torch.nn.Parameter(torch.ones(3))]}]
    with pytest.raises(UserError, match="optimizer: Untyped does not take these"):
        optimizers.make_optimizer(groups, config, 1.0)
    config.optimizer_options = {"power": 2}
    assert optimizers.make_optimizer(groups, config, 1.0).power == 2


def test_options_and_flags_reach_the_optimizer(build):
    run = build(optimizer="SGD", adam_weight_decay=0.5, **{"optimizer_options.momentum": 0.9})
    group = run.state.optimizer.param_groups[0]
    assert (group["momentum"], group["weight_decay"], group["lr"]) == (0.9, 0.5, 1e-3)
    step_once(run)


@pytest.mark.parametrize("path", ["spectral", *EXTRAS])
def test_an_optional_optimizer_resumes_to_the_bit(path, flags, data, tmp_path):
    changes = {
        "max_train_steps": 4,
        "checkpointing_steps": 2,
        "checkpoints_total_limit": None,
        **extra(path),
        **VALIDATION,
        "validation.targets": data / "targets.jsonl",
    }
    assert main(flags("whole", **changes)) == 0
    assert all(math.isfinite(row["loss"]) for row in rows(tmp_path / "whole"))
    resumed = tmp_path / "whole/checkpoints/step-2"
    assert main(flags("cut", **changes, resume_from_checkpoint=resumed)) == 0
    ends = [checkpoint.read_tensors(tmp_path / out / "checkpoints/step-4/unet.safetensors") for out in ("whole", "cut")]
    assert same(*ends)


def test_each_kind_of_weight_has_its_update(build):
    """Matrices and kernels move by about the learning rate in all their directions, the rest as under AdamW."""
    run = build(**extra("spectral"), adam_weight_decay=0)
    before = weights(run)
    step_once(run)
    moved = {name: (weight - before[name]).flatten(1) for name, weight in weights(run).items() if weight.ndim >= 2}
    for name, change in moved.items():
        if change.any():
            values = torch.linalg.svdvals(change) / (1e-3 * 0.2 * max(change.shape) ** 0.5)
            assert float(values[0]) == pytest.approx(1.0, abs=0.3), name
    groups = run.state.optimizer.param_groups
    assert {p.ndim < 2 for group in groups if not group["spectral"] for p in group["params"]} == {True}


def test_layers_left_out_of_spectral_updates_have_adamw(build):
    run = build(**extra("spectral"), **{"gradient_control.spectral_except": '["time","proj"]'})
    spectral = {id(p) for group in run.state.optimizer.param_groups if group["spectral"] for p in group["params"]}
    names = {group_of(name).split(".")[1] for name, p in run.state.model.named_parameters() if id(p) in spectral}
    assert {"xattn", "resnet"} <= names and not names & {"time", "proj", "norm"}


def test_adapters_have_spectral_updates_too(build):
    run = build(**extra("spectral"), **{"lora.rank": 2})
    before = weights(run)
    step_once(run)
    moved = [name for name, weight in weights(run).items() if not torch.equal(weight, before[name])]
    assert moved and all("lora" in name for name in moved)


def test_schedule_free_is_measured_and_saved_at_its_average(build, tmp_path):
    run = build(**extra("schedulefree.AdamWScheduleFree"))
    for _ in range(3):
        step_once(run)
    trained = weights(run)
    with averaged(run.state.model, optimizer=run.state.optimizer):
        average = weights(run)
    assert not same(trained, average) and same(trained, weights(run))
    run.products.save_pipeline(tmp_path / "saved")
    saved = next((Path(tmp_path) / "saved" / "unet").glob("*.safetensors"))
    assert same(checkpoint.read_tensors(saved), average) and same(trained, weights(run))
    step_once(run)  # back in training mode


def test_only_uniform_takes_a_rate_adapting_optimizer(flags, capsys):
    changes = extra("prodigyopt.Prodigy")
    assert main(flags(**changes, **{"gradient_control.name": GSNR})) == 2
    assert "Prodigy" in capsys.readouterr().err
    assert main(flags(**changes, max_train_steps=1)) == 0


@pytest.mark.parametrize("update", OWN)
def test_multipliers_reach_an_update_of_our_own(update, build):
    run = build(**extra(update), **{"gradient_control.name": PRIOR, "gradient_control.warmup": 0})
    assert type(run.state.optimizer.optimizer).__name__ in ("SpectralAdamW", "ShrunkAdamW")
    name = run.control.groups.names[0]
    run.control.multipliers[name] = 2.0
    run.control.before_step(0)
    assert {group["lr"] for group in run.state.optimizer.param_groups if group["name"] == name} == {2e-3}
    step_once(run)


def test_a_flag_that_means_another_thing_there_is_not_passed():
    """Adafactor's eps is a pair, of other things than Adam's."""
    config = Config(optimizer="Adafactor", adam_epsilon=1e-5)
    optimizer = optimizers.make_optimizer([{"params": [torch.nn.Parameter(torch.ones(2, 2))]}], config, 1.0)
    assert optimizer.defaults["eps"] == (None, 0.001)
