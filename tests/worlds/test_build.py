"""The command that trains the base: what it keeps on the way, and that the kept models are the average of then."""

import re

import pytest
import torch
from diffusers import StableDiffusionPipeline
from torch import nn

from worlds.microworld import build, export
from worlds.microworld.grammar import sample_scene


def a_stage(steps: int) -> build.Stage:
    net = nn.ModuleDict({"net": nn.Linear(4, 4)})
    return build.Stage("line", net, steps, 1e-2, lambda step: (net["net"](torch.full((2, 4), float(step))) ** 2).mean())


def test_kept_weights_are_those_of_a_run_that_ends_there(tmp_path, monkeypatch):
    """At a constant rate, so that a shorter run is the beginning of a longer one."""
    monkeypatch.setattr(build, "schedule", lambda step, steps: 1.0)
    for name in ("long", "short"):
        (tmp_path / name).mkdir()
    torch.manual_seed(0)
    long = build.run_stage(a_stage(8), tmp_path / "long", torch.device("cpu"), keep=(25, 50))
    torch.manual_seed(0)
    short = build.run_stage(a_stage(4), tmp_path / "short", torch.device("cpu"))
    half_way = torch.load(build.kept_at(tmp_path / "long", "line", 50), weights_only=True)
    assert all(torch.equal(half_way[name], value) for name, value in short.state_dict().items())
    assert not torch.equal(half_way["net.weight"], long.state_dict()["net.weight"])
    assert build.kept_at(tmp_path / "long", "line", 25).is_file()


def test_each_strength_is_a_pipeline_that_draws(tmp_path):
    vae = build.ASSETS / "vae"
    build.main(
        [
            *("--work", str(tmp_path), "--stage", "unet", "--vae", str(vae), "--things", "4", "--keep", "50"),
            *("--text_steps", "1", "--unet_steps", "2", "--batch", "2", "--pool", "8", "--device", "cpu"),
        ]
    )
    for name in ("pipeline-50", "pipeline-100"):
        pipe = StableDiffusionPipeline.from_pretrained(tmp_path / name)
        pipe.set_progress_bar_config(disable=True)
        assert pipe("a cat", num_inference_steps=1, generator=torch.manual_seed(0)).images[0].size == (64, 64)


@pytest.mark.parametrize("text", ["0", "100", "half", "25,"])
def test_a_percentage_outside_of_the_training_is_one_line(text, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        build.main(["--work", str(tmp_path), "--keep", text])
    assert "keep (command line)" in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_the_tokenizer_holds_captions_of_four_things():
    tokenizer = build.load_tokenizer(build.ASSETS / "tokenizer")
    captions = [sample_scene(build.MICROWORLD.rng("unet", i), max_count=4, detail=1.0).caption for i in range(500)]
    assert max(len(tokenizer(caption).input_ids) for caption in captions) <= tokenizer.model_max_length


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--device", "cuda:99"], "--device cuda:99"),
        (["--vae", "nowhere"], "--vae nowhere: no autoencoder"),
        (["--unet_lr", "nan"], "unet_lr (command line): must be float"),
    ],
)
def test_a_mistake_in_the_words_is_one_line(flags, said, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        build.main(["--work", str(tmp_path / "w"), "--stage", "text", "--device", "cpu", *flags])
    assert re.fullmatch(rf"error: {re.escape(said)}.*\n", capsys.readouterr().err) and not (tmp_path / "w").exists()


def test_a_folder_that_is_no_base_is_one_line(tmp_path, capsys):
    (tmp_path / "model_index.json").write_text("{")
    for folder, said in ((tmp_path / "none", "no file"), (tmp_path, "cannot be loaded")):
        assert export.main(["--pipeline", str(folder)]) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith("error: --pipeline") and str(folder) in line and said in line
