"""A dry run: what the run will take, and nothing written."""

import re

import pytest

from train_silentbad import main


def mib(text: str) -> float:
    number, unit = re.fullmatch(r"([\d.]+) (MiB|GiB)", text).groups()
    return float(number) * (1024 if unit == "GiB" else 1)


def said(text: str, pattern: str) -> float:
    return mib(re.search(pattern.replace("SIZE", r"([\d.]+ [MG]iB)"), text)[1])


def test_a_dry_run_says_what_the_run_takes(flags, tmp_path, capsys):
    settings = {"checkpointing_steps": 2, "cache_dir": tmp_path / "cache", "use_ema": True}
    assert main(flags(dry_run=True, **settings)) == 0
    out = capsys.readouterr().out
    assert "3 steps timed after 2, one image; nothing written" in out and "6, of 6 samples; an epoch has 3" in out
    assert re.search(r"time     \d+ s to train, [\d.e-]+ s a step", out) and said(out, "peak SIZE") > 100
    assert not (tmp_path / "run").exists() and not (tmp_path / "cache").exists()
    assert main(flags(**settings)) == 0
    kept = list((tmp_path / "run" / "checkpoints").iterdir())
    size = sum(file.stat().st_size for file in kept[0].iterdir()) / 2**20
    assert len(kept) == 3 and said(out, "3 x SIZE and one being written") == pytest.approx(size, rel=0.35)
    size = sum(file.stat().st_size for file in (tmp_path / "run" / "pipeline").rglob("*.safetensors")) / 2**20
    assert said(out, "weights 1 x SIZE") == pytest.approx(size, rel=0.35)
    size = sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*.safetensors")) / 2**20
    assert said(out, "cache SIZE") == pytest.approx(size, abs=0.1)


def test_a_short_run_is_timed_too(flags, data, capsys):
    assert main(flags(dry_run=True, max_train_steps=1, **{"validation.targets": data / "targets.jsonl"})) == 0
    out = capsys.readouterr().out
    assert "1 steps timed after 0" in out and "16 images of 20 steps, timed one at a time" in out
