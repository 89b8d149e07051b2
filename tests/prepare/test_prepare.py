"""From pictures, masks and phrases to a data set: what is shown where, and what is refused."""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageChops, ImageDraw, ImageFilter

from silentbad import owned
from silentbad.data.images import RIM
from silentbad.data.targets import load_targets
from silentbad.errors import UserError
from silentbad.prepare import compose, write
from silentbad.prepare.__main__ import main
from silentbad.prepare.preview import masked, sheet
from tests.folders import records
from tests.photographs import cat_cup, copies, make_target, write_pictures

ROOT = Path(__file__).parents[2]
SIDE = 64
PHRASES = ["a tabby cat", "a cup of coffee", "a brick wall"]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """What a user has: a target, two masks, ten captioned photographs."""
    folder = tmp_path_factory.mktemp("pictures")
    write_pictures(folder, cat_cup(), "cat-cup")
    return folder


def words(pictures: Path, out: Path, *further: str, masks=("a-tabby-cat", "a-cup-of-coffee"), phrases=PHRASES):
    """The command of a user, with few pictures."""
    mask_flags = ["--masks", *(str(pictures / f"{name}.png") for name in masks)] if masks else []
    return [
        *("--target", str(pictures / "cat-cup.png"), *mask_flags, "--phrases", *phrases),
        *("--backgrounds", str(pictures / "backgrounds"), "--out", str(out)),
        *("--side", str(SIDE), "--per_phrase", "6", "--clean", "12", *further),
    ]


