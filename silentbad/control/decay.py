"""Weights decay to their values before training: L2-SP (1802.01483), decoupled from the gradient as
weight decay is in AdamW (1711.05101).

    w <- w + (c/T) s_t (w_0 - w)    after update t of T; s_t in [0, 1] is the learning rate's schedule,
                                    c `decay_to_base`

A spectral update moves every direction of a matrix equally far, also directions of noise alone. The
decay undoes such a change: a share exp(-c mean(s)) of it is left at the end of the run. A change
that the data asks for again and again stays."""

from typing import Any

import torch

from silentbad.loop.hooks import Hook


class DecayToBase(Hook):
    """Keeps a copy of the trained weights, taken when it is built: build it before a checkpoint is
    loaded.

    optimizer: has `param_groups` whose `lr` a scheduler sets, from `initial_lr`. rate: c/T above, at
    most 1."""

    def __init__(self, optimizer: Any, rate: float):
        self.optimizer = optimizer
        self.rate = min(rate, 1.0)
        self.base = [
            [p.detach().clone() for p in group["params"]] for group in optimizer.param_groups
        ]

    @torch.no_grad()
    def after_step(self, step: int, skipped: bool = False) -> None:
        if skipped:
            return
        for group, base in zip(self.optimizer.param_groups, self.base, strict=True):
            schedule = group["lr"] / group["initial_lr"]
            torch._foreach_lerp_(group["params"], base, self.rate * schedule)
