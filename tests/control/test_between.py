"""Factors between sources: every rule, the exact gradient, levels, resume, refusals."""

import inspect

import pytest
import torch

from gradient_control import SOURCE_RULES, Controller, GradientControlConfig
from silentbad.control.between import BetweenConfig
from silentbad.control.statistics import centred
from silentbad.data.loader import chunks
from silentbad.errors import UserError
from silentbad.settings.types import check_values
from tests.toy import CONTRAST, REMOVE_CONFLICT, Toy, config, controlled, equal, experiment, stats_of

OPTIONS = {"placebo": {"of": CONTRAST}}
SOON = {"warmup": 2, "refresh": 2, "max_log_step": 1.0}
SOURCES = ("clean", "element", "clean", "rehearsal", "clean")  # of the samples of a step


def settings(name, **more):
    levels = {"clean": 0.1, "rehearsal": 0.5}
    more = {"options": OPTIONS.get(name, {}), **more}
    return config("uniform", between=BetweenConfig(**{"name": name, "levels": levels, **SOON, **more}))


def gradients(model, step):
    """Each sample's gradient: its direction is steady in some tensors for elements, in others for clean pictures."""
    of_sources = []
    for j, source in enumerate(SOURCES):
        rng = torch.Generator().manual_seed(100 * step + j)
        steady = [0.0 if source == "rehearsal" else 1.0 + (i if source == "element" else 5 - i) for i in range(5)]
        of_sources.append(
            [torch.randn(p.shape, generator=rng) + s for p, s in zip(model.parameters(), steady, strict=True)]
        )
    return of_sources


def losses_of(model, gradients):
    return torch.stack(
        [sum((p * g).sum() for p, g in zip(model.parameters(), gradient, strict=True)) for gradient in gradients]
    )


def walk(model, control, optimizer, steps, scale=1.0):
    """Steps of one part a source, as the training loop takes them."""
    for step in steps:
        of_sources = gradients(model, step)
        parts = chunks(
            {"text": list(SOURCES), "role": list(SOURCES), "own": list(range(5))}, None, control.one_source_per_backward
        )
        for k, (share, part) in enumerate(parts):
            losses = control.weight_losses(losses_of(model, [of_sources[j] for j in part["own"]]), part["role"])
            control.before_backward(losses, part["role"], share * scale)
            (losses.mean() * share * scale).backward()
            control.after_backward(k == len(parts) - 1)
        for p in model.parameters():
            p.grad /= scale
        yield of_sources
        control.before_step(step)
        optimizer.step()
        control.after_step()
        optimizer.zero_grad()


def walked(*args, **more):
    for _ in walk(*args, **more):
        pass


