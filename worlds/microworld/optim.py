"""Muon for the base's training. torch.optim.Muon takes matrices only; most of a UNet's weights
are convolutions."""

import torch
from torch import nn

from silentbad.control.spectral import orthogonalise


class Muon(torch.optim.Optimizer):
    """Momentum, then orthogonalisation of each weight flattened to (out, in*kh*kw); update size
    as in 2502.16982."""

    def __init__(self, parameters, lr: float = 3e-3, momentum: float = 0.95):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no closure
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                g = p.grad.reshape(len(p), -1)
                m = (
                    state.setdefault("momentum", torch.zeros_like(g))
                    .mul_(group["momentum"])
                    .add_(g)
                )
                u = orthogonalise(g.add(m, alpha=group["momentum"]))
                p.add_(u.reshape(p.shape), alpha=-group["lr"] * 0.2 * max(u.shape) ** 0.5)


def adamw(parameters: list[nn.Parameter], lr: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.99), weight_decay=0.0, fused=True)


class MuonWithAdamW:
    """Muon on matrices and kernels, AdamW on everything else: embeddings, norms, biases. With
    `muon` off AdamW has the matrices too, at their own rate."""

    def __init__(self, module: nn.Module, lr: float, muon: bool = True):
        embeddings = {
            id(p) for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters()
        }
        all_parameters = list(module.parameters())
        matrices = [p for p in all_parameters if p.ndim >= 2 and id(p) not in embeddings]
        rest = [p for p in all_parameters if p.ndim < 2 or id(p) in embeddings]
        self.lr = lr
        self.optimizers = [
            Muon(matrices, lr) if muon else adamw(matrices, lr),
            adamw(rest, lr / 3),
        ]

    def set_fraction(self, fraction: float) -> None:
        for optimizer, peak in zip(self.optimizers, (self.lr, self.lr / 3), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * fraction

    def step(self) -> None:  # type: ignore[override]  # no closure
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict]:
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load_state_dict(self, state: list[dict]) -> None:
        for optimizer, part in zip(self.optimizers, state, strict=True):
            optimizer.load_state_dict(part)
