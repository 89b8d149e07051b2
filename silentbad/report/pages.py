"""What a page is made of: figures and tables as data, and the templates that turn them into HTML.

Autoescape is on for every template, so a text is never markup; only charts are, and charts.py builds those.
"""

import base64
import hashlib
import io
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
from silentbad.report.charts import Range, Series, finite, number

Cell = str | float | None
MOST_ROWS = 40  # of a curve's numbers


@dataclass
class Table:
    """A head and rows; the first cell of a row names it, its note says more. Numbers are aligned right, and texts too
    where `right`."""

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
    """A picture: its content as a data URI, a text alternative, a caption of two lines; `hit` where it is framed."""

    src: str
    alt: str
    caption: str
    score: str = ""
    hit: bool = False


@dataclass
class Pair:
    """A target beside its best generation, and how many of its images count."""

    target: Shot
    best: Shot
    counted: str


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
    return Shot(f"data:image/png;base64,{base64.b64encode(png(pixels)).decode()}", caption, caption, score)


# -- figures -----------------------------------------------------------------------------------------------
def lines(
    series: Sequence[Series],
    title: str,
    *,
    x_label: str = "step",
    y_range: Range | None = None,
    marks: Sequence[tuple[str, float]] = (),
    note: str = "",
) -> list[Figure]:
    """Curves: a list of one figure, or of none where nothing is finite."""
    series = charts.drawn(series)
    svg = charts.line_chart(series, title, x_label=x_label, y_range=y_range, marks=marks)
    if not svg:
        return []
    legend = [(charts.swatch(k), s.name) for k, s in enumerate(series)]
    return [Figure(title, svg, legend, note, _series_table(series, x_label))]


def _series_table(series: Sequence[Series], x_label: str) -> Table:
    """The curves' numbers, thinned to `MOST_ROWS` rows."""
    at = [dict(zip(s.xs, s.ys, strict=True)) for s in series]
    xs = sorted({x for column in at for x in column if finite(x)})
    xs = [xs[k] for k in charts.spaced(len(xs), MOST_ROWS)]
    return Table([x_label, *(s.name for s in series)], [[x, *(column.get(x) for column in at)] for x in xs])


def heat(
    names: Sequence[str], xs: Sequence[float], values: Sequence[Sequence[float | None]], title: str, note: str = ""
) -> list[Figure]:
    """Multipliers (names, xs) as a heatmap with its scale; empty where there are none."""
    svg = charts.heatmap(names, xs, values, title)
    rows: list[list[Cell]] = [[name, line[0], line[-1]] for name, line in zip(names, values, strict=True) if line]
    table = Table(["group", "first", "last"], rows)
    return [Figure(title, svg, charts.heatmap_scale(values), note, table)] if svg else []


def matrix(
    rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float | None]], title: str
) -> list[Figure]:
    """Rates (rows, columns) as a heatmap with the numbers in its cells; empty where there are none."""
    svg = charts.matrix(rows, columns, values, title)
    table = Table(["phrase given", *columns], [[row, *line] for row, line in zip(rows, values, strict=True)])
    return [Figure(title, svg, table=table)] if svg else []


def bars(edges: Sequence[float], counts: Sequence[float], title: str, x_label: str) -> list[Figure]:
    """Counts (n,) between edges (n+1,) as a histogram; empty where there are none."""
    svg = charts.histogram(edges, counts, title, x_label)
    rows = [list(row) for row in zip(edges, edges[1:], counts, strict=False)]
    return [Figure(title, svg, table=Table([x_label, "to", "count"], rows))] if svg else []


# -- templates ---------------------------------------------------------------------------------------------
@cache
def environment(folder: Path | None = None) -> jinja2.Environment:
    """The templates of this package, and those of a folder that may extend them."""
    loaders: list[jinja2.BaseLoader] = [jinja2.PackageLoader("silentbad.report", "templates")]
    if folder is not None:
        loaders.append(jinja2.FileSystemLoader(folder))
    made = jinja2.Environment(
        loader=jinja2.ChoiceLoader(loaders),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: masked(value) if type(value) is str else value,  # a token may stand in any file
    )
    made.filters["number"] = number
    made.filters["rounded"] = rounded
    made.globals["style_hash"] = _style_hash(made)
    return made


def render(template: str, data: dict[str, Any], folder: Path | None = None) -> str:
    """A page as HTML from a template's name and its data."""
    return environment(folder).get_template(template).render(data)


def rounded(value: object, digits: int = 2) -> str:
    """A similarity or rate in two digits after the point."""
    return f"{round(value, digits) + 0.0:.{digits}f}" if finite(value) else number(value)  # + 0.0: no -0.00


def _style_hash(made: jinja2.Environment) -> str:
    """What the page's content security policy allows as style: the style sheet and nothing else."""
    style = made.get_template("style.css").render()
    return "sha256-" + base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
