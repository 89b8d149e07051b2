"""Parts that were measured and did not earn their place: reachable by name, off by default, out of
the way of a reader.

Rules, samplers, timestep policies, losses, auxiliaries and gradient transforms live here, each with
its outcome in `OUTCOMES`. What is recommended, or what a comparison needs as its baseline, does
not: it stands in the root modules."""

from collections.abc import Callable
from typing import Any

from silentbad.experiments.auxiliaries import L2SP, AndDistillation, AttentionBinding, gradient_norm
from silentbad.experiments.layer_rules import (
    auto_rgn,
    contrast,
    equalise,
    gsnr,
    hypergradient,
    inverse_rms,
    prior,
)
from silentbad.experiments.leitner import leitner
from silentbad.experiments.losses import cosmap, debiased, huber, p2, sigma_sqrt, soft_min_snr, x0
from silentbad.experiments.timestep_policies import curriculum, learning_progress
from silentbad.experiments.transforms import TRANSFORMS
from silentbad.settings.outcomes import OUTCOMES

__all__ = [
    "AUXILIARY",
    "ERRORS",
    "LOSSES",
    "LOSS_BALANCE",
    "OUTCOMES",
    "RULES",
    "SAMPLERS",
    "SOURCE_RULES",
    "TIMESTEPS",
    "TRANSFORMS",
]

Registry = dict[str, Callable[..., Any]]

RULES: Registry = {
    "gsnr": gsnr,
    "prior": prior,
    "inverse_rms": inverse_rms,
    "auto_rgn": auto_rgn,
    "hypergradient": hypergradient,
}
SOURCE_RULES: Registry = {"contrast": contrast, "equalise": equalise}
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