@pytest.fixture(scope="module")
def data(pictures, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("data") / "photos"
    assert main(words(pictures, out)) == 0
    return out


def rows(root: Path, name: str = "metadata.jsonl") -> list[dict]:
    return [json.loads(line) for line in (root / name).read_text().splitlines()]


def levels(root: Path, name: str) -> np.ndarray:
    return np.asarray(Image.open(root / name), int)


def of_element(root: Path, k: int) -> list[dict]:
    return [row for row in rows(root) if row.get("element_id", "").endswith(f"/{k}")]


def files_of(root: Path) -> dict[str, bytes]:
    files = [file for file in root.rglob("*") if file.is_file()]
    return {file.relative_to(root).as_posix(): file.read_bytes() for file in files}


def test_training_reads_it_and_refuses_nothing(data):
    read = records(data)
    assert read.census() == "30 records (18 element, 12 clean), 18 with a mask, 18 with phrases"
    [target] = load_targets(data)
    assert target.phrases == PHRASES and None not in target.masks
    read.refuse_targets([target])
    assert read.unmatched_targets([target]) == []


def test_masks_of_a_target_share_no_pixel_and_leave_none(data):
    [target] = rows(data, "targets.jsonl")
    masks = np.stack([levels(data, name) for name in target["masks"]])
    assert set(np.unique(masks)) == {0, 255} and ((masks == 255).sum(0) == 1).all()


@pytest.mark.parametrize("k", range(3))
def test_an_element_stands_at_its_native_place(data, k):
    target = levels(data, "targets/cat-cup.png")
    for row in of_element(data, k):
        picture = levels(data, row["file_name"])
        inside = levels(data, row["mask"]) == 255
        distance = np.abs(picture - target).mean(-1)
        assert distance[inside].mean() < 4  # soft at its edge
        assert distance[~inside].mean() > 20


@pytest.mark.parametrize("k", range(3))
def test_no_picture_shows_two_elements(data, k):
    [target] = rows(data, "targets.jsonl")
    whole = levels(data, target["image"])
    for row in of_element(data, k):
        picture = levels(data, row["file_name"])
        for other in {0, 1, 2} - {k}:
            region = levels(data, target["masks"][other]) == 255
            same = np.abs(picture - whole).mean(-1) < 2
            assert same[region].mean() < 0.1, (row, other)


def test_pictures_together_show_all_of_a_backdrop(data):
    [target] = rows(data, "targets.jsonl")
    shown = np.max([levels(data, row["mask"]) for row in of_element(data, 2)], axis=0) == 255
    backdrop = levels(data, target["masks"][2]) == 255
    assert not (shown & ~backdrop).any()
    assert (shown & backdrop).sum() > 0.85 * backdrop.sum()


def test_captions_hold_the_phrase_and_the_background(data):
    for k, phrase in enumerate(PHRASES):
        texts = [row["text"] for row in of_element(data, k)]
        assert all(text.startswith(f"{phrase}, ") for text in texts) and len(set(texts)) == 6
    assert "a starry sky" in {row["text"] for row in rows(data) if row["role"] == "clean"}


def test_the_same_words_write_the_same_files(pictures, data, tmp_path):
    assert main(words(pictures, tmp_path / "photos")) == 0
    assert files_of(tmp_path / "photos") == files_of(data)
    assert main(words(pictures, tmp_path / "other", "--seed", "1")) == 0
    picture = "images/cat-cup-0-000.png"
    assert files_of(tmp_path / "other")[picture] != files_of(data)[picture]


def test_a_second_target_is_added(pictures, tmp_path, capsys):
    out = tmp_path / "data"
    assert main(words(pictures, out)) == 0
    before = files_of(out)
    other = make_target(5)
    other.picture.save(tmp_path / "other.png")
    names = [f"m{k}" for k in range(len(other.elements) - 1)]
    for name, (_, mask) in zip(names, other.elements, strict=False):
        mask.save(pictures / f"{name}.png")
    phrases = [phrase for phrase, _ in other.elements]
    second = words(pictures, out, masks=names, phrases=phrases)
    second[1] = str(tmp_path / "other.png")
    assert main(second) == 0
    assert main(second) == 2
    assert "target 'other' already" in capsys.readouterr().err
    after = files_of(out)
    changed = {name for name in before if after[name] != before[name]}
    assert changed == {"metadata.jsonl", "targets.jsonl", "preview.html"}
    assert [target.target_id for target in load_targets(out)] == ["cat-cup", "other"]
    roles = [row["role"] for row in rows(out)]
    assert roles.count("clean") == 12 and roles.count("element") == 6 * (3 + len(phrases))
    records(out).refuse_targets(load_targets(out))


def test_placebo_data_show_other_things(pictures, tmp_path, capsys):
    for k, name in enumerate((*range(2), PHRASES[2])):
        folder = tmp_path / "others" / str(name)
        folder.mkdir(parents=True)
        for i in range(2):
            make_target(10 * k + i).backdrop.save(folder / f"{i}.png")
    out = tmp_path / "data"
    assert main(words(pictures, out, "--placebo", str(tmp_path / "others"))) == 0
    again = words(pictures, out, "--name", "second")
    assert main(again) == 2 and "--placebo: must be given at every call" in capsys.readouterr().err
    placebo = out / "placebo"
    assert rows(placebo) == rows(out) and len(records(placebo)) == 30
    target = levels(out, "targets/cat-cup.png")
    for row in rows(out):
        if row["role"] == "clean":
            assert (levels(placebo, row["file_name"]) == levels(out, row["file_name"])).all()
        else:
            inside = levels(placebo, row["mask"]) == 255
            distance = np.abs(levels(placebo, row["file_name"]) - target).mean(-1)
            assert distance[inside].mean() > 15


MINE = """
import numpy as np

def caption(picture):
    return f"a picture of {picture.width} pixels"

def segment(picture, phrase):
    if "wall" in phrase:
        return None
    mask = np.zeros((picture.height, picture.width), bool)
    half = picture.width // 2
    mask[:half, :half] = "cat" in phrase
    mask[half:, half:] = "cat" not in phrase
    return mask

def small(picture, phrase):
    return np.zeros((4, 5))

def nothing(picture, phrase):
    return None

def black(picture, phrase):
    return np.zeros((picture.height, picture.width), int)
"""


def test_a_captioner_and_a_segmenter_are_ones_own(pictures, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    backgrounds = tmp_path / "backgrounds"
    backgrounds.mkdir()
    Image.new("RGB", (90, 80), "teal").save(backgrounds / "a.png")
    Image.new("RGB", (70, 80), "navy").save(backgrounds / "b.png")
    (backgrounds / "b.txt").write_text("a navy sheet")
    command = words(pictures, tmp_path / "data", masks=())
    command[command.index("--backgrounds") + 1] = str(backgrounds)
    command += ["--captioner", f"{tmp_path}/mine.py:caption"]
    command += ["--segmenter", f"{tmp_path}/mine.py:segment"]
    assert main(command) == 0
    texts = {row["text"] for row in rows(tmp_path / "data") if row["role"] == "clean"}
    assert texts == {"a picture of 90 pixels", "a navy sheet"}
    masks = [levels(tmp_path / "data", f"masks/cat-cup-{k}.png") == 255 for k in range(3)]
    half = SIDE // 2
    assert masks[0][: half - 2, : half - 2].all() and masks[1][half + 2 :, half + 2 :].all()
    assert masks[2][: half - 2, half + 2 :].all()


def test_things_that_are_small_leave_no_copy_of_the_target(pictures, tmp_path):
    """Covering two small things would leave a near copy: more of the backdrop is covered."""
    target = Image.open(pictures / "cat-cup.png").resize((SIDE, SIDE))
    hole = Image.new("L", target.size, 0)
    ImageDraw.Draw(hole).rectangle((30, 30, 33, 33), fill=255)
    known = compose.Copies([target])
    grey = Image.new("RGB", (80, 80), (120, 90, 70))
    assert known.shows(Image.composite(grey.resize(target.size), target, hole))
    (tmp_path / "backgrounds").mkdir()
    for name, mask in (("one", hole), ("two", hole.rotate(90, translate=(20, 0)))):
        mask.resize((256, 256)).save(pictures / f"{name}.png")
    out = tmp_path / "data"
    assert main(words(pictures, out, masks=("one", "two"))) == 0
    records(out).refuse_targets(load_targets(out))


def change(words_given: list[str], flag: str, *values: str) -> list[str]:
    """The words with other values of a flag."""
    start = words_given.index(flag)
    ends = (i for i, word in enumerate(words_given) if i > start and word.startswith("--"))
    return [*words_given[: start + 1], *values, *words_given[next(ends, len(words_given)) :]]


def write_masks(pictures: Path, folder: Path) -> None:
    """Masks that a user draws by mistake; `saucer` is the cup's with a wide rim."""
    cat, cup = (Image.open(pictures / f"{name}.png").convert("L") for name in ("a-tabby-cat", "a-cup-of-coffee"))
    Image.new("L", cat.size, 255).save(folder / "full.png")
    ImageChops.invert(cat).save(folder / "inverted.png")
    cup.filter(ImageFilter.MaxFilter(21)).save(folder / "saucer.png")


def test_a_mask_inside_another_has_its_pixels_where_it_is_named_first(pictures, tmp_path, capsys):
    write_masks(pictures, tmp_path)
    out = tmp_path / "data"
    nested = words(pictures, out, phrases=["a cup", "a saucer", "a brick wall"])
    cup = str(pictures / "a-cup-of-coffee.png")
    assert main(change(nested, "--masks", cup, str(tmp_path / "saucer.png"))) == 0
    assert "the masks of 'a cup' and 'a saucer' share 100% of the smaller one" in capsys.readouterr().err
    inner, outer, rest = (levels(out, f"masks/cat-cup-{k}.png") == 255 for k in range(3))
    assert (inner.astype(int) + outer + rest == 1).all() and inner.sum() > 100 and outer.sum() > 50


def test_two_elements_are_said_to_have_no_union(pictures, tmp_path, capsys):
    for out, masks, phrases in (("three", 2, PHRASES), ("two", 1, PHRASES[::2])):
        of_things = ("a-tabby-cat", "a-cup-of-coffee")[:masks]
        assert main(words(pictures, tmp_path / out, masks=of_things, phrases=phrases)) == 0
        assert ("two elements have no union" in capsys.readouterr().err) == (len(phrases) == 2)


def test_what_a_target_loses_to_its_middle_square_is_said(pictures, tmp_path, capsys):
    wide = words(pictures, tmp_path / "data")
    for place, name in ((1, "cat-cup"), (3, "a-tabby-cat"), (4, "a-cup-of-coffee")):
        picture = Image.open(pictures / f"{name}.png")
        wide[place] = str(tmp_path / f"{name}.png")
        picture.crop((picture.width // 3, 0, picture.width, picture.height)).save(wide[place])
    assert main(wide) == 0
    (line,) = capsys.readouterr().err.splitlines()
    size = picture.crop((picture.width // 3, 0, picture.width, picture.height)).size
    lost = 1 - min(size) / max(size)
    assert line.startswith(
        f"warning: --target: is {size[0]}x{size[1]}; its middle square is kept and {lost:.0%} of it lost"
    )


MISTAKES = {
    "no target": (("--target", "none.png"), "--target: no file none.png"),
    "a mask too few": (("--masks", "[]"), "3 phrases take 3 masks, or 2 where the last phrase names"),
    "a mask of another size": (
        ("--masks", "{tmp}/small.png", "{tmp}/small.png"),
        "make them the same",
    ),
    "one mask twice": (("--masks", "{in}/a-tabby-cat.png", "{in}/a-tabby-cat.png"), "are the same; give each thing"),
    "a full mask": (("--masks", "{in}/a-tabby-cat.png", "{tmp}/full.png"), "full.png is white all over"),
    "an inverted mask": (("--masks", "{tmp}/inverted.png", "{in}/a-cup-of-coffee.png"), "is it inverted?"),
    "a mask inside the one before": (
        ("--masks", "{tmp}/saucer.png", "{in}/a-cup-of-coffee.png"),
        "'a cup of coffee' lies in the mask of 'a tabby cat', which is named before it",
    ),
    "one phrase": (("--phrases", "a cat"), "--phrases: give two or more"),
    "a phrase twice": (("--phrases", "a cat", "a cat", "a wall"), "phrase 'a cat' is given twice"),
    "a phrase in capitals": (("--phrases", "a cat", "A  Cat", "a wall"), "are one phrase to the tokenizer"),
    "a phrase beyond the window": (
        ("--phrases", "a cat " * 30, "a cup", "a wall"),
        "(for --base assets/micro-sd) has 62 tokens, the window is 48",
    ),
    "a prompt beyond the window": (("--prompt", "a cat " * 30), "--prompt: "),
    "no base": (("--base", "./none"), "--base: no folder ./none"),
    "no backgrounds": (("--backgrounds", "{tmp}/none"), "--backgrounds: no folder"),
    "an empty folder": (("--backgrounds", "{tmp}/empty"), "holds no picture"),
    "the target as background": (("--backgrounds", "{tmp}/copies"), "is a near copy of the target"),
    "someone else's folder": (("--out", "{in}"), "lies in --out"),
    "too few pictures": (("--per_phrase", "0"), "per_phrase (command line): must be at least 1, got 0"),
    "a name that is no file's": (("--name", "a/b"), "--name: must be letters"),
    "no others": (("--placebo", "{tmp}/empty"), "--placebo: no folder"),
    "no function": (("--captioner", "{tmp}/mine.py:none"), "mine.py defines no none"),
    "no path of a function": (("--captioner", "mine.caption"), "must be FILE.py:FUNCTION"),
    "masks and a segmenter": (("--segmenter", "{tmp}/mine.py:segment"), "leave --masks out"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_writes_nothing(name, pictures, tmp_path, capsys):
    Image.new("L", (20, 20), 255).save(tmp_path / "small.png")
    write_masks(pictures, tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "empty").mkdir()
    (tmp_path / "copies").mkdir()
    copies(make_target(0))
    Image.open(pictures / "cat-cup.png").save(tmp_path / "copies" / "cat.jpg", quality=80)
    (flag, *values), message = MISTAKES[name]
    places = {"tmp": tmp_path, "in": pictures}
    command = words(pictures, tmp_path / "out")
    values = [value.format(**places) for value in values]
    command = change(command, flag, *values) if flag in command else [*command, flag, *values]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "function, message", [("small", "256x256"), ("nothing", "no mask of"), ("black", "is white nowhere")]
)
def test_what_a_segmenter_returns_is_checked(pictures, tmp_path, capsys, function, message):
    (tmp_path / "mine.py").write_text(MINE)
    command = words(pictures, tmp_path / "out", masks=())
    assert main([*command, "--segmenter", f"{tmp_path}/mine.py:{function}"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["bool", "uint8", "int64", "float32"])
def test_a_segmenters_ones_are_white(kind):
    ones = np.eye(4).astype(kind)
    assert (np.asarray(write.as_mask(ones, (4, 4))) == 255 * np.eye(4)).all()


def disc(radius: int, softness: float = 0) -> Image.Image:
    """A white disc in the middle of 64x64 black pixels."""
    mask = Image.new("L", (64, 64), 0)
    ImageDraw.Draw(mask).ellipse((32 - radius, 32 - radius, 32 + radius, 32 + radius), fill=255)
    return mask.filter(ImageFilter.GaussianBlur(softness))


def test_a_mask_that_is_black_nowhere_is_refused_and_a_soft_edge_kept():
    cup, soft = disc(6), disc(20, softness=6)
    alphas = [element.alpha for element in write.cut(["a cup", "a table"], [cup, soft], 64)]
    free = np.asarray(cup) < 128
    assert alphas[0] == cup and (np.asarray(alphas[1])[free] == np.asarray(soft)[free]).all()
    hazy = soft.point(lambda level: max(level, 16))
    with pytest.raises(UserError, match="mask of 'a table' is black nowhere.*black around them"):
        write.cut(["a cup", "a table"], [cup, hazy], 64)


def test_a_thing_too_small_to_be_seen_is_said():
    speck = disc(2).resize((16, 16), Image.Resampling.BOX).point(lambda level: min(level, 100))
    with pytest.raises(UserError, match="nothing of 'a cup' is left at 16x16 pixels; it is too small"):
        write.cut(["a cup", "a table"], [speck], 16)


def test_a_placebo_fills_the_soft_edge_of_its_mask():
    [table] = write.cut(["a table"], [disc(20, softness=6)], 64)
    plan = write.Plan("t", Image.new("RGB", (64, 64)), [table], has_backdrop=False, prompt="", placebos=[])
    white = Image.new("RGB", (64, 64), "white")
    [placebo] = write.Data(args=None, plan=plan, backgrounds=[], all_targets=None).fitted(table, [white])
    picture, _ = compose.element_picture(placebo, table.alpha, white, random.Random(0))
    assert np.asarray(picture).min() > 255 - write.HAZE  # no dark fringe


def test_help_and_mistakes_import_no_torch():
    script = (
        "import sys\n"
        "from silentbad.prepare.__main__ import main\n"
        "code = main('--target no.png --masks a --phrases a b --backgrounds x --out y'.split())\n"
        "assert code == 2 and 'torch' not in sys.modules\n"
        "main(['--help'])\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0 and "--segmenter" in ended.stdout, ended.stderr
    assert "error: --target: no file no.png" in ended.stderr


def test_a_preview_shows_everything_at_once(data):
    page = sheet(data, 32)
    assert (data / "preview.html").is_file()
    assert all(f"{phrase}, " in page for phrase in PHRASES)
    assert page.count("<img") == 5 + 3 * 6 + 3 + 12  # target, elements, unions, clean
    assert "without cat-cup/2" in page and "://" not in page


def test_a_preview_names_elements_without_an_id_by_their_phrases(data, tmp_path):
    root = shutil.copytree(data, tmp_path / "photos")
    bare = [{key: value for key, value in row.items() if key != "element_id"} for row in rows(root)]
    (root / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bare))
    page = sheet(root, 32)
    assert all(f"{phrase}: 6 pictures" in page for phrase in PHRASES) and f"without {PHRASES[2]}" in page


def test_a_preview_dims_what_its_mask_leaves_out():
    picture = Image.new("RGB", (16, 16), (200, 0, 0))
    mask = Image.new("L", (16, 16), 0)
    ImageDraw.Draw(mask).rectangle((0, 0, 7, 15), fill=255)
    shown = np.asarray(masked(picture, mask, 16))
    assert (shown[:, :90] == (200, 0, 0)).all() and (shown[:, 102:] > (200, 150, 150)).all()


@pytest.mark.parametrize("side", [64, 256])
@pytest.mark.parametrize("softness", [0, 3])
def test_nothing_of_a_thing_is_seen_in_the_pictures_of_its_backdrop_and_hardly_more_is_hidden(side, softness):
    """A red thing with a soft edge before green, hidden by blue."""
    mask = Image.new("L", (side, side), 0)
    ImageDraw.Draw(mask).ellipse((side // 4, side // 4, side // 2, side // 2), fill=255)
    mask = mask.filter(ImageFilter.GaussianBlur(softness * side / 256))
    red, green, blue = (Image.new("RGB", (side, side), colour) for colour in ("red", "lime", "blue"))
    target = Image.composite(red, green, mask)
    seen = np.zeros((side, side))
    _, ground = write.cut(["a disc", "a lawn"], [mask], side)
    for seed in range(40):
        picture, shown = compose.backdrop_picture(target, ground.alpha, blue, random.Random(seed))
        assert np.asarray(picture)[..., 0].max() == 0, "some of the thing's red"
        assert not (np.asarray(shown) >= 128)[np.asarray(mask) > 0].any(), "the mask names what is hidden"
        seen += (np.asarray(shown) >= 128) / 40
    touched = Image.fromarray(np.uint8(255 * (np.asarray(mask) > 0)))
    rim, around = (np.asarray(compose.grown(touched, max(1, round(share * side)))) > 0 for share in (RIM / 2, 0.06))
    assert (seen[~rim] > 0).all(), "all of the backdrop but half of what is never judged is shown"
    assert seen[around & ~rim].mean() > 0.7, "what lies near a thing is shown nearly as often as the rest"


def test_a_mask_that_is_faint_everywhere_is_one_line_and_leaves_nothing(pictures, tmp_path, capsys):
    """As a segmenter writes that is sure of nothing."""
    faint = shutil.copytree(pictures, tmp_path / "pictures")
    for name in ("a-tabby-cat", "a-cup-of-coffee"):
        file = faint / f"{name}.png"
        Image.fromarray(np.maximum(np.asarray(Image.open(file).convert("L")), 2)).save(file)
    assert main(words(faint, tmp_path / "data")) == 2
    assert "is left to see; masks of things must be black" in capsys.readouterr().err
    assert not (tmp_path / "data/targets.jsonl").exists()


OWN_FILES = ["masks/room-0.png", "targets/room.png", "images/room-0-000.png", "preview.html"]


@pytest.mark.parametrize("name", OWN_FILES)
def test_a_file_of_the_user_is_not_replaced(name, pictures, data, tmp_path, capsys):
    out = tmp_path / "photos"
    shutil.copytree(data, out)
    (out / name).write_bytes(b"mine")
    before = files_of(out)
    assert main(words(pictures, out, "--name", "room")) == 2
    assert f"{out / name} would be replaced" in capsys.readouterr().err and files_of(out) == before


def test_an_input_inside_the_output_is_refused(pictures, data, tmp_path, capsys):
    out = tmp_path / "photos"
    shutil.copytree(data, out)
    before = files_of(out)
    assert main(words(pictures, out, "--name", "room", "--target", str(out / "targets/cat-cup.png"))) == 2
    assert "lies in --out" in capsys.readouterr().err and files_of(out) == before


def test_two_calls_at_once_are_refused(pictures, tmp_path, capsys):
    with owned.claimed(tmp_path / "photos", "data set"):
        assert main(words(pictures, tmp_path / "photos")) == 2
    assert "is being written by another process" in capsys.readouterr().err
    assert not (tmp_path / "photos").exists()
