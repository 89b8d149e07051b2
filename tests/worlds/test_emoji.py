"""The emoji world: who draws what, what a null changes, what its data sets hold, and how a missing package is said."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from PIL import Image

from bench import emoji_judge, shield
from bench.recovery import BASES
from bench.shield_data import assemble, clean, hide
from silentbad.errors import UserError
from silentbad.measure.micro import MicroEmbedder
from silentbad_shield.scan.find import Findings
from silentbad_shield.scan.suspect_sets import SuspectSet
from worlds.data_sets import phrase_of
from worlds.emoji import build, export, make, nulls, sets, visible
from worlds.emoji import render as emoji_render
from worlds.emoji.grammar import FORMS, PLACES, redraw, sample_scene
from worlds.emoji.nouns import NOUNS, words
from worlds.emoji.nulls import ELEMENT_NULLS, SCENE_NULLS, STORED, hard_null, turns
from worlds.emoji.render import render
from worlds.emoji.world import EMOJI, held_out_scenes
from worlds.microworld.export import load_judge
from worlds.microworld.oracle import Judge
from worlds.microworld.render import backdrop_mask
from worlds.options import EmojiBaseOptions

DRAWINGS = Path(__file__).parent / "emoji"
FEW = ["--images_per_phrase", "2", "--clean", "3", "--redraws", "3", "--nulls", "3"]


def forget():
    """Drawings and pictures that are kept for the next call."""
    for cached in (sets.artist, sets.drawing, visible.pixels, visible.regions):
        cached.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def drawings(tmp_path_factory):
    """A folder as the packages leave it, with three drawings by each artist in place of all."""
    folder = tmp_path_factory.mktemp("emoji-sets")
    forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EMOJI_SETS", str(folder))
        for name in sets.SETS:
            sheet = np.asarray(Image.open(DRAWINGS / f"{name}.png"))
            three = sheet.reshape(sets.SIDE, 3, sets.SIDE, 4).swapaxes(0, 1)
            np.savez(sets.drawing_file(name), pictures=three[np.arange(len(NOUNS)) % 3])
        yield folder
    forget()


def pixels(scene) -> np.ndarray:
    return np.asarray(render(scene)[0]).astype(int)


def test_captions_say_every_phrase_in_each_form():
    scenes = [sample_scene(np.random.default_rng(i)) for i in range(60)]
    assert {scene.form for scene in scenes} == {*range(FORMS)}
    for scene in scenes:
        at = 0
        for phrase in scene.phrases:
            at = scene.caption.index(phrase, at) + len(phrase)
    assert words("owl") == "an owl" and words("unicorn") == "a unicorn" and words("books") == "some books"


def test_one_artist_is_seen_in_targets_alone():
    for seed in range(30):
        artists = [thing.artist for thing in make.target_scene(str(seed)).things]
        assert sets.HELD_OUT in artists and len({*artists}) == len(artists)
        rng = np.random.default_rng(seed)
        assert all(thing.artist in sets.TRAINED for thing in sample_scene(rng).things)
        scene = make.target_scene(str(seed))
        for element, thing in enumerate(scene.things):
            placebo = make.placebo_scene(scene, element, rng).things[element]
            assert placebo.phrase == thing.phrase
            assert placebo.artist in sets.TRAINED and placebo.artist != thing.artist


def test_a_redraw_keeps_the_caption_and_is_by_others():
    for seed in range(20):
        scene = sample_scene(np.random.default_rng(seed))
        other = redraw(np.random.default_rng(seed + 1), scene)
        assert other.caption == scene.caption and (pixels(other) != pixels(scene)).any()
        assert all(a.artist != b.artist for a, b in zip(other.things, scene.things, strict=True))


@pytest.mark.parametrize("kind", ELEMENT_NULLS)
def test_a_null_of_one_element_leaves_the_others(kind):
    scene = make.target_scene("3")
    masks = render(scene)[1]
    masks = [np.asarray(mask) for mask in (*masks, backdrop_mask(masks))]
    for turn in range(turns(kind, scene)):
        null = hard_null(kind, np.random.default_rng(turn), scene, turn)
        assert null.changed == (turn,)
        changed = (pixels(null.scene) != pixels(scene)).any(-1)
        assert changed[masks[turn] > 127].mean() > 0.05
        for element in {*range(len(scene.things))} - {turn}:
            assert changed[masks[element] == 255].mean() < 0.1  # where they touch


@pytest.mark.parametrize("kind", SCENE_NULLS)
def test_a_null_of_the_scene_changes_all_that_it_says(kind):
    for seed in range(8):
        scene = make.target_scene(str(seed))
        null = hard_null(kind, np.random.default_rng(seed), scene)
        masks = render(scene)[1]
        masks = [np.asarray(mask) for mask in (*masks, backdrop_mask(masks))]
        changed = (pixels(null.scene) != pixels(scene)).any(-1)
        assert all(changed[masks[element] > 127].mean() > 0.05 for element in null.changed)
        if kind == "artists":
            assert null.scene.caption == scene.caption and null.scene.backdrop == scene.backdrop


@pytest.mark.parametrize("kind", [*SCENE_NULLS, *ELEMENT_NULLS])
def test_a_null_looks_different_wherever_it_says(kind):
    """More than nineteen of twenty copies do. Drawn as they come, some do not."""
    scene = make.target_scene("3")
    drawn = [hard_null(kind, np.random.default_rng(i), scene, i) for i in range(12)]
    for null in drawn:
        assert visible.differs(null.scene, scene, null.changed)
        assert not visible.differs(scene, scene, null.changed)


def test_two_artists_who_draw_the_same_make_no_null(monkeypatch):
    """All but one other artist draw as the thing's own: `artist` is then always by that one."""
    scene = make.target_scene("3")
    thing, other = scene.things[0], next(name for name in sets.TRAINED if name != scene.things[0].artist)
    real = sets.drawing
    same = lambda name, noun: real(name if name == other else thing.artist, noun)  # noqa: E731
    monkeypatch.setattr(emoji_render, "drawing", same)
    forget()
    for i in range(12):
        null = hard_null("artist", np.random.default_rng(i), scene, 0)
        assert null.scene.things[0].artist == other
    forget()


