"""Attribution as a detector: scores find a planted record, masks share out the whole, the best threshold."""

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline

from bench.attribution import Features, attribution, best_f1
from bench.instrument import BASE


def test_best_f1_equals_a_hand_count():
    truth = np.array([True, False, True, False, False])
    assert best_f1(np.array([5.0, 4.0, 3.0, 2.0, 1.0]), truth) == pytest.approx(2 * 2 / (3 + 2))
    assert best_f1(np.array([5.0, 1.0, 4.0, 2.0, 3.0]), truth) == 1.0


def test_attribution_finds_the_records_a_query_is_made_of():
    draw = torch.Generator().manual_seed(0)
    records = torch.randn(40, 64, generator=draw)
    queries = records[:3].sum(0) + 0.1 * torch.randn(5, 64, generator=draw)
    assert set(attribution(records, queries, 0.1).topk(3).indices.tolist()) == {0, 1, 2}


def test_regions_of_a_gradient_add_up_to_the_whole():
    pipe = StableDiffusionPipeline.from_pretrained(BASE)
    side = pipe.unet.config.sample_size
    left = torch.zeros(side, side)
    left[:, : side // 4] = 1
    features = Features(pipe, torch.stack([torch.ones(side, side), left, 1 - left]))
    whole, first, second = features(torch.rand(3, 64, 64), "a red cat", "test")
    torch.testing.assert_close(0.25 * first + 0.75 * second, whole, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(first, second, rtol=0.1)
