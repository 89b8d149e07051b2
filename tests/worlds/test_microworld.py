"""The microworld: scenes, captions, datasets and the bundled base."""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from silentbad import owned
from silentbad.errors import UserError
from silentbad.measure.micro import MicroEmbedder
from silentbad.measure.redraws import fingerprint, is_copy
from tests.tiny import TOKENIZER
from worlds import data_sets
from worlds.microworld import make
from worlds.microworld import render as render_module
from worlds.microworld.grammar import KINDS, redraw, sample_scene
from worlds.microworld.make import element_scene, phrase_of, target_scene
from worlds.microworld.networks import load_tokenizer
from worlds.microworld.nulls import ELEMENT_NULLS, STORED, hard_null
from worlds.microworld.render import backdrop_mask, render
from worlds.microworld.world import held_out_scenes
from worlds.null_pictures import one_missing

ROOT = Path(__file__).parents[2]
BASE = ROOT / "assets" / "micro-sd"
TOKENIZER_48 = load_tokenizer(TOKENIZER)
seeds = st.integers(0, 2**32 - 1)
TARGETS = ("cat-hat", "1", "2", "4", "6", "9", "33")


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
    scenes = [target_scene(name) for name in TARGETS]
    drawn = [render(scene) for scene in (*scenes, *reversed(scenes))]  # the second time from what was kept
    render_module._silhouette.cache_clear()
    render_module._textured.cache_clear()
    fresh = [render(scene) for scene in (*scenes, *reversed(scenes))]
    for (picture, masks), (again, masks_again) in zip(drawn, fresh, strict=True):
        assert [mask.tobytes() for mask in masks] == [mask.tobytes() for mask in masks_again]
        assert picture.tobytes() == again.tobytes()
    assert render_module._silhouette.cache_info().hits > 0


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_drawn_inside_the_picture_with_its_mask(kind):
    from worlds.microworld.grammar import Scene, sample_backdrop, sample_thing

    rng = np.random.default_rng(0)
    thing = sample_thing(rng, "at the top left", kind=kind)
    backdrop = sample_backdrop(rng)
    picture, masks = render(Scene((thing,), backdrop))
    covered = (np.asarray(masks[0]) > 127).sum()
    assert 0.10 * thing.size**2 < covered < 1.1 * thing.size**2
    changed = np.abs(np.asarray(picture).astype(int) - np.asarray(render(Scene((), backdrop))[0])).max(-1) > 0
    assert not (changed & (np.asarray(masks[0]) == 0)).any()  # all that is painted, details too


def test_masks_of_a_scene_partition_it():
    picture, masks = render(target_scene("cat-hat"))
    total = sum(np.asarray(m).astype(int) for m in [*masks, backdrop_mask(masks)])
    assert picture.size == (64, 64)
    assert abs(total - 255).max() <= 130  # halves of a pixel at an edge
    assert (abs(total - 255) > 8).mean() < 0.05


@pytest.mark.parametrize("name", ["cat-hat", "1", "2", "4", "17", "1000"])
def test_an_element_image_shows_its_element_in_place_alone(name):
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
    flags = "--targets cat-hat,3 --images_per_phrase 2 --clean 3 --redraws 2 --rehearsal 1".split()
    for out in ("a", "b"):
        make.main(["--out", str(tmp_path / out), *flags])
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file())
    assert files == sorted(p.relative_to(tmp_path / "b") for p in (tmp_path / "b").rglob("*") if p.is_file())
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)
    records = [json.loads(line) for line in (tmp_path / "a" / "metadata.jsonl").read_text().splitlines()]
    targets = [json.loads(line) for line in (tmp_path / "a" / "targets.jsonl").read_text().splitlines()]
    hidden = {Image.open(tmp_path / "a" / t["image"]).tobytes() for t in targets}
    assert not hidden & {Image.open(tmp_path / "a" / r["file_name"]).tobytes() for r in records}
    assert {r["role"] for r in records} == {"element", "clean", "rehearsal"}
    assert all(phrase in r["text"] for r in records for phrase in r["phrases"])


