"""Optimizers by name, groups without decay, the norm of a gradient, the weights an averaging optimizer measures."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gradient_control import Controller, GradientControlConfig
from silentbad import checkpoint, optimizers, shrinkage
from silentbad.config import parse
from silentbad.errors import UserError
from silentbad.shrinkage import ShrunkAdamW, gains, noise
from tests.test_train import VALIDATION, build, flags, main, rows, same, step_once, weights  # noqa: F401
from tests.tiny import tiny_unet
from train_silentbad import Config, check_all

EXTRAS = {"schedulefree.AdamWScheduleFree": {}, "prodigyopt.Prodigy": {"learning_rate": 1.0}}
SHRINK = {"gradient_control.shrink": True}


def extra(path: str) -> dict:
    """Settings of an optional optimizer, or a skip where its package is not installed."""
    if path == "shrink":
        return SHRINK
    package = path.split(".")[0]
    pytest.importorskip(package, reason=f"pip install {package}")
    return {"optimizer": path, **EXTRAS[path]}


# ---------------------------------------------------------------- groups


def test_groups_without_decay_cover_the_model_exactly_and_split_by_shape():
    unet = tiny_unet()
    groups = Controller(unet, GradientControlConfig(name="prior"), 0).param_groups(1e-2)
    split = optimizers.without_decay(groups)
    held = [p for group in split for p in group["params"]]
    assert len({id(p) for p in held}) == len(held) == len(list(unet.parameters()))
    assert all((group["weight_decay"] == 0) == (p.ndim < 2) for group in split for p in group["params"])
    assert {group["name"] for group in split} == {group["name"] for group in groups}


def test_norms_and_biases_keep_their_size_where_decay_leaves_them_out(build):  # noqa: F811
    for decays in (True, False):
        run = build(adam_weight_decay=1.0, decay_norms_and_biases=decays)
        before = weights(run)
        run.optimizer.optimizer.zero_grad()
        for p in run.parts.unet.parameters():
            p.grad = torch.zeros_like(p)
        run.optimizer.step()
        after = weights(run)
        assert torch.equal(before["conv_norm_out.weight"], after["conv_norm_out.weight"]) is not decays
        assert not torch.equal(before["conv_in.weight"], after["conv_in.weight"])


def test_multipliers_reach_both_halves_of_a_group(build):  # noqa: F811
    run = build(decay_norms_and_biases=False, **{"gradient_control.name": "prior", "gradient_control.warmup": 0})
    name = run.control.groups.names[0]
    run.control.multipliers[name] = 2.0
    run.control.before_step(0)
    halves = [group for group in run.optimizer.param_groups if group["name"] == name]
    assert [group["lr"] for group in halves] == [2e-3] * len(halves) and len(halves) == 2
    assert sorted(group["weight_decay"] for group in halves) == [0, 5e-3]
    run.control.after_step()


# ---------------------------------------------------------------- the norm


def test_the_norm_and_the_clip_equal_torchs():
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(n)) for n in (3, 50, 7)]
    for p in parameters[:2]:
        p.grad = torch.randn_like(p)
    twins = [torch.nn.Parameter(p.detach().clone()) for p in parameters[:2]]
    for p, twin in zip(parameters, twins, strict=False):
        twin.grad = p.grad.clone()
    norms = optimizers.gradient_norms(parameters)
    assert norms.shape == (3,) and norms[2] == 0
    optimizers.clip(parameters, 0.5, torch.linalg.vector_norm(norms))
    expected = torch.nn.utils.clip_grad_norm_(twins, 0.5)
    torch.testing.assert_close(torch.linalg.vector_norm(norms), expected)
    for p, twin in zip(parameters, twins, strict=False):
        torch.testing.assert_close(p.grad, twin.grad)


@pytest.mark.parametrize("changes, passes", [
    ({}, 1), ({"gradient_control.name": "gsnr"}, 1),
    ({"gradient_control.name": "mean_abs", "gradient_control.apply": "gradient"}, 2),
], ids=["uniform", "gsnr", "gradients scaled"])  # fmt: skip
def test_a_step_passes_over_the_gradients_once_for_their_norm(build, monkeypatch, changes, passes):  # noqa: F811
    run, counted, norm = build(**changes), [], torch._foreach_norm
    run.control.config.refresh = 10**6  # a refresh takes the norms of the weights too

    def count(tensors, *arguments, **keywords):
        counted.append(len(tensors))
        return norm(tensors, *arguments, **keywords)

    monkeypatch.setattr(torch, "_foreach_norm", count)
    step_once(run)
    assert len(counted) == passes


# ---------------------------------------------------------------- by name and by import path


@pytest.mark.parametrize("changes, message", [
    ({"optimizer": "AdmW"}, "no torch optimizer"), ({"optimizer": "nowhere.Adam"}, "pip install nowhere"),
    ({"optimizer": "os.path"}, "no torch optimizer"), ({"optimizer_options": {"betta": 1}}, "takes no 'betta'"),
    ({"optimizer": "SGD", "use_8bit_adam": True}, "excludes optimizer SGD"),
    ({"gradient_control.shrink": True, "optimizer": "SGD"}, "shrink: is for optimizer AdamW, not for optimizer SGD"),
    ({"gradient_control.shrink": True, "use_8bit_adam": True}, "shrink: is for optimizer AdamW, not for use_8bit_adam"),
    ({"gradient_control.shrink": True, "adam_beta1": 0}, "adam_beta1 0 averages nothing"),
], ids=str)  # fmt: skip
def test_what_is_no_optimizer_is_one_line(flags, changes, message):  # noqa: F811
    options = changes.pop("optimizer_options", {})
    argv = flags(**changes, **{f"optimizer_options.{key}": value for key, value in options.items()})
    config, sources = parse(Config, argv)
    with pytest.raises(UserError, match=message):
        check_all(config, sources)


def test_options_and_flags_reach_the_optimizer(build):  # noqa: F811
    run = build(optimizer="SGD", adam_weight_decay=0.5, **{"optimizer_options.momentum": 0.9})
    group = run.optimizer.param_groups[0]
    assert (group["momentum"], group["weight_decay"], group["lr"]) == (0.9, 0.5, 1e-3)
    step_once(run)


@pytest.mark.parametrize("path", [*EXTRAS, "shrink"])
def test_an_optional_optimizer_trains_validates_and_resumes_to_the_bit(path, flags, data, tmp_path):  # noqa: F811
    changes = {"max_train_steps": 4, "checkpointing_steps": 2, "checkpoints_total_limit": None, **extra(path),
               **VALIDATION, "validation.targets": data / "targets.jsonl"}  # fmt: skip
    assert main(flags("whole", **changes)) == 0
    assert all(math.isfinite(row["loss"]) for row in rows(tmp_path / "whole"))
    resumed = tmp_path / "whole/checkpoints/step-2"
    assert main(flags("cut", **changes, resume_from_checkpoint=resumed)) == 0
    ends = [checkpoint.read_tensors(tmp_path / out / "checkpoints/step-4/unet.safetensors") for out in ("whole", "cut")]
    assert same(*ends)


def test_schedule_free_is_measured_and_saved_at_its_average_and_trains_on_unchanged(build, tmp_path):  # noqa: F811
    run = build(**extra("schedulefree.AdamWScheduleFree"))
    for _ in range(3):
        step_once(run)
    trained = weights(run)
    with optimizers.measured(run.optimizer):
        average = weights(run)
    assert not same(trained, average) and same(trained, weights(run))
    run.save_pipeline(tmp_path / "saved")
    saved = next((Path(tmp_path) / "saved" / "unet").glob("*.safetensors"))
    assert same(checkpoint.read_tensors(saved), average) and same(trained, weights(run))
    step_once(run)  # back in training mode


def test_schedule_free_beside_an_average_is_refused(flags, capsys):  # noqa: F811
    assert main(flags(**extra("schedulefree.AdamWScheduleFree"), use_ema=True)) == 2
    assert "keeps an average" in capsys.readouterr().err


def test_a_rate_adapting_optimizer_is_refused_by_every_rule_but_uniform(flags, capsys):  # noqa: F811
    changes = extra("prodigyopt.Prodigy")
    assert main(flags(**changes, **{"gradient_control.name": "gsnr"})) == 2
    assert "Prodigy" in capsys.readouterr().err
    assert main(flags(**changes, max_train_steps=1)) == 0


# ---------------------------------------------------------------- shrunk updates


def steps(kind: type, gradients: list[torch.Tensor], **settings) -> list[torch.Tensor]:
    """Where a weight of zeros is after each of these gradients."""
    weight, places = torch.nn.Parameter(torch.zeros_like(gradients[0])), []
    optimizer = kind([weight], lr=1e-2, **{"weight_decay": 0.0, **settings})
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
        places.append(weight.detach().clone())
    return places


def test_a_shrunk_update_is_its_formula():
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(3, generator=generator, dtype=torch.float64) + 0.5 for _ in range(12)]
    places = steps(ShrunkAdamW, gradients, betas=(0.8, 0.9), weight_decay=0.1)
    for k in range(3):
        m = v = w = 0.0
        for t, gradient in enumerate(gradients, 1):
            g = float(gradient[k])
            m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
            mean, square = m / (1 - 0.8**t), v / (1 - 0.9**t)
            parts = [0.2 * 0.8**i for i in range(t)]
            rho = sum(x * x for x in parts) / sum(parts) ** 2  # the weights' own sums, not their closed form
            gain = 0.0 if t == 1 else min(max((1 - rho * square / mean**2) / (1 - rho), 0), 1)
            w -= 1e-2 * 0.1 * w + 1e-2 * gain * mean / (square**0.5 + 1e-8)
            assert float(places[t - 1][k]) == pytest.approx(w, rel=1e-6, abs=1e-12)


def test_shrinking_leaves_adamw_alone_where_there_is_no_noise():
    gradients = [torch.tensor([1.0, -3.0, 1e-3, 0.0])] * 20
    shrunk, plain = steps(ShrunkAdamW, gradients), steps(torch.optim.AdamW, gradients)
    assert not shrunk[0].any()  # one gradient tells nothing
    assert torch.allclose(shrunk[-1], plain[-1] - plain[0], rtol=1e-4)


@pytest.mark.parametrize("signal, walk", [(0.0, 0.55), (0.3, 0.85), (3.0, 1.05)])
def test_shrinking_halves_the_walk_of_noise_and_keeps_that_of_signal(signal, walk):
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(4096, generator=generator) + signal for _ in range(100)]
    shrunk, plain = (steps(kind, gradients)[-1].square().mean().sqrt() for kind in (ShrunkAdamW, torch.optim.AdamW))
    assert float(shrunk / plain) < walk
    assert signal < 1 or float(shrunk / plain) > 0.9


@pytest.mark.parametrize("signal, error", [(0.0, 0.5), (0.1, 0.75), (0.3, 1.5), (1.0, 1.5), (3.0, 1.5)])
def test_the_shrunk_mean_is_nearer_a_small_mean_and_never_much_further_from_a_large_one(signal, error):
    """Shrinking a weight by itself has its price where the mean is the size of the noise left in the average, 0.23
    sigma at beta1 0.9."""
    generator = torch.Generator().manual_seed(0)
    draws = signal + torch.randn(100, 8192, generator=generator)
    ages = 0.9 ** torch.arange(99.0, -1, -1)
    mean = ages / ages.sum() @ draws
    kept = gains([mean / draws.square().mean(0).sqrt()], [noise(0.9, 100)])[0]
    shrunk, plain = (float((estimate - signal).square().mean()) for estimate in (kept * mean, mean))
    assert shrunk / plain < error


def test_shrunk_updates_are_the_same_however_tensors_are_put_together(monkeypatch):
    sizes, seen = (5, 3, 9, 2), []
    for together, device in ((2**24, "cpu"), (8, "cuda")):
        monkeypatch.setattr(shrinkage, "TOGETHER", together)
        stand_ins = [SimpleNamespace(numel=lambda n=n: n, device=SimpleNamespace(type=device)) for n in sizes]
        seen.append([[p.numel() for p in batch] for batch in shrinkage.batches(stand_ins)])
    assert seen == [[[5], [3], [9], [2]], [[5, 3], [9], [2]]]
    generator = torch.Generator().manual_seed(0)
    weights = [[torch.nn.Parameter(torch.zeros(n)) for n in sizes] for _ in range(2)]
    apart, at_once = (ShrunkAdamW(one) for one in weights)
    for _ in range(4):
        for one, other in zip(*weights, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        apart.step()
        with torch.no_grad():
            at_once._update(at_once.param_groups[0], weights[1])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def test_multipliers_reach_a_shrunk_update(build):  # noqa: F811
    run = build(**SHRINK, **{"gradient_control.name": "prior", "gradient_control.warmup": 0})
    assert type(run.optimizer.optimizer) is ShrunkAdamW
    name = run.control.groups.names[0]
    run.control.multipliers[name] = 2.0
    run.control.before_step(0)
    assert [group["lr"] for group in run.optimizer.param_groups if group["name"] == name] == [2e-3]
    step_once(run)
