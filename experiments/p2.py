"""Less weight at low noise. Measured: no reported arm. For noise schedules, not for flows."""

import torch

from silentbad.memory.weightings import in_prediction
from silentbad.settings.types import Positive


def p2(
    snr: torch.Tensor, prediction_type: str, *, k: Positive = 1.0, gamma: Positive = 1.0
) -> torch.Tensor:
    """1/(k + SNR)^gamma on epsilon (2204.00227)."""
    return in_prediction((k + snr) ** -gamma, snr, prediction_type)
