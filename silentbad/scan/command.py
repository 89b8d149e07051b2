"""The scan command: views of a data set, the search, and what it writes.

<output_dir>/scan.json     what was found, with every record by index and by file and line
<output_dir>/scan.html     the same to read, in one file
<output_dir>/composite-1.png ...  the hidden pictures as far as they are known
<output_dir>/mask-1-1.png ...  where each element of a set recurs
<output_dir>/clean.jsonl   the metadata without the suspect records
"""

import argparse
import json
import re
import time
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from silentbad import owned
from silentbad.data import scan_file
from silentbad.data.published import is_published
from silentbad.data.records import PUBLISHED_FLAGS, row_source
from silentbad.data.schema import csv_lines, json_lines
from silentbad.errors import ArgumentParser, UserError, print_error, writing
from silentbad.files import check_writable, path_argument, path_text, remove_earlier, replace_text
from silentbad.progress import Bar
from silentbad.report import pages
from silentbad.report.pages import Table, png, shot
from silentbad.scan.composite import MOST
from silentbad.scan.find import Composite, Found, draw, find, pictures_needed
from silentbad.scan.sets import SuspectSet
from silentbad.scan.views import FOLDER, Views, picture_of
from silentbad.settings.train import TrainConfig
from silentbad.settings.types import problem

SCHEMA = 1
TEMPLATES = Path(__file__).parent / "templates"
SHOWN = 200  # records of a set in the page


HINTS = typing.get_type_hints(TrainConfig, include_extras=True)
# The flags of the published layout alone, each with training's range and default.
PUBLISHED = {flag: (HINTS[flag], getattr(TrainConfig, flag)) for flag in PUBLISHED_FLAGS if flag != "seed"}


def progress(items: Iterable, what: str, total: int) -> Iterable:
    """A bar on stderr."""
    return Bar(items, desc=what, total=total or None)


# -- what was found, as data -----------------------------------------------------------------------------------
def described(
    found: Found, where: dict[int, str], options: argparse.Namespace, texts: list[str], seconds: float
) -> dict:
    """scan.json."""
    sets = []
    for k, (one, composite) in enumerate(zip(found.sets, found.composites, strict=True)):
        sets.append(
            {
                "prompt": one.prompt,
                "score": round(one.score, 2),
                "false_alarm": found.alarms[k] if found.alarms else None,
                "composite": f"composite-{k + 1}.png",
                "known": round(float(composite.known.mean()), 4),
                "elements": [
                    element_row(one, i, composite, where) | {"mask": f"mask-{k + 1}-{i + 1}.png"}
                    for i in range(len(one.elements))
                ],
            }
        )
    recurring = [
        {"phrase": e.phrase, "records": len(e.group.records), "share": round(e.group.share, 4)} for e in found.recurring
    ]
    return {
        "schema": SCHEMA,
        "source": options.dataset_name or options.train_data_dir,
        "records": len(texts),
        "captions": scan_file.digest(texts),
        "found": bool(sets),
        "suspects": [{"index": int(i), "file": where[int(i)], "text": texts[i]} for i in found.records],
        "sets": sets,
        "recurring": recurring,
        "permutations": options.permutations,
        "seconds": round(seconds, 1),
    }


def element_row(one: SuspectSet, i: int, composite: Composite, where: dict[int, str]) -> dict[str, Any]:
    """An element of a set; `region` is its box in shares of the frame: left, top, right, bottom."""
    element, records, region = one.elements[i], one.records[i], composite.parts[i].region
    ys, xs = np.nonzero(region)
    box = [xs.min() / 64, ys.min() / 64, (xs.max() + 1) / 64, (ys.max() + 1) / 64] if len(xs) else []
    return {
        "phrase": element.phrase,
        "records": [int(r) for r in records],
        "files": [where[int(r)] for r in records],
        "association": round(element.association, 2),
        "isolation": round(element.group.isolation, 2),
        "backdrop": element.group.wide,
        "region": [round(float(v), 4) for v in box],
        "share": round(float(region.mean()), 4),
    }


