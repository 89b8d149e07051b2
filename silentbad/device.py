"""Transfers between host and device without waiting, batches that fit into memory, and errors where
memory runs out."""

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate.utils.memory import should_reduce_batch_size

from silentbad.errors import UserError, first_line, no_memory

T = TypeVar("T")
Made = TypeVar("Made")


class Mailbox:
    """A tensor that one step sends to the host and a later step reads, so that no step waits."""

    def __init__(self) -> None:
        self.value: torch.Tensor | None = None
        self.sent: torch.cuda.Event | None = None

    def send(self, x: torch.Tensor) -> None:
        """Start the copy of x to the host."""
        self.value = x.detach().to("cpu", non_blocking=True, copy=True)
        if x.is_cuda:
            self.sent = torch.cuda.Event()
            self.sent.record()

    def receive(self) -> torch.Tensor | None:
        """The tensor that was sent since the last `receive`, or None."""
        value = self.peek()
        self.value = None
        self.sent = None
        return value

    def restore(self, value: torch.Tensor | None) -> None:
        """Restore the tensor that a checkpoint saved."""
        self.value = None if value is None else value.cpu().clone()
        self.sent = None

    def peek(self) -> torch.Tensor | None:
        """The tensor that was sent, without removing it."""
        if self.sent is not None:
            self.sent.synchronize()
        return self.value


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to the device. On CUDA the copy uses pinned memory and does not wait for
    work under way."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)


def in_batches(
    items: list[T],
    size: int,
    work: Callable[[list[T]], Made],
    halved: Callable[[int], Any] = lambda size: None,
) -> Iterator[tuple[list[T], Made]]:
    """(chunk, `work(chunk)`) over all items, `size` at once. Where memory runs out the size is
    halved for the rest, and `halved` is called with it."""
    start = 0
    while start < len(items):
        chunk = items[start : start + size]
        try:
            result = work(chunk)
        except (RuntimeError, MemoryError) as error:
            if len(chunk) == 1 or not ran_out(error):
                raise
            size = len(chunk) // 2
            halved(size)
            continue
        start += len(chunk)
        yield chunk, result


def ran_out(error: Exception) -> bool:
    """Whether memory ran out, of the device or of this machine."""
    on_device = isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error)
    return on_device or no_memory(error)


def larger_device() -> str:
    """Advice where no flag of a command reduces its memory."""
    if torch.cuda.is_available():
        return "a larger device, or the CPU (CUDA_VISIBLE_DEVICES=)"
    return "a machine with more memory"


@contextmanager
def explain_out_of_memory(flag: str, advice: str) -> Iterator[None]:
    """Turn an out-of-memory error, of the device or of this machine, into one line that begins with
    the flag to change."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not ran_out(error):
            raise
        raise UserError(f"{flag}: memory ran out ({first_line(error)}); {advice}") from error


def device_name(device: torch.device | str) -> str:
    """The GPU's or the CPU's model, as far as the system tells."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def scalars(meters: Any) -> dict[str, Any]:
    """The meters of a state, each a number or a tensor of one. Raises ValueError where one is
    not."""
    for name, value in dict(meters).items():
        if not isinstance(value, (int, float)) and not (
            isinstance(value, torch.Tensor) and value.numel() == 1
        ):
            raise ValueError(f"the meter {name!r} is no scalar")
    return dict(meters)