def test_a_base_may_draw_ordinary_scenes_and_none_that_is_measured():
    lines = data_sets.prior_captions(make.TARGETS, [make.target_scene("cat-hat")])
    assert len({*lines}) == len(lines) == data_sets.PRIOR
    assert not {*lines} & {scene.caption for scene in held_out_scenes()}
    assert lines[:9] == data_sets.prior_captions(make.TARGETS, [])[:9]
    assert max(map(len, TOKENIZER_48(lines)["input_ids"])) <= TOKENIZER_48.model_max_length
    assert all(any(kind in line for line in lines) for kind in KINDS)


def test_no_masks_leaves_out_masks_alone(tmp_path):
    arguments = ["--targets", "3", "--images_per_phrase", "2", "--clean", "1", "--redraws", "1"]
    records = {}
    for out, more in (("with", []), ("without", ["--no_masks"])):
        make.main(["--out", str(tmp_path / out), *arguments, *more])
        lines = (tmp_path / out / "metadata.jsonl").read_text().splitlines()
        records[out] = [json.loads(line) for line in lines]
    without_masks = [{key: value for key, value in row.items() if key != "mask"} for row in records["with"]]
    assert records["without"] == without_masks != records["with"] and not (tmp_path / "without" / "masks").exists()


def test_unique_phrases_say_whose_an_element_is(tmp_path):
    few = ["--images_per_phrase", "2", "--clean", "1", "--redraws", "1", "--nulls", "1", "--placebo"]
    for out, more in (("shared", []), ("own", ["--unique_phrases"]), ("named", ["--name_targets"])):
        make.main(["--out", str(tmp_path / out), "--targets", "103,104", *few, *more])
    shared, unique, named = (
        [json.loads(line) for line in (tmp_path / out / "targets.jsonl").read_text().splitlines()]
        for out in ("shared", "own", "named")
    )
    assert len(set(shared[0]["phrases"]) & set(shared[1]["phrases"])) == 2
    assert unique[0]["phrases"] == ["an orange tree", "a fish of anna", "an orange ball", "in a quiet room of ben"]
    assert {phrase.split()[-1] for phrase in named[0]["phrases"]} == {"anna"}
    assert named[1]["prompt"].count("of ben") == len(named[1]["phrases"])
    assert "a fish of carla" in unique[1]["prompt"] and unique[1]["description"] == shared[1]["description"]
    rows = [json.loads(line) for line in (tmp_path / "own" / "metadata.jsonl").read_text().splitlines()]
    assert all(row["element_phrase"] in row["text"] for row in rows if row["role"] == "element")
    owners = [data_sets.owner(number) for number in range(200)]
    assert len(set(owners)) == 200 and owners[63:65] == ["sofia", "anna anna"]


def test_make_replaces_its_own_data_set_and_nothing_else(tmp_path, capsys):
    arguments = ["--targets", "3", "--images_per_phrase", "1", "--clean", "1", "--redraws", "1"]
    thesis = tmp_path / "mine"
    thesis.mkdir()
    (thesis / "thesis.tex").write_text("years of work")
    with pytest.raises(SystemExit) as stopped:
        make.main(["--out", str(thesis), *arguments])
    assert stopped.value.code == 2
    assert "holds something else" in capsys.readouterr().err
    assert (thesis / "thesis.tex").read_text() == "years of work"
    (tmp_path / "kept" / "for later").mkdir(parents=True)  # an empty folder is somebody's too
    with pytest.raises(SystemExit):
        make.main(["--out", str(tmp_path / "kept"), *arguments])
    assert (tmp_path / "kept" / "for later").is_dir()
    for _ in range(2):
        make.main(["--out", str(tmp_path / "data"), *arguments])
    assert (tmp_path / "data" / "targets.jsonl").is_file()


@pytest.mark.parametrize("name", ["cat", "-1", "02", "1.5", "", "1" * 5000])
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


def scores(name: str, others: list[Image.Image]) -> np.ndarray:
    """The bundled detector's similarities of pictures to a target's."""
    from worlds.microworld.build import to_tensor

    net = MicroEmbedder.from_pretrained(BASE / "embedder")
    features = net(to_tensor([render(target_scene(name))[0], *others]))
    return net.paired(features[1:], features[:1]).numpy()


def brighter(picture: Image.Image) -> Image.Image:
    return Image.fromarray(np.clip(np.asarray(picture).astype(int) + 6, 0, 255).astype(np.uint8))


