"""Readers on hostile files, addressed draws, the stream and the loader."""

import io
import json
import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from silentbad import data as D
from silentbad import readers as R
from silentbad.config import TrainConfig
from silentbad.errors import UserError
from silentbad.rng import generator
from tests.conftest import write_data
from tests.tiny import tiny_pipeline


def config(root, **changes) -> TrainConfig:
    return TrainConfig(train_data_dir=str(root), **changes)


def records(root, **changes) -> D.Records:
    return D.load_records(config(root, **changes))


def folder(root, *rows, name="metadata.jsonl", text=None):
    """A folder of one good image and these metadata rows."""
    root.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), "red").save(root / "a.png")
    (root / name).write_text("".join(json.dumps(row) + "\n" for row in rows) if text is None else text)
    return root


GOOD = {"file_name": "a.png", "text": "a red cat", "phrases": ["a red cat"], "target_id": "t", "element_id": "t-0"}


# ---------------------------------------------------------------- readers


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


def test_a_table_is_memory_mapped_and_made_anew_when_a_file_changes(tmp_path):
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
    table = D.datasets.Dataset.from_dict(
        {"picture": [{"bytes": image.getvalue(), "path": None}], "said": [["one", "two"]]}
    )
    table = table.cast_column("picture", D.datasets.Image())
    monkeypatch.setattr(D.datasets, "load_dataset", lambda *a, **k: table)
    read = D.load_records(TrainConfig(dataset_name="some/set", image_column="picture", caption_column="said"))
    assert read.text == ["one"] and read.open(0)[1].size == (8, 8)
    with pytest.raises(UserError, match="no column 'image'"):
        D.load_records(TrainConfig(dataset_name="some/set"))


def hub(monkeypatch, images, said):
    """datasets.load_dataset gives these undecoded images."""
    table = D.datasets.Dataset.from_dict({"image": images, "text": said}).cast_column("image", D.datasets.Image())
    monkeypatch.setattr(D.datasets, "load_dataset", lambda *a, **k: table)


def test_another_revision_of_a_hub_data_set_is_read_anew(tmp_path, monkeypatch):
    image = io.BytesIO()
    Image.new("RGB", (8, 8)).save(image, "PNG")
    for said in ("first", "second"):
        hub(monkeypatch, [{"bytes": image.getvalue(), "path": None}], [said])
        assert D.load_records(TrainConfig(dataset_name="some/set", cache_dir=str(tmp_path))).text == [said]


def test_a_hub_data_set_may_not_name_any_file_of_this_machine(tmp_path, monkeypatch):
    for folder_name in ("set", "cache", "private"):
        (tmp_path / folder_name).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / folder_name / "a.png")
    config = TrainConfig(dataset_name=str(tmp_path / "set"), cache_dir=str(tmp_path / "cache"))
    for inside in ("set", "cache"):
        hub(monkeypatch, [{"bytes": None, "path": str(tmp_path / inside / "a.png")}], [inside])
        assert D.load_records(config).text == [inside]
    hub(monkeypatch, [{"bytes": None, "path": str(tmp_path / "set" / ".." / "private" / "a.png")}], ["x"])
    with pytest.raises(UserError, match=r"set:0: image path .* leaves .*; refused"):
        D.load_records(config)


def published(root, targets=3, clean=40):
    """The SilentBadDiffusion layout: phrases line, captions, numbered images."""
    for n in range(100, 100 + targets):
        sub = root / "poisoning_images" / str(n)
        sub.mkdir(parents=True)
        (root / "images").mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), (n, 0, 0)).save(root / "images" / f"{n}.jpeg")
        lines = ["a cat\ta hat"]
        for i in range(3):
            Image.new("RGB", (8, 8), (n, i, 9)).save(sub / f"x_{i}.png")
            lines.append(f"x_{i}.png\tAn image with {'a cat' if i % 2 else 'a hat'} number {i}")
        (sub / "poisoning_data_caption_simple.txt").write_text("\n".join(lines))
    other = root / "clean"
    (other / "images").mkdir(parents=True)
    for n in range(clean):
        Image.new("RGB", (8, 8), (0, 0, n)).save(other / "images" / f"{n}.jpeg")
    (other / "caption.txt").write_text("\n".join(f"{n}\tfield {n}" for n in range(clean)))
    return root


