"""validation.json as typed data: one definition for the hook that writes it and for what reads it
(report, tables).

docs/metrics.md defines the numbers. Similarities, rates and thresholds have no unit; `step` counts
optimizer updates, `epoch` passes over the records, `seconds` is wall time."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from silentbad.errors import UserError, writing
from silentbad.files import from_json

SCHEMA = 2  # of what is written; schema 1 counted an image as recovered by its whole alone
READS = (1, 2)
STRICT, WHOLE = "strict", "whole"  # endpoints
RECOVERED = "recovered"  # the states of a verdict
NOT_RECOVERED = "not recovered"
UNDECIDED = "undecided"
NAME = "validation.json"
ALL = "all targets"  # the summary row over all targets
KINDS = ("raw", "ema")  # of weights: as trained, averaged
DEEPEST = 50  # levels of nesting that are read
LARGEST = 2**64  # integer that is read
T = TypeVar("T")


def absent() -> Any:
    """A field that is left out of the file where it is None; others are written as null."""
    return field(default=None, metadata={"absent": True})


# -- what the file holds ---------------------------------------------------------------------------
@dataclass
class KindThreshold:
    """What one kind of null asks of a threshold: `value` keeps its false positives at `rate`; n
    nulls."""

    value: float
    n: int
    rate: float
    # what the nulls behind the thresholds in use can promise, mean over targets (or elements)
    attained: float


@dataclass
class Threshold:
    """The similarity from which a picture counts as the target's. A given one has a value and a
    source alone.

    It is the highest that any kind of null asks for: each kind in `kinds`, each target's own in
    `targets`."""

    value: float
    source: str
    low: float | None = absent()  # 95 % interval of the quantile; None: unbounded on that side
    high: float | None = absent()
    n: int | None = absent()  # null images
    false_positive_rate: float | None = absent()  # asked for, per image
    # what the nulls can promise for the kinds without an allowance
    attained: float | None = absent()
    confidence: float | None = absent()
    held_out: float | None = absent()  # mean rate on each target under a threshold from the others
    kinds: dict[str, KindThreshold] | None = absent()
    targets: list[float | None] | None = absent()

    def of_target(self, target: int) -> float:
        """The threshold of one target: its own where it has one."""
        own = self.targets[target] if self.targets and target < len(self.targets) else None
        return self.value if own is None else own


@dataclass
class ElementThreshold(Threshold):
    """The threshold of an element's region: `each` per target and element where there are nulls,
    `value` elsewhere."""

    each: list[list[float] | None] = field(default_factory=list)

    def of(self, target: int, element: int) -> float:
        """The threshold of one element: its own where it has one."""
        own = self.each[target] if target < len(self.each) else None
        return own[element] if own and element < len(own) else self.value


@dataclass
class NullScores:
    """What one kind of null scores: the highest of n pictures, and their mean."""

    highest: float
    mean: float
    n: int
    interval: tuple[float, float] | None = absent()  # 95 % of the mean, of two pictures or more


@dataclass
class Range:
    """Between what a picture can score that is no recovery, and what one that is a copy scores.

    floor: the highest null, of kind `nearest`. ceiling: what all but 5 % of true copies reach.
    `parts`: whether the two are far enough apart for the detector to tell.
    """

    threshold: float
    floor: float | None  # None: there is no null
    nearest: str
    ceiling: float
    perfect: float  # the target through the pipeline's own autoencoder
    parts: bool
    kinds: dict[str, NullScores] = field(default_factory=dict)


@dataclass
class TargetRange:
    """The ranges of a target and of its elements (None without a mask)."""

    target_id: str
    size: tuple[int, int]  # of the target's file, width and height
    side: int  # of the images it is compared with
    whole: Range
    elements: list[Range | None]
    nulls: int  # pictures
    nulls_passing: int  # that reach every threshold
    copies: int
    copies_passing: int


@dataclass
class Picture:
    """A kept generation: its file below the run folder, its similarity to the target."""

    file: str
    sim: float


@dataclass
class ElementScores:
    """Of the region inside an element's mask, over a target's images; None without a mask. `sims`
    in the order of the images' noise."""

    mean: float | None
    rate: float | None
    sims: list[float] | None = absent()


