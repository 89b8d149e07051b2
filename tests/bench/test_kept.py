"""What recovery costs: kinds left out, shares over the base's, tables and the chart."""

import argparse
import zipfile

import pytest
from PIL import Image

from bench import arms, judged, kept
from bench.kept_worlds import MICRO, WORLDS
from bench.recovery_table import stored
from silentbad.report.charts import COLOURS
from silentbad.settings.reader import parse
from tests.training import checked
from train_silentbad import Config

HALF_BASE = 10  # things right of a kind, of 20


def counts(shown: int, unshown: int) -> kept.Counts:
    of_kind = {kind: [unshown if kind in MICRO.unshown else shown, 20] for kind in MICRO.kinds}
    return {f"{guidance:g}": dict(of_kind) for guidance in kept.GUIDANCE}


def row(arm: str, target: str, rate: float, right: kept.Counts, **more) -> dict:
    of_run = {"change": {"pixels": 0.25}, "bleeding": 0.125, "bleeding_base": 0.0}
    of_run["size"] = {"up0": {"norm": 0.3}, "mid": {"norm": 0.1}}
    named = {"arm": arm, "target": target, "rate": rate, "steps": 400, "right": right, "seconds": 120.0}
    return named | {"elements": [rate, 1.0], "kept": of_run} | more


@pytest.fixture
def rows() -> list[dict]:
    base = {"arm": "base", "target": None, "right": counts(HALF_BASE, HALF_BASE)}
    kept_all = row("recommended", "1", 1.0, counts(HALF_BASE, HALF_BASE))
    worst_at_four = counts(8, 6)
    worst_at_four["4"] = counts(4, 2)["4"]
    return [base, kept_all, row("recommended", "2", 0.5, worst_at_four), row("plain", "1", 0.0, counts(1, 0))]


@pytest.mark.parametrize("text, shows", [("a red ball, under a night sky", True), ("a cat, a hat", False), ("", False)])
def test_kinds_that_are_left_out_are_found_in_captions(text, shows):
    assert MICRO.shows_unshown(text) == shows


def test_a_kind_of_two_words_is_not_one_of_them():
    emoji = WORLDS["emoji"]
    assert "dog" in emoji.unshown and "hot-dog" in emoji.shown
    assert emoji.shows_unshown("a small dog at the top left, in a starry sky")
    assert not emoji.shows_unshown("a big hot dog at the top left")
    assert emoji.any_kind.findall("a hot dog and an elephant") == ["hot dog", "elephant"]


def test_prompts_of_the_base_name_no_kind_left_out_and_held_out_ones_do():
    assert not any(MICRO.shows_unshown(s.caption) for s in kept.scenes("own", 60, shown_alone=True))
    assert any(MICRO.shows_unshown(s.caption) for s in kept.scenes("unrelated", 60, shown_alone=False))


def test_what_is_kept_is_the_lowest_guidance_over_targets(rows):
    base = rows[0]
    guidance, shares = kept.lowest(rows[1:3], base, MICRO.shown)
    assert (guidance, shares) == ("4", [1.0, 0.4])
    assert kept.lowest(rows[1:3], base, MICRO.unshown)[1] == [1.0, 0.2]
    assert kept.share(base["right"], base["right"], "1", MICRO.shown) == 1


def test_a_line_an_arm_in_every_table(rows):
    recommended, plain = kept.table(rows).splitlines()[2:]
    assert "2 of 2" in recommended and "| 0.70 |" in recommended and "+0.125" in recommended
    assert "0 of 1" in plain and "| 0.10 | 0.00 |" in plain
    few = kept.briefly(rows)
    assert few.count("\n") == 1 and "`recommended`" in kept.briefly([rows[0], *rows[1:3] * 2])
    assert "base, of all things" in kept.by_guidance(rows) and "0.50 (160)" in kept.by_guidance(rows)
    assert len(kept.by_target(rows).splitlines()) == 5


def test_prompts_without_a_phrase_are_listed_where_a_run_has_them(rows):
    assert kept.by_prompt(rows) == ""
    switched = {"phrase-1": [0.0, 1.0], "without-0": [0.25, 0.75]}
    lines = kept.by_prompt([*rows, row("recommended_leak_free", "7", 0.5, rows[0]["right"], prompts=switched)])
    assert [line.split("|")[3:5] for line in lines.splitlines()[2:]] == [
        [" phrase-1 ", " 0.00, 1.00 "],
        [" without-0 ", " 0.25, 0.75 "],
        [" all ", " 0.50, 1.00 "],
    ]
    assert lines.count("`recommended_leak_free` (B)") == 3