@pytest.mark.parametrize(
    "name", [*SOURCE_RULES, CONTRAST, experiment("equalise")], ids=lambda name: name.rpartition(":")[2]
)
class TestEveryRule:
    def test_is_short_and_says_what_it_is(self, name):
        rule = SOURCE_RULES[name]
        assert len(inspect.getsource(rule).rstrip().split("\n")) <= 15 and rule.__doc__

    @pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
    def test_is_positive_and_does_not_see_the_loss_scale(self, name, scale):
        def factors(scale):
            own, element = stats_of(scale), stats_of(scale, S=stats_of(scale).S.flip(0))
            raw = SOURCE_RULES[name](own, element, **OPTIONS.get(name, {}))
            assert raw.shape == (6,) and (raw > 0).all()
            return centred(raw.log(), stats_of().n)

        assert torch.allclose(factors(scale), factors(1.0), atol=1e-9)

    def test_takes_degenerate_statistics(self, name):
        zero = torch.zeros(6).double()
        for bad in (dict(S=zero, E=zero, Q=zero), dict(S=-stats_of().S), dict(S=zero + torch.nan, E=zero + torch.nan)):
            for pair in ((stats_of(**bad), stats_of()), (stats_of(), stats_of(**bad))):
                assert centred(SOURCE_RULES[name](*pair, **OPTIONS.get(name, {})).log(), stats_of().n).isfinite().all()

    def test_refuses_an_unknown_option_by_name(self, name):
        with pytest.raises(UserError, match="unknown option 'betta'"):
            Controller(Toy(), settings(name, options={"betta": 1}))

    def test_keeps_bounds_and_level(self, name):
        model = Toy()
        control, optimizer = controlled(model, settings(name, bound=3.0))
        walked(model, control, optimizer, range(16))
        n = torch.tensor(control.groups.sizes).double()
        for source in ("clean", "rehearsal"):
            a = torch.tensor(control.source_weights.layers[source]).double()
            assert a.min() >= 1 / 3 - 1e-6 and a.max() <= 3 + 1e-6
            assert ((n * a**2).sum() / n.sum()).item() == pytest.approx(1, abs=1e-6)
        assert control.source_weights.layers["element"] == [1.0] * 5
        assert name == "uniform" or a.unique().numel() > 1

    def test_gradient_is_the_weighted_sum_of_the_sources(self, name):
        model = Toy()
        control, optimizer = controlled(model, settings(name))
        for of_sources in walk(model, control, optimizer, range(8), scale=2.0**9):
            between = control.source_weights
            factor = {s: [between.level(s) * a for a in between.layers[s]] for s in between.names}
            for i, (group, p) in enumerate(zip(control.groups, model.parameters(), strict=True)):
                assert group[0] is p
                exact = sum(factor[s][i] * gradient[i] for s, gradient in zip(SOURCES, of_sources, strict=True)) / len(
                    SOURCES
                )
                torch.testing.assert_close(p.grad, exact, rtol=1e-4, atol=1e-5)

    def test_resume_is_bit_exact(self, name, tmp_path):
        def fresh():
            model = Toy()
            return model, *controlled(model, settings(name, ramp=12))

        whole, first, second = fresh(), fresh(), fresh()
        walked(*whole, range(12))
        walked(*first, range(7))
        torch.save([part.state_dict() for part in first], tmp_path / "state.pt")
        for part, saved in zip(second, torch.load(tmp_path / "state.pt", weights_only=True), strict=True):
            part.load_state_dict(saved)
        walked(*second, range(7, 12))
        assert equal(whole[0].parameters(), second[0].parameters())
        assert whole[1].source_weights.layers == second[1].source_weights.layers
        assert whole[1].meters().keys() == second[1].meters().keys()


def test_contrast_quietens_clean_where_elements_speak():
    model = Toy()
    control, optimizer = controlled(model, settings(CONTRAST))
    walked(model, control, optimizer, range(24))
    clean = control.source_weights.layers["clean"]
    assert clean[0] > clean[2] > clean[4]  # elements are steady in the last tensors, clean pictures in the first
    inverse, optimizer = controlled(Toy(), settings(CONTRAST, options={"power": -0.5}))
    walked(inverse._model, inverse, optimizer, range(24))
    assert inverse.source_weights.layers["clean"][0] < inverse.source_weights.layers["clean"][4]


def test_placebo_has_the_factors_in_other_places():
    factors = {}
    for name in (CONTRAST, "placebo"):
        model = Toy()
        control, optimizer = controlled(model, settings(name, bound=100.0, max_log_step=9.0))
        walked(model, control, optimizer, range(20))
        factors[name] = control.source_weights.layers["clean"]
    assert factors[CONTRAST] != factors["placebo"]


def test_layer_uniform_hooks_equal_loss_weights():
    """The two mechanisms meet where the layers' factors are all one."""
    ends = []
    for name, more in (("uniform", {}), (CONTRAST, {"bound": 1.0})):
        model = Toy()
        control, _ = controlled(model, settings(name, **more))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        control.attach(optimizer)
        walked(model, control, optimizer, range(8))
        ends.append([p.detach() for p in model.parameters()])
        assert control.one_source_per_backward == (name != "uniform")
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_off_does_nothing_at_all():
    control, _ = controlled(Toy(), GradientControlConfig())
    losses = torch.ones(2)
    assert control.weight_losses(losses, ["clean", "element"]) is losses and not control.one_source_per_backward
    assert "between" not in control.state_dict()
    assert not any(p._backward_hooks for p in control.params)


def test_level_falls_and_is_released():
    between = Controller(Toy(), settings("uniform", levels={"clean": 0.01}, ramp=10, release=30)).source_weights
    seen = []
    for _ in range(60):
        seen.append(between.level("clean"))
        between.after_step(0)
    assert seen[0] == 1 and seen[5] == pytest.approx(0.1) and seen[10:30] == pytest.approx([0.01] * 20)
    assert seen[35] == pytest.approx(0.1) and seen[40:] == pytest.approx([1.0] * 20)
    assert between.level("element") == 1


