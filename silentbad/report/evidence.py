"""What a record says, in words and tables: the verdict, what is kept, what else would have counted,
bleeding, thresholds, detection.

Pure functions of a Record; docs/metrics.md defines the numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from silentbad.errors import brief
from silentbad.measure.intervals import FEW_TARGETS
from silentbad.measure.limit import Limit
from silentbad.measure.record import (
    IN_PART,
    CellScores,
    Kept,
    Placebo,
    Range,
    Record,
    Scores,
    TargetRange,
)
from silentbad.measure.scores import latest
from silentbad.report import pages
from silentbad.report.pages import Cell, Figure, Table, interval_text, rounded, supported
from silentbad.settings.validation import ValidationConfig

MOST_TARGETS = 8  # with a bleed matrix of their own
CONTROLS = {  # cell, or the stem of numbered ones -> (row, what it asks)
    "shuffled": ("phrases in another order", "Does it depend on the order?"),
    "phrase": ("phrase {} alone", "Is one phrase enough?"),
    "without": ("all but phrase {}", "Is this phrase needed?"),
    "paraphrase": ("paraphrase {}", "Does it depend on the exact words?"),
    "others": ("phrases of another target", "Does any trained prompt give it?"),
    "unrelated": ("unrelated caption", "Does it come without being asked for?"),
}


# -- the verdict -----------------------------------------------------------------------------------
@dataclass
class Answer:
    """The verdict in words: its state, the sentences with its numbers, and what to try."""

    state: str  # RECOVERED, NOT_RECOVERED, IN_PART or UNDECIDED
    sentences: list[str]
    to_try: list[str]

    @property
    def opening(self) -> str:
        """The state with its punctuation, to begin the sentences."""
        return f"{self.state.capitalize()}{':' if self.state == IN_PART else '.'}"

    def __str__(self) -> str:
        """The verdict in one line for a terminal, and what to try in a line each."""
        return "\n".join([" ".join([self.opening, *self.sentences]), *self.to_try])


def answer(record: Record) -> Answer:
    """The verdict on the last measurement (recovered, in part, not recovered or undecided), with
    its reasons and numbers."""
    scores = latest(record.history[-1])
    verdict = record.verdict
    in_part = verdict.state == IN_PART
    parts = [f"{part}." for part in verdict.parts or []]
    if parts and not in_part:
        parts[0] = f"By part: {parts[0]}"
    reasons = [f"Reason: {reason}." for reason in verdict.reasons or []]
    sentences = parts + reasons if in_part else reasons + parts
    sentences += [_counted(record, scores), *_before(record), *_by_chance(record)]
    if record.placebo is not None:
        how = "Training on placebo data, which never shows an exact element,"
        sentences += _less(how, record.placebo)
    if record.withheld is not None:
        how = f"Training without {', '.join(record.withheld.elements)}"
        sentences += _less(how, record.withheld)
    return Answer(
        state=verdict.state,
        sentences=sentences,
        to_try=[f"Try {advice}." for advice in verdict.to_try or []],
    )


def _counted(record: Record, scores: Scores) -> str:
    """How many images count, the rate and its interval."""
    low, high = map(rounded, scores.interval)
    rate = f"{rounded(scores.cir)} (95 % interval {low} to {high})"
    of = f"{scores.above} of {scores.images} images of the composed prompt"
    other = ""
    if record.verdict.images > scores.images:
        rest = (record.verdict.images_above - scores.above, record.verdict.images - scores.images)
        other = f"; with the phrases in another order {rest[0]} of {rest[1]}"
    if not any(file for target in record.targets for file in target.elements):
        reached = "the threshold of the whole picture; no element was looked at"
        return f"{of} reach {reached}: rate {rate}{other}."
    estimated = any(target.estimated for target in record.targets)
    elements = "every element (masks estimated from the data)" if estimated else "every element"
    return f"{of} reach the threshold of the whole and of {elements}: strict rate {rate}{other}."


def _before(record: Record) -> list[str]:
    base = base_scores(record)
    if base is None or len(record.history) < 2:
        return []
    name = "The baseline" if record.history[0].label == "baseline" else "The base model"
    return [f"{name} has the rate {rounded(base.cir)}."]


def _by_chance(record: Record) -> list[str]:
    verdict = record.verdict
    if verdict.images_above == 0 or verdict.expected_by_chance is None:
        return []
    p = "" if verdict.p_value is None else f" (p {probability(verdict.p_value)})"
    share = rounded(verdict.expected_by_chance / verdict.images)
    return [f"{share} of pictures like the nulls are taken to pass by chance{p}."]


def _less(how: str, control: Placebo) -> list[str]:
    """The rate of a control run beside the run's own; the sentence begins with `how`, its
    training."""
    low, high = map(rounded, control.interval)
    few = "one target" if control.targets == 1 else f"these {control.targets} targets"
    over = f"over the images of {few}"
    if control.targets >= FEW_TARGETS:
        over = f"over {control.targets} targets"
    sentence = (
        f"{how} gives {rounded(control.cir)}: the difference is {rounded(control.difference)} "
        f"(95 % interval {low} to {high}, {over})."
    )
    if control.thresholds is None:
        return [sentence]
    means = [f"a mean of {rounded(value, 3)}" for value in control.thresholds]
    return [sentence, f"Warning: {not_comparable('thresholds', means)}"]


def not_comparable(what: str, used: Sequence[str]) -> str:
    """A sentence that says that runs were measured with different thresholds or embedders."""
    return f"The runs used different {what}, so rates are not comparable: {'; '.join(used)}."


def probability(p: float) -> str:
    """A p-value with its sign of comparison."""
    return "< 0.0001" if p < 0.0001 else f"= {p:.2g}"


# -- what is kept ----------------------------------------------------------------------------------
def kept_of(record: Record) -> Kept | None:
    """What the saved weights kept of the base at the last measurement; None where it was not
    measured."""
    last = record.history[-1]
    return last.saved.kept if last.step > 0 and last.saved is not None else None


def kept_sentence(record: Record) -> str:
    """What the last measurement kept, in one line; empty where it was not measured."""
    kept = kept_of(record)
    if kept is None:
        return ""
    parts = [_words(kept), _change(kept, record.unrelated), _bleeding(kept), _limit(record)]
    return f"Kept: {'; '.join(filter(None, parts))}."


def _words(kept: Kept) -> str:
    words = kept.words
    if words is None:
        return ""
    if words.named is None:
        return f"{words.by} score {words.trained:.1f} (base {words.base:.1f})"
    shares = f"{rounded(words.trained)} (base {rounded(words.base)})"
    return f"things right {shares}, of {words.named}"


def _change(kept: Kept, prompts: Sequence[str] | None) -> str:
    """How much pictures of unrelated prompts changed, with one of the prompts, since captions like
    those of the clean pictures change less than others."""
    pixels = kept.change.get("pixels")
    if pixels is None:
        return ""
    example = f" such as {brief(prompts[0])}" if prompts else ""
    return f"{100 * pixels:.0f} % changed on unrelated prompts{example}"


def _bleeding(kept: Kept) -> str:
    if kept.bleeding is None or kept.bleeding_base is None:
        return ""
    if kept.bleeding == 0:
        return f"nothing bleeds in {kept.prompts} images"
    base = f"base model: {100 * kept.bleeding_base:.0f} %"
    return f"an element comes in {100 * kept.bleeding:.0f} % of {kept.prompts} images ({base})"


def _limit(record: Record) -> str:
    """Whether the run is within its limit, where it has one."""
    names = ("keep", "keep_by", "judge", "clip_path")
    set_here = {key: value for key, value in record.config.items() if key in names}
    limit = Limit.of(ValidationConfig(**set_here))
    share = None if limit is None else limit.kept(record.history[-1])
    if limit is None or share is None:
        return ""
    side = "within" if limit.holds(record.history[-1]) else "below"
    return f"{rounded(share)} by {limit.by}, {side} the limit of {limit.share:g}"


CHANGES = {
    "pixels": "change of the pixels",
    "embedder": "change by the embedder",
    "structure": "change of the structure (SSIM)",
}


def kept_table(record: Record) -> Table:
    """What is kept in numbers, beside the base's own."""
    rows: list[list[Cell]] = []
    if (kept := kept_of(record)) is not None:
        rows = [[CHANGES.get(name, name), rounded(v), "0.00"] for name, v in kept.change.items()]
        if kept.bleeding is not None and kept.rise is not None:
            bleeding = (kept.bleeding, kept.bleeding_base)
            rows.append(["images in which an element comes, anywhere", *map(rounded, bleeding)])
            rows.append(["best similarity to an element", f"{kept.rise:+.2f}", "0.00"])
        if (words := kept.words) is not None:
            name = f"things right, of {words.named}" if words.named else "score"
            rows.append([f"{name} ({words.by})", *map(rounded, (words.trained, words.base))])
    return Table(["on unrelated prompts", "trained model", "base model"], rows, right=True)


