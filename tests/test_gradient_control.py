"""Gradient control: the named properties of the groups, the statistics, the rules and the controller."""

import copy
import inspect
import math
import sys
import warnings

import pytest
import torch
from diffusers import UNet2DConditionModel
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import gradient_control as gc
from gradient_control import (
    SCALE_RULES,
    TRANSFORMS,
    Controller,
    GradientControlConfig,
    adjust_gradient_scale,
    group_parameters,
)
from silentbad.errors import UserError
from silentbad.gradients import GroupStats, Sample, Statistics, project
from silentbad.groups import OTHER, group_of

from .tiny import tiny_unet
from .toy import NAMES, Toy, config, run

# ------------------------------------------------------------------------------------------------- helpers
CROSS, PLAIN = "CrossAttnDownBlock2D", "DownBlock2D"
PUBLISHED = {  # the published UNet configurations, and their numbers of tensors and parameters
    "SD1": (dict(cross_attention_dim=768, attention_head_dim=8), 686, 859_520_964),
    "SD2": (
        dict(cross_attention_dim=1024, attention_head_dim=[5, 10, 20, 20], use_linear_projection=True),
        686,
        865_910_724,
    ),
    "SDXL": (
        dict(
            block_out_channels=(320, 640, 1280),
            down_block_types=(PLAIN, CROSS, CROSS),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=[1, 2, 10],
            attention_head_dim=[5, 10, 20],
            cross_attention_dim=2048,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
        ),
        1680,
        2_567_463_684,
    ),
}
ACTIVE = [name for name in SCALE_RULES if name != "uniform"]


def controlled(model, settings, optimizer=torch.optim.AdamW, lr=1e-3, weight_decay=1e-2, **options):
    control = Controller(model, settings, seed=3)
    optimizer = optimizer(control.param_groups(weight_decay), lr=lr, **options)
    control.attach(optimizer)
    return control, optimizer


def stats_of(scale=1.0, groups=6, **replace):
    rng = torch.Generator().manual_seed(1)
    E = (torch.rand(groups, generator=rng) + 0.1).double() * scale**2
    n = torch.randint(100, 10000, (groups,), generator=rng).double()
    names = ("mid.xattn.v", "mid.xattn.k", "up1.attn.q", "down0.ff", "stem.norm", "up3.resnet.conv")[:groups]
    parts = dict(
        n=n, S=E * torch.linspace(0.01, 0.5, groups).double(), E=E, Q=2 * E, L1=(E * n).sqrt(),
        theta=n.sqrt(), transfer=torch.linspace(-0.1, 0.1, groups).double(),
    )  # fmt: skip
    return GroupStats(**{"names": names, **parts, **replace})


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def published(which):
    with torch.device("meta"):
        return UNet2DConditionModel(sample_size=64, **PUBLISHED[which][0])


def lora(unet):
    from peft import LoraConfig, inject_adapter_in_model

    unet.requires_grad_(False)
    targets = [
        "to_k",
        "to_q",
        "to_v",
        "to_out.0",
        "proj_in",
        "proj_out",
        "ff.net.0.proj",
        "ff.net.2",
        "conv1",
    ]
    with torch.device("meta"):
        return inject_adapter_in_model(LoraConfig(r=4, target_modules=targets), unet)


# ------------------------------------------------------------------------------------------------- groups
@pytest.mark.parametrize("which", PUBLISHED)
def test_partition_is_exact_and_knows_every_name(which):
    unet, (_, tensors, parameters) = published(which), PUBLISHED[which]
    groups = group_parameters(unet)
    names = [name for members in groups.members.values() for name in members]
    assert sorted(names) == sorted(name for name, _ in unet.named_parameters())
    assert sum(len(group) for group in groups) == tensors and sum(groups.sizes) == parameters
    assert OTHER not in groups.names
    aside = {name for name in groups.names if name.endswith((".norm", ".io"))}
    assert all(
        size >= 50_000 for name, size in zip(groups.names, groups.sizes, strict=True) if name not in aside
    )
    for group, members in groups.members.items():
        assert group in {group_of(name) for name in members}


def test_partition_shares_of_sd1():
    groups = group_parameters(published("SD1"))
    size, total = dict(zip(groups.names, groups.sizes, strict=True)), sum(groups.sizes)

    def share(*ends):
        return sum(s for name, s in size.items() if name.endswith(ends)) / total

    assert share("xattn.k", "xattn.v") == pytest.approx(0.0223, abs=1e-4)
    assert share("resnet.conv") == pytest.approx(0.568, abs=1e-3)
    assert share(".ff") == pytest.approx(0.173, abs=1e-3)
    assert groups.names[0] == "stem.time" and groups.names[-1].startswith("up3")
    assert "859,520,964" in groups.table()


@pytest.mark.parametrize("which", PUBLISHED)
def test_partition_of_lora_covers_the_adapters_alone(which):
    unet = lora(published(which))
    groups = group_parameters(unet)
    names = [name for members in groups.members.values() for name in members]
    assert sorted(names) == sorted(n for n, p in unet.named_parameters() if p.requires_grad)
    assert all("lora_" in name for name in names) and OTHER not in groups.names
    assert {"mid.xattn.v", "mid.xattn.k", "mid.attn.q", "mid.ff", "mid.proj"} <= set(groups.names)


