"""What a user may get wrong, and the one line each mistake must give: exit code 2, nothing written.

`pytest tests/test_bad_input.py -q` prints the table at its end. A case changes a good set of inputs in place (`touch`),
adds flags, and names what its line must hold.
"""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISREG

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file, save_file

import train_silentbad
import validation
from silentbad import checkpoint, class_images
from tests.conftest import write_data
from tests.test_data import bomb


@dataclass
class Case:
    """`flags` replace the good run's, `touch` spoils its inputs, `said` must stand in the one line."""

    said: tuple[str, ...]
    flags: dict = field(default_factory=dict)
    touch: Callable[[Path], object] | None = None
    more: tuple[str, ...] = ()  # words after the flags
    program: Callable = train_silentbad.main


def case(*said: str, touch=None, more=(), program=train_silentbad.main, **flags) -> Case:
    flags = {key.replace("__", "."): value for key, value in flags.items()}
    return Case(said, flags, touch, tuple(more), program)


# ---------------------------------------------------------------- ways to spoil a file


def write(name: str, content: str | bytes):
    content = content.encode() if isinstance(content, str) else content
    return lambda root: (root / name).write_bytes(content)


def append(name: str, **row):
    """One more line in a JSON-lines file."""

    def spoil(root: Path) -> None:
        with (root / name).open("a") as file:
            file.write(json.dumps(row) + "\n")

    return spoil


def remove(name: str):
    return lambda root: shutil.rmtree(root / name) if (root / name).is_dir() else (root / name).unlink()


def cut(name: str, size: int = 100):
    return lambda root: (root / name).write_bytes((root / name).read_bytes()[:size])


def both(*spoils):
    return lambda root: [spoil(root) for spoil in spoils]


def edit_json(name: str, **changes):
    def spoil(root: Path) -> None:
        (root / name).write_text(json.dumps(json.loads((root / name).read_text()) | changes))

    return spoil


def record(**row):
    """One more record, whose image is a good one unless it says otherwise."""
    return append("data/metadata.jsonl", **{"file_name": "images/c0.png", "text": "a field", **row})


def copy_of_target(change: Callable[[Image.Image], Image.Image], **options):
    """A record that shows a detailed target, changed; the target is written anew so that it has details."""

    def spoil(root: Path) -> None:
        small = np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8)
        picture = Image.fromarray(small).resize((64, 64), Image.Resampling.BICUBIC)
        picture.save(root / "data/targets/t0.png")
        change(picture).save(root / "data/images/copy.jpg", **options)
        record(file_name="images/copy.jpg")(root)

    return spoil


def pickled(root: Path) -> None:
    file = root / "pipeline/unet/diffusion_pytorch_model.safetensors"
    torch.save(load_file(file), root / "pipeline/unet/diffusion_pytorch_model.bin")
    file.unlink()


def other_width(root: Path) -> None:
    """A text encoder whose states the UNet does not attend to."""
    from transformers import CLIPTextConfig, CLIPTextModel

    folder = root / "pipeline/text_encoder"
    config = CLIPTextConfig.from_pretrained(folder, hidden_size=16, intermediate_size=16, num_attention_heads=2)
    CLIPTextModel(config).save_pretrained(folder)


def held(name: str):
    return lambda root: root / "held" / "checkpoints" / "step-2" / name


def rewrite(change: Callable[[Path], object]):
    """Change files of the held checkpoint and make its manifest fit them again."""

    def spoil(root: Path) -> None:
        folder = root / "held" / "checkpoints" / "step-2"
        change(folder)
        manifest = json.loads((folder / "manifest.json").read_text())
        for name, entry in manifest["files"].items():
            entry |= {"size": (folder / name).stat().st_size, "sha256": checkpoint.sha256(folder / name)}
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return spoil


def another_unet(folder: Path) -> None:
    tensors = load_file(folder / "unet.safetensors")
    doubled = {key: value.repeat(2, *[1] * (value.ndim - 1)) for key, value in tensors.items()}
    save_file(doubled, folder / "unet.safetensors")


def fewer_groups(folder: Path) -> None:
    state = checkpoint.read_state(folder / "state.pt")
    state["optimizer"]["param_groups"] = state["optimizer"]["param_groups"] * 2
    checkpoint.write_state(folder / "state.pt", state)


class Code:
    def __reduce__(self):
        return (print, ("code ran",))


