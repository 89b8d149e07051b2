"""Stable Diffusion 1 and 2 (2112.10752) and XL (2307.01952): UNets under one or two CLIP text
encoders."""

from typing import Any

import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline, UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from silentbad.model.family import Family, refuse_width, with_alphas

# layers of diffusers' UNet outside its blocks, and those of a resnet, by the original's names
ORIGINAL_LAYERS = {
    "conv_in": "input_blocks.0.0",
    "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}
ORIGINAL_RESNET = {
    "conv1": "in_layers.2",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}


class StableDiffusion(Family):
    """One text encoder, its last states."""

    name = "Stable Diffusion 1 or 2"
    pipeline = StableDiffusionPipeline
    backbone = "unet"
    kind = UNet2DConditionModel
    encoders = {"text_encoder": CLIPTextModel}
    tokenizer = {"tokenizer": CLIPTokenizer}
    kohya = {"unet": "lora_unet", "text_encoder": "lora_te"}

    def widths(self, backbone: Any, encoders: dict[str, Any]) -> tuple[int, int]:
        return sum(encoder.config.hidden_size for encoder in encoders.values()), 0

    def encode(
        self, encoders: dict[str, Any], tokens: list[Tensor], nonempty: Tensor | None, width: int
    ) -> tuple[Tensor, Tensor | None]:
        (encoder,) = encoders.values()
        return encoder(tokens[0], return_dict=False)[0].float(), None

    def check_fit(self, path: str, backbone: Any, encoders: dict[str, Any]) -> None:
        refuse_width(
            path, "unet", backbone.config.cross_attention_dim, self.widths(backbone, encoders)[0]
        )

    def assemble(self, **components: Any) -> Any:
        return self.pipeline(
            **components, safety_checker=None, feature_extractor=None, requires_safety_checker=False
        )


class StableDiffusionXL(StableDiffusion):
    """Two text encoders: their second-to-last states concatenated, and the pooled state of the
    second one. In pixels: original height and width, top and left of the crop, target height and
    width."""

    name = "Stable Diffusion XL"
    pipeline = StableDiffusionXLPipeline
    encoders = {"text_encoder": CLIPTextModel, "text_encoder_2": CLIPTextModelWithProjection}
    tokenizer = {"tokenizer": CLIPTokenizer, "tokenizer_2": CLIPTokenizer}
    sized = upcasts = True
    kohya = {"unet": "lora_unet", "text_encoder": "lora_te1", "text_encoder_2": "lora_te2"}

    def widths(self, backbone: Any, encoders: dict[str, Any]) -> tuple[int, int]:
        return super().widths(backbone, encoders)[0], encoders[
            "text_encoder_2"
        ].config.projection_dim

    def encode(
        self, encoders: dict[str, Any], tokens: list[Tensor], nonempty: Tensor | None, width: int
    ) -> tuple[Tensor, Tensor | None]:
        outputs = [
            encoder(ids, output_hidden_states=True)
            for encoder, ids in zip(encoders.values(), tokens, strict=True)
        ]
        c = torch.cat([out.hidden_states[-2] for out in outputs], dim=-1).float()
        pooled = outputs[-1].text_embeds.float()
        return (c, pooled) if nonempty is None else (c * nonempty[:, None], pooled * nonempty)

    def zero_empty(self, index: dict[str, Any]) -> bool:
        return bool(index.get("force_zeros_for_empty_prompt", True))

    def unused(self, name: str, module: Any) -> list[nn.Parameter]:
        """The layers after an encoder's second-to-last state, if nothing is pooled."""
        if name not in self.encoders or name == "text_encoder_2":
            return []
        inner = getattr(module, "text_model", module)
        return [*inner.encoder.layers[-1].parameters(), *inner.final_layer_norm.parameters()]

    def options(self, zero_empty: bool) -> dict[str, Any]:
        return {"force_zeros_for_empty_prompt": zero_empty}

    def assemble(self, **components: Any) -> Any:
        return self.pipeline(**components, add_watermarker=False)

    def kohya_path(self, backbone: Any, path: str) -> str:
        """The layer's path in the original UNet, which sd-scripts trains for this family alone: its
        input, middle and output blocks are numbered through, 1 + N resnets going down and up."""
        if path in ORIGINAL_LAYERS:
            return ORIGINAL_LAYERS[path]
        block, *parts = path.split(".")
        level = 0 if block == "mid_block" else int(parts.pop(0))
        kind, index, *rest = parts
        resnets = backbone.config.layers_per_block
        first = level * (resnets + 1)
        if kind == "resnets":
            rest = [ORIGINAL_RESNET[rest[0]]]
        if block == "mid_block":
            place = f"middle_block.{1 if kind == 'attentions' else 2 * int(index)}"
        elif kind == "downsamplers":
            place = f"input_blocks.{first + resnets + 1}.0"
            rest = ["op"]
        elif block == "down_blocks":
            place = f"input_blocks.{first + int(index) + 1}.{int(kind == 'attentions')}"
        elif kind == "upsamplers":
            place = f"output_blocks.{first + resnets}.2"
        else:
            place = f"output_blocks.{first + int(index)}.{int(kind == 'attentions')}"
        return ".".join([place, *rest])

    def lora_tensors(self, pipe: Any, path: str) -> dict[str, Tensor]:
        return with_alphas(
            *pipe.lora_state_dict(path, use_safetensors=True, unet_config=pipe.unet.config)
        )
