"""Fills in the numbers of the documents that come from bench/results.

    python -m bench.documents            fill every block again
    python -m bench.documents --check    name the stale blocks; exit code 1 if there is one

A block is the text between two lines of a document, `<!-- generated: NAME -->` and `<!-- /generated -->`. NAME is a key
of BLOCKS: a function from the stored results and the document's language to Markdown. bench/recovery_table.py computes
the figures; tests/test_docs.py fails if a block is stale.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from pathlib import Path
from statistics import median

import numpy as np

from bench import attribution, between, guard_cost, instrument, layerwise, nulls, stealth, strength, thresholds
from bench.published_table import (
    FEW_NULLS,
    FIRST_TARGETS,
    IMAGES,
    LONG,
    MAIN,
    PAPER,
    alone,
    block_alone,
    by_arm,
    figures,
    first,
    interval,
    longer,
    paper,
    ratio,
    reported_of,
    sign_flips,
    swept,
    times_sooner,
    usual,
)
from bench.published_table import HEAD as PUBLISHED_HEAD
from bench.published_table import lines_of as published_lines
from bench.published_table import runs_of as published_runs
from bench.recovery_table import (
    HEAD,
    OVER,
    RESULTS,
    Arm,
    compared,
    difference,
    lines_of,
    markdown,
    named,
    pairs,
    read,
    runs_of,
    speedup,
    stored,
    tables,
)
from bench.shield_table import audit_table, guard_table, table

ROOT = Path(__file__).parents[1]

PLAIN: Arm = ("plain", 8.0)

# One table of words for the headings and labels of generated tables; English is the key.
CHINESE = {
    "arm": "实验臂",
    "over": "相对",
    "runs": "运行数",
    "seed": "种子",
    "seeds": "种子",
    "targets": "目标",
    "lr": "学习率",
    "CIR 50 %": "CIR 50 %",
    "CIR": "CIR",
    "plain's CIR": "plain 的 CIR",
    "elements": "元素",
    "drift": "漂移",
    "speed-up": "加速",
    "in seconds": "按秒",
    "sooner, later": "更早，更晚",
    "CIR, difference": "CIR 之差",
    "elements, difference": "元素之差",
    "whole": "整图",
    "whole and every element, at most": "整图且每个元素，至多",
    "reached 50 %": "达到 50 %",
    "fall back": "回落",
    "path": "路径",
    "seconds a step": "每步秒数",
    "share of the step": "占一步的份额",
    "extra memory": "额外内存",
    "the original code path": "原始代码路径",
    "its rule, rewritten": "其规则，重写",
    "a step without control": "无控制的一步",
    "speed-up over `plain`": "相对 `plain` 的加速",
    "configuration": "配置",
    "`plain`": "`plain`",
    "targets at once": "个目标同时",
    "never": "从未",
    "target": "目标",
    "strict rate": "严格还原率",
    "every element from step": "每个元素自此步起",
    "No reported run is stored yet.": "尚无报告的运行。",
    "recovered": "已还原",
    "images": "末步图像",
    "step": "步数",
    "steps": "步数",
    "times sooner": "快几倍",
    "lr x": "学习率倍数",
    "targets (runs)": "目标（运行）",
    "median step": "中位步数",
    "s/step": "秒/步",
    "times sooner than `plain`": "比 `plain` 快几倍",
    "p (Holm)": "p（Holm）",
    "the same in seconds": "按秒计",
    "similarity": "相似度",
    "of elements": "元素的相似度",
}
Language = str  # "en" or "zh"


def words(text: str, language: Language) -> str:
    """A heading or label in the language of the document."""
    if language == "en":
        return text
    if text not in CHINESE:
        raise SystemExit(f"error: bench/documents.py: CHINESE has no word for '{text}'")
    return CHINESE[text]


class Results:
    """The stored rows of the benchmarks, each read when a block first asks for it."""

    def __init__(self, folder: Path = RESULTS.parent):
        self.folder = folder

    @cached_property
    def rows(self) -> list[dict]:
        return stored(self.folder / RESULTS.name)

    @cached_property
    def published(self) -> list[dict]:
        return stored(self.folder / "published.jsonl")

    @cached_property
    def ceiling(self) -> list[dict]:
        return stored(self.folder / "ceiling.jsonl")

    @cached_property
    def single(self) -> list[dict]:
        """The rows of runs that train on one target."""
        return [row for row in self.rows if "," not in row["targets"]]

    @cached_property
    def lines(self) -> dict[tuple[str, str], dict[str, str]]:
        """{(arm, rate): {heading: cell}} of the whole table."""
        return {(line[0], line[1]): dict(zip(HEAD, line, strict=True)) for line in tables(self.rows)}

    @cached_property
    def differences(self) -> dict[tuple[Arm, Arm], dict[str, str]]:
        return {}

    def over(self, arm: Arm, base: Arm) -> dict[str, str]:
        """{heading: cell} of one arm over another, paired over the targets and seeds that both have."""
        if (arm, base) not in self.differences:
            self.differences[arm, base] = dict(zip(OVER, difference(self.single, base, arm), strict=True))
        return self.differences[arm, base]

    def line(self, arm: Arm) -> dict[str, str]:
        return self.lines[arm[0], f"{arm[1]:g}"]

    def load(self, name: str) -> dict:
        return json.loads((self.folder / f"{name}.json").read_text())


def grid(head: Sequence[str], lines: Iterable[Sequence[str]], language: Language) -> str:
    """A Markdown table whose headings are in the language of the document."""
    return markdown([tuple(line) for line in lines], tuple(words(cell, language) if cell else "" for cell in head))


def code(arm: Arm) -> str:
    """An arm's name as the documents write it."""
    return f"`{named(arm)}`"