@pytest.mark.parametrize(
    "name, group",
    [
        ("down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k.lora_A.default.weight", "down0.xattn.k"),
        ("base_model.model.mid_block.attentions.0.transformer_blocks.0.attn1.to_out.0.bias", "mid.attn.o"),
        ("module._orig_mod.up_blocks.3.attentions.2.transformer_blocks.0.ff.net.0.proj.weight", "up3.ff"),
        (
            "up_blocks.0.attentions.0.transformer_blocks.9.attn2.processor.to_v_lora.down.weight",
            "up0.xattn.v",
        ),
        ("down_blocks.1.resnets.0.conv_shortcut.weight", "down1.resnet.shortcut"),
        ("down_blocks.1.resnets.0.time_emb_proj.bias", "down1.time"),
        ("down_blocks.2.downsamplers.0.conv.weight", "down2.sampler"),
        ("add_embedding.linear_1.weight", "stem.time"),
        ("conv_norm_out.weight", "stem.norm"),
        ("conv_out.bias", "stem.io"),
        ("transformer.h.0.mlp.weight", OTHER),
    ],
)
def test_group_of_a_name(name, group):
    assert group_of(name) == group


def test_small_groups_join_the_nearest_role_of_their_stage():
    groups = group_parameters(Toy(), min_size=1500)
    assert groups.names == ["mid.ff", "up1.resnet.conv", "up1.norm"]  # k -> v -> ff; norm stays aside
    assert groups.sizes == [2900, 2500, 40]


def test_unknown_names_keep_multiplier_one(caplog):
    model = Toy(names=("strange.part", *list(NAMES.values())[1:]))
    control, optimizer = controlled(model, config())
    run(model, control, optimizer, range(12))
    assert "strange.part.weight" in caplog.text and caplog.text.count("unknown name") == 1
    assert control.multipliers[OTHER] == 1.0 and len(set(control.multipliers.values())) > 2


# --------------------------------------------------------------------------------------------- projection
@pytest.mark.parametrize("seed", range(20))
def test_projection_holds_bounds_and_mean_one_together(seed):
    rng = torch.Generator().manual_seed(seed)
    groups, A, delta = 1 + seed * 7, 1.5 + seed / 4, 0.05 + seed / 10
    n = torch.logspace(0, 8, groups).double()[torch.randperm(groups, generator=rng)]
    past = torch.ones(groups).double()
    for _ in range(6):  # a random walk of extreme raw values, each step starting from the last
        log_x = torch.randn(groups, generator=rng).double() * 10 ** (seed % 3)
        low, high = (past * math.exp(-delta)).clamp(min=1 / A), (past * math.exp(delta)).clamp(max=A)
        a = project(log_x, n, low, high)
        assert ((n * a**2).sum() / n.sum()).item() == pytest.approx(1, abs=1e-6)
        assert a.min() >= 1 / A - 1e-6 and a.max() <= A + 1e-6
        assert ((a / past).log().abs() <= delta + 1e-6).all()
        past = a


def test_projection_keeps_order_and_ratios_of_the_free():
    log_x = torch.tensor([-0.5, 0.0, 0.3]).double()
    a = project(log_x, torch.tensor([5.0, 3.0, 2.0]).double(), torch.full((3,), 0.25), torch.full((3,), 4.0))
    assert torch.allclose(a.log().diff(), log_x.diff())


# ---------------------------------------------------------------------------------- contract: every rule
@pytest.mark.parametrize("name", SCALE_RULES)
class TestEveryRule:
    def settings(self, name):
        return config(name, options={"of": "gsnr"} if name == "placebo" else {})

    def test_is_short_and_says_what_it_is(self, name):
        rule = SCALE_RULES[name]
        assert len(inspect.getsource(rule).rstrip().split("\n")) <= 15 and rule.__doc__

    @pytest.mark.parametrize("scale", [1e-12, 1e-6, 1.0, 1e6, 1e12])
    def test_is_positive_and_does_not_see_the_scale_of_the_loss(self, name, scale):
        x, one = (gc.combine(stats_of(s), {name: (1.0, {})}) for s in (scale, 1.0))
        assert x.isfinite().all() and torch.allclose(x, one, atol=1e-9)

    def test_takes_degenerate_statistics(self, name):
        zero = torch.zeros(6).double()
        for bad in (dict(S=zero, E=zero, Q=zero, L1=zero), dict(theta=zero), dict(S=-stats_of().S)):
            assert gc.combine(stats_of(**bad), {name: (1.0, {})}).isfinite().all()
        nan = stats_of(S=zero + torch.nan, E=zero + torch.nan, Q=zero + torch.nan, L1=zero + torch.inf)
        assert gc.combine(nan, {name: (1.0, {})}).isfinite().all()

    def test_leaves_its_statistics_alone(self, name):
        stats, same = stats_of(), stats_of()
        SCALE_RULES[name](stats)
        assert all(torch.equal(getattr(stats, k), getattr(same, k)) for k in ("n", "S", "E", "Q", "theta"))

    def test_refuses_an_unknown_option_by_name(self, name):
        with pytest.raises(UserError, match="unknown option 'betta'"):
            Controller(Toy(), config(name, options={"betta": 1}))

    def test_bounds_and_mean_one_in_a_run(self, name):
        model = Toy()
        control, optimizer = controlled(model, self.settings(name))
        run(model, control, optimizer, range(30))
        a, n = torch.tensor([*control.multipliers.values()]).double(), torch.tensor(control.groups.sizes)
        assert a.min() >= 0.25 - 1e-6 and a.max() <= 4 + 1e-6
        assert ((n * a**2).sum() / n.sum()).item() == pytest.approx(1, abs=1e-6)
        assert name == "uniform" or a.unique().numel() > 1

    def test_multiplying_the_loss_leaves_multipliers_unchanged(self, name):
        runs = []
        for scale in (1.0, 1e-4, 3e5):
            model = Toy()
            control, optimizer = controlled(model, self.settings(name), torch.optim.SGD, lr=0.0)
            run(model, control, optimizer, range(12), scale)
            runs.append([*control.multipliers.values()])
        assert runs[1] == pytest.approx(runs[0], rel=1e-5) and runs[2] == pytest.approx(runs[0], rel=1e-5)

    def test_gradients_are_bit_unchanged_in_lr_mode(self, name):
        model = Toy()
        control, optimizer = controlled(model, self.settings(name))
        for step in range(9):
            model.grads(step)
            before = [p.grad.clone() for p in model.parameters()]
            control.after_backward(True, "element")
            control.before_step(step)
            assert equal(before, [p.grad for p in model.parameters()])
            optimizer.step()
            control.after_step()

    def test_resume_is_bit_exact(self, name, tmp_path):
        def fresh():
            model = Toy()
            return model, *controlled(model, self.settings(name))

        whole = fresh()
        expected = run(*whole, range(17))
        first = fresh()
        run(*first, range(9))
        parts = dict(
            zip(("model", "control", "optimizer"), (part.state_dict() for part in first), strict=True)
        )
        torch.save(parts, tmp_path / "state.pt")
        second, saved = fresh(), torch.load(tmp_path / "state.pt", weights_only=True)
        for part, key in zip(second, saved, strict=True):
            part.load_state_dict(saved[key])
        assert equal(run(*second, range(9, 17)), expected)
        assert second[1].history == whole[1].history and second[1].multipliers == whole[1].multipliers


