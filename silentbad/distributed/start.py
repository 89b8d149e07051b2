"""The Accelerator, built from this program's settings; the environment variables of accelerate are
checked against them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Timer
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    parse_flag_from_env,
)

from silentbad.errors import UserError, user_errors, warn

PATIENCE = 8.0  # seconds until a wait for other processes is reported
# The processes may lie so far apart: one alone reads a new data set's pictures while the others
# wait, longer than NCCL's ten minutes
APART = timedelta(hours=2)
PRECISIONS = ("no", "fp16", "bf16")
PRECISION = "ACCELERATE_MIXED_PRECISION"
ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"


def start(
    accumulation: int = 1, mixed_precision: str | None = None, tf32: bool = False, **options: Any
) -> Accelerator:
    """The Accelerator; if `mixed_precision` is unset, accelerate's own setting is used. `tf32`:
    matrix products and convolutions in it on CUDA.

    Raises UserError for a precision that this machine or this program does not have, for more
    processes than cards, and where accelerate refuses its configuration or the processes do not
    find each other."""
    if mixed_precision is None:  # a flag's value was checked with the other flags
        asked = os.environ.get(PRECISION, "no")
        if asked not in PRECISIONS:
            raise UserError(f"{PRECISION}: must be no, fp16 or bf16, is {asked!r}")
        check_precision(asked, PRECISION)
    if (other := os.environ.get(ACCUMULATION, "1")) not in ("1", str(accumulation)):
        warn(
            f"{ACCUMULATION} {other} does not count; gradient_accumulation_steps is {accumulation}"
        )
    check_cards()
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    # a plain number would give way to the environment
    plugin = GradientAccumulationPlugin(num_steps=accumulation)
    failed = ("accelerate cannot start", "correct its configuration or its environment variables")
    with report_waiting(), user_errors(*failed):
        return Accelerator(
            gradient_accumulation_plugin=plugin,
            mixed_precision=mixed_precision,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=APART)],
            **options,
        )


@contextmanager
def report_waiting() -> Iterator[None]:
    """A context that reports, after some seconds, the wait for other processes: RANK and WORLD_SIZE
    may be left over in the environment."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT', '29500')}"
    line = f"waiting for {world} processes at {place}; for one, unset RANK and WORLD_SIZE"
    timer = Timer(PATIENCE, warn, [line])
    timer.daemon = True
    if world > 1:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def check_cards() -> None:
    """Refuse more processes on this machine than it has cards: NCCL takes one card for each."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cards = torch.cuda.device_count()
    if processes > cards > 0 and not parse_flag_from_env("ACCELERATE_USE_CPU"):
        raise UserError(
            f"{processes} processes need as many cards, here there are {cards}; start "
            f"--num_processes {cards}, or none on a card with ACCELERATE_USE_CPU=true"
        )


def check_precision(precision: str, key: str) -> None:
    """Refuse half precision that this machine does not have."""
    if precision == "fp16" and not torch.cuda.is_available():
        raise UserError(f"{key}: fp16 needs a CUDA device; use bf16 or no")
