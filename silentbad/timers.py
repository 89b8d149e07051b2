"""Where the host's time goes."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class Timers:
    """Seconds by activity since the last reading, as the host sees them: on an accelerator the time of work that was
    only launched falls to whatever waits for it, the update."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self.began, self.samples = time.perf_counter(), 0

    @contextmanager
    def of(self, activity: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.spent[activity] = self.spent.get(activity, 0.0) + time.perf_counter() - started

    def waiting(self, activity: str, items: Iterable[Any]) -> Iterator[Any]:
        """The items, the time until each is there counted."""
        iterator, end = iter(items), object()
        while True:
            with self.of(activity):
                item = next(iterator, end)
            if item is end:
                return
            yield item

    def read(self, samples: int) -> dict[str, float]:
        """Shares of the time since the last reading, in [0, 1], and samples a second; `samples` is the count so far."""
        now = time.perf_counter()
        passed = max(now - self.began, 1e-9)
        values = {f"time/{activity}": seconds / passed for activity, seconds in self.spent.items()}
        values["samples_per_second"] = (samples - self.samples) / passed
        self.spent, self.began, self.samples = {}, now, samples
        return values
