"""The loop: it runs, it resumes to the bit, it stops when told, and none of the inherited defects is back.

`test_defect_NN_...` names the line of the defect list it guards.
"""

import json
import math
import os
import re
import shutil
import signal
import sys
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler, StableDiffusionPipeline
from PIL import Image

import train_silentbad
from memory_reinforce import LOSSES
from silentbad import device
from silentbad.data import phrases
from silentbad.data.loader import Stream
from silentbad.errors import UserError
from silentbad.loop import trackers
from silentbad.loop.log import Log
from silentbad.measure.generation import Sampler
from silentbad.measure.record import ElementThreshold, Threshold
from silentbad.model.diffusion import noised
from silentbad.saving import card, checkpoint, folder
from tests.conftest import write_data
from tests.toy import CURRICULUM, GSNR, experiment
from tests.training import VALIDATION, equal, rows, same, step_once, weights
from train_silentbad import main, micro_step

HYPERGRADIENT = experiment("hypergradient")

# ---------------------------------------------------------------- it runs


def test_smoke_pipeline_loads_with_plain_diffusers(flags, data, tmp_path):
    argv = flags(
        use_ema=True,
        save_best=True,
        save_ckpt_epoch_interval=1,
        lr_scheduler="cosine",
        noise_offset=0.1,
        input_perturbation=0.1,
        snr_gamma=5,
        random_flip=True,
        gradient_checkpointing=True,
        max_train_steps=3,
        **VALIDATION | {"validation.targets": data / "targets.jsonl"},
    )
    assert main([*argv, "--validation_prompts", "a red cat", "a hat", "--validation_epochs", "1"]) == 0
    out = tmp_path / "run"
    pipeline = StableDiffusionPipeline.from_pretrained(out / "pipeline")
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline("a red cat", num_inference_steps=1, height=16, width=16).images[0].size == (16, 16)
    card = (out / "pipeline" / "README.md").read_text()
    assert "element data" in card and "`t0`" in card
    assert [row["step"] for row in rows(out)] == [1, 2, 3]
    assert [row["step"] for row in rows(out, validation=True)] == [0, 2, 3]
    assert all(math.isfinite(row["loss"]) for row in rows(out))
    assert (out / "best" / "model_index.json").is_file() and (out / "epochs" / "epoch-1" / "unet").is_dir()
    assert len(list((out / "samples" / "sample_prompts").glob("*.png"))) >= 2
    facts = json.loads((out / "run.json").read_text())
    assert facts["versions"]["torch"] in torch.__version__ and facts["device"] == f"cpu: {device.device_name('cpu')}"


def test_weight_files_are_safetensors_and_state_is_plain(flags, tmp_path):
    main(flags(use_ema=True, max_train_steps=1))
    folder = tmp_path / "run" / "checkpoints" / "step-1"
    tensors = {"unet.safetensors", "ema.safetensors"}
    assert {p.name for p in folder.iterdir()} == {"manifest.json", "facts.json", "state.pt", *tensors}
    torch.load(folder / "state.pt", weights_only=True)
    assert not list((tmp_path / "run").rglob("*.bin"))


def test_a_dry_run_resumes_what_the_run_would(flags, tmp_path, capsys):
    assert main(flags(max_train_steps=2, checkpointing_steps=1)) == 0
    assert main(flags(max_train_steps=4, dry_run=True, resume_from_checkpoint="latest")) == 0
    assert "no checkpoint" not in capsys.readouterr().out
    assert sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir()) == ["step-1", "step-2"]


def test_a_dry_run_resumes_what_measured(flags, data, capsys):
    settings = {**VALIDATION, "validation.targets": data / "targets.jsonl"}
    assert main(flags(max_train_steps=2, checkpointing_steps=2, **settings)) == 0
    again = {"dry_run": True, "resume_from_checkpoint": "latest"}
    assert main(flags(max_train_steps=4, **settings, **again)) == 0, capsys.readouterr().err


def test_a_signal_after_the_last_step_stops_the_run_as_any_other(flags, tmp_path, monkeypatch):
    usual = train_silentbad.boundary

    def and_a_signal(run, requests, bar):
        stop = usual(run, requests, bar)
        if run.state.step == run.state.total:
            os.kill(os.getpid(), signal.SIGTERM)
        return stop

    monkeypatch.setattr(train_silentbad, "boundary", and_a_signal)
    assert main(flags(max_train_steps=2)) == 128 + signal.SIGTERM
    assert not (tmp_path / "run/pipeline").exists()
    assert main(flags(max_train_steps=2, resume_from_checkpoint="latest")) == 0
    assert (tmp_path / "run/pipeline").is_dir()


