"""A Stable Diffusion pipeline with random weights, SD's component classes and block names, small enough for tests."""

from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

TOKENIZER = Path(__file__).parents[1] / "assets" / "micro-sd" / "tokenizer"


def tiny_unet(**overrides) -> UNet2DConditionModel:
    """UNet of about 0.1 M parameters: two resolutions, cross-attention in both, SD's names."""
    config = dict(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(16, 32),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32, attention_head_dim=2, norm_num_groups=8,
    )
    return UNet2DConditionModel(**{**config, **overrides})


def tiny_pipeline(prediction_type: str = "v_prediction", seed: int = 0) -> StableDiffusionPipeline:
    """16x16 images, 8x8x4 latents, the real CLIP tokenizer with a window of 48 tokens."""
    torch.manual_seed(seed)
    tokenizer = CLIPTokenizer.from_pretrained(TOKENIZER)
    text_encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=tokenizer.model_max_length, projection_dim=32,
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    vae = AutoencoderKL(
        block_out_channels=(8, 16), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, norm_num_groups=4, sample_size=16,
    )
    zero_snr = prediction_type == "v_prediction"
    scheduler = DDIMScheduler(
        beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, prediction_type=prediction_type,
        rescale_betas_zero_snr=zero_snr, timestep_spacing="trailing", clip_sample=False, steps_offset=1,
        set_alpha_to_one=not zero_snr,
    )
    return StableDiffusionPipeline(
        vae=vae, text_encoder=text_encoder, tokenizer=tokenizer, unet=tiny_unet(), scheduler=scheduler,
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )
