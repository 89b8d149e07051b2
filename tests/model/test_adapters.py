"""LoRA, text encoders, SD 2 and SDXL: each trains, is measured, resumes to the bit, and loads with plain diffusers."""

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, DiffusionPipeline, StableDiffusionXLPipeline
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, T5Config, T5EncoderModel

from experiments.prior import prior, prior_table
from gradient_control import Controller, GradientControlConfig
from silentbad.data.draws import Transform
from silentbad.errors import UserError
from silentbad.loop import trackers
from silentbad.memory.auxiliary import Teacher
from silentbad.model import denoiser, lora, pipeline
from silentbad.model.denoiser import Denoiser
from silentbad.model.groups import OTHER, group_of, group_parameters
from silentbad.model.registry import FAMILIES
from silentbad.saving import checkpoint, folder
from silentbad.settings.train import LoraSettings
from tests.conftest import write_data
from tests.mistakes import tensors, with_nan, without_first
from tests.published import PUBLISHED, published, published_transformer
from tests.tiny import tiny_pipeline
from tests.toy import AND, GSNR, PRIOR, stats_of
from tests.training import VALIDATION, checked, equal, same, step_once
from train_silentbad import Run, main
from train_silentbad import build as build_run

ROOT = Path(__file__).parents[2]
SD2 = pytest.param("sd2", marks=pytest.mark.thorough)  # loads and encodes as "epsilon" does
LORA = {"lora.rank": 4, "lora.alpha": 8, "lora.targets": '["attn","xattn","ff"]'}
TEXT = {"train_text_encoder": True}
MEMORY = {
    "memory.phrase_memory.enabled": True,
    "memory.phrase_memory.share": 1.0,
    "memory.sampler.name": "weakest_first",
    "memory.distillation.name": AND,
    "memory.distillation.options": '{"after": -9.0, "every": 1}',
    "memory.retention.name": "self_distillation",
    "memory.region.name": "mask",
    "memory.rehearsal.name": "pairwise",
    "memory.loss.dream": 1.0,
}
CONTROL = {"gradient_control.name": f"{PRIOR}+{GSNR}", "gradient_control.warmup": 1, "gradient_control.refresh": 1}


@pytest.fixture
def flags(pipelines, tmp_path):
    """argv of a small run of a pipeline into tmp_path/`out`."""
    data = write_data(tmp_path / "data", elements=4, clean=12, kinds=3)

    def make(kind: str, out: str = "run", **changes) -> list[str]:
        values = {
            "pretrained_model_name_or_path": pipelines[kind],
            "train_data_dir": data,
            "report_to": "none",
            "output_dir": tmp_path / out,
            "train_batch_size": 4,
            "max_train_steps": 4,
            "checkpointing_steps": 2,
            "checkpoints_total_limit": "null",
            "log_every": 1,
            "learning_rate": 1e-3,
            "held_out_clean": 1,
        } | changes
        return [f"--{key}={value}" for key, value in values.items()]

    return make


@pytest.fixture
def build(flags):
    def make(kind: str, out: str = "run", **changes) -> Run:
        config = checked(flags(kind, out, **changes))
        return build_run(config, trackers.make_accelerator(config), folder.RunFolder(config, True))

    return make


# ---------------------------------------------------------------- every kind trains, is measured, resumes

KINDS = {
    "sd2": ("sd2", {}),
    "sd lora": ("v_prediction", {**LORA, "use_ema": True}),
    "sd text, all memory": ("epsilon", {**TEXT, **MEMORY, "use_ema": True}),
    "sd2 lora text, control": ("sd2", {**LORA, **TEXT, **CONTROL}),
    "xl": ("xl", {"gradient_checkpointing": True, **CONTROL}),
    "xl lora text, all": ("xl", {**LORA, **TEXT, **MEMORY, **CONTROL, "use_ema": True, "gradient_checkpointing": True}),
    "xl text": ("xl", {**TEXT, "cache_mb": 0, "gradient_checkpointing": True}),
    "xl lora, all memory in bf16": ("xl", {**LORA, **MEMORY, "mixed_precision": "bf16"}),
}


