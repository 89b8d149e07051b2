"""The rule that `gradient_control.Controller` replaces, kept for comparison."""

import torch
from torch import Tensor, nn


@torch.no_grad()
def adjust_gradient_scale(
    model: nn.Module,
    layer_scales: Tensor,
    current_gradients: list[Tensor | None],
    beta: float = 0.9,
) -> Tensor:
    """layer_scales (N,) <- beta layer_scales + (1 - beta) f, f_i = mean |g_i| / sum_j mean |g_j|.

    Kept for comparison; `Controller` is its successor. The f_i sum to one, so the average scale
    tends to 1/N: 1/686 for SD 1.5. Multiplied into gradients it is nearly without effect under
    Adam, which divides a constant scale out (1412.6980); but it makes `max_grad_norm` ineffective,
    pushes layers with small gradients toward Adam's eps and, while the scales fall from 1, acts as
    a hidden learning-rate schedule. `model` is unused and kept for the signature.

    Edge cases: a missing or empty gradient counts as 0; an all-zero or non-finite step leaves the
    scales as they are; means are taken in float32; gradients may be on another device than the
    scales. It neither copies a gradient nor waits for the device: pass `[p.grad for p in
    model.parameters()]`, once per optimizer step. Raises ValueError where their number is not N.
    """
    if len(current_gradients) != len(layer_scales):
        raise ValueError(
            f"{len(layer_scales)} layer_scales need as many gradients, got {len(current_gradients)}"
        )
    zero = layer_scales.new_zeros(())
    grads = [zero if g is None or not g.numel() else g.detach() for g in current_gradients]
    if not grads:
        return layer_scales
    wide = torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32
    means = torch._foreach_div(
        torch._foreach_norm(grads, 1, dtype=wide), [float(g.numel()) for g in grads]
    )
    mean = torch.stack([x.to(zero.device) for x in means])
    f = (mean / mean.sum()).to(layer_scales)
    usable = mean.sum().isfinite() & (mean.sum() > 0)
    return torch.where(usable, layer_scales * beta + f * (1 - beta), layer_scales)
