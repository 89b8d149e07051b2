"""Draws: a record at an address."""

import numpy as np
import torch
from PIL import Image

from silentbad.data import draws
from silentbad.data.phrases import phrases_in
from silentbad.rng import generator
from tests.folders import records


def test_shuffled_text_permutes_phrases_in_their_places():
    phrases = ["a cat", "a hat", "a cat house"]
    text = "An image with a cat house, a cat and a hat."
    seen = {draws.shuffled_text(text, phrases, generator(i)) for i in range(40)}
    assert len(seen) == 6 and text in seen
    assert all(s.startswith("An image with ") and sorted(s) == sorted(text) for s in seen)


def test_phrases_are_exchanged_as_whole_words():
    text, phrases = "a car, a dog, a carpet on the floor", ["a car", "a dog"]
    seen = {draws.shuffled_text(text, phrases, generator(i)) for i in range(20)}
    assert seen == {text, "a dog, a car, a carpet on the floor"}
    assert draws.with_caption({"phrases": phrases, "element_id": ""}, "a carpet, a dog")["phrases"] == ["a dog"]
    joined = {draws.shuffled_text("猫と犬がいる", ["猫", "犬"], generator(i)) for i in range(20)}
    assert joined == {"猫と犬がいる", "犬と猫がいる"}  # a script without spaces has no such bounds
    for phrase, whole, part in (
        ("кот", "кот, дом", "котёл"),
        ("قط", "قط، بيت", "قطار"),
        ("2 cats", "2 cats.", "12 cats"),
    ):
        assert phrases_in([phrase], whole) == [phrase] and phrases_in([phrase], part) == []


def test_the_mask_follows_the_image():
    """A picture that is its own mask stays so through resize, crop and flip."""
    values = np.random.default_rng(0).integers(0, 2, (5, 9), dtype=np.uint8).repeat(4, 0).repeat(4, 1) * 255
    mask = Image.fromarray(values)
    transform = draws.Transform(16, random_flip=True)
    for i in range(6):
        image, small = transform.resize(mask.convert("RGB"), mask)
        (pixels, cropped), _ = transform.crop([image, small], image.size, (0, i), (16, 16))
        assert pixels.shape == (3, 16, 16) and (pixels[:1].int() - cropped.int()).abs().max() <= 1


def test_a_draw_depends_on_its_address_alone(data):
    sampler = draws.Draws(draws.Reader(records(data), draws.Transform(8, random_flip=True), seed=0))
    first = sampler(0, 3, 1)
    sampler(5, 9, 9)
    again = draws.Draws(draws.Reader(records(data), draws.Transform(8, random_flip=True), seed=0, cache_bytes=10**6))
    again(0, 0, 0)
    assert torch.equal(first["pixels"], again(0, 3, 1)["pixels"])
    assert len({sampler(0, i, 0)["pixels"].numpy().tobytes() for i in range(8)}) == 2  # flipped and not


def test_rehearsal_may_replace_a_record(data):
    def rehearse(record, address):
        return None if address[1] else {**record, "text": "other", "image": record["image"].copy()}

    sampler = draws.Draws(
        draws.Reader(records(data), draws.Transform(16), seed=0, cache_bytes=10**6), rehearse=rehearse
    )
    assert sampler(0, 0, 0)["text"] == "other" and not sampler(0, 0, 0)["fixed"]
    assert sampler(0, 0, 1)["text"] == "a picture of a red cat" and sampler(0, 0, 1)["fixed"]


def test_clean_records_lose_their_captions_by_address(data):
    def rehearse(record, address):
        return {**record, "text": "other"}

    sampler = draws.Draws(
        draws.Reader(records(data), draws.Transform(16), seed=0), dropout={"clean": 0.5}, rehearse=rehearse
    )
    seen = [sampler(12, draw, 0) for draw in range(40)]
    empty = [s for s in seen if s["text"] == ""]
    assert 10 < len(empty) < 30 and all(s["phrases"] == [] and s["fixed"] for s in empty)  # the picture stays its own
    assert {s["text"] for s in seen} == {"", "other"}  # the rest is rehearsed
    assert [s["text"] for s in seen] == [sampler(12, draw, 0)["text"] for draw in range(40)]
    assert all(sampler(0, draw, 0)["text"] == "other" for draw in range(40))  # an element's caption is never dropped
    sampler.dropout = {"clean": 1.0}
    assert all(sampler(12, draw, 0)["text"] == "" for draw in range(40))
