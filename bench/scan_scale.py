"""Time and memory of a scan against the number of pictures: `python -m bench.scan_scale [--pictures 10000 100000]`.

Each size is a data set of the microworld on disk, clean scenes and four hidden pictures of 20 records an element, which
`python -m silentbad.scan` then reads in a process of its own, as a user would start it. Seconds are wall clock and
processor time. Memory is the most that the process held of its own (RssAnon, asked twice a second), without the mapped
views, which the kernel takes back when it needs them. The goal: 100,000 pictures in 20 minutes on two cores.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from bench.recovery import drawing, facts, words
from bench.recovery_table import grid, stored

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "scan-scale.json"
WORK = ROOT / "runs" / "scan-scale"
HIDDEN = ("500", "501", "502", "503")  # development targets
RECORDS = 20  # of an element
MINUTES = 20.0  # of the largest size


def data_of(pictures: int) -> Path:
    """A data set of so many clean pictures beside the hidden ones, made once."""
    out = WORK / f"data-{pictures}-{drawing()}"
    if not out.is_dir():
        asked = {"out": out, "targets": ",".join(HIDDEN), "clean": pictures, "images_per_phrase": RECORDS}
        make = [sys.executable, "-m", "silentbad.worlds.microworld.make", *words(asked), "--redraws", "0", "--no_masks"]
        subprocess.run(make, cwd=ROOT, check=True)
    return out


def anonymous(pid: int) -> float:
    """MiB that a process holds of its own; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon")), 0.0)


def measured(pictures: int) -> dict:
    """One scan, watched from outside."""
    data, out = data_of(pictures), WORK / f"scan-{os.getpid()}"
    before, start, most = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter(), 0.0
    scan = subprocess.Popen(
        [sys.executable, "-m", "silentbad.scan", "--train_data_dir", str(data), "--output_dir", str(out)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    while scan.poll() is None:
        most = max(most, anonymous(scan.pid))
        time.sleep(0.5)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if scan.returncode not in (0, 3):
        raise SystemExit(f"the scan stopped with exit code {scan.returncode}")
    found = json.loads((out / "scan.json").read_text())
    suspects = {row["file"] for row in found["suspects"]}
    return {
        "records": found["records"],
        "seconds": round(seconds, 1),
        "processor_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "own_mib": round(most),
        "sets": len(found["sets"]),
        "hidden": len(HIDDEN),
        **flagged(data, suspects),
    }


def flagged(data: Path, suspects: set[str]) -> dict[str, int]:
    """How many records show an element, and how many of those and of the others the scan names."""
    rows = stored(data / "metadata.jsonl")
    elements = {f"{data / 'metadata.jsonl'}:{i + 1}" for i, row in enumerate(rows) if row["role"] == "element"}
    return {"elements": len(elements), "right": len(suspects & elements), "wrong": len(suspects - elements)}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    found: dict = {**facts(), "goal_minutes": MINUTES, "rows": []}
    for pictures in args.pictures:
        found["rows"].append(measured(pictures))
        print(found["rows"][-1])
        args.results.write_text(json.dumps(found, indent=1) + "\n")


def table(measured: dict) -> str:
    """Seconds and memory of a scan by number of pictures."""
    lines = []
    for row in measured["rows"]:
        minutes = (f"{row['seconds'] / 60:.1f}", f"{row['processor_seconds'] / 60:.1f}", f"{row['own_mib']} MiB")
        sets = f"{row['sets']}, {row['hidden']}"
        records = f"{row['right'] + row['wrong']}, {row['right']} of {row['elements']}"
        lines.append((f"{row['records']:,}", *minutes, sets, records))
    head = ("pictures", "minutes", "processor minutes", "own memory", "sets found, hidden", "records flagged, right")
    return grid(head, lines)


if __name__ == "__main__":
    main()