def test_a_thing_stands_out_from_its_backdrop(monkeypatch):
    pale = lambda name, noun: Image.new("RGBA", (96, 96), (255, 255, 255, 12))  # noqa: E731
    rng = np.random.default_rng(0)
    assert all(nulls.all_differ(rng, make.target_scene(str(seed)), make.NEEDED) for seed in range(8))
    monkeypatch.setattr(emoji_render, "drawing", pale)
    forget()
    assert not nulls.all_differ(rng, make.drawn_target(rng), ("missing",))
    forget()


def test_what_a_detector_is_trained_on_has_no_drawing_by_the_artist_held_out():
    for i in range(12):
        rng = np.random.default_rng(i)
        scene = EMOJI.terse_scene(rng)
        for kind in (kind for kinds in EMOJI.null_kinds for kind in kinds):
            shown = (*scene.things, *EMOJI.null(kind, rng, scene).scene.things)
            assert all(thing.artist in sets.TRAINED for thing in shown)


def test_an_element_is_shown_alone_as_the_target_has_it():
    for name in ("0", "1", "2", "5"):
        scene = make.target_scene(name)
        masks = render(scene)[1]
        nouns = {thing.kind for thing in scene.things}
        for element in range(len(scene.things) + 1):
            shown = make.element_scene(scene, element, np.random.default_rng(element))
            assert phrase_of(scene, element) in shown.caption
            others = {thing.kind for thing in shown.things}
            if element < len(scene.things):
                others -= {scene.things[element].kind}
                inside = np.asarray(masks[element]) == 255
                difference = np.abs(pixels(shown)[inside] - pixels(scene)[inside]).max(-1)
                assert (difference <= 16).mean() > 0.97  # some drawings let the backdrop through a little
                assert shown.backdrop.kind != scene.backdrop.kind
            assert not others & nouns


def test_a_data_set_is_the_microworlds_in_form(tmp_path):
    for out, more in (("a", []), ("b", []), ("placebo", ["--placebo"])):
        make.main(["--out", str(tmp_path / out), "--targets", "3,4", *FEW, *more])
    files = {name: (tmp_path / name / "metadata.jsonl").read_bytes() for name in ("a", "b")}
    assert files["a"] == files["b"]
    records = [json.loads(line) for line in files["a"].splitlines()]
    assert {record["role"] for record in records} == {"element", "clean"}
    assert all(phrase in record["text"] for record in records for phrase in record["phrases"])
    redraws = [json.loads(line) for line in (tmp_path / "a/redraws.jsonl").read_text().splitlines()]
    assert {row["kind"] for row in redraws} == {*STORED}
    element = next(record for record in records if record["role"] == "element")
    one, other = (Image.open(tmp_path / out / element["file_name"]).tobytes() for out in ("a", "placebo"))
    assert one != other
    prior = (tmp_path / "a/prior.txt").read_text().splitlines()
    assert len({*prior}) == 400 and not {*prior} & {scene.caption for scene in held_out_scenes()}


