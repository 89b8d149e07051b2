"""Rules and hooks in a file of one's own: what they do in a run, and the one line of each
mistake."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch

from gradient_control import Controller, check_config, combine
from silentbad.errors import UserError
from silentbad.loop import hooks
from silentbad.loop.hooks import Hook, Hooks
from silentbad.saving import checkpoint, identity
from silentbad.settings.control import GradientControlConfig
from silentbad.settings.user_code import places_in
from tests.toy import Toy, run, stats_of
from tests.toy import config as toy_config
from tests.training import checked, rows, same, step_once, weights
from train_silentbad import main

MINE = Path(__file__).parents[1] / "docs/example/mine.py"

HOOK = "from silentbad.loop.hooks import Hook\nclass Mine(Hook):\n"
COUNTS = '''
import torch
from silentbad.loop.hooks import Hook


class Counts(Hook):
    """Counts what the loop calls, and adds a loss of nothing."""

    def __init__(self, context):
        self.context, self.calls, self.total = context, [], 0

    def extra_loss(self, loss, now):
        self.calls.append("extra_loss")
        return 0 * loss

    def before_backward(self, losses, sources, scale=1.0):
        self.calls.append("before_backward")

    def after_backward(self, last=True):
        self.calls.append(f"after_backward {last}")

    def before_step(self, step, finite=None, norms=None):
        self.calls.append(f"before_step {step}")
        assert len(norms) == len(self.context.params) and bool(finite)
        return {"mine/step": torch.tensor(float(step))}

    def after_step(self, step, skipped=False):
        self.calls.append(f"after_step {step}")
        self.total = step

    def should_run(self, step, asked=False, final=False):
        return step == 2 or final

    def run(self, step, epoch, unet, ema=None, final=False):
        return {"mine/measured": step}

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]
'''


@pytest.fixture
def counts(tmp_path) -> str:
    (tmp_path / "counts.py").write_text(COUNTS)
    return f"{tmp_path}/counts.py:Counts"


# ---------------------------------------------------------------- in a run


def test_the_documented_rule_and_hook_train_and_are_recorded(flags, tmp_path):
    places = {"gradient_control.name": f"{MINE}:quieter", "hooks": f"{MINE}:LossByRole"}
    soon = {"gradient_control.warmup": 0, "gradient_control.refresh": 1, "max_train_steps": 4}
    assert main(flags(**places, **soon)) == 0
    folder = tmp_path / "run"
    logged = rows(folder)
    assert any("mine/loss_element" in row for row in logged)
    multipliers = json.loads((folder / "multipliers.json").read_text())
    assert len(set(multipliers[-1]["multipliers"].values())) > 1
    digest = hashlib.sha256(MINE.read_bytes()).hexdigest()
    entries = json.loads((folder / "run.json").read_text())["own_code"]
    assert entries == {place: {"file": str(MINE), "sha256": digest} for place in places.values()}


def test_a_hook_is_called_in_the_order_of_a_step(build, counts):
    run = build(hooks=counts)
    step_once(run)
    (hook,) = [hook for hook in run.hooks if type(hook).__name__ == "Counts"]
    assert hook.calls == [
        *("extra_loss", "before_backward", "after_backward False"),
        *("extra_loss", "before_backward", "after_backward True"),
        *("before_step 0", "after_step 1"),
    ]
    assert run.meters.read()["mine/step"] == 0


def test_a_hook_that_changes_nothing_changes_no_weight(build, counts):
    plain, hooked = build("plain"), build("hooked", hooks=counts)
    for _ in range(2):
        step_once(plain)
        step_once(hooked)
    assert same(weights(plain), weights(hooked))


def test_a_hook_measures_on_its_own_grid_and_at_the_end(flags, counts, tmp_path):
    assert main(flags(max_train_steps=3, hooks=counts)) == 0
    measured = [(row["step"], row["mine/measured"]) for row in rows(tmp_path / "run", validation=True)]
    assert measured == [(2, 2), (3, 3)]


def test_a_resume_measures_a_step_once_more_and_keeps_one_row(flags, counts, tmp_path):
    settings = {"max_train_steps": 3, "checkpointing_steps": 2, "checkpoints_total_limit": None, "hooks": counts}
    assert main(flags(**settings)) == 0
    shutil.rmtree(tmp_path / "run/checkpoints/step-3")
    assert main(flags(**settings, resume_from_checkpoint="latest")) == 0
    assert [row["step"] for row in rows(tmp_path / "run", validation=True)] == [2, 3]


OVERFLOWS = (
    HOOK
    + """    modifies_gradients = True
    def __init__(self, context): self.params = context.params
    def before_backward(self, losses, sources, scale=1.0): self.calls = getattr(self, "calls", 0) + 1
    def after_backward(self, last=True):
        if self.calls <= 2:
            for p in self.params: p.grad.mul_(float("inf"))
    def before_step(self, step, finite=None, norms=None): return {"mine/norm": norms.sum()}
    def should_run(self, step, asked=False, final=False): return step == 0
    def run(self, step, epoch, unet, ema=None, final=False): return {"mine/measured": step}
