"""What tests of runs share: reading their rows, one step, comparing weights; `flags` and `build` are in conftest."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from silentbad.settings.check import check, merged, with_base
from silentbad.settings.reader import parse
from train_silentbad import Config, Run, check_parts, micro_step, update


def checked(argv: Sequence[str]) -> Config:
    """The configuration of a command line that passes all checks; its files need not exist."""
    config, sources = parse(Config, argv, "")
    config = with_base(config)
    check(config, sources)
    config = merged(config)
    check_parts(config)
    return config


def rows(folder: Path, validation: bool = False) -> list[dict]:
    read = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in read if bool(row.get("validation")) == validation]


def step_once(run: Run) -> list[torch.Tensor]:
    """Draw, micro-steps, update."""
    losses = []
    for micro, batch in enumerate(run.loader.draw(run.state.draw)):
        run.memory.count_rehearsals(batch["united"])
        with run.accelerator.accumulate(run.model):
            losses.append(micro_step(run, batch, micro))
    update(run)
    return losses


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run.parts.backbone.state_dict().items()}


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


VALIDATION = {
    "validation.embedder": "ssim",
    "validation.steps": 2,
    "validation.images_per_target": 1,
    "validation.num_inference_steps": 1,
    "validation.threshold": 0.5,
}


def equal(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a.nan_to_num(), b.nan_to_num())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b
