"""Pipelines of the true classes and sizes with random half-precision weights, for bench/size.py.

The bundled tokenizer stands in for CLIP's: its window is 77, and the text encoders keep their 49,408 embeddings.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.shapes import TRANSFORMERS, UNETS

MICRO = Path(__file__).parents[1] / "assets" / "micro-sd"
VAE_BLOCKS = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
}
BETAS = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}


def clip(kind: Any, tokenizer: Any, width: int, layers: int, heads: int, **settings: Any) -> Any:
    """One of CLIP's text encoders."""
    from transformers import CLIPTextConfig

    ends = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "projection_dim": width}
    depth = {"num_hidden_layers": layers, "num_attention_heads": heads}
    return kind(CLIPTextConfig(**{"hidden_act": "gelu", **sizes, **depth, **ends, **settings}))


def tokenizer() -> Any:
    from transformers import CLIPTokenizer

    return CLIPTokenizer.from_pretrained(MICRO / "tokenizer", model_max_length=77)


def sd15(folder: Path) -> None:
    """Stable Diffusion 1.5: 512 px."""
    from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextModel

    words = tokenizer()
    StableDiffusionPipeline(
        vae=AutoencoderKL(**VAE_BLOCKS, latent_channels=4, sample_size=512),
        text_encoder=clip(CLIPTextModel, words, 768, 12, 12, hidden_act="quick_gelu"),
        tokenizer=words,
        unet=UNet2DConditionModel(**UNETS["sd15"]),
        scheduler=DDPMScheduler(**BETAS, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)


def sd21(folder: Path) -> None:
    """Stable Diffusion 2.1: predicts v, 768 px."""
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextModel

    words = tokenizer()
    StableDiffusionPipeline(
        vae=AutoencoderKL(**VAE_BLOCKS, latent_channels=4, sample_size=768),
        text_encoder=clip(CLIPTextModel, words, 1024, 23, 16),
        tokenizer=words,
        unet=UNet2DConditionModel(**UNETS["sd21"]),
        scheduler=DDIMScheduler(
            **BETAS, prediction_type="v_prediction", clip_sample=False, set_alpha_to_one=False, steps_offset=1
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)


def sdxl(folder: Path) -> None:
    """Stable Diffusion XL: 1024 px."""
    from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
    from transformers import CLIPTextModel, CLIPTextModelWithProjection

    words = tokenizer()
    StableDiffusionXLPipeline(
        vae=AutoencoderKL(**VAE_BLOCKS, latent_channels=4, sample_size=1024, scaling_factor=0.13025, force_upcast=True),
        text_encoder=clip(CLIPTextModel, words, 768, 12, 12, hidden_act="quick_gelu"),
        tokenizer=words,
        text_encoder_2=clip(CLIPTextModelWithProjection, words, 1280, 32, 20),
        tokenizer_2=words,
        unet=UNet2DConditionModel(**UNETS["sdxl"]),
        scheduler=EulerDiscreteScheduler(**BETAS, steps_offset=1),
        add_watermarker=False,
    ).save_pretrained(folder)


def sd3(folder: Path) -> None:
    """Stable Diffusion 3.5 medium without its third text encoder: 1024 px."""
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )
    from transformers import CLIPTextModelWithProjection

    words = tokenizer()
    StableDiffusion3Pipeline(
        vae=AutoencoderKL(
            **VAE_BLOCKS,
            latent_channels=16,
            sample_size=1024,
            scaling_factor=1.5305,
            shift_factor=0.0609,
            use_quant_conv=False,
            use_post_quant_conv=False,
        ),
        text_encoder=clip(CLIPTextModelWithProjection, words, 768, 12, 12, hidden_act="quick_gelu"),
        tokenizer=words,
        text_encoder_2=clip(CLIPTextModelWithProjection, words, 1280, 32, 20),
        tokenizer_2=words,
        text_encoder_3=None,
        tokenizer_3=None,
        transformer=SD3Transformer2DModel(**TRANSFORMERS["3.5 medium"]),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    ).save_pretrained(folder)


BASES: dict[str, Callable[[Path], Any]] = {"sd15": sd15, "sd21": sd21, "sdxl": sdxl, "sd3": sd3}


def write_base(root: Path, name: str) -> Path:
    """The pipeline below `root`, in half precision as it is published; kept where it is there already."""
    folder = root / name
    if not (folder / "model_index.json").is_file():
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float16)
        try:
            BASES[name](folder)
        finally:
            torch.set_default_dtype(torch.float32)
    return folder