# --------------------------------------------------------------------------------------------- statistics
def update_stats(params, gradients, momentum=0.9, averaging=0.98, per_tensor=8192):
    """Statistics over groups of one tensor each, after every list of gradients."""
    statistics = Statistics(
        Sample([[p] for p in params], per_tensor, torch.device("cpu")), momentum, averaging
    )
    for g in gradients:
        statistics.update(g)
    return statistics


def grouped(statistics):
    zero = torch.zeros_like(statistics.sample.n)
    return statistics.groups(names=("g",) * len(zero), transfer=zero)


@pytest.mark.parametrize("r, tolerance", [(0.5, 0.04), (0.0025, 0.15)])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_synthetic_mean_and_noise_are_recovered(r, tolerance, scale):
    """g = mu + noise with ||mu||^2 / E||noise||^2 = r on 100k coordinates, of which a few thousand are
    kept.
    """
    rng = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.zeros(250, 400))
    mu = torch.randn(250, 400, generator=rng)
    mu *= scale * math.sqrt(r) / mu.square().mean().sqrt()
    steps = ([mu + scale * torch.randn(250, 400, generator=rng)] for _ in range(300))
    stats = grouped(update_stats([p], steps))
    estimate = (stats.S / (stats.E - stats.S)).item()
    assert estimate == pytest.approx(r, rel=tolerance)
    assert (stats.S / p.numel()).item() == pytest.approx(r * scale**2, rel=tolerance)
    assert stats.rms.item() == pytest.approx(scale * math.sqrt(1 + r), rel=0.02)


def test_pure_noise_has_no_signal():
    p, rng = nn.Parameter(torch.zeros(40_000)), torch.Generator().manual_seed(0)
    stats = grouped(update_stats([p], ([torch.randn(40_000, generator=rng)] for _ in range(200))))
    assert abs(stats.S / stats.E) < 2e-3  # the naive m^2 / v would show (1 - 0.9) / (1 + 0.9) = 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_exact_statistics_of_small_tensors(dtype):
    """Every coordinate sampled: S, E, Q, L1 equal their definitions; zeros, None, channels_last and 0-dim
    too.
    """
    shapes = [(7,), (3, 5), (4, 3, 3, 3), (), (300,)]
    params = [nn.Parameter(torch.ones(s, dtype=dtype)) for s in shapes]
    g = [torch.randn(s).to(dtype) for s in shapes]
    g[2], g[4] = g[2].to(memory_format=torch.channels_last), None
    g[1] = torch.zeros_like(g[1])
    stats = grouped(update_stats(params, [g, [None if x is None else 2 * x for x in g]]))
    exact = [torch.zeros(()) if x is None else x.double() for x in g]
    square = torch.stack([x.square().sum() for x in exact])
    for value, factor in ((stats.S, 2), (stats.E, 4), (stats.Q, 4)):
        assert torch.allclose(value, factor * square, rtol=1e-5)
    assert torch.allclose(stats.L1, 2 * torch.stack([x.abs().sum() for x in exact]), rtol=1e-5)
    assert torch.allclose(stats.theta**2, torch.tensor([float(math.prod(s)) for s in shapes]).double())


def test_sampled_norms_estimate_the_whole_and_cover_all_columns():
    p = nn.Parameter(torch.zeros(1280, 1280))
    sample = Sample([[p]], 8192, torch.device("cpu"))
    g = torch.rand(1280, 1280) * torch.linspace(0, 1, 1280)
    estimate = sample.per_group(sample.read([g]).square().sum(1)).item()
    assert estimate == pytest.approx(g.square().sum().item(), rel=0.05)
    assert len({k * sample.stride[0] % 1280 for k in range(8192)}) == 1280
    assert sample.read([g]).numel() <= 8192 + 128


