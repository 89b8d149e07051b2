"""Spectral updates against AdamW on another base: rates apart, and pairs at each arm's own."""

import pytest

from bench import kept, match
from tests.bench.test_kept import HALF_BASE, counts, row
from worlds.microworld.networks import new_unet
from worlds.microworld.optim import Muon, MuonWithAdamW


@pytest.fixture
def rows() -> list[dict]:
    def ran(arm, target, rate, times, right):
        factor, steps = kept.KEPT_AT[arm]
        return row(arm, target, rate, counts(right, right), factor=times * factor, steps=steps)

    return [
        {"arm": "base", "target": None, "right": counts(HALF_BASE, HALF_BASE)},
        ran("decoder_2026", "1", 1.0, 1, 5),
        ran("decoder_2026", "2", 0.5, 1, 5),
        ran("decoder_2026", "1", 0.25, 2, 1),
        ran("decoder_adamw_2026", "1", 0.5, 1, 6),
    ]


def test_each_rate_has_its_line(rows):
    lines = [line.split(" | ")[:5] for line in match.table(rows).splitlines()[2:]]
    assert [(name, factor, targets) for name, factor, _, targets, _ in lines] == [
        ("| `decoder_2026` (C)", "40", "2"),
        ("| `decoder_2026` (C)", "80", "1"),
        ("| `decoder_adamw_2026` (C)", "16", "1"),
    ]


def test_pairs_are_of_the_same_target_at_each_arms_own_rate(rows):
    assert match.differences(rows).splitlines()[2:] == [
        "| `decoder_2026`, 200, 40 | `decoder_adamw_2026`, 400, 16 | 1 | +0.50 | -0.10 | -0.10 |"
    ]


def test_pairs_may_be_of_other_rates_and_steps(rows):
    short = {**rows[-1], "steps": 200, "factor": 32.0, "rate": 0.25}
    pairs = [(match.cell("decoder_2026", 2), match.cell("decoder_adamw_2026", 2, steps=200))]
    assert match.differences([*rows, short], pairs).splitlines()[2:] == [
        "| `decoder_2026`, 200, 80 | `decoder_adamw_2026`, 200, 32 | 1 | +0.00 | -0.50 | -0.50 |"
    ]


def test_runs_of_other_lengths_have_lines_of_their_own(rows):
    lines = match.rates([*rows, {**rows[-1], "steps": 200}]).splitlines()[2:]
    assert [line.split(" | ")[2] for line in lines if "adamw" in line] == ["200", "400"]


def test_arms_of_a_pair_differ_in_the_updates_alone():
    for spectral, adamw in match.PAIRS.items():
        assert {**kept.KEPT[adamw], "gradient_control.spectral": "true"} == kept.KEPT[spectral]


def test_without_muon_adamw_updates_every_weight_at_the_same_rates():
    net = new_unet((32, 32))
    with_muon, without = (MuonWithAdamW(net, 1e-3, muon) for muon in (True, False))
    assert isinstance(with_muon.optimizers[0], Muon) and not isinstance(without.optimizers[0], Muon)
    for a, b in zip(with_muon.optimizers, without.optimizers, strict=True):
        assert a.param_groups[0]["lr"] == b.param_groups[0]["lr"]
        assert len(a.param_groups[0]["params"]) == len(b.param_groups[0]["params"])


def test_rates_have_few_columns(rows):
    lines = match.rates(rows).splitlines()[2:]
    assert lines[0].startswith("| `decoder_2026` (C) | 40 | 200 | 2 | 0.75 [") and len(lines) == 3