# What Stable Diffusion 3 refuses is left out (tests/model/test_sd3.py).
FLOW = {k: v for k, v in MEMORY.items() if k != "memory.loss.dream"}
BY_GSNR = {**CONTROL, "gradient_control.name": GSNR}
KINDS |= {
    "sd3, memory, control": ("sd3", {**FLOW, **BY_GSNR, "memory.timesteps.name": "logit_normal", "use_ema": True}),
    "sd3 lora": ("sd3", {**LORA, "memory.loss.name": "x0", "gradient_checkpointing": True, "mixed_precision": "bf16"}),
}
# what the others have in part
LONGER = {
    "sd2",
    "sd lora",
    "xl lora, all memory in bf16",
    "sd3 lora",
    "sd text, all memory",
    "xl lora text, all",
    "xl text",
}


PARTS = ("distillation", "retention")


@pytest.mark.parametrize("arm", [pytest.param(k, marks=pytest.mark.thorough if k in LONGER else ()) for k in KINDS])
def test_trains_validates_and_resumes_to_the_bit(arm, flags, tmp_path):
    kind, changes = KINDS[arm]
    targets = {**VALIDATION, "validation.targets": tmp_path / "data" / "targets.jsonl"}
    assert main(flags(kind, "whole", **changes, **targets)) == 0
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    shutil.copytree(whole / "checkpoints" / "step-2", cut / "checkpoints" / "step-2")
    assert main(flags(kind, "cut", **changes, **targets, resume_from_checkpoint="latest")) == 0
    a, b = (folder / "checkpoints" / "step-4" for folder in (whole, cut))
    files = {path.name for path in a.glob("*.safetensors")}
    text = {"text_encoder.safetensors", *({"text_encoder_2.safetensors"} if kind == "xl" else {})}
    assert files == {
        "transformer.safetensors" if kind == "sd3" else "unet.safetensors",
        *(text if "train_text_encoder" in changes else ()),
        *(["ema.safetensors"] if "use_ema" in changes else []),
    }
    for name in files:
        first, last = checkpoint.read_tensors(whole / "checkpoints/step-2" / name), checkpoint.read_tensors(a / name)
        assert same(last, checkpoint.read_tensors(b / name))
        assert any(not torch.equal(first[key], last[key]) for key in last)
    left, right = (checkpoint.read_state(folder / "state.pt") for folder in (a, b))
    assert equal(left["optimizer"], right["optimizer"]) and equal(left["memory"], right["memory"])
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row.get("validation")] == [0, 2, 4]
    trained = [row for row in rows if not row.get("validation")]
    assert all(math.isfinite(row["loss"]) and row["skipped"] == 0 for row in trained)
    if "memory.distillation.name" in changes:
        for part in (part for part in PARTS if f"memory.{part}.name" in changes):
            assert any(row.get(f"memory/{part}", 0) > 0 for row in trained), part


# ---------------------------------------------------------------- LoRA


def test_lora_adapts_the_layers_asked_for_and_freezes_the_base(build):
    run = build("xl", **LORA, **TEXT)
    names = [name for name, p in run.parts.model.named_parameters() if p.requires_grad]
    assert names and all("lora_" in name for name in names)
    assert {group_of(name).split(".")[1] for name in names} == {"attn", "xattn", "ff"}
    assert {name.split(".")[0] for name in names} == {"unet", "text_encoder", "text_encoder_2"}
    frozen = {n: p.clone() for n, p in run.parts.model.named_parameters() if not p.requires_grad}
    for _ in range(2):
        step_once(run)
    after = dict(run.parts.model.named_parameters())
    assert all(torch.equal(p, after[name]) and after[name].grad is None for name, p in frozen.items())
    only = build("xl", **{**LORA, "lora.targets": '["mid.xattn.v"]'})
    assert {group_of(n) for n, p in only.parts.model.named_parameters() if p.requires_grad} == {"mid.xattn.v"}


