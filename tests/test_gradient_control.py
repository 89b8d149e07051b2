"""Gradient control: the named properties of the groups, the statistics, the rules and the controller."""

import copy
import inspect

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import gradient_control as gc
from gradient_control import (
    SCALE_RULES,
    Controller,
    GradientControlConfig,
    adjust_gradient_scale,
)
from silentbad.control.spectral import SpectralAdamW
from silentbad.errors import UserError
from silentbad.model.groups import OTHER
from tests.tiny import tiny_unet
from tests.toy import GSNR, PRIOR, RATES, Toy, config, controlled, equal, run, stats_of

# ------------------------------------------------------------------------------------------------- helpers
BUILT_IN = [name for name in SCALE_RULES if name not in ("uniform", "placebo")]
ACTIVE = [*BUILT_IN, *RATES]

# ---------------------------------------------------------------------------------- contract: every rule


EVERY = [*SCALE_RULES, *RATES]
ID = {"ids": lambda name: name.rpartition(":")[2]}
OPTIONS = {"placebo": {"of": GSNR}}


class RuleContract:
    """What every scale rule keeps, those of tests/test_contract.py too."""

    def settings(self, name):
        return config(name, options=OPTIONS.get(name, {}))

    def test_is_short_and_says_what_it_is(self, name):
        rule = SCALE_RULES[name]
        assert len(inspect.getsource(rule).rstrip().split("\n")) <= 15 and rule.__doc__

    @pytest.mark.parametrize("scale", [1e-12, 1e-6, 1.0, 1e6, 1e12])
    def test_is_positive_and_does_not_see_the_scale_of_the_loss(self, name, scale):
        x, one = (gc.combine(stats_of(s), {name: (1.0, OPTIONS.get(name, {}))}) for s in (scale, 1.0))
        assert x.isfinite().all() and torch.allclose(x, one, atol=1e-9)

    def test_takes_degenerate_statistics(self, name):
        zero = torch.zeros(6).double()
        for bad in (dict(S=zero, E=zero, Q=zero, L1=zero), dict(theta=zero), dict(S=-stats_of().S)):
            assert gc.combine(stats_of(**bad), {name: (1.0, OPTIONS.get(name, {}))}).isfinite().all()
        nan = stats_of(S=zero + torch.nan, E=zero + torch.nan, Q=zero + torch.nan, L1=zero + torch.inf)
        assert gc.combine(nan, {name: (1.0, OPTIONS.get(name, {}))}).isfinite().all()

    def test_leaves_its_statistics_alone(self, name):
        stats, same = stats_of(), stats_of()
        SCALE_RULES[name](stats, **OPTIONS.get(name, {}))
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
        parts = dict(zip(("model", "control", "optimizer"), (part.state_dict() for part in first), strict=True))
        torch.save(parts, tmp_path / "state.pt")
        second, saved = fresh(), torch.load(tmp_path / "state.pt", weights_only=True)
        for part, key in zip(second, saved, strict=True):
            part.load_state_dict(saved[key])
        assert equal(run(*second, range(9, 17)), expected)
        assert second[1].history == whole[1].history and second[1].multipliers == whole[1].multipliers


@pytest.mark.parametrize("name", EVERY, **ID)
class TestEveryRule(RuleContract):
    pass


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
    [
        GradientControlConfig(),
        config("uniform", conflict=True),
        config(bound=1.0),
        config(warmup=10**6),
        config(GSNR, bound=1.0, apply="gradient"),
    ],
)
def test_all_ones_multipliers_are_bit_identical_to_plain_adamw(settings):
    model = Toy()
    assert equal(run(model, *controlled(model, settings), range(20)), plain_adamw(range(20)))


def test_uniform_does_nothing_at_all():
    model = Toy()
    control, optimizer = controlled(model, GradientControlConfig())
    run(model, control, optimizer, range(3))
    assert len(optimizer.param_groups) == 1 and control.meters() == {} and control.history == []
    assert list(control) == []
    assert "statistics" not in vars(control.layer_rates) and not control.layer_rates.sample.cache_info().currsize


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
                control.layer_rates.multipliers = dict(
                    zip(names, torch.linspace(0.5, 2.0, len(names)).tolist(), strict=True)
                )
            start = [p.detach().clone() for p in control.params]
            model.grads(0)
            control.before_step(0)
            optimizer.step()
            control.after_step()
            steps[decay, scaled] = [p.detach() - s for p, s in zip(control.params, start, strict=True)]
    decayed = zip(steps[0.5, True], steps[0.0, True], steps[0.5, False], steps[0.0, False], strict=True)
    for a, scaled, plain in zip(torch.linspace(0.5, 2.0, 5), steps[0.0, True], steps[0.0, False], strict=True):
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


def test_an_optimizer_without_spectral_updates_is_refused_where_they_are_asked_for():
    """AdamW takes the mark of their groups and does nothing with it."""
    control = Controller(Toy(), GradientControlConfig(spectral=True))
    with pytest.raises(UserError, match="AdamW makes no spectral updates"):
        control.attach(torch.optim.AdamW(control.param_groups()))
    control.attach(SpectralAdamW(control.param_groups(), lr=1e-3))


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
        control.load_state_dict(Controller(Toy(), config(GSNR)).state_dict())


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
    parts = [gc.combine(stats, {name: (1.0, {})}) for name in (PRIOR, GSNR)]
    both = gc.combine(stats, gc.rules_of(f"{PRIOR}+{GSNR}", {GSNR: {"floor": 1e-3}}, {GSNR: 0.5}, SCALE_RULES))
    assert torch.allclose(both, parts[0] + 0.5 * parts[1])
    order = parts[1].argsort()
    mass = stats.n[order].cumsum(0) / stats.n.sum()
    assert parts[1][order][(mass >= 0.5).nonzero()[0]] == 0  # the weighted median is the neutral point


