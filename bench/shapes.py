"""Arguments of the published backbones: a random one has the true size."""

from typing import Any

UNETS: dict[str, dict[str, Any]] = {
    "sd15": {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8},
    "sd21": {
        "sample_size": 96,
        "cross_attention_dim": 1024,
        "attention_head_dim": (5, 10, 20, 20),
        "use_linear_projection": True,
    },
    "sdxl": {
        "sample_size": 128,
        "block_out_channels": (320, 640, 1280),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 10),
        "attention_head_dim": (5, 10, 20),
        "cross_attention_dim": 2048,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
}
SD3 = {
    "sample_size": 128,
    "num_layers": 24,
    "num_attention_heads": 24,
    "caption_projection_dim": 1536,
    "pos_embed_max_size": 192,
}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "3 medium": SD3,
    "3.5 medium": {**SD3, "dual_attention_layers": tuple(range(13)), "qk_norm": "rms_norm", "pos_embed_max_size": 384},
    "3.5 large": {
        **SD3,
        "num_layers": 38,
        "num_attention_heads": 38,
        "caption_projection_dim": 2432,
        "qk_norm": "rms_norm",
    },
}