def test_adapters_begin_as_nothing_and_by_the_seed(build):
    x, t = torch.randn(1, 4, 8, 8), torch.tensor([500])
    runs_ = [build("epsilon", **changes) for changes in ({}, LORA, LORA, {**LORA, "seed": 1})]
    with torch.no_grad():
        plain, begun = (run.predict(x, t, ["a red cat"]) for run in runs_[:2])
    assert torch.allclose(plain, begun, atol=1e-6)
    weights = [denoiser.trained(run.parts.backbone) for run in runs_[1:]]
    assert same(*weights[:2]) and not same(weights[0], weights[2])


@pytest.mark.parametrize("file", [lora.KOHYA, None])
@pytest.mark.parametrize("kind", ["epsilon", SD2, "xl"])
def test_plain_diffusers_loads_what_lora_learnt(kind, file, build, pipelines, tmp_path):
    run = build(kind, **{**LORA, "lora.targets": '["attn","xattn","ff","resnet"]'}, **TEXT, learning_rate=0.05)
    for _ in range(2):
        step_once(run)
    prompts = ["a red cat, a blue hat"]
    before = pipeline.draw_images(DiffusionPipeline.from_pretrained(pipelines[kind]), prompts, 0, steps=3)
    here = pipeline.draw_images(pipeline.pipeline(run.parts), prompts, 0, steps=3)
    run.products.save_pipeline(tmp_path / "lora")
    plain = DiffusionPipeline.from_pretrained(pipelines[kind])
    plain.load_lora_weights(tmp_path / "lora", **({} if file is None else {"weight_name": file}))
    there = pipeline.draw_images(plain, prompts, 0, steps=3)
    a, b, c = (np.asarray(images[0]).astype(int) for images in (here, there, before))
    assert np.abs(a - b).max() <= 1 and np.abs(a - c).max() > 5
    assert "load_lora_weights" in (tmp_path / "lora" / "README.md").read_text()


def test_the_kohya_file_has_its_names_and_the_alpha(build, tmp_path):
    for kind, prefixes in (("epsilon", {"lora_unet", "lora_te"}), ("xl", {"lora_unet", "lora_te1", "lora_te2"})):
        run = build(kind, **LORA, **TEXT)
        run.products.save_pipeline(tmp_path / kind)
        tensors = load_file(tmp_path / kind / lora.KOHYA)
        assert {"_".join(key.split("_")[:2]) for key in tensors} == prefixes
        assert {key.split(".", 1)[1] for key in tensors} == {"lora_down.weight", "lora_up.weight", "alpha"}
        assert all(value == 8 for key, value in tensors.items() if key.endswith(".alpha"))
        assert f"{max(prefixes - {'lora_unet'})}_text_model_encoder_layers_0_self_attn_q_proj.alpha" in tensors


def names_in_sd_scripts(depths: list[int], resnets: int) -> set[str]:
    """Layers of sd-scripts' SDXL UNet with `resnets` a level and `depths` of its transformers: the original's blocks in
    their order, by the rule that a layer's name is its path."""
    names = {"input_blocks_0_0", "out_2", "time_embed_0", "time_embed_2", "label_emb_0_0", "label_emb_0_2"}

    def add(block: str, depth: int, widens: bool) -> None:
        layers = ["in_layers_2", "emb_layers_1", "out_layers_3", *(["skip_connection"] if widens else [])]
        names.update(f"{block}_0_{layer}" for layer in layers)
        if depth:
            names.update(transformer(f"{block}_1", depth))

    def transformer(place: str, depth: int) -> set[str]:
        of_attention = [f"attn{i}_to_{one}" for i in (1, 2) for one in ("q", "k", "v", "out_0")]
        layers = [*of_attention, "ff_net_0_proj", "ff_net_2"]
        inside = {f"transformer_blocks_{i}_{layer}" for i in range(depth) for layer in layers}
        return {f"{place}_{layer}" for layer in {"proj_in", "proj_out", *inside}}

    number = 1
    for level, depth in enumerate(depths):
        for i in range(resnets):
            add(f"input_blocks_{number + i}", depth, widens=level > 0 and i == 0)
        number += resnets
        if level < len(depths) - 1:
            names.add(f"input_blocks_{number}_0_op")
            number += 1
    add("middle_block", depths[-1], widens=False)
    names.update(f"middle_block_2_{layer}" for layer in ("in_layers_2", "emb_layers_1", "out_layers_3"))
    number = 0
    for level, depth in reversed([*enumerate(depths)]):
        for _ in range(resnets + 1):
            add(f"output_blocks_{number}", depth, widens=True)
            number += 1
        if level:
            names.add(f"output_blocks_{number - 1}_2_conv")
    return names


