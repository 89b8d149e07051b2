"""Weights decay to what they were before training: L2-SP (1802.01483), decoupled from the gradient
as weight decay is in AdamW (1711.05101).

    w <- w + lr c (w_0 - w)     after each update; lr of the weight's group, c `decay_to_base`

A spectral update moves every direction of a matrix equally far, also those in which only noise
points. Such a direction keeps the sum of its last 1/(lr c) updates; one that the data asks for again
and again stays written."""

from typing import Any

import torch

from silentbad.loop.hooks import Hook


class DecayToBase(Hook):
    """Keeps a copy of the weights that train, as they are when it is built: before a checkpoint is
    taken up.

    optimizer: has `param_groups`, each with `params` and `lr`. strength: c above; 1/lr and more
    puts the weights back at every step."""

    def __init__(self, optimizer: Any, strength: float):
        self.optimizer = optimizer
        self.strength = strength
        self.base = [
            [p.detach().clone() for p in group["params"]] for group in optimizer.param_groups
        ]

    @torch.no_grad()
    def after_step(self, step: int, skipped: bool = False) -> None:
        if skipped:
            return
        for group, base in zip(self.optimizer.param_groups, self.base, strict=True):
            torch._foreach_lerp_(group["params"], base, min(1.0, group["lr"] * self.strength))
