"""Attention kept inside the elements' masks. Measured: 1.00 [1.00, 1.00] of plain's speed."""

from contextlib import AbstractContextManager

import torch

from experiments.attention import (
    Maps,
    mass_outside,
    overlap,
    phrase_maps,
    record_maps,
    token_table,
)
from silentbad.data.elements import DataInfo
from silentbad.loop.hooks import MicroStep
from silentbad.memory.auxiliary import RunFacts
from silentbad.settings.types import NotNegative, Small, Unit


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