EVERY = ["attn", "xattn", "ff", "resnet", "proj", "time", "sampler", "io"]


def test_the_layers_of_sdxl_are_named_as_in_sd_scripts():
    unet = published("SDXL")
    layers = lora.target_layers("unet", unet, LoraSettings(targets=EVERY))
    named = {FAMILIES["StableDiffusionXLPipeline"].kohya_path(unet, path).replace(".", "_") for path in layers}
    table = names_in_sd_scripts([0, 2, 10], 2)
    assert len([name for name in table if "transformer" in name or "proj_" in name]) == 722  # what sd-scripts reports
    assert named == table


@pytest.mark.parametrize("kind", ["dora", "loha", "lokr"])
def test_the_kohya_file_of_sdxl_has_the_names_of_sd_scripts(kind, build, tmp_path):
    targets = {"lora.targets": json.dumps(EVERY), "lora.kind": kind, "lora.rank": 2}
    build("xl", **targets).products.save_pipeline(tmp_path)
    names = {key.split(".")[0] for key in load_file(tmp_path / lora.KOHYA)}
    assert names == {f"lora_unet_{name}" for name in names_in_sd_scripts([0, 2], 1)}


@pytest.mark.parametrize("kind", ["epsilon", "xl"])
def test_an_audit_reads_the_kohya_file(kind, build, pipelines, tmp_path):
    build(kind, **LORA, **TEXT).products.save_pipeline(tmp_path)
    pipe = DiffusionPipeline.from_pretrained(pipelines[kind])
    lora.load(pipe, str(tmp_path / lora.KOHYA), kind)
    assert any(".lora_B." in name for name, _ in pipe.unet.named_parameters())


def test_a_lora_run_ends_with_adapters(flags, tmp_path):
    assert main(flags("xl", **LORA, max_train_steps=1)) == 0
    out = tmp_path / "run"
    files = {"README.md", lora.KOHYA, "pytorch_lora_weights.safetensors"}
    assert {p.name for p in (out / "lora").iterdir()} == files
    assert not (out / "pipeline").exists() and "LoRA of rank 4" in (out / "lora" / "README.md").read_text()
    assert main(flags("xl", **LORA, max_train_steps=1, resume_from_checkpoint="latest")) == 0


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"lora.alpha": 4}, "lora.alpha (command line): needs lora.rank"),
        ({"lora.rank": 0}, "lora.rank (command line): must be at least 1, got 0"),
        (
            {"lora.rank": 2, "lora.targets": '["attention"]'},
            "'attention' names no layer of any that adapters fit; did you mean",
        ),
        ({"lora.rank": 2, "lora.targets": '["xattn"]', **TEXT}, "xattn names no layer of text_encoder"),
        ({"lora.rank": 2, "lora.targets": '["ff"]', **TEXT}, "needs attn"),
        ({"lora.rnak": 2}, "did you mean 'lora.rank'"),
    ],
    ids=str,
)
def test_a_wrong_lora_is_one_line(changes, said, flags, capsys):
    assert main(flags("epsilon", **changes)) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and said in error


def test_a_checkpoint_of_other_weights_is_refused(flags, tmp_path, capsys):
    assert main(flags("epsilon", **LORA, max_train_steps=2)) == 0
    again = {"max_train_steps": 3, "resume_from_checkpoint": "latest"}
    assert main(flags("epsilon", **{**LORA, "lora.rank": 2, "lora.alpha": 8}, **again)) == 2
    assert "lora.rank was 4, is 2" in capsys.readouterr().err
    assert main(flags("epsilon", **LORA, **TEXT, **again)) == 2
    assert "train_text_encoder was False, is True" in capsys.readouterr().err


# ---------------------------------------------------------------- text encoders


