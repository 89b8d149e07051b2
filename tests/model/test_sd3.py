"""Stable Diffusion 3: its path, loss, text states, groups and files, each against diffusers' own."""

import copy

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3
from peft import PeftModel

from silentbad.errors import UserError
from silentbad.measure.generation import Sampler
from silentbad.memory.weightings import flow_sigma
from silentbad.model import diffusion, lora, pipeline
from silentbad.model.denoiser import Denoiser
from silentbad.model.diffusion import Flow
from silentbad.model.groups import OTHER, group_of, group_parameters
from silentbad.model.latents import decode
from silentbad.model.registry import FAMILIES
from silentbad.settings.train import LoraSettings
from tests.published import TRANSFORMERS, published_transformer
from tests.tiny import tiny_sd3_pipeline
from tests.toy import experiment
from tests.training import same, step_once
from train_silentbad import main
from validation import ValidationConfig

LORA = {"lora.rank": 2, "lora.alpha": 4, "lora.targets": '["attn","ff","mod"]', "learning_rate": 0.05}
FAMILY = FAMILIES["StableDiffusion3Pipeline"]


@pytest.fixture
def sd3(build, pipelines):
    return lambda **changes: build(pretrained_model_name_or_path=pipelines["sd3"], **changes)


def sample(run) -> tuple[dict, torch.Tensor, torch.Tensor]:
    """(batch, its latents, indices from the most noise down), the indices drawn as diffusers' script draws them."""
    batch = next(iter(run.loader.draw(0)))
    g = torch.Generator().manual_seed(0)
    u = compute_density_for_timestep_sampling("logit_normal", len(batch["text"]), 0.0, 1.0, generator=g)
    return batch, run.encoder.latents(batch, 0), (u * 1000).long()


# ---------------------------------------------------------------- the path and the loss
ARMS = [  # memory.loss.name, the script's --weighting_scheme and --precondition_outputs
    ("x0", "logit_normal", True),  # the script's defaults
    ("none", "sigma_sqrt", True),
    ("none", "logit_normal", False),
    (experiment("flow_weights", "cosmap"), "cosmap", False),
    (experiment("flow_weights", "sigma_sqrt"), "sigma_sqrt", False),
]


