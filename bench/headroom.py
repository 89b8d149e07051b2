"""The most that learning rates by layer group could gain in one step: `python -m bench.headroom [--smoke]`.

Around weights theta, with u_G what an update does to group G,

    L(theta - sum_G a_G u_G) = L - b'a + a'Ca/2        b_G = <dL/dtheta, u_G>        C_GH = u_G' H_GN u_H

The best uniform length gains (1'b)^2 / (2 1'C1), the best rates by group b'C^-1 b / 2. R is their quotient, on the bank
of (picture, timestep, noise) that b and C are of: no rule can know more of the step. *Other bank*: what is left of it
there, where only the length is chosen again. *Within 4*: every rate within a factor of 4 of a common one, as
multipliers are. H is the quotient of b'a where the quadratic mean of a is one, as `project` keeps it, and curvature
does not count.

The weights are not changed: an optimizer's update is the one after BATCHES batches of a microworld target's elements.
The loss is a square, so H_GN = 2/N J'J, and J u_G is a difference of two forwards.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from PIL import Image
from scipy.optimize import lsq_linear
from torch import Tensor

from bench.published_table import markdown
from bench.recovery import data_set
from bench.recovery_table import stored
from silentbad.control.spectral import SpectralAdamW, split
from silentbad.data.images import to_tensor
from silentbad.localise.substitution import part_of
from silentbad.model.diffusion import prediction_target
from silentbad.model.forwards import convolve
from silentbad.model.groups import group_of
from silentbad.rng import generator

BASE = "assets/micro-sd"
RESULTS = Path(__file__).parent / "results" / "headroom.json"
HEAD = ("optimizer", "by", "parts", "R", "R, other bank", "R within 4", "within 4, other bank", "H")
BATCH = 16
BATCHES = 16
ARMS: dict[str, Callable[[UNet2DConditionModel], torch.optim.Optimizer]] = {
    "SGD": lambda unet: torch.optim.SGD(unet.parameters(), 1.0, momentum=0.9),
    "AdamW": lambda unet: torch.optim.AdamW(unet.parameters(), 1e-3, (0.9, 0.99), weight_decay=0.0),
    "spectral": lambda unet: SpectralAdamW(of_spectral(unet), 1e-3, (0.9, 0.99), weight_decay=0.0),
}


def of_spectral(unet: UNet2DConditionModel) -> list[dict]:
    return split([{"params": [*unet.parameters()], "name": "all"}], unet)


@dataclass
class Bank:
    """Draws at fixed timesteps and noise: x_t and target (n,C,h,w), t (n,), text states (n,L,D)."""

    x: Tensor
    t: Tensor
    c: Tensor
    target: Tensor

    def error(self, unet: UNet2DConditionModel) -> Tensor:
        """The error (n,C,h,w) of the model's prediction."""
        return unet(self.x, self.t, self.c).sample - self.target


class Elements:
    """Pictures of a target's elements as latents (N,C,h,w), with their text states (N,L,D)."""

    def __init__(self, target: str):
        data = data_set(target, 0, 20, {})
        rows = [row for row in stored(data / "metadata.jsonl") if row["role"] == "element"]
        pipe = StableDiffusionPipeline.from_pretrained(BASE)
        self.scheduler = DDPMScheduler.from_config(pipe.scheduler.config)
        images = torch.stack([to_tensor(Image.open(data / row["file_name"])) for row in rows])
        texts = [row["text"] for row in rows]
        with torch.no_grad():
            self.x0 = pipe.vae.encode(images * 2 - 1).latent_dist.mean * pipe.vae.config.scaling_factor
            ids = pipe.tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt").input_ids
            self.c = pipe.text_encoder(ids).last_hidden_state

    def draw(self, count: int, *address: int | str) -> Bank:
        g = generator("headroom", *address)
        rows = torch.randint(len(self.x0), (count,), generator=g)
        x0 = self.x0[rows]
        T = self.scheduler.config.num_train_timesteps
        t = ((torch.arange(count) + torch.rand(count, generator=g)) * T / count).long()  # in strata
        eps = torch.randn(x0.shape, generator=g)
        x = self.scheduler.add_noise(x0, eps, t)
        return Bank(x=x, t=t, c=self.c[rows], target=prediction_target(self.scheduler, x0, eps, t))