RESUME = {"output_dir": "held", "resume_from_checkpoint": "latest", "max_train_steps": 4}
STEP = "held/checkpoints/step-2/"
TARGET = {"target_id": "t1", "image": "targets/t0.png", "phrases": ["a red cat"]}
AUDIT = {"program": validation.main}
CLASS = {"program": class_images.main}

CASES = {
    # -- configuration
    "config: an unknown key": case("'learnin_rate'", "'learning_rate'", learnin_rate=1),
    "config: an unknown key in a file": case("'seeds'", "'seed'", "a.yaml", config="a.yaml", touch=write("a.yaml", "seeds: 1")),
    "config: a file that is not YAML": case("a.yaml, line", "not YAML", config="a.yaml", touch=write("a.yaml", "a: [b\nc: d")),
    "config: a file that is not text": case("a.yaml", "not UTF-8", config="a.yaml", touch=write("a.yaml", b"\xff\xfe\x00")),
    "config: no such file": case("b.yaml", "No such file", config="b.yaml"),
    "config: a folder for a file": case("data", "Is a directory", config="data"),
    "config: text where a number belongs": case("learning_rate", "float", learning_rate="fast"),
    "config: null where a number belongs": case("seed (a.yaml)", config="a.yaml", touch=write("a.yaml", "seed: null")),
    "config: a batch of nothing": case("train_batch_size", "at least 1", train_batch_size=0),
    "config: no step at all": case("max_train_steps", "at least 1", max_train_steps=0),
    "config: a rate below zero": case("learning_rate", "positive and finite", learning_rate=-1),
    "config: a flag of an earlier script": case("'model_card'", "pretrained_model_name_or_path", model_card="x"),
    "config: an unknown sampler": case("weakest_first", memory__sampler__name="weakest"),
    "config: an unknown option": case("did you mean 'gamma'", memory__loss__name="min_snr", memory__loss__options__gama=5),
    "config: two losses at once": case("snr_gamma", "debiased", snr_gamma=5, memory__loss__name="debiased"),
    "config: a sampler without its memory": case("phrase_memory.enabled", memory__sampler__name="leitner"),
    "config: an unknown rule": case("gsnr", gradient_control__name="gsn"),
    "config: estimated masks of flipped images": case("native place", "random_flip", memory__region__name="estimated", random_flip=True),
    "config: a resolution the UNet cannot take": case("resolution", "multiple", resolution=30),
    "config: an unknown resize filter": case("image_interpolation_mode", "bilinear", image_interpolation_mode="nearly"),
    "config: an unknown tracker": case("report_to", "tensorboard", report_to="board"),
    "config: a tracker that is not installed": case("report_to", "not installed", report_to="comet_ml"),
    "config: a token without a push": case("hub_token", "push_to_hub", hub_token="hf_x"),
    "config: overwrite and resume": case("overwrite_output_dir", "excludes", overwrite_output_dir=True, resume_from_checkpoint="latest"),
    "config: fp16 on a CPU": case("mixed_precision", "CUDA", mixed_precision="fp16"),
    "config: no image a target": case("validation.images_per_target", "at least 1", validation__images_per_target=0),
    "config: a threshold out of range": case("validation.threshold", "from -1 to 1", validation__threshold=2),
    "config: an impossible error rate": case("validation.false_positive_rate", "(0, 1)", validation__false_positive_rate=2),
    "config: a negative interval": case("validation.steps", "at least 0", validation__steps=-1),
    "config: an unknown embedder": case("validation.embedder", "sscd", validation__embedder="ssc"),
    "config: sscd without its file": case("embedder_path", "TorchScript", validation__embedder="sscd"),
    "config: sscd's file is not there": case("no file nowhere", validation__embedder="sscd", validation__embedder_path="nowhere"),
    "config: a checksum for another embedder": case("embedder_sha256", "ssim", validation__embedder_sha256="00"),
    "config: an embedder that is not there": case("embedder_path", "nowhere", validation__embedder="micro", validation__embedder_path="nowhere"),
    # -- data
    "data: none given": case("train_data_dir", "is missing", train_data_dir="null"),
    "data: no such folder": case("no folder nowhere", train_data_dir="nowhere"),
    "data: a file for a folder": case("no folder a.yaml", train_data_dir="a.yaml", touch=write("a.yaml", "")),
    "data: a folder without metadata": case("no metadata.jsonl", touch=remove("data/metadata.jsonl")),
    "data: both metadata files": case("keep one", touch=write("data/metadata.csv", "file_name,text\n")),
    "data: no record": case("holds no record", touch=write("data/metadata.jsonl", "")),
    "data: a line that is not JSON": case("metadata.jsonl:1: not JSON", touch=write("data/metadata.jsonl", "{'a'")),
    "data: a ragged CSV": case("metadata.csv:2", "fields", touch=both(remove("data/metadata.jsonl"), write("data/metadata.csv", "file_name,text\na.png\n"))),
    "data: no caption": case("metadata.jsonl:17: no caption", touch=record(text=" ")),
    "data: a phrase not in its caption": case("'a dog'", "does not stand", touch=record(phrases=["a dog"])),
    "data: an unknown role": case("'poison'", "element, rehearsal, clean", touch=record(role="poison")),
    "data: a misspelled key": case("'phrase'", "'phrases'", touch=record(phrase=[])),
    "data: a missing image": case("metadata.jsonl:17: no file", touch=record(file_name="images/none.png")),
    "data: a path out of the folder": case("leaves", touch=record(file_name="../pipeline/model_index.json")),
    "data: an absolute path": case("absolute", touch=record(file_name="/etc/hostname")),
    "data: text for an image": case("cannot read", touch=both(write("data/images/x.png", "text"), record(file_name="images/x.png"))),
    "data: a truncated image": case("e0-0.png", "cannot read", touch=cut("data/images/e0-0.png", 60)),
    "data: a decompression bomb": case("over the limit", touch=both(write("data/images/x.png", bomb()), record(file_name="images/x.png"))),
    "data: a mask of another size": case("16x16", touch=lambda root: Image.new("L", (9, 9)).save(root / "data/masks/e0-0.png")),
    "data: a caption beyond the window": case("cut off: 'red cat'", touch=record(text="very " * 60 + "red cat", phrases=["red cat"])),
    "data: clean records that are not there": case("clean_ratio", touch=lambda root: write_data(root / "data", clean=0), memory__sampler__clean_ratio=1.0),
    "data: no clean record to show without caption": case("memory.retention.unconditional", touch=lambda root: write_data(root / "data", clean=0), memory__retention__unconditional=0.5),
    "data: no phrases to join": case("memory.rehearsal.name=leak_free", "none with a caption has two", memory__rehearsal__name="leak_free"),
    "data: no rehearsal to learn from": case("gradient_control.name=hypergradient", "role rehearsal", gradient_control__name="hypergradient"),
    "data: no rehearsal for a placebo of what learns": case("gradient_control.name=placebo", "of which there are none", gradient_control__name="placebo", gradient_control__options='{"of": "hypergradient"}'),
    "data: elements cut at random": case("17x16", "center_crop", memory__region__name="estimated", touch=both(lambda root: Image.new("RGB", (17, 16)).save(root / "data/images/wide.png"), record(file_name="images/wide.png", phrases=["a field"]))),
    "data: a Hub set out of reach": case("dataset_name", "cannot load", train_data_dir="null", dataset_name="nobody/nothing"),
    "data: a target among the records": case("metadata.jsonl:17", "equals target 't0'", touch=record(file_name="targets/t0.png")),
    "data: a resized target": case("near copy of target 't0'", touch=copy_of_target(lambda x: x.resize((97, 97)))),
    "data: a recompressed target": case("near copy of target 't0'", touch=copy_of_target(lambda x: x, quality=40)),
    "data: a mirrored target": case("near copy of target 't0'", touch=copy_of_target(ImageOps.mirror, quality=90)),
    # -- model folders
    "model: no such folder": case("no folder ./nowhere", pretrained_model_name_or_path="./nowhere"),
    "model: not a pipeline": case("model_index.json", pretrained_model_name_or_path="data"),
    "model: an index that is not JSON": case("not a JSON object", touch=write("pipeline/model_index.json", "{")),
    "model: another kind of pipeline": case("StableDiffusion3Pipeline", touch=edit_json("pipeline/model_index.json", _class_name="StableDiffusion3Pipeline")),
    "model: a part is missing": case("no vae/", touch=remove("pipeline/vae")),
    "model: no schedule": case("no scheduler", touch=remove("pipeline/scheduler/scheduler_config.json")),
    "model: no weights": case("cannot load unet", touch=remove("pipeline/unet/diffusion_pytorch_model.safetensors")),
    "model: pickled weights": case("cannot load unet", touch=pickled),
    "model: truncated weights": case("cannot load unet", touch=cut("pipeline/unet/diffusion_pytorch_model.safetensors", 5000)),
    "model: a broken configuration": case("cannot load unet", touch=write("pipeline/unet/config.json", "{")),
    "model: no vocabulary": case("vocabulary is missing", touch=both(*(lambda root, n=n: (root / "pipeline/tokenizer" / n).unlink(missing_ok=True) for n in ("vocab.json", "merges.txt", "tokenizer.json")))),
    "model: a text encoder of another width": case("width 32", "16", touch=other_width),
    "model: DREAM on a v model": case("dream_training", "v_prediction", dream_training=True),
    # -- checkpoints and the output folder
    "checkpoint: no such folder": case("nowhere", "no such folder", resume_from_checkpoint="nowhere"),
    "checkpoint: a folder without manifest": case("data", "no manifest.json", resume_from_checkpoint="data"),
    "checkpoint: a damaged file": case("state.pt does not match", touch=lambda root: held("state.pt")(root).write_bytes(held("state.pt")(root).read_bytes()[:-1] + b"x"), **RESUME | {"resume_from_checkpoint": STEP}),
    "checkpoint: a truncated file": case("unet.safetensors has 100 bytes", touch=cut(STEP + "unet.safetensors"), **RESUME | {"resume_from_checkpoint": STEP}),
    "checkpoint: none of a run is whole": case("no whole checkpoint", touch=cut(STEP + "unet.safetensors"), **RESUME),
    "checkpoint: of a later format": case("version 99", "version 1", touch=edit_json(STEP + "manifest.json", format=99), **RESUME),
    "checkpoint: given, of a later format": case("version 99", "version 1", touch=edit_json(STEP + "manifest.json", format=99), **RESUME | {"resume_from_checkpoint": STEP}),
    "checkpoint: without the average asked for": case("'ema'", **RESUME, use_ema=True),
    "checkpoint: of another rule": case("gradient_control", "'uniform'", **RESUME, gradient_control__name="gsnr"),
    "checkpoint: of another UNet": case("'unet'", "does not fit", touch=rewrite(another_unet), **RESUME),
    "checkpoint: of another optimizer": case("'optimizer'", "does not fit", touch=rewrite(fewer_groups), **RESUME),
    "checkpoint: a state with code in it": case("state.pt", "not loaded", touch=rewrite(lambda folder: torch.save({"x": Code()}, folder / "state.pt")), **RESUME),
    "output: holds a run": case("holds a run", "--overwrite_output_dir", output_dir="held"),
    "output: a file": case("cannot be written", output_dir="a.yaml", touch=write("a.yaml", "")),
    "output: below a file": case("cannot be written", output_dir="a.yaml/run", touch=write("a.yaml", "")),
    # -- targets
    "targets: no such file": case("no file nowhere", validation__targets="nowhere"),
    "targets: none": case("holds no target", touch=write("data/targets.jsonl", "")),
    "targets: not JSON": case("targets.jsonl:1: not JSON", touch=write("data/targets.jsonl", "{")),
    "targets: no phrases": case("targets.jsonl:2", "needs phrases", touch=append("data/targets.jsonl", **{**TARGET, "phrases": []})),
    "targets: one id twice": case("'t0' stands twice", touch=append("data/targets.jsonl", **{**TARGET, "target_id": "t0"})),
    "targets: an image that is not there": case("targets.jsonl:2: no file", touch=append("data/targets.jsonl", **{**TARGET, "image": "x.png"})),
    "targets: an image out of the folder": case("leaves", touch=append("data/targets.jsonl", **{**TARGET, "image": "../x.png"})),
    "targets: masks that do not match": case("masks must list", touch=append("data/targets.jsonl", **{**TARGET, "masks": ["a", "b"]})),
    "targets: a broken redraw": case("redraws.jsonl:1", "needs image", touch=write("data/redraws.jsonl", '{"target_id": "t0"}\n')),
    "targets: a redraw that is no image": case("redraws.jsonl:1", "cannot read", touch=write("data/redraws.jsonl", '{"target_id": "t0", "image": "targets.jsonl"}\n')),
    # -- prompts
    "prompts: an empty one": case("validation_prompts", "empty", more=("--validation_prompts", "a cat", " ")),
    "prompts: an empty unrelated caption": case("validation.unrelated", "empty", validation__unrelated=" "),
    "prompts: an empty one of a target": case("prompt must be text", touch=append("data/targets.jsonl", **{**TARGET, "prompt": " "})),
    "prompts: a target's beyond the window": case("'t1'", "the window is 48", touch=append("data/targets.jsonl", **{**TARGET, "prompt": "very " * 60 + "red cat"})),
    # -- the other programs
    "audit: an unknown flag": case("targts", **AUDIT, more=("--pipeline", "pipeline", "--targts", "data")),
    "audit: no pipeline": case("nowhere", **AUDIT, more=("--pipeline", "./nowhere", "--targets", "data", "--threshold", "0.5", "--embedder", "ssim")),
    "audit: nothing to calibrate on": case("--threshold", **AUDIT, more=("--pipeline", "pipeline", "--targets", "data", "--embedder", "ssim")),
    "audit: an impossible value": case("--max_batch", **AUDIT, more=("--pipeline", "pipeline", "--targets", "data", "--threshold", "0.5", "--max_batch", "0")),
    "class images: no prompts": case("--prompts", **CLASS, more=("--pipeline", "pipeline", "--prompts", "nowhere", "--out", "class")),
    "class images: no pipeline": case("--pipeline", **CLASS, more=("--pipeline", "./nowhere", "--prompts", "data/targets.jsonl", "--out", "class")),
}  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory, pipelines) -> Path:
    """Good inputs: data, pipeline, and a run that holds a checkpoint."""
    root = tmp_path_factory.mktemp("good")
    shutil.copytree(pipelines["v_prediction"], root / "pipeline")
    write_data(root / "data")
    argv = [f"--{key}={value}" for key, value in flags(root, output_dir=root / "held", max_train_steps=2).items()]
    assert train_silentbad.main([*argv, "--checkpointing_steps=2"]) == 0
    return root


