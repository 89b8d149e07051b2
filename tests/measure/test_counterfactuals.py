"""Counterfactual pictures: the target to the bit outside the mask, something else inside, kept in a cache."""

from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from diffusers import (
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    HeunDiscreteScheduler,
    PNDMScheduler,
    UniPCMultistepScheduler,
)
from PIL import Image

from silentbad.data.images import to_tensor
from silentbad.data.targets import Target
from silentbad.errors import UserError
from silentbad.measure import counterfactuals as module
from silentbad.measure.counterfactuals import (
    KINDS,
    REGIONS,
    canvas,
    counterfactuals,
    draws_of,
    masked_denoising,
    masks_of,
)
from silentbad.measure.generation import Sampler
from tests.recoveries import make_hook, smooth
from tests.recoveries import some_targets as make_targets
from tests.tiny import tiny_pipeline, tiny_sd2_pipeline, tiny_sd3_pipeline, tiny_xl_pipeline

SIDE = 16
CPU = torch.device("cpu")


def box_mask(left: int, top: int, right: int, bottom: int, side: int = SIDE) -> Image.Image:
    mask = np.zeros((side, side), np.uint8)
    mask[top:bottom, left:right] = 255
    return Image.fromarray(mask)


def inverted(mask: Image.Image) -> Image.Image:
    return Image.fromarray(255 - np.asarray(mask))


