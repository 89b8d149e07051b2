"""Gradient control: how fast each part of the UNet learns, chosen by measurement. Theory: docs/gradient-control.md.

    control = Controller(unet, GradientControlConfig(name="prior+gsnr"))
    optimizer = torch.optim.AdamW(control.param_groups(weight_decay=1e-2), lr=1e-5)
    control.attach(optimizer)
    loss.backward(); control.before_step(step)     # then clip, then:
    optimizer.step(); control.after_step()         # then lr_scheduler.step(), zero_grad()

Under Adam the scale of a gradient cancels (1412.6980), so a multiplier acts on the learning rate. To add a
rule, write one function of `GroupStats` and enter it in `SCALE_RULES`; the contract test picks it up. Within a
group, `shrink` acts on each weight: the optimizer is then `silentbad.control.shrinkage.ShrunkAdamW`.

Symbols: G groups; n (G,) parameters of a group; g_t gradient; m_t its EMA, m̂ bias-corrected;
S = <g_t, m̂_(t-1)>; E = ||g_t||^2 on the coordinates of S; Q = ||g_t||^2 on all; r = S+ / (E - S+) the
signal-to-noise ratio; x (G,) raw multipliers of a rule; a (G,) the multipliers applied.
"""

import fnmatch
import functools
import math
from collections.abc import Callable
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from silentbad import experiments
from silentbad.control.between import SOURCE_RULES, Between
from silentbad.control.multipliers import Multipliers
from silentbad.control.original import adjust_gradient_scale
from silentbad.control.rates import Rates, check_optimizer, scale_gradients
from silentbad.control.sources import MIXED, SourceBank
from silentbad.control.spectral import split
from silentbad.control.statistics import GroupStats, Sample, Statistics, centred
from silentbad.device import scalars
from silentbad.distributed.zero import gradients
from silentbad.errors import UserError
from silentbad.experiments import TRANSFORMS
from silentbad.experiments.rules import Transfer
from silentbad.model.groups import OTHER, Groups, group_parameters, prior_table, warn_of_idle_rows
from silentbad.settings.control import GradientControlConfig, RuleTable, check_control, rules_of
from silentbad.settings.types import Positive, Range, Weight

__all__ = [
    "SCALE_RULES",
    "SOURCE_RULES",
    "TRANSFORMS",
    "Controller",
    "GradientControlConfig",
    "adjust_gradient_scale",
    "check_config",
    "group_parameters",
]


# ------------------------------------------------------------------------------------------------- rules
# A rule maps GroupStats to raw multipliers (G,), any positive scale. Non-finite entries count as neutral.


def uniform(stats: GroupStats) -> Tensor:
    """One rate for all: plain AdamW, and the baseline to beat."""
    return torch.ones_like(stats.n)


def mean_abs(stats: GroupStats) -> Tensor:
    """mean |g|: the rule of `adjust_gradient_scale`, as a learning rate; a baseline of doubtful sign."""
    return stats.L1 / stats.n


def gsnr(stats: GroupStats, *, beta: Annotated[float, Range(-8, 8)] = 1.0, floor: Positive = 4e-4) -> Tensor:
    """sqrt(r / RMS^beta), r = S+ / (E - S+): gradient signal-to-noise (GSNR 2001.07384; MoLS 2605.05794).

    Below `floor`, r is mostly estimation error. The half powers are ours.
    """
    return (stats.snr(floor) / stats.rms**beta).sqrt()


def prior(stats: GroupStats, *, table: str | None = None, drop: list[str] | None = None) -> Tensor:
    """pi_G of configs/prior.yaml, each row with its evidence; `drop` leaves rows out, for ablation."""
    rows = prior_table(table, drop, stats.sdxl).items()
    match = fnmatch.fnmatch
    return stats.constant(math.prod(x for row, x in rows if match(name, row)) for name in stats.names)


def placebo(
    stats: GroupStats,
    *,
    of: str = "prior+gsnr",
    weights: dict[str, Weight] | None = None,
    options: dict[str, Any] | None = None,
) -> Tensor:
    """The multipliers of the rule `of`, shuffled over the groups by the run's seed: a control."""
    return combine(stats, rules_of(of, options or {}, weights or {}, SCALE_RULES)).exp()[stats.shuffled()]


SCALE_RULES: dict[str, Callable[..., Tensor]] = {
    **{rule.__name__: rule for rule in (uniform, mean_abs, gsnr, prior, placebo)},
    **experiments.RULES,
}


# ------------------------------------------------------------------------------- combining and projecting
def combine(stats: GroupStats, rules: RuleTable) -> Tensor:
    """log x (G,) = sum over rules of weight * [log rule]_centred."""
    size = stats.constant(name != OTHER for name in stats.names) * stats.n
    raw = {rule: SCALE_RULES[rule](stats, **options) for rule, (_, options) in rules.items()}
    return torch.stack([weight * centred(raw[rule].log(), size) for rule, (weight, _) in rules.items()]).sum(0)


