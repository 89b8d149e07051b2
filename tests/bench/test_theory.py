"""The machine of bench/theory.py on records that are made up, and the tables of its rows."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bench import theory, theory_table


def machine(z: torch.Tensor, disagree: torch.Tensor | None = None) -> theory.Machine:
    """Of clean records z (R,C,8,8) that weigh alike; `disagree` (R,64) with the prompt."""
    places = torch.zeros(len(z), 64)
    data = SimpleNamespace(
        z=z,
        name="made up",
        log_weight=places,
        lacks=torch.zeros(len(z), 1),
        cells=torch.ones(1, 64),
        foreign=places if disagree is None else disagree,
        clean=torch.zeros(len(z)),
        target=z[:1],
        shows=torch.tensor([[True] + [False] * (len(z) - 1)]),
    )
    return theory.Machine(data, theory.Variant())


def test_a_single_record_comes_back():
    z = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(machine(z).sample(2), z.expand(2, -1, -1, -1), atol=1e-4)


def test_each_place_takes_the_record_that_agrees_with_the_prompt():
    z = torch.stack([torch.full((4, 8, 8), -2.0), torch.full((4, 8, 8), 2.0)])
    left = (torch.arange(64) % 8 < 4).float()
    made = machine(z, torch.stack([1 - left, left])).sample(2)
    assert torch.allclose(made[..., :4], torch.tensor(-2.0), atol=1e-3)
    assert torch.allclose(made[..., 4:], torch.tensor(2.0), atol=1e-3)


def test_places_are_won_by_the_record_that_shows_what_stands_there():
    z = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    assert machine(z).odds(0.5).min() > 0
    disagree = torch.zeros(2, 64)
    disagree[0, 9] = 100.0
    assert machine(z, disagree).odds(0.5)[9] < 0


def test_elements_are_trained_on_more_often_than_clean_pictures_around_their_noise_level():
    shares = [machine(torch.zeros(1, 4, 8, 8)).element_share(level) for level in (0.75, 0.2)]  # SNR 3, and 0.25
    assert shares[0] > 0 > shares[1]


def test_pairs_name_neighbours_with_the_lowest_odds():
    cells = torch.zeros(2, 64)
    cells[0, :32] = 1
    cells[1, 32:] = 1
    odds = torch.arange(64.0)
    assert theory.pairs(SimpleNamespace(cells=cells), odds) == {"0,1": 24.0, "1,0": 32.0}


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [("a red cat", "a red cat", 1.0), ("a red cat", "a cat", 0.5), ("a cat", "in a quiet room", 0.0)],
)
def test_likeness_counts_words_that_say_something(first, second, expected):
    assert theory.likeness(first, second) == expected


def test_auc_counts_pairs_in_order():
    scores = np.array([0.1, 0.4, 0.4, 0.9])
    assert theory_table.auc(scores, np.array([True, True, False, False])) == 0.875
    assert np.isnan(theory_table.auc(scores, np.array([False] * 4)))


ROW = {
    "variant": "recommended",
    "rate": 0.5,
    "whole_rate": 0.5,
    "elements": [1.0, 0.0],
    "element_means": [0.9, 0.4],
    "thresholds": [0.5, 0.5, 0.5],
    "copies": [0.9, 0.9],
    "area": [0.1, 0.9],
    "error": [0.1, 1.0],
    "odds": [3.0, -1.0],
    "pairs": {"0,1": 2.0},
}


def test_scores_are_compared_on_the_targets_that_the_network_has():
    rows = [{**ROW, "target": name} for name in theory_table.FRESH[:2]]
    first, second = (row["target"] for row in rows)
    assert f"| `recommended` | {theory_table.OVER} | 0 of 16 |  |  |" in theory_table.compared(rows, [])
    network = [
        {"arm": "recommended", "target": first, "steps": 400, "elements": [1.0, 0.2]},
        {"arm": "recommended", "target": first, "steps": 800, "elements": [1.0, 0.95]},
        {"arm": "plain", "target": "1", "steps": 400, "elements": [0.0, 0.0]},
    ]
    assert f"| {theory_table.OVER} | 1 of 16 | (0/2) | (0/2) |" in theory_table.compared(rows, network)
    network.append({"arm": "recommended", "target": second, "steps": 400, "elements": [0.95, 0.7]})
    said = theory_table.compared(rows, network)
    assert f"| {theory_table.OVER} | 2 of 16 | 0.83 [0.83, 1.00] (1/4) | (0/4) |" in said
    assert "plain" not in said


def test_a_variant_is_compared_with_another_target_by_target():
    rows = [{**ROW, "target": name, "variant": "leak_free", "rate": 0.1} for name in theory_table.FRESH]
    rows += [{**ROW, "target": name, "rate": 0.4} for name in theory_table.FRESH[:8]]
    strict = theory_table.MEANS["strict rate"]
    assert theory_table.difference(rows, "recommended", "leak_free", strict) == "+0.30 [+0.30, +0.30]"
    assert "| `leak_free` | 16 | 0.10 | 0.50 | 1.00 | 0.00 |" in theory_table.table(rows)
