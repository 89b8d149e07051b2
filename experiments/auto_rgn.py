"""Faster where gradients are large beside the weights. Measured: 1.00 [1.00, 1.33] of plain's speed,
with more rise of the clean error."""

from torch import Tensor

from silentbad.control.statistics import GroupStats


def auto_rgn(stats: GroupStats) -> Tensor:
    """||g|| / ||theta||: Auto-RGN of surgical fine-tuning (2210.11466)."""
    return stats.Q.sqrt() / stats.theta
