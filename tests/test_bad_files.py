"""Damaged, hostile and absurd files: one line and exit code 2, and what may be mended is mended.

The cases go on where tests/test_bad_input.py ends: each spoils one file of a good set of inputs.
"""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import train_silentbad
import validation
from silentbad import owned
from silentbad.data import images, table
from silentbad.data.records import load_records
from silentbad.data.targets import load_targets
from silentbad.errors import UserError, first_line, user_errors
from silentbad.measure.embedders import EMBEDDERS, load_embedder
from silentbad.measure.generation import Sampler, plan
from silentbad.measure.micro import MicroEmbedder
from silentbad.measure.thresholds import load_redraws
from silentbad.model import lora, pipeline, store
from silentbad.report import run_report
from silentbad.scan import scanner
from tests.conftest import write_data
from tests.folders import config, encoded, published
from tests.mistakes import (
    TARGET,
    Case,
    append,
    both,
    case,
    edit_json,
    record,
    refused,
    remove,
    write,
)
from tests.mistakes import good as good  # a fixture
from tests.recoveries import make_hook, saved_embedder, smooth, some_targets
from tests.tiny import tiny_pipeline, tiny_sd3_pipeline
from tests.training import VALIDATION
from validation import RecoveryHook, ValidationConfig
from worlds import data_sets
from worlds.microworld import make

NAN = float("nan")


# ---------------------------------------------------------------- ways to spoil a model folder
def tensors(name: str, change):
    """Change the tensors of a safetensors file: change({name: tensor})."""

    def spoil(root: Path) -> None:
        held = load_file(root / name)
        change(held)
        save_file(held, root / name, metadata={"format": "pt"})

    return spoil


def with_nan(held: dict) -> None:
    held[sorted(held)[0]].view(-1)[0] = NAN


def zeroed(held: dict) -> None:
    for tensor in held.values():
        tensor.zero_()


def without_first(held: dict) -> None:
    held.pop(sorted(held)[0])


def with_another(held: dict) -> None:
    held["somewhere.else"] = torch.zeros(3)


def without(name: str, key: str):
    def spoil(root: Path) -> None:
        content = json.loads((root / name).read_text())
        content.pop(key)
        (root / name).write_text(json.dumps(content))

    return spoil


def link(name: str):
    """A file of the data replaced by a link to the same file outside the folder."""

    def spoil(root: Path) -> None:
        outside = root / "outside"
        shutil.move(root / name, outside)
        (root / name).symlink_to(outside)

    return spoil


def picture(name: str, make_picture):
    return lambda root: make_picture().save(root / name)


def as_csv(text: str):
    return both(remove("data/metadata.jsonl"), write("data/metadata.csv", text))


def measured_at(folder: Path, target: str) -> None:
    """A run folder whose record has one target."""
    pipe, one = tiny_pipeline(), some_targets(1)
    one[0].target_id = target
    make_hook(folder, pipe, one, threshold=0.5, images_per_target=1, num_inference_steps=1).run(0, 0, pipe.unet)


WEIGHTS = {part: f"pipeline/{part}/diffusion_pytorch_model.safetensors" for part in ("unet", "vae")}
WEIGHTS["text_encoder"] = "pipeline/text_encoder/model.safetensors"
SCHEDULE = "pipeline/scheduler/scheduler_config.json"
TOKENIZER = "pipeline/tokenizer/tokenizer_config.json"
AUDITED = ("--pipeline", "pipeline", "--targets", "data", "--threshold", "0.5", "--embedder", "ssim")
AUDITED += ("--images_per_target", "1", "--num_inference_steps", "1", "--output_dir", "audit")


def audit(*said: str, touch=None, more=()) -> Case:
    return Case(said, {}, touch, (*AUDITED, *more), validation.main)


