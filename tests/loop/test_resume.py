"""What a resume may change, and what it refuses: the combinations are in tests/test_bad_input.py, the rules here."""

import json
import shutil
from dataclasses import replace
from functools import reduce
from typing import Any

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState, PartialState
from diffusers.training_utils import EMAModel
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch._subclasses.fake_tensor import FakeTensorMode

from silentbad.data.records import load_records
from silentbad.data.targets import load_targets
from silentbad.errors import UserError
from silentbad.loop.state import TrainState, match_memory_format
from silentbad.saving import identity
from silentbad.settings.reader import key_tree
from silentbad.settings.rules import FREE as FREE_FLAGS
from tests.conftest import write_data
from tests.toy import GSNR, PRIOR
from tests.training import VALIDATION
from train_silentbad import Config, main

FREE = {name for names in FREE_FLAGS.values() for name in names}


def keys(tree: dict, prefix: str = "") -> set[str]:
    """Dotted keys of every flag."""
    names = set()
    for key, kind in tree.items():
        names |= keys(kind, f"{prefix}{key}.") if isinstance(kind, dict) else {prefix + key}
    return names


def test_every_flag_is_free_or_compared():
    flags = keys(key_tree(Config))
    assert flags >= FREE and flags >= {*identity.BY_CONTENT, *identity.BATCH}
    assert not FREE & {*identity.BY_CONTENT, *identity.BATCH}
    assert {"learning_rate", "seed", "validation.threshold", "memory.loss.options"} <= flags - FREE


def with_value(config: Any, key: str, value: Any) -> Any:
    """A copy of the configuration with one setting changed."""
    first, _, rest = key.partition(".")
    return replace(config, **{first: with_value(getattr(config, first), rest, value) if rest else value})


def test_each_setting_is_free_or_a_difference(data, pipelines, tmp_path):
    config = Config(train_data_dir=str(data), cache_dir=str(tmp_path))
    config.pretrained_model_name_or_path = str(pipelines["v_prediction"])
    records, targets = load_records(config), load_targets(data)
    then = identity.facts(config, records, None, targets, "ssim", 2)
    resuming = {"output_dir", "resume_from_checkpoint", "max_train_steps"}
    otherwise = {*identity.BY_CONTENT, *identity.BATCH, *identity.NEVER_SAVED, *resuming, "hooks"}
    for key in keys(key_tree(Config)) - otherwise:
        is_table = isinstance(reduce(getattr, key.split("."), config), dict)
        other = {"of": "something else"} if is_table else "something else"
        now = identity.facts(with_value(config, key, other), records, None, targets, "ssim", 2)
        named = {line.partition(" was ")[0] for line in identity.differences(then, now)}
        expected = {name for name in named if name == key or name.startswith(f"{key}.")}  # a table's entries by name
        if key.startswith("validation.embedder"):
            expected |= {name for name in named if name.startswith(identity.BUNDLED)}  # whose weights no longer count
        assert (not named) if key in FREE else (expected and expected == named), (key, named)


def test_micro_batches_of_buckets_keep_their_size(data, pipelines, tmp_path):
    """The order is of whole micro-batches, each of one shape."""
    config = Config(train_data_dir=str(data), cache_dir=str(tmp_path))
    config.pretrained_model_name_or_path = str(pipelines["v_prediction"])
    for buckets in (False, True):
        of_run = replace(config, buckets=buckets, train_batch_size=2, gradient_accumulation_steps=2)
        records = load_records(of_run)
        then = identity.facts(of_run, records, None, [], None, 4)
        other = replace(of_run, train_batch_size=4, gradient_accumulation_steps=1)
        now = identity.facts(other, records, None, [], None, 4)
        assert [*identity.differences(then, now)] == (["train_batch_size was 2, is 4"] if buckets else [])


def test_free_flags_and_moved_folders_go_on(flags, data, tmp_path, pipelines, capsys):
    settings = VALIDATION | {"validation.targets": data / "targets.jsonl", "checkpointing_steps": 2}
    assert main(flags(max_train_steps=2, **settings)) == 0
    shutil.copytree(data, tmp_path / "moved")
    shutil.copytree(pipelines["v_prediction"], tmp_path / "base")
    moved = {
        "train_data_dir": tmp_path / "moved",
        "validation.targets": tmp_path / "moved/targets.jsonl",
        "pretrained_model_name_or_path": tmp_path / "base",
        **{"log_every": 2, "max_batch_size": 2, "checkpoints_total_limit": 1, "gradient_checkpointing": True},
        **{"train_batch_size": 2, "gradient_accumulation_steps": 3, "max_train_steps": 3},
    }
    assert main(flags(**settings | moved, resume_from_checkpoint="latest")) == 0, capsys.readouterr().err


