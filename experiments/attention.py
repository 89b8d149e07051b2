"""Cross-attention maps and phrase tokens.

The maps are recomputed from the queries and keys that forward hooks see, on the small layers only,
so the attention itself runs through whatever kernel is installed (SDPA, xFormers) and LoRA layers
are seen as they are. Legend: S = side^2 map positions, L caption tokens, P phrases of a caption."""

import re
from contextlib import contextmanager
from typing import Any

import torch

from silentbad.data.phrases import pattern


def token_spans(tokenizer, text: str, phrases: list[str]) -> list[list[int]]:
    """Token indices of each phrase in `text`, exact by the tokenizer's character offsets.

    Each phrase takes its first occurrence at word bounds that no earlier phrase of the list has
    taken; a phrase that is absent or cut off by the token window has no tokens."""
    coded = tokenizer(
        text, truncation=True, max_length=tokenizer.model_max_length, return_offsets_mapping=True
    )
    offsets = coded["offset_mapping"]
    taken = [False] * len(text)
    spans = []
    for phrase in phrases:
        wanted = phrase.strip().lower()
        span: list[int] = []
        for match in re.finditer(pattern([wanted]), text.lower()):
            start, end = match.span()
            if not any(taken[start:end]):
                taken[start:end] = [True] * (end - start)
                span = [i for i, (a, b) in enumerate(offsets) if a < end and start < b]
                break
        if span and max(offsets[i][1] for i in span) < end:  # cut off by the token window
            span = []
        spans.append(span)
    return spans


def token_table(tokenizer, texts: list[str], phrases: list[list[str]]) -> torch.Tensor:
    """(B,P,L) float {0,1}: the tokens of each caption's phrases, P the most of any, L the token
    window; on the CPU."""
    table = torch.zeros(len(texts), max([1, *map(len, phrases)]), tokenizer.model_max_length)
    for b, (text, shown) in enumerate(zip(texts, phrases, strict=True)):
        for p, span in enumerate(token_spans(tokenizer, text, shown)):
            table[b, p, span] = 1.0
    return table


class Maps:
    """What one forward of a UNet recorded: queries (B,S,H*d) and keys (B,L,H*d) of its
    cross-attention layers.

    The maps are computed from them when asked for, outside the layers, so gradient checkpointing
    recomputes a layer as it ran."""

    def __init__(self, side: int):
        self.side = side
        self.queries: dict[Any, torch.Tensor] = {}
        self.keys: dict[Any, torch.Tensor] = {}

    def _record(self, layer, queries: bool, x: torch.Tensor) -> None:
        """Keep layers of at most side x side positions, or where all are finer the coarsest
        (SDXL: 32x32)."""
        if queries:
            most = max(
                self.side**2, min([x.shape[1], *(q.shape[1] for q in self.queries.values())])
            )
            self.queries = {
                k: q for k, q in {**self.queries, layer: x}.items() if q.shape[1] <= most
            }
            self.keys = {k: v for k, v in self.keys.items() if k in self.queries}
        elif layer in self.queries:
            self.keys[layer] = x

    def _largest(self) -> list:
        """Layers of the largest recorded resolution, in the order they ran."""
        positions = max(q.shape[1] for q in self.queries.values())
        return [layer for layer, q in self.queries.items() if q.shape[1] == positions]

    def of(self, layer) -> torch.Tensor:
        """softmax(q k^T / sqrt(d)) (B,S,L), averaged over heads."""
        q, k = (
            x.unflatten(-1, (layer.heads, -1)).transpose(1, 2).float()
            for x in (self.queries[layer], self.keys[layer])
        )
        return (q @ k.transpose(-1, -2) * layer.scale).softmax(-1).mean(dim=1)

    def mean(self) -> torch.Tensor:
        """(B,S,L): the mean over the layers of the largest recorded resolution (SD at 512: the
        16x16 level)."""
        return torch.stack([self.of(layer) for layer in self._largest()]).mean(dim=0)


@contextmanager
def record_maps(unet: torch.nn.Module, side: int = 16):
    """While open, every forward of `unet` records its cross-attention maps of at most side x side
    positions, or the coarsest it has."""
    maps = Maps(side)
    handles = []

    def record(layer, queries):
        return lambda module, args, out: maps._record(layer, queries, out)

    for name, layer in unet.named_modules():
        if name.endswith("attn2"):
            handles.append(layer.to_q.register_forward_hook(record(layer, True)))
            handles.append(layer.to_k.register_forward_hook(record(layer, False)))
    try:
        yield maps
    finally:
        for handle in handles:
            handle.remove()


def phrase_maps(probs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """probs (B,S,L), tokens (B,P,L) -> each phrase's share of attention by place (B,P,S), sum one
    (0 if no token)."""
    maps = torch.einsum("bsl,bpl->bps", probs, tokens)
    return maps / maps.sum(dim=-1, keepdim=True).clamp_min(1e-8)
