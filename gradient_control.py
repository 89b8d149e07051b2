"""Gradient control: how fast each part of the network learns. Theory: docs/gradient-control.md.

No rule by layer was faster than uniform rates: Adam and Muon have already made the updates of all
layers alike. To act on layers, train some of them: `--train_layers up*`.

    control = Controller(unet, GradientControlConfig(name="experiments/gsnr.py:gsnr"))
    optimizer = torch.optim.AdamW(control.param_groups(weight_decay=1e-2), lr=1e-5)
    control.attach(optimizer)

    accelerator.backward(loss)
    if accelerator.sync_gradients:      # of a whole batch, not of a part that is accumulated
        accelerator.unscale_gradients()
        control.before_step(step)       # then clip
    optimizer.step()
    if accelerator.sync_gradients:
        control.after_step(step, accelerator.optimizer_step_was_skipped)
    lr_scheduler.step(); optimizer.zero_grad()

With `spectral` the optimizer is silentbad.control.spectral.SpectralAdamW.

Under Adam the scale of a gradient cancels (1412.6980), so a multiplier acts on the learning rate. A
rule is one function of `GroupStats`: `--gradient_control.name mine.py:my_rule` takes a rule from
any file, such as those in experiments/; an entry in `SCALE_RULES` registers it by name.

Symbols: G groups; n (G,) parameters of a group; g_t gradient; m_t its EMA, m̂ bias-corrected; S =
<g_t, m̂_(t-1)>; E = ||g_t||^2 on the coordinates of S; Q = ||g_t||^2 on all; r = S+ / (E - S+) the
signal-to-noise ratio; x (G,) raw multipliers of a rule; a (G,) the multipliers applied.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from silentbad.control.multipliers import Multipliers
from silentbad.control.original import adjust_gradient_scale
from silentbad.control.rates import LearningRates, check_optimizer, scale_gradients
from silentbad.control.source_gradients import MIXED, SourceBank
from silentbad.control.spectral import SpectralAdamW, split
from silentbad.control.statistics import GroupStats, Sample, Statistics, centred
from silentbad.device import scalars
from silentbad.errors import UserError, warn
from silentbad.loop.hooks import Hook, Hooks
from silentbad.model.groups import OTHER, Groups, group_parameters
from silentbad.settings import user_code
from silentbad.settings.check import check_part
from silentbad.settings.control import GradientControlConfig, RuleTable, check_control, rules_of
from silentbad.settings.registries import Examples, Expected, Parts
from silentbad.settings.types import Weight

__all__ = [
    "SCALE_RULES",
    "Controller",
    "GradientControlConfig",
    "LayerRates",
    "SourceConflict",
    "adjust_gradient_scale",
    "check_config",
    "group_parameters",
]


# ---------------------------------------------------------------- examples, on which parts are tried
NAMES = ("down0.ff", "mid.xattn.k", "up1.norm")  # of groups


def statistics_of(names: Sequence[str], sdxl: bool = False) -> GroupStats:
    """Statistics of groups that differ."""
    up = torch.linspace(1, 2, len(names), dtype=torch.float64)
    return GroupStats(
        tuple(names),
        n=100 * up,
        S=0.1 * up,
        E=up.square(),
        Q=2 * up,
        L1=up.sqrt(),
        theta=up,
        sdxl=sdxl,
    )


def rule_examples(names: Sequence[str] = NAMES, sdxl: bool = False) -> Examples:
    """Statistics of these groups. Values that are not positive numbers count as neutral, so only
    the shape is judged; `LayerRates` warns of a rule that acts on no group."""
    yield (statistics_of(names, sdxl),), Expected((len(names),), floor=None, varies=False)


# ---------------------------------------------------------------- rules
# A rule maps GroupStats to raw multipliers (G,), any positive scale. Non-finite entries count as
# neutral.


def uniform(stats: GroupStats) -> Tensor:
    """One rate for all: plain AdamW, and the baseline to beat."""
    return torch.ones_like(stats.n)


def mean_abs(stats: GroupStats) -> Tensor:
    """mean |g|: the rule of `adjust_gradient_scale`, as a learning rate; a baseline. Whether
    large gradients should learn faster or slower is open."""
    return stats.L1 / stats.n


def placebo(
    stats: GroupStats,
    *,
    of: str,
    weights: dict[str, Weight] | None = None,
    options: dict[str, Any] | None = None,
) -> Tensor:
    """The multipliers of the rule `of`, shuffled over the groups by the run's seed: a control."""
    rules = rules_of(of, options or {}, weights or {}, SCALE_RULES)
    return combine(stats, rules).exp()[stats.shuffled()]