SPOILED = {  # name: (spoil, what the line says), in training and in an audit alike
    "a UNet with NaN": (tensors(WEIGHTS["unet"], with_nan), ("load unet", "NaN or infinite values in conv_in.bias")),
    "a scheduler of flow matching": (edit_json(SCHEDULE, _class_name="FlowMatchEulerDiscreteScheduler"), ("FlowMatchEulerDiscreteScheduler predicts",)),
    "an index without a class": (write("pipeline/model_index.json", "{}"), ("model_index.json", "_class_name")),
    "a UNet that lacks a tensor": (tensors(WEIGHTS["unet"], without_first), ("load unet", "it lacks conv_in.bias")),
    "a tensor of another model": (tensors(WEIGHTS["unet"], with_another), ("load unet", "somewhere.else")),
    "a text encoder's broken configuration": (
        write("pipeline/text_encoder/config.json", "{"),
        ("load text_encoder", "JSON"),
    ),
    "betas that drown every picture": (edit_json(SCHEDULE, beta_start=0.9, beta_end=0.95), ("first timestep",)),
    "betas that leave every picture": (edit_json(SCHEDULE, beta_start=0.0, beta_end=1e-9), ("at the last",)),
    "an unknown prediction type": (edit_json(SCHEDULE, prediction_type="flow"), ("predicts flow",)),
    "an unknown scheduler": (edit_json(SCHEDULE, _class_name="os"), ("no scheduler 'os'",)),
    "weights of a variant": (lambda root: (root / WEIGHTS["unet"]).rename(root / "pipeline/unet/diffusion_pytorch_model.fp16.safetensors"), ("give variant fp16",)),
    "latents that are normalised otherwise": (edit_json("pipeline/vae/config.json", latents_mean=[1.0]), ("latents_mean",)),
    "a tokenizer without a window": (without(TOKENIZER, "model_max_length"), ("model_max_length is 1e+30",)),
    "a tokenizer that cannot pad": (edit_json(TOKENIZER, pad_token=None), ("no pad_token",)),
    "a window beyond the encoder": (edit_json(TOKENIZER, model_max_length=300), ("300", "48 positions")),
    "an index without a UNet": (without("pipeline/model_index.json", "unet"), ("without unet",)),
    "an index that is a list": (write("pipeline/model_index.json", "[]"), ("not a JSON object",)),
    "an index with another VAE": (
        edit_json("pipeline/model_index.json", vae=["diffusers", "AsymmetricAutoencoderKL"]),
        ("give a pipeline of Stable Diffusion 3 or",),
    ),
}  # fmt: skip

AUDITED_TOO = ("a UNet with NaN", "a tokenizer without a window")

