"""The settings of what stands between a scan's suspects and training; docs/shield.md explains
each guard."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from silentbad.errors import UserError
from silentbad.settings.types import Location, Registry, check_values, option, parse_combination


@dataclass
class GuardConfig:
    """What stands between the data and training."""

    name: str = option("none", "of GUARDS, or several: mask+cap")
    scan: Location | None = option(
        None, "the scan.json that names the suspects", needs="guard.name"
    )
    options: dict[str, Any] = option(
        {}, "of the guard; of several: guard -> options", needs="guard.name"
    )


ADVICE = "make it with `python -m silentbad.scan`"


def parse_guards(config: GuardConfig, registry: Registry) -> dict[str, dict[str, Any]]:
    """{guard: its options}, checked against `registry`; {"none": {}} where nothing guards."""
    check_values(config, "guard.")
    return parse_combination("guard", registry, config.name, config.options)


def check_scan(path: str, flag: str) -> None:
    """Refuse a scan that is not there."""
    file = Path(path, "scan.json") if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise UserError(f"{flag}: no file {file}; {ADVICE}")
