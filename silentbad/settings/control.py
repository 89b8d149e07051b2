"""The settings of gradient control; gradient_control.py explains them."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from annotated_types import Interval

from silentbad.errors import UserError
from silentbad.settings.types import (
    Count,
    Decay,
    Factor,
    Natural,
    Positive,
    Registry,
    Weight,
    check_values,
    option,
    parse_combination,
)

# an option that has an effect with a rule other than `uniform`
of_rule = partial(option, needs="gradient_control.name", idle="warned")


@dataclass
class GradientControlConfig:
    """Nested under --gradient_control.*; of a combination, options by rule."""

    name: str = option("uniform", "a rule of SCALE_RULES or PATH.py:NAME, or several, joined by +")
    options: dict[str, Any] = option({}, "of the rule; of a combination: rule -> options")
    weights: dict[str, Weight] = option({}, "rule -> its weight in log space (default 1)")
    apply: Literal["lr", "gradient"] = of_rule(
        "lr", "on learning rates, or (for comparison) on gradients"
    )
    bound: Factor = of_rule(4.0, "A: every multiplier stays in [1/A, A]")
    warmup: Natural = of_rule(
        50, "updates with all multipliers 1; the rule fades in over as many again"
    )
    refresh: Count = of_rule(
        10, "updates between two computations; a result takes effect one refresh later"
    )
    max_log_step: Positive = of_rule(0.25, "|d log a| of a group between two refreshes")
    momentum: Decay = of_rule(0.9, "decay of m, the running mean of the gradients")
    averaging: Decay = of_rule(0.98, "decay of the running statistics S, E, Q")
    sample: Annotated[int, Interval(ge=1, le=16384)] = option(
        8192,
        "coordinates of m kept per tensor",
        needs="gradient_control.name or gradient_control.conflict",
        idle="warned",
    )
    conflict: bool = option(False, "meter the cosines between the gradients of the sources")
    sources: Literal["role", "element"] = option(
        "role",
        "told apart by role (element, clean, rehearsal), or element: each element is one",
        needs="gradient_control.conflict",
        idle="warned",
    )
    spectral: bool = option(
        False, "update matrices by Muon: rare directions move as far as frequent ones"
    )
    spectral_except: list[str] = option(
        [],
        "layers that keep AdamW, as train_layers: time, proj",
        needs="gradient_control.spectral",
        idle="warned",
    )


RuleTable = dict[str, tuple[float, dict[str, Any]]]  # {rule: (its weight, its options)}


def rules_of(
    name: str, options: dict[str, Any], weights: dict[str, Any], registry: Registry
) -> RuleTable:
    """The rules that a name such as "prior+gsnr" combines, checked against `registry`."""
    per_rule = parse_combination("gradient_control", registry, name, options)
    for key in weights:
        if key not in per_rule:
            raise UserError(f"gradient_control.weights: {key!r} is no rule of {name}")
    return {
        rule: (float(weights.get(rule, 1.0)), rule_options)
        for rule, rule_options in per_rule.items()
    }


def check_control(config: GradientControlConfig, rules: Registry) -> RuleTable:
    """The rules of the settings, or a UserError that names the key."""
    check_values(config, "gradient_control.")
    table = rules_of(config.name, config.options, config.weights, rules)
    if "placebo" in table:
        _, options = table["placebo"]
        of = options["of"]
        if "placebo" in of.split("+"):
            raise UserError("placebo: option 'of' must be another rule, got 'placebo'")
        rules_of(of, options.get("options") or {}, options.get("weights") or {}, rules)
    return table