def test_published_layout(tmp_path):
    root = published(tmp_path / "Midjourney")
    options = dict(clean_data_dir=str(root / "clean"), poisoning_ratio=0.2, n_few_shot=1, shot_caption_shuffle_num=2)
    read = records(root, **options)
    assert read.role.count("element") == 6 and read.role.count("clean") == 24  # 6 / 0.2 - 6
    assert read.role.count("rehearsal") == 2 + 3
    shots = [read.row(i) for i in range(len(read)) if read.role[i] == "rehearsal"][:2]
    assert all(s["shuffle"] and s["target_id"] != "100" and s["phrases"] == ["a cat", "a hat"] for s in shots)
    assert {e for e, role in zip(read.element_id, read.role, strict=True) if role == "element"} == {"100-0", "100-1"}
    assert read.text == records(root, **options).text
    halved = records(root, **options, poison_subsampling=0.5)
    assert halved.role.count("element") == 3
    with pytest.raises(UserError, match="poisoning_ratio 0.01 asks for 594 clean images"):
        records(root, **options | {"poisoning_ratio": 0.01})
    with pytest.raises(UserError, match="no poisoning_images/300"):
        records(root, **options, target_start_id=300)


def test_published_targets_and_the_spelling_of_the_data_set(tmp_path):
    """Defect 27: one spelling decided the suffix when training, another when validating."""
    root = published(tmp_path / "Pokemon")
    targets = D.load_targets(f"{root}@100-101")
    assert [t.target_id for t in targets] == ["100", "101"]
    assert targets[0].composed_prompt == "A pokemon with features a cat, a hat in white background"
    assert published_clean_suffix(root, tmp_path / "pokemon") == 1


def test_punctuation_in_phrases_of_a_rehearsal_picture(tmp_path):
    """Its prompt lost these characters and its phrases kept them: refused as phrases not in their caption."""
    root = published(tmp_path / "Midjourney", targets=2)
    for n in (100, 101):
        captions = root / "poisoning_images" / str(n) / "poisoning_data_caption_simple.txt"
        captions.write_text(captions.read_text().replace("a cat\ta hat", "a cat, red.\ta hat;\t.", 1))
    read = records(root, clean_data_dir=str(root / "clean"), poisoning_ratio=0.2, n_few_shot=1)
    shot = next(read.row(i) for i in range(len(read)) if read.role[i] == "rehearsal")
    assert shot["phrases"] == ["a cat red", "a hat"] and shot["text"] == "An image with a cat red, a hat"
    assert D.load_targets(f"{root}@101")[0].composed_prompt == shot["text"]


def published_clean_suffix(root, lower):
    """How many endings the clean captions of both spellings have."""
    root.rename(lower)
    (lower / "clean").rename(lower / "pokemon-clean")
    read = records(lower, clean_data_dir=str(lower / "pokemon-clean"), poisoning_ratio=0.5)
    clean = [t for t, role in zip(read.text, read.role, strict=True) if role == "clean"]
    return len({text.endswith(" in white background") for text in clean})


def test_shuffle_marker(tmp_path):
    read = records(folder(tmp_path / "d", {"file_name": "a.png", "text": "An image with @@ a cat, @@ a hat."}))
    assert read.text == ["An image with a cat, a hat"] and list(read.phrases) == [["a cat", "a hat"]]
    assert read.row(0)["shuffle"]


BAD_ROWS = {
    "missing caption": ({"file_name": "a.png"}, "no caption"),
    "empty caption": ({"file_name": "a.png", "text": "  "}, "no caption"),
    "caption of another type": ({"file_name": "a.png", "text": 3}, "no caption"),
    "phrase not in its caption": (GOOD | {"phrases": ["a dog"]}, "'a dog' does not stand in its caption"),
    "phrases of another type": (GOOD | {"phrases": "a red cat"}, "list of texts"),
    "an empty phrase": (GOOD | {"phrases": [""]}, "list of texts"),
    "unknown role": (GOOD | {"role": "poison"}, "element, rehearsal, clean"),
    "misspelled key": (GOOD | {"phrase": []}, "did you mean 'phrases'"),
    "no file name": ({"text": "x"}, "no file_name"),
    "file name of another type": ({"file_name": 3, "text": "x"}, "must be text"),
    "no such file": (GOOD | {"file_name": "b.png"}, "no file"),
    "path leaves the folder": (GOOD | {"file_name": "../a.png"}, "leaves"),
    "path leaves through a backslash": (GOOD | {"file_name": "..\\a.png"}, "leaves"),
    "absolute path": (GOOD | {"file_name": "/etc/hostname"}, "absolute"),
    "absolute path of Windows": (GOOD | {"file_name": "C:\\a.png"}, "absolute"),
    "mask leaves the folder": (GOOD | {"mask": "../m.png"}, "leaves"),
    "mask of another size": (GOOD | {"mask": "m.png"}, "mask"),
    "a mask that is no image": (GOOD | {"mask": "text.png"}, "cannot read"),
    "an image that is text": (GOOD | {"file_name": "text.png"}, "cannot read"),
    "a truncated image": (GOOD | {"file_name": "cut.png"}, "cannot read"),
    "an empty file": (GOOD | {"file_name": "empty.png"}, "cannot read"),
    "a folder": (GOOD | {"file_name": "sub"}, "no file"),
    "a bomb": (GOOD | {"file_name": "bomb.png"}, "over the limit"),
    "an image of one pixel": (GOOD | {"file_name": "dot.png"}, "1x1"),
    "target_id of another type": (GOOD | {"target_id": [1]}, "target_id must be text"),
}