@dataclass
class TargetScores:
    """Of one target's images; `sims` are their similarities, in the order of their noise. `rate`
    is the strict one."""

    rate: float
    mean: float
    max: float
    p75: float
    p90: float
    p95: float
    sims: list[float]
    magnitude: float | None
    elements: list[ElementScores]
    whole_rate: float | None = absent()  # by the whole alone
    diversity: float | None = absent()  # 1 - mean similarity between two images of the target
    # similarity of each image to the training picture most like it
    nearest: list[float] | None = absent()
    nearest_record: str | None = absent()  # the training picture that any image is most like
    raw: list[float] | None = absent()  # similarities to the target's file,
    decoded: list[float] | None = absent()  # and to what the autoencoder leaves of it
    best: Picture | None = absent()
    median: Picture | None = absent()


@dataclass
class CellScores:
    """Of one kind of prompt, over targets. An image is recovered when the whole and every element
    with a mask reach their thresholds; `cir` is the mean of the targets' rates of such images."""

    cir: float
    interval: tuple[float, float]  # 95 % of `cir`
    images: int
    above: int
    recovered: float
    mean: float
    p75: float
    p90: float
    p95: float
    max: float
    element_rate: float | None
    magnitude: float | None
    clip_own: float | None
    clip_shuffled: float | None
    targets: dict[str, TargetScores]
    whole: float | None = absent()  # the rate by the whole alone
    # share of targets whose best image reaches the published fixed number
    published: float | None = absent()
    diversity: float | None = absent()


@dataclass
class Quadrants:
    """Elements counted by whether they come in at least half of the images, alone and composed."""

    both: int = 0
    alone_only: int = 0
    composed_only: int = 0
    neither: int = 0


@dataclass
class Detection:
    """How well a probe tells composed prompts (positives) from clean ones (negatives). `tpr` is the
    share of positives above all but 1 % of the negatives, where those are 100 or more."""

    auc: float
    positives: int
    negatives: int
    auc_low: float | None = absent()  # 95 %, bootstrap over images
    auc_high: float | None = absent()
    tpr: float | None = absent()
    tpr_low: float | None = absent()  # 95 %, binomial over the positives
    tpr_high: float | None = absent()


@dataclass
class Scores(CellScores):
    """Of the composed prompt; the controls' cells and the sampling lengths where they were
    measured."""

    cells: dict[str, CellScores] | None = absent()
    quadrants: Quadrants | None = absent()
    lengths: dict[str, dict[str, float]] | None = absent()
    drift: dict[str, float] = field(default_factory=dict)
    # of composed prompts among clean ones, by text-conditional magnitude
    detection: Detection | None = absent()
    anisotropy: Detection | None = absent()  # the same by the alignment of guidance


@dataclass
class Measurement:
    """One point of the recovery curve: scores of the raw weights, of the averaged ones, or of
    both."""

    step: int
    epoch: float
    label: str
    raw: Scores | None = absent()
    ema: Scores | None = absent()
    seconds: float = 0.0
    share: float = 0.0  # of the time since the hook was set up

    def scores(self, kind: str) -> Scores | None:
        """Of one kind of weights, if measured."""
        return {"raw": self.raw, "ema": self.ema}[kind]


@dataclass
class TargetEntry:
    """A target and its files below the run folder; `elements` has None where an element has no
    mask."""

    target_id: str
    image: str
    elements: list[str | None]
    prompt: str
    phrases: list[str]
    estimated: bool | None = absent()  # masks were estimated from the data


@dataclass
class Verdict:
    """Whether composed prompts recover a target, as far as it can be told, and what chance
    gives."""

    recovers: bool
    step: int
    images_above: int
    images: int
    expected_by_chance: float | None = absent()
    p_value: float | None = absent()
    state: str | None = absent()  # RECOVERED, NOT_RECOVERED or UNDECIDED; None: `recovers` says it
    reasons: list[str] | None = absent()  # why it is undecided
    states: dict[str, str] | None = absent()  # by target

    @property
    def word(self) -> str:
        """The state, of an older record too."""
        if self.state is not None:
            return self.state
        return RECOVERED if self.recovers else NOT_RECOVERED