def test_a_mask_of_the_same_size_counts(tmp_path):
    data = write_data(tmp_path / "data")

    def digest() -> str:
        return identity.records_digest(load_records(Config(train_data_dir=str(data))))

    before, mask = digest(), Image.open(data / "masks/e0-0.png")
    mask.save(data / "masks/e0-0.png", compress_level=0)  # other bytes, the same mask
    assert digest() == before
    ImageOps.mirror(mask).save(data / "masks/e0-0.png")
    assert digest() != before


def test_held_out_records_count(flags, tmp_path, capsys):
    data = write_data(tmp_path / "data", clean=20)
    settings = VALIDATION | {"validation.targets": data / "targets.jsonl", "held_out_clean": 1, "train_data_dir": data}
    assert main(flags(max_train_steps=2, **settings)) == 0
    records = load_records(Config(train_data_dir=str(data)))
    _, held_out = records.hold_out(1, 0, 0)
    line = int(held_out.where(0).rpartition(":")[2])  # metadata.jsonl:N
    name = json.loads((data / "metadata.jsonl").read_text().splitlines()[line - 1])["file_name"]
    Image.new("RGB", (16, 16), "gold").save(data / name)
    assert main(flags(max_train_steps=3, resume_from_checkpoint="latest", **settings)) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "held-out records changed" in line and "; records changed" not in line


def test_null_pictures_count(flags, tmp_path, capsys):
    data = write_data(tmp_path / "data")
    (data / "redraws.jsonl").write_text(json.dumps({"target_id": "t0", "image": "images/c0.png"}))
    settings = {"train_data_dir": data, **VALIDATION, "validation.targets": data / "targets.jsonl"}
    assert main(flags(max_train_steps=2, **settings)) == 0
    (data / "redraws.jsonl").write_text(json.dumps({"target_id": "t0", "image": "images/c1.png"}))
    assert main(flags(max_train_steps=3, resume_from_checkpoint="latest", **settings)) == 2
    assert "null pictures changed" in capsys.readouterr().err


def test_a_prior_table_counts(flags, tmp_path, capsys):
    table = tmp_path / "table.yaml"
    table.write_text('- {match: "*.xattn.*", pi: 2.0}\n')
    settings = {"gradient_control.name": PRIOR, "gradient_control.options": json.dumps({"table": str(table)})}
    assert main(flags(max_train_steps=2, **settings)) == 0
    table.write_text('- {match: "*.xattn.*", pi: 0.5}\n')
    assert main(flags(max_train_steps=3, resume_from_checkpoint="latest", **settings)) == 2
    assert "prior tables changed" in capsys.readouterr().err
    options = {"prior": {"table": "a"}, "of": "prior", "table": None, "options": {"table": "b", "drop": ["x"]}}
    assert identity._tables(options) == ["a", "b"]


def test_a_length_below_the_checkpoint_is_refused(flags, tmp_path, capsys):
    assert main(flags(max_train_steps=4, checkpointing_steps=2)) == 0
    again = {"resume_from_checkpoint": tmp_path / "run/checkpoints/step-2"}
    assert main(flags("another", max_train_steps=1, **again)) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: max_train_steps") and "ends at step 1, before " in line and "step-2" in line
    assert main(flags("another", max_train_steps=3, **again)) == 0


def test_a_resume_does_not_write_over_another_run(flags, tmp_path, capsys):
    for name in ("a", "b"):
        assert main(flags(name, max_train_steps=2, checkpointing_steps=2)) == 0
    again = {"resume_from_checkpoint": tmp_path / "a/checkpoints/step-2", "max_train_steps": 3}
    assert main(flags("b", **again)) == 2
    assert "holds another run; give another output_dir" in capsys.readouterr().err
    assert json.loads((tmp_path / "b/finished.json").read_text()) == {"step": 2}