@pytest.mark.parametrize("name", ["-1", "cat-hat", "3k4", "01"])
def test_a_target_that_is_no_seed_is_one_line(name, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        make.main(["--out", str(tmp_path / "d"), "--targets", name])
    assert re.fullmatch(r"error: --targets: .*is no seed.*\n", capsys.readouterr().err)
    assert not (tmp_path / "d").exists()


def test_a_package_that_cannot_be_fetched_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("EMOJI_SETS", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="there is no npm here"):
        sets.fetched("noto")
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho 'npm error network' >&2\nexit 1\n")
    npm.chmod(0o755)
    with pytest.raises(UserError, match="npm pack @iconify-json/noto@1.2.9 failed: npm error network"):
        sets.fetched("noto")
    npm.write_text(f"#!/bin/sh\necho other > {tmp_path}/iconify-json-noto-1.2.9.tgz\n")
    with pytest.raises(UserError, match="another checksum"):
        sets.fetched("noto")


def test_an_icon_is_drawn_whole():
    """An alias, a box of its own, and a package's default size."""
    resvg = pytest.importorskip("resvg_py")
    body = '<path fill="#f00" d="M0 0h32v32H0z"/>'
    icons = {"width": 32, "height": 32, "icons": {"a": {"body": body}}, "aliases": {"b": {"parent": "a"}}}
    content = bytes(resvg.svg_to_bytes(svg_string=sets.svg(icons, "b")))
    picture = Image.open(io.BytesIO(content)).convert("RGBA")
    assert picture.size == (sets.SIDE, sets.SIDE)
    assert np.asarray(picture)[[1, -2], [1, -2]].tolist() == [[255, 0, 0, 255]] * 2


@pytest.mark.thorough
def test_the_base_is_built_by_the_microworlds_stages(tmp_path):
    """Two steps of what is cheap; what is written is a pipeline with its card."""
    flags = ["--text_steps", "1", "--unet_steps", "1", "--batch", "2", "--pool", "8", "--device", "cpu"]
    vae = build.ASSETS / "vae"
    build.main(["--work", str(tmp_path), "--stage", "unet", "--vae", str(vae), *flags])
    nets = build.networks("assets/micro-sd") | {"judge": Judge(EMOJI)}
    options = EmojiBaseOptions(work=str(tmp_path), captions=2)
    folder = export.export(nets, build.load_tokenizer(build.ASSETS / "tokenizer"), options)
    figures = json.loads((folder / "measured.json").read_text())
    assert figures["captions"] == 2 and figures["generated"]["things"] >= 2
    assert "OpenMoji" in (folder / "README.md").read_text()


@pytest.mark.thorough
def test_the_judge_knows_its_copies(tmp_path):
    """By the bundled detector, and by one that was trained on from it, for two steps."""
    vae = ["--vae", str(build.ASSETS / "vae"), "--device", "cpu"]
    build.main(["--work", str(tmp_path), "--stage", "embedder", "--embedder_steps", "2", *vae])
    small = ["--targets", "3", "--calibration", "3", "--pictures", "3", "--base", "assets/micro-sd"]
    trained = ["--trained", str(tmp_path / "pipeline/embedder")]
    emoji_judge.main([*small, *trained, "--results", str(tmp_path / "judge.json")])
    results = json.loads((tmp_path / "judge.json").read_text())
    assert results["trained"] != results["detector"]
    for row in results["targets"]["3"]["columns"].values():
        assert row["passed"]["copy"]["whole"] == [3, 3]
        assert row["passed"]["redraw"]["strict"] == [0, 3]
        assert set(row["elements"]) <= {"unseen artist", "known artist", "backdrop"}
    assert "trained, strict" in emoji_judge.table(results)


def test_the_scan_is_measured_on_data_of_this_world():
    hidden = hide("3", 3, of=make.TARGETS)
    data = assemble(3, 120, [hidden], clean(3, 10, make.TARGETS), of=make.TARGETS)
    assert data.suspect().sum() == 3 * len(hidden[0].records)
    for phrase, records in zip(hidden[0].phrases, hidden[0].records, strict=True):
        assert all(phrase in data.captions[i] and data.kinds[i] == "element" for i in records)
    exact = Findings([SuspectSet([], 0.0, [np.asarray(records) for records in hidden[0].records])])
    assert shield.elements_found(data, exact) == [len(hidden[0].records)] * 2
    assert shield.elements_found(data, Findings([])) == [0, len(hidden[0].records)]


def test_the_bundled_base_draws_and_brings_its_judge_and_detector():
    folder = BASES["emoji"]
    pipe = StableDiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    image = pipe("a fox, on a green meadow", num_inference_steps=2, generator=torch.manual_seed(0)).images[0]
    assert image.size == (64, 64)
    assert load_judge(folder / "judge" / "model.safetensors", EMOJI).training is False
    detector = MicroEmbedder.from_pretrained(folder / "embedder")
    assert detector(torch.zeros(1, 3, 64, 64)).isfinite().all()
    assert json.loads((folder / "measured.json").read_text())["generated"]["kind"] > 0.4


def test_places_are_inside_and_captions_fit_the_tokenizer():
    tokenizer = build.load_tokenizer(build.ASSETS / "tokenizer")
    captions = [EMOJI.sample_scene(EMOJI.rng("unet", i), max_count=4, detail=1.0).caption for i in range(200)]
    assert max(len(tokenizer(caption).input_ids) for caption in captions) <= tokenizer.model_max_length
    assert len(PLACES) == 4 and torch.tensor([*PLACES.values()]).max() < 64
