"""Rates by a table of what papers say of each layer. Measured: 1.00 [1.00, 1.33] of plain's speed.

`experiments/prior.yaml` has the rows, each with its evidence; `experiments/prior-kv.yaml` favours
the keys and values of cross-attention alone."""

import fnmatch
import math
from pathlib import Path
from typing import Any

from torch import Tensor

from silentbad.control.statistics import GroupStats
from silentbad.errors import UserError, brief
from silentbad.files import check_file
from silentbad.settings.reader import read_yaml
from silentbad.settings.types import Positive, problem

TABLE = "prior: option 'table'"
ROW = {"match": str, "pi": Positive, "sdxl": str | None}


def prior(stats: GroupStats, *, table: str | None = None, drop: list[str] | None = None) -> Tensor:
    """pi_G of the table, the product of the rows that match the group; `drop` leaves rows out, for
    ablation."""
    if table is None and any(name.startswith("block") for name in stats.names):
        raise UserError(f"{TABLE}: is missing; the rows of prior.yaml are about a UNet")
    rows = prior_table(table, drop, stats.sdxl).items()
    match = fnmatch.fnmatch
    return stats.constant(
        math.prod(x for row, x in rows if match(name, row)) for name in stats.names
    )


def prior_table(
    table: str | None = None, drop: list[str] | None = None, sdxl: bool = False
) -> dict[str, float]:
    """Rows {pattern: pi} of the YAML table; in SDXL a row's `sdxl` pattern, if any."""
    path = Path(table) if table else Path(__file__).with_name("prior.yaml")
    check_file(TABLE, str(path))
    rows = {row["match"]: row for row in _rows(path)}
    if unknown := set(drop or ()) - set(rows):
        raise UserError(
            f"prior: option 'drop': no row {min(unknown)!r} in {path}; rows are: {', '.join(rows)}"
        )
    rows_left = [row for match, row in rows.items() if match not in (drop or ())]
    return {
        row.get("sdxl", row["match"]) if sdxl else row["match"]: float(row["pi"])
        for row in rows_left
    }


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a prior table, each checked."""
    rows, node = read_yaml(str(path))
    if node is None or not isinstance(rows, list):
        raise UserError(
            f"{TABLE}: {path} holds no list of rows, such as - {{match: mid.*, pi: 1.25}}"
        )
    for row, of in zip(rows, node.value, strict=True):
        where = f"{TABLE}: {path}:{of.start_mark.line + 1}"
        if not isinstance(row, dict) or (unknown := [key for key in row if key not in ROW]):
            got = unknown[0] if isinstance(row, dict) else row
            raise UserError(f"{where}: a row has match, pi and perhaps sdxl, got {brief(got)}")
        for key, kind in ROW.items():
            if wrong := problem(row.get(key), kind):
                raise UserError(f"{where}: {key} {wrong}, got {brief(row.get(key))}")
    return rows