"""
)


def test_a_skipped_update_measures_nothing_again_and_logs_no_scalars(flags, tmp_path):
    (tmp_path / "mine.py").write_text(OVERFLOWS)
    assert main(flags(max_train_steps=2, log_every=2, hooks=f"{tmp_path}/mine.py:Mine")) == 0
    (row,) = rows(tmp_path / "run")
    assert row["skipped"] == 1 and row["mine/norm"] is not None
    assert len(rows(tmp_path / "run", validation=True)) == 1


def test_a_hook_that_fails_in_an_update_leaves_no_half_of_it(flags, tmp_path):
    """Rates are multiplied and statistics counted by then: a checkpoint of that moment would keep both."""
    fails = "    def before_step(self, step, finite=None, norms=None):\n        if step == 5: raise KeyError(step)\n"
    (tmp_path / "mine.py").write_text(HOOK + "    def __init__(self, context): pass\n" + fails)
    soon = {"gradient_control.name": "mean_abs", "gradient_control.warmup": 0, "gradient_control.refresh": 1}
    with pytest.raises(KeyError):
        main(flags(checkpointing_steps=2, hooks=f"{tmp_path}/mine.py:Mine", **soon))
    saved = [checkpoint.read_state(folder / "state.pt") for folder in (tmp_path / "run/checkpoints").iterdir()]
    assert saved
    for state in saved:
        assert {group["lr"] for group in state["optimizer"]["param_groups"]} == {1e-3}


def test_a_resume_takes_up_the_hook_and_refuses_a_changed_file(flags, counts, tmp_path, capsys):
    assert main(flags(max_train_steps=2, hooks=counts)) == 0
    again = flags(max_train_steps=3, hooks=counts, resume_from_checkpoint="latest")
    assert main(again) == 0
    state = torch.load(tmp_path / "run/checkpoints/step-3/state.pt", weights_only=True)
    assert state["own_hooks"] == {"counts.py:Counts": {"total": 3}}
    (tmp_path / "counts.py").write_text(COUNTS.replace("0 * loss", "0.0 * loss"))
    capsys.readouterr()
    assert main(flags(max_train_steps=4, hooks=counts, resume_from_checkpoint="latest")) == 2
    assert "the file of counts.py:Counts changed" in capsys.readouterr().err


def test_a_file_that_moved_resumes(flags, counts, tmp_path):
    assert main(flags(max_train_steps=1, hooks=counts)) == 0
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "counts.py").rename(tmp_path / "elsewhere/counts.py")
    moved = f"{tmp_path}/elsewhere/counts.py:Counts"
    assert main(flags(max_train_steps=2, hooks=moved, resume_from_checkpoint="latest")) == 0


def test_places_among_options_are_compared_without_their_folders():
    """Options of own code may have any name, whatever the settings call places by."""
    options = {"/a/mine.py:H": {"error": 0.1, "of": ["/a/mine.py:other", 3]}}
    assert [*places_in({"hook_options": options})] == ["/a/mine.py:other"]
    assert identity._shortened(options) == {"mine.py:H": {"error": 0.1, "of": ["mine.py:other", 3]}}


def test_a_hook_chooses_the_noise_level_and_modifies_gradients(build, tmp_path):
    (tmp_path / "mine.py").write_text(
        HOOK + "    modifies_gradients = True\n"
        "    def __init__(self, context): self.params = context.params\n"
        "    def timesteps(self, draw, positions, count, batch):\n"
        "        import torch\n"
        "        return torch.full((len(positions),), 999), torch.ones(len(positions))\n"
        "    def before_step(self, step, finite=None, norms=None):\n"
        "        for p in self.params: p.grad.mul_(1e6)\n"
    )
    run = build(
        hooks=f"{tmp_path}/mine.py:Mine", max_grad_norm=1.0, optimizer="SGD", learning_rate=1.0, adam_weight_decay=0
    )
    before = weights(run)
    step_once(run)
    assert run.state.timesteps[-1] == run.state.timesteps.sum() == 6
    moved = torch.cat([(after - before[name]).flatten() for name, after in weights(run).items()])
    assert moved.norm().item() == pytest.approx(1.0, rel=1e-3)  # the clip has seen the gradients as they are now


def test_an_update_whose_gradient_a_hook_makes_nan_is_skipped(build, tmp_path):
    (tmp_path / "mine.py").write_text(
        HOOK + "    modifies_gradients = True\n"
        "    def __init__(self, context): self.params = context.params\n"
        "    def before_step(self, step, finite=None, norms=None): self.params[0].grad.mul_(float('nan'))\n"
    )
    run = build(hooks=f"{tmp_path}/mine.py:Mine")
    before = {name: weight.clone() for name, weight in weights(run).items()}
    step_once(run)
    assert same(weights(run), before) and run.state.step == 0


def test_a_dry_run_takes_an_embedder_of_ones_own(flags, tmp_path):
    (tmp_path / "mine.py").write_text(PARTS)
    targets = {"validation.targets": tmp_path / "data/targets.jsonl", "validation.embedder": f"{tmp_path}/mine.py:Grey"}
    assert main(flags(dry_run=True, **targets)) == 0


def test_a_placebo_shuffles_a_rule_of_ones_own():
    place = f"{MINE}:quieter"
    rules = check_config(GradientControlConfig(name="placebo", options={"of": place}))
    x = combine(stats_of(), rules)
    assert x.isfinite().all() and x.unique().numel() > 1


PARTS = """
import torch
import torch.nn.functional as F

