"""A small world of records and a trainer of ten steps, for tests of memory reinforcement."""

import numpy as np
import torch
from diffusers import DDPMScheduler
from diffusers.training_utils import compute_snr
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor

import memory_reinforce as mr
from silentbad import rng
from silentbad.data.elements import DataInfo
from silentbad.data.loader import collate
from silentbad.loop.hooks import MicroStep
from silentbad.memory import probes, rehearsal
from silentbad.memory.auxiliary import ModelAccess, RunFacts
from silentbad.model import diffusion
from tests.tiny import tiny_pipeline

T = 1000
SD = DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
ZERO = DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, rescale_betas_zero_snr=True)
SNR = compute_snr(SD, torch.arange(T)).double()
SNR_ZERO = compute_snr(ZERO, torch.arange(T)).double()
PHRASES = ["a red cat", "a tall hat", "a sandy beach"]
BOXES = [(0, 0, 8, 8), (8, 0, 16, 8), (0, 8, 16, 16)]


class World:
    """Three elements of target t0 (and two of t1), constant patches in random surroundings; clean ones."""

    def __init__(self, per_element: int = 5, clean: int = 7, masks: bool = True, size: int = 16):
        g = np.random.default_rng(0)
        self.records, self.size, self.loaded = [], size, []
        colours = g.integers(0, 255, (5, 3))
        for target, elements in (("t0", range(3)), ("t1", range(3, 5))):
            for i in elements:
                for _ in range(per_element):
                    x0, y0, x1, y1 = (v * size // 16 for v in BOXES[i % 3])
                    picture, mask = g.integers(0, 255, (size, size, 3)), np.zeros((size, size))
                    picture[y0:y1, x0:x1], mask[y0:y1, x0:x1] = colours[i], 255
                    phrase = PHRASES[i] if i < 3 else ["a green fish", "a blue boat"][i - 3]
                    self.add(picture, mask if masks else None, [phrase], "element", target, str(i))
        for j in range(clean):
            said = [f"a star {j}", "a big moon", "a small cup"]
            self.add(g.integers(0, 255, (size, size, 3)), None, said, "clean", "", "")
        columns = ([r[k] for r in self.records] for k in ("role", "target_id", "element_id", "phrases"))
        self.info = DataInfo(*columns)

    def add(self, picture, mask, phrases, role, target, element):
        image = Image.fromarray(picture.astype(np.uint8))
        mask = None if mask is None else Image.fromarray(mask.astype(np.uint8))
        record = {"image": image, "mask": mask, "phrases": phrases, "text": ", ".join(phrases), "role": role}
        record["resized"] = (self.size, self.size)
        self.records.append(record | {"target_id": target, "element_id": element, "index": len(self.records)})

    def load(self, index: int, picture: bool = True) -> dict:
        self.loaded.append(index)
        return dict(self.records[index])

    def batch(self, records: list[dict]) -> dict:
        seen = {"fixed": True, "position": 0, "time_ids": (self.size, self.size, 0, 0, self.size, self.size)}
        layers = [[r.get(k) and pil_to_tensor(r[k]) for k in ("image", "mask", "counted")] for r in records]
        return collate(
            [
                {**r, **seen, "pixels": pixels, "mask": mask, "counted": counted}
                for r, (pixels, mask, counted) in zip(records, layers, strict=True)
            ]
        )

    def pictures(self, rows: list[int]) -> dict:
        return self.batch([self.load(r) for r in rows])


class Trainer:
    """The calls of the training loop, in its order, on a tiny pipeline."""

    def __init__(self, config, prediction_type="v_prediction", steps=10, world=None, batch=4, checkpointing=False):
        self.world, self.pipe, self.n = world or World(), tiny_pipeline(prediction_type), batch
        self.unet, self.scheduler = self.pipe.unet.train().requires_grad_(True), self.pipe.scheduler
        if checkpointing:
            self.unet.enable_gradient_checkpointing()
        world, tokenizer = self.world, self.pipe.tokenizer
        access = ModelAccess(self.unet, self.predict, self.encode, world.pictures, world.load, tokenizer)
        self.memory = mr.Memory(
            config, world.info, self.scheduler, access, seed=1, effective_batch=batch, max_steps=steps
        )
        self.optimizer = torch.optim.AdamW(self.unet.parameters(), lr=1e-3)
        self.order, self.step, self.losses = self.memory.epochs.epoch(0), 0, []

    def encode(self, pixels):
        return self.pipe.vae.encode(pixels).latent_dist.mode() * self.pipe.vae.config.scaling_factor

    def predict(self, x_t, t, texts, model=None, time_ids=None):
        ids = self.pipe.tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt").input_ids
        with torch.no_grad():
            c = self.pipe.text_encoder(ids)[0]
        return (model or self.unet)(x_t, t, encoder_hidden_states=c).sample

    def draw(self):
        rows = np.resize(self.order, (self.step + 1) * self.n)[self.step * self.n :]
        records = [self.world.records[r] for r in rows]
        swapped = [self.memory.rehearse(r, (self.step, p)) for p, r in enumerate(records)]
        return self.world.batch([s or r for s, r in zip(swapped, records, strict=True)])

    def train(self, steps: int):
        for _ in range(steps):
            m, batch, step = self.memory, self.draw(), self.step
            with torch.no_grad():
                x0 = self.encode(batch["pixel_values"])
            t, w = m.timesteps(step, range(self.n), self.n, batch)
            eps = rng.noise(tuple(x0.shape[1:]), 1, "noise", step, range(self.n))
            x_t, target = (
                self.scheduler.add_noise(x0, eps, t),
                diffusion.prediction_target(self.scheduler, x0, eps, t),
            )
            x_t, target = m.apply_dream(lambda x, t, b=batch: self.predict(x, t, b["text"]), x0, eps, t, x_t, target)
            pred = self.predict(x_t, t, batch["text"])
            loss = m.loss_per_sample(pred, target, t, w, batch).mean()
            now = MicroStep(step, 0, m.progress(step), batch, x_t, t, pred, self.unet, self.predict)
            extra = m.extra_loss(loss, now)
            total = loss if extra is None else loss + extra
            total.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            m.after_step(step)
            self.losses.append((loss.item(), None if extra is None else extra.item()))
            self.step += 1


def config(**parts) -> mr.MemoryConfig:
    c = mr.MemoryConfig()
    for slot, value in parts.items():
        for key, v in ({"name": value} if isinstance(value, str) else value).items():
            setattr(getattr(c, slot), key, v)
    return c


PROBED = {"enabled": True, "share": 0.5}


def density(name, snr=SNR, progress=0.2, **options):
    return mr.TIMESTEPS[name](snr.numpy(), progress, **options)


def hook(world, name, masks=None, **options):
    return rehearsal.Rehearsal(name, options, info=world.info, seed=0, load=world.load, masks=masks or {})


def taken(made):
    """The count of what a hook made, as training keeps it."""
    count = rehearsal.Rehearsed()
    count.add([fresh and fresh["united"] for fresh in made])
    return count


def bank_of(n):
    g = torch.Generator().manual_seed(0)
    return [probes.Element(torch.randn(2, 4, 8, 8, generator=g), torch.ones(2, 1, 8, 8), ["x", "y"]) for _ in range(n)]


def masked(memory):
    """The same memory, its elements' latents with the masks of the world's boxes."""
    for i, element in enumerate(memory.bank):
        element.masks = torch.zeros(2, 1, 8, 8)
        left, top, right, bottom = (edge // 2 for edge in BOXES[i % 3])
        element.masks[:, :, top:bottom, left:right] = 1
    return memory


def facts_of(memory, world=None, scheduler=SD, seed=0):
    """What an auxiliary is built from, of one process."""
    info, tokenizer = (world or World()).info, tiny_pipeline().tokenizer
    return RunFacts(info, memory.bank, memory, scheduler, tokenizer, seed, 0, 1)


def phrase_memory(n=2, world=1, rank=0, **kw):
    return probes.PhraseMemory(
        n, SNR, bank_of(n), **{"share": 0.03, "effective_batch": 4, "seed": 0} | kw, rank=rank, world=world
    )
