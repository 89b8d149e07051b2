"""Kinds of input: a strategy of cases, and how a case is put into a copy of good inputs and given to a command."""

import dataclasses
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

import train_silentbad
import validation
from silentbad.report import run_report
from tests.fuzz import strategies as some
from tests.fuzz.judge import Tally, audited, judge, marked, trained
from tests.fuzz.mutations import mutated
from tests.mistakes import flags

AUDIT = [*("--pipeline", "pipeline", "--targets", "data", "--threshold", "0.5", "--embedder", "ssim")]
AUDIT += [*("--images_per_target", "1", "--num_inference_steps", "1", "--output_dir", "audit")]
STEP = "held/checkpoints/step-2"
SHORT = {"num_train_epochs": 1}  # where a case takes max_train_steps away
RESUME = {"output_dir": "held", "resume_from_checkpoint": "latest", "max_train_steps": 3}


@dataclasses.dataclass(frozen=True)
class Kind:
    """`give` puts a case into a folder of good inputs, runs a command there and counts what came of it."""

    cases: st.SearchStrategy[Any]
    give: Callable[[Tally, Any, Path], None]


def train(found: Tally, case: object, root: Path, out: str = "out", **changes: Any) -> str:
    given = flags(Path("."), **{"output_dir": out} | changes)
    argv = [f"--{key}={'null' if value is None else value}" for key, value in given.items()]
    return judge(found, case, train_silentbad.main, argv, root, lambda root: trained(root, out))


def resume(found: Tally, case: object, root: Path) -> str:
    return train(found, case, root, "held", **RESUME)


def audit(found: Tally, case: object, root: Path, *more: str) -> str:
    return judge(found, case, validation.main, [*AUDIT, *more], root, audited)


# ---------------------------------------------------------------- configurations
def as_flags(found: Tally, case: list[tuple[str, Any]], root: Path) -> None:
    """Settings as flags: YAML of the value, or its text; they override the good ones."""
    given = {**flags(Path(".")), **SHORT}
    words: list[str] = []
    for key, value in case:
        given.pop(key, None)
        if isinstance(value, list) and value and random.Random(repr(value)).random() < 0.5:
            words += [f"--{key}", *map(str, value)]
        else:
            words.append(f"--{key}={value if isinstance(value, str) else _flow(value)}")
    good = [f"--{key}={value}" for key, value in given.items()]
    judge(found, case, train_silentbad.main, [*good, *words], root, lambda root: marked(root))


def _flow(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**9).split("\n...")[0].strip()