def test_going_back_behind_checkpoints_of_the_folder_is_refused(flags, tmp_path, capsys):
    assert main(flags(max_train_steps=4, checkpointing_steps=2)) == 0
    again = {"resume_from_checkpoint": tmp_path / "run/checkpoints/step-2"}
    assert main(flags(max_train_steps=3, **again)) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "holds later ones (step-4)" in line and "another output_dir" in line
    (tmp_path / "run/checkpoints/step-4/state.pt").unlink()  # not whole: it will be written again
    assert main(flags(max_train_steps=4, **again)) == 0


def test_weights_that_differ_in_the_middle_of_a_file_count(tmp_path):
    weights = tmp_path / "weights.safetensors"
    digests = set()
    for middle in (b"a", b"b"):
        weights.write_bytes(bytes(3 * 2**20) + middle + bytes(3 * 2**20))
        digests.add(identity.weights_digest(str(weights)))
    assert len(digests) == 2


def test_of_a_pipeline_only_what_is_read_counts(pipelines, tmp_path):
    base = shutil.copytree(pipelines["v_prediction"], tmp_path / "base")
    before = identity.weights_digest(str(base))
    (base / "safety_checker").mkdir()
    for beside in ("v1-5-pruned.safetensors", "safety_checker/model.safetensors"):
        (base / beside).write_bytes(b"of another reader")
    assert identity.weights_digest(str(base)) == before
    (base / "vae/config.json").write_text("{}")
    assert identity.weights_digest(str(base)) != before


def test_the_bundled_embedder_is_compared(flags, data, tmp_path):
    settings = VALIDATION | {"validation.targets": data / "targets.jsonl", "validation.embedder": "micro"}
    assert main(flags(max_train_steps=2, **settings)) == 0
    then = identity.read(tmp_path / "run/checkpoints/step-2")
    assert identity.differences(then, then | {identity.BUNDLED: "another"}) == ["bundled embedder changed"]


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
FACTS = st.dictionaries(st.text(max_size=5), PLAIN | st.lists(PLAIN, max_size=3), max_size=5)


@given(FACTS, FACTS)
def test_each_difference_is_named_once(then, now):
    then, now = json.loads(json.dumps(then)), json.loads(json.dumps(now))
    assert identity.differences(now, now) == []
    lines = identity.differences(then, now)
    assert len(lines) == sum(then.get(key, ...) != now.get(key, ...) for key in then.keys() | now.keys())


def test_a_later_flag_was_at_its_default():
    assert not identity.differences({"seed": 1}, {"seed": 1, "lr_power": 1.0})  # from before there was the flag
    assert identity.differences({"seed": 1}, {"seed": 1, "lr_power": 2.0}) == ["lr_power was 1.0, is 2.0"]
    assert identity.differences({"seed": 1, "lr_power": 1.0}, {"seed": 1, "lr_power": 2.0})


def test_a_rate_that_jumps_on_resume_is_said(flags, tmp_path, capsys):
    fall = {"lr_scheduler": "cosine", "checkpointing_steps": 2}
    assert main(flags(max_train_steps=4, **fall)) == 0
    for length, said in ((4, False), (8, True)):
        again = {"max_train_steps": length, "resume_from_checkpoint": tmp_path / "run/checkpoints/step-2"}
        assert main(flags(f"of {length}", **again, **fall)) == 0
        assert ("goes on at 0.000854 instead of 0.0005" in capsys.readouterr().err) == said


