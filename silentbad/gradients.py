"""What gradient control measures and solves: sampled statistics, the bank of sources, the projection.

Everything stays on the device; nothing here waits for it. Symbols as in `gradient_control`.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from silentbad.sharding import cut_up, whole
from silentbad.zero import Part, summed

# --------------------------------------------------------------------------------------------- statistics
WIDTH = 128  # coordinates a row; rows keep the sums short and the padding small


class Sample:
    """Fixed coordinates of every tensor, at most `per_tensor` each, read without copying the tensors.

    The stride of a tensor is coprime to its size, so no row or column of a matrix is missed by design.
    """

    def __init__(self, group_params: list[list[nn.Parameter]], per_tensor: int, device: torch.device):
        self.params = [p for group in group_params for p in group]
        numel = [p.numel() for p in self.params]
        self.count = [min(n, per_tensor) for n in numel]
        self.stride = [_coprime(n // k, n) for n, k in zip(numel, self.count, strict=True)]
        rows = [-(-k // WIDTH) for k in self.count]
        self.rows = sum(rows)
        # index (T,R): rows of each tensor; past its end, the row of zeros that per_group appends
        first, column = torch.tensor([0, *rows]).cumsum(0)[:-1, None], torch.arange(max(rows))
        self.index = torch.where(column < torch.tensor(rows)[:, None], first + column, self.rows).to(device)
        owner = torch.tensor([g for g, group in enumerate(group_params) for _ in group])
        # owner (T,G) one-hot; share (T,) parameters per sampled coordinate; n (G,)
        self.owner = nn.functional.one_hot(owner, len(group_params)).to(device, _wide(device))
        self.share = torch.tensor([n / k for n, k in zip(numel, self.count, strict=True)]).to(self.owner)
        self.n = torch.tensor(numel).to(self.owner) @ self.owner
        self.zeros = torch.zeros(max(per_tensor, WIDTH), device=device, dtype=self.params[0].dtype)

    def read(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """The sampled coordinates (rows, WIDTH) in float32; a missing tensor reads as zeros, shards are gathered and
        parts put together."""
        pieces = []
        for tensor, k, stride in zip(tensors, self.count, self.stride, strict=True):
            pieces.append(self.zeros[:k] if tensor is None else _strided(tensor, k, stride))
            pieces.append(self.zeros[: -k % WIDTH])
        return summed(torch.cat(pieces).float().view(-1, WIDTH), over=tensors)

    def per_group(self, rows: Tensor) -> Tensor:
        """Sum row values (..., rows) into estimates over whole groups (..., G)."""
        rows = nn.functional.pad(rows.to(self.owner), (0, 1))
        return (rows[..., self.index].sum(-1) * self.share) @ self.owner

    def norms(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Exact norm of each tensor (T,), one fused pass over all coordinates."""
        present = [self.zeros[:1] if t is None else t.detach() for t in tensors]
        kinds = {t.dtype for t in present}
        wide = torch.float64 if torch.float64 in kinds else torch.float32
        wide = None if kinds == {wide} else wide  # shards take no other than their own
        return whole(torch.stack(torch._foreach_norm(present, 2, dtype=wide))).to(self.owner)


def row_dot(a: Tensor, b: Tensor) -> Tensor:
    """Sums of a * b over each row (rows,); in pieces, so that the product is never whole in memory."""
    return torch.cat([(x * y).sum(1) for x, y in zip(a.chunk(8), b.chunk(8), strict=True)])


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _coprime(stride: int, size: int) -> int:
    return next(s for s in range(max(stride, 1), 0, -1) if math.gcd(s, size) == 1)


def _strided(tensor: Any, count: int, stride: int) -> Tensor:
    if isinstance(tensor, Part):
        return tensor.strided(count, stride)
    if cut_up(tensor):
        return _strided(whole(tensor), count, stride).clone()  # a view would keep every tensor gathered until the last
    tensor = tensor.detach()
    dense = tensor.is_contiguous() or (
        tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    )
    return tensor.as_strided((count,), (stride,)) if dense else tensor.reshape(-1)[::stride][:count]


