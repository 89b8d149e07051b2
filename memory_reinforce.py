"""Memory reinforcement: which records to show, at which noise levels, which regions count in the
loss, and how to preserve other images.

A target is a picture of k elements; the data shows each element alone, at its native place, with
its phrase in the caption. Every part below is usable alone and off by default; docs/memory.md says
what each is for and when it harms.

Legend: R records, n elements (a key is "target/element"), T training timesteps, N effective batch,
B micro-batch, latents (B,C,h,w), timesteps (B,), rho_i strength of element i, q_i its share of the
exposures, p (T,) timestep density.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from silentbad.data.elements import DataInfo, Epochs
from silentbad.loop.hooks import Hook, MicroStep
from silentbad.memory import masks, probes
from silentbad.memory.auxiliary import Auxiliaries, ModelAccess, RunFacts, SelfDistillation
from silentbad.memory.masks import REGION
from silentbad.memory.rehearsal import REHEARSAL, Rehearsal, Rehearsed
from silentbad.memory.samplers import weakest_first
from silentbad.memory.timesteps import draw_timesteps, logit_normal, mode, snr_mixture
from silentbad.memory.weightings import flow_sigma, in_prediction, mse
from silentbad.model import diffusion
from silentbad.settings.check import check_part
from silentbad.settings.memory import (
    Choice,
    MemoryConfig,
    check_memory,
    policies,
    role_settings,
)
from silentbad.settings.registries import Examples, Expected, Parts
from silentbad.settings.types import Positive

# A registry of `Parts` takes PATH.py:NAME too, code of your own; experiments/ has some.


# ------------------------------------------------------------ samplers
# A sampler gives each element its share q (n,) of the epoch's element exposures, from the probe
# history rho (H,n), the number of records of each element (n,) and the epoch. `epoch_order` draws
# the records of an epoch by these shares.


def uniform(rho: np.ndarray, records: np.ndarray, epoch: int) -> np.ndarray:
    """Every record once."""
    return records / records.sum()


SAMPLERS = Parts(
    {"uniform": uniform, "weakest_first": weakest_first},
    key="memory.sampler.name",
    takes="rho records epoch",
)


def sampler_examples(records: np.ndarray) -> Examples:
    """The history before the first probe, and after one; records (n,) of each element."""
    n = len(records)
    for rho in (np.zeros((0, n)), np.linspace(0.2, 0.8, n)[None]):
        yield (rho, records, len(rho)), Expected((n,), total=1, varies=False)


# ------------------------------------------------------------ timestep policies
# A policy is a density p (T,) from the schedule's snr (T,) and the progress of the run in [0,1]. At
# least 0.3 of every density is uniform.
# `silentbad/memory/timesteps.py` has the other densities.


def uniform_t(snr: np.ndarray, progress: float) -> np.ndarray:
    """1/T: what plain training does."""
    return np.full(len(snr), 1 / len(snr))


def policy_examples() -> Examples:
    """At the start of a run, in its middle and at its end."""
    snr = np.geomspace(1e3, 1e-3, 100)
    for progress in (0.0, 0.5, 1.0):
        yield (snr, progress), Expected((100,), floor=0.003 - 1e-9, total=1)


TIMESTEPS = Parts(
    {
        "uniform": uniform_t,
        "logit_normal": logit_normal,
        "mode": mode,
        "snr_mixture": snr_mixture,
    },
    key="memory.timesteps.name",
    takes="snr progress",
    examples=policy_examples,
)


# ------------------------------------------------------------ losses
# A loss weight is a function of snr (B,) for the epsilon error, finite at snr = 0; `in_prediction`
# converts it to the model's prediction type.


def no_weight(snr: torch.Tensor, prediction_type: str) -> torch.Tensor:
    """The mean squared error of whatever the model predicts."""
    return torch.ones_like(snr)


def min_snr(snr: torch.Tensor, prediction_type: str, *, gamma: Positive = 5.0) -> torch.Tensor:
    """min(SNR, gamma)/SNR on epsilon (2303.09556), written gamma/max(SNR, gamma)."""
    return in_prediction(gamma / snr.clamp_min(gamma), snr, prediction_type)


def x0(snr: torch.Tensor, prediction_type: str, *, cap: Positive = 10.0) -> torch.Tensor:
    """1/SNR on epsilon: the error of x0, as diffusers' script of Stable Diffusion 3 takes it. The
    weight is at most cap^2; in a flow it is exact, sigma^2."""
    if prediction_type == "flow":
        return flow_sigma(snr).square()
    return in_prediction(1 / snr.clamp_min(cap**-2), snr, prediction_type)


LOSSES = Parts(
    {"none": no_weight, "min_snr": min_snr, "x0": x0},
    key="memory.loss.name",
    takes="snr prediction_type",
)


def loss_examples(prediction_type: str) -> Examples:
    """From no noise to noise alone, where the SNR is zero."""
    yield (torch.tensor([1e3, 10.0, 1.0, 0.1, 0.0]), prediction_type), Expected((5,))


def error_examples() -> Examples:
    """Errors of both signs."""
    pred = torch.linspace(-1, 1, 64).view(1, 4, 4, 4)
    yield (pred, -pred, 0.1), Expected((1, 4, 4, 4))


ERRORS = Parts(
    {"mse": mse}, key="memory.loss.error", takes="pred target delta", examples=error_examples
)


# ------------------------------------------------------------ all parts of a run
# Regions are registered in `silentbad.memory.masks`, rehearsal in `silentbad.memory.rehearsal`; the
# parts of auxiliary losses are in `silentbad.memory.auxiliary`.


def no_part(unet: torch.nn.Module, facts: RunFacts) -> None:
    """No such loss."""


AUXILIARY = {
    "distillation": Parts({"none": no_part}, key="memory.distillation.name", takes="unet facts"),
    "retention": Parts(
        {"none": no_part, "self_distillation": SelfDistillation},
        key="memory.retention.name",
        takes="unet facts",
    ),
}

REGISTRIES: dict[str, Parts] = {
    "sampler": SAMPLERS,
    "timesteps": TIMESTEPS,
    "loss": LOSSES,
    "region": REGION,
    "rehearsal": REHEARSAL,
    **AUXILIARY,
}


def check(config: MemoryConfig) -> None:
    """Refuse settings that cannot run, before any weights load."""
    slots = [(registry, getattr(config, slot)) for slot, registry in REGISTRIES.items()]
    slots += [(TIMESTEPS, policy) for policy in policies(config).values()]
    parts = [(registry, part.name, part.options) for registry, part in slots]
    parts.append((ERRORS, config.loss.error, {}))
    check_memory(config, {**REGISTRIES, "loss.error": ERRORS})
    check_part(memory=config)
    for registry, name, options in parts:
        registry.try_part(name, options)


def try_with(config: MemoryConfig, info: DataInfo, prediction_type: str) -> None:
    """Refuse parts that fail with the run's elements or prediction type."""
    counts = np.asarray([len(rows) for rows in info.rows])
    if len(counts):
        examples = sampler_examples(counts)
        SAMPLERS.try_part(config.sampler.name, config.sampler.options, examples)
    examples = loss_examples(prediction_type)
    LOSSES.try_part(config.loss.name, config.loss.options, examples)