from silentbad.measure.embedders import Embedder, resize


def border(mask, has_mask, estimated, size, *, inside: float = 2.0):
    weight = torch.ones(len(mask), 1, *size)
    weight[..., 1:-1, 1:-1] = inside
    return weight / weight.mean(dim=(2, 3), keepdim=True)


def plainly(record, g, others):
    if record["role"] != "element":
        return None
    return {**others.load(record["index"]), "text": "an element"}


class Grey(Embedder):
    def __init__(self, path, device):
        self.device = device

    def embed(self, images):
        x = resize(images.to(self.device), (16, 16)).mean(1).flatten(1)
        return F.normalize(x - x.mean(1, keepdim=True) + 1e-3, dim=-1)

    def describe(self):
        return "grey 16x16"


class Slow(torch.optim.SGD):
    def __init__(self, params, lr, *, share: float = 0.5):
        super().__init__(params, share * lr)
"""


def test_region_rehearsal_embedder_and_optimizer_are_places_recorded_and_hashed(flags, tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(PARTS)
    keys = {"memory.region.name": "border", "memory.rehearsal.name": "plainly"}
    keys |= {"validation.embedder": "Grey", "optimizer": "Slow"}
    places = {key: f"{file}:{name}" for key, name in keys.items()}
    settings = {"validation.targets": tmp_path / "data/targets.jsonl", "validation.images_per_target": 2}
    settings |= {"validation.controls": "never", "validation.steps": 2, "validation.num_inference_steps": 1}
    settings |= {"validation.unrelated_images": 0, "memory.region.options.inside": 3.0, "optimizer_options.share": 0.25}
    assert main(flags(**places, **settings, max_train_steps=2)) == 0
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    entries = json.loads((tmp_path / "run/run.json").read_text())["own_code"]
    assert entries == {place: {"file": str(file), "sha256": digest} for place in places.values()}
    assert digest in (tmp_path / "run/validation.json").read_text()
    again = {**places, **settings, "max_train_steps": 3, "resume_from_checkpoint": "latest"}
    assert main(flags(**again, dry_run=True)) == 0
    file.write_text(PARTS.replace("2.0", "2.5"))
    capsys.readouterr()
    assert main(flags(**again)) == 2
    assert "the file of mine.py:Slow changed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "key, text, said",
    [
        ("memory.timesteps.name", "def f(snr, progress): return snr * 0", "returns 0; 0.003 is the least"),
        ("memory.timesteps.name", "def f(snr, progress): return snr * 0 + 0.01", "it changes nothing"),
        (
            "memory.loss.error",
            "def f(pred, target, delta): return (pred - target).mean()",
            "returns numbers of shape ()",
        ),
        ("memory.loss.error", "def f(pred, target, delta): return target - pred", "is the least"),
        ("memory.region.name", "def f(mask, has_mask, estimated, size): return estimated", "whose sum is"),
        ("memory.region.name", "def f(mask, has_mask, estimated, size): return estimated * 0", "zeros alone"),
        ("optimizer", "f = 1", "no torch optimizer"),
    ],
)
def test_a_part_that_is_no_use_is_said_before_anything_loads(key, text, said, flags, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(text + "\n")
    settings = {key: f"{tmp_path}/mine.py:f"}
    try:
        checked(flags(**settings))
    except UserError as error:
        assert said in str(error) and key in str(error)
    else:
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "key, text",
    [
        ("memory.timesteps.name", "def f(snr, progress): return snr * 0 + 0.01"),
    ],
)
def test_a_part_that_changes_nothing_is_said_once_a_start(key, text, flags, tmp_path, capsys):
    """The command tries it, and so does what the command builds."""
    (tmp_path / "mine.py").write_text(text + "\n")
    for _ in range(2):
        assert main(flags(**{key: f"{tmp_path}/mine.py:f"}, dry_run=True)) == 0
        assert capsys.readouterr().err.count("it changes nothing") == 1


@pytest.mark.parametrize(
    "key, text, said",
    [
        ("loss", "(snr, kind): return snr * float('nan')", "returns NaN"),
        ("loss", "(snr, kind): return snr * 0 - 1", "returns -1; 0 is the least"),
        ("loss", "(snr, kind): return snr * 0 + 3", "it changes nothing"),
        ("sampler", "(rho, records, epoch): return records * float('nan')", "returns NaN"),
        ("sampler", "(rho, records, epoch): return records * -1.0", "returns -4; 0 is the least"),
        ("sampler", "(rho, records, epoch): return records[:1] / records[0]", "returns numbers of shape (1,)"),
    ],
)
def test_what_model_and_data_decide_is_tried_with_them(key, text, said, build, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(f"def f{text}\n")
    try:
        build(**{f"memory.{key}.name": f"{tmp_path}/mine.py:f"})
    except UserError as error:
        assert said in str(error)
    else:
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "change, said",
    [
        ("float('nan')", "makes a weight NaN"),
        ("p.grad", "moves weights up the gradient"),
        ("0 * p", "moves no weight"),
    ],
)
def test_an_optimizer_that_does_not_descend_is_said(change, said, build, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "import torch\nclass Mine(torch.optim.SGD):\n    @torch.no_grad()\n    def step(self):\n"
        f"        for p in self.param_groups[0]['params']: p.add_({change})\n"
    )
    try:
        build(optimizer=f"{tmp_path}/mine.py:Mine", adam_weight_decay=0)
    except UserError as error:
        assert said in str(error)
    else:
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "value, said",
    [
        ("{'text': 'x'}", "returns a record without"),
        ("3", "returns int, not a record or None"),
        ("{**others.load(record['index']), 'role': 'mine'}", "returns role 'mine'"),
        ("{**others.load(record['index']), 'text': 'a red cat, a blue hat'}", "rebuilds target 't0'"),
        ("1 / 0", "fails (division by zero)"),
    ],
)
def test_a_rehearsal_that_is_no_record_is_refused_at_its_first_use(value, said, build, tmp_path):
    (tmp_path / "mine.py").write_text(f"def f(record, g, others):\n    return {value}\n")
    with pytest.raises(UserError) as error:
        step_once(build(**{"memory.rehearsal.name": f"{tmp_path}/mine.py:f"}))
    assert said in str(error.value)


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    "text, name, said",
    [
        ("x = 1 +\n", "rule", "line 1 does not run (SyntaxError"),
        ("import torch\nimport nothing_of_that_name\n", "rule", "line 2 does not run (ModuleNotFoundError"),
        ("raise SystemExit(3)\n", "rule", "line 1 does not run (SystemExit"),
        ("def rule(stats):\n    return stats.n\n", "rules", "defines no rules"),
        ("rule = 3\n", "rule", "is no function"),
        (
            "def rule(stats, beta):\n    return stats.n\n",
            "rule",
            "takes (stats, beta); it must take stats, and after a",
        ),
        ("def rule():\n    return 1\n", "rule", "takes (); it must take stats, and after a"),
        ("def rule(stats):\n    return stats.nothing\n", "rule", "fails ('GroupStats' object has no attribute"),
        (
            "def rule(stats):\n    return stats.n.sum()\n",
            "rule",
            "returns numbers of shape (), not",
        ),
        ("def rule(stats):\n    return 1.0\n", "rule", "returns float, not numbers of shape (3,)"),
    ],
)
def test_a_rule_that_cannot_work_is_one_line(text, name, said, tmp_path):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UserError) as error:
        check_config(GradientControlConfig(name=f"{tmp_path}/mine.py:{name}"))
    assert said in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).startswith("gradient_control.name: ")


def test_options_of_a_rule_are_checked_as_those_of_the_project():
    place = f"{MINE}:quieter"
    with pytest.raises(UserError, match="unknown option 'powr'; did you mean 'power'?"):
        check_config(GradientControlConfig(name=place, options={"powr": 1.0}))
    with pytest.raises(UserError, match="option 'power' must be float"):
        check_config(GradientControlConfig(name=place, options={"power": "high"}))
    combined = check_config(GradientControlConfig(name=f"mean_abs+{place}", options={place: {"power": 1.0}}))
    assert combined[place] == (1.0, {"power": 1.0})


@pytest.mark.parametrize(
    "text, name, said",
    [
        ("class Mine:\n    pass\n", "Mine", "is no subclass of silentbad.loop.hooks.Hook"),
        (HOOK + "    def __init__(self, context): pass\n", "Mine", "overrides no method of a hook"),
        (HOOK + "    def after_step(self, step, skipped=False): pass\n", "Mine", "must take (self, context)"),
        (
            HOOK + "    def __init__(self, context): pass\n    def after_step(self, step): pass\n",
            "Mine",
            "after_step takes (self, step), and is called as after_step(self, step: int, skipped: bool = False)",
        ),
        (HOOK + "    def meters(self): return {}\n", "Other", "defines no Other"),
    ],
)
def test_a_hook_that_cannot_work_is_one_line(text, name, said, tmp_path):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UserError) as error:
        hooks.hook_classes([f"{tmp_path}/mine.py:{name}"])
    assert said in str(error.value) and "\n" not in str(error.value)


def test_names_of_hooks_are_places_and_given_once(counts):
    with pytest.raises(UserError, match="'Counts' is not PATH.py:CLASS"):
        hooks.hook_classes(["Counts"])
    with pytest.raises(UserError, match="counts.py:Counts is given twice"):
        hooks.hook_classes([counts, counts])


@pytest.mark.parametrize("key, name", [("hooks", "Mine"), ("gradient_control.name", "my_rule")])
def test_a_file_that_is_not_there_is_named_before_anything_loads(key, name, flags, tmp_path, capsys):
    assert main(flags(**{key: f"{tmp_path}/nowhere.py:{name}"})) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert key in line and f"no file {tmp_path}/nowhere.py" in line


@pytest.mark.parametrize("value", ["self", "__import__('numpy').float64(1)"])
def test_a_state_that_would_not_load_is_refused_at_once(value, build, tmp_path):
    text = HOOK + f"    def __init__(self, context): pass\n    def state_dict(self): return {{'value': {value}}}\n"
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UserError, match="the state_dict of mine.py:Mine holds more than tensors"):
        build(hooks=f"{tmp_path}/mine.py:Mine")


# ---------------------------------------------------------------- the base class


def test_a_hook_does_nothing():
    hook, losses = Hook(), torch.ones(2)
    assert hook.timesteps(0, [0, 1], 2, {"role": ["clean", "element"]}) is None
    assert hook.weight_losses(losses, ["clean", "element"]) is losses
    assert hook.extra_loss(losses.mean(), None) is None  # type: ignore[arg-type]
    assert hook.before_step(0) is None
    assert hook.run(0, 0.0, None) == hook.meters() == hook.state_dict() == {}
    assert not (hook.should_run(0, True, True) or hook.modifies_gradients or hook.one_source_per_backward)


def test_hooks_are_called_one_after_the_other():
    class Doubles(Hook):
        modifies_gradients = True

        def weight_losses(self, losses, sources):
            return 2 * losses

        def extra_loss(self, loss, now):
            return loss

    both = Hooks([Doubles(), Hook(), Doubles()])
    assert both.weight_losses(torch.ones(1), ["clean"]).item() == 4
    assert both.extra_loss(torch.tensor(3.0), None).item() == 6  # type: ignore[arg-type]
    assert both.modifies_gradients and not both.one_source_per_backward


RULES = {
    "nan": "stats.n * float('nan')",
    "negative": "-stats.n",
    "constant": "stats.n * 0 + 3",
    "good": "stats.n.sqrt()",
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_that_acts_on_no_group_is_said_once(name, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(f"def rule(stats):\n    return {RULES[name]}\n")
    model = Toy()
    control = Controller(model, toy_config(name=f"{tmp_path}/mine.py:rule"))
    optimizer = torch.optim.SGD(control.param_groups(), lr=1e-3)
    control.attach(optimizer)
    run(model, control, optimizer, range(16))
    lines = [line for line in capsys.readouterr().err.splitlines() if "acts on no group" in line]
    assert len(lines) == (name != "good")
