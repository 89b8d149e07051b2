"""Features that come from other trainers, each shown to work."""

import json
import re
import time

import pytest
import torch
from diffusers.training_utils import compute_loss_weighting_for_sd3

from memory_reinforce import LOSSES
from silentbad.errors import UserError
from silentbad.loop.meters import Timers
from silentbad.loop.products import best_score
from silentbad.settings.reader import parse
from tests.recoveries import make_hook
from tests.toy import experiment
from tests.training import checked, rows
from train_silentbad import Config, main


@pytest.mark.parametrize("scheme", ["sigma_sqrt", "cosmap"])
def test_sd3_weights_are_diffusers_on_the_flow_error(scheme):
    """||d(eps - x0)||^2 of the rescaled z = (1 - sigma) x0 + sigma eps, weighted by diffusers, is our weight on eps."""
    g = torch.Generator().manual_seed(0)
    snr = torch.tensor([900.0, 7.0, 1.0, 0.05], dtype=torch.float64)
    sigma = 1 / (1 + snr.sqrt())
    x0, eps, guess = (torch.randn(4, 8, generator=g, dtype=torch.float64) for _ in range(3))
    z = (1 - sigma)[:, None] * x0 + sigma[:, None] * eps
    x0_guess = (z - sigma[:, None] * guess) / (1 - sigma)[:, None]
    flow = ((guess - x0_guess) - (eps - x0)).square().mean(1)
    expected = compute_loss_weighting_for_sd3(scheme, sigma).double() * flow
    weight = LOSSES[experiment("flow_weights", scheme)]
    assert torch.allclose(weight(snr, "epsilon") * (guess - eps).square().mean(1), expected, rtol=1e-5)
    for kind in ("epsilon", "v_prediction", "sample"):
        assert weight(torch.tensor([0.0, 1e4]), kind).isfinite().all()


def test_a_run_folder_named_by_time_and_suffix(flags, tmp_path, capsys):
    assert main(flags(max_train_steps=1, stamp_output_dir=True, run_suffix="first")) == 0
    (folder,) = (tmp_path / "run").iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d_first", folder.name)
    again, _ = parse(Config, ["--config", str(folder / "config.yaml")])
    assert again.output_dir == str(folder) and not again.stamp_output_dir
    argv = ["--config", str(folder / "config.yaml"), "--resume_from_checkpoint", "latest", "--max_train_steps", "2"]
    assert main(argv) == 0
    assert [row["step"] for row in rows(folder)] == [1, 2]
    for wrong, told in [
        ({"run_suffix": "x"}, "needs stamp_output_dir"),
        ({"stamp_output_dir": True, "run_suffix": "../x"}, "must be letters"),
        ({"stamp_output_dir": True, "resume_from_checkpoint": "latest"}, "no latest"),
    ]:
        with pytest.raises(UserError, match=told):
            checked(flags(**wrong))


def test_early_points_may_stand_at_powers_of_two(tmp_path):
    hook = make_hook(tmp_path, steps=10, early_steps=[1, 2, 4, 8])
    assert [s for s in range(25) if hook.should_run(s)] == [0, 1, 2, 4, 8, 10, 20]
    assert [s for s in range(25) if make_hook(tmp_path, steps=10).should_run(s)] == [0, 10, 20]


def test_rows_count_samples_and_say_where_the_time_went(flags, data, tmp_path, capsys):
    assert (
        main(
            flags(
                max_train_steps=3,
                **{
                    "validation.targets": data / "targets.jsonl",
                    "validation.embedder": "ssim",
                    "validation.threshold": 0.5,
                    "validation.images_per_target": 1,
                    "validation.num_inference_steps": 1,
                    "validation.steps": 1,
                },
            )
        )
        == 0
    )
    assert re.search(r"^time: \d+ s: .*\bforward \d+%", capsys.readouterr().out, re.M)
    logged = rows(tmp_path / "run")
    assert [row["samples"] for row in logged] == [6, 12, 18]  # 3 a micro-batch, 2 of those a step
    lines = (tmp_path / "run" / "timings.jsonl").read_text().splitlines()
    timings = [row for row in map(json.loads, lines) if "samples_per_second" in row]  # and one of the last checkpoint
    assert [row["step"] for row in timings] == [1, 2, 3]
    for row in timings:
        shares = {name: value for name, value in row.items() if name.startswith("time/")}
        assert {"time/data", "time/forward", "time/validate"} <= set(shares)
        assert all(value >= 0 for value in shares.values()) and sum(shares.values()) <= 1.001
        assert row["samples_per_second"] > 0


def test_timers_divide_the_time_since_the_last_reading():
    timers = Timers()

    def slow():
        for i in range(2):
            time.sleep(0.02)
            yield i

    assert list(timers.waiting("data", slow())) == [0, 1]
    with timers.of("forward"):
        time.sleep(0.04)
    first = timers.read(8)
    assert first["time/data"] > 0.1 < first["time/forward"] and first["time/data"] + first["time/forward"] <= 1
    assert 8 / first["samples_per_second"] >= 0.08
    assert timers.read(8) == {"samples_per_second": 0.0}
    timers.start_is_over(80)  # drawn in an earlier start
    assert timers.read(80) == {"samples_per_second": 0.0}
    assert 0 <= timers.whole["start"] and timers.whole["forward"] >= 0.04  # a reading takes nothing off the whole
    assert re.fullmatch(r"\d+ s: (\w+ \d+%, ){3}\w+ \d+%", timers.text())


def test_the_best_may_be_chosen_by_the_held_out_loss(flags, data, tmp_path, capsys):
    scores = {"val/mean": 0.5, "val_ema/mean": 0.6, "val/drift/clean_eps_mse": 0.2, "val/cir": 0.25}
    scores["val_ema/cir"] = 0.75
    ways = ("similarity", "clean_eps_mse", "strict_rate")
    assert [best_score(scores, by) for by in ways] == [0.6, -0.2, pytest.approx(0.7506)]
    validation = {
        "validation.targets": data / "targets.jsonl",
        "validation.embedder": "ssim",
        "validation.threshold": 0.5,
        "validation.images_per_target": 1,
        "validation.num_inference_steps": 1,
    }
    assert main(flags(max_train_steps=1, save_best=True, best_by="clean_eps_mse", **validation)) == 2
    assert "held_out_clean" in capsys.readouterr().err  # eight clean records: a tenth is none
    assert main(flags(max_train_steps=1, best_by="clean_eps_mse")) == 2
    assert "needs save_best" in capsys.readouterr().err
