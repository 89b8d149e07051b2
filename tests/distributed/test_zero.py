"""ZeRO 2 by DeepSpeed over two gloo processes on the CPU trains, measures and resumes as one process does.

How closely: both ranks and a resumed run to the bit; against one process of the same global batch, weights to 2e-5 (a
sum of two halves rounds differently from the sum of the whole).
"""

import json
import os
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline

import train_silentbad
from silentbad.distributed import shards
from silentbad.distributed.zero import RELEASE, Part, release
from silentbad.saving import checkpoint
from tests.distributed import test_two_processes as two
from tests.distributed.test_two_processes import (
    SHORT,
    TOLERANCE,
    VALIDATION,
    gap,
    launch_shipped,
    leave_alone,
    refused,
    rows,
    same_states,
    saved,
    seen,
    text,
    whole,
)
from tests.kill.runner import finish

inputs = two.inputs
ZERO = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "7"}  # the 7 must not count
THOROUGH = pytest.mark.thorough
RUNS = pytest.mark.skipif(not release().startswith(RELEASE), reason=f"DeepSpeed {RELEASE}x is an optional extra")
STATEFUL = {**two.STATEFUL, "gradient_control.name": "prior+gsnr", "max_grad_norm": 0.1}


def watch(argv: list[str]) -> None:
    """Keep also, in parts of the weights' number, how much of the gradients and of AdamW's states a rank holds."""
    two.watch(argv)
    out, update = two.output_dir(argv), train_silentbad.update

    def measured(run):
        numel = sum(p.numel() for p in run.parts.backbone.parameters())
        grads = run.zero.engine.optimizer.averaged_gradients.values()
        states = [state["exp_avg"] for state in run.zero.optimizer.state.values() if "exp_avg" in state]
        assert all(p.grad is None for p in run.parts.backbone.parameters())
        part = {"gradients": sum(g.numel() for group in grads for g in group) / numel}
        part |= {"states": sum(s.numel() for s in states) / numel} if states else {}
        (out.parent / f"{out.name}-part-{os.environ['RANK']}.json").write_text(json.dumps(part))
        return update(run)

    train_silentbad.update = measured


def zero(inputs: dict, out: Path, prepare=watch, **changes) -> None:
    """A run under ZeRO, to its end."""
    codes = [finish(process, 120) for process in two.ranks(inputs, out, environment=ZERO, prepare=prepare, **changes)]
    assert codes == [0, 0], text(out)


CASES = {  # changes of both; of the run under ZeRO alone; `make test` has the first
    "groups, decay by kind, clip": (
        {
            "gradient_control.name": "prior",
            "gradient_control.warmup": 1,
            "gradient_control.refresh": 1,
            "decay_norms_and_biases": False,
            "max_grad_norm": 0.1,
        },
        {},
    ),
    "accumulation, DREAM": (
        {"gradient_accumulation_steps": 2, "dream_training": True, "pretrained_model_name_or_path": "epsilon"},
        {"max_batch_size": 1, "gradient_checkpointing": True},
    ),
    "SGD, scaled gradients": (
        {
            "optimizer": "SGD",
            "gradient_control.name": "gsnr",
            "gradient_control.apply": "gradient",
            "gradient_control.warmup": 1,
            "gradient_control.refresh": 1,
            "max_grad_norm": 0.1,
        },
        {},
    ),
    "shrunk updates": ({"gradient_control.shrink": True}, {}),
    "L2-SP": ({"memory.retention.name": "l2_sp"}, {}),
    "self-distillation": ({"memory.retention.name": "self_distillation"}, {}),
}


@RUNS
@pytest.mark.parametrize("name", [pytest.param(case, marks=THOROUGH if k else ()) for k, case in enumerate(CASES)])
def test_zero_equals_the_whole(name, inputs, tmp_path):
    both, alone = CASES[name]
    both = both | model(inputs, both.get("pretrained_model_name_or_path", "v_prediction"))
    zero(inputs, tmp_path / "zero", **both, **alone, **SHORT)
    whole(inputs, tmp_path / "one", **both, **SHORT)
    same(tmp_path / "zero", tmp_path / "one")
    for rank in range(2):
        part = json.loads((tmp_path / f"zero-part-{rank}.json").read_text())
        assert 0.45 < part["gradients"] < 0.55 and 0.45 < part.get("states", 0.5) < 0.55


