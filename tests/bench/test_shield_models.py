"""The shield on models: the rank of a hidden prompt, the tables, and a small run of each benchmark."""

from pathlib import Path

import numpy as np
import pytest

from bench import shield_models
from bench.recovery import BASE
from bench.shield import bounds
from bench.shield_models import LEAK_FREE, Plan, guards_of, rank_of, run
from bench.shield_table import auc_interval, audit_table, guard_table
from bench.shield_worlds import WORLDS
from silentbad_shield.options import SearchOptions
from silentbad_shield.search.search import Probe
from silentbad_shield.search.unknown import ordinary


def probe(*phrases):
    return Probe(list(phrases), 0.0, 0.0, 0.0, 0.0)


def asked(score, p=0.5, found=False):
    return {"probe": score, "between": 0.1, "p": p, "share": 0.2, "found": found}


def pipeline(kind, target, own, rank=1):
    """A row of the audit with 60 ordinary prompts."""
    row = {"kind": kind, "target": target, "steps": 300, "commit": "a" * 40, "strict": {"0": 0.0, "300": 0.75}}
    row |= {
        "own": own,
        "ordinary": [asked(float(k % 5)) for k in range(60)],
        "phrases": ["a Cat", "a hat", "in a room"],
    }
    return row | {"given": ["a cat", "in a room"], "searched": 40, "rank": rank, "part": 1}


def guarded(kind, strict, loss, **more):
    row = {"kind": kind, "target": "7", "steps": 400, "commit": "a" * 40, "seconds": 90.0}
    return row | {"strict": {"0": 0.0, "40": strict}, "clean_loss": {"0": 0.1, "40": loss}, **more}


def test_the_hidden_prompts_rank_is_among_all_searched():
    found = rank_of([probe("a cat", "a boat"), probe("a cat", "a hat"), probe("a hat", "in a room", "a cat")], HIDDEN)
    assert (found["rank"], found["part"], found["searched"]) == (3, 2, 3)
    assert rank_of([probe("a boat", "a cup")], HIDDEN)["rank"] is None


HIDDEN = ["a Cat", "a hat", "in a room"]


def test_an_area_of_one_keeps_an_interval():
    low, high = auc_interval(1.0, 4, 6)
    assert low == pytest.approx(0.6, abs=0.1) and high == 1
    low, high = auc_interval(0.8, 200, 200)
    assert low == pytest.approx(0.754, abs=0.01) and high == pytest.approx(0.839, abs=0.01)


def test_the_audits_table_states_its_denominators():
    rows = [pipeline("elements", "7", asked(9.0, 1e-6, True)), pipeline("elements", "8", asked(8.0, 1e-4, True), None)]
    rows += [pipeline("placebo", "7", asked(1.0)), pipeline("clean", "7", asked(0.0))]
    text = audit_table(rows)
    assert "2 trained on elements, 1 on placebo data, 1 on clean data" in text
    assert (
        "| probes | 2 composed prompts of placebo and clean pipelines | 1.000 [" in text and "too few negatives" in text
    )
    assert "| probes | 240 ordinary prompts of all pipelines | 1.000 [" in text and "| 2 of 2 [0.16, 1.00] |" in text
    assert "| 8 | 2 of 3 | 40 | not searched | 1 | 0.75 |" in text and "best 10 in 1 of 2" in text
    later = audit_table([*rows, pipeline("elements", "3023", asked(9.0, 1e-6, True))])  # the present audit's targets
    assert "Targets: 3023." in later and "| 8 |" not in later


def test_the_guards_table_compares_with_the_clean_records():
    rows = [guarded("unguarded", 0.5, 0.3), guarded("clean records alone", 0.0, 0.2)]
    rows += [guarded("drop", 0.0, 0.2, flagged=80, right=80, elements=81)]
    text = guard_table(rows)
    shared = "| `recommended_leak_free_adamw` | 400 |"
    assert f"{shared} unguarded | 1 |  |  | 0.50 | 0.50 | 1 of 1 [0.03, 1.00] | +50.0 to +50.0 % | 90 |" in text
    assert f"{shared} drop | 1 | 80 | 80 of 81 | 0.00 | 0.00 | 0 of 1 [0.00, 0.97] | +0.0 to +0.0 % | 90 |" in text


