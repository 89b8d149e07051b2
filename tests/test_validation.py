"""Recovery: scores, threshold, embedders, the hook that training does not notice, and the audit."""

import copy
import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler
from diffusers.training_utils import EMAModel
from PIL import Image

import validation
from silentbad import class_images, generation
from silentbad.calibration import calibrate, load_redraws, of_element, thresholds
from silentbad.data import Target, load_targets
from silentbad.errors import UserError
from silentbad.generation import Sampler, averaged, plan
from silentbad.rng import generator, noise
from silentbad.samples import slugs
from silentbad.similarity import (
    EMBEDDERS,
    SSIM,
    binomial_interval,
    bootstrap_interval,
    curve_scores,
    region,
    to_pil,
    to_tensor,
)
from tests.tiny import TOKENIZER, tiny_pipeline
from validation import RecoveryHook, ValidationConfig, recovery

ROOT = Path(__file__).parents[1]


def smooth(*address, side: int = 16) -> Image.Image:
    """A random picture of broad blobs."""
    coarse = torch.rand(1, 3, 4, 4, generator=generator(*address))
    return to_pil(torch.nn.functional.interpolate(coarse, (side, side), mode="bicubic").clamp(0, 1)[0])


def some_targets(n: int = 2) -> list[Target]:
    box = np.zeros((16, 16), np.uint8)
    box[2:9, 3:12] = 255
    masks = [Image.fromarray(box), None, Image.fromarray(255 - box)]
    return [
        Target(f"t{i}", smooth("target", i), ["a red cat", "a hat", f"on beach {i}"], None, masks)
        for i in range(n)
    ]


def make_hook(folder, pipe=None, targets=None, **options) -> RecoveryHook:
    pipe = pipe or tiny_pipeline()
    clean = [
        {"pixel_values": to_tensor(smooth("clean", i)) * 2 - 1, "text": f"a house {i}"} for i in range(5)
    ]
    settings = dict(
        embedder="ssim", images_per_target=3, num_inference_steps=2, guidance_scale=3.0, null_images=4
    )
    config = ValidationConfig(**{**settings, **options})
    return RecoveryHook(
        config,
        targets=targets or some_targets(),
        components=pipe.components,
        clean=clean,
        accelerator=Accelerator(cpu=True),
        output_dir=folder,
        seed=0,
    )


def shifted(unet, amount: float = 0.02):
    """Another model: every weight moved a little."""
    with torch.no_grad():
        for i, p in enumerate(unet.parameters()):
            p.add_(amount * torch.randn(p.shape, generator=generator("shift", i)))
    return unet


# -- scores -----------------------------------------------------------------------------------------------
def test_recovery_scores_each_target_on_its_own_images():
    sim = torch.tensor([[0.9, 0.1], [0.5, 1.0], [0.2, 0.8], [1.0, 0.6]])
    scores = recovery(sim, [0, 0, 1, 1], 0.7)
    assert scores["rate"].tolist() == [0.5, 0.5]
    assert scores["max"].tolist() == pytest.approx([0.9, 0.8])
    assert scores["mean"].tolist() == pytest.approx([0.7, 0.7])
    own = recovery(torch.tensor([0.9, 0.5, 0.8, 0.6]), [0, 0, 1, 1], torch.tensor([0.7, 0.6]))
    assert own["rate"].tolist() == [0.5, 1.0]
    assert recovery(torch.tensor([0.3]), [1], 0.5)["mean"].isnan().tolist() == [True, False]


def test_ideal_memoriser_scores_one_and_redraws_do_not():
    targets = [to_tensor(smooth("target", i))[None] for i in range(4)]
    redraws = [to_tensor(smooth("redraw", i, j))[None] for i in range(4) for j in range(50)]
    embedder = SSIM()
    features = torch.cat([embedder.embed(x) for x in targets])
    null = embedder.similarity(torch.cat([embedder.embed(x) for x in redraws]), features)
    target_of = np.repeat(np.arange(4), 50)
    threshold = calibrate(null[range(200), target_of], 0.01, target_of)
    memorised = recovery(embedder.similarity(features, features), range(4), threshold["value"])
    assert memorised["rate"].tolist() == [1.0] * 4
    assert recovery(null, target_of, threshold["value"])["rate"].mean() <= 0.01


