"""Timesteps of a draw, from a density over all of them; and densities: `snr_mixture`, and those of
Stable Diffusion 3."""

import math
from typing import Annotated

import numpy as np
import torch
from annotated_types import Interval

from silentbad import rng
from silentbad.errors import UserError
from silentbad.settings.types import Decay, Positive, Unit


def comb(seed: int, draw: int, n: int) -> np.ndarray:
    """u (n,): n evenly spaced points with one random offset (the low-discrepancy sampler of
    2107.00630), shuffled anew at every draw."""
    g = rng.generator(seed, "timesteps", draw)
    perm = torch.randperm(n, generator=g).numpy()
    return (perm + torch.rand((), generator=g, dtype=torch.float64).item()) / n


def draw_timesteps(
    p: np.ndarray,
    seed: int,
    draw: int,
    positions: list[int],
    n: int,
    importance: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(t (B,), w (B,)) at `positions` of the draw's effective batch: the inverse CDF of the density
    p (T,) at an even `comb` u; w = 1/(T p) or 1."""
    u = comb(seed, draw, n)[np.asarray(positions)]
    cdf = np.cumsum(p)
    t = np.minimum(np.searchsorted(cdf / cdf[-1], u, side="right"), len(p) - 1)
    w = 1 / (len(p) * p[t]) if importance else np.ones(len(t))
    return torch.from_numpy(t), torch.from_numpy(w).float()


def mixed(q: np.ndarray, uniform: float) -> np.ndarray:
    """(1 - uniform) * q normalised + uniform / T; uniform where q (T,) is zero everywhere. Raises
    UserError where `uniform` is below 0.3."""
    if not 0.3 - 1e-9 <= uniform <= 1:  # 1 - 0.55 - 0.15 is a little less than 0.3
        raise UserError(
            f"memory.timesteps: the uniform share is {uniform:g}; it must lie in [0.3, 1]"
        )
    q = q if q.any() else np.ones(len(q))
    return (1 - uniform) * q / q.sum() + uniform / len(q)


def snr_mixture(
    snr: np.ndarray,
    progress: float,
    *,
    centre: Positive = 0.5,
    width: Positive = 0.7,
    middle: Unit = 0.5,
    high: Unit = 0.15,
    above: Decay = 0.7,
) -> np.ndarray:
    """`middle` of a logistic in log-SNR around SNR `centre`, `high` of a uniform above t = above*T,
    the rest uniform. The middle noise levels are where memory forms (2602.17846), the high ones
    hold the guidance basin (2411.16738)."""
    T = len(snr)
    log_snr = np.log(np.maximum(snr, 1e-20))
    edges = np.concatenate([[np.inf], (log_snr[1:] + log_snr[:-1]) / 2, [-np.inf]])
    cdf = 0.5 * (1 + np.tanh((edges - math.log(centre)) / (2 * width)))
    tail = np.arange(T) >= above * T
    return mixed(middle * -np.diff(cdf) + high * tail / tail.sum(), 1 - middle - high)


def logit_normal(
    snr: np.ndarray,
    progress: float,
    *,
    mean: Annotated[float, Interval(ge=-10, le=10)] = 0.0,
    std: Positive = 1.0,
    uniform: Unit = 0.3,
) -> np.ndarray:
    """logit(t/T) ~ N(mean, std) (2403.03206, eq. 19): the mass of each bin."""
    edges = np.linspace(0, 1, len(snr) + 1)[1:-1]
    z = (np.log(edges / (1 - edges)) - mean) / std
    cdf = np.asarray([0.0, *(0.5 * (1 + math.erf(v / math.sqrt(2))) for v in z), 1.0])
    return mixed(np.diff(cdf), uniform)


def mode(
    snr: np.ndarray,
    progress: float,
    *,
    scale: Annotated[float, Interval(ge=-1, le=2 / (math.pi - 2))] = 1.29,
    uniform: Unit = 0.3,
) -> np.ndarray:
    """t/T = 1 - u - scale (cos^2(pi u / 2) - 1 + u), u uniform (2403.03206, eq. 20): the mass of
    each bin. The map is monotone in the range of `scale`."""
    u = np.linspace(1, 0, 20 * len(snr) + 1)
    x = 1 - u - scale * (np.cos(math.pi / 2 * u) ** 2 - 1 + u)
    return mixed(np.diff(1 - np.interp(np.linspace(0, 1, len(snr) + 1), x, u)), uniform)
