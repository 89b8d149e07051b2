"""What the hook's benchmark says of cost and equal quality."""

import math

import numpy as np
import pytest
import torch

from bench import validation
from silentbad.measure.embedders import EMBEDDERS
from tests.recoveries import make_hook
from tests.tiny import tiny_pipeline


def test_quality_equals_a_hand_count():
    nan = math.nan  # the second target has no element
    reference = np.array([[[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8]], [[0.1, 0.2, 0.3, 0.4], [nan] * 4]])
    found = reference.copy()
    found[0, 0] = [0.1, 0.2, 0.2, 0.4]  # one decision of twelve: at the middle, 0.25
    own = validation.quality(reference, found)
    assert own["similarities"] == 12 and own["images"] == 8 and own["strict_images"] == 4
    assert own["largest_difference"] == pytest.approx(0.1) and own["mean_difference"] == pytest.approx(0.1 / 12)
    assert own["decisions_agree"] == pytest.approx(11 / 12) and own["strict_agree"] == pytest.approx(7 / 8)


def test_ratios_are_medians_over_rounds():
    cpu = {"one by one": [9.0, 8.0, 30.0], "five a call": [4.0, 4.0, 4.0], "hook": [3.0, 2.0, 4.0]}
    assert validation.ratios(cpu) == {"hook": {"one by one": 4.0, "five a call": 4 / 3}}


def test_hook_and_published_ways_give_the_same_images(tmp_path):
    pipe = tiny_pipeline()
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(tmp_path / "base")
    hook = make_hook(tmp_path / "run", pipe, validation.microworld_targets(2), threshold=0.5)
    embedder = EMBEDDERS["ssim"](None)
    hook.run(1, 0, pipe.unet)
    for call in validation.LOOPS.values():
        with torch.no_grad():
            images = validation.rebuilding_loop(tmp_path / "base", pipe, hook.targets, hook.config, embedder, call)
        own = validation.quality(validation.scores_of_images(hook, images), validation.scores_of_hook(hook))
        assert len(images) == 6 and own["largest_difference"] < 1e-4