def test_calibrated_threshold_keeps_its_rate_on_fresh_nulls():
    rng, alpha, rates, covered = np.random.default_rng(0), 0.05, [], 0
    truth = np.quantile(rng.beta(2, 5, 400_000), 1 - alpha)
    for _ in range(300):
        found = calibrate(rng.beta(2, 5, 199), alpha)
        rates.append(np.mean(rng.beta(2, 5, 500) >= found["value"]))
        covered += found["low"] <= truth <= found["high"]
    assert np.mean(rates) == pytest.approx(alpha, abs=0.006)
    assert covered / 300 > 0.92


def test_calibration_says_what_few_nulls_are_worth():
    found = calibrate([0.1, 0.3, 0.2], 0.01)
    assert 0.3 < found["value"] < 0.3001 and found["attained"] == 0.25 and found["high"] is None
    tilted = calibrate([0.1] * 50 + [0.9] * 50, 0.02, ["a"] * 50 + ["b"] * 50)
    assert tilted["held_out"] == 0.5  # each target's level says nothing about the other's
    with pytest.raises(UserError, match="null scores"):
        calibrate([], 0.01)


def test_each_element_has_the_threshold_of_its_own_nulls():
    rng = np.random.default_rng(1)
    null = [{"target": j, "sim": 0.1, "elements": [rng.uniform(0, high) for high in (0.9, 0.4, 0.6)[: 3 - j]]}
            for j in (0, 1) for _ in range(99 if j == 0 else 50)]  # fmt: skip
    _, found = thresholds(null, None, 0.01, "test")
    for k in range(3):
        own = [row["elements"][k] for row in null if row["target"] == 0]
        assert of_element(found, 0, k) == pytest.approx(max(own), abs=1e-9)  # ceil(100 * 0.99) = the 99th of 99
    assert of_element(found, 1, 0) == of_element(found, 1, 1) == found["value"]  # 50 are too few: they share
    rows = [{"target": 0, "sim": 0.9, "magnitude": 1.0, "elements": [0.5, 0.5, 0.5]}]
    scores = validation.cell_scores(rows, ["a"], 0.5, found)
    assert [e["rate"] for e in scores["targets"]["a"]["elements"]] == [0.0, 1.0, 0.0]


def test_intervals():
    assert binomial_interval(0, 10) == pytest.approx((0, 0.30850), abs=1e-4)
    assert binomial_interval(5, 10) == pytest.approx((0.18709, 0.81291), abs=1e-4)
    assert binomial_interval(1000, 1000)[0] == pytest.approx(0.99632, abs=1e-4)
    low, high = bootstrap_interval(np.arange(100) / 100)
    assert low < 0.495 < high and 0.08 < high - low < 0.15


def test_curve_scores():
    rates = np.array([[0, 0.0], [0, 0.5], [0.25, 1]])
    scores = curve_scores([0, 100, 200], rates, rates > 0)
    assert scores["aurc"].tolist() == [0.0625, 0.5]
    assert scores["first"].tolist() == [200, 100] and scores["half"].tolist() == [np.inf, 100]
    never = curve_scores([0, 100], np.zeros((2, 1)), np.zeros((2, 1)))
    assert never["first"][0] == np.inf and never["restricted"][0] == 100


# -- embedders --------------------------------------------------------------------------------------------
def saved_embedder(name: str, folder: Path) -> str | None:
    """Random weights of each kind, saved as their users have them."""
    if name == "micro":
        from silentbad.microworld.embedder import MicroEmbedder

        MicroEmbedder().save_pretrained(folder)
    elif name == "sscd":
        net = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(48, 16))
        torch.jit.trace(net.eval(), torch.rand(1, 3, 320, 320)).save(str(folder / "sscd.pt"))
        return str(folder / "sscd.pt")
    elif name == "clip":
        from transformers import AutoTokenizer, CLIPConfig, CLIPImageProcessor, CLIPModel

        tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
        side = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        text = dict(
            **side, vocab_size=len(tokenizer), max_position_embeddings=20, eos_token_id=tokenizer.eos_token_id
        )
        vision = dict(**side, image_size=32, patch_size=8)
        CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)).save_pretrained(
            folder
        )
        CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    elif name == "dinov2":
        from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

        Dinov2Model(
            Dinov2Config(
                hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
            )
        ).save_pretrained(folder)
        BitImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 28, "width": 28}).save_pretrained(
            folder
        )
    else:
        return None
    return str(folder)