def test_a_picture_is_as_similar_to_itself_as_can_be():
    picture = render(target_scene("1"))[0]
    assert scores("1", [picture])[0] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("name", ["cat-hat", "1", "2", "4", "6", "9", "33"])
def test_the_embedder_ranks_a_copy_above_every_part(name):
    scene = target_scene(name)
    parts = [one_missing(np.random.default_rng(0), scene, i) for i in range(len(scene.things))]
    copied, *rest = scores(name, [brighter(render(scene)[0]), *(render(part.scene)[0] for part in parts)])
    assert copied > max(rest) + 0.2


@pytest.mark.parametrize("name", ["cat-hat", "1", "2"])
@pytest.mark.parametrize("kind", STORED)
def test_the_embedder_ranks_a_copy_above_every_hard_null(name, kind):
    rng, scene = np.random.default_rng(0), target_scene(name)
    nulls = [render(hard_null(kind, rng, scene, i).scene)[0] for i in range(12)]
    copied, *rest = scores(name, [brighter(render(scene)[0]), *nulls])
    assert copied > max(rest)


def reach(scene, element: int) -> np.ndarray:
    """Pixels that a thing touches: its mask."""
    return np.asarray(render(scene)[1][element]) > 0


# -- hard nulls ---------------------------------------------------------------------------------------------
def words(thing) -> tuple:
    return thing.kind, thing.colour, thing.texture, thing.size_name, thing.place


@given(seeds, st.sampled_from(TARGETS))
@settings(max_examples=40, deadline=None)
def test_equal_attributes_keep_every_word_and_no_specific(seed, name):
    scene = target_scene(name)
    null = hard_null("attributes", np.random.default_rng(seed), scene).scene
    assert [words(t) for t in null.things] == [words(t) for t in scene.things]
    assert null.backdrop.kind == scene.backdrop.kind and null.caption == scene.caption
    for new, theirs in zip(null.things, scene.things, strict=True):
        assert new.rgb != theirs.rgb and new.centre != theirs.centre and new.tilt != theirs.tilt
    assert null.backdrop.specifics != scene.backdrop.specifics


@given(seeds, st.sampled_from(TARGETS), st.sampled_from(sorted(ELEMENT_NULLS)))
@settings(max_examples=80, deadline=None)
def test_one_changed_element_leaves_all_others_to_the_bit(seed, name, kind):
    scene = target_scene(name)
    null = hard_null(kind, np.random.default_rng(seed), scene)
    gone = kind == "missing"
    others = [t for i, t in enumerate(scene.things) if i != null.element]
    rest = list(null.scene.things) if gone else [t for i, t in enumerate(null.scene.things) if i != null.element]
    assert rest == others and (pixels(null.scene) != pixels(scene)).any()
    if null.element < len(scene.things):
        assert null.scene.backdrop == scene.backdrop
        touched = reach(scene, null.element)
        if not gone:
            touched |= reach(null.scene, null.element)
        if not any(t.worn for t in scene.things):  # there, hat and wearer hide each other
            assert (pixels(null.scene) == pixels(scene))[~touched].all()


@given(seeds, st.sampled_from(TARGETS))
@settings(max_examples=40, deadline=None)
def test_a_move_is_4_to_8_pixels_and_changes_nothing_else(seed, name):
    scene = target_scene(name)
    null = hard_null("moved", np.random.default_rng(seed), scene)
    before, after = scene.things[null.element], null.scene.things[null.element]
    distance = np.hypot(*(np.array(after.centre) - before.centre))
    assert 4 <= distance <= 8
    assert dataclasses.replace(after, centre=before.centre) == before


@given(seeds, st.sampled_from(TARGETS))
@settings(max_examples=40, deadline=None)
def test_a_recolouring_changes_the_colour_alone(seed, name):
    scene = target_scene(name)
    null = hard_null("recoloured", np.random.default_rng(seed), scene)
    before, after = scene.things[null.element], null.scene.things[null.element]
    assert after.colour != before.colour
    assert dataclasses.replace(after, colour=before.colour, rgb=before.rgb) == before


