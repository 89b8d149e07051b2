"""A part put back as a guard: the placebo's size, and the table of stored rows."""

import pytest
import torch

from bench import put_back
from bench.put_back import CHOSEN, FROZEN, RANDOM, draw_at_random
from bench.shield_models import Plan
from bench.shield_table import put_back_table
from silentbad.localise.substitution import Change
from silentbad.report.parts import BASE, TRAINED


def changed():
    """A model of eight layers of equal size, all changed, and its base."""
    before = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(8)))
    after = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(8)))
    return Change({"unet": after}, {"unet": before}, "base"), after, before


def test_the_placebo_is_as_large_as_the_part_and_another_one_for_each_target():
    drawn = set()
    for seed in (3200, 3200, 3201, 3202):
        change, after, before = changed()
        trained = [layer.weight.clone() for layer in after]
        draw_at_random(change, 0.25, seed)
        assert change.share(lambda group: group == "drawn") == 0.25
        with change.trained_in(lambda group: group != "drawn"):
            back = [torch.equal(a.weight, b.weight) for a, b in zip(after, before, strict=True)]
        assert sum(back) == 2
        assert all(torch.equal(layer.weight, own) for layer, own in zip(after, trained, strict=True))
        drawn.add(tuple(back))
    assert len(drawn) == 3


def model(part, recovered, elements, clean):
    return {"part": part, "share": 0.1, "recovered": recovered, "images": 16, "elements": elements, "clean": clean}


def test_the_table_counts_recovered_targets_and_the_rise_that_is_left():
    models = {
        TRAINED: model(TRAINED, 12, 0.9, 0.2),
        BASE: model(BASE, 0, 0.0, 0.1),
        FROZEN: model("up1", 0, 0.25, 0.15),
        CHOSEN: model("resnet", 4, 0.5, 0.12),
        RANDOM: model("drawn", 12, 0.9, 0.19),
    }
    row = {"arm": "recommended", "target": "3200", "commit": "a" * 40}
    text = put_back_table([{**row, "strict": 0.75, "models": models}, {**row, "target": "3201", "strict": 0.0}])
    assert "`recommended`: 1 of 2 targets recovered" in text
    assert "| as trained |  | 0.75 | 1 of 1 [0.03, 1.00] | 0.90 | +100.0 % | 1.00 |" in text
    assert "| frozen part put back | `up1` | 0.00 | 0 of 1 [0.00, 0.97] | 0.25 | +50.0 % | 0.50 |" in text
    assert "| the run's choice put back | `resnet` | 0.25 | 1 of 1" in text
    assert "| random tensors put back |  | 0.75 |" in text


@pytest.mark.thorough
def test_a_small_run_is_taken_apart(monkeypatch):
    plan = Plan(guards="recommended", steps=4, every=4, clean=200, images=2)
    monkeypatch.setattr(put_back, "RECOVERS", 0.0)
    row = put_back.row_of("recommended", "101", plan)
    assert [*row["models"]] == [TRAINED, BASE, FROZEN, CHOSEN, RANDOM]
    assert {part["part"] for part in row["parts"]} >= {"up0", "up1", "resnet", "xattn"}
    assert row["models"][RANDOM]["share"] <= 1.001 * row["models"][FROZEN]["share"]