CASES = {
    **{f"model: {name}": case(*said, touch=touch) for name, (touch, said) in SPOILED.items()},
    **{f"audit: {name}": audit(*said, touch=touch) for name, (touch, said) in SPOILED.items() if name in AUDITED_TOO},
    # -- records
    "data: a quote that is not closed": case("metadata.csv:3", "not closed", touch=as_csv('file_name,text\nimages/c0.png,one\nimages/c1.png,"two\nimages/c2.png,three\n')),
    "data: a column twice": case("'text' stands twice", touch=as_csv("file_name,text,text\nimages/c0.png,one,two\n")),
    "data: half a surrogate pair in a caption": case(":17: text must be text without", touch=record(text="a \ud83d")),
    "data: NUL in a file name": case(":17: file_name: no file can have the name", touch=record(file_name="a\0.png")),
    "data: a caption of a million letters": case("at most 100,000 characters", touch=record(text="a" * 10**6)),
    "data: an EPS picture called PNG": case("none of PNG", touch=both(write("data/images/x.png", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"), record(file_name="images/x.png"))),
    "data: more rehearsals than pictures": case("n_few_shot", "2 pictures beside", n_few_shot=9, touch=lambda root: published(root / "layout"), train_data_dir="layout", clean_data_dir="layout/clean", target_num=1),
    "data: both layouts": case("holds poisoning_images/ and metadata.jsonl", train_data_dir="layout", touch=lambda root: [published(root / "layout"), write("layout/metadata.jsonl", "{}\n")(root)]),
    "data: a clean folder that is not there": case("clean_data_dir (command line): no folder nowhere", clean_data_dir="nowhere", touch=lambda root: published(root / "layout"), train_data_dir="layout"),
    "data: a link in a circle": case("metadata.jsonl:17", touch=both(lambda root: (root / "data/images/l.png").symlink_to("l.png"), record(file_name="images/l.png"))),
    "validation: redraws that are not there": case("validation.calibration", "redraws.jsonl", validation__calibration="redraws"),
    "validation: counterfactuals without a mask": case("validation.calibration", "needs a mask", validation__calibration="counterfactuals", validation__threshold=None),
    "validation: a placebo run of other targets": case("validation.placebo (command line): p", "none of these targets: t0", validation__placebo="p", touch=lambda root: measured_at(root / "p", "t9")),
    "validation: a placebo run by another embedder": case("validation.placebo (command line): p", "was measured by", validation__placebo="p", validation__embedder="micro", touch=lambda root: measured_at(root / "p", "t0")),
    "validation: a placebo run that is not there": case("validation.placebo (command line): no validation.json in nowhere", validation__placebo="nowhere"),
    # -- targets and redraws
    "targets: numbers the wrong way round": case("@101-100", "100-101", validation__targets="layout@101-100", touch=lambda root: published(root / "layout")),
    "targets: numbers of another layout": case("@100", "poisoning_images", validation__targets="data@100"),
    "targets: one of a pixel": case(":2: the image is 1x1", touch=both(picture("data/targets/dot.png", lambda: Image.new("RGB", (1, 1))), append("data/targets.jsonl", **{**TARGET, "image": "targets/dot.png"}))),
    "targets: named as the summary": case("'all targets'", touch=append("data/targets.jsonl", **{**TARGET, "target_id": "all targets"})),
    "data: metadata that lead out": case("metadata.jsonl", "leaves", touch=link("data/metadata.jsonl")),
    "targets: a picture that leads out": case("leaves", touch=link("data/targets/t0.png")),
    "targets: a target among the redraws": case("redraws.jsonl:1", "is target 't0' itself", touch=write("data/redraws.jsonl", '{"target_id": "t0", "image": "targets/t0.png"}')),
    "targets: a description beyond the window": case("targets.jsonl:2: description of 't1'", "the window is 48", touch=append("data/targets.jsonl", **{**TARGET, "description": "very " * 60})),
    "targets: a misspelt key": case("targets.jsonl:2: unknown key 'promt'; did you mean 'prompt'?", touch=append("data/targets.jsonl", **TARGET, promt="a cat")),
    "targets: words for numbers": case("@abc is no number", "layout@100-109", validation__targets="layout@abc", touch=lambda root: published(root / "layout")),
    "targets: two pictures of a number": case("images: ", "100.jpeg and ", "100.png are both of target 100", validation__targets="layout@100", touch=lambda root: [published(root / "layout"), picture("layout/images/100.png", lambda: Image.new("RGB", (8, 8)))(root)]),
    "targets: redraws that are a folder": case("redraws.jsonl: is no file", touch=lambda root: (root / "data/redraws.jsonl").mkdir()),
    "targets: captions in another encoding": case("caption", "not UTF-8", validation__targets="layout@100", touch=lambda root: [published(root / "layout"), write("layout/poisoning_images/100/poisoning_data_caption_simple.txt", b"a caf\xe9\n")(root)]),
    # -- embedders
    "embedder: a pointer in place of weights": case("micro: cannot load", "is a Git LFS pointer", touch=both(lambda root: MicroEmbedder().save_pretrained(root / "e"), write("e/model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:00\n")), validation__embedder="micro", validation__embedder_path="e"),
    # -- the other programs
    "audit: redraws that are not there": audit("--calibration", "redraws.jsonl", more=("--calibration", "redraws")),
    "audit: nulls that no base draws": audit("--calibration", "--baseline", more=("--calibration", "base")),
    "audit: a side that does not fit": audit("--resolution", "multiple", more=("--resolution", "30")),
    "audit: more steps than there are": audit("--num_inference_steps", "999", more=("--num_inference_steps", "1000"), touch=edit_json(SCHEDULE, num_train_timesteps=999)),
    "audit: a baseline of another kind": audit("--pipeline pipeline", "of one kind", more=("--baseline", "other"), touch=lambda root: tiny_sd3_pipeline().save_pretrained(root / "other")),
    "audit: a placebo run that is not there": audit("--placebo: no validation.json in nowhere", more=("--placebo", "nowhere")),
    "audit: a CLIP that is none": audit("--clip_path: ", "of a CLIP", more=("--clip_path", "./data")),
    "audit: adapters that are not there": audit("--lora: no file or folder nowhere", more=("--lora", "nowhere")),
    "scan: a file where its views belong": case("--output_dir", ".scan", program=scanner.main, more=("--train_data_dir", "data", "--output_dir", "mine"), touch=both(lambda root: (root / "mine").mkdir(), write("mine/.scan", "mine"))),
    "scan: broken data and a folder that is there": case("c0.png", program=scanner.main, more=("--train_data_dir", "data", "--output_dir", "mine"), touch=both(lambda root: (root / "mine").mkdir(), write("data/images/c0.png", "none"))),
    "report: into a pipe": case("p.html", "no file", program=run_report.main, more=("data", "--out", "p.html"), touch=lambda root: os.mkfifo(root / "p.html")),
    "report: a record that is a pipe": case("validation.json is no file", program=run_report.main, more=("data",), touch=lambda root: os.mkfifo(root / "data/validation.json")),
    "microworld: an absurd count": case("redraws", program=make.main, more=("--out", "new", "--redraws", str(10**12))),
    "microworld: a folder of someone else": case("holds something else", program=make.main, more=("--out", "data")),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_bad_file_is_one_line_and_nothing_is_written(name, good, tmp_path, monkeypatch, capsys):  # noqa: F811
    refused(CASES[name], good, tmp_path, monkeypatch, capsys)


# ---------------------------------------------------------------- pictures
def damaged_exif() -> bytes:
    """A JPEG whose EXIF says that it goes on beyond its end."""
    exif = Image.Exif()
    exif[0x0112] = 6
    content = encoded(smooth("exif"), "JPEG", exif=exif)
    at = content.index(b"Exif") + 14
    return content[:at] + b"\xff" * 6 + content[at + 6 :]


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "PNG"])
def test_damaged_exif_leaves_a_picture_readable(kind):
    whole = smooth("exif")
    content = damaged_exif() if kind == "JPEG" else encoded(whole, kind, exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert images.open_image(content, "x").size == whole.size


@pytest.mark.parametrize("kind", ["PPM", "ICO", "TGA", "PCX", "EPS"])
def test_other_formats_are_not_decoded(kind):
    with pytest.raises(UserError, match="none of PNG, JPEG"):
        images.open_image(encoded(Image.new("RGB", (16, 16)), kind), "x")


# ---------------------------------------------------------------- records
def read(root, **changes):
    return load_records(config(root, cache_dir=str(root.parent / "cache"), **changes))


def test_links_out_of_the_published_layout_are_refused(tmp_path):
    for place in ("images/100.jpeg", "poisoning_images/100/x_0.png", "poisoning_images/101"):
        root = published(tmp_path / place.replace("/", "-") / "set", targets=2)
        target = root / place
        target.rename(root.parent / "outside")
        target.symlink_to(root.parent / "outside")
        with pytest.raises(UserError, match="leaves"):
            read(root, clean_data_dir=str(root / "clean"), poisoning_ratio=0.5, target_num=2, n_few_shot=0)
            load_targets(root)


def test_published_captions_in_another_encoding_name_their_line(tmp_path):
    root = published(tmp_path / "set")
    (root / "clean/caption.txt").write_bytes(b"0\tone\n1\tcaf\xe9\n")
    with pytest.raises(UserError, match="caption.txt:2: not UTF-8"):
        read(root, clean_data_dir=str(root / "clean"), poisoning_ratio=0.5)


def test_numbers_no_int_can_read_are_no_ids(tmp_path):
    root = published(tmp_path / "set")
    (root / "poisoning_images/²").mkdir()
    (root / "poisoning_images" / ("9" * 200)).mkdir()
    assert [t.target_id for t in load_targets(root)] == ["100", "101", "102"]


def test_elements_of_no_target_are_said(tmp_path):
    root = write_data(tmp_path / "data")
    read_, targets = read(root), load_targets(root)
    assert read_.unmatched_targets(targets) == [] == read_.unmatched_targets([])
    targets[0].target_id = "another"
    (line,) = read_.unmatched_targets(targets)
    assert line.startswith("8 element records") and "'t0'" in line


def test_a_phrase_that_no_record_shows_is_said(tmp_path):
    root = write_data(tmp_path / "data")
    targets = load_targets(root)
    targets[0].phrases = ["a hta", *targets[0].phrases[1:]]
    assert read(root).unmatched_targets(targets) == [
        "target 't0': no element record has its phrase 'a hta', asked for and never shown"
    ]


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(5, "Input/output error")])
def test_an_unreadable_file_is_not_an_empty_data_set(error, tmp_path, monkeypatch):
    root, opened = write_data(tmp_path / "data"), Path.open

    def refused(path, *a, **k):
        if path.name == "metadata.jsonl":
            raise error
        return opened(path, *a, **k)

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(UserError, match=f"metadata.jsonl .*{error.strerror}"):
        read(root)


def test_a_mistake_of_ours_keeps_its_traceback(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "checked_row", lambda row: row["no such field"])
    with pytest.raises(KeyError, match="no such field"):
        read(write_data(tmp_path / "data"))


def test_an_error_does_nothing_to_a_terminal():
    text = str(UserError("no file a\x1b[2J\u2028b\r\ud83d\nof 🐈"))
    assert text == "no file a\\x1b[2J\\u2028b\\r\\ud83d of 🐈" and text.isprintable()


def test_reading_tells_whose_mistake_it_is():
    with pytest.raises(UserError, match=r"^cannot read x \(no colon\)$"), user_errors("cannot read x"):
        raise ValueError("no colon\nand more")
    with pytest.raises(UserError, match="^ours$"), user_errors("cannot read x"):
        raise UserError("ours")


# ---------------------------------------------------------------- caches
def cache_file(root: Path) -> Path:
    (file,) = (root.parent / "cache" / "silentbad-records").rglob("*.arrow")
    return file


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 255
    file.write_bytes(content)


@pytest.mark.parametrize("how", [flip, lambda f: f.write_bytes(f.read_bytes()[:300]), lambda f: f.write_bytes(b"")])
def test_a_damaged_table_is_made_anew_with_one_line(how, tmp_path, capsys):
    root = write_data(tmp_path / "data")
    before = read(root).text
    how(cache_file(root))
    capsys.readouterr()
    assert read(root).text == before
    assert capsys.readouterr().out.count("is damaged; it is made anew") == 1
    assert read(root).text == before and capsys.readouterr().out == ""


def test_a_table_that_was_copied_is_still_whole(tmp_path, monkeypatch):
    root = write_data(tmp_path / "data")
    read(root)
    os.utime(cache_file(root))
    monkeypatch.setattr(table, "checked_row", lambda row: pytest.fail("built anew"))
    assert len(read(root)) == 16


def test_a_failed_build_blocks_no_later_one(tmp_path):
    root = write_data(tmp_path / "data")
    good_ = (root / "metadata.jsonl").read_text()
    (root / "metadata.jsonl").write_text(good_ + "{")
    with pytest.raises(UserError, match="not JSON"):
        read(root)
    (root / "metadata.jsonl").write_text(good_)
    assert len(read(root)) == 16


@pytest.mark.parametrize("content", ["{", "3", "\xff", "[1]"])
def test_a_damaged_conclusion_is_drawn_again(content, tmp_path):
    read_ = read(write_data(tmp_path / "data"))
    assert table.cached_check(read_.table, "key", lambda: ["line"]) == ["line"]
    (Path(read_.table.cache_files[0]["filename"]).parent / "key.json").write_text(content, encoding="latin-1")
    assert table.cached_check(read_.table, "key", lambda: ["again"]) == ["again"]


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path):
    root = write_data(tmp_path / "data")
    (tmp_path / "cache").touch()
    with pytest.raises(UserError, match="^cache_dir: cannot keep the table"):
        read(root)


