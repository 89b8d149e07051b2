"""Drop from each source's gradient what points against another's. Measured: no reported arm.

A transform maps the Gram matrix (K,K) of the sources' gradients to their weights (K,) in the sum."""

import torch
from torch import Tensor


def remove_conflict(gram: Tensor) -> Tensor:
    """PCGrad (2001.06782) in Gramian form, the others in fixed order: drop what points against a
    source."""
    eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    total = torch.zeros_like(gram[0])
    for i in range(len(gram)):
        weights = eye[i]
        for j in (k for k in range(len(gram)) if k != i):
            along = (weights @ gram[j]).clamp(max=0) / gram[j, j]
            weights = weights - eye[j] * along.nan_to_num(0, 0, 0)
        total = total + weights
    return total
