"""Scenes to pixels: polygons at twice the resolution, a dark outline, a texture, one
box-filtered reduction."""

from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from worlds.microworld.grammar import Backdrop, Scene, Thing

SIZE = 64
SCALE = 2  # supersampling
CANVAS = SIZE * SCALE
# pixel coordinates of the final picture, along a side
COORDINATES = np.arange(CANVAS).astype(np.float32) / SCALE
DARK = (0.12, 0.10, 0.14)


def _ellipse(cx, cy, rx, ry, start=0.0, stop=1.0):
    turn = np.linspace(start, stop, 28) * 2 * np.pi
    return np.stack([cx + rx * np.cos(turn), cy + ry * np.sin(turn)], 1)


def _poly(*points):
    return np.array(points, dtype=float)


def _star():
    angle = np.arange(10) * np.pi / 5 - np.pi / 2
    radius = np.where(np.arange(10) % 2 == 0, 1.0, 0.45)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)


def _heart():
    s = np.linspace(0, 2 * np.pi, 40)
    x = 16 * np.sin(s) ** 3
    y = -(13 * np.cos(s) - 5 * np.cos(2 * s) - 2 * np.cos(3 * s) - np.cos(4 * s))
    return np.stack([x / 17, y / 17], 1)


def _crescent():
    outer = _ellipse(0.1, 0, 0.95, 0.95, 0.16, 0.84)
    inner = _ellipse(0.55, 0, 0.80, 0.75, 0.76, 0.24)
    return np.concatenate([outer, inner])


# Each figure: (body polygons, [(detail polygon, shade)]); y grows downwards, everything within [-1,
# 1]. A shade is "dark", "light", "deep" (the body's colour, darker) or an rgb triple.
FIGURES: dict[str, tuple[list, list]] = {
    "cat": (
        [
            _ellipse(0, 0.50, 0.50, 0.50),
            _ellipse(0, -0.22, 0.56, 0.46),
            _poly((-0.55, -0.30), (-0.52, -1.0), (-0.10, -0.60)),
            _poly((0.55, -0.30), (0.52, -1.0), (0.10, -0.60)),
            _poly((0.35, 0.95), (0.85, 0.85), (0.98, 0.35), (0.82, 0.10), (0.72, 0.20), (0.80, 0.40), (0.70, 0.65),
                  (0.35, 0.70)),
        ],
        [
            (_ellipse(-0.23, -0.28, 0.10, 0.14), "dark"), (_ellipse(0.23, -0.28, 0.10, 0.14), "dark"),
            (_poly((-0.10, -0.05), (0.10, -0.05), (0, 0.07)), "dark"),
        ],
    ),
    "hat": (
        [
            _poly((-0.55, 0.35), (-0.48, -0.75), (0.48, -0.75), (0.55, 0.35)),
            _ellipse(0, 0.45, 1.0, 0.24),
        ],
        [(_poly((-0.55, 0.30), (-0.53, 0.02), (0.53, 0.02), (0.55, 0.30)), "dark")],
    ),
    "fish": (
        [
            _ellipse(-0.15, 0, 0.75, 0.50),
            _poly((0.40, 0), (1.0, -0.55), (0.86, 0), (1.0, 0.55)),
            _poly((-0.25, -0.42), (0.15, -0.80), (0.30, -0.35)),
        ],
        [(_ellipse(-0.55, -0.10, 0.13, 0.13), "light"), (_ellipse(-0.57, -0.10, 0.07, 0.07), "dark"),
         (_poly((-0.20, -0.30), (-0.10, 0.0), (-0.20, 0.30), (-0.12, 0.30), (-0.02, 0.0), (-0.12, -0.30)), "deep")],
    ),
    "house": (
        [_poly((-0.70, -0.15), (0.70, -0.15), (0.70, 0.95), (-0.70, 0.95)),
         _poly((-0.95, -0.12), (0, -0.95), (0.95, -0.12))],
        [(_poly((-0.95, -0.12), (0, -0.95), (0.95, -0.12)), "deep"),
         (_poly((-0.48, 0.35), (-0.08, 0.35), (-0.08, 0.95), (-0.48, 0.95)), "dark"),
         (_poly((0.18, 0.12), (0.54, 0.12), (0.54, 0.48), (0.18, 0.48)), (1.0, 0.95, 0.6))],
    ),
    "tree": (
        [_poly((-0.16, 0.20), (0.16, 0.20), (0.20, 1.0), (-0.20, 1.0)), _ellipse(0, -0.55, 0.50, 0.45),
         _ellipse(-0.40, -0.10, 0.45, 0.42), _ellipse(0.40, -0.10, 0.45, 0.42)],
        [(_poly((-0.15, 0.34), (0.15, 0.34), (0.20, 1.0), (-0.20, 1.0)), (0.42, 0.26, 0.13))],
    ),
    "boat": (
        [_poly((-1.0, 0.30), (1.0, 0.30), (0.65, 0.90), (-0.65, 0.90)),
         _poly((-0.05, -1.0), (0.05, -1.0), (0.05, 0.32), (-0.05, 0.32)),
         _poly((0.08, -0.95), (0.78, 0.15), (0.08, 0.15)), _poly((-0.08, -0.70), (-0.60, 0.15), (-0.08, 0.15))],
        [(_poly((0.08, -0.95), (0.78, 0.15), (0.08, 0.15)), (0.97, 0.95, 0.88)),
         (_poly((-0.08, -0.70), (-0.60, 0.15), (-0.08, 0.15)), (0.97, 0.95, 0.88))],
    ),
    "umbrella": (
        [np.concatenate([_ellipse(0, 0.0, 1.0, 0.85, 0.5, 1.0), _poly((0.66, -0.12), (0.33, 0.05), (0, -0.12),
                                                                      (-0.33, 0.05), (-0.66, -0.12))]),
         _poly((-0.06, -0.95), (0.06, -0.95), (0.06, 0.85), (-0.06, 0.85)),
         _poly((-0.06, 0.70), (0.06, 0.70), (0.06, 0.85), (0.28, 0.85), (0.28, 0.65), (0.40, 0.65), (0.40, 0.97),
               (-0.06, 0.97))],
        [(_poly((-0.05, -0.05), (0.05, -0.05), (0.05, 0.95), (-0.05, 0.95)), "dark")],
    ),
    "cup": (
        [_poly((-0.80, -0.70), (0.45, -0.70), (0.32, 0.80), (-0.67, 0.80)),
         np.concatenate([_ellipse(0.45, -0.02, 0.52, 0.48, -0.25, 0.25), _ellipse(0.45, -0.02, 0.28, 0.26, 0.25, -0.25)])],
        [(_ellipse(-0.175, -0.70, 0.62, 0.16), "dark")],
    ),
    "star": ([_star()], []),
    "moon": ([_crescent()], [(_ellipse(-0.55, -0.15, 0.10, 0.10), "deep"), (_ellipse(-0.38, 0.38, 0.12, 0.12), "deep")]),
    "heart": ([_heart()], [(_ellipse(-0.45, -0.40, 0.13, 0.18), "light")]),
    "ball": (
        [_ellipse(0, 0, 0.88, 0.88)],
        [(np.concatenate([_ellipse(0, 0, 0.16, 0.88), ]), "light"),
         (_poly((-0.87, -0.10), (0.87, -0.10), (0.87, 0.10), (-0.87, 0.10)), "light")],
    ),
}  # fmt: skip


