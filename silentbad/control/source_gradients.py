"""The gradient of one optimizer step, split by source, and the cosines between the sources."""

import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from silentbad.control.statistics import Sample, row_dot
from silentbad.device import send
from silentbad.distributed.shards import world_size

# ---------------------------------------------------------------- sources
MIXED = "mixed"  # a micro-batch of several sources


class SourceBank:
    """The gradient of one optimizer step, split by source ("element", "clean", ...).

    Sampled coordinates are enough for cosines; `full` keeps whole gradients, one copy a source, to
    recombine them.
    """

    def __init__(self, sample: Sample, full: bool):
        self.sample = sample
        self.full = full
        self.parts: dict[str, list[Tensor]] = {}

    def after_backward(self, last: bool, source: str) -> None:
        """After a backward: give `source` the part of the gradient that no source has yet.

        At the `last` backward of a step DDP has averaged the whole gradient over the processes. So
        the parts of the sources are averaged too, and `source` gets the rest of the whole.
        """
        if last and world_size() > 1:
            source = self._average(source)
        if last:  # the whole includes what the source had so far
            self.parts.pop(source, None)
        rest = self._read([p.grad for p in self.sample.params])
        # in one order on all ranks: the bits of a sum depend on it
        for other in sorted(self.parts):
            torch._foreach_sub_(rest, self.parts[other])
        self.add(source, rest)

    def split(self, names: list[str], losses: Tensor, sources: list[str], scale: float) -> None:
        """Keep the gradients of the sources `names` of a mixed micro-batch: losses (B,) with their
        graph, and their B `sources`."""
        for name in names:
            own = [i for i, source in enumerate(sources) if source == name]
            rows = send(torch.tensor(own), losses.device)
            loss = losses[rows].sum() * (scale / len(losses))
            grads = torch.autograd.grad(
                loss, self.sample.params, retain_graph=True, allow_unused=True
            )
            self.add(name, self._read(list(grads)))

    def add(self, source: str, part: list[Tensor]) -> None:
        if source in self.parts:
            torch._foreach_add_(self.parts[source], part)
        else:
            self.parts[source] = part

    def _average(self, source: str) -> str:
        """Average the parts over the ranks; returns the source of the rest: "mixed" where ranks
        name different sources.

        The ranks exchange source names through the host. This waits once a step, only with several
        ranks and a bank.
        """
        of_ranks: list = [None] * world_size()
        dist.all_gather_object(of_ranks, (source, list(self.parts)))
        last = {name for name, _ in of_ranks}
        source = last.pop() if len(last) == 1 else MIXED
        for name in sorted(set().union(*(names for _, names in of_ranks)) - {source}):
            self.parts.setdefault(
                name, [torch.zeros_like(t) for t in self._read([None] * len(self.sample.params))]
            )
            for tensor in self.parts[name]:
                dist.all_reduce(tensor)
                tensor /= world_size()
        return source

    def _read(self, grads: list[Tensor | None]) -> list[Tensor]:
        if not self.full:
            return [self.sample.read(grads)]
        pairs = zip(self.sample.params, grads, strict=True)
        return [torch.zeros_like(p) if g is None else g.detach().clone() for p, g in pairs]

    def gram(self) -> tuple[list[str], Tensor]:
        """Sorted source names and the Gram matrix (K,K) of their gradients."""
        names = sorted(self.parts)
        return names, torch.stack([torch.stack([self._inner(a, b) for b in names]) for a in names])

    def _inner(self, a: str, b: str) -> Tensor:
        pairs = list(zip(self.parts[a], self.parts[b], strict=True))
        if not self.full:
            return self.sample.per_group(row_dot(*pairs[0])).sum()
        return (
            torch.stack([torch.dot(x.flatten(), y.flatten()) for x, y in pairs])
            .to(self.sample.owner)
            .sum()
        )

    def compare(self, transform: Callable[[Tensor], Tensor], each: bool) -> dict[str, Tensor]:
        """Meters of the cosines between the sources, with `each` one for each pair. If `full`,
        recombine the gradients by `transform`."""
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

        A loss scale may have been divided out since the parts were kept. It is a power of two,
        which the ratio of the norms gives.
        """
        now = self.sample.norms([p.grad for p in self.sample.params]).square().sum()
        unit = ((now / gram.sum()).log2() / 2).round().exp2().nan_to_num(1.0, 1.0, 1.0)
        for i, p in enumerate(self.sample.params):
            if p.grad is not None:
                for name, weight in zip(names, (weights - 1) * unit, strict=True):
                    p.grad.addcmul_(self.parts[name][i], weight.to(p.grad))