def snapshot(control):
    state = control.state_dict()
    kept = {k: v for k, v in state["statistics"].items() if k not in ("ignored", "norm")}
    return {**kept, "scale": state["scale"]}, state["updates"], control.multipliers, len(control.history)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_steps_are_ignored(bad):
    model = Toy()
    control, optimizer = controlled(model, config(refresh=100))
    run(model, control, optimizer, range(5))
    before = snapshot(control)
    model.grads(5)
    [*model.parameters()][2].grad[1234] = bad  # one coordinate of one group spoils the step for all
    control.before_step(5)
    control.after_step(skipped=True)
    model.grads(6)
    control.before_step(6, finite=torch.tensor(False))
    control.after_step(skipped=True)
    after = snapshot(control)
    assert equal(before[0].values(), after[0].values()) and before[1:] == after[1:]
    assert control.meters()["control/ignored_steps"] == 2


def test_skipped_fp16_step_leaves_statistics_alone():
    """A GradScaler that overflows: the first steps are skipped, and a run without them is bit-equal."""
    histories = []
    for start in (2.0**126, 2.0**96):
        model = Toy()
        control, optimizer = controlled(model, config(refresh=3))
        scaler = torch.amp.GradScaler("cpu", init_scale=start, growth_interval=1000, backoff_factor=2.0**-30)
        step = 0
        while step < 12:
            model.grads(step)
            noise = [p.grad.clone() for p in model.parameters()]
            optimizer.zero_grad()
            scaler.scale(
                sum((p * g).sum() for p, g in zip(model.parameters(), noise, strict=True))
            ).backward()
            scaler.unscale_(optimizer)
            control.before_step(step)
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped = scaler.get_scale() < scale
            control.after_step(skipped)
            step += not skipped
        histories.append((control.history, [p.detach() for p in model.parameters()], snapshot(control)[0]))
    assert histories[0][0] == histories[1][0] and equal(histories[0][1], histories[1][1])
    assert equal(histories[0][2].values(), histories[1][2].values())


def test_nothing_changes_on_non_synchronised_micro_steps():
    model = Toy()
    control, optimizer = controlled(model, config(conflict=True))
    run(model, control, optimizer, range(7))
    before, rates = snapshot(control), [g["lr"] for g in optimizer.param_groups]
    for micro in range(3):
        model.grads(micro)
        kept = [p.grad.clone() for p in model.parameters()]
        control.after_backward(sync=False, source="element")
        assert equal(kept, [p.grad for p in model.parameters()])
    after = snapshot(control)
    assert equal(before[0].values(), after[0].values()) and before[1:] == after[1:]
    assert rates == [g["lr"] for g in optimizer.param_groups]


def test_accumulated_micro_batches_give_the_statistics_of_the_whole_batch():
    states = []
    for parts in (1, 4):
        model = Toy()
        control, optimizer = controlled(model, config())
        for step in range(9):
            model.grads(step)
            whole = [p.grad for p in model.parameters()]
            optimizer.zero_grad()
            for micro in range(parts):
                sum((p * g).sum() / parts for p, g in zip(model.parameters(), whole, strict=True)).backward()
                control.after_backward(sync=micro == parts - 1)
            control.before_step(step)
            optimizer.step()
            control.after_step()
        states.append((control.multipliers, snapshot(control)[0]))
    assert states[0][0] == states[1][0] and equal(states[0][1].values(), states[1][1].values())


# ----------------------------------------------------------------------------- multipliers on learning rates
def plain_adamw(steps):
    model = Toy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    for step in steps:
        model.grads(step)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    "settings",
    [GradientControlConfig(), config("uniform", conflict=True), config(bound=1.0), config(warmup=10**6),
     config("gsnr", bound=1.0, apply="gradient"), config("uniform", transform="remove_conflict")],
)  # fmt: skip
def test_all_ones_multipliers_are_bit_identical_to_plain_adamw(settings):
    model = Toy()
    assert equal(run(model, *controlled(model, settings), range(20)), plain_adamw(range(20)))


def test_uniform_does_nothing_at_all():
    model = Toy()
    control, optimizer = controlled(model, GradientControlConfig())
    run(model, control, optimizer, range(3))
    assert len(optimizer.param_groups) == 1 and control.meters() == {} and control.history == []
    assert "_sample" not in vars(control) and "_statistics" not in vars(control)


def test_schedule_times_multiplier_does_not_compound():
    """A recursive schedule (it multiplies the rate it finds) and a closed one, both seen as configured."""
    for make in (
        lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: 0.9**t),
    ):
        model = Toy()
        control, optimizer = controlled(model, config())
        scheduler = make(optimizer)
        for step in range(20):
            model.grads(step)
            control.before_step(step)
            for group in optimizer.param_groups:
                a = control.multipliers[group["name"]]
                assert group["lr"] == pytest.approx(1e-3 * 0.9**step * a, rel=1e-12)
                assert group["lr"] * group["weight_decay"] == pytest.approx(1e-5 * 0.9**step, rel=1e-12)
            optimizer.step()
            control.after_step()
            scheduler.step()
        assert all(g["lr"] == pytest.approx(1e-3 * 0.9**20) for g in optimizer.param_groups)
        assert all(g["weight_decay"] == 1e-2 for g in optimizer.param_groups)
        assert len(set(control.multipliers.values())) > 3


def test_scheduler_before_after_step_is_an_error():
    model = Toy()
    control, optimizer = controlled(model, config())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model.grads(0)
    control.before_step(0)
    optimizer.step()
    scheduler.step()
    with pytest.raises(RuntimeError, match="after_step before lr_scheduler.step"):
        control.after_step()


