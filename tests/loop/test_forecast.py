"""A dry run: what the run will take, and nothing written but caches."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from diffusers.image_processor import VaeImageProcessor

from silentbad.loop.forecast import Forecast
from train_silentbad import main, micro_step, train, try_out

ROOT = Path(__file__).parents[2]
# a hook of one's own: says that a step is under way
WAITS = """
import time
from pathlib import Path
from silentbad.loop.hooks import Hook

class Waits(Hook):
    def __init__(self, context):
        pass

    def before_step(self, step, finite=None, norms=None):
        Path(__file__).with_name("stepping").touch()
        time.sleep(1)
"""


def mib(text: str) -> float:
    number, unit = re.fullmatch(r"([\d.]+) (MiB|GiB)", text).groups()
    return float(number) * (1024 if unit == "GiB" else 1)


def said(text: str, pattern: str) -> float:
    return mib(re.search(pattern.replace("SIZE", r"([\d.]+ [MG]iB)"), text)[1])


def test_a_dry_run_says_what_the_run_takes(flags, tmp_path, capsys):
    settings = {"checkpointing_steps": 2, "cache_dir": tmp_path / "cache", "use_ema": True}
    assert main(flags(dry_run=True, **settings)) == 0
    out = capsys.readouterr().out
    assert "2 warm-up and 3 timed steps; only caches are written" in out and "6, of 6 samples; an epoch has 3" in out
    assert re.search(r"time     \d+ s to train, [\d.e-]+ s a step", out) and said(out, "peak SIZE") > 100
    assert not (tmp_path / "run").exists()
    shards = {file.name for file in (tmp_path / "cache").rglob("*.safetensors")}
    assert main(flags(**settings)) == 0
    checkpoints = list((tmp_path / "run" / "checkpoints").iterdir())
    size = sum(file.stat().st_size for file in checkpoints[0].iterdir()) / 2**20
    assert len(checkpoints) == 3 and said(out, "3 x SIZE and one being written") == pytest.approx(size, rel=0.35)
    size = sum(file.stat().st_size for file in (tmp_path / "run" / "pipeline").rglob("*.safetensors")) / 2**20
    assert said(out, "weights 1 x SIZE") == pytest.approx(size, rel=0.35)
    assert shards == {file.name for file in (tmp_path / "cache").rglob("*.safetensors")}  # nothing is encoded twice
    size = sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*.safetensors")) / 2**20
    assert said(out, "cache SIZE") == pytest.approx(size, abs=0.1)


def test_a_short_run_is_timed_too_and_its_images_are_counted(flags, data, tmp_path, capsys):
    short = {"max_train_steps": 1, "validation.targets": data / "targets.jsonl", "cache_dir": tmp_path / "cache"}
    short |= {"validation.num_inference_steps": 2}
    assert main(flags(dry_run=True, **short)) == 0
    out = capsys.readouterr().out
    said = re.search(r"(\d+) images of 2 steps, timed one at a time", out)
    assert said, out
    assert "0 warm-up and 1 timed steps, one image; only" in out
    assert main(flags(**short)) == 0
    unrelated = len([*(tmp_path / "run").rglob("base-*.png")])
    assert unrelated and int(said[1]) == 2 * (8 + unrelated)  # at both points, 8 of the target


def test_text_and_decoding_count_once_for_an_image():
    forecast = Forecast.__new__(Forecast)
    forecast.drawn = [0.0, 5.0, 7.0, 9.0, 10.0]  # 3 s of text, 3 steps of 2 s, 1 s of decoding
    assert forecast.image_seconds(20) == 3 + 20 * 2 + 1


def test_images_are_drawn_at_the_side_of_the_validation(build, data, capsys, monkeypatch):
    targets = {"validation.targets": data / "targets.jsonl", "validation.threshold": 0.5}
    run = build(resolution=32, dry_run=True, **targets)
    assert "training uses 32 pixels, images are drawn at 16" in capsys.readouterr().err
    assert run.products.side == 16
    run = build(resolution=32, dry_run=True, **targets, **{"validation.resolution": 32})
    sizes = []
    postprocess = VaeImageProcessor.postprocess
    seen = lambda self, image, **more: sizes.append(image.shape[-2:]) or postprocess(self, image, **more)  # noqa: E731
    monkeypatch.setattr(VaeImageProcessor, "postprocess", seen)
    run.products.try_drawing("a cat", lambda pipe, number, timestep, values: values)
    assert sizes[-1] == (32, 32) and "trains on pictures" not in capsys.readouterr().err


def test_a_dry_run_sends_as_much_through_the_autoencoder_as_calibration(build, data):
    targets = {"validation.targets": data / "targets.jsonl", "validation.max_batch": 3}
    run, batches = build(dry_run=True, **targets), []
    run.parts.vae.encoder.register_forward_pre_hook(lambda _, pixels: batches.append(tuple(pixels[0].shape)))
    run.products.try_round_trip()
    assert batches == [(3, 3, run.products.side, run.products.side)]


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_dry_run_that_fails_writes_no_checkpoint(dry_run, build, monkeypatch):
    run = build(dry_run=dry_run)

    def fail(run, batch, micro):
        if run.state.step == 2:
            raise RuntimeError("broken")
        return micro_step(run, batch, micro)

    monkeypatch.setattr("train_silentbad.micro_step", fail)
    with pytest.raises(RuntimeError, match="broken"):
        try_out(run) if dry_run else train(run)
    assert run.folder.checkpoints.exists() is not dry_run


@pytest.mark.parametrize(
    "moment",
    [pytest.param("scratch/silentbad-*", marks=pytest.mark.thorough), "stepping"],
    ids=["loading", "in a step"],
)
def test_a_signal_leaves_no_scratch_behind(moment, flags, tmp_path):
    (tmp_path / "waits.py").write_text(WAITS)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    changes = {"hooks": f"['{tmp_path}/waits.py:Waits']", "cache_dir": tmp_path / "cache"}
    called = [sys.executable, "train_silentbad.py", *flags(dry_run=True, **changes)]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with subprocess.Popen(
        called,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        while process.poll() is None and not any(tmp_path.glob(moment)):
            time.sleep(0.01)
        process.terminate()
        said = process.communicate()[0]
    assert process.returncode == 128 + signal.SIGTERM, said
    assert "stopped by SIGTERM" in said and "resume" not in said and "Traceback" not in said
    assert not any(scratch.iterdir()) and not (tmp_path / "run").exists()