AS_DATA_PARALLEL = {  # what one process rounds or normalises otherwise than two do
    "SDXL, bf16": {"mixed_precision": "bf16", "pretrained_model_name_or_path": "xl"},
    "AND distillation": two.AND,
    "attention binding": {
        "memory.attention_binding.name": "mass",
        "memory.attention_binding.options": json.dumps({"start": 0.0}),
    },
}


@RUNS
@THOROUGH
@pytest.mark.parametrize("name", AS_DATA_PARALLEL)
def test_zero_equals_data_parallel(name, inputs, tmp_path):
    both = AS_DATA_PARALLEL[name]
    both = both | model(inputs, both.get("pretrained_model_name_or_path", "v_prediction"))
    zero(inputs, tmp_path / "zero", **both, **SHORT)
    codes = [finish(process, 120) for process in two.ranks(inputs, tmp_path / "ddp", **both, **SHORT)]
    assert codes == [0, 0], text(tmp_path / "ddp")
    same(tmp_path / "zero", tmp_path / "ddp", ranks=2)


def model(inputs: dict, kind: str) -> dict:
    return {"pretrained_model_name_or_path": inputs["pretrained_model_name_or_path"].parent / kind}


def same(out: Path, other: Path, ranks: int = 1) -> None:
    """Two ranks under ZeRO saw, lost and became what the other run's did."""
    a, b, expected = seen(out), seen(out, 1), seen(other)
    drawn = sum((seen(other, rank)["drawn"] for rank in range(ranks)), [])
    assert sorted(a["drawn"] + b["drawn"]) == sorted(drawn)
    assert gap(a["weights"], b["weights"]) == 0
    assert gap(a["weights"], expected["weights"]) < TOLERANCE
    for mine, theirs in zip(rows(out), rows(other), strict=True):
        assert mine.keys() == theirs.keys()
        for key in ("loss", "grad_norm", "lr", "skipped", "val/mean", "val/recovered", "control/gsnr_median"):
            assert (mine.get(key) or 0) == pytest.approx(theirs.get(key) or 0, rel=1e-3, abs=1e-4), key


@pytest.fixture(scope="module")
def straight(inputs, tmp_path_factory):
    """Runs with all the state there is, measured on the way: `zero` and `one`."""
    root = tmp_path_factory.mktemp("straight")
    zero(inputs, root / "zero", **STATEFUL, **VALIDATION)
    whole(inputs, root / "one", **STATEFUL, **VALIDATION)
    return root


@RUNS
@THOROUGH
def test_everything_with_state_equals_the_whole(straight):
    same(straight / "zero", straight / "one")
    (weights, state), (_, theirs) = saved(straight / "zero"), saved(straight / "one")
    assert gap(weights, seen(straight / "zero")["weights"]) == 0
    assert state["optimizer"]["state"].keys() == theirs["optimizer"]["state"].keys()
    for mine, entry in zip(state["optimizer"]["param_groups"], theirs["optimizer"]["param_groups"], strict=True):
        assert mine["params"] == entry["params"] and mine["name"] == entry["name"]
    for i, entry in theirs["optimizer"]["state"].items():
        assert gap(state["optimizer"]["state"][i], entry) < TOLERANCE
    mine, average = (straight / run / "checkpoints/step-4/ema.safetensors" for run in ("zero", "one"))
    assert gap(checkpoint.read_tensors(mine), checkpoint.read_tensors(average)) < TOLERANCE


@RUNS
@THOROUGH
def test_its_pipeline_loads_in_plain_diffusers(straight):
    pipeline = DiffusionPipeline.from_pretrained(straight / "zero" / "pipeline")
    average = checkpoint.read_tensors(straight / "zero/checkpoints/step-4/ema.safetensors")
    for p, shadow in zip(pipeline.unet.parameters(), (average[str(i)] for i in range(len(average))), strict=True):
        assert torch.equal(p, shadow)


@RUNS
@THOROUGH
@pytest.mark.parametrize("step", [2, 4])
def test_a_resumed_run_is_bit_equal(step, straight, inputs, tmp_path):
    """Also one that has no step left, and so saves the state it loaded."""
    folder = straight / "zero" / "checkpoints" / f"step-{step}"
    zero(inputs, tmp_path / "resumed", **STATEFUL, **VALIDATION, resume_from_checkpoint=folder)
    same_states(tmp_path / "resumed", straight / "zero")


