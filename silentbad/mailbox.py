"""A value on its way off the device."""

import torch


class Mailbox:
    """Sent at one visit, read at a later one, so that no step waits for the device."""

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
        """What was sent since the last visit, or None."""
        value = self.peek()
        self.value, self.sent = None, None
        return value

    def peek(self) -> torch.Tensor | None:
        """The same, left in its place."""
        if self.sent is not None:
            self.sent.synchronize()
        return self.value