def test_a_step_given_up_by_the_loop_does_not_compound():
    model = Toy()
    control, optimizer = controlled(model, config())
    run(model, control, optimizer, range(11))
    used = []
    for _ in range(2):  # no after_step between: the loop dropped the step
        control.before_step(11)
        used.append([g["lr"] for g in optimizer.param_groups])
    assert used[0] == used[1] != [1e-3] * len(used[0])


def optimizers():
    import bitsandbytes

    return {
        "adamw": (torch.optim.AdamW, {}),
        "fused": (torch.optim.AdamW, {"fused": True}),
        "foreach": (torch.optim.AdamW, {"foreach": True}),
        "adamw8bit": (bitsandbytes.optim.AdamW8bit, {"min_8bit_size": 1024}),
        "sgd": (torch.optim.SGD, {}),
    }


@pytest.mark.parametrize("which", ["adamw", "fused", "foreach", "adamw8bit", "sgd"])
def test_update_is_the_multiple_and_decay_is_not(which):
    kind, options = optimizers()[which]
    steps = {}
    for decay in (0.0, 0.5):
        for scaled in (False, True):
            model = Toy((4096, 5000, 6000, 7000, 800))
            control, optimizer = controlled(model, config(), kind, lr=1e-4, weight_decay=decay, **options)
            if scaled:
                names = control.groups.names
                control.multipliers = dict(
                    zip(names, torch.linspace(0.5, 2.0, len(names)).tolist(), strict=True)
                )
            start = [p.detach().clone() for p in control.params]
            model.grads(0)
            control.before_step(0)
            optimizer.step()
            control.after_step()
            steps[decay, scaled] = [p.detach() - s for p, s in zip(control.params, start, strict=True)]
    decayed = zip(steps[0.5, True], steps[0.0, True], steps[0.5, False], steps[0.0, False], strict=True)
    for a, scaled, plain in zip(
        torch.linspace(0.5, 2.0, 5), steps[0.0, True], steps[0.0, False], strict=True
    ):
        assert torch.allclose(scaled, a * plain, rtol=2e-3, atol=5e-7)
    for with_a, without_a, with_1, without_1 in decayed:
        assert torch.allclose(with_a - without_a, with_1 - without_1, atol=1e-6)


@pytest.mark.parametrize("name", ["Prodigy", "DAdaptAdam", "DeepSpeedOptimizerWrapper"])
def test_rate_adapting_optimizers_are_refused_by_name(name):
    control = Controller(Toy(), config())
    optimizer = type(name, (torch.optim.SGD,), {})(control.param_groups(), lr=1.0)
    with pytest.raises(UserError, match=name):
        control.attach(optimizer)
    Controller(Toy(), GradientControlConfig()).attach(optimizer)  # uniform works with any


def test_adafactor_with_relative_step_is_refused_by_name():
    from transformers.optimization import Adafactor

    control = Controller(Toy(), config())
    with pytest.raises(UserError, match="Adafactor with relative_step"):
        control.attach(Adafactor(control.param_groups(), relative_step=True))
    control.attach(Adafactor(control.param_groups(), lr=1e-3, relative_step=False, scale_parameter=False))


def test_wrong_wiring_is_refused():
    model = Toy()
    control = Controller(model, config())
    model.grads(0)
    with pytest.raises(UserError, match=r"attach\(optimizer\)"):
        control.before_step(0)
    with pytest.raises(UserError, match="no parameter group"):
        control.attach(torch.optim.AdamW(model.parameters()))
    optimizer = torch.optim.AdamW(control.param_groups())
    other = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(UserError, match="another optimizer"):
        control.attach(optimizer, other)
    control.attach(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))
    with pytest.raises(UserError, match="written with other groups"):
        control.load_state_dict(Controller(Toy((1,) * 5), config()).state_dict())
    with pytest.raises(UserError, match="written with other rule"):
        control.load_state_dict(Controller(Toy(), config("gsnr")).state_dict())


def test_param_groups_follow_the_groups():
    model = Toy()
    control = Controller(model, config())
    groups = control.param_groups(0.1)
    assert [g["name"] for g in groups] == control.groups.names
    assert [sum(p.numel() for p in g["params"]) for g in groups] == control.groups.sizes
    assert all(g["weight_decay"] == 0.1 for g in groups) and "weight_decay" not in control.param_groups()[0]


def test_warm_up_fade_in_and_the_bound_on_each_refresh():
    model = Toy()
    control, optimizer = controlled(model, config("mean_abs", warmup=10, refresh=2, max_log_step=0.2))
    run(model, control, optimizer, range(60))
    steps = [entry["step"] for entry in control.history]
    a = torch.tensor([[*entry["multipliers"].values()] for entry in control.history])
    assert steps[:3] == [0, 12, 14] and (a[:2] == 1).all()  # computed at 10 with fade 0, in force from 12
    assert (a.log().diff(dim=0).abs() <= 0.2 + 1e-6).all() and (a[-1] != 1).any()
    assert control.history[-1]["multipliers"] == control.multipliers


def test_combination_is_a_weighted_sum_of_centred_logs():
    stats = stats_of()
    parts = [gc.combine(stats, {name: (1.0, {})}) for name in ("prior", "gsnr")]
    both = gc.combine(stats, gc.rules_of("prior+gsnr", {"gsnr": {"floor": 1e-3}}, {"gsnr": 0.5}))
    assert torch.allclose(both, parts[0] + 0.5 * parts[1])
    order = parts[1].argsort()
    mass = stats.n[order].cumsum(0) / stats.n.sum()
    assert parts[1][order][(mass >= 0.5).nonzero()[0]] == 0  # the weighted median is the neutral point


