"""What becomes of the gradients of several sources: functions of their Gram matrix.

A transform maps the Gram matrix (K,K) of the sources' gradients to their weights (K,) in the sum.
"""

import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from .errors import UserError


def none(gram: Tensor) -> Tensor:
    """The plain sum."""
    return torch.ones_like(gram[0])


def remove_conflict(gram: Tensor) -> Tensor:
    """PCGrad (2001.06782) in Gramian form, the others in fixed order: drop what points against a source."""
    eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    total = torch.zeros_like(gram[0])
    for i in range(len(gram)):
        weights = eye[i]
        for j in (k for k in range(len(gram)) if k != i):
            along = (weights @ gram[j]).clamp(max=0) / gram[j, j]
            weights = weights - eye[j] * along.nan_to_num(0, 0, 0)
        total = total + weights
    return total


def torchjd_weighting(name: str) -> Callable[[Tensor], Tensor]:
    """A weighting of torchjd (2406.16232), scaled so that equal gradients keep the plain sum."""

    def weighting(gram: Tensor) -> Tensor:
        unit = gram.diagonal().mean().clamp(min=torch.finfo(gram.dtype).tiny)  # torchjd's eps is absolute
        return len(gram) * getattr(importlib.import_module("torchjd.aggregation"), name)()(gram / unit)

    return weighting


TORCHJD = {"upgrad": "UPGradWeighting", "mgda": "MGDAWeighting", "dualproj": "DualProjWeighting"}
TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": none,
    "remove_conflict": remove_conflict,
    **{key: torchjd_weighting(name) for key, name in TORCHJD.items()},
}


def check_transform(name: str) -> None:
    """Refuse an unknown transform, or one whose package is missing."""
    from .config import check_options

    check_options("gradient_control.transform", TRANSFORMS, name, {})
    try:
        TRANSFORMS[name](torch.eye(2))
    except (ImportError, NameError):  # torchjd is missing, or its solver is: it then fails by name
        need = "pip install 'torchjd[quadprog-projector]'"
        raise UserError(f"gradient_control.transform: {name!r} needs `{need}`") from None
