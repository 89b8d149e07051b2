"""validation.json as typed data: one definition for the hook that writes it and for what reads it
(report, tables).

docs/metrics.md defines the numbers. Similarities, rates and thresholds have no unit; `step` counts
optimizer updates, `epoch` passes over the records, `seconds` is wall time."""

import json
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter

from silentbad.errors import UserError, writing
from silentbad.files import replace_text
from silentbad.settings.types import validated_file

RECOVERED = "recovered"  # the states of a verdict
NOT_RECOVERED = "not recovered"
IN_PART = "in part"  # not recovered, but some of its elements are
UNDECIDED = "undecided"
NAME = "validation.json"
ALL = "all targets"  # the summary row over all targets
KINDS = ("raw", "ema")  # of weights: as trained, averaged
ORDERS = ("composed", "shuffled")  # prompts that the verdict counts, and whose images are kept


class Finite:
    """Base of the dataclasses in the file: no number is NaN or infinite. A field whose default is
    None is left out of the file when it is None; any other None is written as null."""

    __pydantic_config__ = ConfigDict(allow_inf_nan=False)


# -- what the file holds ---------------------------------------------------------------------------
@dataclass
class Threshold(Finite):
    """The similarity from which a picture counts as the target's: `value` is the highest of all
    targets, `targets` each target's own. A threshold that the user set has `value` and `source`
    alone."""

    value: float
    source: str
    n: int | None = None  # null pictures of the target (or element) that has the fewest
    attained: float | None = None  # the false-positive rate that they can show
    targets: list[float | None] | None = None

    def of_target(self, target: int) -> float:
        """The threshold of one target: its own where it has one."""
        own = self.targets[target] if self.targets and target < len(self.targets) else None
        return self.value if own is None else own


@dataclass
class ElementThreshold(Threshold):
    """The threshold of an element's region: `each` per target and element."""

    each: list[list[float] | None] = field(default_factory=list)

    def of(self, target: int, element: int) -> float:
        """The threshold of one element: its own where it has one."""
        thresholds = self.each[target] if target < len(self.each) else None
        return thresholds[element] if thresholds and element < len(thresholds) else self.value


@dataclass
class NullScores(Finite):
    """The scores of one kind of null: the highest of n pictures, and their mean."""

    highest: float
    mean: float
    n: int
    interval: tuple[float, float] | None = None  # 95 % of the mean, of two pictures or more


@dataclass
class Range(Finite):
    """The range of scores in which a threshold lies: from pictures that are no recovery to copies.

    floor: the highest score of a null, whose kind is `nearest`. ceiling: the score that all but 5 %
    of true copies reach. separable: whether the two are far enough apart for the detector to tell
    failures from copies.
    """

    threshold: float
    floor: float | None  # None: there is no null
    nearest: str
    ceiling: float
    perfect: float  # the target through the pipeline's own autoencoder
    separable: bool
    kinds: dict[str, NullScores] = field(default_factory=dict)


@dataclass
class TargetRange(Finite):
    """The ranges of a target and of its elements (None without a mask)."""

    target_id: str
    size: tuple[int, int]  # of the target's file, width and height
    side: int  # of the images it is compared with
    whole: Range
    elements: list[Range | None]
    nulls: int  # pictures
    copies: int


@dataclass
class Picture(Finite):
    """A kept generation: its file below the run folder, its similarity to the target."""

    file: str
    sim: float


@dataclass
class ElementScores(Finite):
    """Scores of the region inside an element's mask, over a target's images; None without a mask.
    `sims` are in the order of the images' noise."""

    mean: float | None
    rate: float | None
    sims: list[float] | None = None