def _place(points: np.ndarray, thing: Thing) -> list[tuple[float, float]]:
    """Figure coordinates to canvas coordinates: mirror, tilt, scale, shift."""
    x = points[:, 0] * (-1 if thing.mirrored else 1)
    y = points[:, 1]
    c = np.cos(thing.tilt)
    s = np.sin(thing.tilt)
    half = thing.size / 2
    px = (thing.centre[0] + half * (c * x - s * y)) * SCALE
    py = (thing.centre[1] + half * (s * x + c * y)) * SCALE
    return list(zip(px.tolist(), py.tolist(), strict=True))


@lru_cache(maxsize=64)
def _silhouette(thing: Thing) -> tuple[Image.Image, Image.Image]:
    """What the body covers, and the same with its outline (L, CANVAS x CANVAS). Nulls repeat the
    other things of their target, so the last ones are kept; draw on a copy."""
    mask = Image.new("L", (CANVAS, CANVAS))
    draw = ImageDraw.Draw(mask)
    for polygon in FIGURES[thing.kind][0]:
        draw.polygon(_place(polygon, thing), fill=255)
    return mask, mask.filter(ImageFilter.MaxFilter(3))


@lru_cache(maxsize=64)
def _textured(thing: Thing) -> Image.Image | tuple[int, ...]:
    """The body's colour, or an image (CANVAS x CANVAS) of it with its texture in a contrasting
    shade of the same colour."""
    rgb = np.array(thing.rgb, dtype=np.float32)
    if thing.texture == "plain":
        return tuple(int(255 * float(c)) for c in rgb)
    other = rgb * 0.5 if rgb.mean() > 0.45 else rgb * 0.45 + 0.55
    # one row and one column: their sums below have the canvas's shape
    u = (COORDINATES - thing.centre[0]) / thing.texture_period
    v = (COORDINATES[:, None] - thing.centre[1]) / thing.texture_period
    if thing.texture == "striped":
        on = ((u * 0.45 + v * 0.9 + thing.texture_phase) % 1.0) < 0.42
    else:
        du = (u + thing.texture_phase) % 1.0 - 0.5
        dv = (v + thing.texture_phase) % 1.0 - 0.5
        on = du * du + dv * dv < 0.09
    shades = [(colour * 255).astype(np.uint8) for colour in (other, rgb)]
    return Image.fromarray(np.where(on[..., None], *shades))


def _shade(shade, rgb):
    named = {"dark": DARK, "light": (0.98, 0.98, 0.96), "deep": tuple(0.55 * c for c in rgb)}
    return named.get(shade, shade)


