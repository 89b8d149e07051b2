"""Muon on weights, AdamW on the rest: each matrix moves by an orthogonal matrix, equally far in
every direction.

A linear layer is an associative memory: its weight is a sum of outer products, one for each pair of
a key and its value. Adam's update of it has a few large singular values, those of what the data
shows most. Muon sets all singular values of the averaged gradient to about one, G = U S V' -> U V',
so rare pairs are learnt as fast as the rest (2509.26030: balanced learning over classes of unequal
frequency, whatever their embeddings; the gain lies in the value, output and feed-forward weights).
Among clean pictures, a target's elements are such rare pairs.

    m_t = mu m_(t-1) + (1 - mu) g_t                     W <- W - lr 0.2 sqrt(max(out, in)) orth((1 - mu) g_t + mu m_t)

The factor 0.2 sqrt(max) gives the update the size of AdamW's, so its learning rates keep their
meaning (2502.16982, equation 4). Kernels are flattened to (out, in*kh*kw). Tables of embeddings,
biases and norms have AdamW."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from silentbad.control.updates import Updates
from silentbad.model.groups import group_of
from silentbad.settings.layers import chosen, refuse_unmatched
from silentbad.settings.types import Small

Coefficients = tuple[tuple[float, float, float], ...]  # (a, b, c) of each step
ITERATIONS: dict[str, Coefficients] = {
    # Jordan's quintic: singular values in [0.01, 1] end between 0.68 and 1.13
    "newton_schulz": ((3.4445, -4.7750, 2.0315),) * 5,
    # three of them: a singular value below a fortieth of the norm, which noise alone gives, grows
    # 41-fold and no further, so the rest of the model moves less
    "newton_schulz_3": ((3.4445, -4.7750, 2.0315),) * 3,
    # Polar Express (2505.16932): the best four steps for [0.004, 1], with its margin for bf16;
    # singular values in [0.01, 1] end between 0.86 and 1.13
    "polar_express": (
        (8.2584, -23.874, 17.3386),
        (3.9386, -2.8782, 0.5369),
        (3.2945, -2.4219, 0.4860),
        (2.3086, -1.6760, 0.4196),
    ),
}
WIDE = 1.5  # from this ratio of columns to rows on, iterating on the Gram matrix costs less
Groups = list[dict[str, Any]]


def orthogonalise(matrix: Tensor, iteration: str = "newton_schulz", row_groups: int = 1) -> Tensor:
    """The semi-orthogonal matrix nearest `matrix` (out, in), about: singular values that are a
    hundredth of the norm or more end near 1, smaller ones below. A step is X <- (a + b XX' + c
    (XX')²) X, with the coefficients of ITERATIONS.

    With `row_groups` the shorter side is cut into that many groups, each orthogonalised by itself:
    less work and the same norm, but directions of different groups need not be orthogonal."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if tall else matrix
    if row_groups > 1:
        x = torch.cat([orthogonalise(part, iteration) for part in x.chunk(row_groups)])
        return x.mT if tall else x
    x = x / (x.norm() + 1e-7)
    # in bf16 the products of the Gram matrix drift
    exact = x.dtype in (torch.float32, torch.float64)
    wide = x.shape[1] > WIDE * x.shape[0]
    x = (by_gram if exact and wide else directly)(x, ITERATIONS[iteration])
    return x.mT if tall else x


def directly(x: Tensor, steps: Coefficients) -> Tensor:
    """x (m,n), m <= n -> its image under the polynomial of each step, in order."""
    for a, b, c in steps:
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def by_gram(x: Tensor, steps: Coefficients) -> Tensor:
    """The same polynomial of the same matrix: each step is a factor F(XX') on the left, so for wide
    matrices the small square ones are multiplied and X once."""
    gram = x @ x.mT
    left: Tensor | None = None
    for k, (a, b, c) in enumerate(steps, start=1):
        factor = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal().add_(a)
        left = factor if left is None else left @ factor
        if k < len(steps):
            gram = factor @ gram @ factor
    return x if left is None else left @ x


def split(groups: Groups, model: nn.Module, without: Sequence[str] = ()) -> Groups:
    """Split each group into two of the same name: its weight matrices, marked `spectral`, and the
    rest: embeddings, norms and biases.

    The weights of layers that a pattern of `without` chooses (`silentbad.settings.layers`) go to
    the rest too. Raises UserError where a pattern chooses none."""
    layers = {id(p): group_of(name) for name, p in model.named_parameters() if p.requires_grad}
    for pattern in without:
        refuse_unmatched("gradient_control.spectral_except", pattern, layers.values(), "this model")
    others = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    others |= {number for number, group in layers.items() if chosen(without, group)}
    parts = []
    for group in groups:
        weights = [p for p in group["params"] if p.ndim >= 2 and id(p) not in others]
        spectral = {id(p) for p in weights}
        rest = [p for p in group["params"] if id(p) not in spectral]
        parts += [{**group, "params": weights, "spectral": True}] if weights else []
        parts += [{**group, "params": rest, "spectral": False}] if rest else []
    return parts


class SpectralAdamW(Updates):
    """Muon on groups marked `spectral`, AdamW (1711.05101) on the others; both decay weights by lr
    * weight_decay.

    momentum: mu above. betas and eps: AdamW's. iteration: of ITERATIONS, row_groups: of
    `orthogonalise`. Averages are in the
    weights' precision; the iteration runs in bf16 on CUDA, as torch.optim.Muon's does everywhere,
    and in the weights' precision on a CPU. Raises ValueError where momentum lies outside [0, 1).
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        momentum: float = 0.95,
        iteration: Literal["newton_schulz", "newton_schulz_3", "polar_express"] = "newton_schulz",
        row_groups: Small = 1,
    ):
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum: must lie in [0, 1), got {momentum}")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "iteration": iteration,
            "row_groups": row_groups,
            "spectral": False,
        }
        super().__init__(params, defaults)

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        change = self._orthogonal if group["spectral"] else self._adam
        for parameter in parameters:
            update = change(group, parameter, parameter.grad)
            parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])

    def _orthogonal(self, group: dict[str, Any], parameter: Tensor, gradient: Any) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        average = state["exp_avg"].lerp_(gradient, 1 - group["momentum"])
        ahead = gradient.lerp(average, group["momentum"]).flatten(1)
        if ahead.is_cuda:
            ahead = ahead.bfloat16()
        size = 0.2 * max(ahead.shape) ** 0.5
        update = orthogonalise(ahead, group["iteration"], group["row_groups"])
        return (size * update).reshape(parameter.shape).to(parameter.dtype)

    def _adam(self, group: dict[str, Any], parameter: Tensor, gradient: Any) -> Tensor:
        state = self._averages(parameter)
        beta1, beta2 = group["betas"]
        state["step"] += 1
        t = int(state["step"])
        mean = state["exp_avg"].lerp_(gradient, 1 - beta1) / (1 - beta1**t)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2) / (
            1 - beta2**t
        )
        return mean / square.sqrt_().add_(group["eps"])