@dataclass
class TargetScores(Finite):
    """Scores of one target's images. `sims` are their similarities, in the order of their noise.
    `rate` is the strict rate."""

    rate: float
    mean: float
    max: float
    p75: float
    p90: float
    p95: float
    sims: list[float]
    magnitude: float | None
    elements: list[ElementScores]
    whole_rate: float | None = None  # by the whole alone
    # similarity of each image to the training picture most like it
    nearest: list[float] | None = None
    nearest_record: str | None = None  # the training picture that any image is most like
    raw: list[float] | None = None  # similarities to the target's file
    decoded: list[float] | None = None  # similarities to that file after the autoencoder
    best: Picture | None = None
    median: Picture | None = None
    # the file of every image, in the order of `sims`; of the last measurement alone
    pictures: list[str] | None = None


@dataclass
class CellScores(Finite):
    """Scores of one kind of prompt, over targets. An image is recovered when the whole and every
    element with a mask reach their thresholds; `cir` is the mean over targets of the rate of
    recovered images."""

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
    targets: dict[str, TargetScores]
    whole: float | None = None  # the rate by the whole alone
    # share of targets whose best image reaches the published fixed number
    published: float | None = None


@dataclass
class Detection(Finite):
    """How well a probe tells composed prompts (positives) from clean ones (negatives). `tpr` is the
    share of positives above all but 1 % of the negatives, where those are 100 or more."""

    auc: float
    positives: int
    negatives: int
    auc_low: float | None = None  # 95 %, bootstrap over images
    auc_high: float | None = None
    tpr: float | None = None
    tpr_low: float | None = None  # 95 %, binomial over the positives
    tpr_high: float | None = None


@dataclass
class Words(Finite):
    """How well images show what their prompts name, for the trained model and for the base: the
    share of named things that a judge counts as right, or CLIP's score."""

    trained: float
    base: float
    by: str  # the judge as FILE.py:NAME, or "CLIP"
    named: int | None = None  # things that the judge counts; None of CLIP


@dataclass
class StageSize(Finite):
    """How far the weights of a stage moved. norm: |theta - theta_0| / |theta_0|. singular: the
    largest singular value of a matrix's change, divided by that of the matrix; the highest such
    ratio in the stage."""

    norm: float
    singular: float


@dataclass
class Kept(Finite):
    """What training cost, on images of prompts that have nothing to do with a target.

    change: the mean distance of an image to the base's image of the same prompt and noise, divided
    by the mean distance between the base's images of two prompts; by "pixels", "embedder" and
    "structure". 0: unchanged; 1: another picture altogether. bleeding: the share of images in which
    an element reaches its threshold, wherever it lies. rise: how far the mean best similarity to an
    element lies above the base's."""

    prompts: int
    change: dict[str, float]
    bleeding: float | None = None  # None without a mask
    bleeding_base: float | None = None
    rise: float | None = None
    words: Words | None = None
    # by stage, at the last measurement; at every one where `keep_by` is size
    size: dict[str, StageSize] | None = None


@dataclass
class Scores(CellScores):
    """Scores of the composed prompt. `cells` has those of every kind, if controls were measured."""

    cells: dict[str, CellScores] | None = None
    drift: dict[str, float] = field(default_factory=dict)
    # of composed prompts among clean ones, by text-conditional magnitude
    detection: Detection | None = None
    kept: Kept | None = None

    @property
    def orders(self) -> dict[str, CellScores]:
        """The scores by kind of prompt of those in ORDERS that were measured."""
        cells = {**(self.cells or {}), "composed": self}
        return {kind: cells[kind] for kind in ORDERS if kind in cells}


@dataclass
class Measurement(Finite):
    """One point of the recovery curve, of one or both kinds of weights."""

    step: int
    epoch: float
    label: str
    raw: Scores | None = None
    ema: Scores | None = None
    seconds: float = 0.0
    share: float = 0.0  # share of the time since the hook was set up that measuring took

    def scores(self, kind: str) -> Scores | None:
        """The scores of one kind of weights, if measured."""
        return {"raw": self.raw, "ema": self.ema}[kind]

    @property
    def saved(self) -> Scores | None:
        """The scores of the weights that are saved: averaged ones where there are some."""
        return self.ema or self.raw


@dataclass
class TargetEntry(Finite):
    """A target and its files; `elements` has None where an element has no mask."""

    target_id: str
    image: str
    elements: list[str | None]
    prompt: str
    phrases: list[str]
    estimated: bool | None = None  # masks were estimated from the data


