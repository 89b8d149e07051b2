"""The part of a run that changes from step to step: weights, optimizer, schedule, average,
counters; and its `state_dict`.

`step` counts optimizer updates, `draw` effective batches begun: the data of a skipped update is not
drawn again."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from silentbad.distributed import shards
from silentbad.errors import UserError, warn
from silentbad.model.denoiser import load_trained, trained
from silentbad.saving import checkpoint

BINS = 20  # of the histogram of timesteps


class Stateful(Protocol):
    """An object whose state a checkpoint stores."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


class TrainState:
    """The trained module and its progress. `others` are further parts of a checkpoint."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        lr_scheduler: Any,
        ema: Any,
        *,
        total: int,
        steps_per_epoch: int,
        train_timesteps: int,
        best_of: str = "",
        others: dict[str, Stateful | None],
    ):
        self.model = model
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.ema = ema
        self.total = total
        self.steps_per_epoch = steps_per_epoch
        self.train_timesteps = train_timesteps
        self.step = 0  # optimizer updates
        self.skipped = 0  # updates left out because a gradient was not finite
        self.skipped_in_row = 0
        self.rate = 0.0  # of the last update, of the first parameter group
        self.best = float("-inf")  # score of the best pipeline saved
        self.best_of = best_of  # which pipelines are compared, and by what
        # samples that this process drew in each of BINS equal parts of the schedule
        self.timesteps = torch.zeros(BINS)
        self.updating = False  # whether an update is half done
        parts = {**others, "optimizer": optimizer, "lr_scheduler": lr_scheduler}
        self.parts: dict[str, Stateful] = {
            name: part for name, part in parts.items() if part is not None
        }

    @property
    def draw(self) -> int:
        """Effective batches begun, skipped ones included."""
        return self.step + self.skipped

    @property
    def epoch(self) -> float:
        return self.step / self.steps_per_epoch

    def count(self, timesteps: torch.Tensor) -> None:
        """Add timesteps (B,), still on the CPU, to the histogram."""
        self.timesteps = self.timesteps + torch.histc(
            timesteps.float(), bins=BINS, min=0, max=self.train_timesteps
        )

    def advance(self) -> None:
        """After an update: the learning rate's schedule, the average of the weights, the step."""
        self.rate = self.lr_scheduler.get_last_lr()[0]
        self.lr_scheduler.step()
        if self.ema is not None:
            self._average()
        self.step += 1
        self.skipped_in_row = 0

    def _average(self) -> None:
        """Update the average on the device of the weights; with offload_ema, copy it back into its
        CPU memory, which is pinned for a GPU."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        resting = self.ema.shadow_params
        self.ema.to(parameters[0].device, non_blocking=True)
        self.ema.step(parameters)
        if resting[0].device != parameters[0].device:
            torch._foreach_copy_(resting, self.ema.shadow_params)
            self.ema.shadow_params = resting

    @contextmanager
    def update_under_way(self) -> Iterator[None]:
        """A context in which rates, statistics and weights change: after an exception inside it
        nothing is saved."""
        self.updating = True
        yield
        self.updating = False

    def improved(self, score: float) -> bool:
        """Keep a score if it is the best so far; returns whether it is."""
        better = score > self.best
        self.best = max(score, self.best)
        return better

    def skip(self) -> None:
        """An update was left out."""
        self.skipped += 1
        self.skipped_in_row += 1

    def refuse_nonfinite(self) -> None:
        """Refuse to go on with weights that hold NaN or infinity."""
        for name, module in self.model.named_children():
            trains = [p for p in module.parameters() if p.requires_grad]
            weights = [p.to_local() if hasattr(p, "to_local") else p for p in trains]
            if weights and not bool(torch.stack([torch.isfinite(p).all() for p in weights]).all()):
                wrong = f"weights of {name} are not finite any more; lower learning_rate"
                raise UserError(f"step {self.step}: {wrong}")

    # ---- what a checkpoint holds
    def gathered(self, keep: bool) -> dict[str, Any]:
        """Trained weights and the optimizer's state, unsharded. Collective: every process calls it;
        with `keep` it gets the shards of all processes, on the CPU."""
        weights = {name: trained(module) for name, module in self.model.named_children()}
        return shards.gathered(
            {"weights": weights, "optimizer": self.optimizer.state_dict()}, keep=keep
        )

    def write(self, folder: Path, gathered: dict[str, Any]) -> None:
        """A checkpoint's files: weights and average as safetensors, the rest as state."""
        for name, tensors in gathered["weights"].items():
            checkpoint.write_tensors(folder / f"{name}.safetensors", tensors)
        state = self.state_dict() | {"optimizer": gathered["optimizer"]}
        if self.ema is not None:
            shadow = state["ema"].pop("shadow_params")
            checkpoint.write_tensors(
                folder / "ema.safetensors", {str(i): p for i, p in enumerate(shadow)}
            )
        torch.save(state, folder / "state.pt")

    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights and the optimizer's state, which may be sharded."""
        state = {
            name: part.state_dict() for name, part in self.parts.items() if name != "optimizer"
        }
        state["counters"] = {
            "step": self.step,
            "skipped": self.skipped,
            "skipped_in_row": self.skipped_in_row,
            "best": self.best,
            "best_of": self.best_of,
            "timesteps": self.timesteps.clone(),
        }
        return state | ({} if self.ema is None else {"ema": self.ema.state_dict()})

    def read(self, folder: Path) -> None:
        """Load the files of a checkpoint. Raises UserError where they do not fit this run."""
        state = checkpoint.read_state(folder / "state.pt")
        for name, module in self.model.named_children():
            tensors = checkpoint.read_tensors(folder / f"{name}.safetensors")
            with checkpoint.explain_mismatch(folder, name):
                load_trained(module, tensors)
        if self.ema is not None:
            with checkpoint.explain_mismatch(folder, "ema"):
                shadow = checkpoint.read_tensors(folder / "ema.safetensors")
                state["ema"]["shadow_params"] = [
                    shadow[str(i)] for i in range(len(self.ema.shadow_params))
                ]
        self.load_state_dict(state, folder)

    def load_state_dict(self, state: dict[str, Any], source: Path | str = "state") -> None:
        """Load such a state with the optimizer's; `source` names it where it does not fit."""
        with checkpoint.explain_mismatch(source, "optimizer"):
            state["optimizer"] = shards.states_like(self.optimizer, state["optimizer"])
        for name, part in self.parts.items():
            with checkpoint.explain_mismatch(source, name):
                part.load_state_dict(state[name])
        match_memory_format(self.optimizer)
        warn_of_jump(self.lr_scheduler)
        if self.ema is not None:
            with checkpoint.explain_mismatch(source, "ema"):
                resting = self.ema.shadow_params
                self.ema.load_state_dict(state["ema"])
                for mine, saved in zip(resting, self.ema.shadow_params, strict=True):
                    mine.copy_(saved)
                self.ema.shadow_params = resting
        with checkpoint.explain_mismatch(source, "counters"):
            counters = state["counters"]
            self.step = int(counters["step"])
            self.skipped = int(counters["skipped"])
            self.skipped_in_row = int(counters["skipped_in_row"])
            if counters.get("best_of", self.best_of) == self.best_of:
                self.best = float(counters["best"])
            self.timesteps = counters["timesteps"].float()


def warn_of_jump(scheduler: Any) -> None:
    """Warn if the learning rate jumps because the length of its schedule has changed."""
    was = scheduler.get_last_lr()[0]
    now = scheduler.base_lrs[0] * scheduler.lr_lambdas[0](scheduler.last_epoch)
    if not math.isclose(was, now, rel_tol=1e-6):
        why = "the length of its schedule has changed"
        warn(f"the learning rate goes on at {now:.3g} instead of {was:.3g}: {why}")


def match_memory_format(optimizer: torch.optim.Optimizer) -> None:
    """Copy the optimizer's averages into the memory format of their weights: fused kernels read
    both in memory order, and the checkpoint may have the other `channels_last`. Raises UserError
    for averages in 8 bits, whose blocks follow the memory order."""
    for weight, averages in optimizer.state.items():
        for name, value in averages.items():
            if not torch.is_tensor(value) or value.shape != weight.shape:
                continue
            if value.stride() == weight.stride():
                continue
            if not value.is_floating_point():
                right = "averages in 8 bits keep the checkpoint's; resume with its setting"
                raise UserError(f"channels_last: {right}")
            averages[name] = torch.empty_like(weight, dtype=value.dtype, device=value.device)
            averages[name].copy_(value)
