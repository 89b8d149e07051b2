"""What a run folder holds, for its report: validation.json, metrics.jsonl, multipliers.json,
phrase_memory.json, timesteps.json, localise.json, sample_prompts.json, config.yaml, run.json,
samples/prior/prompts.json and the pictures of samples/ (docs/metrics.md). What is missing is left
empty; what is damaged is a note."""

import base64
import io
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from silentbad.data.images import open_image
from silentbad.errors import UserError, user_errors
from silentbad.files import check_folder, from_json
from silentbad.measure.record import ALL, NAME, Measurement, Record, Scores, SummaryRow
from silentbad.measure.scores import curve, kinds
from silentbad.measure.sheet import NAME as PROMPTS
from silentbad.measure.sheet import PRIOR, Draw, Drawn
from silentbad.report import parts
from silentbad.report.charts import Series, finite
from silentbad.settings.reader import read_file
from silentbad.settings.types import validated_file

WEIGHTS = {"raw": "raw weights", "ema": "averaged weights"}
MOST_BYTES = 32_000_000  # of a picture's file
SIDE = 208  # pixels of a picture in the page, which shows it at half of that
LARGE = 512  # pixels of a picture that a click enlarges
T = TypeVar("T")


@dataclass
class Multipliers:
    """An entry of multipliers.json."""

    step: float
    multipliers: dict[str, float | None]


@dataclass
class Strengths:
    """An entry of `PhraseMemory`: rho of each phrase."""

    step: float
    rho: list[float | None]


@dataclass
class PhraseMemory:
    """phrase_memory.json."""

    phrases: list[str] = field(default_factory=list)
    history: list[Strengths] = field(default_factory=list)

    def series(self) -> list[Series]:
        """The strength of each phrase against steps; a phrase without a name gets a number."""
        steps = [entry.step for entry in self.history]
        unnamed = (f"element {i}" for i in itertools.count(len(self.phrases) + 1))
        names = itertools.chain(self.phrases, unnamed)
        columns = itertools.zip_longest(*(entry.rho for entry in self.history))
        return [Series(name, steps, rho) for name, rho in zip(names, columns, strict=False)]


@dataclass
class Timesteps:
    """timesteps.json: how often each range of timesteps was trained on."""

    edges: list[float] = field(default_factory=list)
    counts: list[float] = field(default_factory=list)


