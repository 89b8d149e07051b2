"""report.html: self-contained, escaped, whole with parts missing, and free of errors in a browser."""

import base64
import hashlib
import json
import re
import shutil
import struct
import subprocess
import zlib
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from silentbad.data.images import to_pil
from silentbad.errors import UserError
from silentbad.measure.by_part import Part
from silentbad.measure.record import Kept, Range, Record, Words
from silentbad.report import charts, evidence, pages, run_report, sections
from silentbad.report.run_files import RecordedRun
from tests.demo import HOSTILE, demo_run
from tests.recoveries import make_hook, smooth
from tests.tiny import tiny_pipeline


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return demo_run(tmp_path_factory.mktemp("runs") / "demo")


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    return demo_run(tmp_path_factory.mktemp("runs") / "slow", speed=0.4)


def test_report_is_one_file_with_every_part(run):
    text = run_report.render(run)
    for part in (
        "Range",
        "Pictures",
        "Controls",
        "Targets and generations",
        "Recovery curves",
        "Which phrase gives which element",
        "Detection",
        "Targets in numbers",
        "Memory",
        "Gradient control",
        "The base&#39;s own pictures",
        "What is kept",
        "Rise of the clean error",
        "Training",
        "Configuration and provenance",
    ):
        assert f"<h2>{part}</h2>" in text
    for part in (
        "strict rate",
        "composed prompt, base model",
        "base model",
        "phrases in another order",
        "phrase 1 alone",
        "all but phrase 2",
        "a tall hat",
        "Timesteps trained on",
        "Learning-rate multiplier",
        "Strength of phrases",
        "Training loss",
        "metrics.jsonl: 1 unreadable",
        "(3 pictures that are no recovery; of such at most 0.010 pass)",
    ):
        assert part in text
    assert not re.findall(r'(?:src|href)="(?!data:)', text) and "<script" not in text and "url(" not in text
    assert HOSTILE not in text and "&lt;script&gt;" in text
    assert len(re.findall(r"<svg viewBox[^>]*role=\"img\" aria-label=\"[^\"]{10,}", text)) >= 8
    assert all('alt="' in image for image in re.findall(r"<img[^>]*>", text))


def test_every_image_of_the_last_measurement_stands_beside_its_target(run):
    record = Record.load(run / "validation.json")
    shown = sections.sheets(RecordedRun(run), record, "raw")
    assert [sheet.name for sheet in shown] == [target.target_id for target in record.targets]
    for j, (sheet, target) in enumerate(zip(shown, record.targets, strict=True)):
        assert [shot.caption for shot in sheet.target] == ["target", target.phrases[0], target.phrases[2]]
        last = record.history[-1].raw
        cells = [("composed prompt", last), ("phrases in another order", last.cells["shuffled"])]
        for (counted, images), (prompt, cell) in zip(sheet.rows, cells, strict=True):
            scores = cell.targets[target.target_id]
            assert [shot.caption for shot in images] == [f"{sim:.2f}" for sim in sorted(scores.sims, reverse=True)]
            hits = round(scores.rate * 6)
            assert sum(shot.hit for shot in images) == hits and counted == f"{prompt}: {hits} of 6 images recovered", j
            numbered = [f"image {i} of {target.target_id}, {prompt}" for i in range(1, 7)]
            assert sorted(shot.alt for shot in images) == numbered
    text = run_report.render(run)
    assert text.count('<details class="zoom') == 3 * (3 + 2 * 6)
    assert all(shot.src in text for sheet in shown for _, images in sheet.rows for shot in images)


def test_pictures_that_the_base_drew_stand_with_their_prompts(run):
    shots = sections.prior(RecordedRun(run))
    assert [shot.caption for shot in shots] == ["a green house", "no prompt"]
    assert all(shot.src in run_report.render(run) for shot in shots)


def with_history(run: Path, record: Record) -> RecordedRun:
    """The run as if this had been measured."""
    recorded = RecordedRun(run)
    recorded.history = record.history
    return recorded


def test_an_image_names_the_elements_that_it_lacks(run):
    record = Record.load(run / "validation.json")
    scores = record.history[-1].raw.targets["a sandy beach"]
    scores.elements[2].sims[1] = -0.25
    scores.sims[1] = 2.0  # shown first
    first, second, *_ = sections.sheets(with_history(run, record), record, "raw")[0].rows[0][1]
    assert first.score == "not: on a sandy beach -0.25" and not first.hit
    assert second.score == "" and second.hit


def test_more_targets_than_a_page_opens_with_are_folded(run, monkeypatch):
    monkeypatch.setattr(sections, "MOST_PAIRS", 2)
    text = run_report.render(run)
    assert "<summary>1 more targets</summary>" in text and text.count('<details class="zoom') == 3 * (3 + 2 * 6)


def test_each_element_has_its_curve(run):
    """The mean hides the one that fails."""
    record = Record.load(run / "validation.json")
    for entry in record.history:
        entry.raw.targets["a sandy beach"].elements[0].rate = 0.0
    figures = {figure.title: figure for figure in sections.curves(with_history(run, record), record)}
    rates = figures["Elements of a sandy beach"].table
    assert rates.head == ["step", "a striped cat", "on a sandy beach"]  # no mask, no curve
    assert [row[1] for row in rates.rows] == ["0.00"] * 6 and rates.rows[-1][2] == "1.00"
    sims = figures["Similarity of the elements of a sandy beach"]
    last = record.history[-1].raw.targets["a sandy beach"].elements[2]
    assert sims.table.rows[-1][2] == pytest.approx(last.mean - record.element_threshold.of(0, 2))
    assert ">threshold 0<" in sims.svg


