"""Scenes to pixels: drawings pasted by their alpha at twice the resolution, one box-filtered
reduction."""

import colorsys

import numpy as np
from PIL import Image

from worlds.emoji.backdrops import BACKDROPS
from worlds.emoji.grammar import Scene, Thing
from worlds.emoji.sets import drawing

SIZE = 64
SCALE = 2  # supersampling
CANVAS = SIZE * SCALE
TINT = 0.35  # of a recoloured drawing: greys have no hue to turn


def recoloured(picture: Image.Image, turn: float) -> Image.Image:
    """A drawing with its hues turned, and tinted by the new hue."""
    hue, saturation, value = picture.convert("RGB").convert("HSV").split()
    turned = hue.point([int(v + 256 * turn) % 256 for v in range(256)])
    rgb = Image.merge("HSV", (turned, saturation, value)).convert("RGB")
    tint = tuple(round(255 * v) for v in colorsys.hsv_to_rgb(turn % 1, 0.8, 0.9))
    rgb = Image.blend(rgb, Image.new("RGB", rgb.size, tint), TINT)
    rgb.putalpha(picture.getchannel("A"))
    return rgb


def posed(thing: Thing) -> Image.Image:
    """A thing's drawing as the canvas shows it, RGBA."""
    picture = drawing(thing.artist, thing.kind)
    if thing.hue:
        picture = recoloured(picture, thing.hue)
    if thing.mirrored:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    ratio = thing.size * SCALE / max(picture.size)
    size = [max(1, round(side * ratio)) for side in picture.size]
    picture = picture.resize((size[0], size[1]), Image.Resampling.BICUBIC)
    return picture.rotate(np.degrees(thing.tilt), Image.Resampling.BICUBIC, expand=True)


def _paste(canvas: Image.Image, thing: Thing) -> Image.Image:
    """Put one thing on the canvas; returns what it covers (L, CANVAS x CANVAS)."""
    picture = posed(thing)
    x, y = (
        round(at * SCALE - side / 2) for at, side in zip(thing.centre, picture.size, strict=True)
    )
    canvas.paste(picture, (x, y), picture)
    mask = Image.new("L", canvas.size)
    mask.paste(picture.getchannel("A"), (x, y))
    return mask


def render(scene: Scene) -> tuple[Image.Image, list[Image.Image]]:
    """The picture (RGB, 64x64) and each thing's visible mask (L, 64x64), in the order of
    `scene.things`."""
    pixels = BACKDROPS[scene.backdrop.kind].draw(scene.backdrop.specifics)
    canvas = Image.fromarray((np.clip(pixels, 0, 1) * 255).astype(np.uint8))
    masks: list[Image.Image] = []
    for thing in scene.things:
        mask = _paste(canvas, thing)
        for earlier_mask in masks:  # later things hide earlier ones
            earlier_mask.paste(0, mask=mask)
        masks.append(mask)
    return canvas.reduce(SCALE), [mask.reduce(SCALE) for mask in masks]
