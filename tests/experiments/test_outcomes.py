"""What did not earn its place: used by its place, with an outcome that the stored rows bear out."""

import ast
from pathlib import Path

import pytest

import gradient_control
import memory_reinforce
from bench import recovery_table
from silentbad.settings import user_code
from silentbad.settings.moved import MOVED

ROOT = Path(__file__).parents[2]
ARMS = {  # file -> arm of bench/results/recovery.md
    "gsnr": "gsnr",
    "prior": "prior",
    "inverse_rms": "inverse_rms",
    "auto_rgn": "auto_rgn",
    "curriculum": "curriculum",
    "learning_progress": "learning_progress",
    "and_distillation": "and_distillation",
    "l2_sp": "retention",
    "hypergradient": "hypergradient",
    "shrinkage": "shrink",
}
REGISTRIES = [
    *(gradient_control.SCALE_RULES, memory_reinforce.ERRORS, *memory_reinforce.REGISTRIES.values()),
]


def said(file: str) -> str:
    """The first words of a file, on one line."""
    return " ".join((ast.get_docstring(ast.parse((ROOT / file).read_text())) or "").split())


@pytest.mark.parametrize("name", MOVED)
def test_an_old_name_leads_to_what_is_there(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert callable(user_code.load("a setting", MOVED[name]))
    assert not any(name in registry for registry in REGISTRIES)


def test_every_old_name_has_a_file_and_every_file_says_what_was_measured():
    files = {path.name for path in (ROOT / "experiments").glob("*.py")} - {"__init__.py", "attention.py"}
    assert files >= {Path(place.partition(":")[0]).name for place in MOVED.values()}
    readme = (ROOT / "experiments/README.md").read_text()
    for file in files:
        assert "Measured: " in said(f"experiments/{file}"), file
        assert f"`{file}" in readme, file


@pytest.fixture(scope="module")
def speeds() -> dict[str, str]:
    """Speed in steps over plain, "median [low, high]", by arm, as the table of stored rows has it."""
    rows = (recovery_table.RESULTS.parent / "recovery.md").read_text().splitlines()
    head, *body = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows if row.startswith("|")]
    column = next(i for i, name in enumerate(head) if name.startswith("speed"))
    return {row[0]: row[column] for row in reversed(body) if row[column]}


@pytest.mark.parametrize("file, arm", ARMS.items())
def test_outcomes_are_those_of_the_stored_rows(file, arm, speeds):
    assert f"{speeds[arm]} of plain's speed" in said(f"experiments/{file}.py")
