"""Gradients by source."""

import pytest
import torch

from tests.toy import Toy, config, controlled, equal


@pytest.mark.parametrize("loss_scale", [1.0, 2.0**16])
def test_sources_are_told_apart(loss_scale):
    """Three micro-batches, two sources, a loss scale taken out before before_step."""
    model = Toy()
    control, optimizer = controlled(model, config("uniform", conflict=True))
    rng = torch.Generator().manual_seed(5)
    g = [[torch.randn(p.shape, generator=rng) for p in model.parameters()] for _ in range(2)]
    g.append([-0.5 * a + 0.3 * torch.randn(a.shape, generator=rng) for a in g[0]])
    for i, source in enumerate(["element", "element", "clean"]):
        sum(loss_scale * (p * x).sum() for p, x in zip(model.parameters(), g[i], strict=True)).backward()
        control.after_backward(last=i == 2, source=source)
    for p in model.parameters():
        p.grad /= loss_scale
    total = [p.grad.clone() for p in model.parameters()]
    control.before_step(0)
    e, c = (torch.cat([x.flatten() for x in part]) for part in ([a + b for a, b in zip(*g[:2], strict=True)], g[2]))
    cosine = (e @ c / (e.norm() * c.norm())).item()
    assert control.meters()["control/cos/clean-element"].item() == pytest.approx(cosine, abs=1e-5)
    assert cosine < 0 and equal(total, [p.grad for p in model.parameters()])


@pytest.mark.parametrize("scale", [1.0, 2.0**12 / 3])
def test_a_mixed_micro_batch_is_split_by_source(scale):
    """The banked parts are the sources' own gradients; what is accumulated is that of the whole loss."""
    model = Toy()
    control, _ = controlled(model, config("uniform", conflict=True))
    directions = torch.randn(4, sum(p.numel() for p in model.parameters()), generator=torch.Generator().manual_seed(1))
    losses = directions @ torch.cat([p.flatten() for p in model.parameters()])
    control.before_backward(losses, ["rehearsal", "element", "clean", "element"], scale)
    assert control.source_conflict.remaining == "rehearsal"
    (losses.mean() * scale).backward()
    control.after_backward()
    total = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert torch.allclose(total, directions.mean(0) * scale, rtol=1e-4, atol=1e-5 * scale)
    control.before_step(0)
    for a, b, x, y in (
        ("clean", "element", directions[2], directions[1] + directions[3]),
        ("element", "rehearsal", directions[1] + directions[3], directions[0]),
    ):
        cosine = torch.nn.functional.cosine_similarity(x, y, dim=0).item()
        assert control.meters()[f"control/cos/{a}-{b}"].item() == pytest.approx(cosine, abs=1e-4)
