"""How bench/recovery.py makes its data."""

import shutil

from bench import recovery
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


def test_a_kept_evaluation_is_the_bases_own(flags, data, tmp_path, monkeypatch):
    """A second run takes up what the first left, draws no image at step 0, and goes on the same."""
    monkeypatch.setattr(recovery, "WORK", tmp_path / "work")
    monkeypatch.setattr(recovery, "CONFIG", str(tmp_path / "empty.yaml"))
    (tmp_path / "empty.yaml").write_text("")
    given = [word.removeprefix("--").split("=", 1) for word in flags(max_train_steps=2)]
    settings = dict(given) | VALIDATION | {"validation.targets": str(data / "targets.jsonl")}
    histories = []
    for name in ("one", "two"):
        report, seconds = recovery.kept(name, settings | {"output_dir": str(tmp_path / name)})
        histories.append([entry["raw"] for entry in report["history"]])
        assert [*seconds] == ["0", "2"]
    assert histories[0] == histories[1] and len([*(tmp_path / "work/bases").iterdir()]) == 1