def test_prior_is_the_product_of_its_rows():
    log_x = SCALE_RULES[PRIOR](stats_of())
    assert log_x.tolist() == pytest.approx([2.0 * 1.25, 1.25, 1.25 * 1.25, 1.25 * 0.75, 0.5, 1.0])
    assert SCALE_RULES[PRIOR](stats_of(), drop=["*.xattn.v"])[0] == 1.25
    with pytest.raises(UserError, match="no row 'xattn.v'"):
        Controller(Toy(), config(PRIOR, options={"drop": ["xattn.v"]}))
    for table in ("nowhere.yaml", "n" * 300):
        with pytest.raises(UserError, match=f"prior: option 'table': no file {table}"):
            Controller(Toy(), config(PRIOR, options={"table": table}))


def test_the_rows_of_prior_are_of_a_unet(tmp_path):
    (tmp_path / "t.yaml").write_text('- {match: "*", pi: 2}\n')
    stats = stats_of(groups=2, names=("block0.ff", "block1.ff"))
    with pytest.raises(UserError, match="about a UNet"):
        SCALE_RULES[PRIOR](stats)
    assert SCALE_RULES[PRIOR](stats, table=str(tmp_path / "t.yaml")).tolist() == [2, 2]


def test_placebo_shuffles_the_same_values_and_leaves_other():
    stats = stats_of(names=("mid.ff", "mid.xattn.v", "up1.ff", "down0.ff", "stem.norm", OTHER))
    base = gc.combine(stats, {PRIOR: (1.0, {})}).exp()
    shuffled = [gc.placebo(copy.copy(stats), of=PRIOR)]
    shuffled += [gc.placebo(stats_of(names=stats.names, seed=seed), of=PRIOR) for seed in range(8)]
    for x in shuffled:
        assert torch.equal(x.sort().values, base.sort().values) and x[-1] == base[-1]
    assert torch.equal(shuffled[0], shuffled[1]) and any(not torch.equal(x, base) for x in shuffled)


def test_config_errors_name_the_key():
    for settings, message in [
        (config("mean_ab"), "unknown name 'mean_ab'; did you mean 'mean_abs'"),
        (config("gsnr"), "gsnr is an experiment in a file of its own now; use experiments/gsnr.py:gsnr"),
        (config("placebo"), "option 'of' is missing"),
        (
            config(GSNR, options={"betta": 1}),
            "gsnr: unknown option 'betta'; did you mean 'beta'. it takes: ",
        ),
        (config("mean_abs+mean_abs"), "mean_abs.mean_abs names a part twice"),
        (config(f"{PRIOR}+{GSNR}", options={"floor": 1}), "options: 'floor' is no part of .*prior.*gsnr"),
        (config(GSNR, weights={"prior": 1}), "weights: 'prior'"),
        (config(GSNR, bound=0.5), "bound: must be at least 1, got 0.5"),
        (config(GSNR, refresh=0), "refresh: must be at least 1"),
        (config(GSNR, apply="grad"), "apply: must be lr or gradient"),
        (config("placebo", options={"of": "placebo"}), "must be another rule"),
    ]:
        with pytest.raises(UserError, match=message):
            Controller(Toy(), settings)


# ----------------------------------------------------------------------------------- no host sync in the step


@pytest.mark.parametrize("name", [*ACTIVE, f"{PRIOR}+{GSNR}"], **ID)
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
        assert control.layer_rates.computed.state_dict()["pending"] is not None  # a refresh was launched on the way


def test_no_host_sync_in_the_original_rule():
    with FakeTensorMode():
        grads = [torch.randn(4, 4), None, torch.randn(3)]
        assert adjust_gradient_scale(None, torch.ones(3), grads).shape == (3,)


# --------------------------------------------------------------------------------------- sources


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
                control.after_step(step, optimizer.step_was_skipped)
                step += 1
            scheduler.step()
            optimizer.zero_grad()
    assert control.layer_rates.updates == 8 and len(control.history) == 4
    assert control.meters()["control/cos/clean-element"] > 0.9
    assert all(g["lr"] == pytest.approx(1e-3 / 9) for g in optimizer.param_groups)


def test_each_source_but_the_last_asks_for_one_more_backward(monkeypatch):
    model, calls = Toy(), []
    control, _ = controlled(model, config("uniform", conflict=True))
    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: calls.append(1) or grad(*a, **k))
    losses = torch.stack([(i + 1) * sum(p.sum() for p in model.parameters()) for i in range(4)])
    control.before_backward(losses, ["clean", "element", "rehearsal", "element"])
    assert control.source_conflict.remaining == "rehearsal"
    assert len(calls) == 2
    Controller(Toy(), config("uniform")).before_backward(losses, ["a"] * 4)
    assert len(calls) == 2
