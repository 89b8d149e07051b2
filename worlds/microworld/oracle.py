"""What the base drew: a classifier of the thing at a place, trained on renders alone, and the
accuracies it yields."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from worlds.interface import World
from worlds.microworld.world import MICROWORLD

CROP = 34  # pixels around a place's centre


def crops(x: torch.Tensor, spots: list[tuple[int, float, float]]) -> torch.Tensor:
    """(B,3,64,64) and (picture, x, y) triples -> (N,3,34,34), edge pixels repeated beyond the
    border."""
    half = CROP // 2
    padded = F.pad(x, (half,) * 4, mode="replicate")
    return torch.stack(
        [padded[b, :, int(y) : int(y) + CROP, int(u) : int(u) + CROP] for b, u, y in spots]
    )


class Judge(nn.Module):
    """(N,3,34,34) -> logits (N,words) of each field that the world has judged."""

    def __init__(self, world: World = MICROWORLD, width: int = 32):
        super().__init__()
        self.words = {name: list(words) for name, words in world.judged.items()}
        layers = []
        c = 3
        for c_out, stride in ((width, 2), (2 * width, 2), (2 * width, 1), (3 * width, 2)):
            layers += [nn.Conv2d(c, c_out, 3, stride, 1), nn.GroupNorm(8, c_out), nn.SiLU()]
            c = c_out
        self.features = nn.Sequential(*layers, nn.Flatten())
        self.head = nn.Linear(c * 25, sum(map(len, self.words.values())))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = self.head(self.features(x)).split([*map(len, self.words.values())], dim=1)
        return dict(zip(self.words, parts, strict=True))

    def truth(self, things: list) -> dict[str, torch.Tensor]:
        """The right answers (N,) of each field."""
        return {
            name: torch.tensor([words.index(getattr(thing, name)) for thing in things])
            for name, words in self.words.items()
        }


def judge_loss(
    judge: Judge,
    x: torch.Tensor,
    scenes: list,
    vae,
    rng: np.random.Generator,
    world: World = MICROWORLD,
) -> torch.Tensor:
    """Cross-entropy of every field; half of the pictures pass through the autoencoder first,
    as generations do."""
    with torch.no_grad():
        half = len(x) // 2
        x = torch.cat([x[:half], vae.decode(vae.encode(x[half:]).latent_dist.mean).sample])
    things = [(b, thing) for b, scene in enumerate(scenes) for thing in scene.things]
    where = [(b, *(np.array(world.spot(t)) + rng.integers(-3, 4, 2))) for b, t in things]
    logits = judge(crops(x, where).to(x.device))
    truth = judge.truth([t for _, t in things])
    losses = [F.cross_entropy(logits[name], truth[name].to(x.device)) for name in truth]
    return torch.stack(losses).sum()


@torch.no_grad()
def judged(
    judge: Judge, x: torch.Tensor, scenes: list, world: World = MICROWORLD
) -> dict[str, float]:
    """Share of things of which each field, and then all fields, are right at their place."""
    things = [(b, thing) for b, scene in enumerate(scenes) for thing in scene.things]
    logits = judge(crops(x, [(b, *world.spot(t)) for b, t in things]))
    truth = judge.truth([t for _, t in things])
    right = {name: logits[name].argmax(1).cpu() == truth[name] for name in truth}
    shares = {name: correct.float().mean().item() for name, correct in right.items()}
    every = torch.stack([*right.values()]).all(0).float().mean().item()
    return {**shares, "both": every, "things": len(things)}


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
