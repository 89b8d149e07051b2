"""The path from pictures to noise: noise at an address, x_t, and what the model is asked to predict
there.

x_t = alpha_t x0 + sigma_t eps. A schedule states alpha_t and sigma_t for t = 0 (least noise) to T -
1: a DDPMScheduler, or a `Flow`. Another path is another class beside `Flow`. Legend: x0 (B,C,h,w)
latents, eps noise, t (B,)."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from diffusers.training_utils import compute_dream_and_update_latents, compute_snr

from silentbad.device import send
from silentbad.rng import noise
from silentbad.settings.train import TrainConfig


class Flow:
    """A rectified flow: x_t = (1 - sigma_t) x0 + sigma_t eps, the model predicts eps - x0
    (2403.03206, eq. 13 and 14).

    It has what is read of a DDPMScheduler elsewhere: `add_noise` and `config`. `scheduler` is
    diffusers' FlowMatchEulerDiscreteScheduler, whose shift is in its sigmas already; it lists them
    from the most noise down."""

    def __init__(self, scheduler: Any):
        T = scheduler.config.num_train_timesteps
        self.config = SimpleNamespace(num_train_timesteps=T, prediction_type="flow")
        # sigma_t, and t as it is fed
        self.table = torch.stack([scheduler.sigmas[:T], scheduler.timesteps[:T]]).flip(1)

    def read(self, t: torch.Tensor) -> torch.Tensor:
        """(sigma_t, t as the model takes it) (2,B)."""
        self.table = self.table.to(t.device)
        return self.table[:, t]

    def add_noise(self, x0: torch.Tensor, eps: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """x_t (B,C,h,w)."""
        a, s = levels(self, t, x0)
        return a * x0 + s * eps


def signal_to_noise(schedule: Any) -> torch.Tensor:
    """SNR (T,) = alpha^2 / sigma^2."""
    if isinstance(schedule, Flow):
        return (1 / schedule.table[0].cpu() - 1).square()
    return compute_snr(schedule, torch.arange(schedule.config.num_train_timesteps)).float()


def levels(schedule: Any, t: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(alpha_t, sigma_t), both (B,1,1,1), in the precision of `like`."""
    if isinstance(schedule, Flow):
        s = schedule.read(t)[0].to(like)[:, None, None, None]
        return 1 - s, s
    abar = schedule.alphas_cumprod.to(t.device)[t].to(like)[:, None, None, None]
    return abar.sqrt(), (1 - abar).sqrt()


def model_time(schedule: Any, t: torch.Tensor) -> torch.Tensor:
    """t (B,) as the model takes it."""
    return schedule.read(t)[1] if isinstance(schedule, Flow) else t


def noised(
    scheduler: Any,
    x0: torch.Tensor,
    t: torch.Tensor,
    config: TrainConfig,
    draw: int,
    positions: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(eps, x_t), both (B,C,h,w), from addressed noise, perturbed where asked."""

    def addressed(shape: tuple[int, ...], stream: str) -> torch.Tensor:
        return send(noise(shape, config.seed, stream, draw, positions), x0.device)

    shape = tuple(x0.shape[1:])
    eps = addressed(shape, "noise")
    if config.noise_offset:
        eps = eps + config.noise_offset * addressed((shape[0], 1, 1), "offset")
    perturbed = eps
    if config.input_perturbation:  # the input is noisier than the target says (2301.11706)
        perturbed = eps + config.input_perturbation * addressed(shape, "perturbation")
    return eps, scheduler.add_noise(x0, perturbed, t)


def prediction_target(
    scheduler: Any, x0: torch.Tensor, eps: torch.Tensor, t: torch.Tensor
) -> torch.Tensor:
    """What the model predicts (B,C,h,w), by the schedule's prediction_type."""
    kind = scheduler.config.prediction_type
    if kind == "epsilon":
        return eps
    if kind == "flow":
        return eps - x0
    return scheduler.get_velocity(x0, eps, t) if kind == "v_prediction" else x0


def to_epsilon(
    scheduler: Any, out: torch.Tensor, x_t: torch.Tensor, t: torch.Tensor
) -> torch.Tensor:
    """The eps (B,C,h,w) that a prediction `out` at x_t and t (B,) stands for."""
    kind = scheduler.config.prediction_type
    a, s = levels(scheduler, t, x_t)
    if kind == "v_prediction":
        return a * out + s * x_t
    if kind == "flow":
        return x_t + a * out
    return (x_t - a * out) / s if kind == "sample" else out


def dream(
    model: Callable, scheduler, x0, eps, t, x_t, preservation: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """DREAM (2312.00210) by diffusers' function -> (x_t, target) rectified by the model's own noise
    estimate. It knows epsilon only: v and x0 are read as epsilon on the way in, and turned back."""

    def as_epsilon(x, t, c):
        return SimpleNamespace(sample=to_epsilon(scheduler, model(x, t), x, t))

    asked = SimpleNamespace(
        alphas_cumprod=scheduler.alphas_cumprod, config=SimpleNamespace(prediction_type="epsilon")
    )
    x_t, eps = compute_dream_and_update_latents(
        as_epsilon, asked, t, eps, x_t, eps, None, preservation
    )
    return x_t, prediction_target(scheduler, x0, eps, t)