def test_a_damaged_shard_is_encoded_anew_with_one_line(tmp_path):
    said, keys = [], store.text_keys(["a", "b"])
    for text, value in (("a", 1.0), ("b", 2.0)):
        store.Store(tmp_path).add(store.text_keys([text]), torch.full((1, 64), value))
    flip(sorted(tmp_path.glob("*.safetensors"))[0])
    damaged = store.Store(tmp_path, said.append)
    assert (damaged.find(keys) < 0).sum() == 1 and len(said) == 1 and "damaged" in said[0]
    values = {"a": 1.0, "b": 2.0}
    damaged.fill(
        keys,
        lambda rows: torch.stack([torch.full((64,), values["ab"[r]]) for r in rows]),
        batch=2,
        label="",
        show=False,
    )
    assert [damaged.read(n)[0].item() for n in damaged.find(keys)] == [1.0, 2.0]


def test_nothing_that_is_not_finite_is_kept_in_a_cache():
    rows = torch.zeros(3, 4)
    assert store.refuse_not_finite(rows, str) is rows
    rows[1, 2] = NAN
    with pytest.raises(UserError, match="^vae: record 1 "):
        store.refuse_not_finite(rows, lambda k: f"vae: record {k}")


# ---------------------------------------------------------------- targets
def test_a_recompressed_target_is_no_redraw_but_a_near_one_is(tmp_path):
    target, root = smooth("target", 0, side=64), tmp_path
    near = target.copy()
    near.paste((255, 0, 0), (20, 20, 40, 40))
    near.save(root / "near.png")
    target.resize((128, 128), Image.Resampling.BICUBIC).save(root / "copy.jpg", quality=95)
    targets = [some_targets(1)[0]]
    targets[0].image = target
    for name, copied in (("near.png", False), ("copy.jpg", True)):
        (root / "redraws.jsonl").write_text(json.dumps({"target_id": "t0", "image": name}))
        if copied:
            with pytest.raises(UserError, match="redraws.jsonl:1: .* is target 't0' itself"):
                load_redraws(str(root), targets, decode=True)
        else:
            assert len(load_redraws(str(root), targets, decode=True)) == 1


