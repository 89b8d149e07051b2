"""The square root of SNR taken off the loss. Measured: no reported arm. For noise schedules, not
for flows."""

import torch

from silentbad.memory.weightings import in_prediction
from silentbad.settings.types import Positive


def debiased(snr: torch.Tensor, prediction_type: str, *, cap: Positive = 10.0) -> torch.Tensor:
    """1/sqrt(SNR) on epsilon (2310.08442), at most `cap`: it diverges at terminal SNR zero."""
    return in_prediction(snr.clamp_min(cap**-2).rsqrt(), snr, prediction_type)