def test_prior_is_the_product_of_its_rows():
    log_x = gc.prior(stats_of())
    assert log_x.tolist() == pytest.approx([2.0 * 1.25, 1.25, 1.25 * 1.25, 1.25 * 0.75, 0.5, 1.0])
    assert gc.prior(stats_of(), drop=["*.xattn.v"])[0] == 1.25
    with pytest.raises(UserError, match="no row 'xattn.v'"):
        Controller(Toy(), config("prior", options={"drop": ["xattn.v"]}))
    with pytest.raises(UserError, match="no file nowhere.yaml"):
        Controller(Toy(), config("prior", options={"table": "nowhere.yaml"}))


def test_placebo_shuffles_the_same_values_and_leaves_other():
    stats = stats_of(names=("mid.ff", "mid.xattn.v", "up1.ff", "down0.ff", "stem.norm", OTHER))
    base = gc.combine(stats, {"prior": (1.0, {})}).exp()
    shuffled = [gc.placebo(copy.copy(stats), of="prior")]
    shuffled += [gc.placebo(stats_of(names=stats.names, seed=seed), of="prior") for seed in range(8)]
    for x in shuffled:
        assert torch.equal(x.sort().values, base.sort().values) and x[-1] == base[-1]
    assert torch.equal(shuffled[0], shuffled[1]) and any(not torch.equal(x, base) for x in shuffled)


def test_hypergradient_favours_groups_whose_updates_serve_rehearsals():
    model = Toy()
    control, optimizer = controlled(model, config("hypergradient"), torch.optim.SGD, lr=0.1, weight_decay=0.0)
    for step in range(40):
        for i, p in enumerate(model.parameters()):  # rehearsals agree with training in even groups only
            sign = -1.0 if step % 2 and i % 2 else 1.0
            p.grad = sign * torch.ones_like(p)
        control.after_backward(True, "rehearsal" if step % 2 else "element")
        control.before_step(step)
        optimizer.step()
        control.after_step()
    by_tensor = {
        next(iter(m)): a
        for m, a in zip(control.groups.members.values(), control.multipliers.values(), strict=True)
    }
    a = [by_tensor[name] for name, _ in model.named_parameters()]
    assert min(a[0::2]) > 1 > max(a[1::2])


def test_config_errors_name_the_key():
    for settings, message in [
        (config("gnsr"), "unknown name 'gnsr'"),
        (
            config("gsnr", options={"betta": 1}),
            "gsnr: unknown option 'betta'; did you mean 'beta'. it takes: ",
        ),
        (config("prior+gsnr", options={"floor": 1}), "options: 'floor' is not a rule of prior.gsnr"),
        (config("gsnr", weights={"prior": 1}), "weights: 'prior'"),
        (config("gsnr", bound=0.5), "bound: must be at least 1, got 0.5"),
        (config("gsnr", refresh=0), "refresh: must be at least 1"),
        (config("gsnr", apply="grad"), "apply: must be lr or gradient"),
        (config("gsnr", transform="pcgrad"), "unknown name 'pcgrad'"),
        (config("placebo", options={"of": "placebo"}), "must be another rule"),
    ]:
        with pytest.raises(UserError, match=message):
            Controller(Toy(), settings)


# ----------------------------------------------------------------------------------- no host sync in the step
@pytest.mark.parametrize("name", [*ACTIVE, "prior+gsnr+hypergradient"])
@pytest.mark.parametrize("apply", ["lr", "gradient"])
def test_no_host_sync_in_the_step(name, apply):
    """Under FakeTensorMode reading a value raises. Landing reads a copy that is a whole refresh old."""
    with FakeTensorMode():
        model = Toy()
        control, optimizer = controlled(
            model, config(name, apply=apply, refresh=3, warmup=0, conflict=True), torch.optim.SGD
        )
        for step in range(5):
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            control.after_backward(False, "element")
            control.after_backward(True, "rehearsal")
            control.before_step(step, finite=torch.tensor(True))
            optimizer.step()
            control.after_step()
            control.meters()
        assert control._pending.peek() is not None  # a refresh was launched on the way


def test_no_host_sync_in_remove_conflict_and_the_original_rule():
    with FakeTensorMode():
        assert TRANSFORMS["remove_conflict"](torch.randn(3, 3)).shape == (3,)
        grads = [torch.randn(4, 4), None, torch.randn(3)]
        assert adjust_gradient_scale(None, torch.ones(3), grads).shape == (3,)


# --------------------------------------------------------------------------------------- sources, transforms
@pytest.mark.parametrize("name", TRANSFORMS)
class TestEveryTransform:
    def weights(self, name, gram):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return TRANSFORMS[name](gram)
            except (ImportError, NameError):
                pytest.skip("torchjd[quadprog-projector] is an optional extra")

    def test_equal_gradients_keep_the_plain_sum(self, name):
        weights = self.weights(name, torch.ones(3, 3).double())
        assert weights.sum().item() == pytest.approx(3, rel=1e-3) and (weights >= -1e-6).all()

    def test_takes_a_silent_source(self, name):
        assert self.weights(name, torch.diag(torch.tensor([1.0, 0.0])).double()).isfinite().all()

    @pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
    def test_does_not_see_the_scale(self, name, scale):
        gram = torch.tensor([[2.0, -0.5], [-0.5, 1.0]]).double()
        assert torch.allclose(
            self.weights(name, scale * gram), self.weights(name, gram), rtol=1e-2, atol=1e-3
        )


def test_a_missing_extra_is_a_user_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchjd.aggregation", None)
    with pytest.raises(UserError, match=r"'upgrad' needs `pip install 'torchjd"):
        Controller(Toy(), config("uniform", transform="upgrad"))