# -- files -----------------------------------------------------------------------------------------------------
def page(found: Found, data: dict) -> str:
    """scan.html."""
    cards = []
    for composite, row in zip(found.composites, data["sets"], strict=True):
        shots = [shot(composite.picture, "reconstructed", "grey: not known")]
        for part, element in zip(composite.parts, row["elements"], strict=True):
            pixels = np.where(part.region[..., None], part.pixels, 128).astype(np.uint8)
            shots.append(shot(pixels, element["phrase"], f"{len(element['records'])} records"))
        head = ["phrase", "records", "share of the frame", "association, nats", "isolation, nats"]
        rows = [[e["phrase"], len(e["records"]), e["share"], e["association"], e["isolation"]] for e in row["elements"]]
        files = [[file, e["phrase"]] for e in row["elements"] for file in e["files"]]
        card = {key: row[key] for key in ("prompt", "score", "false_alarm", "known")}
        cards.append(
            card
            | {"records": len(files), "shots": shots}
            | {"table": Table(head, rows), "files": Table(["record", "phrase"], files[:SHOWN])}
        )
    recurring = [[r["phrase"], r["records"], r["share"]] for r in data["recurring"]]
    values = {
        "name": Path(data["source"]).name or data["source"],
        "records": data["records"],
        "suspects": len(data["suspects"]),
        "draws": data["permutations"],
        "cards": cards,
        "recurring": Table(["phrase", "records", "share of the frame"], recurring),
    }
    return pages.render("scan.html.j2", values, TEMPLATES)


def metadata_rows(options: argparse.Namespace, rows: Any) -> Iterator[dict]:
    """The entries of the metadata as they stand; of other sources, what a metadata.jsonl would hold."""
    root = Path(options.train_data_dir or "")
    if options.dataset_name is None and (root / "metadata.jsonl").is_file():
        yield from (entry for _, entry in json_lines(root / "metadata.jsonl"))
    elif options.dataset_name is None and (root / "metadata.csv").is_file():
        yield from (entry for _, entry in csv_lines(root / "metadata.csv"))
    else:
        names = ("text", "phrases", "role", "target_id", "element_id")
        for number, row in enumerate(rows()):
            path = row["image"]["path"]
            yield {"index": number, "file_name": path} | {name: row[name] for name in names if row.get(name)}


PICTURES = r"composite-\d+\.png|mask-\d+-\d+\.png"
WRITTEN = ("scan.json", "scan.html", "clean.jsonl", FOLDER)


def write(out: Path, found: Found, data: dict, options: argparse.Namespace, rows: Any) -> None:
    """All files, clean.jsonl last. Raises UserError where one cannot be written."""
    suspect = {row["index"] for row in data["suspects"]}
    with writing("--output_dir", str(out)):
        remove_earlier(out / "scan.json", PICTURES)
        for row, composite in zip(data["sets"], found.composites, strict=True):
            (out / row["composite"]).write_bytes(png(composite.picture))
            for part, element in zip(composite.parts, row["elements"], strict=True):
                (out / element["mask"]).write_bytes(png(255 * part.region.astype(np.uint8)))
        (out / "scan.html").write_text(page(found, data), encoding="utf-8")
        replace_text(out / "scan.json", json.dumps(data, indent=1, ensure_ascii=False) + "\n")
        draft = out / "clean.jsonl.tmp"
        with draft.open("w", encoding="utf-8") as lines:
            for number, entry in enumerate(metadata_rows(options, rows)):
                if number not in suspect:
                    lines.write(json.dumps(entry, ensure_ascii=False) + "\n")
        draft.replace(out / "clean.jsonl")