def some_targets(n: int = 2, side: int = SIDE) -> list[Target]:
    """A cat with a mask, a hat without one, and a backdrop."""
    cat = box_mask(side // 4, side // 4, side // 2, side * 3 // 4, side)
    phrases = ["a red cat", "a hat", "on a beach"]
    return [Target(f"t{i}", smooth("t", i, side=side), phrases, None, [cat, None, inverted(cat)]) for i in range(n)]


def sampler_of(pipe=None, **settings) -> Sampler:
    pipe = pipe or tiny_pipeline()
    usual = dict(max_batch=8, resolution=None, num_inference_steps=3, sampling_lengths=[])
    guidance = dict(guidance_scale=2.0, guidance_rescale=0.0)
    sampler = Sampler(pipe.components, SimpleNamespace(**(usual | guidance | settings)), seed=0)
    sampler.side = settings.get("resolution") or SIDE
    return sampler


def drawn(sampler=None, targets=None, count=2, seed=0, **options) -> list:
    sampler = sampler or sampler_of()
    targets = targets or some_targets()
    with sampler.using(sampler.backbone, CPU):
        return list(counterfactuals(sampler, targets, masks_of(targets), count, seed, **options))


def same(first: list, second: list) -> bool:
    return [r[:4] for r in first] == [r[:4] for r in second] and all(
        torch.equal(a.image, b.image) for a, b in zip(first, second, strict=True)
    )


def with_scheduler(kind, **changes):
    pipe = tiny_pipeline("epsilon")
    pipe.scheduler = kind.from_config(pipe.scheduler.config, **changes)
    return pipe


PIPELINES = {
    "epsilon": lambda: tiny_pipeline("epsilon"),
    "v": tiny_pipeline,
    "sd2": tiny_sd2_pipeline,
    "xl": tiny_xl_pipeline,
    "ddpm": lambda: with_scheduler(DDPMScheduler),
    "pndm": lambda: with_scheduler(PNDMScheduler, skip_prk_steps=True),
    "dpm++": lambda: with_scheduler(DPMSolverMultistepScheduler, use_karras_sigmas=True),
    "unipc": lambda: with_scheduler(UniPCMultistepScheduler),
    "heun": lambda: with_scheduler(HeunDiscreteScheduler),
    "ancestral": lambda: with_scheduler(EulerAncestralDiscreteScheduler),
    "sd3": lambda: tiny_sd3_pipeline(t5=False),
}


# ---------------------------------------------------------------- pictures
@pytest.mark.parametrize("name", PIPELINES)
def test_outside_the_mask_the_target_to_the_bit_inside_not(name):
    targets = some_targets()
    rows = drawn(sampler_of(PIPELINES[name]()), targets, kinds=REGIONS)
    assert {(r.target, r.kind, r.changed) for r in rows} == {
        (j, *rest) for j in (0, 1) for rest in (("redrawn", (0,)), ("redrawn", (2,)), ("missing", (0,)))
    }
    for row in rows:
        target = targets[row.target]
        inside = torch.from_numpy(np.array(target.masks[row.changed[0]])) > 0
        old = torch.from_numpy(np.array(target.image))
        new = (row.image * 255).round().byte().permute(1, 2, 0)
        assert torch.equal(old[~inside], new[~inside])
        assert row.image.isfinite().all() and (old[inside] != new[inside]).float().mean() > 0.5


@pytest.mark.parametrize("name", PIPELINES)
def test_known_latents_arrive_as_the_target_has_them(name):
    sampler = sampler_of(PIPELINES[name]())
    x0, eps = torch.randn(2, 1, 4, 8, 8, generator=torch.Generator().manual_seed(0)).expand(2, 2, 4, 8, 8)
    hole = torch.zeros(2, 1, 8, 8, dtype=torch.bool)
    hole[..., 2:5, 2:5] = True
    streams = [torch.Generator().manual_seed(i) for i in range(2)]
    with sampler.using(sampler.backbone, CPU):
        latents = masked_denoising(sampler, sampler.encode(["a cat", "a hat"]), x0, eps, hole, streams)
    known = ~hole.expand_as(x0)
    assert torch.equal(latents[known], x0[known]) and not torch.equal(latents[~known], x0[~known])


@pytest.mark.parametrize("name", [name for name in PIPELINES if name != "sd3"])
def test_the_model_sees_known_latents_at_the_level_of_each_step(name):
    """With everything known, what the model is shown is the target at that step's own noise level."""
    sampler = sampler_of(PIPELINES[name]())
    x0, eps = torch.randn(2, 1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    shown = []
    hook = sampler.pipe.unet.register_forward_pre_hook(lambda _, args: shown.append((args[0][:1], args[1])))
    with sampler.using(sampler.backbone, CPU):
        stream = [torch.Generator().manual_seed(0)]
        nothing = torch.zeros(1, 1, 8, 8, dtype=torch.bool)
        masked_denoising(sampler, sampler.encode(["a cat"]), x0, eps, nothing, stream)
    hook.remove()
    bars = sampler.pipe.scheduler.alphas_cumprod
    for seen, t in shown[1:]:  # the first is noise alone
        low = bars[int(np.floor(float(t)))]
        high = bars[int(np.ceil(float(t)))]
        a = torch.lerp(low, high, float(t) % 1)
        wanted = a.sqrt() * x0 + (1 - a).sqrt() * eps
        assert (seen - wanted).norm() / wanted.norm() < 0.02


def test_whole_pictures_of_the_prompt_and_the_description():
    targets = some_targets(1)
    targets[0].description = "a red cat with a hat on a beach at noon"
    rows = drawn(targets=targets, kinds=("composed", "described"))
    assert [r.kind for r in rows] == ["composed"] * 2 + ["described"] * 2 and {r.changed for r in rows} == {None}
    assert not torch.equal(rows[0].image, rows[1].image)


def test_without_masks_only_whole_pictures():
    target = Target("t", smooth("t"), ["a cat", "a hat"], None, [None, None])
    assert {r.kind for r in drawn(targets=[target], count=1)} == {"composed"}


@pytest.mark.parametrize("name", ["v", "xl"])
def test_guidance_leads_away_from_a_text_or_the_pipelines_own(name):
    sampler = sampler_of(PIPELINES[name]())
    with sampler.using(sampler.backbone, CPU):
        states = sampler.encode(["a cat"] * 2, ["", "a hat"])
        plain = sampler.encode(["a cat", "a hat"])
    for key in (key for key in plain if key.startswith("negative")):
        empty = plain[key][0]
        hat = plain[key.removeprefix("negative_")][1]
        assert torch.equal(states[key][0], empty) and torch.allclose(states[key][1], hat, atol=1e-5)
        assert not torch.allclose(empty, hat, atol=1e-2)


def test_missing_is_drawn_under_the_backdrop_or_no_caption():
    targets = some_targets(2)
    targets[1].masks[2] = None
    canvases = [canvas(t, [None if m is None else to_tensor(m)[:1] for m in t.masks], SIDE) for t in targets]
    assert [c.backdrop for c in canvases] == [2, None]
    prompts = {(d.kind, d.target, d.element): (d.prompt, d.against) for d in draws_of(targets, canvases, 1, REGIONS)}
    assert prompts == {
        ("redrawn", 0, 0): ("a red cat", "on a beach"),
        ("missing", 0, 0): ("on a beach", ""),
        ("redrawn", 0, 2): ("on a beach", ""),
        ("redrawn", 1, 0): ("a red cat", ""),
        ("missing", 1, 0): ("", ""),
    }


def test_a_soft_edge_keeps_no_outline_of_the_old_element():
    mask = torch.zeros(1, SIDE, SIDE)
    mask[0, 4, 4:8] = torch.tensor([0.0, 0.125, 0.25, 1.0])
    share = canvas(Target("t", smooth("t"), ["a cat"]), [mask], SIDE).shares[0]
    assert share[0, 4, 4:8].tolist() == [0, 0.5, 1, 1]


def test_a_target_of_another_size_is_squashed_first():
    target = Target("t", smooth("t", side=48), ["a cat"], None, [box_mask(8, 8, 30, 30, 48)])
    rows = drawn(targets=[target], kinds=("redrawn",))
    small = canvas(target, [to_tensor(target.masks[0])[:1]], SIDE)
    outside = (small.shares[0] == 0).expand(3, -1, -1)
    assert outside.any() and rows[0].image.shape == (3, SIDE, SIDE)
    assert all(torch.equal((r.image * 255).round().byte()[outside], small.picture[outside]) for r in rows)


def test_an_empty_mask_is_one_line():
    targets = some_targets(1)
    targets[0].masks[0] = Image.new("L", (SIDE, SIDE))
    with pytest.raises(UserError, match="targets: 't0': the mask of 'a red cat' is empty"):
        drawn(targets=targets)


def test_a_mask_of_everything_gives_a_whole_new_picture():
    target = Target("t", smooth("t"), ["on a beach"], None, [Image.new("L", (SIDE, SIDE), 255)])
    rows = drawn(targets=[target], kinds=REGIONS)
    assert {r.kind for r in rows} == {"redrawn"}  # nothing stands behind a backdrop
    assert all((r.image != to_tensor(target.image)).float().mean() > 0.9 for r in rows)


def test_two_calls_give_equal_bytes_another_seed_others():
    first = drawn()
    assert same(first, drawn()) and [r.number for r in first] == list(range(len(first)))
    assert not any(torch.equal(a.image, b.image) for a, b in zip(first, drawn(seed=1), strict=True))


def test_the_batch_changes_roundings_alone():
    for a, b in zip(drawn(sampler_of(max_batch=8), count=1), drawn(sampler_of(max_batch=1), count=1), strict=True):
        assert a[:4] == b[:4]
        torch.testing.assert_close(a.image, b.image, rtol=0, atol=1.01 / 255)


def test_shares_of_processes_make_the_whole():
    whole = drawn(sampler_of(max_batch=1), count=1)
    parts = [drawn(sampler_of(max_batch=1), count=1, share=lambda n, r=r: list(range(r, n, 2))) for r in range(2)]
    assert same(whole, sorted(parts[0] + parts[1], key=lambda row: row.number))


def test_targets_do_not_change_each_other():
    alone, both = (drawn(sampler_of(max_batch=1), some_targets(2)[k:], count=1) for k in (1, 0))
    of_second = [row for row in both if row.target == 1]
    assert all(torch.equal(a.image, b.image) for a, b in zip(alone, of_second, strict=True))


def test_a_batch_too_large_is_halved_and_stays_halved(monkeypatch):
    sampler = sampler_of(max_batch=8)
    sizes = []

    def tight(self, draws):
        sizes.append(len(draws))
        if len(draws) > 2:
            raise RuntimeError("CUDA out of memory.")
        return whole(self, draws)

    whole = module.Painter._batch
    monkeypatch.setattr(module.Painter, "_batch", tight)
    rows = drawn(sampler, count=1)
    assert sizes[:3] == [6, 3, 1] and sampler.batch == 1 and [r.number for r in rows] == list(range(len(rows)))


def test_modules_and_random_streams_are_left_as_found():
    sampler = sampler_of()
    sampler.pipe.unet.train()
    torch.manual_seed(5)
    before = [p.clone() for p in sampler.pipe.unet.parameters()]
    rng = torch.get_rng_state()
    rows = counterfactuals(sampler, some_targets(), masks_of(some_targets()), 1, 7)
    for _ in rows:
        assert sampler.pipe.unet.training and torch.equal(torch.get_rng_state(), rng) and torch.is_grad_enabled()
    assert sampler.seed == 0 and all(map(torch.equal, before, sampler.pipe.unet.parameters()))


# ---------------------------------------------------------------- the cache
def never(*_):
    pytest.fail("drawn, though it is in the cache")


def test_what_is_in_the_cache_is_read_back_equal(tmp_path, monkeypatch):
    first = drawn(count=1, cache=tmp_path)
    assert same(first, drawn(count=1))
    monkeypatch.setattr(module.Painter, "_batch", never)
    assert same(first, drawn(count=1, cache=tmp_path))


def other_weights(sampler, targets, options):
    next(sampler.pipe.unet.parameters()).data.add_(1e-3)


def other_guidance(sampler, targets, options):
    sampler.config.guidance_scale = 3.0


def other_steps(sampler, targets, options):
    sampler.steps = 4


def other_seed(sampler, targets, options):
    options["seed"] = 1


def other_picture(sampler, targets, options):
    targets[0].image = smooth("another")


def other_mask(sampler, targets, options):
    targets[0].masks[0] = box_mask(2, 2, 9, 9)


def other_phrase(sampler, targets, options):
    targets[0].phrases = ["a blue cat", *targets[0].phrases[1:]]


CHANGES = [other_weights, other_guidance, other_steps, other_seed, other_picture, other_mask, other_phrase]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_never_read_from_the_cache(change, tmp_path):
    options = dict(kinds=("redrawn",), count=1)
    drawn(targets=some_targets(1), cache=tmp_path, **options)
    sampler = sampler_of()
    targets = some_targets(1)
    change(sampler, targets, options)
    assert same(drawn(sampler, targets, cache=tmp_path, **options), drawn(sampler, targets, **options))


def test_more_pictures_are_added_to_those_there(tmp_path, monkeypatch):
    few = drawn(cache=tmp_path, count=1)
    asked = []
    whole = module.Painter._batch
    monkeypatch.setattr(module.Painter, "_batch", lambda self, draws: asked.extend(draws) or whole(self, draws))
    more = drawn(cache=tmp_path, count=2)
    assert len(asked) == len(few) and {d.image for d in asked} == {1}
    assert {r.image.numpy().tobytes() for r in few} <= {r.image.numpy().tobytes() for r in more}


def cut_off(file):
    file.write_bytes(file.read_bytes()[:-100])


def flip_a_byte(file):
    data = bytearray(file.read_bytes())
    data[-40] ^= 1
    file.write_bytes(data)


def empty(file):
    file.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut_off, flip_a_byte, empty])
