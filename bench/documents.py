"""Fills the numbers of the documents from bench/results.

    python -m bench.documents            fill every block again
    python -m bench.documents --check    name the stale blocks; exit code 1 if there is one

A block is the text between `<!-- generated: NAME -->` and `<!-- /generated -->`. NAME is a key of
BLOCKS: a function from the stored results to Markdown, which the benchmark that wrote them defines.
In Chinese documents the words of CHINESE replace headings and labels of the same table.
tests/test_docs.py fails if a block is stale.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from bench import (
    card,
    carry,
    emoji_judge,
    headroom,
    instrument,
    judged,
    kept,
    law,
    layers,
    many,
    match,
    photographs,
    photographs_trained,
    published_blocks,
    put_back,
    recovery_blocks,
    reproduce,
    shield_table,
    size,
    spectral,
    stealth,
    theory_table,
)
from bench.recovery import BASES
from bench.recovery_table import RESULTS, Read, stored
from worlds.emoji import export

ROOT = Path(__file__).parents[1]
Block = Callable[[Read], str]

# The words of the tables that users read; English is the key. Names in `code` stay.
CHINESE = {
    "trains": "训练",
    "part": "部分",
    "share": "占改变量的份额",
    "as trained": "训练后",
    "base": "基础模型",
    "of the weights": "占权重",
    "kept for backward": "为反向传播保留",
    "s a step, ratio": "每步秒数之比",
    "arm": "实验臂",
    "targets": "目标数",
    "steps": "步数",
    "recovered": "已还原",
    "strict rate": "严格还原率",
    "whole": "整图",
    "first element": "第一个元素",
    "others": "其余元素",
    "elements shown": "展示的元素",
    "all": "全部",
    "all but the first": "除第一个外全部",
    "picture": "图像",
    "passes": "通过率",
    "by the whole alone": "只看整图",
    "a true copy": "真正的副本",
    "one thing recoloured": "一件东西变色",
    "one thing missing": "缺少一件东西",
    "in other colours": "换了颜色",
    "kept: kinds shown": "保留：展示过的种类",
    "kept: kinds not shown": "保留：未展示的种类",
    "optimizer": "优化器",
    "variant": "变体",
    "things": "物体",
    "backdrop": "背景",
    "score of an element": "元素的得分",
    "AUC, fails below 0.9": "AUC，低于 0.9 为失败",
    "machine over the threshold": "机器的得分减阈值",
    "copy over the threshold": "副本的得分减阈值",
}
COUNT = re.compile(r"^(\d+) of (\d+)\b")


def reader(folder: Path = RESULTS.parent) -> Read:
    """Reads the stored results of a folder by file name, each once: rows of .jsonl, else JSON."""

    @cache
    def read(name: str) -> Any:
        path = folder / name
        return stored(path) if path.suffix == ".jsonl" else json.loads(path.read_text())

    return read


def of(file: Path | str, table: Callable[..., str], *more: Path | str) -> Block:
    """The block of a benchmark whose `table` takes the content of a file, or of several."""
    names = [Path(one).name for one in (file, *more)]
    return lambda read: table(*map(read, names)).rstrip("\n") + "\n"


BLOCKS: dict[str, Block] = {
    **published_blocks.BLOCKS,
    **recovery_blocks.BLOCKS,
    **theory_table.BLOCKS,
    **law.BLOCKS,
    "card": of(card.RESULTS, card.table),
    "reproduce": of(reproduce.RESULTS, reproduce.table),
    "reproduce-dry": of(reproduce.RESULTS, reproduce.dry_table),
    "judge": of("instrument-2812.json", instrument.judge),
    "judge-later": of("instrument-2548.json", partial(instrument.table, only=("today", "new", "ssim"))),
    "judge-chroma": of("instrument-2812.json", partial(instrument.table, only=("new", "alone"))),
    "emoji-audit": of("shield-audit-emoji.jsonl", shield_table.audit_table),
    "emoji-sd": lambda read: export.measured(json.loads((BASES["emoji"] / "measured.json").read_text())),
    "emoji-claims-over": of("emoji-claims.jsonl", layers.compared),
    "emoji-judge-2716": of(emoji_judge.RESULTS, emoji_judge.table),
    "emoji-shield": of("shield-emoji.json", shield_table.world_table),
    "photographs": of(photographs.RESULTS, photographs.table),
    "photographs-trained": of(photographs_trained.RESULTS, photographs_trained.table),
    "photographs-looked": of(photographs_trained.RESULTS, photographs_trained.looked),
    "photographs-example": of(photographs.RESULTS, photographs.example),
    "headroom": of(headroom.RESULTS, headroom.table),
    "kept": of(kept.RESULTS, kept.table),
    "kept-2818": of("kept-2818.jsonl", kept.table),
    "kept-emoji": of("kept-emoji.jsonl", kept.table),
    "kept-emoji-first": of("kept-emoji-first.jsonl", kept.table),
    "kept-briefly": of(kept.RESULTS, kept.briefly),
    "kept-front": of(kept.RESULTS, kept.front),
    "kept-judged": of(judged.rows_of(kept.RESULTS), judged.table, kept.RESULTS),
    "match": of(match.RESULTS, match.rates),
    "match-bases": of(match.RESULTS, match.bases, match.RATES, kept.RESULTS),
    "match-rates": of(match.RATES, match.rates),
    "match-over": of(match.RESULTS, match.differences),
    "match-rates-over": of(match.RATES, partial(match.differences, pairs=match.AT_RATES)),
    "carry": of(carry.RESULTS, carry.table),
    "carry-bases": of(carry.DRAWN, carry.bases, kept.RESULTS),
    "size": of(size.RESULTS, size.table),
    "size-counts": of(size.RESULTS, size.counts),
    "size-peers": of(size.RESULTS, size.peers),
    "size-starts": of(size.RESULTS, size.starts),
    "spectral-cost": of(spectral.OPERATIONS, spectral.by_model),
    "spectral-recovery": of(spectral.RUNS, spectral.recovery),
    "spectral-row-groups": of(spectral.RUNS, spectral.row_groups),
    "stealth": of(stealth.RESULTS, stealth.table),
    "layers": of(layers.RUNS, layers.outcomes),
    "layers-over": of(layers.RUNS, layers.compared),
    "layers-sooner": of(layers.RUNS, layers.sooner, layers.STEP),
    "layers-patterns": of(layers.STEP, layers.patterns_table),
    "shield": of("shield.json", shield_table.table),
    "shield-audit": of("shield-audit.jsonl", shield_table.audit_table),
    "shield-guards": of("shield-guards.jsonl", shield_table.guard_table),
    "many": many.at_once,
    "many-differences": many.differences,
    "many-sequence": many.by_stage,
    "localise": of(put_back.QUICKSTART, put_back.quickstart_table),
    "put-back": of("put-back.jsonl", shield_table.put_back_table),
}

MARKED = re.compile(r"^<!-- generated: (?P<name>\S+) -->\n(?P<body>.*?)^<!-- /generated -->$", re.M | re.S)


def documents(root: Path = ROOT) -> list[Path]:
    """The Markdown files that may have generated blocks."""
    folders = ("", "docs/", "docs/zh/", "research/")
    return sorted(path for folder in folders for path in root.glob(f"{folder}*.md"))


def is_chinese(path: Path) -> bool:
    """README.zh-CN.md and what lies in docs/zh."""
    return path.name.endswith(".zh-CN.md") or path.parent.name == "zh"


def translated(cell: str) -> str:
    """A cell in Chinese: a word of CHINESE, or `22 of 24` as 22/24."""
    cell = COUNT.sub(r"\1/\2", cell)
    return CHINESE.get(cell, cell)


def chinese(table: str) -> str:
    """A table with its words in Chinese; a heading without one is an error."""
    lines = []
    for place, line in enumerate(table.splitlines()):
        cells = line.strip("|").split(" | ") if line.startswith("| ") else []
        for cell in map(str.strip, cells):
            if place == 0 and cell not in CHINESE:
                raise SystemExit(f"error: bench/documents.py: CHINESE has no word for '{cell}'")
        cells = [translated(cell.strip()) for cell in cells]
        lines.append("| " + " | ".join(cells) + " |" if cells else line)
    return "\n".join(lines) + "\n"


def filled(text: str, path: Path, read: Read) -> tuple[str, list[str]]:
    """A document with its blocks computed again, and the names of those that changed."""
    starts, ends = text.count("\n<!-- generated: "), text.count("\n<!-- /generated -->")
    if starts != ends or starts != len(MARKED.findall(text)):
        raise SystemExit(f"error: {path.name}: {starts} lines open a generated block and {ends} close one")
    stale = []

    def again(block: re.Match) -> str:
        name = block["name"]
        if name not in BLOCKS:
            raise SystemExit(f"error: {path.name}: no block '{name}'; there are: {', '.join(BLOCKS)}")
        table = BLOCKS[name](read)
        body = f"\n{chinese(table) if is_chinese(path) else table}\n"
        if body != block["body"]:
            stale.append(name)
        return f"<!-- generated: {name} -->\n{body}<!-- /generated -->"

    return MARKED.sub(again, text), stale


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a block is stale")
    args = parser.parse_args(argv)
    read, code = reader(), 0
    for path in documents():
        text, stale = filled(path.read_text(encoding="utf-8"), path, read)
        for block in stale:
            todo = "stale; python -m bench.documents fills it again" if args.check else "filled"
            print(f"{path.relative_to(ROOT).as_posix()}: {block}: {todo}")
        if stale and args.check:
            code = 1
        elif stale:
            path.write_text(text, encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
