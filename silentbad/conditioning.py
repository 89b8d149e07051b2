"""What the UNet is told beside x_t and t, and the module that trains.

A condition is a dict of keyword arguments of `Denoiser`: text states made beforehand, or, where the text encoders
train, the tokens from which it makes them. Legend: c (B,L,D) text states; pooled (B,P) and time_ids (B,6) exist for
SDXL (2307.01952): original height and width, top and left of the crop, target height and width, in pixels.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


def tokenize(tokenizers: list[Any], texts: list[str]) -> list[Tensor]:
    """Token ids (B,L) by tokenizer, padded to its window."""
    return [
        tokenizer(
            texts, max_length=tokenizer.model_max_length, padding="max_length", truncation=True, return_tensors="pt"
        ).input_ids
        for tokenizer in tokenizers
    ]


def encode(encoders: list[nn.Module], tokens: list[Tensor], said: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """(c, pooled): the last states of one encoder; of SDXL's two the last but one, side by side, and a pooled state.

    Where said (B,1) is 0 both are zero: what SDXL is guided away from when there is no negative prompt.
    """
    if len(encoders) == 1:
        return encoders[0](tokens[0], return_dict=False)[0].float(), None
    made = [encoder(ids, output_hidden_states=True) for encoder, ids in zip(encoders, tokens, strict=True)]
    c = torch.cat([out.hidden_states[-2] for out in made], dim=-1).float()
    pooled = made[-1].text_embeds.float()
    return (c, pooled) if said is None else (c * said[:, None], pooled * said)


def unused(encoder: Any, pooled: bool) -> list[nn.Parameter]:
    """Parameters of SDXL's encoders that `encode` does not reach: past the last state but one, where nothing is
    pooled."""
    inner = getattr(encoder, "text_model", encoder)
    return [] if pooled else [*inner.encoder.layers[-1].parameters(), *inner.final_layer_norm.parameters()]


class Denoiser(nn.Module):
    """The UNet, called like one, and beside it the text encoders where they train."""

    def __init__(self, unet: nn.Module, **text_encoders: nn.Module):
        super().__init__()
        self.unet, self.text_encoders = unet, list(text_encoders)
        for name, encoder in text_encoders.items():
            self.add_module(name, encoder)

    def forward(
        self, x_t: Tensor, t: Tensor, encoder_hidden_states: Tensor | None = None, *,
        added_cond_kwargs: dict[str, Tensor] | None = None, tokens: list[Tensor] | None = None,
        said: Tensor | None = None, return_dict: bool = True,
    ) -> Any:  # fmt: skip
        """The prediction (B,C,h,w) under text states, or under `tokens` with gradients for the encoders."""
        if tokens is not None:
            encoders = [getattr(self, name) for name in self.text_encoders]
            encoder_hidden_states, pooled = encode(encoders, tokens, said)
            if pooled is not None:
                added_cond_kwargs = {**added_cond_kwargs, "text_embeds": pooled}
        dtype = x_t.dtype  # a copy in half precision is given its own; autocast looks after the rest
        added = {k: v if k == "time_ids" else v.to(dtype) for k, v in (added_cond_kwargs or {}).items()}
        out = self.unet(x_t, t, encoder_hidden_states.to(dtype), added_cond_kwargs=added, return_dict=False)[0]
        return SimpleNamespace(sample=out) if return_dict else (out,)
