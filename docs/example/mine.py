"""A scale rule and a hook of one's own."""

import torch
from torch import Tensor

from silentbad.control.statistics import GroupStats
from silentbad.loop.hooks import Hook, HookContext


def quieter(stats: GroupStats, *, power: float = 0.5) -> Tensor:
    """RMS(g)^-power: slower where gradients are large."""
    return stats.rms**-power


class LossByRole(Hook):
    """Logs each role's mean loss, exponentially averaged over the micro-batches that held it."""

    def __init__(self, context: HookContext):
        self.device = context.device
        self.means: dict[str, Tensor] = {}

    def weight_losses(self, losses: Tensor, sources: list[str]) -> Tensor:
        for source in sorted(set(sources)):
            rows = torch.tensor([each == source for each in sources]).to(
                self.device, non_blocking=True
            )
            mean = torch.where(rows, losses.detach(), 0).sum() / rows.sum()
            self.means[source] = mean.lerp(self.means.get(source, mean), 0.9)
        return losses

    def meters(self) -> dict[str, Tensor]:
        return {f"mine/loss_{source}": mean for source, mean in self.means.items()}

    def state_dict(self) -> dict[str, Tensor]:
        return {source: mean.clone() for source, mean in self.means.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.means = {source: mean.to(self.device) for source, mean in state.items()}
