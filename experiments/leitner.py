"""Leitner's boxes: elements that are recalled are shown less often. Measured: no reported arm.

Needs `--memory.phrase_memory.enabled true`, which measures what is recalled."""

import numpy as np

from silentbad.memory.samplers import weakest_first
from silentbad.settings.types import Positive, Small, Unit


def leitner(
    rho: np.ndarray,
    records: np.ndarray,
    epoch: int,
    *,
    promote: Unit = 0.5,
    boxes: Small = 3,
    cap: Positive = 4.0,
) -> np.ndarray:
    """Leitner's boxes: an element in box b is shown every 2^b epochs; `weakest_first` divides the
    exposures among those that are due.

    The box is the number of latest probes in a row with rho >= promote, so one failed recall sends
    it back to the first. (Leitner tests an item only when it is due; our probe tests all, at the
    cost of forwards only.)"""
    n = len(records)
    recalled = (
        np.cumprod(rho[::-1] >= promote, axis=0).sum(axis=0) if len(rho) else np.zeros(n, dtype=int)
    )
    box = np.minimum(recalled, boxes - 1)
    due = epoch % (2**box) == 0
    due = due if due.any() else box == box.min()
    q = np.zeros(n)
    q[due] = weakest_first(rho[:, due], records[due], epoch, cap=cap)
    return q
