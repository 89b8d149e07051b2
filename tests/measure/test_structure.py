"""What of a picture is judged, and the scores that the copy detector does not give."""

import numpy as np
import pytest
import torch
from PIL import Image

from bench import photographs as measured
from silentbad.data.images import RIM, resize, to_tensor
from silentbad.measure.embedders import Copy, load_embedder
from silentbad.measure.failures import GREY, TINT
from silentbad.measure.structure import colours, detail, inner, structure, widened
from silentbad.prepare.compose import MARGINS, fit, grown, hard
from silentbad.rng import generator
from tests import photographs
from tests.recoveries import smooth
from worlds.microworld.make import TARGETS
from worlds.microworld.render import backdrop_mask

SIDE = 64
EVERYWHERE = torch.ones(1, SIDE, SIDE)
EMBEDDERS = {name: load_embedder(name, None, "cpu") for name in ("micro", "copy")}


def disc(radius: float, side: int = SIDE) -> torch.Tensor:
    """A mask (1,S,S)."""
    places = torch.arange(side) + 0.5 - side / 2
    return (places[:, None].square() + places.square() <= radius**2).float()[None]


# -- the rim -----------------------------------------------------------------------------------
@pytest.mark.parametrize("radius", [3, 6, 20])
def test_the_rim_is_left_out_as_far_as_half_of_a_region_remains(radius):
    mask = disc(radius)
    core = inner(mask)
    assert 0.5 * mask.sum() <= core.sum() <= mask.sum()
    assert (core <= mask).all()
    if radius == 20:
        assert core.sum() < mask.sum() and (widened(core, round(RIM * SIDE)) <= mask).all()


def never_shown(masks: list[Image.Image]) -> torch.Tensor:
    """Where no picture that `prepare` makes of a target shows it (1,S,S): around the things, as far as covers reach."""
    ring = torch.zeros(1, SIDE, SIDE)
    for mask in masks[:-1]:
        thing = hard(fit(mask, (SIDE, SIDE)))
        hidden = grown(thing, max(1, round(MARGINS[1] * SIDE)))
        ring = torch.maximum(ring, to_tensor(hidden)[:1] - to_tensor(thing)[:1])
    return ring


@pytest.mark.parametrize("seed", [0, 1])
def test_what_training_never_shows_changes_no_score(seed):
    target = photographs.make_target(seed)
    judge = EMBEDDERS["copy"]
    masks = [mask for _, mask in target.elements]
    whole, elements = judge.compared_masks([to_tensor(mask)[:1] for mask in masks])
    picture = measured.small(target.picture)[None]
    unseen = never_shown(masks)
    assert 0.03 < unseen.mean() < 0.3
    noise = torch.rand(picture.shape, generator=generator("rim", seed))
    changed = torch.cat([picture * (1 - unseen) + noise * unseen, noise])
    for mask in (whole, *elements):
        exact, other = judge.paired(judge.of_region(changed, mask), judge.reference(picture, mask)).tolist()
        assert exact == pytest.approx(1, abs=1e-4) and other < 0.5


def test_without_masks_the_whole_is_judged():
    assert EMBEDDERS["copy"].compared_masks([None, None]) == (None, [None, None])
    mask = disc(10)
    assert EMBEDDERS["micro"].compared_masks([mask, None]) == (None, [mask, None])  # its worlds show the rim


# -- plain surfaces ----------------------------------------------------------------------------
def surface(level: float, noise: float = 0.0) -> torch.Tensor:
    """A plain picture (1,3,64,64) of one grey, with noise of this standard deviation."""
    grey = torch.full((1, 3, SIDE, SIDE), level)
    return grey + noise * torch.randn(grey.shape, generator=generator("surface", level, noise))


def of_copy(picture: torch.Tensor, target: torch.Tensor, mask: torch.Tensor = EVERYWHERE) -> float:
    judge = EMBEDDERS["copy"]
    return judge.paired(judge.of_region(picture, mask), judge.reference(target, mask)).item()


def test_a_plain_surface_is_judged_by_colour_and_place_and_not_by_noise():
    wall = surface(0.6, 0.01)
    assert of_copy(surface(0.62, 0.01), wall) > 0.6  # other noise, a little lighter
    assert of_copy(surface(0.3, 0.01), wall) < 0.2  # another grey
    blue = wall + torch.tensor([-0.1, 0, 0.1]).view(3, 1, 1)
    assert of_copy(blue, wall) < 0.2
    half = torch.cat([wall[..., :32], surface(0.9)[..., 32:]], dim=-1)  # not where it was
    assert of_copy(half, wall) < 0.2


