"""An error that large residuals affect less. Measured: no reported arm."""

import torch


def huber(pred: torch.Tensor, target: torch.Tensor, delta: float) -> torch.Tensor:
    """Pseudo-Huber 2 delta (sqrt(r^2 + delta^2) - delta) (2403.16728): r^2 for small r, 2 delta
    |r| for large."""
    return 2 * delta * (((pred - target).square() + delta**2).sqrt() - delta)
