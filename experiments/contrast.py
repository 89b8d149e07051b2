"""Clean gradients quieter in the layers where elements speak. Measured: no better than one factor for
all layers, or than its own factors shuffled (research/results.md); the elements' signal-to-noise
ratio is zero in most groups."""

from typing import Annotated

from annotated_types import Interval
from torch import Tensor

from silentbad.control.statistics import GroupStats
from silentbad.settings.types import Positive


def contrast(
    own: GroupStats,
    element: GroupStats,
    *,
    power: Annotated[float, Interval(ge=-4, le=4)] = 0.5,
    floor: Positive = 4e-4,
) -> Tensor:
    """(r_own / r_element)^power: quiet where the elements have something to say, kept where only
    this source has."""
    return (own.snr(floor) / element.snr(floor)) ** power
