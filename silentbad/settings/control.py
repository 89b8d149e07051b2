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
    option,
)


def of_between(default: Any, help: str = "") -> Any:
    """An option of a rule between the sources."""
    return option(default, help, needs="gradient_control.between.name")


@dataclass
class BetweenConfig:
    """Nested under --gradient_control.between.*: the factors between sources."""

    name: str = option("none", "a rule of SOURCE_RULES, or none")
    options: dict[str, Any] = of_between({}, "of the rule")
    levels: dict[str, Annotated[float, Range(1e-6, 1e6)]] = of_between(
        {"clean": 0.1}, "w: each source's mean factor, of clean and rehearsal; elements have 1"
    )
    ramp: Natural = of_between(
        0, "updates in which a level falls from 1 to w, geometrically; 0: at once"
    )
    release: Natural | None = of_between(
        None, "updates after which it rises to 1 again, as fast; unset: never"
    )
    bound: Annotated[float, Range(at_least=1)] = of_between(
        5.0, "A: a layer's factor stays in [w/A, w A]"
    )
    warmup: Natural = of_between(
        20, "updates at the level alone; the rule fades in over as many again"
    )
    refresh: Count = of_between(
        10, "updates between two computations; a result takes effect one refresh later"
    )
    max_log_step: Positive = of_between(0.5, "|d log a| of a group between two refreshes")
    momentum: Decay = of_between(0.9, "of each source's mean gradient")
    averaging: Decay = of_between(0.98, "of its statistics")
    sample: Annotated[int, Range(at_least=1, at_most=16384)] = of_between(
        2048, "coordinates kept per tensor and source"
    )

    @property
    def layerwise(self) -> bool:
        """Whether layers differ, so that micro-batches must be of one source each."""
        return self.name not in ("none", "uniform")


def of_rule(default: Any, help: str = "") -> Any:
    """An option of a rule; one for all groups, as by default, has none."""
    return option(default, help, needs="gradient_control.name", idle="said")


@dataclass
class GradientControlConfig:
    """Nested under --gradient_control.*; a combination has one option dict a rule: {gsnr:
    {floor: 1e-3}}."""

    name: str = option("uniform", "a rule of SCALE_RULES, or several: prior+gsnr")
    options: dict[str, Any] = option({}, "of the rule; of a combination: rule -> options")
    weights: dict[str, Weight] = option({}, "rule -> its weight in log space (default 1)")
    apply: Literal["lr", "gradient"] = of_rule(
        "lr", "on learning rates, or (for comparison) on gradients"
    )
    bound: Annotated[float, Range(at_least=1)] = of_rule(
        4.0, "A: every multiplier stays in [1/A, A]"
    )
    warmup: Natural = of_rule(
        50, "updates with all multipliers 1; the rule fades in over as many again"
    )
    refresh: Count = of_rule(
        10, "updates between two computations; a result takes effect one refresh later"
    )
    max_log_step: Positive = of_rule(0.25, "|d log a| of a group between two refreshes")
    momentum: Decay = of_rule(0.9, "of m")
    averaging: Decay = of_rule(0.98, "of S, E, Q")
    sample: Annotated[int, Range(at_least=1, at_most=16384)] = option(
        8192,
        "coordinates of m kept per tensor",
        needs="gradient_control.name or gradient_control.conflict or gradient_control.transform",
        idle="said",
    )
    conflict: bool = option(False, "meter the cosines between the gradients of the sources")
    sources: Literal["role", "element"] = option(
        "role",
        "told apart by role (element, clean, rehearsal), or element: each element is one",
        needs="gradient_control.conflict or gradient_control.transform",
        idle="said",
    )
    transform: str = option("none", "of TRANSFORMS: recombine the sources' gradients")
    # factors between the sources; they act on gradients
    between: BetweenConfig = field(default_factory=BetweenConfig)
    shrink: bool = option(
        False, "shrink each weight's AdamW update to what rises above its gradient's noise"
    )
    spectral: bool = option(
        False, "move each matrix equally far in all its directions (Muon): the rare ones as fast"
    )
    spectral_except: list[str] = option(
        [],
        "layers that keep AdamW, as train_layers: time, proj",
        needs="gradient_control.spectral",
        idle="said",
    )

    @property
    def own_rules(self) -> list[str]:
        """The rules that are code of the user's own, PATH.py:NAME; those that a placebo copies
        among them."""
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


def rules_of(
    name: str, options: dict[str, Any], weights: dict[str, Any], registry: Registry
) -> RuleTable:
    """The rules that a name such as "prior+gsnr" combines, all checked against `registry`.

    `options` are the rule's, or rule -> options where several are combined.
    """
    rules = name.split("+")
    if len(set(rules)) < len(rules):
        raise UserError(
            f"gradient_control.name: {name} names a rule twice; its weight makes it count more"
        )
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
        raise UserError(
            f"gradient_control.{what}: {unknown[0]!r} is not a rule of {'+'.join(rules)}"
        )


def check_control(
    config: GradientControlConfig, rules: Registry, sources: Registry, transforms: Registry
) -> RuleTable:
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
    check_between(config.between, sources)
    return table


OTHERS = ("clean", "rehearsal")  # sources with a level; elements have 1


def check_between(config: BetweenConfig, registry: Registry) -> None:
    """Refuse a rule between sources that is not there, and what it cannot act on."""
    key = "gradient_control.between"
    if config.name == "none":
        return
    check_options(key, registry, config.name, config.options)
    if config.options.get("of", "contrast") not in {*registry} - {"placebo"}:
        raise UserError(
            f"{key}.options: 'of' must be another rule than placebo: {', '.join(registry)}"
        )
    unknown = [source for source in config.levels if source not in OTHERS]
    if unknown:
        raise UserError(
            f"{key}.levels: {unknown[0]!r} has no level; elements are 1, there are: "
            f"{', '.join(OTHERS)}"
        )
