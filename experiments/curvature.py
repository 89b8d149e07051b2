"""Rates by role from measured slope and curvature of the training loss. Measured: later than uniform
rates and than its placebo on one development target, at 0.89 of their rise of the clean error.

    --gradient_control.name experiments/curvature.py:curvature
    --hooks experiments/curvature.py:Curvature

Legend: P roles; u_P what an update does to role P; b (P,) descent along each u_P on a batch that the
update did not see; C (P,P) = 2 J J' / N the Gauss-Newton matrix of the loss along them, J (P,N) the
derivatives of the batch's predictions; a (P,) rates. L(theta + sum_P a_P u_P) = L - b'a + a'Ca/2."""

from typing import Any

import numpy as np
import torch
from scipy.optimize import lsq_linear
from torch import Tensor

from silentbad.control.statistics import GroupStats
from silentbad.loop.hooks import Hook, HookContext, MicroStep
from silentbad.memory.masks import given_mask
from silentbad.model.groups import group_of

RATES: dict[str, float] = {}  # {role: rate}, from the hook to the rule


def role_of(group: str) -> str:
    """xattn of up1.xattn.k."""
    return [*group.split("."), group][1]


def curvature(stats: GroupStats) -> Tensor:
    """The rates that the hook `Curvature` measured last; before that the same for all."""
    return torch.tensor([RATES.get(role_of(name), 1.0) for name in stats.names]).to(stats.n)


def best_rates(b: np.ndarray, C: np.ndarray, bound: float) -> np.ndarray:
    """The a with most descent in one step, each rate within a factor of `bound` of a common one."""
    C = C + np.diag(0.02 * C.diagonal() + 1e-4 * C.diagonal().mean())
    root = np.linalg.cholesky(C)
    aim = np.linalg.solve(root, b)
    common = abs(b.sum() / C.sum()) * np.geomspace(0.1, 10, 41)
    options = [lsq_linear(root.T, aim, (level / bound, level * bound)).x for level in common]
    return max(options, key=lambda a: (a @ b) * abs(a @ b) / (a @ C @ a))


class Curvature(Hook):
    """Measures b and C along every `every`th update, keeps running means of both in units of an
    update's RMS, and hands the best rates to the rule."""

    def __init__(
        self, context: HookContext, *, every: int = 10, bound: float = 4.0, mean: float = 0.7
    ):
        self.every = every
        self.bound = bound
        self.mean = mean
        self.roles: dict[str, list[torch.nn.Parameter]] = {}
        for name, parameter in context.model.named_parameters():
            if parameter.requires_grad:
                self.roles.setdefault(role_of(group_of(name)), []).append(parameter)
        self.before: dict[str, list[Tensor]] = {}
        self.now: Any = None  # the last micro-step
        self.first: Any = None  # RMS of the first update measured, at equal rates
        self.measured: Any = None  # means of b and, beside it, C
        RATES.clear()

    def extra_loss(self, loss: Tensor, now: MicroStep) -> None:
        self.now = now

    @torch.no_grad()
    def before_step(self, step: int, finite=None, norms=None) -> None:
        if self.before:
            self.measure()
        self.before = {}
        if step and step % self.every == 0:
            self.before = {role: [p.clone() for p in own] for role, own in self.roles.items()}

    def state_dict(self) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in ("before", "first", "measured")}
        return {**kept, "rates": {role: float(rate) for role, rate in RATES.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        RATES.update(state["rates"])
        for name in ("before", "first", "measured"):
            setattr(self, name, state[name])

    def measure(self) -> None:
        """Along the last update, on the batch of this step."""
        parts = [self.along(own, self.before[role]) for role, own in self.roles.items()]
        rows, slopes, rms = (torch.stack(column).double() for column in zip(*parts, strict=True))
        C = 2 * rows @ rows.T / rows.shape[1]
        b = slopes + C.sum(1)  # at the weights before the update
        now = torch.column_stack([b / rms, C / rms.outer(rms)])
        self.first = rms if self.first is None else self.first
        self.measured = now if self.measured is None else now.lerp(self.measured, self.mean)
        b, C = self.measured[:, 0] * self.first, self.measured[:, 1:] * self.first.outer(self.first)
        a = best_rates(b.cpu().numpy(), C.cpu().numpy(), self.bound)
        RATES.update(zip(self.roles, a / np.exp(np.log(a).mean()), strict=True))

    def along(
        self, own: list[torch.nn.Parameter], before: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The derivative (N,) of the weighted predictions along a role's update, by central
        differences; the descent along it; its RMS."""
        update = [p - old for p, old in zip(own, before, strict=True)]
        pairs = zip(update, own, strict=True)
        slope = -torch.stack([(u * p.grad).sum() for u, p in pairs if p.grad is not None]).sum()
        flat = torch.cat([u.flatten() for u in update])
        h = 1e-3 * torch.cat([p.flatten() for p in own]).norm() / flat.norm().clamp_min(1e-30)
        after = [p.clone() for p in own]
        now = self.now
        ends = []
        for side in (h, -h, 0):
            for p, start, u in zip(own, after, update, strict=True):
                p.copy_(start + side * u)
            if side:
                ends.append(now.predict(now.noisy_latents, now.timesteps, now.batch["text"]))
        size = ends[0].shape[-2:]
        weight = given_mask(now.batch["mask"], now.batch["has_mask"], None, size, outside=0.05)
        row = (ends[0] - ends[1]) / (2 * h) * weight.sqrt()
        return row.flatten(), slope, flat.square().mean().sqrt()
