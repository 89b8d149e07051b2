"""Charts as inline SVG: no script, no network, a text alternative each, legible on a phone and in grey print.

Every function takes plain numbers and returns HTML; texts are escaped here. Points that are not finite are
left out.
"""

import itertools
import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 480, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 20, 12, 40
COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#8a6d00",
    "#56b4e9",
    "#5b5b5b",
    "#b22222",
)  # Okabe-Ito, darker
DASHES = ("", "7 4", "2 3", "9 3 2 3", "", "7 4", "2 3", "9 3 2 3")


class Series(NamedTuple):
    """A curve: ys over xs, with a band where low and high are given."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None


def finite(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def number(value) -> str:
    """A number in at most four digits."""
    if not finite(value):
        return "–" if value is None or isinstance(value, float) else str(value)
    return f"{value:.4g}" if isinstance(value, float) else f"{value}"


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
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def bounds(values: list[float], fixed: tuple[float, float] | None = None) -> tuple[float, float]:
    low, high = fixed or (min(values), max(values))
    if fixed:
        low, high = min([low, *values]), max([high, *values])
    if high - low < 1e-12 * max(1.0, abs(high)):
        pad = 0.5 if high == 0 else abs(high) * 0.1
        low, high = low - pad, high + pad
    return low, high


def frame(inside: list[str], title: str, description: str, height: int = HEIGHT) -> str:
    label = f"<title>{escape(title)}</title><desc>{escape(description)}</desc>"
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(f"{title}. {description}")}">'
        f"{label}{''.join(inside)}</svg>"
    )


def figure(svg: str, title: str, legend: str = "", note: str = "", table: str = "") -> str:
    caption = (
        f"<figcaption><b>{escape(title)}</b>{f' <span>{escape(note)}</span>' if note else ''}</figcaption>"
    )
    numbers = f"<details><summary>numbers</summary>{table}</details>" if table else ""
    return f'<figure class="chart">{caption}{svg}{legend}{numbers}</figure>'


def text_at(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def rule(kind: str, y: float) -> str:
    """A horizontal line over the whole plot."""
    return f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'


def axes(
    x_range: tuple[float, float], y_range: tuple[float, float], x_label: str, place_x, place_y
) -> list[str]:
    parts = []
    for y in ticks(*y_range):
        parts.append(rule("grid", place_y(y)))
        parts.append(text_at(LEFT - 6, place_y(y) + 4, tick_label(y), "end"))
    for x in ticks(*x_range):
        parts.append(text_at(place_x(x), HEIGHT - BOTTOM + 16, tick_label(x)))
    parts.append(
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>'
    )
    parts.append(text_at((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_label))
    return parts


def line_chart(
    series: list[Series], title: str, *, x_label: str = "step", y_range=None, marks=(), note=""
) -> str:
    """Curves with bands; marks are (name, y) horizontal lines. Empty where nothing is finite."""
    series = [s for s in series if any(finite(y) for y in s.ys)]
    if not series:
        return ""
    xs = [x for s in series for x, y in zip(s.xs, s.ys, strict=True) if finite(y) and finite(x)]
    ys = [y for s in series for side in (s.ys, s.low or (), s.high or ()) for y in side if finite(y)]
    x_range, y_range = bounds(xs), bounds(ys + [y for _, y in marks if finite(y)], y_range)

    def place_x(x: float) -> float:
        return LEFT + (x - x_range[0]) / (x_range[1] - x_range[0]) * (WIDTH - LEFT - RIGHT)

    def place_y(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y_range[0]) / (y_range[1] - y_range[0]) * (HEIGHT - TOP - BOTTOM)

    parts = axes(x_range, y_range, x_label, place_x, place_y)
    for k, s in enumerate(series):
        colour, dash = COLOURS[k % len(COLOURS)], DASHES[k % len(DASHES)]
        rows = [(x, y) for x, y in zip(s.xs, s.ys, strict=True) if finite(x) and finite(y)]
        if s.low and s.high:
            band = [(x, a, b) for x, a, b in zip(s.xs, s.low, s.high, strict=True) if finite(a) and finite(b)]
            edge = [(x, a) for x, a, _ in band] + [(x, b) for x, _, b in reversed(band)]
            points = " ".join(f"{place_x(x):.1f},{place_y(y):.1f}" for x, y in edge)
            parts.append(f'<polygon points="{points}" fill="{colour}" opacity="0.16"/>')
        points = " ".join(f"{place_x(x):.1f},{place_y(y):.1f}" for x, y in rows)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2" '
            f'stroke-dasharray="{dash}"/>'
        )
        if len(rows) <= 24:
            parts += [
                f'<circle cx="{place_x(x):.1f}" cy="{place_y(y):.1f}" r="2.8" fill="{colour}"/>'
                for x, y in rows
            ]
    for name, y in marks:
        if finite(y):
            parts.append(rule("mark", place_y(y)))
            parts.append(text_at(WIDTH - RIGHT - 2, place_y(y) - 4, f"{name} {y:.3g}", "end"))
    legend = "".join(f"<span>{swatch(k)}{escape(s.name)}</span>" for k, s in enumerate(series))
    described = "; ".join(describe(s) for s in series[:8])
    return figure(
        frame(parts, title, described),
        title,
        f'<p class="legend">{legend}</p>',
        note,
        series_table(series, x_label),
    )


def swatch(k: int) -> str:
    return (
        f'<svg class="swatch" viewBox="0 0 22 8" aria-hidden="true"><line x1="0" x2="22" y1="4" y2="4" '
        f'stroke="{COLOURS[k % len(COLOURS)]}" stroke-width="3" '
        f'stroke-dasharray="{DASHES[k % len(DASHES)]}"/></svg>'
    )


def describe(s: Series) -> str:
    rows = [(x, y) for x, y in zip(s.xs, s.ys, strict=True) if finite(y)]
    top = max(rows, key=lambda row: row[1])
    ends = f"from {number(rows[0][1])} to {number(rows[-1][1])}"
    return f"{s.name}: {ends}, highest {number(top[1])} at {number(top[0])}"


def series_table(series: list[Series], x_label: str, most: int = 40) -> str:
    """The curves' numbers, thinned to `most` rows."""
    at = [dict(zip(s.xs, s.ys, strict=True)) for s in series]
    xs = sorted({x for column in at for x in column if finite(x)})
    xs = xs if len(xs) <= most else [xs[round(i * (len(xs) - 1) / (most - 1))] for i in range(most)]
    return html_table(
        [x_label, *(s.name for s in series)], [[x, *(column.get(x) for column in at)] for x in xs]
    )


