"""The `micro` embedder: a copy detector for 64x64 pictures, trained in SSCD's manner (2202.10261)."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn


def _block(c_in: int, c_out: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(c_in, c_out, 3, stride, 1), nn.GroupNorm(8, c_out), nn.SiLU(),
        nn.Conv2d(c_out, c_out, 3, 1, 1), nn.GroupNorm(8, c_out), nn.SiLU(),
    )  # fmt: skip


class MicroEmbedder(nn.Module):
    """(B,3,64,64) in [-1,1] -> (B,128), unit length. The last 4x4 map is kept in place: where things stand counts."""

    def __init__(self, width: int = 32, dim: int = 128):
        super().__init__()
        self.config = {"width": width, "dim": dim}
        self.features = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1), nn.SiLU(),
            _block(width, width, 1), _block(width, 2 * width, 2), _block(2 * width, 2 * width, 2),
            _block(2 * width, 2 * width, 2),
        )  # fmt: skip
        self.project = nn.Linear(2 * width * 16, dim)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.project(self.features(images).flatten(1)), dim=1)

    def save_pretrained(self, folder: str | Path) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config) + "\n")
        save_file({k: v.half().contiguous() for k, v in self.state_dict().items()}, folder / "model.safetensors")

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "MicroEmbedder":
        folder = Path(folder)
        net = cls(**json.loads((folder / "config.json").read_text()))
        net.load_state_dict({k: v.float() for k, v in load_file(folder / "model.safetensors").items()})
        return net.eval().requires_grad_(False)


def degrade(x: torch.Tensor, vae, draw: torch.Generator) -> torch.Tensor:
    """What a faithful copy may suffer: the autoencoder's round trip, a shift of up to one pixel, a change of gain and
    bias, a little noise. x (B,3,64,64)."""
    b = len(x)
    with torch.no_grad():
        latents = vae.encode(x).latent_dist.mean
        latents = latents + 0.15 * latents.std() * torch.randn(latents.shape, generator=draw).to(x.device)
        y = vae.decode(latents).sample
    dx, dy = (int(v) for v in torch.randint(-1, 2, (2,), generator=draw))
    y = torch.roll(F.pad(y, (1, 1, 1, 1), mode="replicate"), (dy, dx), (2, 3))[..., 1:-1, 1:-1]
    gain = 1 + 0.08 * torch.randn(b, 3, 1, 1, generator=draw).to(x.device)
    bias = 0.05 * torch.randn(b, 3, 1, 1, generator=draw).to(x.device)
    return y * gain + bias + 0.04 * torch.randn(y.shape, generator=draw).to(x.device)


def copy_loss(net: MicroEmbedder, x, lookalike, vae, draw, temperature: float = 0.07) -> torch.Tensor:
    """InfoNCE: x (B,3,64,64) must find its own degraded copy among all copies and all redraws of its caption."""
    anchor, copies, others = net(x), net(degrade(x, vae, draw)), net(lookalike)
    logits = anchor @ torch.cat([copies, others]).T / temperature
    # stands in for SSCD's entropy term: different pictures spread over the sphere
    spread = (anchor @ anchor.T - torch.eye(len(x), device=x.device)).square().mean()
    return F.cross_entropy(logits, torch.arange(len(x), device=x.device)) + spread
