"""Memory reinforcement: what to show, at which noise level, where to look, and what to keep.

A target is a picture of k elements; the data shows each element alone, at its native place, beside its phrase. Every
part below is usable alone and off by default; docs/memory.md says what each is for and when it harms.

Legend: R records, n elements (a key is "target/element"), T training timesteps, N effective batch, B micro-batch,
x0 (B,C,h,w) latents, t (B,), rho_i strength of element i, q_i its share of the exposures, p (T,) timestep density.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

from silentbad import experiments
from silentbad.data.elements import ORDERS, DataInfo, Epochs
from silentbad.experiments.attention import record_maps
from silentbad.experiments.timesteps import ErrorByTimestep
from silentbad.memory import masks, probes, roles
from silentbad.memory.auxiliary import Access, Auxiliaries, SelfDistillation, Setting, Step, fixed
from silentbad.memory.masks import REGION
from silentbad.memory.rehearsal import REHEARSAL, Rehearsal, Rehearsed
from silentbad.memory.samplers import weakest_first
from silentbad.memory.timesteps import SEQUENCES, draw_timesteps, logit_normal, mixed, mode
from silentbad.memory.weightings import in_prediction, mse
from silentbad.model import diffusion
from silentbad.settings.memory import (
    MemoryConfig,
    Part,
    check_memory,
)
from silentbad.settings.types import Decay, Positive, Unit

Registry = dict[str, Callable[..., Any]]


# ------------------------------------------------------------ samplers
# A sampler gives each element its share q (n,) of the epoch's element exposures, from the probe history
# rho (H,n), the number of records of each element (n,) and the epoch. `epoch_order` deals the records.


def uniform(rho: np.ndarray, records: np.ndarray, epoch: int) -> np.ndarray:
    """Every record once."""
    return records / records.sum()


SAMPLERS: Registry = {"uniform": uniform, "weakest_first": weakest_first, **experiments.SAMPLERS}


# ------------------------------------------------------------ timestep policies
# A policy is a density p (T,) from the schedule's snr (T,), the progress of the run in [0,1] and the relative
# error by timestep (bins,) or None. At least 0.3 of every density is uniform. `silentbad/memory/timesteps.py`
# has the densities of Stable Diffusion 3.


def uniform_t(snr: np.ndarray, progress: float, error: np.ndarray | None) -> np.ndarray:
    """1/T: what plain training does."""
    return np.full(len(snr), 1 / len(snr))


def snr_mixture(
    snr: np.ndarray,
    progress: float,
    error: np.ndarray | None,
    *,
    centre: Positive = 0.5,
    width: Positive = 0.7,
    middle: Unit = 0.5,
    high: Unit = 0.15,
    above: Decay = 0.7,
) -> np.ndarray:
    """`middle` of a logistic in log-SNR around SNR `centre`, `high` of a uniform above t = above*T, the rest
    uniform. The middle noise levels are where memory forms (2602.17846), the high ones hold the guidance
    basin (2411.16738)."""
    T = len(snr)
    log_snr = np.log(np.maximum(snr, 1e-20))
    edges = np.concatenate([[np.inf], (log_snr[1:] + log_snr[:-1]) / 2, [-np.inf]])
    cdf = 0.5 * (1 + np.tanh((edges - math.log(centre)) / (2 * width)))
    tail = np.arange(T) >= above * T
    return mixed(middle * -np.diff(cdf) + high * tail / tail.sum(), 1 - middle - high)


TIMESTEPS: Registry = {
    "uniform": uniform_t,
    "logit_normal": logit_normal,
    "mode": mode,
    "snr_mixture": snr_mixture,
    **experiments.TIMESTEPS,
}


# ------------------------------------------------------------ losses
# A loss weight is a function of snr (B,) for the epsilon error, finite at snr = 0; `in_prediction` carries it over to
# what the model predicts. More are in silentbad/experiments/losses.py.


def no_weight(snr: torch.Tensor, prediction_type: str) -> torch.Tensor:
    """The mean squared error of whatever the model predicts."""
    return torch.ones_like(snr)


def min_snr(snr: torch.Tensor, prediction_type: str, *, gamma: Positive = 5.0) -> torch.Tensor:
    """min(SNR, gamma)/SNR on epsilon (2303.09556), written gamma/max(SNR, gamma)."""
    return in_prediction(gamma / snr.clamp_min(gamma), snr, prediction_type)


LOSSES: Registry = {"none": no_weight, "min_snr": min_snr, **experiments.LOSSES}
ERRORS: Registry = {"mse": mse, **experiments.ERRORS}


# ------------------------------------------------------------ the shell
# Regions are registered in `silentbad.memory.masks`, rehearsal in `silentbad.memory.rehearsal`; the parts of auxiliary
# losses are in `silentbad.memory.auxiliary`.


AUXILIARY: dict[str, Registry] = {
    **experiments.AUXILIARY,
    "retention": {"self_distillation": SelfDistillation, **experiments.AUXILIARY["retention"]},
}
LOSS_BALANCE: Registry = {"fixed": fixed, **experiments.LOSS_BALANCE}


REGISTRIES: dict[str, dict[str, Callable[..., Any]]] = {
    **{"sampler": SAMPLERS, "timesteps": TIMESTEPS, "loss": LOSSES, "region": REGION, "rehearsal": REHEARSAL},
    **{slot: {"none": no_weight, **names} for slot, names in AUXILIARY.items()},
    "loss_balance": LOSS_BALANCE,
}


def check(config: MemoryConfig) -> None:
    """Refuse what cannot run, before any weights load."""
    named = {"loss.error": ERRORS, "sampler.order": ORDERS, "timesteps.sequence": SEQUENCES}
    check_memory(config, {**REGISTRIES, **named})
    # The functions judge their own values, such as how two options add up.
    timesteps, region = config.timesteps, config.region
    TIMESTEPS[timesteps.name](np.geomspace(1e3, 1e-3, 100), 0.0, None, **timesteps.options)
    blank = torch.ones(1, 1, 1, 1)
    REGION[region.name](blank, torch.tensor([True]), blank, (1, 1), **region.options)


class Memory:
    """The parts the configuration names, in the order a step calls them.

    epochs.epoch, rehearse (while drawing) -> timesteps -> rectify -> watch (around the UNet's forward) ->
    loss_per_sample -> auxiliary -> took -> after_step. Built from the weights before training, also before a
    checkpoint loads. `reduce` sums a tensor over the ranks.
    """

    def __init__(
        self,
        config: MemoryConfig,
        info: DataInfo,
        scheduler: Any,
        access: Access,
        *,
        seed: int,
        effective_batch: int,
        max_steps: int,
        rank: int = 0,
        world: int = 1,
        reduce: Callable[..., Any] | None = None,
    ):
        check(config)
        self.config, self.info, self.scheduler, self.seed, self.max_steps = config, info, scheduler, seed, max_steps
        snr = diffusion.signal_to_noise(scheduler)
        self.snr, self.snr_numpy = snr.to(next(access.unet.parameters()).device), snr.double().numpy()
        bank = self._bank(access)
        self.estimated = probes.mask_table(bank) if config.region.name == "estimated" else None
        n, process = len(info.keys), {"seed": seed, "rank": rank, "world": world, "reduce": reduce}
        probed, share = n if config.phrase_memory.enabled else 0, config.phrase_memory.share
        self.phrases = probes.PhraseMemory(probed, snr, bank, share=share, effective_batch=effective_batch, **process)
        sampler = config.sampler
        shares = partial(SAMPLERS[sampler.name], **sampler.options)
        self.epochs = Epochs(shares, info, seed, sampler.clean_ratio, self.phrases.rows, sampler.order)
        found = {i: masks.mask_to_image(e.found) for i, e in enumerate(bank) if e.found is not None}
        shown = found if config.region.name == "estimated" else {}
        rehearsal = config.rehearsal
        self.rehearse = Rehearsal(rehearsal.name, rehearsal.options, info, seed, access.load, shown)
        self.rehearsed = Rehearsed()
        self.policies = roles.policies(config)
        learns = "learning_progress" in {config.timesteps.name, *(part.name for part in self.policies.values())}
        self.errors = ErrorByTimestep(len(self.snr), reduce) if learns else None
        self.weights = {role: own.loss_weight for role, own in roles.by_role(config).items()}
        setting = Setting(info, bank, self.phrases, scheduler, access.tokenizer, seed, rank, world)
        balance = partial(LOSS_BALANCE[config.loss_balance.name], **config.loss_balance.options)
        parts = {slot: getattr(config, slot) for slot in AUXILIARY}
        self.auxiliaries = Auxiliaries(balance, AUXILIARY, parts, access.unet, setting)
        if config.phrase_memory.enabled:
            self.phrases.start(access.predict, scheduler)

    def _bank(self, access: Access) -> list[probes.Element]:
        """Pictures and masks of each element, where a part looks at them."""
        c = self.config
        if not (c.phrase_memory.enabled or c.region.name == "estimated" or c.distillation.name != "none"):
            return []
        return probes.build_bank(self.info, access.encode, access.pictures, c.phrase_memory.images, self.snr.device)

    def timesteps(
        self, draw: int, positions: list[int], n: int, of: list[str] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(t (B,), w (B,)) on the CPU for these positions of the draw's effective batch of n, whose roles are `of`."""
        c, error = self.config.timesteps, self.errors.relative() if self.errors else None

        def drawn(part: Part, at: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
            p = TIMESTEPS[part.name](self.snr_numpy, self.progress(draw), error, **part.options)
            return draw_timesteps(p, self.seed, draw, at, n, c.importance, c.sequence)

        t, w = drawn(c, list(positions))
        for role, part in self.policies.items():
            if own := [k for k, its in enumerate(of or ()) if its == role]:
                t[own], w[own] = drawn(part, [positions[k] for k in own])
        return t, w

    def progress(self, count: int) -> float:
        """Share of the run that is over after so many steps, or draws, in [0, 1]."""
        return min(1.0, count / max(self.max_steps, 1))

    def rectify(
        self,
        model: Callable[..., Any],
        x0: torch.Tensor,
        eps: torch.Tensor,
        t: torch.Tensor,
        x_t: torch.Tensor,
        target: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x_t, target), by DREAM where it is on; model(x_t, t) -> prediction under the batch's captions."""
        if self.config.loss.dream is None:
            return x_t, target
        return diffusion.dream(model, self.scheduler, x0, eps, t, x_t, self.config.loss.dream)

    def watch(self, unet: torch.nn.Module, step: int) -> AbstractContextManager[Any]:
        """A context for the UNet's forward: its attention maps when binding wants them, else None."""
        binding = self.auxiliaries.get("attention_binding")
        if binding is None or self.progress(step) < binding.start:
            return nullcontext()
        return record_maps(unet, binding.side)

    def loss_per_sample(
        self, pred: torch.Tensor, target: torch.Tensor, t: torch.Tensor, w: torch.Tensor, batch: dict[str, Any]
    ) -> torch.Tensor:
        """(B,): region-weighted error, times the loss weight of its SNR, the importance w and the role's weight."""
        c = self.config
        err = ERRORS[c.loss.error](pred.float(), target.float(), c.loss.huber_delta)
        estimated = None
        if self.estimated is not None:
            rows = torch.tensor(self.info.of_batch(batch)).to(pred.device, non_blocking=True)
            estimated = self.estimated[rows]
        size = tuple(pred.shape[-2:])
        region = REGION[c.region.name](batch["mask"], batch["has_mask"], estimated, size, **c.region.options)
        if "counted" in batch:
            region = masks.counted_only(region, batch["counted"])
        raw = (err * region).mean(dim=(1, 2, 3))
        if self.errors is not None:
            self.errors.observe(t, raw.detach())
        weight = LOSSES[c.loss.name](self.snr[t], self.scheduler.config.prediction_type, **c.loss.options)
        of_role = torch.tensor([self.weights[role] for role in batch["role"]])
        return raw * weight * w * of_role.to(pred.device, non_blocking=True)

    def auxiliary(
        self,
        loss: torch.Tensor,
        *,
        step: int,
        micro: int,
        batch: dict[str, Any],
        x_t: torch.Tensor,
        t: torch.Tensor,
        pred: torch.Tensor,
        maps: Any,
        unet: torch.nn.Module,
        predict: Callable[..., Any],
    ) -> torch.Tensor | None:
        """The weighted sum of the auxiliaries that are on in this micro-step, to be added to `loss`; or None."""
        now = Step(step, micro, self.progress(step), batch, x_t, t, pred, maps, unet, predict)
        return self.auxiliaries(loss, now)

    def took(self, united: list[tuple[int, int] | None]) -> None:
        """Count the rehearsals of a batch that training has taken."""
        self.rehearsed.add(united)

    def after_step(self, step: int, predict: Callable[..., Any]) -> None:
        """At a synchronised step: probe what the budget allows, pass the timestep statistics on."""
        self.phrases.after_step(step, predict, self.scheduler)
        if self.errors is not None:
            self.errors.after_step(step)

    def meters(self) -> dict[str, Any]:
        """Scalars for the log; what was made on the device stays there."""
        made = dict(self.auxiliaries.meters)
        if self.phrases.n:
            made |= {"memory/rho_min": self.phrases.rho.min(), "memory/rho_mean": self.phrases.rho.mean()}
        if self.config.rehearsal.name != "none":
            made |= {"memory/rehearsals": self.rehearsed.count, "memory/largest_union": self.rehearsed.largest[0]}
        return made

    @property
    def history(self) -> list[dict[str, Any]]:
        """Strengths by sweep: {"step", "rho": [...]}, in the order of info.keys."""
        return self.phrases.history

    def state_dict(self) -> dict[str, Any]:
        """All that a bit-exact resume needs; call between steps."""
        return {
            "phrases": self.phrases.state_dict(),
            "epochs": self.epochs.state_dict(),
            "rehearsed": self.rehearsed.state_dict(),
            "errors": self.errors.state_dict() if self.errors else None,
            "auxiliaries": self.auxiliaries.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state of the same configuration."""
        self.phrases.load_state_dict(state["phrases"])
        self.epochs.load_state_dict(state["epochs"])
        self.rehearsed.load_state_dict(state["rehearsed"])
        if self.errors:
            self.errors.load_state_dict(state["errors"])
        self.auxiliaries.load_state_dict(state["auxiliaries"])
