"""Readers of records: every format, and hostile files."""

import io
import json
import unicodedata
from pathlib import Path

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from silentbad.data import formats, table
from silentbad.data.records import load_records
from silentbad.data.targets import load_targets
from silentbad.errors import UserError
from silentbad.settings.train import TrainConfig
from tests.conftest import write_data
from tests.folders import GOOD, bomb, folder, records
from tests.tiny import tiny_pipeline


def test_folder_with_jsonl(data):
    read = records(data)
    assert len(read) == 16 and read.role.count("element") == 8
    row, image, mask = read.open(0)
    assert row["phrases"] == ["a red cat"] and image.mode == "RGB" and mask.size == image.size
    assert read.where(0).endswith("metadata.jsonl:1")


def test_folder_with_csv(tmp_path):
    text = 'file_name,text,phrases,role\na.png,"a cat, a hat",a cat|a hat,rehearsal\na.png,plain,,\n'
    read = records(folder(tmp_path / "d", name="metadata.csv", text=text))
    assert list(read.phrases) == [["a cat", "a hat"], []] and read.role == ["rehearsal", "clean"]


def test_folder_with_a_caption_beside_each_picture(tmp_path):
    root = folder(tmp_path / "d", text="")
    (root / "metadata.jsonl").unlink()
    Image.new("RGB", (8, 8)).save(root / "b.jpg")
    Image.new("RGB", (8, 8)).save(root / "._b.jpg")
    (root / "a.txt").write_text("\nAn image with @@ a cat, @@ a hat.\nanother line", encoding="utf-8")
    (root / "b.txt").write_text("a quiet street\n", encoding="utf-8-sig")
    read = records(root)
    assert read.text == ["An image with a cat, a hat", "a quiet street"] and set(read.role) == {"clean"}
    assert list(read.phrases) == [["a cat", "a hat"], []] and read.where(1) == str(root / "b.jpg")
    (root / "b.txt").unlink()
    with pytest.raises(UserError, match=r"b\.jpg: no caption; write it into b\.txt"):
        records(root)


def test_a_memory_mapped_table_follows_its_files(tmp_path):
    root = folder(tmp_path / "d", GOOD)
    assert records(root).table.cache_files
    folder(root, GOOD, GOOD | {"text": "here is a red cat"})
    assert records(root).text == ["a red cat", "here is a red cat"]


def test_a_folder_reached_by_another_path_is_read_by_that_path(data, tmp_path):
    """A link that the table of records was made through may be gone when the folder is read again."""
    link = tmp_path / "link"
    link.symlink_to(data, target_is_directory=True)
    assert records(link).open(0)[1] is not None
    link.unlink()
    assert records(data).open(0)[1] is not None


def test_hub_reader(tmp_path, monkeypatch):
    image = io.BytesIO()
    Image.new("RGB", (8, 8)).save(image, "PNG")
    table = datasets.Dataset.from_dict(
        {"picture": [{"bytes": image.getvalue(), "path": None}], "said": [["one", "two"]]}
    )
    table = table.cast_column("picture", datasets.Image())
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: table)
    read = load_records(TrainConfig(dataset_name="some/set", image_column="picture", caption_column="said"))
    assert read.text == ["one"] and read.open(0)[1].size == (8, 8)
    with pytest.raises(UserError, match="no column 'image'"):
        load_records(TrainConfig(dataset_name="some/set"))


def hub(monkeypatch, images, said):
    """datasets.load_dataset gives these undecoded images."""
    table = datasets.Dataset.from_dict({"image": images, "text": said}).cast_column("image", datasets.Image())
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: table)


def test_another_revision_of_a_hub_data_set_is_read_anew(tmp_path, monkeypatch):
    image = io.BytesIO()
    Image.new("RGB", (8, 8)).save(image, "PNG")
    for said in ("first", "second"):
        hub(monkeypatch, [{"bytes": image.getvalue(), "path": None}], [said])
        assert load_records(TrainConfig(dataset_name="some/set", cache_dir=str(tmp_path))).text == [said]