@RUNS
@THOROUGH
@pytest.mark.parametrize("resumes, wrote", [(zero, "one"), (whole, "zero")])
def test_zero_and_the_whole_resume_each_other(resumes, wrote, straight, inputs, tmp_path):
    step_2 = straight / wrote / "checkpoints" / "step-2"
    resumes(inputs, tmp_path / "run", **STATEFUL, **VALIDATION, resume_from_checkpoint=step_2)
    assert gap(saved(tmp_path / "run")[0], saved(straight / "one")[0]) < TOLERANCE


def broken(argv: list[str]) -> None:
    """The second draw's loss is not a number: of two processes, on the last alone."""
    two.watch(argv)
    backward = train_silentbad.backward

    def nan(run, loss, last):
        backward(run, loss * float("nan") if run.state.draw == 1 and run.accelerator.is_last_process else loss, last)

    train_silentbad.backward = nan


@RUNS
@THOROUGH
def test_a_gradient_that_is_not_finite_is_skipped_by_both(inputs, tmp_path):
    both = {**SHORT, "gradient_control.name": "gsnr", "gradient_control.warmup": 1, "gradient_control.refresh": 1}
    zero(inputs, tmp_path / "zero", broken, **both, gradient_accumulation_steps=2)
    whole(inputs, tmp_path / "one", broken, **both, gradient_accumulation_steps=2)
    assert rows(tmp_path / "zero")[-1]["skipped"] == 1
    same(tmp_path / "zero", tmp_path / "one")


@RUNS
@THOROUGH
def test_a_rank_left_alone_ends_without_a_checkpoint(inputs, tmp_path):
    leave_alone(inputs, tmp_path / "run", ZERO)


@RUNS
@THOROUGH
def test_the_shipped_configuration_runs_zero(inputs, tmp_path):
    launch_shipped("configs/accelerate/deepspeed.yaml", inputs, tmp_path / "run")


# ---------------------------------------------------------------- what does not need DeepSpeed

REFUSED = {  # what is asked for -> the key that the line names
    ("ACCELERATE_DEEPSPEED_ZERO_STAGE=3",): "zero_stage",
    ("ACCELERATE_DEEPSPEED_CONFIG_FILE=zero.json",): "deepspeed_config_file",
    ("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE=cpu",): "offload_optimizer_device",
    ("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE=nvme",): "offload_param_device",
    ("WORLD_SIZE=1",): "num_processes",
    ("ACCELERATE_MIXED_PRECISION=fp16",): "mixed_precision",
    ("--optimizer=Adafactor",): "optimizer",
    ("--lora.rank=2",): "lora.rank",
    ("--train_text_encoder=true",): "train_text_encoder",
    ("--compile_model=true",): "compile_model",
    ("--channels_last=true",): "channels_last",
    ("--gradient_control.conflict=true",): "gradient_control.conflict",
    ("--gradient_control.transform=pcgrad",): "gradient_control.transform",
    ("--gradient_control.name=prior+hypergradient",): "gradient_control.name",
    ("--gradient_control.between.name=contrast",): "gradient_control.between.name",
    ("--memory.loss_balance.name=gradient_norm",): "memory.loss_balance.name",
}


@pytest.mark.parametrize("asked", REFUSED, ids=" ".join)
def test_what_does_not_work_under_zero_is_refused_in_one_line(asked, inputs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shards, "release", lambda: f"{RELEASE}8")
    line = refused(asked, ZERO, inputs, tmp_path / "run", monkeypatch, capsys)
    where = " (command line)" if asked[0].startswith("--") else ""
    assert line.startswith(f"error: {REFUSED[asked]}{where}: ")


@pytest.mark.parametrize("installed", ["none", "0.16.2"])
def test_without_that_deepspeed_the_line_names_the_package(installed, inputs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shards, "release", lambda: installed)
    line = refused((), ZERO, inputs, tmp_path / "run", monkeypatch, capsys)
    assert f"{installed} is installed; pip install 'deepspeed==" in line


@pytest.mark.parametrize("sizes", [(7, 1, 12), (1, 30, 2), (5, 5, 5)])
@pytest.mark.parametrize("stride", [1, 2, 3, 7])
def test_parts_make_up_what_a_sample_reads(sizes, stride):
    """However a tensor is cut, each sampled coordinate is in exactly one part."""
    values = torch.arange(1.0, 1.0 + sum(sizes))
    cuts = torch.tensor((0, *sizes)).cumsum(0).tolist()
    parts = [Part(values.shape, a, values[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
    count = len(values) // stride
    assert torch.equal(sum(part.strided(count, stride) for part in parts), values.as_strided((count,), (stride,)))
