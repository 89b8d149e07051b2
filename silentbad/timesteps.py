"""Timesteps of a step, drawn from a density over all of them."""

import numpy as np
import torch

from silentbad import rng


def draw_timesteps(
    p: np.ndarray, seed: int, step: int, positions: list[int], n: int, importance: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(t (B,), w (B,)) at `positions` of the step's effective batch: the inverse CDF at u_i = (perm_i +
    offset)/N.

    One shared offset (2107.00630) makes each u_i uniform and their union an even comb; w = 1/(T p) or 1.
    """
    g = rng.generator(seed, "timesteps", step)
    perm = torch.randperm(n, generator=g).numpy()[np.asarray(positions)]
    u = (perm + torch.rand((), generator=g, dtype=torch.float64).item()) / n
    cdf = np.cumsum(p)
    t = np.minimum(np.searchsorted(cdf / cdf[-1], u, side="right"), len(p) - 1)
    w = 1 / (len(p) * p[t]) if importance else np.ones(len(t))
    return torch.from_numpy(t), torch.from_numpy(w).float()
