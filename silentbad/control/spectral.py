"""Muon on weights, AdamW on the rest: each matrix moves by an orthogonal matrix, equally far in
every direction.

A linear layer is an associative memory: its weight is a sum of outer products, one for each pair of
what is looked up and what comes back. Adam's update of it has a few large singular values, those of
what the data shows most. Muon sets all singular values of the averaged gradient to about one, G = U
S V' -> U V', so what is rare is written as fast as the rest (2509.26030: balanced learning over
classes of unequal frequency, whatever their embeddings; the gain lies in the value, output and
feed-forward weights). A picture's elements are such a tail among clean pictures.

    m_t = mu m_(t-1) + (1 - mu) g_t                     W <- W - lr 0.2 sqrt(max(out, in)) orth((1 - mu) g_t + mu m_t)

The factor 0.2 sqrt(max) gives the update the size of AdamW's, so its learning rates keep their
meaning (2502.16982, equation 4). Kernels are flattened to (out, in*kh*kw). Tables of embeddings,
biases and norms have AdamW."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from silentbad.control.updates import Updates
from silentbad.model.groups import group_of
from silentbad.settings.layers import chosen, refuse_unmatched

# Jordan's quintic: singular values in (0, 1] end near 1, in five steps
A, B, C = 3.4445, -4.7750, 2.0315
WIDE = 1.5  # columns over rows from which on the iteration on the Gram matrix costs less
Groups = list[dict[str, Any]]


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """The semi-orthogonal matrix nearest `matrix` (out, in), about: singular values end between 0.7
    and 1.2, those below 1e-2 of the norm less. By Newton and Schulz's iteration X <- (A + B XX' + C
    (XX')²) X."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if tall else matrix
    x = x / (x.norm() + 1e-7)
    # in bf16 the products of the Gram matrix drift
    exact = x.dtype in (torch.float32, torch.float64)
    x = by_gram(x, steps) if exact and x.shape[1] > WIDE * x.shape[0] else directly(x, steps)
    return x.mT if tall else x


def directly(x: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x


def by_gram(x: Tensor, steps: int) -> Tensor:
    """The same polynomial of the same matrix: each step is a factor F(XX') on the left, so for wide
    matrices the small square ones are multiplied and X once."""
    gram = x @ x.mT
    left = torch.eye(len(x), dtype=x.dtype, device=x.device)
    for _ in range(steps):
        factor = torch.addmm(gram, gram, gram, beta=B, alpha=C)
        factor.diagonal().add_(A)
        left = left @ factor
        gram = factor @ gram @ factor
    return left @ x


def split(groups: Groups, model: nn.Module, without: Sequence[str] = ()) -> Groups:
    """Each group as its weights, `spectral`, and under the same name the rest: embeddings, norms
    and biases.

    The weights of layers that a pattern of `without` chooses (`silentbad.settings.layers`) are of
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

    momentum: mu above. betas and eps: AdamW's. Averages are in the weights' precision; the
    iteration runs in bf16 on CUDA, as torch.optim.Muon's does everywhere, and in the weights'
    precision on a CPU.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        momentum: float = 0.95,
    ):
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum: must lie in [0, 1), got {momentum}")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum": momentum,
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
        return (size * orthogonalise(ahead)).reshape(parameter.shape).to(parameter.dtype)

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