# ------------------------------------------------------------------------------------- checks of the config
REHEARSAL = "rehearsal"  # the source whose gradients feed the hypergradient


def check_config(config: GradientControlConfig) -> RuleTable:
    """Rules of the config, or a UserError naming the key; loads no weights."""
    rules = check_control(config, SCALE_RULES, SOURCE_RULES, TRANSFORMS)
    if "prior" in rules:
        prior_table(**rules["prior"][1])
    return rules


# -------------------------------------------------------------------------------------------- the controller
class Controller:
    """Measures gradients, multiplies learning rates. `uniform` without sources does nothing at all.

    Order in a step: `after_backward` after each micro-step's backward (reads only; needed only for sources);
    at the synchronised step, on unscaled gradients, `before_step`, clip once, `optimizer.step()`,
    `after_step`, and only then the scheduler.
    """

    def __init__(self, model: nn.Module, config: GradientControlConfig, seed: int = 0, groups: Groups | None = None):
        self.config, self.seed = config, seed
        self.rules = check_config(config)
        self.groups = groups or group_parameters(model)
        self.params = [p for group in self.groups for p in group]
        self.multipliers = dict.fromkeys(self.groups.names, 1.0)  # in force
        self.active = [*self.rules] != ["uniform"]
        self.updates = 0
        self.history = [{"step": 0, "multipliers": dict(self.multipliers)}] if self.active else []
        self.edits = config.transform != "none" or self.active and config.apply == "gradient"  # the gradients
        self.learns = config.learns
        self.banking = config.conflict or config.transform != "none" or self.learns
        self._model, self._optimizer, self._rates, self._step = model, None, Rates(), 0
        self._sdxl = sdxl = any("add_embedding." in name for name, _ in model.named_parameters())
        self._meters: dict[str, Tensor] = {}
        self._between = Between(config.between, self.groups, seed, sdxl)
        warn_of_idle_rows(**self.rules.get("prior", (0.0, {}))[1], names=self.groups.names, sdxl=sdxl)
        self.apart = config.between.layerwise  # whether each backward must be of one source

    # ---- set-up
    def param_groups(self, weight_decay: float | None = None) -> list[dict[str, Any]]:
        """Parameter groups for the optimizer: one a group, or a single one where no rate will ever differ."""
        decay = {} if weight_decay is None else {"weight_decay": weight_decay}
        named = {"all": [p for p in self._model.parameters() if p.requires_grad]}
        if self.active and self.config.apply != "gradient":
            named = dict(zip(self.groups.names, self.groups, strict=True))
        groups = [{"params": params, "name": name, **decay} for name, params in named.items()]
        return split(groups, self._model) if self.config.spectral else groups

    def attach(self, optimizer: torch.optim.Optimizer, lr_scheduler: Any = None) -> None:
        """Take the optimizer, wrapped or not. Refuses those a multiplier cannot work with."""
        names = self.groups.names if self.active else None
        self._optimizer = check_optimizer(optimizer, lr_scheduler, names, self.config.apply)

    @functools.cached_property
    def _sample(self) -> Sample:
        return Sample(list(self.groups), self.config.sample, self.params[0].device)

    @functools.cached_property
    def _compared(self) -> Sample:
        """Coordinates on which sources and updates are compared; the hypergradient's cosine takes a quarter of them."""
        if self.config.conflict or self.config.transform != "none":
            return self._sample
        return Sample(list(self.groups), max(self.config.sample // 4, 1), self.params[0].device)

    @functools.cached_property
    def _statistics(self) -> Statistics:
        return Statistics(self._sample, self.config.momentum, self.config.averaging)

    @functools.cached_property
    def _multipliers(self) -> Multipliers:
        return Multipliers(len(self.groups), self.config.bound, self.config.max_log_step, self.params[0].device)

    @functools.cached_property
    def _transfer(self) -> Transfer:
        return Transfer(self._compared, self.config.averaging)

    @functools.cached_property
    def _sources(self) -> SourceBank:
        return SourceBank(self._compared, full=self.config.transform != "none")

    # ---- the step
    def weighed(self, losses: Tensor, sources: list[str]) -> Tensor:
        """losses (B,), each times the factor of its source where that is the same in all layers."""
        return self._between.weighed(losses, sources)

    def before_backward(self, losses: Tensor, sources: list[str], scale: float = 1.0) -> str:
        """Bank each source's own gradient of a mixed micro-batch; returns the source that `after_backward` takes.

        losses (B,) with their graph, sources of the B samples; `scale` is what the backward to come multiplies
        their mean by. Every source but the last costs one more backward, taken beside the accumulated gradient
        (so DDP's hooks do not see it); where nothing is banked nothing happens.
        """
        self._between.begin(sources, scale)
        if not self.banking:
            return MIXED
        if not (self.config.conflict or self._sources.full):  # the hypergradient asks for one source alone
            sources = [source if source == REHEARSAL else MIXED for source in sources]
        names = sorted(set(sources))
        self._sources.split(names[:-1], losses, sources, scale)
        return names[-1]

    @torch.no_grad()
    def after_backward(self, sync: bool = True, source: str | None = None) -> None:
        """Bank what this micro-step added to the gradient, under its source; the gradient stays as it is."""
        self._between.end()
        if self.banking:
            self._sources.take(sync, source)

    @torch.no_grad()
    def before_step(self, step: int, finite: Tensor | None = None, norms: Tensor | None = None) -> None:
        """Measure, then set the step's learning rates (or scale the gradients). Call before clipping.

        `norms` (T,) of the gradients of `params`, where known, save the statistics a pass over them.
        """
        self._rates.restore()
        self._step = step
        if self.banking and self._sources.parts:
            self._use_sources()
        self._between.before_step(finite)
        if not self.active:
            return
        grads = gradients(self.params)
        self._statistics.update(grads, finite, norms if self.config.transform == "none" else None)
        if self.learns:
            self._transfer.before_step()
        if self.config.apply == "gradient":
            scale_gradients(self.groups, list(self.multipliers.values()))
            return
        if self._optimizer is None:
            raise UserError("gradient_control: call Controller.attach(optimizer) before the first step")
        self._rates.multiply(self._optimizer, self.multipliers)

    @torch.no_grad()
    def after_step(self, skipped: bool = False) -> None:
        """Give the schedule its own rates back; every `refresh` updates compute new multipliers."""
        self._rates.restore()
        self._between.after_step(skipped)
        if self.banking:
            self._sources.parts.clear()
        if self.learns:
            self._transfer.after_step(skipped)
        if skipped or not self.active:
            return
        self.updates += 1
        if self.updates % self.config.refresh == 0:
            self._land()
            if self.updates >= self.config.warmup:
                self._launch()

    # ---- multipliers: computed on the device, read by the host one refresh later
    def _land(self) -> None:
        if (host := self._multipliers.receive()) is None:
            return
        self.multipliers = dict(zip(self.groups.names, host, strict=True))
        self.history.append({"step": self._step + 1, "multipliers": dict(self.multipliers)})

    def _launch(self) -> None:
        """Multipliers from the statistics so far: rule, fade-in, bounds, quadratic mean one."""
        c = self.config
        names, transfer = tuple(self.groups.names), self._transfer.value
        stats = self._statistics.groups(names=names, transfer=transfer, seed=self.seed, sdxl=self._sdxl)
        fade = min(1.0, (self.updates - c.warmup) / c.warmup) if c.warmup else 1.0
        a = self._multipliers.send(fade * combine(stats, self.rules), stats)
        p = (stats.S / stats.E).clamp(0, 1)
        self._meters |= {
            "control/a_min": a.min(),
            "control/a_max": a.max(),
            "control/a_log_std": a.log().std(correction=0),
            "control/gsnr_median": (p / (1 - p)).nanmedian(),
        }

    def _use_sources(self) -> None:
        """What the step's sources are for: the hypergradient, the meters, a transform."""
        bank = self._sources
        if self.learns and REHEARSAL in bank.parts:
            self._transfer.learn(bank.sampled(REHEARSAL))
        if len(bank.parts) > 1:
            self._meters |= bank.compare(TRANSFORMS[self.config.transform], each=self.config.sources == "role")
        bank.parts.clear()

    # ---- records
    def meters(self) -> dict[str, Tensor]:
        """Device scalars for the tracker; empty for `uniform`."""
        meters = self._meters | self._between.meters
        if not self.active:
            return meters
        s = self._statistics
        return meters | {"control/grad_norm": s.norm.clone(), "control/ignored_steps": s.ignored.clone()}

    def state_dict(self) -> dict[str, Any]:
        """All that a bit-exact resume needs; call between steps."""
        meters = {name: value.clone() for name, value in self._meters.items()}
        state = {"groups": self.groups.parameters, "rule": self.config.name, "meters": meters}
        if self._between.on:
            state["between"] = self._between.state_dict()
        if not self.active:
            return state
        return state | {
            "updates": self.updates,
            "multipliers": dict(self.multipliers),
            "history": [dict(entry) for entry in self.history],
            **self._multipliers.state_dict(),
            "statistics": self._statistics.state_dict(),
            "transfer": self._transfer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state. Raises UserError where it is of another rule or of other groups."""
        for key, now in (("rule", self.config.name), ("groups", self.groups.parameters)):
            if state[key] != now:
                what = f"{key}: {shown(state[key])}, now {shown(now)}"
                raise UserError(f"gradient_control: the checkpoint was written with other {what}")
        self._meters = scalars(state["meters"])
        if self._between.on:
            self._between.load_state_dict(state["between"])
        if not self.active:
            return
        self.updates, self.multipliers = state["updates"], dict(state["multipliers"])
        self.history = [dict(entry) for entry in state["history"]]
        self._multipliers.load_state_dict(state)
        self._statistics.load_state_dict(state["statistics"])
        self._transfer.load_state_dict(state["transfer"])


def shown(value: str | dict[str, int]) -> str:
    return f"{len(value)} groups, {sum(value.values())} parameters" if isinstance(value, dict) else repr(value)