def test_remove_conflict_equals_gradient_surgery():
    g, h = torch.tensor([1.0, 0.5, 0.0]), torch.tensor([-1.0, 1.0, 0.2])
    gram = torch.stack([g, h]) @ torch.stack([g, h]).T
    weights = TRANSFORMS["remove_conflict"](gram)
    surgery = (g - (g @ h) / (h @ h) * h) + (h - (h @ g) / (g @ g) * g)
    assert g @ h < 0 and torch.allclose(weights[0] * g + weights[1] * h, surgery)
    agreeing = torch.tensor([[1.0, 0.2], [0.2, 1.0]])
    assert torch.equal(TRANSFORMS["remove_conflict"](agreeing), torch.ones(2))


@pytest.mark.parametrize("loss_scale", [1.0, 2.0**16])
@pytest.mark.parametrize("transform", ["none", "remove_conflict"])
def test_sources_are_told_apart_and_recombined(transform, loss_scale):
    """Three micro-batches, two sources, a loss scale taken out before before_step."""
    model = Toy()
    control, optimizer = controlled(model, config("uniform", conflict=True, transform=transform))
    rng = torch.Generator().manual_seed(5)
    g = [[torch.randn(p.shape, generator=rng) for p in model.parameters()] for _ in range(2)]
    g.append([-0.5 * a + 0.3 * torch.randn(a.shape, generator=rng) for a in g[0]])
    for i, source in enumerate(["element", "element", "clean"]):
        sum(loss_scale * (p * x).sum() for p, x in zip(model.parameters(), g[i], strict=True)).backward()
        control.after_backward(sync=i == 2, source=source)
    for p in model.parameters():
        p.grad /= loss_scale
    total = [p.grad.clone() for p in model.parameters()]
    control.before_step(0)
    e, c = (
        torch.cat([x.flatten() for x in part])
        for part in ([a + b for a, b in zip(*g[:2], strict=True)], g[2])
    )
    cosine = (e @ c / (e.norm() * c.norm())).item()
    assert control.meters()["control/cos/clean-element"].item() == pytest.approx(cosine, abs=1e-5)
    got = torch.cat([p.grad.flatten() for p in model.parameters()])
    if transform == "none":
        assert cosine < 0 and equal(total, [p.grad for p in model.parameters()])
    else:
        expected = (e - (e @ c) / (c @ c) * c) + (c - (c @ e) / (e @ e) * e)
        assert torch.allclose(got, expected, atol=1e-5)


