"""The memory of phrases: what a probe measures, costs and leaves alone."""

import copy

import pytest
import torch
from diffusers import DDPMScheduler

from silentbad.memory import probes
from silentbad.model import diffusion
from tests.toy import AND, CURRICULUM, L2SP
from tests.world import PROBED, SD, SNR, Trainer, config, phrase_memory


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample"])
def test_strength_is_the_removed_share_of_the_error(kind):
    scheduler = DDPMScheduler.from_config(SD.config, prediction_type=kind)
    memory = phrase_memory()

    def predictor(share_left):
        def predict(x_t, t, texts):
            x0 = memory.bank[0].latents[[("x", "y").index(text) for text in texts]]
            a, s = (v[t][:, None, None, None].sqrt() for v in (SD.alphas_cumprod, 1 - SD.alphas_cumprod))
            target = diffusion.prediction_target(scheduler, x0, (x_t - a * x0) / s, t)
            scale = {"epsilon": 1, "v_prediction": a.square().reciprocal().sqrt(), "sample": s / a}[kind]
            return target + share_left * scale

        return predict

    memory.first = torch.stack([memory.probe(0, predictor(1.0), scheduler)])
    halved = torch.stack([memory.probe(0, predictor(0.5), scheduler)])
    assert probes.strength(halved, memory.first).item() == pytest.approx(0.75, abs=1e-3)
    perfect = torch.stack([memory.probe(0, predictor(0.0), scheduler)])
    assert probes.strength(perfect, memory.first).item() == pytest.approx(1, abs=1e-4)


def test_probe_timesteps_cover_four_strata_of_snr():
    s = SNR[probes.probe_timesteps(SNR)]
    assert [int(((s < hi) & (s > lo)).sum()) for hi, lo in ((10, 2), (2, 0.5), (0.5, 0.1), (0.1, 0.02))] == [2] * 4


def test_probing_stays_within_its_share_of_the_budget():
    memory, forwards = phrase_memory(n=3), 0

    def predict(x_t, t, texts):
        nonlocal forwards
        forwards += len(x_t)
        return torch.zeros_like(x_t)

    memory.start(predict, SD)
    assert forwards == 3 * 8
    for step in range(1, 1001):
        memory.after_step(step, predict, SD)
        assert forwards <= max(24, 0.03 * 3 * 4 * step)
    assert forwards > 0.9 * 0.03 * 3 * 4 * 1000
    assert [h["step"] for h in memory.history] == sorted({h["step"] for h in memory.history})
    assert len(memory.rows()) == len(memory.history) > 5


def test_ranks_share_a_probe_and_agree():
    def predict(x_t, t, texts):
        return 0.3 * x_t

    whole = phrase_memory().probe(0, predict, SD)
    for world in (2, 3, 11):
        parts = [phrase_memory(world=world, rank=r).probe(0, predict, SD) for r in range(world)]
        assert torch.allclose(sum(parts), whole, rtol=1e-5)
        assert ((torch.stack(parts) > 0).sum(dim=0) == 1).all()


def test_probing_changes_no_generator_and_no_weights():
    trainer = Trainer(config(phrase_memory=PROBED))
    state, weights = torch.get_rng_state(), [p.detach().clone() for p in trainer.unet.parameters()]
    for step in range(1, 8):
        trainer.memory.after_step(step)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(weights, trainer.unet.parameters(), strict=True))
    assert all(p.grad is None for p in trainer.unet.parameters())


def test_resume_continues_bit_for_bit():
    parts = dict(
        sampler="weakest_first",
        phrase_memory=PROBED,
        timesteps=CURRICULUM,
        distillation={"name": AND, "options": {"after": -9.0, "every": 1, "refresh": 4}},
        retention=L2SP,
    )
    whole = Trainer(config(**parts))
    whole.train(5)
    state = copy.deepcopy((whole.memory.state_dict(), whole.unet.state_dict(), whole.optimizer.state_dict()))
    whole.train(4)
    again = Trainer(config(**parts))
    again.step = 5
    again.memory.load_state_dict(state[0])
    again.unet.load_state_dict(state[1])
    again.optimizer.load_state_dict(state[2])
    again.train(4)
    assert again.losses == whole.losses[5:] and again.memory.history == whole.memory.history
