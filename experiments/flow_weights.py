"""The other loss weights of diffusers' script for Stable Diffusion 3. Measured: no reported arm."""

import torch
from diffusers.training_utils import compute_loss_weighting_for_sd3

from silentbad.memory.weightings import flow_sigma, in_prediction
from silentbad.settings.types import Positive


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


def sigma_sqrt(snr: torch.Tensor, prediction_type: str, *, cap: Positive = 10.0) -> torch.Tensor:
    """1/sigma^2 on the flow error (EDM's weight as diffusers has it, 2206.00364): nearly all of
    it at low noise."""
    return in_flow("sigma_sqrt", snr, prediction_type, cap)


def cosmap(snr: torch.Tensor, prediction_type: str, *, cap: Positive = 10.0) -> torch.Tensor:
    """2/(pi (1 - 2 sigma + 2 sigma^2)) on the flow error (2403.03206, eq. 21)."""
    return in_flow("cosmap", snr, prediction_type, cap)
