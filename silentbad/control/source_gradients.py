"""The gradient of one optimizer step, split by source, and the cosines between the sources."""

import itertools

import torch
import torch.distributed as dist
from torch import Tensor

from silentbad.control.statistics import Sample, row_dot
from silentbad.device import send
from silentbad.distributed.shards import world_size

MIXED = "mixed"  # a micro-batch of several sources


class SourceBank:
    """The gradient of one optimizer step, split by source ("element", "clean", ...), on sampled
    coordinates (rows, WIDTH)."""

    def __init__(self, sample: Sample):
        self.sample = sample
        self.parts: dict[str, Tensor] = {}

    def after_backward(self, last: bool, source: str) -> None:
        """After a backward: give `source` the part of the gradient that no source has yet.

        At the `last` backward of a step DDP has averaged the whole gradient over the processes. So
        the parts of the sources are averaged too, and `source` gets the rest of the whole.
        """
        if last and world_size() > 1:
            source = self._average(source)
        if last:  # the whole includes what the source had so far
            self.parts.pop(source, None)
        rest = self.sample.read([p.grad for p in self.sample.params])
        # in one order on all ranks: the bits of a sum depend on it
        for other in sorted(self.parts):
            rest -= self.parts[other]
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
            self.add(name, self.sample.read(list(grads)))

    def add(self, source: str, part: Tensor) -> None:
        self.parts[source] = self.parts[source] + part if source in self.parts else part

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
        nothing = self.sample.read([None] * len(self.sample.params))
        for name in sorted(set().union(*(names for _, names in of_ranks)) - {source}):
            part = self.parts.setdefault(name, nothing.clone())
            dist.all_reduce(part)
            part /= world_size()
        return source

    def cosines(self, each: bool) -> dict[str, Tensor]:
        """Meters of the cosines between the sources, with `each` one for each pair."""
        names = sorted(self.parts)
        gram = torch.stack([torch.stack([self._inner(a, b) for b in names]) for a in names])
        cosine = gram / (gram.diagonal()[:, None] * gram.diagonal()).sqrt()
        pairs = list(itertools.combinations(range(len(names)), 2))
        between = torch.stack([cosine[i, j] for i, j in pairs])
        meters = {"control/cos_min": between.min(), "control/cos_mean": between.mean()}
        if each:
            meters |= {f"control/cos/{names[i]}-{names[j]}": cosine[i, j] for i, j in pairs}
        return meters

    def _inner(self, a: str, b: str) -> Tensor:
        return self.sample.per_group(row_dot(self.parts[a], self.parts[b])).sum()
