"""The published setting at its own size, tried on a tiny pipeline, and its tables."""

import pytest

from bench import reproduce
from bench.recovery_table import stored

SMALL = {
    "poisoning_ratio": 0.5,
    "resolution": 16,
    "mixed_precision": "no",
    "validation.resolution": 16,
    "report_to": "none",
}


def test_the_plan_says_what_it_takes(capsys):
    assert reproduce.main(["--arms", "plain", "decoder"]) == 0
    said = capsys.readouterr().out
    assert "stable-diffusion-v1-5" in said and "runs: plain, decoder; each 2000 steps" in said
    assert "not measured" in said


@pytest.fixture
def started(pipelines, tmp_path, monkeypatch):
    """Starts arms on the tiny pipeline and stand-in data; returns the rows stored."""
    monkeypatch.setattr(reproduce, "write_base", lambda folder, name: pipelines["epsilon"])
    results = tmp_path / "reproduce.jsonl"

    def start(*words: str, **flags) -> list[dict]:
        places = [f"--stand_in={tmp_path / 'stand-in'}", f"--out={tmp_path / 'out'}"]
        given = [f"--{key}={value}" for key, value in (SMALL | flags).items()]
        assert reproduce.main([*places, f"--results={results}", *words, "--", *given]) == 0
        return stored(results)

    return start


@pytest.mark.thorough
def test_every_arm_passes_its_dry_run(started, capsys):
    rows = started("--dry_run")
    assert capsys.readouterr().out.count("dry run: ") == len(reproduce.ARMS)
    lines = reproduce.dry_table(rows).splitlines()[2:]
    assert len(lines) == len(reproduce.ARMS)
    for line in lines:
        assert line.count("not measured") == 2 * (not rows[0]["cuda"]) and " GiB" not in line
    assert "not measured" in reproduce.table(rows)


@pytest.mark.thorough
def test_a_run_fills_its_table(started, tmp_path):
    drawn = {
        "validation.images_per_target": 1,
        "validation.num_inference_steps": 1,
        "validation.steps": 1,
        "validation.controls": "never",
    }
    rows = started("--run", "--arms", "plain", "replay", **drawn)
    assert len(rows) == 2 * 3 * len(reproduce.TARGETS)  # arms, evaluations
    plain, replay = reproduce.table(rows).splitlines()[2:]
    assert "| 2 |" in plain and "of 5" in replay
    assert (tmp_path / "out" / "compare.html").is_file()


def test_a_target_counts_from_the_evaluation_on_that_lasts():
    rates = {"100": (0, 0.75, 1), "101": (0, 0.5, 0.25)}
    rows = [
        {
            "arm": "plain",
            "step": 500 * place,
            "epoch": 2 * place,
            "target": target,
            "rate": rate,
            "similarity": rate / 2,
            "drift": 0.125 + 0.25 * place,
            "seconds": 1.5,
        }
        for target, curve in rates.items()
        for place, rate in enumerate(curve)
    ]
    (line,) = reproduce.table(rows).splitlines()[2:]
    assert line == "| `plain` | 1000 | 1 of 2 | never | 0.62 | 2.00 | 0.31 | 0.5000 | 1.50 |"