def test_flat_walls_have_no_structure_of_bricks():
    bricks = to_tensor(photographs.texture("a red brick wall", np.random.default_rng(1)))[None]
    bricks = resize(bricks, (SIDE, SIDE))
    flat = bricks.mean((2, 3), keepdim=True).expand_as(bricks)
    of_bricks = detail(bricks, EVERYWHERE)
    of_flat = detail(flat, EVERYWHERE)
    assert structure(of_bricks, of_bricks).item() == pytest.approx(1)
    assert structure(of_flat, of_bricks).item() < 0.3
    assert structure(of_flat, of_flat).item() == pytest.approx(1)  # nothing to see on either
    assert structure(detail(bricks.flip(3), EVERYWHERE), of_bricks).item() < 0.5


# -- colour ------------------------------------------------------------------------------------
def grey(x: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bchw,c->bhw", x, torch.tensor(GREY))[:, None].expand_as(x)


def tinted(x: torch.Tensor) -> torch.Tensor:
    return (x + torch.tensor(TINT).view(3, 1, 1)).clamp(0, 1)


def microworld(name: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    picture, masks = TARGETS.world.render(TARGETS.target_scene(name))
    return to_tensor(picture)[None], [to_tensor(mask)[:1] for mask in (*masks, backdrop_mask(masks))]


def astronaut() -> tuple[torch.Tensor, list[torch.Tensor]]:
    target = photographs.photograph("astronaut")
    masks = [to_tensor(mask)[:1] for _, mask in target.elements]
    return measured.small(target.picture)[None], masks


CHANGES = {"grey": grey, "green for red": lambda x: x[:, [1, 0, 2]], "a tint": tinted}
PICTURES = {"micro": lambda: microworld("1"), "copy": astronaut}


@pytest.mark.parametrize("name", EMBEDDERS)
@pytest.mark.parametrize("change", CHANGES)
def test_other_colours_fail_the_whole_and_the_element(name, change):
    judge = EMBEDDERS[name]
    picture, masks = PICTURES[name]()
    whole, elements = judge.compared_masks(masks)
    whole = EVERYWHERE if whole is None else whole
    changed = CHANGES[change](picture)
    for mask in (whole, elements[0]):
        reference = judge.reference(picture, mask)
        copy = (picture * 1.05).clamp(0, 1)
        score, of_copy = judge.paired(judge.of_region(torch.cat([changed, copy]), mask), reference).tolist()
        assert score < 0.2 and of_copy > 0.8
        exact = judge.paired(judge.of_region(picture, mask), reference).item()
        assert exact == pytest.approx(1, abs=1e-5)


def test_a_few_stripes_of_another_colour_count():
    """Over a region that is mostly grey a mean would hide them."""
    wall = torch.full((1, 3, SIDE, SIDE), 0.6)
    flag = wall.clone()
    flag[:, :, :, :8] = torch.tensor([0.7, 0.3, 0.3]).view(3, 1, 1)
    green = wall.clone()
    green[:, :, :, :8] = torch.tensor([0.3, 0.7, 0.3]).view(3, 1, 1)
    assert of_copy(green, flag) < 0.1


def test_between_images_the_detector_is_graded():
    """Of two generations nothing is judged: two reds and a blue are not all the same distance apart."""
    judge = EMBEDDERS["micro"]
    red, blue = (to_tensor(Image.new("RGB", (SIDE, SIDE), colour)) for colour in ("red", "blue"))
    other = to_tensor(smooth("graded", 0, side=SIDE))
    features = judge.embed(torch.stack([red, blue, other]))
    assert judge.similarity(features, features).min() > 1e-6


def test_colours_do_not_depend_on_the_size_of_a_region():
    red = torch.tensor([0.8, 0.2, 0.2]).view(1, 3, 1, 1).expand(1, 3, SIDE, SIDE)
    norms = [colours(red, disc(radius)).square().sum(1).square().sum().item() for radius in (6, 20)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


def test_larger_images_are_judged_as_small_ones():
    """A region is cut at 64 pixels, whatever side images are drawn at."""
    target = photographs.photograph("astronaut")
    judge: Copy = EMBEDDERS["copy"]
    _, elements = judge.compared_masks([to_tensor(mask)[:1] for _, mask in target.elements])
    large = to_tensor(target.picture)[None]
    for mask in elements:
        assert judge.paired(judge.of_region(large, mask), judge.reference(large, mask)).item() > 0.999