@pytest.mark.parametrize("kind", ["epsilon", "xl"])
def test_every_tensor_of_a_trained_text_encoder_is_reached(kind, build):
    """A trained parameter without gradient would stop a run on several processes."""
    run = build(kind, **TEXT)
    before = {n: p.clone() for n, p in run.parts.model.named_parameters() if p.requires_grad}
    reached = set()
    for n, p in run.parts.model.named_parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda p, n=n: reached.add(n))
    step_once(run)
    assert reached == set(before) and any(n.startswith("text_encoder.") for n in reached)
    after = dict(run.parts.model.named_parameters())
    moved = [n for n, p in before.items() if not torch.equal(p, after[n])]
    assert any("text_encoder." in n and n.endswith("q_proj.weight") for n in moved)
    assert run.encoder.kept_texts == {}  # nothing of a moving encoder is kept
    if kind == "xl":
        assert any(n.startswith("text_encoder_2.") and "text_projection" in n for n in moved)
        unused = run.parts.family.unused("text_encoder", run.parts.text_encoders["text_encoder"])
        assert unused and {id(p) for p in unused}.isdisjoint({id(after[n]) for n in before})


@pytest.mark.parametrize("kind", ["epsilon", SD2, "xl"])
def test_conditions_equal_those_of_the_pipeline(kind, build):
    """Cached, uncached and live states are what diffusers' own pipeline gives its UNet."""
    texts, x, t = ["a red cat", ""], torch.randn(2, 4, 8, 8), torch.tensor([300, 700])
    cached, plain, live = (build(kind, **changes) for changes in ({}, {"cache_mb": 0}, TEXT))
    pipe = pipeline.pipeline(cached.parts)
    c = [cached.encoder.condition(texts) for _ in range(2)][1]
    if kind == "xl":
        embeds, negative, pooled, negative_pooled = pipe.encode_prompt(texts[0], do_classifier_free_guidance=True)
        ids = pipe._get_add_time_ids((16, 16), (0, 0), (16, 16), torch.float32, 24)
        assert torch.allclose(c["added_cond_kwargs"]["text_embeds"], torch.cat([pooled, negative_pooled]), atol=1e-5)
        assert torch.equal(c["added_cond_kwargs"]["time_ids"], ids.expand(2, -1))
        assert not c["added_cond_kwargs"]["time_ids"].is_floating_point(), "FSDP would round them to bf16: 1023 to 1024"
        assert not negative.any()
    else:
        embeds, negative = pipe.encode_prompt(texts[0], "cpu", 1, True)
    assert torch.allclose(c["encoder_hidden_states"], torch.cat([embeds, negative]), atol=1e-5)
    with torch.no_grad():
        a, b, d = (run.predict(x, t, texts) for run in (cached, plain, live))
    assert torch.allclose(a, b, atol=1e-5) and torch.allclose(a, d, atol=1e-5)


def test_a_teacher_keeps_its_own_text_encoders(build):
    run = build("xl", **TEXT)
    teacher, x, t = Teacher(run.parts.model, torch.float32), torch.randn(1, 4, 8, 8), torch.tensor([300])
    with torch.no_grad():
        before = run.predict(x, t, ["a red cat"], model=teacher)
        assert torch.allclose(before, run.predict(x, t, ["a red cat"]), atol=1e-5)
        for p in run.parts.text_encoders["text_encoder_2"].parameters():
            p.mul_(1.5)
        assert torch.equal(run.predict(x, t, ["a red cat"], model=teacher), before)
        assert not torch.allclose(run.predict(x, t, ["a red cat"]), before, atol=1e-3)
        teacher.refresh(run.parts.model)
        trained = denoiser.trained(run.parts.model)
        assert all(torch.equal(value, trained[name]) for name, value in teacher.state_dict().items())


def test_a_teacher_of_adapters_shares_the_frozen_base(build):
    run = build("xl", **LORA, mixed_precision="bf16")
    teacher = Teacher(run.parts.model)
    mine, its = dict(run.parts.model.named_parameters()), dict(teacher.unet.named_parameters())
    assert {n for n in its if its[n].data_ptr() == mine[n].data_ptr()} == {n for n in mine if "lora_" not in n}
    assert all(p.dtype == torch.float32 for n, p in mine.items() if "lora_" in n)
    assert set(teacher.state_dict()) == {n for n in mine if "lora_" in n}