def test_what_a_run_enlarges_and_repeats_is_said_before_it_starts(build, data, capsys):
    for line in map(json.loads, (data / "metadata.jsonl").read_text().splitlines()[:2]):
        for name in (line["file_name"], line["mask"]):
            Image.open(data / name).resize((10, 12)).save(data / name)
    build(train_batch_size=20, learning_rate=1.0)
    said = capsys.readouterr().err
    assert "resolution: 2 pictures are smaller than 16 and enlarged" in said and "metadata.jsonl:1 first" in said
    assert "train_batch_size: a step takes 40 of " in said
    assert "learning_rate: 1 is a thousand times AdamW's usual" in said
    assert f"validation.targets: is unset, so no target of {data}/targets.jsonl is measured" in said


def test_epochs_beside_steps_are_refused(flags, capsys):
    assert main(flags(num_train_epochs=3, max_train_steps=2)) == 2
    assert "num_train_epochs (command line): needs max_train_steps=null" in capsys.readouterr().err


def test_print_groups_covers_every_parameter(flags, capsys, pipelines):
    assert main(flags(print_groups=True, train_data_dir="null", **{"validation.targets": "null"})) == 0
    unet = StableDiffusionPipeline.from_pretrained(pipelines["v_prediction"]).unet
    assert f"{sum(p.numel() for p in unet.parameters()):,}" in capsys.readouterr().out


def test_phrases_of_several_targets_are_named_before_training(build, data, monkeypatch, capsys):
    records = data / "metadata.jsonl"
    lines = records.read_text().splitlines()
    elements = [line for line in lines if '"t0"' in line]
    others = [line.replace('"t0"', '"t1"').replace('"t0-', '"t1-') for line in elements]
    records.write_text("\n".join([*lines, *others, elements[0].replace('"t0', '"t2')]))
    monkeypatch.setattr(phrases, "MOST_SHARED", 1)
    build()
    said = [line for line in capsys.readouterr().err.splitlines() if " targets" in line]
    assert said == [
        "warning: 'a red cat' is an element of 3 targets: t0, t1, t2; a picture of it alone shows one of 3",
        "warning: 1 more phrases are elements of several targets",
    ]


def test_a_run_is_not_overwritten_unasked(flags, data, tmp_path, capsys):
    assert main(flags(max_train_steps=1)) == 0
    assert main(flags(max_train_steps=1)) == 2
    assert "--overwrite_output_dir" in capsys.readouterr().err
    assert main(flags(max_train_steps=1, overwrite_output_dir=True, train_data_dir=tmp_path)) == 2
    assert (tmp_path / "run" / "pipeline").is_dir()  # a mistake elsewhere deletes nothing
    assert main(flags(max_train_steps=2, overwrite_output_dir=True)) == 0
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]


@pytest.mark.parametrize(
    "changes",
    [
        {"mixed_precision": "bf16", "use_8bit_adam": True, "max_train_samples": 6},
        {"memory.loss.dream": 1.0, "cache_mb": 0, "shuffle_phrases": True, "dataloader_num_workers": 2},
        {"prediction_type": "sample", "use_ema": True, "offload_ema": True, "scale_lr": True, "learning_rate": 1e-5},
    ],
    ids=str,
)
def test_capabilities_train(flags, tmp_path, changes):
    assert main(flags(max_train_steps=2, **changes)) == 0
    assert all(math.isfinite(row["loss"]) for row in rows(tmp_path / "run"))


def test_defect_18_a_seed_fixes_the_weights_whatever_the_threads(build):
    ends = []
    for changes in ({}, {"dataloader_num_workers": 3}, {"seed": 1}):
        run = build(random_flip=True, shuffle_phrases=True, **changes)
        for _ in range(4):
            step_once(run)
        ends.append(weights(run))
    assert same(*ends[:2]) and not same(ends[0], ends[2])


def test_the_hub_token_is_written_nowhere(flags, tmp_path, monkeypatch):
    monkeypatch.setattr(card, "push", lambda folder, config: None)
    monkeypatch.setattr(card, "check_push", lambda config: None)
    main(flags(max_train_steps=1, push_to_hub=True, hub_token="hf_secret", report_to="tensorboard"))
    assert not any(b"hf_secret" in p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file())


