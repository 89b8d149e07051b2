"""Backbones of the published configurations on the meta device: shapes and names without memory."""

import torch
from diffusers import SD3Transformer2DModel, UNet2DConditionModel

from bench.shapes import TRANSFORMERS, UNETS

PUBLISHED = {  # the published UNets, and their numbers of tensors and parameters
    "SD1": (UNETS["sd15"], 686, 859_520_964),
    "SD2": (UNETS["sd21"], 686, 865_910_724),
    "SDXL": (UNETS["sdxl"], 1680, 2_567_463_684),
}


def published(which: str) -> UNet2DConditionModel:
    with torch.device("meta"):
        return UNet2DConditionModel(**PUBLISHED[which][0] | {"sample_size": 64})


def published_transformer(which: str) -> SD3Transformer2DModel:
    with torch.device("meta"):
        return SD3Transformer2DModel(**TRANSFORMERS[which])