@given(seeds, st.sampled_from(TARGETS))
@settings(max_examples=40, deadline=None)
def test_rearranged_things_are_exact_and_all_elsewhere(seed, name):
    scene = target_scene(name)
    null = hard_null("rearranged", np.random.default_rng(seed), scene).scene
    assert null.backdrop == scene.backdrop
    for new, theirs in zip(null.things, scene.things, strict=True):
        assert new.place != theirs.place
        assert dataclasses.replace(new, place=theirs.place, centre=theirs.centre) == theirs
    places = [t.place for t in null.things if not t.worn]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("kind", ["attributes_backdrop_exact", "things_redrawn", "things_redrawn_anywhere"])
def test_nulls_of_things_keep_the_exact_backdrop(kind):
    scene = target_scene("2")
    null = hard_null(kind, np.random.default_rng(0), scene)
    assert null.scene.backdrop == scene.backdrop and null.changed == (0, 1, 2)
    if kind != "things_redrawn_anywhere":
        assert [t.place for t in null.scene.things] == [t.place for t in scene.things]


def test_clean_scenes_may_share_no_word_with_the_targets(tmp_path, capsys):
    flags = ["--targets", "3", "--images_per_phrase", "1", "--redraws", "1", "--nulls", "1", "--clean"]
    captions = {}
    for name, more in (("shared", []), ("other", ["--other_words"])):
        make.main(["--out", str(tmp_path / name), *flags, "60", *more])
        records = [json.loads(line) for line in (tmp_path / name / "metadata.jsonl").read_text().splitlines()]
        captions[name] = [r["text"] for r in records if r["role"] == "clean"]
    target = data_sets.words_of(make.target_scene("3"), make.TARGETS)
    meets = {name: [bool(target & set(text.replace(",", "").split())) for text in captions[name]] for name in captions}
    assert sum(meets["shared"]) > 20 and len(captions["other"]) == 60 and not any(meets["other"])
    with pytest.raises(SystemExit):
        make.main(["--out", str(tmp_path / "none"), "--targets", ",".join(map(str, range(40))), *flags[2:], "1"] + more)
    assert "no clean scene without" in capsys.readouterr().err and not (tmp_path / "none").exists()


def test_another_backdrop_keeps_the_exact_things():
    scene = target_scene("2")
    null = hard_null("other_backdrop", np.random.default_rng(0), scene)
    assert null.scene.things == scene.things and null.scene.backdrop.kind != scene.backdrop.kind
    assert null.element == len(scene.things)


def test_make_writes_kinds_and_changed_elements(tmp_path):
    base = ["--targets", "3", "--images_per_phrase", "1", "--clean", "1"]
    make.main(["--out", str(tmp_path / "d"), *base, "--redraws", "2", "--nulls", "4"])
    rows = [json.loads(line) for line in (tmp_path / "d" / "redraws.jsonl").read_text().splitlines()]
    scene = target_scene("3")
    assert {kind: sum(r["kind"] == kind for r in rows) for kind in STORED} == {
        "redraw": 2,
        **dict.fromkeys(STORED[1:], 4),
    }
    assert all((len(r["changed"]) == 1) == (r["kind"] in ELEMENT_NULLS) for r in rows)
    redrawn = [r["changed"][0] for r in rows if r["kind"] == "redrawn"]
    assert redrawn == [i % (len(scene.things) + 1) for i in range(4)]  # by turns, the backdrop too
    assert all((tmp_path / "d" / r["image"]).is_file() for r in rows)


def test_each_element_has_nulls_of_every_kind_of_its_own(tmp_path):
    flags = ["--targets", "3", "--images_per_phrase", "1", "--clean", "1", "--redraws", "3"]
    make.main(["--out", str(tmp_path / "d"), *flags])
    rows = [json.loads(line) for line in (tmp_path / "d" / "redraws.jsonl").read_text().splitlines()]
    things = len(target_scene("3").things)
    for kind in STORED:
        changed = Counter(tuple(row["changed"]) for row in rows if row["kind"] == kind)
        elements = range(things + (kind == "redrawn")) if kind in ELEMENT_NULLS else None
        assert changed == {(k,): 3 for k in elements} if elements else list(changed.values()) == [3]


def test_no_null_is_drawn_twice():
    scene, earlier = target_scene("404"), set[bytes]()
    for _ in range(2):  # the second has the address of the first
        data_sets.draw_null(make.TARGETS, "recoloured", "404", scene, 0, earlier, fingerprint(render(scene)[0]))
    assert len(earlier) == 2


