"""Images of a validation: what plain diffusers makes, prompts encoded once, batches that fit."""

import pytest
import torch
from diffusers import DDPMScheduler

from silentbad.errors import UserError
from silentbad.loop.signals import Interrupted
from silentbad.measure.generation import Sampler, plan
from silentbad.model.stable_diffusion import StableDiffusion
from silentbad.rng import generator, noise
from tests.recoveries import make_hook, some_targets
from tests.tiny import tiny_pipeline
from validation import ValidationConfig


@pytest.mark.parametrize("kind", ["v_prediction", "epsilon", "ddpm"])
def test_generation_equals_plain_diffusers(kind):
    pipe = tiny_pipeline("epsilon" if kind == "ddpm" else kind)
    if kind == "ddpm":  # draws noise at every step
        pipe.scheduler = DDPMScheduler.from_config(pipe.scheduler.config)
    pipe.set_progress_bar_config(disable=True)
    config = ValidationConfig(num_inference_steps=3, guidance_scale=4.0, guidance_rescale=0.3)
    items = plan(some_targets(2), 2, seed=7)
    sampler = Sampler({**pipe.components, "unet": tiny_pipeline().unet}, config, seed=7)
    resting = sampler.pipe.unet
    with sampler.using(pipe.unet, torch.device("cpu")):
        images, magnitudes = sampler.generate(items)
    assert sampler.pipe.unet is resting, "a copy made for the measurement would stay in memory"
    for item, image in zip(items, images, strict=True):
        latents = noise((4, 8, 8), 7, f"validation/{item.address}", 0, [item.image])
        plain = pipe(
            item.prompt,
            latents=latents,
            num_inference_steps=3,
            guidance_scale=4.0,
            guidance_rescale=0.3,
            generator=[generator(7, "validation-steps", item.address, item.image)],
            output_type="pt",
        ).images
        assert torch.allclose(plain[0], image, atol=2e-5)
    assert (magnitudes > 0).all()


def test_xl_pipeline_generates():
    from tests.tiny import tiny_xl_pipeline

    pipe = tiny_xl_pipeline()
    sampler = Sampler(pipe.components, ValidationConfig(num_inference_steps=2), 0)
    with sampler.using(pipe.unet, torch.device("cpu")):
        images, _ = sampler.generate(plan(some_targets(1), 2, 0))
        record = {"pixel_values": torch.zeros(3, 16, 16), "text": "a cat"}
        errors = sampler.eps_errors([record], [0], "validation/clean")
    assert images.shape == (2, 3, 16, 16) and images.isfinite().all() and errors[0] > 0


def test_a_signal_ends_a_round_trip_between_two_batches():
    """Of an autoencoder at true size 60 pictures take minutes."""
    pipe = tiny_pipeline()
    sampler = Sampler(pipe.components, ValidationConfig(), 0)
    calls = []

    def ask():
        calls.append(1)
        if len(calls) == 3:
            raise Interrupted

    sampler.between_batches = ask
    with sampler.using(pipe.unet, torch.device("cpu")), pytest.raises(Interrupted):
        sampler.round_trip(torch.rand(40, 3, 16, 16))
    assert len(calls) == 3  # of five batches of eight


