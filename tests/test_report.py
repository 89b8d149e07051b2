"""report.html: self-contained, escaped, whole with parts missing, and free of errors in a browser."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from silentbad import plots, report
from silentbad.data import Target
from silentbad.errors import UserError
from silentbad.rng import generator
from silentbad.similarity import to_pil, to_tensor
from tests.test_validation import make_hook, smooth
from tests.tiny import tiny_pipeline

HOSTILE = '<script>alert("x")</script>'


def demo_run(folder: Path, speed: float = 1.0, points: int = 6) -> Path:
    """A run folder as training leaves it, of a model that drifts from other pictures towards its targets."""
    mask = np.zeros((64, 64), np.uint8)
    mask[10:40, 15:50] = 255
    masks = [Image.fromarray(mask), None, Image.fromarray(255 - mask)]
    targets = [
        Target(
            name, smooth("demo", name, side=64), ["a striped cat", "a tall hat", f"on {name}"], None, masks
        )
        for name in ("a sandy beach", "a green meadow", HOSTILE)
    ]
    pipe = tiny_pipeline()
    hook = make_hook(folder, pipe, targets, images_per_target=6, null_images=40)
    progress = {"raw": 0.0}

    def generate(items):
        images = []
        for item in items:
            other = to_tensor(smooth("demo-other", item.address, item.image, item.cell == "null", side=64))
            mine = to_tensor(targets[item.target].image)
            reach = {"composed": 1.0, "shuffled": 0.8, "null": 0}.get(item.cell, 0.25)
            luck = torch.rand(1, generator=generator("luck", item.address, item.image)).item()
            w = min(1.0, progress["raw"] * reach * (0.6 + 0.8 * luck)) if item.target >= 0 else 0.0
            images.append((1 - w) * other + w * mine)
        return torch.stack(images), torch.full((len(items),), 1.0 + progress["raw"])

    hook.sampler.generate = generate
    for k in range(points):
        progress["raw"] = min(1.0, speed * (k / (points - 1)) ** 1.5)
        (hook.run if k < points - 1 else hook.finish)(100 * k, k / 2, pipe.unet)
    fill(folder)
    return folder


def fill(folder: Path) -> None:
    """The files other parts of a run write."""
    draw = np.random.default_rng(0)
    rows = [
        {
            "step": s,
            "epoch": s / 200,
            "loss": 0.3 * np.exp(-s / 200) + 0.02 * draw.random(),
            "lr": 1e-4,
            "grad_norm": 1 + draw.random(),
            "memory/rho_mean": s / 500,
        }
        for s in range(10, 510, 10)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"step": 510, "lo')
    groups = [
        f"{stage}.{role}"
        for stage in ("down0", "mid", "up0", "up1")
        for role in ("xattn.v", "xattn.k", "ff", "conv")
    ]
    history = [
        {
            "step": s,
            "multipliers": {g: float(np.exp(0.8 * np.sin(i + s / 200))) for i, g in enumerate(groups)},
        }
        for s in range(0, 500, 20)
    ]
    (folder / "multipliers.json").write_text(json.dumps(history))
    sweeps = [
        {"step": s, "rho": [1 - np.exp(-s / (100 + 40 * i)) for i in range(5)]} for s in range(0, 500, 50)
    ]
    memory = {
        "phrases": ["a striped cat", "a tall hat", HOSTILE, "on a beach", "on a meadow"],
        "history": sweeps,
    }
    (folder / "phrase_memory.json").write_text(json.dumps(memory))
    counts = {"edges": list(range(0, 1050, 50)), "counts": draw.integers(20, 90, 20).tolist()}
    (folder / "timesteps.json").write_text(json.dumps(counts))
    (folder / "config.yaml").write_text(f"learning_rate: 0.0001\nnote: '{HOSTILE}'\n")
    (folder / "run.json").write_text(
        json.dumps({"commit": "0123abc", "versions": {"torch": "2"}, "device": HOSTILE})
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return demo_run(tmp_path_factory.mktemp("runs") / "demo")


def test_report_is_one_file_with_every_part(run):
    text = report.render(run)
    for part in (
        "Targets and generations",
        "Recovery curves",
        "Controls",
        "Targets in numbers",
        "Memory",
        "Gradient control",
        "Drift on clean prompts",
        "Training",
        "Configuration and provenance",
    ):
        assert f"<h2>{part}</h2>" in text
    for part in (
        "Recovers.",
        "base model",
        "phrases in another order",
        "phrase 1 alone",
        "Timesteps trained on",
        "Learning-rate multiplier",
        "Strength of phrases",
        "Training loss",
        "metrics.jsonl: 1 unreadable",
    ):
        assert part in text
    assert not re.findall(r'(?:src|href)="(?!data:)', text) and "<script" not in text and "url(" not in text
    assert HOSTILE not in text and "&lt;script&gt;" in text
    assert len(re.findall(r"<svg viewBox[^>]*role=\"img\" aria-label=\"[^\"]{10,}", text)) >= 8
    assert all('alt="' in image for image in re.findall(r"<img[^>]*>", text))


def test_report_with_parts_missing(run, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    with pytest.raises(UserError, match="neither"):
        report.render(bare)
    with pytest.raises(UserError, match="no folder"):
        report.render(tmp_path / "none")
    shutil.copy(run / "validation.json", bare)  # an audit's folder without its pictures
    assert "Recovery rate" in report.render(bare)
    (bare / "validation.json").unlink()
    shutil.copy(run / "metrics.jsonl", bare)
    (bare / "multipliers.json").write_text("{broken")
    (bare / "phrase_memory.json").write_text('"odd"')
    text = report.render(bare)
    assert "recovery was not measured" in text and "could not be read" in text and "another form" in text


def test_pictures_outside_the_run_are_not_read(run, tmp_path):
    smooth("secret").save(tmp_path / "secret.png")
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(run / "validation.json", folder)
    held = report.Run(folder)
    assert held.picture("../secret.png", "x") == "" and held.picture(str(tmp_path / "secret.png"), "x") == ""
    (folder / "bad.png").write_text("no picture")
    assert held.picture("bad.png", "x") == "" and held.picture(None, "x") == ""


def test_comparison_has_paired_intervals(run, tmp_path, capsys):
    slow = demo_run(tmp_path / "slow", speed=0.4)
    text, gaps = report.compare([run, slow])
    rate = next(row for row in gaps if row[1] == "rate")
    assert rate[2] < 0 and rate[3] <= rate[2] <= rate[4] and rate[5] == 3
    assert "demo, raw weights" in text and "slow, raw weights" in text and HOSTILE not in text
    assert report.main(["compare", str(run), str(slow), "--out", str(tmp_path / "both.html")]) == 0
    assert (tmp_path / "both.html").is_file()
    assert report.main([str(run)]) == 0 and (run / "report.html").is_file()
    assert report.main(["compare", str(run)]) == 2 and report.main([str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_charts_bear_odd_numbers():
    nan = float("nan")
    assert plots.line_chart([plots.Series("x", [0, 1], [None, nan])], "empty") == ""
    flat = plots.line_chart(
        [plots.Series("<b>", [0, 1, 2], [1.0, nan, 1.0])], "flat & even", marks=[("m", 2.0)]
    )
    assert "nan" not in flat and "&lt;b&gt;" in flat and "flat &amp; even" in flat
    assert "nan" not in plots.line_chart([plots.Series("one", [5], [1e-9], [0.0], [nan])], "one point")
    assert plots.heatmap(["g"], [0, 1], [[1.0, None]], "h") and plots.heatmap([], [], [], "h") == ""
    assert plots.histogram([0, 1, 2], [3, 4], "h", "t") and plots.histogram([], [], "h", "t") == ""
    for low, high in ((0, 1), (-3e-7, 2e-7), (0, 12345), (99, 101)):
        marks = plots.ticks(low, high)
        assert 2 <= len(marks) <= 8 and min(marks) >= low - 1e-9 and max(marks) <= high + 1e-9


BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))),
    None,
)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("size", ["1280,2400", "390,2400"])
def test_report_renders_in_a_browser_without_console_errors(run, tmp_path, size):
    report.write(run)
    shot = tmp_path / "shot.png"
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--hide-scrollbars",
        "--enable-logging=stderr",
        "--v=0",
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--window-size={size}",
    ]
    done = subprocess.run(
        [BROWSER, *flags, f"--screenshot={shot}", (run / "report.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and "CONSOLE" not in done.stderr
    picture = np.asarray(Image.open(shot).convert("RGB"))
    assert picture.std() > 10 and to_pil(torch.zeros(3, 1, 1)).size == (1, 1)
