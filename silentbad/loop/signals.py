"""Requests to a run by signals and trigger files."""

import os
import signal
from typing import Any

import torch
import torch.distributed

from silentbad.saving.folder import RunFolder


class Interrupted(Exception):
    """A signal came during a measurement, which ends between two batches of images."""


class Requests:
    """Requests by signals and trigger files; all processes agree on them at each step boundary.

    SIGTERM, SIGINT and SIGHUP: save and stop with 128 + the signal's number; SIGUSR1: save and go
    on. Under nohup SIGHUP stays ignored. The agreement runs on the host (gloo), so no process waits
    for its device.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)

    def __init__(self, folder: RunFolder):
        self.folder = folder
        self.stop = 0
        self.save = 0
        self.group: Any = None
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.group = torch.distributed.new_group(backend="gloo")

    def __enter__(self) -> "Requests":
        self.previous = {}
        for number in self.SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            try:
                self.previous[number] = signal.signal(number, self._note)
            except ValueError:  # outside the main thread only trigger files work
                break
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: Any) -> None:
        if number == signal.SIGUSR1:
            self.save = 1
            return
        self.stop = number
        said = f"\n{signal.Signals(number).name}: saving and stopping as soon as possible\n"
        os.write(2, said.encode())  # not print: the signal may have come inside one

    def between_batches(self) -> None:
        """Raises Interrupted where a measurement should end at once. Several processes go on until
        all have come to the next step boundary."""
        if self.stop and self.group is None:
            raise Interrupted

    def agreed(self) -> tuple[int, bool, bool]:
        """(signal to stop by or 0, save now, validate now), the same on every process."""
        asked = [self.stop, self.save or self.folder.asked("SAVE"), self.folder.asked("VALIDATE")]
        self.save = 0
        if self.group is not None:
            shared = torch.tensor([int(value) for value in asked])
            torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX, group=self.group)
            asked = shared.tolist()
        return int(asked[0]), bool(asked[1]), bool(asked[2])
