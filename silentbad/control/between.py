"""A factor between sources: w_s on what source s adds to a gradient. Theory:
docs/gradient-control.md.

A factor common to a whole gradient cancels under Adam. A factor between the sources does not: with
g = sum_s w_s g_s their ratio stays. Elements are the reference, w = 1. The factor weighs each
sample's loss, which is free. A factor for each layer group too is in
`silentbad.control.between_layers`.
"""

from typing import Any

import torch
from torch import Tensor

from silentbad.device import send
from silentbad.loop.hooks import Hook
from silentbad.model.groups import Groups
from silentbad.settings.control import BetweenConfig

ELEMENT = "element"  # the source that the factors of the others are relative to


class SourceWeights(Hook):
    """Weighs each sample's loss by the level of its source."""

    def __init__(self, config: BetweenConfig, groups: Groups):
        self.config = config
        self.on = config.name != "none"
        self.names = [ELEMENT, *sorted(config.levels)]
        self.updates = 0
        # {source: a_(s,G) / w_s, in force}: here 1 in every group
        self.layers = {name: [1.0] * len(groups.names) for name in self.names}

    def level(self, source: str) -> float:
        """w_s now: from 1 to its level within `ramp` updates, and back to 1 after `release`."""
        c = self.config
        share = self._ramped(self.updates)
        if c.release is not None and self.updates >= c.release:
            share = min(share, 1 - self._ramped(self.updates - c.release))
        return c.levels.get(source, 1.0) ** share

    def _ramped(self, updates: int) -> float:
        """The share in [0, 1] of a ramp that so many updates have covered."""
        return min(1.0, updates / self.config.ramp) if self.config.ramp else 1.0

    def weight_losses(self, losses: Tensor, sources: list[str]) -> Tensor:
        """losses (B,) of B `sources`, each times its level."""
        if not self.on:
            return losses
        return losses * send(
            torch.tensor([self.level(source) for source in sources]), losses.device
        )

    def after_step(self, step: int, skipped: bool = False) -> None:
        """Count the update."""
        if not skipped:
            self.updates += 1

    def state_dict(self) -> dict[str, Any]:
        """All that a bit-exact resume needs; call between steps."""
        return {
            "updates": self.updates,
            "layers": {name: list(factors) for name, factors in self.layers.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up such a state."""
        self.updates = state["updates"]
        self.layers = {name: list(factors) for name, factors in state["layers"].items()}
