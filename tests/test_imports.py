"""Imports run one way: ground <- distributed, data <- model <- control, memory, measure <- report <- the root modules;
`loop` and `saving` belong to train_silentbad.py alone, and no room imports prepare. Nothing in them imports what stands
beside them: the shield, worlds, experiments, bench and tests."""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
THREE = {"gradient_control", "memory_reinforce", "validation"}
MODULES = [*ROOT.glob("*.py"), *ROOT.glob("silentbad/**/*.py")]
HOOKS = {"silentbad.loop.hooks"}  # what a lever subclasses: it stands on nothing, and every room may take it
NAMES = ("errors", "progress", "rng", "settings", "owned", "device", "files", "hub")
GROUND = HOOKS | {f"silentbad.{name}" for name in NAMES}
GROUND |= {f"silentbad.settings.{path.stem}" for path in ROOT.glob("silentbad/settings/*.py")}
BESIDE = {
    "silentbad_shield",
    "worlds",
    "experiments",
    "bench",
    "tests",
    "research",
}  # of the repository, not of the product
LAST = {"prepare", "localise"}  # rooms that no other imports
# Room -> the rooms it may import beside the ground and itself.
SHARED = {"distributed", "data", "model"}
BELOW: dict[str, set[str]] = {
    "distributed": set(),
    "data": set(),
    "model": {"distributed", "data"},
    "control": SHARED,
    "memory": SHARED,
    "measure": SHARED,
    "report": SHARED | {"measure"},
    "localise": SHARED | {"measure", "report"},
    "saving": SHARED | {"measure", "report"},
    "loop": SHARED | {"control", "memory", "measure", "report", "saving"},
    "prepare": SHARED | {"measure", "report"},
}
MAY_IMPORT = {
    "worlds": {"control", "data", "measure"},
    "experiments": SHARED | {"control", "measure", "memory"},
    "silentbad_shield": SHARED | {"measure", "report"},
}
FLAT = 8  # files that lie in silentbad/ itself, at most


class AtRunTime(ast.NodeTransformer):
    """Leaves out what is imported for the types alone."""

    def visit_If(self, node: ast.If) -> ast.If | None:
        for_types = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        return None if for_types else node


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imported(path: Path) -> set[str]:
    """Full names of the modules that a module imports at run time, as `silentbad.data.images`."""
    names = set()
    for node in ast.walk(AtRunTime().visit(ast.parse(path.read_text()))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the full name"
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names if is_module(node.module, alias.name)}
    return names


@cache
def is_module(package: str, name: str) -> bool:
    place = ROOT.joinpath(*package.split("."), name)
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str:
    """The room of a module of silentbad; "" for the ground, the commands and the package itself."""
    parts = module.split(".") if module not in HOOKS else []
    return parts[1] if len(parts) > 1 and parts[1] in BELOW else ""


def tops(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported(path)}


def test_root_modules_stand_apart():
    for path in MODULES:
        names = tops(path)
        assert "train_silentbad" not in names, path
        if path.parent != ROOT:
            assert not names & THREE, path
        elif path.stem in THREE:
            assert not names & (THREE - {path.stem}), path


def test_rooms_import_only_what_lies_below():
    for path in MODULES:
        module, ours = dotted(path), {name for name in imported(path) if name.startswith("silentbad.")}
        room, rooms = room_of(module), {room_of(name) for name in ours} - {""}
        if module in GROUND:
            assert ours <= GROUND, path
        elif room:
            assert rooms <= BELOW[room] | {room}, path
        elif module != "train_silentbad":
            assert not rooms & {"loop", "saving"}, path
        assert not rooms & LAST - {room}, path


def test_the_product_imports_nothing_that_stands_beside_it():
    assert len(MODULES) > 100
    for path in MODULES:
        assert not tops(path) & BESIDE, path


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_what_stands_beside_the_product_draws_on_rooms_below_alone(name):
    for path in ROOT.glob(f"{name}/**/*.py"):
        assert {room_of(module) for module in imported(path)} - {""} <= MAY_IMPORT[name], path
        search_fits = {"validation"} if name == "silentbad_shield" else set()  # what a search does without memory
        assert tops(path).isdisjoint((THREE - search_fits) | {"train_silentbad"} | BESIDE - {name}), path


def test_every_room_has_its_arrows_and_says_what_lives_there():
    inits = [*ROOT.glob("silentbad/*/__init__.py")]
    assert {path.parent.name for path in inits} <= BELOW.keys() | {"settings"}
    assert len([*ROOT.glob("silentbad/*.py")]) <= FLAT
    for path in inits:
        assert len((ast.get_docstring(ast.parse(path.read_text())) or "").split()) >= 10, path


def test_no_two_modules_have_one_name():
    names = Counter(path.stem for path in ROOT.glob("silentbad/**/*.py") if not path.stem.startswith("__"))
    assert [name for name, count in names.items() if count > 1] == []


def test_the_walk_sees_the_entry_point():
    assert THREE <= tops(ROOT / "train_silentbad.py")


# What a loader of data must be given wherever it is given at all. ruff's S rules see pickle and yaml.load, not these.
SAFE = {"weights_only": True, "trust_remote_code": False, "allow_pickle": False}


def test_no_loader_may_run_code_from_data():
    for path in MODULES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.keyword) and node.arg in SAFE:
                value = node.value.value if isinstance(node.value, ast.Constant) else None
                assert value is SAFE[node.arg], f"{path}:{node.lineno}"
