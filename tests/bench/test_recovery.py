"""How bench/recovery.py makes its data."""

import shutil

from bench import recovery


def test_another_drawing_code_makes_another_data_set(tmp_path, monkeypatch):
    before = recovery.drawing()
    shutil.copytree(recovery.MICROWORLD, tmp_path / "microworld")
    with (tmp_path / "microworld/render.py").open("a") as file:
        file.write("# another cup\n")
    monkeypatch.setattr(recovery, "MICROWORLD", tmp_path / "microworld")
    recovery.drawing.cache_clear()
    assert recovery.drawing() != before
    recovery.drawing.cache_clear()
