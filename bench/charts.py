"""A chart of a report as a file of its own, for `docs/images`."""

import math
import re
from html import escape

from silentbad.report.charts import COLOURS, DASHES, WIDTH
from silentbad.report.pages import Figure

STYLE = (
    "svg{background:#fff;font-family:system-ui,sans-serif}text{font-size:13px;fill:#444}.grid{stroke:#ddd}"
    ".axis{stroke:#666}"
)
LONG = 20  # letters of a name that leaves no room for another beside it


def standalone(charts: list[Figure], legend: list[str]) -> str:
    """The first chart as an SVG, and below it the legend, two short names a row."""
    shape = re.search(r'<svg viewBox="0 0 (\d+) (\d+)"(.*?)>(.*?)</svg>', charts[0].svg, re.S)
    assert shape is not None, charts[0].svg
    height, rest, inside = int(shape[2]), shape[3], shape[4]
    abreast = 1 if max(map(len, legend)) > LONG else 2
    for k, name in enumerate(legend):
        x, y = 52 + (k % abreast) * 220, height + 14 + 18 * (k // abreast)
        line = f'<line x1="{x}" x2="{x + 26}" y1="{y - 4}" y2="{y - 4}" stroke="{COLOURS[k]}" stroke-width="2"'
        inside += f'{line} stroke-dasharray="{DASHES[k]}"/><text x="{x + 32}" y="{y}">{escape(name)}</text>'
    full = height + 24 + 18 * math.ceil(len(legend) / abreast)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {full}"{rest}><style>{STYLE}</style>'
        f"{inside}</svg>\n"
    )