def size_table(record: Record) -> Table:
    """How far the weights of each stage moved."""
    kept = kept_of(record)
    sizes = kept.size if kept else None
    rows: list[list[Cell]] = [
        [stage, rounded(size.norm, 3), rounded(size.singular, 3)]
        for stage, size in (sizes or {}).items()
    ]
    return Table(["stage", "norm of the change", "its largest singular value"], rows, right=True)


# -- the range -------------------------------------------------------------------------------------
def range_lines(ranges: Sequence[TargetRange]) -> list[str]:
    """The scores of a perfect copy and of the nearest null: a line per target and per element."""
    lines: list[str] = []
    for target in ranges:
        width, height = target.size
        size = f"{width}x{height}"
        if target.size != (target.side, target.side):
            size += f" becomes {target.side}x{target.side}"
        lines.append(f"{target.target_id}: {size}; the whole: {range_text(target.whole)}")
        for k, part in enumerate(target.elements):
            if part is not None:
                lines.append(f"{target.target_id}: element {k + 1}: {range_text(part)}")
    return lines


def range_text(measured: Range) -> str:
    """A range in words."""
    copy = f"a perfect copy scores {measured.perfect:.2f}"
    threshold = f"threshold {measured.threshold:.2f}"
    if measured.floor is None:
        return f"{copy}; it has no null of its own, {threshold}"
    kind = measured.nearest and f" ({measured.nearest})"
    text = f"{copy}, the nearest null{kind} {measured.floor:.2f}; {threshold}"
    return text if measured.separable else f"{text}: the detector cannot tell them apart"


