"""kill -9 at random moments, and disks that fail: nothing is lost beyond the last interval, and a resumed run ends in
the bits of one left alone. `--kills 100` asks for so many kills; half of them strike inside a checkpoint's writing.
"""

import json
import random
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from silentbad import owned
from silentbad.saving import checkpoint
from tests.kill.runner import finish, start
from tests.toy import CURRICULUM, GSNR
from tests.training import equal

STEPS = 14
INTERVAL = 2
EVERYTHING = {
    "use_ema": True,
    "lr_scheduler": "cosine",
    "random_flip": True,
    "shuffle_phrases": True,
    "save_best": True,
    "gradient_control.name": GSNR,
    "gradient_control.warmup": 2,
    "gradient_control.refresh": 2,
    "memory.phrase_memory.enabled": True,
    "memory.phrase_memory.share": 0.3,
    "memory.sampler.name": "weakest_first",
    "memory.timesteps.name": CURRICULUM,
    "memory.region.name": "mask",
    "validation.embedder": "ssim",
    "validation.steps": 6,
    "validation.images_per_target": 1,
    "validation.num_inference_steps": 1,
    "validation.threshold": 0.5,
    "validation.unrelated_images": 0,
    "validation.controls": "never",
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, pipelines):
    """Data, pipeline and Arrow cache shared by all runs of this file."""
    from tests.conftest import write_data

    root = tmp_path_factory.mktemp("kill")
    return {
        "pretrained_model_name_or_path": pipelines["v_prediction"],
        "train_data_dir": write_data(root / "data"),
        "cache_dir": root / "arrow",
        "validation.targets": root / "data" / "targets.jsonl",
        "report_to": "none",
        "train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_train_steps": STEPS,
        "log_every": 1,
        "checkpointing_steps": INTERVAL,
        "checkpoints_total_limit": 2,
        "learning_rate": 1e-3,
        "resume_from_checkpoint": "latest",
    }


def argv(inputs: dict, out: Path, **changes) -> list[str]:
    return [f"--{key}={value}" for key, value in {**inputs, "output_dir": out, **changes}.items()]


@pytest.fixture(scope="module")
def alone(inputs, tmp_path_factory):
    """The run left alone, with everything that has state."""
    out = tmp_path_factory.mktemp("alone") / "run"
    assert finish(start(argv(inputs, out, **EVERYTHING), out.with_suffix(".log"))) == 0, text(out)
    return out


def text(out: Path) -> str:
    return out.with_suffix(".log").read_text()[-3000:]


def rows(out: Path) -> list[dict]:
    """Whole rows of metrics.jsonl without the clock's part in them."""
    whole = []
    for line in (out / "metrics.jsonl").read_text().splitlines() if (out / "metrics.jsonl").exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue  # the one the kill cut off
        whole.append({key: value for key, value in row.items() if key not in ("val/seconds", "val/share")})
    return whole


def trained(out: Path) -> int:
    """The last step that is logged."""
    return max((row["step"] for row in rows(out) if not row.get("validation")), default=0)


def kept(out: Path) -> int:
    """The step of the newest whole checkpoint."""
    whole = [p for p in checkpoint.steps(out / "checkpoints") if checkpoint.problem(p) is None]
    return int(whole[-1].name[5:]) if whole else 0


def assert_same_end(out: Path, alone: Path) -> None:
    """Weights, average, optimizer, memory, metrics and the saved pipeline are those of the run left alone."""
    a, b = (folder / "checkpoints" / f"step-{STEPS}" for folder in (alone, out))
    for name in ("unet.safetensors", "ema.safetensors"):
        if (a / name).exists():
            assert equal(checkpoint.read_tensors(a / name), checkpoint.read_tensors(b / name)), name
    left, right = (checkpoint.read_state(folder / "state.pt") for folder in (a, b))
    assert all(equal(left[part], right[part]) for part in ("optimizer", "memory", "control", "stream", "lr_scheduler"))
    assert rows(out) == rows(alone)
    weights = "pipeline/unet/diffusion_pytorch_model.safetensors"
    assert (out / weights).read_bytes() == (alone / weights).read_bytes()
    assert (out / "report.html").is_file() and [p.name for p in out.glob(".*")] == [owned.MARKER]
    assert not list(out.glob("checkpoints/.*"))