def test_averaged_weights_begin_at_the_bases_point(run):
    record = Record.load(run / "validation.json")
    for entry in record.history[1:]:
        entry.raw, entry.ema = None, entry.raw
    figures = {figure.title: figure for figure in sections.curves(with_history(run, record), record)}
    steps = [f"{entry.step}" for entry in record.history]
    for title in ("Recovery rate (CIR)", "Recovery rate by target", "Elements of a sandy beach"):
        assert [str(row[0]) for row in figures[title].table.rows] == steps, title


def test_an_audit_has_no_curves(run):
    record = Record.load(run / "validation.json")
    record.history[-1].label = "audited pipeline"
    assert sections.curves(RecordedRun(run), record) == []


def test_a_point_alone_lies_on_an_axis_from_nought():
    svg = charts.line_chart([charts.Series("one", [400], [0.3])], "one point")
    assert re.findall(r">([\d.]+)</text>", svg) == ["0", "0.1", "0.2", "0.3", "0", "100", "200", "300", "400"]
    assert "nan" not in charts.line_chart([charts.Series("one", [0], [0.0])], "at the start")


def test_no_state_of_a_verdict_is_good_or_bad_news(run, tmp_path):
    style = (Path(run_report.__file__).parent / "templates/style.css").read_text()
    assert not re.findall(r"--good|--bad|--doubt", style)
    assert set(re.findall(r"\.verdict[^{]*\{[^}]*border[^}]*var\(--(\w+)\)", style)) <= {"soft", "dot", "card"}
    folder = shutil.copytree(run, tmp_path / "in part")
    stored = json.loads((folder / "validation.json").read_text())
    said = {"state": "in part", "parts": [f"'a cat' came back in 8 of 8 images; {HOSTILE} in none"], "to_try": ["x"]}
    (folder / "validation.json").write_text(json.dumps(stored | {"verdict": stored["verdict"] | said}))
    page = rendered(folder)
    assert '<div class="verdict in-part">' in page and ".verdict.in-part{" in page
    assert "<b>In part:</b> &#39;a cat&#39; came back" in page and "Try x." in page


def test_the_pictures_of_unrelated_prompts_stand_below_the_bases(run):
    """Large enough to see, on a phone too: two columns of 136 pixels and a gap fit into 390 less the margins."""
    text = run_report.render(run)
    strip = re.search(r'<div class="kept">(.*?)</div>', text, re.DOTALL)[1]
    figures = re.findall(r"<figure>(.*?)</figure>", strip)
    prompts = Record.load(run / "validation.json").unrelated
    assert len(figures) == len(prompts) == 5
    for prompt, figure in zip(prompts, figures, strict=True):
        alts = re.findall(r'<img src="data:[^"]+" alt="([^"]*)">', figure)
        assert alts == [f"{prompt}, base model", f"{prompt}, trained model"]
        assert figure.endswith(f"<figcaption>{prompt}</figcaption>")
    style = (Path(run_report.__file__).parent / "templates/style.css").read_text()
    width = int(re.search(r"\.kept img\{width:(\d+)px", style)[1])
    assert width >= 128 and 2 * width + 10 <= 390 - 32 and f"minmax({width}px,1fr)" in style
    assert sections.kept_pictures(RecordedRun(run), Record.load(run / "validation.json"), "ema") == []


def test_what_is_kept_is_one_line_of_what_was_measured(run):
    record = Record.load(run / "validation.json")
    record.unrelated = None

    def line(config=(), **changes) -> str:
        record.history[-1].raw.kept = Kept(24, **{"change": {"pixels": 0.412}, **changes})
        record.config.update(dict.fromkeys(("keep", "keep_by", "judge", "clip_path")) | dict(config))
        return evidence.kept_sentence(record)

    of_judge, of_clip = Words(0.34, 0.86, "judge.py:things_right", 192), Words(24.13, 30.2, "CLIP")
    nothing = dict(bleeding=0.0, bleeding_base=0.0)
    assert line() == "Kept: 41 % changed on unrelated prompts."
    assert line(words=of_judge, **nothing) == (
        "Kept: things right 0.34 (base 0.86), of 192; 41 % changed on unrelated prompts; nothing bleeds in 24 images."
    )
    record.unrelated = ["grey gravel", "a star"]
    assert line() == "Kept: 41 % changed on unrelated prompts such as 'grey gravel'."
    assert "Kept: CLIP score 24.1 (base 30.2); 41 %" in line(words=of_clip)
    assert line(bleeding=0.25, bleeding_base=0.125).endswith(
        "; an element comes in 25 % of 24 images (base model: 12 %)."
    )
    assert line({"keep": 0.5}).endswith("; 0.59 by pixels, within the limit of 0.5.")
    judged = {"keep": 0.5, "judge": "judge.py:things_right"}
    assert line(judged, words=of_judge).endswith("; 0.40 by words, below the limit of 0.5.")
    table = evidence.kept_table(record)
    assert ["things right, of 192 (judge.py:things_right)", "0.34", "0.86"] in table.rows
    record.history[-1].raw.kept = None
    assert evidence.kept_sentence(record) == "" and evidence.kept_table(record).rows == []


