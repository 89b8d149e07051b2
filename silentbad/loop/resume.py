"""The checkpoints of a run: saved by all processes together, loaded, and saved once more when it
fails."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from silentbad.data.loader import Loader
from silentbad.distributed import shards
from silentbad.errors import UserError, user_errors, warn, writing
from silentbad.loop.meters import Meters, Timers
from silentbad.loop.signals import Interrupted
from silentbad.loop.state import TrainState
from silentbad.saving import checkpoint, identity
from silentbad.saving.folder import SAVED, RunFolder


@dataclass
class Checkpoints:
    """checkpoints/step-N of a run folder, `limit` at most; `facts` are the run's."""

    folder: RunFolder
    state: TrainState
    accelerator: Any
    meters: Meters
    timers: Timers
    limit: int | None
    facts: dict[str, Any]

    def save(self, reason: str) -> None:
        """Write step-N on the main process, then rotate. Collective: every process calls it and
        waits for it.

        Raises UserError if a weight is NaN or infinite: earlier checkpoints stay."""
        self.state.refuse_nonfinite()
        self.meters.share(self.accelerator)
        self._write(reason)
        self.accelerator.wait_for_everyone()

    def _write(self, reason: str) -> None:
        path = self.folder.checkpoints / f"step-{self.state.step}"
        with self.timers.of("save"):
            gathered = self.state.gathered(keep=self.accelerator.is_main_process)
        if not self.accelerator.is_main_process or checkpoint.problem(path) is None:
            return

        def write(draft: Path) -> None:
            self.state.write(draft, gathered)
            facts = json.dumps(self.facts, indent=1)
            (draft / identity.FILE).write_text(facts, encoding="utf-8")

        with self.timers.of("save"), writing(f"output_dir {self.folder.path}", path.name):
            checkpoint.save(path, write, {"step": self.state.step, "reason": reason})
        self.folder.log({"step": self.state.step, SAVED: reason}, "timings.jsonl")
        checkpoint.rotate(self.folder.checkpoints, self.limit, path)

    def load(self, path: Path) -> None:
        """Load a checkpoint. Raises UserError if it is of another run or does not fit."""
        if lines := identity.differences(identity.read(path), self.facts):
            raise UserError(
                f"{path}: cannot be resumed with other settings or data: {'; '.join(lines)}; "
                "resume with its config.yaml, or start a new run"
            )
        self.state.read(path)
        self.meters.to(self.accelerator.device)

    @contextmanager
    def rescue(self, loader: Loader) -> Iterator[None]:
        """On an exception save a checkpoint, unless an update was half done, the weights are
        sharded, or the run is a dry run."""
        state = self.state
        resumable = not self.folder.config.dry_run and not shards.sharded(state.model)
        try:
            yield
        except Exception as error:
            if resumable and state.step > 0 and not state.updating:
                if loader.drawing == state.draw:
                    loader.rewind()
                try:
                    # by this process alone: the others may be at any step, or have ended
                    state.refuse_nonfinite()
                    self._write("signal" if isinstance(error, Interrupted) else "exception")
                except Exception as second:  # a full disk must not hide the first error
                    warn(f"no checkpoint after {type(error).__name__}: {second}")
            with user_errors(f"output_dir {self.folder.path}: step {state.step}", kinds=OSError):
                raise
