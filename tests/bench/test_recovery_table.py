"""The recovery benchmark: its arms are configurations that run, and its figures are what they say."""

import json

import pytest

import train_silentbad
from bench import arms, recovery, recovery_table
from silentbad.settings.reader import parse
from tests.training import checked


@pytest.mark.parametrize("name", arms.ARMS)
def test_every_arm_is_a_configuration_that_passes_the_checks(name):
    argv = ["--config", "configs/microworld.yaml", "--train_data_dir", "data", "--output_dir", "out"]
    flags = [f"--{k}={v}" for k, v in arms.ARMS[name].items()]
    checked([*argv, *flags])
    config, _ = parse(train_silentbad.Config, [*argv, *flags], "")
    plain, _ = parse(train_silentbad.Config, argv, "")
    assert (config == plain) == (name == "plain"), "an arm without effect"


@pytest.mark.parametrize(
    "flags, files",
    [
        (arms.KEPT["recommended"], ["recommended"]),
        (arms.KEPT["recommended_2026"], ["fewest_steps"]),
        (arms.PUBLISHED["unions_long"], ["fewest_steps", "many"]),
        (arms.PUBLISHED["unions_keeping"], ["recommended", "many"]),
        (arms.PUBLISHED["unions_keeping_names"], ["recommended", "many", "many_names"]),
    ],
    ids=["recommended", "fewest steps", "many, fewest steps", "many", "many, names"],
)
def test_a_configuration_is_the_arm_it_names(flags, files):
    argv = ["--config", "configs/microworld.yaml", "--train_data_dir", "data", "--output_dir", "out"]
    merged = [part for name in files for part in ("--config", f"configs/{name}.yaml")]
    from_files, _ = parse(train_silentbad.Config, [*argv, *merged], "")
    of_files = ("memory.", "gradient_control.", "prior_preservation.", "train_layers", "train_batch_size")
    of_files += ("optimizer_options", "decay_to_base", "train_text_encoder", "hooks")
    own = {k: v for k, v in flags.items() if k.startswith((*of_files, "lr_scheduler", "lr_power"))}
    from_flags, _ = parse(train_silentbad.Config, [*argv, *(f"--{k}={v}" for k, v in own.items())], "")
    assert from_files == from_flags


def rows(arm: str, curves: dict[str, dict[int, float]], **more) -> list[dict]:
    return [
        {
            "arm": arm,
            "factor": 1.0,
            "targets": target,
            "target": target,
            "seed": 0,
            "step": step,
            "rate": rate,
            "mean": rate,
            "elements": [1.0, 0.5],
            "drift": 0.1 + 0.001 * step,
            "seconds": 0.5 * step,
            **more,
        }
        for target, curve in curves.items()
        for step, rate in curve.items()
    ]


def test_a_run_in_figures():
    figures = recovery_table.summarise(rows("a", {"1": {0: 0.0, 10: 0.25, 20: 0.75, 40: 0.5}}))
    assert (figures["first"], figures["cir50"], figures["cir80"]) == (10, 20, 40)  # 80 % not reached: the budget
    assert (figures["cir50_reached"], figures["cir80_reached"]) == (1, 0)
    assert figures["seconds_per_step"] == 0.5
    assert figures["aurc"] == pytest.approx((0.5 * 0.25 * 10 + 0.5 * 10 + 0.625 * 20) / 40)
    assert figures["drift"] == pytest.approx(0.04) and figures["elements"] == 0.75 and figures["parts_only"] == 0


def test_a_speedup_over_what_never_recovers_is_a_lower_bound():
    plain = {str(i): {0: 0.0, 10: 0.0, 20: 0.0, 100: 0.0} for i in range(3)}
    quick = {str(i): {0: 0.0, 10: 0.0, 20: 0.9, 100: 0.9} for i in range(3)}
    table = recovery_table.table(rows("plain", plain) + rows("quick", quick))
    line = dict(zip(recovery_table.HEAD, table[1], strict=True))
    assert line["speed-up to CIR 50 %"] == line["the same in seconds"] == "5.00 [5.00, 5.00]"
    assert line["CIR 50 %"] == "20" and table[0][4] == "never"


def test_an_arm_is_timed_on_one_device_by_its_quickest_run():
    curve = {0: 0.0, 10: 0.0, 20: 1.0}
    plain = rows("plain", {"1": curve, "2": {0: 0.0, 10: 0.0, 20: 0.0}}, device="a")
    same, other = (rows("arm", {"1": {0: 0.0, 10: 1.0, 20: 1.0}}, device=device) for device in "ab")
    slow = [{**row, "target": "3", "targets": "3", "seconds": 9.0 * row["step"]} for row in same]
    swept = [{**row, "factor": 2.0, "seconds": 0.25 * row["step"]} for row in same]  # a step costs the same at any rate
    for mine, seconds in ((same + slow, "2.00 [2.00, 2.00]"), (same + swept, "4.00 [4.00, 4.00]"), (other, "")):
        line = dict(zip(recovery_table.HEAD, recovery_table.table(plain + mine)[1], strict=True))
        assert line["plain's CIR there"] == "1.00" and line["speed-up to CIR 50 %"] == "2.00 [2.00, 2.00]"
        assert line["the same in seconds"] == seconds
    alone = rows("arm", {"3": curve})
    assert recovery_table.table(plain + alone)[1][-4:] == ("",) * 4