# ------------------------------------------------------------------------------------ recovery, one target a run


def with_every_element(rows: list[dict], arm: Arm) -> float:
    """Upper bound of the share of images at the budget that pass as a whole and in every element.

    A row has rates, not images: an image that passes everything counts in each rate, so the least of them bounds it.
    """
    of_target = [
        np.mean([min(last["rate"], *last["elements"]) for last in (max(run, key=lambda r: r["step"]) for run in runs)])
        for runs in (seeds.values() for seeds in runs_of(rows, *arm).values())
    ]
    return float(np.mean(of_target))


def fall_back(rows: list[dict], arm: Arm, level: float = 0.5) -> tuple[int, int]:
    """Runs whose rate reaches `level` at some step, and how many of them are below it at a later one."""
    reached = again = 0
    for seeds in runs_of(rows, *arm).values():
        for run in seeds.values():
            on = [row["rate"] >= level for row in sorted(run, key=lambda r: r["step"]) if row["step"] > 0]
            reached += any(on)
            again += any(on) and not all(on[on.index(True) :])
    return reached, again


Block = Callable[[Results, Language], str]
README_CELLS = {"configuration": "arm", "recovered": "recovered", "images": "strict rate", "step": "median step"}


def readme(results: Results, language: Language) -> str:
    """The arms of the published setting on reported targets: a row each, and a sentence a block."""
    arms = published_arms(results)
    if not arms:
        return words("No reported run is stored yet.", language) + "\n"
    shown = [arms[f"`{name}`"] for name in README_ARMS if f"`{name}`" in arms]
    cells = [[*(line[key] for key in README_CELLS.values()), line[SOONER] or "1"] for line in shown]
    head = [*README_CELLS, "times sooner"]
    said = [(SAID, arms["`recommended`"] | {f"plain {key}": cell for key, cell in arms["`plain`"].items()})]
    if long := published_arms(results, LONG).get("`recommended_long`"):
        said.append((SAID_LONG, long))
    text = " ".join(sentence[language].format_map(counts_alone(arm)) for sentence, arm in said)
    return grid(head, cells, language) + "\n" + wrapped(text + "\n", language)


def counts_alone(cells: dict[str, str]) -> dict[str, str]:
    """Cells of a row, targets recovered without their interval."""
    return {key: cell.split(" [")[0] if key.endswith("recovered") else cell for key, cell in cells.items()}


SAID = {
    "en": "`recommended` brings back {recovered} targets in {steps} steps, `plain` {plain recovered} in {plain steps}.",
    "zh": "`recommended` 在 {steps} 步内还原 {recovered} 个目标，`plain` 在 {plain steps} 步内还原 {plain recovered}。",
}
SAID_LONG = {
    "en": "On other targets `recommended_long` brings back {recovered} in {steps} steps: {strict rate} of the images.",
    "zh": "在另一批目标上，`recommended_long` 在 {steps} 步内还原了 {recovered} 个，图像还原率为 {strict rate}。",
}
SOONER = "times sooner than `plain`"
README_ARMS = ("recommended", "recommended_leak_free_adamw", "replay", "plain")


def frozen_rows(results: Results, block: int = MAIN) -> list[dict]:
    """The rows of a block at a poisoning ratio of 10 %, one target a run, each arm at its frozen length."""
    rows = [row for row in reported_of(results.published, block) if row["images"] == IMAGES]
    return [row for row in rows if usual(row) and alone(row) and not longer(row)]


def published_arms(results: Results, block: int = MAIN) -> dict[str, dict[str, str]]:
    """{arm: {heading: cell}} of a block's targets at a poisoning ratio of 10 %, one target a run."""
    rows = frozen_rows(results, block)
    return {line[0]: dict(zip(PUBLISHED_HEAD, line, strict=True)) for line in published_lines(rows)}


def published_results(results: Results, language: Language, block: int = MAIN) -> str:
    """Every column of them."""
    arms = published_arms(results, block)
    return grid(PUBLISHED_HEAD, [list(line.values()) for line in arms.values()], language)


OUTCOME = ("arm", "targets (runs)", "recovered", "median step", "strict rate", "elements", "drift")


def outcome(rows: list[dict]) -> list[str]:
    """The cells under OUTCOME of an arm's rows."""
    cells = dict(zip(PUBLISHED_HEAD, published_lines(rows)[0], strict=True))
    return [cells[column] for column in OUTCOME]


def published_paper(results: Results, language: Language) -> str:
    """Recovery, first-attack epoch and similarity of each arm, as the paper reports them."""
    return grid(PAPER, paper(frozen_rows(results)), language)


def published_k(results: Results, language: Language) -> str:
    """What recovers at all, by the number k of a target's elements."""
    rows = [row for row in block_alone(results.published, MAIN) if usual(row) and row["arm"] == "recommended"]
    lines = []
    for k in sorted({len(row["elements"]) for row in rows}):
        lines.append([str(k), *outcome([row for row in rows if len(row["elements"]) == k])])
    return grid(("k", *OUTCOME), lines, language)