SCALE_RULES = Parts(
    {
        "uniform": uniform,
        "mean_abs": mean_abs,
        "placebo": placebo,
    },
    key="gradient_control.name",
    takes="stats",
    examples=rule_examples,
)


# ---------------------------------------------------------------- combining and projecting
def combine(stats: GroupStats, rules: RuleTable) -> Tensor:
    """log x (G,) = sum over rules of weight * [log rule]_centred."""
    size = stats.constant(name != OTHER for name in stats.names) * stats.n
    logs = []
    for name, (weight, options) in rules.items():
        raw = SCALE_RULES[name](stats, **options)
        logs.append(weight * centred(raw.log(), size))
    return torch.stack(logs).sum(0)


# ---------------------------------------------------------------- checks of the config


def check_config(config: GradientControlConfig) -> RuleTable:
    """Rules of the config, or a UserError naming the key; loads no weights."""
    rules = check_control(config, SCALE_RULES)
    check_part(gradient_control=config)
    for place in filter(user_code.is_place, rules):
        SCALE_RULES.try_part(place, rules[place][1])
    return rules


# ---------------------------------------------------------------- the hooks
class LayerRates(Hook):
    """Multiplies the learning rate of each group by a factor that the rules compute from statistics
    of its gradients.

    Multipliers are computed on the device and read by the host one refresh later. `meters` is the
    dict of the controller's meters.
    """

    def __init__(
        self,
        config: GradientControlConfig,
        groups: Groups,
        *,
        rules: RuleTable,
        sample: Callable[[], Sample],
        meters: dict[str, Tensor],
        seed: int,
        sdxl: bool,
    ):
        self.config = config
        self.groups = groups
        self.rules = rules
        self.sample = sample
        self.seed = seed
        self.sdxl = sdxl
        self.params = [p for group in groups for p in group]
        self.modifies_gradients = config.apply == "gradient"
        self.optimizer: Any = None  # set by `Controller.attach`
        self.rates = LearningRates()
        self.multipliers = dict.fromkeys(groups.names, 1.0)  # in force
        self.history = [{"step": 0, "multipliers": dict(self.multipliers)}]
        self.checked_effect = [*rules] == ["uniform"]  # whether it was checked that the rule acts
        self.updates = 0
        self.step = 0
        self.latest = meters

    @functools.cached_property
    def statistics(self) -> Statistics:
        """Running averages over the gradients."""
        return Statistics(self.sample(), self.config.momentum, self.config.averaging)

    @functools.cached_property
    def computed(self) -> Multipliers:
        """The multipliers (G,) on their way to the host."""
        limits = (self.config.bound, self.config.max_log_step)
        return Multipliers(len(self.groups), *limits, self.params[0].device)

    @torch.no_grad()
    def before_step(
        self, step: int, finite: Tensor | None = None, norms: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Measure, then set the step's learning rates, or scale the gradients."""
        self.rates.restore()
        self.step = step
        self.statistics.update([p.grad for p in self.params], finite, norms)
        if self.config.apply == "gradient":
            scale_gradients(self.groups, list(self.multipliers.values()))
            return {}
        if self.optimizer is None:
            raise UserError(
                "gradient_control: call Controller.attach(optimizer) before the first step"
            )
        self.rates.multiply(self.optimizer, self.multipliers)
        return {}

    @torch.no_grad()
    def after_step(self, step: int, skipped: bool = False) -> None:
        """Restore the schedule's rates; every `refresh` updates, compute new multipliers."""
        self.rates.restore()
        if skipped:
            return
        self.updates += 1
        if self.updates % self.config.refresh == 0:
            self.apply_multipliers()
            if self.updates >= self.config.warmup:
                self.compute_multipliers()

    def apply_multipliers(self) -> None:
        """Apply the multipliers that were computed one refresh before."""
        if (host := self.computed.receive()) is None:
            return
        self.multipliers = dict(zip(self.groups.names, host, strict=True))
        in_force = self.updates - self.config.refresh > self.config.warmup
        if in_force and not self.checked_effect:  # at the first refresh after the fade-in began
            self.checked_effect = True
            if max(host) - min(host) < 1e-9:
                why = "its values are NaN, not positive, or the same for all"
                warn(f"gradient_control.name: {self.config.name} acts on no group ({why})")
        self.history.append({"step": self.step + 1, "multipliers": dict(self.multipliers)})

    def compute_multipliers(self) -> None:
        """Compute multipliers from the statistics so far: rule, fade-in, bounds, quadratic mean
        one."""
        c = self.config
        stats = self.statistics.groups(
            names=tuple(self.groups.names),
            seed=self.seed,
            sdxl=self.sdxl,
        )
        fade = min(1.0, (self.updates - c.warmup) / c.warmup) if c.warmup else 1.0
        a = self.computed.send(fade * combine(stats, self.rules), stats)
        self.latest |= {
            "control/a_min": a.min(),
            "control/a_max": a.max(),
            "control/a_log_std": a.log().std(correction=0),
            "control/gsnr_median": stats.snr(floor=0.0).nanmedian(),
        }

    def meters(self) -> dict[str, Tensor]:
        """Norm of the gradient, and steps whose gradient was not finite."""
        return {
            "control/grad_norm": self.statistics.norm.clone(),
            "control/ignored_steps": self.statistics.ignored.clone(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Statistics, multipliers and their history."""
        return {
            "updates": self.updates,
            "multipliers": dict(self.multipliers),
            "history": [dict(entry) for entry in self.history],
            **self.computed.state_dict(),
            "statistics": self.statistics.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load such a state."""
        self.updates = state["updates"]
        self.multipliers = dict(state["multipliers"])
        self.history = [dict(entry) for entry in state["history"]]
        self.computed.load_state_dict(state)
        self.statistics.load_state_dict(state["statistics"])


class SourceConflict(Hook):
    """Meters the cosines between the gradients of a step's sources. `meters` is the dict of the
    controller's meters."""

    def __init__(
        self,
        config: GradientControlConfig,
        sample: Callable[[], Sample],
        meters: dict[str, Tensor],
    ):
        self.config = config
        self.sample = sample
        self.remaining = MIXED  # the source that gets the rest of the next backward's gradient
        self.latest = meters

    @functools.cached_property
    def bank(self) -> SourceBank:
        """The gradients by source."""
        return SourceBank(self.sample())

    def before_backward(self, losses: Tensor, sources: list[str], scale: float = 1.0) -> None:
        """Keep the gradient of each source of a mixed micro-batch; the last source gets the rest,
        from the backward that follows.

        Every source but the last costs one more backward. It does not add to the accumulated
        gradient, and DDP's hooks do not see it.
        """
        names = sorted(set(sources))
        self.bank.split(names[:-1], losses, sources, scale)
        self.remaining = names[-1]

    @torch.no_grad()
    def after_backward(self, last: bool = True) -> None:
        """Assign the part of the gradient that no source has yet to the remaining source; the
        gradient itself is unchanged."""
        self.bank.after_backward(last, self.remaining)
        self.remaining = MIXED

    @torch.no_grad()
    def before_step(
        self, step: int, finite: Tensor | None = None, norms: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Meter the cosines of the step's sources."""
        if len(self.bank.parts) > 1:
            self.latest |= self.bank.cosines(each=self.config.sources == "role")
        self.bank.parts.clear()
        return {}


class Controller(Hooks):
    """Gradient control as one hook, of the parts that its configuration turns on; `uniform` alone
    does nothing.

    Order in a step: `before_backward` and `after_backward` around each backward
    (only where sources count); then, on the whole and unscaled gradient, `before_step`, clip once,
    `optimizer.step()`, `after_step`, and only then the scheduler.
    """

    def __init__(
        self,
        model: nn.Module,
        config: GradientControlConfig,
        seed: int = 0,
        groups: Groups | None = None,
    ):
        self.config = config
        self.rules = check_config(config)
        self.groups = groups or group_parameters(model)
        self.params = [p for group in self.groups for p in group]
        self.rates_differ = [*self.rules] != ["uniform"]
        self._model = model
        self._latest: dict[str, Tensor] = {}  # the meters that a checkpoint keeps

        sdxl = any("add_embedding." in name for name, _ in model.named_parameters())
        for place in filter(user_code.is_place, self.rules):
            examples = rule_examples(self.groups.names, sdxl)
            SCALE_RULES.try_part(place, self.rules[place][1], examples)
        # chosen at the first use: by then the model is on its device
        sample = functools.cache(
            lambda: Sample([*self.groups], config.sample, self.params[0].device)
        )
        self.layer_rates = LayerRates(
            config,
            groups=self.groups,
            rules=self.rules,
            sample=sample,
            meters=self._latest,
            seed=seed,
            sdxl=sdxl,
        )
        self.source_conflict = SourceConflict(config, sample, self._latest)

        chosen = (
            (self.source_conflict, config.conflict),
            (self.layer_rates, self.rates_differ),
        )
        super().__init__([hook for hook, is_on in chosen if is_on])

    @property
    def multipliers(self) -> dict[str, float]:
        """{group: the present multiplier of its learning rate}."""
        return self.layer_rates.multipliers

    @property
    def history(self) -> list[dict[str, Any]]:
        """[{"step", "multipliers"}], one entry a change; empty where all rates are one."""
        return self.layer_rates.history if self.rates_differ else []

    # ---- the optimizer
    def param_groups(self, weight_decay: float | None = None) -> list[dict[str, Any]]:
        """Parameter groups for the optimizer: one for each layer group, or a single one if all
        rates are always equal."""
        decay = {} if weight_decay is None else {"weight_decay": weight_decay}
        named = {"all": [p for p in self._model.parameters() if p.requires_grad]}
        if self.rates_differ and self.config.apply != "gradient":
            named = dict(zip(self.groups.names, self.groups, strict=True))
        groups = [{"params": params, "name": name, **decay} for name, params in named.items()]
        return (
            split(groups, self._model, self.config.spectral_except)
            if self.config.spectral
            else groups
        )

    def attach(self, optimizer: torch.optim.Optimizer, lr_scheduler: Any = None) -> None:
        """Store the optimizer, wrapped or not. Refuses one on which multipliers cannot act."""
        names = self.groups.names if self.rates_differ else None
        inner = check_optimizer(optimizer, lr_scheduler, names, self.config.apply)
        if self.config.spectral and not isinstance(inner, SpectralAdamW):
            raise UserError(
                f"gradient_control.spectral: {type(inner).__name__} makes no spectral updates; "
                "take silentbad.control.spectral.SpectralAdamW"
            )
        self.layer_rates.optimizer = inner

    # ---- the step, as a loop of your own calls it
    def after_backward(self, last: bool = True, source: str | None = None) -> None:
        """`source` is the source of this backward, where `before_backward` was not called."""
        if source is not None:
            self.source_conflict.remaining = source
        super().after_backward(last)

    def after_step(self, step: int = 0, skipped: bool = False) -> None:
        """Call it before the scheduler's step."""
        super().after_step(step, skipped)

    # ---- records
    def meters(self) -> dict[str, Tensor]:
        """Device scalars for the tracker; empty for `uniform`."""
        return self._latest | super().meters()

    def state_dict(self) -> dict[str, Any]:
        """All that a bit-exact resume needs; call between steps."""
        state: dict[str, Any] = {
            "groups": self.groups.parameters,
            "rule": user_code.short(self.config.name),
            "meters": {name: value.clone() for name, value in self._latest.items()},
        }
        if self.rates_differ:
            state |= self.layer_rates.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state. Raises UserError if it has another rule or other groups."""
        for key, now in (
            ("rule", user_code.short(self.config.name)),
            ("groups", self.groups.parameters),
        ):
            if state[key] != now:
                what = f"{key}: {shown(state[key])}, now {shown(now)}"
                raise UserError(f"gradient_control: the checkpoint was written with other {what}")
        self._latest.clear()
        self._latest |= scalars(state["meters"])
        if self.rates_differ:
            self.layer_rates.load_state_dict(state)


def shown(value: str | dict[str, int]) -> str:
    """A rule by its name, groups by their size."""
    return (
        f"{len(value)} groups, {sum(value.values())} parameters"
        if isinstance(value, dict)
        else repr(value)
    )
