"""Factors between sources for each layer group: a_(s,G) on what source s adds to the gradient of
group G. Theory: docs/gradient-control.md, section 5.

Micro-batches are of one source each (`silentbad.data.loader.chunks` cuts them): a hook on every
parameter scales what a backward is about to add, before it is accumulated or averaged over
processes. So accumulation, parts and DDP need nothing else, and no accumulated gradient is ever
edited.

Symbols: s source; w_s level; g_s its gradient, summed over samples; r_(s,G) signal-to-noise of g_s
in group G.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from silentbad.control.between import ELEMENT, SourceWeights
from silentbad.control.multipliers import Multipliers
from silentbad.control.statistics import (
    WIDTH,
    PassMean,
    RecentMean,
    Sample,
    Statistics,
    centred,
)
from silentbad.device import scalars
from silentbad.distributed.shards import world_size
from silentbad.model.groups import OTHER, Groups
from silentbad.settings.control import BetweenConfig

# A rule maps the statistics of a source and of the elements to raw factors (G,) on that source's
# gradient, on any positive scale: the level sets their quadratic mean. Non-finite entries count as
# neutral. The rules are those of SOURCE_RULES (`gradient_control.py`), or your own.
SourceRule = Callable[..., Tensor]


class LayerSourceWeights(SourceWeights):
    """Holds the factors and puts them into gradients.

    `records`: how many records each source has, for a signal that drawing without replacement does
    not bias (`PassMean`).

    Only a refresh waits for the device: it reads the factors that were sent one refresh before.
    """

    one_source_per_backward = True

    def __init__(
        self,
        config: BetweenConfig,
        groups: Groups,
        rule: SourceRule,
        seed: int,
        sdxl: bool,
        records: Mapping[str, int] | None = None,
    ):
        super().__init__(config, groups)
        self.rule = rule
        self.groups = groups
        self.seed = seed
        self.sdxl = sdxl
        self.latest: dict[str, Tensor] = {}
        self._source = ELEMENT  # of the backward under way
        self._unit = 0.0  # its scale of a sample's loss; 0: no backward is under way

        params = [p for group in groups for p in group]
        device = params[0].device
        self.sample = Sample(list(groups), config.sample, device)
        # g_s of the step, sampled
        self.parts = torch.zeros(len(self.names), self.sample.rows, WIDTH, device=device)
        self.seen = torch.zeros(len(self.names), device=device)  # samples of the step
        self.statistics = {
            name: Statistics(self.sample, self._mean(name, records or {}), config.averaging)
            for name in self.names
        }
        limits = (config.bound, config.max_log_step, device)
        self.multipliers = {name: Multipliers(len(groups), *limits) for name in self.names[1:]}
        owner = [g for g, group in enumerate(groups) for _ in group]
        for i, p in enumerate(params):
            p.register_hook(functools.partial(self._arriving, i, owner[i]))

    def _mean(self, source: str, records: Mapping[str, int]) -> RecentMean | PassMean:
        if source in records:
            return PassMean(self.sample, records[source])
        return RecentMean(self.sample, self.config.momentum)

    # ---- the step
    def weight_losses(self, losses: Tensor, sources: list[str]) -> Tensor:
        """losses (B,) as they are: the factors act on gradients."""
        return losses

    def before_backward(self, losses: Tensor, sources: list[str], scale: float = 1.0) -> None:
        """Note the source of the backward that follows. Raises ValueError for several sources."""
        if len(set(sources)) > 1:
            raise ValueError(
                f"a backward of several sources ({', '.join(sorted(set(sources)))}): cut the "
                f"batch by source"
            )
        self._source = sources[0] if sources[0] in self.names else ELEMENT
        self._unit = scale / len(sources)
        self._factors = [self.level(self._source) * a for a in self.layers[self._source]]
        self.seen[self.names.index(self._source)] += len(sources)

    def _arriving(self, i: int, group: int, grad: Tensor) -> Tensor | None:
        """Sample the gradient that parameter i is about to gain, and return it scaled."""
        if not self._unit:
            return None
        self.sample.add(
            self.parts[self.names.index(self._source)], i, grad.detach(), 1 / self._unit
        )
        a = self._factors[group]
        return None if a == 1.0 else grad * a

    def after_backward(self, last: bool = True) -> None:
        """The backward is over."""
        self._unit = 0.0

    @torch.no_grad()
    def before_step(
        self, step: int, finite: Tensor | None = None, norms: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Take in the step's gradients by source; a step that is not finite changes nothing."""
        if world_size() > 1:
            dist.all_reduce(self.parts)
            dist.all_reduce(self.seen)
        all_finite = self.parts.isfinite().all() & (True if finite is None else finite)
        for name, part, samples in zip(self.names, self.parts, self.seen, strict=True):
            self.statistics[name].add(part, all_finite & (samples > 0), seen=samples)
        self.parts.zero_()
        self.seen.zero_()
        return {}

    @torch.no_grad()
    def after_step(self, step: int, skipped: bool = False) -> None:
        """Count the update; every `refresh` updates compute new factors."""
        super().after_step(step, skipped)
        if not skipped and self.updates % self.config.refresh == 0:
            for name, multipliers in self.multipliers.items():
                self.layers[name] = multipliers.receive() or self.layers[name]
            if self.updates >= self.config.warmup:
                self._compute_factors()

    def _compute_factors(self) -> None:
        c = self.config
        names = tuple(self.groups.names)
        fade = min(1.0, (self.updates - c.warmup) / c.warmup) if c.warmup else 1.0
        about = {
            "names": names,
            "seed": self.seed,
            "sdxl": self.sdxl,
        }
        stats = {name: statistics.groups(**about) for name, statistics in self.statistics.items()}
        element = stats[ELEMENT]
        size = element.constant(name != OTHER for name in names) * element.n
        for name, multipliers in self.multipliers.items():
            raw = self.rule(stats[name], element, **c.options)
            a = multipliers.send(fade * centred(raw.log(), size), stats[name])
            self.latest |= {
                f"control/between/{name}_min": self.level(name) * a.min(),
                f"control/between/{name}_max": self.level(name) * a.max(),
                f"control/between/{name}_log_std": a.log().std(correction=0),
                f"control/between/{name}_gsnr": stats[name].snr(0.0).nanmedian(),
            }
        self.latest["control/between/element_gsnr"] = element.snr(0.0).nanmedian()

    # ---- records
    def meters(self) -> dict[str, Tensor]:
        """Range of the layer-wise factors, signal-to-noise of the sources."""
        return self.latest

    def state_dict(self) -> dict[str, Any]:
        """All that a bit-exact resume needs; call between steps."""
        return super().state_dict() | {
            "meters": {name: value.clone() for name, value in self.latest.items()},
            "statistics": {name: s.state_dict() for name, s in self.statistics.items()},
            "multipliers": {name: m.state_dict() for name, m in self.multipliers.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up such a state."""
        super().load_state_dict(state)
        self.latest = scalars(state["meters"])
        for name, statistics in self.statistics.items():
            statistics.load_state_dict(state["statistics"][name])
        for name, multipliers in self.multipliers.items():
            multipliers.load_state_dict(state["multipliers"][name])