def published_ratio(results: Results, language: Language) -> str:
    """What recovers by the elements' share of the records, on the targets that ran at more than one."""
    rows, lines = swept(results.published), []
    for arm in ("recommended", "plain"):
        own = [row for row in rows if row["arm"] == arm]
        for share in sorted({row["ratio"] for row in own}):
            mine = [row for row in own if row["ratio"] == share]
            lines.append([f"{share:.0%}".replace("%", " %"), *outcome(mine)])
    return grid(("share", *OUTCOME), lines, language)


def published_seeds(results: Results, language: Language, block: int = MAIN, arm: str = "recommended") -> str:
    """What each seed of an arm recovers, of the targets that all its seeds ran."""
    rows = [row for row in block_alone(results.published, block) if usual(row) and row["arm"] == arm]
    seeds = sorted({row["seed"] for row in rows})
    ran = {seed: {row["target"] for row in rows if row["seed"] == seed} for seed in seeds}
    shared = set.intersection(*ran.values())
    lines = []
    for seed in seeds:
        mine = [row for row in rows if row["seed"] == seed and row["target"] in shared]
        lines.append([str(seed), *outcome(mine)])
    return grid(("seed", *OUTCOME), lines, language)


def published_clean(results: Results, language: Language, block: int = MAIN) -> str:
    """What recovers among more clean pictures, of the targets that ran among both numbers of them."""
    rows = [row for row in block_alone(results.published, block) if row["seed"] == 0 and row["ratio"] == 0.1]
    lines = []
    for arm in ("recommended_long", "recommended", "plain"):
        many = {row["target"] for row in rows if row["arm"] == arm and not usual(row)}
        own = [row for row in rows if row["arm"] == arm and row["target"] in many]
        for clean in sorted({row["clean"] for row in own}):
            lines.append([str(clean), *outcome([row for row in own if row["clean"] == clean])])
    return grid(("clean pictures", *OUTCOME), lines, language)


def published_together(results: Results, language: Language, block: int = MAIN, arm: str = "recommended") -> str:
    """What an arm recovers of several targets trained at once, and of the same targets alone (seed 0)."""
    rows = [row for row in reported_of(results.published, block) if row["arm"] == arm]
    rows = [row for row in rows if usual(row) and not row["placebo"] and row["seed"] == 0]
    lines = []
    for together in sorted({row["targets"] for row in rows if not alone(row)}, key=len):
        own = [row for row in rows if row["targets"] == together]
        single = [row for row in rows if alone(row) and row["target"] in together.split(",")]
        count = len(together.split(","))
        for name, part in ((f"{count} at once", own), (f"the same {count}, each alone", single)):
            if part:
                lines.append([name, str(part[0]["clean"]), str(part[0]["steps"]), *outcome(part)[1:]])
    return grid(("targets", "clean pictures", "steps", *OUTCOME[1:]), lines, language)


def by_strength(results: Results, language: Language) -> str:
    """What `recommended` recovers from one base at several points of its training."""
    rows = stored(results.folder / strength.RESULTS.name)
    return strength.by_strength(rows, results.load(strength.MEASURED.stem)) + "\n"


def by_elements(results: Results, language: Language) -> str:
    """What `recommended` recovers of pictures of two to five elements."""
    return strength.by_elements(stored(results.folder / strength.RESULTS.name)) + "\n"


def layerwise_runs(results: Results, language: Language) -> str:
    """`recommended` with uniform rates, with rates by layer, and with those shuffled."""
    return layerwise.by_run(stored(results.folder / layerwise.RESULTS.name)) + "\n"


def layerwise_over(results: Results, language: Language) -> str:
    """Rates by layer over each of the others."""
    return layerwise.compared(stored(results.folder / layerwise.RESULTS.name)) + "\n"


def between_frontier(results: Results, language: Language) -> str:
    """Gradient control alone on plain's data stream, by arm and rate."""
    return between.frontier(stored(results.folder / between.RESULTS.name)) + "\n"


def between_over(results: Results, language: Language) -> str:
    """The layer-wise factor between sources over each other arm at the same rate."""
    return between.compared(stored(results.folder / between.RESULTS.name)) + "\n"


def published_ceiling(results: Results, language: Language) -> str:
    """By target: what the endpoint accepts of a base fine-tuned on the target itself, and what the arms reach."""
    rows = [row for row in block_alone(results.published, FEW_NULLS) if usual(row) and row["seed"] == 0]
    arms = {arm: runs for (arm, _, _), runs in by_arm(rows).items()}
    names = [arm for arm in ("recommended", "recommended_adamw", "recommended_leak_free") if arm in arms]
    best = {row["target"]: row for row in results.ceiling}

    def reached(arm: str, target: str) -> str:
        return f"{arms[arm][target][0]['strict rate']:.2f}" if target in arms[arm] else ""

    lines = []
    for target, row in best.items():
        ceiling = [f"{value:.2f}" for value in (row["rate"], row["whole_rate"], min(row["elements"]))]
        lines.append([target, *ceiling, *(reached(arm, target) for arm in names)])
    mine = arms.get("recommended", {})
    able = [target for target, row in best.items() if row["rate"] >= 0.5 and target in mine]
    recovered = sum(mine[target][0]["strict"] is not None for target in able)
    head = ("target", "ceiling: strict", "whole", "weakest element", *(f"`{arm}`" for arm in names))
    said = f"Where the ceiling is at least one half, `recommended` recovers {recovered} of {len(able)}."
    return f"{grid(head, lines, language)}\n{said}\n"


