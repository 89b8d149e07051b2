"""What is kept on unrelated prompts: its numbers by hand, and the hook that measures them."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from safetensors.torch import load_file, save_file

from silentbad.data.images import to_tensor
from silentbad.data.targets import Target
from silentbad.errors import UserError
from silentbad.measure import kept
from silentbad.measure.embedders import load_embedder
from silentbad.measure.limit import kept_by, kept_share
from silentbad.measure.record import Kept, StageSize, Words
from silentbad.measure.weight_change import (
    base_files,
    base_modules,
    largest_singular_value,
    stage_sizes,
)
from silentbad.model.gate import Source
from silentbad.rng import generator
from silentbad.settings.validation import ValidationConfig
from tests.recoveries import make_hook, saved_embedder, shifted, smooth
from tests.tiny import tiny_pipeline
from worlds.microworld.judge import things_right
from worlds.microworld.make import target_scene
from worlds.microworld.render import render
from worlds.microworld.world import held_out_scenes

ROOT = Path(__file__).parents[2]
JUDGE = """
def half(captions, images):
    assert images.shape[0] == len(captions) and 0 <= images.min() and images.max() <= 1
    return [(int(image.mean() > 0.5), 2) for image in images]

def wrong(captions, images):
    return [(3, 2)] * len(captions)

def nothing(captions, images):
    return [(0, 0)] * len(captions)

def broken(captions, images):
    return 1 / 0
