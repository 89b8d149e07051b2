"""Where the memory of a finished run sits: the results of `silentbad.localise` as heat maps.

They show rates and losses with parts put back to the base, and with parts kept alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from silentbad.measure.intervals import binomial_interval
from silentbad.report import pages
from silentbad.report.pages import Cell, Figure, Table, rounded

NAME = "localise.json"
TRAINED = "as trained"
BASE = "base"
PUT_BACK = "put back"
ALONE = "kept alone"

Interval = tuple[float, float]


@dataclass
class Rate:
    """Images that reach a threshold, of all; `interval` is binomial, 95 %."""

    count: int
    images: int
    interval: Interval

    @classmethod
    def of(cls, hits: Sequence[bool]) -> "Rate":
        return cls(sum(hits), len(hits), binomial_interval(sum(hits), len(hits)))

    @property
    def value(self) -> float:
        return self.count / self.images

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.interval[0]:.2f}-{self.interval[1]:.2f})"


@dataclass
class Row:
    """The results of one mixture of trained and base weights. `share` is the part's share of the
    parameters that training changed."""

    part: str
    by: str  # stage, role or both; "" for the trained weights and for the base
    state: str  # PUT_BACK or ALONE; "" likewise
    share: float
    recovered: Rate  # whole and every element, over all targets
    targets: dict[str, Rate]
    wholes: dict[str, Rate]  # of each target by the whole alone
    elements: dict[str, list[Rate | None]]  # of each target; None without a mask
    clean: float | None = None  # mean error of the predicted noise on held-out clean records
    # `clean` minus the base's; its interval: bootstrap over records, 95 %
    rise: float | None = None
    rise_interval: Interval | None = None
    errors: list[float] = field(default_factory=list, repr=False)  # of each record; not written

    def element_mean(self) -> float | None:
        """Mean rate of the elements with a mask."""
        rates = [
            rate.value
            for of_target in self.elements.values()
            for rate in of_target
            if rate is not None
        ]
        return sum(rates) / len(rates) if rates else None


def table(rows: Sequence[Row]) -> Table:
    """Every row with its intervals."""
    head = ["weights", "share of change", "strict rate", "elements", "clean loss", "above the base"]
    lines: list[list[Cell]] = []
    for row in rows:
        rise = None
        if row.rise is not None and row.rise_interval is not None:
            low, high = row.rise_interval
            rise = f"{row.rise:+.4f} ({low:+.4f} to {high:+.4f})"
        lines.append(
            [
                f"{row.part} {row.state}".strip(),
                f"{row.share:.1%}",
                str(row.recovered),
                rounded(row.element_mean()),
                None if row.clean is None else f"{row.clean:.4f}",
                rise,
            ]
        )
    return Table(head, lines, right=True)


@dataclass
class Localised:
    """localise.json: the trained weights, the base, then every part; a sentence on the defence."""

    defence: str
    rows: list[Row]


def rise(rows: Sequence[Row]) -> Callable[[Row], float | None]:
    """A function that gives a row's rise of the clean error as a share of the trained weights'
    rise: 1 as trained, 0 for the base."""
    trained = rows[0].rise

    def share(row: Row) -> float | None:
        return row.rise / trained if row.rise is not None and trained and trained > 0 else None

    return share


def heat_maps(rows: Sequence[Row], phrases: Mapping[str, Sequence[str]]) -> list[Figure]:
    """Rates and the rise of the clean error by stage and role: a map for each target and state."""
    share = rise(rows)
    figures: list[Figure] = []
    for state in (PUT_BACK, ALONE):
        of_parts = [r for r in rows if r.state == state and r.by in ("stage", "role")]
        if not of_parts:
            continue
        shown = [*rows[:2], *of_parts]
        for name, phrases_of_target in phrases.items():
            columns = ["strict", "whole", *map(str, range(1, len(phrases_of_target) + 1)), "rise"]
            values = [
                [
                    row.targets[name].value,
                    row.wholes[name].value,
                    *(None if rate is None else rate.value for rate in row.elements[name]),
                    share(row),
                ]
                for row in shown
            ]
            legend = ", ".join(
                f"{k} {phrase}" for k, phrase in enumerate(phrases_of_target, start=1)
            )
            figures += pages.matrix(
                [row.part for row in shown],
                columns,
                values,
                f"{name}: {state}",
                down="part",
                across="outcome",
                note=legend,
            )
    return figures


def grids(rows: Sequence[Row]) -> list[Figure]:
    """Stage by role, where both were asked for: strict rate, elements and rise of the clean error
    of a part put back and kept alone."""
    outcomes: dict[str, Callable[[Row], float | None]] = {
        "strict rate": lambda row: row.recovered.value,
        "mean rate of the elements": Row.element_mean,
        "rise of the clean error": rise(rows),
    }
    figures: list[Figure] = []
    for state in (PUT_BACK, ALONE):
        by_part = {row.part: row for row in rows if row.by == "both" and row.state == state}
        stages, roles = (
            list(dict.fromkeys(part.split(".")[k] for part in by_part)) for k in (0, 1)
        )
        for title, outcome in outcomes.items() if by_part else ():
            values = [
                [
                    outcome(by_part[part]) if (part := f"{stage}.{role}") in by_part else None
                    for stage in stages
                ]
                for role in roles
            ]
            figures += pages.matrix(
                roles, stages, values, f"{title}, {state}", down="role", across="stage"
            )
    return figures
