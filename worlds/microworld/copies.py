"""What the copy detector is trained on: scenes, true copies of them, and hard nulls, whole and
element by element."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from silentbad.data.images import resize
from silentbad.measure.embedders import region
from silentbad.measure.micro import MicroEmbedder, alignments
from silentbad.progress import Bar
from silentbad.rng import generator
from worlds.interface import World
from worlds.microworld.render import backdrop_mask
from worlds.microworld.world import MICROWORLD

COPIES = 2  # per scene
NULLS = 8  # per scene
LATENT_NOISE = 0.15  # of the latents' deviation


# -- changes that a true copy may have -------------------------------------------------------------
@torch.no_grad()
def round_trip(x: torch.Tensor, vae, draw: torch.Generator | None = None) -> torch.Tensor:
    """Pictures (B,3,64,64) in [-1,1] through the autoencoder, with a little latent noise where
    `draw` is given."""
    latents = vae.encode(x).latent_dist.mean
    if draw is not None:
        latents = latents + LATENT_NOISE * latents.std() * torch.randn(
            latents.shape, generator=draw
        ).to(x.device)
    return vae.decode(latents).sample.clamp(-1, 1)


def shifted(x: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
    """Each picture of x (B,3,H,W) moved by its (dy, dx) of shifts (B,2) in {-1,0,1}, edge pixels
    repeated."""
    padded = F.pad(x, (1, 1, 1, 1), mode="replicate")
    h, w = x.shape[-2:]
    return torch.stack(
        [
            p[:, 1 - dy : 1 - dy + h, 1 - dx : 1 - dx + w]
            for p, (dy, dx) in zip(padded, shifts.tolist(), strict=True)
        ]
    )


def disturb(x: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Gain (deviation 8 %) and bias (0.05) per channel, noise (0.04). x (B,3,H,W) in [-1,1]."""
    b = len(x)
    gain = 1 + 0.08 * torch.randn(b, 3, 1, 1, generator=draw).to(x.device)
    bias = 0.05 * torch.randn(b, 3, 1, 1, generator=draw).to(x.device)
    noise = 0.04 * torch.randn(x.shape, generator=draw).to(x.device)
    return (x * gain + bias + noise).clamp(-1, 1)


def true_copies(x: torch.Tensor, vae, draw: torch.Generator) -> torch.Tensor:
    """Copies that must count as copies: the autoencoder's round trip, a shift of up to one
    pixel, then `disturb`."""
    y = round_trip(x, vae, draw)
    return disturb(shifted(y, torch.randint(-1, 2, (len(y), 2), generator=draw)), draw)


