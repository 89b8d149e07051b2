"""What is refused before any weights load."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import train_silentbad
from silentbad.errors import UserError
from silentbad.model import pipeline
from silentbad.model.gate import Source, check_precision
from tests.mistakes import WEIGHTS


def test_quantised_weights_are_refused(tmp_path):
    tensors = {"a.weight": torch.ones(2), "ids": torch.arange(3), "b.weight": torch.ones(2, dtype=torch.int8)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="x: b.weight in model.safetensors is I8; give weights in floating point"):
        check_precision(tmp_path, "x")
    save_file(
        {k: tensors[k].half() if k == "a.weight" else tensors[k] for k in ("a.weight", "ids")},
        tmp_path / "model.safetensors",
    )
    check_precision(tmp_path, "x")


def test_parts_without_the_variant_are_read_without_it(flags, pipelines, tmp_path, capsys):
    base = shutil.copytree(pipelines["v_prediction"], tmp_path / "pipeline")
    (tmp_path / WEIGHTS["unet"]).rename(base / "unet/diffusion_pytorch_model.fp16.safetensors")
    (base / "vae/._diffusion_pytorch_model.safetensors").write_bytes(b"of macOS")
    assert train_silentbad.main(flags(pretrained_model_name_or_path=base, variant="fp16", max_train_steps=1)) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "no weights of variant fp16" in line]
    assert [Path(line.split(": ")[1]).name for line in said] == ["vae", "text_encoder"]


@pytest.mark.parametrize("kind, dtype", [("xl", torch.float32), ("epsilon", torch.float16)])
def test_an_autoencoder_that_overflows_in_fp16_is_read_wide(pipelines, kind, dtype):
    pipe = pipeline.load_pipeline(str(pipelines[kind]), "float16", "cpu")
    alone = pipeline.load_autoencoder(Source(str(pipelines[kind])), "float16", "cpu")
    assert (pipe.vae.dtype, alone.dtype, pipe.unet.dtype) == (dtype, dtype, torch.float16)


def test_a_tokenizer_without_merges_is_one_line(tmp_path):
    pipe = tmp_path / "pipe"
    shutil.copytree(Path(__file__).parents[2] / "assets/micro-sd", pipe)
    (pipe / "tokenizer/merges.txt").unlink()
    with pytest.raises(UserError, match="it has no merges.txt"):
        pipeline.load_pipeline(str(pipe), "float32", "cpu")
