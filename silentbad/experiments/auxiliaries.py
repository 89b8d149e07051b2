"""Losses beside the diffusion loss that were measured and did not earn their place."""

from contextlib import AbstractContextManager
from random import Random
from typing import Literal

import torch
import torch.nn.functional as F

from silentbad import rng
from silentbad.data.elements import DataInfo
from silentbad.errors import UserError
from silentbad.experiments.attention import (
    Maps,
    mass_outside,
    overlap,
    phrase_maps,
    record_maps,
    token_table,
)
from silentbad.loop.hooks import MicroStep
from silentbad.memory.auxiliary import RunFacts, Teacher, last_layer
from silentbad.settings.types import Count, Decay, NotNegative, Positive, Small, Strength, Unit


def in_mask(info: DataInfo, batch: dict) -> list[set[str]]:
    """The phrases whose place each sample's mask is: an element's, or those of a union; not what
    stands around."""
    mentioned = []
    elements = info.of_batch(batch)
    for i, role, target in zip(elements, batch["role"], batch["target_id"], strict=True):
        shown = [i] if i < len(info.keys) else []
        if role == "rehearsal":
            shown = info.elements_of.get(target, [])
        mentioned.append({info.phrase[j] for j in shown})
    return mentioned


class AttentionBinding:
    """The element's tokens look inside its mask, and the phrases of a caption look at different
    places."""

    @staticmethod
    def layer(unet: torch.nn.Module, now: MicroStep) -> torch.Tensor | None:
        """The last trained key weight its maps depend on; nothing later does."""
        keys = [p for p in now.maps.last_layer.to_k.parameters() if p.requires_grad and p.ndim > 1]
        return keys[-1] if keys else None

    def __init__(
        self,
        unet,
        facts: RunFacts,
        *,
        weight: NotNegative = 0.01,
        start: Unit = 0.5,
        side: Small = 16,
        overlap_weight: NotNegative = 0.5,
    ):
        self.facts = facts
        self.weight = weight
        self.start = start
        self.side = side
        self.overlap_weight = overlap_weight

    def record(self, unet: torch.nn.Module) -> AbstractContextManager[Maps]:
        """A context in which every forward of `unet` records the maps that the loss reads."""
        return record_maps(unet, self.side)

    def __call__(self, now: MicroStep) -> torch.Tensor | None:
        if now.progress < self.start or now.maps is None:
            return None
        b = now.batch
        info = self.facts.info
        probs = now.maps.mean()
        tokens = token_table(self.facts.tokenizer, b["text"], b["phrases"])
        tokens = tokens.to(probs.device, non_blocking=True)
        masked = torch.zeros(tokens.shape[:2])
        for r, mentioned in enumerate(in_mask(info, b)):
            for p, phrase in enumerate(b["phrases"][r]):
                masked[r, p] = float(phrase in mentioned)
        masked = masked.to(probs.device, non_blocking=True)
        maps = phrase_maps(probs, tokens)
        there = tokens.amax(dim=-1)
        bound = phrase_maps(probs, (masked[..., None] * tokens).amax(dim=1, keepdim=True))[:, 0]
        has = b["has_mask"].to(probs.dtype) * (masked * there).amax(dim=-1)
        binding = (mass_outside(bound, b["mask"]) * has).sum() / has.sum().clamp_min(1)
        return binding + self.overlap_weight * overlap(maps, there).mean()


def and_target(base: torch.Tensor, conditional: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """eps* = eps(0) + sum_i G_i (eps(c_i) - eps(0)): base (B,C,h,w), conditional (k,B,C,h,w), G
    (k,B,1,h,w).

    The coefficients sum to one, so the same line holds for v and x0, which are affine in eps at a
    given x_t."""
    return base + (gates * (conditional - base)).sum(dim=0)


class AndDistillation:
    """The composed caption learns the gated sum of its phrases' lagged predictions, at x_t from an
    element's picture (or from noise alone); the composed picture itself is never seen. Unproven."""

    layer = staticmethod(last_layer)

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
        if gate == "mask" and any(e.masks is None for e in facts.bank):
            raise UserError(
                "memory.distillation: gate 'mask' needs a mask for every element; "
                "use gate 'attention'"
            )

    def ready(self) -> list[str]:
        """Targets whose weakest element is held: rho > after."""
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


class L2SP:
    """1/2 ||theta - theta_0||^2 over the trained parameters (1802.01483); theta_0 in their own
    precision."""

    layer = staticmethod(last_layer)

    def __init__(self, unet, facts: RunFacts, *, weight: NotNegative = 0.01):
        self.weight = weight
        self.start = [p.detach().clone() for p in unet.parameters() if p.requires_grad]

    def __call__(self, now: MicroStep) -> torch.Tensor:
        trained = (p for p in now.model.parameters() if p.requires_grad)
        pairs = zip(trained, self.start, strict=True)
        return 0.5 * torch.stack([(p - p0).square().sum() for p, p0 in pairs]).sum()


def gradient_norm(
    loss: torch.Tensor, extra: torch.Tensor, layer: torch.Tensor | None, *, ceiling: Positive = 10.0
) -> torch.Tensor | float:
    """||d loss / d W|| / ||d extra / d W|| at one layer W, within [0, ceiling] (the adaptive weight
    of 2012.09841)."""
    if layer is None:
        return 1.0
    norms = []
    for term in (loss, extra):
        (grad,) = torch.autograd.grad(term, layer, retain_graph=True, allow_unused=True)
        norms.append(torch.zeros((), device=layer.device) if grad is None else grad.float().norm())
    return (norms[0] / (norms[1] + 1e-4)).clamp(0, ceiling).detach()
