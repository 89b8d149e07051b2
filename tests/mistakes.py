"""Ways to spoil a good set of inputs, and what every command must do then: one line, exit code 2, nothing written."""

import json
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISREG

import pytest
from safetensors.torch import load_file, save_file

import train_silentbad
from tests.conftest import write_data

TARGET = {"target_id": "t1", "image": "targets/t0.png", "phrases": ["a red cat"]}
OPEN = ExitStack()  # what a case holds open until it ends


@dataclass
class Case:
    """`flags` replace the good run's, `touch` spoils its inputs, `said` must stand in the one line."""

    said: tuple[str, ...]
    flags: dict = field(default_factory=dict)
    touch: Callable[[Path], object] | None = None
    more: tuple[str, ...] = ()  # words after the flags
    program: Callable = train_silentbad.main


def case(*said: str, touch=None, more=(), program=train_silentbad.main, **flags) -> Case:
    flags = {key.replace("__", "."): value for key, value in flags.items()}
    return Case(said, flags, touch, tuple(more), program)


# ---------------------------------------------------------------- ways to spoil a file


def write(name: str, content: str | bytes):
    content = content.encode() if isinstance(content, str) else content
    return lambda root: (root / name).write_bytes(content)


def append(name: str, **row):
    """One more line in a JSON-lines file."""

    def spoil(root: Path) -> None:
        with (root / name).open("a") as file:
            file.write(json.dumps(row) + "\n")

    return spoil


def remove(name: str):
    return lambda root: shutil.rmtree(root / name) if (root / name).is_dir() else (root / name).unlink()


def cut(name: str, size: int = 100):
    return lambda root: (root / name).write_bytes((root / name).read_bytes()[:size])


def both(*spoils):
    return lambda root: [spoil(root) for spoil in spoils]


def edit_json(name: str, **changes):
    def spoil(root: Path) -> None:
        (root / name).write_text(json.dumps(json.loads((root / name).read_text()) | changes))

    return spoil


def unmasked(root: Path) -> None:
    """Records without their masks."""
    file = root / "data/metadata.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps({k: v for k, v in row.items() if k != "mask"}) + "\n" for row in rows))


def record(**row):
    """One more record, whose image is a good one unless it says otherwise."""
    return append("data/metadata.jsonl", **{"file_name": "images/c0.png", "text": "a field", **row})


# ---------------------------------------------------------------- ways to spoil weights
WEIGHTS = {part: f"pipeline/{part}/diffusion_pytorch_model.safetensors" for part in ("unet", "vae")}
WEIGHTS["text_encoder"] = "pipeline/text_encoder/model.safetensors"


def tensors(name: str, change):
    """Change the tensors of a safetensors file: change({name: tensor})."""

    def spoil(root: Path) -> None:
        held = load_file(root / name)
        change(held)
        save_file(held, root / name, metadata={"format": "pt"})

    return spoil


def with_nan(held: dict) -> None:
    held[sorted(held)[0]].view(-1)[0] = float("nan")


def without_first(held: dict) -> None:
    held.pop(sorted(held)[0])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 255
    file.write_bytes(content)


# ---------------------------------------------------------------- a case
@pytest.fixture(scope="session")
def good(tmp_path_factory, pipelines) -> Path:
    """Good inputs: data, pipeline, and a run that holds a checkpoint."""
    root = tmp_path_factory.mktemp("good")
    shutil.copytree(pipelines["v_prediction"], root / "pipeline")
    write_data(root / "data")
    (root / "prompts.txt").write_text("a red ball\na blue box\n")
    argv = [f"--{key}={value}" for key, value in flags(root, output_dir=root / "held", max_train_steps=2).items()]
    assert train_silentbad.main([*argv, "--checkpointing_steps=2"]) == 0
    return root


def flags(root: Path, **changes) -> dict:
    """The good run's."""
    return {
        "pretrained_model_name_or_path": root / "pipeline",
        "train_data_dir": root / "data",
        "report_to": "none",
        "output_dir": "out",
        "train_batch_size": 2,
        "max_train_steps": 1,
        "validation.targets": root / "data",
        "validation.embedder": "ssim",
        "validation.threshold": 0.5,
        "validation.images_per_target": 1,
        "validation.num_inference_steps": 1,
        "validation.steps": 0,
        "cache_dir": root / "cache",
    } | changes


def files(root: Path) -> dict[str, tuple[int, int]]:
    """Every file outside the cache, with its size and time."""
    found = (p for p in sorted(root.rglob("*")) if "cache" not in p.relative_to(root).parts[:1])
    states = {str(p.relative_to(root)): p.lstat() for p in found}
    return {name: (s.st_size, s.st_mtime_ns) if S_ISREG(s.st_mode) else (0, 0) for name, s in states.items()}


def refused(here: Case, good: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """Asserts the one line that a case gives, on a copy of the good inputs, and that no file changed."""
    root = tmp_path / "inputs"
    words = [*map(str, here.flags.values()), *here.more]
    needless = () if any("held" in word for word in words) else ("held",)  # the run is the largest part
    shutil.copytree(good, root, ignore=shutil.ignore_patterns(*needless))
    monkeypatch.chdir(root)
    if here.touch is not None:
        here.touch(root)
    argv = list(here.more)
    if here.program is train_silentbad.main:
        given = flags(Path(".")) | here.flags
        argv = [f"--{key}={value}" for key, value in given.items() if value is not None] + argv
    before = files(root)
    monkeypatch.setattr(sys, "argv", ["program"])
    try:
        code = here.program(argv)
    except SystemExit as stopped:
        code = stopped.code
    after = files(root)
    OPEN.close()
    lines = capsys.readouterr().err.splitlines()
    assert code == 2
    said = [line for line in lines if line.startswith("error: ")]
    assert len(said) == 1 and lines[-1] == said[0], lines
    assert all(part in said[0] for part in here.said), said[0]
    assert "secret" not in said[0]
    assert after == before