def as_file(found: Tally, case: list[tuple[str, Any]], root: Path) -> None:
    """Settings as a YAML file over the good flags that it does not name."""
    given, tree = {**flags(Path(".")), **SHORT}, dict[str, Any]()
    for key, value in case:
        given.pop(key, None)
        into = tree
        *above, last = key.split(".")
        for part in above:
            into = into.setdefault(part, {})
            if not isinstance(into, dict):
                return
        into[last] = value
    text = yaml.safe_dump(tree, allow_unicode=True)
    (root / "a.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    good = [f"--{key}={value}" for key, value in given.items()]
    judge(found, case, train_silentbad.main, ["--config=a.yaml", *good], root, lambda root: marked(root))


# ---------------------------------------------------------------- records, targets
def lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def as_records(found: Tally, case: list[Any], root: Path) -> None:
    with (root / "data/metadata.jsonl").open("a") as file:
        file.write(lines(case))
    train(found, case, root)


def as_csv(found: Tally, case: list[Any], root: Path) -> None:
    import csv

    (root / "data/metadata.jsonl").unlink()
    names = sorted({str(key) for row in case if isinstance(row, dict) for key in row} | {"file_name", "text"})
    with (root / "data/metadata.csv").open("w", newline="", encoding="utf-8", errors="surrogatepass") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerow(["images/c0.png" if name == "file_name" else "a field" * (name == "text") for name in names])
        for row in case:
            if isinstance(row, dict):
                writer.writerow([row.get(name, "") for name in names])
            else:
                writer.writerow([row])
    train(found, case, root)


def as_targets(found: Tally, case: tuple[list[Any], list[Any]], root: Path) -> None:
    targets, redraws = case
    with (root / "data/targets.jsonl").open("a") as file:
        file.write(lines(targets))
    if redraws:
        (root / "data/redraws.jsonl").write_text(lines(redraws))
    if len(redraws) % 2:
        train(found, case, root, **{"validation.threshold": None})
    else:
        audit(found, case, root)


# ---------------------------------------------------------------- run folders
RUN_FILES = (
    "validation.json",
    "validation.json",
    "run.json",
    "multipliers.json",
    "phrase_memory.json",
    "timesteps.json",
)
LINE_FILES = ("metrics.jsonl", "timings.jsonl", "config.yaml", "finished.json")


def in_run(found: Tally, case: tuple[str, int, list[some.Edit], str], root: Path) -> None:
    """An edited part of a run folder, given to the report, to a comparison, as placebo or to a resume."""
    name, line, edits, asked = case
    file = root / "held" / name
    text = file.read_text()
    if name == "config.yaml":
        text = yaml.safe_dump(json.loads(some.edited(json.dumps(yaml.safe_load(text)), edits)))
    else:
        text = some.edited_lines(text, line, edits) if name.endswith(".jsonl") else some.edited(text, edits)
    file.write_text(text)
    given(found, case, root, asked)


def given(found: Tally, case: object, root: Path, asked: str) -> None:
    """A run folder given to a command."""
    if asked == "report":
        judge(found, case, run_report.main, ["held"], root, marked)
    elif asked == "compare":
        judge(found, case, run_report.main, ["compare", "held", "held", "--out", "compare.html"], root, marked)
    elif asked == "placebo":
        audit(found, case, root, "--placebo", "held")
    elif asked == "config":
        train(found, case, root, config="held/config.yaml")
    else:
        resume(found, case, root)


ASKED = st.sampled_from(["report", "report", "report", "compare", "compare", "placebo", "resume"])


# ---------------------------------------------------------------- checkpoints
def in_checkpoint(found: Tally, case: tuple[str, list[some.Edit]], root: Path) -> None:
    """An edited facts.json or manifest.json."""
    name, edits = case
    file = root / STEP / name
    file.write_text(some.edited(file.read_text(), edits))
    resume(found, case, root)


# ---------------------------------------------------------------- model folders
MODEL_FILES = (
    *("model_index.json", "unet/config.json", "vae/config.json", "text_encoder/config.json"),
    *("scheduler/scheduler_config.json", "tokenizer/tokenizer_config.json", "scheduler/scheduler_config.json"),
)


def in_model(found: Tally, case: tuple[str, list[some.Edit], bool], root: Path) -> None:
    """An edited configuration of a pipeline, trained on or audited."""
    name, edits, trains = case
    file = root / "pipeline" / name
    file.write_text(some.edited(file.read_text(), edits))
    train(found, case, root) if trains else audit(found, case, root)


# ---------------------------------------------------------------- bytes
def in_bytes(found: Tally, case: tuple[str, int], root: Path) -> None:
    """Some bytes of any input; given to what reads it."""
    name, seed = case
    inputs = sorted(p for p in root.rglob("*") if p.is_file() and (p.name == name or p.suffix == name))
    file = random.Random(seed).choice(inputs)
    content, touched = mutated(file.read_bytes(), seed)
    found.mutated += touched
    file.write_bytes(content)
    part = file.relative_to(root).parts
    if part[0] == "pipeline":
        train(found, case, root) if seed % 3 == 0 else audit(found, case, root)
    elif part[0] == "held" and "checkpoints" in part:
        resume(found, case, root)
    elif part[0] == "held":
        given(found, case, root, random.Random(seed).choice(["report", "compare", "placebo", "resume", "config"]))
    elif part[0] == "cache":
        train(found, case, root)
    else:
        train(found, case, root) if seed % 2 else audit(found, case, root)


NAMES = (
    *(".jsonl", ".json", ".yaml", ".safetensors", ".pt", ".png", ".arrow", "metadata.jsonl", "targets.jsonl"),
    *("validation.json", "manifest.json", "model_index.json", "tokenizer.json", "metrics.jsonl", "config.json"),
)

KINDS = {
    "settings as flags": Kind(some.CONFIGURATIONS, as_flags),
    "settings in a file": Kind(some.CONFIGURATIONS, as_file),
    "records": Kind(some.rows(some.WHOLE_RECORD, some.RECORDS), as_records),
    "records in a CSV": Kind(some.rows(some.WHOLE_RECORD, some.RECORDS), as_csv),
    "targets and redraws": Kind(
        st.tuples(some.rows(some.WHOLE_TARGET, some.TARGETS), some.rows(some.WHOLE_REDRAW, some.REDRAWS)), as_targets
    ),
    "run folders": Kind(
        st.tuples(st.sampled_from(RUN_FILES + LINE_FILES), st.integers(0, 50), some.EDITS, ASKED), in_run
    ),
    "facts and manifests": Kind(st.tuples(st.sampled_from(["facts.json", "manifest.json"]), some.EDITS), in_checkpoint),
    "pipelines": Kind(st.tuples(st.sampled_from(MODEL_FILES), some.EDITS, st.booleans()), in_model),
    "bytes of any input": Kind(st.tuples(st.sampled_from(NAMES), st.integers(0, 10**9)), in_bytes),
}


def copied(good: Path, root: Path) -> Path:
    """A copy of the good inputs."""
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(good, root)
    return root
