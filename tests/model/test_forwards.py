"""Linear layers as convolutions: equal values and gradients, and nothing of it after measuring."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from silentbad.measure.generation import Sampler
from silentbad.model.denoiser import training_forward
from silentbad.model.forwards import as_convolutions, convolve, text_projected_once
from silentbad.rng import generator
from tests.tiny import tiny_pipeline
from validation import ValidationConfig


def convolutions(module: nn.Module, *inputs) -> int:
    """How many convolutions a forward pass takes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen, torch.no_grad():
        module(*inputs)
    return sum(event.count for event in seen.key_averages() if event.key == "aten::conv2d")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch", [1, 3, 32])
def test_a_layer_as_a_convolution_gives_the_same(batch, bias):
    torch.manual_seed(0)
    layer, x = nn.Linear(24, 40, bias=bias), torch.randn(batch, 7, 24, generator=generator("forwards", batch))
    with as_convolutions(layer):
        assert convolutions(layer, x) == 1
        convolved, strided = layer(x), layer(x.transpose(0, 1))
    assert convolved.is_contiguous() and torch.allclose(convolved, layer(x), atol=1e-6)
    assert torch.allclose(strided, layer(x.transpose(0, 1)), atol=1e-6)


def test_layers_that_are_no_plain_fp32_stay():
    wrapped, double, flat = nn.Linear(4, 4), nn.Linear(4, 4).double(), nn.Linear(4, 4)
    wrapped.forward = forward = lambda x: x
    model, x = nn.ModuleList([wrapped, double, flat]), torch.ones(2, 3, 4)
    with as_convolutions(model):
        assert wrapped.forward is forward and convolutions(double, x.double()) == 0
        assert convolutions(flat, x[0]) == 0, "two dimensions: the embedding of the timestep"
    assert wrapped.forward is forward


def test_a_failure_leaves_the_layers_as_they_were():
    layer = nn.Linear(4, 4)
    with pytest.raises(RuntimeError, match="out of memory"), as_convolutions(layer):
        assert "forward" in vars(layer)
        raise RuntimeError("out of memory")
    assert "forward" not in vars(layer)


def test_gradients_through_a_convolution_are_the_same():
    torch.manual_seed(0)
    layer, x = nn.Linear(24, 40), torch.randn(3, 7, 24, requires_grad=True)

    def gradients() -> list[torch.Tensor]:
        return list(torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()]))

    usual = gradients()
    assert convolve(layer) == [layer] and convolve(layer) == []
    for gradient, expected in zip(gradients(), usual, strict=True):
        assert gradient.shape == expected.shape and torch.allclose(gradient, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("precision", "more"), [("no", True), ("bf16", False)])
def test_training_in_fp32_uses_it(precision, more):
    unet = tiny_pipeline().unet
    inputs = torch.zeros(2, 4, 8, 8), 1, torch.zeros(2, 8, unet.config.cross_attention_dim)
    before = convolutions(unet, *inputs)
    forward = training_forward(unet, SimpleNamespace(compile_model=False), precision)
    assert (convolutions(forward, *inputs) > before) is more


def test_measuring_uses_it_and_leaves_the_backbone():
    pipe = tiny_pipeline()
    inputs = torch.zeros(2, 4, 8, 8), 1, torch.zeros(2, 8, pipe.unet.config.cross_attention_dim)
    before = convolutions(pipe.unet, *inputs)
    sampler = Sampler(pipe.components, ValidationConfig(num_inference_steps=2), 0)
    with sampler.using(pipe.unet, torch.device("cpu")):
        assert convolutions(pipe.unet, *inputs) > before
    assert convolutions(pipe.unet, *inputs) == before


def test_text_is_projected_once_for_the_same_states():
    unet = tiny_pipeline().unet
    across = [m for m in unet.modules() if getattr(m, "is_cross_attention", False)]
    calls = []
    x, width = torch.randn(2, 4, 8, 8), unet.config.cross_attention_dim
    one, two = torch.randn(2, 2, 8, width, generator=generator("states", 0)).unbind()
    with torch.no_grad(), as_convolutions(unet):
        plain = [unet(x, t, c).sample for t, c in ((1, one), (5, one), (5, two))]
        forward = vars(across[0].to_k)["forward"]
        across[0].to_k.register_forward_hook(lambda *_: calls.append("asked"))
        across[0].to_k.forward = counted = lambda y: (calls.append("made"), forward(y))[1]
        with text_projected_once(unet):
            assert across[0].to_k.forward is counted, "a forward of someone else stays"
        across[0].to_k.forward = forward
        with text_projected_once(unet):
            across[0].to_k.forward.forward = counted
            once = [unet(x, t, c).sample for t, c in ((1, one), (5, one), (5, two))]
        assert vars(across[0].to_k)["forward"] is forward
    assert all(torch.equal(a, b) for a, b in zip(plain, once, strict=True))
    assert calls.count("made") == 2 and calls.count("asked") >= 3
    assert len(across) > 1 and not any("forward" in vars(layer) for m in across for layer in (m.to_k, m.to_v))


def test_text_is_projected_anew_where_gradients_flow():
    unet = tiny_pipeline().unet
    c = torch.randn(1, 8, unet.config.cross_attention_dim, requires_grad=True)
    with text_projected_once(unet):
        for t in (1, 2):
            unet(torch.ones(1, 4, 8, 8), t, c).sample.sum().backward()
    assert c.grad.abs().sum() > 0
