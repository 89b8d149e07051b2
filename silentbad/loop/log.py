"""Rows of metrics.jsonl and of the trackers."""

from dataclasses import dataclass
from typing import Any

from silentbad.loop.meters import Meters, Timers
from silentbad.loop.state import TrainState
from silentbad.saving.folder import RunFolder


@dataclass
class Log:
    """Writes a row every `log_every` updates and for each validation; meters are read only here."""

    folder: RunFolder
    state: TrainState
    accelerator: Any
    meters: Meters
    timers: Timers
    effective_batch: int

    @property
    def samples(self) -> int:
        """Samples drawn since the run's first start."""
        return self.state.draw * self.effective_batch

    def training(self, scalars: dict[str, Any]) -> dict[str, float]:
        """Write and return the means since the last row, with `scalars`. Collective."""
        state = self.state
        self.meters.share(self.accelerator)
        self.meters.add(scalars)
        values = self.meters.read()
        values |= {"lr": state.rate, "skipped": state.skipped, "samples": self.samples}
        timings = self.timers.read(self.samples)
        self.folder.log({"step": state.step, "epoch": state.epoch, **values})
        self.folder.log({"step": state.step, **timings}, "timings.jsonl")
        self.accelerator.log(values | timings, step=state.step)
        return values

    def validation(self, scores: dict[str, float]) -> None:
        """Write the scores of a validation."""
        self.folder.log(
            {"step": self.state.step, "epoch": self.state.epoch, "validation": True, **scores}
        )
        self.accelerator.log(scores, step=self.state.step)

    def say(self, text: str) -> None:
        """Print a line for the user, with the folder and the step of the run."""
        self.accelerator.print(
            f"{self.folder.path}: step {self.state.step} of {self.state.total}: {text}"
        )