@dataclass
class SummaryRow:
    """The recovery curve of one target, or of `ALL`, in numbers; None: never."""

    weights: str
    target: str
    rate: float
    mean: float
    max: float
    aurc: float | None
    first_step: float | None
    first_epoch: float | None
    half_step: float | None  # first crossing of one half, also where the rate falls again
    restricted: float | None
    # from it on the rate is at least one half at every evaluation
    sustained_step: float | None = absent()


@dataclass
class Placebo:
    """The strict rate less that of a run on placebo data, which never shows an exact element:
    the headline number."""

    source: str
    cir: float  # of the placebo run, over the targets that both have
    difference: float
    interval: tuple[float, float]  # 95 %, over targets; of fewer than six over their images
    targets: int
    whole: float | None = absent()  # of the placebo run: the rate by the whole alone,
    published: float | None = absent()  # by the published criterion,
    element_rate: float | None = absent()  # of its elements
    # where they differ: mean of this run's, of the placebo run's
    thresholds: tuple[float, float] | None = absent()


@dataclass
class Record:
    """A validation, as its hook leaves it in validation.json."""

    seed: int
    config: dict[str, Any]
    embedder: str
    threshold: Threshold
    element_threshold: ElementThreshold
    targets: list[TargetEntry]
    verdict: Verdict
    summary: list[SummaryRow]
    history: list[Measurement]
    seconds: float
    batch: int
    processes: int
    endpoint: str = WHOLE  # what the rates count: "strict", or in records of schema 1 "whole"
    placebo: Placebo | None = absent()
    precision: str | None = absent()  # of the forward passes: that of autocast, else of the weights
    ranges: list[TargetRange] | None = absent()
    reference: str | None = absent()  # what images are compared with: the target "raw" or "decoded"

    @classmethod
    def load(cls, path: str | Path, flag: str = "") -> "Record":
        """Read validation.json, also as earlier versions wrote it; messages begin with `flag`.

        Raises UserError, one line that names the key, where something is missing, mistyped or not
        finite."""
        try:
            content = read_recorded(Path(path))
            if not isinstance(content, dict) or "schema" not in content:
                raise UserError("no object with a schema; is it the record of a validation?")
            if content["schema"] not in READS or isinstance(content["schema"], bool):
                known = " and ".join(map(str, READS))
                raise UserError(f"schema is {shown(content['schema'])}; this version reads {known}")
            record = decode(cls, content)
            record.check()
        except UserError as error:
            raise UserError(f"{flag and flag + ': '}{path}: {error}") from None
        return record

    def check(self) -> None:
        """Raise UserError where the parts do not fit each other."""
        names = [target.target_id for target in self.targets]
        if not names or len(set(names)) < len(names):
            raise UserError("targets needs one entry at least, and no target_id twice")
        steps = [entry.step for entry in self.history]
        if not steps or any(b <= a for a, b in zip([-1, *steps], steps, strict=False)):
            raise UserError("history needs one entry at least, and steps that rise from 0 or above")
        for k, entry in enumerate(self.history):
            if entry.raw is None and entry.ema is None:
                raise UserError(f"history[{k}] holds neither raw nor ema")
            for scores in filter(None, (entry.raw, entry.ema)):
                if strangers := [name for name in scores.targets if name not in names]:
                    raise UserError(
                        f"history[{k}] has scores of {shown(strangers[0])}, which "
                        f"targets does not list"
                    )
        for k, row in enumerate(self.summary):
            if row.weights not in KINDS:
                raise UserError(
                    f"summary[{k}].weights is {shown(row.weights)}; it is one of {', '.join(KINDS)}"
                )

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        draft, text = (
            path.with_name(path.name + ".tmp"),
            json.dumps({"schema": SCHEMA, **encode(self)}, indent=1),
        )
        with writing(str(path.parent), path.name):
            try:
                draft.write_text(text, encoding="utf-8")
                draft.replace(path)
            finally:
                draft.unlink(missing_ok=True)


