"""The Accelerator, its trackers, and the pictures that they log."""

import importlib.util
from typing import Any

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

from silentbad.distributed.start import start as start_accelerator
from silentbad.errors import UserError, user_errors
from silentbad.settings.reader import flat
from silentbad.settings.train import TrainConfig


def make_accelerator(config: TrainConfig) -> Accelerator:
    """The Accelerator, with the trackers of `report_to`."""
    trackers = None if config.report_to == "none" or config.dry_run else config.report_to
    if trackers and trackers != "all" and importlib.util.find_spec(trackers) is None:
        raise UserError(
            f"report_to: {trackers} is not installed; pip install {trackers}, or use none"
        )
    accelerator = start_accelerator(
        config.gradient_accumulation_steps,
        config.mixed_precision,
        config.allow_tf32,
        log_with=trackers,
        project_config=ProjectConfiguration(
            config.output_dir, logging_dir=f"{config.output_dir}/{config.logging_dir}"
        ),
    )
    return accelerator


def start(accelerator: Accelerator, config: TrainConfig, values: dict[str, Any], step: int) -> None:
    """Open the trackers. Raises UserError where one cannot start: no login, no disk."""
    plain = flat(values)
    for key, value in plain.items():
        plain[key] = value if isinstance(value, (int, float, str)) else str(value)
    resumed = {"tensorboard": {"purge_step": step + 1}} if step else {}
    # each tracker raises errors of its own
    with user_errors(f"report_to: {config.report_to} does not start", "fix its setup, or use none"):
        accelerator.init_trackers(config.tracker_project_name, plain, resumed)
