"""Learning rates as a share of the weights that they move, and the meter of that share.

A rate of AdamW or of Muon is the RMS change of a weight in a step, whatever the weight's own size.
One rate is thus a different share of the weights on a base of other widths or of another trainer.
In the relative unit, tensor by tensor,

    W <- W - lr lambda W + eta U        eta = lr max(RMS(W), FLOOR) / RMS(U)

where U is the optimizer's update without its weight decay lambda, so RMS(eta U) / RMS(W) is lr, the
rate of the schedule and of the rules. It is the trust ratio of LARS (1708.03888, equation 6) and
LAMB (1904.00962), with the floor of Adafactor's relative step size (1804.04235, section 8): a
weight of zeros moves as one of RMS 1e-3. Unlike in LAMB, U excludes the decay: else a weight whose
gradient is zero would decay at the full rate. The unit applies to norms and biases too. A spectral
norm in place of the RMS is the modular norm's choice (2409.20325).

An adapter moves the frozen weight W by its product D(A, B), s B A for LoRA. Its factors have one
eta for all, such that RMS(D(A + eta U_A, B + eta U_B) - D(A, B)) is lr max(RMS(W), FLOOR). So they
move although B begins as zeros. DoRA's magnitudes are tensors of their own.

No unit repairs a mismatch of optimizers: Muon degrades what Adam trained, the more the larger the
update (2605.10468)."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from silentbad.control.statistics import coprime
from silentbad.distributed.shards import gather
from silentbad.loop.hooks import Hook
from silentbad.model.groups import stage_of

FLOOR = 1e-3  # the least RMS that a weight counts as having
ROUNDS = 6  # iterations that find an adapter's eta; its product is nearly linear in a small eta
SAMPLED = 4096  # coordinates of a tensor that the meter reads


@dataclass(frozen=True)
class Weight:
    """A weight that training moves: a trained tensor itself, or a frozen one under an adapter."""

    stage: str  # up1
    tensor: Tensor  # the frozen one under an adapter
    factors: list[Tensor]  # what trains
    value: Callable[[], Tensor]  # of the tensor's shape: the part of the weight that factors make


def weights_of(model: nn.Module) -> list[Weight]:
    """The weights that training moves; each trained tensor is a factor of exactly one."""
    weights = []
    for path, layer in model.named_modules():
        if isinstance(layer, BaseTunerLayer):
            named = layer.named_parameters()
            factors: list[Tensor] = [
                p for name, p in named if p.requires_grad and "magnitude" not in name
            ]
            if factors:
                frozen: Any = layer.get_base_layer().weight
                stage = stage_of(f"{path}.weight")
                product = product_of(layer)
                weights.append(Weight(stage, tensor=frozen, factors=factors, value=product))
    of_adapters = {id(p) for weight in weights for p in weight.factors}
    for name, p in model.named_parameters():
        if p.requires_grad and id(p) not in of_adapters:
            weights.append(Weight(stage_of(name), tensor=p, factors=[p], value=p.detach))
    return weights


def product_of(layer: Any) -> Callable[[], Tensor]:
    """A function that returns the product that a layer's adapter adds to its weight."""
    return lambda: layer.get_delta_weight(layer.active_adapters[0]).detach()


