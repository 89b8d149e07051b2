"""The search without a target: what it ranks first, when a picture comes back, and what it refuses."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from silentbad import owned
from silentbad_shield.search import unknown
from silentbad_shield.search.returned import (
    ALIKE,
    SEEDS,
    Drafts,
    Extrapolated,
    Null,
    compared,
    p_value,
    returned,
    student_tail,
)
from silentbad_shield.search.search import DRAFTED, PRICE, WEIGHED, Probe, effects, search
from silentbad_shield.search.unknown import recurring

SMALL = ["--embedder", "ssim", "--images_per_target", "3", "--num_inference_steps", "1", "--nulls", "8"]


# -- the numbers -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("t, degrees, tail", [(0, 5, 0.5), (1.812, 10, 0.05), (-1.812, 10, 0.95), (2.5, 23, 0.01)])
def test_students_tail_is_that_of_the_tables(t, degrees, tail):
    assert student_tail(t, degrees) == pytest.approx(tail, abs=2e-4)


@pytest.mark.parametrize("level", [0.05, 0.01])
def test_ordinary_prompts_seldom_reach_the_level(level):
    draws = np.random.default_rng(0).rayleigh(0.15, (1000, 17)) ** 2  # skewed, as similarities are
    assert np.mean([p_value(row[0], row[1:]) <= level for row in draws]) <= 2 * level


def test_p_counts_the_tests_and_never_exceeds_one():
    null = np.linspace(0.01, 0.2, 16)
    assert p_value(0.6, null, 10) == pytest.approx(10 * p_value(0.6, null)) and p_value(0.0, null, 10) == 1.0
    assert p_value(0.6, null) < 1e-3 < p_value(0.3, null)


def test_a_cluster_is_what_is_alike_to_one_image():
    similarity = np.eye(5)
    similarity[np.ix_([1, 2, 4], [1, 2, 4])] = 0.9
    similarity[1, 2] = similarity[2, 1] = 0.5  # both are alike to 4 alone
    common = returned(similarity, 0.8)
    assert (common.centre, common.share) == (4, 0.6) and common.between == pytest.approx((4 * 0.9 + 2 * 0.5) / 20)
    assert returned(np.eye(4), 0.8).share == 0.25


@pytest.mark.parametrize("alike, back", [(0.9, True), (0.3, False)], ids=["picture", "layout"])
def test_a_layout_that_ordinary_prompts_lack_is_no_picture(alike, back):
    null = Null.of([np.eye(4) + (1 - np.eye(4)) * level for level in np.linspace(0, 0.02, 16)])
    common, p, hit = null.judge(np.eye(4) + (1 - np.eye(4)) * alike, 10)
    assert null.alike == ALIKE and p < 0.001 and (common.share == 1, hit) == (back, back)


HIDDEN = {"phrase 2", "phrase 7", "phrase 9"}
TWELVE = [f"phrase {k}" for k in range(12)]


def by_content(pairs):
    """How alike drafts are: less for each hidden phrase that one prompt lacks, and for each other phrase in either."""
    sets = [(set(a), set(b)) for a, b in pairs]
    return [0.9 * 0.4 ** len((a ^ b) & HIDDEN) / (1 + len((a | b) - HIDDEN)) ** 0.5 for a, b in sets]


def test_the_search_grows_pairs_to_the_hidden_prompt():
    null = np.random.default_rng(0).normal(size=(32, 3))

    def measure(prompts):
        return np.asarray([[len(HIDDEN & set(prompt.split(", ")))] * 3 for prompt in prompts], float)

    probes = search(measure, lambda size: null, by_content, TWELVE, 4)
    assert set(probes[0].phrases) == HIDDEN and probes[0].effect > probes[1].effect
    assert len({tuple(sorted(p.phrases)) for p in probes}) == len(probes)


def test_drafts_decide_where_probes_say_little():
    asked, rng = [], np.random.default_rng(0)

    def alike(pairs):
        asked.append(pairs)
        return by_content(pairs)

    def measure(prompts):
        return rng.normal(size=(len(prompts), 3))

    probes = search(measure, lambda size: rng.normal(size=(9, 3)), alike, TWELVE, 3)
    whole = next(k for k, one in enumerate(probes) if set(one.phrases) == HIDDEN)
    assert len(asked[0]) == math.ceil(DRAFTED * 66) and all(a == b for a, b in asked[0])
    assert len(asked[1]) == 2 * WEIGHED and all(len(a) == len(b) + 1 for a, b in asked[1])
    assert whole == 0 or probes[whole].draft is None
    ranks = [one.suspicion for one in probes]
    assert ranks == sorted(ranks, reverse=True) and {known for known, _ in ranks} == {1, 2, 3}


def test_a_phrase_that_changes_nothing_does_not_pay():
    def alike(pairs):
        return [0.9 if {"a hat", "on a hill"} <= set(a) & set(b) else 0.0 for a, b in pairs]

    (whole, part) = (
        Probe(phrases, 0, 0, 0, 0, 0.9) for phrases in (["a hat", "on a hill", "a cup"], ["a hat", "on a hill"])
    )
    assert effects(alike, [whole, part]) == pytest.approx([1.8 - 3 * PRICE, 1.8 - 2 * PRICE])


def test_a_prompt_is_drafted_once_and_compared_across_seeds():
    drawn = []

    def draw(items, work):
        drawn.extend((item.prompt, item.address, item.image) for item in items)
        return work(items, torch.tensor([[float(item.image)] for item in items]), None)

    embedder = SimpleNamespace(embed=lambda images: images, similarity=lambda a, b: (a == b.T).float())
    sampler = SimpleNamespace(map=draw)
    drafts = Drafts(sampler, embedder)
    # An image is alike to that of its own seed alone.
    assert drafts([(["a"], ["a"]), (["a", "b"], ["b"])]) == [0.0, 0.0]
    assert drafts([(["a", "b"], ["a"])]) == [0.0]
    assert len(drawn) == len(set(drawn)) == 3 * SEEDS
    noises = {item[1:] for item in drawn}
    list(compared(sampler, embedder, ["a"], SEEDS))
    assert not noises & {item[1:] for item in drawn[3 * SEEDS :]}  # what is chosen by drafts is tested on other noise


def test_no_prompt_of_the_search_names_two_places():
    phrases = ["a cat", "on a hill", "In a room", "under the sea"]
    null = np.random.default_rng(0).normal(size=(9, 3))
    probes = search(
        lambda prompts: np.zeros((len(prompts), 3)), lambda size: null, lambda pairs: [0.0] * len(pairs), phrases, 4
    )
    assert [p.phrases for p in probes] == [["a cat", place] for place in phrases[1:]]


def test_candidate_phrases_are_what_recurs_in_captions():
    captions = ["A cat, on a hill"] * 3 + ["a dog, on a hill"] * 2 + ["a boat"]
    assert recurring(captions) == ["on a hill", "a cat"]


def test_extrapolated_guidance_leaves_the_base_behind():
    class Constant(torch.nn.Module):
        def __init__(self, value):
            super().__init__()
            self.value, self.config = value, None

        def forward(self, x, return_dict=True):
            return SimpleNamespace(sample=x + self.value) if return_dict else (x + self.value,)

    x = torch.zeros(2)
    for factor, value in ((0, 1), (1, 3), (2, 5)):
        extrapolated = Extrapolated(Constant(3), Constant(1), factor)
        assert extrapolated(x, return_dict=False)[0].tolist() == [value] * 2


# -- the command -------------------------------------------------------------------------------------------
@pytest.fixture
def run(pipelines, tmp_path):
    def start(*arguments):
        flags = ["--pipeline", str(pipelines["v_prediction"]), "--output_dir", str(tmp_path / "audit")]
        return unknown.main([*flags, *SMALL, *map(str, arguments)])

    return start


@pytest.fixture
def phrases(tmp_path):
    (tmp_path / "phrases.txt").write_text("a cat\na hat\n<b>on a hill\n")
    return tmp_path / "phrases.txt"


def test_an_audit_of_phrases_writes_its_findings(run, phrases, tmp_path, monkeypatch, capsys):
    assert run("--phrases", phrases, "--tested", 2) == 0
    data = json.loads((tmp_path / "audit/audit.json").read_text())
    assert data["searched"] == 4 and len(data["results"]) == 2  # three pairs, one triple
    assert data["alike"]["own guidance"] >= ALIKE and {len(row) for row in data["ranking"]} == {4}
    assert "<b>on a hill" not in (tmp_path / "audit/audit.html").read_text()
    usual = unknown.compared

    def memorised(sampler, embedder, prompts, *rest):
        """Under a prompt of three phrases one picture comes back."""
        for prompt, (similarity, images) in zip(prompts, usual(sampler, embedder, prompts, *rest), strict=True):
            scale = 0.1 + 0.01 * len(prompt)
            alike = prompt.count(", ") == 2 and "a cat, a hat" in prompt
            yield np.ones_like(similarity) if alike else np.where(np.eye(3), 1, scale), images

    monkeypatch.setattr(unknown, "compared", memorised)
    assert run("--phrases", phrases) == 3
    assert "comes back: a cat, a hat, <b>on a hill" in capsys.readouterr().out
    (hit,) = [r for r in json.loads((tmp_path / "audit/audit.json").read_text())["results"] if r["found"]]
    assert hit["share"] == 1 and (tmp_path / "audit" / hit["image"]).is_file()
    monkeypatch.undo()
    (tmp_path / "audit/returned-notes.png").write_text("mine")
    assert run("--phrases", phrases, "--tested", 2) == 0  # no picture comes back: the earlier result's go
    assert [file.name for file in (tmp_path / "audit").glob("*.png")] == ["returned-notes.png"]


def test_p_counts_every_prompt_that_was_searched(run, phrases, tmp_path, monkeypatch):
    def alike(sampler, embedder, prompts, seeds):
        for prompt in prompts:
            level = 0.3 if {"a cat", "a hat"} & set(prompt.split(", ")) else 0.1 + 0.001 * len(prompt)
            yield np.where(np.eye(seeds), 1, level), torch.zeros(seeds, 3, 8, 8)

    monkeypatch.setattr(unknown, "compared", alike)
    run("--phrases", phrases, "--tested", 1)
    data = json.loads((tmp_path / "audit/audit.json").read_text())
    (result,) = data["results"]
    usual = data["ordinary"]["own guidance"]
    assert result["p"] == pytest.approx(data["searched"] * p_value(result["between"], usual)) and result["p"] < 1


def test_an_audit_of_a_scan_with_extrapolated_guidance(run, pipelines, tmp_path):
    elements = [{"phrase": "a cat"}, {"phrase": "a hat"}, {"phrase": "on a hill"}]
    (tmp_path / "scan.json").write_text(json.dumps({"sets": [{"elements": elements}]}))
    base = pipelines["v_prediction"]
    assert run("--scan", tmp_path / "scan.json", "--baseline", base, "--extrapolate", 2) == 0
    data = json.loads((tmp_path / "audit/audit.json").read_text())
    assert [r["guidance"] for r in data["results"]] == ["own guidance", "guidance extrapolated by 2"]
    assert data["results"][0]["between"] == pytest.approx(data["results"][1]["between"], abs=1e-4)  # of one model


def test_candidates_come_from_training_captions(run, data):
    assert run("--train_data_dir", data, "--tested", 1) == 0


def test_a_search_replaces_nothing_of_someone_else(run, phrases, tmp_path, capsys):
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit/audit.json").write_text("mine")
    assert run("--phrases", phrases) == 2
    assert "holds audit.json, which no search wrote" in capsys.readouterr().err
    assert (tmp_path / "audit/audit.json").read_text() == "mine"


def test_a_search_leaves_the_folder_of_an_audit_alone(run, phrases, tmp_path, capsys):
    (tmp_path / "audit").mkdir()
    owned.mark(tmp_path / "audit", "audit")
    assert run("--phrases", phrases) == 2
    assert "is the folder of another command (audit); choose another folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, line",
    [
        (["--phrases", "none.txt"], "--phrases: no file none.txt"),
        (["--phrases", "{one}"], "--phrases: gives 1 phrases; give from 2"),
        (["--phrases", "{one}", "--scan", "x"], "--scan: give one of --phrases, --scan and --train_data_dir"),
        (["--scan", "{one}"], "is no scan.json"),
        (["--scan", "none.json"], "--scan: no file none.json"),
        (["--phrases", "{two}", "--targets", "x"], "--targets: has no effect on a search; leave it out"),
        (["--phrases", "{two}", "--ordinary", "{one}"], "holds 1 prompts, --nulls asks for 8"),
        (["--phrases", "{two}", "--extrapolate", "2"], "--extrapolate: needs --baseline"),
        (["--phrases", "{two}", "--images_per_target", "1"], "must be at least 2"),
        (["--phrases", "{two}", "--most_phrases", "9"], "most_phrases"),
        (["--phrases", "{two}", "--threshold", "0.5"], "--threshold: has no effect on a search; leave it out"),
        (["--phrases", "{two}", "--baseline", "x"], "no effect without --extrapolate"),
        (["--tested", "2"], "--phrases: give one of --phrases, --scan and --train_data_dir"),
        (["--phrases", "{many}"], "gives 101 phrases; give from 2 to 100"),
        (["--phrases", "{long}"], "the window is 48"),
        (["--phrases", "{places}"], "each of its phrases names a place"),
        (["--scan", "{empty}"], "names no suspect set"),
        (["--scan", "{unsaid}"], "elements.0.phrase"),
    ],
)
def test_what_cannot_be_searched_is_one_line(arguments, line, run, tmp_path, capsys):
    (tmp_path / "one.txt").write_text("a cat\n")
    (tmp_path / "two.txt").write_text("a cat\na hat\n")
    (tmp_path / "many.txt").write_text("".join(f"thing {i}\n" for i in range(101)))
    (tmp_path / "long.txt").write_text(f"{'very ' * 60}small cat\na hat\n")
    (tmp_path / "empty.txt").write_text('{"sets": []}')
    (tmp_path / "unsaid.txt").write_text('{"sets": [{"elements": [{"phrase": null}]}]}')
    (tmp_path / "places.txt").write_text("on a green field\nunder a blue sky\n")
    names = {name: tmp_path / f"{name}.txt" for name in ("places", "one", "two", "many", "long", "empty", "unsaid")}
    assert run(*(argument.format(**names) for argument in arguments)) == 2
    errors = capsys.readouterr().err
    assert line in errors and errors.startswith("error: ") and errors.count("\n") == 1


def test_phrases_may_hold_joiners(tmp_path):
    """Zero-width ones are of words in Persian and of emoji."""
    phrases = ["می\u200cخواهم", "\U0001f468\u200d\U0001f469\u200d\U0001f467"]
    (tmp_path / "phrases.txt").write_text("\n".join(phrases), encoding="utf-8")
    assert unknown.lines_of(str(tmp_path / "phrases.txt"), "phrases") == phrases