def test_what_is_guarded_trains_as_the_clean_records_do():
    for arm in ("recommended", LEAK_FREE):
        assert guards_of(arm)["drop"] == guards_of(arm)["clean records alone"]
        assert ("gradient_control.spectral" in guards_of(arm)["drop"]) == (arm == "recommended")


def test_guards_are_measured_where_something_recovers(tmp_path, monkeypatch):
    made = []

    def row_of(kind, target, plan):
        made.append((kind, target))
        return {"strict": {"0": 0.0, "40": 0.5 if target == "8" else 0.0}, "clean_loss": {"40": 0.1}}

    monkeypatch.setattr(shield_models, "guard_row", row_of)
    for _ in range(2):  # the second time all rows are stored
        rows = run(Plan(guards=LEAK_FREE, steps=40), ["7", "8"], tmp_path / "rows.jsonl")
    assert made == [("unguarded", "7"), *((guard, "8") for guard in guards_of(LEAK_FREE))] and len(rows) == 4


@pytest.mark.parametrize("name", WORLDS)
def test_ordinary_prompts_are_of_the_models_world(name):
    world = WORLDS[name]
    scenes = [world.targets.world.sample_scene(np.random.default_rng(i), detail=0.0) for i in range(200)]
    assert {scene.backdrop.phrase for scene in scenes} == {*world.places}
    nouns = {phrase.split()[-1] for scene in scenes for phrase in scene.phrases if phrase not in world.places}
    assert nouns <= {thing.split()[-1] for thing in world.things}
    avoid = [*world.things[1:], world.places[0]]
    for prompt in ordinary(SearchOptions(nulls=8), 8, 2, avoid, world.things, world.places):
        thing, place = prompt.split(", ")
        assert thing == world.things[0] and place in world.places[1:]


def test_each_world_has_files_and_targets_of_its_own():
    files = [world.file(seed, "shield-audit.jsonl") for world in WORLDS.values() for seed in (7, 3140)]
    assert [file.parent.name for file in files] == ["runs", "results"] * len(WORLDS) and len({*files}) == len(files)
    targets = [seed for world in WORLDS.values() for part in (world.scans, world.models) for seed in reported(part)]
    assert min(targets) >= 1000


def reported(seeds):
    first, last = bounds(seeds)
    return range(first, last + 1)


def test_a_models_base_and_detector_are_flags_of_its_training():
    assert Plan().flags() == {}
    assert Plan(world="emoji").flags()["validation.embedder_path"].endswith("assets/emoji-sd/embedder")
    own = Plan(world="emoji", base=Path("runs/base"), embedder=Path("runs/detector"))
    assert own.flags() == {BASE: "runs/base", "validation.embedder_path": "runs/detector"}


@pytest.mark.thorough
def test_small_models_are_audited_and_guarded(tmp_path, monkeypatch):
    small = {"steps": 12, "clean": 200, "images": 2}
    rows = run(Plan(**small, seeds=3, nulls=8, ordinary=6), ["101"], tmp_path / "audit.jsonl")
    assert [row["kind"] for row in rows] == list(shield_models.KINDS) and rows[0]["searched"] > 0
    assert all(len(row["ordinary"]) == 6 and np.isfinite(row["own"]["probe"]) for row in rows)
    monkeypatch.setattr(shield_models, "recovers", lambda rows, target: True)
    rows = run(Plan(guards=LEAK_FREE, **small, every=6), ["101"], tmp_path / "guards.jsonl")
    assert [row["kind"] for row in rows] == list(guards_of(LEAK_FREE)) and rows[2]["right"] > 0
