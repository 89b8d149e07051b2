"""One search of generated views, measured in a process of its own for bench/scan_scale.py.

`python -m bench.scan_once DATA WORKERS DRAWS` prints a row. It imports what the scan imports and no more, for its
memory is measured.
"""

import json
import os
import shutil
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

from silentbad.scan.candidates import places
from silentbad.scan.engines import opened
from silentbad.scan.find import search
from silentbad.scan.plan import Plan, describe
from silentbad.scan.scan_folder import Store
from silentbad.scan.views import Views
from silentbad.settings.commands import ScanOptions


def given(store: Store, number: int, data: Path) -> int:
    """A part of generated views, in place of one that is read."""
    made = Views(data / f"part-{number}", "")
    shutil.copytree(data / f"part-{number}", store.part(number), dirs_exist_ok=True)
    describe(store, number, Views(store.part(number), ""))
    return len(made.captions)


class Memory(threading.Thread):
    """The most that this process and those below it had of their own, in MiB, by process."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = defaultdict[int, float](float)
        self.start()

    def run(self) -> None:
        while True:
            for pid in (os.getpid(), *below(os.getpid())):
                self.most[pid] = max(self.most[pid], anonymous(pid))
            time.sleep(0.5)


def below(pid: int) -> list[int]:
    """The processes that a process started, and theirs."""
    pids = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, file.read_text().split()):
            pids += [child, *below(child)]
    return pids


def anonymous(pid: int) -> float:
    """MiB that a process holds of its own; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon")), 0.0)


def written(folder: Path) -> dict[str, int]:
    """Bytes of a scan's folder, by what they hold."""
    sizes = defaultdict[str, int](int)
    for file in folder.rglob("*"):
        if file.is_file():
            kind = file.name if file.parent.name.startswith("part-") else file.stem.partition("-")[0]
            sizes["marks" if file.parent.name == "done" else kind.removesuffix(".npy")] += file.stat().st_size
    return dict(sizes)


def measured(data: Path, workers: int, permutations: int) -> dict:
    """One search, in this process; with `workers`, on as many of a local Dask cluster."""
    memory, folder = Memory(), data.parent / f"scan-{os.getpid()}"
    truth = json.loads((data / "truth.json").read_text())
    options = ScanOptions(engine="dask" if workers else "process", workers=workers or 1)
    start, own = time.perf_counter(), time.process_time()
    try:
        with opened(options) as engine:
            plan = Plan(folder, engine)
            plan.index(plan.steps.run("given", given, [(plan.store, k, data) for k in range(len(truth["sizes"]))]))
            suspects = search(plan, permutations)
        seconds, steps = time.perf_counter() - start, plan.steps.seconds
        sizes = written(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    by_step = defaultdict[str, float](float)
    for step, spent in steps.items():
        by_step["groups" if step.startswith("groups") else step] += spent
    driver = time.process_time() - own - (0 if workers else sum(by_step.values()))
    flagged, elements = set(suspects.records.tolist()), set(truth["elements"])
    return {
        "records": truth["records"],
        "workers": workers,
        "places": len(places(truth["records"])),
        "sets": len(suspects.sets),
        "hidden": truth["hidden"],
        "elements": len(elements),
        "right": len(flagged & elements),
        "wrong": len(flagged - elements),
        "seconds": round(seconds, 1),
        "plan_seconds": round(driver, 1),
        "steps": {step: round(spent, 1) for step, spent in by_step.items()},
        "bytes": sizes,
        "own_mib": sorted((round(mib) for mib in memory.most.values()), reverse=True),
    }


if __name__ == "__main__":
    print(json.dumps(measured(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