def test_the_error_on_held_out_records_is_measured_in_batches_that_fit(monkeypatch):
    """The autoencoder sees at most 8 pictures, the model fewer where memory runs out."""
    pipe = tiny_pipeline()
    noises = torch.randn(20, 3, 16, 16, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    records = [{"pixel_values": pixels, "text": f"a cat {i}"} for i, pixels in enumerate(noises)]
    encode = pipe.vae.encode
    predict = Sampler.predict_eps
    seen = []

    def tight(self, x_t, *more):
        if len(x_t) > 5:
            raise RuntimeError("CUDA out of memory.")
        return predict(self, x_t, *more)

    monkeypatch.setattr(pipe.vae, "encode", lambda x: seen.append(len(x)) or encode(x))
    sampler = Sampler(pipe.components, ValidationConfig(max_batch=20), 0)
    with sampler.using(pipe.unet, torch.device("cpu")):
        whole = sampler.eps_errors(records, list(range(20)), "validation/clean")
        assert max(seen) == 8 and sampler.batch == 20
        monkeypatch.setattr(Sampler, "predict_eps", tight)
        parts = sampler.eps_errors(records, list(range(20)), "validation/clean")
    assert sampler.batch == 5 and parts == pytest.approx(whole, rel=1e-4)


def test_sampling_scheduler_respects_prediction_type_override():
    pipe = tiny_pipeline("epsilon")
    sampler = Sampler(pipe.components, ValidationConfig(), 0, prediction_type="v_prediction")
    assert sampler.pipe.scheduler.config.prediction_type == "v_prediction"
    assert pipe.scheduler.config.prediction_type == "epsilon" and sampler.pipe.scheduler is not pipe.scheduler


def test_sampling_that_begins_beyond_the_schedule_is_one_line():
    pipe = tiny_pipeline()
    settings = {**pipe.scheduler.config, "timestep_spacing": "leading", "steps_offset": 1}
    parts = {**pipe.components, "scheduler": type(pipe.scheduler).from_config(settings)}
    Sampler(parts, ValidationConfig(num_inference_steps=500), 0)
    with pytest.raises(UserError, match="num_inference_steps: 1000 steps begin at timestep 1000 of 1000"):
        Sampler(parts, ValidationConfig(num_inference_steps=1000), 0)


def test_guidance_scale_reaches_the_pipeline(tmp_path):
    means = []
    for scale in (1.0, 9.0):
        hook = make_hook(tmp_path, guidance_scale=scale, images_per_target=5)
        hook.run(0, 0, tiny_pipeline().unet)
        scores = hook.history[0].raw
        assert scores.images == 10 and len(scores.targets["t0"].sims) == 5
        assert (scores.magnitude is None) == (scale == 1.0)
        means.append(scores.mean)
    assert means[0] != means[1]


def test_generator_is_not_seeded_from_the_clock(tmp_path):
    sims = []
    for folder in "ab":
        hook = make_hook(tmp_path / folder)
        hook.run(0, 0, tiny_pipeline().unet)
        sims.append(hook.history[0].raw.targets["t0"].sims)
    assert sims[0] == sims[1]


def test_pipeline_is_built_once_and_prompts_encoded_once(tmp_path, monkeypatch):
    built = []
    encoded = []
    kind = StableDiffusion.pipeline
    monkeypatch.setattr(StableDiffusion, "pipeline", staticmethod(lambda **k: built.append(1) or kind(**k)))
    pipe = tiny_pipeline()
    pipe.text_encoder.requires_grad_(False)
    hook = make_hook(tmp_path, pipe)
    encode = hook.sampler.pipe.encode_prompt
    monkeypatch.setattr(
        hook.sampler.pipe,
        "encode_prompt",
        lambda prompt=None, *a, **k: encoded.extend(prompt or []) or encode(prompt, *a, **k),
    )
    for step in (0, 100, 200):
        hook.run(step, 0, pipe.unet)
    assert len(built) == 1 and len(encoded) == len(set(encoded)) > 0


def test_batch_halves_when_memory_runs_out_and_remembers(tmp_path, monkeypatch):
    hook = make_hook(tmp_path, max_batch=64, images_per_target=8)
    generate = hook.sampler.generate
    sizes = []

    def tight(items):
        sizes.append(len(items))
        if len(items) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return generate(items)

    monkeypatch.setattr(hook.sampler, "generate", tight)
    hook.run(0, 0, tiny_pipeline().unet)
    assert hook.sampler.batch == 2 and max(sizes[3:]) <= 4
    sizes.clear()
    hook.run(100, 0, tiny_pipeline().unet)
    assert set(sizes) == {2} and hook.state_dict()["batch"] == 2
    monkeypatch.setattr(hook.sampler, "generate", lambda items: (_ for _ in ()).throw(RuntimeError("another error")))
    with pytest.raises(RuntimeError, match="another"):
        hook.run(200, 0, tiny_pipeline().unet)
