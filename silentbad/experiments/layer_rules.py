"""Scale rules and rules between sources that were level with uniform ones, and what the
hypergradient measures. To act on layers, train some of them: `--train_layers up*`."""

import fnmatch
import math
from typing import Annotated

import torch
from annotated_types import Interval
from torch import Tensor

from silentbad.control.statistics import WIDTH, GroupStats, Sample, row_dot
from silentbad.model.groups import prior_table
from silentbad.settings.types import NotNegative, Positive


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


def prior(stats: GroupStats, *, table: str | None = None, drop: list[str] | None = None) -> Tensor:
    """pi_G of configs/prior.yaml, each row with its evidence; `drop` leaves rows out, for
    ablation."""
    rows = prior_table(table, drop, stats.sdxl).items()
    match = fnmatch.fnmatch
    return stats.constant(
        math.prod(x for row, x in rows if match(name, row)) for name in stats.names
    )


def inverse_rms(stats: GroupStats) -> Tensor:
    """1 / RMS(g): slower where gradients are large, as if curvature grew with noise."""
    return 1 / stats.rms


def auto_rgn(stats: GroupStats) -> Tensor:
    """||g|| / ||theta||: Auto-RGN of surgical fine-tuning (2210.11466)."""
    return stats.Q.sqrt() / stats.theta


def hypergradient(stats: GroupStats, *, rate: NotNegative = 4.0) -> Tensor:
    """h = exp(rate * transfer): faster where updates descend on rehearsals too (after OSGM
    2502.11229)."""
    return (rate * stats.transfer).exp()


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


def equalise(own: GroupStats, element: GroupStats) -> Tensor:
    """RMS(g_element) / RMS(g_own): both sources as loud in every layer."""
    return element.rms / own.rms


class Transfer:
    """How well each group's last update served rehearsed compositions: an average of -cos(gradient,
    update) (G,)."""

    def __init__(self, sample: Sample, averaging: float):
        self.sample = sample
        self.averaging = averaging
        self.value = torch.zeros_like(sample.owner[0])
        self.update = torch.zeros(sample.rows, WIDTH, device=sample.owner.device)

    def state_dict(self) -> dict[str, Tensor]:
        return {"value": self.value.clone(), "update": self.update.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.value = state["value"].to(self.value)
        self.update = state["update"].to(self.update)

    def before_step(self) -> None:
        """Hold the weights in the place of the last update, which `learn` has seen by now."""
        self.update = self.sample.read(self.sample.params)

    def after_step(self, skipped: bool) -> None:
        """The update, from the weights held; zero, so without a cosine, after a skipped step."""
        self.update = self.sample.read(self.sample.params).sub_(self.update)
        if skipped:
            self.update.zero_()

    def learn(self, rehearsal: Tensor) -> None:
        """Take in a rehearsal gradient (rows, WIDTH); groups without a defined cosine stay as
        they are."""
        g = rehearsal
        u = self.update
        dot, gg, uu = self.sample.per_group(
            torch.stack([row_dot(g, u), row_dot(g, g), row_dot(u, u)])
        )
        cos = dot / (gg * uu).sqrt()
        self.value.lerp_(torch.where(cos.isfinite(), -cos, self.value), 1 - self.averaging)