def test_the_loss_is_that_of_diffusers_script(sd3, pipelines):
    """examples/dreambooth/train_dreambooth_sd3.py, from the noisy latents to the mean, for the same noise."""
    run = sd3()
    batch, model_input, indices = sample(run)
    t, schedule = 999 - indices, run.parts.noise_scheduler
    eps, x_t = diffusion.noised(schedule, model_input, t, run.config, 0, batch["position"].tolist())
    target = diffusion.prediction_target(schedule, model_input, eps, t)
    with torch.no_grad():
        pred = run.predict(x_t, t, batch["text"])
    # -- the script's
    pipe = DiffusionPipeline.from_pretrained(pipelines["sd3"])
    noise_scheduler = copy.deepcopy(pipe.scheduler)
    timesteps = noise_scheduler.timesteps[indices]
    places = [(noise_scheduler.timesteps == each).nonzero().item() for each in timesteps]
    sigmas = noise_scheduler.sigmas[places].flatten()[:, None, None, None]
    noisy_model_input = (1.0 - sigmas) * model_input + sigmas * eps
    assert torch.allclose(x_t, noisy_model_input, atol=1e-6)
    with torch.no_grad():
        embeds, _, pooled, _ = pipe.encode_prompt(batch["text"], None, None, do_classifier_free_guidance=False)
        model_pred = pipe.transformer(
            hidden_states=noisy_model_input,
            timestep=timesteps,
            encoder_hidden_states=embeds,
            pooled_projections=pooled,
            return_dict=False,
        )[0]
    for ours, scheme, preconditioned in ARMS:
        run.memory.config.loss.name = ours
        loss = run.memory.loss_per_sample(pred, target, t, torch.ones(len(t)), batch).mean()
        prediction, goal = model_pred, eps - model_input
        if preconditioned:
            prediction, goal = model_pred * (-sigmas) + noisy_model_input, model_input
        weighting = compute_loss_weighting_for_sd3(scheme, sigmas)
        wanted = torch.mean(
            (weighting.float() * (prediction.float() - goal.float()) ** 2).reshape(len(t), -1), 1
        ).mean()
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-5), ours


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_the_path_and_its_estimates_of_the_noise(shift):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    flow, t = Flow(scheduler), torch.tensor([0, 400, 999])
    x0, eps = torch.randn(2, 3, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    x_t, fed = flow.add_noise(x0, eps, t), diffusion.model_time(flow, t)
    assert torch.allclose(x_t, scheduler.scale_noise(x0, fed, eps), atol=1e-6)
    assert (fed[1:] > fed[:-1]).all() and fed[-1] == 1000  # the least noise first
    target = diffusion.prediction_target(flow, x0, eps, t)
    assert torch.allclose(diffusion.to_epsilon(flow, target, x_t, t), eps, atol=1e-5)
    snr = diffusion.signal_to_noise(flow)
    assert snr[-1] == 0 and (snr.diff() < 0).all()
    assert torch.allclose(flow_sigma(snr), scheduler.sigmas.flip(0), atol=1e-6)


def test_latents_have_the_shift_and_lose_it_again(sd3):
    run = sd3()
    pixels, vae = torch.rand(2, 3, 16, 16) * 2 - 1, run.parts.vae
    with torch.no_grad():
        mode = vae.encode(pixels).latent_dist.mode()
        assert torch.allclose(run.encoder.mode(pixels), (mode - 0.06) * 1.5, atol=1e-5)
        assert torch.allclose(decode(vae, (mode - 0.06) * 1.5), vae.decode(mode).sample, atol=1e-5)


# ---------------------------------------------------------------- text
@pytest.mark.parametrize("t5", [True, False], ids=["T5", "without T5"])
def test_text_states_are_those_of_the_pipeline_cached_or_not(t5, build, pipelines, tmp_path):
    where = pipelines["sd3"] if t5 else tmp_path / "pipe"
    if not t5:
        tiny_sd3_pipeline(t5=False).save_pretrained(where)
    runs = [build(f"run{mb}", pretrained_model_name_or_path=where, cache_mb=mb, disk_cache_gb=mb) for mb in (0, 1)]
    pipe, texts = pipeline.pipeline(runs[0].parts), ["a picture of a red cat", ""]
    embeds, _, pooled, _ = pipe.encode_prompt(texts, None, None, do_classifier_free_guidance=False)
    assert embeds.shape == (2, 48 + 256, 64) and bool(embeds[:, 48:].any()) == t5
    for run in runs:
        c = run.encoder.condition(texts)
        assert torch.allclose(c["encoder_hidden_states"], embeds, atol=1e-5)
        assert torch.allclose(c["added_cond_kwargs"]["text_embeds"], pooled, atol=1e-5)
    if not t5:
        runs[0].products.save_pipeline(tmp_path / "saved")
        none = dict.fromkeys(FAMILY.optional)
        assert "text_encoder_3=None, tokenizer_3=None)" in (tmp_path / "saved" / "README.md").read_text()
        assert DiffusionPipeline.from_pretrained(tmp_path / "saved", **none).text_encoder_3 is None
    resting = runs[1].encoder.offloaded  # all records' captions are on disk, so no step needs an encoder
    assert len(resting) == 3 + t5 and all(any(m is part for part in resting) for m in runs[1].encoder.text_encoders)


# ---------------------------------------------------------------- groups
@pytest.mark.parametrize("which", TRANSFORMERS)
def test_groups_by_block_and_role_are_exact(which):
    model = Denoiser(published_transformer(which), FAMILY)
    groups = group_parameters(model)
    names = [name for members in groups.members.values() for name in members]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert OTHER not in groups.names and sum(groups.sizes) == sum(p.numel() for p in model.parameters())
    assert {"block3.attn.q", "block3.attn.context.v", "block3.ff", "block3.ff.context", "block3.mod"} < {*groups.names}
    assert ("block3.attn.image.q" in groups.names) == (which == "3.5 medium")
    assert groups.names[0].startswith("stem") and groups.names[-1].startswith("block")


def test_a_layer_has_its_role_whatever_wraps_it():
    for name, group in {
        "transformer.transformer_blocks.3.attn.to_q.lora_A.default.weight": "block3.attn.q",
        "transformer_blocks.11.attn.to_add_out.bias": "block11.attn.context.o",
        "module.transformer.transformer_blocks.0.attn2.to_out.0.weight": "block0.attn.image.o",
        "transformer.transformer_blocks.0.attn2.norm_q.weight": "block0.norm",
        "transformer.transformer_blocks.0.norm1_context.linear.bias": "block0.mod.context",
        "transformer.time_text_embed.text_embedder.linear_1.weight": "stem.time",
        "transformer.proj_out.weight": "stem.io",
        "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_q.weight": "down0.xattn.q",
    }.items():
        assert group_of(name) == group


def test_what_gets_no_gradient_stays_frozen(sd3):
    """The last block drops its text tokens, so their queries there reach nothing; all else is reached."""
    run = sd3()
    frozen = {n for n, p in run.parts.model.named_parameters() if not p.requires_grad}
    assert frozen == {
        f"transformer.transformer_blocks.2.attn.{n}"
        for n in ("add_q_proj.weight", "add_q_proj.bias", "norm_added_q.weight")
    }
    before = {n: p.clone() for n, p in run.parts.model.named_parameters()}
    step_once(run)
    after = dict(run.parts.model.named_parameters())
    assert {n for n in before if torch.equal(before[n], after[n])} == frozen


@pytest.mark.thorough
def test_compilation_changes_rounding_only(sd3, monkeypatch):
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **k: compiled(model, **k, backend="aot_eager"))
    plain, other = sd3(adam_epsilon=1e-3), sd3(adam_epsilon=1e-3, compile_model=True)
    for _ in range(2):
        torch.testing.assert_close(step_once(other), step_once(plain), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- files
def pixels(pipe) -> np.ndarray:
    return np.asarray(pipeline.draw_images(pipe, ["a red cat"], 0, steps=2)[0]).astype(int)


def test_plain_diffusers_loads_what_it_saves(sd3, tmp_path):
    run = sd3()
    step_once(run)
    run.products.save_pipeline(tmp_path / "pipeline")
    plain = DiffusionPipeline.from_pretrained(tmp_path / "pipeline")
    assert type(plain) is FAMILY.pipeline and plain.scheduler.shift == 3
    assert same(plain.transformer.state_dict(), run.parts.backbone.state_dict())
    assert np.abs(pixels(plain) - pixels(pipeline.pipeline(run.parts))).max() <= 1


MADE = {"lora": "lora_", "dora": "lora_", "loha": "hada_", "lokr": "lokr_"}  # in the names of what trains


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.thorough if k in ("dora", "loha") else ()) for k in MADE]
)
def test_adapters_are_read_by_others(kind, sd3, pipelines, tmp_path):
    run = sd3(**LORA, **{"lora.kind": kind, "lora.merged": True})
    trained = [n for n, p in run.parts.model.named_parameters() if p.requires_grad]
    assert trained and all(MADE[kind] in n for n in trained)
    for _ in range(2):
        step_once(run)
    saved = run.folder.pipeline = run.folder.path / "lora"
    run.products.save_pipeline(saved)
    base = str(pipelines["sd3"])
    plain = DiffusionPipeline.from_pretrained(base)
    after, before = pixels(pipeline.pipeline(run.parts)), pixels(plain)
    assert np.abs(after - before).max() > 2
    assert np.abs(pixels(pipeline.load_pipeline(base, "float32", "cpu", str(saved))) - after).max() <= 1
    assert np.abs(pixels(DiffusionPipeline.from_pretrained(run.folder.path / "pipeline")) - after).max() <= 1
    assert not (saved / lora.KOHYA).exists()  # its names for this family fuse what is apart here
    if kind in lora.FOLDERS:
        plain.transformer = PeftModel.from_pretrained(plain.transformer, saved / "transformer").merge_and_unload()
    else:
        plain.load_lora_weights(saved)
    assert np.abs(pixels(plain) - after).max() <= 1


