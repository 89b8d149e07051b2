"""The `micro` embedder: a copy detector for 64x64 pictures, position by position and as strict as
its worst position.

A cosine of two global vectors (SSCD, 2202.10261) cannot see that one small thing of four is
missing. Here features keep their place on a 16x16 map, pictures are compared place by place, and a
power mean over the places lets the largest difference decide. A shift of one pixel is no
difference: a target is compared at each of its nine alignments."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from silentbad.files import read_json

POWER = 4  # of the mean over places; 1 would be their average, infinity the worst place


def alignments(x: torch.Tensor) -> torch.Tensor:
    """A picture (1,C,H,W) -> (9,C,H,W): moved by up to a pixel each way."""
    h, w = x.shape[-2:]
    padded = F.pad(x, (1, 1, 1, 1), mode="replicate")
    return torch.cat([padded[..., dy : dy + h, dx : dx + w] for dy in range(3) for dx in range(3)])


class Residual(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(8, width),
            nn.SiLU(),
            nn.Conv2d(width, width, 3, 1, 1),
            nn.GroupNorm(8, width),
            nn.SiLU(),
            nn.Conv2d(width, width, 3, 1, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


class MicroEmbedder(nn.Module):
    """(B,3,64,64) in [-1,1] -> features (B,dim,16,16). `paired` compares two such maps: 1 for
    equal pictures."""

    def __init__(self, width: int = 32, dim: int = 32):
        super().__init__()
        self.config = {"width": width, "dim": dim}
        self.features = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1),
            Residual(width),
            nn.Conv2d(width, 2 * width, 4, 2, 1),
            Residual(2 * width),
            Residual(2 * width),
            nn.GroupNorm(8, 2 * width),
            nn.SiLU(),
            nn.Conv2d(2 * width, dim, 1),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.features(images)

    @staticmethod
    def distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Features (N,dim,h,w) and (N or 1,dim,h,w) -> distances (N,): the power mean over places
        of the mean squared difference."""
        local = (a - b).square().mean(-3).flatten(1)
        # divided out first, since the powers would underflow
        peak = local.amax(1, keepdim=True).clamp(min=1e-12)
        return peak[:, 0] * (local / peak).pow(POWER).mean(1).pow(1 / POWER)

    @classmethod
    def paired(cls, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Features (N,dim,h,w) and (N or 1,dim,h,w) -> similarities (N,) in (0,1]: exp(-distance).
        With A alignments (N or 1,A,dim,h,w) the best one counts."""
        if b.ndim > a.ndim:
            return torch.stack([cls.paired(a, alignment) for alignment in b.unbind(1)]).amax(0)
        return (-cls.distance(a, b)).exp()

    def save_pretrained(self, folder: str | Path) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config) + "\n")
        save_file(
            {k: v.half().contiguous() for k, v in self.state_dict().items()},
            folder / "model.safetensors",
        )

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "MicroEmbedder":
        folder = Path(folder)
        net = cls(**read_json(folder / "config.json"))
        net.load_state_dict(
            {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
        )
        return net.eval().requires_grad_(False)