@pytest.mark.parametrize("name", EMBEDDERS)
def test_embedder_contract(name, tmp_path):
    embedder = EMBEDDERS[name](saved_embedder(name, tmp_path), "cpu")
    images = torch.stack([to_tensor(smooth("embed", i, side=40)) for i in range(3)])
    features = embedder.embed(images)
    matrix = embedder.similarity(features, features[:2])
    assert matrix.shape == (3, 2) and matrix.max() <= 1 + 1e-5
    assert torch.diagonal(matrix).tolist() == pytest.approx([1, 1], abs=1e-5)
    assert torch.allclose(
        embedder.paired(features[:2], features[1:]),
        embedder.similarity(features[:2], features[1:]).diagonal(),
    )
    assert embedder.embed(torch.rand(1, 3, 1, 1)).isfinite().all()
    assert name in embedder.describe() and any(c.isdigit() for c in embedder.describe())


def test_missing_embedder_files_say_where_to_get_them(tmp_path):
    with pytest.raises(UserError, match="facebookresearch/sscd-copy-detection"):
        EMBEDDERS["sscd"](str(tmp_path / "no.pt"))
    (tmp_path / "bad.pt").write_text("no script")
    with pytest.raises(UserError, match="not a TorchScript"):
        EMBEDDERS["sscd"](str(tmp_path / "bad.pt"))
    for name in ("micro", "clip", "dinov2"):
        with pytest.raises(UserError, match=f"^{name}: "):
            EMBEDDERS[name](str(tmp_path / "nothing"))


