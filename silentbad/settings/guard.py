"""The settings of what stands between a scan's suspects and training; docs/shield.md explains each guard."""

from dataclasses import dataclass, field
from typing import Any

from silentbad.settings.types import Location


@dataclass
class GuardConfig:
    """What stands between the data and training."""

    name: str = "none"  # of GUARDS, or several: mask+cap
    scan: Location | None = None  # the scan.json that names the suspects
    options: dict[str, Any] = field(default_factory=dict)  # of the guard; of several: guard -> options
