"""The parts of a page: figures and tables as data, and the templates that turn them into HTML.

Autoescape is on for every template, so a text is never markup; only charts are, and charts.py
builds those."""

import base64
import hashlib
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup
from PIL import Image

from silentbad.errors import masked
from silentbad.report import charts
from silentbad.report.charts import Series, Span, finite, number

Cell = str | float | None
MOST_ROWS = 40  # of a curve's numbers


@dataclass
class Table:
    """A head and rows; the first cell of a row names it, its note says more. Numbers are aligned
    right, and texts too where `right`."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    right: bool = False
    notes: Sequence[str] = ()

    @property
    def words(self) -> list[bool]:
        """Which columns are aligned left."""
        texts = [any(isinstance(row[k], str) for row in self.rows) for k in range(len(self.head))]
        return [k == 0 or text and not self.right for k, text in enumerate(texts)]


@dataclass
class Figure:
    """A chart with its caption, legend (mark, name) and numbers."""

    title: str
    svg: Markup
    legend: Sequence[tuple[Markup, str]] = ()
    note: str = ""
    table: Table | None = None


@dataclass
class Shot:
    """A picture as a data URI, with its texts; `hit`: it is recovered, and framed."""

    src: str
    alt: str
    caption: str
    score: str = ""
    hit: bool = False


@dataclass
class Sheet:
    """A target and its elements; for the composed prompt, and for its phrases in another order, how
    many images count, and every image."""

    name: str
    prompt: str
    target: Sequence[Shot]
    rows: Sequence[tuple[str, Sequence[Shot]]]


@dataclass
class Card:
    """A target: its picture, rows of generations by step, its elements."""

    name: str
    prompt: str
    target: Shot
    rows: Sequence[Sequence[Shot]]
    elements: Sequence[Shot] = field(default_factory=list)


def png(pixels: np.ndarray) -> bytes:
    """Pixels (H,W,3) or (H,W) uint8 as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def shot(pixels: np.ndarray, caption: str, score: str = "") -> Shot:
    """Pixels (H,W,3) uint8 as a picture of a page."""
    content = base64.b64encode(png(pixels)).decode()
    return Shot(src=f"data:image/png;base64,{content}", alt=caption, caption=caption, score=score)


# -- figures ---------------------------------------------------------------------------------------
def lines(
    series: Sequence[Series],
    title: str,
    *,
    y_range: Span | None = None,
    marks: Sequence[tuple[str, float]] = (),
    note: str = "",
    digits: int | None = None,
) -> list[Figure]:
    """Curves over steps: one figure, or none where nothing is finite. `digits`: decimals."""
    series = charts.drawn(series)
    svg = charts.line_chart(series, title, y_range=y_range, marks=marks)
    if not svg:
        return []
    legend = [(charts.swatch(k), s.name) for k, s in enumerate(series)]
    digits = 2 if digits is None and y_range == (0, 1) else digits

    def cell(y: float | None) -> Cell:
        return y if digits is None or y is None else rounded(y, digits)

    columns = [dict(zip(s.xs, map(cell, s.ys), strict=True)) for s in series]
    xs = sorted({x for column in columns for x in column if finite(x)})
    rows = [[xs[k], *(c.get(xs[k]) for c in columns)] for k in charts.spaced(len(xs), MOST_ROWS)]
    table = Table(["step", *(s.name for s in series)], rows, right=True)
    return [Figure(title=title, svg=svg, legend=legend, note=note, table=table)]


def heat(
    names: Sequence[str],
    xs: Sequence[float],
    values: Sequence[Sequence[float | None]],
    title: str,
    note: str = "",
) -> list[Figure]:
    """Multipliers (names, xs) as a heatmap with its scale; empty where there are none."""
    svg = charts.heatmap(names, xs, values, title)
    rows: list[list[Cell]] = [
        [name, line[0], line[-1]] for name, line in zip(names, values, strict=True) if line
    ]
    table = Table(["group", "first", "last"], rows)
    return (
        [Figure(title=title, svg=svg, legend=charts.heatmap_scale(values), note=note, table=table)]
        if svg
        else []
    )


def matrix(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
    title: str,
    *,
    down: str = "phrase given",
    across: str = "element",
    note: str = "",
) -> list[Figure]:
    """Rates (rows, columns) as a heatmap with the numbers in its cells; empty where there are none.
    `down` names what the rows are, `across` the columns."""
    svg = charts.matrix(rows, columns, values, title, across)
    numbers = [[row, *map(rounded, line)] for row, line in zip(rows, values, strict=True)]
    table = Table([down, *columns], numbers, right=True)
    return [Figure(title, svg, note=note, table=table)] if svg else []


def bars(edges: Sequence[float], counts: Sequence[float], title: str, x_label: str) -> list[Figure]:
    """Counts (n,) between edges (n+1,) as a histogram; empty where there are none."""
    svg = charts.histogram(edges, counts, title, x_label)
    rows = [list(row) for row in zip(edges, edges[1:], counts, strict=False)]
    return [Figure(title, svg, table=Table([x_label, "to", "count"], rows))] if svg else []


# -- templates -------------------------------------------------------------------------------------
@cache
def environment(folder: Path | None = None) -> jinja2.Environment:
    """The templates of this package, and those of a folder that may extend them."""
    loaders: list[jinja2.BaseLoader] = [jinja2.PackageLoader("silentbad.report", "templates")]
    if folder is not None:
        loaders.append(jinja2.FileSystemLoader(folder))
    templates = jinja2.Environment(
        loader=jinja2.ChoiceLoader(loaders),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # any file may hold an access token, which is masked
        finalize=lambda value: masked(value) if type(value) is str else value,
    )
    templates.filters.update(number=number, rounded=rounded)
    # what the page's content security policy allows as style: the style sheet and nothing else
    style = hashlib.sha256(templates.get_template("style.css").render().encode()).digest()
    templates.globals["style_hash"] = "sha256-" + base64.b64encode(style).decode()
    return templates


def render(template: str, data: dict[str, Any], folder: Path | None = None) -> str:
    """A page as HTML from a template's name and its data."""
    return environment(folder).get_template(template).render(data)


def rounded(value: object, digits: int = 2) -> str:
    """A similarity or rate in two digits after the point."""
    # + 0.0: no -0.00
    return f"{round(value, digits) + 0.0:.{digits}f}" if finite(value) else number(value)


def short(value: object) -> str:
    """A number without an interval: two digits after the point, none from 10 on."""
    return rounded(value, 0 if abs(value) >= 10 else 2) if finite(value) else number(value)


def supported(value: object, interval: Sequence[float | None] | None) -> str:
    """A number in the digits that its interval supports: half the interval's width in one
    significant digit, in two where it begins with 1, 2 or 3. Without an interval as `short`."""
    ends = [end for end in interval or () if finite(end)]
    if not finite(value) or len(ends) < 2 or not ends[1] > ends[0]:
        return short(value)
    half = (ends[1] - ends[0]) / 2
    exponent = math.floor(math.log10(half))
    digits = -exponent + (half < 4 * 10**exponent)
    return rounded(value, min(max(digits, 0), 6))


def interval_text(interval: Sequence[float | None] | None) -> str | None:
    """Both ends of an interval, in the digits that it supports."""
    if interval is None or not all(map(finite, interval)):
        return None
    low, high = (supported(end, interval) for end in interval)
    return f"{low}\N{NO-BREAK SPACE}to {high}"
