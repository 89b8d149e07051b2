"""Refusals that look at more than one part of the configuration, or at the records too; no weights have loaded."""

import math
from pathlib import Path
from typing import Any

from .compose import REHEARSED
from .epochs import DataInfo
from .errors import UserError
from .tables import TextLists


def join(config: Any) -> None:
    """The flat loss flags become the parts of `memory` they name; refuse parts that contradict each other."""
    loss = config.memory.loss
    if config.snr_gamma is not None:
        if loss.name not in ("none", "min_snr"):
            raise UserError(f"snr_gamma: means memory.loss.name=min_snr, which is set to {loss.name}; set one of them")
        loss.name, loss.options = "min_snr", {**loss.options, "gamma": config.snr_gamma}
    if config.dream_training:
        loss.dream = config.dream_detail_preservation
    if config.memory.region.name == "estimated" and config.random_flip:
        raise UserError(
            "memory.region.name=estimated: finds each element at its native place, which random_flip moves; "
            "leave one of them out"
        )
    if config.max_batch_size is not None:
        for key, part, name in (("attention_binding", config.memory.attention_binding, "mass"),
                                ("loss_balance", config.memory.loss_balance, "gradient_norm")):  # fmt: skip
            if part.name == name:
                raise UserError(f"max_batch_size: memory.{key}.name={name} is defined over a whole micro-batch; lower "
                                "train_batch_size and raise gradient_accumulation_steps instead")  # fmt: skip
    if config.validation.targets is not None:
        check_validation(config.validation)


def check_records(config: Any, info: DataInfo, phrases: TextLists) -> None:
    """Refuse a part that would have nothing to act on among the records; phrases[r] are what record r names."""
    memory = config.memory
    if memory.retention.unconditional and "clean" not in info.roles:
        raise UserError("memory.retention.unconditional: the data holds no clean record to show without caption")
    if memory.rehearsal.name == "leak_free":
        captioned = ("rehearsal", "clean") if memory.retention.unconditional < 1 else ("rehearsal",)
        if not any(role in captioned and len(phrases[r]) > 1 for r, role in enumerate(info.roles)):
            raise UserError(
                "memory.rehearsal.name=leak_free: joins phrases of clean and rehearsal records; none with a caption "
                "has two"
            )
    rehearsed = memory.rehearsal.name in REHEARSED
    if config.gradient_control.learns and not (rehearsed or "rehearsal" in info.roles):
        raise UserError(
            f"gradient_control.name={config.gradient_control.name}: learns from rehearsals, of which there are none; "
            "set memory.rehearsal.name to leak_free or pairwise, or give records of role rehearsal"
        )


BOUNDS = {  # of ValidationConfig: lowest value, highest value
    "steps": (0, math.inf), "images_per_target": (1, math.inf), "num_inference_steps": (1, 1000),
    "guidance_scale": (0, 1e4), "guidance_rescale": (0, 1), "resolution": (8, math.inf), "threshold": (-1, 1),
    "null_images": (1, math.inf), "max_batch": (1, math.inf), "clean_records": (0, math.inf),
    "drift_images": (0, math.inf), "sample_targets": (0, math.inf),
}  # fmt: skip


def check_validation(config: Any, prefix: str = "validation.") -> None:
    """Refuse values of a `ValidationConfig` that cannot work; opens no file."""
    for key, (low, high) in BOUNDS.items():
        value = getattr(config, key)
        if value is not None and not low <= value <= high:
            right = f"at least {low}" if math.isinf(high) else f"from {low} to {high:g}"
            raise UserError(f"{prefix}{key}: must be {right}, got {value}")
    if not 0 < config.false_positive_rate < 1:
        raise UserError(f"{prefix}false_positive_rate: must lie in (0, 1), got {config.false_positive_rate}")
    if not config.unrelated.strip():
        raise UserError(f"{prefix}unrelated: is empty; give a caption that names no element")
    path, digest = config.embedder_path, config.embedder_sha256
    if digest is not None and config.embedder != "sscd":
        raise UserError(f"{prefix}embedder_sha256: is of sscd's TorchScript file; the embedder is {config.embedder}")
    if config.embedder == "sscd" and not path:
        raise UserError(f"{prefix}embedder_path: is missing; sscd needs its TorchScript file, see the README")


def check_embedder(config: Any, prefix: str = "validation.") -> None:
    """Refuse an embedder of a `ValidationConfig` whose local files are not there; loads nothing."""
    path = config.embedder_path
    if config.embedder == "sscd" and not Path(path).is_file():
        raise UserError(f"{prefix}embedder_path: no file {path}; sscd needs its TorchScript file, see the README")
    if config.embedder == "micro" and path and not (Path(path) / "config.json").is_file():
        raise UserError(f"{prefix}embedder_path: no config.json in {path}; leave it out for the bundled embedder")
