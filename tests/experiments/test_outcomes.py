"""What did not earn its place: reachable by name, with an outcome that the stored rows bear out."""

import pytest

import gradient_control
import memory_reinforce
from bench import recovery_table
from silentbad import experiments

FIGURES = [(name, arm, text) for name, (arm, text) in experiments.OUTCOMES.items() if arm]


def names() -> set[str]:
    """ "slot.name" of every entry that stands in `silentbad.experiments`."""
    memory = {
        "sampler": experiments.SAMPLERS,
        "timesteps": experiments.TIMESTEPS,
        "loss": {**experiments.LOSSES, **experiments.ERRORS},
        "loss_balance": experiments.LOSS_BALANCE,
        **experiments.AUXILIARY,
    }
    found = {f"memory.{slot}.{name}" for slot, entries in memory.items() for name in entries}
    found |= {f"gradient_control.{name}" for name in experiments.RULES}
    found |= {f"gradient_control.between.{name}" for name in experiments.SOURCE_RULES}
    return found | {f"gradient_control.transform.{name}" for name in experiments.TRANSFORMS if name != "none"}


def test_every_experiment_has_an_outcome():
    assert names() == set(experiments.OUTCOMES)


def test_experiments_are_reachable_by_name():
    assert set(experiments.RULES) <= set(gradient_control.SCALE_RULES)
    for slot, entries in (("sampler", experiments.SAMPLERS), ("timesteps", experiments.TIMESTEPS)):
        assert set(entries) <= set(memory_reinforce.REGISTRIES[slot])


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