def test_a_damaged_cache_is_one_line_and_drawn_anew(damage, tmp_path):
    options = dict(kinds=REGIONS, count=1, cache=tmp_path)
    lines = []
    first = drawn(**options)
    damage(sorted(tmp_path.glob("*/*.safetensors"))[0])
    assert same(first, drawn(**options, say=lines.append))
    assert ["is damaged" in line for line in lines] == [True, False]  # then how many are drawn
    drawn(**options, say=lines.append)
    assert len(lines) == 2


def test_a_killed_build_keeps_what_was_whole(tmp_path):
    sampler = sampler_of(max_batch=2)
    with sampler.using(sampler.backbone, CPU), pytest.raises(KeyboardInterrupt):
        painted = module.Painter._batch
        calls = []

        def killed(self, draws):
            calls.append(len(draws))
            if len(calls) == 3:
                raise KeyboardInterrupt
            return painted(self, draws)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module.Painter, "_batch", killed)
            list(counterfactuals(sampler, some_targets(), masks_of(some_targets()), 1, 0, cache=tmp_path))
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 2
    resumed = drawn(sampler_of(max_batch=2), count=1, cache=tmp_path)
    assert same(resumed, drawn(sampler_of(max_batch=2), count=1))


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write counterfactuals"):
        drawn(cache=tmp_path / "file")


def test_the_bases_whole_pictures_calibrate_and_are_kept(tmp_path, monkeypatch):
    """`calibration: base` draws both prompts, needs no mask, and reads what another run has drawn."""
    targets = make_targets(2)
    targets[0].description = "a red cat under a hat on the beach"
    pipe = tiny_pipeline()
    options = dict(targets=targets, calibration="base", null_images=3)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    calibrations = []
    for _ in range(2):
        hook = make_hook(tmp_path / "run", pipe, **options)
        with hook.sampler.using(pipe.unet, torch.device("cpu")):
            calibrations.append(hook.measure.calibrate_targets(0))
        monkeypatch.setattr(module.Painter, "_batch", never)
    assert calibrations[0] == calibrations[1]
    assert {kind: t.n for kind, t in calibrations[0][0].kinds.items()} == {"composed": 6, "described": 3}


def test_every_kind_has_its_number_of_pictures():
    targets = some_targets(1)
    targets[0].description = "everything"
    rows = drawn(targets=targets, count=3)
    counts = {kind: sum(r.kind == kind for r in rows) for kind in KINDS}
    assert counts == {"redrawn": 6, "missing": 3, "composed": 3, "described": 3}