# ---------------------------------------------------------------- SDXL's sizes


def test_time_ids_are_size_crop_and_target():
    """Height first, corner of the window in the picture as it is shown, flipped or not."""
    picture = Image.fromarray(np.arange(20 * 40, dtype=np.uint8).reshape(20, 40).repeat(3).reshape(20, 40, 3) // 4)
    transform = Transform(10, "nearest", random_flip=True)
    small, _ = transform.resize(picture, None)
    flipped = 0
    for i in range(12):
        (pixels,), (top, left) = transform.crop([small], small.size, (0, i), (10, 10))
        shown = np.asarray(small).transpose(2, 0, 1)
        straight = shown[:, top : top + 10, left : left + 10]
        mirrored = shown[:, :, ::-1][:, top : top + 10, left : left + 10]
        assert np.array_equal(pixels, straight) or np.array_equal(pixels, mirrored)
        flipped += not np.array_equal(pixels, straight)
    assert 0 < flipped < 12


def test_sdxl_is_told_each_pictures_size_and_crop(build, tmp_path):
    Image.new("RGB", (48, 24), "green").save(tmp_path / "data" / "images" / "c0.png")
    run = build("xl", center_crop=True)
    batch = [b for draw in range(8) for b in run.loader.draw(draw)]
    ids = torch.cat([b["time_ids"] for b in batch])
    assert {tuple(row) for row in ids.tolist()} == {(16, 16, 0, 0, 16, 16), (24, 48, 0, 8, 16, 16)}
    x, t = torch.randn(1, 4, 8, 8), torch.tensor([300])
    with torch.no_grad():
        a, b = (run.predict(x, t, ["a cat"], time_ids=ids[ids[:, 0] == side][:1]) for side in (16, 24))
        assert torch.equal(a, run.predict(x, t, ["a cat"])) and not torch.equal(a, b)


def test_a_saved_sdxl_pipeline_loads_with_plain_diffusers(flags, tmp_path, pipelines):
    assert main(flags("xl", max_train_steps=1)) == 0
    pipe = DiffusionPipeline.from_pretrained(tmp_path / "run" / "pipeline")
    base = DiffusionPipeline.from_pretrained(pipelines["xl"])
    assert type(pipe) is StableDiffusionXLPipeline and pipe.config.force_zeros_for_empty_prompt
    assert same(pipe.text_encoder_2.state_dict(), base.text_encoder_2.state_dict())
    assert not same(pipe.unet.state_dict(), base.unet.state_dict())
    assert type(pipe.scheduler) is type(base.scheduler)


# ---------------------------------------------------------------- groups and the prior


def text_encoder(which: int, kind: type | None = None):
    """SDXL's text encoders at their true sizes, without weights; the first is SD 1's."""
    usual = (CLIPTextModel, CLIPTextModelWithProjection)[which]
    width, depth, inner = [(768, 12, 3072), (1280, 32, 5120)][which]
    with torch.device("meta"):
        return (kind or usual)(
            CLIPTextConfig(
                hidden_size=width,
                num_hidden_layers=depth,
                intermediate_size=inner,
                projection_dim=width,
                num_attention_heads=width // 64,
            )
        )


def test_groups_of_sdxl_and_both_text_encoders_are_exact():
    encoders = {"text_encoder": text_encoder(0), "text_encoder_2": text_encoder(1)}
    model = Denoiser(published("SDXL"), **encoders)
    groups = group_parameters(model)
    names = [name for members in groups.members.values() for name in members]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    sizes = (PUBLISHED["SDXL"][2], 123_060_480, 694_659_840)
    assert sum(groups.sizes) == sum(sizes) and OTHER not in groups.names
    assert {f"text{i}.{role}" for i in (1, 2) for role in ("attn.q", "attn.o", "ff", "norm", "embed")} < {*groups.names}
    assert groups.names[-1].startswith("text2") and "text2.proj" in groups.names


@pytest.mark.parametrize("which", PUBLISHED)
def test_lora_of_every_role_covers_the_adapters_alone(which):
    model = Denoiser(published(which), text_encoder=text_encoder(0))
    with torch.device("meta"):
        for name, module in model.named_children():
            lora.add(name, module, LoraSettings(rank=4, targets=EVERY), 0)
    groups = group_parameters(model)
    names = [name for members in groups.members.values() for name in members]
    assert sorted(names) == sorted(n for n, p in model.named_parameters() if p.requires_grad)
    assert all("lora_" in name for name in names) and OTHER not in groups.names
    layers = (torch.nn.Linear, torch.nn.Conv2d)
    left = [n for n, m in model.named_modules() if isinstance(m, layers) and "base_layer" not in n and "lora_" not in n]
    assert left == []


def test_the_prior_names_sdxls_blocks_by_their_place():
    sd, xl = prior_table(), prior_table(sdxl=True)
    assert "up1.*" in sd and "up0.*" not in sd and "up0.*" in xl and "up1.*" not in xl
    assert list(sd.values()) == list(xl.values())
    assert "up0.*" not in prior_table(drop=["up1.*"], sdxl=True)
    names = ("up0.resnet.conv", "up1.resnet.conv", "mid.ff")
    for sdxl, expected in ((False, [1, 1.25, 1.25**2]), (True, [1.25, 1, 1.25**2])):
        assert prior(stats_of(groups=3, names=names, sdxl=sdxl)).tolist() == pytest.approx(expected)
    config = GradientControlConfig(name=PRIOR)
    sdxl = [Controller(published(name), config).layer_rates.sdxl for name in ("SDXL", "SD2")]
    assert sdxl == [True, False]


# ---------------------------------------------------------------- shipped configurations


def parameters(module: torch.nn.Module, trained: bool | None = None) -> int:
    return sum(p.numel() for p in module.parameters() if trained is None or p.requires_grad == trained)


VAE = dict(
    block_out_channels=(128, 256, 512, 512),
    layers_per_block=2,
    down_block_types=("DownEncoderBlock2D",) * 4,
    up_block_types=("UpDecoderBlock2D",) * 4,
)
VAE_OF_SD3 = {**VAE, "latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False}


def shipped(name: str) -> tuple[torch.nn.Module, list[torch.nn.Module], AutoencoderKL]:
    """(backbone, text encoders, autoencoder) of a configuration's base, without weights."""
    with torch.device("meta"):
        if name == "sd3":
            t5 = T5Config(
                vocab_size=32128, d_model=4096, d_ff=10240, num_layers=24, num_heads=64, feed_forward_proj="gated-gelu"
            )
            encoders = [text_encoder(0, CLIPTextModelWithProjection), text_encoder(1), T5EncoderModel(t5)]
            return published_transformer("3.5 medium"), encoders, AutoencoderKL(**VAE_OF_SD3)
        which = {"sd15": "SD1", "sd21": "SD2", "sdxl": "SDXL"}[name[:4]]
        second = CLIPTextConfig(hidden_size=1024, num_hidden_layers=23, intermediate_size=4096, num_attention_heads=16)
        encoders = [CLIPTextModel(second)] if which == "SD2" else [text_encoder(0)]
        encoders += [text_encoder(1)] if which == "SDXL" else []
        return published(which), encoders, AutoencoderKL(**VAE)


@pytest.mark.parametrize("name", ["sd15_full", "sd15_lora", "sd21_full", "sdxl_lora", "sd3"])
def test_configurations_state_their_memory(name):
    """18 bytes a trained parameter, 2 a frozen one (the autoencoder of SDXL and SD 3: 4), from the published shapes."""
    file = ROOT / "configs" / f"{name}.yaml"
    config = checked(["--config", str(file), "--train_data_dir", "data"])
    backbone, encoders, vae = shipped(name)
    backbone.requires_grad_(True)
    if config.lora.rank is not None:
        lora.add("transformer" if name == "sd3" else "unet", backbone, config.lora, 0)
    frozen = parameters(backbone, False) + sum(map(parameters, encoders))
    total = 18 * parameters(backbone, True) + 2 * frozen + (4 if name[:3] in ("sdx", "sd3") else 2) * parameters(vae)
    stated = f"{total / 1e9:.1f} GB"
    assert file.read_text().startswith(f"# Memory: {stated} before activations")
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    assert re.search(rf"`{name}.yaml`( takes)? {stated.removesuffix(' GB')}\b", page)
    assert f"{parameters(backbone, True) / 1e6:.1f} M trained" in file.read_text()


def test_an_audit_takes_adapters(build, pipelines, tmp_path):
    from silentbad.model.pipeline import load_pipeline

    run = build("epsilon", **LORA, learning_rate=0.05)
    step_once(run)
    run.products.save_pipeline(tmp_path / "lora")
    base, lora = str(pipelines["epsilon"]), str(tmp_path / "lora")
    pipes = [load_pipeline(base, "float32", "cpu", adapters) for adapters in (None, lora)]
    images = [np.asarray(pipeline.draw_images(pipe, ["a red cat"], 0, steps=2)[0]).astype(int) for pipe in pipes]
    assert np.abs(images[0] - images[1]).max() > 2
    with pytest.raises(UserError, match="--lora"):
        load_pipeline(base, "float32", "cpu", str(tmp_path / "data"))


@pytest.mark.parametrize("kind", ["xl", "sd3"])
def test_a_dry_run_in_half_precision_draws(kind, flags, tmp_path):
    """The autoencoder keeps SDXL's full precision under autocast, in training and in pictures."""
    drawn = ["--validation_prompts", "a red cat"]
    assert main([*flags(kind, **LORA, mixed_precision="bf16", dry_run=True), *drawn]) == 0


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A saved pipeline and adapters of its UNet."""
    from diffusers import StableDiffusionPipeline
    from peft import LoraConfig, get_peft_model_state_dict

    folder_, pipe = tmp_path_factory.mktemp("adapted"), tiny_pipeline("epsilon")
    pipe.save_pretrained(folder_ / "pipeline")
    pipe.unet.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_v"]))
    layers = get_peft_model_state_dict(pipe.unet)
    StableDiffusionPipeline.save_lora_weights(folder_ / "lora", unet_lora_layers=layers)
    return folder_


SPOILED_ADAPTERS = {
    "whole": (lambda held: None, None),
    "NaN": (with_nan, "NaN or infinite values"),
    "a half is missing": (without_first, "on its layers"),
    "a layer that is not there": (
        lambda held: held.update(
            {key.replace("mid_block", "mid_blocks"): held.pop(key) for key in list(held) if "mid_block" in key}
        ),
        "on its layers",
    ),
    "no adapter at all": (lambda held: [held.clear(), held.update(x=torch.zeros(2))], ""),
}


@pytest.mark.parametrize("name", SPOILED_ADAPTERS)
def test_adapters_are_taken_whole_or_refused(name, adapted, tmp_path):
    change, said = SPOILED_ADAPTERS[name]
    shutil.copytree(adapted / "lora", tmp_path / "lora")
    tensors("lora/pytorch_lora_weights.safetensors", change)(tmp_path)
    arguments = (str(adapted / "pipeline"), "float32", "cpu", str(tmp_path / "lora"))
    if said is None:
        assert lora.present(pipeline.load_pipeline(*arguments).unet)
        return
    with pytest.raises(UserError, match="^--lora ") as refused:
        pipeline.load_pipeline(*arguments)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_an_alpha_of_kohyas_that_is_not_finite_is_named(adapted, tmp_path):
    layer = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"
    weights = load_file(adapted / "lora/pytorch_lora_weights.safetensors")
    (a,) = (
        value
        for name, value in weights.items()
        if name.endswith("mid_block.attentions.0.transformer_blocks.0.attn1.to_q.lora_A.weight")
    )
    down, up = f"{layer}.lora_down.weight", f"{layer}.lora_up.weight"
    save_file(
        {down: a, up: torch.ones(a.shape[1], 2), f"{layer}.alpha": torch.tensor(torch.nan)}, tmp_path / "k.safetensors"
    )
    arguments = (str(adapted / "pipeline"), "float32", "cpu", str(tmp_path / "k.safetensors"))
    with pytest.raises(UserError, match=r"^--lora .*NaN or infinite values in unet.mid_block.*to_q.*alpha"):
        pipeline.load_pipeline(*arguments)