def html_table(head: Sequence[str], rows: Sequence[Sequence]) -> str:
    """A table; numbers are aligned right, the first column heads its row."""

    def cell(value, k: int) -> str:
        text = escape(
            number(value) if value is None or finite(value) or isinstance(value, float) else str(value)
        )
        return (
            f'<th scope="row">{text}</th>'
            if k == 0
            else f"<td{'' if isinstance(value, str) else ' class=n'}>{text}</td>"
        )

    words = [any(isinstance(row[k], str) for row in rows) or k == 0 for k in range(len(head))]
    top = "".join(
        f'<th scope="col"{"" if word else " class=n"}>{escape(str(name))}</th>'
        for name, word in zip(head, words, strict=True)
    )
    body = "".join(f"<tr>{''.join(cell(value, k) for k, value in enumerate(row))}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def heatmap(
    names: list[str], xs: list[float], values: list[list[float | None]], title: str, note: str = ""
) -> str:
    """values (names, xs) of positive multipliers: blue below 1, white at 1, orange above, on a log scale."""
    if not names or not xs:
        return ""
    most = 120
    keep = (
        list(range(len(xs)))
        if len(xs) <= most
        else [round(i * (len(xs) - 1) / (most - 1)) for i in range(most)]
    )
    row, left, top = 15, 136, 6
    height = top + row * len(names) + 40
    cell = (WIDTH - left - RIGHT) / len(keep)
    span = max([abs(math.log(v)) for line in values for v in line if finite(v) and v > 0] + [math.log(1.5)])
    parts = []
    for i, name in enumerate(names):
        parts.append(
            text_at(left - 6, top + row * i + 11, name if len(name) <= 18 else name[:17] + "…", "end")
        )
        shown = [values[i][k] for k in keep]
        tints = [tint(math.log(v) / span) if finite(v) and v > 0 else None for v in shown]
        for colour, alike in itertools.groupby(range(len(keep)), tints.__getitem__):
            if colour is not None:
                columns = list(alike)
                parts.append(
                    f'<rect x="{left + columns[0] * cell:.1f}" y="{top + row * i}" '
                    f'width="{len(columns) * cell + 0.3:.1f}" height="{row - 1}" fill="{colour}"/>'
                )
    for j in sorted({0, len(keep) // 2, len(keep) - 1}):
        parts.append(text_at(left + (j + 0.5) * cell, top + row * len(names) + 14, f"{xs[keep[j]]:.6g}"))
    parts.append(text_at(left + (WIDTH - left - RIGHT) / 2, height - 6, "step"))
    last = [(name, line[-1]) for name, line in zip(names, values, strict=True) if finite(line[-1])]
    spread = sorted(last, key=lambda item: item[1])
    described = (
        f"lowest at the end {spread[0][0]} {number(spread[0][1])}, "
        f"highest {spread[-1][0]} {number(spread[-1][1])}"
        if spread
        else ""
    )
    scale = "".join(
        f'<span><i style="background:{tint(k / 2)}"></i>{math.exp(k / 2 * span):.2f}</span>'
        for k in range(-2, 3)
    )
    table = html_table(
        ["group", "first", "last"], [[n, line[0], line[-1]] for n, line in zip(names, values, strict=True)]
    )
    return figure(
        frame(parts, title, described, height), title, f'<p class="legend scale">{scale}</p>', note, table
    )


def tint(x: float) -> str:
    """-1 .. 1 -> blue .. white .. orange, in 33 shades."""
    x = round(max(-1.0, min(1.0, x)) * 16) / 16
    end = (213, 94, 0) if x > 0 else (0, 114, 178)
    return "#" + "".join(f"{round(255 + (c - 255) * abs(x)):02x}" for c in end)


def histogram(edges: list[float], counts: list[float], title: str, x_label: str, note: str = "") -> str:
    """Bars of counts (n,) between edges (n+1,)."""
    if (
        not counts
        or len(edges) != len(counts) + 1
        or not all(map(finite, [*edges, *counts]))
        or sum(counts) == 0
    ):
        return ""
    x_range, y_range = bounds(list(edges)), bounds(list(counts), (0, 0))

    def place_x(x: float) -> float:
        return LEFT + (x - x_range[0]) / (x_range[1] - x_range[0]) * (WIDTH - LEFT - RIGHT)

    def place_y(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y_range[0]) / (y_range[1] - y_range[0]) * (HEIGHT - TOP - BOTTOM)

    parts = axes(x_range, y_range, x_label, place_x, place_y)
    for a, b, count in zip(edges, edges[1:], counts, strict=False):
        parts.append(
            f'<rect x="{place_x(a) + 0.5:.1f}" width="{max(place_x(b) - place_x(a) - 1, 0.5):.1f}" '
            f'y="{place_y(count):.1f}" height="{HEIGHT - BOTTOM - place_y(count):.1f}" fill="{COLOURS[0]}"/>'
        )
    peak = max(range(len(counts)), key=lambda i: counts[i])
    described = f"{len(counts)} bins, most between {number(edges[peak])} and {number(edges[peak + 1])}"
    table = html_table(
        [x_label, "to", "count"], [list(row) for row in zip(edges, edges[1:], counts, strict=False)]
    )
    return figure(frame(parts, title, described), title, "", note, table)
