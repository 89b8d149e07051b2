"""One writer a folder, and nobody's files: locks, markers, and output folders apart from what is read."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from silentbad import owned
from silentbad.errors import UserError

ROOT = Path(__file__).parents[1]
HOLD = """
import sys
from silentbad.owned import claimed
try:
    with claimed(sys.argv[1], "training"):
        print("held", flush=True)
        sys.stdin.read()
except Exception as error:
    print(type(error).__name__, error, flush=True)
"""


def holder(folder: Path) -> subprocess.Popen:
    """A process that asks for a folder's lock, says what it got, and keeps it until its stdin closes."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_second_writer_is_refused(tmp_path):
    with holder(tmp_path / "run") as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="output_dir .*is being written by another process"):
            with owned.claimed(tmp_path / "run", "training"):
                pass
        process.stdin.close()
    with owned.claimed(tmp_path / "run", "training"):
        pass


def test_a_folder_that_only_its_marker_fills_goes(tmp_path):
    for there in (False, True):
        with owned.claimed(tmp_path / "a/run", "audit"):
            owned.mark(tmp_path / "a/run", "audit")
            if there:
                (tmp_path / "a/run/validation.json").touch()
        assert (tmp_path / "a").exists() == there


def test_a_marker_alone_does_not_stay(tmp_path):
    (tmp_path / "mine").touch()
    with owned.claimed(tmp_path, "audit"):
        owned.mark(tmp_path, "audit")
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_the_lock_of_a_killed_process_is_gone(tmp_path):
    process = holder(tmp_path / "run")
    assert process.stdout.readline() == "held\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert (tmp_path / "run" / owned.LOCK).is_file()
    with owned.claimed(tmp_path / "run", "training"):
        pass
    assert not (tmp_path / "run" / owned.LOCK).exists()


def test_a_lock_that_is_a_link_is_not_written_through(tmp_path):
    (tmp_path / "mine").write_text("kept")
    (tmp_path / owned.LOCK).symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match="cannot be written"), owned.claimed(tmp_path, "training"):
        pass
    assert (tmp_path / "mine").read_text() == "kept"


def test_of_many_at_once_one_gets_the_folder(tmp_path):
    processes = [holder(tmp_path / "a" / "run") for _ in range(8)]
    said = [process.stdout.readline() for process in processes]
    assert said.count("held\n") == 1 and sum("UserError" in line for line in said) == 7
    for process in processes:
        process.stdin.close()
        process.wait()
    # the folders may have been made by one that lost, which leaves them to whoever holds the lock
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_same_process_is_a_second_writer_too(tmp_path):
    with owned.claimed(tmp_path, "training"), pytest.raises(UserError, match="is being written"):
        with owned.claimed(tmp_path, "audit"):
            pass


def test_a_folder_that_stays_empty_goes_again(tmp_path):
    with pytest.raises(RuntimeError), owned.claimed(tmp_path / "a" / "b", "training"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with owned.claimed(tmp_path / "a" / "b", "training"):
        owned.mark(tmp_path / "a" / "b", "training")
    assert list(tmp_path.iterdir()) == []
    with owned.claimed(tmp_path / "a" / "b", "training"):
        owned.mark(tmp_path / "a" / "b", "training")
        (tmp_path / "a" / "b" / "kept").touch()
    assert owned.kind_of(tmp_path / "a" / "b") == "training"


def test_what_nobody_of_us_wrote_is_not_replaced(tmp_path):
    (tmp_path / "report.html").write_text("mine")
    with pytest.raises(UserError, match="holds report.html, which no audit wrote"):
        with owned.claimed(tmp_path, "audit", key="--output_dir", writes=("validation.json", "report.html")):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    owned.mark(tmp_path, "audit")
    with owned.claimed(tmp_path, "audit", writes=("report.html",)):
        pass
    with pytest.raises(UserError, match="another command"), owned.claimed(tmp_path, "training", writes=()):
        pass


@pytest.mark.parametrize(
    "out, source", [("data", "data"), ("data/run", "data"), ("link", "data"), ("data", "link"), ("run", "run/pipeline")]
)
def test_an_output_folder_among_the_inputs_is_refused(out, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("run/pipeline").mkdir(parents=True)
    Path("link").symlink_to("data")
    with pytest.raises(UserError, match="^output_dir .*train_data_dir .*which is read"):
        owned.refuse_overlap(out, {"train_data_dir": source}, ("pipeline",))
    owned.refuse_overlap(
        "other", {"train_data_dir": source, "cache_dir": None, "dataset_name": "no/where"}, ("pipeline",)
    )
