"""The recorded cross-attention maps, and the tokens of a phrase."""

import copy

import torch
from diffusers.models.attention_processor import AttnProcessor

from experiments import attention


def test_token_spans_are_exact(pipe):
    text = "A Red Cat wearing a tall hat, a red catfish, a hat"
    spans = attention.token_spans(pipe.tokenizer, text, ["a red cat", "a tall hat", "a hat", "a dog"])
    tokens = pipe.tokenizer.convert_ids_to_tokens(pipe.tokenizer(text).input_ids)
    said = ["".join(tokens[i] for i in span).replace("</w>", " ").strip() for span in spans]
    assert said == ["a red cat", "a tall hat", "a hat", ""]
    assert attention.token_spans(pipe.tokenizer, "a cat and a cat", ["a cat", "a cat"]) == [[1, 2], [4, 5]]
    cut = " ".join(["star"] * 60) + " a red cat"
    assert attention.token_spans(pipe.tokenizer, cut, ["a red cat"]) == [[]]
    assert attention.token_spans(pipe.tokenizer, "an extraordinarily-shaped cup", ["extraordinarily-shaped"])[0]


def test_recorded_maps_equal_the_explicit_attention(pipe):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, 8, 8, generator=g)
    c = torch.randn(2, 48, 32, generator=g)
    with attention.record_maps(pipe.unet) as maps:
        out = pipe.unet(x, torch.tensor([10, 500]), c).sample
    probs = {}

    class Explicit(AttnProcessor):
        def __call__(self, attn, hidden_states, encoder_hidden_states=None, **kwargs):
            if encoder_hidden_states is not None:
                q, k = (
                    attn.head_to_batch_dim(f(h))
                    for f, h in ((attn.to_q, hidden_states), (attn.to_k, encoder_hidden_states))
                )
                probs[attn] = attn.get_attention_scores(q, k).unflatten(0, (2, -1)).mean(dim=1)
            return super().__call__(attn, hidden_states, encoder_hidden_states, **kwargs)

    other = copy.deepcopy(pipe.unet)
    other.set_attn_processor(Explicit())
    assert torch.allclose(other(x, torch.tensor([10, 500]), c).sample, out, atol=1e-4)
    large = torch.stack([p for p in probs.values() if p.shape[1] == 64]).mean(dim=0)
    assert torch.allclose(maps.mean(), large, atol=1e-5) and maps.mean().shape == (2, 64, 48)
    assert not any(m._forward_hooks for m in pipe.unet.modules())
