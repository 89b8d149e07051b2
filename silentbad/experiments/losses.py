"""Loss weights by noise level and an error, none of which has a reported arm.

Legend: snr (B,); a weight stands on the epsilon error and is carried over to what the model
predicts."""

import torch
from diffusers.training_utils import compute_loss_weighting_for_sd3

from silentbad.memory.weightings import flow_sigma, in_prediction
from silentbad.settings.types import Positive


def soft_min_snr(snr: torch.Tensor, prediction_type: str, *, gamma: Positive = 4.0) -> torch.Tensor:
    """SNR gamma/(SNR + gamma) on x0 (2401.11605): half the harmonic mean of the two."""
    return in_prediction(gamma / (snr + gamma), snr, prediction_type)


def debiased(snr: torch.Tensor, prediction_type: str, *, cap: Positive = 10.0) -> torch.Tensor:
    """1/sqrt(SNR) on epsilon (2310.08442), at most `cap`: it diverges at terminal SNR zero."""
    return in_prediction(snr.clamp_min(cap**-2).rsqrt(), snr, prediction_type)


def p2(
    snr: torch.Tensor, prediction_type: str, *, k: Positive = 1.0, gamma: Positive = 1.0
) -> torch.Tensor:
    """1/(k + SNR)^gamma on epsilon (2204.00227)."""
    return in_prediction((k + snr) ** -gamma, snr, prediction_type)


def in_flow(scheme: str, snr: torch.Tensor, prediction_type: str, cap: float) -> torch.Tensor:
    """diffusers' weight of the flow error ||d(eps - x0)||^2 = ||d eps||^2 / (1 - sigma)^2, sigma =
    1/(1 + sqrt(SNR)).

    The quotient diverges at SNR zero, so SNR is taken to be at least cap^-2 in it. A model that
    predicts the flow needs none."""
    if prediction_type == "flow":
        return compute_loss_weighting_for_sd3(scheme, flow_sigma(snr))
    sigma = flow_sigma(snr.clamp_min(cap**-2))
    return in_prediction(
        compute_loss_weighting_for_sd3(scheme, sigma) / (1 - sigma) ** 2, snr, prediction_type
    )


def x0(snr: torch.Tensor, prediction_type: str, *, cap: Positive = 10.0) -> torch.Tensor:
    """1/SNR on epsilon: the error of x0, as diffusers' script of Stable Diffusion 3 takes it; at
    most cap^2 there, and exact in a flow, where it is sigma^2."""
    if prediction_type == "flow":
        return flow_sigma(snr).square()
    return in_prediction(1 / snr.clamp_min(cap**-2), snr, prediction_type)


def sigma_sqrt(snr: torch.Tensor, prediction_type: str, *, cap: Positive = 10.0) -> torch.Tensor:
    """1/sigma^2 on the flow error (EDM's weight as diffusers has it, 2206.00364): nearly all of
    it at low noise."""
    return in_flow("sigma_sqrt", snr, prediction_type, cap)


def cosmap(snr: torch.Tensor, prediction_type: str, *, cap: Positive = 10.0) -> torch.Tensor:
    """2/(pi (1 - 2 sigma + 2 sigma^2)) on the flow error (2403.03206, eq. 21)."""
    return in_flow("cosmap", snr, prediction_type, cap)


def huber(pred: torch.Tensor, target: torch.Tensor, delta: float) -> torch.Tensor:
    """Pseudo-Huber 2 delta (sqrt(r^2 + delta^2) - delta) (2403.16728): r^2 for small r, 2 delta
    |r| for large."""
    return 2 * delta * (((pred - target).square() + delta**2).sqrt() - delta)
