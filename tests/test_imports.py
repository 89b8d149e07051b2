"""Imports run one way: train_silentbad -> {gradient_control, memory_reinforce, validation} -> silentbad."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
THREE = {"gradient_control", "memory_reinforce", "validation"}
MODULES = [*ROOT.glob("*.py"), *ROOT.glob("silentbad/**/*.py")]


def imported(path: Path) -> set[str]:
    """Top names a module imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_one_way(path):
    names = imported(path)
    assert "train_silentbad" not in names
    if path.parent != ROOT:
        assert not names & THREE
    elif path.stem in THREE:
        assert not names & (THREE - {path.stem})


def test_the_walk_sees_the_entry_point():
    assert THREE <= imported(ROOT / "train_silentbad.py")


def test_nothing_loads_code_from_data():
    for path in MODULES:
        text = path.read_text()
        assert "weights_only=False" not in text and "trust_remote_code=True" not in text
        assert "pickle.load" not in text and "Unpickler" not in text and "dill" not in text