def test_accelerate_loop_with_accumulation():
    """The order of the training loop, through accelerate's wrappers, on a real (tiny) UNet."""
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    unet = tiny_unet()
    control = Controller(unet, config(conflict=True))
    optimizer = torch.optim.AdamW(control.param_groups(1e-2), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    unet, optimizer, scheduler = accelerator.prepare(unet, optimizer, scheduler)
    control.attach(optimizer, scheduler)
    x, text, step = torch.randn(2, 4, 8, 8), torch.randn(2, 4, 32), 0
    for micro in range(16):
        with accelerator.accumulate(unet):
            loss = (unet(x, torch.tensor([9, 200]), text).sample - x).square().mean()
            accelerator.backward(loss)
            sync = accelerator.sync_gradients
            control.after_backward(sync, "element" if micro % 2 else "clean")
            if sync:
                control.before_step(step)
                accelerator.clip_grad_norm_(unet.parameters(), 1.0)
            optimizer.step()
            if sync:
                control.after_step(optimizer.step_was_skipped)
                step += 1
            scheduler.step()
            optimizer.zero_grad()
    assert control.updates == 8 and len(control.history) == 4
    assert control.meters()["control/cos/clean-element"] > 0.9
    assert all(g["lr"] == pytest.approx(1e-3 / 9) for g in optimizer.param_groups)


# ------------------------------------------------------------------------------- the rule this one replaces
def original(model, layer_scales, current_gradients, beta=0.9):
    """The user's function, line for line."""
    param_grad_means = []
    for grad in current_gradients:
        if grad is not None:
            param_grad_means.append(grad.abs().mean())
        else:
            param_grad_means.append(torch.tensor(0.0, device=layer_scales.device))
    param_grad_means = torch.stack(param_grad_means)
    scaling_factors = param_grad_means / (param_grad_means.sum() + 1e-10)
    return layer_scales * beta + scaling_factors * (1 - beta)


def test_adjust_gradient_scale_is_the_users_rule():
    rng, ours, theirs = torch.Generator().manual_seed(0), torch.ones(4), torch.ones(4)
    for _ in range(20):
        grads = [torch.randn(5, 7, generator=rng), None, 3 * torch.randn(11, generator=rng), torch.zeros(2)]
        ours = adjust_gradient_scale(None, ours, grads)
        theirs = original(None, theirs, grads)
    assert torch.allclose(ours, theirs, rtol=1e-6)


def test_adjust_gradient_scale_edge_cases():
    scales = torch.tensor([0.5, 0.7])
    assert torch.equal(adjust_gradient_scale(None, scales, [None, None]), scales)
    assert torch.equal(adjust_gradient_scale(None, scales, [torch.zeros(3), torch.zeros(2)]), scales)
    for bad in (math.nan, math.inf):  # the original stays NaN for ever
        assert torch.equal(adjust_gradient_scale(None, scales, [torch.tensor([bad]), torch.ones(2)]), scales)
    tiny = adjust_gradient_scale(None, scales, [torch.full((3,), 1e-12), torch.full((2,), 3e-12)])
    assert torch.allclose(
        tiny, 0.9 * scales + 0.1 * torch.tensor([0.25, 0.75])
    )  # the original's 1e-10 hides these
    halves = [torch.full((3,), 3e4).half(), torch.empty(0)]
    assert torch.allclose(
        adjust_gradient_scale(None, scales, halves), 0.9 * scales + torch.tensor([0.1, 0.0])
    )
    assert adjust_gradient_scale(None, torch.ones(0), []).shape == (0,)
    with pytest.raises(ValueError, match="2 layer_scales need as many gradients, got 1"):
        adjust_gradient_scale(None, scales, [torch.ones(1)])


def displacement(scale_of, steps=60):
    model = Toy()
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for step in range(steps):
        model.grads(step, scale=30.0)  # scaled or not, well above Adam's eps
        for i, p in enumerate(model.parameters()):
            p.grad *= scale_of(i, step)
        optimizer.step()
    return [p.detach() - s for p, s in zip(model.parameters(), start, strict=True)]


@pytest.mark.parametrize("scale", [1e-3, 10.0])
def test_constant_gradient_scaling_does_not_move_adamw(scale):
    for scaled, plain in zip(displacement(lambda i, t: scale), displacement(lambda i, t: 1.0), strict=True):
        assert (scaled - plain).norm() / plain.norm() < 1e-4


def test_why_adjust_gradient_scale_was_replaced():
    """Its settled scales change nothing under AdamW, are 1/N on average, and undo the clipping threshold."""
    model, scales = Toy(), torch.ones(5)
    for step in range(200):
        model.grads(step)
        scales = adjust_gradient_scale(model, scales, [p.grad for p in model.parameters()])
    assert scales.mean().item() == pytest.approx(1 / 5, rel=1e-4) and scales.max() / scales.min() > 3
    for scaled, plain in zip(
        displacement(lambda i, t: scales[i]), displacement(lambda i, t: 1.0), strict=True
    ):
        assert (scaled - plain).norm() / plain.norm() < 1e-4
    before = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    after = nn.utils.get_total_norm([s * p.grad for s, p in zip(scales, model.parameters(), strict=True)])
    assert after < before / 2
    control, optimizer = controlled(model, config("gsnr"))  # its successor moves AdamW
    moved, plain = run(model, control, optimizer, range(60)), displacement(lambda i, t: 1.0)
    starts = [p.detach() for p in Toy().parameters()]
    change = [(m - s - d).norm() / d.norm() for m, s, d in zip(moved, starts, plain, strict=True)]
    assert max(change) > 0.2


def test_gradient_mode_scales_once_per_optimizer_step(caplog):
    model = Toy()
    control, optimizer = controlled(model, config("mean_abs", apply="gradient"))
    assert "next to no effect" in caplog.text and len(optimizer.param_groups) == 1
    run(model, control, optimizer, range(12))
    model.grads(12)
    before = [p.grad.clone() for p in control.params]
    control.params[0].grad = None
    control.before_step(12)
    a = [*control.multipliers.values()]
    assert control.params[0].grad is None and len(set(a)) == 5
    assert equal(
        [p.grad for p in control.params[1:]], [g * x for g, x in zip(before[1:], a[1:], strict=True)]
    )


def test_hypergradient_forgets_the_update_of_a_skipped_step():
    model = Toy()
    control, optimizer = controlled(model, config("hypergradient"))
    run(model, control, optimizer, range(4))
    learned = control.state_dict()["transfer"]
    assert learned.any() and control._transfer.update.any()
    model.grads(4)
    control.before_step(4)
    control.after_step(skipped=True)
    control.after_backward(True, "rehearsal")
    control.before_step(4)
    assert torch.equal(control.state_dict()["transfer"], learned)


@pytest.mark.parametrize("scale", [1.0, 2.0**12 / 3])
def test_a_mixed_micro_batch_is_split_by_source(scale):
    """The banked parts are the sources' own gradients; what is accumulated is that of the whole loss."""
    model = Toy()
    control, _ = controlled(model, config("uniform", conflict=True))
    directions = torch.randn(4, sum(p.numel() for p in model.parameters()), generator=torch.Generator().manual_seed(1))
    losses = directions @ torch.cat([p.flatten() for p in model.parameters()])
    source = control.before_backward(losses, ["rehearsal", "element", "clean", "element"], scale)
    (losses.mean() * scale).backward()
    control.after_backward(True, source)
    assert source == "rehearsal"
    total = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert torch.allclose(total, directions.mean(0) * scale, rtol=1e-4, atol=1e-5 * scale)
    control.before_step(0)
    for a, b, x, y in (("clean", "element", directions[2], directions[1] + directions[3]),
                       ("element", "rehearsal", directions[1] + directions[3], directions[0])):  # fmt: skip
        cosine = torch.nn.functional.cosine_similarity(x, y, dim=0).item()
        assert control.meters()[f"control/cos/{a}-{b}"].item() == pytest.approx(cosine, abs=1e-4)


def test_the_hypergradient_asks_for_one_more_backward_only(monkeypatch):
    model, calls = Toy(), []
    control, _ = controlled(model, config("hypergradient"))
    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: calls.append(1) or grad(*a, **k))
    losses = torch.stack([(i + 1) * sum(p.sum() for p in model.parameters()) for i in range(4)])
    assert control.before_backward(losses, ["clean", "element", "rehearsal", "element"]) == "rehearsal"
    assert len(calls) == 1
    assert Controller(Toy(), config("uniform")).before_backward(losses, ["a"] * 4) == "mixed"
