"""Sampled gradient statistics of each group, and the projection of multipliers to quadratic mean
one.

Everything stays on the device; nothing here waits for it. Symbols as in `gradient_control`.
"""

import functools
import itertools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from silentbad.distributed.shards import gather, is_sharded
from silentbad.model.groups import OTHER
from silentbad.rng import addressed_seed

# ---------------------------------------------------------------- statistics
WIDTH = 128  # coordinates a row; rows keep the sums short and the padding small


class Sample:
    """Fixed coordinates of every tensor, at most `per_tensor` each, read without copying the
    tensors.

    They lie one stride apart from a tensor's first coordinate to its end. The stride is coprime to
    its size, so no row or column of a matrix is missed by design.
    """

    def __init__(
        self, group_params: list[list[nn.Parameter]], per_tensor: int, device: torch.device
    ):
        self.params = [p for group in group_params for p in group]
        numel = [p.numel() for p in self.params]
        self.stride = [coprime(-(-n // per_tensor), n) for n in numel]
        self.count = [-(-n // stride) for n, stride in zip(numel, self.stride, strict=True)]
        rows = [-(-k // WIDTH) for k in self.count]
        self.rows = sum(rows)
        # index (T,R): rows of each tensor; past its end, the row of zeros that per_group appends
        first = torch.tensor([0, *rows]).cumsum(0)[:-1, None]
        column = torch.arange(max(rows))
        self.index = torch.where(
            column < torch.tensor(rows)[:, None], first + column, self.rows
        ).to(device)
        owner = torch.tensor([g for g, group in enumerate(group_params) for _ in group])
        # owner (T,G) one-hot; share (T,) parameters per sampled coordinate; n (G,)
        self.owner = nn.functional.one_hot(owner, len(group_params)).to(device, _wide(device))
        self.share = torch.tensor([n / k for n, k in zip(numel, self.count, strict=True)]).to(
            self.owner
        )
        self.n = torch.tensor(numel).to(self.owner) @ self.owner
        self.zeros = torch.zeros(max(per_tensor, WIDTH), device=device, dtype=self.params[0].dtype)

    def read(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """The sampled coordinates (rows, WIDTH) in float32; a missing tensor reads as zeros, shards
        are gathered."""
        pieces = []
        for tensor, k, stride in zip(tensors, self.count, self.stride, strict=True):
            pieces.append(self.zeros[:k] if tensor is None else _strided(tensor, k, stride))
            pieces.append(self.zeros[: -k % WIDTH])
        return torch.cat(pieces).float().view(-1, WIDTH)

    def per_group(self, rows: Tensor) -> Tensor:
        """Sum row values (..., rows) into estimates over whole groups (..., G)."""
        rows = nn.functional.pad(rows.to(self.owner), (0, 1))
        return (rows[..., self.index].sum(-1) * self.share) @ self.owner

    def norms(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Exact norm of each tensor (T,), one fused pass over all coordinates."""
        present = [self.zeros[:1] if t is None else t.detach() for t in tensors]
        kinds = {t.dtype for t in present}
        widest = torch.float64 if torch.float64 in kinds else torch.float32
        wide = None if kinds == {widest} else widest  # shards allow no other dtype than their own
        return gather(torch.stack(torch._foreach_norm(present, 2, dtype=wide))).to(self.owner)


def row_dot(a: Tensor, b: Tensor) -> Tensor:
    """Sums of a * b over each row (rows,); in pieces, so that the product is never whole in
    memory."""
    return torch.cat([(x * y).sum(1) for x, y in zip(a.chunk(8), b.chunk(8), strict=True)])


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def coprime(stride: int, size: int) -> int:
    """The least number from `stride` on that shares no factor with `size`."""
    return next(s for s in itertools.count(stride) if math.gcd(s, size) == 1)


def _strided(tensor: Any, count: int, stride: int) -> Tensor:
    if is_sharded(tensor):
        # a view would keep every tensor gathered until the last
        return _strided(gather(tensor), count, stride).clone()
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.as_strided((count,), (stride,))
    # the same coordinates in any memory format: a run may be resumed in another
    return tensor.take(torch.arange(0, count * stride, stride, device=tensor.device))


@dataclass(frozen=True)
class GroupStats:
    """The input of a scale rule: tensors (G,), bias-corrected averages over the recent steps."""

    names: tuple[str, ...]
    n: Tensor  # parameters
    S: Tensor  # <g_t, m̂_(t-1)>: ||mean gradient||^2, free of noise
    E: Tensor  # ||g_t||^2 on the coordinates of S
    Q: Tensor  # ||g_t||^2
    L1: Tensor  # sum of |g_t|
    theta: Tensor  # ||theta||
    seed: int = 0  # of the run
    sdxl: bool = False  # whether the stages are numbered as in SDXL's UNet
    cache: dict[tuple, Tensor] = field(default_factory=dict)

    @property
    def rms(self) -> Tensor:
        """RMS(g) of each group (G,)."""
        return (self.Q / self.n).sqrt()

    def snr(self, floor: float) -> Tensor:
        """r = S+ / (E - S+) of each group (G,), at least `floor`: below it r is mostly estimation
        error."""
        p = (self.S / self.E).clamp(0, 0.999)
        return (p / (1 - p)).clamp(min=floor)

    def shuffled(self) -> Tensor:
        """Indices (G,) that exchange the groups, by the run's seed; the group OTHER keeps its place."""
        movable = [i for i, name in enumerate(self.names) if name != OTHER]
        order = random.Random(addressed_seed(self.seed, "placebo")).sample(movable, len(movable))
        place = dict(zip(movable, order, strict=True))
        return self.constant(place.get(i, i) for i in range(len(self.names))).long()

    def constant(self, values: Iterable[float]) -> Tensor:
        """Host values (G,) on the device, sent once: sending waits for the device."""
        key = tuple(float(value) for value in values)
        if key not in self.cache:
            self.cache[key] = torch.tensor(key, dtype=self.n.dtype, device=self.n.device)
        return self.cache[key]


class Statistics:
    """Running S, E, Q, L1 of each group; S is measured against m, the mean of earlier gradients.

    A non-finite step changes nothing; nothing reaches the host.
    """

    KEPT = ("m", "count", "average", "weight", "ignored", "norm")  # in a state

    def __init__(self, sample: Sample, momentum: float, averaging: float):
        self.sample = sample
        self.momentum = momentum
        self.averaging = averaging
        zeros = functools.partial(torch.zeros, device=sample.owner.device, dtype=sample.owner.dtype)
        self.m = torch.zeros(sample.rows, WIDTH, device=sample.owner.device)
        self.count = zeros(())  # of gradients in m
        self.average = zeros(4, sample.owner.shape[1])
        self.weight = zeros(())
        self.ignored = zeros(())
        self.norm = zeros(())  # of the last gradient; a meter
        self.cache: dict[tuple, Tensor] = {}

    def update(
        self, grads: list[Tensor | None], finite: Tensor | None = None, norms: Tensor | None = None
    ) -> None:
        """Update the averages by the gradients of one optimizer step: synchronised, unscaled, not
        yet clipped; their norms (T,), where known.
        """
        g = self.sample.read(grads)
        norms = self.sample.norms(grads) if norms is None else norms.to(self.sample.owner)
        self.norm = norms.square().sum().sqrt()
        finite = norms.isfinite().all() & (True if finite is None else finite)
        g.nan_to_num_(0, 0, 0)
        s = row_dot(g, self.m) / (1 - self.momentum**self.count)
        rows = torch.stack(
            [
                s,
                torch.linalg.vector_norm(g, dim=1).to(s).square(),
                torch.linalg.vector_norm(g, 1, 1),
            ]
        )
        S, E, L1 = self.sample.per_group(rows)
        new = torch.stack([S, E, norms.square() @ self.sample.owner, L1])
        use = finite & (self.count > 0)
        self.average.lerp_(torch.where(use, new, self.average), 1 - self.averaging)
        self.weight += use * (1 - self.averaging) * (1 - self.weight)
        self.m.lerp_(g, (finite * (1 - self.momentum)).to(g))
        self.count += finite
        self.ignored += ~finite

    def groups(self, **rest: Any) -> GroupStats:
        """The GroupStats of the averages so far; `rest` gives its other fields."""
        averages = self.average / self.weight
        theta = (self.sample.norms(self.sample.params).square() @ self.sample.owner).sqrt()
        return GroupStats(
            n=self.sample.n,
            S=averages[0],
            E=averages[1],
            Q=averages[2],
            L1=averages[3],
            theta=theta,
            cache=self.cache,
            **rest,
        )

    def state_dict(self) -> dict[str, Tensor]:
        return {key: getattr(self, key).clone() for key in self.KEPT}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for key in self.KEPT:
            getattr(self, key).copy_(state[key])


def centred(log_x: Tensor, size: Tensor) -> Tensor:
    """log_x (G,) minus its size-weighted median; non-finite entries become 0, that is, neutral."""
    finite = log_x.isfinite()
    value, order = torch.where(finite, log_x, torch.inf).sort()
    mass = (size * finite)[order].cumsum(0)
    median = value.gather(0, (mass < mass[-1:] / 2).sum(0, keepdim=True).clamp(max=len(value) - 1))
    return torch.where(finite, log_x - median, 0.0)


def project(log_x: Tensor, n: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """a_G = clip(c x_G, low_G, high_G), all (G,), with the one c > 0 for which sum n a^2 / sum n =
    1.

    Exact and without a loop: the quadratic mean rises with c, with corners where a group meets or
    leaves a bound. Needs sum n low^2 <= sum n <= sum n high^2.
    """
    x = (log_x - log_x.max()).clamp(min=-40).exp()
    p = n / n.sum()
    enter = low / x
    leave = high / x
    corner = torch.cat([enter, leave]).sort().values  # (2G,)
    square = (p * (corner[:, None] * x).clamp(low, high).square()).sum(1)
    last = corner.gather(0, ((square <= 1).sum(0, keepdim=True) - 1).clamp(min=0))
    free = (enter <= last) & (last < leave)
    rest = 1 - (p * torch.where(free, 0.0, (last * x).clamp(low, high).square())).sum()
    c = (rest.clamp(min=0) / (p * torch.where(free, x.square(), 0.0)).sum()).sqrt()
    return (torch.where(free.any(), c, last) * x).clamp(low, high)