def test_the_usual_targets_adapt_all_of_joint_attention():
    transformer = published_transformer("3 medium")
    with torch.device("meta"):
        lora.add("transformer", transformer, LoraSettings(rank=4), 0)
    roles = {group_of(n).split(".", 1)[1] for n, p in transformer.named_parameters() if p.requires_grad}
    assert roles == {f"attn.{part}{x}" for part in ("", "context.") for x in "qkvo"}


# ---------------------------------------------------------------- refused
@pytest.mark.parametrize(
    "settings, said",
    [
        ({"snr_gamma": 5}, "snr_gamma (command line): weighs the error of epsilon"),
        ({"resolution": 15}, "resolution (command line): 15 is not a multiple of 4"),
        ({"resolution": 64}, "resolution (command line): 64 is more than the 32 that"),
    ],
    ids=str,
)
def test_what_a_flow_or_a_transformer_cannot_have_is_refused(settings, said, flags, pipelines, capsys):
    assert main(flags(pretrained_model_name_or_path=pipelines["sd3"], **settings)) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("key, value", [("use_dynamic_shifting", True), ("shift_terminal", 0.1)])
def test_a_schedule_that_is_no_fixed_path_is_refused(key, value):
    settings = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}
    FAMILY.check_schedule(settings, "here")
    with pytest.raises(UserError, match=f"here: {key} is"):
        FAMILY.check_schedule(settings | {key: value}, "here")


def test_guidance_rescale_is_refused():
    with pytest.raises(UserError, match="guidance_rescale"):
        Sampler(tiny_sd3_pipeline(t5=False).components, ValidationConfig(guidance_rescale=0.5), 0)
