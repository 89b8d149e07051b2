"""What the base drew: a classifier of the thing at a place, trained on renders alone, and the
accuracies it yields."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from silentbad.worlds.microworld.grammar import COLOURS, KINDS, PLACES, Scene, Thing

CROP = 34  # pixels around a place's centre
HAT_LIFT = 20  # a worn hat sits about this far above its wearer's place


def spot(thing: Thing) -> tuple[float, float]:
    """Where a caption says to look for a thing: its place, or above it for a worn hat. Pixels
    (x, y)."""
    x, y = PLACES[thing.place]
    return (x, y - HAT_LIFT + 2) if thing.worn else (x, y + 0.0)


def crops(x: torch.Tensor, spots: list[tuple[int, float, float]]) -> torch.Tensor:
    """(B,3,64,64) and (picture, x, y) triples -> (N,3,34,34), edge pixels repeated beyond the
    border."""
    half = CROP // 2
    padded = F.pad(x, (half,) * 4, mode="replicate")
    return torch.stack(
        [padded[b, :, int(y) : int(y) + CROP, int(u) : int(u) + CROP] for b, u, y in spots]
    )


class Judge(nn.Module):
    """(N,3,34,34) -> logits of kind (N,12) and colour (N,8)."""

    def __init__(self, width: int = 32):
        super().__init__()
        layers, c = [], 3
        for c_out, stride in ((width, 2), (2 * width, 2), (2 * width, 1), (3 * width, 2)):
            layers += [nn.Conv2d(c, c_out, 3, stride, 1), nn.GroupNorm(8, c_out), nn.SiLU()]
            c = c_out
        self.features = nn.Sequential(*layers, nn.Flatten())
        self.head = nn.Linear(c * 25, len(KINDS) + len(COLOURS))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.head(self.features(x)).split([len(KINDS), len(COLOURS)], dim=1)


def judge_loss(
    judge: Judge, x: torch.Tensor, scenes: list[Scene], vae, rng: np.random.Generator
) -> torch.Tensor:
    """Cross-entropy of kind and colour; half of the pictures pass through the autoencoder first,
    as generations do."""
    with torch.no_grad():
        half = len(x) // 2
        x = torch.cat([x[:half], vae.decode(vae.encode(x[half:]).latent_dist.mean).sample])
    things = [(b, thing) for b, scene in enumerate(scenes) for thing in scene.things]
    where = [(b, *(np.array(spot(t)) + rng.integers(-3, 4, 2))) for b, t in things]
    kind, colour = judge(crops(x, where).to(x.device))
    kinds = torch.tensor([KINDS.index(t.kind) for _, t in things], device=x.device)
    colours = torch.tensor([list(COLOURS).index(t.colour) for _, t in things], device=x.device)
    return F.cross_entropy(kind, kinds) + F.cross_entropy(colour, colours)


@torch.no_grad()
def judged(judge: Judge, x: torch.Tensor, scenes: list[Scene]) -> dict[str, float]:
    """Share of things whose kind, colour, and both are right at their place."""
    things = [(b, thing) for b, scene in enumerate(scenes) for thing in scene.things]
    kind, colour = judge(crops(x, [(b, *spot(t)) for b, t in things]))
    right_kind = kind.argmax(1).cpu() == torch.tensor([KINDS.index(t.kind) for _, t in things])
    right_colour = colour.argmax(1).cpu() == torch.tensor(
        [list(COLOURS).index(t.colour) for _, t in things]
    )
    return {
        "kind": right_kind.float().mean().item(),
        "colour": right_colour.float().mean().item(),
        "both": (right_kind & right_colour).float().mean().item(),
        "things": len(things),
    }


@torch.no_grad()
def round_trip_psnr(vae, x: torch.Tensor) -> float:
    """Mean PSNR in dB of decode(encode(x)) over pictures x (N,3,64,64) in [-1,1]."""
    parts = (
        vae.decode(vae.encode(part.to(vae.device)).latent_dist.mode()).sample
        for part in x.split(32)
    )
    mse = (
        ((x - torch.cat([part.clamp(-1, 1).cpu() for part in parts])) / 2).square().mean((1, 2, 3))
    )
    return float((-10 * mse.log10()).mean())