# ---------------------------------------------------------------- it resumes to the bit
ARMS = {
    "plain": {},
    "ema and schedule": {"use_ema": True, "lr_scheduler": "cosine", "lr_warmup_steps": 2},
    "8-bit": {"use_8bit_adam": True},
    "gsnr": {"gradient_control.name": GSNR, "gradient_control.warmup": 1, "gradient_control.refresh": 1},
    "mean_abs on gradients": {
        "gradient_control.name": "mean_abs",
        "gradient_control.apply": "gradient",
        "gradient_control.warmup": 1,
        "gradient_control.refresh": 1,
    },
    "curriculum": {"memory.timesteps.name": CURRICULUM},
    "phrase memory": {
        "memory.phrase_memory.enabled": True,
        "memory.phrase_memory.share": 1.0,
        "memory.sampler.name": "weakest_first",
    },
    "rehearsal": {
        "memory.rehearsal.name": "pairwise",
        "memory.region.name": "mask",
        "train_batch_size": 8,
        "memory.sampler.clean_ratio": 0.0,
    },
    "rehearsal, two workers": {  # their threads make the next draw's rehearsals before the step is taken
        "memory.rehearsal.name": "pairwise",
        "memory.region.name": "mask",
        "train_batch_size": 4,
        "memory.sampler.clean_ratio": 0.0,
        "dataloader_num_workers": 2,
    },
    "captions": {
        "memory.rehearsal.name": "joint_captions",
        "memory.region.name": "mask",
        "max_batch_size": 3,
        "train_batch_size": 8,
        "memory.sampler.clean_ratio": 0.0,
    },
    "retention": {"memory.retention.name": "self_distillation", "memory.roles.clean.caption_dropout": 0.5},
    "log window open": {"log_every": 4},
}


IN_PART = {"plain", "gsnr", "phrase memory", "rehearsal", "retention"}  # of other arms, there or in test_adapters


@pytest.mark.parametrize("arm", [pytest.param(k, marks=pytest.mark.thorough if k in IN_PART else ()) for k in ARMS])
def test_resume_is_bit_equal_mid_epoch(arm, flags, tmp_path):
    changes = {"max_train_steps": 5, "checkpointing_steps": 2, "checkpoints_total_limit": None} | ARMS[arm]
    rehearses = "memory.rehearsal.name" in changes
    if rehearses:
        elements = 24 if "dataloader_num_workers" in changes else 6
        changes["train_data_dir"] = write_data(tmp_path / "three", elements=elements, clean=0, kinds=3)
    assert main(flags("whole", **changes)) == 0
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    shutil.copytree(whole / "checkpoints" / "step-2", cut / "checkpoints" / "step-2")
    shutil.copy(whole / "metrics.jsonl", cut / "metrics.jsonl")  # rows beyond the checkpoint: a run that was killed
    assert main(flags("cut", **changes, resume_from_checkpoint="latest")) == 0
    a, b = (folder / "checkpoints" / "step-5" for folder in (whole, cut))
    for name in ("unet.safetensors", *(["ema.safetensors"] if "use_ema" in changes else [])):
        assert same(checkpoint.read_tensors(a / name), checkpoint.read_tensors(b / name))
    left, right = (checkpoint.read_state(folder / "state.pt") for folder in (a, b))
    assert equal(left["optimizer"], right["optimizer"]) and equal(left["memory"], right["memory"])
    assert (whole / "metrics.jsonl").read_text() == (cut / "metrics.jsonl").read_text()
    if rehearses:
        assert rows(whole)[1]["memory/rehearsals"] > 0


