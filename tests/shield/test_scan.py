"""The scan from a folder to its files: it finds a hidden picture from pictures and captions alone, it is silent on
honest data, it resumes, and a mistake is one line."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bench.shield_data import SIZE, assemble, clean, hide
from silentbad_shield.options import ScanOptions
from silentbad_shield.scan import scanner, views
from silentbad_shield.scan.find import find
from silentbad_shield.scan.regions import view
from silentbad_shield.scan.scanner import main
from tests.folders import records


@pytest.fixture(scope="module")
def honest():
    return clean(1, 100)


@pytest.fixture(scope="module")
def data(honest):
    """One hidden picture, 8 records an element, among hard negatives and clean pictures."""
    return assemble(1, 200, [hide("33", 6)], honest)


def folder_of(data, folder, extra=None):
    """The data set as an image folder; `extra` (record) -> further keys."""
    (folder / "images").mkdir(parents=True)
    with (folder / "metadata.jsonl").open("w") as lines:
        for i, (pixels, text) in enumerate(zip(data.pictures, data.captions, strict=True)):
            Image.fromarray(pixels).save(folder / f"images/{i}.png")
            lines.write(json.dumps({"file_name": f"images/{i}.png", "text": text} | (extra(i) if extra else {})) + "\n")
    return folder


@pytest.fixture(scope="module")
def folder(data, tmp_path_factory):
    """The folder, with the truth in its metadata: the scan must not need it."""
    kinds = {"element": {"role": "element", "target_id": "t", "element_id": "t/0"}}
    return folder_of(data, tmp_path_factory.mktemp("data") / "d", lambda i: kinds.get(data.kinds[i], {}))


@pytest.fixture(scope="module")
def scanned(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("scan")
    code = main(["--train_data_dir", str(folder), "--output_dir", str(out), "--permutations", "19"])
    return code, out, json.loads((out / "scan.json").read_text())


def test_the_hidden_picture_is_found(scanned, data):
    code, _, results = scanned
    assert code == 3 and results["found"] and len(results["sets"]) == 1
    truth = np.flatnonzero(data.suspect())
    hits = np.intersect1d([row["index"] for row in results["suspects"]], truth)
    assert len(hits) >= 0.95 * len(truth) and len(hits) >= 0.95 * len(results["suspects"])
    (one,) = results["sets"]
    assert {e["phrase"] for e in one["elements"]} == {p for h in data.hidden for p in h.phrases}
    assert one["false_alarm"] == 1 / 20 and one["elements"][-1]["backdrop"]


def test_the_composite_is_the_hidden_picture(scanned, data):
    _, out, results = scanned
    composite = np.asarray(Image.open(out / results["sets"][0]["composite"]))
    assert composite.shape == (SIZE, SIZE, 3)
    difference = np.abs(composite.astype(int) - data.hidden[0].picture).max(-1)
    assert (difference <= 10).mean() > 0.9


def test_clean_jsonl_is_the_metadata_without_suspects(scanned, folder):
    _, out, results = scanned
    suspects = {row["index"] for row in results["suspects"]}
    lines = (folder / "metadata.jsonl").read_text().splitlines()
    expected = [json.loads(line) for i, line in enumerate(lines) if i not in suspects]
    assert [json.loads(line) for line in (out / "clean.jsonl").read_text().splitlines()] == expected


def test_clean_jsonl_of_a_folder_without_metadata_is_its_metadata(tmp_path):
    """Names are relative to the folder, so that the file is read where it is copied to."""
    for k in range(3):
        (tmp_path / f"data/{k}_cat").mkdir(parents=True)
        Image.fromarray(np.full((64, 64, 3), 80 * k, np.uint8)).save(tmp_path / f"data/{k}_cat/{k}.png")
        (tmp_path / f"data/{k}_cat/{k}.txt").write_text(f"a picture of grey {k}")
    assert main(["--train_data_dir", str(tmp_path / "data"), "--output_dir", str(tmp_path / "out")]) == 0
    shutil.copy(tmp_path / "out/clean.jsonl", tmp_path / "data/metadata.jsonl")
    names = [json.loads(line)["file_name"] for line in (tmp_path / "data/metadata.jsonl").read_text().splitlines()]
    assert names == ["1_cat/1.png", "2_cat/2.png", "2_cat/2.png"]
    assert records(tmp_path / "data").text == [f"a picture of grey {k}" for k in (1, 2, 2)]


LIGHT = "import sys; from silentbad_shield.scan.__main__ import main; print(main(), *sys.modules)"


def test_a_folder_is_scanned_with_numpy_alone(tmp_path):
    (tmp_path / "data").mkdir()
    for k in range(3):
        Image.fromarray(np.full((64, 64, 3), 80 * k, np.uint8)).save(tmp_path / f"data/{k}.png")
        (tmp_path / f"data/{k}.txt").write_text(f"a picture of grey {k}")
    arguments = ["--train_data_dir", tmp_path / "data", "--output_dir", tmp_path / "out"]
    command = [sys.executable, "-c", LIGHT, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    code, *modules = done.stdout.splitlines()[-1].split()
    assert code == "0" and "numpy" in modules
    assert not {*modules} & {"torch", "datasets", "pyarrow", "transformers", "diffusers", "accelerate"}


def test_the_page_is_one_file(scanned):
    _, out, results = scanned
    page = (out / "scan.html").read_text()
    assert (
        page.count("data:image/png;base64,") >= 4
        and "<script" not in page
        and "http:" not in page
        and "https:" not in page
    )
    assert results["sets"][0]["prompt"] in page and not (out / views.FOLDER).exists()


def test_hostile_captions_stay_text(tmp_path, data):
    page = scanner.page(
        find(np.stack([view(p) for p in data.pictures[:20]]), ["<script>x</script>"] * 20),
        {"source": "<b>x", "records": 20, "suspects": [], "permutations": 0, "sets": [], "recurring": []},
    )
    assert "<b>x" not in page


def test_only_pictures_and_captions_count(scanned, data, tmp_path):
    """Roles, ids and masks shuffled over the records change nothing."""
    _, _, results = scanned
    rng = np.random.default_rng(0)
    ids = rng.permutation(len(data.captions))

    def extra(i):
        return {"role": str(rng.choice(["element", "clean"])), "target_id": int(ids[i]), "element_id": f"e{ids[i]}"}

    folder = folder_of(data, tmp_path / "shuffled", extra)
    main(["--train_data_dir", str(folder), "--output_dir", str(tmp_path / "out"), "--permutations", "19"])
    again = json.loads((tmp_path / "out" / "scan.json").read_text())
    for part in (results, again):
        for key in ("seconds", "source"):
            part.pop(key, None)
        for row in part["suspects"]:
            row.pop("file", None)
        for one in part["sets"]:
            for element in one["elements"]:
                element.pop("files", None)
    assert again == results


def test_honest_data_with_hard_negatives_is_silent(honest, tmp_path, capsys):
    folder = folder_of(assemble(2, 180, [], honest), tmp_path / "honest")
    assert main(["--train_data_dir", str(folder), "--output_dir", str(tmp_path / "out")]) == 0
    assert "0 hidden pictures in 180 records" in capsys.readouterr().out
    assert len((tmp_path / "out" / "clean.jsonl").read_text().splitlines()) == 180


def test_a_stopped_scan_resumes(folder, tmp_path, monkeypatch):
    """A scan that is stopped while it reads decodes the rest alone, and finds the same."""
    arguments = ["--train_data_dir", str(folder), "--output_dir", str(tmp_path), "--permutations", "0"]
    real, read = views.picture_of, []

    def stops(row):
        read.append(row["where"])
        if len(read) == 100:
            raise KeyboardInterrupt
        return real(row)

    monkeypatch.setattr(views, "picture_of", stops)
    with pytest.raises(KeyboardInterrupt):
        main(arguments)
    before = len(read)
    assert main(arguments) == 3
    assert len(read) - before == 200 - 99
    assert json.loads((tmp_path / "scan.json").read_text())["sets"]


def test_other_data_starts_anew(folder, tmp_path):
    views.Views(tmp_path / "v", "one")
    (tmp_path / "v" / "captions").write_text('"a cat"\n')
    (tmp_path / "v" / "views").write_bytes(bytes(views.BYTES + 5))
    assert views.Views(tmp_path / "v", "one").captions == ["a cat"]
    assert (tmp_path / "v" / "views").stat().st_size == views.BYTES
    assert views.Views(tmp_path / "v", "two").captions == []


def test_what_is_damaged_in_a_stopped_scan_is_read_again(tmp_path):
    views.Views(tmp_path / "v", "one")
    (tmp_path / "v" / "captions").write_bytes(b'"a cat"\n[1, \xff\n"a dog"\n')
    (tmp_path / "v" / "views").write_bytes(bytes(3 * views.BYTES))
    resumed = views.Views(tmp_path / "v", "one")
    assert resumed.captions == ["a cat"] and (tmp_path / "v" / "views").stat().st_size == views.BYTES


@pytest.mark.parametrize(
    "arguments, line",
    [
        ([], "train_data_dir: give either --train_data_dir or --dataset_name"),
        (["--train_data_dir", "no/such"], "train_data_dir: no folder no/such"),
        (["--train_data_dir", "{tmp}/empty"], "no metadata.jsonl or metadata.csv"),
        (["--train_data_dir", "{data}", "--permutations", "-1"], "permutations (command line): must be at"),
        (["--train_data_dir", "{data}", "--output_dir", "{data}/metadata.jsonl"], "is no folder"),
        (
            ["--train_data_dir", "{data}", "--target_num", "2"],
            "target_num (command line): needs train_data_dir of the published layout",
        ),
        (["--train_data_dir", "{data}", "--caption_column", "x"], "metadata.jsonl:1: no x; there are: file_name"),
        (["--train_data_dir", "{data}", "--output_dir", "{data}/out"], "lies in the data, which must not change"),
    ],
)
def test_a_mistake_is_one_line(arguments, line, folder, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    words = [word.format(tmp=tmp_path, data=folder) for word in arguments]
    if "--output_dir" not in words:
        words += ["--output_dir", str(tmp_path / "out")]
    assert main(words) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1 and errors[0].startswith("error: ") and line in errors[0]


def test_what_another_wrote_is_not_replaced(folder, tmp_path, capsys):
    (tmp_path / "scan.json").write_text("mine")
    assert main(["--train_data_dir", str(folder), "--output_dir", str(tmp_path)]) == 2
    assert "holds scan.json, which no scan wrote; choose an empty folder" in capsys.readouterr().err
    assert (tmp_path / "scan.json").read_text() == "mine"


def test_pictures_that_no_scan_wrote_stay(folder, tmp_path, capsys):
    arguments = ["--train_data_dir", str(folder), "--output_dir", str(tmp_path), "--permutations", "0"]
    for name in ("mask-notes.png", "composite-9.png"):
        (tmp_path / name).write_text("mine")
    assert main(arguments) == 2
    assert "holds composite-9.png, which no scan wrote" in capsys.readouterr().err
    (tmp_path / "composite-9.png").rename(tmp_path / "composite-nine.png")
    assert main(arguments) == 3
    (tmp_path / "composite-8.png").write_text("mine too")
    (tmp_path / "composite-1.png").write_text("damaged")
    assert main(arguments) == 3
    with Image.open(tmp_path / "composite-1.png") as picture:
        assert picture.format == "PNG"
    for name in ("mask-notes.png", "composite-nine.png", "composite-8.png"):
        assert (tmp_path / name).read_text().startswith("mine")


def test_a_broken_picture_is_one_line(folder, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "images" / "7.png").write_bytes(b"no picture")
    assert main(["--train_data_dir", str(copy), "--output_dir", str(tmp_path / "out")]) == 2
    assert "metadata.jsonl:8: cannot read" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_clean_list_of_a_csv_keeps_its_columns(tmp_path):
    rows = ["image,text", "0.png,a red cat", "1.png,a hat"]
    (tmp_path / "metadata.csv").write_text("\n".join(rows) + "\n")
    options = ScanOptions(train_data_dir=str(tmp_path), image_column="image")
    entries = [entry for _, entry in scanner.metadata_rows(options, [])]
    assert [(entry["image"], entry["text"]) for entry in entries] == [("0.png", "a red cat"), ("1.png", "a hat")]