class Memory(Hook):
    """The parts the configuration names.

    While drawing: `epochs.epoch` and `rehearse`. In a step: `timesteps`, `apply_dream`,
    `loss_per_sample`, `extra_loss`, `count_rehearsals`,
    `after_step`. Build it before a checkpoint loads: it reads the weights before training. `reduce`
    sums a tensor over the ranks.
    """

    def __init__(
        self,
        config: MemoryConfig,
        info: DataInfo,
        scheduler: Any,
        access: ModelAccess,
        *,
        seed: int,
        effective_batch: int,
        max_steps: int,
        rank: int = 0,
        world: int = 1,
        reduce: Callable[..., Any] | None = None,
    ):
        check(config)
        try_with(config, info, scheduler.config.prediction_type)
        self.config = config
        self.info = info
        self.scheduler = scheduler
        self.access = access
        self.seed = seed
        self.max_steps = max_steps
        snr = diffusion.signal_to_noise(scheduler)
        self.snr = snr.to(next(access.unet.parameters()).device)
        self.snr_numpy = snr.double().numpy()

        # Pictures of each element, and the masks estimated from them
        bank = self._bank(access)
        self.estimated_masks = None
        mask_images = {}
        if config.region.name == "estimated":
            self.estimated_masks = probes.mask_table(bank)
            mask_images = probes.mask_images(bank)

        # What is shown, and how often
        self.phrases = probes.PhraseMemory(
            len(info.keys) if config.phrase_memory.enabled else 0,
            snr,
            bank,
            share=config.phrase_memory.share,
            effective_batch=effective_batch,
            seed=seed,
            rank=rank,
            world=world,
            reduce=reduce,
        )
        shares = partial(SAMPLERS[config.sampler.name], **config.sampler.options)
        self.epochs = Epochs(
            share=shares,
            info=info,
            seed=seed,
            clean_ratio=config.sampler.clean_ratio,
            history=self.phrases.rows,
        )
        self.rehearse = Rehearsal(
            config.rehearsal.name,
            config.rehearsal.options,
            info=info,
            seed=seed,
            load=access.load,
            masks=mask_images,
        )
        self.rehearsed = Rehearsed()

        # At which noise level, and how an error counts
        self.policies = policies(config)
        self.role_weights = {
            role: settings.loss_weight for role, settings in role_settings(config).items()
        }

        # Losses beside the diffusion loss
        self.auxiliaries = self._auxiliaries(bank, rank, world)

        if config.phrase_memory.enabled:
            self.phrases.start(access.predict, scheduler)

    def _bank(self, access: ModelAccess) -> list[probes.Element]:
        """Pictures and masks of each element, where a part looks at them."""
        c = self.config
        if not (
            c.phrase_memory.enabled or c.region.name == "estimated" or c.distillation.name != "none"
        ):
            return []
        return probes.build_bank(
            self.info, access.encode, access.pictures, c.phrase_memory.images, self.snr.device
        )

    def _auxiliaries(self, bank: list[probes.Element], rank: int, world: int) -> Auxiliaries:
        """The losses that the configuration adds, with the facts that they are built from."""
        choices = {slot: getattr(self.config, slot) for slot in AUXILIARY}
        facts = RunFacts(
            info=self.info,
            bank=bank,
            memory=self.phrases,
            scheduler=self.scheduler,
            tokenizer=self.access.tokenizer,
            seed=self.seed,
            rank=rank,
            world=world,
        )
        return Auxiliaries(AUXILIARY, choices, unet=self.access.unet, facts=facts)

    # ---- the step
    def timesteps(
        self, draw: int, positions: list[int], count: int, batch: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(timesteps (B,), weights (B,)) on the CPU, by the policy of each sample's role."""
        timesteps, weights = self._drawn(self.config.timesteps, draw, list(positions), count)
        for role, policy in self.policies.items():
            rows = [row for row, its_role in enumerate(batch["role"]) if its_role == role]
            if rows:
                places = [positions[row] for row in rows]
                timesteps[rows], weights[rows] = self._drawn(policy, draw, places, count)
        return timesteps, weights

    def _drawn(
        self, policy: Choice, draw: int, positions: list[int], count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(timesteps (B,), weights (B,)) at these positions, by one policy."""
        density = TIMESTEPS[policy.name](self.snr_numpy, self.progress(draw), **policy.options)
        importance = self.config.timesteps.importance
        return draw_timesteps(density, self.seed, draw, positions, count, importance)

    def progress(self, count: int) -> float:
        """Share of the run that is over after so many steps, or draws, in [0, 1]."""
        return min(1.0, count / max(self.max_steps, 1))

    def apply_dream(
        self,
        model: Callable[..., Any],
        latents: torch.Tensor,
        noise: torch.Tensor,
        timesteps: torch.Tensor,
        noisy_latents: torch.Tensor,
        target: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(noisy_latents, target), by DREAM (2312.00210) where it is on; `model` maps noisy latents
        and timesteps to the prediction under the batch's captions."""
        if self.config.loss.dream is None:
            return noisy_latents, target
        power = self.config.loss.dream
        return diffusion.dream(
            model, self.scheduler, latents, noise, timesteps, noisy_latents, power
        )

    def loss_per_sample(
        self,
        model_pred: torch.Tensor,
        target: torch.Tensor,
        timesteps: torch.Tensor,
        weights: torch.Tensor,
        batch: dict[str, Any],
    ) -> torch.Tensor:
        """(B,): region-weighted error, times the loss weight of its SNR, the importance weight and
        the role's."""
        c = self.config
        error = ERRORS[c.loss.error](model_pred.float(), target.float(), c.loss.huber_delta)

        estimated = None
        if self.estimated_masks is not None:
            rows = torch.tensor(self.info.of_batch(batch)).to(model_pred.device, non_blocking=True)
            estimated = self.estimated_masks[rows]
        size = tuple(model_pred.shape[-2:])
        region = REGION[c.region.name](
            batch["mask"], batch["has_mask"], estimated, size, **c.region.options
        )
        if "counted" in batch:
            region = masks.counted_only(region, batch["counted"])
        loss = (error * region).mean(dim=(1, 2, 3))

        prediction_type = self.scheduler.config.prediction_type
        snr_weights = LOSSES[c.loss.name](self.snr[timesteps], prediction_type, **c.loss.options)
        role_weights = torch.tensor([self.role_weights[role] for role in batch["role"]])
        return loss * snr_weights * weights * role_weights.to(loss.device, non_blocking=True)

    def extra_loss(self, loss: torch.Tensor, now: MicroStep) -> torch.Tensor | None:
        """The weighted sum of the auxiliaries that are on in this micro-step, or None."""
        return self.auxiliaries(now)

    def count_rehearsals(self, united: list[tuple[int, int] | None]) -> None:
        """Count the rehearsals of a batch that training has taken."""
        self.rehearsed.add(united)

    def after_step(self, step: int, skipped: bool = False) -> None:
        """Probe the elements that the budget allows."""
        if not skipped:
            self.phrases.after_step(step, self.access.predict, self.scheduler)

    # ---- records
    def meters(self) -> dict[str, Any]:
        """Auxiliary losses, strengths, rehearsals."""
        meters = dict(self.auxiliaries.meters)
        if self.phrases.n:
            meters["memory/rho_min"] = self.phrases.rho.min()
            meters["memory/rho_mean"] = self.phrases.rho.mean()
        if self.config.rehearsal.name != "none":
            meters["memory/rehearsals"] = self.rehearsed.count
            meters["memory/largest_union"] = self.rehearsed.largest[0]
        return meters

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
            "auxiliaries": self.auxiliaries.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of the same configuration."""
        self.phrases.load_state_dict(state["phrases"])
        self.epochs.load_state_dict(state["epochs"])
        self.rehearsed.load_state_dict(state["rehearsed"])
        self.auxiliaries.load_state_dict(state["auxiliaries"])