"""


@pytest.fixture
def judge(tmp_path):
    """A place in a file of judges."""
    (tmp_path / "mine.py").write_text(JUDGE)
    return lambda name: f"{tmp_path}/mine.py:{name}"


def as_bytes(*pictures) -> torch.Tensor:
    return torch.stack([(to_tensor(picture) * 255).round().byte() for picture in pictures])


# -- prompts -----------------------------------------------------------------------------------------------
def test_prompts_are_of_the_file_else_captions_without_a_phrase_else_plain(tmp_path):
    tokenizer = tiny_pipeline().tokenizer
    targets = [Target("t", smooth(0), ["a cat", "a hat"])]
    captions = ["a house", "a cat at home", "a house", "a boat", " ", "A  Cat asleep", "a cathedral"]

    def drawn(**options):
        return kept.unrelated_prompts(ValidationConfig(**options), targets, captions, tokenizer)

    assert drawn() == ["a house", "a boat", "a cathedral"] and drawn(unrelated_images=0) == []
    assert drawn(unrelated_images=2) == ["a house", "a cathedral"]
    captions = ["a cat"]
    bundled = kept.BUNDLED.read_text().splitlines()
    assert len(set(bundled)) == 96 and len(drawn()) == 24 and {*drawn()} < {*bundled}
    file = tmp_path / "mine.txt"
    file.write_text("one\n\n two \none\nthree\n")
    assert drawn(prompts=str(file)) == ["one", "two", "three"]
    file.write_text("one\n" + "very " * 60)
    with pytest.raises(UserError, match=r"mine.txt:2: the prompt has .* the window is 48"):
        drawn(prompts=str(file))
    file.write_text("one\none\n")
    with pytest.raises(UserError, match="mine.txt: holds 1 different prompts"):
        drawn(prompts=str(file))


# -- change ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["ssim", "micro", "copy"])
def test_change_is_0_for_the_same_and_1_for_the_picture_of_another_prompt(name):
    embedder = load_embedder(name, None, "cpu")
    base = as_bytes(*[smooth("base", i, side=64) for i in range(4)])
    prompts = list("abcd")
    same = kept.change(base, base, prompts, embedder)
    assert same == pytest.approx({"pixels": 0, "embedder": 0, "structure": 0}, abs=1e-6)
    other = kept.change(base.roll(-1, 0), base, prompts, embedder)
    assert other == pytest.approx({"pixels": 1, "embedder": 1, "structure": 1}, abs=1e-5)
    part = kept.change(torch.cat([base.roll(-1, 0)[:2], base[2:]]), base, prompts, embedder)
    assert all(0.1 < share < 0.9 for share in part.values())


def test_pictures_of_one_prompt_are_no_unit_of_change():
    embedder = load_embedder("ssim", None, "cpu")
    base = as_bytes(*[smooth("base", i) for i in range(3)])
    moved = kept.change(base.roll(-1, 0), base, ["a", "a", "b"], embedder)
    units = [(base[i].float() - base[j].float()).abs().mean() for i, j in ((1, 2), (2, 0))]
    all_moves = [*units, (base[0].float() - base[1].float()).abs().mean()]
    assert moved["pixels"] == pytest.approx(float(np.mean(all_moves) / np.mean(units)))
    assert kept.change(base, base, ["a"] * 3, embedder) == {}


# -- bleeding ----------------------------------------------------------------------------------------------
def pasted(picture, mask, down: int, right: int, recoloured: bool = False) -> torch.Tensor:
    """A plain picture that shows the element elsewhere."""
    element = picture[[1, 2, 0]] if recoloured else picture
    moved_mask, moved = (x.roll((down, right), (-2, -1)) for x in (mask, element))
    plain = torch.tensor([0.5, 0.5, 0.6])[:, None, None].expand_as(picture)
    return plain * (1 - moved_mask) + moved * moved_mask


def test_an_element_is_found_where_it_was_moved_to_and_not_in_another_colour():
    scene = target_scene("cat-hat")
    image, masks = render(scene)
    picture = to_tensor(image)
    mask = (to_tensor(masks[0])[:1] > 0.5).float()
    embedder = load_embedder("micro", None, "cpu")
    reference = embedder.reference(picture[None], mask)

    def similarity(images):
        return embedder.paired(embedder.of_region(images, mask), reference).tolist()

    images = torch.stack(
        [
            pasted(picture, mask, 0, 0),
            pasted(picture, mask, -9, 17),
            pasted(picture, mask, -9, 17, recoloured=True),
            torch.full_like(picture, 0.5),
        ]
    )
    offsets = kept.best_offsets(images, picture, mask)
    assert offsets[:2].tolist() == [[0, 0], [-9, 17]]
    native, moved, other, empty = kept.similarities_anywhere(images, images, picture, mask, similarity)
    assert native > 0.9 and moved > 0.9 and similarity(images[1:2])[0] < 0.5
    assert other < 0.6 and empty < 0.5
    assert torch.equal(kept.shifted(images[1], 9, -17) * mask, picture * mask)


def test_the_place_at_an_edge_needs_most_of_the_mask_inside():
    mask = torch.zeros(1, 16, 16)
    mask[:, 4:12, 4:12] = 1
    element = torch.rand(3, 16, 16, generator=generator("element"))
    images = torch.stack([element.roll((down, 0), (1, 2)) for down in (0, 6, -6)])
    images[1, :, :6] = images[2, :, 10:] = 0.5  # below the roll's edge: a quarter is outside
    assert kept.best_offsets(images, element, mask)[:, 0].tolist() == [0, 6, -6]
    assert kept.best_offsets(images, element, torch.zeros(1, 16, 16)).tolist() == [[0, 0]] * 3


# -- words -------------------------------------------------------------------------------------------------
def test_words_are_the_share_of_named_things_or_clips_score(judge, tmp_path):
    bright = torch.full((4, 3, 8, 8), 200, dtype=torch.uint8)
    dark = torch.zeros_like(bright)
    config = ValidationConfig(judge=judge("half"))
    place = (kept.load_judge(config), str(config.judge))
    pictures = torch.cat([bright[:1], dark[:3]])
    assert kept.words(place, None, list("abcd"), pictures, bright) == Words(1 / 8, 4 / 8, "mine.py:half", 8)
    assert kept.words(None, None, list("abcd"), pictures, bright) is None
    clip = load_embedder("clip", saved_embedder("clip", tmp_path), "cpu")
    score = kept.words(None, clip, list("abcd"), pictures, bright)
    assert score.by == "CLIP" and score.named is None and 0 <= score.trained <= 100


@pytest.mark.parametrize(
    "name, line",
    [
        ("wrong", r"must return \(things right, things named\) for each of 2 captions"),
        ("nothing", "counts no named thing in 2 prompts"),
        ("broken", r"does not run .*division by zero"),
    ],
)
def test_a_judge_that_does_not_judge_is_named(judge, name, line):
    function = kept.load_judge(ValidationConfig(judge=judge(name)))
    with pytest.raises(UserError, match=rf"^validation.judge: .*:{name} {line}"):
        kept.judged(function, judge(name), ["a", "b"], torch.zeros(2, 3, 8, 8), "validation.judge")


def test_the_share_that_is_kept():
    measured = Kept(4, {"pixels": 0.25, "embedder": 0.5}, words=Words(0.3, 0.4, "CLIP"))
    shares = [kept_share(measured, by) for by in ("words", "pixels", "embedder", "structure")]
    assert shares == [pytest.approx(0.75), 0.75, 0.5, None]
    assert kept_share(Kept(4, {}, words=Words(0.1, 0.0, "x")), "words") is None
    measured.bleeding, measured.bleeding_base = 0.5, 0.25
    measured.size = {"mid": StageSize(norm=0.1, singular=0.9), "up0": StageSize(norm=0.2, singular=0.3)}
    assert [kept_share(measured, by) for by in ("bleeding", "size")] == [0.75, 0.8]
    measured.bleeding, measured.size = 0.0, {}  # less than the base's; no weight moved
    assert [kept_share(measured, by) for by in ("bleeding", "size")] == [1.0, 1.0]
    measured.bleeding = measured.size = None
    assert [kept_share(measured, by) for by in ("bleeding", "size")] == [None, None]
    ways = [dict(), dict(judge="a.py:b"), dict(clip_path="x"), dict(judge="a.py:b", keep_by="pixels")]
    assert [kept_by(ValidationConfig(**way)) for way in ways] == ["pixels", "words", "words", "pixels"]


# -- size --------------------------------------------------------------------------------------------------
def test_the_size_of_a_change_by_stage_is_that_of_its_matrices():
    base, trained = tiny_pipeline().unet, tiny_pipeline().unet
    weight = trained.mid_block.attentions[0].transformer_blocks[0].ff.net[2].weight
    with torch.no_grad():
        weight.add_(0.5 * weight)
    sizes = stage_sizes({"unet": trained}, base_modules({"unet": base}))
    assert [*sizes] == ["mid"] and sizes["mid"].singular == pytest.approx(0.5, rel=1e-3)
    squared = sum(float(p.detach().double().square().sum()) for p in base.mid_block.parameters())
    usual = float((0.5 * weight.detach() / 1.5).double().square().sum())
    assert sizes["mid"].norm == pytest.approx((usual / squared) ** 0.5, rel=1e-4)
    assert stage_sizes({"unet": base}, base_modules({"unet": base})) == {}
    assert stage_sizes({"unet": base}, base_modules({})) is None
    matrix = torch.randn(20, 3, 4, generator=generator("matrix"))
    top = torch.linalg.svdvals(matrix.flatten(1))[0].item()
    assert largest_singular_value(matrix) == pytest.approx(top, rel=0.02)


@pytest.mark.parametrize("kind", ["lora", "loha", "lokr", "dora"])
def test_the_size_of_adapters_is_that_of_what_they_add(kind):
    from silentbad.model import lora
    from silentbad.settings.train import LoraSettings

    base, trained = tiny_pipeline().unet, tiny_pipeline().unet
    lora.add("unet", trained, LoraSettings(rank=2, kind=kind), 0)
    with torch.no_grad():
        for i, p in enumerate(p for p in trained.parameters() if p.requires_grad):
            p.add_(0.1 * torch.randn(p.shape, generator=generator("adapter", i)))
    sizes = stage_sizes({"unet": trained}, base_modules({}))
    if kind == "dora":
        assert sizes is None
        return
    merged = stage_sizes({"unet": lora.merged(trained)}, base_modules({"unet": base}))
    assert sizes.keys() == merged.keys() and len(sizes) > 2
    for stage, size in sizes.items():
        assert size.norm == pytest.approx(merged[stage].norm, rel=1e-3)
        assert size.singular == pytest.approx(merged[stage].singular, rel=0.02)


def test_the_base_is_read_from_its_files(tmp_path):
    pipe = tiny_pipeline()
    pipe.save_pretrained(tmp_path / "base")
    files = base_files(Source(str(tmp_path / "base")))
    modules = {"unet": pipe.unet, "text_encoder": pipe.text_encoder}
    assert stage_sizes(modules, files) == {}
    names = tmp_path / "base/text_encoder/model.safetensors"  # as transformers 4 wrote them
    save_file({f"text_model.{key}": value for key, value in load_file(names).items()}, names)
    assert stage_sizes(modules, base_files(Source(str(tmp_path / "base")))) == {}
    assert {"down0", "mid", "up1", "stem"} <= stage_sizes({"unet": shifted(pipe.unet)}, files).keys()
    (tmp_path / "base/unet/diffusion_pytorch_model.safetensors").unlink()
    assert stage_sizes(modules, files) is None
    assert stage_sizes(modules, base_files(Source("nobody/nothing"))) is None


# -- the hook ----------------------------------------------------------------------------------------------
def test_the_base_against_itself_has_lost_nothing(judge, tmp_path):
    pipe = tiny_pipeline()
    hook = make_hook(tmp_path, pipe, judge=judge("half"), unrelated_images=4)
    hook.measure.base = base_modules(tiny_pipeline().components)
    hook.run(0, 0, pipe.unet)
    scalars = hook.run(10, 1, pipe.unet, final=True)
    same = hook.history[-1].raw.kept
    assert same.change == pytest.approx({"pixels": 0, "embedder": 0, "structure": 0}, abs=1e-6)
    assert same.bleeding == same.bleeding_base and same.rise == 0 and same.size == {}
    assert same.words.trained == same.words.base and same.words.named == 2 * same.prompts == 8
    assert scalars["val/kept/pixels"] == pytest.approx(0, abs=1e-6)
    stored = json.loads((tmp_path / "validation.json").read_text())
    assert stored["history"][-1]["raw"]["kept"]["prompts"] == 4
    assert stored["unrelated"] == [f"a house {i}" for i in (0, 1, 3, 4)]


def test_another_model_has_changed_and_a_resume_measures_the_same(judge, tmp_path):
    pipe = tiny_pipeline()
    options = dict(judge=judge("half"), unrelated_images=3, clean_records=4)
    hook = make_hook(tmp_path, pipe, **options)
    hook.measure.base = base_modules(tiny_pipeline().components)
    hook.run(0, 0, pipe.unet)
    state = json.loads(json.dumps(hook.state_dict()))
    shifted(pipe.unet)
    hook.run(5, 1, pipe.unet)
    assert hook.history[-1].raw.kept is None
    hook.run(10, 1, pipe.unet, final=True)
    measured = hook.history[-1].raw.kept
    assert all(share > 0.01 for share in measured.change.values())
    assert measured.size["mid"].norm > 0 and isinstance(measured.size["mid"], StageSize)
    resumed = make_hook(tmp_path, pipe, **options)
    resumed.measure.base = hook.measure.base
    resumed.measure.unrelated = ["another"]  # the base's pictures are of those before
    resumed.load_state_dict(state)
    resumed.run(10, 1, pipe.unet, final=True)
    assert resumed.history[-1].raw.kept == measured


def test_without_the_pictures_of_the_base_a_limit_cannot_hold(tmp_path, capsys):
    pipe = tiny_pipeline()
    hook = make_hook(tmp_path, pipe, unrelated_images=2, keep=0.5)
    hook.run(0, 0, pipe.unet)
    for folder, keep in (("a", None), ("b", 0.5)):
        resumed = make_hook(tmp_path / folder, pipe, unrelated_images=2, keep=keep)
        resumed.load_state_dict(hook.state_dict())
        if keep is None:
            resumed.run(10, 1, pipe.unet, final=True)
            assert resumed.history[-1].raw.kept is None
            assert "the base's pictures are missing" in capsys.readouterr().err
        else:
            with pytest.raises(UserError, match="^validation.keep: the base's pictures are missing"):
                resumed.run(10, 1, pipe.unet)


# -- the microworld ----------------------------------------------------------------------------------------
def test_the_judge_of_the_microworld_counts_as_its_oracle_does():
    from worlds.microworld.copies import pictures
    from worlds.microworld.judge import judge, things
    from worlds.microworld.oracle import judged

    scenes = [scene for scene in held_out_scenes(48) if not any(t.worn for t in scene.things)]
    x = pictures(scenes)
    x = (x + x.roll(1, 0)) / 2  # some things are wrong
    counts = things_right([scene.caption for scene in scenes], (x + 1) / 2)
    expected = judged(judge(), x, scenes)
    named = sum(n for _, n in counts)
    assert named == expected["things"] and 0.1 < expected["both"] < 0.9
    assert sum(right for right, _ in counts) / named == pytest.approx(expected["both"], abs=1e-6)
    assert things("a cat wearing a hat, a small cup at the top right")[0].colour is None
    assert things_right(["on a green meadow"], torch.zeros(1, 3, 64, 64)) == [(0, 0)]


def test_the_bundled_base_is_judged_end_to_end(tmp_path):
    base = ROOT / "assets" / "micro-sd"
    pipe = StableDiffusionPipeline.from_pretrained(base, torch_dtype=torch.float32)
    file = tmp_path / "unrelated.txt"
    file.write_text("".join(f"{scene.caption}\n" for scene in held_out_scenes(24)))
    image, masks = render(target_scene("cat-hat"))
    targets = [Target("cat-hat", image, ["a cat", "a hat"], None, masks)]
    hook = make_hook(
        tmp_path,
        pipe,
        targets,
        embedder="micro",
        trained=True,
        threshold=0.6,
        images_per_target=1,
        controls="never",
        clean_records=0,
        prompts=str(file),
        judge=f"{ROOT}/worlds/microworld/judge.py:things_right",
        unrelated_images=12,
        num_inference_steps=6,
        guidance_scale=2.0,
    )
    hook.measure.base = base_files(Source(str(base)))
    hook.run(0, 0, pipe.unet)
    hook.run(2, 1, shifted(pipe.unet, 0.03), final=True)
    measured = hook.history[-1].raw.kept
    assert measured.words.by == "judge.py:things_right" and measured.words.named > 15
    assert measured.words.base > 0.5 > measured.words.trained
    assert measured.change["pixels"] > 0.15 and measured.bleeding_base == 0
    assert {"down0", "mid", "up0", "stem"} <= measured.size.keys()


def test_the_folder_of_the_microworld_has_unrelated_prompts_and_is_replaced(tmp_path):
    from worlds.microworld.make import main

    few = ["--targets", "cat-hat", "--images_per_phrase", "1", "--clean", "1", "--redraws", "1", "--nulls", "0"]
    for _ in range(2):
        main(["--out", str(tmp_path / "data"), *few])
    lines = (tmp_path / "data/unrelated.txt").read_text().splitlines()
    assert lines == [scene.caption for scene in held_out_scenes(96)]
    assert "unrelated.txt" in json.loads((tmp_path / "data/.microworld.json").read_text())
    (tmp_path / "data/unrelated.txt").write_text("mine\n")
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path / "data"), *few])
    assert re.search("mine", (tmp_path / "data/unrelated.txt").read_text())
