"""Parts of a finished run put back to its base: the two ends are the run's own, and parts add up."""

import json
import re
import shutil

import pytest
import torch

from silentbad.localise import __main__ as localise
from silentbad.localise import findings, substitution
from silentbad.measure.record import Record
from silentbad.report.parts import Rate, Row
from tests.conftest import write_data
from tests.training import VALIDATION
from train_silentbad import main


@pytest.fixture
def finished(flags, tmp_path):
    """A run of the decoder with masked elements and held-out clean records; the arguments that measure it."""
    data = write_data(tmp_path / "data", clean=20)
    target = json.loads((data / "targets.jsonl").read_text())
    (data / "targets.jsonl").write_text(json.dumps(target | {"masks": ["masks/e0-0.png", "masks/e1-0.png"]}))

    def make(**changes):
        settings = {"train_data_dir": data, "validation.targets": data / "targets.jsonl", "held_out_clean": 2}
        settings |= VALIDATION | {"validation.threshold": 0.02, "validation.images_per_target": 3}
        settings |= {"validation.embedder": "auto"}  # as a run on one's own pictures, without redraws
        settings |= {"max_train_steps": 4, "learning_rate": 0.02, "train_layers": '["up*"]'}
        assert main(flags(**settings | {"validation.steps": 4, "validation.controls": "never"} | changes)) == 0
        return tmp_path / "run"

    return make


def rows_of(run, *more):
    assert localise.main([str(run), *more]) == 0
    written = json.loads((run / "localise.json").read_text())
    return {(row["part"], row["by"], row["state"]): row for row in written["rows"]}, written


def measured(row):
    return {key: row[key] for key in ("recovered", "targets", "elements", "clean")}


def test_the_ends_are_the_runs_own_and_the_parts_add_up(finished, capsys):
    run = finished()
    rows, written = rows_of(run, "--by", "stage", "role", "both")
    history = Record.load(run / "validation.json").history
    for end, entry in (("as trained", history[-1]), ("base", history[0])):
        row = rows[end, "", ""]
        assert (row["recovered"]["count"], row["recovered"]["images"]) == (entry.raw.above, 3)
        assert row["clean"] == pytest.approx(entry.raw.drift["clean_eps_mse"], rel=1e-6)
        rates = [None if rate is None else rate["count"] / 3 for rate in row["elements"]["t0"]]
        assert rates == [pytest.approx(e.rate) for e in entry.raw.targets["t0"].elements]
        assert row["wholes"]["t0"]["count"] / 3 == pytest.approx(entry.raw.targets["t0"].whole_rate)
    assert {part for part, by, _ in rows if by == "stage"} == {"up0", "up1"}
    assert measured(rows["up0", "stage", "put back"]) == measured(rows["up1", "stage", "kept alone"])
    assert rows["up0", "stage", "put back"]["clean"] != rows["as trained", "", ""]["clean"]
    by_stage = [row["share"] for (_, by, state), row in rows.items() if by == "stage" and state == "put back"]
    by_both = [row["share"] for (_, by, state), row in rows.items() if by == "both" and state == "put back"]
    assert sum(by_stage) == pytest.approx(1) and sum(by_both) == pytest.approx(1)
    low, high = rows["up0", "stage", "put back"]["recovered"]["interval"]
    assert 0 <= low < high <= 1
    printed = capsys.readouterr().out
    assert written["defence"] in printed
    assert written["kept"].startswith("Kept: ") and written["kept"] in printed
    report = (run / "report.html").read_text()
    assert "Where the memory sits" in report and written["defence"] in report.replace("&#39;", "'")
    for title in ("t0: put back", "t0: kept alone", "strict rate, put back", "mean rate of the elements, kept alone"):
        assert title in report
    assert "up0 put back" in report  # of the table


def test_adapters_are_parts_too(finished):
    run = finished(**{"lora.rank": 2, "lora.targets": '["attn","resnet"]'})
    rows, _ = rows_of(run)
    assert {part for part, by, _ in rows if by == "role"} == {"attn", "resnet"}
    entry = Record.load(run / "validation.json").history[-1]
    assert rows["as trained", "", ""]["clean"] == pytest.approx(entry.raw.drift["clean_eps_mse"], rel=1e-4)


def test_a_mixture_is_undone():
    modules = {"unet": torch.nn.Linear(4, 4)}
    base = {"unet": torch.nn.Linear(4, 4)}
    weight = modules["unet"].weight.detach().clone()
    change = substitution.Change(modules, base, "--base x")
    with change.trained_in(lambda group: False):
        assert torch.equal(modules["unet"].weight, base["unet"].weight)
    assert torch.equal(modules["unet"].weight, weight)


def row(part, state, count, clean, by="stage", share=0.5):
    rate = Rate.of([True] * count + [False] * (8 - count))
    return Row(part, by, state, share, rate, {"t": rate}, {"t": rate}, {"t": [rate]}, clean)


def test_the_defence_is_the_part_that_costs_least():
    ends = [row("as trained", "", 8, 0.2, by=""), row("base", "", 0, 0.1, by="")]
    parts = [row("a", "put back", 0, 0.18), row("b", "put back", 0, 0.12), row("c", "put back", 3, 0.1)]
    alone = [row("d", "kept alone", 0, 0.05)]
    said = findings.defence([*ends, *parts, *alone])
    assert said.startswith("Put b back (50.0% of what changed): none of 8 images") and "0.1200" in said
    # the best of several: 1 - (0.025 / 3) ** (1 / 8), not 37 %
    assert "at most 45% with 95 % confidence, as the best of 3 parts" in said
    assert "No single part" in findings.defence([*ends, parts[2], *alone])
    assert "with c put back, 3 of 8 images stay" in findings.defence([*ends, parts[2], *alone])
    assert "nothing to remove" in findings.defence([ends[1], ends[1], *parts])


def test_mistakes_are_one_line(finished, pipelines, tmp_path, capsys):
    run = finished()
    moved = tmp_path / "data" / "targets.jsonl"
    cases = {
        (str(tmp_path),): "RUN: no file",
        (str(run), "--images", "0"): "images (command line): must be at least 1",
        (str(run), "--targets", "no.jsonl"): "--targets: no file or folder no.jsonl",
        (str(run), "--base", str(pipelines["sd2"])): "has other parameters than the run's",
        (str(run), "--base", str(run / "pipeline")): "holds the weights of the run itself",
    }
    capsys.readouterr()
    for words, said in cases.items():
        assert localise.main([*words]) == 2
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
        assert len(lines) == 1 and said in lines[0], lines
    text = moved.read_text()
    moved.write_text(text.replace('"t0"', '"t1"'))
    assert localise.main([str(run)]) == 2 and "which are not the run's" in capsys.readouterr().err
    moved.write_text(text)
    shutil.rmtree(run / "pipeline")
    assert localise.main([str(run)]) == 2 and "RUN" in capsys.readouterr().err
    assert not list(run.glob("localise*")) and re.search("finished", " ".join(p.name for p in run.iterdir()))
