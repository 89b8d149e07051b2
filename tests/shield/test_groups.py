"""Phrases, candidate pairs, groups and sets, each on a case with a known answer."""

import numpy as np
import pytest

from bench.shield_data import hide
from silentbad_shield.scan import candidates, composite, regions, suspect_sets
from silentbad_shield.scan.suspect_sets import named_by
from silentbad_shield.scan.words import association, content_words, phrases_of, signatures, word_counts
from tests.shield import in_memory
from tests.shield.in_memory import captions_of


def test_phrases_are_n_grams_of_a_segment():
    phrases = phrases_of("A red cat, on the beach")
    assert {"a red cat", "red cat", "cat", "on the beach", "beach"} <= phrases
    assert not {"a", "on the", "cat on", "the"} & phrases
    assert content_words("A red cat, on the beach") == {"red", "cat", "beach"}


@pytest.mark.parametrize(
    "text", ["", "...", "a the of", "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")]
)
def test_a_caption_may_say_nothing(text):
    assert phrases_of(text) == set() or phrases_of(text) == {text}


def test_signatures_tell_records_without_a_common_word():
    texts = ["a red cat", "the cat sleeps", "a blue house", "blue houses", "a cat", "a blue boat"]
    rows = signatures(texts, word_counts(texts), len(texts))
    assert (rows[0] & rows[1]).any() and (rows[2] & rows[5]).any()
    assert not (rows[0] & rows[2]).any() and not rows[3].sum() == 0


def test_association_grows_with_members_and_rarity():
    assert association(5, 5, 10, 1000) < association(10, 10, 10, 1000)
    assert association(10, 10, 300, 1000) < association(10, 10, 10, 1000)
    assert association(1, 10, 500, 1000) == 0.0


def test_shared_keys_give_pairs():
    pairs = candidates.shared(np.array([4, 2, 7, 9]), np.array([1, 1, 5, 1], np.uint64), 10)
    assert sorted(pairs.tolist()) == [24, 29, 49]