# -- what else would have counted ------------------------------------------------------------------
def rates(scores: CellScores | Placebo) -> list[Cell]:
    """The rate by each endpoint: strict with its interval, whole, published, elements. A control
    run's interval is that of the difference, so it is left out."""
    interval = scores.interval if isinstance(scores, CellScores) else None
    others = (scores.whole, scores.published, scores.element_rate)
    return [supported(scores.cir, interval), interval_text(interval), *map(rounded, others)]


def base_scores(record: Record) -> Scores | None:
    """The scores of the base model, before training."""
    first = record.history[0]
    return first.raw if first.step == 0 else None


def control_cells(record: Record) -> dict[str, CellScores]:
    """Every cell of the last measurement that has controls."""
    for entry in reversed(record.history):
        scores = latest(entry)
        if entry.step > 0 and scores.cells:
            return scores.cells
    return {}


def alternatives(record: Record, withheld: Sequence[str] = ()) -> Table:
    """ "What else would have counted": the composed prompt, and every control by each endpoint."""
    rows: list[list[Cell]] = []
    notes: list[str] = []

    def add(name: str, asks: str, scores: CellScores | Placebo | None) -> None:
        if scores is not None:
            rows.append([name, *rates(scores)])
            notes.append(asks)

    last = record.history[-1]
    base = base_scores(record)
    cells = control_cells(record)
    asks = "The claim." if record.history[1:] else "One model, no training."
    if withheld:
        asks = f"A control run: trained without {', '.join(withheld)}. Does it come all the same?"
    add("composed prompt", asks, latest(last))
    if last.step > 0:
        add("composed prompt, base model", "Was it there before training?", base)
    described = (base.cells or {}).get("described") if base else None
    add("spelt-out caption, base model", "Do words alone give it?", described)
    add("spelt-out caption", "Do words alone give it after training?", cells.get("described"))
    asks = "Do the attributes alone give it, with no exact element shown?"
    add("composed prompt, placebo data", asks, record.placebo)
    if record.withheld is not None:
        asks = f"Does it come without {', '.join(record.withheld.elements)}?"
        add("composed prompt, an element withheld", asks, record.withheld)
    for stem, (name, asks) in CONTROLS.items():
        for key, cell in cells.items():
            kind, _, number = key.partition("-")
            if kind == stem:
                add(name.format(int(number or 0) + 1), asks, cell)
    head = ["prompt", "strict rate", "95 %", "whole alone", "published: best of n", "elements"]
    return Table(head, rows, right=True, notes=notes)


