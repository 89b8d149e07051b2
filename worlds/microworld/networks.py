"""The bundled base's components before training: Stable Diffusion's classes and block names,
small."""

from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from worlds.interface import World

TEXT_WIDTH = 64
LATENT_CHANNELS = 16


def new_vae() -> AutoencoderKL:
    """64x64x3 to 8x8x16; the full-resolution level is thin because it costs the most."""
    widths = (16, 32, 64, 96)
    vae = AutoencoderKL(
        block_out_channels=widths,
        down_block_types=("DownEncoderBlock2D",) * len(widths),
        up_block_types=("UpDecoderBlock2D",) * len(widths),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=64,
    )
    # start with little posterior noise: at unit variance the decoder learns to ignore fine detail
    nn.init.constant_(vae.quant_conv.bias[LATENT_CHANNELS:], -5.0)
    return vae


def load_tokenizer(folder: Path) -> CLIPTokenizer:
    return CLIPTokenizer.from_pretrained(folder)


def new_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=TEXT_WIDTH,
            intermediate_size=4 * TEXT_WIDTH,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=tokenizer.model_max_length,
            projection_dim=TEXT_WIDTH,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def new_unet(widths: tuple[int, int] = (64, 160)) -> UNet2DConditionModel:
    """Two resolutions, 8x8 and 4x4, both with self- and cross-attention."""
    return UNet2DConditionModel(
        sample_size=8,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        layers_per_block=1,
        block_out_channels=widths,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=TEXT_WIDTH,
        attention_head_dim=4,  # diffusers reads this as the number of heads
        norm_num_groups=16,
        use_linear_projection=True,
    )


def new_scheduler() -> DDIMScheduler:
    """SD's scaled-linear schedule with zero terminal SNR (2305.08891) and v-prediction
    (2202.00512)."""
    return DDIMScheduler(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        clip_sample=False,
        set_alpha_to_one=True,
        steps_offset=1,
    )


class CaptionReader(nn.Module):
    """Heads that make a text encoder bind attributes to things before any picture is seen.

    Two questions per caption: at the last token of each phrase, what does it say (the world's
    fields, each with an "unsaid" answer); and for each named place, asked by one cross-attention as
    the UNet will ask, what stands there. Only used in training; the pipeline
    keeps the encoder alone."""

    def __init__(self, world: World, width: int = TEXT_WIDTH):
        super().__init__()
        self.at_phrase = nn.Linear(width, sum(world.fields.values()))
        self.queries = nn.Parameter(torch.randn(len(world.places), width) * 0.1)
        self.look = nn.MultiheadAttention(width, 4, batch_first=True)
        self.at_place = nn.Linear(width, sum(world.fields.values()))

    def forward(
        self, states: torch.Tensor, last: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """states (B,L,D), last (B,P) token positions -> logits (B,P,F) and (B,places,F)."""
        picked = torch.gather(states, 1, last[..., None].expand(-1, -1, states.shape[-1]))
        attended, _ = self.look(
            self.queries.expand(len(states), -1, -1), states, states, need_weights=False
        )
        return self.at_phrase(picked), self.at_place(attended)
