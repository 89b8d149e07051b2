"""The settings of gradient control; what they mean is in gradient_control.py."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from silentbad.errors import UserError
from silentbad.settings import user_code
from silentbad.settings.types import (
    Count,
    Decay,
    Natural,
    Positive,
    Range,
    Registry,
    Weight,
    check_options,
    check_values,
    off_default,
)


@dataclass
class BetweenConfig:
    """Nested under --gradient_control.between.*: the factors between sources."""

    name: str = "none"  # a rule of SOURCE_RULES, or none
    options: dict[str, Any] = field(default_factory=dict)  # of the rule
    levels: dict[str, Annotated[float, Range(1e-6, 1e6)]] = field(
        default_factory=lambda: {"clean": 0.1}
    )  # w: each source's mean factor, of clean and rehearsal; elements have 1
    ramp: Natural = 0  # updates in which a level falls from 1 to w, geometrically; 0: at once
    release: Natural | None = None  # updates after which it rises to 1 again, as fast; unset: never
    bound: Annotated[float, Range(at_least=1)] = 5.0  # A: a layer's factor stays in [w/A, w A]
    warmup: Natural = 20  # updates at the level alone; the rule fades in over as many again
    refresh: Count = 10  # updates between two computations; a result takes effect one refresh later
    max_log_step: Positive = 0.5  # |d log a| of a group between two refreshes
    momentum: Decay = 0.9  # of each source's mean gradient
    averaging: Decay = 0.98  # of its statistics
    sample: Annotated[int, Range(at_least=1, at_most=16384)] = 2048  # coordinates kept per tensor and source

    @property
    def layerwise(self) -> bool:
        """Whether layers differ, so that micro-batches must be of one source each."""
        return self.name not in ("none", "uniform")


@dataclass
class GradientControlConfig:
    """Nested under --gradient_control.*; a combination has one option dict a rule: {gsnr: {floor: 1e-3}}."""

    name: str = "uniform"  # a rule of SCALE_RULES, or several: prior+gsnr
    options: dict[str, Any] = field(default_factory=dict)  # of the rule; of a combination: rule -> options
    weights: dict[str, Weight] = field(default_factory=dict)  # rule -> its weight in log space (default 1)
    apply: Literal["lr", "gradient"] = "lr"  # on learning rates, or (for comparison) on gradients
    bound: Annotated[float, Range(at_least=1)] = 4.0  # A: every multiplier stays in [1/A, A]
    warmup: Natural = 50  # updates with all multipliers 1; the rule fades in over as many again
    refresh: Count = 10  # updates between two computations; a result takes effect one refresh later
    max_log_step: Positive = 0.25  # |d log a| of a group between two refreshes
    momentum: Decay = 0.9  # of m
    averaging: Decay = 0.98  # of S, E, Q
    sample: Annotated[int, Range(at_least=1, at_most=16384)] = 8192  # coordinates of m kept per tensor
    conflict: bool = False  # meter the cosines between the gradients of the sources
    sources: Literal["role", "element"] = (
        "role"  # told apart by role (element, clean, rehearsal), or element: each element is one
    )
    transform: str = "none"  # of TRANSFORMS: recombine the sources' gradients
    between: BetweenConfig = field(default_factory=BetweenConfig)  # factors between the sources; they act on gradients
    shrink: bool = False  # shrink each weight's AdamW update to what rises above its gradient's noise
    spectral: bool = False  # move each matrix equally far in all its directions (Muon): the rare ones as fast

    @property
    def own_rules(self) -> list[str]:
        """The rules that are code of the user's own, PATH.py:NAME; those that a placebo copies among them."""
        named = [*self.name.split("+"), *self._copied()]
        return [rule for rule in dict.fromkeys(named) if user_code.is_place(rule)]

    @property
    def uses_hypergradient(self) -> bool:
        """Whether a rule learns from rehearsals: the hypergradient, or its placebo."""
        return "hypergradient" in [*self.name.split("+"), *self._copied()]

    def _copied(self) -> list[str]:
        """The rules that a placebo shuffles."""
        rules = self.name.split("+")
        options = self.options if len(rules) == 1 else self.options.get("placebo", {})
        return str(options.get("of", "")).split("+") if "placebo" in rules else []


RuleTable = dict[str, tuple[float, dict[str, Any]]]  # {rule: (its weight, its options)}


def rules_of(name: str, options: dict[str, Any], weights: dict[str, Any], registry: Registry) -> RuleTable:
    """The rules that a name such as "prior+gsnr" combines, all checked against `registry`.

    `options` are the rule's, or rule -> options where several are combined.
    """
    rules = name.split("+")
    if len(set(rules)) < len(rules):
        raise UserError(f"gradient_control.name: {name} names a rule twice; its weight makes it count more")
    if len(rules) > 1:
        _check_keys("options", options, rules)
    _check_keys("weights", weights, rules)
    per_rule = options if len(rules) > 1 else {name: options}
    for rule in rules:
        check_options("gradient_control", registry, rule, per_rule.get(rule, {}))
    return {rule: (float(weights.get(rule, 1.0)), per_rule.get(rule, {})) for rule in rules}


def _check_keys(what: str, given: dict[str, Any], rules: list[str]) -> None:
    """Refuse an entry of `given` for a rule that is not combined."""
    unknown = [key for key in given if key not in rules]
    if unknown:
        raise UserError(f"gradient_control.{what}: {unknown[0]!r} is not a rule of {'+'.join(rules)}")


def check_control(config: GradientControlConfig, rules: Registry, sources: Registry, transforms: Registry) -> RuleTable:
    """The rules of the settings, or a UserError that names the key.

    `rules`, `sources` and `transforms` are SCALE_RULES, SOURCE_RULES and TRANSFORMS.
    """
    check_values(config, "gradient_control.")
    table = rules_of(config.name, config.options, config.weights, rules)
    if "placebo" in table:
        _, options = table["placebo"]
        of = options.get("of", "prior+gsnr")
        copied = rules_of(of, options.get("options") or {}, options.get("weights") or {}, rules)
        if "placebo" in copied:
            raise UserError("placebo: option 'of' must be another rule, got 'placebo'")
    check_options("gradient_control.transform", transforms, config.transform, {})
    readers = {
        "conflict": config.conflict,
        "transform": config.transform != "none",
        "name": config.uses_hypergradient,
    }
    check_between(config.between, [key for key, on in readers.items() if on], sources)
    return table


OTHERS = ("clean", "rehearsal")  # sources with a level; elements have 1


def check_between(config: BetweenConfig, readers: list[str], registry: Registry) -> None:
    """Refuse what cannot work; `readers` are keys that read the sources' gradients."""
    key = "gradient_control.between"
    if config.name == "none":
        if names := off_default(config):
            raise UserError(f"{key}.{names[0]}: acts with a rule, and {key}.name is none; set it, or leave this out")
        return
    check_options(key, registry, config.name, config.options)
    if config.layerwise and readers:
        what = f"takes the sources' gradients apart, which between.name={config.name} scales on their way"
        raise UserError(f"gradient_control.{readers[0]}: {what}; leave one of them out")
    if config.options.get("of", "contrast") not in {*registry} - {"placebo"}:
        raise UserError(f"{key}.options: 'of' must be another rule than placebo: {', '.join(registry)}")
    unknown = [source for source in config.levels if source not in OTHERS]
    if unknown:
        raise UserError(f"{key}.levels: {unknown[0]!r} has no level; elements are 1, there are: {', '.join(OTHERS)}")
