"""The settings of memory reinforcement; memory_reinforce.py explains them."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from silentbad.settings.types import (
    NotNegative,
    Positive,
    Ratio,
    Registry,
    Share,
    Small,
    Unit,
    check_name,
    check_options,
    check_values,
    option,
)

ROLES = ("element", "rehearsal", "clean")  # of a record
SAME = "same"  # the timesteps of `memory.timesteps`


@dataclass
class Choice:
    """A registry entry by name, with its keyword options."""

    name: str = option("none")
    options: dict[str, Any] = option({})


@dataclass
class RoleConfig:
    """Of the records of one role."""

    caption_dropout: Unit = option(
        0.0, "share of their exposures without a caption (2207.12598; of clean ones 2503.20240)"
    )
    loss_weight: NotNegative = option(
        1.0, "factor of their loss (of clean ones the prior weight of DreamBooth, 2208.12242)"
    )
    # entry of TIMESTEPS in place of memory.timesteps
    timesteps: Choice = field(default_factory=lambda: Choice(SAME))


@dataclass
class RolesConfig:
    """By role."""

    element: RoleConfig = field(default_factory=RoleConfig)
    rehearsal: RoleConfig = field(default_factory=RoleConfig)
    clean: RoleConfig = field(default_factory=RoleConfig)


@dataclass
class SamplerConfig(Choice):
    """Which element is shown how often: an entry of SAMPLERS."""

    name: str = option("uniform")
    clean_ratio: Ratio | None = option(
        None, "clean exposures per element exposure; None: every record once"
    )


@dataclass
class TimestepConfig(Choice):
    """The distribution of noise levels: an entry of TIMESTEPS."""

    name: str = option("uniform")
    importance: bool = option(
        True,
        "w = 1/(T p): the policy changes the variance, not the objective",
        needs="memory.timesteps.name or memory.roles.element.timesteps.name or "
        "memory.roles.rehearsal.timesteps.name or memory.roles.clean.timesteps.name or hooks",
        idle="warned",
    )


@dataclass
class LossConfig(Choice):
    """The loss weight by noise level, an entry of LOSSES, and the error, an entry of ERRORS."""

    error: str = option("mse")
    huber_delta: Positive = option(0.1, needs="memory.loss.error", idle="warned")
    dream: NotNegative | None = option(None, "detail preservation of DREAM (2312.00210); None: off")


of_probes = partial(option, needs="memory.phrase_memory.enabled", idle="warned")


@dataclass
class PhraseMemoryConfig:
    """The probes that measure each element's strength rho_i."""

    enabled: bool = option(False)
    share: Share = of_probes(
        0.03, "of the step budget, counted in UNet forwards (a training forward + backward is 3)"
    )
    images: Small = of_probes(4, "pictures of an element its probes look at")


@dataclass
class MemoryConfig:
    """Nested under --memory.*; everything is off by default."""

    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    timesteps: TimestepConfig = field(default_factory=TimestepConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    roles: RolesConfig = field(default_factory=RolesConfig)
    region: Choice = field(default_factory=Choice)
    rehearsal: Choice = field(default_factory=Choice)
    phrase_memory: PhraseMemoryConfig = field(default_factory=PhraseMemoryConfig)
    distillation: Choice = field(default_factory=Choice)
    retention: Choice = field(default_factory=Choice)  # what keeps clean prompts as they were


# REHEARSED: rehearsals whose records have the role rehearsal. PLACED: rehearsals that need masks of
# the elements and a region of the loss (silentbad/settings/rules.py).
REHEARSED = ("leak_free", "pairwise", "pairwise_captions")
PLACED = ("joint_captions", "pairwise", "pairwise_captions")


def role_settings(memory: MemoryConfig) -> dict[str, RoleConfig]:
    """The settings of each role."""
    return {role: getattr(memory.roles, role) for role in ROLES}


def dropout(memory: MemoryConfig) -> dict[str, float]:
    """The share of exposures without a caption, of the roles that have one."""
    return {
        role: settings.caption_dropout
        for role, settings in role_settings(memory).items()
        if settings.caption_dropout
    }


def policies(memory: MemoryConfig) -> dict[str, Choice]:
    """{role: timestep policy}, for the roles that have a policy of their own."""
    return {
        role: settings.timesteps
        for role, settings in role_settings(memory).items()
        if settings.timesteps.name != SAME
    }


def check_memory(memory: MemoryConfig, registries: dict[str, Registry]) -> None:
    """Refuse unknown names and options, and wrong values. `registries`: one for each slot."""
    check_values(memory, "memory.")
    for key, registry in registries.items():
        slot, _, field_name = key.partition(".")
        part = getattr(memory, slot)
        if not field_name:
            check_options(f"memory.{slot}", registry, part.name, part.options)
        else:
            check_name(f"memory.{key}", registry, getattr(part, field_name))
    for role in ROLES:
        part = getattr(memory.roles, role).timesteps
        timesteps = {SAME: {}} if part.name == SAME else registries["timesteps"]
        check_options(f"memory.roles.{role}.timesteps", timesteps, part.name, part.options)
