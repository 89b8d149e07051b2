"""Charts as SVG: a text alternative each, legible on a phone and in grey print.

Every function takes plain numbers and texts and returns markup, in which every text is escaped
(`Markup.format` escapes what it inserts). A chart without a finite number is empty. Captions,
legends and tables are the templates' business."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from markupsafe import Markup

if TYPE_CHECKING:
    from silentbad.measure.by_part import Part


WIDTH = 480
HEIGHT = 250
LEFT = 60
RIGHT = 20
TOP = 12
BOTTOM = 40
# Okabe-Ito, darker
COLOURS = "#0072b2 #d55e00 #009e73 #cc79a7 #8a6d00 #56b4e9 #5b5b5b #b22222".split()
DASHES = ("", "7 4", "2 3", "9 3 2 3", "", "7 4", "2 3", "9 3 2 3")
DRAWABLE = 1e100  # larger numbers are left out, so that differences and squares stay finite
ROW = 15  # height of a heatmap's row
NAMES = 136  # width of its names
REACH_NAMES = 158  # width of the names in a chart of ranges
MOST_COLUMNS = 120

Span = tuple[float, float]
Place = Callable[[float], float]


class Series(NamedTuple):
    """A curve: ys over xs, with a band where low and high are given."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None


# -- numbers ---------------------------------------------------------------------------------------
def finite(value: object) -> TypeGuard[float]:
    """Whether a value is a number that can be drawn."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= DRAWABLE


def number(value: object) -> str:
    """A number in at most four digits; other values as text."""
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else "–"
    return "–" if value is None else str(value)


def shortened(name: str, most: int = 18) -> str:
    """A name of at most so many letters."""
    return name if len(name) <= most else name[: most - 1] + "…"


def tick_label(value: float) -> str:
    """Short enough for the margin: 0.25, 1200, 1.5e-4."""
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e6):
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.6g}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that span [low, high]."""
    raw = (high - low) / count
    base = 10 ** math.floor(math.log10(raw))
    step = next((m * base for m in (1, 2, 2.5, 5, 10) if m * base >= raw * 0.999), 10 * base)
    return [
        i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]


def bounds(values: Sequence[float], fixed: Span | None = None) -> Span:
    """Span of the values, and of `fixed`; a single value gets room around it."""
    values_and_ends = [*values, *(fixed or ())]
    low = float(min(values_and_ends))
    high = float(max(values_and_ends))
    if high - low < 1e-12 * max(1.0, abs(high), abs(low)):
        pad = max(0.1 * abs(high), 1e-9) if high else 0.5
        low -= pad
        high += pad
    return low, high


def scale(values: Span, start: float, end: float) -> Place:
    """Where a value lies between two places of the picture."""
    low, high = values
    return lambda value: start + (value - low) / (high - low) * (end - start)


def scales(x_range: Span, y_range: Span) -> tuple[Place, Place]:
    """Places of x and y in the picture."""
    return scale(x_range, LEFT, WIDTH - RIGHT), scale(y_range, HEIGHT - BOTTOM, TOP)


# -- pieces ----------------------------------------------------------------------------------------
def frame(inside: Iterable[Markup], title: str, description: str, height: int = HEIGHT) -> Markup:
    """The picture with its text alternative."""
    return Markup(
        '<svg viewBox="0 0 {} {}" role="img" '
        'aria-label="{}"><title>{}</title><desc>{}</desc>{}</svg>'
    ).format(WIDTH, height, f"{title}. {description}", title, description, Markup("").join(inside))


def text_at(x: float, y: float, text: str, anchor: str = "middle") -> Markup:
    """A text, which the style sheet gives its size and colour."""
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(
        x, y, anchor, text
    )


def rule(kind: str, y: float) -> Markup:
    """A horizontal line over the whole plot; `kind` is its class."""
    return Markup('<line class="{}" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(
        kind, LEFT, WIDTH - RIGHT, y, y
    )


def rectangle(x: float, y: float, width: float, height: float, fill: str) -> Markup:
    """A bar, or a cell of a heatmap."""
    return Markup('<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" fill="{}"/>').format(
        x, y, width, height, fill
    )