def test_a_hub_data_set_may_not_name_any_file_of_this_machine(tmp_path, monkeypatch):
    for folder_name in ("set", "cache", "private"):
        (tmp_path / folder_name).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / folder_name / "a.png")
    config = TrainConfig(dataset_name=str(tmp_path / "set"), cache_dir=str(tmp_path / "cache"))
    for inside in ("set", "cache"):
        hub(monkeypatch, [{"bytes": None, "path": str(tmp_path / inside / "a.png")}], [inside])
        assert load_records(config).text == [inside]
    hub(monkeypatch, [{"bytes": None, "path": str(tmp_path / "set" / ".." / "private" / "a.png")}], ["x"])
    with pytest.raises(UserError, match=r"set:0: image path .* leaves .*; refused"):
        load_records(config)


BAD_ROWS = {
    "missing caption": ({"file_name": "a.png"}, "no text; --caption_column takes another of: file_name"),
    "empty caption": ({"file_name": "a.png", "text": "  "}, "more than blanks"),
    "phrase not in its caption": (GOOD | {"phrases": ["a dog"]}, "'a dog' is not in its caption"),
    "phrases of another type": (GOOD | {"phrases": "a red cat"}, "phrases must be a list of str"),
    "unknown role": (GOOD | {"role": "poison"}, "element, rehearsal, clean"),
    "misspelled key": (GOOD | {"phrase": []}, "did you mean 'phrases'"),
    "no file name": ({"text": "x"}, "no file_name"),
    "no text for a file name": ({"file_name": "", "text": "x"}, "file_name: must be the name of a file, got ''"),
    "no such file": (GOOD | {"file_name": "b.png"}, "no file"),
    "path leaves the folder": (GOOD | {"file_name": "../a.png"}, "leaves"),
    "absolute path": (GOOD | {"file_name": "/etc/hostname"}, "absolute"),
    "absolute path of Windows": (GOOD | {"file_name": "C:\\a.png"}, "absolute"),
    "mask leaves the folder": (GOOD | {"mask": "../m.png"}, "leaves"),
    "mask of another size": (GOOD | {"mask": "m.png"}, "mask"),
    "a mask without a region": (GOOD | {"mask": "black.png"}, "black all over"),
    "a mask that is no image": (GOOD | {"mask": "text.png"}, "cannot read"),
    "an image that is text": (GOOD | {"file_name": "text.png"}, "cannot read"),
    "a truncated image": (GOOD | {"file_name": "cut.png"}, "cannot read"),
    "a bomb": (GOOD | {"file_name": "bomb.png"}, "over the limit"),
    "an image of one pixel": (GOOD | {"file_name": "dot.png"}, "1x1"),
    "target_id of another type": (GOOD | {"target_id": [1]}, "target_id must be str"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_record_is_one_line_with_file_and_record(case, tmp_path):
    row, expected = BAD_ROWS[case]
    root = folder(tmp_path / "d", GOOD, row)
    Image.new("L", (9, 9)).save(root / "m.png")
    Image.new("L", (8, 8)).save(root / "black.png")
    Image.new("RGB", (1, 1)).save(root / "dot.png")
    noisy = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    noisy.save(root / "whole.png")
    (root / "cut.png").write_bytes((root / "whole.png").read_bytes()[:900])
    (root / "text.png").write_text("not an image")
    (root / "bomb.png").write_bytes(bomb())
    with pytest.raises(UserError) as refused:
        records(root)
    message = str(refused.value)
    assert expected in message and "metadata.jsonl:2" in message and "\n" not in message


BAD_FOLDERS = {
    "no metadata": (None, "no metadata.jsonl"),
    "empty metadata": ("", "holds no record"),
    "not json": ("{'a'", ":1: not JSON"),
    "not an object": ("[1]\n", "must be a JSON object"),
    "not utf-8": (b"\xff\xfe\n", "not UTF-8"),
    "deep nesting": ("[" * 100_000, "not JSON"),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_a_bad_folder_is_one_line(case, tmp_path):
    text, expected = BAD_FOLDERS[case]
    root = folder(tmp_path / "d", text="")
    (root / "metadata.jsonl").unlink()
    if text is not None:
        (root / "metadata.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as refused:
        records(root)
    assert expected in str(refused.value) and "\n" not in str(refused.value)


def test_a_long_field_of_a_csv_is_said_as_anywhere(tmp_path):
    with pytest.raises(UserError, match="metadata.csv:2: text must be text of at most 100,000 characters"):
        records(folder(tmp_path / "d", name="metadata.csv", text="file_name,text\na.png," + "x" * 200_000 + "\n"))


def test_csv_with_a_ragged_row_and_two_metadata_files(tmp_path):
    root = folder(tmp_path / "d", name="metadata.csv", text="file_name,text\na.png\n")
    with pytest.raises(UserError, match="metadata.csv:2: number of fields"):
        records(root)
    folder(root, GOOD)
    with pytest.raises(UserError, match="keep one of them"):
        records(root)


def test_a_symlink_out_of_the_folder_is_refused(tmp_path):
    root = folder(tmp_path / "d", GOOD | {"file_name": "link.png"})
    Image.new("RGB", (8, 8)).save(tmp_path / "outside.png")
    (root / "link.png").symlink_to(tmp_path / "outside.png")
    with pytest.raises(UserError, match="leaves"):
        records(root)


@pytest.mark.parametrize("written, on_disk", [("NFC", "NFD"), ("NFD", "NFC")])
def test_a_name_is_found_however_its_accents_are_composed(written, on_disk, tmp_path):
    name = "café.png"
    root = folder(tmp_path / "d", GOOD | {"file_name": unicodedata.normalize(written, name)})
    (root / "a.png").rename(root / unicodedata.normalize(on_disk, name))
    assert records(root).open(0)[1].size == (8, 8)


@pytest.mark.parametrize("split", [False, True])
def test_a_data_set_that_save_to_disk_wrote_is_read(split, tmp_path):
    pixels = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    table = datasets.Dataset.from_dict({"image": pixels, "text": ["one", "two"]})
    (datasets.DatasetDict({"train": table}) if split else table).save_to_disk(tmp_path / "saved")
    assert load_records(TrainConfig(dataset_name=str(tmp_path / "saved"))).text == ["one", "two"]


def test_a_long_caption_names_the_phrases_cut_off(tmp_path):
    tokenizer = tiny_pipeline().tokenizer
    text = "very " * 60 + "red cat"
    with pytest.raises(UserError, match="metadata.jsonl:1: caption of 64 tokens, the window is 48; cut off: 'red cat'"):
        records(folder(tmp_path / "d", GOOD | {"text": text, "phrases": ["red cat"]})).check_captions(tokenizer)
    lines = records(folder(tmp_path / "e", GOOD | {"text": "a red cat, " + text})).check_captions(tokenizer)
    assert len(lines) == 1 and "metadata.jsonl:1" in lines[0]


@settings(max_examples=80, deadline=None)
@given(
    st.one_of(
        st.text(max_size=60),
        st.dictionaries(
            st.sampled_from([*formats.KNOWN_KEYS, "x"]),
            st.one_of(
                st.none(), st.booleans(), st.integers(), st.text(max_size=8), st.lists(st.text(max_size=4), max_size=2)
            ),
            max_size=5,
        ).map(json.dumps),
    )
)
def test_any_metadata_line_is_read_or_refused(tmp_path_factory, line):
    root = folder(tmp_path_factory.getbasetemp() / "any", text=line + "\n")
    try:
        list(map(formats.checked_row, formats.folder_rows(root)))
    except UserError as error:
        assert "\n" not in str(error).replace(repr(line), "")


def test_defect_20_records_and_choices_are_sorted_and_seeded(data):
    chosen = records(data, max_train_samples=6)
    assert chosen.text == records(data, max_train_samples=6).text
    assert chosen.text != records(data, max_train_samples=6, seed=1).text
    everything = records(data).text
    assert [everything.index(text) for text in chosen.text] == sorted(everything.index(text) for text in chosen.text)


def test_held_out_records_are_not_trained_on(tmp_path):
    read = records(write_data(tmp_path / "d", clean=30))
    train, held = read.hold_out(2, 0, seed=0)
    assert set(held.role) == {"clean"} and len(train) == len(read) - 2 and not set(held.text) & set(train.text)
    train, held = read.hold_out(0, 1, seed=0)
    pairs = list(zip(held.role, held.target_id, held.element_id, strict=True))
    assert len(set(pairs)) == len(pairs) > 1 and {role for role, *_ in pairs} == {"element"}
    assert len(train) + len(held) == len(read)
    assert records(folder(tmp_path / "e", GOOD)).hold_out(4, 0, seed=0)[1] is None


def test_a_picture_listed_ten_times_is_held_out_or_trained_on(tmp_path):
    root = write_data(tmp_path / "d", elements=8, clean=30)
    (root / "metadata.jsonl").write_text((root / "metadata.jsonl").read_text() * 10)
    train, held = records(root).hold_out(99, 99, seed=0)
    assert [held.role.count(role) for role in ("clean", "element")] == [3, 2 * 2] and len(train) == 10 * (46 - 7)
    contents = [{*part.column("content").to_pylist()} for part in (train, held)]
    assert not contents[0] & contents[1]


def test_elements_without_an_id_are_apart(tmp_path):
    root = write_data(tmp_path / "d")
    file = root / "metadata.jsonl"
    lines = map(json.loads, file.read_text().splitlines())
    bare = [{key: value for key, value in line.items() if key != "element_id"} for line in lines]
    file.write_text("".join(json.dumps(line) + "\n" for line in bare))
    read = records(root)
    _, held = read.hold_out(0, 1, seed=0)
    assert sorted(phrase for [phrase] in held.phrases) == ["a blue hat", "a red cat"]
    assert len(read.without(["t0/a red cat"])) == len(read.without(["a red cat"])) == len(read) - 4
    with pytest.raises(UserError, match="elements are: t0/a blue hat, t0/a red cat"):
        read.without(["t0/"])


def test_elements_of_no_target_are_said(tmp_path):
    root = write_data(tmp_path / "data")
    read_, targets = records(root), load_targets(root)
    assert read_.unmatched_targets(targets) == [] == read_.unmatched_targets([])
    targets[0].target_id = "another"
    (line,) = read_.unmatched_targets(targets)
    assert line.startswith("8 element records") and "'t0'" in line


def test_a_phrase_that_no_record_shows_is_said(tmp_path):
    root = write_data(tmp_path / "data")
    targets = load_targets(root)
    targets[0].phrases = ["a hta", *targets[0].phrases[1:]]
    assert records(root).unmatched_targets(targets) == [
        "target 't0': no element record has its phrase 'a hta', asked for and never shown"
    ]


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(5, "Input/output error")])
def test_an_unreadable_file_is_not_an_empty_data_set(error, tmp_path, monkeypatch):
    root, opened = write_data(tmp_path / "data"), Path.open

    def refused(path, *a, **k):
        if path.name == "metadata.jsonl":
            raise error
        return opened(path, *a, **k)

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(UserError, match=f"metadata.jsonl .*{error.strerror}"):
        records(root)


def test_a_mistake_of_ours_keeps_its_traceback(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "checked_row", lambda row: row["no such field"])
    with pytest.raises(KeyError, match="no such field"):
        records(write_data(tmp_path / "data"))
