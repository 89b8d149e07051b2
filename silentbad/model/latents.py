"""An autoencoder's latents: scaled to the diffusion's path, and decoded to images."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from silentbad.device import in_batches

AT_ONCE = 8  # pictures through an autoencoder: decoding is the peak of memory


def scaled(vae: Any, latents: Tensor) -> Tensor:
    """The output of an autoencoder -> the latents of the path: minus its shift, times its scale."""
    shift = getattr(vae.config, "shift_factor", None)
    return (latents - shift if shift else latents) * vae.config.scaling_factor


def decode(vae: Any, latents: Tensor) -> Tensor:
    """Latents (B,C,h,w) -> images (B,3,H,W) in [-1,1], in the autoencoder's own precision:
    SDXL's overflows in fp16."""
    with torch.autocast(latents.device.type, enabled=False):
        shift = getattr(vae.config, "shift_factor", None) or 0
        latents = latents.to(vae.dtype) / vae.config.scaling_factor
        return vae.decode(latents + shift if shift else latents, return_dict=False)[0]


def decode_in_parts(vae: Any, latents: Tensor) -> Tensor:
    """`decode`, AT_ONCE pictures at a time."""
    return torch.cat([decode(vae, part) for part in latents.split(AT_ONCE)])


def round_trip(vae: Any, images: Tensor) -> Tensor:
    """Images (B,3,S,S) in [0,1], encoded and decoded by an autoencoder; on their own device."""
    pixels = images.to(vae.device, vae.dtype) * 2 - 1
    with torch.autocast(vae.device.type, enabled=False), torch.no_grad():
        latents = vae.encode(pixels).latent_dist.mode()
        decoded = vae.decode(latents, return_dict=False)[0]
    return (decoded.float().to(images.device) / 2 + 0.5).clamp(0, 1)


def round_trips(vae: Any, images: Tensor, size: int) -> Iterator[tuple[list[Tensor], Tensor]]:
    """(pictures, `round_trip` of them) over images (B,3,S,S), `size` or AT_ONCE at once, fewer where
    memory runs out."""
    return in_batches(
        list(images), min(size, AT_ONCE), lambda part: round_trip(vae, torch.stack(part))
    )
