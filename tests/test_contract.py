"""The contract of parts of one's own: `pytest tests/test_contract.py --own FILE.py`, or FILE.py:NAME. What each part is
for, its parameters say. Without --own: docs/example/mine.py and experiments/."""

import ast
import inspect
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import memory_reinforce as mr
from gradient_control import SCALE_RULES
from silentbad.loop.hooks import Hook
from silentbad.measure.embedders import Embedder, load_embedder
from silentbad.settings import user_code
from silentbad.settings.types import MISSING, options_of
from tests.measure.test_embedders import keeps_the_contract
from tests.test_gradient_control import RuleContract
from tests.training import same, step_once, weights
from tests.world import PROBED, Trainer, config

ROOT = Path(__file__).parents[1]
SLOTS = {  # registry -> where its parts go in a configuration of memory
    "sampler": lambda place: {"sampler": place, "phrase_memory": PROBED},
    "timesteps": lambda place: {"timesteps": place},
    "loss": lambda place: {"loss": place},
    "loss.error": lambda place: {"loss": {"error": place}},
    "region": lambda place: {"region": place},
    "rehearsal": lambda place: {"rehearsal": place, "region": "mask"},
}
MEMORY = {**mr.REGISTRIES, "loss.error": mr.ERRORS}
PARTS = {"rule": SCALE_RULES}
PARTS |= {kind: registry for kind, registry in MEMORY.items() if kind in SLOTS}
FED_BY_A_HOOK = ("curvature", "hypergradient")  # rules of what a hook measures, tested with it
PREDICTIONS = ("epsilon", "v_prediction", "sample", "flow")


def kind_of(place: str) -> str | None:
    """What a part is for, by its base class or by the names of its parameters; None where they say nothing."""
    part = user_code.load("--own", place)
    for base, kind in ((Hook, "hook"), (Embedder, "embedder"), (torch.optim.Optimizer, "optimizer")):
        if isinstance(part, type) and issubclass(part, base):
            return kind
    parameters = inspect.signature(part).parameters.values() if callable(part) else ()
    names = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    return next((kind for kind, registry in PARTS.items() if registry.takes == names), None)


def parts_of(asked: str) -> dict[str, str]:
    """{place: what it is for} of a place, or of all public definitions of a file."""
    if user_code.is_place(asked):
        places = [asked]
    else:
        defined = (ast.FunctionDef, ast.ClassDef)
        names = [node.name for node in ast.parse(Path(asked).read_text()).body if isinstance(node, defined)]
        places = [f"{asked}:{name}" for name in names if not name.startswith("_")]
    kinds = {place: kind_of(place) for place in places}
    found = {place: kind for place, kind in kinds.items() if kind}
    if not found:
        takes = "; ".join(f"{registry.key}: {', '.join(registry.takes)}" for registry in PARTS.values())
        raise pytest.UsageError(f"--own {asked}: no hook, embedder or optimizer, and no part that takes these: {takes}")
    return found


def pytest_generate_tests(metafunc):
    own = metafunc.config.getoption("own")
    ours = [ROOT / "docs/example/mine.py", *sorted(ROOT.glob("experiments/[a-z]*.py"))]
    files = [own] if own else [str(file) for file in ours if file.stem not in FED_BY_A_HOOK]
    kinds: dict[str, str] = {}
    for file in files:
        try:
            kinds |= parts_of(file)
        except pytest.UsageError:
            if own:
                raise
    wanted = {place: kind for place, kind in kinds.items() if (kind == "rule") == (metafunc.cls is not None)}
    metafunc.parametrize("name", wanted, ids=[place.rpartition("/")[2] for place in wanted])


class TestRule(RuleContract):
    """A scale rule; those of the project pass the same tests."""

    @pytest.fixture(autouse=True)
    def loaded(self, name):
        SCALE_RULES.try_part(name, {})


def test_part(name, request, capsys):
    kind = kind_of(name)
    {"hook": hook, "embedder": embedder, "optimizer": optimizer}.get(kind, part)(name, request)
    said = [line for line in capsys.readouterr().err.splitlines() if "validation.targets" not in line]
    assert not [line for line in said if "warning" in line]


def part(place, request):
    """Accepted, tried on its examples, and trained with for ten steps."""
    kind = kind_of(place)
    registry = PARTS[kind]
    options = options_of(registry[place])
    if needed := [name for name, option in options.items() if option.default is MISSING]:
        pytest.skip(f"{needed[0]} has no default")
    examples = mr.sampler_examples(np.array([6, 3, 3])) if kind == "sampler" else None
    registry.try_part(place, {}, examples)
    prediction = "v_prediction"
    if kind == "loss":
        fits = [each for each in PREDICTIONS if takes_prediction(place, each)]
        assert fits, f"{place} takes none of {', '.join(PREDICTIONS)}"
        prediction = prediction if prediction in fits else fits[0]
    if kind in SLOTS and prediction != "flow":  # whose trainer has another model
        trainer = Trainer(config(**SLOTS[kind](place)), prediction)
        trainer.train(10)
        assert all(math.isfinite(loss) for loss, _ in trainer.losses)


def takes_prediction(place: str, prediction_type: str) -> bool:
    try:
        mr.LOSSES.try_part(place, {}, mr.loss_examples(prediction_type))
    except Exception:
        return False
    return True


def hook(place, request):
    run = request.getfixturevalue("build")(hooks=place)
    step_once(run)
    run.hooks.state_dict()


def embedder(place, request):
    keeps_the_contract(load_embedder(place, None, "cpu"))


def optimizer(place, request):
    run = request.getfixturevalue("build")(optimizer=place)
    before = weights(run)
    step_once(run)
    after = weights(run)
    assert not same(before, after) and all(value.isfinite().all() for value in after.values())