@dataclass(frozen=True)
class GroupStats:
    """What a scale rule may look at: tensors (G,), bias-corrected averages over the recent steps."""

    names: tuple[str, ...]
    n: Tensor  # parameters
    S: Tensor  # <g_t, m̂_(t-1)>: ||mean gradient||^2, free of noise
    E: Tensor  # ||g_t||^2 on the coordinates of S
    Q: Tensor  # ||g_t||^2
    L1: Tensor  # sum of |g_t|
    theta: Tensor  # ||theta||
    transfer: Tensor  # mean of -cos(rehearsal gradient, last update); positive where the update helped
    seed: int = 0  # of the run
    sdxl: bool = False  # whether the stages are numbered as in SDXL's UNet
    cache: dict[tuple, Tensor] = field(default_factory=dict)

    @property
    def rms(self) -> Tensor:
        """RMS(g) of each group (G,)."""
        return (self.Q / self.n).sqrt()

    def constant(self, values: Iterable[float]) -> Tensor:
        """Host values (G,) on the device, sent once: sending waits for the device."""
        key = tuple(float(value) for value in values)
        if key not in self.cache:
            self.cache[key] = torch.tensor(key, dtype=self.n.dtype, device=self.n.device)
        return self.cache[key]


class Statistics:
    """Running S, E, Q, L1 of each group. A non-finite step changes nothing; nothing reaches the host."""

    def __init__(self, sample: Sample, momentum: float, averaging: float):
        self.sample, self.momentum, self.averaging = sample, momentum, averaging
        zeros = functools.partial(torch.zeros, device=sample.owner.device, dtype=sample.owner.dtype)
        self.m = torch.zeros(sample.rows, WIDTH, device=sample.owner.device)
        self.average = zeros(4, sample.owner.shape[1])
        self.weight, self.count, self.ignored = zeros(()), zeros(()), zeros(())
        self.norm = zeros(())  # of the last gradient; a meter
        self.cache: dict[tuple, Tensor] = {}

    def update(
        self, grads: list[Tensor | None], finite: Tensor | None = None, norms: Tensor | None = None
    ) -> None:
        """Take in the gradients of one optimizer step: synchronised, unscaled, not yet clipped; their norms (T,),
        where known.
        """
        g = self.sample.read(grads)
        norms = self.sample.norms(grads) if norms is None else norms.to(self.sample.owner)
        self.norm = norms.square().sum().sqrt()
        finite = norms.isfinite().all() & (True if finite is None else finite)
        g.nan_to_num_(0, 0, 0)
        s = row_dot(g, self.m) / (1 - self.momentum**self.count)
        rows = torch.stack(
            [s, torch.linalg.vector_norm(g, dim=1).to(s).square(), torch.linalg.vector_norm(g, 1, 1)]
        )
        S, E, L1 = self.sample.per_group(rows)
        new = torch.stack([S, E, norms.square() @ self.sample.owner, L1])
        use = finite & (self.count > 0)  # the first step has no m to compare with
        self.average.lerp_(torch.where(use, new, self.average), 1 - self.averaging)
        self.weight += use * (1 - self.averaging) * (1 - self.weight)
        self.m.lerp_(g, (finite * (1 - self.momentum)).to(g))
        self.count += finite
        self.ignored += ~finite

    def groups(self, **rest: Any) -> GroupStats:
        """What the rules see, from the averages so far; `rest` completes it."""
        S, E, Q, L1 = self.average / self.weight
        theta = (self.sample.norms(self.sample.params).square() @ self.sample.owner).sqrt()
        return GroupStats(n=self.sample.n, S=S, E=E, Q=Q, L1=L1, theta=theta, cache=self.cache, **rest)

    def state_dict(self) -> dict[str, Tensor]:
        return {
            key: getattr(self, key).clone() for key in ("m", "average", "weight", "count", "ignored", "norm")
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for key, value in state.items():
            getattr(self, key).copy_(value)


def centred(log_x: Tensor, size: Tensor) -> Tensor:
    """log_x (G,) minus its size-weighted median; non-finite entries become 0, that is, neutral."""
    known = log_x.isfinite()
    value, order = torch.where(known, log_x, torch.inf).sort()
    mass = (size * known)[order].cumsum(0)
    median = value.gather(0, (mass < mass[-1:] / 2).sum(0, keepdim=True).clamp(max=len(value) - 1))
    return torch.where(known, log_x - median, 0.0)


def project(log_x: Tensor, n: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """a_G = clip(c x_G, low_G, high_G), all (G,), with the one c > 0 for which sum n a^2 / sum n = 1.

    Exact and without a loop: the quadratic mean rises with c, with corners where a group meets or leaves a
    bound. Needs sum n low^2 <= sum n <= sum n high^2.
    """
    x, p = (log_x - log_x.max()).clamp(min=-40).exp(), n / n.sum()
    enter, leave = low / x, high / x
    corner = torch.cat([enter, leave]).sort().values  # (2G,)
    square = (p * (corner[:, None] * x).clamp(low, high).square()).sum(1)
    last = corner.gather(0, ((square <= 1).sum(0, keepdim=True) - 1).clamp(min=0))
    free = (enter <= last) & (last < leave)
    rest = 1 - (p * torch.where(free, 0.0, (last * x).clamp(low, high).square())).sum()
    c = (rest.clamp(min=0) / (p * torch.where(free, x.square(), 0.0)).sum()).sqrt()
    return (torch.where(free.any(), c, last) * x).clamp(low, high)


# ---------------------------------------------------------------------------------------------- sources
MIXED = "mixed"  # a micro-batch of several sources


def world_size() -> int:
    """Processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class SourceBank:
    """The gradient of one optimizer step, split by source ("element", "clean", ...).

    Sampled coordinates are enough for cosines; `full` keeps whole gradients, one copy a source, to
    recombine them.
    """

    def __init__(self, sample: Sample, full: bool):
        self.sample, self.full = sample, full
        self.parts: dict[str, list[Tensor]] = {}

    def take(self, sync: bool, source: str | None) -> None:
        """Give `source` what the gradient gained since the last call; None is "mixed".

        At the last micro-step DDP has averaged the whole gradient. So the others are averaged here, and
        `source` gets the rest, its own earlier share included.
        """
        part, source = self._read([p.grad for p in self.sample.params]), source or MIXED
        if sync and world_size() > 1:
            source = self._average(source)
        if sync:
            self.parts.pop(source, None)
        for other in sorted(self.parts):  # in one order on all ranks: the bits of a sum depend on it
            torch._foreach_sub_(part, self.parts[other])
        self.add(source, part)

    def split(self, names: list[str], losses: Tensor, sources: list[str], scale: float) -> None:
        """Bank the gradients of these sources of a mixed micro-batch: losses (B,) with their graph, of B `sources`."""
        for name in names:
            own = losses[[i for i, source in enumerate(sources) if source == name]].sum() * (scale / len(losses))
            grads = torch.autograd.grad(own, self.sample.params, retain_graph=True, allow_unused=True)
            self.give(name, list(grads))

    def give(self, source: str, grads: list[Tensor | None]) -> None:
        """Bank gradients that were taken beside the accumulated ones, in the same unit."""
        self.add(source, self._read(grads))

    def add(self, source: str, part: list[Tensor]) -> None:
        if source in self.parts:
            torch._foreach_add_(self.parts[source], part)
        else:
            self.parts[source] = part

    def _average(self, source: str) -> str:
        """Average the parts over the ranks; returns whose the rest is: "mixed" where ranks name different
        sources.

        The names travel between hosts: the one wait of a step, under several ranks and with a bank alone.
        """
        known: list = [None] * world_size()
        dist.all_gather_object(known, (source, list(self.parts)))
        last = {name for name, _ in known}
        source = last.pop() if len(last) == 1 else MIXED
        for name in sorted(set().union(*(names for _, names in known)) - {source}):
            self.parts.setdefault(name, [torch.zeros_like(t) for t in self._read([None] * len(self.sample.params))])
            for tensor in self.parts[name]:
                dist.all_reduce(tensor)
                tensor /= world_size()
        return source

    def _read(self, grads: list[Tensor | None]) -> list[Tensor]:
        if not self.full:
            return [self.sample.read(grads)]
        pairs = zip(self.sample.params, grads, strict=True)
        return [torch.zeros_like(p) if g is None else g.detach().clone() for p, g in pairs]

    def sampled(self, source: str) -> Tensor:
        """Sampled coordinates (rows, WIDTH) of a source's gradient."""
        return self.sample.read(self.parts[source]) if self.full else self.parts[source][0]

    def gram(self) -> tuple[list[str], Tensor]:
        """Sorted source names and the Gram matrix (K,K) of their gradients."""
        names = sorted(self.parts)
        return names, torch.stack([torch.stack([self._inner(a, b) for b in names]) for a in names])

    def _inner(self, a: str, b: str) -> Tensor:
        pairs = list(zip(self.parts[a], self.parts[b], strict=True))
        if not self.full:
            return self.sample.per_group(row_dot(*pairs[0])).sum()
        return (
            torch.stack([torch.dot(x.flatten(), y.flatten()) for x, y in pairs]).to(self.sample.owner).sum()
        )

    def compare(self, transform: Callable[[Tensor], Tensor], each: bool) -> dict[str, Tensor]:
        """Meters of the sources' cosines, `each` pair's too; the gradients recombined by `transform` if `full`."""
        names, gram = self.gram()
        cosine = gram / (gram.diagonal()[:, None] * gram.diagonal()).sqrt()
        pairs = list(itertools.combinations(range(len(names)), 2))
        between = torch.stack([cosine[i, j] for i, j in pairs])
        meters = {"control/cos_min": between.min(), "control/cos_mean": between.mean()}
        if each:
            meters |= {f"control/cos/{names[i]}-{names[j]}": cosine[i, j] for i, j in pairs}
        if self.full:
            self.recombine(names, transform(gram), gram)
        return meters

    def recombine(self, names: list[str], weights: Tensor, gram: Tensor) -> None:
        """Replace each gradient by the weighted sum (K,) of its sources, in the unit it has now.

        A loss scale taken out since the sources were banked is a power of two, read off the norms.
        """
        now = self.sample.norms([p.grad for p in self.sample.params]).square().sum()
        unit = ((now / gram.sum()).log2() / 2).round().exp2().nan_to_num(1.0, 1.0, 1.0)
        for i, p in enumerate(self.sample.params):
            if p.grad is not None:
                for name, weight in zip(names, (weights - 1) * unit, strict=True):
                    p.grad.addcmul_(self.parts[name][i], weight.to(p.grad))


class Transfer:
    """How well each group's last update served rehearsed compositions: an average of -cos(gradient, update)
    (G,).
    """

    def __init__(self, sample: Sample, averaging: float):
        self.sample, self.averaging = sample, averaging
        self.value = torch.zeros_like(sample.owner[0])
        self.update = torch.zeros(sample.rows, WIDTH, device=sample.owner.device)

    def before_step(self) -> None:
        """Hold the weights in the place of the last update, which `learn` has seen by now."""
        self.update = self.sample.read(self.sample.params)

    def after_step(self, skipped: bool) -> None:
        """The update, from the weights held; zero, so without a cosine, after a skipped step."""
        self.update = self.sample.read(self.sample.params).sub_(self.update)
        if skipped:
            self.update.zero_()

    def learn(self, rehearsal: Tensor) -> None:
        """Take in a rehearsal gradient (rows, WIDTH); groups without a defined cosine stay as they are."""
        g, u = rehearsal, self.update
        dot, gg, uu = self.sample.per_group(torch.stack([row_dot(g, u), row_dot(g, g), row_dot(u, u)]))
        cos = dot / (gg * uu).sqrt()
        self.value.lerp_(torch.where(cos.isfinite(), -cos, self.value), 1 - self.averaging)
