"""What a guard costs a training step: `python -m bench.guard_cost [--rounds 40] [--steps 1]`.

One process trains the bundled pipeline at batch 16 on a data set with two hidden pictures, unguarded and with each
guard, in turns of `--steps` steps. A round's ratio is of its own turns; the figure is the median over rounds. Seconds
are processor time, which other work on the machine disturbs less than wall clock. It needs a quiet machine: `drop`
costs nothing in a step, so its figure is the noise. Writes bench/results/guard.json.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.recovery_table import grid

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "guard.json"
ARMS: dict[str, dict[str, Any]] = {
    "none": {},
    "drop": {},
    "mask": {},
    "cap": {"limit": 10**6},  # never reached: the run shows the same pictures as without
    "project": {"pictures": 1},
    "project, 4 pictures": {"pictures": 4},
}


def built(arm: str, data: Path, scan: Path, out: Path) -> Any:
    """A run ready to train under an arm of ARMS."""
    from silentbad.loop import trackers
    from silentbad.saving import folder
    from silentbad.settings.startup import training
    from train_silentbad import build

    name, options = arm.partition(",")[0], ARMS[arm]
    flags = [f"--train_data_dir={data}", f"--output_dir={out}", f"--cache_dir={out.parent}/cache"]
    flags += ["--pretrained_model_name_or_path=assets/micro-sd", "--report_to=none", "--train_batch_size=16"]
    flags += ["--learning_rate=1e-5", "--max_train_steps=10000", f"--guard.name={name}"]
    flags += [] if name == "none" else [f"--guard.scan={scan}"]
    flags += [f"--guard.options={json.dumps(options)}"] if options else []
    config, _ = training(flags, None)
    return build(config, trackers.make_accelerator(config), folder.RunFolder(config, True))


def turn(run: Any, steps: int) -> float:
    """Processor seconds a step."""
    from train_silentbad import micro_step, update

    start = time.process_time()
    for _ in range(steps):
        for micro, batch in enumerate(run.loader.draw(run.state.draw)):
            with run.accelerator.accumulate(run.model):
                micro_step(run, batch, micro)
        update(run)
    return (time.process_time() - start) / steps


def measured(rounds: int, steps: int, place: Path) -> dict[str, Any]:
    """{arm: median ratio to no guard, its quartiles} and the seconds of an unguarded step."""
    import torch

    from silentbad.device import device_name

    torch.set_num_threads(1)
    data, scan = place / "data", place / "scan"
    make = [sys.executable, "-m", "worlds.microworld.make", "--out", str(data), "--targets", "cat-hat,9"]
    subprocess.run([*make, "--images_per_phrase", "20", "--redraws", "0", "--nulls", "0"], check=True, cwd=ROOT)
    scan_command = [sys.executable, "-m", "silentbad.scan", "--train_data_dir", str(data), "--output_dir", str(scan)]
    assert subprocess.run(scan_command, cwd=ROOT).returncode == 3, "the scan found nothing"
    runs = {arm: built(arm, data, scan / "scan.json", place / f"run-{k}") for k, arm in enumerate(ARMS)}
    for run in runs.values():
        turn(run, 5)  # caches fill
    times: dict[str, list[float]] = {arm: [] for arm in runs}
    for k in range(rounds):
        for arm in list(runs)[:: 1 - 2 * (k % 2)]:  # and back: drift over a round cancels
            times[arm].append(turn(runs[arm], steps))
        print(f"round {k + 1} of {rounds}", file=sys.stderr, flush=True)
    ratios = {arm: [a / b for a, b in zip(seconds, times["none"], strict=True)] for arm, seconds in times.items()}
    return {
        "device": device_name(torch.device("cpu")),
        "rounds": rounds,
        "steps": steps,
        "seconds": statistics.median(times["none"]),
        "ratio": {arm: statistics.quantiles(seconds, n=4) for arm, seconds in ratios.items() if arm != "none"},
    }


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    text = (
        f"Code: {results['commit']}. {results['rounds']} rounds, {results['steps']} step(s) of each arm a round, "
        f"{results['seconds']:.3f} processor seconds a step without a guard."
    )
    lines = []
    for arm, ratios in results["ratio"].items():
        low, middle, high = (f"{100 * (ratio - 1):+.1f} %" for ratio in ratios)
        lines.append([arm, middle, f"{low} to {high}"])
    return f"{text}\n\n{grid(('guard', 'cost of a step', 'quartiles'), lines)}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=1)
    options = parser.parse_args(argv)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    with tempfile.TemporaryDirectory() as place:
        results = {"commit": commit.stdout.strip()} | measured(options.rounds, options.steps, Path(place))
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
