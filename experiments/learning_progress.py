"""Timesteps where the loss still falls. Measured: 1.00 [1.00, 1.00] of plain's speed.

    --hooks experiments/learning_progress.py:LearningProgress

Legend: T training timesteps in `BINS` bins, t (B,) the timesteps of a part of a batch, L (B,) its
losses, p (T,) their density."""

from typing import Any

import numpy as np
import torch
from accelerate.utils import reduce
from torch import Tensor

from silentbad.device import Mailbox
from silentbad.loop.hooks import Hook, HookContext
from silentbad.memory.timesteps import draw_timesteps, mixed
from silentbad.settings.types import Count, Unit

BINS = 20
DECAY = 0.5  # of the mean over rounds


class LearningProgress(Hook):
    """p ~ sqrt(E[L_t^2]) (2102.09672), the second moment of each bin divided by its own first
    value: a loss says mostly which t was drawn (2401.09031), its fall says what was learnt there.

    Sums over a round of `every` steps are sent to the host, and read one round later."""

    def __init__(self, context: HookContext, *, every: Count = 50, uniform: Unit = 0.3):
        self.T = int(context.scheduler.config.num_train_timesteps)
        self.seed = context.config.seed
        self.every = every
        self.uniform = uniform
        self.sums = torch.zeros(2, BINS, device=context.device)  # squared losses, counts
        self.step_sums = torch.zeros_like(self.sums)
        self.now = np.full(BINS, np.nan)
        self.first = np.full(BINS, np.nan)
        self.mail = Mailbox()

    def density(self) -> np.ndarray:
        """p (T,); uniform until every bin has been seen."""
        if np.isnan(self.now).any():
            return np.full(self.T, 1 / self.T)
        fall = np.sqrt(self.now / np.maximum(self.first, 1e-20))
        return mixed(fall[np.arange(self.T) * BINS // self.T], self.uniform)

    def timesteps(
        self, draw: int, positions: list[int], count: int, batch: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        p = self.density()
        drawn = draw_timesteps(p, self.seed, draw, list(positions), count, importance=True)
        self.t, self.weights = drawn
        return drawn

    def weight_losses(self, losses: Tensor, sources: list[str]) -> Tensor:
        t, weights = (x.to(losses.device, non_blocking=True) for x in (self.t, self.weights))
        squares = (losses.detach().float() / weights).square()
        values = torch.stack([squares, torch.ones_like(squares)])
        self.step_sums.index_add_(1, t * BINS // self.T, values)
        return losses

    def after_step(self, step: int, skipped: bool = False) -> None:
        if not skipped:
            self.sums += reduce(self.step_sums, "sum")
        self.step_sums.zero_()
        if skipped or step % self.every:
            return
        if (sums := self.mail.receive()) is not None:
            self.read(*sums.double().numpy())
        self.mail.send(self.sums)
        self.sums = torch.zeros_like(self.sums)

    def read(self, total: np.ndarray, count: np.ndarray) -> None:
        """Take in the squared losses and counts of a round."""
        fresh = np.where(count > 0, total / np.maximum(count, 1), np.nan)
        self.first = np.where(np.isnan(self.first), fresh, self.first)
        blend = np.where(np.isnan(fresh), self.now, DECAY * self.now + (1 - DECAY) * fresh)
        self.now = np.where(np.isnan(self.now), fresh, blend)

    def state_dict(self) -> dict[str, Any]:
        arrays = {"now": torch.from_numpy(self.now), "first": torch.from_numpy(self.first)}
        return {**arrays, "sums": self.sums.clone(), "mail": self.mail.peek()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.now = state["now"].numpy().copy()
        self.first = state["first"].numpy().copy()
        self.sums = state["sums"].to(self.sums.device).clone()
        self.mail.restore(state["mail"])