def flags(root: Path, **changes) -> dict:
    """The good run's."""
    return {
        "pretrained_model_name_or_path": root / "pipeline", "train_data_dir": root / "data", "report_to": "none",
        "output_dir": "out", "train_batch_size": 2, "max_train_steps": 1, "validation.targets": root / "data",
        "validation.embedder": "ssim", "validation.threshold": 0.5, "validation.images_per_target": 1,
        "validation.num_inference_steps": 1, "validation.steps": 0, "cache_dir": root / "cache",
    } | changes  # fmt: skip


def files(root: Path) -> dict[str, tuple[int, int]]:
    """Every file outside the cache, with its size and time."""
    found = (p for p in sorted(root.rglob("*")) if "cache" not in p.relative_to(root).parts[:1])
    states = {str(p.relative_to(root)): p.stat() for p in found}
    return {name: (s.st_size, s.st_mtime_ns) if S_ISREG(s.st_mode) else (0, 0) for name, s in states.items()}


@pytest.mark.filterwarnings("ignore:checkpoint .* skipped")
@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_one_line_and_nothing_is_written(name, good, tmp_path, monkeypatch, capsys, record_property):
    here, root = CASES[name], tmp_path / "inputs"
    shutil.copytree(good, root)
    monkeypatch.chdir(root)
    if here.touch is not None:
        here.touch(root)
    argv = list(here.more)
    if here.program is train_silentbad.main:
        argv = [f"--{key}={value}" for key, value in (flags(Path(".")) | here.flags).items()] + argv
    before = files(root)
    monkeypatch.setattr(sys, "argv", ["program"])
    try:
        code = here.program(argv)
    except SystemExit as stopped:
        code = stopped.code
    lines = [line for line in capsys.readouterr().err.splitlines() if "Generating train split" not in line]
    assert code == 2
    said = [line for line in lines if line.startswith("error: ")]
    assert len(said) == 1 and lines[-1] == said[0], lines
    assert all(part in said[0] for part in here.said), said[0]
    record_property("line", said[0].replace(str(tmp_path), ""))
    assert files(root) == before


def test_the_good_inputs_are_good(good, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train_silentbad.main([f"--{key}={value}" for key, value in flags(good).items()]) == 0


def test_the_table_is_as_long_as_promised():
    kinds = {name.partition(":")[0] for name in CASES}
    assert len(CASES) >= 40 and {"config", "data", "model", "checkpoint", "targets", "prompts"} <= kinds