def axes(x_range: Span, y_range: Span, x_label: str) -> list[Markup]:
    """Grid lines, ticks and the name of the x axis."""
    x_place, y_place = scales(x_range, y_range)
    parts = list[Markup]()
    for y in ticks(*y_range):
        parts += [rule("grid", y_place(y)), text_at(LEFT - 6, y_place(y) + 4, tick_label(y), "end")]
    parts += [text_at(x_place(x), HEIGHT - BOTTOM + 16, tick_label(x)) for x in ticks(*x_range)]
    return [
        *parts,
        rule("axis", HEIGHT - BOTTOM),
        text_at((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_label),
    ]


def swatch(k: int) -> Markup:
    """The line of series k, for a legend."""
    return Markup(
        '<svg class="swatch" viewBox="0 0 22 8" aria-hidden="true">'
        '<line x1="0" x2="22" y1="4" y2="4" stroke="{}" stroke-width="3" '
        'stroke-dasharray="{}"/></svg>'
    ).format(COLOURS[k % len(COLOURS)], DASHES[k % len(DASHES)])


# -- charts ----------------------------------------------------------------------------------------
def line_chart(
    series: Sequence[Series],
    title: str,
    *,
    y_range: Span | None = None,
    marks: Sequence[tuple[str, float]] = (),
) -> Markup:
    """Curves over steps, with bands; marks are (name, y) horizontal lines."""
    series = drawn(series)
    marks = [(name, y) for name, y in marks if finite(y)]
    if not series:
        return Markup("")
    xs = [x for s in series for x, _ in points(s)]
    sides = [side or () for s in series for side in (s.ys, s.low, s.high)]
    ys = [y for side in sides for y in side if finite(y)]
    from_nought = (0.0, 0.0) if len(set(xs)) == 1 else None  # a point alone has no range
    x_range = bounds(xs, from_nought)
    y_range = bounds([*ys, *(y for _, y in marks)], y_range or from_nought)
    x_place, y_place = scales(x_range, y_range)
    parts = axes(x_range, y_range, "step")
    for k, one_curve in enumerate(series):
        parts += curve(one_curve, k, x_place, y_place)
    for name, y in marks:
        beside = y_place(y) + (14 if y_place(y) < TOP + 12 else -4)  # inside the picture
        parts.append(rule("mark", y_place(y)))
        parts.append(text_at(WIDTH - RIGHT - 2, beside, f"{name} {y:.2g}", "end"))
    return frame(parts, title, "; ".join(describe(s) for s in series[:8]))


def drawn(series: Iterable[Series]) -> list[Series]:
    """The series that have a point to draw."""
    return [s for s in series if points(s)]


def points(s: Series) -> list[tuple[float, float]]:
    """(x, y) of a series where both are finite."""
    return [(x, y) for x, y in zip(s.xs, s.ys, strict=True) if finite(x) and finite(y)]


def curve(s: Series, k: int, x_place: Place, y_place: Place) -> list[Markup]:
    """The band, the line and, where they are few, the points of series k."""

    def path(line: Iterable[tuple[float, Any]]) -> str:
        return " ".join(f"{x_place(x):.1f},{y_place(y):.1f}" for x, y in line)

    colour = COLOURS[k % len(COLOURS)]
    parts = list[Markup]()
    line = points(s)
    if s.low and s.high:
        rows = [row for row in zip(s.xs, s.low, s.high, strict=True) if all(map(finite, row))]
        edge = [(x, low) for x, low, _ in rows] + [(x, high) for x, _, high in reversed(rows)]
        band = Markup('<polygon points="{}" fill="{}" opacity="0.16"/>')
        parts.append(band.format(path(edge), colour))
    polyline = Markup(
        '<polyline points="{}" fill="none" stroke="{}" stroke-width="2" stroke-dasharray="{}"/>'
    )
    parts.append(polyline.format(path(line), colour, DASHES[k % len(DASHES)]))
    if len(line) <= 24:
        dot = Markup('<circle cx="{:.1f}" cy="{:.1f}" r="2.8" fill="{}"/>')
        parts += [dot.format(x_place(x), y_place(y), colour) for x, y in line]
    return parts


def describe(s: Series) -> str:
    """A series in words, for its text alternative."""
    line = points(s)
    x, highest = max(line, key=lambda point: point[1])
    ends = f"from {number(line[0][1])} to {number(line[-1][1])}"
    return f"{s.name}: {ends}, highest {number(highest)} at {number(x)}"


def heatmap(
    names: Sequence[str], xs: Sequence[float], values: Sequence[Sequence[float | None]], title: str
) -> Markup:
    """values (names, xs) of multipliers, on a log scale: blue below 1, orange above."""
    if not names or not xs:
        return Markup("")
    keep = spaced(len(xs), MOST_COLUMNS)
    cell = (WIDTH - NAMES - RIGHT) / len(keep)
    below = TOP // 2 + ROW * len(names)
    span = log_span(values)
    parts = list[Markup]()
    for i, (name, line) in enumerate(zip(names, values, strict=True)):
        y = TOP // 2 + ROW * i
        parts.append(text_at(NAMES - 6, y + 11, shortened(name), "end"))
        shades = [
            tint(math.log(v) / span) if finite(v) and v > 0 else None
            for v in (line[k] for k in keep)
        ]
        start = 0
        for colour, alike in itertools.groupby(shades):
            count = len(list(alike))
            if colour is not None:
                x = NAMES + start * cell
                parts.append(rectangle(x, y, count * cell + 0.3, ROW - 1, colour))
            start += count
    for j in sorted({0, len(keep) // 2, len(keep) - 1}):
        parts.append(text_at(NAMES + (j + 0.5) * cell, below + 14, f"{xs[keep[j]]:.6g}"))
    parts.append(text_at(NAMES + (WIDTH - NAMES - RIGHT) / 2, below + 34, "step"))
    ends = zip((line[-1] for line in values), names, strict=True)
    last = sorted((end, name) for end, name in ends if finite(end))
    described = ""
    if last:
        low, slowest = last[0]
        high, fastest = last[-1]
        described = f"lowest at the end {slowest} {number(low)}, highest {fastest} {number(high)}"
    return frame(parts, title, described, below + 40)


def heatmap_scale(values: Sequence[Sequence[float | None]]) -> list[tuple[Markup, str]]:
    """(patch of colour, multiplier) of five shades, for a heatmap's legend."""
    span = log_span(values)
    patch = Markup(
        '<svg class="patch" viewBox="0 0 14 11" aria-hidden="true">'
        '<rect width="14" height="11" fill="{}"/></svg>'
    )
    return [(patch.format(tint(k / 2)), f"{math.exp(k / 2 * span):.2f}") for k in range(-2, 3)]


def log_span(values: Sequence[Sequence[float | None]]) -> float:
    """Largest |log| of the multipliers, at least that of 1.5."""
    return max(
        [abs(math.log(v)) for line in values for v in line if finite(v) and v > 0] + [math.log(1.5)]
    )


def matrix(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
    title: str,
    across: str = "element",
) -> Markup:
    """values (rows, columns) of rates in [0,1]: white at 0, blue at 1, with numbers."""
    if not any(finite(v) for line in values for v in line):
        return Markup("")
    side = 190 if max(map(len, rows)) > 12 else 90
    row = 26
    parts = list[Markup]()
    width = min((WIDTH - side - RIGHT) / len(columns), 64)
    named_values: list[tuple[float, str]] = []
    for i, (name, line) in enumerate(zip(rows, values, strict=True)):
        y = TOP // 2 + row * i
        parts.append(text_at(side - 6, y + 17, shortened(name, 26), "end"))
        for k, (column, value) in enumerate(zip(columns, line, strict=False)):
            middle = side + (k + 0.5) * width - 1
            if not finite(value):
                parts.append(text_at(middle, y + 17, "–"))
                continue
            shade = tint(-max(0.0, value))
            parts.append(rectangle(side + k * width, y, width - 2, row - 2, shade))
            ink = "pale" if value > 0.6 else "dark"  # in any colour scheme
            text = Markup(
                '<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="middle">{:.2f}</text>'
            )
            parts.append(text.format(ink, middle, y + 17, value))
            named_values.append((value, f"{name}, {across} {column}"))
    below = TOP // 2 + row * len(rows)
    for k, name in enumerate(columns):
        parts.append(text_at(side + (k + 0.5) * width - 1, below + 15, name))
    parts.append(text_at(side + len(columns) * width / 2, below + 33, across))
    top, where = max(named_values)
    size = f"{len(rows)} rows, {len(columns)} columns"
    return frame(parts, title, f"{size}, highest {number(top)} at {where}", below + 40)


def ranges(rows: "Sequence[Part]", title: str) -> Markup:
    """A row for each whole or element: a dot for each image, a band from floor to ceiling."""
    rows = [row for row in rows if finite(row.threshold) and any(map(finite, row.sims))]
    if not rows:
        return Markup("")
    ends = [end for row in rows for end in (*row.sims, row.threshold, row.floor, row.ceiling)]
    low, high = bounds([end for end in ends if finite(end)], (0.0, 1.0))
    row_height = 28
    below = TOP // 2 + row_height * len(rows)
    place = scale((low, high), REACH_NAMES, WIDTH - RIGHT)
    upright = Markup('<line class="{0}" x1="{1:.1f}" x2="{1:.1f}" y1="{2}" y2="{3}"/>')
    band = Markup('<rect class="band" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{}"/>')
    dot = Markup('<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="4"/>')
    parts = list[Markup]()
    for x in ticks(low, high, 4):
        parts.append(upright.format("grid", place(x), TOP // 2, below))
        parts.append(text_at(place(x), below + 15, tick_label(x)))
    for i, row in enumerate(rows):
        y = TOP // 2 + row_height * i
        parts.append(text_at(REACH_NAMES - 8, y + 18, shortened(row.label), "end"))
        if finite(row.floor) and finite(row.ceiling) and row.ceiling > row.floor:
            width = place(row.ceiling) - place(row.floor)
            parts.append(band.format(place(row.floor), y + 5, width, row_height - 10))
        parts.append(upright.format("limit", place(row.threshold), y + 2, y + row_height - 2))
        for sim in filter(finite, row.sims):
            kind = "over" if sim >= row.threshold else "under"
            parts.append(dot.format(kind, place(sim), y + row_height / 2))
    middle = (REACH_NAMES + WIDTH - RIGHT) / 2
    parts.append(text_at(middle, below + 32, "similarity (1: the same picture)"))
    counts = "; ".join(f"{row.label}: {row.hits} of {row.images}" for row in rows)
    return frame(parts, title, f"images that reach their threshold: {counts}", below + 38)


def spaced(n: int, most: int) -> list[int]:
    """At most `most` of n indices, evenly, first and last included."""
    return list(range(n)) if n <= most else [round(i * (n - 1) / (most - 1)) for i in range(most)]


def tint(x: float) -> str:
    """-1 .. 1 -> blue .. white .. orange, in 33 shades."""
    x = round(max(-1.0, min(1.0, x)) * 16) / 16
    end = (213, 94, 0) if x > 0 else (0, 114, 178)
    return "#" + "".join(f"{round(255 + (c - 255) * abs(x)):02x}" for c in end)


def histogram(edges: Sequence[float], counts: Sequence[float], title: str, x_label: str) -> Markup:
    """Bars of counts (n,) between edges (n+1,)."""
    fits = len(edges) == len(counts) + 1 and all(map(finite, [*edges, *counts]))
    if not fits or sum(counts) == 0:
        return Markup("")
    x_range = bounds(edges)
    y_range = bounds([0, *counts])
    x_place, y_place = scales(x_range, y_range)
    parts = axes(x_range, y_range, x_label)
    for a, b, count in zip(edges, edges[1:], counts, strict=False):
        width = max(x_place(b) - x_place(a) - 1, 0.5)
        height = y_place(0) - y_place(count)
        top = y_place(max(count, 0))
        parts.append(rectangle(x_place(a) + 0.5, top, width, abs(height), COLOURS[0]))
    peak = max(range(len(counts)), key=lambda i: counts[i])
    between = f"{number(edges[peak])} and {number(edges[peak + 1])}"
    return frame(parts, title, f"{len(counts)} bins, most between {between}")
