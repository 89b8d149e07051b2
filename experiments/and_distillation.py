"""A composed caption taught from its phrases. Measured: 0.63 [0.16, 1.00] of plain's speed, with
fewer images.

Needs `--memory.phrase_memory.enabled true`, which measures what is recalled."""

from random import Random
from typing import Literal

import torch
import torch.nn.functional as F

from experiments.attention import Maps, phrase_maps, record_maps, token_table
from silentbad import rng
from silentbad.errors import UserError
from silentbad.loop.hooks import MicroStep
from silentbad.memory.auxiliary import RunFacts, Teacher
from silentbad.settings.types import Count, Decay, NotNegative, Strength


def and_target(base: torch.Tensor, conditional: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """eps* = eps(0) + sum_i G_i (eps(c_i) - eps(0)) (2206.01714): base (B,C,h,w),
    conditional (k,B,C,h,w), G (k,B,1,h,w).

    The coefficients sum to one, so the same formula is valid for v and x0, which are affine in eps
    at a given x_t."""
    return base + (gates * (conditional - base)).sum(dim=0)


class AndDistillation:
    """The composed caption learns the gated sum of its phrases' lagged predictions, at x_t from an
    element's picture (or from noise alone); the composed picture itself is never seen. Unproven."""

    def __init__(
        self,
        unet,
        facts: RunFacts,
        *,
        weight: NotNegative = 0.1,
        every: Count = 4,
        refresh: Count = 50,
        after: Strength = 0.5,
        gate: Literal["mask", "attention"] = "mask",
        source: Literal["element", "noise"] = "element",
        low: Decay = 0.3,
    ):
        self.facts = facts
        self.weight = weight
        self.every = every
        self.refresh = refresh
        self.after = after
        self.gate = gate
        self.source = source
        self.low = low
        self.teacher = Teacher(unet)
        if not facts.memory.n:
            raise UserError(
                "memory.distillation: AndDistillation needs memory.phrase_memory.enabled=true"
            )
        if gate == "mask" and any(e.masks is None for e in facts.bank):
            raise UserError(
                "memory.distillation: gate 'mask' needs a mask for every element; "
                "use gate 'attention'"
            )

    def ready(self) -> list[str]:
        """Targets whose weakest element is recalled: rho > after."""
        rho = self.facts.memory.rho
        groups = self.facts.info.elements_of
        return [
            t for t, group in groups.items() if len(group) > 1 and rho[group].min() > self.after
        ]

    def gates(self, group: list[int], noisy_latents: torch.Tensor, maps: Maps) -> torch.Tensor:
        """(k,1,1,h,w): the elements' masks, or their phrases' attention maps over their maxima,
        summing to <= 1."""
        if self.gate == "mask":
            # all: see __init__
            masks = [mask for i in group if (mask := self.facts.bank[i].masks) is not None]
            return torch.stack([mask.mean(dim=0, keepdim=True) for mask in masks])
        phrases = [self.facts.info.phrase[i] for i in group]
        tokens = token_table(self.facts.tokenizer, phrases, [[phrase] for phrase in phrases])
        m = phrase_maps(maps.mean()[1:], tokens.to(noisy_latents.device))
        m = (m / m.amax(dim=-1, keepdim=True).clamp_min(1e-8)).unflatten(
            -1, (round(m.shape[-1] ** 0.5), -1)
        )
        m = F.interpolate(m, size=noisy_latents.shape[-2:], mode="bilinear")[:, None]
        return m / m.sum(dim=0).clamp_min(1)

    def start(
        self, group: list[int], step: int, position: int, choose: Random
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Noisy latents (1,C,h,w), timesteps (1,): an element's picture noised, or noise alone at
        the last timestep."""
        latents = self.facts.bank[choose.choice(group)].latents
        scheduler = self.facts.scheduler
        T = scheduler.config.num_train_timesteps
        row = choose.randrange(len(latents))
        shape = tuple(latents.shape[1:])
        noise = rng.noise(shape, self.facts.seed, "distillation", step, [position])
        noise = noise.to(latents.device, non_blocking=True)
        if self.source == "element":
            latents = latents[row : row + 1]
            low = int(self.low * T)
        else:
            latents = 0 * latents[:1]
            low = T - 1
        timesteps = torch.tensor([choose.randrange(low, T)]).to(latents.device, non_blocking=True)
        return scheduler.add_noise(latents, noise, timesteps), timesteps

    def __call__(self, now: MicroStep) -> torch.Tensor | None:
        if now.step % self.refresh == 0 and now.micro == 0:
            self.teacher.refresh(now.model)
        if now.step % self.every or not (targets := self.ready()):
            return None
        position = now.micro * self.facts.world + self.facts.rank
        choose = Random(rng.addressed_seed(self.facts.seed, "distillation", now.step, position))
        group = list(self.facts.info.elements_of[choose.choice(targets)])
        choose.shuffle(group)
        phrases = [self.facts.info.phrase[i] for i in group]
        noisy_latents, timesteps = self.start(group, now.step, position, choose)
        count = len(group) + 1
        with record_maps(self.teacher.unet) as maps, torch.no_grad():
            teacher_pred = now.predict(
                noisy_latents.expand(count, -1, -1, -1),
                timesteps.expand(count),
                ["", *phrases],
                model=self.teacher,
            )
        gates = self.gates(group, noisy_latents, maps)
        target = and_target(teacher_pred[:1], teacher_pred[1:, None], gates)
        model_pred = now.predict(noisy_latents, timesteps, [", ".join(phrases)])
        return F.mse_loss(model_pred.float(), target)

    def state_dict(self) -> dict:
        return {"teacher": self.teacher.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.teacher.load_state_dict(state["teacher"])
