"""Losses beside the diffusion loss: their sum, and self-distillation on clean records.

Legend: B micro-batch, C,h,w shape of the latents.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from silentbad.data.elements import DataInfo
from silentbad.device import scalars
from silentbad.loop.hooks import MicroStep, check_state
from silentbad.memory.probes import Element, PhraseMemory
from silentbad.settings.types import NotNegative


@dataclass(frozen=True)
class ModelAccess:
    """The functions of model and data that memory reinforcement calls.

    predict(noisy_latents (B,C,h,w), timesteps (B,), captions, model=None, time_ids=None)
    -> (B,C,h,w), of `unet` or of a copy of it;
    encode(pixel_values (B,3,R,R)) -> latents (B,C,h,w) without sampling noise;
    pictures(rows) -> a collated batch of plain records; load(row, picture=True) -> a whole
    record, decoded; without `picture` all but its image.
    """

    unet: torch.nn.Module
    predict: Callable[..., torch.Tensor]
    encode: Callable[[torch.Tensor], torch.Tensor]
    pictures: Callable[[list[int]], dict[str, Any]]
    load: Callable[..., dict[str, Any]]
    tokenizer: Any


# An auxiliary is built once from (unet, facts) and its options, has a `weight`, and returns a scalar
# or None when it is called with the micro-step.
class RunFacts(NamedTuple):
    """Facts that stay the same over the run; bank[i] the pictures of element i, memory its
    strengths."""

    info: DataInfo
    bank: list[Element]
    memory: PhraseMemory
    scheduler: Any
    tokenizer: Any
    seed: int
    rank: int
    world: int


class SelfDistillation:
    """The sum of ||eps - eps_0||^2 / (C h w) over the clean records, divided by B; eps_0 is the
    prediction of the model before training. A model that predicts v has v in place of eps."""

    def __init__(self, unet, facts: RunFacts, *, weight: NotNegative = 1.0):
        self.weight = weight
        self.teacher = Teacher(unet)

    def __call__(self, now: MicroStep) -> torch.Tensor | None:
        rows = [r for r, role in enumerate(now.batch["role"]) if role == "clean"]
        if not rows:
            return None
        index = torch.tensor(rows).to(now.noisy_latents.device, non_blocking=True)
        with torch.no_grad():
            before = now.predict(
                now.noisy_latents[index],
                now.timesteps[index],
                [now.batch["text"][r] for r in rows],
                model=self.teacher,
                time_ids=now.batch["time_ids"][index],
            )
        return F.mse_loss(now.model_pred[index].float(), before) * (len(rows) / len(now.timesteps))


class Auxiliaries(dict):
    """The auxiliaries that are on, by slot: their weighted sum, its meters, and their state."""

    def __init__(
        self,
        registry: dict,
        choices: dict,
        unet: torch.nn.Module,
        facts: RunFacts,
    ):
        """registry: slot -> name -> class; choices: slot -> its name and options."""
        super().__init__()
        for slot, choice in choices.items():
            if choice.name != "none":
                self[slot] = registry[slot][choice.name](unet, facts, **choice.options)
        self.meters: dict[str, Any] = {}
        for slot, state in self.state_dict().items():
            check_state(f"memory.{slot}.name: its state_dict", state)

    def __call__(self, now: MicroStep) -> torch.Tensor | None:
        """The sum of the auxiliaries that act in this micro-step, each times its weight; or None."""
        total = None
        for slot, part in self.items():
            if (value := part(now)) is None:
                continue
            total = part.weight * value if total is None else total + part.weight * value
            self.meters[f"memory/{slot}"] = value.detach()
        return total

    def state_dict(self) -> dict:
        parts = {
            slot: part.state_dict() for slot, part in self.items() if hasattr(part, "state_dict")
        }
        return {**parts, "meters": dict(self.meters)}

    def load_state_dict(self, state: dict) -> None:
        self.meters = scalars(state.get("meters", {}))
        for slot, part in self.items():
            if hasattr(part, "load_state_dict"):
                part.load_state_dict(state[slot])


class Teacher:
    """A frozen copy of the trained model, in bf16, called like it; `refresh` copies the present
    weights. On the CPU, where bf16 can take ten times as long, it keeps the model's dtype.

    Frozen parameters that are in its precision already (those under LoRA) are shared, not copied.

    accelerate binds its autocast wrapper to the instance, and a copied wrapper would still call the
    original's weights; so the copy uses the class's own forward.
    """

    def __init__(self, unet: torch.nn.Module, dtype: torch.dtype | None = None):
        if dtype is None:
            weight = next(unet.parameters())
            dtype = weight.dtype if weight.device.type == "cpu" else torch.bfloat16
        self.dtype = dtype
        self.trained = [name for name, p in unet.named_parameters() if p.requires_grad]
        shared = {id(p): p for p in unet.parameters() if not p.requires_grad and p.dtype == dtype}
        self.unet = copy.deepcopy(unet, shared)
        for module in self.unet.modules():
            module.__dict__.pop("forward", None)
            module.__dict__.pop("_original_forward", None)
        # diffusers' own `to` would warn about a cast that is meant
        torch.nn.Module.to(self.unet, dtype)
        self.unet.requires_grad_(False).eval()

    @torch.no_grad()
    def refresh(self, unet: torch.nn.Module) -> None:
        self.load_state_dict(dict(unet.named_parameters()))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The parameters that follow the trained ones."""
        parameters = dict(self.unet.named_parameters())
        return {name: parameters[name].detach() for name in self.trained}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, copy_of in self.state_dict().items():
            copy_of.copy_(state[name])

    @torch.no_grad()
    def __call__(
        self, noisy_latents, timesteps, encoder_hidden_states=None, *, return_dict=True, **more
    ):
        """The copy's prediction in float32, in the form of a diffusers UNet's."""
        text = None if encoder_hidden_states is None else encoder_hidden_states.to(self.dtype)
        out = self.unet(noisy_latents.to(self.dtype), timesteps, text, return_dict=False, **more)[
            0
        ].float()
        return SimpleNamespace(sample=out) if return_dict else (out,)