# -- the bound ---------------------------------------------------------------------------------------------
BOUND = 4.0  # of gradient_control.bound


def gain(a: np.ndarray, b: np.ndarray, C: np.ndarray) -> float:
    """The gain of one step with rates a (G,) at their best length."""
    return float((a @ b) ** 2 / (a @ C @ a))


def best_rates(b: np.ndarray, C: np.ndarray) -> np.ndarray:
    """The rates a (G,) of the largest gain, of any sign and size."""
    return np.linalg.solve(C + 1e-9 * C.diagonal().mean() * np.eye(len(b)), b)


def best_within(b: np.ndarray, C: np.ndarray, bound: float = BOUND) -> np.ndarray:
    """The same with every rate within a factor of `bound` of a common one, as multipliers have it."""
    root = np.linalg.cholesky(C + 1e-9 * C.diagonal().mean() * np.eye(len(b)))
    aim = np.linalg.solve(root, b)
    levels = b.sum() / C.sum() * np.geomspace(0.1, 10, 41)
    rates = [lsq_linear(root.T, aim, (level / bound, level * bound)).x for level in levels]
    return max(rates, key=lambda a: gain(a, b, C))


def at_equal_length(b: np.ndarray, n: np.ndarray) -> float:
    """H: the largest sum of a_G b_G with sum n a^2 = sum n, over that of a = 1."""
    return float((n.sum() * (b**2 / n).sum()) ** 0.5 / b.sum())


def gradient(unet: UNet2DConditionModel, bank: Bank) -> list[Tensor]:
    """The gradient of the mean square error, in parts of BATCH draws."""
    total = len(bank.t)
    for rows in torch.arange(total).split(BATCH):
        part = Bank(x=bank.x[rows], t=bank.t[rows], c=bank.c[rows], target=bank.target[rows])
        (part.error(unet).square().mean() * len(rows) / total).backward()
    slopes_of = [torch.zeros_like(p) if p.grad is None else p.grad for p in unet.parameters()]
    unet.zero_grad(set_to_none=True)
    return slopes_of


def update(unet: UNet2DConditionModel, optimizer: torch.optim.Optimizer, gradients: list[list[Tensor]]) -> list[Tensor]:
    """The weights before the update by the last of these gradients minus those after it; weights are restored after
    each."""
    params = [*unet.parameters()]
    before = [p.detach().clone() for p in params]
    for of_batch in gradients:
        for p, g in zip(params, of_batch, strict=True):
            p.grad = g.clone()
        optimizer.step()
        change = [b - p.detach() for b, p in zip(before, params, strict=True)]
        with torch.no_grad():
            for p, b in zip(params, before, strict=True):
                p.copy_(b)
    unet.zero_grad(set_to_none=True)
    return change


def parts_of(unet: UNet2DConditionModel) -> list[str]:
    """The part, a role of a stage, of each tensor."""
    return [part_of(group_of(name), "both") for name, _ in unet.named_parameters()]


def slopes(u: list[Tensor], g: list[Tensor], parts: list[str]) -> Tensor:
    """b (G,)."""
    sums: dict[str, float] = dict.fromkeys(parts, 0.0)
    for step, slope, part in zip(u, g, parts, strict=True):
        sums[part] += float((step.double() * slope.double()).sum())
    return torch.tensor([*sums.values()]).double()