class RecordedRun:
    """What a run folder holds. A damaged validation.json is refused; another part that is missing
    or damaged is left empty, with a note where it is damaged."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.notes = list[str]()
        check_folder("report", folder, "give the output_dir of a run")
        self.name = self.folder.resolve().name
        file = self.folder / NAME
        if file.exists() and not file.is_file():
            raise UserError(f"report: {file} is no file")
        self.record = Record.load(file) if self._holds(NAME) else None
        self.history = self.record.history if self.record else []
        self.summary = self.record.summary if self.record else []
        self.metrics = self._metrics()
        self.draws = self._part(PROMPTS, list[Draw]) or []
        self.prior = self._part(PRIOR, list[Drawn]) or []
        if not (self.record or self.metrics or self.draws):
            raise UserError(
                f"report: '{folder}' holds neither validation.json nor "
                f"metrics.jsonl; is it a run folder?"
            )
        self.multipliers = self._part("multipliers.json", list[Multipliers]) or []
        self.phrases = self._part("phrase_memory.json", PhraseMemory) or PhraseMemory()
        self.timesteps = self._part("timesteps.json", Timesteps) or Timesteps()
        self.localised = self._part(parts.NAME, parts.Localised)
        self.facts = self._part("run.json", dict[str, Any]) or {}
        self.config = self._text("config.yaml")
        self._pictures: dict[tuple[Path, int], str] = {}

    def _inside(self, name: str) -> Path | None:
        """Where a file of the folder is; None where there is none, or a link leads out."""
        try:
            file = (self.folder / name).resolve()
            return file if file.is_relative_to(self.folder.resolve()) and file.is_file() else None
        except (OSError, ValueError, RuntimeError):  # too long a name, NUL, a loop of links
            return None

    def _holds(self, name: str) -> bool:
        """Whether the folder holds this file; a note where a link leads out."""
        if self._inside(name) is not None:
            return True
        if (self.folder / name).is_file():
            self.notes.append(f"{name} is a link that leads out of the folder; left out")
        return False

    def _text(self, name: str) -> str:
        if not self._holds(name):
            return ""
        return (self.folder / name).read_text(encoding="utf-8", errors="replace")

    def _part(self, name: str, kind: type[T]) -> T | None:
        """A JSON file in its form; None where there is none, or it is damaged."""
        try:
            return validated_file(self.folder / name, kind) if self._holds(name) else None
        except UserError as error:
            self.notes.append(f"{name} could not be read: {error}")
            return None

    def _metrics(self) -> list[dict[str, Any]]:
        rows = []
        broken = 0
        for line in self._text("metrics.jsonl").splitlines():
            try:
                row = from_json(line)
            except ValueError:
                row = None
            if isinstance(row, dict) and finite(row.get("step")):
                rows.append({**row, "step": int(row["step"])})
            else:
                broken += bool(line.strip())
        if broken:
            self.notes.append(f"metrics.jsonl: {broken} unreadable lines left out")
        return rows

    def picture(self, name: str | None, side: int = SIDE) -> str:
        """A picture of the folder as a data URI, of so many pixels at most; empty where there is
        none that can be read."""
        file = None if name is None else self._inside(name)
        if name is None or file is None:
            return ""
        key = (file, side)
        if key not in self._pictures:
            try:
                self._pictures[key] = _data_uri(file, name, side)
            except UserError as error:
                self._pictures[key] = ""
                if str(error) not in self.notes:
                    self.notes.append(str(error))
        return self._pictures[key]

    def withheld(self) -> list[str]:
        """Elements that config.yaml left out of training."""
        try:
            config, _ = read_file(str(self.folder / "config.yaml")) if self.config else ({}, None)
        except UserError:
            return []
        names = config.get("withhold")
        return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []

    def length(self) -> int:
        """The step of the last measurement; 0 without one."""
        return self.history[-1].step if self.history else 0

    def kinds(self) -> list[str]:
        """Which weights were measured."""
        return kinds(self.history)

    def measured(self, kind: str) -> list[tuple[Measurement, Scores]]:
        """The measurements of these weights."""
        return [(entry, scores) for entry in self.history if (scores := entry.scores(kind))]

    def series(self, name: str, kind: str, of: Callable[[Scores], float | None]) -> Series:
        """One score against steps."""
        points = curve(self.history, kind)
        steps = [entry.step for entry, _ in points]
        return Series(name, steps, [of(scores) for _, scores in points])

    def rates(self, name: str, kind: str) -> Series:
        """The recovery rate with its interval."""
        low, high = zip(*(scores.interval for _, scores in curve(self.history, kind)), strict=True)
        return self.series(name, kind, lambda s: s.cir)._replace(low=low, high=high)

    def last(self, kind: str) -> Scores:
        """The latest scores of these weights."""
        return self.measured(kind)[-1][1]

    def total(self, kind: str) -> SummaryRow | None:
        """The summary row over all targets."""
        rows = (row for row in self.summary if row.target == ALL and row.weights == kind)
        return next(rows, None)

    def targets(self, kind: str) -> list[SummaryRow]:
        """The summary rows of each target."""
        return [row for row in self.summary if row.target != ALL and row.weights == kind]


def _data_uri(file: Path, name: str, side: int) -> str:
    with user_errors(f"{name}: cannot be read"):
        if file.stat().st_size > MOST_BYTES:
            raise UserError(f"{name}: over the limit of {MOST_BYTES} bytes; left out")
        image = open_image(file.read_bytes(), name)
    small = max(image.size) <= SIDE // 2
    image.thumbnail((side, side))
    stream = io.BytesIO()
    image.save(stream, "PNG", optimize=True) if small else image.save(stream, "JPEG", quality=86)
    content = base64.b64encode(stream.getvalue()).decode()
    return f"data:image/{'png' if small else 'jpeg'};base64,{content}"
