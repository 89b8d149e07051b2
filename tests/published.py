"""Backbones of the published configurations on the meta device: shapes and names without memory."""

import torch
from diffusers import SD3Transformer2DModel, UNet2DConditionModel

CROSS, PLAIN = "CrossAttnDownBlock2D", "DownBlock2D"
PUBLISHED = {  # the published UNet configurations, and their numbers of tensors and parameters
    "SD1": (dict(cross_attention_dim=768, attention_head_dim=8), 686, 859_520_964),
    "SD2": (
        dict(cross_attention_dim=1024, attention_head_dim=[5, 10, 20, 20], use_linear_projection=True),
        686,
        865_910_724,
    ),
    "SDXL": (
        dict(
            block_out_channels=(320, 640, 1280),
            down_block_types=(PLAIN, CROSS, CROSS),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=[1, 2, 10],
            attention_head_dim=[5, 10, 20],
            cross_attention_dim=2048,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
        ),
        1680,
        2_567_463_684,
    ),
}


def published(which):
    with torch.device("meta"):
        return UNet2DConditionModel(sample_size=64, **PUBLISHED[which][0])


BIG = dict(num_attention_heads=24, caption_projection_dim=1536, num_layers=24, sample_size=128, pos_embed_max_size=192)
TRANSFORMERS = {
    "3 medium": BIG,
    "3.5 medium": {**BIG, "dual_attention_layers": tuple(range(13)), "qk_norm": "rms_norm", "pos_embed_max_size": 384},
    "3.5 large": {
        **BIG,
        "num_attention_heads": 38,
        "caption_projection_dim": 2432,
        "num_layers": 38,
        "qk_norm": "rms_norm",
    },
}


def published_transformer(which: str) -> SD3Transformer2DModel:
    with torch.device("meta"):
        return SD3Transformer2DModel(**TRANSFORMERS[which])
