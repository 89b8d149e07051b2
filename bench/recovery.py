"""Which methods bring a composed prompt to its target sooner: `python -m bench.recovery [--smoke]`.

One run per (arm, learning-rate factor, target set, seed), each a plain call of train_silentbad.py on a microworld data
set of its own; every evaluation becomes one JSON line in bench/results/recovery.jsonl and a run already there is not
made again. Arms differ by configuration alone: base, data, batch, exposures and evaluation grid are the same.
recovery-arms.json has the flags of each arm and the origin of its rows. The protocol is research/protocol.md.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from tqdm import tqdm

from bench.arms import ARMS, RATES, SMOKE
from bench.recovery_table import RESULTS, append, save, stored

ROOT = Path(__file__).parents[1]
WORK = ROOT / "runs" / "bench-recovery"
WORLDS = ROOT / "worlds"
DRAWN_BY = {  # modules that draw a world's pictures and masks
    "microworld": ("grammar", "render", "export", "make", "nulls"),
    "emoji": ("backdrops", "grammar", "make", "nouns", "nulls", "render", "sets", "visible"),
}
# of a world that has a base of its own, with its judge and its detector; without one, CONFIG's
BASES = {"emoji": ROOT / "assets" / "emoji-sd"}
CONFIG = "configs/microworld.yaml"
BASE_LR = 1e-4
BASE = "pretrained_model_name_or_path"
GRID = tuple(f"validation.{key}" for key in ("steps", "early_steps", "first_images", "settled_after"))  # not of a base
FACTORS = (0.5, 1, 2, 4, 8)
TARGETS = ";".join(map(str, range(1000, 1012))) + ";" + ",".join(map(str, range(1000, 1008)))


def own_base(world: str) -> dict[str, Any]:
    """The flags of a world's own base and detector; none where CONFIG's are."""
    base = BASES.get(world)
    return {BASE: str(base), "validation.embedder_path": str(base / "embedder")} if base else {}


def words(flags: dict[str, Any]) -> list[str]:
    """Flags as words of a command line."""
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


@cache
def drawing(world: str = "microworld") -> str:
    """A digest of the code that draws pictures and masks, since other code draws other pictures."""
    files = [
        WORLDS / "data_sets.py",
        WORLDS / "null_pictures.py",
        *(WORLDS / world / f"{name}.py" for name in DRAWN_BY[world]),
    ]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]


def data_set(
    targets: str,
    seed: int,
    images: int,
    flags: dict[str, str],
    clean: int = 64,
    more: tuple[str, ...] = (),
    nulls: int | None = 100,
    world: str = "microworld",
) -> Path:
    """The data set of these targets, made once by this code; without masks for an arm that estimates them. `more` are
    further arguments of the world's `make`; `nulls` are a target's of each harder kind, beside 100
    redraws; None: 300 redraws, and 100 for each element that the kind changes."""
    masks = ["--no_masks"] if flags.get("memory.region.name") == "estimated" else []
    name = "".join(["" if clean == 64 else f"-{clean}", "" if nulls == 100 else f"-{nulls}", *masks, *more])
    out = WORK / "data" / f"{file_name(targets)}-{seed}-{images}{name}-{drawing(world)}"
    if not out.exists():  # made aside and renamed when whole: another process may wait for the same data
        draft = out.with_name(f"{out.name}.{os.getpid()}")
        shutil.rmtree(draft, ignore_errors=True)
        command = [
            "-m",
            f"worlds.{world}.make",
            "--out",
            draft,
            "--targets",
            targets,
            "--seed",
            seed,
            "--images_per_phrase",
            images,
            "--clean",
            clean,
            *([] if nulls is None else ["--redraws", 100, "--nulls", nulls]),
            *masks,
            *more,
        ]
        subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        set_in_place(draft, out)
    return out


def set_in_place(draft: Path, out: Path) -> None:
    """Rename a folder made aside, or remove it where another process was first."""
    try:
        draft.rename(out)
    except OSError:
        shutil.rmtree(draft)


def with_clean(source: Path, suffix: str, keep: Callable[[list[dict]], list[dict]]) -> Path:
    """A copy of a data set, made once, of whose clean records are left what `keep` returns."""
    out = source.with_name(f"{source.name}-{suffix}")
    if out.exists():
        return out
    draft = out.with_name(f"{out.name}.{os.getpid()}")
    shutil.copytree(source, draft, copy_function=os.link)
    records = stored(draft / "metadata.jsonl")
    (draft / "metadata.jsonl").unlink()  # a link
    clean = [record for record in records if record["role"] == "clean"]
    append(draft / "metadata.jsonl", [*(r for r in records if r["role"] != "clean"), *keep(clean)])
    set_in_place(draft, out)
    return out


def train(arm: str, factor: float, targets: str, seed: int, args: argparse.Namespace) -> list[dict]:
    """One run in a process of its own; returns its evaluations, one row per step and target. Its folder is removed
    afterwards."""
    flags_of_arm = {**ARMS[arm], **json.loads(args.flags or "{}")}
    data, out = data_set(targets, seed, args.images_per_phrase, flags_of_arm), WORK / f"run-{os.getpid()}"
    flags = {
        **common(data, out, factor, seed, args.steps),
        "validation.steps": args.every,
        "validation.early_steps": f"[{args.early}]",
        "validation.images_per_target": args.images,
        **flags_of_arm,
    }
    report, seconds = kept(arm, flags)
    shutil.rmtree(out)
    key = {"arm": arm, "factor": factor, "targets": targets, "seed": seed, **protocol(args)}
    return [
        {
            **key,
            "step": entry["step"],
            "target": name,
            "rate": s["rate"],
            "mean": s["mean"],
            "max": s["max"],
            "elements": [e["rate"] for e in s["elements"]],
            "drift": scores(entry)["drift"].get("clean_eps_mse"),
            "threshold": report["threshold"]["value"],
            "seconds": seconds[str(entry["step"])],
        }
        for entry in report["history"]
        for name, s in scores(entry)["targets"].items()
    ]


def common(data: Path, out: Path, factor: float, seed: int, steps: int) -> dict:
    """Flags that every run of an arm has, whatever is measured of it."""
    return {
        "train_data_dir": data,
        "output_dir": out,
        "seed": seed,
        "max_train_steps": steps,
        "report_to": "none",
        "learning_rate": BASE_LR * factor,
        "checkpointing_steps": 10**6,
        "validation.targets": data / "targets.jsonl",
    }


def kept(name: str, flags: dict) -> tuple[dict, dict]:
    """(validation.json, {step: seconds, peak_mib: of the process}) of one run with these flags."""
    from bench.one_run import measured  # its libraries are loaded here once, for all forks

    out = Path(flags["output_dir"])
    shutil.rmtree(out, ignore_errors=True)
    argv = ["--config", CONFIG, *words(flags)]
    log, clock = out.with_suffix(".log"), out.with_suffix(".clock")
    child = multiprocessing.get_context("fork").Process(target=measured, args=(argv, log, clock, base_of(flags)))
    child.start()
    child.join()
    if child.exitcode:
        raise SystemExit(f"{name} stopped with exit code {child.exitcode}:\n{log.read_text()[-2000:]}")
    return json.loads((out / "validation.json").read_text()), json.loads(clock.read_text())


def scores(entry: dict) -> dict:
    """The scores of the averaged weights where an arm averages them, else of the trained ones."""
    return entry.get("ema") or entry["raw"]


@cache
def code() -> str:
    """A digest of every module that a run may call."""
    files = [*sorted((ROOT / "silentbad").rglob("*.py")), *sorted(ROOT.glob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def base_of(flags: dict[str, Any]) -> Path:
    """Where the base's evaluation under such flags is kept: it is the same for every arm, rate and length."""
    of_base = {key: str(flags.get(key)) for key in ("train_data_dir", "seed", "held_out_clean", BASE)}
    of_base |= {key: str(value) for key, value in flags.items() if key.startswith("validation.") and key not in GRID}
    named = json.dumps([of_base, code()], sort_keys=True)
    return WORK / "bases" / f"{hashlib.sha256(named.encode()).hexdigest()[:16]}.json"


