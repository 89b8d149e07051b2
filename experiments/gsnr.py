"""Rates by signal-to-noise. Measured: 1.00 [1.00, 1.00] of plain's speed, with less rise of the clean
error; a lower rate for all layers has as little (docs/gradient-control.md)."""

from typing import Annotated

from annotated_types import Interval
from torch import Tensor

from silentbad.control.statistics import GroupStats
from silentbad.settings.types import Positive


def gsnr(
    stats: GroupStats,
    *,
    beta: Annotated[float, Interval(ge=-8, le=8)] = 1.0,
    floor: Positive = 4e-4,
) -> Tensor:
    """sqrt(r / RMS^beta), r = S+ / (E - S+): gradient signal-to-noise (GSNR 2001.07384; MoLS
    2605.05794).

    Below `floor`, r is mostly estimation error. The half powers are ours.
    """
    return (stats.snr(floor) / stats.rms**beta).sqrt()