@torch.no_grad()
def curvature(unet: UNet2DConditionModel, u: list[Tensor], bank: Bank, parts: list[str]) -> Tensor:
    """C (G,G)."""
    tensors = list(zip(unet.parameters(), u, parts, strict=True))
    rows = []
    for name in dict.fromkeys(parts):
        of_part = [(p, step) for p, step, part in tensors if part == name]
        # a change of a thousandth of the weights: far above rounding, far below their curvature
        h = 1e-3 * norm(p for p, _ in of_part) / max(norm(step for _, step in of_part), 1e-30)
        ends = []
        for side in (h, -h):
            before = [p.clone() for p, _ in of_part]
            for p, step in of_part:
                p.add_(step, alpha=side)
            ends.append(bank.error(unet).double())
            for (p, _), old in zip(of_part, before, strict=True):
                p.copy_(old)
        rows.append(((ends[0] - ends[1]) / (2 * h)).flatten())
    J = torch.stack(rows)
    return 2 * J @ J.T / J.shape[1]


def norm(tensors: Iterable[Tensor]) -> float:
    return float(torch.stack([t.square().sum() for t in tensors]).sum().sqrt())


def gathered(names: list[str], by: str) -> np.ndarray:
    """(parts, G): which of the finest parts each stage, role or both holds."""
    whole = [part_of(name, by) for name in names]
    return np.array([[float(part == own) for part in whole] for own in dict.fromkeys(whole)])


def bounds(model: dict, by: str) -> dict[str, float]:
    """By stage or role, from a stored model of the loss: {"names", "n", "b", "C"}, b and C of two banks."""
    P = gathered(model["names"], by)
    (b, b2), (C, C2) = ([P @ np.array(x) for x in model["b"]], [P @ np.array(x) @ P.T for x in model["C"]])
    one = np.ones(len(b))
    free, within = best_rates(b, C), best_within(b, C)
    return {
        "parts": len(b),
        "R": gain(free, b, C) / gain(one, b, C),
        "R, other bank": gain(free, b2, C2) / gain(one, b2, C2),
        "R within 4": gain(within, b, C) / gain(one, b, C),
        "within 4, other bank": gain(within, b2, C2) / gain(one, b2, C2),
        "H": at_equal_length(b, P @ np.array(model["n"])),
    }


def table(models: dict[str, dict]) -> str:
    """A line an optimizer and partition: Markdown."""
    lines = []
    for arm, model in models.items():
        for by in ("stage", "role", "both"):
            parts, *figures = bounds(model, by).values()
            lines.append([arm, by, str(parts), *(f"{x:.2f}" for x in figures)])
    return markdown(HEAD, lines) + "\n"


def main(arguments: list[str] | None = None) -> dict[str, dict]:
    """Prints the table of each optimizer; stores b and C, of which it is made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="103", help="a seed of the microworld; 0-999 are for development")
    parser.add_argument("--unet", default=f"{BASE}/unet", help="folder of the weights to stand at")
    parser.add_argument("--bank", type=int, default=256, help="draws of a slope, in each of two banks")
    parser.add_argument("--curves", type=int, default=32, help="draws of a curvature, in each of them")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--smoke", action="store_true", help="few draws")
    args = parser.parse_args(arguments)
    if args.smoke:
        vars(args).update(bank=16, curves=2, results=RESULTS.with_name("headroom-smoke.json"))

    elements = Elements(args.target)
    unet = UNet2DConditionModel.from_pretrained(args.unet)
    convolve(unet)
    parts = parts_of(unet)
    names = [*dict.fromkeys(parts)]
    n = [sum(p.numel() for p, part in zip(unet.parameters(), parts, strict=True) if part == name) for name in names]
    shown = [gradient(unet, elements.draw(BATCH, "batch", k)) for k in range(BATCHES)]
    slope = [gradient(unet, elements.draw(args.bank, "slope", k)) for k in (0, 1)]
    banks = [elements.draw(args.curves, "curve", k) for k in (0, 1)]
    models: dict[str, dict] = {}
    for arm, make in ARMS.items():
        u = update(unet, make(unet), shown)
        b = [slopes(u, g, parts).tolist() for g in slope]
        C = [[[float(f"{x:.8g}") for x in row] for row in curvature(unet, u, bank, parts).tolist()] for bank in banks]
        models[arm] = {"names": names, "n": n, "b": b, "C": C}
        print(table({arm: models[arm]}), flush=True)
    args.results.write_text(json.dumps(models) + "\n")
    return models


if __name__ == "__main__":
    main()