# -- by element ------------------------------------------------------------------------------------
def bleeding(record: Record) -> list[Figure]:
    """The recall of each target's elements under each phrase alone, all but one, and all."""
    cells = control_cells(record)
    figures = list[Figure]()

    def recall(cell: str, target: str) -> list[float | None]:
        scores = cells[cell].targets.get(target) if cell in cells else None
        return [element.rate for element in scores.elements] if scores else []

    for target in record.targets[:MOST_TARGETS]:
        name = target.target_id
        rows = {
            f"{k + 1} {phrase}": recall(f"phrase-{k}", name)
            for k, phrase in enumerate(target.phrases)
        }
        rows |= {
            f"all but {k + 1}": recall(f"without-{k}", name) for k in range(len(target.phrases))
        }
        rows = {phrase: values for phrase, values in rows.items() if values}
        together = recall("composed", name)
        if rows and together:
            rows["all together"] = together
            columns = [str(k + 1) for k in range(len(together))]
            figures += pages.matrix([*rows], columns, [*rows.values()], name)
    return figures


# -- detection -------------------------------------------------------------------------------------
def detections(record: Record) -> Table:
    """How well the text-conditional magnitude tells composed prompts from clean ones, by step."""
    rows: list[list[Cell]] = []
    for entry in record.history:
        detection = latest(entry).detection
        if detection is None:
            continue
        auc_ends = (detection.auc_low, detection.auc_high)
        tpr_ends = (detection.tpr_low, detection.tpr_high)
        rows.append(
            [
                entry.label or f"step {entry.step}",
                supported(detection.auc, auc_ends),
                interval_text(auc_ends),
                detection.positives,
                detection.negatives,
                supported(detection.tpr, tpr_ends),
                interval_text(tpr_ends),
            ]
        )
    head = ["measurement", "AUC", "95 %", "composed", "clean", "TPR at 1 % FPR", "95 %"]
    return Table(head, rows, right=True)


def composed_or_copied(record: Record) -> Table:
    """How similar each target's images are to it and to the nearest training picture, beside the
    similarity of the base's images to theirs."""
    base = base_scores(record)
    last = latest(record.history[-1])
    rows = list[list[Cell]]()
    notes = list[str]()
    for target in record.targets:
        target_scores = last.targets.get(target.target_id)
        before = base.targets.get(target.target_id) if base else None
        if target_scores is None or not target_scores.nearest:
            continue
        null = before.nearest if before and last is not base else None
        level = float(np.quantile(null, 0.95)) if null else None
        nearest = np.array(target_scores.nearest)
        values = (
            target_scores.mean,
            float(nearest.mean()),
            level,
            None if level is None else float((nearest > level).mean()),
            float((nearest > target_scores.sims).mean()),
        )
        rows.append([target.target_id, *map(rounded, values)])
        notes.append(f"nearest: {target_scores.nearest_record}")
    head = [
        "target",
        "to the target",
        "to the nearest training picture",
        "95th percentile of the base's",
        "share above it",
    ]
    return Table(
        [*head, "share nearer to training than to the target"], rows, right=True, notes=notes
    )
