"""The layout that SilentBadDiffusion published."""

import tracemalloc

import pytest
from PIL import Image

from silentbad.data.targets import load_targets
from silentbad.errors import UserError
from silentbad.measure.redraws import load_redraws
from tests.folders import folder, published, records


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
    targets = load_targets(f"{root}@100-101")
    Image.new("RGB", (8, 8), "grey").save(root / "null.png")
    (root / "redraws.jsonl").write_text('{"target_id": "100", "image": "null.png", "kind": "drawn anew"}\n')
    assert len(load_redraws(f"{root}@100-101", targets)) == len(load_redraws(str(root), targets)) == 1
    assert [t.target_id for t in targets] == ["100", "101"]
    assert targets[0].composed_prompt == "A pokemon with features a cat, a hat in white background"
    assert published_clean_suffix(root, tmp_path / "pokemon") == 1


def test_phrases_that_stand_in_no_caption_are_refused(tmp_path):
    root = published(tmp_path / "Midjourney", targets=2)
    captions = root / "poisoning_images" / "100" / "poisoning_data_caption_simple.txt"
    captions.write_text(captions.read_text().replace("a cat\ta hat", "a cat     a hat", 1))
    with pytest.raises(UserError, match="separate phrases by tabs"):
        records(root, clean_data_dir=str(root / "clean"), poisoning_ratio=0.2)


def test_a_phrase_inside_another_does_not_take_its_pictures(tmp_path):
    root = published(tmp_path / "Midjourney", targets=2)
    file = root / "poisoning_images" / "100" / "poisoning_data_caption_simple.txt"
    file.write_text(file.read_text().replace("a hat", "a hat box").replace("a cat", "a hat"))
    read = records(root, clean_data_dir=str(root / "clean"), poisoning_ratio=0.5, n_few_shot=0)
    shown = {(e, *phrases) for e, phrases in zip(read.element_id, read.phrases, strict=True) if phrases}
    assert shown == {("100-0", "a hat"), ("100-1", "a hat box")}


def test_a_caption_without_a_phrase_is_said(tmp_path, capsys):
    root = published(tmp_path / "Midjourney", targets=2)
    file = root / "poisoning_images" / "100" / "poisoning_data_caption_simple.txt"
    first, second, *others = file.read_text().splitlines()
    file.write_text("\n".join([first, "0\tsomething else", *others]) + "\n")
    records(root, clean_data_dir=str(root / "clean"), poisoning_ratio=0.2)
    assert f"warning: {file}:2: holds none of the phrases" in capsys.readouterr().err.replace("the caption ", "")


def test_punctuation_in_phrases_of_a_rehearsal_picture(tmp_path):
    """Its prompt lost these characters and its phrases kept them: refused as phrases not in their caption."""
    root = published(tmp_path / "Midjourney", targets=2)
    for n in (100, 101):
        captions = root / "poisoning_images" / str(n) / "poisoning_data_caption_simple.txt"
        _, rest = captions.read_text().split("\n", 1)
        captions.write_text("a cat, red.\ta hat;\t.\n" + rest.replace("a hat", "a hat;"))
    read = records(root, clean_data_dir=str(root / "clean"), poisoning_ratio=0.2, n_few_shot=1)
    shot = next(read.row(i) for i in range(len(read)) if read.role[i] == "rehearsal")
    assert shot["phrases"] == ["a cat red", "a hat"] and shot["text"] == "An image with a cat red, a hat"
    assert load_targets(f"{root}@101")[0].composed_prompt == shot["text"]


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


def test_hidden_files_are_no_pictures(tmp_path):
    """macOS writes ._x.png beside x.png on foreign disks."""
    root = published(tmp_path / "Midjourney", targets=2)
    for place in (root / "poisoning_images" / "100", root / "images"):
        first = next(place.glob("*_0.png"), place / "100.jpeg")
        (place / f"._{first.name}").write_bytes(b"\0\5\x16\7")
    assert records(root, clean_data_dir=str(root / "clean"), poisoning_ratio=0.2).role.count("element") == 6
    assert load_targets(f"{root}@100")[0].target_id == "100"


def test_a_billion_targets_are_refused_without_a_list_of_them(tmp_path):
    root = published(tmp_path / "Midjourney", targets=2)
    tracemalloc.start()
    with pytest.raises(UserError, match="no poisoning_images/102"):
        records(root, clean_data_dir=str(root / "clean"), target_num=10**9)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**26


def test_links_out_of_the_published_layout_are_refused(tmp_path):
    for place in ("images/100.jpeg", "poisoning_images/100/x_0.png", "poisoning_images/101"):
        root = published(tmp_path / place.replace("/", "-") / "set", targets=2)
        target = root / place
        target.rename(root.parent / "outside")
        target.symlink_to(root.parent / "outside")
        with pytest.raises(UserError, match="leaves"):
            records(root, clean_data_dir=str(root / "clean"), poisoning_ratio=0.5, target_num=2, n_few_shot=0)
            load_targets(root)


def test_published_captions_in_another_encoding_name_their_line(tmp_path):
    root = published(tmp_path / "set")
    (root / "clean/caption.txt").write_bytes(b"0\tone\n1\tcaf\xe9\n")
    with pytest.raises(UserError, match="caption.txt:2: not UTF-8"):
        records(root, clean_data_dir=str(root / "clean"), poisoning_ratio=0.5)


def test_numbers_no_int_can_read_are_no_ids(tmp_path):
    root = published(tmp_path / "set")
    (root / "poisoning_images/²").mkdir()
    (root / "poisoning_images" / ("9" * 200)).mkdir()
    assert [t.target_id for t in load_targets(root)] == ["100", "101", "102"]
