"""Some of the layers train: what is frozen stays the base's bit for bit and costs nothing."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file

from silentbad.model.groups import group_of
from silentbad.saving import checkpoint
from silentbad.settings.layers import chosen
from tests.toy import GSNR
from tests.training import equal, rows, same, step_once
from train_silentbad import main

UP = '["up*"]'
PARTS = {  # pipeline: (its backbone, patterns)
    "v_prediction": ("unet", ["up*"]),
    "xl": ("unet", ["*.resnet.*", "mid.attn"]),
    "sd3": ("transformer", ["block2", "block1.ff"]),
}
ALL_BUT = '["!sampler"]'


def last_checkpoint(run: Path) -> Path:
    return checkpoint.latest(run / "checkpoints")


@pytest.mark.parametrize(
    "patterns, named, others",
    [
        (["up*"], ["up0.ff", "up1.xattn.v"], ["down0.ff", "mid.resnet.conv", "stem.io"]),
        (["*.resnet.*"], ["up0.resnet.conv", "mid.resnet.shortcut"], ["up0.norm", "up0.ff"]),
        (["mid.attn"], ["mid.attn.q", "mid.attn.o"], ["mid.xattn.q", "up0.attn.q"]),
        (["xattn.v", "stem"], ["up0.xattn.v", "stem.time"], ["up0.xattn.k", "up0.attn.v"]),
        (["!sampler"], ["up0.ff", "stem.io", "block3.attn.q"], ["up0.sampler", "down0.sampler"]),
        (["up*", "!xattn", "!up1"], ["up0.ff"], ["up0.xattn.k", "up1.ff", "down0.ff"]),
    ],
)
def test_a_pattern_names_stages_roles_and_what_they_begin(patterns, named, others):
    assert all(chosen(patterns, group) for group in named)
    assert not any(chosen(patterns, group) for group in others)


@pytest.mark.parametrize("kind", PARTS)
def test_what_is_frozen_stays_the_base_and_the_pipeline_is_whole(kind, flags, pipelines, tmp_path):
    component, patterns = PARTS[kind]
    changes = {"pretrained_model_name_or_path": pipelines[kind], "max_train_steps": 2, "use_ema": True}
    assert main(flags(**changes, train_layers=json.dumps(patterns))) == 0
    base = dict(getattr(DiffusionPipeline.from_pretrained(pipelines[kind]), component).named_parameters())
    after = dict(getattr(DiffusionPipeline.from_pretrained(tmp_path / "run/pipeline"), component).named_parameters())
    trains = {name for name in base if chosen(patterns, group_of(f"{component}.{name}"))}
    moved = {name for name in base if not torch.equal(base[name], after[name])}
    assert after.keys() == base.keys() and moved and moved <= trains
    assert len(moved) > 0.8 * len(trains)  # a bias of attention's keys has no gradient
    saved = load_file(last_checkpoint(tmp_path / "run") / f"{component}.safetensors")
    assert 0 < len(saved) < len(base) and saved.keys() <= trains
    assert len(load_file(last_checkpoint(tmp_path / "run") / "ema.safetensors")) == len(saved)


def test_what_is_left_out_stays_frozen_and_may_be_what_a_model_lacks(build, pipelines):
    of_unet = build("a", train_layers=ALL_BUT).parts.backbone
    frozen = {group_of(f"unet.{n}") for n, p in of_unet.named_parameters() if not p.requires_grad}
    assert frozen == {"down0.sampler", "up0.sampler"}
    without = build("b", train_layers=ALL_BUT, pretrained_model_name_or_path=pipelines["sd3"])
    trained = [p for p in without.parts.backbone.parameters() if p.requires_grad]
    assert len(trained) > 0.8 * len([*without.parts.backbone.parameters()])


def test_naming_no_layer_changes_nothing(build):
    plain, unset = build("a"), build("b", train_layers=None)
    for run in (plain, unset):
        step_once(run)
    assert same(*({n: p for n, p in run.parts.backbone.named_parameters()} for run in (plain, unset)))
    assert all(p.requires_grad for p in plain.parts.backbone.parameters())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_frozen_layers_store_no_activations(build, checkpointing):
    run = build(train_layers=UP, gradient_checkpointing=checkpointing)
    now, stored = [], {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        where = now[-1] if now else "elsewhere"
        stored[where] = stored.get(where, 0) + tensor.numel() * tensor.element_size()
        return tensor

    for name, module in run.parts.backbone.named_modules():
        if re.fullmatch(r"(down|up)_blocks\.\d+|mid_block|conv_in|time_embedding", name):
            module.register_forward_pre_hook(lambda module, inputs, name=name: now.append(name))
            module.register_forward_hook(lambda module, inputs, output: now.pop() and None)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step_once(run)
    assert {name for name in stored if name != "elsewhere"} == {"up_blocks.0", "up_blocks.1"}


@pytest.mark.parametrize("update", [{}, {"gradient_control.spectral": True}, {"gradient_control.name": GSNR}])
def test_frozen_layers_have_no_gradient_optimizer_state_or_group(build, update):
    run = build(train_layers=UP, use_ema=True, **update)
    step_once(run)
    trains = [p for n, p in run.parts.backbone.named_parameters() if n.startswith("up_blocks")]
    frozen = [p for n, p in run.parts.backbone.named_parameters() if not n.startswith("up_blocks")]
    assert all(p.grad is None and not p.requires_grad for p in frozen)
    assert {id(p) for p in run.state.optimizer.state} == {id(p) for p in trains}
    assert len(run.state.ema.shadow_params) == len(trains)
    assert all(name.startswith("up") for name in run.control.groups.names)


ARMS = {
    "whole": {},
    "spectral, averaged": {"gradient_control.spectral": True, "use_ema": True},
    "rates": {"gradient_control.name": GSNR, "gradient_control.warmup": 1, "gradient_control.refresh": 1},
    "adapters": {"lora.rank": 2, "lora.targets": '["attn","resnet"]'},
}


LONGER = {"whole", "rates"}  # tests/test_train.py has them where all layers train


@pytest.mark.parametrize("arm", [pytest.param(k, marks=pytest.mark.thorough if k in LONGER else ()) for k in ARMS])
def test_a_resume_is_equal_to_the_bit(arm, flags, tmp_path):
    changes = {"max_train_steps": 5, "checkpointing_steps": 2, "checkpoints_total_limit": None, "train_layers": UP}
    changes |= ARMS[arm]
    assert main(flags("whole", **changes)) == 0
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    shutil.copytree(whole / "checkpoints/step-2", cut / "checkpoints/step-2")
    assert main(flags("cut", **changes, resume_from_checkpoint="latest")) == 0
    a, b = (folder / "checkpoints/step-5" for folder in (whole, cut))
    assert same(load_file(a / "unet.safetensors"), load_file(b / "unet.safetensors"))
    left, right = (checkpoint.read_state(folder / "state.pt") for folder in (a, b))
    assert equal(left["optimizer"], right["optimizer"]) and equal(left["control"], right["control"])
    assert rows(whole)[2:] == rows(cut)


def test_other_layers_or_another_base_are_refused_on_resume(flags, pipelines, tmp_path, capsys):
    base = tmp_path / "base"
    shutil.copytree(pipelines["v_prediction"], base)
    changes = {"pretrained_model_name_or_path": base, "max_train_steps": 2, "train_layers": UP}
    assert main(flags(**changes)) == 0
    again = {"resume_from_checkpoint": "latest"} | changes | {"max_train_steps": 3}
    for other in ('["up*","mid"]', None):
        assert main(flags(**again | {"train_layers": other})) == 2
        assert "train_layers was ['up*']" in capsys.readouterr().err
    file = base / "unet/diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors["mid_block.resnets.0.conv1.weight"][0, 0, 0, 0] += 1  # of what is frozen, and in no checkpoint
    save_file(tensors, file, {"format": "pt"})
    assert main(flags(**again)) == 2
    assert "base changed" in capsys.readouterr().err


def test_adapters_go_on_the_layers_that_both_choose(flags, pipelines, tmp_path):
    changes = {"lora.rank": 2, "lora.targets": '["attn","xattn"]', "train_layers": '["up1","down0"]'}
    assert main(flags(max_train_steps=1, **changes)) == 0
    saved = load_file(tmp_path / "run/lora/pytorch_lora_weights.safetensors")
    assert {".".join(name.split(".")[1:3]) for name in saved} == {"up_blocks.1", "down_blocks.0"}
    DiffusionPipeline.from_pretrained(pipelines["v_prediction"]).load_lora_weights(tmp_path / "run/lora")


def test_text_encoders_train_where_a_pattern_names_them(build):
    run = build(train_text_encoder=True, train_layers='["up1", "text1.attn"]')
    step_once(run)
    assert all(p in run.state.optimizer.state for p in run.state.model.parameters() if p.requires_grad)
    trains = {name for name, p in run.state.model.named_parameters() if p.requires_grad}
    stages = {group_of(name).partition(".")[0] for name in trains}
    assert stages == {"up1", "text1"}


REFUSED = {
    "a typing error": (["uup1"], {}, "'uup1' names no layer of any model; did you mean 'up1'?"),
    "a stage that is not there": (["up3"], {}, "'up3' names no layer of this model; did you mean 'up"),
    "a part of nothing": (["up*.mod"], {}, "'up*.mod' names no layer of this model"),
    "nothing at all": ([], {}, "train_layers: is empty"),
    "every layer": (["*"], {}, "* names every layer of this model; leave it out"),
    "layers without adapters": (
        ["*.resnet.*"],
        {"lora.rank": 2},
        "'*.resnet.*' names no layer of those that lora.targets choose",
    ),
    "no layer of the text encoder": (
        ["up*"],
        {"train_text_encoder": True},
        "names nothing of text_encoder; name a layer of it, or leave out train_text_encoder",
    ),
    "no layer of the unet": (["text1"], {"train_text_encoder": True}, "text1 names nothing of unet"),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_idle_patterns_are_refused_in_one_line(mistake, flags, tmp_path, capsys):
    patterns, changes, said = REFUSED[mistake]
    assert main(flags(train_layers=json.dumps(patterns), **changes)) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert said in line.replace("train_layers (command line)", "train_layers")
    assert not (tmp_path / "run").exists()


def test_the_table_and_the_forecast_say_what_trains(flags, capsys, tmp_path, pipelines):
    unet = DiffusionPipeline.from_pretrained(pipelines["v_prediction"]).unet
    count = sum(p.numel() for name, p in unet.named_parameters() if name.startswith("up_blocks"))
    total = sum(p.numel() for p in unet.parameters())
    says = f"{count:,} of {total:,} parameters ({count / total:.1%})"
    states = {"adam": (8, {}), "spectral": (4, {"gradient_control.spectral": True})}
    for bytes_each, update in states.values():
        assert main(flags(train_layers=UP, print_groups=True, **update)) == 0
        out = capsys.readouterr().out
        assert says in out and f"{count:,}" in out and not re.search(r"^(down|mid|stem)", out, re.M)
        mib = float(re.search(r"^optimizer   ([\d.]+) MiB", out, re.M)[1])
        assert mib == pytest.approx(bytes_each * count / 2**20, rel=0.2)
        assert main(flags(train_layers=UP, dry_run=True, **update)) == 0
        out = capsys.readouterr().out
        assert f"trains   {says}; {mib:.1f} MiB of optimizer" in out
