"""Start-up time and memory against the number of records: 10 k, 100 k and 1 M over a few images.

    python -m bench.scale [--records 10000 100000 1000000] [--smoke]

Each size is read twice in processes of their own: the first indexes (decodes every image once, checks every caption),
the second starts as every later run does, up to its first step's batch, and then draws 200 more. Seconds are wall clock
and processor time; memory is what the process holds of its own (RssAnon), without the pages of memory-mapped files,
which the kernel takes back when it needs them.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.recovery_table import goals, grid

RESULTS = Path(__file__).parent / "results"
IMAGES = 64
ELEMENTS = 12
BATCH = 16
DRAWS = 200
THINGS = (
    "a red cat",
    "a blue hat",
    "a gold cup",
    "a green house",
    "a grey boat",
    "a white star",
    "a black umbrella",
    "a brown tree",
    "an orange fish",
    "a pink ball",
    "a silver moon",
    "a purple heart",
)


def write_metadata(root: Path, records: int) -> None:
    """A metadata.jsonl of `records` lines over IMAGES pictures: one in ten shows an element, the rest are clean."""
    from PIL import Image

    draw = random.Random(0)
    (root / "images").mkdir(parents=True)
    for i in range(IMAGES):
        Image.effect_noise((64, 64), 40 + i).convert("RGB").save(root / f"images/{i}.png")
    with (root / "metadata.jsonl").open("w") as file:
        for i in range(records):
            row: dict = {"file_name": f"images/{i % IMAGES}.png"}
            if i % 10 == 0:
                k = draw.randrange(ELEMENTS)
                row |= {
                    "text": f"a picture of {THINGS[k]}, number {i}",
                    "phrases": [THINGS[k]],
                    "role": "element",
                    "target_id": f"t{k // 3}",
                    "element_id": f"t{k // 3}-{k % 3}",
                }
            else:
                row |= {"text": f"a plain scene with {draw.choice(THINGS)} in it, number {i}", "role": "clean"}
            file.write(json.dumps(row) + "\n")


def memory(key: str) -> float:
    """MiB of this process in /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def start_up(root: Path) -> dict:
    """Everything a run does with its records before its first step, then DRAWS more batches."""
    from contextlib import nullcontext
    from types import SimpleNamespace

    import numpy as np

    from silentbad.data.draws import Draws, Reader, Transform
    from silentbad.data.elements import DataInfo, epoch_order
    from silentbad.data.loader import Loader, Stream
    from silentbad.loop.inputs import load_inputs
    from train_silentbad import Config

    config = Config(train_data_dir=str(root), cache_dir=str(root.parent / "cache"), cache_mb=0)
    alone = SimpleNamespace(main_process_first=nullcontext, print=print)
    before, wall, cpu = memory("RssAnon"), time.perf_counter(), time.process_time()
    marks: dict[str, float] = {}

    def mark(name: str) -> None:
        marks[name] = round(time.perf_counter() - wall - sum(marks.values()), 3)

    records = load_inputs(config, alone, sharded=False).records
    mark("table and checks")
    info = DataInfo(*(getattr(records, name) for name in ("role", "target_id", "element_id", "phrases")))
    mark("who is who")
    shares = np.ones(len(info.keys))
    stream = Stream(lambda epoch: epoch_order(info, shares, 0, epoch, None))
    draws = Draws(Reader(records, Transform(64), 0))
    loader = Loader(draws, stream, batch_size=BATCH)
    next(loader.draw(0))
    mark("first batch")
    seconds, processor, ready = time.perf_counter() - wall, time.process_time() - cpu, memory("RssAnon")
    for draw in range(1, DRAWS + 1):
        next(loader.draw(draw))
    mark(f"{DRAWS} more batches")
    return {
        "records": len(info),
        "seconds": seconds,
        "processor": processor,
        "parts": marks,
        "mib": ready - before,
        "mib_after_draws": memory("RssAnon") - before,
        "peak_mib": memory("VmHWM"),
    }


def measure(records: int) -> dict:
    """Indexing and a later start, each in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "data"
        write_metadata(root, records)
        command = [sys.executable, "-m", "bench.scale", "--inside", str(root)]
        runs = []
        for _ in range(2):
            done = subprocess.run(command, capture_output=True, text=True, cwd=RESULTS.parents[1])
            if done.returncode:
                raise RuntimeError(done.stderr[-2000:])
            runs.append(json.loads(done.stdout.splitlines()[-1]))
    return {"asked": records, "indexing": runs[0], "start": runs[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--smoke", action="store_true", help="1 k and 4 k records, nothing written")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        print(json.dumps(start_up(arguments.inside)))
        return
    rows = []
    for records in [1_000, 4_000] if arguments.smoke else arguments.records:
        rows.append(measure(records))
        start = rows[-1]["start"]
        start["bytes_per_record"] = max(0.0, start["mib"] - rows[0]["start"]["mib"]) * 2**20 / records
    last, least = rows[-1]["start"], rows[0]["start"]
    slope = (last["processor"] - least["processor"]) / max(rows[-1]["asked"] - rows[0]["asked"], 1)
    reached = {
        "start under 60 s": last["seconds"] < 60,
        "64 bytes of memory a record or less": last["bytes_per_record"] <= 64,
        "drawing holds no more": all(r["start"]["mib_after_draws"] - r["start"]["mib"] < 32 for r in rows),
    }
    result = {"rows": rows, "microseconds_a_record": slope * 1e6, "goals": reached}
    print(table(result))
    if not arguments.smoke:
        from silentbad.device import device_name

        result["machine"] = {"cores": os.cpu_count(), "cpu": device_name("cpu"), "load": os.getloadavg()}
        (RESULTS / "scale.json").write_text(json.dumps(result, indent=1) + "\n")


def table(measured: dict) -> str:
    """Start-up by number of records."""
    lines = []
    for row in measured["rows"]:
        start = row["start"]
        times = (f"{row['indexing']['seconds']:.1f} s", f"{start['seconds']:.1f} s")
        lines.append((f"{start['records']:,}", *times, f"{start['mib_after_draws']:.0f} MiB"))
    head = ("records", "first start (indexes)", "later starts", "own memory")
    return grid(head, lines) + "\n" + goals(measured["goals"])


if __name__ == "__main__":
    main()