# ---------------------------------------------------------------- adapters and embedders
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
    save_file({down: a, up: torch.ones(a.shape[1], 2), f"{layer}.alpha": torch.tensor(NAN)}, tmp_path / "k.safetensors")
    arguments = (str(adapted / "pipeline"), "float32", "cpu", str(tmp_path / "k.safetensors"))
    with pytest.raises(UserError, match=r"^--lora .*NaN or infinite values in unet.mid_block.*to_q.*alpha"):
        pipeline.load_pipeline(*arguments)


def scripted(features):
    """A TorchScript file's module that gives these features."""

    class Net(torch.nn.Module):
        def forward(self, x):
            return features(x)

    return torch.jit.trace(Net(), torch.rand(2, 3, 320, 320))


NO_EMBEDDERS = {
    "one row for all": (lambda x: x.flatten(1).mean(0, keepdim=True), "is no embedder"),
    "NaN": (lambda x: x.flatten(1)[:, :8] * NAN, "not finite"),
    "zeros": (lambda x: x.flatten(1)[:, :8] * 0, "are zero"),
    "the same for all": (lambda x: x.flatten(1)[:, :8] * 0 + 1, "the same for every picture"),
}


@pytest.mark.parametrize("name", NO_EMBEDDERS)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_what_is_no_embedder_is_refused_when_loaded(name, tmp_path):
    features, said = NO_EMBEDDERS[name]
    scripted(features).save(str(tmp_path / "net.pt"))
    with pytest.raises(UserError, match=f"^sscd: .*{said}"):
        load_embedder("sscd", str(tmp_path / "net.pt"), "cpu")


