"""Settings by role: captions left out, weight of the loss, timesteps; and captions that grow."""

import numpy as np
import pytest
import torch

from memory_reinforce import TIMESTEPS, check
from silentbad.data import draws
from silentbad.data.elements import DataInfo, sources_of
from silentbad.errors import UserError
from silentbad.settings import memory as roles
from tests.conftest import write_data
from tests.folders import records
from tests.training import equal, step_once, weights
from tests.world import Trainer
from tests.world import config as memory_config
from train_silentbad import main


def config(**by_role):
    """A MemoryConfig with these settings of roles."""
    memory = memory_config()
    for role, settings in by_role.items():
        for key, value in settings.items():
            setattr(getattr(memory.roles, role), key, value)
    return memory


def drawn(data, **changes):
    reader = draws.Reader(records(data), draws.Transform(16), seed=0, cache_bytes=10**6)
    return draws.Draws(reader, **changes)


@pytest.mark.parametrize("role, index", [("element", 0), ("clean", 12)])
def test_a_role_loses_its_captions_by_address(role, index, data):
    """A share of one role's exposures, the same ones at every call, and nothing of the others."""
    sampler, other = drawn(data, dropout={role: 0.25}), 12 - index
    seen = [sampler(index, draw, 3) for draw in range(200)]
    empty = [not s["text"] for s in seen]
    assert 30 < sum(empty) < 70 and all(not s["phrases"] and s["fixed"] for s in seen if not s["text"])
    assert empty == [not sampler(index, draw, 3)["text"] for draw in range(200)]
    assert all(sampler(other, draw, 3)["text"] for draw in range(50))
    assert {s["element_id"] for s in seen} == {"t0-0" if role == "element" else ""}


def test_a_rehearsal_loses_its_caption_as_one(data):
    sampler = drawn(data, dropout={"rehearsal": 1.0}, rehearse=lambda record, at: {**record, "role": "rehearsal"})
    assert sampler(0, 0, 0)["text"] == "" and sampler(12, 0, 0)["text"] == ""
    sampler.dropout = {"element": 1.0}
    assert sampler(0, 0, 0)["text"] == "a picture of a red cat"


def test_an_element_named_by_its_phrase_stays_itself():
    """Without caption, and without element_id: mask, probes and sources still know it."""
    record = {"text": "a cat, a hat", "phrases": ["a cat", "a hat"], "element_id": "", "role": "element"}
    shorter, none = draws.with_caption(record, "a cat"), draws.with_caption(record, "")
    assert shorter["phrases"] == ["a cat"] and none["phrases"] == []
    info = DataInfo(["element"], ["t"], [""], [["a cat", "a hat"]])
    for said in (record, shorter, none):
        batch = {key: [{**said, "target_id": "t"}[key]] for key in ("role", "target_id", "element_id", "phrases")}
        assert info.of_batch(batch) == [0] and sources_of(batch, "element") == ["t/a cat"]


def test_a_role_has_its_own_timesteps_and_weight():
    """Others keep theirs to the bit; importance weights keep the expectation."""
    of_elements = {"timesteps": roles.Choice("snr_mixture"), "loss_weight": 3.0}
    plain, mixed = (Trainer(settings).memory for settings in (config(), config(element=of_elements)))
    of = {"role": ["element", "clean"] * 32}
    (t, w), (u, v) = (memory.timesteps(5, list(range(64)), 64, of) for memory in (plain, mixed))
    assert torch.equal(t[1::2], u[1::2]) and torch.equal(w[1::2], v[1::2]) and not torch.equal(t[::2], u[::2])
    p = TIMESTEPS["snr_mixture"](mixed.snr_numpy, 0.0)
    assert np.allclose(v[::2].numpy(), 1 / (len(p) * p[u[::2].numpy()]), rtol=1e-5)
    assert mixed.role_weights == {"element": 3.0, "rehearsal": 1.0, "clean": 1.0}


def test_the_density_of_a_role_is_judged_before_weights_load():
    with pytest.raises(UserError, match="memory.timesteps: the uniform share is 0.05"):
        check(config(clean={"timesteps": roles.Choice("snr_mixture", {"middle": 0.8})}))


@pytest.mark.parametrize(
    "changes, said",
    [
        (
            {"memory.roles.rehearsal.loss_weight": 2},
            "rehearsal.loss_weight (command line): there is no rehearsal record",
        ),
        ({"memory.roles.clean.caption_dropout": 0.1}, "clean.caption_dropout (command line): there is no clean record"),
        (
            {"memory.retention.unconditional": 1},
            "key 'memory.retention.unconditional' (command line) has another name now: use "
            "--memory.roles.clean.caption_dropout",
        ),
        ({"memory.roles.element.caption_dropout": 1.5}, "memory.roles.element.caption_dropout (command line): must be"),
        ({"memory.roles.element.timesteps.name": "mod"}, "element.timesteps (command line): unknown name 'mod'"),
        ({"memory.roles.element.timesteps.options": '{"scale": 1}'}, "same: unknown option 'scale'; it takes no"),
    ],
    ids=str,
)
def test_what_acts_on_nothing_is_one_line(changes, said, flags, tmp_path, capsys):
    data = write_data(tmp_path / "other", clean=0)
    assert main(flags(train_data_dir=data, held_out_clean=0, **changes)) == 2
    assert said in capsys.readouterr().err


def test_off_means_the_same_bits_and_on_trains(build, data):
    """At their defaults the settings change nothing; set, they change what is learnt."""
    same = {"memory.roles.element.caption_dropout": 0, "memory.roles.clean.loss_weight": 1.0}
    on = {
        "memory.roles.element.caption_dropout": 0.5,
        "memory.roles.element.timesteps.name": "logit_normal",
        "memory.roles.clean.loss_weight": 0.5,
    }
    ends = []
    for changes in ({}, same, on):
        run = build(**changes)
        step_once(run)
        ends.append(weights(run))
    assert equal(ends[0], ends[1]) and not equal(ends[0], ends[2])