# ---------------------------------------------------------------- the unit
class RelativeRate:
    """Applies the learning rates of an optimizer in the relative unit, by hooks before and after
    its step. A step holds one more copy of the trained weights."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.weights = weights_of(model)
        self.sizes: list[Tensor] = []  # of each weight: the norm of a change of relative size 1
        self.before: list[list[Tensor]] = []  # of each weight: its factors before the step
        self.decay: list[float] = []  # of each group of the optimizer
        optimizer.register_step_pre_hook(self.keep)
        optimizer.register_step_post_hook(self.rescale)

    @torch.no_grad()
    def keep(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Before the optimizer's step: copy the weights; weight decay is 0 until `rescale`."""
        self.sizes = [
            rms(w.tensor).clamp(min=FLOOR) * w.tensor.numel() ** 0.5 for w in self.weights
        ]
        self.before = [[p.detach().clone() for p in w.factors] for w in self.weights]
        self.decay = [group["weight_decay"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0

    @torch.no_grad()
    def rescale(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """After the optimizer's step: rescale its update to the relative rate, and decay."""
        rates: dict[Tensor, tuple[float, float]] = {}
        for group, decay in zip(optimizer.param_groups, self.decay, strict=True):
            group["weight_decay"] = decay
            rates |= dict.fromkeys(group["params"], (group["lr"], decay))
        for weight, size, before in zip(self.weights, self.sizes, self.before, strict=True):
            rate, decay = rates[weight.factors[0]]
            move(weight, before, rate * size)
            # of the scaler of fp16: 1 where the update is skipped
            if (skipped := getattr(optimizer, "found_inf", None)) is not None:
                before = [*torch._foreach_mul(before, 1 - skipped)]
            torch._foreach_add_(weight.factors, before, alpha=-rate * decay)
        self.before = []


def rms(tensor: Tensor) -> Tensor:
    """The root mean square, () in float32."""
    return tensor.detach().float().square().mean().sqrt()


def move(weight: Weight, before: list[Tensor], size: Tensor) -> None:
    """Rescale the step of the factors, from `before` to their present values, so that the weight
    moves by the norm `size` (). A weight that does not move stays."""
    after = [p.detach().clone() for p in weight.factors]
    torch._foreach_copy_(weight.factors, before)
    start = weight.value().clone()
    eta = torch.ones_like(size)
    for _ in range(ROUNDS if len(before) > 1 else 1):
        put(weight.factors, before, after, eta)
        moved = (weight.value() - start).float().norm()
        eta = torch.where(moved > 0, eta * size / moved, eta)
    put(weight.factors, before, after, eta)


def put(factors: list[Tensor], before: list[Tensor], after: list[Tensor], eta: Tensor) -> None:
    for p, start, end in zip(factors, before, after, strict=True):
        p.copy_(torch.lerp(start, end, eta.to(p.dtype)))


# ---------------------------------------------------------------- the meter
class RelativeChange(Hook):
    """Meters, by stage, the RMS of the change over the RMS of the weights at the start: the change
    since the start, and that of the last update. For an adapter it is the change of its product.
    Estimated from SAMPLED coordinates a tensor.

    Build it before a checkpoint is loaded. A row of the log follows every `every` updates, and
    update `total`."""

    def __init__(self, model: nn.Module, *, every: int, total: int):
        self.every = every
        self.total = total
        self.weights = weights_of(model)
        self.norms = self._by_stage(gather(w.tensor).detach().float() for w in self.weights)
        self.start = self._read()
        self.before = self.start  # the last update

    def _read(self) -> list[Tensor]:
        """The sampled coordinates of each weight."""
        samples = []
        for weight in self.weights:
            count = weight.tensor.numel()
            stride = coprime(-(-count // SAMPLED), count)
            samples.append(gather(weight.value()).flatten()[::stride].float().clone())
        return samples

    def _by_stage(self, tensors: Iterable[Tensor]) -> dict[str, Tensor]:
        """The norm of each stage, from all or from some coordinates of its weights."""
        squares: dict[str, Any] = defaultdict(float)
        for weight, values in zip(self.weights, tensors, strict=True):
            squares[weight.stage] += weight.tensor.numel() * values.square().mean()
        return {stage: square.sqrt() for stage, square in squares.items()}

    @torch.no_grad()
    def before_step(
        self, step: int, finite: Tensor | None = None, norms: Tensor | None = None
    ) -> None:
        if (step + 1) % self.every == 0 or step + 1 == self.total:
            self.before = self._read()

    @torch.no_grad()
    def meters(self) -> dict[str, Tensor]:
        now = self._read()
        row: dict[str, Tensor] = {}
        for key, then in (("change", self.start), ("step_change", self.before)):
            moved = self._by_stage(torch._foreach_sub(now, then))
            row |= {f"{key}/{stage}": moved[stage] / norm for stage, norm in self.norms.items()}
        return row
