"""How tests are kept: short names, and a folder for each room."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "tests").glob("**/*.py"))
ROOMS = {path.parent.name for path in ROOT.glob("silentbad/*/__init__.py")}
BESIDE = {"bench", "fuzz", "kill"}  # folders of tests of other things than a room
LONGEST = 60


def names_of(path: Path) -> list[str]:
    defined = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
    return [node.name for node in defined if node.name.startswith("test_")]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", FILES, ids=name)
def test_names_are_short(path):
    assert not [test for test in names_of(path) if len(test) > LONGEST]


@pytest.mark.parametrize("path", FILES, ids=name)
def test_names_of_a_module_differ(path):
    module = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    assert len(module) == len(set(module))  # the first of two would never run


def test_folders_are_rooms():
    folders = {path.parent.name for path in FILES if path.parent != ROOT / "tests"}
    assert folders <= ROOMS | BESIDE


@pytest.mark.parametrize("path", FILES, ids=name)
def test_tests_import_helpers_and_not_each_other(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and path.parent.name != "distributed":
            assert not node.module.rpartition(".")[2].startswith("test_"), node.lineno