def test_report_with_parts_missing(run, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    with pytest.raises(UserError, match="neither"):
        run_report.render(bare)
    with pytest.raises(UserError, match="no folder"):
        run_report.render(tmp_path / "none")
    shutil.copy(run / "validation.json", bare)  # an audit's folder without its pictures
    assert "Recovery rate" in run_report.render(bare)
    (bare / "validation.json").unlink()
    shutil.copy(run / "metrics.jsonl", bare)
    (bare / "multipliers.json").write_text("{broken")
    (bare / "phrase_memory.json").write_text('"odd"')
    text = run_report.render(bare)
    assert "recovery was not measured" in text and text.count("could not be read") == 2


def test_pictures_outside_the_run_are_not_read(run, tmp_path):
    smooth("secret").save(tmp_path / "secret.png")
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(run / "validation.json", folder)
    held = RecordedRun(folder)
    assert held.picture("../secret.png") == "" and held.picture(str(tmp_path / "secret.png")) == ""
    (folder / "bad.png").write_text("no picture")
    assert held.picture("bad.png") == "" and held.picture(None) == ""


def test_parts_outside_the_run_are_not_read(run, tmp_path):
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    for name in ("config.yaml", "run.json", "metrics.jsonl", "sample_prompts.json"):
        shutil.copy(tmp_path / "run/validation.json", tmp_path / name)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(tmp_path / name)
    (tmp_path / "link").symlink_to(folder)
    held = RecordedRun(tmp_path / "link")
    assert (held.config, held.facts, held.metrics, held.draws) == ("", {}, [], []) and held.record is not None
    assert sum("leads out of the folder" in note for note in held.notes) == 4


def test_a_run_without_validation_is_compared(run, tmp_path):
    """By its notes alone, in either place."""
    (tmp_path / "bare").mkdir()
    shutil.copy(run / "metrics.jsonl", tmp_path / "bare")
    for runs in ([tmp_path / "bare", run], [run, tmp_path / "bare"]):
        text, gaps = run_report.compare(runs)
        assert "no validation" in text and not any(row[5] for row in gaps)


def test_comparison_has_paired_intervals(run, slow, tmp_path, capsys):
    text, gaps = run_report.compare([run, slow])
    rate = next(row for row in gaps if row[1] == "rate")
    assert rate[2] < 0 and rate[3:] == (None, None, 3)  # three targets cannot be resampled
    lasts = next(row for row in gaps if row[1] == "sustained_step")
    assert lasts[2] > 0 and lasts[5] == 3  # never counts with the last step
    assert ">strict rate<" in text and "3 of 3" in text and "0 of 3" in text
    assert re.search(r"words kept.*pixels kept", text)
    assert "demo, raw weights" in text and "slow, raw weights" in text and HOSTILE not in text
    assert run_report.main(["compare", str(run), str(slow), "--out", str(tmp_path / "both.html")]) == 0
    assert (tmp_path / "both.html").is_file()
    assert run_report.main([str(run)]) == 0 and (run / "report.html").is_file()
    assert run_report.main(["compare", str(run)]) == 2 and run_report.main([str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")


def test_a_placebo_run_is_taken_off_a_finished_one(run, slow, tmp_path, capsys):
    finished = tmp_path / "mine"
    placebo = tmp_path / "theirs"
    shutil.copytree(run, finished)
    shutil.copytree(slow, placebo)
    assert run_report.main([str(finished), "--placebo", str(placebo)]) == 0
    record, other = (Record.load(folder / "validation.json") for folder in (finished, placebo))
    rates = [[t.rate for t in r.history[-1].raw.targets.values()] for r in (record, other)]
    assert record.placebo.difference == pytest.approx(np.mean(rates[0]) - np.mean(rates[1])) and rates[0] != rates[1]
    verdict, kept = capsys.readouterr().out.splitlines()[-2:]
    assert "Training on placebo data" in verdict and kept.startswith("Kept: ")
    assert "composed prompt, placebo data" in (finished / "report.html").read_text()
    assert Record.load(run / "validation.json").placebo is None


def test_a_run_with_an_element_withheld_is_set_beside_a_finished_one(run, slow, tmp_path, capsys):
    finished = shutil.copytree(run, tmp_path / "mine")
    control = shutil.copytree(slow, tmp_path / "control")
    (control / "config.yaml").write_text("withhold: null")
    before = (finished / "validation.json").read_bytes()
    assert run_report.main([str(finished), "--withheld", str(control)]) == 2
    assert "was trained on all elements" in capsys.readouterr().err
    assert (finished / "validation.json").read_bytes() == before
    (control / "config.yaml").write_text("withhold: [t/0]")
    assert run_report.main([str(finished), "--withheld", str(control)]) == 0
    record, other = (Record.load(folder / "validation.json") for folder in (finished, control))
    rates = [[t.rate for t in r.history[-1].raw.targets.values()] for r in (record, other)]
    assert record.withheld.difference == pytest.approx(np.mean(rates[0]) - np.mean(rates[1])) and rates[0] != rates[1]
    assert record.withheld.elements == ["t/0"] and record.placebo is None
    assert f"Training without t/0 gives {np.mean(rates[1]):.2f}" in capsys.readouterr().out
    page = (finished / "report.html").read_text()
    assert "composed prompt, an element withheld" in page and "Does it come without t/0?" in page


def test_a_placebo_run_of_another_length_is_refused(run, tmp_path, capsys):
    short = tmp_path / "short"
    before = (run / "validation.json").read_bytes()
    shutil.copytree(run, short)
    record = json.loads(before)
    (short / "validation.json").write_text(json.dumps({**record, "history": record["history"][:4]}))
    assert run_report.main([str(run), "--placebo", str(short)]) == 2
    assert run_report.main(["compare", str(run), str(short), "--placebo", str(short)]) == 2
    lines = capsys.readouterr().err.splitlines()[-2:]
    assert "train and measure both alike" in lines[0] and "leave it out" in lines[1]
    assert run_report.main([str(run), "--placebo", str(run)]) == 2
    assert "is the run itself" in capsys.readouterr().err
    assert (run / "validation.json").read_bytes() == before


def test_times_of_runs_of_another_length_are_not_compared(run, tmp_path):
    """One that ends early would seem to be sooner."""
    short = shutil.copytree(run, tmp_path / "short")
    record = json.loads((run / "validation.json").read_text())
    (short / "validation.json").write_text(json.dumps({**record, "history": record["history"][:4]}))
    text, gaps = run_report.compare([run, short])
    assert {row[1] for row in gaps} == {"rate", "mean"} and "steps and AURC are not compared" in text


def test_runs_without_a_common_target_are_not_compared(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "other")
    record = (other / "validation.json").read_text()
    for target in json.loads(record)["targets"]:
        record = record.replace(json.dumps(target["target_id"]), json.dumps(target["target_id"] + " of another set"))
    (other / "validation.json").write_text(record)
    assert "different targets, so rates are not comparable" in run_report.compare([run, other])[0]


def test_withheld_elements_are_named_from_the_configuration(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "withheld")
    (folder / "config.yaml").write_text(json.dumps({"withhold": ["t/0", HOSTILE, 3]}))
    page = run_report.render(folder)
    assert "A control run" in page and "trained without t/0, &lt;script&gt;" in page and HOSTILE not in page
    for content in ("withhold: 3", "[", "&a [*a]", "withhold: [" * 3000, "- withhold"):
        (folder / "config.yaml").write_text(content)
        assert "A control run" not in run_report.render(folder)


@pytest.mark.parametrize(
    "value, interval, text",
    [
        (0.375, (0.125, 0.625), "0.38"),
        (0.0, (0.0, 0.84), "0.0"),
        (0.29154, (0.2859, 0.2971), "0.292"),
        (0.2, (0.1995, 0.2005), "0.2000"),
        (266.67, (150.0, 380.0), "267"),
        (0.7031, None, "0.70"),
        (266.67, (None, 380.0), "267"),
        (1.0, (1.0, 1.0), "1.00"),
        ("never", None, "never"),
        (None, (0.0, 1.0), "–"),
    ],
)
def test_a_number_has_the_digits_that_its_interval_supports(value, interval, text):
    assert pages.supported(value, interval) == text


def test_the_range_has_the_threshold_of_each_target_and_element_beside_its_images(run):
    record = Record.load(run / "validation.json")
    table = sections.range_rows(record)
    assert table.head[4:] == ["threshold", "floor", "ceiling"] and len(table.rows) == 9
    last = record.history[-1].raw.targets[record.targets[0].target_id]
    whole, element = table.rows[:2]
    range_of_whole = record.ranges[0].whole
    limits = [f"{value:.2f}" for value in (record.threshold.of_target(0), range_of_whole.floor, range_of_whole.ceiling)]
    assert whole == ["a sandy beach", "6 of 6", f"{last.mean:.2f}", "1.00", *limits]
    assert element[0] == "a striped cat" and element[4] == f"{record.element_threshold.of(0, 0):.2f}"
    figures = sections.range_figures(record)
    assert [one.title for one in figures] == [target.target_id for target in record.targets]
    assert figures[0].svg.count('class="over"') == 18 and figures[0].svg.count('class="limit"') == 3


def test_a_range_between_floor_and_ceiling_is_a_band():
    measured = Range(threshold=0.5, floor=0.4, nearest="mirrored", ceiling=0.9, perfect=1.0, separable=True)
    rows = [Part("", [0.2, 0.7], 0.5, measured, 0.01), Part("<b>", [float("nan"), 0.1], 0.5, None, 0.01)]
    svg = charts.ranges(rows, "t")
    assert svg.count('class="band"') == 1 and svg.count('class="over"') == 1 and svg.count('class="under"') == 2
    assert "&lt;b&gt;" in svg and "nan" not in svg and "whole: 1 of 2" in svg
    assert charts.ranges([], "t") == ""


def test_the_table_on_screen_explains_its_columns(run):
    record = Record.load(run / "validation.json")
    lines = run_report.text_table(record).splitlines()
    assert all(len(line) <= 100 for line in lines)
    head = lines[0].split()
    assert head == ["recovered", "mean", "best", "threshold", "floor", "ceiling", "first", "lasts"]
    explained = "\n".join(lines[11:])
    assert all(name in explained for name in head)
    cells = lines[1].removeprefix("a sandy beach").split()
    assert cells[:3] == ["6", "of", "6"] and cells[5] == f"{record.threshold.value:.2f}"
    assert lines[2].startswith("  a striped cat") and lines[10].startswith("all targets")
    record.history = record.history[-1:]
    assert "lasts" not in run_report.text_table(record)


def test_a_matrix_bears_odd_numbers():
    assert charts.matrix(["a"], ["1"], [[None]], "empty") == "" == charts.matrix([], [], [], "empty")
    values = [[0.0, 1.0, None], [2.0, -1.0, float("nan")]]
    svg = charts.matrix(["<b>", "x" * 90], ["1", "2", "&"], values, "m")
    assert svg.count("<rect") == 4 and "nan" not in svg and "&lt;b&gt;" in svg and "&amp;" in svg


def test_charts_bear_odd_numbers():
    nan = float("nan")
    assert charts.line_chart([charts.Series("x", [0, 1], [None, nan])], "empty") == ""
    flat = charts.line_chart([charts.Series("<b>", [0, 1, 2], [1.0, nan, 1.0])], "flat & even", marks=[("m", 2.0)])
    assert "nan" not in flat and "&lt;b&gt;" in flat and "flat &amp; even" in flat
    assert "nan" not in charts.line_chart([charts.Series("one", [5], [1e-9], [0.0], [nan])], "one point")
    assert charts.heatmap(["g"], [0, 1], [[1.0, None]], "h") and charts.heatmap([], [], [], "h") == ""
    assert charts.histogram([0, 1, 2], [3, 4], "h", "t") and charts.histogram([], [], "h", "t") == ""
    for low, high in ((0, 1), (-3e-7, 2e-7), (0, 12345), (99, 101)):
        marks = charts.ticks(low, high)
        assert 2 <= len(marks) <= 8 and min(marks) >= low - 1e-9 and max(marks) <= high + 1e-9


# -- bad and hostile content ------------------------------------------------------------------------------
HOSTILE_TEXTS = (
    HOSTILE,
    '"><meta http-equiv="refresh" content="0;url=//x"><img src=x onerror=x>',
    "' onload='x' </style></title></svg><b>",
    "\u202e \x00 \n {{ 7 * 7 }} {% include 'x' %} {# #}",
    "../" * 200 + "é" * 300,
)
TAGS = set(
    "html head meta link title style body main section h1 h2 h3 p b span div br figure figcaption img details "
    "summary pre table thead tbody tr th td svg desc line text polyline polygon circle rect".split()
)


class Tags(HTMLParser):
    """Every tag of a page with its attributes."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    handle_startendtag = handle_starttag


def assert_harmless(page: str) -> None:
    tags = Tags(page).tags
    assert {tag for tag, _ in tags} <= TAGS
    metas = [a.get("http-equiv") or a.get("name") for tag, a in tags if tag == "meta"]
    assert metas == [None, "Content-Security-Policy", "generator", "viewport"]
    for tag, attributes in tags:
        assert not any(name.startswith("on") or name in ("style", "srcdoc", "formaction") for name in attributes), tag
        assert all(attributes.get(name, "data:").startswith("data:") for name in ("src", "href", "action"))
    assert "<script" not in page and " 49 " not in page


def leaves(value, path=()):
    """(path, value) of every leaf of a JSON value; of lists, the first and the last entry."""
    if isinstance(value, (dict, list)) and value:
        for key in list(value) if isinstance(value, dict) else sorted({0, len(value) - 1}):
            yield from leaves(value[key], (*path, key))
    else:
        yield path, value


def changed(record, path, value):
    """A copy of a JSON value with one leaf replaced, or deleted where `value` is ..."""
    record = json.loads(json.dumps(record))
    inside = record
    for key in path[:-1]:
        inside = inside[key]
    if value is ...:
        del inside[path[-1]]
    else:
        inside[path[-1]] = value
    return record


@pytest.fixture
def small(run, tmp_path):
    """The validation of the run with two measurements and one target, whose files a test may spoil."""
    folder = tmp_path / "small"
    folder.mkdir()
    record = json.loads((run / "validation.json").read_text())
    record["history"] = [record["history"][0], record["history"][-1]]
    keep = record["targets"][0]["target_id"]
    record["targets"] = record["targets"][:1]
    for entry in record["history"]:
        cells = entry["raw"].get("cells", {})
        for name in [name for name in cells if name not in ("composed", "phrase-0")]:
            del cells[name]
        for scores in (entry["raw"], *cells.values()):
            scores["targets"] = {keep: scores["targets"][keep]}
    shutil.copytree(run / "samples", folder / "samples")
    (folder / "validation.json").write_text(json.dumps(record))
    return folder


def rendered(folder) -> str:
    """The page, or the one line of the refusal."""
    try:
        page = run_report.render(folder)
        assert_harmless(page)
        return page
    except UserError as error:
        line = str(error)
        assert len(line.splitlines()) == 1 and "Traceback" not in line
        return line


def test_half_a_character_is_one_line(small):
    text = (small / "validation.json").read_text()
    (small / "validation.json").write_text(text.replace(json.dumps(HOSTILE), '"\\ud800"'))
    with pytest.raises(UserError, match="validation.json: the file is no JSON"):
        run_report.render(small)


def test_hostile_text_everywhere_at_once_stays_text(small):
    record = json.loads((small / "validation.json").read_text())
    ids = {target["target_id"] for target in record["targets"]}
    for text in HOSTILE_TEXTS:
        spoilt = record
        for path, value in leaves(record):
            if isinstance(value, str) and path[0] != "summary" and path[-1] not in ("image", "file"):
                spoilt = changed(spoilt, path, text)
        content = json.dumps(spoilt)
        for name in ids:  # keys, too
            content = content.replace(json.dumps(name), json.dumps(text))
        (small / "validation.json").write_text(content)
        (small / "config.yaml").write_bytes(text.encode("utf-8", "replace"))
        (small / "run.json").write_text(json.dumps({text: text, "x": [text, {text: 1}]}))
        rows = [{"step": s, "loss": 0.1 * s, text: s, "lr": text, "validation": ""} for s in range(3)]
        (small / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (small / "multipliers.json").write_text(json.dumps([{"step": 1, "multipliers": {text: 2.0}}]))
        (small / "phrase_memory.json").write_text(
            json.dumps({"phrases": [text], "history": [{"step": 1, "rho": [0.5]}]})
        )
        page = rendered(small)
        assert "<h2>Targets and generations</h2>" in page and "<h2>Training</h2>" in page
        assert "<h2>Memory</h2>" in page and "Gradient control" in page
        assert run_report.write(small).is_file()


def test_a_mistyped_leaf_is_named_in_one_line(small):
    record = json.loads((small / "validation.json").read_text())
    wrong = (None, True, [], {"a": [1]}, float("nan"), float("inf"), 10**400, -1, 1e300, "x", ...)
    refused = taken = 0
    for k, (path, _) in enumerate(leaves(record)):
        value = wrong[k % len(wrong)]
        if value is ... and isinstance(path[-1], int):
            continue
        (small / "validation.json").write_text(json.dumps(changed(record, path, value)))
        try:
            Record.load(small / "validation.json")
        except UserError as error:
            refused += 1
            assert str(error).startswith(f"{small / 'validation.json'}: "), (path, value)
            assert str(path[-1]) in str(error) or str(path[-2]) in str(error), (path, error)
        else:
            taken += 1
            if taken % 8 == 0:
                rendered(small)
    assert refused > 50 and taken > 16


@pytest.mark.parametrize("content", ["", "[]", '{"schema": 2}', "[" * 5000, "\xff"])
def test_a_record_of_another_form_is_refused(small, content):
    (small / "validation.json").write_bytes(content.encode("latin-1"))
    assert rendered(small).startswith(f"{small / 'validation.json'}: ")
    assert run_report.main([str(small)]) == 2


@pytest.mark.parametrize("content", ["", "[]", "3", "[" * 5000, '[{"step": 1}]', '{"history": 3}', '[{"step": NaN}]'])
def test_damaged_parts_leave_the_rest(small, content):
    for name in ("multipliers.json", "phrase_memory.json", "timesteps.json", "run.json"):
        (small / name).write_text(content)
    assert "Recovery curves" in rendered(small)


def test_metrics_bear_any_rows(small):
    rows = [None, [], 3, {"step": "5"}, {"step": 1e400}, {"step": True}, {}, {"step": 7, "loss": 1e308, "x": -1e308}]
    rows += [{"step": s, "loss": v, "x": [v]} for s, v in enumerate([1, 1e99, -1e99, float("nan"), 10**400, 5e-324])]
    (small / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n" + "[" * 5000)
    page = rendered(small)
    assert "Training loss" in page and "8 unreadable lines left out" in page


def png_of_size(width: int, height: int) -> bytes:
    """The head of a PNG that says it is so large."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", len(head)) + b"IHDR" + head + struct.pack(">I", zlib.crc32(b"IHDR" + head))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 9) + b"IDAT"


def test_picture_bombs_and_broken_pictures_are_left_out(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "copy")
    record = json.loads((folder / "validation.json").read_text())
    (folder / record["targets"][0]["image"]).write_bytes(png_of_size(60000, 60000))
    (folder / record["targets"][1]["image"]).write_bytes(png_of_size(9000, 9000))
    whole = (folder / record["targets"][2]["image"]).read_bytes()
    (folder / record["targets"][2]["image"]).write_bytes(whole[: len(whole) // 2])
    page = rendered(folder)
    assert str(folder) not in page and "Targets and generations" in page
    assert "over the limit" in page and "cannot read" in page
    held = RecordedRun(folder)
    for name in ("x" * 5000, "a\0b", "\ud800", ".", "samples", "/etc/passwd"):
        assert held.picture(name) == ""


def test_a_page_that_cannot_be_written_is_one_line(run, tmp_path, capsys):
    for out in (tmp_path, tmp_path / "none" / "page.html", tmp_path / "a\0b"):
        assert run_report.main([str(run), "--out", str(out)]) == 2
        error = capsys.readouterr().err
        assert (
            error.startswith(
                ("error: report: cannot write", "error: --out: ", "error: out (command line): must name a path")
            )
            and error.count("\n") == 1
        )
    assert run_report.main([str(run), "--out", str(tmp_path / ("x" * 300))]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: out (command line): must be a path") and error.count("\n") == 1


# -- record, templates, charts ----------------------------------------------------------------------------


def test_record_reads_what_it_writes(run, tmp_path):
    record = Record.load(run / "validation.json")
    record.save(tmp_path / "validation.json")
    assert Record.load(tmp_path / "validation.json") == record
    written = [json.loads((folder / "validation.json").read_text()) for folder in (tmp_path, run)]
    assert written[0] == written[1]


def test_record_of_a_given_threshold_has_no_more(tmp_path):
    hook = make_hook(tmp_path, threshold=0.5)
    hook.run(0, 0, tiny_pipeline().unet)
    stored = json.loads((tmp_path / "validation.json").read_text())
    assert stored["threshold"] == {"value": 0.5, "source": "given"} and "p_value" not in stored["verdict"]
    assert "cells" not in stored["history"][0]["raw"] and "ema" not in stored["history"][0]
    assert "given" in run_report.render(tmp_path)


def test_only_charts_build_markup():
    folder = Path(run_report.__file__).parent
    assert pages.environment().autoescape is True
    for template in folder.glob("templates/*"):
        assert not re.search(r"\|\s*safe|autoescape|Markup", template.read_text()), template.name
    for module in Path(run_report.__file__).parents[1].rglob("*.py"):
        assert module.stem == "charts" or not re.search(r"\bMarkup\(", module.read_text()), module
    for call in re.findall(r"Markup\(\s*f", (folder / "charts.py").read_text()):
        raise AssertionError(call)  # an f-string would not escape what it inserts


def test_the_policy_admits_the_style_of_the_page_alone(run):
    page = run_report.render(run)
    style = re.search(r"<style>(.*?)</style>", page, re.S)[1]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = dict(Tags(page).tags[3][1])["content"]
    assert policy == f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'" and "unsafe" not in page


def test_a_token_in_a_configuration_is_masked_on_the_page(run):
    config = run / "config.yaml"
    text = config.read_text()
    config.write_text(f"{text}tracker_project_name: hf_aBcDeFgHiJkL\nlogging_dir: https://me:secret@logs.org\n")
    page = run_report.render(run)
    config.write_text(text)
    assert "hf_***" in page and "aBcDeFgHiJkL" not in page and "me:secret" not in page


NUMBERS = st.one_of(st.none(), st.floats(), st.integers(-(10**320), 10**320))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS), max_size=6), st.text(max_size=20), NUMBERS)
def test_charts_bear_every_number(rows, text, mark):
    columns = [[row[k] for row in rows] for k in range(4)]
    xs, ys = columns[:2]
    drawings = [charts.line_chart([charts.Series(text, *columns)], text, marks=[(text, mark)])]
    drawings += [charts.heatmap([text], [0.0] * len(xs), [ys], text), charts.histogram(xs[:-1], ys[:-2], text, text)]
    for svg in drawings:
        assert set(tag for tag, _ in Tags(svg).tags) <= TAGS
        places = re.findall(r' (?:x|y|x1|x2|y1|y2|cx|cy|width|height|points)="([^"]*)"', svg)
        assert not re.search(r"nan|inf", " ".join(places))


BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))),
    None,
)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("size", ["1280,2400", "390,2400"])
def test_report_renders_in_a_browser_without_console_errors(run, tmp_path, size):
    run_report.write(run)
    shot = tmp_path / "shot.png"
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--hide-scrollbars",
        "--enable-logging=stderr",
        "--v=0",
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--window-size={size}",
    ]
    done = subprocess.run(
        [BROWSER, *flags, f"--screenshot={shot}", (run / "report.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and "CONSOLE" not in done.stderr
    picture = np.asarray(Image.open(shot).convert("RGB"))
    assert picture.std() > 10 and to_pil(torch.zeros(3, 1, 1)).size == (1, 1)


def test_a_page_replaces_a_link_and_not_what_it_names(tmp_path):
    (tmp_path / "mine").write_text("kept")
    (tmp_path / "report.html").symlink_to(tmp_path / "mine")
    for page in ("first", "second"):
        run_report.save(page, tmp_path / "report.html")
    assert (tmp_path / "mine").read_text() == "kept" and (tmp_path / "report.html").read_text() == "second"
    assert len(list(tmp_path.iterdir())) == 2


PROBE = r"""<script>
const of = e => (e.closest("section, .part") || document).querySelector("h2, h1").textContent;
const seen = e => e.getClientRects().length > 0;
const note = seen(document.querySelector(".paper"));
const all = [...document.querySelectorAll("details:not(.zoom)")];  // a picture is seen large or small
all.forEach((e, i) => { e.open = i === 0 || !note; });  // on a screen any part may be open
const wider = e => e.scrollWidth > e.clientWidth + 1;
const wide = [...document.querySelectorAll(".scroll, .strip, main, body")]
  .filter(e => wider(e) && !e.closest(".chart"));  // the numbers behind a chart scroll
const edge = document.querySelector("main").getBoundingClientRect().right + 1;
const boxed = e => e.closest(".scroll, pre, svg");
const cut = [...document.querySelectorAll("main *")]
  .filter(e => !boxed(e.parentElement) && e.getBoundingClientRect().right > edge).map(e => e.className || e.tagName);
all.forEach((e, i) => { e.open = i === 0; });
const folded = all.map(e => [e.open, seen(e.querySelector("summary"))]);
const parts = colour => colour.match(/[\d.]+/g).map(Number);
const light = colour => parts(colour).slice(0, 3).map(c => c / 255)
  .map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const solid = e => { const b = parts(getComputedStyle(e).backgroundColor); return b.length < 4 || b[3] > 0.5; };
const under = e => {
  while (e && !solid(e)) e = e.parentElement;
  return e ? getComputedStyle(e).backgroundColor : "rgb(255,255,255)";
};
const contrasts = [];
for (const e of document.querySelectorAll("body *")) {
  const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
  if (!own || !seen(e) || e.matches("script, style, svg text.dark, svg text.pale")) continue;  // on coloured cells
  const style = getComputedStyle(e), ink = e.closest("svg") ? style.fill : style.color;
  const [a, b] = [light(ink), light(under(e))].sort((x, y) => y - x);
  contrasts.push([(a + 0.05) / (b + 0.05), `${e.tagName} ${e.getAttribute("class")}: ${e.textContent.slice(0, 30)}`]);
}
contrasts.sort((x, y) => x[0] - y[0]);
const pre = document.createElement("pre");
pre.id = "found";
const found = {wide: [...new Set(wide.map(of))], cut, folded, note, contrasts: contrasts.slice(0, 3)};
pre.textContent = JSON.stringify(found);
document.body.appendChild(pre);
</script></body>"""


def probed(page: str, tmp_path: Path, media: str, width: int, probe: str = PROBE) -> dict:
    """What a browser makes of the page where the rules of this medium hold, in so many pixels."""
    for old, new in (
        (r'<meta http-equiv="Content-Security-Policy"[^>]*>', f"<style>html{{width:{width}px}}</style>"),
        (re.escape(f"@media {media}{{"), "@media all{"),
        ("</body>", probe),
    ):
        page, count = re.subn(old, lambda _, new=new: new, page)
        assert count == 1, old
    (tmp_path / "probe.html").write_text(page)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    done = subprocess.run(
        [BROWSER, *flags, (tmp_path / "probe.html").as_uri()], capture_output=True, text=True, timeout=180
    )
    return json.loads(re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL).group(1))


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_nothing_is_cut_on_paper_and_folded_parts_stay_away(run, tmp_path):
    layout = probed(run_report.render(run), tmp_path, "print", 700)  # US Letter less its margins
    assert layout["wide"] == [] and layout["note"]
    assert all(shown == opened for opened, shown in layout["folded"]), (
        "an open part has its title, a folded one nothing"
    )
    assert {opened for opened, _ in layout["folded"]} == {True, False}


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("media, width", [("(max-width:560px)", 390), ("(prefers-color-scheme:dark)", 1280)])
def test_nothing_is_cut_on_a_screen(media, width, run, tmp_path):
    """Pictures wrap. On a phone a long table scrolls in its own box, but what opens the page fits; on a wide
    screen all tables do."""
    layout = probed(run_report.render(run), tmp_path, media, width)
    assert layout["cut"] == [] and not layout["note"]
    opening = {"Range", "Pictures", "Controls", "demo"}
    assert layout["wide"] == [] if width == 1280 else not opening & set(layout["wide"])


CLICKS = r"""<script>
const sheet = document.querySelector(".zoom").parentElement;
const zooms = [...sheet.querySelectorAll(".zoom")];
const box = e => {
  const b = e.querySelector("img").getBoundingClientRect();
  return [b.left, b.top, b.width, b.height];
};
const small = zooms.map(box);
[zooms[0], zooms.at(-1)].forEach(e => e.querySelector("summary").click());  // the target, and an image
const large = [zooms[0], zooms.at(-1)].map(box);
[zooms[0], zooms.at(-1)].forEach(e => e.querySelector("summary").click());
const pre = document.createElement("pre");
pre.id = "found";
pre.textContent = JSON.stringify({small, large, again: zooms.map(box), loaded: zooms.every(
  e => e.querySelector("img").naturalWidth > 0)});
document.body.appendChild(pre);
</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_picture_is_large_on_a_click_beside_the_target(width, run, tmp_path):
    media = "(max-width:560px)" if width == 390 else "(prefers-color-scheme:dark)"
    seen = probed(run_report.render(run), tmp_path, media, width, CLICKS)
    # the target, two elements with a mask, six images of the phrases in either order
    assert len(seen["small"]) == 3 + 2 * 6 and seen["loaded"]
    assert all(100 <= w <= 130 and w == h for _, _, w, h in seen["small"]) and seen["again"] == seen["small"]
    (left, top, *sizes), (other_left, other_top, *other_sizes) = seen["large"]
    assert sizes == other_sizes and min(sizes) >= (500 if width == 1280 else 300)
    if width == 1280:
        assert top == other_top and other_left > left + sizes[0]  # side by side
    else:
        assert left == other_left and other_top > top + sizes[1]  # below each other
    assert all(x + w <= width for x, _, w, _ in (*seen["small"], *seen["large"]))


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("media", ["(prefers-color-scheme:dark)", "print"], ids=["dark", "printed"])
def test_words_stand_out(media, run, tmp_path):
    layout = probed(run_report.render(run), tmp_path, media, 1000)
    assert len(layout["contrasts"]) == 3 and layout["contrasts"][0][0] >= 4.5, layout["contrasts"]  # WCAG 2.1, AA
