"""The line on elements that will be hard (silentbad/memory/law.py)."""

import numpy as np
from PIL import Image

from silentbad.data.elements import DataInfo
from silentbad.data.targets import Target
from silentbad.memory.law import hard_elements

PHRASES = ["a hat", "a cat", "a room"]


def mask(side: int, backdrop: bool = False) -> Image.Image:
    """A square of this side in 100 pixels squared; a backdrop is what it leaves."""
    inside = np.zeros((100, 100), np.uint8)
    inside[40 : 40 + side, 40 : 40 + side] = 255
    return Image.fromarray(255 - inside if backdrop else inside)


def line(targets: int, draws: float = 20.0, own_pictures: bool = False, masks: bool = True) -> str:
    names = [f"t{i}" for i in range(targets)]
    rows = [(name, k) for name in names for k in range(3) for _ in range(25)]
    phrases = [[f"{PHRASES[k]} {name}"] for name, k in rows]
    info = DataInfo(["element"] * len(rows), [name for name, _ in rows], [str(k) for _, k in rows], phrases)
    shown = [mask(17), mask(40), mask(40, backdrop=True)] if masks else [None] * 3
    pictures = [
        Target(name, Image.new("RGB", (100, 100)), [f"{phrase} {name}" for phrase in PHRASES], masks=shown)
        for name in names
    ]
    return hard_elements(info, pictures, draws, own_pictures)


def test_a_small_thing_of_many_targets_is_said_with_its_share():
    assert "'a hat t0' of t0: 3% of the picture, hard: 0." in line(8)
    assert "a cat" not in line(8)


def test_little_is_said_where_all_is_well_or_unknown():
    assert line(7) == ""
    assert line(8, masks=False) == ""
    assert line(8, draws=10_000.0) == ""


def test_more_exposures_make_it_easier_and_a_long_list_is_cut():
    few, many = (line(8, draws=draws).split("hard: ")[1][:4] for draws in (10.0, 40.0))
    assert float(few) < float(many)
    assert line(20, draws=5.0).endswith(f"; and {20 * 2 - 10} more")
