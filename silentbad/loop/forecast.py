"""The hours, memory and disk of a run, forecast from a few of its steps: the end of a dry run."""

import math
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from silentbad.loop.trains import file_bytes, memory, share, size, weight_bytes, whole_bytes
from silentbad.measure.prompts import on_grid, prompts_due

WARM = 2  # steps, which compile, fill caches and make the optimizer's state
MEASURED = 3  # steps after these


class Forecast:
    """Times steps and one image of a run (`silentbad.loop.assembly.Run`)."""

    def __init__(self, run: Any):
        self.run = run
        self.device = run.accelerator.device
        self.begun = run.state.step
        self.planned = run.state.total
        self.step_seconds = math.nan
        # when the drawing began, when each of its sampling steps ended, when it ended
        self.drawn: list[float] = []
        self.steps = 0  # measured

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def end_of_warm_up(self) -> int:
        """The step at which the timed steps begin; the present step where the run is short."""
        left = self.planned - self.begun
        self.steps = min(MEASURED, max(left - WARM, min(left, 1)))
        return self.begun + min(WARM, left - self.steps)

    @contextmanager
    def timing(self) -> Iterator[int]:
        """Around the timed steps; gives the step to train to."""
        started = self._now()
        yield self.run.state.step + self.steps
        self.step_seconds = (self._now() - started) / max(self.steps, 1)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Around the drawing of one image."""
        self.drawn.append(self._now())
        yield
        self.drawn.append(self._now())

    def sampling_step(
        self, pipe: Any, number: int, timestep: Any, values: dict[str, Any]
    ) -> dict[str, Any]:
        """diffusers' callback after a sampling step of that image."""
        self.drawn.append(self._now())
        return values

    def image_seconds(self, steps: int) -> float:
        """Seconds of an image of `steps` sampling steps; text and decoding count once."""
        each = (self.drawn[-2] - self.drawn[1]) / (len(self.drawn) - 3)
        return self.drawn[-1] - self.drawn[0] + each * (steps - len(self.drawn) + 2)

    # ---- the text of the forecast
    def text(self) -> str:
        """The forecast, a line a quantity."""
        config = self.run.config
        state = self.run.state
        left = self.planned - self.begun
        warm = state.step - self.begun - self.steps
        lines = [
            f"dry run: {warm} warm-up and {self.steps} timed steps"
            f"{', one image' * self.draws()}; only caches are written",
            f"  steps    {left}, of {self.run.loader.effective_batch} samples; an epoch has "
            f"{state.steps_per_epoch}",
            f"  time     {_time(left * self.step_seconds)} to train, "
            f"{self.step_seconds:.3g} s a step",
            f"  trains   {share(self.run.parts)}; {memory(self.moments())} of optimizer",
            f"  memory   {self.memory()}",
            f"  disk     {self.disk()}",
        ]
        if images := self.images():
            steps = config.validation.num_inference_steps
            about = _time(images * self.image_seconds(steps))
            what = f"{images} images of {steps} steps, timed one at a time"
            lines.insert(3, f"  drawing  about {about}: {what}")
        prior = self.run.prior
        if prior is not None and prior.missing:
            seconds = prior.missing * prior.seconds / self.run.accelerator.num_processes
            lines.insert(
                2, f"  prior    about {_time(seconds)}: {prior.missing} pictures by the base"
            )
        return "\n".join(lines)

    def draws(self) -> bool:
        """Whether the run draws images: the peak of memory must then include drawing one."""
        return bool(self.images())

    def images(self) -> int:
        """Pictures that validations and plain prompts draw, without controls."""
        config = self.run.config
        steps = range(self.begun, self.planned)
        points = 1 + sum(on_grid(config.validation, step) for step in steps)
        due = prompts_due(config, self.run.state.steps_per_epoch)
        prompts = (1 + sum(map(due, steps))) * self.run.prompts
        weights = 1 + (config.use_ema and config.validation.weights == "both")
        targets = len(self.run.products.targets) * config.validation.images_per_target
        unrelated = config.validation.unrelated_images if targets else 0
        at_points = min(points, 2) if config.validation.keep is None else points
        return points * targets * weights + prompts + at_points * unrelated * weights

    def memory(self) -> str:
        """The peak so far."""
        unit = 1 if sys.platform == "darwin" else 1024
        of_process = (
            f"{memory(unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)} of this process"
        )
        if self.device.type != "cuda":
            return f"peak {of_process}"
        allocated = memory(torch.cuda.max_memory_allocated(self.device))
        reserved = memory(torch.cuda.max_memory_reserved(self.device))
        return f"peak {allocated} on the device ({reserved} reserved), {of_process}"

    def moments(self) -> int:
        """Bytes of the optimizer's state."""
        optimizer = self.run.state.optimizer
        inner = getattr(optimizer, "optimizer", optimizer)
        return sum(size(entry.values()) for entry in getattr(inner, "state", {}).values())

    def disk(self) -> str:
        """Checkpoints, pipelines and caches."""
        config = self.run.config
        state = self.run.state
        parts = self.run.parts
        average = 0 if state.ema is None else size(state.ema.shadow_params)
        checkpoint = weight_bytes(parts) + self.moments() + average
        count = -(-self.planned // config.checkpointing_steps)
        checkpoints_left = min(count, config.checkpoints_total_limit or count)
        pipeline = file_bytes(parts)
        epochs = self.planned // state.steps_per_epoch
        best = config.save_best or config.validation.keep is not None
        pipelines = 1 + best + epochs // (config.save_ckpt_epoch_interval or epochs + 1)
        disk = self.run.encoder.disk
        cache = config.disk_cache_gb * 2**30 - disk.left if disk is not None else 0
        merged = config.lora.merged * whole_bytes(parts)
        total = (checkpoints_left + 1) * checkpoint + pipelines * pipeline + merged + cache
        return (
            f"{memory(total)}: checkpoints {checkpoints_left} x {memory(checkpoint)} and one "
            f"being written, weights {pipelines} x {memory(pipeline)}, cache {memory(cache)}"
        )


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} hours"
