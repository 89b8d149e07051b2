"""min-SNR without its corner. Measured: no reported arm. For noise schedules, not for flows."""

import torch

from silentbad.memory.weightings import in_prediction
from silentbad.settings.types import Positive


def soft_min_snr(snr: torch.Tensor, prediction_type: str, *, gamma: Positive = 4.0) -> torch.Tensor:
    """SNR gamma/(SNR + gamma) on x0 (2401.11605): half the harmonic mean of the two."""
    return in_prediction(gamma / (snr + gamma), snr, prediction_type)
