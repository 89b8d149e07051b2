"""Encodes images to latents and captions to conditions, cached per record and per text.

A condition is a dict of keyword arguments of `Denoiser`: text states made beforehand, or, where the
text encoders train, the tokens from which it makes them. Legend: c (B,L,D) text states; pooled
(B,P) and time_ids (B,6) exist where the family has them (`silentbad.model.family`)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from silentbad import rng
from silentbad.data.table import vocabulary
from silentbad.device import send
from silentbad.model.latents import scaled
from silentbad.model.pipeline import Components
from silentbad.model.store import Cached, merge_cached


def tokenize(parts: Components, texts: list[str]) -> list[Tensor]:
    """Token ids (B,L) by tokenizer, padded to its window."""
    windows = zip(parts.tokenizers.values(), parts.family.windows(parts.tokenizers), strict=True)
    return [
        tokenizer(
            texts, max_length=window, padding="max_length", truncation=True, return_tensors="pt"
        ).input_ids
        for tokenizer, window in windows
    ]


# ---------------------------------------------------------------- encoding
class Encoder:
    """Latents and conditions of a micro-batch, kept per record and per text while the budget lasts.

    Cached values are encoded one at a time, so that none depends on the rest of its batch: a run
    with a warm cache and a resumed one with a cold cache see the same bits."""

    def __init__(
        self, parts: Components, accelerator: Any, *, side: int, cache_bytes: int, seed: int
    ):
        self.device = accelerator.device
        self.vae = parts.vae.to(self.device)
        self.parts = parts
        self.text_encoders = [encoder.to(self.device) for encoder in parts.text_encoders.values()]
        self.family = parts.family
        self.width, self.pooled = parts.family.widths(parts.backbone, parts.text_encoders)
        # the text encoders train: the model encodes for itself
        self.live = bool(parts.model.text_encoders)
        self.default_time_ids = torch.tensor([[side, side, 0, 0, side, side]])  # of a whole picture
        self.budget = cache_bytes
        self.seed = seed
        self.kept_images: dict[int, torch.Tensor] = {}
        self.kept_texts: dict[str, torch.Tensor] = {}
        self.disk: Cached | None = None
        self.offloaded: list[torch.nn.Module] = []

    def read_from(self, disk: Cached) -> None:
        """Use the encodings on disk; modules that no step needs any more move to the CPU."""
        self.disk = disk
        self.offloaded = [self.vae] * disk.all_images + self.text_encoders * disk.all_texts
        for module in self.offloaded:
            module.to("cpu")

    @contextmanager
    def on_device(self, *modules: torch.nn.Module) -> Iterator[None]:
        """These modules (all, where none is named) on the device."""
        wanted = modules or self.offloaded
        called = [m for m in self.offloaded if any(m is module for module in wanted)]
        for module in called:
            module.to(self.device)
        try:
            yield
        finally:
            for module in called:
                module.to("cpu")

    def own_precision(self) -> torch.autocast:
        """A context without autocast: encodings have the same bits, whoever asks for them first."""
        return torch.autocast(self.device.type, enabled=False)

    @property
    def text_facts(self) -> list[Any]:
        """The facts on which the states of a text depend."""
        vocabularies = map(vocabulary, self.parts.tokenizers.values())
        of_backbone = self.family.text_facts(self.parts.backbone)
        return [*self.text_encoders, *vocabularies, self.parts.zero_empty, *of_backbone]

    @torch.no_grad()
    def latents(self, batch: dict[str, Any], draw: int) -> torch.Tensor:
        """Latents (B,C,h,w): a draw from each image's posterior, noise at its own address."""
        pixels = batch["pixel_values"]

        def cached(k: int, index: int) -> torch.Tensor | None:
            if not batch["fixed"][k]:
                return None
            row = None if self.disk is None else self.disk.image(index)
            if row is not None:
                return row
            return self._kept(self.kept_images, index, lambda: self.moments(pixels[k][None])[0])

        rows = [cached(k, index) for k, index in enumerate(batch["index"].tolist())]
        moments = merge_cached(
            rows, lambda live: self.moments(torch.stack([pixels[k] for k in live])), self.device
        )
        mean, std = moments.chunk(2, dim=1)
        shape = tuple(mean.shape[1:])
        noise = rng.noise(shape, self.seed, "posterior", draw, batch["position"].tolist())
        return scaled(self.vae, mean + std * send(noise, self.device))

    @torch.no_grad()
    def mode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Latents (B,C,h,w) of pixel_values, the middle of each posterior."""
        return scaled(self.vae, self.moments(pixels).chunk(2, dim=1)[0])

    @torch.no_grad()
    def moments(self, pixels: torch.Tensor) -> torch.Tensor:
        """Mean and standard deviation of the posteriors (B,2C,h,w)."""
        with self.on_device(self.vae), self.own_precision():
            posterior = self.vae.encode(send(pixels, self.device).to(self.vae.dtype)).latent_dist
        return torch.cat([posterior.mean, posterior.std], dim=1).float()

    def condition(self, texts: list[str], time_ids: torch.Tensor | None = None) -> dict[str, Any]:
        """Keyword arguments of the model; time_ids (B,6), by default a whole picture's."""
        added = {}
        if self.family.sized:
            if time_ids is None:
                time_ids = self.default_time_ids.expand(len(texts), -1)
            # integers, which no precision rounds
            added = {"time_ids": time_ids.to(self.device, torch.long, non_blocking=True)}
        if self.live:
            tokens = [send(ids, self.device) for ids in tokenize(self.parts, texts)]
            return {"tokens": tokens, "nonempty": self._nonempty(texts), "added_cond_kwargs": added}
        on_disk = [None] * len(texts) if self.disk is None else self.disk.states(texts)
        rows = []
        for row, text in zip(on_disk, texts, strict=True):
            if row is None:
                row = self._kept(self.kept_texts, text, partial(self._state, text))
            rows.append(row)
        packed = merge_cached(rows, lambda live: self.states([texts[k] for k in live]), self.device)
        if self.pooled:  # (B, L*D + P)
            added["text_embeds"] = packed[:, -self.pooled :]
            packed = packed[:, : -self.pooled]
            packed = packed.unflatten(1, (-1, self.width))
        return {"encoder_hidden_states": packed, "added_cond_kwargs": added}

    def _nonempty(self, texts: list[str]) -> torch.Tensor | None:
        """(B,1): 0 where the caption is empty and its states are to be zero."""
        if not self.parts.zero_empty:
            return None
        return torch.tensor([[float(bool(text))] for text in texts]).to(
            self.device, non_blocking=True
        )

    @torch.no_grad()
    def states(self, texts: list[str]) -> torch.Tensor:
        """c (B,L,D); where there is a pooled state (B, L*D + P), both in one row."""
        tokens = [send(ids, self.device) for ids in tokenize(self.parts, texts)]
        with self.on_device(*self.text_encoders), self.own_precision():
            c, pooled = self.family.encode(
                self.parts.text_encoders, tokens, self._nonempty(texts), self.width
            )
        return c if pooled is None else torch.cat([c.flatten(1), pooled], dim=1)

    def _state(self, text: str) -> torch.Tensor:
        """The row of one text."""
        return self.states([text])[0]

    def _kept(
        self, store: dict, key: Any, compute: Callable[[], torch.Tensor]
    ) -> torch.Tensor | None:
        """The value cached in memory, encoded now if the budget has room for it; else None."""
        if key not in store:
            if self.budget <= 0:
                return None
            store[key] = compute().cpu()
            self.budget -= store[key].nbytes
        return store[key]
