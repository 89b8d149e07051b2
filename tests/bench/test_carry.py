"""The carry-over of a rate: the table's ratio, and what the bases draw."""

import json

import torch
from diffusers import UNet2DConditionModel

from bench.carry import BASE, UNITS, bases, rescale, table
from bench.kept_worlds import MICRO


def run(base: str | None, unit: str, target: str, recovers_at: int | None, times: float = 1) -> list[dict]:
    """Rows of a run with evaluations at 0, 20, 40 and 60."""
    shared = {
        "factor": times * UNITS[unit],
        "flags": json.dumps({"learning_rate_unit": unit}),
        "target": target,
        "whole_rate": 0.0,
        "mean": 0.0,
        "elements": [0.0],
        "element_means": [0.0],
        "seconds": 1.0,
        **({} if base is None else {"base": base}),
    }
    back = [step for step in (20, 40, 60) if recovers_at is not None and step >= recovers_at]
    return [
        {**shared, "step": step, "rate": 1.0 if step in back else 0.25, "drift": step / 1000}
        for step in (0, 20, 40, 60)
    ]


def right(of_ten: int) -> dict:
    return {"2": {kind: [of_ten, 10] for kind in MICRO.kinds}}


def cells(rows: list[dict]) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table(rows).splitlines()[2:]]


def test_steps_are_compared_target_by_target_within_a_unit():
    rows = run(None, "absolute", "1", 20) + run(None, "absolute", "2", 40)
    rows += run("quarter", "absolute", "1", 40) + run("quarter", "absolute", "2", None)
    rows += run(None, "relative", "1", 40) + run("four", "relative", "1", 40)
    assert [[*line[:5], *line[6:8]] for line in cells(rows)] == [
        ["a quarter", "absolute", "40", "2", "1", "never", "2.00"],
        ["bundled", "absolute", "40", "2", "2", "30", "1.00"],
        ["bundled", "relative", "54", "1", "1", "40", "1.00"],
        ["four times", "relative", "54", "1", "1", "40", "1.00"],
    ]


def test_the_clean_error_is_that_of_the_end_less_that_of_the_start():
    assert [line[8] for line in cells(run(None, "absolute", "1", 20))] == ["0.060"]


def test_another_rate_has_a_line_of_its_own_and_is_compared_with_the_bundled_bases_own():
    rows = run(None, "relative", "1", 20) + run("quarter", "relative", "1", 60)
    rows += run("quarter", "relative", "1", 40, times=2)
    assert [[*line[:3], line[7]] for line in cells(rows)] == [
        ["a quarter", "relative", "54", "3.00"],
        ["a quarter", "relative", "108", "2.00"],
        ["bundled", "relative", "54", "1.00"],
    ]


def test_what_a_new_base_draws_stands_over_the_bundled_one():
    lines = bases([{"base": "quarter", "right": right(5)}], [{"arm": "base", "right": right(10)}]).splitlines()[2:]
    assert [line.split(" | ")[:2] for line in lines] == [["| a quarter", "0.50"], ["| bundled", "1.00"]]


def test_a_rescaled_base_predicts_the_same():
    unet = UNet2DConditionModel.from_pretrained(BASE / "unet")
    inputs = torch.randn(2, 16, 8, 8), torch.tensor([10, 800]), torch.randn(2, 48, 64)
    with torch.no_grad():
        before, weight = unet(*inputs).sample, unet.mid_block.attentions[0].transformer_blocks[0].attn2.to_k.weight
        size = weight.norm()
        rescale(unet)
        after = unet(*inputs).sample
    assert torch.allclose(weight.norm(), 3 * size)
    assert torch.allclose(before, after, atol=1e-3 * before.abs().max())