def protocol(args: argparse.Namespace) -> dict:
    """What must be equal for two rows to be compared."""
    return {name: getattr(args, name) for name in ("steps", "every", "early", "images", "images_per_phrase", "flags")}


FACTS = ("commit", "torch", "device", "cores")


def facts() -> dict:
    """The facts of rows that are measured now: commit, torch, device and cores."""
    from bench.one_run import machine

    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return dict(zip(FACTS, (commit, *machine()), strict=True))


def provenance(rows: list[dict], args: argparse.Namespace) -> dict:
    """The settings that all rows share, and each arm's own flags, rates, seeds, commits and machines."""
    ran = defaultdict(list)
    for row in rows:
        ran[row["arm"]].append(row)
    of_rows = ("factor", "seed", "targets", *FACTS)
    arms = {
        arm: {"flags": ARMS[arm], **{key: sorted({row[key] for row in of_arm}) for key in of_rows}}
        for arm, of_arm in ran.items()
    }
    return {"config": CONFIG, "learning_rate": BASE_LR, **protocol(args), "arms": arms}


def comparable(path: Path, mine: dict) -> list[dict]:
    """The stored rows made under this protocol."""
    return [row for row in stored(path) if {k: row.get(k) for k in mine} == mine]


def done(path: Path, mine: dict) -> set[tuple]:
    return {(row["arm"], row["factor"], row["targets"], row["seed"]) for row in comparable(path, mine)}


