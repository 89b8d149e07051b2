"""Memory reinforcement: every formula against an independent closed form, every registry entry on the tiny
pipeline.
"""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

import memory_reinforce as mr
from silentbad.errors import UserError
from silentbad.loop.hooks import MicroStep
from silentbad.memory import rehearsal
from tests.tiny import tiny_unet
from tests.toy import AND, CURRICULUM, L2SP, experiment
from tests.world import PROBED, Trainer, config

# ------------------------------------------------------------ the contract of each registry
ENTRIES = [
    *({"sampler": n, "phrase_memory": PROBED} for n in (*mr.SAMPLERS, experiment("leitner"))),
    {"sampler": {"name": experiment("by_need"), "options": {"rates": [0.5, 0.9, 0.9, 0.2, 1.0]}}},
    *({"timesteps": n} for n in (*mr.TIMESTEPS, CURRICULUM)),
    *({"loss": n} for n in (*mr.LOSSES, *map(experiment, ("soft_min_snr", "debiased", "p2")))),
    *({"loss": experiment("flow_weights", n)} for n in ("sigma_sqrt", "cosmap")),
    *({"loss": {"error": n}} for n in (*mr.ERRORS, experiment("huber"))),
    *({"region": n} for n in mr.REGION),
    *({"rehearsal": n, "region": "mask"} for n in mr.REHEARSAL),
    {"retention": L2SP},
    {"loss": {"dream": 1.0}},
    *(
        {"phrase_memory": PROBED, "distillation": {"name": AND, "options": {"after": -9.0, "every": 2} | o}}
        for o in ({"gate": "mask"}, {"gate": "attention"}, {"source": "noise"})
    ),
    {
        "distillation": {"name": experiment("regional", "RegionalDistillation"), "options": {"after": 0.0}},
        "region": "mask",
    },
    {"retention": "self_distillation"},
]


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_entry_trains_ten_steps(entry):
    trainer = Trainer(config(**entry))
    before = [p.detach().clone() for p in trainer.unet.parameters()]
    trainer.train(10)
    assert all(math.isfinite(loss) for loss, _ in trainer.losses)
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.unet.parameters(), strict=True))
    slots = set(entry) & set(mr.AUXILIARY)
    assert all(f"memory/{slot}" in trainer.memory.meters() for slot in slots)
    assert slots == set() or any(extra is not None for _, extra in trainer.losses)


@pytest.mark.parametrize("prediction_type", ["epsilon", "sample"])
def test_other_predictions_train_with_everything_on(prediction_type):
    trainer = Trainer(
        config(
            loss={"name": "min_snr", "dream": 1.0},
            sampler="weakest_first",
            phrase_memory=PROBED,
            region="estimated",
            retention="self_distillation",
            distillation={"name": AND, "options": {"after": -9.0}},
            rehearsal="leak_free",
            timesteps="snr_mixture",
        ),
        prediction_type,
    )
    trainer.train(5)
    assert all(math.isfinite(loss) for loss, _ in trainer.losses)


def test_unknown_names_and_options_are_refused_before_weights():
    for wrong in (
        config(sampler="unifrm"),
        config(loss={"name": "min_snr", "options": {"gama": 5.0}}),
        config(sampler="weakest_first"),
        config(rehearsal="pairwise"),
        *(config(rehearsal=name) for name in rehearsal.PLACED if name != "pairwise"),
        config(timesteps={"name": "mode", "options": {"scale": 9.0}}),
        config(region={"name": "mask", "options": {"outside": 0.0}}),
        config(loss={"error": "l1"}),
        config(phrase_memory={"share": 0.0}),
        config(distillation="andd"),
    ):
        with pytest.raises(UserError):
            mr.check(wrong)
    mr.check(mr.MemoryConfig())


# ------------------------------------------------------------ no host sync


@pytest.mark.parametrize("region", mr.REGION)
def test_the_step_never_waits_for_the_device(region):
    """Under FakeTensorMode a tensor has no values: reading one on the host raises."""
    trainer = Trainer(
        config(
            region=region,
            loss="min_snr",
            timesteps=CURRICULUM,
            phrase_memory=PROBED,
            distillation={"name": AND, "options": {"after": -9.0, "every": 1}},
            retention="self_distillation",
        )
    )
    m, world = trainer.memory, trainer.world
    batch = world.batch([world.records[r] for r in (0, 5, 10, -1)])
    t, w = m.timesteps(0, range(4), 4, batch)
    c = trainer.pipe.text_encoder(torch.zeros(1, 48, dtype=torch.long))[0].detach()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        with pytest.raises((RuntimeError, DynamicOutputShapeException)):
            mode.from_tensor(t)[0].item()
        unet = tiny_unet()

        def predict(x_t, t, texts, model=None, time_ids=None):
            return (model or unet)(x_t, t, mode.from_tensor(c).expand(len(texts), -1, -1)).sample

        fake = {k: mode.from_tensor(v) if torch.is_tensor(v) else v for k, v in batch.items()}
        t, w = mode.from_tensor(t), mode.from_tensor(w)
        x_t = torch.randn(4, 4, 8, 8)
        pred = predict(x_t, t, fake["text"])
        loss = m.loss_per_sample(pred, torch.randn(4, 4, 8, 8), t, w, fake).mean()
        extra = m.extra_loss(loss, MicroStep(1, 0, m.progress(1), fake, x_t, t, pred, unet, predict))
        (loss + extra).backward()
    assert {"memory/distillation", "memory/retention"} <= set(m.meters())
