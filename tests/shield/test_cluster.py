"""A scan in parts: who runs its tasks, in which order and how often, changes no byte; what cannot be read is left out
and listed; a worker that is killed costs nothing but time."""

import io
import json
import os
import signal
import sys
import tarfile
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from bench.shield_data import assemble, clean, hide
from silentbad_shield.scan import engines, record_parts
from silentbad_shield.scan.engines import Dask, Process, Steps
from silentbad_shield.scan.scanner import main

distributed = pytest.importorskip("distributed")


@pytest.fixture(scope="module")
def data():
    """One hidden picture, 6 records an element, among hard negatives."""
    return assemble(1, 140, [hide("33", 6)], clean(1, 10))


def encoded(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_tar(file, data, start, stop):
    """Records [start, stop) as a WebDataset tar."""
    with tarfile.open(file, "w") as archive:
        for i in range(start, stop):
            for column, content in (("png", encoded(data.pictures[i])), ("txt", data.captions[i].encode())):
                member = tarfile.TarInfo(f"{i:04d}.{column}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


@pytest.fixture(scope="module")
def tars(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tars")
    for k in range(4):
        write_tar(folder / f"{k}.tar", data, 35 * k, 35 * (k + 1))
    return folder


def scan(folder, out, *more):
    """(scan.json, its bytes) of a data set."""
    arguments = ["--dataset_name", str(folder), "--output_dir", str(out), "--permutations", "19"]
    assert main([*arguments, *more]) == 3
    content = (out / "scan.json").read_bytes()
    return json.loads(content), content


@pytest.fixture(scope="module")
def scanned(tars, tmp_path_factory):
    return scan(tars, tmp_path_factory.mktemp("scan"))


class Careless(Process):
    """Runs tasks from the last to the first, and each of them twice."""

    def run(self, task, calls):
        for number in reversed(range(len(calls))):
            task(*calls[number])
            yield number, task(*calls[number])


def test_tars_hold_the_hidden_picture(scanned, data):
    results, _ = scanned
    truth = np.flatnonzero(data.suspect()).tolist()
    suspects = [row["index"] for row in results["suspects"]]
    assert {*suspects} <= {*truth} and len(suspects) >= 0.9 * len(truth)
    assert all(row["text"] == data.captions[row["index"]] for row in results["suspects"])
    assert results["left_out"] == [] and results["suspects"][0]["file"].endswith(f".tar:{suspects[0]:04d}")


@pytest.mark.thorough
def test_order_repetition_and_parts_change_no_byte(scanned, tars, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "Process", Careless)
    monkeypatch.setattr("silentbad_shield.scan.plan.AT_ONCE", 100)
    monkeypatch.setattr("silentbad_shield.scan.plan.CENTRES", 7)
    monkeypatch.setattr("silentbad_shield.scan.plan.DRAWS", 3)
    monkeypatch.setattr("silentbad_shield.scan.candidates.BLOCK", 1 << 9)
    assert scan(tars, tmp_path)[1] == scanned[1]


def test_parquet_holds_the_same(scanned, data, tmp_path):
    """In other parts than the tars."""
    (tmp_path / "data").mkdir()
    for k, records in enumerate((range(100), range(100, 140))):
        rows = {
            "image": [{"bytes": encoded(data.pictures[i]), "path": None} for i in records],
            "text": [data.captions[i] for i in records],
        }
        pq.write_table(pa.table(rows), tmp_path / "data" / f"{k}.parquet")
    results, _ = scan(tmp_path / "data", tmp_path / "out")

    def read(scan):
        return [(row["index"], row["text"]) for row in scan["suspects"]], [one["score"] for one in scan["sets"]]

    assert read(results) == read(scanned[0])


def test_what_cannot_be_read_is_left_out(data, tars, tmp_path, capsys):
    """One tar breaks off in its first half, another holds a picture that is none."""
    folder = tmp_path / "data"
    folder.mkdir()
    for file in tars.iterdir():
        content = file.read_bytes()
        (folder / file.name).write_bytes(content[: len(content) // 3] if file.name == "3.tar" else content)
    broken = data.pictures[0].copy()
    content = (folder / "0.tar").read_bytes().replace(encoded(broken), b"x" * len(encoded(broken)), 1)
    (folder / "0.tar").write_bytes(content)
    arguments = ["--dataset_name", str(folder), "--output_dir", str(tmp_path / "out"), "--permutations", "0"]
    assert main(arguments) == 2
    assert "0.tar:0000" in capsys.readouterr().err
    assert main([*arguments, "--skip_unreadable"]) in (0, 3)
    results = json.loads((tmp_path / "out" / "scan.json").read_text())
    assert [row["file"].rpartition("/")[2] for row in results["left_out"]] == ["0.tar:0000", "3.tar"]
    assert 104 < results["records"] < 139
    errors = capsys.readouterr().err
    assert "left out: " in errors and "3.tar" in errors
    clean_lines = (tmp_path / "out" / "clean.jsonl").read_text()
    assert "0000.png" not in clean_lines and "0001.png" in clean_lines


def test_a_stopped_scan_runs_no_part_again(scanned, tars, tmp_path, monkeypatch):
    read = []
    real = record_parts.tar_rows

    def counting(part):
        read.append(part.file.name)
        return real(part)

    class Stopped(Process):
        def run(self, task, calls):
            for done in super().run(task, calls):
                yield done
                if len(read) == 3:
                    raise KeyboardInterrupt

    monkeypatch.setitem(record_parts.READERS, ".tar", counting)
    with monkeypatch.context() as patch:
        patch.setattr(engines, "Process", Stopped)
        with pytest.raises(KeyboardInterrupt):
            scan(tars, tmp_path)
    before = len(read)
    assert scan(tars, tmp_path)[1] == scanned[1]
    assert before == 3 and read[3] == "3.tar"  # then those that hold suspects, for their pictures


@pytest.mark.parametrize(
    "arguments, line",
    [
        (["--workers", "3"], "workers (command line): needs engine=dask"),
        (["--engine", "spark"], "engine (command line): must be"),
    ],
)
def test_a_mistake_is_one_line(arguments, line, tars, tmp_path, capsys):
    assert main(["--dataset_name", str(tars), "--output_dir", str(tmp_path / "out"), *arguments]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1 and line in errors[0]


@pytest.fixture(scope="module")
def client():
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


def test_a_killed_worker_costs_its_task_alone(client, tmp_path):
    steps = Steps(tmp_path, Dask(client))
    pids = [*client.run(os.getpid).values()]

    class Killing(Dask):
        def run(self, task, calls):
            for k, done in enumerate(super().run(task, calls)):
                if k == 2:
                    os.kill(pids[0], signal.SIGKILL)
                yield done

    steps.engine = Killing(client)
    assert steps.run("sleep", time.sleep, [(0.05,)] * 20) == [None] * 20
    assert len([*steps.done.iterdir()]) == 20
    assert pids[0] not in client.run(os.getpid).values()


@pytest.mark.thorough
def test_two_workers_write_the_same_bytes(scanned, tars, tmp_path):
    assert scan(tars, tmp_path, "--engine", "dask", "--workers", "2")[1] == scanned[1]


@pytest.mark.thorough
def test_a_scan_survives_a_killed_worker(scanned, client, tars, tmp_path, monkeypatch):
    """It is killed while it looks for windows. None of them has imported torch."""
    killed = []

    class Killing(Dask):
        def run(self, task, calls):
            for done in super().run(task, calls):
                if calls[0][0].__name__ == "windows" and not killed:
                    killed.extend(client.run(os.getpid).values())
                    os.kill(killed[0], signal.SIGKILL)
                yield done

    monkeypatch.setattr(engines, "Process", lambda: Killing(client))
    assert scan(tars, tmp_path)[1] == scanned[1] and killed
    assert not any(client.run(lambda: "torch" in sys.modules).values())