def published_over(results: Results, language: Language) -> str:
    """`recommended` over each length of plain and over replay, on the targets that both ran in the last block."""
    rows = [row for row in reported_of(results.published, MAIN) if usual(row) and alone(row)]
    arms = by_arm([row for row in rows if not row["placebo"] and row["seed"] == 0])
    mine = next(runs for (arm, *_), runs in arms.items() if arm == "recommended")
    cost: dict[str, float] = {}  # least seconds of a step, whatever the length of a run
    for (arm, *_), runs in arms.items():
        cost[arm] = min(cost.get(arm, np.inf), *(run["s/step"] for (run,) in runs.values()))
    lines = []
    for (arm, _, horizon), other in arms.items():
        if arm in ("plain", "replay"):
            logs, never = times_sooner(other, mine, horizon), any(run["strict"] is None for (run,) in other.values())
            seconds = np.log(cost[arm] / cost["recommended"])
            p = f"{sign_flips(logs):.4f}" if len(logs) > 1 else ""
            cells = [f"`{arm}`", str(horizon), str(len(logs)), ratio(logs, never), p, ratio(logs + seconds, never)]
            lines.append(cells)
    return grid(("over", "steps", "targets", "times sooner", "p", "the same in seconds"), lines, language)


def stealth_table(results: Results, language: Language) -> str:
    """How near the training pictures come to the target."""
    return stealth.table(stored(results.folder / stealth.RESULTS.name)) + "\n"


def withheld(results: Results, language: Language) -> str:
    """`recommended` without one element's pictures, beside the same targets with all of them."""
    rows = stored(results.folder / "withheld.jsonl")
    targets = {row["target"] for row in rows}
    whole = [row for row in block_alone(results.published, MAIN) if row["arm"] == "recommended" and usual(row)]
    whole = [row for row in whole if row["seed"] == 0]
    lines = []
    for name, mine in (("all", [row for row in whole if row["target"] in targets]), ("all but the first", rows)):
        runs = [run for seeds in by_arm(mine)["recommended", 40.0, 200].values() for run in seeds]
        last = [row["elements"] for row in mine if row["step"] == row["steps"]]
        rates = [[row[key] for row in runs] for key in ("strict rate", "whole rate")]
        rates += [[one[0] for one in last], [float(np.mean(one[1:])) for one in last]]
        lines.append([name, str(len(runs)), *map(interval, rates)])
    return grid(("elements shown", "targets", "strict rate", "whole", "first element", "others"), lines, language)


def published_pair(results: Results, language: Language, block: int = MAIN) -> str:
    """`recommended` over the same with AdamW and unions of two, on the targets of a block that both ran."""
    rows = [row for row in block_alone(results.published, block) if usual(row) and row["seed"] == 0]
    arms = {arm: (runs, steps) for (arm, _, steps), runs in by_arm(rows).items()}
    (over, horizon), (mine, _) = arms["recommended_adamw"], arms["recommended"]
    both = [target for target in mine if target in over]

    def mean(of: Callable[[str], float], form: str) -> str:
        return interval([of(target) for target in both], form)

    sooner = times_sooner(over, mine, horizon)
    seen = np.log([first(over[t][0], horizon) / first(mine[t][0], horizon) for t in both])
    rate, drift = (lambda t, key=key: mine[t][0][key] - over[t][0][key] for key in ("strict rate", "drift"))
    lines = [
        ("steps, the earlier evaluation counting for AdamW", ratio(sooner, False), f"{sign_flips(sooner):.4f}"),
        ("steps, the first evaluation that shows it for both", ratio(seen, False), f"{sign_flips(seen):.4f}"),
        ("strict rate at the end, difference", mean(rate, "+.2f"), ""),
        ("drift at the end, difference", mean(drift, "+.4f"), ""),
    ]
    return grid((f"over {len(both)} targets", "figure", "p"), lines, language)


def published_long(results: Results, language: Language) -> str:
    """`recommended_long` over `recommended`, on the targets that both ran."""
    rows = [row for row in frozen_rows(results, LONG) if not row["placebo"]]
    runs = {arm: mine for (arm, _, _), mine in by_arm(rows).items()}
    short, long = (runs.get(arm, {}) for arm in ("recommended", "recommended_long"))
    both = [target for target in long if target in short]
    lines = []
    for key, form in (("strict rate", "+.2f"), ("elements", "+.2f"), ("element similarity", "+.2f"), ("drift", "+.4f")):
        gains = np.array([long[target][0][key] - short[target][0][key] for target in both])
        p = sign_flips(gains)
        lines.append(
            (f"{key} at the end, difference", interval(list(gains), form), f"{p:.4f}" if p >= 1e-4 else "<0.0001")
        )
    return grid((f"over {len(both)} targets", "figure", "p"), lines, language)


def wrapped(text: str, language: Language, width: int = 120) -> str:
    """A paragraph in lines of at most `width`; Chinese has no spaces to break at and stays whole."""
    if language == "zh":
        return text
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return "\n".join([*lines, line]) + "\n"


ARGUMENT_ARMS = ("plain", "region", "unconditional", "pairwise", "recommended_leak_free", "recommended", "gsnr")