def file_name(text: str) -> str:
    """A file name from the targets, or from their hash where it would be too long for a file system."""
    name = text.replace(",", "+")
    return name if len(name) <= 160 else hashlib.sha256(name.encode()).hexdigest()


@contextmanager
def claimed(run: tuple):
    """True while no other process makes this run: several may work on one results file."""
    (WORK / "claims").mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(WORK / "claims" / file_name("-".join(map(str, run))), blocking=False):
            yield True
    except Timeout:
        yield False


# ------------------------------------------------------------------------------------------------- commands


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default=",".join(ARMS), help="comma-separated")
    parser.add_argument(
        "--targets", default=TARGETS, help="target sets: ';' between runs, ',' between the targets of one run"
    )
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument(
        "--factors",
        help=f"learning rates in units of {BASE_LR:g} instead of each arm's own; a sweep: "
        f"{','.join(f'{f:g}' for f in FACTORS)}",
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=50, help="steps between evaluations")
    parser.add_argument("--early", default="10,15,20,30,40,75", help="further evaluations")
    parser.add_argument("--images", type=int, default=16, help="images per target and evaluation")
    parser.add_argument("--images_per_phrase", type=int, default=20)
    parser.add_argument("--flags", help="further flags of train_silentbad.py for every arm, as JSON")
    parser.add_argument("--budget-minutes", type=float, default=float("inf"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--smoke", action="store_true", help="plain, original and recommended on one target")
    args = parser.parse_args(argv)
    if args.smoke:
        smoke = {
            "arms": ",".join(SMOKE),
            "targets": "33",
            "seeds": "0",
            "steps": 100,
            "every": 50,
            "early": "10,15,20,30,75",
            "results": RESULTS.with_name("recovery-smoke.jsonl"),
        }
        vars(args).update(smoke)
    unknown = [arm for arm in args.arms.split(",") if arm not in ARMS]
    if unknown:
        parser.exit(2, f"error: --arms: unknown arm '{unknown[0]}'; there are: {', '.join(ARMS)}\n")
    wanted = [
        (arm, float(factor))
        for arm in args.arms.split(",")
        for factor in (args.factors.split(",") if args.factors else [RATES[arm]])
    ]
    todo = [
        (arm, factor, targets, int(seed))
        for seed in args.seeds.split(",")
        for arm, factor in wanted
        for targets in args.targets.split(";")
    ]
    args.results.parent.mkdir(parents=True, exist_ok=True)
    mine = protocol(args)
    deadline = time.monotonic() + 60 * args.budget_minutes
    for run in tqdm(todo, desc="runs"):
        if time.monotonic() > deadline:
            print(f"--budget-minutes {args.budget_minutes:g} are over; the same command goes on from here")
            break
        with claimed(run) as free:
            if free and run not in done(args.results, mine):
                arm, factor, targets, seed = run
                rows_of_run, here = train(arm, factor, targets, seed, args), facts()
                append(args.results, [{**row, **here} for row in rows_of_run])
    rows = comparable(args.results, mine)
    arms = {arm for arm, _ in wanted}
    if args.factors:  # else every rate there is
        rows = [row for row in rows if (row["arm"], row["factor"]) in wanted]
    rows = [row for row in rows if row["arm"] in arms]
    print(save(rows, args.results))
    about = json.dumps(provenance(rows, args), indent=1)
    args.results.with_name(f"{args.results.stem}-arms.json").write_text(about + "\n")


if __name__ == "__main__":
    main()
