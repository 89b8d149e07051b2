"""An auxiliary loss scaled to the gradient of the main loss. Measured: no reported arm."""

import torch

from silentbad.settings.types import Positive


def gradient_norm(
    loss: torch.Tensor, extra: torch.Tensor, layer: torch.Tensor | None, *, ceiling: Positive = 10.0
) -> torch.Tensor | float:
    """||d loss / d W|| / ||d extra / d W|| at one layer W, within [0, ceiling] (the adaptive weight
    of 2012.09841)."""
    if layer is None:
        return 1.0
    norms = []
    for term in (loss, extra):
        (grad,) = torch.autograd.grad(term, layer, retain_graph=True, allow_unused=True)
        norms.append(torch.zeros((), device=layer.device) if grad is None else grad.float().norm())
    return (norms[0] / (norms[1] + 1e-4)).clamp(0, ceiling).detach()