# -- the command -----------------------------------------------------------------------------------------------
def scan(options: argparse.Namespace) -> dict:
    """Scan, write, and return what scan.json holds. Raises UserError where the data or the output is at fault."""
    if (options.train_data_dir is None) == (options.dataset_name is None):
        raise UserError("train_data_dir: give either --train_data_dir or --dataset_name")
    if not 0 <= options.permutations <= 10_000:
        raise UserError(f"--permutations: must be from 0 to 10000, got {options.permutations}")
    if not 0 <= options.seed < 2**63:
        raise UserError(f"--seed: must be from 0 to 2^63 - 1, got {options.seed}")
    for name, (kind, default) in PUBLISHED.items():
        value = getattr(options, name)
        if value != default and (wrong := problem(value, kind)) is not None:
            raise UserError(f"--{name}: {wrong}, got {value}")
    check_idle(options)
    started, out = time.monotonic(), Path(options.output_dir)
    check_writable(out, "--output_dir", folder=True)
    if options.train_data_dir and out.resolve().is_relative_to(Path(options.train_data_dir).resolve()):
        raise UserError(f"--output_dir: {out} lies in the data, which must not change; name a folder outside of it")
    _, key, rows = row_source(options)
    pictures = [file.name for file in out.glob("*.png") if re.fullmatch(PICTURES, file.name)]
    with owned.claimed(out, "scan", key="--output_dir", writes=(*WRITTEN, *pictures)):
        with writing("--output_dir", str(out)):
            owned.mark(out, "scan")
        views = Views(out / FOLDER, key)
        try:
            views.fill(rows, progress)
        except UserError:  # of the data: nothing to go on from
            views.remove()
            raise
        with writing("--output_dir", str(views.folder)):
            found = find(views.pixels, views.captions, progress, options.permutations, options.seed, views.folder)
        wanted, suspects = set(pictures_needed(found, MOST).tolist()), set(found.records.tolist())
        pictures, where = {}, {}
        for number, row in enumerate(rows() if suspects else ()):
            if number in suspects:
                where[number] = row["where"]
            if number in wanted:
                pictures[number] = picture_of(row)
        draw(found, pictures.__getitem__)
        data = described(found, where, options, views.captions, time.monotonic() - started)
        write(out, found, data, options, rows)
        views.remove()
    return data


def check_idle(options: argparse.Namespace) -> None:
    """Refuse flags that act on nothing in this data."""
    data = Path(options.train_data_dir or "")
    layout = is_published(data) or not data.is_dir()  # one that is not there is refused later
    of_layout = [name for name, (_, default) in PUBLISHED.items() if getattr(options, name) != default]
    for names, acts, needed in (
        (of_layout, layout, "train_data_dir of the published layout"),
        (("dataset_config_name", "image_column", "caption_column"), options.dataset_name, "dataset_name"),
    ):
        if not acts and (idle := [name for name in names if getattr(options, name) is not None]):
            raise UserError(f"--{idle[0]}: needs {needed}, without which it has no effect")


def parser() -> argparse.ArgumentParser:
    made = ArgumentParser(
        prog="python -m silentbad.scan",
        description="Find pictures that are dispersed in a data set, from its pictures and captions alone. "
        "Exit code 0: nothing found; 3: a suspect set; 2: a mistake.",
    )
    made.add_argument(
        "--train_data_dir", type=path_text, help="folder with metadata.jsonl or .csv, or of the published layout"
    )
    made.add_argument(
        "--dataset_name", type=path_text, help="Hub data set, or a local one that datasets.load_dataset takes"
    )
    made.add_argument("--dataset_config_name", help="configuration of the Hub data set")
    made.add_argument("--image_column", help="image column of the Hub data set")
    made.add_argument("--caption_column", help="caption column of the Hub data set")
    made.add_argument("--clean_data_dir", type=path_text, help="published layout: folder of the clean images")
    for name, (kind, default) in PUBLISHED.items():
        plain = int if int in typing.get_args(kind) else float
        made.add_argument(f"--{name}", type=plain, default=default, help="published layout: as in training")
    made.add_argument("--cache_dir", type=path_text, help="folder of downloads; the Hugging Face cache when unset")
    made.add_argument("--output_dir", type=path_argument, default=Path("runs/scan"), help="where the results go")
    made.add_argument("--permutations", type=int, default=99, help="of the captions, for the false-alarm rate; 0: none")
    made.add_argument("--seed", type=int, default=0, help="of hashing, permutations and the published layout's choices")
    return made


def main(arguments: list[str] | None = None) -> int:
    """The command line: exit code 0 where nothing is found, 3 where something is, 2 after a mistake."""
    options = parser().parse_args(arguments)
    try:
        data = scan(options)
    except UserError as error:
        print_error(error)
        return 2
    for one in data["sets"]:
        count = sum(len(element["records"]) for element in one["elements"])
        print(f"found: {one['prompt']} ({count} records, false-alarm rate {one['false_alarm']})")
    print(f"{len(data['sets'])} hidden pictures in {data['records']} records; {options.output_dir}/scan.html")
    return 3 if data["found"] else 0
