"""What is particular to the records of one role; the settings are in
silentbad/settings/memory.py."""

from silentbad.settings.memory import (
    OF_CLEAN,
    SAME,
    Part,
    RoleConfig,
    RolesConfig,
    by_role,
    dropout,
    policies,
    refuse_absent,
)
from silentbad.settings.memory import check_roles as check

__all__ = [
    "OF_CLEAN",
    "SAME",
    "Part",
    "RoleConfig",
    "RolesConfig",
    "by_role",
    "check",
    "dropout",
    "policies",
    "refuse_absent",
]
