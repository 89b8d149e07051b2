"""The part of a command that needs no torch: parse, check, and report a mistake."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from silentbad.errors import UserError, exit_with, heed_signals, leave, print_error
from silentbad.settings.check import check, check_inputs, merged, with_base
from silentbad.settings.reader import parse, with_source
from silentbad.settings.train import TrainConfig

T = TypeVar("T")


def training(argv: Sequence[str] | None, about: str | None) -> tuple[TrainConfig, dict[str, str]]:
    """(configuration, where each key was set) of a training, checked; or SystemExit(0)."""
    config, sources = parse(TrainConfig, argv, about)
    config = with_base(config)
    try:
        check(config, sources)
        check_inputs(config)
    except UserError as error:
        raise UserError(with_source(str(error), sources)) from None
    return merged(config), sources


def options(cls: type[T], argv: Sequence[str] | None = None, about: str | None = None) -> T:
    """The options of a smaller command, checked.

    The class may name options that must be given (NEEDED), and refuse more in `check(sources)`. Raises
    UserError for a mistake, SystemExit(0) after --help or --print_config.
    """
    settings, sources = parse(cls, argv, about)
    for name in getattr(cls, "NEEDED", ()):
        if getattr(settings, name) is None:
            raise UserError(f"--{name}: is missing; --help lists the flags")
    if hasattr(settings, "check"):
        settings.check(sources)
    return settings


def early(read: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """What `read` returns; a mistake in it, or --help, ends the process."""
    result: list[T] = []

    def parse() -> int:
        try:
            result.append(read(*arguments, **named))
        except UserError as error:
            return refused(error)
        except SystemExit as stop:  # after --help or --print_config
            return int(stop.code or 0)
        return 0

    try:
        exit_with(parse)
    except SystemExit:
        if not result:
            raise
    heed_signals(leave)  # until the imports are done and `exit_with` is called again
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print("loading", file=sys.stderr, flush=True)
    return result[0]


def refused(error: UserError, sources: dict[str, str] | None = None, each: bool = False) -> int:
    """Print a mistake; returns exit code 2.

    Until the processes of a launch are connected, all of them make the same mistake, and only the
    first process of each node prints it. With `each`, every process prints its own."""
    line = with_source(str(error), sources or {})
    rank = os.environ.get("RANK", "0")
    if each or os.environ.get("LOCAL_RANK", "0") == "0":
        print_error(line if rank == "0" else f"rank {rank}: {line}")
    return 2
