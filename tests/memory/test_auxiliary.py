"""Retention by distilling from the model as it was."""

import pytest
import torch

from silentbad.loop.hooks import MicroStep
from silentbad.settings.memory import RoleConfig
from tests.world import Trainer, config


def test_self_distillation_starts_near_zero_on_clean_records():
    trainer = Trainer(config(retention="self_distillation"))
    part, world = trainer.memory.auxiliaries["retention"], trainer.world
    batch = world.batch([world.records[0], world.records[-1]])
    x_t, t = torch.randn(2, 4, 8, 8), torch.tensor([10, 400])
    pred = trainer.predict(x_t, t, batch["text"])
    now = MicroStep(0, 0, 0.0, batch, x_t, t, pred, trainer.unet, trainer.predict)
    assert part(now).item() < 1e-3
    now = now._replace(model_pred=pred + torch.tensor([100.0, 1.0])[:, None, None, None])
    assert part(now).item() == pytest.approx(0.5, rel=0.05)
    assert part(now._replace(batch=world.batch(world.records[:2]))) is None


def test_clean_weight_scales_clean_records_alone():
    trainer = Trainer(config(roles={"clean": RoleConfig(loss_weight=0.5)}))
    batch = trainer.world.batch([trainer.world.records[0], trainer.world.records[-1]])
    pred, target = torch.ones(2, 4, 8, 8), torch.zeros(2, 4, 8, 8)
    loss = trainer.memory.loss_per_sample(pred, target, torch.tensor([5, 5]), torch.tensor([1.0, 2.0]), batch)
    assert loss.tolist() == [1.0, 1.0]
