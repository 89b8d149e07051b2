"""What did not earn its place: reachable by name, with an outcome that the stored rows bear out."""

import pytest

import gradient_control
import memory_reinforce
from bench import recovery_table
from silentbad.settings.outcomes import OUTCOMES

FIGURES = [(name, arm, text) for name, (arm, text) in OUTCOMES.items() if arm]


def names() -> set[str]:
    """ "slot.name" of every entry of a registry that stands in `silentbad.experiments`."""
    registries = {
        "gradient_control": [gradient_control.SCALE_RULES],
        "gradient_control.between": [gradient_control.SOURCE_RULES],
        "gradient_control.transform": [gradient_control.TRANSFORMS],
        **{f"memory.{slot}": [registry] for slot, registry in memory_reinforce.REGISTRIES.items()},
    }
    registries["memory.loss"].append(memory_reinforce.ERRORS)
    return {
        f"{slot}.{name}"
        for slot, parts in registries.items()
        for registry in parts
        for name, part in registry.items()
        if part.__module__.startswith("silentbad.experiments.")
    }


def test_every_experiment_has_an_outcome():
    assert names() == set(OUTCOMES)


@pytest.fixture(scope="module")
def speeds() -> dict[str, str]:
    """Speed in steps over plain, "median [low, high]", by arm, as the table of stored rows has it."""
    rows = (recovery_table.RESULTS.parent / "recovery.md").read_text().splitlines()
    head, *body = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows if row.startswith("|")]
    column = next(i for i, name in enumerate(head) if name.startswith("speed"))
    return {row[0]: row[column] for row in reversed(body) if row[column]}


@pytest.mark.parametrize("name, arm, text", FIGURES, ids=[name for name, *_ in FIGURES])
def test_outcomes_are_those_of_the_stored_rows(name, arm, text, speeds):
    assert text.startswith(f"{speeds[arm]} of plain's speed")