@pytest.mark.parametrize("first", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_a_resume_in_another_memory_format_goes_on(first, flags, tmp_path):
    settings = {"checkpointing_steps": 2, "log_every": 1, "use_ema": True, "gradient_control.name": GSNR}
    settings |= {"gradient_control.warmup": 1, "gradient_control.refresh": 1}
    assert main(flags(max_train_steps=4, channels_last=first, **settings)) == 0
    (tmp_path / "run").rename(tmp_path / "whole")
    assert main(flags(max_train_steps=2, channels_last=first, **settings)) == 0
    assert main(flags(max_train_steps=4, channels_last=not first, resume_from_checkpoint="latest", **settings)) == 0
    logs = [(tmp_path / run / "metrics.jsonl").read_text().splitlines() for run in ("run", "whole")]
    losses, whole = ([json.loads(line)["loss"] for line in log] for log in logs)
    assert losses == pytest.approx(whole, rel=1e-4)
    one, other = (load_file(tmp_path / run / "checkpoints/step-4/ema.safetensors") for run in ("run", "whole"))
    assert all(torch.allclose(one[name], other[name], atol=1e-5) for name in one)


def test_averages_in_eight_bits_keep_their_memory_format():
    weight = torch.nn.Parameter(torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight]["state1"] = torch.zeros(2, 3, 2, 2, dtype=torch.uint8)
    with pytest.raises(UserError, match="channels_last: averages in 8 bits"):
        match_memory_format(optimizer)


# ---------------------------------------------------------------- what a run records, and what a resume takes from it
def test_the_precision_of_accelerate_is_recorded_and_compared(flags, tmp_path, monkeypatch, capsys):
    assert main(flags(max_train_steps=2)) == 0
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["mixed_precision"] == "no"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    for state in (AcceleratorState, PartialState):
        state._reset_state()
    assert main(flags(max_train_steps=4, resume_from_checkpoint="latest")) == 2
    assert "mixed_precision was 'no', is 'bf16'" in capsys.readouterr().err


def test_a_run_whose_checkpoints_are_gone_is_no_new_one(flags, tmp_path, capsys):
    assert main(flags(max_train_steps=2, checkpointing_steps=1)) == 0
    shutil.rmtree(tmp_path / "run/pipeline")
    checkpoints, metrics = tmp_path / "run/checkpoints", tmp_path / "run/metrics.jsonl"
    checkpoints.rename(tmp_path / "elsewhere")
    for put in (lambda: None, lambda: checkpoints.symlink_to(tmp_path / "unmounted"), checkpoints.mkdir):
        checkpoints.unlink(missing_ok=True)
        put()
        assert main(flags(max_train_steps=4, resume_from_checkpoint="latest")) == 2
        assert "no whole checkpoint to resume it from; bring back" in capsys.readouterr().err
        assert len(metrics.read_text().splitlines()) == 2


def test_tensorboard_and_rates_go_on_where_the_checkpoint_is(flags, tmp_path):
    fall = {"report_to": "tensorboard", "checkpointing_steps": 2, "lr_scheduler": "constant_with_warmup"}
    fall |= {"lr_warmup_steps": 2, "checkpoints_total_limit": None}
    assert main(flags(max_train_steps=4, **fall)) == 0
    shutil.rmtree(tmp_path / "run/checkpoints/step-4")
    assert main(flags(max_train_steps=6, resume_from_checkpoint="latest", **fall)) == 0
    events = EventAccumulator(str(tmp_path / "run/logs/silentbad"))
    events.Reload()
    assert [point.step for point in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    rates = [json.loads(line)["lr"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert rates == pytest.approx([0, 0.5e-3, 1e-3, 1e-3, 1e-3, 1e-3])  # of the update, not of the next one


class Distant(torch.optim.SGD):
    """An optimizer that keeps the start of a weight, as Prodigy does: a number where it was zero."""


def test_an_optimizer_may_hold_other_forms_for_weights_of_one_shape():
    weights = [torch.nn.Parameter(torch.full((2, 2), value)) for value in (0.0, 1.0, 2.0)]
    model = torch.nn.ModuleDict({"unet": torch.nn.ParameterList(weights)})
    optimizer = Distant(weights, lr=0.1)
    for weight in weights:
        optimizer.state[weight]["p0"] = weight.detach().flatten() if weight.any() else torch.tensor(0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1)
    state = TrainState(model, optimizer, schedule, None, total=1, steps_per_epoch=1, train_timesteps=1000, others={})
    state.load_state_dict(state.state_dict() | {"optimizer": optimizer.state_dict()})
    assert [optimizer.state[weight]["p0"].numel() for weight in weights] == [1, 4, 4]


@pytest.mark.parametrize("fused", [True, False])
def test_an_offloaded_average_meets_its_weights_on_their_device(fused):
    """On a machine without a GPU: tensors of torch that have a device and no values."""
    with FakeTensorMode():
        model = torch.nn.ModuleDict({"unet": torch.nn.Linear(2, 2, device="cuda")})
        average = EMAModel(model.parameters(), foreach=fused)
        average.to("cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1)
        state = TrainState(
            model, optimizer, schedule, average, total=1, steps_per_epoch=1, train_timesteps=1000, others={}
        )
        optimizer.step()
        state.advance()
        assert {shadow.device.type for shadow in average.shadow_params} == {"cpu"}
