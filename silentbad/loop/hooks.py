"""Hooks of the training loop. The methods of `Hook` do nothing; a subclass overrides those that it
needs.

In one step the loop calls `timesteps`, `weight_losses`, `extra_loss`, `before_backward` and
`after_backward` of each part of a micro-batch; then, once an update, `before_step`, the clip, the
optimizer's step, `after_step`. CONTRIBUTING.md shows a hook of your own. Memory is a hook too;
the loop also calls methods that only Memory has, such as `loss_per_sample`.

Legend: B samples, T trained tensors, C,h,w shape of the latents.
"""

import inspect
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from silentbad.errors import UserError
from silentbad.settings import user_code


class MicroStep(NamedTuple):
    """The inputs and the prediction of one part of a micro-batch, for `Hook.extra_loss`."""

    step: int  # optimizer updates so far
    micro: int  # which micro-batch of the update
    progress: float  # share of the run that is over, in [0, 1]
    batch: dict[str, Any]  # columns of the B samples (silentbad.data.loader.collate)
    noisy_latents: Tensor  # (B,C,h,w)
    timesteps: Tensor  # (B,)
    model_pred: Tensor  # (B,C,h,w), with its graph
    model: torch.nn.Module  # what trains: the backbone, and the text encoders where they train too
    # (noisy_latents, timesteps, captions, model=None, time_ids=None) -> (B,C,h,w)
    predict: Callable[..., Tensor]


class Hook:
    """Changes nothing.

    Nothing that a step calls may wait for the device (`.item()`, `.tolist()`): return tensors, the
    log reads them.
    """

    # whether it changes gradients before the clip, which must then measure their norm again
    modifies_gradients = False
    one_source_per_backward = False  # whether each backward must be of samples of one role

    @staticmethod
    def kept(records: Any, options: Mapping[str, Any]) -> Any:
        """Which of the records (N,) (silentbad.data.records.Records) are trained on, an array (N,)
        of bool, or None for all. Asked before any weights load and before the hook is made, with
        the `options` that it will be given."""
        return None

    def timesteps(
        self, draw: int, positions: list[int], count: int, batch: dict[str, Any]
    ) -> tuple[Tensor, Tensor] | None:
        """(timesteps (B,), importance weights (B,)) on the CPU, in place of those of the hooks
        before; None keeps them. `positions` (B,) lie in effective batch number `draw` of `count`
        samples; `batch` has the columns of these B, on the CPU (silentbad.data.loader.collate)."""
        return None

    def weight_losses(self, losses: Tensor, sources: list[str]) -> Tensor:
        """The losses (B,) to train on, from those of samples of B `sources`."""
        return losses

    def extra_loss(self, loss: Tensor, now: MicroStep) -> Tensor | None:
        """A scalar to add to `loss`, the mean of the weighted losses; or None."""
        return None

    def before_backward(self, losses: Tensor, sources: list[str], scale: float = 1.0) -> None:
        """losses (B,) with their graph; the backward to come multiplies their mean by `scale`."""

    def after_backward(self, last: bool = True) -> None:
        """The gradients have been accumulated; do not change them. `last`: of an update."""

    def before_step(
        self, step: int, finite: Tensor | None = None, norms: Tensor | None = None
    ) -> dict[str, Tensor] | None:
        """The gradient of update number `step` is whole and unscaled. `finite` () says whether it
        may be applied; `norms` (T,) are of its tensors. Returns scalars of this step, which the log
        averages over the steps that were applied, or None."""
        return None

    def after_step(self, step: int, skipped: bool = False) -> None:
        """`step` updates are done; `skipped`: the last gradient was not finite."""

    def should_run(self, step: int, asked: bool = False, final: bool = False) -> bool:
        """Whether `run` measures the weights between two steps: on its own grid, because the user
        has `asked`, or as the `final` point. Collective: the same on every process."""
        return False

    def run(
        self, step: int, epoch: float, unet: Any, ema: Any = None, final: bool = False
    ) -> dict[str, Any]:
        """Measure the weights of `unet`, and of their average where there is one; returns scalars
        for the log. Leaves weights, modes and random streams as they are. Training gives the
        denoiser; `silentbad.model.denoiser.backbone_in` finds the UNet or transformer in it."""
        return {}

    def meters(self) -> dict[str, Any]:
        """Scalars for a row of the log, on the device where they are."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values: what a bit-exact resume needs."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load such a state."""