@dataclass
class Verdict(Finite):
    """Whether composed prompts recover a target, and how many images would pass by chance."""

    recovers: bool
    step: int
    images_above: int
    images: int
    state: str  # RECOVERED, NOT_RECOVERED, IN_PART or UNDECIDED
    expected_by_chance: float | None = None
    p_value: float | None = None
    reasons: list[str] | None = None  # why it is undecided
    states: dict[str, str] | None = None  # by target
    parts: list[str] | None = None  # what came back and what did not, where that differs
    to_try: list[str] | None = None  # next, by what was measured


@dataclass
class SummaryRow(Finite):
    """The recovery curve of one target, or of `ALL`, in numbers; None: never. Of all targets a time
    is that of the half that comes back first."""

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
    # the first step from which the rate is at least one half at every evaluation
    sustained_step: float | None = None


@dataclass
class Placebo(Finite):
    """The strict rate minus that of a run on placebo data: the headline number."""

    source: str
    cir: float  # of the placebo run, over the targets that both have
    difference: float
    interval: tuple[float, float]  # 95 %, over targets; for fewer than six, over images
    targets: int
    whole: float | None = None  # the placebo run's rate by the whole alone
    published: float | None = None  # the placebo run's rate by the published criterion
    element_rate: float | None = None  # the placebo run's mean rate of elements
    # (mean of this run's thresholds, mean of the placebo run's), where they differ
    thresholds: tuple[float, float] | None = None


@dataclass
class Withheld(Placebo):
    """The strict rate minus that of a run that was trained without some elements."""

    elements: list[str] = field(default_factory=list)


@dataclass
class Record(Finite):
    """A validation, as its hook writes it to validation.json."""

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
    placebo: Placebo | None = None
    withheld: Withheld | None = None
    precision: str | None = None  # of the forward passes: that of autocast, else of the weights
    ranges: list[TargetRange] | None = None
    reference: str | None = None  # what images are compared with: the target "raw" or "decoded"
    unrelated: list[str] | None = None  # the prompts on which what is kept was measured
    schema: Literal[2] = 2

    @classmethod
    def load(cls, path: str | Path, flag: str = "") -> "Record":
        """Read validation.json. Raises UserError, which begins with `flag` and names the key, where
        something is missing, mistyped or not finite."""
        try:
            record = validated_file(Path(path), cls)
            record.check()
        except UserError as error:
            raise UserError(f"{flag and flag + ': '}{path}: {error}") from None
        return record

    def check(self) -> None:
        """Raise UserError where the parts do not fit each other."""
        names = {target.target_id for target in self.targets}
        steps = [entry.step for entry in self.history]
        measured = [scores for e in self.history for scores in (e.raw, e.ema) if scores]
        fit = (
            len(names) == len(self.targets) > 0
            and steps == sorted({*steps})
            and min(steps, default=-1) >= 0
            and all(entry.raw or entry.ema for entry in self.history)
            and all(names >= scores.targets.keys() for scores in measured)
            and all(row.weights in KINDS for row in self.summary)
        )
        if not fit:
            raise UserError(
                "target_id, step and weights of targets, history and summary do not fit together"
            )

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        with writing(str(path.parent), path.name):
            replace_text(path, json.dumps(encode(self), indent=1))


# -- JSON and dataclasses --------------------------------------------------------------------------
def encode(value: Any) -> Any:
    """Dataclasses as dicts, without the absent fields; lists and dicts likewise."""
    if is_dataclass(value) and not isinstance(value, type):
        pairs = [(f, getattr(value, f.name)) for f in fields(value)]
        return {f.name: encode(v) for f, v in pairs if v is not None or f.default is not None}
    if isinstance(value, dict):
        return {key: encode(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(part) for part in value]
    return value


def decode(kind: Any, value: Any) -> Any:
    """The inverse of `encode`. `kind` is a dataclass, or a list or optional of one."""
    return TypeAdapter(kind).validate_python(value)
