"""A UNet in shards over two gloo processes on the CPU (FSDP 2) trains, measures and resumes as a whole one does.

How closely: a resumed run to the bit; against one process of the same global batch, weights to 2e-5 (a sum of two
halves rounds differently from the sum of the whole), in bf16 to 1e-3 (shards normalise in it too, autocast does not).
"""

import json
from pathlib import Path

import pytest
from diffusers import DiffusionPipeline

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
from tests.toy import GSNR, PRIOR

inputs = two.inputs
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
STATEFUL = {**two.STATEFUL, "use_ema": False, "gradient_control.name": f"{PRIOR}+{GSNR}", "max_grad_norm": 0.1}
THOROUGH = pytest.mark.thorough


def sharded(inputs: dict, out: Path, **changes) -> None:
    """A run in shards, to its end."""
    codes = [finish(process, 120) for process in two.ranks(inputs, out, environment=FSDP, **changes)]
    assert codes == [0, 0], text(out)


CASES = {  # changes of both; of the run in shards alone; `make test` has the first
    "accumulation, DREAM": (
        {"gradient_accumulation_steps": 2, "dream_training": True, "pretrained_model_name_or_path": "epsilon"},
        {"max_batch_size": 1, "gradient_checkpointing": True},
    ),
    "SDXL, bf16": ({"mixed_precision": "bf16", "pretrained_model_name_or_path": "xl"}, {}),
    "SDXL, placebo of prior": (
        {
            "pretrained_model_name_or_path": "xl",
            "gradient_control.name": "placebo",
            "gradient_control.options": json.dumps({"of": PRIOR}),
            "gradient_control.warmup": 1,
            "gradient_control.refresh": 1,
        },
        {},
    ),
}


@pytest.mark.parametrize("name", [pytest.param(case, marks=THOROUGH if k else ()) for k, case in enumerate(CASES)])
def test_shards_equal_the_whole(name, inputs, tmp_path):
    both, alone = CASES[name]
    kind = both.get("pretrained_model_name_or_path", "v_prediction")
    both = {**both, "pretrained_model_name_or_path": inputs["pretrained_model_name_or_path"].parent / kind}
    sharded(inputs, tmp_path / "shards", **both, **alone, **SHORT)
    whole(inputs, tmp_path / "one", **both, **SHORT)
    a, b, expected = seen(tmp_path / "shards"), seen(tmp_path / "shards", 1), seen(tmp_path / "one")
    tolerance = 1e-3 if "bf16" in name else TOLERANCE
    assert sorted(a["drawn"] + b["drawn"]) == sorted(expected["drawn"])
    assert gap(a["weights"], expected["weights"]) < tolerance
    for mine, theirs in zip(rows(tmp_path / "shards"), rows(tmp_path / "one"), strict=True):
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=10 * tolerance)
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=10 * tolerance)


@pytest.fixture(scope="module")
def straight(inputs, tmp_path_factory):
    """Runs with all the state there is, measured on the way: `shards` and `one`."""
    root = tmp_path_factory.mktemp("straight")
    sharded(inputs, root / "shards", **STATEFUL, **VALIDATION)
    whole(inputs, root / "one", **STATEFUL, **VALIDATION)
    return root


@THOROUGH
def test_everything_with_state_equals_the_whole(straight):
    a, b, expected = seen(straight / "shards"), seen(straight / "shards", 1), seen(straight / "one")
    assert a["own"] + b["own"] == expected["own"] and 0.4 < a["own"] / expected["own"] < 0.6
    assert gap(a["weights"], expected["weights"]) < TOLERANCE
    assert gap(a["weights"], b["weights"]) == 0 == gap(a["weights"], saved(straight / "shards")[0])
    for mine, theirs in zip(rows(straight / "shards"), rows(straight / "one"), strict=True):
        assert mine.keys() == theirs.keys()
        for key in ("loss", "grad_norm", "lr", "val/mean", "val/recovered", "control/gsnr_median", "memory/rho_mean"):
            assert (mine.get(key) or 0) == pytest.approx(theirs.get(key) or 0, rel=1e-3, abs=1e-4), key


@THOROUGH
def test_its_pipeline_loads_in_plain_diffusers(straight):
    pipeline = DiffusionPipeline.from_pretrained(straight / "shards" / "pipeline")
    assert gap(pipeline.unet.state_dict(), seen(straight / "shards")["weights"]) == 0
    assert (straight / "shards" / "best" / "unet").is_dir()


@THOROUGH
def test_a_resumed_run_is_bit_equal(straight, inputs, tmp_path):
    step_2 = straight / "shards" / "checkpoints" / "step-2"
    sharded(inputs, tmp_path / "resumed", **STATEFUL, **VALIDATION, resume_from_checkpoint=step_2)
    same_states(tmp_path / "resumed", straight / "shards")


@THOROUGH
@pytest.mark.parametrize("resumes, wrote", [(sharded, "one"), (whole, "shards")])
def test_shards_and_the_whole_resume_each_other(resumes, wrote, straight, inputs, tmp_path):
    step_2 = straight / wrote / "checkpoints" / "step-2"
    resumes(inputs, tmp_path / "run", **STATEFUL, **VALIDATION, resume_from_checkpoint=step_2)
    assert gap(saved(tmp_path / "run")[0], saved(straight / "one")[0]) < TOLERANCE


@THOROUGH
def test_a_rank_left_alone_ends_without_a_checkpoint(inputs, tmp_path):
    leave_alone(inputs, tmp_path / "run", FSDP)


@THOROUGH
def test_the_shipped_configuration_shards(inputs, tmp_path):
    launch_shipped("configs/accelerate/fsdp.yaml", inputs, tmp_path / "run")


REFUSED = {  # what is asked for -> the key that the line names
    ("ACCELERATE_USE_DEEPSPEED=true",): "accelerate: DEEPSPEED",
    ("ACCELERATE_USE_MEGATRON_LM=true",): "accelerate: MEGATRON_LM",
    ("FSDP_VERSION=1",): "fsdp_version",
    ("FSDP_OFFLOAD_PARAMS=true",): "fsdp_offload_params",
    ("WORLD_SIZE=1",): "num_processes",
    ("ACCELERATE_MIXED_PRECISION=fp8",): "mixed_precision",
    ("--lora.rank=2",): "lora.rank",  # a row of the table of what excludes what
}


@pytest.mark.parametrize("asked", REFUSED, ids=" ".join)
def test_what_does_not_work_in_shards_is_refused_in_one_line(asked, inputs, tmp_path, monkeypatch, capsys):
    line = refused(asked, FSDP, inputs, tmp_path / "run", monkeypatch, capsys)
    assert line.startswith(f"error: {REFUSED[asked]}")
