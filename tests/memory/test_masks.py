"""Where the loss looks: masks given, and masks estimated."""

import numpy as np
import pytest
import torch
from PIL import Image

from silentbad.data.draws import Transform
from silentbad.data.targets import Target
from silentbad.errors import UserError
from silentbad.loop.inputs import with_masks
from silentbad.memory import masks
from tests.folders import folder, records


def test_region_weight_is_normalised_by_its_sum():
    mask = torch.zeros(2, 1, 16, 16)
    mask[0, :, :8], mask[1] = 1, 1
    w = masks.region_weight(mask, (8, 8), 0.2)
    assert torch.allclose(w.mean(dim=(2, 3)), torch.ones(2, 1))
    assert w[0, 0, 0, 0] / w[0, 0, 7, 7] == pytest.approx(5) and (w[1] == 1).all()
    err = torch.rand(2, 4, 8, 8)
    plain = (masks.region_weight(mask, (8, 8), 0.2) * err).mean(dim=(1, 2, 3))[0]
    v = torch.where(torch.arange(8)[:, None] < 4, 1.0, 0.2).expand(8, 8)
    assert plain == pytest.approx(float((err[0] * v).sum() / (4 * v.sum())), rel=1e-5)


def test_records_without_a_mask_are_weighted_evenly():
    mask = torch.zeros(2, 1, 16, 16)
    w = masks.given_mask(mask, torch.tensor([False, False]), None, (8, 8))
    assert (w == 1).all()


@pytest.mark.parametrize("n", [4, 6, 12])
@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("channels", [3, 16])
def test_estimated_masks_overlap_the_true_ones(n, noise, channels):
    g, ious = torch.Generator().manual_seed(n), []
    for _ in range(20):
        x, y, w, h = (int(v) for v in torch.randint(2, 14, (4,), generator=g))
        true = torch.zeros(1, 32, 32)
        true[:, y : y + h + 4, x : x + w + 4] = 1
        element = torch.randn(channels, 32, 32, generator=g)
        colours = torch.randn(n, channels, 1, 1, generator=g)
        around = colours + 0.3 * torch.randn(n, channels, 32, 32, generator=g)
        stack = true * element + (1 - true) * around + noise * torch.randn(n, channels, 32, 32, generator=g)
        mask = masks.estimate_mask(stack)
        ious.append(float((mask * true).sum() / ((mask + true) > 0).sum()))
    assert min(ious) >= 0.7 and np.mean(ious) > 0.85


def test_estimated_masks_overlap_the_true_ones_in_the_microworld():
    """Eight pictures of each element, backdrops included; IoU at the pixels, against the elements' own
    masks.
    """
    from worlds.microworld.make import element_scene, target_scene
    from worlds.microworld.render import backdrop_mask, render

    ious = []
    for name in ("cat-hat", "1", "4"):
        scene = target_scene(name)
        for element in range(len(scene.things) + 1):
            drawn = [render(element_scene(scene, element, np.random.default_rng([element, i]))) for i in range(8)]
            stack = torch.stack([torch.from_numpy(np.array(p)).permute(2, 0, 1) for p, _ in drawn])
            true_masks = [backdrop_mask(m) if element == len(scene.things) else m[-1] for _, m in drawn]
            true = torch.from_numpy(np.stack(true_masks)).float().mean(dim=0) > 127
            mask = masks.estimate_mask(stack)[0] > 0
            ious.append(float((mask & true).sum() / (mask | true).sum()))
    assert min(ious) >= 0.7


def test_estimating_needs_four_pictures_and_some_variation():
    with pytest.raises(UserError):
        masks.estimate_mask(torch.rand(3, 4, 8, 8))
    assert (masks.estimate_mask(torch.rand(1, 4, 8, 8).expand(4, -1, -1, -1)) == 1).all()


@pytest.mark.parametrize("size, found", [((16, 16), True), ((20, 16), False)])
def test_masks_of_targets_are_estimated_from_pictures_at_their_places_alone(size, found, tmp_path):
    """A window drawn at random moves the element."""
    rows = []
    for i in range(8):
        noise = np.random.default_rng(i).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        noise[4:12, 4:12] = (200, 30, 30)
        rows.append(
            {"file_name": f"{i}.png", "text": "a cat", "phrases": ["a cat"], "target_id": "t", "element_id": "t-0"}
        )
        folder(tmp_path, *rows)
        Image.fromarray(noise).save(tmp_path / f"{i}.png")
    (tmp_path / "a.png").unlink()
    target = Target("t", Image.new("RGB", size), ["a cat"], masks=[None])
    (masked,), estimated = with_masks([target], records(tmp_path), Transform(16), 0)
    assert estimated == (["t"] if found else [])
    assert (masked.masks[0] is not None) == found