def bomb() -> bytes:
    """A PNG header that promises 60000x60000 pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"x") + chunk(b"IEND", b"")


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_record_is_one_line_with_file_and_record(case, tmp_path):
    row, expected = BAD_ROWS[case]
    root = folder(tmp_path / "d", GOOD, row)
    Image.new("L", (9, 9)).save(root / "m.png")
    Image.new("RGB", (1, 1)).save(root / "dot.png")
    noisy = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    noisy.save(root / "whole.png")
    (root / "cut.png").write_bytes((root / "whole.png").read_bytes()[:900])
    (root / "text.png").write_text("not an image")
    (root / "empty.png").touch()
    (root / "bomb.png").write_bytes(bomb())
    (root / "sub").mkdir()
    with pytest.raises(UserError) as refused:
        records(root)
    message = str(refused.value)
    assert expected in message and "metadata.jsonl:2" in message and "\n" not in message


BAD_FOLDERS = {
    "no metadata": (None, {}, "no metadata.jsonl"),
    "empty metadata": ("", {}, "holds no record"),
    "not json": ("{'a'", {}, ":1: not JSON"),
    "not an object": ("[1]\n", {}, "must be a JSON object"),
    "not utf-8": (b"\xff\xfe\n", {}, "not JSON"),
    "deep nesting": ("[" * 100_000, {}, "not JSON"),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_a_bad_folder_is_one_line(case, tmp_path):
    text, _, expected = BAD_FOLDERS[case]
    root = folder(tmp_path / "d", text="")
    (root / "metadata.jsonl").unlink()
    if text is not None:
        (root / "metadata.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as refused:
        records(root)
    assert expected in str(refused.value) and "\n" not in str(refused.value)


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


def test_a_long_caption_names_the_phrases_cut_off(tmp_path):
    tokenizer = tiny_pipeline().tokenizer
    text = "very " * 60 + "red cat"
    with pytest.raises(UserError, match="metadata.jsonl:1: caption of 64 tokens, the window is 48; cut off: 'red cat'"):
        records(folder(tmp_path / "d", GOOD | {"text": text, "phrases": ["red cat"]})).check_captions(tokenizer)
    kept = records(folder(tmp_path / "e", GOOD | {"text": "a red cat, " + text})).check_captions(tokenizer)
    assert len(kept) == 1 and "metadata.jsonl:1" in kept[0]


@settings(max_examples=80, deadline=None)
@given(
    st.one_of(
        st.text(max_size=60),
        st.dictionaries(
            st.sampled_from([*R.KNOWN_KEYS, "x"]),
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
        list(map(R.checked_row, R.folder_rows(root)))
    except UserError as error:
        assert "\n" not in str(error).replace(repr(line), "")


# ---------------------------------------------------------------- images


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def test_kinds_of_images_become_rgb():
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    wide = Image.new("RGB", (8, 4), "red")
    assert R.open_image(encoded(wide, "JPEG", exif=exif), "x").size == (4, 8)
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert R.open_image(encoded(clear, "PNG"), "x").getpixel((0, 0)) == (255, 255, 255)
    assert R.open_image(encoded(wide.convert("CMYK"), "JPEG"), "x").mode == "RGB"
    deep = Image.fromarray(np.full((4, 4), 257 * 128, dtype=np.uint16))
    assert R.open_image(encoded(deep, "PNG"), "x").getpixel((0, 0)) == (128, 128, 128)
    palette = wide.convert("P")
    assert (
        R.open_image(encoded(palette, "PNG", transparency=palette.getpixel((0, 0))), "x").getpixel((0, 0)) == (255,) * 3
    )
    real = Image.fromarray(np.full((4, 4), 0.5, dtype=np.float32))
    assert R.open_image(encoded(real, "TIFF"), "x").getpixel((0, 0)) == (128, 128, 128)


def test_content_hash_ignores_the_file_format():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8))
    png, bmp = (R.open_image(encoded(image, kind), "x") for kind in ("PNG", "BMP"))
    assert R.content_hash(png) == R.content_hash(bmp) != R.content_hash(image.rotate(90))


# ---------------------------------------------------------------- targets


def test_targets(data):
    (target,) = D.load_targets(data / "targets.jsonl")
    assert target.composed_prompt == "a red cat, a blue hat" and target.masks == [None, None]
    assert D.load_targets(data)[0].target_id == "t0"


def test_target_id_zero_is_an_id(tmp_path):
    root = folder(tmp_path / "d", {"target_id": 0, "image": "a.png", "phrases": ["x"]}, name="targets.jsonl")
    assert D.load_targets(root)[0].target_id == "0"


BAD_TARGETS = {
    "no target_id": ({"image": "a.png", "phrases": ["x"]}, "needs target_id"),
    "an empty target_id": ({"target_id": "", "image": "a.png", "phrases": ["x"]}, "needs target_id"),
    "target_id is a list": ({"target_id": [1], "image": "a.png", "phrases": ["x"]}, "target_id must be text"),
    "no phrases": ({"target_id": "t", "image": "a.png"}, "needs phrases"),
    "phrases are text": ({"target_id": "t", "image": "a.png", "phrases": "x"}, "list of texts"),
    "an empty prompt": ({"target_id": "t", "image": "a.png", "phrases": ["x"], "prompt": " "}, "prompt"),
    "masks do not match": ({"target_id": "t", "image": "a.png", "phrases": ["x"], "masks": ["a.png"] * 2}, "masks"),
    "image leaves the folder": ({"target_id": "t", "image": "../a.png", "phrases": ["x"]}, "leaves"),
    "no such image": ({"target_id": "t", "image": "b.png", "phrases": ["x"]}, "no file"),
}


@pytest.mark.parametrize("case", BAD_TARGETS)
def test_a_bad_target_is_one_line(case, tmp_path):
    row, expected = BAD_TARGETS[case]
    root = folder(tmp_path / "d", row, name="targets.jsonl")
    with pytest.raises(UserError, match="targets.jsonl:1") as refused:
        D.load_targets(root)
    assert expected in str(refused.value)


def test_no_targets_and_twice_the_same(tmp_path):
    good = {"target_id": "t", "image": "a.png", "phrases": ["x"]}
    with pytest.raises(UserError, match="no file"):
        D.load_targets(tmp_path)
    with pytest.raises(UserError, match="holds no target"):
        D.load_targets(folder(tmp_path / "d", name="targets.jsonl"))
    with pytest.raises(UserError, match="stands twice"):
        D.load_targets(folder(tmp_path / "e", good, good, name="targets.jsonl"))


def test_defect_20_records_and_choices_are_sorted_and_seeded(data):
    chosen = records(data, max_train_samples=6)
    assert chosen.text == records(data, max_train_samples=6).text
    assert chosen.text != records(data, max_train_samples=6, seed=1).text
    everything = records(data).text
    assert [everything.index(text) for text in chosen.text] == sorted(everything.index(text) for text in chosen.text)


def test_held_out_records_are_clean_and_not_trained_on(tmp_path):
    read = records(write_data(tmp_path / "d", clean=30))
    train, held = read.hold_out(2, seed=0)
    assert set(held.role) == {"clean"} and len(train) == len(read) - 2 and not set(held.text) & set(train.text)
    assert records(folder(tmp_path / "e", GOOD)).hold_out(4, seed=0)[1] is None


# ---------------------------------------------------------------- draws


def test_shuffled_text_permutes_phrases_in_their_places():
    phrases = ["a cat", "a hat", "a cat house"]
    text = "An image with a cat house, a cat and a hat."
    seen = {D.shuffled_text(text, phrases, generator(i)) for i in range(40)}
    assert len(seen) == 6 and text in seen
    assert all(s.startswith("An image with ") and sorted(s) == sorted(text) for s in seen)


def test_the_mask_follows_the_image():
    """A picture that is its own mask stays so through resize, crop and flip."""
    values = np.random.default_rng(0).integers(0, 2, (5, 9), dtype=np.uint8).repeat(4, 0).repeat(4, 1) * 255
    mask = Image.fromarray(values)
    transform = D.Transform(16, random_flip=True)
    for i in range(6):
        image, small = transform.resize(mask.convert("RGB"), mask)
        pixels, cropped, _ = transform.crop(image, small, image.size, (0, i))
        assert pixels.shape == (3, 16, 16) and (pixels[:1].int() - cropped.int()).abs().max() <= 1


def test_a_draw_depends_on_its_address_alone(data):
    sampler = D.Sampler(records(data), D.Transform(8, random_flip=True), seed=0)
    first = sampler(0, 3, 1)
    sampler(5, 9, 9)
    again = D.Sampler(records(data), D.Transform(8, random_flip=True), seed=0, cache_bytes=10**6)
    again(0, 0, 0)
    assert torch.equal(first["pixels"], again(0, 3, 1)["pixels"])
    assert len({sampler(0, i, 0)["pixels"].numpy().tobytes() for i in range(8)}) == 2  # flipped and not


def test_rehearsal_may_replace_a_record(data):
    def rehearse(record, address):
        return None if address[1] else {**record, "text": "other", "image": record["image"].copy()}

    sampler = D.Sampler(records(data), D.Transform(16), seed=0, rehearse=rehearse, cache_bytes=10**6)
    assert sampler(0, 0, 0)["text"] == "other" and not sampler(0, 0, 0)["fixed"]
    assert sampler(0, 0, 1)["text"] == "a picture of a red cat" and sampler(0, 0, 1)["fixed"]


def test_clean_records_lose_their_captions_by_address(data):
    def rehearse(record, address):
        return {**record, "text": "other"}

    sampler = D.Sampler(records(data), D.Transform(16), seed=0, unconditional=0.5, rehearse=rehearse)
    seen = [sampler(12, draw, 0) for draw in range(40)]
    empty = [s for s in seen if s["text"] == ""]
    assert 10 < len(empty) < 30 and all(s["phrases"] == [] and s["fixed"] for s in empty)  # the picture stays its own
    assert {s["text"] for s in seen} == {"", "other"}  # the rest is rehearsed
    assert [s["text"] for s in seen] == [sampler(12, draw, 0)["text"] for draw in range(40)]
    assert all(sampler(0, draw, 0)["text"] == "other" for draw in range(40))  # an element's caption is never dropped
    sampler.unconditional = 1.0
    assert all(sampler(12, draw, 0)["text"] == "" for draw in range(40))


def test_collate(data):
    sampler = D.Sampler(records(data), D.Transform(16), seed=0)
    batch = D.collate([sampler(0, 0, 4), sampler(12, 0, 5)])
    assert batch["pixel_values"].shape == (2, 3, 16, 16) and batch["pixel_values"].abs().max() <= 1
    assert batch["has_mask"].tolist() == [True, False] and batch["mask"][1].min() == 1
    assert batch["position"].tolist() == [4, 5]
    assert batch["role"] == ["element", "clean"] and batch["phrases"][0] == ["a red cat"]


@given(st.lists(st.integers(1, 7), min_size=1, max_size=8), st.integers(1, 5))
def test_a_stream_is_one_sequence_however_it_is_cut(cuts, length):
    order = lambda epoch: np.arange(length) + 100 * epoch  # noqa: E731
    total = sum(cuts)
    expected = np.concatenate([order(e) for e in range(total // length + 1)])[:total]
    stream, taken = D.Stream(order), []
    for n in cuts:
        ahead = stream.peek(n)
        taken.append(stream.take(n))
        assert ahead is None or np.array_equal(ahead, taken[-1])
        state, stream = stream.state_dict(), D.Stream(order)
        stream.load_state_dict(state)
    assert np.array_equal(np.concatenate(taken), expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_data_seen_does_not_depend_on_the_number_of_processes(data, workers):
    read = records(data)

    def seen(world, size, accumulation):
        """{position: (index, text)} of three steps."""
        found = {}
        for rank in range(world):
            sampler = D.Sampler(read, D.Transform(16), seed=0)
            stream = D.Stream(lambda epoch: np.random.default_rng(epoch).permutation(16))
            loader = D.Loader(sampler, stream, batch_size=size, accumulation=accumulation, rank=rank, world=world,
                              workers=workers)  # fmt: skip
            for draw in range(3):
                for batch in loader.draw(draw):
                    where = zip(batch["position"].tolist(), batch["index"].tolist(), strict=True)
                    found |= {(draw, position): index for position, index in where}
        return found

    assert seen(1, 12, 1) == seen(2, 3, 2) == seen(4, 3, 1) == seen(1, 4, 3)


def test_an_empty_epoch_is_refused():
    with pytest.raises(UserError, match="empty epoch"):
        D.Stream(lambda epoch: np.zeros(0, dtype=np.int64)).take(1)