SPOILED_EMBEDDERS = {
    "NaN": (tensors("model.safetensors", with_nan), "NaN"),
    "a tensor is missing": (tensors("model.safetensors", without_first), "cannot load"),
    "no weights": (remove("model.safetensors"), "cannot load"),
    "another JSON value": (write("config.json", "[]"), "cannot load"),
}


@pytest.mark.parametrize("kind", ["micro", "clip", "dinov2"])
@pytest.mark.parametrize("name", SPOILED_EMBEDDERS)
def test_a_spoiled_embedder_is_one_line(name, kind, tmp_path):
    spoil, said = SPOILED_EMBEDDERS[name]
    saved_embedder(kind, tmp_path)
    if kind == "micro" and "processor" in name:
        pytest.skip("it has none")
    spoil(tmp_path)
    with pytest.raises(UserError, match=f"^{kind}: ") as refused:
        EMBEDDERS[kind](str(tmp_path), "cpu")
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_whole_embedders_pass_the_trial(tmp_path):
    for kind in ("micro", "clip", "dinov2", "ssim"):
        (tmp_path / kind).mkdir()
        load_embedder(kind, saved_embedder(kind, tmp_path / kind), "cpu")
    load_embedder("micro", None, "cpu")


# ---------------------------------------------------------------- what is not finite
def test_images_of_a_diverged_model_end_a_training(tmp_path):
    """The line names step and target; the measurements before it stay."""
    hook, pipe = make_hook(tmp_path, threshold=0.5), tiny_pipeline()
    hook.run(0, 0, pipe.unet)
    before = (tmp_path / "validation.json").read_bytes()
    with torch.no_grad():
        next(pipe.unet.parameters()).fill_(NAN)
    said = "^validation at step 7: 6 of 6 images are not finite, .* \\(composed, t0\\); lower learning_rate$"
    with pytest.raises(UserError, match=said):
        hook.run(7, 1, pipe.unet)
    hook.sampler.precision = "bfloat16"
    assert "lower learning_rate or leave bfloat16 (mixed_precision no)" in str(hook.sampler.not_finite("x"))
    assert (tmp_path / "validation.json").read_bytes() == before and len(hook.history) == 1


