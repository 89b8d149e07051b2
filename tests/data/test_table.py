"""The table of records on disk: damaged, copied, or not to be written."""

import os
from pathlib import Path

import pytest

from silentbad.data import table
from silentbad.errors import UserError
from tests.conftest import write_data
from tests.folders import records
from tests.mistakes import flip


def read(root):
    return records(root, cache_dir=str(root.parent / "cache"))


def cache_file(root: Path) -> Path:
    (file,) = (root.parent / "cache" / "silentbad-records").rglob("*.arrow")
    return file


@pytest.mark.parametrize("how", [flip, lambda f: f.write_bytes(f.read_bytes()[:300]), lambda f: f.write_bytes(b"")])
def test_a_damaged_table_is_made_anew_with_one_line(how, tmp_path, capsys):
    root = write_data(tmp_path / "data")
    before = read(root).text
    how(cache_file(root))
    capsys.readouterr()
    assert read(root).text == before
    assert capsys.readouterr().out.count("is damaged; it is made anew") == 1
    assert read(root).text == before and capsys.readouterr().out == ""


def test_a_table_that_was_copied_is_still_whole(tmp_path, monkeypatch):
    root = write_data(tmp_path / "data")
    read(root)
    os.utime(cache_file(root))
    monkeypatch.setattr(table, "checked_row", lambda row: pytest.fail("built anew"))
    assert len(read(root)) == 16


def test_a_failed_build_blocks_no_later_one(tmp_path):
    root = write_data(tmp_path / "data")
    good_ = (root / "metadata.jsonl").read_text()
    (root / "metadata.jsonl").write_text(good_ + "{")
    with pytest.raises(UserError, match="not JSON"):
        read(root)
    (root / "metadata.jsonl").write_text(good_)
    assert len(read(root)) == 16


@pytest.mark.parametrize("content", ["{", "3", "\xff", "[1]"])
def test_a_damaged_conclusion_is_drawn_again(content, tmp_path):
    read_ = read(write_data(tmp_path / "data"))
    assert table.cached_check(read_.table, "key", lambda: ["line"]) == ["line"]
    (Path(read_.table.cache_files[0]["filename"]).parent / "key.json").write_text(content, encoding="latin-1")
    assert table.cached_check(read_.table, "key", lambda: ["again"]) == ["again"]


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path):
    root = write_data(tmp_path / "data")
    (tmp_path / "cache").touch()
    with pytest.raises(UserError, match="^cache_dir: cannot keep the table"):
        read(root)


def test_a_disk_that_fills_under_the_table_is_one_line(tmp_path, monkeypatch):
    """Closing the file fails too, and must not hide why."""

    class Full(table.ArrowWriter):
        def write(self, *_, **__):
            raise OSError(28, "No space left on device")

        def close(self):
            super().close()
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(table, "ArrowWriter", Full)
    monkeypatch.setattr(table, "checked_row", dict)
    with pytest.raises(UserError, match="cannot keep the table.*No space left.*free some space"):
        table._build(lambda: iter([{"text": "a"}]), "x", tmp_path, "cannot keep the table")
    assert list(tmp_path.iterdir()) == []