@pytest.mark.parametrize("name, options", [(HYPERGRADIENT, "{}"), ("placebo", json.dumps({"of": HYPERGRADIENT}))])
def test_the_hypergradient_learns_from_leak_free_rehearsals(name, options, build, data):
    lines = [json.loads(line) for line in (data / "metadata.jsonl").read_text().splitlines()]
    for line in lines:
        if line["role"] == "clean":
            line |= {"text": line["text"] + ", a blue sky", "phrases": ["a plain field", "a blue sky"]}
    (data / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = build(
        **{
            "memory.rehearsal.name": "leak_free",
            "memory.rehearsal.options": '{"share": 1.0}',
            "gradient_control.name": name,
            "gradient_control.options": options,
            "gradient_control.warmup": 0,
            "gradient_control.refresh": 1,
            "hooks": experiment("hypergradient", "Transfer"),
        }
    )
    for _ in range(4):
        step_once(run)
    assert run.memory.rehearsed.count > 0
    assert len(set(run.control.multipliers.values())) > 1


def test_resume_with_validation_repeats_no_row(flags, data, tmp_path):
    changes = {
        "max_train_steps": 4,
        "checkpointing_steps": 2,
        **VALIDATION,
        "validation.targets": data / "targets.jsonl",
    }
    assert main(flags("whole", **changes)) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-4")
    shutil.rmtree(tmp_path / "cut" / "pipeline")
    assert main(flags("cut", **changes, resume_from_checkpoint="latest")) == 0
    for validation in (False, True):
        timeless = [
            [{k: v for k, v in row.items() if k not in ("val/seconds", "val/share")} for row in rows(out, validation)]
            for out in (tmp_path / "whole", tmp_path / "cut")
        ]
        assert timeless[0] == timeless[1]


def test_a_log_of_a_training_has_lines_and_no_carriage_returns(flags, data, capsys, monkeypatch):
    monkeypatch.setattr("silentbad.progress.FIRST", 0.0)
    settings = VALIDATION | {"validation.steps": 2, "validation.targets": data / "targets.jsonl"}
    assert main(flags(max_train_steps=3, **settings)) == 0
    log = capsys.readouterr().err
    lines = log.splitlines()
    assert "\r" not in log and "\x1b" not in log
    assert [line for line in lines if "measuring" in line] == ["Steps: measuring the base model", "Steps: measuring"]
    steps = [line for line in lines if line.startswith("Steps: ") and " of 3, " in line]
    assert steps[0].startswith("Steps: 1 of 3, ") and steps[-1].startswith("Steps: 3 of 3, ")
    assert "to go" in steps[0] and "loss=" in steps[-1]


WHOLE: dict[str, torch.Tensor] = {}


@pytest.fixture
def six_steps(flags, tmp_path):
    """The weights after six steps that nothing disturbs."""
    if not WHOLE:
        assert main(flags("whole")) == 0
        WHOLE.update(checkpoint.read_tensors(tmp_path / "whole/checkpoints/step-6/unet.safetensors"))
    return WHOLE


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGUSR1, 0)])
def test_signals_save_at_the_next_step_boundary(number, code, flags, six_steps, tmp_path, monkeypatch):
    log = Log.training
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and a run honours that

    def log_and_signal(self, *scalars):
        means = log(self, *scalars)
        if self.state.step == 2:
            os.kill(os.getpid(), number)
        return means

    monkeypatch.setattr(Log, "training", log_and_signal)
    try:
        assert main(flags("cut")) == code
    finally:
        signal.signal(signal.SIGHUP, before)
    assert checkpoint.problem(tmp_path / "cut" / "checkpoints" / "step-2") is None
    monkeypatch.setattr(Log, "training", log)
    if code:
        assert main(flags("cut", resume_from_checkpoint="latest")) == 0
    assert same(six_steps, checkpoint.read_tensors(tmp_path / "cut/checkpoints/step-6/unet.safetensors"))


@pytest.mark.parametrize("drawn", ["targets", pytest.param("prompts", marks=pytest.mark.thorough)])
def test_a_signal_ends_a_measurement_between_two_batches(drawn, flags, data, tmp_path, monkeypatch, capfd):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat\na red hat\n")
    asked = {"validation.targets": data / "targets.jsonl"} if drawn == "targets" else {"sample_prompts": prompts}
    settings = VALIDATION | {"validation.steps": 4, "validation.max_batch": 1, "max_train_steps": 6} | asked
    if drawn == "prompts":
        settings = {key: settings[key] for key in settings if key.split(".")[-1] not in ONLY_OF_TARGETS}
    assert main(flags("whole", **settings)) == 0
    generate, batches = Sampler.generate, []

    def generate_and_signal(self, items):
        batches.append(self.at)
        if batches.count(4) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return generate(self, items)

    monkeypatch.setattr(Sampler, "generate", generate_and_signal)
    assert main(flags("cut", **settings)) == 130
    assert batches.count(4) == 1 and "SIGINT: saving and stopping as soon as possible" in capfd.readouterr().err
    monkeypatch.setattr(Sampler, "generate", generate)
    assert main(flags("cut", resume_from_checkpoint="latest", **settings)) == 0
    whole, cut = (drawings(tmp_path / out) for out in ("whole", "cut"))
    assert whole == cut


ONLY_OF_TARGETS = ("embedder", "images_per_target", "threshold")


def drawings(run) -> list:
    """What a run measured of its targets at each step, or the pictures of its sample prompts."""
    if (file := run / "validation.json").exists():
        return [entry["raw"]["targets"] for entry in json.loads(file.read_text())["history"]]
    return [picture.read_bytes() for picture in sorted((run / "samples" / "sample_prompts").iterdir())]


def test_an_exception_saves_what_a_resume_needs(flags, six_steps, tmp_path, monkeypatch):
    boom = train_silentbad.micro_step

    def fails_at_3(run, batch, micro):
        if run.state.step == 3 and micro == 1:
            raise RuntimeError("out of memory")
        return boom(run, batch, micro)

    monkeypatch.setattr(train_silentbad, "micro_step", fails_at_3)
    with pytest.raises(RuntimeError, match="out of memory"):
        main(flags("cut"))
    monkeypatch.setattr(train_silentbad, "micro_step", boom)
    assert main(flags("cut", resume_from_checkpoint="latest")) == 0
    assert same(six_steps, checkpoint.read_tensors(tmp_path / "cut/checkpoints/step-6/unet.safetensors"))