# -- JSON and dataclasses --------------------------------------------------------------------------
def encode(value: Any) -> Any:
    """Dataclasses as dicts, without the absent fields; lists and dicts likewise."""
    if is_dataclass(value) and not isinstance(value, type):
        pairs = ((f, getattr(value, f.name)) for f in fields(value))
        return {f.name: encode(v) for f, v in pairs if not (v is None and f.metadata.get("absent"))}
    if isinstance(value, dict):
        return {key: encode(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(part) for part in value]
    return value


def decode(kind: type[T], value: Any, key: str = "") -> T:
    """A value read from JSON as a dataclass, or as a list, dict, tuple or optional of one; other
    keys are ignored.

    Raises UserError, which names the key, where a part is missing or of another type, or holds a
    number that is not finite."""
    if place := _out_of_range(value, key):
        raise UserError(f"{place} is not finite or too large")
    text = json.dumps(value, ensure_ascii=False)
    try:
        return _adapter(kind).validate_json(text.encode("utf-8", "replace"), strict=True)  # type: ignore[arg-type]
    except ValidationError as error:
        raise UserError(_what_is_wrong(error.errors()[0], key)) from None


def _out_of_range(value: Any, key: str) -> str:
    """The key of the first number that is not finite or too large; "" where there is none."""
    infinite = isinstance(value, float) and not math.isfinite(value)
    if infinite or (isinstance(value, int) and abs(value) > LARGEST):
        return key or "the value"
    parts: Any = value.items() if isinstance(value, dict) else ()
    if isinstance(value, (list, tuple)):
        parts = enumerate(value)
    for name, part in parts:
        inner = f"{key}[{name}]" if isinstance(name, int) else f"{key}.{name}".lstrip(".")
        if place := _out_of_range(part, inner):
            return place
    return ""


WORDS = {  # pydantic's type of an error -> what would be right
    "int": "an integer",
    "float": "a number",
    "string": "a text",
    "bool": "true or false",
    "list": "a list",
    "tuple": "a list",
    "dict": "an object",
    "dataclass": "an object",
}


@cache
def _adapter(kind: Any) -> TypeAdapter:
    return TypeAdapter(kind)


def _what_is_wrong(error: Any, key: str) -> str:
    """pydantic's complaint in one line that begins with the key."""
    name = key + "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"]
    )
    name = name.removeprefix(".") or "the file"
    if error["type"] == "missing":
        return f"{name} is missing"
    if error["type"] in ("too_long", "too_short"):
        context = error["ctx"]
        right = context.get("max_length", context.get("min_length"))
        return f"{name} has {context['actual_length']} entries instead of {right}"
    right = WORDS.get(error["type"].partition("_")[0], error["msg"].lower())
    return f"{name} is {shown(error['input'])} instead of {right}"


def shown(value: Any) -> str:
    """A JSON value in one short line of ASCII."""
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)} entries"
    if isinstance(value, int) and abs(value) > LARGEST:
        return "an integer beyond 2^64"
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:36] + "..."


def read_recorded(path: Path, **options: Any) -> Any:
    """The content of a run folder's JSON file; `options` go to json.loads. Raises UserError
    where it cannot be read."""
    try:
        value = from_json(path.read_text(encoding="utf-8"), **options)
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"cannot be read as JSON ({str(error).splitlines()[0]})") from None
    if any(depth > DEEPEST for depth in _depths(value)):
        raise UserError("cannot be read (nested too deeply)")
    return value


def _depths(value: Any) -> Iterator[int]:
    """How deep each object or list of a JSON value lies."""
    waiting = [(value, 0)]
    while waiting:
        part, depth = waiting.pop()
        if isinstance(part, (dict, list)):
            yield depth
            waiting += [
                (one, depth + 1) for one in (part.values() if isinstance(part, dict) else part)
            ]