def test_a_level_without_a_ramp_is_released_at_once():
    between = Controller(Toy(), settings("uniform", levels={"clean": 0.01}, release=3)).source_weights
    seen = []
    for _ in range(5):
        seen.append(between.level("clean"))
        between.after_step(0)
    assert seen == [0.01] * 3 + [1.0] * 2


def test_a_skipped_or_infinite_step_changes_nothing():
    model = Toy()
    control, optimizer = controlled(model, settings(CONTRAST))
    walked(model, control, optimizer, range(6))
    before = control.source_weights.state_dict()
    losses = losses_of(model, gradients(model, 6)[:1]) * torch.inf
    control.before_backward(losses, ["clean"], 1.0)
    losses.mean().backward()
    control.after_backward(True)
    control.before_step(6, finite=torch.tensor(False))
    control.after_step(skipped=True)
    after = control.source_weights.state_dict()
    assert after["updates"] == before["updates"]
    for name, state in before["statistics"].items():
        unchanged = [key for key in state if key not in ("ignored", "seen")]  # which count such steps
        assert equal([state[key] for key in unchanged], [after["statistics"][name][key] for key in unchanged])


def test_another_backward_meets_no_factor():
    """Gradients taken outside begin and end, as a regulariser's own, are left as they are."""
    model = Toy()
    control, _ = controlled(model, settings(CONTRAST))
    control.before_backward(torch.zeros(1), ["clean"], 1.0)
    control.after_backward(True)
    p = next(model.parameters())
    (g,) = torch.autograd.grad((p * 3).sum(), p)
    assert g.eq(3).all()


def test_a_backward_of_two_sources_is_an_error():
    control, _ = controlled(Toy(), settings(CONTRAST))
    with pytest.raises(ValueError, match="cut the batch by source"):
        control.before_backward(torch.zeros(2), ["clean", "element"], 1.0)


def test_parts_by_source_hold_each_sample_once():
    role = ["clean", "element", "clean", "rehearsal", "clean"]
    batch = {"text": list("abcde"), "role": role, "index": torch.arange(5)}
    parts = chunks(batch, 2, by_role=True)
    assert [part["role"] for _, part in parts] == [["clean"] * 2, ["clean"], ["element"], ["rehearsal"]]
    assert sorted(torch.cat([part["index"] for _, part in parts]).tolist()) == list(range(5))
    assert all(part["text"] == ["abcde"[i] for i in part["index"]] for _, part in parts)
    assert [share for share, _ in parts] == [0.4, 0.2, 0.2, 0.2]


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"name": "contrst"}, "unknown"),
        ({"name": "none"}, "between.[a-z]+ .default.: needs gradient_control.between.name"),
        ({"levels": {"element": 2.0}}, "elements are 1"),
        ({"levels": {"clean": 0.0}}, "must be at least 1e-06"),
        ({"name": "placebo", "options": {"of": "placebo"}}, "another rule"),
        ({"name": "placebo", "options": {"of": "nothing"}}, "'of': unknown name 'nothing'"),
        ({"bound": 0.5}, "bound"),
    ],
)
def test_refuses_in_one_line(wrong, said):
    with pytest.raises(UserError, match=said) as error:
        Controller(Toy(), settings(**{"name": CONTRAST, **wrong}))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("reader", [{"conflict": True}, {"transform": REMOVE_CONFLICT}])
def test_what_reads_the_sources_is_refused(reader):
    between = settings(CONTRAST).between
    with pytest.raises(UserError, match="leave one of them out"):
        Controller(Toy(), config(**{"name": "uniform", "between": between, **reader}))
    Controller(Toy(), config(**{"name": "uniform", "between": BetweenConfig(name="uniform"), **reader}))


def test_defaults_are_in_range():
    check_values(BetweenConfig(), "gradient_control.between.")


def test_no_step_waits_for_the_device(monkeypatch):
    """Between two refreshes; a refresh reads what was sent one refresh before."""

    def refuse(tensor, *_):
        raise AssertionError("waits for the device")

    model = Toy()
    control, optimizer = controlled(model, settings(CONTRAST, refresh=100))
    for name in ("item", "tolist", "__bool__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    of_sources = gradients(model, 0)
    for gradient, source in zip(of_sources, SOURCES, strict=True):
        loss = losses_of(model, [gradient])
        control.before_backward(loss, [source], 1.0)
        loss.mean().backward()
        control.after_backward(True)
    control.before_step(0, finite=torch.tensor(True))
    control.after_step()
