"""A noise window for each element, by its size and contrast. Measured: no gain on two development
targets, nor on eight at once (0.49 of the images, without 0.51, one window for all 0.52); a run
each.

    --hooks experiments/noise_window.py:NoiseWindow

The noise level at which a thing is decided rises with how far it sets the picture apart, which is
its area times its contrast (2403.01633): a small or pale thing is decided at less noise.

Legend: B samples, S,S pixels, T training timesteps, p (T,) a density of timesteps."""

from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from silentbad.data.elements import DataInfo
from silentbad.data.images import to_tensor
from silentbad.data.records import Records
from silentbad.loop.hooks import Hook, HookContext
from silentbad.memory.masks import fitted_mask
from silentbad.memory.timesteps import draw_timesteps, snr_mixture
from silentbad.model import diffusion
from silentbad.settings.types import Positive, Unit

LOWEST, HIGHEST = 0.3, 30.0  # SNR of a centre


class NoiseWindow(Hook):
    """Elements' pictures are shown around SNR = centre * (typical separation / separation)^power,
    unions around `centre`, as `snr_mixture` does it; clean pictures at all noise levels alike.

    The separation of an element is the area of its mask times the RMS distance of its pixels from
    the mean outside of it; typical is the geometric mean over elements. Controls: power 0, one
    window for all; power -1; separations `shuffled` over the elements."""

    def __init__(
        self,
        context: HookContext,
        *,
        centre: Positive = 3.0,
        power: float = 1.0,
        width: Positive = 1.0,
        high: Unit = 0.1,
        shuffled: bool = False,
    ):
        self.seed = context.config.seed
        self.importance = context.config.memory.timesteps.importance
        self.snr = diffusion.signal_to_noise(context.scheduler).double().cpu().numpy()
        self.width = width
        self.high = high
        self.centre = centre
        self.power = power
        self.shuffled = shuffled
        self.separations = separations(context.records)  # by element

    def timesteps(
        self, draw: int, positions: list[int], count: int, batch: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        t = torch.empty(len(positions), dtype=torch.long)
        w = torch.empty(len(positions))
        alike = defaultdict(list)  # rows of one density
        for row, kind in enumerate(zip(batch["role"], DataInfo.keys_of(batch), strict=True)):
            alike[kind].append(row)
        for kind, rows in alike.items():
            places = [positions[row] for row in rows]
            t[rows], w[rows] = draw_timesteps(
                self.density(*kind), self.seed, draw, places, count, self.importance
            )
        return t, w

    def density(self, role: str, element: str) -> np.ndarray:
        """p (T,) for a picture."""
        if role == "clean":
            return np.full(len(self.snr), 1 / len(self.snr))
        centre = self.centre_of(element) if element in self.separations else self.centre
        return snr_mixture(self.snr, 0.0, centre=centre, width=self.width, high=self.high)

    def centre_of(self, element: str) -> float:
        """The SNR around which an element is shown."""
        if self.shuffled:
            elements = list(self.separations)
            element = elements[(elements.index(element) + 1) % len(elements)]
        typical = float(np.exp(np.mean(np.log([*self.separations.values()]))))
        centre = self.centre * (typical / self.separations[element]) ** self.power
        return float(np.clip(centre, LOWEST, HIGHEST))


def separations(records: Records) -> dict[str, float]:
    """{element: the mean of its records with a mask}."""
    info = records.info()
    found = defaultdict(list)
    for key, rows in zip(info.keys, info.rows, strict=True):
        for row in rows.tolist():
            _, picture, mask = records.open(row)
            if picture is not None and mask is not None:
                of_mask = to_tensor(fitted_mask(mask, picture.size))[:1]
                found[key].append(separation(to_tensor(picture), of_mask))
    return {key: float(np.mean(values)) for key, values in found.items()}


def separation(picture: Tensor, mask: Tensor) -> float:
    """Of what a mask (1,S,S) shows of a picture (3,S,S); at least 0.001."""
    inside = mask.round()
    outside = 1 - inside
    mean = (picture * outside).sum((1, 2), keepdim=True) / outside.sum().clamp_min(1)
    squares = (picture - mean).square().mean(0, keepdim=True) * inside
    contrast = (squares.sum() / inside.sum().clamp_min(1)).sqrt()
    return max(float(inside.mean() * contrast), 1e-3)