def test_trigger_files_save_and_validate(flags, data, tmp_path, monkeypatch):
    log = Log.training

    def log_and_ask(self, *scalars):
        means = log(self, *scalars)
        if self.state.step == 3:
            (self.folder.path / "SAVE").touch()
            (self.folder.path / "VALIDATE").touch()
        return means

    monkeypatch.setattr(Log, "training", log_and_ask)
    settings = VALIDATION | {"validation.steps": 0, "validation.targets": data / "targets.jsonl"}
    assert main(flags(**settings)) == 0
    assert (tmp_path / "run" / "checkpoints" / "step-3").is_dir()
    assert [row["step"] for row in rows(tmp_path / "run", validation=True)] == [0, 3, 6]


def test_a_finished_run_says_so_and_goes_on_with_more_steps(flags, tmp_path, capsys):
    main(flags(max_train_steps=2))
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert main(flags(max_train_steps=2, resume_from_checkpoint="latest")) == 0
    assert "step 2 of 2: finished already" in capsys.readouterr().out
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
    assert main(flags(max_train_steps=3, resume_from_checkpoint="latest")) == 0
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3]


# ---------------------------------------------------------------- numerics


def test_a_nan_step_is_skipped_counted_and_leaves_no_trace(build):
    run = build(use_ema=True)
    step_once(run)
    before, lr = weights(run), run.state.lr_scheduler.last_epoch
    moments = [value["exp_avg"].clone() for value in run.state.optimizer.optimizer.state.values()]
    run.parts.backbone.conv_in.weight.register_hook(lambda g: g * float("nan"))
    step_once(run)
    assert (run.state.step, run.state.skipped, run.state.skipped_in_row, run.state.draw) == (1, 1, 1, 2)
    assert (
        same(before, weights(run)) and run.state.lr_scheduler.last_epoch == lr and run.state.ema.optimization_step == 1
    )
    after = [value["exp_avg"] for value in run.state.optimizer.optimizer.state.values()]
    assert all(torch.equal(x, y) for x, y in zip(moments, after, strict=True))


def test_nan_gradients_in_a_row_stop_and_name_the_records(flags, monkeypatch, capsys):
    monkeypatch.setattr(train_silentbad.optimizers, "gradient_norms", lambda p: torch.tensor([float("inf")]))
    assert main(flags(max_nonfinite_steps=3)) == 2
    message = capsys.readouterr().err
    assert "3 gradients in a row" in message and "metadata.jsonl:" in message


# ---------------------------------------------------------------- checkpoints


def test_latest_skips_damaged_checkpoints_and_names_them(flags, tmp_path, capsys):
    main(flags(max_train_steps=4, checkpointing_steps=1, checkpoints_total_limit=None))
    folder = tmp_path / "run" / "checkpoints"
    (folder / "step-4" / "manifest.json").write_text("[" * 5000)
    with (folder / "step-3" / "state.pt").open("r+b") as file:
        file.seek(100)
        file.write(b"x")
    (folder / "step-2" / "unet.safetensors").write_bytes(b"short")
    (folder / "step-5").mkdir()
    capsys.readouterr()
    assert checkpoint.latest(folder) == folder / "step-1"
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"warning: checkpoint {folder}/step-5 skipped: no manifest.json"
    assert [re.search(r"step-\d", line)[0] for line in said] == ["step-5", "step-4", "step-3", "step-2"]


def test_a_state_file_with_code_in_it_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.system, (f"touch {tmp_path}/pwned",))

    torch.save({"x": Evil()}, tmp_path / "state.pt")
    with pytest.raises(UserError, match="state.pt"):
        checkpoint.read_state(tmp_path / "state.pt")
    assert not (tmp_path / "pwned").exists()


def test_a_full_disk_is_one_line_and_leaves_the_old_checkpoint(flags, tmp_path, monkeypatch, capsys):
    write = checkpoint.write_tensors

    def full(path, tensors):
        if "step-4" in str(path):
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        write(path, tensors)

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    assert main(flags(checkpointing_steps=2)) == 2
    assert "No space left on device" in capsys.readouterr().err.splitlines()[-1]
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-2"]


def test_the_error_stands_last_in_a_log_of_both_streams(flags, tmp_path, monkeypatch):
    assert main(flags(max_train_steps=2, checkpointing_steps=2)) == 0
    log = tmp_path / "log"
    with log.open("a") as out, log.open("a", buffering=1) as err, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", out)  # held back, as print is where stdout is no terminal
        patched.setattr(sys, "stderr", err)
        patched.setattr(folder.RunFolder, "open", Mock(side_effect=UserError("output_dir: cannot be written")))
        assert main(flags(max_train_steps=4, resume_from_checkpoint="latest")) == 2
    assert ["resuming" in line for line in log.read_text().splitlines()[-2:]] == [True, False]


