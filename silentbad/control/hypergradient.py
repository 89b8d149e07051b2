"""A scale rule that learns from rehearsals, and what it measures. It was level with uniform rates:
1.00 [0.75, 1.50] of plain's speed, and slower in seconds."""

import torch
from torch import Tensor

from silentbad.control.statistics import WIDTH, GroupStats, Sample, row_dot
from silentbad.settings.types import NotNegative


def hypergradient(stats: GroupStats, *, rate: NotNegative = 4.0) -> Tensor:
    """h = exp(rate * transfer): faster where updates descend on rehearsals too (after OSGM
    2502.11229)."""
    return (rate * stats.transfer).exp()


class Transfer:
    """How well each group's last update served rehearsed compositions: an average of -cos(gradient,
    update) (G,)."""

    def __init__(self, sample: Sample, averaging: float):
        self.sample = sample
        self.averaging = averaging
        self.value = torch.zeros_like(sample.owner[0])
        self.update = torch.zeros(sample.rows, WIDTH, device=sample.owner.device)

    def state_dict(self) -> dict[str, Tensor]:
        return {"value": self.value.clone(), "update": self.update.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.value = state["value"].to(self.value)
        self.update = state["update"].to(self.update)

    def before_step(self) -> None:
        """Hold the weights in the place of the last update, which `learn` has seen by now."""
        self.update = self.sample.read(self.sample.params)

    def after_step(self, skipped: bool) -> None:
        """The update, from the weights held; zero, so without a cosine, after a skipped step."""
        self.update = self.sample.read(self.sample.params).sub_(self.update)
        if skipped:
            self.update.zero_()

    def learn(self, rehearsal: Tensor) -> None:
        """Take in a rehearsal gradient (rows, WIDTH); groups without a defined cosine stay as
        they are."""
        g = rehearsal
        u = self.update
        dot, gg, uu = self.sample.per_group(
            torch.stack([row_dot(g, u), row_dot(g, g), row_dot(u, u)])
        )
        cos = dot / (gg * uu).sqrt()
        self.value.lerp_(torch.where(cos.isfinite(), -cos, self.value), 1 - self.averaging)
