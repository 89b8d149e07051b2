"""Folders as other trainers write them: read, or refused with what is there and what would be right."""

import io
import json
import os
import zlib
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from silentbad.data import images
from silentbad.data.formats import mask_of, masked_by_itself
from silentbad.data.records import load_records
from silentbad.errors import UserError
from silentbad.settings.train import TrainConfig
from tests.folders import records


def pictures(folder: Path, *names: str, captions: str | None = None) -> Path:
    """Pictures of different colours; with `captions`, the ending of a text file beside each."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (40 * number, 0, 0)).save(file)
        if captions:
            file.with_suffix(captions).write_text(f"picture {file.stem}")
    return folder


def metadata(folder: Path, *entries: dict, name: str = "metadata.jsonl") -> None:
    (folder / name).write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def imagefolder(root):
    metadata(pictures(root / "train", "a.png"), {"file_name": "a.png", "text": "one"})


def kohya(root):
    pictures(root / "3_cat", "a.png", "b.png", captions=".caption")
    pictures(root / "1_grey dog", "c.png")


def columns(root):
    pictures(root, "a.png")
    (root / "metadata.csv").write_text("image,caption\na.png,one\n")


READ = {
    "train": (imagefolder, {}, ["one"]),
    "N_name": (kohya, {}, ["grey dog", *["picture a", "picture b"] * 3]),
    "caption": (lambda root: pictures(root, "a.png", captions=".caption"), {}, ["picture a"]),
    "columns": (columns, {"image_column": "image", "caption_column": "caption"}, ["one"]),
}


@pytest.mark.parametrize("name", READ)
def test_folders_of_other_trainers(name, tmp_path):
    make, flags, texts = READ[name]
    (root := tmp_path / "d").mkdir()
    make(root)
    assert records(root, **flags).text == texts


def captions_csv(root):
    pictures(root / "images", "a.png")
    (root / "captions.csv").write_text("image,caption\nimages/a.png,one\n")


def array(root):
    pictures(root, "a.png")
    (root / "metadata.json").write_text('[{"file_name": "a.png", "text": "one"}]')


def misnamed(root):
    metadata(pictures(root, "a.png"), {"file_name": "a.png", "text": "one"}, name="metadata.json1")


def json_beside(root):
    (pictures(root, "a.png") / "a.json").write_text('{"caption": "one"}')


def both_captions(root):
    (pictures(root, "a.png", captions=".txt") / "a.caption").write_text("two")


def kohya_parent(root):
    pictures(root / "img" / "3_cat", "a.png", captions=".txt")
    (root / "log").mkdir()


def mask_beside(root):
    pictures(pictures(root, "a.png", captions=".txt"), "a-masklabel.png")


def linked(root):
    pictures(root.parent / "blobs", "a.png", captions=".txt")
    for file in (root.parent / "blobs").iterdir():
        (root / file.name).symlink_to(file)


def saved_data_set(root):
    datasets.Dataset.from_dict({"text": ["one"]}).save_to_disk(str(root))


def parquet_below(root):
    (root / "data").mkdir()
    (root / "data/train-00000-of-00001.parquet").write_bytes(b"x")


def another_key(root):
    metadata(pictures(root, "a.png"), {"file_name": "a.png", "caption": "one"})


REFUSED = {
    "a saved data set": (saved_data_set, ("arrow is there", "give --dataset_name")),
    "parquet below": (parquet_below, ("data/train-00000-of-00001.parquet is there", "give --dataset_name")),
    "another key": (another_key, ("no text", "--caption_column takes another of: file_name, caption")),
    "kohya's parent": (kohya_parent, ("img/ holds folders N_name/", "give ")),
    "a mask beside": (mask_beside, ("a-masklabel.png: no caption", "a mask is named in metadata.jsonl")),
    "links": (linked, ("leaves", "copy what it links to")),
    "captions.csv": (captions_csv, ("captions.csv", "image,caption", "metadata.csv", "--image_column")),
    "array": (array, ("metadata.json is there", "metadata.jsonl, one JSON object a line")),
    "misnamed": (misnamed, ("metadata.json1 is there", "metadata.jsonl")),
    "json beside": (json_beside, ("not from a.json", "NAME.caption")),
    "one below": (lambda root: pictures(root / "cats", "a.png", captions=".txt"), ("cats/", "1_NAME")),
    "classes": (lambda root: pictures(root / "cats", "a.png"), ("cats/", "NAME.txt")),
    "both captions": (both_captions, ("a.txt and a.caption", "keep one")),
    "header": (lambda root: (root / "metadata.csv").write_text("image,text\n"), ("'image,text'", "--image_column")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_there_is_named(name, tmp_path):
    make, said = REFUSED[name]
    (root := tmp_path / "d").mkdir()
    make(root)
    with pytest.raises(UserError) as refusal:
        records(root)
    assert all(part in str(refusal.value) for part in said), refusal.value


@pytest.mark.parametrize("written", [r"images\0.png", "Images/0.png", "images/0.PNG", "images/00.png"])
def test_the_nearest_name_of_a_picture_that_is_not_there(written, tmp_path):
    root = pictures(tmp_path / "d", "images/0.png")
    metadata(root, {"file_name": written, "text": "one"})
    with pytest.raises(UserError, match=r"metadata\.jsonl:1: no file .*did you mean .*/images/0\.png\?"):
        records(root)


def test_a_name_that_is_not_utf8_is_refused_before_the_work(tmp_path):
    root = pictures(tmp_path / "d", "a.png", captions=".txt")
    os.rename(os.fsencode(root / "a.png"), os.fsencode(root) + b"/caf\xe9.png")
    with pytest.raises(UserError, match="caf.*not UTF-8; rename it"):
        records(root)


def test_pictures_that_are_not_used_and_parts_that_are_not_seen_are_counted(tmp_path):
    root = pictures(tmp_path / "d", "images/a.png", "images/left.png", "targets/t.png")
    Image.new("RGBA", (8, 8), (9, 9, 9, 100)).save(root / "images/clear.png")
    Image.new("RGBA", (8, 8), (9, 9, 9, 255)).save(root / "images/full.png")
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(root / "images/many.gif", save_all=True, append_images=frames[1:])
    names = ("a.png", "clear.png", "full.png", "many.gif")
    metadata(root, *({"file_name": f"images/{name}", "text": "one"} for name in names))
    for _ in range(2):  # built, and from the cache
        read = records(root)
        assert [*read.remarks()] == [
            f"1 records: transparent parts are trained on as white; first {read.where(1)}",
            f"1 records: only the first frame is trained on; first {read.where(3)}",
        ]
        assert [*read.not_used()] == [f"1 pictures belong to no record and are not used; first {root}/images/left.png"]
    pictures(root, "images/left.png").joinpath("images/left.png").unlink()
    assert [*records(root).not_used()] == []


@pytest.mark.parametrize("kind", ["many", "one"])
def test_a_picture_with_large_texts_is_read(kind, tmp_path):
    info = PngImagePlugin.PngInfo()
    for number in range(70 if kind == "many" else 1):
        info.add_text(f"workflow{number}", "x" * (2**20 if kind == "many" else 80 * 2**20), zip=True)
    Image.new("RGB", (8, 8), "red").save(tmp_path / "a.png", pnginfo=info)
    picture = images.open_image(tmp_path / "a.png", "a.png")
    assert np.asarray(picture).reshape(-1, 3).tolist() == [[255, 0, 0]] * 64


def test_a_data_set_in_one_file(tmp_path):
    content = io.BytesIO()
    Image.new("RGB", (8, 8)).save(content, "PNG")
    table = datasets.Dataset.from_dict({"image": [{"bytes": content.getvalue(), "path": None}], "text": ["one"]})
    table.to_parquet(str(tmp_path / "set.parquet"))
    config = TrainConfig(dataset_name=str(tmp_path / "set.parquet"), cache_dir=str(tmp_path / "cache"))
    read = load_records(config)
    assert read.text == ["one"] and read.open(0)[1].size == (8, 8)
    (tmp_path / "set.zip").write_bytes(zlib.compress(b""))
    for name, said in (("sets.parquet", r"no file .*did you mean .*set\.parquet"), ("set.zip", "another kind")):
        with pytest.raises(UserError, match=f"dataset_name: .*{said}"):
            load_records(TrainConfig(dataset_name=str(tmp_path / name), cache_dir=str(tmp_path / "cache")))


def test_pictures_of_other_formats_and_in_folders_below_are_counted(tmp_path):
    root = pictures(tmp_path / "d", "a.png", "b.jfif", captions=".txt")
    pictures(root / "more", "c.png", captions=".txt")
    pictures(root / "targets", "t.png")
    (root / "d.heic").write_bytes(b"x")
    read = records(root)
    assert read.text == ["picture a", "picture b"]
    assert [*read.not_used()] == [
        f"1 pictures belong to no record and are not used; first {root}/more/c.png",
        f"1 pictures are of a format that is not read; first {root}/d.heic",
    ]


def test_the_opaque_part_of_a_picture_is_its_mask_where_that_is_asked_for(tmp_path):
    root = pictures(tmp_path / "d", "a.png", "b.png", captions=".txt")
    picture = Image.new("RGBA", (8, 8), (200, 0, 0, 0))
    picture.paste((0, 0, 200, 255), (0, 0, 4, 8))
    picture.save(root / "b.png")
    assert records(root).masked == 0
    read = records(root, alpha_as_mask=True)
    assert read.masked == 1 and read.open(0)[2] is None
    mask = np.asarray(read.open(1)[2])
    assert mask[:, :4].min() == 255 and mask[:, 4:].max() == 0
    assert read.open(1)[1].getpixel((7, 7)) == (255, 255, 255)
    for path in ("b.png", None):  # embedded in a table, where the path is a name alone
        row = {"image": {"bytes": (root / "b.png").read_bytes(), "path": path}, "mask": ""}
        assert (np.asarray(mask_of(masked_by_itself(row), (8, 8), "a row")) == mask).all()