def argument(results: Results, language: Language) -> str:
    """The entry page's table: what each part does alone and together."""
    head = ("arm", "runs", "speed-up", "whole", "whole and every element, at most", "drift")
    lines = []
    for arm in map(read, (*ARGUMENT_ARMS, "recommended+gsnr")):
        cells = results.line(arm)
        strict = f"{with_every_element(results.single, arm):.2f}"
        lines.append(
            (
                code(arm),
                cells["runs"],
                cells["speed-up to CIR 50 %"],
                cells["CIR"],
                strict,
                cells["drift, equal CIR"],
            )
        )
    return grid(head, lines, language)


RESULT_ARMS = (
    "plain",
    "plain@4",
    "recommended",
    "recommended_leak_free",
    "recommended_estimated",
    "recommended+gsnr",
    "unconditional",
    "pairwise",
    "region",
    "snr_mixture",
    "leak_free",
    "joint_captions",
    "keys_values",
    "keys_values_placebo",
    "gsnr",
    "auto_rgn",
    "original",
)


def result_table(results: Results, language: Language) -> str:
    """The arms that say most, and the runs with eight targets at once."""
    head = ("arm", "runs", "CIR 50 %", "CIR", "plain's CIR", "elements", "drift", "speed-up", "in seconds")
    measures = ("runs", "CIR 50 %", "CIR", "plain's CIR there", "elements", "drift, equal CIR")
    keys = (*measures, "speed-up to CIR 50 %", "the same in seconds")
    chosen = [((code(arm)), results.line(arm)) for arm in map(read, RESULT_ARMS)]
    for (arm, _), cells in results.lines.items():
        name, _, together = arm.partition(", ")
        if together:
            count = words("targets at once", language)
            number = int(together.split()[0])
            label = f"`{name}`, {number} {count}" if language == "en" else f"`{name}`，{number} {count}"
            chosen.append((label, {**cells, "runs": str(int(cells["runs"]) // number)}))  # a run has all its targets
    lines = [
        (label, *(words("never", language) if cells[key] == "never" else cells[key] for key in keys))
        for label, cells in chosen
    ]
    return grid(head, lines, language)


def strict_table(results: Results, language: Language) -> str:
    """What a stricter endpoint leaves: every element too, and no return below half."""
    head = ("arm", "runs", "whole", "whole and every element, at most", "reached 50 %", "fall back")
    lines = []
    for arm in map(read, RESULT_ARMS):
        cells, (reached, again) = results.line(arm), fall_back(results.single, arm)
        bound = with_every_element(results.single, arm)
        lines.append((code(arm), cells["runs"], cells["CIR"], f"{bound:.2f}", str(reached), str(again)))
    return grid(head, lines, language)


SEED_ARMS = ("recommended", "recommended_leak_free", "recommended+gsnr", "pairwise", "joint_captions", "keys_values")


def seed_table(results: Results, language: Language) -> str:
    """Median speed-up over plain of each seed by itself."""
    seeds = sorted({row["seed"] for row in results.single})
    lines = []
    for arm in map(read, SEED_ARMS):
        medians = []
        for seed in seeds:
            rows = [row for row in results.single if row["seed"] == seed]
            medians.append(f"{speedup(*compared(pairs(rows, PLAIN, arm)))[0]:.2f}")
        lines.append((code(arm), *medians))
    head = (words("arm", language), *(f"{words('seed', language)} {seed}" for seed in seeds))
    return markdown(lines, head)


def over_plain(names: Sequence[str]) -> Callable[[Results, Language], str]:
    """A block: arms over plain."""

    def block(results: Results, language: Language) -> str:
        head = ("arm", "runs", "speed-up", "sooner, later", "CIR", "CIR, difference", "elements, difference", "drift")
        lines = []
        for arm in map(read, names):
            cells = results.over(arm, PLAIN)
            lines.append(
                (code(arm), *counted(cells, language)[:3], results.line(arm)["CIR"], *counted(cells, language)[3:])
            )
        return grid(head, lines, language)

    return block


def over_arms(*couples: tuple[str, str]) -> Callable[[Results, Language], str]:
    """A block: (arm, base) by (arm, base)."""

    def block(results: Results, language: Language) -> str:
        head = ("arm", "over", "runs", "speed-up", "sooner, later", "CIR, difference", "elements, difference", "drift")
        lines = []
        for arm, base in ((read(one), read(other)) for one, other in couples):
            lines.append((code(arm), code(base), *counted(results.over(arm, base), language)))
        return grid(head, lines, language)

    return block


def counted(cells: dict[str, str], language: Language) -> list[str]:
    """Runs, speed-up, sooner and later, differences and drift of a line of OVER."""
    keys = ("runs", "speed-up to CIR 50 %", "sooner, later", "CIR", "elements", "drift, equal CIR")
    sooner = cells["sooner, later"] if language == "en" else cells["sooner, later"].replace(" of ", " / ")
    return [sooner if key == "sooner, later" else cells[key] for key in keys]


RATE_ARMS = (
    "keys_values",
    "keys_values_placebo",
    "prior",
    "gsnr",
    "prior_gsnr",
    "placebo",
    "auto_rgn",
    "inverse_rms",
    "hypergradient",
    "original_as_rate",
    "shrink",
    "original",
    "plain@4",
)
RATE_PAIRS = (
    ("keys_values", "keys_values_placebo"),
    ("keys_values", "plain@4"),
    ("hypergradient", "leak_free"),
    ("recommended+gsnr", "recommended"),
    ("recommended+placebo", "recommended"),
    ("recommended+gsnr", "recommended+placebo"),
    ("recommended+gsnr", "plain@4"),
    ("recommended_leak_free+shrink", "recommended_leak_free"),
)
MEMORY_ARMS = (
    "recommended",
    "recommended_leak_free",
    "recommended_estimated",
    "recommended+gsnr",
    "recommended+placebo",
    "recommended_leak_free+shrink",
    "unconditional",
    "region",
    "region_estimated",
    "snr_mixture",
    "curriculum",
    "learning_progress",
    "leak_free",
    "weakest_first",
    "attention_binding",
    "retention",
    "recommended-snr_mixture",
    "recommended-unconditional",
    "pairwise",
    "recommended_leak_free-snr_mixture",
    "recommended_leak_free-region",
    "region+snr_mixture",
    "leak_free+region+snr_mixture",
    "leak_free+snr_mixture",
    "joint_captions",
    "and_distillation",
    "and_distillation_gated",
)
MEMORY_PAIRS = (
    ("recommended_leak_free", "leak_free+region+snr_mixture"),
    ("recommended", "recommended-unconditional"),
    ("recommended", "recommended_leak_free"),
    ("pairwise", "recommended"),
    ("pairwise", "recommended-unconditional"),
    ("recommended_estimated", "recommended"),
    ("recommended-snr_mixture", "recommended"),
    ("recommended_leak_free-snr_mixture", "recommended_leak_free"),
    ("recommended_leak_free-region", "recommended_leak_free"),
    ("recommended_leak_free+shrink", "recommended_leak_free"),
    ("recommended+gsnr", "recommended"),
)
RESULT_PAIRS = (
    ("recommended", "recommended_leak_free"),
    ("recommended_estimated", "recommended"),
    ("recommended+gsnr", "recommended"),
    ("recommended+placebo", "recommended"),
    ("recommended_leak_free+shrink", "recommended_leak_free"),
    ("keys_values", "keys_values_placebo"),
    ("recommended", "plain@4"),
    ("recommended_leak_free", "plain@4"),
    ("recommended+gsnr", "plain@4"),
    ("keys_values", "plain@4"),
)


def coverage(results: Results, language: Language) -> str:
    """Which arms ran on how many targets, with which seeds, grouped by that."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for single in (True, False):
        rows = [row for row in results.rows if ("," not in row["targets"]) == single]
        for arm, factor in lines_of(rows):
            runs = runs_of(rows, arm, factor)
            seeds = ", ".join(map(str, sorted({seed for of_target in runs.values() for seed in of_target})))
            count = str(len(runs)) if single else f"{len(runs)} {words('targets at once', language)}"
            groups.setdefault((count, seeds, f"{factor:g}e-4"), []).append(f"`{arm}`")
    head = ("targets", "seeds", "lr", "arm")
    return grid(head, [(*key, ", ".join(arms)) for key, arms in groups.items()], language)


# --------------------------------------------------------------------------------------------- the other benchmarks


def rate_cost(results: Results, language: Language) -> str:
    """Seconds and memory of each scale rule beside a step of SD 1.5's UNet."""
    found = results.load("controller")
    step = sum(found["step"].values())
    labels = {"original code path": "the original code path", "its rule, written anew": "its rule, rewritten"}
    lines = [(words("a step without control", language), f"{step:.2f}", "", "")]
    for name, cost in found["control"].items():
        label = words(labels[name], language) if name in labels else f"`{name}`"
        share = f"{100 * cost['seconds'] / step:.2f} %"
        lines.append((label, f"{cost['seconds']:.4f}", share, f"{cost['extra_mib']:.0f} MiB"))
    machine = found["machine"]
    size, device, threads = found["parameters"] / 1e6, machine["device"], machine["threads"]
    if language == "en":
        text = (
            f"Median seconds on one machine ({device}, threads: {threads}, fp32, batch 1 at 64x64 latents, "
            f"{size:.1f} M parameters; processor time on a CPU), from `bench/results/controller.json`:"
        )
    else:
        text = (
            f"一台机器上的秒数中位数（{device}，线程数 {threads}，fp32，批大小 1，64x64 潜变量，{size:.1f} M 参数；"
            f"CPU 上为处理器时间），出自 `bench/results/controller.json`："
        )
    head = ("path", "seconds a step", "share of the step", "extra memory")
    return wrapped(text, language).rstrip("\n") + "\n\n" + grid(head, lines, language)


def throughput(results: Results, language: Language) -> str:
    """Our training loop against a plain one."""
    found = results.load("throughput")["places"]
    lines: list[tuple[str, ...]] = [
        (name, f"{row['images_a_second']:.1f}", f"{row['over_plain']:.2f}", f"{row['peak_mib']:.0f} MiB")
        for place in found.values()
        for name, row in place.get("rows", {}).items()
    ]
    table = markdown(lines, ("loop", "images a second", "over the plain loop", "peak memory"))
    return table + "\n" + "\n".join(goals(place["goals"]) for place in found.values() if "goals" in place)


def goals(met: dict[str, bool]) -> str:
    """Which goals a benchmark meets, as a list."""
    return "".join(f"- goal {'met' if ok else 'missed'}: {goal}\n" for goal, ok in met.items())


def scale(results: Results, language: Language) -> str:
    """Start-up by number of records."""
    found = results.load("scale")
    lines: list[tuple[str, ...]] = [
        (
            f"{row['start']['records']:,}",
            f"{row['indexing']['seconds']:.1f} s",
            f"{row['start']['seconds']:.1f} s",
            f"{row['start']['mib_after_draws']:.0f} MiB",
        )
        for row in found["rows"]
    ]
    table = markdown(lines, ("records", "first start (indexes)", "later starts", "own memory"))
    return table + "\n" + goals(found["goals"])


def scan_scale(results: Results, language: Language) -> str:
    """Seconds and memory of a scan by number of pictures."""
    rows = results.load("scan-scale")["rows"]
    head = ("pictures", "minutes", "processor minutes", "own memory", "sets found, hidden", "records flagged, right")
    lines: list[tuple[str, ...]] = [
        (
            f"{row['records']:,}",
            f"{row['seconds'] / 60:.1f}",
            f"{row['processor_seconds'] / 60:.1f}",
            f"{row['own_mib']} MiB",
            f"{row['sets']}, {row['hidden']}",
            f"{row['right'] + row['wrong']}, {row['right']} of {row['elements']}",
        )
        for row in rows
    ]
    return markdown(lines, head)


def validation(results: Results, language: Language) -> str:
    """CPU time of the recovery hook against the published ways, and how equal its scores are."""
    found = results.load("validation")
    lines = list[tuple[str, ...]]()
    for name, spent in found["cpu_seconds"].items():
        row = [name, f"{median(spent) / found['images']:.3f}"]
        if name in found["ratios"]:
            ratio, own = found["ratios"][name], found["quality"][name]
            row += [f"{ratio['one by one']:.2f}", f"{ratio['five a call']:.2f}", f"{own['largest_difference']:.1e}"]
            row += [f"{own['mean_difference']:.1e}", f"{100 * own['strict_agree']:.0f} %"]
        lines.append((*row, *[""] * (7 - len(row))))
    head = ("way", "CPU seconds an image", "times one by one", "times five a call")
    table = markdown(lines, (*head, "largest difference", "mean difference", "strict decisions alike"))
    ratio = found["ratios"]["hook"]
    reached = {f"at least {found['bar']:g} times {way}, in fp32": ratio[way] >= found["bar"] for way in ratio}
    share = f"\nOf the hook's CPU time {100 * found['backbone_share']:.0f} % is the backbone's.\n\n"
    return table + share + goals(reached)


def judge(results: Results, language: Language) -> str:
    """Two sentences on what the copy detector lets pass, beside the earlier one."""
    found = fresh(results.load("instrument"))

    def rate(column: str, kind: str) -> str:
        cell = instrument.rate_of(found, column, kind, "strict")
        assert cell is not None, kind
        return f"{cell[0]:.2f}"

    whole = instrument.rate_of(found, "today", "recoloured", "whole")
    assert whole is not None, "the earlier detector has a rate"
    count = len(found["targets"])
    copies, recoloured, missing = rate("new", "copy"), rate("new", "recoloured"), rate("new", "missing")
    if language == "en":
        text = (
            f"On {count} fresh targets {copies} of true copies pass. Of pictures with one thing "
            f"recoloured {recoloured} pass (by the whole alone, earlier: {whole[0]:.2f}), with one missing {missing}.\n"
        )
    else:
        text = (
            f"在未用于任何选择的 {count} 个目标上，真正的副本有 {copies} 通过。"
            f"一物变色的图像有 {recoloured} 通过（早先只看整图为 {whole[0]:.2f}），缺一物的有 {missing}。\n"
        )
    return wrapped(text, language)


def fresh(found: dict) -> dict:
    """Of the instrument's results those on targets that were met once."""
    return {**found, "targets": {name: t for name, t in found["targets"].items() if int(name) >= instrument.FRESH}}


def judge_table(results: Results, language: Language) -> str:
    """What the copy detector lets pass, by kind of picture, and the room that each kind of element has."""
    found = results.load("instrument")
    once = fresh(found)
    whole, element, strict = (rate_of_copies(once, level) for level in ("whole", "element", "strict"))
    text = (
        f"{len(found['targets'])} targets. Of true copies on the {len(once['targets'])} that were met once, from "
        f"{instrument.FRESH} on, {whole} pass whole, {element} by element and {strict} strictly."
    )
    return f"{wrapped(text, language)}\n\n{instrument.table(found)}\n\n{instrument.by_element(found)}\n"


def rate_of_copies(found: dict, level: str) -> str:
    """With its interval."""
    cell = instrument.rate_of(found, "new", "copy", level)
    assert cell is not None, "copies were measured"
    return f"{cell[0]:.2f} [{cell[1]:.2f}, {cell[2]:.2f}]"


def nulls_table(results: Results, language: Language) -> str:
    """The same images under few and under enough nulls."""
    return nulls.table(stored(results.folder / nulls.RESULTS.name)) + "\n"


def threshold_table(results: Results, language: Language) -> str:
    """Thresholds from renders and from counterfactuals, side by side."""
    found = results.load("thresholds")
    return f"{len(found['targets'])} targets.\n\n{thresholds.table(found)}\n"


def shield(results: Results, language: Language) -> str:
    """What the scan finds at each ratio, and under which changes."""
    return table(results.load("shield"))


def shield_attribution(results: Results, language: Language) -> str:
    """The scan beside two rivals that attribute a trained model's images."""
    return attribution.table(stored(results.folder / attribution.RESULTS.name)) + "\n"


def shield_audit(results: Results, language: Language) -> str:
    """How well the audit tells models that remember from others."""
    return audit_table(stored(results.folder / "shield-audit.jsonl"))


def shield_guard_cost(results: Results, language: Language) -> str:
    """What each guard costs a step."""
    return guard_cost.table(results.load("guard"))


def shield_guards(results: Results, language: Language) -> str:
    """What each guard leaves of a recovery, and what it costs."""
    return guard_table(stored(results.folder / "shield-guards.jsonl"))


def published(results: Results, language: Language) -> str:
    """Development runs at guidance 3 at their last step, each on one seed."""
    lines, early = [], [row for row in results.published if "guidance" not in row]
    for (_, target, arm, *_), rows in sorted(published_runs(early).items()):
        f = figures(rows)
        reached = words("never", language) if f["all elements"] is None else f"{f['all elements']}"
        rates = (
            f"{f[key]:.2f}" for key in ("strict rate", "whole rate", "elements", "similarity", "element similarity")
        )
        lines.append((target, f"`{arm}`", reached, *rates, f"{f['drift']:.4f}"))
    head = ("target", "arm", "every element from step", "strict rate", "whole", "elements", "similarity", "of elements")
    return grid((*head, "drift"), lines, language)


BLOCKS: dict[str, Block] = {
    "readme": readme,
    "argument": argument,
    "results": result_table,
    "strict": strict_table,
    "seeds": seed_table,
    "pairs": over_arms(*RESULT_PAIRS),
    "coverage": coverage,
    "rates": over_plain(RATE_ARMS),
    "rate-pairs": over_arms(*RATE_PAIRS),
    "rate-cost": rate_cost,
    "memory": over_plain(MEMORY_ARMS),
    "memory-pairs": over_arms(*MEMORY_PAIRS),
    "throughput": throughput,
    "scale": scale,
    "validation": validation,
    "judge": judge,
    "judge-table": judge_table,
    "nulls": nulls_table,
    "threshold-table": threshold_table,
    "published": published,
    "published-results": published_results,
    "published-results-few": partial(published_results, block=FEW_NULLS),
    "published-results-first": partial(published_results, block=FIRST_TARGETS[0]),
    "published-results-long": partial(published_results, block=LONG),
    "published-long": published_long,
    "published-over": published_over,
    "published-pair": published_pair,
    "published-pair-few": partial(published_pair, block=FEW_NULLS),
    "stealth": stealth_table,
    "withheld": withheld,
    "published-k": published_k,
    "published-ratio": published_ratio,
    "published-ceiling": published_ceiling,
    "published-paper": published_paper,
    "published-clean": published_clean,
    "published-seeds": published_seeds,
    "published-seeds-few": partial(published_seeds, block=FEW_NULLS),
    "published-together": published_together,
    "published-together-few": partial(published_together, block=FEW_NULLS),
    "published-together-long": partial(published_together, block=LONG, arm="recommended_long"),
    "published-sixteen": partial(published_together, block=LONG),
    "published-seeds-long": partial(published_seeds, block=LONG, arm="recommended_long"),
    "published-clean-long": partial(published_clean, block=LONG),
    "strength": by_strength,
    "strength-elements": by_elements,
    "between": between_frontier,
    "between-over": between_over,
    "layerwise": layerwise_runs,
    "layerwise-over": layerwise_over,
    "scan-scale": scan_scale,
    "shield": shield,
    "shield-attribution": shield_attribution,
    "shield-audit": shield_audit,
    "shield-guard-cost": shield_guard_cost,
    "shield-guards": shield_guards,
}

# --------------------------------------------------------------------------------------------------------- documents

MARKED = re.compile(r"^<!-- generated: (?P<name>\S+) -->\n(?P<body>.*?)^<!-- /generated -->$", re.M | re.S)


def documents(root: Path = ROOT) -> list[Path]:
    """The Markdown files that may have generated blocks."""
    return sorted([*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("research/*.md")])


def language_of(path: Path) -> Language:
    """By the file's name: README.zh-CN.md is Chinese."""
    return "zh" if path.name.endswith(".zh-CN.md") else "en"


def filled(text: str, name: str, language: Language, results: Results) -> tuple[str, list[str]]:
    """A document with its blocks computed again, and the names of those that changed."""
    starts, ends = text.count("\n<!-- generated: "), text.count("\n<!-- /generated -->")
    if starts != ends or starts != len(MARKED.findall(text)):
        raise SystemExit(f"error: {name}: {starts} lines open a generated block and {ends} close one")
    stale = []

    def again(found: re.Match) -> str:
        key = found["name"]
        if key not in BLOCKS:
            raise SystemExit(f"error: {name}: no block '{key}'; there are: {', '.join(BLOCKS)}")
        body = "\n" + BLOCKS[key](results, language) + "\n"
        if body != found["body"]:
            stale.append(key)
        return f"<!-- generated: {key} -->\n{body}<!-- /generated -->"

    return MARKED.sub(again, text), stale


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a block is stale")
    args = parser.parse_args(argv)
    results, code = Results(), 0
    for path in documents():
        name = path.relative_to(ROOT).as_posix()
        text, stale = filled(path.read_text(encoding="utf-8"), name, language_of(path), results)
        for block in stale:
            print(f"{name}: {block}: {'stale; python -m bench.documents fills it again' if args.check else 'filled'}")
        if stale and args.check:
            code = 1
        elif stale:
            path.write_text(text, encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
