"""DoRA, LoHa and LoKr beside LoRA: each trains, resumes, is merged, and is read by diffusers, peft and LyCORIS."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from peft import LoKrConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file

from silentbad.errors import UserError
from silentbad.model import lora, pipeline
from silentbad.model.groups import OTHER, group_parameters
from silentbad.saving import checkpoint
from tests.toy import GSNR
from tests.training import same, step_once
from train_silentbad import main

LAYERS = '["attn","xattn","ff","resnet"]'
KINDS = {
    "dora": {"lora.kind": "dora"},
    "loha": {"lora.kind": "loha"},
    "lokr": {"lora.kind": "lokr", "lora.factor": 4},
    "lokr, whole factors": {"lora.kind": "lokr", "lora.rank": 64},
}


LONG = pytest.mark.thorough


def changes(kind: str, **more) -> dict:
    return {"lora.rank": 2, "lora.alpha": 6, "lora.targets": LAYERS, "learning_rate": 0.05, **KINDS[kind], **more}


def pixels(pipe) -> np.ndarray:
    return np.asarray(pipeline.draw_images(pipe, ["a red cat, a blue hat"], 0, steps=2)[0]).astype(int)


def added(tensors: dict[str, torch.Tensor], layer: str, weight: torch.Tensor) -> torch.Tensor:
    """A layer's weight with what LyCORIS's readers make of a file's tensors."""
    part = {key.removeprefix(f"{layer}."): value for key, value in tensors.items() if key.startswith(f"{layer}.")}
    alpha, shape = float(part["alpha"]), weight.shape
    if "lora_up.weight" in part:
        down, up = part["lora_down.weight"], part["lora_up.weight"]
        merged = weight + (up.flatten(1) @ down.flatten(1)).reshape(shape) * (alpha / len(down))
        if "dora_scale" in part:
            norm = merged.flatten(1).norm(dim=1).reshape(-1, *[1] * (merged.dim() - 1))
            merged = merged * (part["dora_scale"] / norm)
        return merged
    if "hada_w1_a" in part:
        product = (part["hada_w1_a"] @ part["hada_w1_b"]) * (part["hada_w2_a"] @ part["hada_w2_b"])
        return weight + product.reshape(shape) * (alpha / len(part["hada_w1_b"]))
    first, second, scale = part["lokr_w1"], part.get("lokr_w2"), 1.0
    if second is None:
        second, scale = part["lokr_w2_a"] @ part["lokr_w2_b"], alpha / len(part["lokr_w2_b"])
    if weight.dim() == 4:
        second = second.reshape(shape[0] // first.shape[0], shape[1] // first.shape[1], *shape[2:])
        first = first[:, :, None, None]
    return weight + torch.kron(first, second).reshape(shape) * scale


@pytest.mark.parametrize(
    "kind", ["dora", "lokr", *(pytest.param(k, marks=LONG) for k in ("loha", "lokr, whole factors"))]
)
def test_an_adapter_is_read_by_others_and_merged(kind, build, pipelines, tmp_path):
    run = build(**changes(kind, **{"lora.merged": True, "train_text_encoder": True}))
    plain = DiffusionPipeline.from_pretrained(pipelines["v_prediction"])
    begun, before = pixels(pipeline.pipeline(run.parts)), pixels(plain)
    assert np.abs(begun - before).max() <= 1  # it begins as nothing
    named = dict(run.parts.model.named_parameters())
    trained = {name for name, p in named.items() if p.requires_grad}
    groups = group_parameters(run.parts.model)
    assert OTHER not in groups.names and set().union(*groups.members.values()) == trained
    assert run.control.params and len(run.control.params) == len(trained)
    start = {name: named[name].clone() for name in named}
    for _ in range(2):
        step_once(run)
    assert all(torch.equal(named[name], start[name]) == (name not in trained) for name in named)
    after = pixels(pipeline.pipeline(run.parts))
    assert np.abs(after - before).max() > 5
    saved = run.folder.pipeline = run.folder.path / "lora"
    run.products.save_pipeline(saved)
    # -- plain diffusers, or plain peft
    if KINDS[kind]["lora.kind"] in lora.FOLDERS:
        for name in ("unet", "text_encoder"):
            setattr(plain, name, PeftModel.from_pretrained(getattr(plain, name), saved / name).merge_and_unload())
    else:
        plain.load_lora_weights(saved)
    assert np.abs(pixels(plain) - after).max() <= 1
    # -- our own audit, and the merged pipeline
    with pytest.raises(
        UserError, match="is read from the folder that training saved"
    ):  # of kohya's file a part is lost
        pipeline.load_pipeline(str(pipelines["v_prediction"]), "float32", "cpu", str(saved / lora.KOHYA))
    base = str(pipelines["v_prediction"])
    assert np.abs(pixels(pipeline.load_pipeline(base, "float32", "cpu", str(saved))) - after).max() <= 1
    merged = DiffusionPipeline.from_pretrained(run.folder.path / "pipeline")
    assert np.abs(pixels(merged) - after).max() <= 1 and lora.present(run.parts.backbone)
    assert "merged" in (run.folder.path / "pipeline" / "README.md").read_text()
    # -- kohya's file, by LyCORIS's formulas
    tensors, unet = load_file(saved / lora.KOHYA), DiffusionPipeline.from_pretrained(base).unet
    layers = [path for path, layer in run.parts.backbone.named_modules() if isinstance(layer, BaseTunerLayer)]
    for path in layers:
        weight, name = unet.get_submodule(path).weight.detach(), f"lora_unet_{path.replace('.', '_')}"
        assert torch.allclose(added(tensors, name, weight), merged.unet.get_submodule(path).weight, atol=1e-5), path
    assert {key.split(".")[0] for key in tensors if "lora_unet" in key} == {
        f"lora_unet_{path.replace('.', '_')}" for path in layers
    }


@LONG
@pytest.mark.parametrize("kind", ["dora", "lokr"])
def test_an_adapter_resumes_to_the_bit(kind, flags, tmp_path):
    settings = changes(kind, use_ema=True, max_train_steps=4, checkpointing_steps=2, **{"gradient_control.name": GSNR})
    assert main(flags("whole", **settings)) == 0
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    shutil.copytree(whole / "checkpoints" / "step-2", cut / "checkpoints" / "step-2")
    assert main(flags("cut", **settings, resume_from_checkpoint="latest")) == 0
    for name in ("unet", "ema"):
        a, b = (checkpoint.read_tensors(out / f"checkpoints/step-4/{name}.safetensors") for out in (whole, cut))
        assert same(a, b)
    assert (whole / "metrics.jsonl").read_text() != ""


@LONG
def test_a_damaged_folder_is_one_line(build, pipelines, tmp_path):
    run = build(**changes("loha"))
    run.products.save_pipeline(tmp_path / "good")
    base, file = str(pipelines["v_prediction"]), tmp_path / "bad" / "unet" / lora.PEFT_WEIGHTS
    shutil.copytree(tmp_path / "good", tmp_path / "bad")
    tensors = load_file(file)
    first = next(iter(tensors))
    for damage, said in (
        ({k: v for k, v in tensors.items() if k != first}, "tensors, its layers take"),
        ({**tensors, first: tensors[first] * float("nan")}, "NaN or infinite values in"),
    ):
        save_file(damage, file)
        with pytest.raises(UserError, match=said):
            pipeline.load_pipeline(base, "float32", "cpu", str(tmp_path / "bad"))
    config = json.loads((file.parent / lora.PEFT_CONFIG).read_text())
    (file.parent / lora.PEFT_CONFIG).write_text(json.dumps(config | {"peft_type": "LORA"}))
    with pytest.raises(UserError, match="holds PeftType.LORA|unet/"):
        pipeline.load_pipeline(base, "float32", "cpu", str(tmp_path / "bad"))


def test_a_pickled_adapter_is_refused(tmp_path):
    torch.save({"a": torch.zeros(1)}, tmp_path / "x.pt")
    with pytest.raises(UserError, match=r"only \.safetensors is read"):
        lora.load(SimpleNamespace(unet=torch.nn.Module()), str(tmp_path / "x.pt"), "base")


@pytest.mark.parametrize(
    "text, said",
    [
        ("{", "property name"),
        ('{"peft_type": "XORA"}', "XORA"),
    ],
)
def test_a_damaged_configuration_is_named(text, said, tmp_path):
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / lora.PEFT_CONFIG).write_text(text)
    save_file({"a": torch.zeros(1)}, tmp_path / "unet" / lora.PEFT_WEIGHTS)
    with pytest.raises(UserError, match=f"unet/.*{said}"):
        lora._load_folder(torch.nn.Linear(1, 1), tmp_path / "unet", "--lora l: no adapters")


@pytest.mark.parametrize("key", ["target_modules", "exclude_modules", "rank_pattern"])
def test_a_pattern_in_a_folder_is_not_matched(key, tmp_path):
    pattern = {"(a*)*b": 2} if key == "rank_pattern" else "(a*)*b"
    LoKrConfig(**{"target_modules": ["to_q", "mid.to_k"], key: pattern}).save_pretrained(tmp_path / "unet")
    save_file({"a": torch.zeros(1)}, tmp_path / "unet" / lora.PEFT_WEIGHTS)
    with pytest.raises(UserError, match=f"{key} must list names of layers"):
        lora.load(SimpleNamespace(unet=torch.nn.Module()), str(tmp_path), "base")
