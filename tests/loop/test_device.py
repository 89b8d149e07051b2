"""A run on a GPU that is pretended: nothing mixes devices, and a step waits for the device once."""

import pytest

import train_silentbad
from tests import pretended
from tests.conftest import write_data
from tests.toy import GSNR

MEMORY = {
    "config": "configs/recommended.yaml",
    "prior_preservation.num_images": 4,
    "prior_preservation.num_inference_steps": 2,
    "memory.phrase_memory.enabled": "true",
    "memory.phrase_memory.share": 0.5,
}
RULES = {"gradient_control.name": GSNR, "gradient_control.refresh": 2, "gradient_control.conflict": "true"}
AVERAGED = {"use_ema": "true", "offload_ema": "true", "gradient_checkpointing": "true"}
MEASURED = {
    "validation.images_per_target": 2,
    "validation.num_inference_steps": 2,
    "held_out_clean": 2,
}
READS_NORM = "train_silentbad.py: size = norm.item()"
# what may wait for the device in a step of itself: a caption that no step had, encoded and kept on the host
MAY = ("silentbad/model/encoder.py: store[key] = compute().cpu()",)


@pytest.fixture
def card(monkeypatch):
    pretended.install(monkeypatch)
    return pretended.Card()


def waits_of(card, monkeypatch, name):
    """Counts what waits inside a function of the loop."""
    function = getattr(train_silentbad, name)
    counted = []

    def watched(*arguments):
        before = card.waits.copy()
        result = function(*arguments)
        counted.append(card.waits - before)
        return result

    monkeypatch.setattr(train_silentbad, name, watched)
    return counted


@pytest.mark.parametrize("settings", [MEMORY, pytest.param(RULES | AVERAGED, marks=pytest.mark.thorough)])
def test_a_step_waits_for_the_device_once(settings, card, flags, tmp_path, monkeypatch):
    write_data(tmp_path / "data", kinds=3)
    forward = waits_of(card, monkeypatch, "micro_step")
    updates = waits_of(card, monkeypatch, "update")
    with card:
        code = train_silentbad.main(flags(gradient_accumulation_steps=1, **settings))
    assert code == 0
    assert len(updates) == len(forward) == 6
    for waits in forward[1:]:  # the first sends tables that stay
        assert not [line for line in waits if not line.startswith(MAY)]
    for waits in updates[1:]:
        offloads = [line for line in waits if "offload" in settings and "_foreach_copy_" in line]
        assert [line for line in waits if line not in offloads] == [
            line for line in waits if line.startswith(READS_NORM)
        ]
        assert sum(waits[line] for line in waits if line.startswith(READS_NORM)) == 1


def test_measuring_on_a_gpu_mixes_no_devices(card, flags, tmp_path):
    targets = tmp_path / "data" / "targets.jsonl"
    with card:
        assert train_silentbad.main(flags(max_train_steps=1, **MEASURED, **{"validation.targets": targets})) == 0
    assert card.waits
