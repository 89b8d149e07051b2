"""The scan command: views of a data set, the search, and what it writes.

<output_dir>/scan.json     what was found, with every record by index and by file and line
<output_dir>/scan.html     the same to read, in one file
<output_dir>/composite-1.png ...  the hidden pictures as far as they are known
<output_dir>/mask-1-1.png ...  where each element of a set recurs
<output_dir>/clean.jsonl   the metadata without the suspect records
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from silentbad import owned
from silentbad.data.published import as_trained
from silentbad.data.schema import csv_lines, json_lines
from silentbad.errors import UserError, warn, writing
from silentbad.files import check_writable, replace_text
from silentbad.report import pages
from silentbad.report.pages import Table, png, shot
from silentbad.settings.startup import options as read_options
from silentbad.settings.startup import refused
from silentbad_shield import scan_file
from silentbad_shield.options import ScanOptions
from silentbad_shield.scan.composite import MOST
from silentbad_shield.scan.engines import opened
from silentbad_shield.scan.find import Composite, Findings, draw, pictures_needed, search
from silentbad_shield.scan.plan import Plan
from silentbad_shield.scan.record_parts import PART, RecordPart, key_of, parts_of
from silentbad_shield.scan.scan_folder import Store
from silentbad_shield.scan.suspect_sets import SuspectSet
from silentbad_shield.scan.views import FOLDER, LeftOut
from silentbad_shield.scan_file import PICTURE

SCHEMA = 1
TEMPLATES = Path(__file__).parent / "templates"
SHOWN = 200  # records of a set in the page


# -- what was found, as data -----------------------------------------------------------------------
def described(
    findings: Findings,
    where: dict[int, str],
    options: ScanOptions,
    texts: Sequence[str],
    left_out: list[LeftOut],
) -> dict:
    """scan.json."""
    sets = []
    for k, (suspect_set, composite) in enumerate(
        zip(findings.sets, findings.composites, strict=True)
    ):
        elements = [
            element_row(suspect_set, i, composite, where) for i in range(len(suspect_set.elements))
        ]
        for i, element in enumerate(elements):
            element["mask"] = f"mask-{k + 1}-{i + 1}.png"
        sets.append(
            {
                "prompt": suspect_set.prompt,
                "score": round(suspect_set.score, 2),
                "false_alarm": findings.alarms[k] if findings.alarms else None,
                "composite": f"composite-{k + 1}.png",
                "known": round(float(composite.known.mean()), 4),
                "elements": elements,
            }
        )
    recurring = [
        {"phrase": e.phrase, "records": len(e.group.records), "share": round(e.group.share, 4)}
        for e in findings.recurring
    ]
    suspects = [
        {"index": i, "file": where[i], "text": as_trained(texts[i])[0]}
        for i in findings.records.tolist()
    ]
    return {
        "schema": SCHEMA,
        "source": options.dataset_name or options.train_data_dir,
        "records": len(texts),
        "captions": scan_file.digest(as_trained(text)[0] for text in texts),
        "found": bool(sets),
        "suspects": suspects,
        "sets": sets,
        "recurring": recurring,
        "permutations": options.permutations,
        "left_out": left_out,
    }


def element_row(
    suspect_set: SuspectSet, i: int, composite: Composite, where: dict[int, str]
) -> dict[str, Any]:
    """An element of a set; `region` is its box in shares of the frame: left, top, right, bottom."""
    element = suspect_set.elements[i]
    records = suspect_set.records[i].tolist()
    region = composite.parts[i].region
    box = []
    if region.any():
        ys, xs = np.nonzero(region)
        ends = (xs.min(), ys.min(), xs.max() + 1, ys.max() + 1)
        box = [round(float(end) / PICTURE, 4) for end in ends]
    return {
        "phrase": element.phrase,
        "records": records,
        "files": [where[record] for record in records],
        "association": round(element.association, 2),
        "isolation": round(element.group.isolation, 2),
        "backdrop": element.group.wide,
        "region": box,
        "share": round(float(region.mean()), 4),
    }


# -- files -----------------------------------------------------------------------------------------
def page(findings: Findings, data: dict) -> str:
    """scan.html."""
    cards = []
    for composite, row in zip(findings.composites, data["sets"], strict=True):
        shots = [shot(composite.picture, "reconstructed", "grey: not known")]
        for part, element in zip(composite.parts, row["elements"], strict=True):
            pixels = np.where(part.region[..., None], part.pixels, 128).astype(np.uint8)
            shots.append(shot(pixels, element["phrase"], f"{len(element['records'])} records"))
        head = ["phrase", "records", "share of the frame", "association, nats", "isolation, nats"]
        rows = [
            [e["phrase"], len(e["records"]), e["share"], e["association"], e["isolation"]]
            for e in row["elements"]
        ]
        files = [[file, e["phrase"]] for e in row["elements"] for file in e["files"]]
        card = {key: row[key] for key in ("prompt", "score", "false_alarm", "known")}
        card |= {"records": len(files), "shots": shots, "table": Table(head, rows)}
        card["files"] = Table(["record", "phrase"], files[:SHOWN])
        cards.append(card)
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


def metadata_rows(options: ScanOptions, parts: list[RecordPart]) -> Iterator[tuple[str, dict]]:
    """(where, entry) of the metadata; of other sources, what a metadata.jsonl would hold."""
    root = Path(options.train_data_dir or "")
    named = partial(csv_lines, needed=options.image_column or "file_name")
    readers: dict[str, Callable] = {"metadata.jsonl": json_lines, "metadata.csv": named}
    for place in (root / name for name in (*readers, *(f"train/{name}" for name in readers))):
        if options.dataset_name is None and place.is_file():
            yield from readers[place.name](place)
            return
    names = ("text", "phrases", "role", "target_id", "element_id")
    number = 0
    for part in parts:
        with suppress(UserError) if options.skip_unreadable else nullcontext():
            for row in part.rows():
                fields = {name: row[name] for name in names if row.get(name)}
                files = {"file_name": row["image"]["path"], "mask": row["mask"]}
                if options.train_data_dir:  # as its metadata.jsonl would name them
                    files = {
                        key: os.path.relpath(file, root) for key, file in files.items() if file
                    }
                yield row["where"], {"index": number, **files, **fields}
                number += 1


PICTURES = r"composite-\d+\.png|mask-\d+-\d+\.png"
WRITTEN = ("scan.json", "scan.html", "clean.jsonl", FOLDER)


def write(
    out: Path, findings: Findings, data: dict, options: ScanOptions, parts: list[RecordPart]
) -> None:
    """All files, clean.jsonl last. Raises UserError where one cannot be written."""
    removed = {row["file"] for row in (*data["suspects"], *data["left_out"])}
    with writing("--output_dir", str(out)):
        scan_file.remove_earlier(out / "scan.json", PICTURES)
        for row, composite in zip(data["sets"], findings.composites, strict=True):
            (out / row["composite"]).write_bytes(png(composite.picture))
            for part, element in zip(composite.parts, row["elements"], strict=True):
                (out / element["mask"]).write_bytes(png(255 * part.region.astype(np.uint8)))
        (out / "scan.html").write_text(page(findings, data), encoding="utf-8")
        replace_text(out / "scan.json", json.dumps(data, indent=1, ensure_ascii=False) + "\n")
        draft = out / "clean.jsonl.tmp"
        with draft.open("w", encoding="utf-8") as lines:
            for where, entry in metadata_rows(options, parts):
                if where not in removed:
                    lines.write(json.dumps(entry, ensure_ascii=False) + "\n")
        draft.replace(out / "clean.jsonl")


# -- the command -----------------------------------------------------------------------------------
def scan(options: ScanOptions) -> dict:
    """Scan, write, and return what scan.json holds. Raises UserError."""
    out = Path(options.output_dir)
    check_writable(out, "--output_dir", folder=True)
    data_dir = options.train_data_dir
    if data_dir and out.resolve().is_relative_to(Path(data_dir).resolve()):
        raise UserError(
            f"--output_dir: {out} lies in the data, which must not change; name a "
            f"folder outside of it"
        )
    key, rows = key_of(options)
    pictures = [file.name for file in out.glob("*.png") if re.fullmatch(PICTURES, file.name)]
    with owned.claimed(out, "scan", key="--output_dir", writes=(*WRITTEN, *pictures)):
        with writing("--output_dir", str(out)):
            owned.mark(out, "scan")
        folder = opened_folder(out / FOLDER, key, options)
        with opened(options) as engine, writing("--output_dir", str(folder)):
            plan = Plan(folder, engine, options.seed)
            try:
                parts = parts_of(options, rows, folder / "rows")
                left_out = plan.read(parts, key, options.skip_unreadable)
                if not len(plan.store):
                    raise UserError("train_data_dir: holds no record")
            except UserError:  # of the data: nothing to go on from
                plan.store.remove()
                raise
            findings = search(plan, options.permutations)
            where, shown = plan.pictures(
                parts,
                findings.records,
                pictures_needed(findings, MOST),
                [e["file"] for e in left_out],
            )
        draw(findings, shown.__getitem__)
        data = described(findings, where, options, plan.store.texts, left_out)
        write(out, findings, data, options, parts)
        plan.store.remove()
    return data


def opened_folder(folder: Path, data_key: str, options: ScanOptions) -> Path:
    """The folder of a scan; one of other data or options is emptied. Raises UserError where it
    cannot be written."""
    key = f"{data_key} {PART} {options.seed} {options.skip_unreadable}"
    file = folder / "key"
    with writing("--output_dir", str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
        if not file.is_file() or file.read_text(errors="replace") != key:
            Store(folder).remove()
            folder.mkdir(exist_ok=True)
            file.write_text(key)
    return folder


def main(arguments: list[str] | None = None, options: ScanOptions | None = None) -> int:
    """Exit code 0 where nothing is found, 3 where something is, 2 after a mistake."""
    try:
        options = options or read_options(ScanOptions, arguments)
        data = scan(options)
    except UserError as error:
        return refused(error)
    for row in data["sets"]:
        count = sum(len(element["records"]) for element in row["elements"])
        print(f"found: {row['prompt']} ({count} records, false-alarm rate {row['false_alarm']})")
    for row in data["left_out"]:
        warn(f"left out: {row['why']}")
    print(
        f"{len(data['sets'])} hidden pictures in {data['records']} records; "
        f"{options.output_dir}/scan.html"
    )
    return 3 if data["found"] else 0