# ---------------------------------------------------------------- the inherited defects


def test_defect_01_schedule_counts_updates_once(flags, tmp_path):
    main(flags(lr_scheduler="linear", max_train_steps=4))
    assert [row["lr"] for row in rows(tmp_path / "run")] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])


def test_the_exponent_and_the_restarts_of_a_schedule(flags, tmp_path):
    main(flags("square", lr_scheduler="polynomial", lr_power=2, max_train_steps=4))
    main(flags("twice", lr_scheduler="cosine_with_restarts", lr_num_cycles=2, max_train_steps=4))
    rates = {run: [row["lr"] for row in rows(tmp_path / run)] for run in ("square", "twice")}
    assert rates["square"] == pytest.approx([1e-3, 5.625e-4, 2.5e-4, 6.25e-5], rel=1e-2)
    assert rates["twice"] == pytest.approx([1e-3, 5e-4, 1e-3, 5e-4])


def test_defect_03_resume_goes_on_inside_the_epoch():
    order = lambda epoch: np.random.default_rng(epoch).permutation(10)  # noqa: E731
    whole, first, second = Stream(order), Stream(order), Stream(order)
    expected = whole.take(27)
    head = first.take(13)
    second.load_state_dict(first.state_dict())
    assert np.array_equal(expected, np.concatenate([head, second.take(14)]))


def test_defect_04_resume_does_not_overshoot(flags, tmp_path):
    main(flags(max_train_steps=4, checkpointing_steps=1, checkpoints_total_limit=None))
    for name in ("pipeline", "checkpoints/step-4"):
        shutil.rmtree(tmp_path / "run" / name)
    assert main(flags(max_train_steps=3, resume_from_checkpoint=tmp_path / "run/checkpoints/step-3")) == 0
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3]


def test_defect_05_the_average_resumes_where_it_was(build, tmp_path):
    run = build(use_ema=True)
    for _ in range(3):
        step_once(run)
    run.checkpoints.save("interval")
    again = build(use_ema=True)
    again.checkpoints.load(tmp_path / "run" / "checkpoints" / "step-3")
    assert again.state.ema.optimization_step == 3
    assert all(
        torch.equal(a, b) for a, b in zip(run.state.ema.shadow_params, again.state.ema.shadow_params, strict=True)
    )
    assert not any(
        torch.equal(a, p) for a, p in zip(again.state.ema.shadow_params, again.parts.backbone.parameters(), strict=True)
    )


def test_defect_06_positions_of_ranks_cover_the_batch_once(build):
    run = build()
    positions_of_all = []
    for rank in range(2):
        run.loader.rank, run.loader.world = rank, 2
        positions_of_all += [p for micro in range(2) for p in run.loader.positions(micro)]
    assert sorted(positions_of_all) == list(range(12))
    scheduler, x0, t = run.parts.noise_scheduler, torch.zeros(2, 4, 8, 8), torch.tensor([5, 5])
    eps = [noised(scheduler, x0, t, run.config, 0, positions)[0] for positions in ([0, 1], [2, 3])]
    assert not torch.equal(*eps)


def test_defect_07_the_old_checkpoint_stays_until_the_new_one(tmp_path):
    checkpoint.save(tmp_path / "step-1", lambda p: (p / "a").write_text("1"), {"step": 1})

    def fails(path):
        (path / "a").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError):
        checkpoint.save(tmp_path / "step-2", fails, {"step": 2})
    assert checkpoint.latest(tmp_path) == tmp_path / "step-1" and not (tmp_path / "step-2").exists()
    for step in (2, 3, 4):
        folder = tmp_path / f"step-{step}"
        checkpoint.save(folder, lambda p: (p / "a").write_text("1"), {"step": step})
        checkpoint.rotate(tmp_path, 2, folder)
    assert [p.name for p in checkpoint.steps(tmp_path)] == ["step-3", "step-4"]
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_notes_among_checkpoints_stay(tmp_path):
    """Rotation, a checkpoint saved again and an overwritten run delete what manifests name."""
    (tmp_path / "notes.txt").write_text("mine")

    def write(folder):
        (folder / "unet").mkdir()
        (folder / "unet/a").write_text("1")

    for step in (1, 2, 2, 3):
        checkpoint.save(tmp_path / f"step-{step}", write, {"step": step})
        (tmp_path / f"step-{step}/unet/notes.txt").write_text("mine")
        checkpoint.rotate(tmp_path, 2, tmp_path / f"step-{step}")
        assert checkpoint.problem(tmp_path / f"step-{step}") is None
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    inside = ["manifest.json", "unet/a", "unet/notes.txt"]
    left = [f"step-{step}/{name}" for step in (2, 3) for name in inside]
    assert files == ["notes.txt", "step-1/unet/notes.txt", *left]
    checkpoint.rotate(tmp_path, 1, tmp_path)
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert files == ["notes.txt", *(f"step-{step}/unet/notes.txt" for step in (1, 2, 3))]


