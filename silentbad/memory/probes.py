"""How well the model reproduces each element: a fixed probe bank and the strength rho_i.

Legend: n elements, P probes of an element, m pictures of an element, e (n,P) probe errors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from silentbad import rng
from silentbad.device import Mailbox, send
from silentbad.memory.masks import estimate_mask, mask_to_image
from silentbad.model.diffusion import prediction_target

FEWEST = 4  # pictures of an element from which its mask is estimated


@dataclass
class Element:
    """The data that a probe of one element needs: latents (m,C,h,w), masks (m,1,h,w) in [0,1] or
    None, captions (m); `estimated` (1,H,W) is the mask estimated at the pixels, where none was
    given."""

    latents: torch.Tensor
    masks: torch.Tensor | None
    texts: list[str]
    estimated: torch.Tensor | None = None


def probe_timesteps(
    snr: torch.Tensor, edges: tuple[float, ...] = (10, 2, 0.5, 0.1, 0.02)
) -> torch.Tensor:
    """Two timesteps in each of the strata between `edges`, at a quarter and three quarters in
    log-SNR -> (P,)."""
    logs = torch.tensor(edges, dtype=torch.float64).log()
    wanted = torch.stack(
        [logs[:-1] * (1 - f) + logs[1:] * f for f in (0.25, 0.75)], dim=1
    ).flatten()
    return (snr.double().clamp_min(1e-20).log()[None] - wanted[:, None]).abs().argmin(dim=1)


def strength(e: torch.Tensor, e0: torch.Tensor) -> torch.Tensor:
    """rho (n,) = 1 - mean over probes of e/e0, e and e0 (n,P).

    Each probe is divided by its own first error, so no timestep dominates and the strength is the
    same whether the model predicts epsilon, v or x0 (their errors differ by a factor of t alone).
    """
    return 1 - (e / e0.clamp_min(1e-12)).mean(dim=1)


class PhraseMemory:
    """rho_i by element, refreshed one element at a time within a share of the step budget.

    A training step of N samples costs about 3 N UNet forwards. Each step adds `share` of them to
    the budget of probes; an element is probed when the budget covers its P forwards. The P probes
    are split over the ranks and their errors summed, so rho is the same number everywhere. A sweep
    probes every element once, and adds a row to the history.
    """

    def __init__(
        self,
        n: int,
        snr: torch.Tensor,  # (T,)
        bank: list[Element],
        *,
        share: float,
        effective_batch: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ):
        self.n = n
        self.bank = bank
        self.seed = seed
        self.rank = rank
        self.world = world
        self.reduce = reduce or (lambda x: x)
        self.timesteps = probe_timesteps(snr)
        self.income = 3 * effective_batch * share
        self.credit = 0.0  # budget: forwards that probes may use
        self.next = 0  # the element to probe
        self.sweep = 0  # the step at which the last sweep ended
        self.errors: torch.Tensor | None = None  # (n,P), the latest
        self.first: torch.Tensor | None = None  # (n,P), before training
        self.mail = Mailbox()
        self.history: list[dict[str, Any]] = []  # of completed sweeps: step, rho

    @property
    def rho(self) -> np.ndarray:
        """(n,) the latest completed sweep; zeros before there is one."""
        return np.asarray(self.history[-1]["rho"]) if self.history else np.zeros(self.n)

    def rows(self) -> np.ndarray:
        """(H,n) all completed sweeps."""
        return np.asarray([h["rho"] for h in self.history]).reshape(len(self.history), self.n)

    @torch.no_grad()
    def probe(self, i: int, predict: Callable, scheduler) -> torch.Tensor:
        """e_i (P,): the masked squared error of element i's probes, the same noise every time."""
        P = len(self.timesteps)
        bank = self.bank[i]
        device = bank.latents.device
        # every rank runs equally many forwards; those past the last probe are not counted
        places = range(self.rank, -(-P // self.world) * self.world, self.world)
        probes = [place % P for place in places]
        counted = sum(place < P for place in places)

        # sent, since an index on the host would wait for the device
        places_on_device = send(torch.tensor(probes), device)
        pictures = places_on_device % len(bank.latents)
        latents = bank.latents[pictures]
        timesteps = send(self.timesteps[probes], device)
        shape = tuple(latents.shape[1:])
        noise = send(rng.noise(shape, self.seed, f"probe/{i}", 0, probes), device)
        noisy_latents = scheduler.add_noise(latents, noise, timesteps)
        texts = [bank.texts[j % len(bank.latents)] for j in probes]
        model_pred = predict(noisy_latents, timesteps, texts)
        target = prediction_target(scheduler, latents, noise, timesteps)

        error = (model_pred.float() - target).square().mean(dim=1, keepdim=True)
        weight = torch.ones_like(error) if bank.masks is None else bank.masks[pictures]
        error = (error * weight).sum(dim=(1, 2, 3)) / weight.sum(dim=(1, 2, 3)).clamp_min(1e-8)
        e = torch.zeros(P, device=device)
        e[places_on_device[:counted]] = error[:counted]
        return self.reduce(e)

    def start(self, predict: Callable, scheduler) -> None:
        """The first sweep, e_i(0); its cost makes the budget negative, which delays the second
        sweep."""
        if not self.n:
            return
        self.first = torch.stack([self.probe(i, predict, scheduler) for i in range(self.n)])
        self.errors = self.first.clone()
        self.credit = -float(self.n * len(self.timesteps))
        self.history = [{"step": 0, "rho": [0.0] * self.n}]

    def after_step(self, step: int, predict: Callable, scheduler) -> None:
        """Read finished strengths, add the step's share to the budget, probe the elements it
        covers."""
        if not self.n:
            return
        assert self.errors is not None and self.first is not None, "`start` comes first"
        self.collect()
        self.credit += self.income
        while self.credit >= len(self.timesteps):
            self.errors[self.next] = self.probe(self.next, predict, scheduler)
            self.credit -= len(self.timesteps)
            self.next = (self.next + 1) % self.n
            if self.next == 0:
                self.collect()
                self.sweep = step
                self.mail.send(strength(self.errors, self.first))

    def collect(self) -> None:
        """Add the strengths of the last sweep to the history, if they are not there yet."""
        if (rho := self.mail.receive()) is not None:
            self.history.append({"step": self.sweep, "rho": rho.tolist()})

    def state_dict(self) -> dict:
        keys = ("credit", "next", "sweep", "errors", "first")
        copied = {k: v.clone() if torch.is_tensor(v := getattr(self, k)) else v for k in keys}
        return {**copied, "history": list(self.history), "mail": self.mail.peek()}

    def load_state_dict(self, state: dict) -> None:
        device = self.first.device if self.first is not None else "cpu"
        self.credit = state["credit"]
        self.next = state["next"]
        self.sweep = state["sweep"]
        self.history = list(state["history"])
        for key in ("errors", "first"):
            setattr(self, key, None if state[key] is None else state[key].to(device))
        self.mail.restore(state["mail"])


@torch.no_grad()
def build_bank(
    info, encode: Callable, pictures: Callable, count: int, device, most: int = 12
) -> list[Element]:
    """The first `count` pictures of each element, with their masks. Where one of them has no mask,
    one for all is estimated from up to `most` pictures of the element, if it has FEWEST. It is
    estimated from pixels, since latents of small pictures are too coarse."""
    bank = []
    for rows in info.rows:
        rows = [int(r) for r in rows[:most]]
        batch = pictures(rows[:count])
        latents = encode(batch["pixel_values"].to(device)).float()
        masks = None
        estimated = None
        if bool(batch["has_mask"].all()):
            masks = batch["mask"]
        elif len(rows) >= FEWEST:
            estimated = estimate_mask(pictures(rows)["pixel_values"])
            masks = estimated.expand(len(latents), -1, -1, -1)
        if masks is not None:
            masks = F.interpolate(masks.to(device).float(), size=latents.shape[-2:], mode="area")
        bank.append(
            Element(
                latents=latents,
                masks=masks,
                texts=batch["text"],
                estimated=estimated,
            )
        )
    return bank


def mask_images(bank: list[Element]) -> dict[int, Image.Image]:
    """{element: its estimated mask as a picture}, of the elements that have one."""
    return {
        i: mask_to_image(element.estimated)
        for i, element in enumerate(bank)
        if element.estimated is not None
    }


def mask_table(bank: list[Element]) -> torch.Tensor:
    """(n+1,1,h,w): each element's mask, ones where it has none and, last, for records of no
    element."""
    ones = torch.ones_like(bank[0].latents[:1, :1])
    return torch.cat([*(ones if e.masks is None else e.masks[:1] for e in bank), ones])
