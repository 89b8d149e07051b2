"""Parts that were measured and did not earn their place: reachable by name, out of the way of a reader.

Rules, samplers, timestep policies, losses, auxiliaries and gradient transforms live here, each with its outcome in
`OUTCOMES`. What is recommended, or what a comparison needs as its baseline, does not: it stands in the root modules.
"""

from collections.abc import Callable
from typing import Any

from silentbad.experiments.auxiliaries import L2SP, AndDistillation, AttentionBinding, gradient_norm
from silentbad.experiments.losses import cosmap, debiased, huber, p2, sigma_sqrt, soft_min_snr, x0
from silentbad.experiments.rules import auto_rgn, hypergradient, inverse_rms
from silentbad.experiments.samplers import leitner
from silentbad.experiments.timesteps import curriculum, learning_progress
from silentbad.experiments.transforms import TRANSFORMS, check_transform

__all__ = [
    "AUXILIARY",
    "ERRORS",
    "LOSSES",
    "LOSS_BALANCE",
    "OUTCOMES",
    "RULES",
    "SAMPLERS",
    "TIMESTEPS",
    "TRANSFORMS",
    "check_transform",
    "outcomes",
]

Registry = dict[str, Callable[..., Any]]

RULES: Registry = {"inverse_rms": inverse_rms, "auto_rgn": auto_rgn, "hypergradient": hypergradient}
SAMPLERS: Registry = {"leitner": leitner}
TIMESTEPS: Registry = {"curriculum": curriculum, "learning_progress": learning_progress}
LOSSES: Registry = {
    "soft_min_snr": soft_min_snr,
    "debiased": debiased,
    "p2": p2,
    "sigma_sqrt": sigma_sqrt,
    "cosmap": cosmap,
    "x0": x0,
}
ERRORS: Registry = {"huber": huber}
AUXILIARY: dict[str, Registry] = {
    "attention_binding": {"mass": AttentionBinding},
    "distillation": {"and": AndDistillation},
    "retention": {"l2_sp": L2SP},
}
LOSS_BALANCE: Registry = {"gradient_norm": gradient_norm}

# "slot.name" -> (arm of bench/results/recovery.md or "", what came out). An arm's figure is its speed in steps over
# plain's on twelve targets; tests/experiments/test_outcomes.py compares each with the stored rows.
OUTCOMES: dict[str, tuple[str, str]] = {
    "gradient_control.inverse_rms": ("inverse_rms", "0.88 [0.63, 1.00] of plain's speed"),
    "gradient_control.auto_rgn": ("auto_rgn", "1.00 [1.00, 1.33] of plain's speed, more drift"),
    "gradient_control.hypergradient": ("hypergradient", "1.00 [0.75, 1.50] of plain's speed, slower in seconds"),
    "gradient_control.transform.remove_conflict": ("", "no reported arm"),
    "memory.sampler.leitner": ("", "no reported arm"),
    "memory.timesteps.curriculum": ("curriculum", "1.29 [1.00, 2.08] of plain's speed, fewer images at the end"),
    "memory.timesteps.learning_progress": ("learning_progress", "1.00 [1.00, 1.00] of plain's speed"),
    "memory.attention_binding.mass": ("attention_binding", "1.00 [1.00, 1.00] of plain's speed"),
    "memory.distillation.and": ("and_distillation", "0.63 [0.16, 1.00] of plain's speed"),
    "memory.retention.l2_sp": ("retention", "0.83 [0.27, 1.00] of plain's speed, less drift"),
    "memory.loss_balance.gradient_norm": ("", "no reported arm"),
    **{f"memory.loss.{name}": ("", "no reported arm") for name in (*LOSSES, *ERRORS)},
}


def outcomes() -> str:
    """One line for each entry, as `--help` shows them."""
    return "\n".join(f"  {name}: {outcome}" for name, (_, outcome) in OUTCOMES.items())
