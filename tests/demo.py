"""A run folder as training leaves it, made without training: for tests of reports and figures."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from silentbad.data.images import to_tensor
from silentbad.data.targets import Target
from silentbad.measure.calibrate import Scored, ScoredTarget, measured_range, thresholds
from silentbad.measure.record import TargetRange
from silentbad.measure.sheet import PRIOR, Drawn
from silentbad.rng import generator
from tests.recoveries import make_hook, smooth
from tests.tiny import tiny_pipeline
from validation import RecoveryHook

HOSTILE = '<script>alert("x")</script>'
POINTS = 6  # of the curve


def demo_run(folder: Path, speed: float = 1.0) -> Path:
    """A run folder as training leaves it, of a model that drifts from other pictures towards its targets."""
    mask = np.zeros((64, 64), np.uint8)
    mask[10:40, 15:50] = 255
    masks = [Image.fromarray(mask), None, Image.fromarray(255 - mask)]
    targets = [
        Target(name, smooth("demo", name, side=64), ["a striped cat", "a tall hat", f"on {name}"], None, masks)
        for name in ("a sandy beach", "a green meadow", HOSTILE)
    ]
    pipe = tiny_pipeline()
    hook = make_hook(folder, pipe, targets, images_per_target=6, resolution=32)
    calibrate(hook)
    progress = {"raw": 0.0}

    def generate(items):
        images = []
        for item in items:
            other = to_tensor(smooth("demo-other", item.address, item.image, False, side=64))
            mine = to_tensor(targets[item.target].image)
            reach = {"composed": 1.0, "shuffled": 0.8}.get(item.cell, 0.25)
            luck = torch.rand(1, generator=generator("luck", item.address, item.image)).item()
            if item.target < 0:  # a prompt that has nothing to do with a target
                mine, reach = to_tensor(smooth("demo-changed", item.image, side=64)), 0.4
            w = min(1.0, progress["raw"] * reach * (0.6 + 0.8 * luck))
            images.append((1 - w) * other + w * mine)
        return torch.stack(images), torch.full((len(items),), 1.0 + progress["raw"])

    hook.sampler.generate = generate
    for k in range(POINTS):
        progress["raw"] = min(1.0, speed * (k / (POINTS - 1)) ** 1.5)
        hook.run(100 * k, k / 2, pipe.unet, final=k == POINTS - 1)
    fill(folder)
    return folder


def calibrate(hook: RecoveryHook) -> None:
    """Thresholds and ranges as if nulls scored little."""

    def part(of_element: bool) -> Scored:
        return Scored(of_element, {"plain grey": [0.2, 0.3], "mirrored": [0.77]}, [0.95] * 9)

    scored = [ScoredTarget(part(False), [part(True), None, part(True)]) for _ in hook.targets]
    hook.threshold, hook.element_threshold = thresholds(scored, None, None)
    for target, (whole, elements) in zip(hook.targets, scored, strict=True):
        whole_range = measured_range(whole, hook.threshold.value)
        parts = [each and measured_range(each, hook.element_threshold.value) for each in elements]
        hook.ranges.append(TargetRange(target.target_id, (64, 64), 32, whole_range, parts, nulls=3, copies=9))


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
        f"{stage}.{role}" for stage in ("down0", "mid", "up0", "up1") for role in ("xattn.v", "xattn.k", "ff", "conv")
    ]
    history = [
        {
            "step": s,
            "multipliers": {g: float(np.exp(0.8 * np.sin(i + s / 200))) for i, g in enumerate(groups)},
        }
        for s in range(0, 500, 20)
    ]
    (folder / "multipliers.json").write_text(json.dumps(history))
    sweeps = [{"step": s, "rho": [1 - np.exp(-s / (100 + 40 * i)) for i in range(5)]} for s in range(0, 500, 50)]
    memory = {
        "phrases": ["a striped cat", "a tall hat", HOSTILE, "on a beach", "on a meadow"],
        "history": sweeps,
    }
    (folder / "phrase_memory.json").write_text(json.dumps(memory))
    counts = {"edges": list(range(0, 1050, 50)), "counts": draw.integers(20, 90, 20).tolist()}
    (folder / "timesteps.json").write_text(json.dumps(counts))
    prior = folder / PRIOR
    prior.parent.mkdir(parents=True)
    drawn = [Drawn(prompt, f"{Path(PRIOR).parent}/{i}.png") for i, prompt in enumerate(("a green house", ""))]
    for image in drawn:
        smooth("prior", image.prompt, side=64).save(folder / image.file)
    prior.write_text(json.dumps([asdict(image) for image in drawn]))
    (folder / "config.yaml").write_text(f"learning_rate: 0.0001\nnote: '{HOSTILE}'\n")
    (folder / "run.json").write_text(json.dumps({"commit": "0123abc", "versions": {"torch": "2"}, "device": HOSTILE}))
