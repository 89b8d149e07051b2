"""What is particular to the records of one role: captions left out, weight of the loss, policy of the timesteps."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

from silentbad.data.schema import ROLES
from silentbad.errors import UserError
from silentbad.options import NotNegative, Unit, check_options, off_default

SAME = "same"  # the timesteps of `memory.timesteps`


@dataclass
class Part:
    """A registry entry by name, with its keyword options."""

    name: str = "none"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class RoleConfig:
    """Of the records of one role."""

    caption_dropout: Unit = 0.0  # share of their exposures without a caption (2207.12598)
    loss_weight: NotNegative = 1.0
    timesteps: Part = field(default_factory=lambda: Part(SAME))  # entry of TIMESTEPS in place of memory.timesteps


@dataclass
class RolesConfig:
    """By role."""

    element: RoleConfig = field(default_factory=RoleConfig)
    rehearsal: RoleConfig = field(default_factory=RoleConfig)
    clean: RoleConfig = field(default_factory=RoleConfig)


# Older names of settings of the clean records.
OF_CLEAN = {"unconditional": "caption_dropout", "clean_weight": "loss_weight"}


def by_role(memory: Any) -> dict[str, RoleConfig]:
    """The settings of each role of a `MemoryConfig`, those of `retention` among them."""
    found = {role: getattr(memory.roles, role) for role in ROLES}
    older = {new: getattr(memory.retention, old) for old, new in OF_CLEAN.items()}
    changed = {name: value for name, value in older.items() if value != getattr(RoleConfig(), name)}
    return found | {"clean": replace(found["clean"], **changed)}


def dropout(memory: Any) -> dict[str, float]:
    """The share of exposures without a caption, of the roles that have one."""
    return {role: own.caption_dropout for role, own in by_role(memory).items() if own.caption_dropout}


def policies(memory: Any) -> dict[str, Part]:
    """The timesteps of the roles that have their own."""
    return {role: own.timesteps for role, own in by_role(memory).items() if own.timesteps.name != SAME}


def check(memory: Any, timesteps: dict[str, Callable]) -> None:
    """Refuse one setting under two names, and a timestep policy that is not in the registry."""
    for old, new in OF_CLEAN.items():
        if getattr(memory.retention, old) != (plain := getattr(RoleConfig(), new)):
            if getattr(memory.roles.clean, new) != plain:
                raise UserError(
                    f"memory.roles.clean.{new}: is memory.retention.{old}, which is set too; set one of them"
                )
    for role in ROLES:
        part = getattr(memory.roles, role).timesteps
        if part.name != SAME or part.options:
            check_options(f"memory.roles.{role}.timesteps", {SAME: _same, **timesteps}, part.name, part.options)


def _same() -> None:
    """Takes no options."""


def refuse_absent(memory: Any, there: Collection[str]) -> None:
    """Refuse settings of a role of which there is no record, neither in the data nor made by a rehearsal, and weights
    that leave nothing to learn."""
    for role in ROLES:
        if (names := off_default(getattr(memory.roles, role))) and role not in there:
            raise UserError(f"memory.roles.{role}.{names[0]}: there is no {role} record to act on; leave it out")
    if there and not any(by_role(memory)[role].loss_weight for role in there):
        raise UserError(f"memory.roles: loss_weight is 0 for {' and '.join(sorted(there))}, so nothing would be learnt")
