"""The base's own pictures: drawn once, the same after a kill and in two processes, clean records of the run."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from silentbad.errors import UserError
from silentbad.loop import prior
from silentbad.loop.prior import BLOCK, BUNDLED, PictureStore, read_prompts, says
from silentbad.measure.sheet import PRIOR
from silentbad.model.pipeline import load_tokenizer
from silentbad.settings.train import TrainConfig
from tests.conftest import write_data
from tests.training import checked, rows, same, weights
from train_silentbad import main

PROMPTS = ("a star", "a moon over a meadow", "a green tree")
COUNT = BLOCK + 3
NAN = float("nan")


@pytest.fixture
def own(tmp_path):
    """Settings of a run whose base draws its own pictures."""
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS) + "\n\n")
    return {
        "prior_preservation.num_images": COUNT,
        "prior_preservation.prompts": tmp_path / "prompts.txt",
        "prior_preservation.guidance_scale": 2.0,
        "prior_preservation.num_inference_steps": 2,
        "cache_dir": tmp_path / "cache",
        "held_out_clean": 0,
    }


@pytest.fixture
def drawn(monkeypatch):
    """Numbers of the pictures that are drawn."""
    numbers = []
    write = PictureStore._write

    def note(self, block):
        numbers.extend(block)
        write(self, block)

    monkeypatch.setattr(PictureStore, "_write", note)
    return numbers


def pictures(cache):
    """{name: pixels} of the one set in a cache."""
    (folder,) = cache.glob("silentbad/prior-*")
    return {file.name: np.asarray(Image.open(file)) for file in folder.glob("*.png")}


def equal(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def test_the_pictures_are_clean_records_with_their_prompts(build, own, tmp_path, capsys):
    run = build(**own)
    roles = np.asarray(run.records.role)
    texts = np.asarray(run.records.text)
    assert (roles == "clean").sum() == 8 + COUNT
    assert texts[-COUNT:].tolist() == [PROMPTS[i % 3] for i in range(COUNT)]
    assert f"the base drew {COUNT} of these" in capsys.readouterr().out
    listed = json.loads((tmp_path / "run" / PRIOR).read_text())
    assert [image["prompt"] for image in listed] == texts[-COUNT:].tolist()  # few, so that all are shown
    shown = [np.asarray(Image.open(tmp_path / "run" / image["file"])) for image in listed]
    drawn = pictures(tmp_path / "cache")
    assert np.array_equal(shown, [drawn[f"{i:06d}.png"] for i in range(COUNT)])
    seen = [text for draw in range(8) for batch in run.loader.draw(draw) for text in batch["text"]]
    assert {*PROMPTS} <= {*seen}


def test_a_share_of_the_pictures_has_no_prompt(build, own, monkeypatch):
    run = build(**own, **{"prior_preservation.unconditional": 0.25})
    texts = np.asarray(run.records.text)[-COUNT:].tolist()
    assert [i for i, text in enumerate(texts) if not text] == [3, 7]
    assert texts[:3] == [*PROMPTS] and texts[4:7] == [*PROMPTS], "the others take the prompts in turn"
    seen = [text for draw in range(8) for batch in run.loader.draw(draw) for text in batch["text"]]
    assert "" in seen


@pytest.mark.parametrize("share", [0.0, 0.1, 1 / 3, 0.5, 1.0])
def test_the_share_without_a_prompt_is_spread_evenly(share):
    texts = [prior.prompt_of(PROMPTS, number, share) for number in range(90)]
    for start in range(0, 90, 30):
        assert texts[start : start + 30].count("") == round(30 * share)
    assert [t for t in texts if t] == [PROMPTS[i % 3] for i in range(90 - texts.count(""))]


def test_no_clean_folder_at_all_trains(flags, own, tmp_path):
    data = write_data(tmp_path / "bare", clean=0)
    assert main(flags(train_data_dir=data, **own, **{"memory.sampler.clean_ratio": 1.0})) == 0
    assert rows(tmp_path / "run")[-1]["step"] == 6


def test_a_picture_depends_on_its_number_and_seed_alone(build, own, drawn, tmp_path):
    build(**own)
    first = pictures(tmp_path / "cache")
    assert len(first) == COUNT == len(drawn)
    assert len({picture.tobytes() for picture in first.values()}) == COUNT
    build("again", **own, seed=5)
    assert len(drawn) == COUNT  # a cache hit draws nothing, whatever the run's seed
    build("more", **{**own, "prior_preservation.num_images": COUNT + BLOCK})
    more = pictures(tmp_path / "cache")
    assert equal(first, {name: more[name] for name in first}) and len(more) == COUNT + BLOCK
    other = {**own, "prior_preservation.seed": 1, "cache_dir": tmp_path / "other"}
    build("other", **other)
    assert not equal(first, pictures(tmp_path / "other"))


def test_a_kill_in_the_middle_goes_on_and_gives_the_same_pictures(build, own, drawn, tmp_path, monkeypatch):
    build(**own)
    whole = pictures(tmp_path / "cache")
    save = Image.Image.save

    def killed(image, file, *more, **options):
        if len(list((tmp_path / "killed").glob("silentbad/prior-*/0*.png"))) == 5:
            file.write_bytes(b"half a picture")
            raise KeyboardInterrupt
        save(image, file, *more, **options)

    monkeypatch.setattr(Image.Image, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        build("killed", **{**own, "cache_dir": tmp_path / "killed"})
    monkeypatch.undo()
    assert len(pictures_there := list((tmp_path / "killed").glob("silentbad/prior-*/0*.png"))) == 5
    times = {file: file.stat().st_mtime_ns for file in pictures_there}
    build("resumed", **{**own, "cache_dir": tmp_path / "killed"})
    assert times == {file: file.stat().st_mtime_ns for file in times}  # what was there is not drawn again
    (folder,) = (tmp_path / "killed").glob("silentbad/prior-*")
    assert not list(folder.glob(".*"))
    assert equal(whole, pictures(tmp_path / "killed"))


def test_a_block_that_another_run_is_drawing_is_waited_for(build, own, drawn, tmp_path, monkeypatch):
    build(**own)
    whole = pictures(tmp_path / "cache")
    drawn.clear()
    lock = prior.FileLock

    class Late(lock):
        """Another run has drawn the block by the time that the lock is free."""

        def __enter__(self):
            for name in whole:
                Image.fromarray(whole[name]).save(self.folder / name)
            return super().__enter__()

        @property
        def folder(self):
            return next((tmp_path / "other").glob("silentbad/prior-*"))

    monkeypatch.setattr(prior, "FileLock", Late)
    build("other", **{**own, "cache_dir": tmp_path / "other"})
    assert not drawn and equal(whole, pictures(tmp_path / "other"))


def test_with_adapters_the_base_draws_the_same(build, own, drawn, tmp_path):
    build(**own)
    adapters = {"lora.rank": 2, "lora.kind": "dora"}
    run = build("lora", **own, **adapters)
    assert len(drawn) == COUNT and (np.asarray(run.records.role) == "clean").sum() == 8 + COUNT


@pytest.mark.parametrize("kind", ["sd2", "xl", "sd3"])
def test_every_family_draws(build, own, pipelines, kind, tmp_path):
    build(**own, pretrained_model_name_or_path=pipelines[kind])
    assert len(pictures(tmp_path / "cache")) == COUNT


def test_training_is_the_same_whether_they_are_drawn_or_read(build, own):
    assert same(weights(build(**own)), weights(build("again", **own)))
    state = torch.random.get_rng_state()
    build("last", **own)
    torch.random.set_rng_state(state)


def test_a_resume_draws_again_what_the_cache_has_lost(flags, own, tmp_path, drawn):
    assert main(flags(**own, max_train_steps=2, checkpointing_steps=2)) == 0
    shutil.rmtree(tmp_path / "cache")
    assert main(flags(**own, max_train_steps=4, resume_from_checkpoint="latest")) == 0
    assert len(drawn) == 2 * COUNT and rows(tmp_path / "run")[-1]["step"] == 4
    changed = {**own, "prior_preservation.num_images": COUNT + 1}
    assert main(flags(**changed, max_train_steps=6, resume_from_checkpoint="latest")) == 2


def test_a_dry_run_draws_a_few_and_forecasts_the_rest(flags, own, tmp_path, drawn, capsys):
    assert main(flags(**{**own, "prior_preservation.num_images": 3 * BLOCK}, dry_run=True)) == 0
    out = capsys.readouterr().out
    assert len(drawn) == BLOCK and re.search(rf"prior    about \d+ s: {2 * BLOCK} pictures by the base", out)
    assert f"{20 + 3 * BLOCK} records" in out or f"{8 + 3 * BLOCK} clean" in out  # as many as the run will have
    few = pictures(tmp_path / "cache")
    assert main(flags(**{**own, "prior_preservation.num_images": 3 * BLOCK})) == 0
    assert len(drawn) == 3 * BLOCK
    whole = pictures(tmp_path / "cache")
    assert equal(few, {name: whole[name] for name in few})  # nothing of the dry run is wasted
    assert main(flags("last", **{**own, "prior_preservation.num_images": 3 * BLOCK}, dry_run=True)) == 0
    assert "pictures by the base" not in capsys.readouterr().out.split("dry run")[1]


def test_a_picture_that_is_not_finite_is_one_line(flags, own, monkeypatch, capsys):
    check = prior.BaseSampler.check_finite
    monkeypatch.setattr(prior.BaseSampler, "check_finite", lambda self, images, drawn: check(self, images * NAN, drawn))
    assert main(flags(**own)) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "prior_preservation.num_images" in line
    assert line.endswith("the picture of 'a star' is not finite; take another base")


@pytest.mark.parametrize(
    "content, said",
    [
        ("", "prompts.txt holds no prompt; give one a line"),
        ("a cat\n" + "very " * 60, "prompts.txt:2: the prompt has"),
        ('{"prompt": "a cat"}', "prompts.txt:1: the JSON would be drawn as a prompt; "),
        ("a cat\na\0dog\n", "prompts.txt:2: a prompt must be text without NUL"),
        (None, "prior_preservation.prompts (command line): no file"),
    ],
)
def test_prompts_that_cannot_be_drawn_are_one_line(flags, own, tmp_path, capsys, drawn, content, said):
    if content is None:
        (tmp_path / "prompts.txt").unlink()
    else:
        (tmp_path / "prompts.txt").write_text(content)
    assert main(flags(**own)) == 2
    err = capsys.readouterr().err.strip()
    assert said in err and "\n" not in err and not drawn


def test_steps_that_the_schedule_does_not_take_name_this_setting(flags, own, monkeypatch, capsys):
    def refuse(scheduler, steps, *more):
        raise ValueError("too few")

    monkeypatch.setattr("diffusers.DDIMScheduler.set_timesteps", refuse)
    assert main(flags(**own)) == 2
    err = capsys.readouterr().err
    assert re.search(r"prior_preservation.num_inference_steps.*: the scheduler cannot take 2 steps", err)


def test_pictures_that_are_never_shown_are_refused():
    with pytest.raises(UserError, match="prior_preservation.num_images .*: draws clean records, of which"):
        checked(["--train_data_dir=d", "--prior_preservation.num_images=4", "--memory.sampler.clean_ratio=0"])
    with pytest.raises(UserError, match="needs prior_preservation.num_images"):
        checked(["--train_data_dir=d", "--prior_preservation.seed=4"])


@pytest.mark.parametrize(
    "flag", ["with_prior_preservation", "num_class_images", "class_prompt", "class_data_dir", "prior_loss_weight"]
)
def test_the_flags_of_other_trainers_name_their_successor(flag):
    with pytest.raises(UserError, match=f"{flag}.* is of another script: .*(prior_preservation|roles.clean)"):
        checked(["--train_data_dir=d", f"--{flag}=4"])


def test_the_bundled_prompts_are_many_different_and_short():
    lines = BUNDLED.read_text(encoding="utf-8").splitlines()
    assert len(lines) >= 400 and len({*lines}) == len(lines)
    tokenizer = load_tokenizer(TrainConfig())
    prompts = read_prompts(None, tokenizer)
    assert prompts == lines


def test_a_base_may_hold_prompts_of_what_it_knows(tmp_path):
    tokenizer = load_tokenizer(TrainConfig())
    assert read_prompts(None, tokenizer, str(tmp_path)) == read_prompts(None, tokenizer)
    (tmp_path / "prior.txt").write_text("a star\n")
    assert read_prompts(None, tokenizer, str(tmp_path)) == ["a star"]
    assert len(read_prompts(None, tokenizer, "assets/micro-sd")) == 400


@pytest.mark.parametrize(
    "prompt, phrase, expected",
    [
        ("a big red dotted cat, a hat", "a red cat", True),
        ("a red hat, a cat", "a red cat", False),
        ("A cat on the mat", "the cat", True),
        ("a carpet", "a car", False),
        ("一只红色的猫在帽子旁边", "红色的猫", True),
    ],
)
def test_a_prompt_says_a_phrase_between_two_commas(prompt, phrase, expected):
    assert says(prompt, phrase) is expected


def test_prompts_that_say_an_elements_phrase_are_left_out(build, own, tmp_path):
    for file in (tmp_path / "data" / "masks").glob("e1-*.png"):
        ImageOps.invert(Image.open(file)).save(file)
    thing, backdrop = build("before").memory.info.phrase
    (tmp_path / "prompts.txt").write_text(f"a moon\nover there {thing}\nbig {backdrop}\n")
    for which, left in {"nothing": {thing, backdrop}, "backdrops": {thing}, "elements": set()}.items():
        run = build(which, **own, **{"prior_preservation.leave_out": which})
        said = " ".join(run.records.text[-COUNT:])
        assert "a moon" in said and {phrase for phrase in (thing, backdrop) if phrase in said} == left


def test_every_prompt_says_a_phrase(build, own, tmp_path):
    phrase = build("before").memory.info.phrase[0]
    (tmp_path / "prompts.txt").write_text(f"over there {phrase}\n")
    with pytest.raises(UserError, match="leave_out: every prompt says .*; add others, or leave out nothing"):
        build(**own, **{"prior_preservation.leave_out": "elements"})
