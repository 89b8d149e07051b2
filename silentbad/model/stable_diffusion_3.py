"""Stable Diffusion 3 and 3.5 (2403.03206): a transformer over image and text tokens, on the path
of a flow."""

from typing import Any

import torch
import torch.nn.functional as F
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from torch import Tensor, nn
from transformers import CLIPTextModelWithProjection, CLIPTokenizer, T5EncoderModel, T5TokenizerFast

from silentbad.errors import UserError, brief, user_errors
from silentbad.model import gate
from silentbad.model.diffusion import Flow
from silentbad.model.family import Family, refuse_width

WINDOW = 256  # T5's tokens of a caption: what diffusers' pipeline samples with
CLIPS = ("text_encoder", "text_encoder_2")
# of a scheduler: without these the path changes with the picture or the number of steps
FIXED: dict[str, Any] = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "use_dynamic_shifting": False,
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "invert_sigmas": False,
    "shift_terminal": None,
}


class StableDiffusion3(Family):
    """Two CLIP text encoders: their second-to-last states concatenated, then the states of T5
    (zeros if T5 is missing); and the pooled states of both CLIPs."""

    name = "Stable Diffusion 3"
    pipeline = StableDiffusion3Pipeline
    backbone = "transformer"
    kind = SD3Transformer2DModel
    encoders = {
        "text_encoder": CLIPTextModelWithProjection,
        "text_encoder_2": CLIPTextModelWithProjection,
        "text_encoder_3": T5EncoderModel,
    }
    tokenizer = {
        "tokenizer": CLIPTokenizer,
        "tokenizer_2": CLIPTokenizer,
        "tokenizer_3": T5TokenizerFast,
    }
    optional = ("text_encoder_3", "tokenizer_3")
    flow = upcasts = True
    attention = "joint attention"

    # ---- the path
    def check_schedule(self, settings: dict[str, Any], where: str) -> None:
        for key, right in FIXED.items():
            if settings.get(key, right) != right:
                raise UserError(f"{where}: {key} is {brief(settings[key])}; it must be {right}")
        with gate.quietly(), user_errors(f"{where}: makes no schedule"):
            self.schedule(settings)

    def schedule(self, settings: dict[str, Any]) -> Flow:
        return Flow(FlowMatchEulerDiscreteScheduler.from_config(settings))

    def schedule_of(self, scheduler: Any) -> Flow:
        return self.schedule(scheduler.config)

    # ---- captions
    def windows(self, tokenizers: dict[str, Any]) -> list[int]:
        first = tokenizers["tokenizer"].model_max_length
        return [WINDOW if name == "tokenizer_3" else first for name in tokenizers]

    def widths(self, backbone: Any, encoders: dict[str, Any]) -> tuple[int, int]:
        return backbone.config.joint_attention_dim, backbone.config.pooled_projection_dim

    def encode(
        self, encoders: dict[str, Any], tokens: list[Tensor], nonempty: Tensor | None, width: int
    ) -> tuple[Tensor, Tensor | None]:
        clips = [
            encoders[name](ids, output_hidden_states=True)
            for name, ids in zip(CLIPS, tokens, strict=False)
        ]
        c = torch.cat([out.hidden_states[-2] for out in clips], dim=-1).float()
        c = F.pad(c, (0, width - c.shape[-1]))
        if "text_encoder_3" in encoders:
            of_t5 = encoders["text_encoder_3"](tokens[2])[0].float()
        else:
            of_t5 = c.new_zeros(len(c), WINDOW, width)
        pooled = torch.cat([out.text_embeds for out in clips], dim=-1).float()
        return torch.cat([c, of_t5], dim=1), pooled

    def text_facts(self, backbone: Any) -> list[Any]:
        return [WINDOW, *self.widths(backbone, {})]

    # ---- the prediction
    def predict(
        self,
        backbone: Any,
        noisy_latents: Tensor,
        timesteps: Any,
        encoder_hidden_states: Tensor,
        added: dict[str, Tensor],
    ) -> Tensor:
        return backbone(
            noisy_latents,
            encoder_hidden_states=encoder_hidden_states,
            pooled_projections=added["text_embeds"],
            timestep=timesteps,
            return_dict=False,
        )[0]

    def unused(self, name: str, module: Any) -> list[nn.Parameter]:
        """The last block drops its text tokens, so nothing depends on their queries there."""
        if name != self.backbone:
            return []
        attention = module.transformer_blocks[-1].attn
        layers = [attention.add_q_proj, attention.norm_added_q]
        return [
            parameter for layer in layers if layer is not None for parameter in layer.parameters()
        ]

    # ---- fit
    def side(self, backbone: Any) -> int:
        return backbone.config.patch_size

    def largest(self, backbone: Any) -> int | None:
        return backbone.config.pos_embed_max_size * backbone.config.patch_size

    def check_fit(self, path: str, backbone: Any, encoders: dict[str, Any]) -> None:
        width, pooled = self.widths(backbone, encoders)
        clips = [encoder.config for name, encoder in encoders.items() if name != "text_encoder_3"]
        if "text_encoder_3" in encoders:
            refuse_width(path, self.backbone, width, encoders["text_encoder_3"].config.d_model)
        if (clip := sum(config.hidden_size for config in clips)) > width:
            raise UserError(
                f"{path}: transformer attends to width {width}, its CLIP text encoders give {clip}"
            )
        if (projected := sum(config.projection_dim for config in clips)) != pooled:
            raise UserError(
                f"{path}: transformer takes pooled states of width {pooled}, text "
                f"encoders give {projected}"
            )

    # ---- pipelines
    def assemble(self, **components: Any) -> Any:
        return self.pipeline(**{**dict.fromkeys(self.optional), **components})

    def prompt(self, prompts: list[str]) -> dict[str, Any]:
        return {"prompt": prompts, "prompt_2": None, "prompt_3": None}

    def sampling(self, config: Any, prefix: str) -> dict[str, Any]:
        if config.guidance_rescale:
            raise UserError(
                f"{prefix}guidance_rescale: diffusers' pipeline of {self.name} has none; leave it 0"
            )
        return {}

    def lora_tensors(self, pipe: Any, path: str) -> dict[str, Tensor]:
        return pipe.lora_state_dict(path, use_safetensors=True)
