"""Multiply the learning rates of an optimizer's groups for one step and restore them; check that
the optimizer allows it."""

import re
from collections.abc import Iterable
from typing import Any

import torch

from silentbad.errors import UserError, warn

REFUSED = {  # {pattern of class names: why multipliers do not work with the optimizer}
    r"prodigy|dadapt|dowg|mechanic|lomo": "adapts its own learning rate, which undoes a multiplier",
    r"deepspeed|fullysharded|zeroredundancy": "shards the gradients the statistics need whole",
}


def unwrapped(wrapper: Any, attribute: str) -> Any:
    """The object inside accelerate's wrapper, or the object itself."""
    return (
        getattr(wrapper, attribute) if type(wrapper).__name__.startswith("Accelerated") else wrapper
    )


def check_optimizer(optimizer: Any, lr_scheduler: Any, names: list[str] | None, apply: str) -> Any:
    """The bare optimizer, or a UserError where multipliers of the groups `names` cannot work with
    it.

    `names` is None where no multiplier will ever differ from one; `apply` is lr or gradient.
    """
    inner = unwrapped(optimizer, "optimizer")
    scheduler = unwrapped(lr_scheduler, "scheduler")
    name = type(inner).__name__
    if (
        scheduler is not None
        and unwrapped(getattr(scheduler, "optimizer", inner), "optimizer") is not inner
    ):
        raise UserError("gradient_control: the learning-rate scheduler drives another optimizer")
    if names is None:
        return inner
    for pattern, why in REFUSED.items():
        if re.search(pattern, f"{type(optimizer).__name__} {name}".lower()):
            raise UserError(
                f"gradient_control: {name} {why}; take AdamW, AdamW8bit or SGD, or name: uniform"
            )
    if any(group.get("relative_step") for group in inner.param_groups):
        raise UserError(
            f"gradient_control: {name} with relative_step=True sets its own learning rate; "
            "set relative_step=False and a learning rate, or name: uniform"
        )
    if apply == "lr":
        if missing := set(names) - {group.get("name") for group in inner.param_groups}:
            raise UserError(
                f"gradient_control: {name} has no parameter group {min(missing)!r}; "
                "build it from Controller.param_groups(weight_decay)"
            )
    elif "adam" in name.lower():
        effect = f"has next to no effect: {name} divides the scale out again"
        warn(f"gradient_control.apply=gradient: {effect}")
    return inner


def scale_gradients(groups: Iterable[list[torch.nn.Parameter]], multipliers: list[float]) -> None:
    """Multiply the gradients of each group in place; parameters without a gradient stay without."""
    for group, a in zip(groups, multipliers, strict=True):
        if present := [p.grad for p in group if p.grad is not None]:
            torch._foreach_mul_(present, a)


class LearningRates:
    """Keeps the schedule's learning rates while a step uses others."""

    def __init__(self) -> None:
        self.replaced: list[tuple[dict[str, Any], float, float, float | None]] = []

    def multiply(self, optimizer: Any, multipliers: dict[str, float]) -> None:
        """lr * a for each named group. AdamW decays by lr * weight_decay: that product is kept."""
        for group in optimizer.param_groups:
            a = multipliers.get(group.get("name"), 1.0)
            decay = group.get("weight_decay")
            rate = group["lr"] * a
            self.replaced.append((group, group["lr"], rate, decay))
            group["lr"] = rate
            if decay is not None:
                group["weight_decay"] = decay / a

    def restore(self) -> None:
        """The schedule's own rates again. Raises RuntimeError where they changed inside the
        step."""
        for group, scheduled, used, decay in self.replaced:
            if group["lr"] is not used:
                raise RuntimeError(
                    "the learning rate changed inside the step: call after_step before "
                    "lr_scheduler.step"
                )
            group["lr"] = scheduled
            if decay is not None:
                group["weight_decay"] = decay
        self.replaced.clear()