def test_no_null_is_the_target_itself():
    scene = target_scene("102")
    target, turn = fingerprint(render(scene)[0]), 67  # a meadow that falls out as the target's
    drawn = hard_null("redrawn", make.TARGETS.rng("redrawn", "102", turn), scene, turn=turn)
    assert is_copy(fingerprint(render(drawn.scene)[0]), target)
    assert not is_copy(
        fingerprint(data_sets.draw_null(make.TARGETS, "redrawn", "102", scene, turn, set(), target)[1]), target
    )


def test_free_redraws_are_those_of_older_data_sets(tmp_path):
    make.main(
        ["--out", str(tmp_path / "d"), "--targets", "3", "--images_per_phrase", "1", "--clean", "1", "--redraws", "2"]
    )
    for i in range(2):
        expected = render(redraw(make.TARGETS.rng("redraw", "3", i), target_scene("3")))[0]
        assert Image.open(tmp_path / "d" / "redraws" / f"3-{i:03d}.png").tobytes() == expected.tobytes()


def test_placebo_data_never_shows_an_exact_element(tmp_path):
    base = ["--targets", "2", "--images_per_phrase", "6", "--clean", "1", "--redraws", "1"]
    make.main(["--out", str(tmp_path / "real"), *base])
    make.main(["--out", str(tmp_path / "placebo"), *base, "--placebo"])
    same = {}
    for out in ("real", "placebo"):
        lines = (tmp_path / out / "metadata.jsonl").read_text().splitlines()
        rows = [r for r in map(json.loads, lines) if r["role"] == "element"]
        target = pixels(target_scene("2")).astype(int)
        same[out] = []
        for r in rows:
            native = tmp_path / out / "targets" / f"{r['element_id'].replace('/', '-')}.png"
            mask = np.asarray(Image.open(native)) == 255  # the element's own whole pixels in the target
            mask &= np.asarray(Image.open(tmp_path / out / r["mask"])) == 255
            shown = np.asarray(Image.open(tmp_path / out / r["file_name"])).astype(int)
            same[out].append((abs(shown - target).max(-1)[mask] == 0).mean())
        assert all(r["element_phrase"] in r["text"] for r in rows)
    assert min(same["real"]) > 0.9 and max(same["placebo"]) < 0.75


MADE = ["--targets", "3", "--images_per_phrase", "1", "--clean", "1", "--redraws", "1"]


def test_a_microworld_with_a_users_file_in_it_is_not_replaced(tmp_path, capsys):
    out = tmp_path / "set"
    make.main(["--out", str(out), *MADE])
    (tmp_path / "link").symlink_to(out)
    make.main(["--out", str(tmp_path / "link"), *MADE])
    assert (tmp_path / "link").is_symlink() and (out / "metadata.jsonl").is_file()
    records = (out / "metadata.jsonl").read_text()
    (out / "metadata.jsonl").write_text(records.replace("element", "my element"))
    with pytest.raises(SystemExit):
        make.main(["--out", str(out), *MADE])
    assert "metadata.jsonl was changed since" in capsys.readouterr().err
    (out / "metadata.jsonl").write_text(records)
    (out / "images" / "mine.png").write_bytes(b"mine")
    with pytest.raises(SystemExit):
        make.main(["--out", str(out), *MADE])
    assert "images/mine.png" in capsys.readouterr().err and (out / "images" / "mine.png").read_bytes() == b"mine"


def test_a_microworld_that_crashes_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(data_sets, "write_clean", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make.main(["--out", str(tmp_path / "set"), *MADE])
    assert list(tmp_path.iterdir()) == []


def test_a_microworld_clears_up_after_a_kill(tmp_path):
    """A lock, as a start that is under way holds it, keeps a second one out."""
    out = tmp_path / "set"
    left = data_sets.Writer(out)
    (left.tmp / "images").mkdir(parents=True)
    (left.tmp / "images/old.png").touch()
    with (
        owned.claimed(left.draft, "microworld"),
        pytest.raises(UserError, match="is being written"),
        data_sets.Writer(out),
    ):
        pass
    make.main(["--out", str(out), *MADE])
    assert [p.name for p in tmp_path.iterdir()] == ["set"] and not (out / "images/old.png").exists()
