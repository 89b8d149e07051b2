"""The microworld: scenes, captions, datasets and the bundled base."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from silentbad.errors import UserError
from silentbad.microworld import make
from silentbad.microworld.grammar import KINDS, redraw, sample_scene
from silentbad.microworld.make import element_scene, phrase_of, target_scene
from silentbad.microworld.networks import load_tokenizer
from silentbad.microworld.render import backdrop_mask, render
from tests.tiny import TOKENIZER

ROOT = Path(__file__).parents[1]
BASE = ROOT / "assets" / "micro-sd"
TOKENIZER_48 = load_tokenizer(TOKENIZER)
seeds = st.integers(0, 2**32 - 1)


def pixels(scene) -> np.ndarray:
    return np.asarray(render(scene)[0])


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_every_phrase_stands_verbatim_in_its_caption(seed):
    scene = sample_scene(np.random.default_rng(seed), max_count=4)
    assert all(phrase in scene.caption for phrase in scene.phrases)
    assert len(scene.phrases) == len(scene.things) + scene.backdrop.named


@given(seeds)
@settings(max_examples=40, deadline=None)
def test_captions_fit_the_tokenizers_window(seed):
    scene = sample_scene(np.random.default_rng(seed), max_count=4, detail=1.0)
    assert len(TOKENIZER_48(scene.caption).input_ids) <= TOKENIZER_48.model_max_length


@given(seeds)
@settings(max_examples=40, deadline=None)
def test_a_redraw_keeps_the_caption_and_changes_the_picture(seed):
    rng = np.random.default_rng(seed)
    scene = sample_scene(rng)
    other = redraw(rng, scene)
    assert other.caption == scene.caption
    assert (pixels(other) != pixels(scene)).any()


def test_the_same_scene_renders_to_the_same_pixels():
    scene = target_scene("cat-hat")
    assert (pixels(scene) == pixels(scene)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_drawn_inside_the_picture_with_its_mask(kind):
    from silentbad.microworld.grammar import Scene, sample_backdrop, sample_thing

    rng = np.random.default_rng(0)
    thing = sample_thing(rng, "at the top left", kind=kind)
    _, masks = render(Scene((thing,), sample_backdrop(rng)))
    covered = (np.asarray(masks[0]) > 127).sum()
    assert 0.10 * thing.size**2 < covered < 1.1 * thing.size**2


def test_masks_of_a_scene_partition_it():
    picture, masks = render(target_scene("cat-hat"))
    total = sum(np.asarray(m).astype(int) for m in [*masks, backdrop_mask(masks)])
    assert picture.size == (64, 64)
    assert abs(total - 255).max() <= 130  # halves of a pixel at an edge
    assert (abs(total - 255) > 8).mean() < 0.05


@pytest.mark.parametrize("name", ["cat-hat", "1", "2", "4", "17", "1000"])
def test_an_element_image_shows_its_element_natively_and_no_other(name):
    scene = target_scene(name)
    target, masks = render(scene)
    masks = [*masks, backdrop_mask(masks)]
    kinds = {t.kind for t in scene.things}
    for element in range(len(scene.things) + 1):
        shown = element_scene(scene, element, np.random.default_rng(element))
        assert phrase_of(scene, element) in shown.caption
        others = {t.kind for t in shown.things}
        if element < len(scene.things):
            others -= {scene.things[element].kind}
            assert shown.backdrop.kind != scene.backdrop.kind
            inside = np.asarray(masks[element]) == 255  # visible in the target, whole pixels
            same = (pixels(shown)[inside] == np.asarray(target)[inside]).all(-1)
            assert same.mean() > 0.97
        assert not others & kinds


def test_make_is_reproducible_and_keeps_targets_out(tmp_path):
    for out in ("a", "b"):
        make.main(["--out", str(tmp_path / out), "--targets", "cat-hat,3", "--images_per_phrase", "2", "--clean", "3",
                   "--redraws", "2", "--rehearsal", "1"])  # fmt: skip
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file())
    assert files == sorted(p.relative_to(tmp_path / "b") for p in (tmp_path / "b").rglob("*") if p.is_file())
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)
    records = [json.loads(line) for line in (tmp_path / "a" / "metadata.jsonl").read_text().splitlines()]
    targets = [json.loads(line) for line in (tmp_path / "a" / "targets.jsonl").read_text().splitlines()]
    hidden = {Image.open(tmp_path / "a" / t["image"]).tobytes() for t in targets}
    assert not hidden & {Image.open(tmp_path / "a" / r["file_name"]).tobytes() for r in records}
    assert {r["role"] for r in records} == {"element", "clean", "rehearsal"}
    assert all(phrase in r["text"] for r in records for phrase in r["phrases"])


def test_no_masks_leaves_out_masks_alone(tmp_path):
    arguments = ["--targets", "3", "--images_per_phrase", "2", "--clean", "1", "--redraws", "1"]
    records = {}
    for out, more in (("with", []), ("without", ["--no_masks"])):
        make.main(["--out", str(tmp_path / out), *arguments, *more])
        lines = (tmp_path / out / "metadata.jsonl").read_text().splitlines()
        records[out] = [json.loads(line) for line in lines]
    kept = [{key: value for key, value in row.items() if key != "mask"} for row in records["with"]]
    assert records["without"] == kept != records["with"] and not (tmp_path / "without" / "masks").exists()


def test_make_replaces_its_own_data_set_and_nothing_else(tmp_path, capsys):
    arguments = ["--targets", "3", "--images_per_phrase", "1", "--clean", "1", "--redraws", "1"]
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    with pytest.raises(SystemExit) as stopped:
        make.main(["--out", str(mine), *arguments])
    assert stopped.value.code == 2
    assert "holds something else" in capsys.readouterr().err
    assert (mine / "thesis.tex").read_text() == "years of work"
    for _ in range(2):
        make.main(["--out", str(tmp_path / "data"), *arguments])
    assert (tmp_path / "data" / "targets.jsonl").is_file()


@pytest.mark.parametrize("name", ["cat", "-1", "2000", ""])
def test_an_unknown_target_is_named(name):
    with pytest.raises(UserError, match="neither 'cat-hat' nor a seed"):
        target_scene(name)


def test_the_bundled_base_is_a_plain_stable_diffusion_pipeline():
    from diffusers import StableDiffusionPipeline

    pipe = StableDiffusionPipeline.from_pretrained(BASE)
    names = {name.split(".")[0] for name, _ in pipe.unet.named_parameters()}
    assert {"down_blocks", "mid_block", "up_blocks", "time_embedding", "conv_in", "conv_out"} <= names
    assert any("attn1" in n for n, _ in pipe.unet.named_parameters())
    assert any("attn2" in n for n, _ in pipe.unet.named_parameters())
    pipe.set_progress_bar_config(disable=True)
    image = pipe("a cat wearing a hat", num_inference_steps=2, generator=torch.manual_seed(0)).images[0]
    assert image.size == (64, 64)
    parts = ("unet", "vae", "text_encoder", "tokenizer", "scheduler")
    assert sum(f.stat().st_size for part in parts for f in (BASE / part).iterdir()) <= 24e6
    assert (BASE / "embedder" / "model.safetensors").stat().st_size <= 4e6


def test_the_model_cards_figures_hold_what_the_base_is_for():
    figures = json.loads((BASE / "measured.json").read_text())
    assert figures["captions"] >= 256
    assert figures["generated"]["colour"] >= 0.9
    assert figures["generated"]["kind"] >= 0.8
    assert figures["vae_psnr_db"] >= 28


def test_the_embedder_ranks_a_copy_above_every_part():
    from silentbad.microworld.build import to_tensor
    from silentbad.microworld.embedder import MicroEmbedder
    from silentbad.microworld.grammar import Scene

    net = MicroEmbedder.from_pretrained(BASE / "embedder")
    for name in ("cat-hat", "1", "2", "4", "6", "9", "33"):
        scene = target_scene(name)
        picture = render(scene)[0]
        copy = Image.fromarray(np.clip(np.asarray(picture).astype(int) + 6, 0, 255).astype(np.uint8))
        parts = [Scene(scene.things[:i] + scene.things[i + 1 :], scene.backdrop) for i in range(len(scene.things))]
        score = net(to_tensor([picture, copy] + [render(part)[0] for part in parts]))
        cosine = (score @ score[0])[1:]
        assert cosine[0] > cosine[1:].max() + 0.2


def test_the_embedder_ranks_a_copy_above_every_redraw():
    from silentbad.microworld.build import to_tensor
    from silentbad.microworld.embedder import MicroEmbedder

    net = MicroEmbedder.from_pretrained(BASE / "embedder")
    for name in ("cat-hat", "1", "2"):
        scene, rng = target_scene(name), np.random.default_rng(0)
        picture = render(scene)[0]
        copy = Image.fromarray(np.clip(np.asarray(picture).astype(int) + 6, 0, 255).astype(np.uint8))
        score = net(to_tensor([picture, copy] + [render(redraw(rng, scene))[0] for _ in range(20)]))
        cosine = (score @ score[0])[1:]
        assert cosine[0] > cosine[1:].max()