def test_sscd_is_read_only_from_the_path_given(tmp_path, monkeypatch):
    """No default from the working directory, nothing fetched: a TorchScript file runs code."""
    import huggingface_hub

    Path(saved_embedder("sscd", tmp_path)).rename(tmp_path / "sscd_disc_mixup.torchscript.pt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: str(next(tmp_path.iterdir())))
    for path in (None, "", "owner/repository/sscd.torchscript.pt", str(tmp_path)):
        with pytest.raises(UserError, match="download sscd_disc_mixup.torchscript.pt.*sscd-copy-detection") as refused:
            EMBEDDERS["sscd"](path)
        assert "\n" not in str(refused.value)
    EMBEDDERS["sscd"]("sscd_disc_mixup.torchscript.pt")


def test_sscd_with_another_sha256_is_not_loaded(tmp_path, monkeypatch):
    path = saved_embedder("sscd", tmp_path)
    right = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    options = dict(embedder="sscd", embedder_path=path, threshold=0.5)
    hook = make_hook(tmp_path / "run", **options, embedder_sha256=right.upper())
    assert right in hook.embedder.describe()
    with pytest.raises(UserError, match="^embedder_sha256: .* ssim"):
        make_hook(tmp_path / "run", embedder="ssim", embedder_sha256=right)
    monkeypatch.setattr(torch.jit, "load", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(UserError, match=f"embedder_sha256 is 00, but .* has {right}"):
        make_hook(tmp_path / "run", **options, embedder_sha256="00")


def pickled(folder: Path) -> None:
    """Safetensors of a folder replaced by the same weights, pickled under their former names."""
    from safetensors.torch import load_file

    for file in list(folder.rglob("*.safetensors")):
        torch.save(load_file(file), file.with_name({"model": "pytorch_model"}.get(file.stem, file.stem) + ".bin"))
        file.unlink()


@pytest.mark.parametrize("name", ["clip", "dinov2", "pipeline", "class_images"])
def test_pickled_weights_are_refused(name, tmp_path, capsys):
    folder, expected = tmp_path / "weights", "no safetensors weights; pickled ones are not loaded"
    folder.mkdir()
    if name in EMBEDDERS:
        saved_embedder(name, folder)
        pickled(folder)
        with pytest.raises(UserError, match=f"^{name}: .*{expected}") as refused:
            EMBEDDERS[name](str(folder))
        assert "\n" not in str(refused.value)
        return
    tiny_pipeline().save_pretrained(folder)
    generation.load_pipeline(str(folder), "float32", "cpu")
    pickled(folder / "text_encoder" if name == "pipeline" else folder)
    if name == "pipeline":
        with pytest.raises(UserError, match=expected):
            generation.load_pipeline(str(folder), "float32", "cpu")
    else:
        (tmp_path / "prompts.txt").write_text("a cat")
        flags = ["--pipeline", str(folder), "--prompts", str(tmp_path / "prompts.txt"), "--out", str(tmp_path / "out")]
        assert class_images.main(flags) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("error: --pipeline: cannot load") and expected in error


def test_ssim_equals_torchmetrics():
    from torchmetrics.functional.image import structural_similarity_index_measure

    from silentbad.similarity import ssim

    a, b = (torch.stack([to_tensor(smooth(k, i, side=48)) for i in range(2)]) for k in "ab")
    _, full = structural_similarity_index_measure(
        a, b, data_range=1.0, reduction="none", return_full_image=True
    )
    inner = full[..., 5:-5, 5:-5].flatten(1).mean(1)  # where the window needs no padding
    assert torch.allclose(ssim(a, b), inner, atol=1e-4)


def test_region_keeps_the_element_and_greys_the_rest():
    image, mask = torch.zeros(1, 3, 20, 20), torch.zeros(1, 40, 40)
    mask[:, 10:20, 20:30] = 1
    image[..., 5:10, 10:15] = 1
    part = region(image, mask)
    assert (
        part.shape[-2:] == (7, 7)
        and part[0, 0, 3, 3] == 1
        and part[0, 0, 0, 0] == pytest.approx(0.5, abs=0.02)
    )
    assert region(image, torch.zeros(1, 4, 4)).shape == image.shape


# -- prompts ----------------------------------------------------------------------------------------------
def test_phrase_lists_are_not_shuffled_in_place():
    targets = some_targets(3)
    before = copy.deepcopy([t.phrases for t in targets])
    state = random.getstate()
    cells = {item.cell for item in plan(targets, 3, 0, True, "a map")}
    assert cells == {"composed", "shuffled", "phrase-0", "phrase-1", "phrase-2", "others", "unrelated"}
    assert [t.phrases for t in targets] == before and random.getstate() == state
    for item in plan(targets, 8, 0, True, "a map"):
        if item.cell == "shuffled":
            assert item.prompt != targets[item.target].composed_prompt
            assert sorted(item.prompt.split(", ")) == sorted(targets[item.target].phrases)
    alone = plan([Target("x", smooth(1), ["a cat"], None, [None])], 1, 0, True, "a map")
    assert [i.cell for i in alone] == ["composed", "unrelated"]


def test_targets_and_their_order_do_not_leak(tmp_path):
    targets = some_targets(3)
    forward, backward = (
        make_hook(tmp_path / "a", targets=targets),
        make_hook(tmp_path / "b", targets=targets[::-1]),
    )
    unet = tiny_pipeline().unet
    for hook in (forward, backward):
        hook.run(0, 0, unet)
        hook.run(5, 1, unet, final=True)
    a, b = forward.history[-1]["raw"], backward.history[-1]["raw"]
    for cell, scores in a["cells"].items():
        for name, target in scores["targets"].items():
            assert target["sims"] == pytest.approx(b["cells"][cell]["targets"][name]["sims"], abs=1e-5), cell
    few = make_hook(tmp_path / "c", targets=targets[1:2])
    few.run(0, 0, unet)
    assert few.history[0]["raw"]["targets"]["t1"]["sims"] == pytest.approx(
        forward.history[0]["raw"]["targets"]["t1"]["sims"], abs=1e-5
    )


# -- generation -------------------------------------------------------------------------------------------
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
        errors = sampler.eps_errors([{"pixel_values": torch.zeros(3, 16, 16), "text": "a cat"}], [0])
    assert images.shape == (2, 3, 16, 16) and images.isfinite().all() and errors[0] > 0


def test_sampling_scheduler_respects_prediction_type_override():
    pipe = tiny_pipeline("epsilon")
    sampler = Sampler(pipe.components, ValidationConfig(), 0, prediction_type="v_prediction")
    assert sampler.pipe.scheduler.config.prediction_type == "v_prediction"
    assert pipe.scheduler.config.prediction_type == "epsilon" and sampler.pipe.scheduler is not pipe.scheduler


def test_guidance_scale_reaches_the_pipeline_and_image_count_is_kept(tmp_path):
    means = []
    for scale in (1.0, 9.0):
        hook = make_hook(tmp_path, guidance_scale=scale, images_per_target=5)
        hook.run(0, 0, tiny_pipeline().unet)
        scores = hook.history[0]["raw"]
        assert scores["images"] == 10 and len(scores["targets"]["t0"]["sims"]) == 5
        assert (scores["magnitude"] is None) == (scale == 1.0)
        means.append(scores["mean"])
    assert means[0] != means[1]


def test_generator_is_not_seeded_from_the_clock(tmp_path):
    sims = []
    for folder in "ab":
        hook = make_hook(tmp_path / folder)
        hook.run(0, 0, tiny_pipeline().unet)
        sims.append(hook.history[0]["raw"]["targets"]["t0"]["sims"])
    assert sims[0] == sims[1]


def test_pipeline_is_built_once_and_prompts_encoded_once(tmp_path, monkeypatch):
    built, encoded = [], []
    kind = generation.StableDiffusionPipeline
    monkeypatch.setattr(generation, "StableDiffusionPipeline", lambda **k: built.append(1) or kind(**k))
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
    generate, sizes = hook.sampler.generate, []

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
    monkeypatch.setattr(
        hook.sampler, "generate", lambda items: (_ for _ in ()).throw(RuntimeError("another error"))
    )
    with pytest.raises(RuntimeError, match="another"):
        hook.run(200, 0, tiny_pipeline().unet)


# -- the hook ---------------------------------------------------------------------------------------------
def training_state(unet, optimizer, ema) -> list:
    tensors = [p.detach().clone() for p in unet.parameters()] + [p.clone() for p in ema.shadow_params]
    tensors += [v.clone() for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    streams = [torch.get_rng_state(), torch.tensor(np.random.get_state()[1].astype(np.int64))]
    return [
        tensors + streams,
        random.getstate(),
        [m.training for m in unet.modules()],
        optimizer.param_groups[0]["lr"],
    ]


def same(a: list, b: list) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True)) and a[1:] == b[1:]


def trained(pipe):
    """A UNet in training mode with a used optimizer and an average that differs from it."""
    ema = EMAModel(pipe.unet.parameters())
    optimizer = torch.optim.AdamW(pipe.unet.parameters())
    pipe.unet.train()
    pipe.unet.mid_block.eval()
    for p in pipe.unet.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return ema, optimizer


def test_training_does_not_notice_validation(tmp_path):
    pipe = tiny_pipeline()
    hook = make_hook(tmp_path, pipe, controls="always")
    ema, optimizer = trained(pipe)
    before, grads = (
        training_state(pipe.unet, optimizer, ema),
        [p.grad.clone() for p in pipe.unet.parameters()],
    )
    hook.run(0, 0, pipe.unet, ema)
    hook.run(100, 1, pipe.unet, ema)
    assert same(before, training_state(pipe.unet, optimizer, ema))
    assert all(torch.equal(g, p.grad) for g, p in zip(grads, pipe.unet.parameters(), strict=True))
    assert not pipe.unet._forward_hooks and "ema" in hook.history[1]
    assert hook.history[1]["raw"]["mean"] != hook.history[1]["ema"]["mean"]


def test_exception_between_store_and_restore_leaves_raw_weights(tmp_path, monkeypatch):
    pipe = tiny_pipeline()
    hook = make_hook(tmp_path, pipe, weights="ema")
    ema, optimizer = trained(pipe)
    hook.run(0, 0, pipe.unet)
    before = training_state(pipe.unet, optimizer, ema)
    monkeypatch.setattr(hook, "_score", lambda *a: (torch.rand(3), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        hook.run(100, 1, pipe.unet, ema)
    assert same(before, training_state(pipe.unet, optimizer, ema))
    assert len(hook.history) == 1 and not pipe.unet._forward_hooks


def test_averaged_weights_alone(tmp_path):
    from silentbad import report

    pipe = tiny_pipeline()
    hook = make_hook(tmp_path, pipe, weights="ema")
    ema, _ = trained(pipe)
    hook.run(0, 0, pipe.unet)
    hook.finish(10, 1, pipe.unet, ema)
    assert "raw" not in hook.history[1] and {r["weights"] for r in hook.summary()} == {"ema"}
    assert len({tuple(row) for row in hook.summary()}) == 1  # every row has the same columns
    text = report.write(tmp_path).read_text()
    assert "averaged weights" in text and "curve: raw" not in text


def test_similarities_are_in_full_precision_under_autocast(tmp_path):
    pipe = tiny_pipeline()
    hook = make_hook(tmp_path, pipe)
    hook.accelerator.autocast = lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    seen = []
    similar = hook._similar

    def watched(images, of):
        seen.append((images.dtype, torch.is_autocast_enabled("cpu")))
        return similar(images, of)

    hook._similar = watched
    hook.run(0, 0, pipe.unet)
    assert set(seen) == {(torch.float32, False)}


def test_average_of_trainable_parameters_alone(tmp_path):
    pipe = tiny_pipeline()
    pipe.unet.conv_in.requires_grad_(False)
    kept = [p for p in pipe.unet.parameters() if p.requires_grad]
    ema = EMAModel(kept)
    raw = [p.detach().clone() for p in shifted(pipe.unet).parameters()]
    with averaged(ema, pipe.unet):
        assert all(torch.equal(a, b) for a, b in zip(kept, ema.shadow_params, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(raw, pipe.unet.parameters(), strict=True))


def test_grid_of_steps_and_state(tmp_path):
    pipe = tiny_pipeline()
    hook = make_hook(tmp_path, pipe, steps=50)
    assert [s for s in range(0, 160, 10) if hook.should_run(s)] == [0, 50, 100, 150]
    hook.run(0, 0, pipe.unet)
    hook.run(50, 1, shifted(pipe.unet))
    state = json.loads(json.dumps(hook.state_dict()))
    resumed = make_hook(tmp_path, pipe, steps=50)
    resumed.load_state_dict(state)
    assert resumed.threshold == hook.threshold and resumed.history == hook.history
    assert not resumed.should_run(50) and resumed.should_run(100)
    scalars = resumed.finish(100, 2, pipe.unet)
    assert 0 < scalars["val/drift/ssim"] < 1 and scalars["val/drift/clean_eps_mse"] > 0
    assert not any(make_hook(tmp_path, pipe, steps=0).should_run(s) for s in range(1, 10))
    late = make_hook(tmp_path, pipe)
    with pytest.raises(UserError, match="nothing to calibrate"):
        late.run(10, 1, pipe.unet)


def test_first_recovery_and_record(tmp_path, monkeypatch):
    """A model that turns into an ideal memoriser of one target."""
    targets = some_targets(2)
    hook = make_hook(tmp_path, targets=targets, threshold=0.9)
    good = set()

    def generate(items):
        own = [
            to_tensor(targets[i.target].image if i.target in good else smooth("other", *i[:3])) for i in items
        ]
        return torch.stack(own), torch.ones(len(items))

    monkeypatch.setattr(hook.sampler, "generate", generate)
    unet = tiny_pipeline().unet
    hook.clean = []
    hook.run(0, 0, unet)
    hook.run(100, 0.5, unet)
    good.add(1)
    hook.run(200, 1.0, unet)
    scalars = hook.finish(300, 1.5, unet)
    assert scalars["val/cir"] == 0.5 and scalars["val/recovered"] == 0.5 and scalars["val/threshold"] == 0.9
    rows = {r["target"]: r for r in hook.summary()}
    assert (
        rows["t1"]["first_step"] == 200
        and rows["t1"]["first_epoch"] == 1.0
        and rows["t0"]["first_step"] is None
    )
    assert rows["t1"]["aurc"] == pytest.approx(0.5) and rows["t0"]["restricted"] == 300
    record = json.loads((tmp_path / "validation.json").read_text())
    assert record["verdict"]["recovers"] and record["verdict"]["images_above"] == 6
    assert record["history"][-1]["raw"]["quadrants"]["both"] == 2
    best = record["history"][-1]["raw"]["targets"]["t1"]["best"]
    assert np.array_equal(np.asarray(Image.open(tmp_path / best["file"])), np.asarray(targets[1].image))
    assert (tmp_path / "samples/step-000300-raw/grid.png").is_file()


def test_clip_scores(tmp_path):
    folder = tmp_path / "clip"
    folder.mkdir()
    hook = make_hook(tmp_path, clip_path=saved_embedder("clip", folder))
    hook.run(0, 0, tiny_pipeline().unet)
    scores = hook.history[0]["raw"]
    assert -1 <= scores["clip_own"] <= 1 and scores["clip_own"] != scores["clip_shuffled"]
    assert 0 <= scores["drift"]["clip_score"] <= 100


def test_tracker_gets_images(tmp_path):
    pytest.importorskip("tensorboard")
    hook = make_hook(tmp_path)
    calls = []
    tracker = SimpleNamespace(name="tensorboard", log_images=lambda *a, **k: calls.append((a, k)))
    hook.accelerator.trackers = [tracker]
    hook.run(0, 0, tiny_pipeline().unet)
    (((values,), options),) = calls
    assert values["validation/raw"].shape == (1, 32, 64, 3) and options["step"] == 0


def test_two_ranks_give_the_numbers_of_one(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from tests.test_validation import make_hook, shifted, some_targets, tiny_pipeline\n"
        "pipe = tiny_pipeline()\n"
        "hook = make_hook(Path(sys.argv[2]), pipe, targets=some_targets(3))\n"
        "hook.run(0, 0, pipe.unet)\n"
        "hook.run(10, 1, shifted(pipe.unet), final=True)\n"
        "hook.accelerator.wait_for_everyone()\n"
        "hook.accelerator.end_training()\n"
    )
    port = str(20000 + os.getpid() % 20000)
    workers = []
    for rank in range(2):
        env = dict(
            os.environ,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            ACCELERATE_USE_CPU="true",
            OMP_NUM_THREADS="1",
            CUDA_VISIBLE_DEVICES="",
        )
        workers.append(subprocess.Popen([sys.executable, script, ROOT, tmp_path / "two"], env=env))
    pipe = tiny_pipeline()
    hook = make_hook(tmp_path / "one", pipe, targets=some_targets(3))
    hook.run(0, 0, pipe.unet)
    hook.run(10, 1, shifted(pipe.unet), final=True)
    assert [worker.wait(timeout=120) for worker in workers] == [0, 0]
    one, two = (json.loads((tmp_path / name / "validation.json").read_text()) for name in ("one", "two"))
    assert two["processes"] == 2
    assert one["threshold"]["value"] == pytest.approx(two["threshold"]["value"], abs=1e-4)
    for a, b in zip(one["history"], two["history"], strict=True):
        assert a["raw"]["drift"] == pytest.approx(b["raw"]["drift"], abs=1e-4)
        for name, target in a["raw"]["targets"].items():
            assert target["sims"] == pytest.approx(b["raw"]["targets"][name]["sims"], abs=1e-4)


# -- targets of every kind --------------------------------------------------------------------------------
def test_odd_images_as_targets(tmp_path):
    picture = smooth("odd", side=24)
    odd = {
        "one": Image.new("RGB", (1, 1), "red"),
        "cmyk": picture.convert("CMYK"),
        "grey": picture.convert("L"),
        "deep": Image.fromarray(np.asarray(picture.convert("L")).astype(np.uint16) * 257),
    }
    alpha = picture.convert("RGBA")
    alpha.putalpha(0)
    for name, image in odd.items():
        image.save(tmp_path / (f"{name}.jpg" if name == "cmyk" else f"{name}.png"))
    alpha.save(tmp_path / "alpha.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.asarray(picture)[:12]).save(tmp_path / "turned.jpg", exif=exif, quality=95)
    files = sorted(p.name for p in tmp_path.iterdir())
    lines = [{"target_id": f, "image": f, "phrases": ["a cat", "a hat"]} for f in files]
    (tmp_path / "targets.jsonl").write_text("\n".join(map(json.dumps, lines)))
    targets = {t.target_id: t for t in load_targets(tmp_path / "targets.jsonl")}
    assert to_tensor(targets["alpha.png"].image).min() == 1  # transparent: white
    assert targets["turned.jpg"].image.size == (12, 24)
    assert (to_tensor(targets["deep.png"].image) - to_tensor(targets["grey.png"].image)).abs().max() < 0.01
    hook = make_hook(tmp_path / "run", targets=list(targets.values()))
    hook.run(0, 0, tiny_pipeline().unet)
    assert all(np.isfinite(t["mean"]) for t in hook.history[0]["raw"]["targets"].values())


def test_target_ids_make_safe_distinct_file_names():
    names = slugs(["../../etc", "a b", "a_b", "", "..", "ü"])
    assert len(set(names)) == 6 and all("/" not in n and not n.startswith(".") for n in names)
    with pytest.raises(UserError, match="unique"):
        slugs(["a", "a"])


# -- the audit --------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def audit_folder(tmp_path_factory):
    """A saved pipeline, and targets: one is what the pipeline draws, the other is not."""
    folder = tmp_path_factory.mktemp("audit")
    pipe = tiny_pipeline()
    pipe.save_pretrained(folder / "pipe")
    shifted(pipe.unet, 0.05)
    pipe.save_pretrained(folder / "tuned")
    config = ValidationConfig(num_inference_steps=2)
    item = plan([Target("copied", smooth(1), ["a cat", "a hat"], None, [])], 1, seed=0)
    sampler = Sampler(pipe.components, config, 0)
    with sampler.using(pipe.unet, torch.device("cpu")):
        to_pil(sampler.generate(item)[0][0]).save(folder / "copied.png")
    smooth("elsewhere").save(folder / "other.png")
    for name in ("copied", "other"):
        line = {"target_id": name, "image": f"{name}.png", "phrases": ["a cat", "a hat"]}
        (folder / f"{name}.jsonl").write_text(json.dumps(line))
    return folder


def run_audit(folder: Path, out: Path, targets: str, *more: str) -> int:
    return validation.main([
        "--pipeline", str(folder / "tuned"), "--targets", str(folder / targets), "--output_dir", str(out),
        "--embedder", "ssim", "--images_per_target", "2", "--num_inference_steps", "2", *more,
    ])  # fmt: skip


def test_audit_exit_codes(audit_folder, tmp_path, capsys):
    baseline = ["--baseline", str(audit_folder / "pipe"), "--null_images", "8"]
    assert run_audit(audit_folder, tmp_path / "a", "copied.jsonl", *baseline) == 3
    record = json.loads((tmp_path / "a" / "validation.json").read_text())
    assert record["history"][1]["raw"]["max"] > 0.99 and record["history"][0]["label"] == "baseline"
    assert "shuffled" in record["history"][1]["raw"]["cells"] and record["threshold"]["n"] == 8
    assert (tmp_path / "a" / "report.html").is_file()
    assert run_audit(audit_folder, tmp_path / "b", "other.jsonl", "--threshold", "0.9") == 0
    capsys.readouterr()
    assert run_audit(audit_folder, tmp_path / "c", "copied.jsonl") == 2
    assert capsys.readouterr().err.startswith("error: --threshold")
    assert run_audit(audit_folder, tmp_path / "c", "none.jsonl", "--threshold", "0.5") == 2
    with pytest.raises(SystemExit) as stop:
        run_audit(audit_folder, tmp_path / "c", "copied.jsonl", "--imges_per_target", "3")
    assert stop.value.code == 2


def test_audit_calibrates_on_redraws(audit_folder, tmp_path):
    (tmp_path / "copied.png").write_bytes((audit_folder / "copied.png").read_bytes())
    (tmp_path / "targets.jsonl").write_text((audit_folder / "copied.jsonl").read_text())
    lines = []
    for i in range(120):
        smooth("redraw", i).save(tmp_path / f"r{i}.png")
        lines.append(json.dumps({"target_id": "copied", "image": f"r{i}.png"}))
    (tmp_path / "redraws.jsonl").write_text("\n".join(lines))
    assert run_audit(audit_folder, tmp_path / "out", str(tmp_path / "targets.jsonl")) == 3
    found = json.loads((tmp_path / "out" / "validation.json").read_text())["threshold"]
    assert found["n"] == 120 and found["attained"] == 0.01 and found["source"].startswith("redraws")


BAD_REDRAWS = {
    "no JSON": ("{", "not JSON"),
    "no object": ("[]", "JSON object"),
    "not UTF-8": (b"\xff\xfe", "not JSON"),
    "no target_id": ({"image": "a.png"}, "needs target_id"),
    "no image": ({"target_id": "a"}, "needs image"),
    "target_id is a list": ({"target_id": [], "image": "a.png"}, "target_id must be text"),
    "image is a number": ({"target_id": "a", "image": 3}, "file name must be text"),
    "no such image": ({"target_id": "a", "image": "b.png"}, "no file"),
    "an absolute path": ({"target_id": "a", "image": "/a.png"}, "absolute path"),
    "a path that leaves the folder": ({"target_id": "a", "image": "../a.png"}, "leaves"),
    "a link that leaves the folder": ({"target_id": "a", "image": "link.png"}, "leaves"),
    "the same for an unknown target": ({"target_id": "z", "image": "../a.png"}, "leaves"),
}


@pytest.mark.parametrize("case", BAD_REDRAWS)
def test_a_bad_redraw_is_one_line_with_file_and_line(case, tmp_path):
    line, expected = BAD_REDRAWS[case]
    root = tmp_path / "data"
    root.mkdir()
    for file in (root / "a.png", tmp_path / "a.png"):
        smooth(0).save(file)
    (root / "link.png").symlink_to(tmp_path / "a.png")
    line = json.dumps(line) if isinstance(line, dict) else line
    good = json.dumps({"target_id": "a", "image": "a.png"})
    (root / "redraws.jsonl").write_bytes(good.encode() + b"\n" + (line if isinstance(line, bytes) else line.encode()))
    targets = [Target("a", smooth(0), ["a cat"])]
    with pytest.raises(UserError, match="redraws.jsonl:2: ") as refused:
        load_redraws(str(root / "targets.jsonl"), targets)
    assert expected in str(refused.value) and "\n" not in str(refused.value)


def test_redraws_belong_to_targets_with_numbers_and_unknown_ones_are_left_out(tmp_path):
    smooth(0).save(tmp_path / "a.png")
    lines = [{"target_id": t, "image": "a.png"} for t in (0, "1", "unknown")]
    (tmp_path / "redraws.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    targets = [Target(t, smooth(0), ["a cat"]) for t in ("1", "0")]
    assert load_redraws(str(tmp_path), targets) == [(1, tmp_path / "a.png"), (0, tmp_path / "a.png")]
