"""The base class of this project's optimizers: a step over the groups, and AdamW's averages as
state."""

from typing import Any

import torch
from torch import Tensor


class Updates(torch.optim.Optimizer):
    """A subclass says in `_update` how the parameters of a group that have a gradient move."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self._update(group, [p for p in group["params"] if p.grad is not None])

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        raise NotImplementedError

    def _averages(self, parameter: Tensor) -> dict[str, Tensor]:
        """AdamW's state of a parameter: the updates it had, and the averages of its gradient and of
        the square."""
        state = self.state[parameter]
        if not state:
            state |= {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        return state
