"""Running sums on the device, and where the host's time goes."""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from silentbad import BEGAN


class Meters:
    """Running sums on the device; `read` is the one place where the host waits for it."""

    def __init__(self):
        self.sums: dict[str, torch.Tensor] = {}
        self.counts: dict[str, int] = {}

    def add(self, values: dict[str, Any]) -> None:
        """Add scalars: tensors, which stay on their device, or numbers."""
        for name, value in values.items():
            value = torch.as_tensor(value).detach().float().reshape(())
            self.sums[name] = self.sums[name] + value if name in self.sums else value.clone()
            self.counts[name] = self.counts.get(name, 0) + 1

    def share(self, accelerator: Any) -> None:
        """Replace the sums by their means over the processes; all of them call it."""
        if accelerator.num_processes > 1 and self.sums:
            names = sorted(self.sums)
            stacked = torch.stack([self.sums[name].to(accelerator.device) for name in names])
            shared = accelerator.reduce(stacked, reduction="mean")
            self.sums = dict(zip(names, shared.unbind(), strict=True))

    def read(self) -> dict[str, float]:
        """Means since the last read; resets the sums."""
        if not self.sums:
            return {}
        names = list(self.sums)
        device = next(iter(self.sums.values())).device
        means = torch.stack(
            [(self.sums[name] / self.counts[name]).to(device) for name in names]
        ).tolist()
        self.sums = {}
        self.counts = {}
        return dict(zip(names, means, strict=True))

    def to(self, device: torch.device) -> None:
        self.sums = {name: value.to(device) for name, value in self.sums.items()}

    def state_dict(self) -> dict[str, Any]:
        sums = {name: value.cpu() for name, value in self.sums.items()}
        return {"sums": sums, "counts": dict(self.counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums = {name: value.float() for name, value in state["sums"].items()}
        self.counts = dict(state["counts"])


class Timers:
    """Seconds by activity since the last reading, measured on the host. An accelerator's work is
    launched without waiting, so its time counts for the activity that waits, the update."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self.whole: dict[str, float] = defaultdict(float)  # the same since the command began
        self.began = time.perf_counter()
        self.samples = 0

    def start_is_over(self, samples: int = 0) -> None:
        """Count the time so far as `start`; `samples` were drawn in earlier starts of the run."""
        self.began = time.perf_counter()
        self.whole["start"] = self.began - BEGAN
        self.samples = samples

    @contextmanager
    def of(self, activity: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self.spent[activity] = self.spent.get(activity, 0.0) + seconds
            self.whole[activity] += seconds

    def waiting(self, activity: str, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items; the time spent waiting for each counts for `activity`."""
        iterator = iter(items)
        end = object()
        while True:
            with self.of(activity):
                item = next(iterator, end)
            if item is end:
                return
            yield item

    def read(self, samples: int) -> dict[str, float]:
        """Shares of the time since the last reading, and samples a second; `samples` so far."""
        now = time.perf_counter()
        passed = max(now - self.began, 1e-9)
        values = {f"time/{activity}": seconds / passed for activity, seconds in self.spent.items()}
        values["samples_per_second"] = (samples - self.samples) / passed
        self.spent = {}
        self.began = now
        self.samples = samples
        return values

    def text(self) -> str:
        """Where the command's time went, the longest first."""
        total = time.perf_counter() - BEGAN
        whole = self.whole | {"other": max(total - sum(self.whole.values()), 0.0)}
        longest = sorted(whole, key=lambda name: -whole[name])
        parts = [f"{name} {whole[name] / total:.0%}" for name in longest]
        return f"{total:.0f} s: " + ", ".join(parts)