def align(x: torch.Tensor, target: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Each picture of x (B,3,H,W) at the alignment nearest to target (3,H,W), in the mask
    (1,H,W) if one is given."""
    weight = 1.0 if mask is None else mask
    moved = torch.stack([alignments(picture[None]) for picture in x])  # (B,9,3,H,W)
    best = ((moved - target) * weight).square().sum((2, 3, 4)).argmin(1)
    return moved[torch.arange(len(x)), best]


# -- the pool --------------------------------------------------------------------------------------
@dataclass
class Group:
    """A scene with its copies and nulls, as bytes (3,64,64) each; masks (E,1,64,64) in [0,1]."""

    target: torch.Tensor
    masks: torch.Tensor
    copies: torch.Tensor  # (COPIES,3,64,64), through the autoencoder
    nulls: torch.Tensor  # (2 NULLS,3,64,64): as rendered, then through the autoencoder
    changed: list[tuple[int, ...]]  # of each null


def to_bytes(x: torch.Tensor) -> torch.Tensor:
    return ((x.clamp(-1, 1) + 1) * 127.5).round().byte()


def from_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.float() / 127.5 - 1


def to_tensor(drawn: list) -> torch.Tensor:
    """RGB pictures of one size -> (B,3,H,W) in [-1,1], channels last in memory."""
    stack = np.stack([np.asarray(picture) for picture in drawn])
    return from_bytes(torch.from_numpy(stack).permute(0, 3, 1, 2))


def pictures(scenes: list[Any], world: World = MICROWORLD) -> torch.Tensor:
    """Scenes -> (B,3,64,64) in [-1,1]."""
    return to_tensor([world.render(scene)[0] for scene in scenes])


def make_group(index: int, vae, device: torch.device, world: World) -> Group:
    """Group `index` of the training stream; half of its nulls change one element."""
    rng = world.rng("embedder", index)
    draw = generator(world.name, "embedder", "copies", index)
    scene = world.terse_scene(rng)
    half = NULLS // 2
    of_scene, of_element = world.null_kinds
    kinds = [*rng.choice(of_scene, half), *rng.choice(of_element, NULLS - half)]
    nulls = [world.null(str(kind), rng, scene) for kind in kinds]
    _, drawn_masks = world.render(scene)
    masks = [np.asarray(m, np.float32) / 255 for m in (*drawn_masks, backdrop_mask(drawn_masks))]
    x = pictures([scene], world).to(device)
    drawn = pictures([null.scene for null in nulls], world).to(device)
    through = round_trip(torch.cat([x.expand(COPIES, -1, -1, -1), drawn]), vae, draw)
    return Group(
        target=to_bytes(x[0]),
        masks=torch.from_numpy(np.stack(masks))[:, None],
        copies=to_bytes(through[:COPIES]),
        nulls=to_bytes(torch.cat([drawn, through[COPIES:]])),
        changed=[null.changed for null in nulls],
    )


class CopyPool:
    """Groups made once and drawn many times; it grows with training, so that a resumed run sees
    the same groups."""

    def __init__(self, vae, device: torch.device, world: World, capacity: int):
        self.vae = vae
        self.world = world
        self.device = device
        self.capacity = capacity
        self.groups: list[Group] = []

    def grow(self, size: int) -> None:
        missing = range(len(self.groups), min(size, self.capacity))
        for index in Bar(missing, desc="copies and nulls", disable=len(missing) < 2):
            self.groups.append(make_group(index, self.vae, self.device, self.world))

    def draw(self, rng: np.random.Generator, n: int) -> list[Group]:
        return [self.groups[i] for i in rng.integers(0, len(self.groups), n)]


# -- the loss --------------------------------------------------------------------------------------
def crop(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """An element's region as the detector sees it: x (B,3,64,64) in [-1,1], mask (1,64,64) ->
    (B,3,64,64)."""
    return resize(region((x + 1) / 2, mask), (64, 64)) * 2 - 1


def batch_of(groups: list[Group], rng: np.random.Generator, draw: torch.Generator, nulls: int = 4):
    """Per group: target, a copy, `nulls` nulls; two groups of three show one element alone.

    Copies are not shifted, since the detector compares at the best alignment; nulls are moved to
    it. Returns pictures (G, 2 + nulls, 3, 64, 64) and which of the nulls are there (G, nulls)."""
    rows = []
    there = []
    for i, group in enumerate(groups):
        pick = rng.permutation(NULLS)
        element = int(rng.integers(len(group.masks))) if i % 3 else None
        if element is not None:
            pick = np.array([k for k in pick if element in group.changed[k]], dtype=int)
        pick = pick[:nulls]
        there.append([k < len(pick) for k in range(nulls)])
        pick = np.concatenate([pick, np.zeros(nulls - len(pick), int)])
        # a null must not be recognised by its sharpness
        rendered = pick + NULLS * rng.integers(0, 2, nulls)
        copy = group.copies[int(rng.integers(COPIES))] if rng.random() < 0.8 else group.target
        target = from_bytes(group.target)
        mask = None if element is None else group.masks[element]
        lookalikes = align(from_bytes(group.nulls[rendered]), target, mask)
        row = torch.cat(
            [target[None], disturb(torch.cat([from_bytes(copy)[None], lookalikes]), draw)]
        )
        rows.append(row if mask is None else crop(row, mask))
    return torch.stack(rows), torch.tensor(there)


class Slope(nn.Module):
    """How steeply the loss's logits grow with the logarithm of the distance; learned, and used in
    training only."""

    def __init__(self):
        super().__init__()
        self.log = nn.Parameter(torch.tensor(1.0))


def copy_loss(
    net: MicroEmbedder, x: torch.Tensor, there: torch.Tensor, slope: Slope
) -> torch.Tensor:
    """Copy or not, by the logarithm of the distance, whose boundary is at distance ln 2, similarity
    1/2.

    x (G,2+K,3,64,64): target, copy, nulls; there (G,K). Cross-entropy of copies and of nulls, and
    of each copy against its own nulls: a threshold is set for one target at a time."""
    g, k = x.shape[:2]
    features = net(x.flatten(0, 1).contiguous(memory_format=torch.channels_last)).unflatten(
        0, (g, k)
    )
    target = features[:, :1].expand(-1, k - 1, -1, -1, -1).flatten(0, 1)
    distance = net.distance(features[:, 1:].flatten(0, 1), target).view(g, k - 1)
    logits = slope.log.exp() * (np.log(np.log(2)) - (distance + 1e-6).log())  # above 0: a copy
    copies = logits[:, 0]
    nulls = logits[:, 1:]
    weight = there / there.sum().clamp(min=1)
    absolute = F.softplus(-copies).mean() + (F.softplus(nulls) * weight).sum()
    hardest = nulls.masked_fill(~there, -1e4).logsumexp(1)
    return absolute + F.softplus(hardest - copies).mean()
