"""Gradient control on two gloo ranks: multipliers bit-equal, the whole batch split by source."""

import gc
import importlib
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from gradient_control import Controller
from tests.toy import GSNR, Toy, config, run

STEPS = 12
SOURCES = ("element", "element", "rehearsal")
DISAGREE = (("clean", "element", "rehearsal"), ("element", "element", "clean"))  # sources of each rank


class Linear(Toy):
    """Toy whose loss is linear: the gradient of each parameter is the tensor handed to forward."""

    def forward(self, g):
        return sum((p * x).sum() for p, x in zip(self.parameters(), g, strict=True))


def micro_batch(model, step, micro, rank):
    rng = torch.Generator().manual_seed(step * 100 + micro * 10 + rank)
    shared = torch.Generator().manual_seed(step * 100 + micro // 2)
    return [torch.randn(p.shape, generator=rng) + torch.randn(p.shape, generator=shared) for p in model.parameters()]


def train(model, forward, ranks, no_sync, sources=SOURCES):
    """Train on the micro-batches of `ranks`; returns the controller and the weights."""
    control = Controller(model, config(GSNR, conflict=True), seed=0)
    optimizer = torch.optim.AdamW(control.param_groups(1e-2), lr=1e-2)
    control.attach(optimizer)
    for step in range(STEPS):
        for micro, source in enumerate(sources):
            sync = micro == len(sources) - 1
            with no_sync(sync):
                for rank in ranks:
                    (forward(micro_batch(model, step, micro, rank)) / len(ranks)).backward()
            control.after_backward(sync, source)
        control.before_step(step)
        optimizer.step()
        control.after_step()
        optimizer.zero_grad()
    return control, [p.detach() for p in model.parameters()]


def worker(rank, folder):
    """All in a call of its own: a thread of the process group that lets go of a tensor while the interpreter ends
    aborts the process (pytorch#190489)."""
    importlib.import_module("torch._dynamo")  # DDP does it too late: it would then hold the group for ever
    compare(rank, folder)
    gc.collect()
    assert not [t for t in Path("/proc/self/task").glob("*/comm") if "gloo" in t.read_text()]


def compare(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    for name, sources in (("agree", SOURCES), ("disagree", DISAGREE[rank])):
        model = Linear()
        ddp = DistributedDataParallel(model)
        no_sync = lambda sync, ddp=ddp: torch.enable_grad() if sync else ddp.no_sync()  # noqa: E731
        control, weights = train(model, ddp, [rank], no_sync, sources)
        if rank == 1:  # a rank whose statistics went astray still follows rank 0
            control.layer_rates.statistics.average.mul_(torch.rand_like(control.layer_rates.statistics.average))
        control.layer_rates.compute_multipliers()
        control.layer_rates.apply_multipliers()
        cosine = {key: value for key, value in control.meters().items() if "/cos/" in key}
        torch.save((weights, control.history, cosine), os.path.join(folder, f"{name}-{rank}.pt"))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(worker, (str(folder),), nprocs=2)
    return folder


@pytest.mark.parametrize("sources", ["agree", "disagree"])
def test_two_gloo_ranks_are_bit_equal(ranks, sources):
    a, b = (torch.load(ranks / f"{sources}-{rank}.pt", weights_only=True) for rank in range(2))
    assert a[1] == b[1] and len(set(a[1][-1]["multipliers"].values())) > 2
    assert all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True)) and a[2] == b[2]


def test_two_gloo_ranks_match_one_process_with_the_whole_batch(ranks):
    weights, history, cosine = torch.load(ranks / "agree-0.pt", weights_only=True)
    model = Linear()
    alone, expected = train(model, model, [0, 1], lambda sync: torch.enable_grad())
    assert cosine["control/cos/element-rehearsal"].item() == pytest.approx(
        alone.meters()["control/cos/element-rehearsal"].item(), abs=1e-4
    )
    assert all(torch.allclose(x, y, atol=1e-4) for x, y in zip(weights, expected, strict=True))
    for ours, theirs in zip(history, alone.history, strict=False):
        assert [*ours["multipliers"].values()] == pytest.approx([*theirs["multipliers"].values()], rel=1e-2)


def test_ranks_that_name_different_sources_do_not_hang(ranks):
    """What is left at the last micro-step then belongs to no single source."""
    cosine = torch.load(ranks / "disagree-0.pt", weights_only=True)[2]
    assert set(cosine) == {f"control/cos/{pair}" for pair in ("clean-element", "clean-mixed", "element-mixed")}
    assert all(value.isfinite() for value in cosine.values())


def test_one_process_needs_no_process_group():
    model = Toy()
    control = Controller(model, config(GSNR))
    optimizer = torch.optim.AdamW(control.param_groups())
    control.attach(optimizer)
    run(model, control, optimizer, range(6))
    assert not dist.is_initialized() and control.layer_rates.updates == 6