def wait_for(condition, process, timeout: float = 120) -> bool:
    """Whether `condition` came true while the process lived."""
    ends = time.monotonic() + timeout
    while not condition():
        if not process.is_alive():
            return condition()
        assert time.monotonic() < ends, "nothing happened"
        time.sleep(0.0005)
    return True


def strike(process, out: Path, inside: bool, rng: random.Random) -> bool:
    """Kill the process inside the writing of a checkpoint or pipeline, or anywhere; whether it lived to be killed."""
    if inside:  # of the first, second or third write to come
        wanted, seen = rng.randint(1, 3), set()

        def writing() -> bool:
            seen.update(p.name for p in (*out.glob("checkpoints/.step-*.tmp"), *out.glob(".*.tmp")))
            return len(seen) >= wanted

        wait_for(writing, process)
        time.sleep(rng.uniform(0, 0.04))
    else:
        wait_for((out / "config.yaml").is_file, process)  # it was there before the first kill
        process.join(rng.uniform(0.1, 4.0))
    hit = process.is_alive()
    process.kill()
    process.join()
    return hit


def test_kill_9_at_random_moments_costs_no_bit(inputs, alone, tmp_path, pytestconfig, capsys):
    wanted, rng = pytestconfig.getoption("kills"), random.Random(0)
    kills = inside = left_unfinished = runs = 0
    while kills < wanted:
        out, runs, whole = tmp_path / f"run-{runs}", runs + 1, 0
        while kills < wanted:
            began, process = time.time(), start(argv(inputs, out, **EVERYTHING), out.with_suffix(".log"))
            aimed = kills % 2 == 0
            hit = strike(process, out, aimed, rng)
            if not hit and process.exitcode == 0:
                break  # it got to its end first
            assert hit, text(out)
            kills += 1
            torn = [p for p in (*out.glob("checkpoints/.step-*"), *out.glob(".*.tmp")) if p.stat().st_mtime > began]
            inside, left_unfinished = inside + aimed, left_unfinished + bool(torn)
            assert kept(out) >= trained(out) - INTERVAL, "more than the last interval is lost"
            assert kept(out) >= whole, "a checkpoint that was whole is gone"
            whole = kept(out)
        assert finish(start(argv(inputs, out, **EVERYTHING), out.with_suffix(".log"))) == 0, text(out)
        assert_same_end(out, alone)
        again = start(argv(inputs, out, **EVERYTHING), out.with_suffix(".log"))
        assert finish(again) == 0 and "finished already" in text(out)
    with capsys.disabled():
        print(
            f"\n{kills} kills ({inside} aimed at a write, {left_unfinished} left one unfinished), "
            f"{runs} runs of {STEPS} steps, all bit-equal to the one left alone"
        )


# ---------------------------------------------------------------- disks that fail


PLAIN = {"use_ema": True, "validation.targets": "null"}


@pytest.fixture(scope="module")
def plain(inputs, tmp_path_factory):
    """The run left alone, without validation."""
    out = tmp_path_factory.mktemp("plain") / "run"
    assert finish(start(argv(inputs, out, **PLAIN), out.with_suffix(".log"))) == 0, text(out)
    return out


def refused(process, out: Path, *words: str) -> None:
    """It ended by itself with code 2 and one line that says these words."""
    assert finish(process) == 2, text(out)
    last = text(out).strip().splitlines()[-1]
    assert last.startswith(f"error: output_dir {out}") and all(word in last for word in words), text(out)
    assert "Traceback" not in text(out)


