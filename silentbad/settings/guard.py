"""The settings of what stands between a scan's suspects and training; docs/shield.md explains
each guard."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from silentbad.errors import UserError
from silentbad.settings.types import Location, Registry, check_options, check_values, option


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
    """{guard: its options}, all checked; {"none": {}} where nothing guards.

    `registry` holds the guards, and none.
    """
    check_values(config, "guard.")
    names = config.name.split("+")
    if len(names) > 1 and "none" in names:
        raise UserError(f"guard.name: {config.name} joins none, which guards nothing; leave it out")
    if len({*names}) < len(names):
        raise UserError(f"guard.name: {config.name} names a guard twice; once is enough")
    if len(names) == 1:
        options = {config.name: config.options}
    else:
        unknown = [key for key in config.options if key not in names]
        if unknown:
            raise UserError(
                f"guard.options: {unknown[0]!r} is not a guard of {config.name}; "
                f"give {names[0]}: {{...}}"
            )
        options = {name: config.options.get(name, {}) for name in names}
    for name, given in options.items():
        check_options("guard", registry, name, given)
    return options


def check_scan(path: str, flag: str) -> None:
    """Refuse a scan that is not there."""
    file = Path(path, "scan.json") if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise UserError(f"{flag}: no file {file}; {ADVICE}")
