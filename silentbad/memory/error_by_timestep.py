"""The error by timestep, for timestep policies of your own."""

import numpy as np
import torch

from silentbad.device import Mailbox

BINS = 20  # of timesteps
DECAY = 0.5  # of the mean over rounds


class ErrorByTimestep:
    """Second moment of the per-sample error by timestep bin, relative to its own first value.

    A step's sums are reduced over the ranks on the device; every `every` steps they are sent, and
    read one round later."""

    def __init__(self, T: int, reduce=None, *, every: int = 50):
        self.T = T
        self.every = every
        self.reduce = reduce or (lambda x: x)
        self.step = torch.zeros(2, BINS)
        self.sums = torch.zeros(2, BINS)  # rows: squared errors, counts
        self.now = np.full(BINS, np.nan)
        self.first = np.full(BINS, np.nan)
        self.mail = Mailbox()

    def observe(self, t: torch.Tensor, error: torch.Tensor) -> None:
        """error (B,) at t (B,)."""
        self.step = self.step.to(t.device)
        values = torch.stack([error.float().square(), torch.ones_like(error, dtype=torch.float32)])
        self.step.index_add_(1, t * BINS // self.T, values)

    def after_step(self, step: int, skipped: bool = False) -> None:
        observed = self.step
        self.step = torch.zeros_like(observed)
        if skipped:
            return
        self.sums = self.sums.to(observed.device) + self.reduce(observed)
        if step % self.every:
            return
        if (sums := self.mail.receive()) is not None:
            total, count = sums.double().numpy()
            fresh = np.where(count > 0, total / np.maximum(count, 1), np.nan)
            self.first = np.where(np.isnan(self.first), fresh, self.first)
            blend = np.where(np.isnan(fresh), self.now, DECAY * self.now + (1 - DECAY) * fresh)
            self.now = np.where(np.isnan(self.now), fresh, blend)
        self.mail.send(self.sums)
        self.sums = torch.zeros_like(self.sums)

    def relative(self) -> np.ndarray | None:
        """(bins,) sqrt(E[L^2] / its first value), once every bin has been seen."""
        return (
            None if np.isnan(self.now).any() else np.sqrt(self.now / np.maximum(self.first, 1e-20))
        )

    def state_dict(self) -> dict:
        arrays = {
            "now": torch.from_numpy(self.now.copy()),
            "first": torch.from_numpy(self.first.copy()),
        }
        return {**arrays, "sums": self.sums.clone(), "mail": self.mail.peek()}

    def load_state_dict(self, state: dict) -> None:
        self.now = state["now"].numpy().copy()
        self.first = state["first"].numpy().copy()
        self.sums = state["sums"].clone()
        self.mail.restore(state["mail"])