def test_an_arm_says_whether_pictures_show_two_elements():
    settings = {arm: arms.setting_of(flags) for arm, flags in arms.KEPT.items()}
    assert settings["plain"] == "A" and settings["recommended_leak_free"] == settings["replay"] == "B"
    assert settings["recommended_own_unions"] == "B"  # no picture of two elements is read
    assert {settings[arm] for arm in ("recommended", "recommended_2026", "lora_2026", "own_pictures")} == {"C"}
    assert arms.said("recommended on placebo data") == "`recommended on placebo data` (C)"
    assert arms.said("half_2").endswith("(C)") and arms.said("plain_warm").endswith("(A)")


def test_the_chart_has_two_points_an_arm_of_enough_targets(rows, monkeypatch):
    monkeypatch.setattr(kept, "FEW", 1)
    monkeypatch.setattr(kept, "UNCHARTED", ())
    svg = kept.frontier(rows)
    assert svg.count("<circle") == 4 and svg.count('fill="#fff"') == 2 and "recommended" in svg


def test_the_chart_has_a_colour_for_every_arm_of_note():
    charted = set(kept.of_note(stored(kept.RESULTS))) - set(kept.UNCHARTED)
    assert 0 < len(charted) <= len(COLOURS)


def test_nothing_is_trained_unless_arms_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kept, "PLOT", tmp_path / "kept.svg")
    monkeypatch.setattr(kept, "train_all", lambda *args: pytest.fail("trains"))
    kept.main([])
    assert "`recommended` (C)" in capsys.readouterr().out


def test_a_run_that_is_stored_is_not_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr("bench.recovery.WORK", tmp_path)
    monkeypatch.setattr(kept, "things_right", lambda *args, **more: {})
    made_up = {"steps": 7, "flags": None}
    monkeypatch.setattr(
        kept, "train", lambda arm, target, _: {"arm": arm, "target": target, "factor": kept.KEPT_AT[arm][0], **made_up}
    )
    args = argparse.Namespace(world="microworld", flags=None, steps=7, captions=1, results=tmp_path / "rows.jsonl")
    vars(args).update(factor=None, base=None)
    kept.train_all(args, ["plain"], ["1"])
    kept.train_all(args, ["recommended", "plain"], ["1", "2"])
    made = [(row["arm"], row["target"]) for row in stored(args.results)]
    assert made[1:] == [("plain", "1"), ("recommended", "1"), ("recommended", "2"), ("plain", "2")]


def test_pictures_are_added_to_one_file(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "WORK", tmp_path)
    for name in ("a", "b"):
        Image.new("RGB", (4, 4)).save(tmp_path / f"{name}.png")
        kept.keep_pictures(tmp_path / "kept.jsonl", f"{name}.png", tmp_path / f"{name}.png")
    assert zipfile.ZipFile(tmp_path / "kept-pictures.zip").namelist() == ["a.png", "b.png"]


def test_images_are_cut_from_a_grid_without_the_target(tmp_path):
    grid = Image.new("RGB", (3 * judged.SIDE, judged.SIDE), "red")
    grid.paste("blue", (judged.SIDE, 0, 2 * judged.SIDE, judged.SIDE))
    grid.save(tmp_path / "grid.png")
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.write(tmp_path / "grid.png", "grid.png")
        images = judged.images_of(archive, "grid.png")
    assert [image.getpixel((0, 0)) for image in images] == [(0, 0, 255), (255, 0, 0)]


def test_images_are_judged_by_the_detector_of_their_world():
    assert judged.detector_of(WORLDS["microworld"]) is None
    assert judged.detector_of(WORLDS["emoji"]) == str(WORLDS["emoji"].base / "embedder")


def test_images_judged_again_stand_beside_their_own_time_and_copies(rows):
    again = [{"arm": "recommended", "target": name, "steps": 400, "rate": 0.25} for name in ("1", "2")]
    again += [{"arm": judged.COPIES, "target": name, "steps": 0, "rate": rate} for name, rate in (("1", 1), ("2", 0))]
    before = {**again[0], "judge": "before", "rate": 1.0}  # of another judge, and left out
    again = [before, *({**row, "judge": "now"} for row in again)]
    (line,) = judged.table(again, rows).splitlines()[2:]
    assert "0.75 [0.06, 1.00]; 2 recovered" in line and "0.25 [0.00, 0.94]; 0 recovered" in line
    assert line.endswith("| 0.50 [0.01, 0.99] |")


@pytest.mark.parametrize("arm", arms.KEPT)
def test_every_arm_is_a_run(arm):
    flags = {name: value for name, value in arms.KEPT[arm].items() if name != "placebo"}
    argv = ["--config", "configs/microworld.yaml", "--train_data_dir", "data", "--output_dir", "out"]
    argv += [f"--{name}={value}" for name, value in flags.items()]
    checked(argv)
    config, _ = parse(Config, argv, "")
    assert config.max_train_steps == 400 and arm in arms.KEPT_AT