class Hooks(Hook):
    """Several hooks as one, called in their order."""

    def __init__(self, hooks: Sequence[Hook]):
        self.each: list[Any] = list(hooks)

    def __iter__(self) -> Iterator[Hook]:
        return iter(self.each)

    @property
    def modifies_gradients(self) -> bool:  # type: ignore[override]
        return any(hook.modifies_gradients for hook in self)

    @property
    def one_source_per_backward(self) -> bool:  # type: ignore[override]
        return any(hook.one_source_per_backward for hook in self)

    def timesteps(
        self, draw: int, positions: list[int], count: int, batch: dict[str, Any]
    ) -> tuple[Tensor, Tensor] | None:
        drawn = None
        for hook in self:
            drawn = hook.timesteps(draw, positions, count, batch) or drawn
        return drawn

    def weight_losses(self, losses: Tensor, sources: list[str]) -> Tensor:
        for hook in self:
            losses = hook.weight_losses(losses, sources)
        return losses

    def extra_loss(self, loss: Tensor, now: MicroStep) -> Tensor | None:
        total = None
        for hook in self:
            if (extra := hook.extra_loss(loss, now)) is not None:
                total = extra if total is None else total + extra
        return total

    def before_backward(self, losses: Tensor, sources: list[str], scale: float = 1.0) -> None:
        for hook in self:
            hook.before_backward(losses, sources, scale)

    def after_backward(self, last: bool = True) -> None:
        for hook in self:
            hook.after_backward(last)

    def before_step(
        self, step: int, finite: Tensor | None = None, norms: Tensor | None = None
    ) -> dict[str, Tensor]:
        scalars: dict[str, Tensor] = {}
        for hook in self:
            scalars |= hook.before_step(step, finite, norms) or {}
        return scalars

    def after_step(self, step: int, skipped: bool = False) -> None:
        for hook in self:
            hook.after_step(step, skipped)

    def meters(self) -> dict[str, Any]:
        return {name: value for hook in self for name, value in hook.meters().items()}


# ------------------------------------------------------------ hooks of your own
@dataclass(frozen=True)
class HookContext:
    """The argument of the constructor of your own hook."""

    config: Any  # every setting of the run (silentbad.settings.train.TrainConfig)
    model: torch.nn.Module  # what trains: the backbone, and the text encoders where they train too
    params: list[torch.nn.Parameter]  # the T trained tensors
    records: Any  # those that are trained on (silentbad.data.records.Records)
    scheduler: Any  # the noise schedule of training
    # (noisy_latents, timesteps, captions, model=None, time_ids=None) -> (B,C,h,w)
    predict: Callable[..., Tensor]
    device: torch.device
    rank: int
    world: int
    effective_batch: int  # samples of an update
    max_steps: int
    output_dir: Path  # of the run; it is there from the first step on


def hook_classes(places: Sequence[str]) -> dict[str, type[Hook]]:
    """{PATH.py:CLASS: the class}. Raises UserError for a class that is no valid hook."""
    names = [user_code.short(place) for place in places]
    classes = {}
    for place, name in zip(places, names, strict=True):
        if not user_code.is_place(place):
            raise UserError(
                f"hooks: {place!r} is not PATH.py:CLASS or package.module:CLASS, such as "
                "docs/example/mine.py:LossByRole"
            )
        if names.count(name) > 1:
            raise UserError(f"hooks: {name} is given twice")
        kind = user_code.load("hooks", place)
        check_hook(place, kind)
        classes[place] = kind
    return classes


def check_hook(place: str, kind: Any) -> None:
    """Refuse what is no hook, overrides nothing, or overrides with other parameters."""
    if not (isinstance(kind, type) and issubclass(kind, Hook)):
        raise UserError(f"hooks: {place} is no subclass of silentbad.loop.hooks.Hook")
    methods = [
        name for name, member in vars(Hook).items() if callable(member) and not name.startswith("_")
    ]
    overridden = [name for name in methods if getattr(kind, name) is not getattr(Hook, name)]
    if not overridden:
        raise UserError(
            f"hooks: {place} overrides no method of a hook; there are: {', '.join(methods)}"
        )
    positional = [
        parameter
        for parameter in inspect.signature(kind).parameters.values()
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY
    ]
    if len(positional) != 1:
        right = "a HookContext, and after a * its options"
        raise UserError(f"hooks: {place}.__init__ must take (self, context), {right}")
    for name in overridden:
        expected = inspect.signature(getattr(Hook, name))
        if not takes(getattr(kind, name), len(expected.parameters)):
            signature = inspect.signature(getattr(kind, name))
            raise UserError(
                f"hooks: {place}.{name} takes {signature}, and is called as {name}{expected}"
            )


def takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with so many arguments."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    return True


class OwnHooks(Hooks):
    """Hooks of your own, and their states by name."""

    def __init__(
        self,
        classes: Mapping[str, type[Hook]],
        context: HookContext,
        options: Mapping[str, Mapping[str, Any]],
    ):
        hooks = {}
        for place, kind in classes.items():
            own = options.get(place, {})
            hooks[user_code.short(place)] = kind(context, **own)  # type: ignore[call-arg]
        super().__init__([*hooks.values()])
        self.names = list(hooks)
        self.state_dict()  # refused now, not at the first checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Raises UserError where a state could not be read back."""
        states = {name: h.state_dict() for name, h in zip(self.names, self.each, strict=True)}
        for name, state in states.items():
            check_state(f"hooks: the state_dict of {name}", state)
        return states

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the states of the same hooks."""
        for name, hook in zip(self.names, self.each, strict=True):
            hook.load_state_dict(state[name])


def check_state(what: str, state: Any) -> None:
    """Refuse a state that a checkpoint could not read back."""
    if not is_plain(state):
        right = "tensors, numbers of Python, text, lists, dicts"
        raise UserError(f"{what} holds more than {right}")


def is_plain(value: Any) -> bool:
    """Whether a checkpoint can hold a value: what it reads back runs no code. A number of numpy is
    a float in Python too, and is written in another way."""
    if type(value) in (dict, OrderedDict, Counter):
        return all(type(key) in (str, int) and is_plain(each) for key, each in value.items())
    if type(value) in (list, tuple, torch.Size):
        return all(map(is_plain, value))
    return value is None or isinstance(value, Tensor) or type(value) in (bool, int, float, str)
