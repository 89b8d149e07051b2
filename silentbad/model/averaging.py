"""The weights to measure and to save: the average that a run keeps of what it trains, or an
extrapolation of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


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