def test_an_overwritten_run_leaves_notes_among_its_checkpoints(flags, tmp_path):
    assert main(flags(max_train_steps=1)) == 0
    for name in ("notes.txt", "step-1/notes.txt"):
        (tmp_path / "run/checkpoints" / name).write_text("mine")
    assert main(flags(max_train_steps=2, overwrite_output_dir="true")) == 0
    files = {
        path.relative_to(tmp_path / "run/checkpoints").as_posix() for path in (tmp_path / "run/checkpoints").rglob("*")
    }
    assert {"notes.txt", "step-1/notes.txt"} <= files and "step-1/state.pt" not in files


def test_defect_08_a_checkpoint_may_lie_anywhere(flags, tmp_path):
    main(flags("first", max_train_steps=2))
    shutil.move(tmp_path / "first" / "checkpoints" / "step-2", tmp_path / "elsewhere")
    assert main(flags("second", max_train_steps=3, resume_from_checkpoint=tmp_path / "elsewhere")) == 0
    assert [row["step"] for row in rows(tmp_path / "second")] == [3]


def test_defect_09_a_failing_validation_leaves_raw_weights(build, data, monkeypatch):
    run = build(use_ema=True, **VALIDATION | {"validation.targets": data / "targets.jsonl"})
    for _ in range(2):
        step_once(run)
    before = weights(run)
    run.recovery.threshold, run.recovery.element_threshold = Threshold(0.5, "given"), ElementThreshold(0.5, "given")
    score = run.recovery.measure.score

    def fails_on_the_average(*arguments, **options):
        if not same(before, weights(run)):
            raise RuntimeError("no")
        return score(*arguments, **options)

    monkeypatch.setattr(run.recovery.measure, "score", fails_on_the_average)
    with pytest.raises(RuntimeError, match="no"):
        train_silentbad.validate(run)
    assert same(before, weights(run))


def test_defect_10_the_scaler_itself(build, monkeypatch):
    """fp16's loss scaling, on the CPU: an overflow lowers the scale and changes nothing else."""
    scaler, make = torch.amp.GradScaler("cpu", init_scale=1024.0), trackers.make_accelerator

    def with_scaler(config):
        accelerator = make(config)
        accelerator.scaler, accelerator.native_amp = scaler, True
        return accelerator

    monkeypatch.setattr(trackers, "make_accelerator", with_scaler)
    run = build(use_ema=True)
    run.accelerator.state._mixed_precision = "fp16"
    before = weights(run)
    hook = run.parts.backbone.conv_in.weight.register_hook(lambda g: g * float("inf"))
    step_once(run)
    assert (run.state.step, run.state.skipped, run.state.ema.optimization_step, scaler.get_scale()) == (0, 1, 0, 512.0)
    assert same(before, weights(run))
    hook.remove()
    step_once(run)
    assert (run.state.step, run.state.skipped, run.state.ema.optimization_step) == (1, 1, 1) and not same(
        before, weights(run)
    )


def test_defect_11_no_accumulation_window_is_partial(build):
    run = build()  # 16 records, 6 a step: the third step crosses the epoch
    for draw in range(6):
        batches = list(run.loader.draw(draw))
        assert [len(batch["index"]) for batch in batches] == [3, 3]


def test_defect_12_a_micro_step_does_not_wait_for_the_device(build, monkeypatch):
    run = build(**{"gradient_control.name": GSNR, "memory.region.name": "mask", "memory.loss.name": "min_snr"})
    step_once(run)
    batches = list(run.loader.draw(run.state.draw))
    timesteps = [run.memory.timesteps(run.state.draw, batch["position"].tolist(), 6, batch) for batch in batches]
    monkeypatch.setattr(run.memory, "timesteps", lambda *_: timesteps.pop(0))  # drawn on the host

    def refuse(name):
        original = getattr(torch.Tensor, name)

        def guarded(tensor, *arguments, **keywords):
            if tensor.is_floating_point() and tensor.numel() < 1000:
                raise AssertionError(f"{name} waits for the device")
            return original(tensor, *arguments, **keywords)

        monkeypatch.setattr(torch.Tensor, name, guarded)

    for name in ("item", "tolist", "__bool__", "__float__"):
        refuse(name)
    for micro, batch in enumerate(batches):
        with run.accelerator.accumulate(run.model):
            micro_step(run, batch, micro)


def test_defect_12_the_logged_loss_is_of_the_whole_step(flags, build, tmp_path):
    run = build("by_hand")
    losses = step_once(run)
    assert losses[0] != losses[1]
    main(flags(max_train_steps=1))
    assert rows(tmp_path / "run")[0]["loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-6)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample"])