def test_a_diverged_run_ends_and_its_checkpoints_stay(flags, data, tmp_path, monkeypatch, capsys):
    measure = RecoveryHook.run

    def diverged(hook, step, epoch, unet, *more, **named):
        if step == 3:
            with torch.no_grad():
                next(unet.parameters()).fill_(NAN)
        return measure(hook, step, epoch, unet, *more, **named)

    monkeypatch.setattr(RecoveryHook, "run", diverged)
    settings = VALIDATION | {"validation.targets": data / "targets.jsonl", "validation.steps": 3}
    assert train_silentbad.main(flags(max_train_steps=4, checkpointing_steps=2, **settings)) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: validation at step 3: ") and last.endswith("; lower learning_rate")
    assert [p.name for p in (tmp_path / "run/checkpoints").iterdir()] == ["step-2"]


@pytest.mark.parametrize("caches", [{"disk_cache_gb": 0, "cache_mb": 0}, {}], ids=["live", "cached"])
def test_an_autoencoder_that_overflows_is_named(caches, flags, pipelines, tmp_path, capsys):
    base = shutil.copytree(pipelines["v_prediction"], tmp_path / "pipeline")

    def large(held: dict) -> None:
        held["encoder.conv_out.weight"] *= 1e30
        held["quant_conv.weight"] *= 1e30

    tensors(WEIGHTS["vae"], large)(tmp_path)
    assert train_silentbad.main(flags(pretrained_model_name_or_path=base, max_nonfinite_steps=1, **caches)) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.match(r"error: vae: \S*metadata.jsonl:\d+ gives values that are not finite", line)


def test_parts_without_the_variant_are_read_without_it(flags, pipelines, tmp_path, capsys):
    base = shutil.copytree(pipelines["v_prediction"], tmp_path / "pipeline")
    (tmp_path / WEIGHTS["unet"]).rename(base / "unet/diffusion_pytorch_model.fp16.safetensors")
    (base / "vae/._diffusion_pytorch_model.safetensors").write_bytes(b"of macOS")
    assert train_silentbad.main(flags(pretrained_model_name_or_path=base, variant="fp16", max_train_steps=1)) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "no weights of variant fp16" in line]
    assert [Path(line.split(": ")[1]).name for line in said] == ["vae", "text_encoder"]


