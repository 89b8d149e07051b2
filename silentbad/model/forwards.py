"""Forward passes of a backbone that does not train now, at less cost on a CPU and equal to rounding."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@contextmanager
def as_convolutions(module: nn.Module) -> Iterator[None]:
    """Linear layers in fp32 on a CPU run as 1x1 convolutions inside.

    PyTorch gives a linear layer to MKL, which on AMD's processors does without AVX-512, and a convolution to oneDNN,
    which uses what the processor has: half the time of a layer there. Layers with a forward of their own (subclasses,
    what a library wrapped) stay as they are.
    """
    changed = [layer for layer in module.modules() if _plain(layer)] if torch.backends.mkldnn.is_available() else []
    try:
        for layer in changed:
            layer.forward = MethodType(_convolved, layer)
        yield
    finally:
        for layer in changed:
            del layer.forward


def _plain(layer: nn.Module) -> bool:
    """Whether a module is a linear layer that nothing wrapped, in fp32 on a CPU."""
    if type(layer) is not nn.Linear or "forward" in vars(layer):
        return False
    return layer.weight.device.type == "cpu" and layer.weight.dtype == torch.float32


def _convolved(layer: nn.Linear, x: Tensor) -> Tensor:
    """x (B,L,D) -> (B,L,E) as `layer` gives it; without a copy, since (B,D,1,L) in channels_last lies as x does."""
    if x.ndim != 3:
        return F.linear(x, layer.weight, layer.bias)
    out = F.conv2d(x.unsqueeze(1).permute(0, 3, 1, 2), layer.weight[..., None, None], layer.bias)
    return out.permute(0, 2, 3, 1).squeeze(1)