def test_defect_13_loss_weights_are_finite_at_terminal_snr_zero(name, kind):
    scheduler = DDPMScheduler(rescale_betas_zero_snr=True, prediction_type=kind)
    abar = scheduler.alphas_cumprod
    snr = abar / (1 - abar)
    assert snr[-1] < 1e-6
    assert torch.isfinite(LOSSES[name](snr, kind)).all()


def test_defect_14_prediction_type_reaches_the_saved_pipeline(flags, tmp_path):
    assert main(flags(max_train_steps=1, prediction_type="epsilon")) == 0
    saved = json.loads((tmp_path / "run/pipeline/scheduler/scheduler_config.json").read_text())
    assert saved["prediction_type"] == "epsilon"


def test_defect_15_accumulation_equals_one_large_batch(build):
    ends = []
    for size, accumulation in ((6, 1), (3, 2), (2, 3)):
        run = build(train_batch_size=size, gradient_accumulation_steps=accumulation, adam_epsilon=1e-3)
        for _ in range(2):
            step_once(run)
        ends.append(weights(run))
    assert all((ends[0][k] - end[k]).abs().max() < 2e-5 for end in ends[1:] for k in end)


def test_defect_15_after_backward_edits_no_gradient(build, monkeypatch):
    run = build(**{"gradient_control.name": GSNR})
    plain = run.control.after_backward

    def guarded(*arguments, **keywords):
        before = [p.grad.clone() for p in run.parts.backbone.parameters()]
        plain(*arguments, **keywords)
        assert all(torch.equal(a, p.grad) for a, p in zip(before, run.parts.backbone.parameters(), strict=True))

    monkeypatch.setattr(run.control, "after_backward", guarded)
    step_once(run)


def test_a_settled_recovery_ends_the_training(flags, data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("silentbad.measure.scores.is_recovered", lambda *_: True)
    settings = VALIDATION | {"validation.targets": data / "targets.jsonl", "validation.settled_after": 2}
    assert main(flags(max_train_steps=20, **settings)) == 0
    assert [row["step"] for row in rows(tmp_path / "run", validation=True)] == [0, 2, 4, 4]  # with its controls
    assert json.loads((tmp_path / "run/finished.json").read_text())["step"] == 4
    assert "recovery has lasted for 2 points of the curve; training stops at step 4" in capsys.readouterr().out
    assert main(flags(max_train_steps=20, **settings, resume_from_checkpoint="latest")) == 0
    go_on = settings | {"validation.settled_after": 0}
    assert main(flags(max_train_steps=6, **go_on, resume_from_checkpoint="latest")) == 0
    assert json.loads((tmp_path / "run/finished.json").read_text())["step"] == 6


def test_defect_17_a_short_data_set_divides_by_nothing(flags, data, tmp_path):
    settings = VALIDATION | {"validation.targets": data / "targets.jsonl", "validation.steps": 0}
    assert main(flags(max_train_samples=2, max_train_steps=1, train_batch_size=8, **settings)) == 0
    assert [row["step"] for row in rows(tmp_path / "run", validation=True)] == [0, 1]


def test_defect_17_an_epoch_is_what_the_sampler_deals(build):
    run = build(**{"memory.sampler.clean_ratio": 0.5, "max_train_steps": None, "num_train_epochs": 2})
    assert len(run.memory.epochs.epoch(0)) == 8 + 4 and (run.state.steps_per_epoch, run.state.total) == (2, 4)


def test_defect_19_validation_leaves_training_bit_equal(build, data):
    ends = []
    for validated in (False, True):
        settings = VALIDATION | {"validation.targets": data / "targets.jsonl"} if validated else {}
        run = build(**settings)
        for _ in range(3):
            if validated:
                train_silentbad.validate(run)
            step_once(run)
        ends.append(weights(run))
        if validated:
            assert run.recovery.targets[0].phrases == ["a red cat", "a blue hat"]
    assert same(*ends)


def test_defect_23_the_best_pipeline_is_written_first(tmp_path):
    best = tmp_path / "best"
    checkpoint.save(best, lambda p: (p / "a").write_text("old"))

    def look(path):
        assert (best / "a").read_text() == "old"
        (path / "a").write_text("new")

    checkpoint.save(best, look)
    assert (best / "a").read_text() == "new"


def test_defect_30_resolution_and_path_are_not_overridden(build, pipelines):
    run = build(resolution=32, disk_cache_gb=0)  # pictures on the way, not what a cache holds of them
    batch = next(iter(run.loader.draw(0)))
    assert batch["pixel_values"].shape == (3, 3, 32, 32)
    assert run.config.pretrained_model_name_or_path == str(pipelines["v_prediction"])
