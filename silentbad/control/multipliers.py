"""Multipliers (G,): bounded, projected to quadratic mean one, sent to the host and read there one
refresh later."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from silentbad.control.statistics import GroupStats, project
from silentbad.device import Mailbox
from silentbad.distributed.shards import world_size
from silentbad.model.groups import OTHER


class Multipliers:
    """Computed on the device, broadcast from rank 0 (reductions may differ by a bit between ranks),
    then sent.

    Every multiplier stays in [1/bound, bound] and moves by at most `max_log_step` in log space
    between two refreshes; groups named `other` stay at 1.
    """

    def __init__(self, groups: int, bound: float, max_log_step: float, device: torch.device):
        self.bound = bound
        self.max_log_step = max_log_step
        self.last = torch.ones(groups, device=device)  # (G,) last computed
        self._mail = Mailbox()

    def send(self, log_x: Tensor, stats: GroupStats) -> Tensor:
        """Project log_x (G,) to multipliers and start their copy to the host; returns them on the
        device."""
        past = self.last.to(stats.n)
        low = (past * math.exp(-self.max_log_step)).clamp(min=1 / self.bound)
        high = (past * math.exp(min(self.max_log_step, 100))).clamp(max=self.bound)
        other = stats.constant(name == OTHER for name in stats.names).bool()
        low, high = (torch.where(other, 1.0, limit) for limit in (low, high))
        a = project(log_x, stats.n, low, high)
        self.last = a.float()
        if world_size() > 1:
            dist.broadcast(self.last, 0)
        self._mail.send(self.last)
        return a

    def receive(self) -> list[float] | None:
        """The multipliers sent at the previous refresh, or None."""
        values = self._mail.receive()
        return None if values is None else values.tolist()

    def state_dict(self) -> dict[str, Any]:
        pending = self._mail.peek()
        return {"pending": None if pending is None else pending.clone(), "scale": self.last.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._mail.restore(state["pending"])
        self.last = state["scale"].to(self.last.device).clone()