def test_drift_is_compared_where_both_have_recovered_as_much():
    plain, quick = {"1": {0: 0.0, 10: 0.0, 40: 0.5}}, {"1": {0: 0.0, 10: 0.6, 40: 0.7}}
    both = rows("plain", plain) + rows("quick", quick)
    assert recovery_table.drift_at_equal_recovery(both, ("plain", 1.0), ("quick", 1.0)) == pytest.approx(0.25)


def test_two_arms_are_compared_where_both_ran(tmp_path, capsys):
    results = tmp_path / "rows.jsonl"
    slow = rows("plain", {str(i): {0: 0.0, 10: 0.0, 20: 0.5, 100: 0.5} for i in range(4)}, factor=4.0)
    quick = rows("leak_free", {str(i): {0: 0.0, 10: 0.5, 20: 0.5, 100: 1.0} for i in range(3)}, factor=8.0)
    other = rows("leak_free", {"0": {0: 0.0, 10: 0.0, 20: 0.0, 100: 0.0}}, factor=8.0, seed=1)
    results.write_text("".join(json.dumps(row) + "\n" for row in slow + quick + other))
    recovery_table.main(["leak_free", "region", "--over", "plain@4", "--results", str(results)])
    *_, first, second = capsys.readouterr().out.strip().splitlines()
    assert first == (
        "| leak_free | plain@4 | 3 | 2.00 [2.00, 2.00] | 3, 0 of 3 | +0.50 [+0.50, +0.50] | "
        "+0.00 [+0.00, +0.00] | 0.50 |"
    )
    assert second.startswith("| region | plain@4 | 0 |")
    recovery_table.main(["leak_free", "--over", "plain@4", "--seeds", "1", "--results", str(results)])
    assert "| leak_free | plain@4 | 0 |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        recovery_table.main(["leek_free", "--results", str(results)])
    assert "'leek_free' is no arm" in capsys.readouterr().err


def test_runs_of_several_targets_have_lines_of_their_own():
    curves = {"1": {0: 0.0, 10: 0.5}, "2": {0: 0.0, 10: 0.0}}
    lines = recovery_table.tables(rows("plain", curves) + rows("plain", curves, targets="1,2"))
    assert [line[0] for line in lines] == ["plain", "plain, 2 targets at once"]


def test_an_arm_is_compared_at_plains_own_rate():
    slow, quick = {0: 0.0, 10: 0.0, 20: 0.0, 40: 1.0}, {0: 0.0, 10: 0.0, 20: 1.0, 40: 1.0}
    elsewhere = rows("plain", {"1": slow}, factor=4.0)
    own = rows("plain", {"1": quick}, factor=arms.RATES["plain"])
    table = recovery_table.table(elsewhere + own + rows("arm", {"1": {0: 0.0, 10: 1.0, 20: 1.0, 40: 1.0}}))
    assert [line[:2] for line in table] == [("plain", "8"), ("plain", "4"), ("arm", "1")]
    speeds = [dict(zip(recovery_table.HEAD, line, strict=True))["speed-up to CIR 50 %"] for line in table]
    assert speeds == ["", "0.50 [0.50, 0.50]", "2.00 [2.00, 2.00]"]


def test_what_the_rows_ran_on_is_stored_beside_the_table(tmp_path):
    shared = {"steps": 20, "every": 50, "early": "10", "images": 2, "images_per_phrase": 4, "flags": None}
    machine = {"torch": "2", "device": "cpu", "cores": 2}
    curve, ran = {"33": {0: 0.0, 20: 0.5}}, []
    for commit, seed in (("b", 1), ("a", 0)):
        ran += rows("original", curve, seed=seed, commit=commit, **shared, **machine)
    results = tmp_path / "recovery.jsonl"
    results.write_text("".join(json.dumps(row) + "\n" for row in ran))
    flags = [f"--{key}={value}" for key, value in shared.items() if value is not None]
    recovery.main(["--budget-minutes=0", f"--results={results}", *flags])
    known = json.loads((tmp_path / "recovery-arms.json").read_text())
    assert known["config"] == "configs/microworld.yaml" and known["steps"] == 20
    assert known["arms"] == {
        "original": {
            "flags": arms.ARMS["original"],
            "factor": [1.0],
            "seed": [0, 1],
            "targets": ["33"],
            "commit": ["a", "b"],
            "torch": ["2"],
            "device": ["cpu"],
            "cores": [2],
        }
    }


def test_an_unknown_arm_is_named(capsys):
    with pytest.raises(SystemExit) as stop:
        recovery.main(["--arms", "plane"])
    assert stop.value.code == 2 and "unknown arm 'plane'; there are: plain" in capsys.readouterr().err