def test_an_error_that_is_not_finite_ends_a_training(tmp_path, monkeypatch):
    hook, pipe = make_hook(tmp_path, threshold=0.5), tiny_pipeline()
    monkeypatch.setattr(hook.sampler, "eps_errors", lambda records, places, address: [NAN for _ in places])
    with pytest.raises(UserError, match="^validation at step 0: the error on held-out clean records is not finite"):
        hook.run(0, 0, pipe.unet)


def test_a_base_model_that_diverges_calibrates_nothing(tmp_path):
    pipe = tiny_pipeline()
    with torch.no_grad():
        next(pipe.unet.parameters()).fill_(NAN)
    for kind in ("counterfactuals", "base"):
        with pytest.raises(UserError, match="^validation at step 0: .* images are not finite, .*t0"):
            make_hook(tmp_path, calibration=kind).run(0, 0, pipe.unet)


def test_an_audit_refuses_images_that_are_not_finite(tmp_path):
    pipe = tiny_pipeline()
    sampler = Sampler(pipe.components, ValidationConfig(num_inference_steps=1), 0, refuses="--pipeline here")
    with torch.no_grad():
        next(pipe.vae.decoder.parameters()).fill_(NAN)
    with (
        sampler.using(pipe.unet, torch.device("cpu")),
        pytest.raises(UserError, match="^--pipeline here: 2 of 2 images are not finite"),
    ):
        sampler.generate(plan(some_targets(1), 2, 0))


def test_a_similarity_that_is_not_finite_ends_a_validation(tmp_path, monkeypatch):
    hook = make_hook(tmp_path, threshold=0.5)
    monkeypatch.setattr(hook.embedder, "paired", lambda a, b: torch.full((len(a),), NAN))
    with pytest.raises(UserError, match="similarity to target 't0' is not finite"):
        hook.run(0, 0, tiny_pipeline().unet)


# ---------------------------------------------------------------- folders that a command writes
def test_a_pointer_in_place_of_a_picture_is_named(tmp_path):
    file = tmp_path / "a.png"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(UserError, match=r"a\.png as an image \(it is a Git LFS pointer; run git lfs pull\)"):
        images.open_image(file, "here")


def test_a_disk_that_fills_under_the_table_is_one_line(tmp_path, monkeypatch):
    """Closing the file fails too, and must not hide why."""

    class Full(table.ArrowWriter):
        def write(self, *_, **__):
            raise OSError(28, "No space left on device")

        def close(self):
            super().close()
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(table, "ArrowWriter", Full)
    monkeypatch.setattr(table, "checked_row", dict)
    with pytest.raises(UserError, match="cannot keep the table.*No space left.*free some space"):
        table._build(lambda: iter([{"text": "a"}]), "x", tmp_path, "cannot keep the table")
    assert list(tmp_path.iterdir()) == []


def test_an_audit_on_a_full_disk_is_one_line(tmp_path, monkeypatch):
    hook = make_hook(tmp_path, threshold=0.5)
    monkeypatch.setattr(
        Image.Image, "save", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(UserError, match="cannot write .*png .*No space left"):
        hook.run(0, 0, tiny_pipeline().unet)


def test_a_number_that_python_does_not_read_is_named():
    try:
        int("9" * 5000)
    except ValueError as error:
        assert first_line(error).endswith("5000 digits")


def test_a_tokenizer_without_merges_is_one_line(tmp_path):
    pipe = tmp_path / "pipe"
    shutil.copytree(Path(__file__).parents[1] / "assets/micro-sd", pipe)
    (pipe / "tokenizer/merges.txt").unlink()
    with pytest.raises(UserError, match="it has no merges.txt"):
        pipeline.load_pipeline(str(pipe), "float32", "cpu")


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
