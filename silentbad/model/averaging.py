"""The weights to measure and to save: the average that a run keeps of what it trains, or an
extrapolation of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from silentbad.errors import UserError


def keeps_average(optimizer: Any) -> bool:
    """Whether an optimizer keeps an average of the weights, which is to be measured."""
    return callable(getattr(optimizer, "eval", None)) and callable(
        getattr(optimizer, "train", None)
    )


@contextmanager
def averaged(model: torch.nn.Module, ema: Any = None, optimizer: Any = None) -> Iterator[None]:
    """A context with the averaged weights; after it, also on an error, the trained ones are
    restored bit for bit.

    The average is that of `ema`, or of a schedule-free optimizer (2405.15682), wrapped or not;
    where there is neither, the trained weights are the ones to measure."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if ema is not None:
        with of_ema(ema, model):
            yield
    elif keeps_average(inner):
        with of_optimizer(inner):
            yield
    else:
        yield


@contextmanager
def of_ema(ema: Any, model: torch.nn.Module) -> Iterator[None]:
    parameters = list(model.parameters())
    if len(ema.shadow_params) != len(parameters):
        parameters = [p for p in parameters if p.requires_grad]
    ema.store(parameters)
    try:
        ema.copy_to(parameters)
        yield
    finally:
        ema.restore(parameters)


@contextmanager
def of_optimizer(optimizer: Any) -> Iterator[None]:
    """Keeps a copy of the trained weights, because the optimizer restores them with rounding
    errors."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    trained = [p.detach().clone() for p in parameters]
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()
        with torch.no_grad():
            torch._foreach_copy_(parameters, trained)


@contextmanager
def extrapolated(model: torch.nn.Module, base: torch.nn.Module, factor: float) -> Iterator[None]:
    """A context with the weights theta_0 + factor (theta - theta_0); theta is restored bit for bit
    after it. `base` has theta_0 (2410.03039).

    Raises UserError if the two have different parameters."""
    first = dict(base.named_parameters())
    if {n: p.shape for n, p in model.named_parameters()} != {n: p.shape for n, p in first.items()}:
        same = "give a baseline with the same UNet, and no --lora"
        raise UserError(f"--extrapolate: the two models have different parameters; {same}")
    trained = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(first[name].to(p) + factor * (p - first[name].to(p)))
    try:
        yield
    finally:
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(trained[name])