def _draw_thing(canvas: Image.Image, thing: Thing) -> Image.Image:
    """Paint one thing on the canvas in place; returns what it covers, outline included (L,
    CANVAS x CANVAS)."""
    body, outline = _silhouette(thing)
    outlined = outline.copy()
    canvas.paste(tuple(int(255 * c) for c in DARK), mask=outlined)
    canvas.paste(_textured(thing), mask=body)
    draw = ImageDraw.Draw(canvas)
    covered = ImageDraw.Draw(outlined)
    for polygon, shade in FIGURES[thing.kind][1]:
        draw.polygon(
            _place(polygon, thing),
            fill=tuple(int(255 * float(c)) for c in _shade(shade, thing.rgb)),
        )
        covered.polygon(_place(polygon, thing), fill=255)  # a cup's rim stands out
    return outlined


def _mix(a, b, w):
    return np.array(a, dtype=np.float32) * (1 - w) + np.array(b, dtype=np.float32) * w


# The colours above the horizon, from one to another, and below it.
ZONES = {
    "beach": (
        ((0.45, 0.72, 0.86), (0.30, 0.58, 0.80)),
        ((0.93, 0.84, 0.62), (0.84, 0.70, 0.46)),
    ),
    "meadow": (
        ((0.75, 0.88, 0.96), (0.60, 0.80, 0.93)),
        ((0.62, 0.80, 0.42), (0.45, 0.66, 0.33)),
    ),
    "snow": (
        ((0.70, 0.75, 0.82), (0.54, 0.60, 0.70)),
        ((0.90, 0.93, 0.97), (0.80, 0.86, 0.94)),
    ),
    "night": (
        ((0.08, 0.09, 0.24), (0.16, 0.12, 0.36)),
        ((0.10, 0.16, 0.20), (0.18, 0.22, 0.32)),
    ),
    "room": (
        ((0.86, 0.80, 0.72), (0.70, 0.76, 0.72)),
        ((0.62, 0.46, 0.34), (0.48, 0.36, 0.30)),
    ),
    "sunset": (
        ((0.98, 0.72, 0.52), (0.90, 0.55, 0.56)),
        ((0.42, 0.30, 0.48), (0.30, 0.24, 0.42)),
    ),
}


def draw_backdrop(backdrop: Backdrop) -> Image.Image:
    """RGB canvas of the backdrop alone: two zones about a horizon, each with one quiet pattern."""
    horizon, *shades, pattern = backdrop.specifics
    edge = 20 + 24 * horizon
    zones = ZONES[backdrop.kind]
    above, below = (_mix(*zone, shade) for zone, shade in zip(zones, shades, strict=True))
    column = np.where((COORDINATES < edge)[:, None, None], above, below)  # (CANVAS, 1, 3)
    picture = Image.fromarray((column * 255).astype(np.uint8)).resize(
        (CANVAS, CANVAS), Image.Resampling.NEAREST
    )
    draw = ImageDraw.Draw(picture)
    if backdrop.kind in ("night", "snow"):  # stars, flakes
        colour = (250, 246, 210) if backdrop.kind == "night" else (255, 255, 255)
        for i in range(7):
            x = ((pattern * 7 + i * 0.618) % 1) * CANVAS
            y = ((pattern * 3 + i * 0.382) % 1) * edge * SCALE
            draw.ellipse((x - 2, y - 2, x + 2, y + 2), fill=colour)
    elif backdrop.kind == "sunset":
        x = (0.2 + 0.6 * pattern) * CANVAS
        draw.chord(
            (x - 22, edge * SCALE - 22, x + 22, edge * SCALE + 22), 180, 360, fill=(255, 225, 150)
        )
    elif backdrop.kind == "room":  # a picture rail
        y = (4 + 10 * pattern) * SCALE
        draw.rectangle((0, y, CANVAS, y + 2), fill=tuple(int(255 * float(c)) for c in below))
    else:  # a band: surf on the beach, a hill's edge on the meadow
        y = (edge + 3 + 5 * pattern) * SCALE
        draw.rectangle(
            (0, y, CANVAS, y + 3), fill=tuple(int(255 * min(1.0, float(c) * 1.12)) for c in below)
        )
    return picture


def render(scene: Scene) -> tuple[Image.Image, list[Image.Image]]:
    """The picture (RGB, 64x64) and each thing's visible mask (L, 64x64), in the order of
    `scene.things`."""
    canvas = draw_backdrop(scene.backdrop)
    masks: list[Image.Image] = []
    for thing in scene.things:
        mask = _draw_thing(canvas, thing)
        for earlier_mask in masks:  # later things hide earlier ones
            earlier_mask.paste(0, mask=mask)
        masks.append(mask)
    shrink = lambda image: image.reduce(SCALE)  # noqa: E731
    return shrink(canvas), [shrink(mask) for mask in masks]


def backdrop_mask(masks: list[Image.Image]) -> Image.Image:
    """L mask of what no thing covers."""
    covered = np.zeros((SIZE, SIZE), np.uint8)
    for mask in masks:
        covered = np.maximum(covered, np.asarray(mask))
    return Image.fromarray(255 - covered)
