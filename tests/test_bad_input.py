"""What a user may get wrong, and the one line each mistake must give: exit code 2, nothing written.

A case changes a good set of inputs in place (`touch`), adds flags, and names what its line must hold. What a setting's
range, its rules or one row of data refuse is tested beside them (tests/settings, tests/data).
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import train_silentbad
import validation
from silentbad import owned
from silentbad.measure.micro import MicroEmbedder
from silentbad.report import run_report
from silentbad_shield.scan import scanner
from tests.conftest import write_data
from tests.folders import published
from tests.mistakes import (
    OPEN,
    TARGET,
    WEIGHTS,
    Case,
    append,
    both,
    case,
    cut,
    edit_json,
    flags,
    record,
    refused,
    remove,
    tensors,
    unmasked,
    with_nan,
    without_first,
    write,
)
from tests.mistakes import good as good  # a fixture
from tests.recoveries import make_hook, some_targets
from tests.tiny import tiny_pipeline, tiny_sd3_pipeline
from tests.toy import PRIOR
from worlds.microworld import make


def folder(name: str):
    return lambda root: (root / name).mkdir()


def going_on(root: Path) -> None:
    """Another run writes into the held folder, until the test ends."""
    OPEN.enter_context(owned.claimed(root / "held", "training"))


def pickled(root: Path) -> None:
    file = root / "pipeline/unet/diffusion_pytorch_model.safetensors"
    torch.save(load_file(file), root / "pipeline/unet/diffusion_pytorch_model.bin")
    file.unlink()


def far_token(root: Path) -> None:
    """A token whose number the text encoder has no row for."""
    file = root / "pipeline/tokenizer/tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["two"] = 70000
    file.write_text(json.dumps(content))


def other_width(root: Path) -> None:
    """A text encoder whose states the UNet does not attend to."""
    from transformers import CLIPTextConfig, CLIPTextModel

    folder = root / "pipeline/text_encoder"
    config = CLIPTextConfig.from_pretrained(folder, hidden_size=16, intermediate_size=16, num_attention_heads=2)
    CLIPTextModel(config).save_pretrained(folder)


def held(name: str):
    return lambda root: root / "held" / "checkpoints" / "step-2" / name


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


SCHEDULE = "pipeline/scheduler/scheduler_config.json"
TOKENIZER = "pipeline/tokenizer/tokenizer_config.json"
AUDITED = ("--pipeline", "pipeline", "--targets", "data", "--threshold", "0.5", "--embedder", "ssim")
AUDITED += ("--images_per_target", "1", "--num_inference_steps", "1", "--output_dir", "audit")
RESUME = {"output_dir": "held", "resume_from_checkpoint": "latest", "max_train_steps": 4}
STEP = "held/checkpoints/step-2/"
AUDIT = {"program": validation.main}


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
    # -- configuration
    "config: a file that is not text": case("a.yaml", "not UTF-8", config="a.yaml", touch=write("a.yaml", b"\xff\xfe\x00")),
    "config: no such file": case("no file b.yaml", config="b.yaml"),
    "config: null where a number belongs": case("seed (a.yaml:1)", config="a.yaml", touch=write("a.yaml", "seed: null")),
    **{
        f"config: a prior table of {what}": case("'table'", said, gradient_control__name=PRIOR, gradient_control__options='{"table": "a.yaml"}', touch=write("a.yaml", text))
        for what, text, said in (
            ("numbers", "[1, 2]", "a.yaml:1: a row has match"),
            ("pairs", "mid.*: 2", "no list of rows"),
            ("no number", "- {match: mid.*, pi: 1}\n- {match: up1.*, pi: .nan}", "a.yaml:2: pi must be a finite"),
            ("nothing", "- {match: mid.*, pi: 0}", "pi must be above 0"),
            ("no pattern", "- {pi: 2}", "match must be str"),
        )
    },
    "config: a prior table with a key twice": case("'match' (a.yaml): is given twice", gradient_control__name=PRIOR, gradient_control__options='{"table": "a.yaml"}', touch=write("a.yaml", '- {match: "*.ff", match: "a", pi: 2}\n')),
    "config: no name of a file": case("--config: is empty", more=("--config", "")),
    "config: a short flag after a file": case("no file -s", more=("--config", "good.yaml", "-s", "1"), touch=write("good.yaml", "seed: 0\n")),
    "config: a key like none": case("'zzz'", "--help lists all", zzz=1),
    "config: a list flag twice": case("withhold", "is given twice", more=["--withhold", "a", "--withhold", "b"]),
    "config: a key that stands elsewhere": case("'rank'", "did you mean 'lora.rank'", rank=4),
    "config: a path with a variable": case("logging_dir", "nothing expands $SCRATCH", logging_dir="$SCRATCH/logs"),
    "config: an option of no part": case("memory.rehearsal.options (command line): 'elements'", "memory.rehearsal.name", memory__rehearsal__options='{"elements": 2}'),
    "config: a rate among the optimizer's options": case("optimizer_options", "learning_rate", optimizer_options='{"lr": 0.1}'),
    "config: every role without weight": case("memory.roles", "nothing would be learnt", memory__roles__element__loss_weight=0, memory__roles__clean__loss_weight=0),
    "config: a scale that is not monotone": case("'scale'", "must be at most 1.75", memory__timesteps__name="mode", memory__timesteps__options="{scale: 2}"),
    "config: a tracker that is not installed": case("report_to", "not installed", report_to="comet_ml"),
    "config: fp16 on a CPU": case("mixed_precision", "CUDA", mixed_precision="fp16"),
    "config: more first images than images": case("validation.first_images", "is 9, of 2 images_per_target", validation__first_images=9, validation__images_per_target=2),
    "config: a run that is its own placebo": case("output_dir", "validation.placebo", validation__placebo="held", output_dir="held", overwrite_output_dir=True),
    "config: sscd without its file": case("embedder_path", "TorchScript", validation__embedder="sscd"),
    "config: sscd's file is not there": case("no file nowhere", validation__embedder="sscd", validation__embedder_path="nowhere"),
    "config: an embedder that is not there": case("embedder_path", "nowhere", validation__embedder="micro", validation__embedder_path="nowhere"),
    "config: an optimizer that asks for the loss": case("optimizer (command line): LBFGS", "compute the loss", optimizer="LBFGS"),
    "config: an optimizer of sparse gradients": case("optimizer (command line): SparseAdam", "sparse", optimizer="SparseAdam"),
    "config: an optimizer's option out of range": case("optimizer: AdamW", "beta", optimizer_options="{betas: [2, 2]}"),
    "config: a list flag without words": case("withhold", "'[]' is the empty list", more=["--withhold"]),
    "config: an optimizer's option of another type": case("optimizer_options (command line): eps", optimizer_options="{eps: tiny}"),
    "config: a push offline": case("push_to_hub", "HF_HUB_OFFLINE", push_to_hub=True),
    "config: a push to no repository": case("hub_model_id", "no repository name", push_to_hub=True, hub_model_id="a/b/c"),
    "config: a seed of 100 digits": case("seed", "at most 9,223,372,036,854,775,807", seed=10**100),
    "config: no output folder": case("output_dir", "not be empty", output_dir=""),
    "config: a name of 300 bytes": case("output_dir", "255 bytes", output_dir="a" * 300),
    "config: NUL in a path": case("output_dir (a.yaml:1)", "NUL", config="a.yaml", touch=write("a.yaml", 'output_dir: "a\\0b"'), output_dir=None),
    "config: half a character": case("text without broken Unicode", more=("--validation_prompts", "a \ud83d cat")),
    "config: a key twice": case("a.yaml", "twice", "1 and 2", config="a.yaml", touch=write("a.yaml", "seed: 1\nseed: 2")),
    "config: 100,000 brackets": case("a.yaml", "cannot be read", config="a.yaml", touch=write("a.yaml", "memory: " + "[" * 100_000)),
    "config: a tag that runs code": case("a.yaml", "not YAML", config="a.yaml", touch=write("a.yaml", "seed: !!python/object/apply:os.getcwd []")),
    "config: a token that is no text": case("hub_token (a.yaml:1): must be str or null", config="a.yaml", touch=write("a.yaml", "hub_token: [secret]")),
    # -- data
    "data: none given": case("train_data_dir", "is missing", train_data_dir="null"),
    "data: no such folder": case("no folder nowhere", train_data_dir="nowhere"),
    "data: a file for a folder": case("no folder a.yaml", train_data_dir="a.yaml", touch=write("a.yaml", "")),
    "data: a CSV with semicolons": case("metadata.csv:1", "separated by commas", touch=as_csv("file_name;text\na.png;x\n")),
    "data: a CSV without a header": case("metadata.csv:1", "name the columns", touch=as_csv("a.png,x\n")),
    "data: one list of records": case("metadata.jsonl:1", "one JSON object a line, no list", touch=write("data/metadata.jsonl", "[\n {}\n]")),
    "data: no mask for a loss on masks": case("memory.region.name=mask", "no record has a mask", "estimated", memory__region__name="mask", touch=unmasked),
    "data: no element for an estimated mask": case("memory.region.name=estimated", "no element has 4 pictures", touch=lambda root: write_data(root / "data", elements=0), memory__region__name="estimated"),
    "data: no clean record to keep": case("self_distillation", "no clean record", touch=lambda root: write_data(root / "data", clean=0), memory__retention__name="self_distillation"),
    "data: a warm-up beyond the epochs": case("lr_warmup_steps", "leaves nothing of the", max_train_steps="null", num_train_epochs=1, lr_scheduler="cosine", lr_warmup_steps=99),
    "data: a mask of ones": case("has values up to 1 of 255", touch=lambda root: Image.new("L", (16, 16), 1).save(root / "data/masks/e0-0.png")),
    "data: a mask in its transparency": case("has transparency", touch=lambda root: Image.new("RGBA", (16, 16), (255, 255, 255, 9)).save(root / "data/masks/e0-0.png")),
    "data: an element without a name": case("needs phrases or element_id", touch=record(role="element", phrases=[])),
    "data: a phrase composed otherwise": case("Unicode composition", touch=record(text="un cafe\u0301", phrases=["un caf\u00e9"])),
    "data: clean records that are not there": case("clean_ratio", touch=lambda root: write_data(root / "data", clean=0), memory__sampler__clean_ratio=1.0),
    "data: no phrases to join": case("memory.rehearsal.name=leak_free", "none with a caption has two", memory__rehearsal__name="leak_free"),
    "data: elements cut at random": case("17x16", "center_crop", memory__region__name="estimated", touch=both(lambda root: Image.new("RGB", (17, 16)).save(root / "data/images/wide.png"), record(file_name="images/wide.png", phrases=["a field"]))),
    "data: a Hub set out of reach": case("dataset_name", "cannot load", train_data_dir="null", dataset_name="nobody/nothing"),
    "data: a target among the records": case("metadata.jsonl:17", "equals target 't0'", touch=record(file_name="targets/t0.png")),
    "data: a quote that is not closed": case("metadata.csv:3", "not closed", touch=as_csv('file_name,text\nimages/c0.png,one\nimages/c1.png,"two\nimages/c2.png,three\n')),
    "data: a column twice": case("'text' is given twice", touch=as_csv("file_name,text,text\nimages/c0.png,one,two\n")),
    "data: half a surrogate pair in a caption": case(":17: text must be text without", touch=record(text="a \ud83d")),
    "data: NUL in a file name": case(":17: file_name: no file can have the name", touch=record(file_name="a\0.png")),
    "data: a caption of a million letters": case("at most 100,000 characters", touch=record(text="a" * 10**6)),
    "data: an EPS picture called PNG": case("none of PNG", touch=both(write("data/images/x.png", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"), record(file_name="images/x.png"))),
    "data: more rehearsals than pictures": case("n_few_shot", "2 pictures beside", n_few_shot=9, touch=lambda root: published(root / "layout"), train_data_dir="layout", clean_data_dir="layout/clean", target_num=1),
    "data: both layouts": case("holds poisoning_images/ and metadata.jsonl", train_data_dir="layout", touch=lambda root: [published(root / "layout"), write("layout/metadata.jsonl", "{}\n")(root)]),
    "data: a clean folder that is not there": case("clean_data_dir (command line): no folder nowhere", clean_data_dir="nowhere", touch=lambda root: published(root / "layout"), train_data_dir="layout"),
    "data: a link in a circle": case("metadata.jsonl:17", touch=both(lambda root: (root / "data/images/l.png").symlink_to("l.png"), record(file_name="images/l.png"))),
    "data: metadata that lead out": case("metadata.jsonl", "leaves", touch=link("data/metadata.jsonl")),
    # -- model folders
    "pipeline: a vocabulary of another size": case("cannot load text_encoder (tensors of another shape:", "token_embedding.weight (", "in place of (5, ", touch=edit_json("pipeline/text_encoder/config.json", vocab_size=5)),
    "model: no such folder": case("no folder ./nowhere", pretrained_model_name_or_path="./nowhere"),
    "model: not a pipeline": case("model_index.json", pretrained_model_name_or_path="data"),
    "model: an index that is not JSON": case("not a JSON object", touch=write("pipeline/model_index.json", "{")),
    "model: another kind of pipeline": case("StableDiffusion3Pipeline", touch=edit_json("pipeline/model_index.json", _class_name="StableDiffusion3Pipeline")),
    "model: a UNet of another class": case("with unet 'Thing', not UNet2DConditionModel", touch=edit_json("pipeline/model_index.json", unet=["diffusers", "Thing"])),
    "model: a part is missing": case("no vae/", touch=remove("pipeline/vae")),
    "model: no schedule": case("no scheduler", touch=remove("pipeline/scheduler/scheduler_config.json")),
    "model: no weights": case("cannot load unet", touch=remove("pipeline/unet/diffusion_pytorch_model.safetensors")),
    "model: pickled weights": case("cannot load unet", touch=pickled),
    "model: truncated weights": case("cannot load unet", touch=cut("pipeline/unet/diffusion_pytorch_model.safetensors", 5000)),
    "model: a broken configuration": case("cannot load unet", touch=write("pipeline/unet/config.json", "{")),
    "model: a tokenizer of nothing": case("cannot load tokenizer", touch=write("pipeline/tokenizer/tokenizer.json", "{}")),
    "model: a tokenizer's broken settings": case("cannot load tokenizer", touch=write("pipeline/tokenizer/tokenizer_config.json", "{")),
    "model: settings that are a list": case("cannot load vae", touch=write("pipeline/vae/config.json", "[]")),
    "model: no vocabulary": case("vocabulary is missing", touch=both(*(lambda root, n=n: (root / "pipeline/tokenizer" / n).unlink(missing_ok=True) for n in ("vocab.json", "merges.txt", "tokenizer.json")))),
    "model: a token beyond the text encoder": case("tokenizer numbers ", "text_encoder knows", touch=far_token),
    "model: pointers in place of weights": case("diffusion_pytorch_model.safetensors is a Git LFS pointer", touch=write("pipeline/unet/diffusion_pytorch_model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:00\n")),
    "model: a pointer in place of a vocabulary": case("vocab.json is a Git LFS pointer", touch=write("pipeline/tokenizer/vocab.json", "version https://git-lfs.github.com/spec/v1\noid sha256:00\n")),
    "model: a text encoder of another width": case("width 32", "16", touch=other_width),
    **{f"model: {name}": case(*said, touch=touch) for name, (touch, said) in SPOILED.items()},
    # -- checkpoints
    "checkpoint: no such folder": case("resume_from_checkpoint", "no folder nowhere", resume_from_checkpoint="nowhere"),
    "checkpoint: a folder without manifest": case("data", "no manifest.json", resume_from_checkpoint="data"),
    "checkpoint: a damaged file": case("state.pt does not match", touch=lambda root: held("state.pt")(root).write_bytes(held("state.pt")(root).read_bytes()[:-1] + b"x"), **RESUME | {"resume_from_checkpoint": STEP}),
    "checkpoint: a truncated file": case("unet.safetensors has 100 bytes", touch=cut(STEP + "unet.safetensors"), **RESUME | {"resume_from_checkpoint": STEP}),
    "checkpoint: none of a run is whole": case("no whole checkpoint", touch=cut(STEP + "unet.safetensors"), **RESUME),
    "checkpoint: given, of a later format": case("version 99", "version 4", touch=edit_json(STEP + "manifest.json", format=99), **RESUME | {"resume_from_checkpoint": STEP}),
    "checkpoint: without the average asked for": case("use_ema was False, is True", **RESUME, use_ema=True),
    # -- resuming with something else
    "resume: another learning rate": case("learning_rate was 0.0001, is 0.1", "resume with its config.yaml", **RESUME, learning_rate=0.1),
    "resume: another batch": case("effective batch was 2, is 4", **RESUME, train_batch_size=4),
    "resume: another target picture": case("target 't0' changed", touch=lambda root: Image.new("RGB", (16, 16), "gold").save(root / "data/targets/t0.png"), **RESUME),
    "resume: another target mask": case("target 't0' changed", touch=write("data/targets.jsonl", json.dumps({"target_id": "t0", "image": "targets/t0.png", "phrases": ["a red cat", "a blue hat"], "masks": ["masks/e0-0.png", None]})), **RESUME),
    "resume: another description": case("target 't0', description and paraphrases changed", touch=write("data/targets.jsonl", json.dumps({"target_id": "t0", "image": "targets/t0.png", "phrases": ["a red cat", "a blue hat"], "description": "a cat"})), **RESUME),
    "resume: a target of another name": case("target 't9' is new", "target 't0' is missing", touch=write("data/targets.jsonl", json.dumps({"target_id": "t9", "image": "targets/t0.png", "phrases": ["a red cat", "a blue hat"]})), **RESUME),
    "resume: other records": case("records changed", "number of records", touch=record(), **RESUME),
    "resume: another base": case("base changed", touch=edit_json("pipeline/scheduler/scheduler_config.json", beta_end=0.013), **RESUME),
    # -- the output folder
    "output: holds a run": case("holds a run", "--overwrite_output_dir", output_dir="held"),
    "output: a file": case("cannot be written", output_dir="a.yaml", touch=write("a.yaml", "")),
    "output: below a tilde": case("output_dir (command line)", "did not expand ~", output_dir="~/out"),
    "output: a config.yaml that no run wrote": case("config.yaml", "no training wrote", touch=both(folder("out"), write("out/config.yaml", "a: 1"))),
    "output: an audit's folder": case("another command (audit)", touch=both(folder("out"), write("out/.silentbad-run", '{"run": "0", "kind": "audit"}'))),
    "output: the same, resuming": case("another command (audit)", resume_from_checkpoint="latest", touch=both(folder("out"), write("out/.silentbad-run", '{"run": "0", "kind": "audit"}'))),
    "output: a dangling link": case("cannot be written", output_dir="link", touch=lambda root: (root / "link").symlink_to("gone")),
    "output: where the pipeline lies": case("pretrained_model_name_or_path", "which is read", output_dir="pipeline/new"),
    "output: a run's own pipeline as base": case("pretrained_model_name_or_path", "would replace", output_dir="held", pretrained_model_name_or_path="held/pipeline", overwrite_output_dir=True),
    "output: a link in a circle": case("output_dir", output_dir="link/run", touch=lambda root: (root / "link").symlink_to("link")),
    "output: a run that goes on": case("output_dir held", "is being written by another process", output_dir="held", overwrite_output_dir=True, touch=going_on),
    "output: trackers outside": case("tracker_project_name", "inside output_dir", tracker_project_name="../x"),
    "output: logs outside": case("logging_dir", "inside output_dir", logging_dir="../x"),
    "output: logs that are a link out": case("holds logs", "no training wrote", report_to="tensorboard", touch=both(folder("else"), folder("out"), lambda root: (root / "out/logs").symlink_to("../else"))),
    # -- targets and redraws
    "targets: a blank id": case("a target_id is blank", touch=append("data/targets.jsonl", **{**TARGET, "target_id": "  "})),
    "targets: a phrase twice": case("is given twice", touch=append("data/targets.jsonl", **{**TARGET, "phrases": ["a red ball", "a red ball"]})),
    "targets: a null picture twice": case("redraws.jsonl:2: the same picture", touch=write("data/redraws.jsonl", '{"target_id": "t0", "image": "images/c0.png"}\n' * 2)),
    "targets: a redraw that is no image": case("redraws.jsonl:1", "cannot read", touch=write("data/redraws.jsonl", '{"target_id": "t0", "image": "targets.jsonl"}\n')),
    "targets: numbers the wrong way round": case("@101-100", "100-101", validation__targets="layout@101-100", touch=lambda root: published(root / "layout")),
    "targets: numbers of another layout": case("@100", "poisoning_images", validation__targets="data@100"),
    "targets: one of a pixel": case(":2: the image is 1x1", touch=both(picture("data/targets/dot.png", lambda: Image.new("RGB", (1, 1))), append("data/targets.jsonl", **{**TARGET, "image": "targets/dot.png"}))),
    "targets: named as the summary": case("'all targets'", touch=append("data/targets.jsonl", **{**TARGET, "target_id": "all targets"})),
    "targets: a picture that leads out": case("leaves", touch=link("data/targets/t0.png")),
    "targets: a target among the redraws": case("redraws.jsonl:1", "is target 't0' itself", touch=write("data/redraws.jsonl", '{"target_id": "t0", "image": "targets/t0.png"}')),
    "targets: a description beyond the window": case("targets.jsonl:2: description of 't1'", "the window is 48", touch=append("data/targets.jsonl", **{**TARGET, "description": "very " * 60})),
    "targets: a misspelt key": case("targets.jsonl:2: unknown key 'promt'; did you mean 'prompt'?", touch=append("data/targets.jsonl", **TARGET, promt="a cat")),
    "targets: words for numbers": case("@abc is no number", "layout@100-109", validation__targets="layout@abc", touch=lambda root: published(root / "layout")),
    "targets: two pictures of a number": case("images: ", "100.jpeg and ", "100.png are both of target 100", validation__targets="layout@100", touch=lambda root: [published(root / "layout"), picture("layout/images/100.png", lambda: Image.new("RGB", (8, 8)))(root)]),
    "targets: redraws that are a folder": case("redraws.jsonl: is no readable file", touch=lambda root: (root / "data/redraws.jsonl").mkdir()),
    "targets: captions in another encoding": case("caption", "not UTF-8", validation__targets="layout@100", touch=lambda root: [published(root / "layout"), write("layout/poisoning_images/100/poisoning_data_caption_simple.txt", b"a caf\xe9\n")(root)]),
    # -- prompts
    "prompts: an empty one": case("validation_prompts", "empty", more=("--validation_prompts", "a cat", " ")),
    "prompts: one beyond the window": case("validation_prompts", "'very very", "the window is 48", more=("--validation_prompts", "very " * 60 + "red cat")),
    "prompts: an empty unrelated caption": case("validation.unrelated", "empty", validation__unrelated=" "),
    "prompts: a target's beyond the window": case("'t1'", "the window is 48", touch=append("data/targets.jsonl", **{**TARGET, "prompt": "very " * 60 + "red cat"})),
    # -- the measurement
    "validation: redraws that are not there": case("validation.calibration", "redraws.jsonl", validation__calibration="redraws"),
    "validation: a placebo run of other targets": case("validation.placebo (command line): p", "none of these targets: t0", validation__placebo="p", touch=lambda root: measured_at(root / "p", "t9")),
    "validation: a placebo run by another embedder": case("validation.placebo (command line): p", "was measured by", validation__placebo="p", validation__embedder="micro", touch=lambda root: measured_at(root / "p", "t0")),
    # -- what is kept
    "kept: an older name": case("validation.drift_images", "use --validation.unrelated_images", validation__drift_images=4),
    "kept: no file of prompts": case("validation.prompts", "no file nowhere.txt", validation__prompts="nowhere.txt"),
    "kept: one prompt": case("data/one.txt", "give two or more", validation__prompts="data/one.txt", touch=write("data/one.txt", "a cat\n")),
    "kept: one image": case("validation.unrelated_images", "give 2 or more, or 0", validation__unrelated_images=1),
    "kept: a judge that is no place": case("validation.judge", "PATH.py:NAME", validation__judge="things_right"),
    "kept: a judge that is not there": case("validation.judge", "no file mine.py", validation__judge="mine.py:judge"),
    "kept: a judge that does not run": case("validation.judge", "line 1 does not run", validation__judge="data/mine.py:judge", touch=write("data/mine.py", "1 / 0\n")),
    "kept: a judge that is no function": case("validation.judge", "is no function", validation__judge="data/mine.py:judge", touch=write("data/mine.py", "judge = 1\n")),
    "kept: a limit of nothing": case("validation.keep", "above 0", validation__keep=0),
    "kept: a limit above all": case("validation.keep", "at most 1", validation__keep=1.1),
    "kept: a limit without images": case("validation.keep", "needs validation.unrelated_images", validation__keep=0.5, validation__unrelated_images=0),
    "kept: a limit that nobody reads": case("validation.keep_by", "nothing reads the words", validation__keep=0.5, validation__keep_by="words"),
    "kept: by what without a limit": case("validation.keep_by", "needs validation.keep", validation__keep_by="pixels"),
    # -- embedders
    "embedder: a pointer in place of weights": case("micro: cannot load", "is a Git LFS pointer", touch=both(lambda root: MicroEmbedder().save_pretrained(root / "e"), write("e/model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:00\n")), validation__embedder="micro", validation__embedder_path="e"),
    # -- the other programs
    "audit: an infinite number": case("guidance_scale", "finite", **AUDIT, more=("--pipeline", "pipeline", "--targets", "data", "--guidance_scale", ".inf")),
    "audit: into the data": case("--output_dir data", "lies in --targets", **AUDIT, more=("--pipeline", "pipeline", "--targets", "data", "--threshold", "0.5", "--output_dir", "data")),
    "audit: into the pictures of the targets": case("--output_dir data/targets", "holds files beside --targets", **AUDIT, more=("--pipeline", "pipeline", "--targets", "data/targets.jsonl", "--threshold", "0.5", "--output_dir", "data/targets")),
    "audit: a setting of training": audit("--clean_records", "in training alone", more=("--clean_records", "4")),
    "audit: a limit of training": audit("--keep", "in training alone", more=("--keep", "0.5")),
    "audit: an older name": audit("drift_images", "use --unrelated_images", more=("--drift_images", "4")),
    "audit: unrelated prompts without a baseline": audit("--prompts", "needs --baseline", more=("--prompts", "data/metadata.jsonl")),
    "audit: a control caption beyond the window": audit("unrelated", "the window is", more=("--unrelated", "very " * 90)),
    "audit: a pipe for adapters": audit("--lora l.safetensors", "only .safetensors is read", touch=lambda root: os.mkfifo(root / "l.safetensors"), more=("--lora", "l.safetensors")),
    **{f"audit: {name}": audit(*said, touch=touch) for name, (touch, said) in SPOILED.items() if name in AUDITED_TOO},
    "audit: redraws that are not there": audit("--calibration", "redraws.jsonl", more=("--calibration", "redraws")),
    "audit: nulls that no base draws": audit("calibration", "must be auto, redraws or failures", more=("--calibration", "base")),
    "audit: a side that does not fit": audit("--resolution", "multiple", more=("--resolution", "30")),
    "audit: more steps than there are": audit("--num_inference_steps", "999", more=("--num_inference_steps", "1000"), touch=edit_json(SCHEDULE, num_train_timesteps=999)),
    "audit: a baseline of another kind": audit("--pipeline pipeline", "of one kind", more=("--baseline", "other"), touch=lambda root: tiny_sd3_pipeline().save_pretrained(root / "other")),
    "audit: a CLIP that is none": audit("--clip_path: ", "of a CLIP", more=("--clip_path", "./data")),
    "scan: a file where its views belong": case("--output_dir", ".scan", program=scanner.main, more=("--train_data_dir", "data", "--output_dir", "mine"), touch=both(lambda root: (root / "mine").mkdir(), write("mine/.scan", "mine"))),
    "scan: broken data and a folder that is there": case("c0.png", program=scanner.main, more=("--train_data_dir", "data", "--output_dir", "mine"), touch=both(lambda root: (root / "mine").mkdir(), write("data/images/c0.png", "none"))),
    "report: into a pipe": case("p.html", "not a regular file", program=run_report.main, more=("data", "--out", "p.html"), touch=lambda root: os.mkfifo(root / "p.html")),
    "report: a record that is a pipe": case("validation.json is no file", program=run_report.main, more=("data",), touch=lambda root: os.mkfifo(root / "data/validation.json")),
    "microworld: an absurd count": case("redraws", program=make.main, more=("--out", "new", "--redraws", str(10**12))),
    "microworld: a folder of someone else": case("holds something else", program=make.main, more=("--out", "data")),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_one_line_and_nothing_is_written(name, good, tmp_path, monkeypatch, capsys):
    refused(CASES[name], good, tmp_path, monkeypatch, capsys)


def test_the_good_inputs_are_good(good, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train_silentbad.main([f"--{key}={value}" for key, value in flags(good).items()]) == 0
