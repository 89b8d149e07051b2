"""The path from pictures to noise: noise at an address, x_t, and the prediction target.

x_t = alpha_t x0 + sigma_t eps. A schedule states alpha_t and sigma_t for t = 0 (least noise) to T -
1: a DDPMScheduler, or a `Flow`. Another path is another class beside `Flow`. Legend: x0 is
`latents` (B,C,h,w), eps `noise`, x_t `noisy_latents`, t `timesteps` (B,)."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from diffusers.training_utils import compute_dream_and_update_latents, compute_snr

from silentbad import rng
from silentbad.device import send
from silentbad.settings.train import TrainConfig


class Flow:
    """A rectified flow: x_t = (1 - sigma_t) x0 + sigma_t eps, the model predicts eps - x0
    (2403.03206, eq. 13 and 14).

    It has the parts of a DDPMScheduler that other modules use: `add_noise` and `config`.
    `scheduler` is diffusers' FlowMatchEulerDiscreteScheduler, whose shift is in its sigmas already;
    it lists them from the most noise down."""

    def __init__(self, scheduler: Any):
        T = scheduler.config.num_train_timesteps
        self.config = SimpleNamespace(num_train_timesteps=T, prediction_type="flow")
        # sigma_t, and t as it is fed
        self.table = torch.stack([scheduler.sigmas[:T], scheduler.timesteps[:T]]).flip(1)

    def read(self, timesteps: torch.Tensor) -> torch.Tensor:
        """(sigma_t, timesteps as the model takes them) (2,B)."""
        self.table = self.table.to(timesteps.device)
        return self.table[:, timesteps]

    def add_noise(
        self, latents: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor
    ) -> torch.Tensor:
        """The noisy latents (B,C,h,w)."""
        alpha, sigma = levels(self, timesteps, latents)
        return alpha * latents + sigma * noise


def signal_to_noise(schedule: Any) -> torch.Tensor:
    """SNR (T,) = alpha^2 / sigma^2."""
    if isinstance(schedule, Flow):
        return (1 / schedule.table[0].cpu() - 1).square()
    return compute_snr(schedule, torch.arange(schedule.config.num_train_timesteps)).float()


def levels(
    schedule: Any, timesteps: torch.Tensor, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(alpha_t, sigma_t), both (B,1,1,1), in the precision of `like`."""
    if isinstance(schedule, Flow):
        sigma = schedule.read(timesteps)[0].to(like)[:, None, None, None]
        return 1 - sigma, sigma
    alpha_bar = schedule.alphas_cumprod.to(timesteps.device)[timesteps].to(like)
    alpha_bar = alpha_bar[:, None, None, None]
    return alpha_bar.sqrt(), (1 - alpha_bar).sqrt()


def model_time(schedule: Any, timesteps: torch.Tensor) -> torch.Tensor:
    """The timesteps (B,) as the model takes them."""
    return schedule.read(timesteps)[1] if isinstance(schedule, Flow) else timesteps


def noised(
    scheduler: Any,
    latents: torch.Tensor,
    timesteps: torch.Tensor,
    config: TrainConfig,
    draw: int,
    positions: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(noise, noisy latents), both (B,C,h,w), from addressed noise, perturbed where asked."""

    def addressed(shape: tuple[int, ...], stream: str) -> torch.Tensor:
        return send(rng.noise(shape, config.seed, stream, draw, positions), latents.device)

    shape = tuple(latents.shape[1:])
    noise = addressed(shape, "noise")
    if config.noise_offset:
        noise = noise + config.noise_offset * addressed((shape[0], 1, 1), "offset")
    perturbed = noise
    if config.input_perturbation:  # the input is noisier than the target says (2301.11706)
        perturbed = noise + config.input_perturbation * addressed(shape, "perturbation")
    return noise, scheduler.add_noise(latents, perturbed, timesteps)


def prediction_target(
    scheduler: Any, latents: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor
) -> torch.Tensor:
    """What the model predicts (B,C,h,w), by the schedule's prediction_type."""
    kind = scheduler.config.prediction_type
    if kind == "epsilon":
        return noise
    if kind == "flow":
        return noise - latents
    return scheduler.get_velocity(latents, noise, timesteps) if kind == "v_prediction" else latents


def to_epsilon(
    scheduler: Any, model_pred: torch.Tensor, noisy_latents: torch.Tensor, timesteps: torch.Tensor
) -> torch.Tensor:
    """The noise (B,C,h,w) that a prediction stands for."""
    kind = scheduler.config.prediction_type
    alpha, sigma = levels(scheduler, timesteps, noisy_latents)
    if kind == "v_prediction":
        return alpha * model_pred + sigma * noisy_latents
    if kind == "flow":
        return noisy_latents + alpha * model_pred
    return (noisy_latents - alpha * model_pred) / sigma if kind == "sample" else model_pred


def dream(
    model: Callable, scheduler, latents, noise, timesteps, noisy_latents, preservation: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """DREAM (2312.00210) by diffusers' function: latents, noise, noisy latents (B,C,h,w) and
    timesteps (B,) -> (noisy latents, target), each (B,C,h,w), rectified by the model's own noise
    estimate. It knows epsilon only: v and x0 are read as epsilon on the way in,
    and turned back."""

    def as_epsilon(noisy_latents, timesteps, encoder_hidden_states):
        model_pred = model(noisy_latents, timesteps)
        return SimpleNamespace(sample=to_epsilon(scheduler, model_pred, noisy_latents, timesteps))

    asked = SimpleNamespace(
        alphas_cumprod=scheduler.alphas_cumprod, config=SimpleNamespace(prediction_type="epsilon")
    )
    noisy_latents, noise = compute_dream_and_update_latents(
        as_epsilon, asked, timesteps, noise, noisy_latents, noise, None, preservation
    )
    return noisy_latents, prediction_target(scheduler, latents, noise, timesteps)
