"""Rows of metrics.jsonl and of the trackers."""

from typing import Any

from silentbad.loop.meters import Meters, Timers
from silentbad.loop.state import TrainState
from silentbad.saving.folder import RunFolder


class Log:
    """One row every so many updates, one a validation; the one place where the host waits for
    the meters."""

    def __init__(
        self,
        folder: RunFolder,
        state: TrainState,
        accelerator: Any,
        meters: Meters,
        timers: Timers,
        effective_batch: int,
    ):
        self.folder, self.state, self.accelerator = folder, state, accelerator
        self.meters, self.timers, self.effective_batch = meters, timers, effective_batch

    def training(self, *scalars: dict[str, Any]) -> dict[str, float]:
        """Write the means since the last row, and further `scalars`; returns the means.
        Collective."""
        state = self.state
        self.meters.share(self.accelerator)
        for values in scalars:
            self.meters.add(values)
        samples = state.draw * self.effective_batch
        values = self.meters.read() | {"lr": state.rate, "skipped": state.skipped}
        values, timings = values | {"samples": samples}, self.timers.read(samples)
        self.folder.log({"step": state.step, "epoch": state.epoch, **values})
        self.folder.log({"step": state.step, **timings}, "timings.jsonl")
        self.accelerator.log(values | timings, step=state.step)
        return values

    def validation(self, scores: dict[str, float]) -> None:
        """What a validation measured."""
        self.folder.log(
            {"step": self.state.step, "epoch": self.state.epoch, "validation": True, **scores}
        )
        self.accelerator.log(scores, step=self.state.step)

    def say(self, text: str) -> None:
        """A line for the user, with where the run is."""
        self.accelerator.print(
            f"{self.folder.path}: step {self.state.step} of {self.state.total}: {text}"
        )
