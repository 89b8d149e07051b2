"""How bench/recovery.py makes its data."""

import json
import multiprocessing
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench import recovery
from bench.recovery_table import append, stored
from tests.training import VALIDATION


def test_another_drawing_code_makes_another_data_set(tmp_path, monkeypatch):
    before = recovery.drawing()
    other = recovery.drawing("emoji")
    shutil.copytree(recovery.WORLDS, tmp_path / "worlds")
    with (tmp_path / "worlds/microworld/render.py").open("a") as file:
        file.write("# another cup\n")
    monkeypatch.setattr(recovery, "WORLDS", tmp_path / "worlds")
    recovery.drawing.cache_clear()
    assert recovery.drawing() != before
    assert recovery.drawing("emoji") == other
    recovery.drawing.cache_clear()


def test_arms_share_the_evaluation_of_their_base():
    shared = {"train_data_dir": "a", "seed": 0, "validation.images_per_target": 16, "validation.steps": 20}
    kept = recovery.base_of(shared)
    arm = {"learning_rate": 1e-3, "max_train_steps": 9, "memory.region.name": "mask", "output_dir": "b"}
    grid = {"validation.steps": 50, "validation.first_images": 4, "validation.settled_after": 3}
    assert recovery.base_of(shared | arm | grid) == kept
    for change in ({"seed": 1}, {"train_data_dir": "c"}, {"validation.images_per_target": 8}, {recovery.BASE: "mine"}):
        assert recovery.base_of(shared | change) != kept


def kept_twice(settings: dict, folder: Path) -> None:
    """Two runs of the same settings, and what each measured."""
    recovery.WORK, recovery.CONFIG = folder / "work", str(folder / "empty.yaml")
    (folder / "empty.yaml").write_text("")
    histories = []
    for name in ("one", "two"):
        report, seconds = recovery.kept(name, settings | {"output_dir": str(folder / name)})
        histories.append([entry["raw"] for entry in report["history"]])
        assert [*seconds] == ["0", "2", "peak_mib"]
    (folder / "histories.json").write_text(json.dumps(histories))


@pytest.mark.thorough
def test_a_kept_evaluation_is_the_bases_own(flags, data, tmp_path):
    """A second run takes up what the first left, draws no image at step 0, and goes on the same."""
    given = [word.removeprefix("--").split("=", 1) for word in flags(max_train_steps=2)]
    settings = dict(given) | VALIDATION | {"validation.targets": str(data / "targets.jsonl")}
    # a fresh process: autograd cannot run in a fork of one that has used its threads
    process = multiprocessing.get_context("spawn").Process(target=kept_twice, args=(settings, tmp_path))
    process.start()
    process.join()
    assert process.exitcode == 0
    one, two = json.loads((tmp_path / "histories.json").read_text())
    assert one == two and len([*(tmp_path / "work/bases").glob("*.json")]) == 1


def test_many_targets_have_a_file_name_that_a_file_system_takes():
    assert recovery.file_name("2596,2597-0") == "2596+2597-0"
    many = [recovery.file_name(",".join(map(str, range(first, first + 64)))) for first in (2604, 2605)]
    assert len(set(many)) == 2 and max(map(len, many)) <= 160


def test_a_copy_has_the_clean_records_that_are_kept_and_leaves_the_data_set_as_it_is(tmp_path):
    records = [{"role": role, "text": text} for role, text in (("clean", "a"), ("element", "b"), ("clean", "c"))]
    data = tmp_path / "data"
    data.mkdir()
    append(data / "metadata.jsonl", records)
    (data / "a.png").write_bytes(b"pixels")
    copy = recovery.with_clean(data, "one", lambda clean: clean[1:])
    assert stored(copy / "metadata.jsonl") == records[1:] and (copy / "a.png").read_bytes() == b"pixels"
    assert stored(recovery.with_clean(data, "none", lambda clean: []) / "metadata.jsonl") == records[1:2]
    assert stored(data / "metadata.jsonl") == records


LIGHT = ("many", "published", "recovery", "recovery_table", "shield_story")


def test_what_starts_runs_parses_its_flags_without_torch():
    code = "import sys; [__import__(f'bench.{name}') for name in sys.argv[1:]]; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *LIGHT], capture_output=True, text=True, check=True)
    assert not {"torch", "diffusers"} & {*done.stdout.split()}
