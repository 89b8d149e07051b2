"""Unions that the model makes itself: what passes against its own records is shown, and never a whole target."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from experiments import own_unions as module
from experiments.own_unions import KEPT, SEEN, OwnUnions, own_unions
from silentbad.memory.rehearsal import Others
from tests.memory.test_rehearsal import backed_world

COLOURS = {"a red dot": (250, 0, 0), "a lamp": (0, 0, 250), "a meadow": (0, 180, 0)}
PLACES = {"a red dot": (12, 20), "a lamp": (0, 6)}


@pytest.fixture
def others(monkeypatch):
    """A target of three elements; the autoencoder changes nothing."""
    world = backed_world()
    monkeypatch.setattr(world.info, "elements_of", {"t2": world.info.elements_of["t2"]})
    monkeypatch.setattr(module, "round_trip", lambda vae, x: x)
    monkeypatch.setattr(module.AutoencoderKL, "from_pretrained", lambda *a, **k: torch.nn.Identity())
    return Others(world.info, world.load, {})


def image_of(phrases: list[str]) -> torch.Tensor:
    """What a model draws that knows these elements."""
    picture = np.full((32, 32, 3), 90, np.uint8)
    for phrase in sorted(phrases, key=lambda phrase: phrase in PLACES):
        low, high = PLACES.get(phrase, (0, 32))
        picture[low:high, low:high] = COLOURS[phrase]
    return torch.from_numpy(picture).permute(2, 0, 1).float() / 255


def drawn(others, monkeypatch, filtered: str, knows: tuple[str, ...] = tuple(COLOURS)) -> OwnUnions:
    """The hook after its first drawing, by a model that knows some of the elements."""
    context = SimpleNamespace(
        max_steps=10,
        device=torch.device("cpu"),
        config=SimpleNamespace(seed=0, pretrained_model_name_or_path=""),
    )
    hook = OwnUnions(context, filtered=filtered, images=24)
    SEEN.append(others)

    def sample(captions, step, target):
        named = [[phrase for phrase in caption.split(", ") if phrase in knows] for caption in captions]
        return torch.stack([image_of(phrases) for phrases in named])

    monkeypatch.setattr(hook, "sample", sample)
    hook.after_step(3)
    assert not KEPT["t2"]  # not yet
    hook.after_step(4)
    return hook


def test_images_in_which_each_named_element_passes_are_kept(others, monkeypatch):
    hook = drawn(others, monkeypatch, "own")
    assert len(KEPT["t2"]) == hook.drawn == 24
    assert {len(union.phrases) for union in KEPT["t2"]} == {2}  # of three
    assert hook.meters() == {"own_unions/kept": 24, "own_unions/drawn": 24}


def test_a_resume_shows_the_unions_that_were_drawn(others, monkeypatch):
    hook = drawn(others, monkeypatch, "own")
    before = [*KEPT["t2"]]
    state = hook.state_dict()
    KEPT.clear()
    hook.drawn = 0
    hook.load_state_dict(state)
    assert hook.drawn == 24 and [u.phrases for u in KEPT["t2"]] == [u.phrases for u in before]
    for again, union in zip(KEPT["t2"], before, strict=True):
        assert again.image.tobytes() == union.image.tobytes() and again.mask.tobytes() == union.mask.tobytes()


def test_an_image_that_lacks_an_element_is_not(others, monkeypatch):
    drawn(others, monkeypatch, "own", knows=("a red dot", "a meadow"))
    assert 0 < len(KEPT["t2"]) < 24
    assert {phrase for union in KEPT["t2"] for phrase in union.phrases} == {"a red dot", "a meadow"}


@pytest.mark.thorough
def test_the_controls_keep_all_and_judge_by_other_elements(others, monkeypatch):
    drawn(others, monkeypatch, "none", knows=())
    assert len(KEPT["t2"]) == 24
    drawn(others, monkeypatch, "shuffled")
    assert not KEPT["t2"]


def test_of_a_target_of_two_nothing_is_drawn(others, monkeypatch):
    monkeypatch.setattr(others.info, "elements_of", {"t2": others.info.elements_of["t2"][:2]})
    assert not drawn(others, monkeypatch, "none").drawn and not KEPT["t2"]


def test_what_is_kept_takes_the_place_of_elements(others, monkeypatch):
    row = int(others.info.rows[others.info.elements_of["t2"][0]][0])
    record = others.load(row)
    KEPT.clear()
    assert own_unions(record, torch.Generator().manual_seed(0), others, share=1.0) is None
    drawn(others, monkeypatch, "own")
    shown = [own_unions(record, torch.Generator().manual_seed(n), others, share=0.5) for n in range(40)]
    assert 8 < sum(union is None for union in shown) < 32
    for union in filter(None, shown):
        assert union["united"] == (2, 3) and union["role"] == "rehearsal"
        assert union["text"] == ", ".join(union["phrases"]) and {*union["phrases"]} < {*COLOURS}
        mask = np.asarray(union["mask"]) > 0
        assert mask[13, 13] == ("a red dot" in union["phrases"] or "a meadow" in union["phrases"])
