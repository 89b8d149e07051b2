"""The optimizer of a run, built by name or import path, and the norm and the clipping of its
gradients.

Legend: T trained tensors; a group is a dict of `params`, `name` and settings, as torch's optimizers
take it."""

import importlib
import inspect
from typing import Any

import torch

from silentbad.control.spectral import SpectralAdamW
from silentbad.distributed.shards import gather
from silentbad.errors import UserError, user_errors, warn
from silentbad.model.averaging import keeps_average
from silentbad.settings import user_code
from silentbad.settings.optimizer_facts import not_one, path_of, source_of
from silentbad.settings.train import TrainConfig


# ---------------------------------------------------------------- building
def optimizer_class(config: TrainConfig) -> type[torch.optim.Optimizer]:
    """The class that the settings name; refused if it does not import or is no optimizer."""
    key, path = path_of(config)
    if user_code.is_place(path):
        kind = user_code.load(key, path)
    else:
        module, _, name = path.rpartition(".")
        with user_errors(f"{key}: {module} does not import", source_of(path)):
            kind = getattr(importlib.import_module(module), name, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise UserError(not_one(key, config.optimizer))
    return kind


def make_optimizer(
    groups: list[dict[str, Any]], config: TrainConfig, scale: float
) -> torch.optim.Optimizer:
    """The optimizer over the controller's groups at `scale` times the learning rate.

    It gets those adam_* flags that it takes; `optimizer_options` override them. Optimizers of torch
    run their fused kernel: one pass over the weights instead of a dozen."""
    kind = optimizer_class(config)
    takes = inspect.signature(kind).parameters
    flags: dict[str, Any] = {
        "lr": config.learning_rate * scale,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_epsilon,
        "weight_decay": config.adam_weight_decay,
    }
    # an eps that is a pair, as Adafactor's, is another setting
    pair = {key for key in takes if isinstance(takes[key].default, tuple)}
    settings = {
        k: v for k, v in flags.items() if k in takes and isinstance(v, tuple) == (k in pair)
    }
    if (
        kind.__module__.startswith("torch.optim")
        and "fused" in takes
        and "foreach" not in config.optimizer_options
    ):
        settings["fused"] = True
    settings |= config.optimizer_options
    # the optimizer itself may refuse settings or weights
    with user_errors(f"optimizer: {kind.__name__} does not take these"):
        optimizer: Any = kind(groups, **settings)
        if kind is not SpectralAdamW:
            try_step(kind, groups[0], settings)
    if keeps_average(optimizer):
        optimizer.train()
    return optimizer


def try_step(kind: Any, group: dict[str, Any], settings: dict[str, Any]) -> None:
    """Try one step on a small matrix of the weights' dtype and device: some settings are checked
    only in a step. Raises UserError where a weight becomes NaN or infinite or moves up the
    gradient; warns where none moves."""
    like = group["params"][0]
    weight = torch.nn.Parameter(torch.ones(2, 2, dtype=like.dtype, device=like.device))
    weight.grad = torch.ones_like(weight)
    with torch.random.fork_rng([]):
        optimizer = kind([{**group, "params": [weight]}], **settings)
        if keeps_average(optimizer):
            optimizer.train()
        optimizer.step()
    if not weight.isfinite().all():
        raise UserError(f"optimizer: {kind.__name__} makes a weight NaN or infinite in one step")
    if (weight > 1).any():
        raise UserError(f"optimizer: {kind.__name__} moves weights up the gradient, not down")
    if settings.get("lr", 1.0) > 1e-6 and like.dtype == torch.float32 and (weight == 1).all():
        warn(f"optimizer: the first step of {kind.__name__} moves no weight")


# ---------------------------------------------------------------- the gradient's norm
def gradient_norms(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    """Euclidean norm of each gradient (T,), of all shards; 0 where there is none."""
    zero = torch.zeros((), device=parameters[0].device)
    gradients = [zero if p.grad is None else p.grad for p in parameters]
    return gather(torch.stack(torch._foreach_norm(gradients)))
