"""Two gloo processes on the CPU equal one: the same data, the same weights, and neither waits for the other for ever.

What is the same, and how closely: both ranks to the bit; against one process of the same global batch, weights to 2e-5
(a sum of two halves rounds differently from the sum of the whole), data and learning rates exactly.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

import train_silentbad
from silentbad.data import images
from silentbad.model import pipeline
from silentbad.saving import checkpoint
from tests import toy, training
from tests.conftest import write_data
from tests.kill.runner import finish, start

ROOT = Path(__file__).parents[2]
TOLERANCE = 2e-5
VALIDATION = {**training.VALIDATION, "save_best": True}
AND = {
    "memory.phrase_memory.enabled": True,
    "memory.phrase_memory.share": 0.5,
    "memory.distillation.name": toy.AND,
    "memory.distillation.options.every": 1,
    "memory.distillation.options.after": -10.0,
    "memory.distillation.options.weight": 1.0,
    "memory.distillation.options.refresh": 2,
}
SHORT = {"max_train_steps": 3, "validation.targets": "null"}
STATEFUL = {
    "gradient_control.name": toy.GSNR,
    "gradient_control.warmup": 1,
    "gradient_control.refresh": 1,
    "memory.timesteps.name": toy.CURRICULUM,
    "memory.phrase_memory.enabled": True,
    "memory.sampler.name": "weakest_first",
    "use_ema": True,
    "lr_scheduler": "linear",
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, pipelines):
    root = tmp_path_factory.mktemp("two")
    data = write_data(root / "data")
    return {
        "pretrained_model_name_or_path": pipelines["v_prediction"],
        "train_data_dir": data,
        "report_to": "none",
        "cache_dir": root / "arrow",
        "validation.targets": data / "targets.jsonl",
        "train_batch_size": 2,
        "max_train_steps": 4,
        "log_every": 1,
        "checkpointing_steps": 2,
        "learning_rate": 1e-3,
        "adam_epsilon": 1e-3,
    }


def output_dir(argv: list[str]) -> Path:
    return Path(next(word for word in argv if word.startswith("--output_dir=")).partition("=")[2])


def watch(argv: list[str]) -> None:
    """Keep what a rank drew, how many weights it holds and the last ones in seen-RANK.pt, and tell when it trains."""
    import train_silentbad

    out = output_dir(argv)
    rank, drawn = os.environ.get("RANK", "0"), []
    step, done = train_silentbad.micro_step, train_silentbad.finish

    def micro_step(run, batch, micro):
        where = zip(batch["position"].tolist(), batch["index"].tolist(), batch["text"], strict=True)
        drawn.extend((run.state.draw, *entry) for entry in where)
        if run.state.step >= 1:
            (out.parent / f"{out.name}-trains-{rank}").touch()
        return step(run, batch, micro)

    def finish(run):
        done(run)
        weights = pipeline.gathered_parts(run.parts).backbone.state_dict()
        parameters = sum(getattr(p, "_local_tensor", p).numel() for p in run.parts.backbone.parameters())
        torch.save({"weights": weights, "own": parameters, "drawn": drawn}, out.parent / f"{out.name}-seen-{rank}.pt")

    train_silentbad.micro_step, train_silentbad.finish = micro_step, finish


def ranks(
    inputs: dict, out: Path, limits: tuple = (None, None), environment: dict | None = None, prepare=watch, **changes
) -> list:
    """Two processes of one run, as torchrun would set them up, but with nobody to end one when the other fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
        **(environment or {}),
    }
    argv = [f"--{key}={value}" for key, value in {**inputs, "output_dir": out, **changes}.items()]
    return [
        start(
            argv,
            out.parent / f"{out.name}-{rank}.log",
            limits[rank],
            {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            prepare,
        )
        for rank in range(2)
    ]


def one(inputs: dict, out: Path, prepare=watch, **changes) -> int:
    argv = [f"--{key}={value}" for key, value in {**inputs, "output_dir": out, **changes}.items()]
    return finish(start(argv, out.parent / f"{out.name}-0.log", prepare=prepare))


# ---------------------------------------------------------------- what the tests of shards share


def whole(inputs: dict, out: Path, prepare=watch, **changes) -> None:
    """A run by one process with the global batch, to its end."""
    assert one(inputs, out, prepare, **{"train_batch_size": 4, **changes}) == 0, text(out)


def saved(out: Path, step: int = 4) -> tuple[dict, dict]:
    """Weights and the rest of a checkpoint."""
    folder = out / "checkpoints" / f"step-{step}"
    return checkpoint.read_tensors(folder / "unet.safetensors"), checkpoint.read_state(folder / "state.pt")


def same_states(out: Path, other: Path) -> None:
    """Two checkpoints are equal to the bit, states of the optimizer included."""
    (weights, state), (expected, theirs) = saved(out), saved(other)
    assert gap(weights, expected) == 0
    for i, entry in theirs["optimizer"]["state"].items():
        assert all(torch.equal(entry[key], state["optimizer"]["state"][i][key]) for key in entry)


def leave_alone(inputs: dict, out: Path, environment: dict) -> None:
    """A rank cannot gather what another held that is gone; an earlier checkpoint is there to resume from."""
    processes = ranks(inputs, out, environment=environment, **LONG)
    until(lambda: checkpoint.steps(out / "checkpoints"), processes)
    processes[1].kill()
    assert finish(processes[0], 60) != 0
    newest = checkpoint.steps(out / "checkpoints")[-1]
    assert checkpoint.problem(newest) is None
    assert json.loads((newest / "manifest.json").read_text())["reason"] == "interval"


def launch_shipped(configuration: str, inputs: dict, out: Path) -> None:
    """A shipped accelerate configuration on two CPU processes, started as a user would: it shards."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", configuration]
    values = {**inputs, **SHORT, "output_dir": out, "mixed_precision": "no", "max_train_steps": 1}
    command = [*launch, "--num_processes", "2", "--main_process_port", "0", "train_silentbad.py"]
    done = subprocess.run(
        [*command, *(f"--{key}={value}" for key, value in values.items())],
        cwd=ROOT,
        env={**os.environ, "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    facts = json.loads((out / "run.json").read_text())
    assert facts["sharded"] and facts["processes"] == 2


def refused(asked: tuple, environment: dict, inputs: dict, out: Path, monkeypatch, capsys) -> str:
    """The one line that a launch with these variables and flags ends in, before anything is written."""
    for setting in [*(f"{key}={value}" for key, value in environment.items()), "WORLD_SIZE=2", *asked]:
        if not setting.startswith("--"):
            monkeypatch.setenv(*setting.split("="))
    argv = [f"--{key}={value}" for key, value in {**inputs, "output_dir": out}.items()]
    assert train_silentbad.main([*argv, *(word for word in asked if word.startswith("--"))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert not out.exists()
    return line


def text(out: Path) -> str:
    return "\n".join(file.read_text()[-2500:] for file in sorted(out.parent.glob(f"{out.name}-?.log")))


def seen(out: Path, rank: int = 0) -> dict:
    return torch.load(out.parent / f"{out.name}-seen-{rank}.pt", weights_only=True)


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def gap(a: dict, b: dict) -> float:
    return max((a[key].float() - b[key].float()).abs().max().item() for key in a)


CASES = {
    "plain": ({}, {"train_batch_size": 4}),
    "accumulation": ({"gradient_accumulation_steps": 2}, {"train_batch_size": 4, "gradient_accumulation_steps": 2}),
    "everything with state": (STATEFUL, STATEFUL | {"train_batch_size": 4}),
    "AND distillation": (AND, AND | {"gradient_accumulation_steps": 2}),  # it draws once a micro-batch and rank
}


def test_two_processes_draw_the_pictures_that_one_draws(inputs, tmp_path):
    """The base's own pictures: each process draws its share, and both train on all."""
    own = {"prior_preservation.num_images": 19, "prior_preservation.num_inference_steps": 2, **SHORT}
    pictures = {}
    for name in ("two", "one"):
        settings = {**own, "max_train_steps": 1, "cache_dir": tmp_path / f"cache-{name}"}
        out = tmp_path / name
        if name == "two":
            assert [finish(process) for process in ranks(inputs, out, **settings)] == [0, 0], text(out)
        else:
            whole(inputs, out, **settings)
        (folder,) = (tmp_path / f"cache-{name}").glob("silentbad/prior-*")
        pictures[name] = {file.name: Image.open(file).tobytes() for file in folder.glob("*.png")}
    assert pictures["two"] == pictures["one"] and len(pictures["one"]) == 19
    a, b, alone = seen(tmp_path / "two"), seen(tmp_path / "two", 1), seen(tmp_path / "one")
    assert sorted(a["drawn"] + b["drawn"]) == sorted(alone["drawn"])


@pytest.mark.thorough
def test_two_processes_equal_one_in_buckets(inputs, tmp_path):
    """The same micro-batches of one shape, and each process draws its part of the sample prompts."""
    (tmp_path / "look.txt").write_text("a red cat\na blue hat\na field\n")
    settings = {
        "train_data_dir": write_data(tmp_path / "data", sizes=((16, 16), (30, 20), (20, 31))),
        "buckets": True,
        "sample_prompts": tmp_path / "look.txt",
        **{key: VALIDATION[key] for key in ("validation.steps", "validation.num_inference_steps")},
        "validation.targets": "null",
    }
    two = tmp_path / "two"
    assert [finish(process) for process in ranks(inputs, two, **settings)] == [0, 0], text(two)
    assert one(inputs, tmp_path / "one", gradient_accumulation_steps=2, **settings) == 0, text(tmp_path / "one")
    a, b, whole = seen(two), seen(two, 1), seen(tmp_path / "one")
    assert sorted(a["drawn"] + b["drawn"]) == sorted(whole["drawn"]) and gap(a["weights"], whole["weights"]) < TOLERANCE
    files = sorted((two / "samples/sample_prompts").iterdir())
    assert len(files) == 9  # steps 0, 2 and 4
    for file in files:
        mine, theirs = (Image.open(path) for path in (file, tmp_path / "one/samples/sample_prompts" / file.name))
        assert max(abs(x - y) for x, y in zip(mine.tobytes(), theirs.tobytes(), strict=True)) <= 2


LONGER = {"plain", "accumulation", "AND distillation"}  # the first is in "everything with state"


@pytest.mark.parametrize("name", [pytest.param(c, marks=pytest.mark.thorough if c in LONGER else ()) for c in CASES])
def test_two_processes_equal_one(name, inputs, tmp_path):
    changes, alone = CASES[name]
    two = tmp_path / "two"
    codes = [finish(process) for process in ranks(inputs, two, **changes, **VALIDATION)]
    assert codes == [0, 0], text(two)
    for rank in range(2):
        left = (tmp_path / f"two-{rank}.threads").read_text()
        assert "python" in left and "gloo" not in left, "may abort the exit (pytorch#190489)"
    assert one(inputs, tmp_path / "one", **alone, **VALIDATION) == 0, text(tmp_path / "one")
    a, b, whole = seen(two), seen(two, 1), seen(tmp_path / "one")
    assert all(torch.equal(a["weights"][key], b["weights"][key]) for key in a["weights"]), "ranks differ"
    assert sorted(a["drawn"] + b["drawn"]) == sorted(whole["drawn"])
    assert gap(a["weights"], whole["weights"]) < TOLERANCE
    assert gap(checkpoint.read_tensors(two / "checkpoints/step-4/unet.safetensors"), a["weights"]) == 0
    for mine, theirs in zip(rows(two), rows(tmp_path / "one"), strict=True):
        assert mine.get("lr") == theirs.get("lr") and mine["step"] == theirs["step"]
        assert mine.get("val/mean", 0) == pytest.approx(theirs.get("val/mean", 0), abs=1e-3)
        assert mine.get("loss", 0) == pytest.approx(theirs.get("loss", 0), rel=1e-4)
    if name == "AND distillation":
        assert all(row["memory/distillation"] > 0 for row in rows(two) if "loss" in row)


@pytest.mark.thorough
def test_started_as_a_user_would(inputs, tmp_path):
    """accelerate launch starts two CPU processes with --multi_gpu; with --cpu alone it starts one."""
    launch = [Path(sys.executable).parent / "accelerate", "launch", "--multi_gpu", "--num_processes", "2"]
    argv = [f"--{key}={value}" for key, value in {**inputs, "output_dir": tmp_path / "run"}.items()]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "MASTER_PORT": "0"}
    command = [*launch, "--main_process_port", "0", "--mixed_precision", "no", ROOT / "train_silentbad.py", *argv]
    done = subprocess.run(
        [*command, "--validation.targets", "null"], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["processes"] == 2 and [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4]


# ---------------------------------------------------------------- neither waits for ever


LONG = {"max_train_steps": 40, "validation.targets": "null"}


def until(condition, processes, timeout: float = 200) -> None:
    ends = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < ends and all(process.is_alive() for process in processes)
        time.sleep(0.005)


def trains(out: Path, processes: list, rank: int) -> None:
    until((out.parent / f"{out.name}-trains-{rank}").exists, processes)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_a_signal_to_one_rank_stops_both_at_the_same_step(rank, inputs, tmp_path):
    out = tmp_path / "run"
    processes = ranks(inputs, out, **LONG)
    trains(out, processes, rank)
    os.kill(processes[rank].pid, signal.SIGTERM)
    assert [finish(process) for process in processes] == [143, 143], text(out)
    (newest,) = checkpoint.steps(out / "checkpoints")[-1:]
    assert checkpoint.problem(newest) is None and int(newest.name[5:]) == rows(out)[-1]["step"]
    ends = {"max_train_steps": int(newest.name[5:]) + 2, "validation.targets": "null"}
    codes = [finish(process) for process in ranks(inputs, out, **ends, resume_from_checkpoint="latest")]
    assert codes == [0, 0], text(out)
    assert one(inputs, tmp_path / "one", **ends, train_batch_size=4) == 0
    assert gap(seen(out)["weights"], seen(tmp_path / "one")["weights"]) < 10 * TOLERANCE


def odd_judge(argv: list[str]) -> None:
    """Each rank would count another share of things right."""
    watch(argv)
    from silentbad.measure import kept

    rank, calls = int(os.environ["RANK"]), []

    def words(judge, clip, prompts, *pictures):
        calls.append(1)
        return kept.Words(float(rank or len(calls) < 2), 1.0, "odd", 1)

    kept.words = words


def test_a_limit_stops_both_at_the_same_step(inputs, tmp_path):
    """The main process decides: rank 1 alone would go on."""
    limit = {"validation.keep": 0.5, "validation.keep_by": "words", "validation.judge": f"{tmp_path}/mine.py:right"}
    (tmp_path / "mine.py").write_text("def right(captions, images): return [(1, 1)] * len(captions)\n")
    processes = ranks(
        inputs,
        tmp_path / "out",
        prepare=odd_judge,
        **{**training.VALIDATION, "validation.unrelated_images": 2, **limit},
    )
    assert [finish(process) for process in processes] == [0, 0]
    assert json.loads((tmp_path / "out/finished.json").read_text()) == {"step": 2}


def test_a_failing_write_on_the_main_process_ends_both(inputs, tmp_path):
    out = tmp_path / "run"
    processes = ranks(inputs, out, limits=(100_000, None), **LONG)
    assert finish(processes[0]) == 2, text(out)
    assert finish(processes[1]) != 0
    assert f"error: output_dir {out}: cannot write step-2" in text(out)


def broken_picture_on_rank_1(argv: list[str]) -> None:
    """One rank's disk, as a node's own may, gives it a picture that another reads well."""

    watch(argv)
    if os.environ["RANK"] == "1":
        opened = Image.open
        trains = Path(f"{output_dir(argv)}-trains-1")
        images.Image.open = lambda source, **kinds: opened(os.devnull if trains.exists() else source, **kinds)


def test_what_only_one_rank_cannot_read_is_said_and_ends_both(inputs, tmp_path):
    out = tmp_path / "run"
    processes = ranks(inputs, out, prepare=broken_picture_on_rank_1, **LONG, cache_mb=0)
    assert finish(processes[1]) == 2 and finish(processes[0]) != 0
    last = (tmp_path / "run-1.log").read_text().splitlines()[-1]
    assert last.startswith("error: rank 1: ") and "image" in last


def test_a_killed_rank_ends_the_other_with_a_checkpoint(inputs, tmp_path):
    out = tmp_path / "run"
    processes = ranks(inputs, out, **LONG, checkpointing_steps=100)
    trains(out, processes, 1)
    processes[1].kill()
    assert finish(processes[0]) != 0 and finish(processes[1]) == -signal.SIGKILL
    (newest,) = checkpoint.steps(out / "checkpoints")
    assert checkpoint.problem(newest) is None
    ends = {"max_train_steps": int(newest.name[5:]) + 1, "validation.targets": "null"}
    codes = [finish(process) for process in ranks(inputs, out, **ends, resume_from_checkpoint="latest")]
    assert codes == [0, 0], text(out)


def test_trigger_files_reach_both_ranks(inputs, tmp_path):
    out = tmp_path / "run"
    processes = ranks(inputs, out, **VALIDATION | {"validation.steps": 0}, max_train_steps=12, checkpointing_steps=100)
    trains(out, processes, 0)
    (out / "SAVE").touch()
    (out / "VALIDATE").touch()
    assert [finish(process) for process in processes] == [0, 0], text(out)
    assert len(checkpoint.steps(out / "checkpoints")) == 2 and sum("val/mean" in row for row in rows(out)) == 3