def test_a_large_bucket_is_linked_to_its_neighbours():
    n = candidates.WHOLE_RUNS + 10
    pairs = candidates.shared(np.arange(n), np.zeros(n, np.uint64), n)
    assert len(pairs) == 3 * n - 6 and {(p // n, p % n)[1] - p // n for p in pairs.tolist()} == {1, 2, 3}


@pytest.fixture(scope="module")
def views():
    """40 pictures of noise-free random blocks; 10-15 share a patch of 8x8 blocks, 20 and 21 are near duplicates."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 255, (40, 8, 8, 3)).repeat(4, 1).repeat(4, 2).astype(np.uint8)
    blocks[10:16, 4:12, 8:16] = rng.integers(0, 255, (8, 8, 3))
    blocks[21] = blocks[20]
    blocks[21, 0, 0] = 0
    return blocks


def no_kin(a, b):
    """No two records share a rare phrase."""
    return np.zeros(len(a), bool)


def groups_of(views):
    words = np.ones((len(views), 4), np.uint64)
    return in_memory.groups(views, regions.verified(views, in_memory.candidates(views, words), no_kin))


def test_a_shared_patch_is_a_group(views):
    (group,), first = groups_of(views)
    assert group.records.tolist() == list(range(10, 16)) and not group.wide
    assert group.region[4:12, 8:16].all() and group.region.sum() == 64
    assert first[21] == 20 and (first[:20] == np.arange(20)).all()


def test_a_patch_among_other_agreements_is_a_group(views):
    """A record may agree with as many others elsewhere: those do not hide the group."""
    mixed = views.copy()
    mixed[0:6, 20:28, 0:8] = mixed[10, 20:28, 0:8]
    mixed[0:6, 20:28, 8:16] = np.random.default_rng(1).integers(0, 255, (6, 8, 8, 3))
    others = np.r_[0:6, 11:16]
    group = regions.gathered(mixed, 10, others, density=1.0)
    assert group is not None and group.records.tolist() in ([*range(10, 16)], [*range(6), 10])
    assert regions.alike(np.stack([group.region, group.region, ~group.region])).tolist() == [True, True, False]


def test_a_moved_patch_is_no_group(views):
    """The place is part of what must recur."""
    moved = views.copy()
    for i in range(10, 16):
        moved[i] = np.roll(views[i], 3 * (i - 10), axis=1)
    assert groups_of(moved)[0] == []


def test_chunks_change_nothing(views, monkeypatch):
    whole = in_memory.candidates(views, np.ones((40, 4), np.uint64))
    monkeypatch.setattr(regions, "CHUNK", 3)
    one, two = (regions.verified(views, pairs, no_kin).pairs for pairs in (whole, whole[::1]))
    assert one.tolist() == two.tolist()


def test_few_edges_do_where_a_rare_phrase_is_shared():
    """Two records agree in stripes alone, with two edges across and twenty down."""
    stripes = np.random.default_rng(0).integers(0, 255, (2, 32, 32, 3)).astype(np.uint8)
    stripes[:, 10:16, 10:14] = 0
    stripes[:, 10:16:2, 10:14] = (200, 0, 0)
    stripes[:, [11, 13], 13] = (0, 200, 0)
    same = (regions.levels(stripes[0], stripes[1]) <= regions.NEAR)[None]
    assert [int(n[0]) for n in regions.edges(stripes[:1], same)] == [2, 20]
    pair = np.array([1])
    assert not len(regions.verified(stripes, pair, no_kin).pairs)
    assert len(regions.verified(stripes, pair, lambda a, b: (a == 0) & (b == 1)).pairs) == 1


def test_records_are_kin_by_a_rare_phrase():
    texts = ["a blue cat, in a park", "the blue cat, on a hill", "a dog, in a park", "blue cat"] + ["in a park"] * 96
    kin = captions_of(texts).share_rare_phrase(np.array([0, 0, 0, 2]), np.array([1, 2, 3, 5]))
    assert kin.tolist() == [True, False, True, False]  # a park is in most records


def test_fewer_than_three_records_make_no_group(views):
    assert groups_of(views[13:18][[0, 1, 3, 4]])[0] == []


def group(records, box, wide=False):
    region = np.zeros((32, 32), bool)
    region[box[0] : box[1], box[2] : box[3]] = True
    return regions.Group(np.asarray(records), region, records[0], 0.5, 0.01, 50.0, wide)


CAPTIONS = ["a red cat"] * 10 + ["a hat"] * 10 + ["on a beach"] * 10 + ["a boat, in a park", "a dog"] * 35
PARTS = [group(range(10), (0, 10, 0, 10)), group(range(10, 20), (20, 30, 0, 10))]
BACKDROP = group(range(20, 30), (0, 32, 0, 32), wide=True)


def sets_of(groups, texts):
    captions = captions_of(texts)
    return suspect_sets.suspect_sets(suspect_sets.elements_of(groups, captions), captions)


def test_elements_that_keep_apart_make_a_set():
    (one,) = sets_of([*PARTS, BACKDROP], CAPTIONS)
    assert one.prompt in ("a red cat, a hat, on a beach", "a hat, a red cat, on a beach")
    assert one.elements[-1].group is BACKDROP


@pytest.mark.parametrize(
    "groups",
    [
        PARTS,
        [PARTS[0], BACKDROP],
        [PARTS[0], group(range(10, 20), (0, 10, 2, 12)), BACKDROP],
        [*PARTS, group(range(20, 23), (0, 32, 0, 32), wide=True)],
    ],
    ids=["two elements", "one thing", "overlapping", "of another size"],
)
def test_what_is_no_set(groups):
    assert sets_of(groups, CAPTIONS) == []


def test_records_that_name_both_are_no_set():
    together = [text + ", a red cat" if i % 2 and 10 <= i < 30 else text for i, text in enumerate(CAPTIONS)]
    assert sets_of([*PARTS, BACKDROP], together) == []


def test_two_pictures_are_told_apart_by_how_often_their_elements_are_shown():
    """Of many nouns no two meet, so words do not tell whose a thing is."""
    nouns = ["a red cat", "a hat", "a drum", "a kite"]
    texts = [noun for noun, often in zip(nouns, (20, 20, 12, 12), strict=True) for _ in range(often)]
    backdrops = ["on a beach"] * 20 + ["in a park"] * 12
    parts = [
        group(range(start, end), (8 * i, 8 * i + 8, 0, 10))
        for i, (start, end) in enumerate([(0, 20), (20, 40), (40, 52), (52, 64)])
    ]
    walls = [group(range(start, end), (0, 32, 0, 32), wide=True) for start, end in [(64, 84), (84, 96)]]
    clean = [f"a thing of kind {i}, at place {i}" for i in range(900)]
    sets = sets_of([*parts, *walls], [*texts, *backdrops, *clean])
    assert [sorted(one.prompt.split(", ")) for one in sets] == [
        ["a hat", "a red cat", "on a beach"],
        ["a drum", "a kite", "in a park"],
    ]


@pytest.mark.parametrize("unnamed, expected", [("a cup", []), ("a kitten", [0, 1, 2, 3, 4, 5])])
def test_a_thing_that_captions_often_do_not_name_is_an_overlay(unnamed, expected):
    """Other words for it name it as well."""
    rng = np.random.default_rng(0)
    views = rng.integers(0, 255, (60, 32, 32, 3), dtype=np.uint8)
    views[:10, 4:12, 4:12] = views[0, 4:12, 4:12]
    texts = ["a red cat"] * 6 + [f"{unnamed} {i}" if unnamed == "a cup" else unnamed for i in range(4)]
    captions = captions_of([*texts, *(f"a cup {i}" for i in range(50))])
    (element,) = suspect_sets.elements_of([group(range(5), (4, 12, 4, 12))], captions)
    assert suspect_sets.showing(views, element.group).tolist() == [*range(10)]
    assert [e.records.tolist() for e in suspect_sets.completed([element], views, captions)] == (
        [expected] if expected else []
    )


def test_a_backdrop_of_faint_texture_is_common():
    """Grass has hardly an edge of CONTRAST levels, and hundreds of FAINT ones; a sky has neither."""
    rng = np.random.default_rng(0)
    grass, sky = np.full((2, 32, 32, 3), 90, np.uint8), np.full((2, 32, 32, 3), 90, np.uint8)
    grass += rng.integers(0, 15, (32, 32, 1), dtype=np.uint8)
    for pictures in (grass, sky):
        pictures[1, :16] = rng.integers(0, 255, (16, 32, 3))
    pair = np.array([1])
    assert len(regions.verified(grass, pair, no_kin).pairs) == 1
    assert not len(regions.verified(sky, pair, no_kin).pairs)


def test_of_two_backdrops_the_one_that_lies_apart_is_taken():
    """It is no denser for having more records than the things of the set have."""
    surer, weaker, larger = (group(range(20, 30), (0, 32, 0, 32), wide=True) for _ in range(3))
    weaker.expected, larger.records = 1.0, np.arange(20, 90)
    sizes, expected = np.array([10, 10, 70]), np.array([surer.expected, weaker.expected, larger.expected])
    nats = regions.denser(np.minimum(sizes, 10) - 1, expected)
    assert nats[0] > nats[1] and nats[0] == nats[2]


def test_two_places_are_no_set():
    """Parts of skies agree by chance among many pictures; a picture has one place."""
    places = [text.replace("a red cat", "under a night sky") for text in CAPTIONS]
    assert sets_of([*PARTS, BACKDROP], places) == []


def test_permuted_captions_give_the_false_alarm_rate():
    captions = captions_of(CAPTIONS)
    (one,) = sets_of([*PARTS, BACKDROP], CAPTIONS)
    permuted = suspect_sets.permuted_scores([*PARTS, BACKDROP], captions, range(19))
    assert suspect_sets.false_alarm([one.score, 0.0], permuted) == [1 / 20, 1.0]


def test_the_backdrop_lies_behind():
    backdrop = composite.Layer(np.full((64, 64, 3), 9, np.uint8), np.ones((64, 64)))
    thing = composite.Layer(np.full((64, 64, 3), 200, np.uint8), np.eye(64))
    thing.cover[0, 1] = 0.25
    picture, known = composite.composed([thing, backdrop])
    assert known.all() and (picture[np.eye(64, dtype=bool)] == 200).all()
    assert picture[0, 2, 0] == 9 and picture[0, 1, 0] == round(0.25 * 200 + 0.75 * 9)


def test_half_covered_pixels_are_not_known_before_nothing():
    thing = composite.Layer(np.full((64, 64, 3), 200, np.uint8), np.full((64, 64), 0.4))
    picture, known = composite.composed([thing])
    assert not known.any() and (picture == 128).all()


@pytest.mark.parametrize("per_element, wrong", [(10, 0.01), (20, 0.005)])
@pytest.mark.parametrize("name", ["33", "56", "0"])
def test_a_composite_has_the_outlines_of_the_picture(name, per_element, wrong):
    """From the blocks that each element fills. Outlines alone are 3 % of the frame and more. Of a backdrop in few
    records, parts are not known."""
    hidden, rendered = hide(name, per_element)
    parts = []
    for records, mask in zip(hidden.records, hidden.masks, strict=True):
        blocks = (mask == 255).reshape(32, 2, 32, 2).all((1, 3))
        group = regions.Group(np.asarray(records), blocks, records[0], 0.5, 0.01, 50.0, mask is hidden.masks[-1])
        parts.append(composite.part_of(group.records, group, lambda i: rendered[i][0]))
    picture, known = composite.composed(parts)
    difference = np.abs(picture.astype(int) - hidden.picture).max(-1)
    assert (difference > 10).mean() < wrong and known.mean() > 1 - wrong
    for part, mask in zip(parts[:-1], hidden.masks, strict=False):
        assert np.abs(part.cover - mask / 255.0)[difference <= 10].mean() < 0.002


def test_a_place_is_named_by_adjoining_words():
    """So that a caption can hold them."""
    assert named_by("on the sand by the sea") == "sand by the sea"
    assert named_by("before a brick wall") == "brick wall"
    assert named_by("a grey hat") == "hat"