@pytest.fixture
def disk(tmp_path):
    """A small file system of its own and a function that mounts it again with other options; needs root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    change = lambda options: subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)  # noqa: E731
    yield folder, change
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.thorough
def test_a_full_disk_is_one_line_and_costs_no_bit(inputs, plain, disk, tmp_path):
    folder, change = disk
    out = folder / "run"
    out.with_suffix(".log").touch()
    size = sum(p.stat().st_size for p in plain.glob(f"checkpoints/step-{STEPS}/*"))
    change(f"size={int(2.6 * size)}")
    log = tmp_path / "full.log"
    process = start(argv(inputs, out, **PLAIN, checkpoints_total_limit="null"), log)
    assert finish(process) == 2
    last = log.read_text().strip().splitlines()[-1]
    assert last.startswith(f"error: output_dir {out}") and "step-6" in last and "Traceback" not in log.read_text()
    assert kept(out) == 4 and not list(out.glob("checkpoints/.*"))
    change("size=64m")
    assert finish(start(argv(inputs, out, **PLAIN, checkpoints_total_limit=2), log)) == 0, log.read_text()[-2000:]
    assert_same_end(out, plain)


def test_a_file_that_may_not_grow_is_one_line(inputs, plain, tmp_path):
    """What a full disk or a quota looks like where no small file system can be mounted."""
    out = tmp_path / "run"
    limit = (plain / f"checkpoints/step-{STEPS}/state.pt").stat().st_size // 2
    refused(start(argv(inputs, out, **PLAIN), out.with_suffix(".log"), limit), out, "step-2")
    assert kept(out) == 0 and not list(out.glob("checkpoints/*"))
    assert finish(start(argv(inputs, out, **PLAIN), out.with_suffix(".log"))) == 0, text(out)
    assert_same_end(out, plain)


@pytest.mark.thorough
def test_a_read_only_disk_is_one_line_at_the_start_and_later(inputs, plain, disk, tmp_path):
    folder, change = disk
    out = folder / "run"
    change("ro")
    log = tmp_path / "read-only.log"
    for resume in ("latest", "null"):
        assert finish(start(argv(inputs, out, **PLAIN | {"resume_from_checkpoint": resume}), log)) == 2
        assert "cannot be written" in log.read_text().strip().splitlines()[-1] and not out.exists()
    change("rw")
    process = start(argv(inputs, out, **PLAIN), log)
    assert wait_for((out / "checkpoints" / "step-4").is_dir, process)
    # A remount would wait for the lock, which is open for writing; so the folder is covered by a read-only view of it.
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
    assert finish(process) == 2
    assert f"error: output_dir {out}" in log.read_text().strip().splitlines()[-1]
    assert "Traceback" not in log.read_text()
    assert finish(start(argv(inputs, out, **PLAIN), log)) == 2  # resumed while still read-only
    assert "cannot be written" in log.read_text().strip().splitlines()[-1]
    subprocess.run(["umount", folder], check=True)
    assert finish(start(argv(inputs, out, **PLAIN), log)) == 0, log.read_text()[-2000:]
    assert_same_end(out, plain)


@pytest.mark.thorough
def test_an_output_folder_that_vanishes_costs_no_bit(inputs, plain, tmp_path):
    out = tmp_path / "run"
    process = start(argv(inputs, out, **PLAIN), out.with_suffix(".log"))
    assert wait_for((out / "checkpoints" / "step-4").is_dir, process)
    out.rename(tmp_path / "taken away")
    refused(process, out)
    assert kept(out) >= 4, "what was trained is saved anew"
    assert finish(start(argv(inputs, out, **PLAIN), out.with_suffix(".log"))) == 0, text(out)
    shutil.copy(plain / "metrics.jsonl", out / "metrics.jsonl")  # its first rows went with the folder
    assert_same_end(out, plain)
