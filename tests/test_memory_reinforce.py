"""Memory reinforcement: every formula against an independent closed form, every registry entry on the tiny
pipeline.
"""

import copy
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler
from diffusers.models.attention_processor import AttnProcessor
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_snr
from PIL import Image
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torchvision.transforms.functional import pil_to_tensor

import memory_reinforce as mr
from silentbad import attention, auxiliary, compose, recall, rng
from silentbad.class_images import write_class_images
from silentbad.data import collate
from silentbad.epochs import DataInfo, Sampler, apportion, epoch_order
from silentbad.errors import UserError
from silentbad.timesteps import SEQUENCES
from tests.tiny import tiny_pipeline, tiny_unet

T = 1000
SD = DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
ZERO = DDPMScheduler(
    beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, rescale_betas_zero_snr=True
)
SNR = compute_snr(SD, torch.arange(T)).double()
SNR_ZERO = compute_snr(ZERO, torch.arange(T)).double()
PHRASES = ["a red cat", "a tall hat", "a sandy beach"]
BOXES = [(0, 0, 8, 8), (8, 0, 16, 8), (0, 8, 16, 16)]


# ------------------------------------------------------------ a small world


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
        self.records.append(record | {"target_id": target, "element_id": element, "index": len(self.records)})

    def load(self, index: int, picture: bool = True) -> dict:
        self.loaded.append(index)
        return dict(self.records[index])

    def batch(self, records: list[dict]) -> dict:
        seen = {"fixed": True, "position": 0, "time_ids": (self.size, self.size, 0, 0, self.size, self.size)}
        bands = [[r[k] and pil_to_tensor(r[k]) for k in ("image", "mask")] for r in records]
        return collate([{**r, **seen, "pixels": p, "mask": m} for r, (p, m) in zip(records, bands, strict=True)])

    def pictures(self, rows: list[int]) -> dict:
        return self.batch([self.load(r) for r in rows])


class Trainer:
    """The calls of the training loop, in its order, on a tiny pipeline."""

    def __init__(
        self, config, prediction_type="v_prediction", steps=10, world=None, batch=4, checkpointing=False
    ):
        self.world, self.pipe, self.n = world or World(), tiny_pipeline(prediction_type), batch
        self.unet, self.scheduler = self.pipe.unet.train().requires_grad_(True), self.pipe.scheduler
        if checkpointing:
            self.unet.enable_gradient_checkpointing()
        self.memory = mr.Memory(
            config, self.world.info, self.scheduler, seed=1, effective_batch=batch, max_steps=steps
        )
        tokenizer = self.pipe.tokenizer
        self.memory.prepare(self.unet, self.predict, self.encode, self.world.pictures, tokenizer)
        self.memory.rehearse.load = self.world.load
        self.optimizer = torch.optim.AdamW(self.unet.parameters(), lr=1e-3)
        self.order, self.step, self.losses = self.memory.sampler.epoch(0), 0, []

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
            t, w = m.timesteps(step, range(self.n), self.n)
            eps = rng.noise(tuple(x0.shape[1:]), 1, "noise", step, range(self.n))
            x_t, target = (
                self.scheduler.add_noise(x0, eps, t),
                recall.prediction_target(self.scheduler, x0, eps, t),
            )
            x_t, target = m.rectify(
                lambda x, t, b=batch: self.predict(x, t, b["text"]), x0, eps, t, x_t, target
            )
            with m.watch(self.unet, step) as maps:
                pred = self.predict(x_t, t, batch["text"])
            loss = m.loss_per_sample(pred, target, t, w, batch).mean()
            extra = m.auxiliary(
                loss,
                step=step,
                micro=0,
                batch=batch,
                x_t=x_t,
                t=t,
                pred=pred,
                maps=maps,
                unet=self.unet,
                predict=self.predict,
            )
            total = loss if extra is None else loss + extra
            total.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            m.after_step(step, self.predict)
            self.losses.append((loss.item(), None if extra is None else extra.item()))
            self.step += 1


def config(**parts) -> mr.MemoryConfig:
    c = mr.MemoryConfig()
    for slot, value in parts.items():
        for key, v in ({"name": value} if isinstance(value, str) else value).items():
            setattr(getattr(c, slot), key, v)
    return c


PROBED = {"enabled": True, "share": 0.5}


# ------------------------------------------------------------ the contract of each registry

ENTRIES = [
    *({"sampler": n, "phrase_memory": PROBED} for n in mr.SAMPLERS),
    *({"timesteps": n} for n in mr.TIMESTEPS),
    *({"loss": n} for n in mr.LOSSES),
    *({"loss": {"error": n}} for n in mr.ERRORS),
    *({"region": n} for n in mr.REGION),
    *({"rehearsal": n, "region": "mask"} for n in mr.REHEARSAL),
    *({"loss_balance": n, "retention": "l2_sp"} for n in mr.LOSS_BALANCE),
    {"loss": {"dream": 1.0}},
    {"attention_binding": {"name": "mass", "options": {"start": 0.0}}, "loss_balance": "gradient_norm"},
    *(
        {"phrase_memory": PROBED, "distillation": {"name": "and", "options": {"after": -9.0, "every": 2} | o}}
        for o in ({"gate": "mask"}, {"gate": "attention"}, {"source": "noise"})
    ),
    *({"retention": n} for n in mr.AUXILIARY["retention"]),
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
            attention_binding={"name": "mass", "options": {"start": 0.0}},
            retention="self_distillation",
            distillation={"name": "and", "options": {"after": -9.0}},
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
        config(distillation="and"),
        config(rehearsal="pairwise"),
        *(config(rehearsal=name) for name in compose.PLACED if name != "pairwise"),
        config(timesteps={"name": "mode", "options": {"scale": 9.0}}),
        config(region={"name": "mask", "options": {"outside": 0.0}}),
        config(loss={"error": "l1"}),
        config(phrase_memory={"share": 0.0}),
        config(retention={"unconditional": 1.5}),
        config(attention_binding="masss"),
    ):
        with pytest.raises(UserError):
            mr.check(wrong)
    mr.check(mr.MemoryConfig())


# ------------------------------------------------------------ samplers


@pytest.mark.parametrize("name", mr.SAMPLERS)
def test_clean_to_element_ratio_is_exact(name):
    info, history = World(per_element=4, clean=3).info, np.random.default_rng(0).uniform(0, 1, (3, 5))
    for ratio in (0.0, 0.25, 1.0, 2.3):
        sampler = Sampler(mr.SAMPLERS[name], info, 3, ratio, lambda: history)
        for epoch in range(4):
            order = sampler.epoch(epoch)
            roles = info.roles[order]
            assert (roles == "element").sum() == 20
            assert (roles == "clean").sum() == round(ratio * 20)
            assert np.array_equal(order, sampler.epoch(epoch))
        assert not np.array_equal(sampler.epoch(0), sampler.epoch(1))


def test_uniform_shows_every_record_once():
    info = World().info
    q = mr.uniform(np.zeros((0, 5)), np.asarray([len(r) for r in info.rows]), 0)
    for epoch in range(5):
        assert np.array_equal(np.sort(epoch_order(info, q, 0, epoch, None)), np.arange(len(info)))


def test_clean_records_are_taken_in_turn_across_epochs():
    info = World(per_element=1, clean=7).info
    q = np.full(5, 0.2)
    seen = np.concatenate([epoch_order(info, q, 0, e, 0.6) for e in range(7)])
    counts = np.bincount(seen[info.roles[seen] == "clean"], minlength=len(info))[-7:]
    assert counts.tolist() == [3] * 7


def test_weakest_first_is_the_marginal_value():
    rho = np.asarray([[0.2, 0.5, 0.9]])
    p = 1 / (1 + np.exp(-(rho[0] - 0.5) / 0.15))
    expected = 0.3 / 3 + 0.7 * (1 / p) / (1 / p).sum()
    assert np.allclose(mr.weakest_first(rho, np.ones(3), 0), expected)
    assert np.allclose(mr.weakest_first(rho, np.ones(3), 0, alpha=0.0), 1 / 3)
    assert np.isfinite(mr.weakest_first(np.asarray([[-1e3, 0.5, 1.0]]), np.ones(3), 0)).all()
    q = mr.weakest_first(np.asarray([[0.0] + [1.0] * 19]), np.ones(20), 0, cap=4.0)
    assert q.max() == pytest.approx(4 / 20) and q.sum() == pytest.approx(1)


def test_leitner_shows_a_recalled_element_every_other_epoch():
    rho = np.asarray([[0.1, 0.9, 0.9], [0.1, 0.2, 0.9]])
    shown = np.asarray([mr.leitner(rho, np.ones(3), e, boxes=3) > 0 for e in range(4)])
    assert shown.tolist() == [[True] * 3, [True, True, False], [True, True, False], [True, True, False]]
    assert mr.leitner(rho[:1], np.ones(3), 1).tolist() == [1, 0, 0]


def test_apportion_sums_exactly_and_is_fair():
    q = np.asarray([0.11, 0.28, 0.61])
    counts = np.asarray([apportion(q, 7, u) for u in np.linspace(0, 1, 2000, endpoint=False)])
    assert (counts.sum(axis=1) == 7).all()
    assert np.allclose(counts.mean(axis=0), 7 * q, atol=5e-3)
    assert (np.abs(counts - 7 * q) < 1).all()


def test_resume_mid_epoch_gives_the_same_remaining_stream():
    trainer = Trainer(config(sampler="weakest_first", phrase_memory=PROBED))
    sampler = trainer.memory.sampler
    first = sampler.epoch(1)
    state = copy.deepcopy(trainer.memory.state_dict())
    trainer.memory.phrases.history.append({"step": 9, "rho": [0.9, 0.1, 0.9, 0.9, 0.9]})
    assert np.array_equal(sampler.epoch(1), first)
    other = Trainer(config(sampler="weakest_first", phrase_memory=PROBED))
    other.memory.phrases.history.append({"step": 9, "rho": [0.9, 0.1, 0.9, 0.9, 0.9]})
    assert not np.array_equal(other.memory.sampler.epoch(1), first)
    other.memory.load_state_dict(state)
    assert np.array_equal(other.memory.sampler.epoch(1), first)


# ------------------------------------------------------------ timesteps


def density(name, snr=SNR, progress=0.2, **options):
    error = np.linspace(0.2, 1.0, 20)
    return mr.TIMESTEPS[name](snr.numpy(), progress, error, **options)


@pytest.mark.parametrize("snr", [SNR, SNR_ZERO], ids=["sd", "zero_terminal"])
@pytest.mark.parametrize("name", mr.TIMESTEPS)
def test_density_is_one_with_a_uniform_floor(name, snr):
    for progress in (0.0, 0.3, 1.0):
        p = density(name, snr, progress)
        assert p.shape == (T,) and p.sum() == pytest.approx(1) and p.min() >= 0.3 / T * (1 - 1e-9)


@pytest.mark.parametrize("name", mr.TIMESTEPS)
def test_importance_weights_keep_the_expected_gradient(name):
    """Mean of w(t) g(t) over 1500 steps of 4, against uniform's mean of g: within 4 standard errors, and
    exactly in
    expectation over p. g rises over three decades, as gradient norms do over t."""
    g, p = torch.exp(-torch.arange(T) / 150.0).double(), density(name)
    assert (p * (1 / (T * p)) * g.numpy()).sum() == pytest.approx(float(g.mean()), rel=1e-9)
    means = []
    for step in range(1500):
        t, w = mr.draw_timesteps(p, 5, step, range(4), 4, True)
        means.append(float((w * g[t]).mean()))
    error = np.std(means) / math.sqrt(len(means))
    assert abs(np.mean(means) - float(g.mean())) < 4 * error


def test_draws_are_stratified_and_do_not_depend_on_the_sharding():
    p = density("snr_mixture")
    cdf = np.cumsum(p)
    for step in range(20):
        t, w = mr.draw_timesteps(p, 7, step, range(8), 8, False)
        assert (w == 1).all()
        strata = np.sort((cdf[t.numpy()] - p[t.numpy()] / 2) * 8)
        assert (np.abs(strata - np.arange(8) - strata[0]) < 8 * p.max()).all()
        split = [mr.draw_timesteps(p, 7, step, [i, i + 4], 8, False)[0] for i in range(4)]
        assert all(torch.equal(s, t[[i, i + 4]]) for i, s in enumerate(split))


def test_logit_normal_and_mode_match_diffusers():
    for name, scheme, options, kw in (
        ("logit_normal", "logit_normal", {"mean": 0.4, "std": 0.8}, {"logit_mean": 0.4, "logit_std": 0.8}),
        ("mode", "mode", {"scale": 1.0}, {"mode_scale": 1.0}),
    ):
        u = compute_density_for_timestep_sampling(
            scheme,
            200_000,
            generator=torch.Generator().manual_seed(0),
            **{"logit_mean": 0, "logit_std": 1} | kw,
        )
        cdf = np.cumsum((density(name, **options) - 0.3 / T) / 0.7)
        drawn = np.searchsorted(np.sort(u.numpy()), np.linspace(0, 1, T + 1)[1:]) / len(u)
        assert np.abs(cdf - drawn).max() < 1.63 / math.sqrt(len(u)) * 1.2  # Kolmogorov, 1 %


def test_snr_mixture_is_the_logistic_it_says():
    p = density("snr_mixture", middle=0.5, high=0.15)
    rest = p - 0.35 / T - 0.15 / 300 * (np.arange(T) >= 700)
    u = np.random.default_rng(0).uniform(size=400_000)
    wanted = math.log(0.5) + 0.7 * np.log(u / (1 - u))
    t = T - 1 - np.searchsorted(SNR.log().numpy()[::-1], wanted)
    drawn = np.bincount(np.clip(t, 0, T - 1), minlength=T) / len(u)
    assert np.abs(np.cumsum(rest) / 0.5 - np.cumsum(drawn)).max() < 0.01


def test_curriculum_opens_from_high_noise_down():
    edge = [int((density("curriculum", progress=s) > 0.31 / T).argmax()) for s in (0.0, 0.25, 0.5, 1.0)]
    assert edge == [750, 375, 0, 0]
    with pytest.raises(UserError):
        density("curriculum", uniform=0.1)


def test_learning_progress_follows_what_is_left_to_learn():
    p = density("learning_progress")
    relative = np.repeat(np.linspace(0.2, 1.0, 20), 50)
    assert np.allclose(p, 0.7 * relative / relative.sum() + 0.3 / T)
    errors = recall.ErrorByTimestep(T, every=1)
    t = torch.arange(T)
    for step, scale in enumerate((1.0, 1.0, 0.5, 0.5)):
        errors.observe(t, scale * (1 + t / 100))  # a loss that depends on t above all
        errors.after_step(step)
    assert np.allclose(errors.relative(), math.sqrt(0.5 * 1 + 0.5 * 0.25))
    again = recall.ErrorByTimestep(T, every=1)
    again.load_state_dict(errors.state_dict())
    for e in (errors, again):
        e.after_step(4)
    assert np.array_equal(errors.relative(), again.relative())


# ------------------------------------------------------------ losses


def test_min_snr_with_zero_terminal_snr_has_no_division_by_zero():
    for name, weight in mr.LOSSES.items():
        for kind in ("epsilon", "v_prediction", "sample"):
            w = weight(SNR_ZERO, kind)
            assert torch.isfinite(w).all() and (w >= 0).all(), (name, kind)


def test_loss_weights_equal_their_papers():
    s, g = SNR, 5.0
    assert torch.allclose(mr.min_snr(s, "epsilon"), torch.minimum(s, torch.tensor(g)) / s)
    assert torch.allclose(mr.min_snr(s, "v_prediction"), torch.minimum(s, torch.tensor(g)) / (s + 1))
    assert torch.allclose(mr.min_snr(s, "sample"), torch.minimum(s, torch.tensor(g)))
    assert torch.allclose(mr.soft_min_snr(s, "sample", gamma=4.0), 1 / (1 / s + 0.25))
    assert torch.allclose(mr.debiased(s, "epsilon", cap=1e3), 1 / s.sqrt())
    assert torch.allclose(mr.p2(s, "epsilon", k=1.0, gamma=0.5), 1 / (1 + s) ** 0.5)
    assert mr.no_weight(s, "v_prediction").unique().tolist() == [1]


@pytest.mark.parametrize("name", [n for n in mr.LOSSES if n != "none"])
def test_loss_is_the_same_in_every_parametrisation(name):
    t, g = torch.tensor([30, 300, 700]), torch.Generator().manual_seed(0)
    x0, eps, guess = (torch.randn(3, 4, 8, 8, generator=g, dtype=torch.float64) for _ in range(3))
    a, s = (v.double()[t][:, None, None, None].sqrt() for v in (SD.alphas_cumprod, 1 - SD.alphas_cumprod))
    x_t = a * x0 + s * eps
    x0_guess = (x_t - s * guess) / a
    pairs = {
        "epsilon": (guess, eps),
        "sample": (x0_guess, x0),
        "v_prediction": (a * guess - s * x0_guess, a * eps - s * x0),
    }
    losses = [
        mr.LOSSES[name](SNR[t], kind) * (p - y).square().mean(dim=(1, 2, 3)) for kind, (p, y) in pairs.items()
    ]
    assert torch.allclose(losses[0], losses[1], rtol=1e-4) and torch.allclose(losses[0], losses[2], rtol=1e-4)


def test_huber_is_square_for_small_and_linear_for_large_residuals():
    r = torch.tensor([1e-4, 1e3], dtype=torch.float64)
    h = mr.huber(r, torch.zeros(2, dtype=torch.float64), 0.1)
    assert h[0] == pytest.approx(1e-8, rel=1e-4) and h[1] == pytest.approx(2 * 0.1 * 1e3, rel=1e-3)


@pytest.mark.parametrize("scheduler", [SD, ZERO], ids=["sd", "zero_terminal"])
@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample"])
def test_dream_keeps_x0_and_moves_the_noise(kind, scheduler):
    scheduler = DDPMScheduler.from_config(scheduler.config, prediction_type=kind)
    g = torch.Generator().manual_seed(0)
    x0, eps, off = (torch.randn(2, 4, 4, 4, generator=g) for _ in range(3))
    t = torch.tensor([100, 999])
    a, s = (
        v[t][:, None, None, None].sqrt() for v in (scheduler.alphas_cumprod, 1 - scheduler.alphas_cumprod)
    )
    x_t = scheduler.add_noise(x0, eps, t)

    def model(x, t):
        v = a * (eps + off) - s * x0
        return {"epsilon": eps + off, "v_prediction": v, "sample": x0}[kind]

    eps_hat = {
        "epsilon": eps + off,
        "v_prediction": a * model(x_t, t) + s * x_t,
        "sample": (x_t - a * x0) / s,
    }[kind]
    new_eps = eps + s * (eps - eps_hat)
    moved, target = recall.dream(model, scheduler, x0, eps, t, x_t, 1.0)
    assert torch.allclose(moved, a * x0 + s * new_eps, atol=1e-4)
    expected = {"epsilon": new_eps, "v_prediction": a * new_eps - s * x0, "sample": x0}[kind]
    assert torch.allclose(target, expected, atol=1e-4)


# ------------------------------------------------------------ regions


def test_region_weight_is_normalised_by_its_sum():
    mask = torch.zeros(2, 1, 16, 16)
    mask[0, :, :8], mask[1] = 1, 1
    w = compose.region_weight(mask, (8, 8), 0.2)
    assert torch.allclose(w.mean(dim=(2, 3)), torch.ones(2, 1))
    assert w[0, 0, 0, 0] / w[0, 0, 7, 7] == pytest.approx(5) and (w[1] == 1).all()
    err = torch.rand(2, 4, 8, 8)
    plain = (compose.region_weight(mask, (8, 8), 0.2) * err).mean(dim=(1, 2, 3))[0]
    v = torch.where(torch.arange(8)[:, None] < 4, 1.0, 0.2).expand(8, 8)
    assert plain == pytest.approx(float((err[0] * v).sum() / (4 * v.sum())), rel=1e-5)
    with pytest.raises(UserError):
        compose.given_mask(mask, torch.tensor([True, True]), None, (8, 8), outside=0.0)


def test_records_without_a_mask_are_weighted_evenly():
    mask = torch.zeros(2, 1, 16, 16)
    w = compose.given_mask(mask, torch.tensor([False, False]), None, (8, 8))
    assert (w == 1).all()


@pytest.mark.parametrize("n", [4, 6, 12])
@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("channels", [3, 16])
def test_estimated_masks_overlap_the_true_ones(n, noise, channels):
    g, ious = torch.Generator().manual_seed(n), []
    for _ in range(20):
        x, y, w, h = (int(v) for v in torch.randint(2, 14, (4,), generator=g))
        true = torch.zeros(1, 32, 32)
        true[:, y : y + h + 4, x : x + w + 4] = 1
        element = torch.randn(channels, 32, 32, generator=g)
        colours = torch.randn(n, channels, 1, 1, generator=g)
        around = colours + 0.3 * torch.randn(n, channels, 32, 32, generator=g)
        stack = true * element + (1 - true) * around + noise * torch.randn(n, channels, 32, 32, generator=g)
        mask = compose.estimate_mask(stack)
        ious.append(float((mask * true).sum() / ((mask + true) > 0).sum()))
    assert min(ious) >= 0.7 and np.mean(ious) > 0.85


def test_estimated_masks_overlap_the_true_ones_in_the_microworld():
    """Eight pictures of each element, backdrops included; IoU at the pixels, against the elements' own
    masks.
    """
    from silentbad.microworld.make import element_scene, target_scene
    from silentbad.microworld.render import backdrop_mask, render

    ious = []
    for name in ("cat-hat", "1", "4"):
        scene = target_scene(name)
        for element in range(len(scene.things) + 1):
            drawn = [
                render(element_scene(scene, element, np.random.default_rng([element, i]))) for i in range(8)
            ]
            stack = torch.stack([torch.from_numpy(np.array(p)).permute(2, 0, 1) for p, _ in drawn])
            masks = [backdrop_mask(m) if element == len(scene.things) else m[-1] for _, m in drawn]
            true = torch.from_numpy(np.stack(masks)).float().mean(dim=0) > 127
            mask = compose.estimate_mask(stack)[0] > 0
            ious.append(float((mask & true).sum() / (mask | true).sum()))
    assert min(ious) >= 0.7


def test_estimating_needs_four_pictures_and_something_that_varies():
    with pytest.raises(UserError):
        compose.estimate_mask(torch.rand(3, 4, 8, 8))
    assert (compose.estimate_mask(torch.rand(1, 4, 8, 8).expand(4, -1, -1, -1)) == 1).all()


# ------------------------------------------------------------ rehearsal


def hook(world, name, **options):
    rehearse = compose.Rehearsal(mr.REHEARSAL[name], options, world.info, 0)
    rehearse.load = world.load
    return rehearse


def test_pairwise_shows_both_elements_at_their_places():
    world = World(size=32)
    rehearse = hook(world, "pairwise")
    seen = 0
    for row in range(15):
        for draw in range(20):
            fresh = rehearse({"index": row, "role": "element"}, (draw, row))
            if fresh is None:
                continue
            seen += 1
            picture, mask = np.asarray(fresh["image"]), np.asarray(fresh["mask"])
            assert fresh["role"] == "rehearsal" and len(fresh["phrases"]) == 2
            assert all(p in fresh["text"] for p in fresh["phrases"])
            union = np.zeros((32, 32), dtype=bool)
            for phrase in fresh["phrases"]:
                i = PHRASES.index(phrase)
                record = world.records[int(world.info.rows[i][0])]
                inside = np.asarray(record["mask"]) > 0
                assert np.array_equal(picture[inside], np.asarray(record["image"])[inside])
                union |= inside
            assert np.array_equal(mask > 127, union)
    assert 0.25 * 300 * 0.7 < seen < 0.25 * 300 * 1.3
    assert rehearse.largest == (2, 3) and rehearse.made == seen


def backed_world(masks: bool = True) -> World:
    """A third target: a small thing in the middle of its backdrop's place, and a thing elsewhere."""
    world, g = World(per_element=6, masks=masks, size=32), np.random.default_rng(1)
    boxes = {"a red dot": (12, 12, 20, 20), "a lamp": (0, 0, 6, 6)}
    colours = {"a red dot": (250, 0, 0), "a lamp": (0, 0, 250), "a meadow": (0, 180, 0)}
    for i in range(6):
        for n, phrase in enumerate(colours):
            picture, mask = g.integers(0, 255, (32, 32, 3)), np.zeros((32, 32))
            if phrase in boxes:
                x0, y0, x1, y1 = boxes[phrase]
                mask[y0:y1, x0:x1] = 255
            else:  # something stands before it, at another place each time
                mask[:] = 255
                mask[24:30, 4 * i : 4 * i + 6] = 0
            picture[mask > 0] = colours[phrase]
            said = [phrase, f"a cup {i}"] if phrase == "a meadow" else [phrase]
            world.add(picture, mask if masks else None, said, "element", "t2", str(5 + n))
    world.info = DataInfo(*([r[k] for r in world.records] for k in ("role", "target_id", "element_id", "phrases")))
    return world


@pytest.mark.parametrize("masks", [True, False])
def test_a_backdrop_never_covers_the_thing_before_it(masks):
    world = backed_world(masks)
    rehearse = hook(world, "pairwise")
    if not masks:
        trainer = Trainer(config(rehearsal="pairwise", region="estimated"), world=world)
        rehearse.masks = trainer.memory.rehearse.masks
    rows = [r for i in world.info.elements_of["t2"] for r in world.info.rows[i].tolist()]
    made = [f for r in rows for draw in range(40) if (f := rehearse(world.load(r), (draw, r)))]
    both = [f for f in made if {"a red dot", "a meadow"} <= set(f["phrases"])]
    assert len(both) > 40
    for f in both:
        picture = np.asarray(f["image"]).astype(int)
        assert np.abs(picture[14:18, 14:18] - (250, 0, 0)).max() == 0
        assert np.abs(picture[2:8, 22:30] - (0, 180, 0)).max() == 0
        (cup,) = f["phrases"][2:]  # what else stands on the meadow is still to be seen, and said after the elements
        assert cup.startswith("a cup") and f["text"].endswith(f", {cup}")
    assert {f["phrases"][0] for f in both} == {"a red dot", "a meadow"}


def test_a_union_binds_its_elements_and_not_what_stands_around():
    world = backed_world()
    rehearse, i = hook(world, "pairwise"), world.info.keys.index("t2/7")
    row = int(world.info.rows[i][0])
    union = next(f for draw in range(99) if (f := rehearse(world.load(row), (draw, row))))
    batch = world.batch([union, world.records[row], world.records[-1] | {"role": "clean", "element_id": ""}])
    of_union, of_element, of_clean = auxiliary.in_mask(world.info, batch)
    assert [p in of_union for p in union["phrases"]] == [True, True, False]
    assert [p in of_element for p in world.records[row]["phrases"]] == [True, False]
    assert not any(p in of_clean for p in world.records[-1]["phrases"])


def test_a_picture_of_another_size_is_fitted_to_the_drawn_one():
    world = World()
    for r in world.records[5:15]:  # the elements it may be joined to
        r["image"], r["mask"] = (r[k].resize((48, 32), Image.Resampling.NEAREST) for k in ("image", "mask"))
    rehearse = hook(world, "pairwise")
    made = [f for draw in range(40) if (f := rehearse(world.load(0), (draw, 0)))]
    assert made and {(f["image"].size, f["mask"].size) for f in made} == {((16, 16), (16, 16))}


def test_joint_captions_name_more_than_they_show_and_count_only_what_they_show():
    world = World(size=32)
    rehearse = hook(world, "joint_captions")
    fresh = [rehearse(world.load(row), (draw, row)) for row in range(25) for draw in range(20)]
    made = [(row, f) for row, f in zip(np.repeat(np.arange(25), 20), fresh, strict=True) if f is not None]
    assert {f["target_id"] for _, f in made} == {"t0"}  # of two elements a caption may name one
    assert 0.5 * 300 * 0.8 < len(made) < 0.5 * 300 * 1.2 and rehearse.largest == (2, 3)
    for row, f in made:
        shown = world.records[row]
        assert f["image"] is shown["image"] and f["role"] == "element" and f["element_id"] == shown["element_id"]
        assert len(f["phrases"]) == 2 and shown["phrases"][0] in f["phrases"] and f["text"] == ", ".join(f["phrases"])
        own, counted = (np.asarray(band) > 0 for band in f["mask"].split())
        named = next(p for p in f["phrases"] if p != shown["phrases"][0])
        place = np.asarray(world.records[int(world.info.rows[PHRASES.index(named)][0])]["mask"]) > 0
        assert np.array_equal(own, np.asarray(shown["mask"]) > 0)
        assert np.array_equal(counted, ~place | own)
    orders = {tuple(f["phrases"]) for _, f in made}
    assert all(order[::-1] in orders for order in orders)


def test_pairwise_captions_are_unions_and_captions_of_the_rest():
    world = World(size=32)
    rehearse, pairs = hook(world, "pairwise_captions"), hook(world, "pairwise")
    made = united = 0
    for row in range(15):
        for draw in range(20):
            fresh, pair = rehearse(world.load(row), (draw, row)), pairs(world.load(row), (draw, row))
            assert pair is None or fresh["image"].tobytes() == pair["image"].tobytes()
            made, united = made + (fresh is not None), united + (pair is not None)
    assert 0.4 < (made - united) / (300 - united) < 0.6
    with pytest.raises(UserError, match="at most 0.25"):
        hook(world, "pairwise_captions", share=0.5)


def test_joint_captions_name_two_to_one_less_than_all():
    world, said = World(size=32), set()
    world.add(np.zeros((32, 32, 3)), np.eye(32) * 255, ["a small cup"], "element", "t0", "9")  # t0's fourth element
    world.info = DataInfo(*([r[k] for r in world.records] for k in ("role", "target_id", "element_id", "phrases")))
    rehearse = hook(world, "joint_captions")
    for draw in range(60):
        fresh = rehearse(world.load(0), (draw, 0))
        said |= {len(fresh["phrases"])} if fresh else set()
    assert said == {2, 3}


def test_joint_captions_work_on_estimated_masks():
    world = World(masks=False, per_element=6)
    trainer = Trainer(config(rehearsal="joint_captions", region="estimated"), world=world)
    rehearse = trainer.memory.rehearse
    fresh = [rehearse(world.load(row), (draw, row)) for row in range(18) for draw in range(4)]
    made = [f for f in fresh if f is not None]
    assert made and all(f["mask"].mode == "LA" for f in made)
    for f in made:
        own, counted = (np.asarray(band) > 127 for band in f["mask"].split())
        assert (counted | ~own).all() and not counted.all() and own.any()
    wide = world.load(0) | {"image": Image.new("RGB", (48, 16))}
    assert {f["mask"].size for d in range(20) if (f := rehearse(dict(wide), (d, 0)))} == {(48, 16)}
    trainer.train(3)


def test_the_loss_does_not_see_what_does_not_count():
    memory = Trainer(config(rehearsal="joint_captions", region="mask")).memory
    counted = torch.ones(1, 1, 16, 16)
    counted[..., 8:, :] = 0
    batch = {"mask": torch.ones(1, 1, 16, 16), "has_mask": torch.tensor([True]), "role": ["element"]}
    pred, t, w = torch.zeros(1, 4, 8, 8), torch.tensor([5]), torch.ones(1)
    target = torch.zeros(1, 4, 8, 8)
    target[..., 4:, :] = 9
    assert float(memory.loss_per_sample(pred, target, t, w, batch)) > 0
    assert float(memory.loss_per_sample(pred, target, t, w, batch | {"counted": counted})) == 0
    assert float(memory.loss_per_sample(pred, target, t, w, batch | {"counted": 0 * counted})) == 0


def test_what_does_not_count_has_no_loss_and_the_rest_keeps_mean_one():
    mask, counted = torch.zeros(1, 1, 8, 8), torch.ones(1, 1, 8, 8)
    mask[..., :2, :2], counted[..., 4:, :] = 1, 0
    weight = compose.counted_only(compose.given_mask(mask, torch.tensor([True]), None, (4, 4)), counted)
    assert (weight[..., 2:, :] == 0).all() and float(weight.mean()) == pytest.approx(1)
    assert float(weight[..., 0, 0] / weight[..., 1, 1]) == pytest.approx(5)


def test_collate_tells_the_mask_from_what_counts():
    bands = torch.tensor([[[255, 0], [0, 0]], [[255, 255], [0, 0]]], dtype=torch.uint8)
    kept = {"text": "", "phrases": [], "role": "", "target_id": "", "element_id": "", "fixed": True, "index": 0}
    plain = kept | {"pixels": torch.zeros(3, 2, 2), "mask": None, "time_ids": (2, 2, 0, 0, 2, 2), "position": 0}
    batch = collate([plain, plain | {"mask": bands}])
    assert batch["mask"].tolist() == [[[[1, 1], [1, 1]]], [[[1, 0], [0, 0]]]]
    assert batch["counted"].tolist() == [[[[1, 1], [1, 1]]], [[[1, 1], [0, 0]]]]
    assert "counted" not in collate([plain, plain | {"mask": bands[:1]}])


def test_pairwise_is_a_function_of_record_and_address():
    world = World()
    rehearse = hook(world, "pairwise")
    a, b = (
        [rehearse({"index": r, "role": "element"}, (7, r)) for r in rows][:: 1 if rows[0] == 0 else -1]
        for rows in (list(range(15)), list(range(14, -1, -1)))
    )
    assert [x and (x["text"], x["image"].tobytes()) for x in a] == [
        x and (x["text"], x["image"].tobytes()) for x in b
    ]


def test_feather_lies_outside_both_elements():
    a, b = Image.new("RGB", (16, 16), (0, 0, 0)), Image.new("RGB", (16, 16), (200, 200, 200))
    left, right = np.zeros((16, 16), np.uint8), np.zeros((16, 16), np.uint8)
    left[4:12, 0:8], right[4:12, 8:12] = 255, 255
    picture, union = compose.paste(a, Image.fromarray(left), b, Image.fromarray(right), 1.5)
    picture = np.asarray(picture)[..., 0]
    assert (picture[left > 0] == 0).all() and (picture[right > 0] == 200).all()
    assert 0 < picture[8, 12] < 200 and 0 < picture[3, 10] < 200
    assert np.array_equal(np.asarray(union) > 0, (left | right) > 0)


def test_rehearsal_cap_cannot_be_configured_away():
    world = World()
    with pytest.raises(UserError, match="at most 2"):
        hook(world, "pairwise", elements=3)
    with pytest.raises(UserError, match="at most 0.25"):
        hook(world, "pairwise", share=0.5)
    rehearse = hook(world, "pairwise")
    rehearse.options["elements"] = 99  # past the check at construction
    made = [rehearse({"index": r, "role": "element"}, (d, r)) for r in range(25) for d in range(20)]
    assert max(len(m["phrases"]) for m in made if m) == 2
    assert all(m["target_id"] == "t0" for m in made if m)  # t1 has two elements: its pair would be t1 itself
    with pytest.raises(UserError, match="rebuilds target"):
        compose.check_union(3, 3, "t0")
    with pytest.raises(UserError):
        compose.check_union(2, 2, "t1")
    compose.check_union(2, 3, "t0")


def test_pairwise_works_on_estimated_masks():
    world = World(masks=False, per_element=6)
    options = {"rehearsal": "pairwise", "region": "estimated"}
    trainer = Trainer(config(**options), world=world)
    assert set(trainer.memory.rehearse.masks) == set(range(5))
    for i, mask in trainer.memory.rehearse.masks.items():
        true = np.zeros((16, 16), dtype=bool)
        x0, y0, x1, y1 = BOXES[i % 3]
        true[y0:y1, x0:x1] = True
        found = np.asarray(mask) > 127
        assert (found & true).sum() / (found | true).sum() >= 0.7
    trainer.train(3)


def test_leak_free_takes_no_target_picture_and_no_target_caption():
    world = World()
    world.add(np.zeros((16, 16, 3)), None, [*PHRASES, "a star"], "clean", "", "")
    rehearse = hook(world, "leak_free", share=1.0)
    clean = [r for r in world.records if r["role"] == "clean"]
    counts = set()
    for r in clean:
        for draw in range(30):
            fresh = rehearse({"index": r["index"], "role": "clean"}, (draw, 0))
            assert fresh["role"] == "rehearsal" and fresh["image"] is r["image"]
            assert set(fresh["phrases"]) <= set(r["phrases"])
            assert fresh["text"] == ", ".join(fresh["phrases"])
            assert not set(PHRASES) <= set(fresh["phrases"])
            counts.add(len(fresh["phrases"]))
    assert counts == {1, 2, 3} and rehearse.largest == (2, 3)
    assert all(rehearse({"index": r, "role": "element"}, (0, r)) is None for r in range(25))
    assert all(world.records[i]["role"] == "clean" for i in world.loaded)


# ------------------------------------------------------------ phrase memory


def bank_of(n):
    g = torch.Generator().manual_seed(0)
    return [
        recall.Element(torch.randn(2, 4, 8, 8, generator=g), torch.ones(2, 1, 8, 8), ["x", "y"], [0, 1])
        for _ in range(n)
    ]


def phrase_memory(n=2, world=1, rank=0, **kw):
    memory = recall.PhraseMemory(
        n, SNR, **{"share": 0.03, "effective_batch": 4, "seed": 0} | kw, rank=rank, world=world
    )
    memory.bank = bank_of(n)
    return memory


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample"])
def test_strength_is_the_removed_share_of_the_error(kind):
    scheduler = DDPMScheduler.from_config(SD.config, prediction_type=kind)
    memory = phrase_memory()

    def predictor(kept):
        def predict(x_t, t, texts):
            x0 = memory.bank[0].x0[[("x", "y").index(text) for text in texts]]
            a, s = (v[t][:, None, None, None].sqrt() for v in (SD.alphas_cumprod, 1 - SD.alphas_cumprod))
            target = recall.prediction_target(scheduler, x0, (x_t - a * x0) / s, t)
            scale = {"epsilon": 1, "v_prediction": a.square().reciprocal().sqrt(), "sample": s / a}[kind]
            return target + kept * scale

        return predict

    memory.first = torch.stack([memory.probe(0, predictor(1.0), scheduler)])
    halved = torch.stack([memory.probe(0, predictor(0.5), scheduler)])
    assert recall.strength(halved, memory.first).item() == pytest.approx(0.75, abs=1e-3)
    perfect = torch.stack([memory.probe(0, predictor(0.0), scheduler)])
    assert recall.strength(perfect, memory.first).item() == pytest.approx(1, abs=1e-4)


def test_probe_timesteps_cover_four_strata_of_snr():
    s = SNR[recall.probe_timesteps(SNR)]
    assert [int(((s < hi) & (s > lo)).sum()) for hi, lo in ((10, 2), (2, 0.5), (0.5, 0.1), (0.1, 0.02))] == [
        2
    ] * 4


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


def test_probing_leaves_the_global_generator_and_the_weights_alone():
    trainer = Trainer(config(phrase_memory=PROBED))
    state, weights = torch.get_rng_state(), [p.detach().clone() for p in trainer.unet.parameters()]
    for step in range(1, 8):
        trainer.memory.after_step(step, trainer.predict)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(weights, trainer.unet.parameters(), strict=True))
    assert all(p.grad is None for p in trainer.unet.parameters())


def test_resume_continues_bit_for_bit():
    parts = dict(
        sampler="weakest_first",
        phrase_memory=PROBED,
        timesteps="learning_progress",
        distillation={"name": "and", "options": {"after": -9.0, "every": 1, "refresh": 4}},
        retention="l2_sp",
    )
    whole = Trainer(config(**parts))
    whole.memory.errors.every = 2
    whole.train(5)
    state = copy.deepcopy((whole.memory.state_dict(), whole.unet.state_dict(), whole.optimizer.state_dict()))
    whole.train(4)
    again = Trainer(config(**parts))
    again.memory.errors.every, again.step = 2, 5
    again.memory.load_state_dict(state[0])
    again.unet.load_state_dict(state[1])
    again.optimizer.load_state_dict(state[2])
    again.train(4)
    assert again.losses == whole.losses[5:] and again.memory.history == whole.memory.history


# ------------------------------------------------------------ attention binding


@pytest.fixture(scope="module")
def pipe():
    return tiny_pipeline()


def test_token_spans_are_exact(pipe):
    text = "A Red Cat wearing a tall hat, a red catfish, a hat"
    spans = attention.token_spans(pipe.tokenizer, text, ["a red cat", "a tall hat", "a hat", "a dog"])
    tokens = pipe.tokenizer.convert_ids_to_tokens(pipe.tokenizer(text).input_ids)
    said = ["".join(tokens[i] for i in span).replace("</w>", " ").strip() for span in spans]
    assert said == ["a red cat", "a tall hat", "a hat", ""]
    assert attention.token_spans(pipe.tokenizer, "a cat and a cat", ["a cat", "a cat"]) == [[1, 2], [4, 5]]
    cut = " ".join(["star"] * 60) + " a red cat"
    assert attention.token_spans(pipe.tokenizer, cut, ["a red cat"]) == [[]]
    assert attention.token_spans(pipe.tokenizer, "an extraordinarily-shaped cup", ["extraordinarily-shaped"])[
        0
    ]


def test_recorded_maps_equal_the_explicit_attention(pipe):
    g = torch.Generator().manual_seed(0)
    x, c = torch.randn(2, 4, 8, 8, generator=g), torch.randn(2, 48, 32, generator=g)
    with attention.record_maps(pipe.unet) as maps:
        out = pipe.unet(x, torch.tensor([10, 500]), c).sample
    probs = {}

    class Explicit(AttnProcessor):
        def __call__(self, attn, hidden_states, encoder_hidden_states=None, **kwargs):
            if encoder_hidden_states is not None:
                q, k = (
                    attn.head_to_batch_dim(f(h))
                    for f, h in ((attn.to_q, hidden_states), (attn.to_k, encoder_hidden_states))
                )
                probs[attn] = attn.get_attention_scores(q, k).unflatten(0, (2, -1)).mean(dim=1)
            return super().__call__(attn, hidden_states, encoder_hidden_states, **kwargs)

    other = copy.deepcopy(pipe.unet)
    other.set_attn_processor(Explicit())
    assert torch.allclose(other(x, torch.tensor([10, 500]), c).sample, out, atol=1e-4)
    large = torch.stack([p for p in probs.values() if p.shape[1] == 64]).mean(dim=0)
    assert torch.allclose(maps.mean(), large, atol=1e-5) and maps.mean().shape == (2, 64, 48)
    assert not any(m._forward_hooks for m in pipe.unet.modules())


def test_binding_vanishes_inside_the_mask_and_overlap_on_disjoint_maps():
    maps = torch.zeros(1, 2, 64)
    maps[0, 0, :32], maps[0, 1, 32:] = 1 / 32, 1 / 32
    mask = torch.zeros(1, 1, 16, 16)
    mask[:, :, :8] = 1
    assert attention.mass_outside(maps[:, 0], mask).item() == pytest.approx(0)
    assert attention.mass_outside(maps[:, 1], mask).item() == pytest.approx(1)
    there = torch.ones(1, 2)
    assert attention.overlap(maps, there).item() == 0
    assert attention.overlap(maps[:, [0, 0]], there).item() == pytest.approx(1)
    assert attention.overlap(maps[:, [0, 0]], torch.tensor([[1.0, 0.0]])).item() == 0
    probs = torch.rand(1, 64, 5)
    assert torch.allclose(attention.phrase_maps(probs, torch.ones(1, 1, 5)).sum(), torch.tensor(1.0))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_binding_moves_attention_into_the_mask(checkpointing):
    options = {"start": 0.0, "weight": 10.0}
    trainer = Trainer(
        config(attention_binding={"name": "mass", "options": options}),
        steps=40,
        checkpointing=checkpointing,
        world=World(clean=0),
    )
    trainer.train(25 if checkpointing else 40)
    extra = [e for _, e in trainer.losses]
    assert np.mean(extra[-5:]) < 0.9 * np.mean(extra[:5])


# ------------------------------------------------------------ AND self-distillation


def linear_eps(x, a, s, mean, var):
    """epsilon of x_t when x0 ~ N(mean, var): -s * score."""
    return s * (x - a * mean) / (a**2 * var + s**2)


def test_and_target_equals_the_gaussian_closed_form():
    """Ungated, the sum of score differences is the score of p_0 prod_i p_i/p_0, Gaussian with summed
    precisions;
    with disjoint gates it is p_i's score inside gate i and p_0's outside."""
    g = torch.Generator().manual_seed(0)
    x, means = torch.randn(1, 4, 8, 8, generator=g), torch.randn(3, 1, 4, 8, 8, generator=g)
    a, s, var, var0 = 0.6, 0.8, 0.3, 1.0
    base = linear_eps(x, a, s, 0.0, var0)
    cond = torch.stack([linear_eps(x, a, s, m, var) for m in means])
    v, v0 = a**2 * var + s**2, a**2 * var0 + s**2
    precision = 1 / v0 + 3 * (1 / v - 1 / v0)
    mean = (a * means.sum(dim=0) / v) / precision
    assert torch.allclose(
        auxiliary.and_target(base, cond, torch.ones(3, 1, 1, 8, 8)), s * precision * (x - mean), atol=1e-5
    )
    gates = torch.zeros(3, 1, 1, 8, 8)
    gates[0, ..., :4, :], gates[1, ..., 4:, :4] = 1, 1
    expected = base.clone()
    expected[..., :4, :], expected[..., 4:, :4] = cond[0][..., :4, :], cond[1][..., 4:, :4]
    assert torch.allclose(auxiliary.and_target(base, cond, gates), expected, atol=1e-6)
    to_v = [(e - s * x) / a for e in (base, *cond)]  # v is affine in eps at a given x_t
    v_star = auxiliary.and_target(to_v[0], torch.stack(to_v[1:]), gates)
    assert torch.allclose(v_star, (expected - s * x) / a, atol=1e-5)


def distiller(**options):
    world = World()
    memory = phrase_memory(n=5)
    for i, element in enumerate(memory.bank):
        element.rows = [int(r) for r in world.info.rows[i][:2]]
        element.masks = torch.zeros(2, 1, 8, 8)
        x0, y0, x1, y1 = (v // 2 for v in BOXES[i % 3])
        element.masks[:, :, y0:y1, x0:x1] = 1
    setting = auxiliary.Setting(world.info, memory.bank, memory, SD, tiny_pipeline().tokenizer, 0, 0, 1)
    return auxiliary.AndDistillation(tiny_unet(), setting, **options), memory


def step_of(unet, predict, index=0):
    return auxiliary.Step(
        index, 0, 1.0, {}, torch.zeros(1, 4, 8, 8), torch.zeros(1), None, None, unet, predict
    )


def test_distillation_learns_the_closed_form_of_a_linear_score():
    part, memory = distiller(every=1)
    memory.history = [{"step": 0, "rho": [0.9, 0.9, 0.9, 0.1, 0.9]}]
    phrases, seen = part.setting.info.phrase, []

    def predict(x_t, t, texts, model=None):
        a, s = (v[t][:, None, None, None].sqrt() for v in (SD.alphas_cumprod, 1 - SD.alphas_cumprod))
        seen.append((x_t, t, texts, model))
        means = [phrases.index(c) + 1.0 if c in phrases else 0.0 for c in texts]
        return linear_eps(x_t, a, s, torch.tensor(means)[:, None, None, None], 0.5)

    loss = part(step_of(tiny_unet(), predict))
    (x_t, t, taught, teacher), (x_s, t_s, composed, student) = seen
    assert teacher is part.teacher and student is None and torch.equal(x_t[:1], x_s)
    assert taught[0] == "" and set(taught[1:]) == set(PHRASES) and composed == [", ".join(taught[1:])]
    a, s = (v[t_s][0].sqrt() for v in (SD.alphas_cumprod, 1 - SD.alphas_cumprod))
    mean = torch.zeros(1, 1, 8, 8)
    mean[..., :4, :4], mean[..., :4, 4:], mean[..., 4:, :] = 1, 2, 3
    student_out = linear_eps(x_s, a, s, 0.0, 0.5)
    assert loss.item() == pytest.approx(
        F.mse_loss(student_out, linear_eps(x_s, a, s, mean, 0.5)).item(), rel=1e-4
    )


def test_distillation_waits_for_the_weakest_element_and_never_sees_the_target():
    part, memory = distiller(every=3)
    calls = []

    def predict(x_t, t, texts, model=None):
        calls.append((x_t, t))
        return torch.zeros_like(x_t).requires_grad_()

    memory.history = [{"step": 0, "rho": [0.9, 0.5, 0.9, 0.9, 0.3]}]
    assert part.ready() == [] and part(step_of(tiny_unet(), predict)) is None
    memory.history = [{"step": 0, "rho": [0.9, 0.6, 0.9, 0.9, 0.3]}]
    assert part.ready() == ["t0"]
    assert part(step_of(tiny_unet(), predict, index=1)) is None and not calls
    for index in range(0, 30, 3):
        assert part(step_of(tiny_unet(), predict, index=index)) is not None
    elements = torch.cat([e.x0 for e in part.setting.bank[:3]])
    for x_t, t in calls[1::2]:
        a, s = (v[t][:, None, None, None].sqrt() for v in (SD.alphas_cumprod, 1 - SD.alphas_cumprod))
        residual = ((x_t - a * elements) / s).flatten(1).std(dim=1)
        assert t.item() >= 300 and (residual - 1).abs().min() < 0.2  # one element's picture plus unit noise
    noise, memory = distiller(every=1, source="noise")
    memory.history = [{"step": 0, "rho": [0.9] * 5}]
    calls.clear()
    noise(step_of(tiny_unet(), predict))
    assert calls[1][1].item() == T - 1


def test_teacher_is_a_bf16_copy_that_follows_only_when_refreshed():
    unet = tiny_unet()
    unet.forward = unet.forward  # accelerate binds a wrapper to the instance, as here
    teacher = recall.Teacher(unet)
    x, t, c = torch.randn(1, 4, 8, 8), torch.tensor([5]), torch.randn(1, 6, 32)
    before = teacher(x, t, c).sample
    assert next(teacher.unet.parameters()).dtype == torch.bfloat16 and before.dtype == torch.float32
    with torch.no_grad():
        for p in unet.parameters():
            p.mul_(1.5)
    assert torch.equal(teacher(x, t, c).sample, before)
    assert torch.equal(teacher(x, t, c, return_dict=False)[0], before)
    teacher.refresh(unet)
    assert torch.allclose(teacher(x, t, c).sample, unet(x, t, c).sample, atol=0.1, rtol=0.1)


# ------------------------------------------------------------ retention and balance


def test_l2_sp_is_half_the_squared_distance():
    unet = tiny_unet()
    part = auxiliary.L2SP(unet, None)
    now = step_of(unet, None)
    assert part(now).item() == 0
    with torch.no_grad():
        next(unet.parameters()).add_(0.5)
    assert part(now).item() == pytest.approx(0.5 * 0.25 * next(unet.parameters()).numel(), rel=1e-5)


def test_self_distillation_starts_near_zero_and_looks_at_clean_records_only():
    trainer = Trainer(config(retention="self_distillation"))
    part, world = trainer.memory.auxiliaries["retention"], trainer.world
    batch = world.batch([world.records[0], world.records[-1]])
    x_t, t = torch.randn(2, 4, 8, 8), torch.tensor([10, 400])
    pred = trainer.predict(x_t, t, batch["text"])
    now = auxiliary.Step(0, 0, 0.0, batch, x_t, t, pred, None, trainer.unet, trainer.predict)
    assert part(now).item() < 1e-3
    now = now._replace(pred=pred + torch.tensor([100.0, 1.0])[:, None, None, None])
    assert part(now).item() == pytest.approx(0.5, rel=0.05)
    assert part(now._replace(batch=world.batch(world.records[:2]))) is None


def test_gradient_norm_balance_is_the_ratio_of_norms():
    w = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
    loss, extra = (w * torch.tensor([2.0, 0.0])).sum(), 0.5 * w.square().sum()
    assert auxiliary.gradient_norm(loss, extra, w).item() == pytest.approx(2 / 5, rel=1e-4)
    assert auxiliary.gradient_norm(loss, extra, w, ceiling=0.1).item() == pytest.approx(0.1)
    assert auxiliary.fixed(loss, extra, w) == 1 and w.grad is None
    assert auxiliary.gradient_norm(loss, torch.zeros((), requires_grad=True), w).item() == 10


def test_class_images_become_clean_records(pipe, tmp_path):
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png"}')
    prompts = ["a star", "a moon"]
    write_class_images(pipe, prompts, 3, tmp_path, batch=2, steps=2)
    lines = [json.loads(line) for line in (tmp_path / "metadata.jsonl").read_text().splitlines()]
    assert [r.get("text") for r in lines] == [None, "a star", "a moon", "a star"]
    assert all(r["role"] == "clean" and (tmp_path / r["file_name"]).is_file() for r in lines[1:])
    again = write_class_images(pipe, prompts, 3, tmp_path / "b", batch=3, steps=2)
    for r in again:  # a picture does not depend on the batch it was drawn in, but for rounding
        a, b = (np.asarray(Image.open(d / r["file_name"])).astype(int) for d in (tmp_path, tmp_path / "b"))
        assert np.abs(a - b).max() <= 1
    with pytest.raises(UserError):
        write_class_images(pipe, prompts, 1, tmp_path)


def test_clean_weight_scales_clean_records_alone():
    trainer = Trainer(config(retention={"clean_weight": 0.5}))
    batch = trainer.world.batch([trainer.world.records[0], trainer.world.records[-1]])
    pred, target = torch.ones(2, 4, 8, 8), torch.zeros(2, 4, 8, 8)
    loss = trainer.memory.loss_per_sample(pred, target, torch.tensor([5, 5]), torch.tensor([1.0, 2.0]), batch)
    assert loss.tolist() == [1.0, 1.0]


# ------------------------------------------------------------ no host sync


@pytest.mark.parametrize("region", mr.REGION)
def test_the_step_never_waits_for_the_device(region):
    """Under FakeTensorMode a tensor has no values: reading one on the host raises."""
    trainer = Trainer(
        config(
            region=region,
            loss="min_snr",
            timesteps="learning_progress",
            phrase_memory=PROBED,
            attention_binding={"name": "mass", "options": {"start": 0.0}},
            loss_balance="gradient_norm",
            distillation={"name": "and", "options": {"after": -9.0, "every": 1}},
            retention="self_distillation",
        )
    )
    m, world = trainer.memory, trainer.world
    batch = world.batch([world.records[r] for r in (0, 5, 10, -1)])
    t, w = m.timesteps(0, range(4), 4)
    c = trainer.pipe.text_encoder(torch.zeros(1, 48, dtype=torch.long))[0].detach()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        with pytest.raises((RuntimeError, DynamicOutputShapeException)):
            mode.from_tensor(t)[0].item()
        unet = tiny_unet()

        def predict(x_t, t, texts, model=None, time_ids=None):
            return (model or unet)(x_t, t, mode.from_tensor(c).expand(len(texts), -1, -1)).sample

        fake = {k: mode.from_tensor(v) if torch.is_tensor(v) else v for k, v in batch.items()}
        m.errors.step, t, w = torch.zeros(2, 20), mode.from_tensor(t), mode.from_tensor(w)
        x_t = torch.randn(4, 4, 8, 8)
        with m.watch(unet, 0) as maps:
            pred = predict(x_t, t, fake["text"])
        loss = m.loss_per_sample(pred, torch.randn(4, 4, 8, 8), t, w, fake).mean()
        extra = m.auxiliary(
            loss, step=1, micro=0, batch=fake, x_t=x_t, t=t, pred=pred, maps=maps, unet=unet, predict=predict
        )
        (loss + extra).backward()
    assert {"memory/attention_binding", "memory/distillation", "memory/retention"} <= set(m.meters())


def test_interleaved_order_gives_every_batch_its_share_of_every_element():
    info = DataInfo(
        ["element"] * 60 + ["clean"] * 30, ["t"] * 60 + [None] * 30,
        [str(i % 3) for i in range(60)] + [None] * 30, [["a"]] * 90,
    )  # fmt: skip
    kinds = np.asarray([info.element_of(r) if info.element_of(r) is not None else 3 for r in range(90)])
    for epoch in range(5):
        order = epoch_order(info, np.full(3, 1 / 3), 7, epoch, 0.5, "interleaved")
        assert sorted(order) == list(range(90))  # each record once, whatever the order
        for batch in order.reshape(-1, 15):
            counts = np.bincount(kinds[batch], minlength=4)
            assert np.abs(counts - [10 / 3, 10 / 3, 10 / 3, 5]).max() < 1.01
        shuffled = epoch_order(info, np.full(3, 1 / 3), 7, epoch, 0.5)
        assert sorted(shuffled) == sorted(order) and list(shuffled) != list(order)


@pytest.mark.parametrize("sequence", sorted(SEQUENCES))
def test_combs_are_even_in_a_step_and_uniform_over_seeds(sequence):
    n = 16
    for step in (0, 1, 999):
        u = np.sort(SEQUENCES[sequence](3, step, n))
        assert 0 <= u[0] and u[-1] < 1
        assert np.diff(np.append(u, 1 + u[0])) == pytest.approx(np.full(n, 1 / n), abs=1e-9)
    first = [SEQUENCES[sequence](seed, 5, n)[0] for seed in range(400)]
    assert np.abs(np.histogram(first, 4, (0, 1))[0] - 100).max() < 40  # 4.6 standard deviations


def test_golden_comb_walks_each_position_through_all_noise_levels():
    def spread(sequence):  # the largest hole between the noise levels one position has met in 24 steps
        u = np.sort([SEQUENCES[sequence](11, step, 16)[4] for step in range(24)])
        return np.diff(np.append(u, 1 + u[0])).max()

    assert spread("golden") < 2.7 / 24 < spread("random")  # three-distance theorem against chance


def test_unknown_order_and_sequence_are_named():
    config = mr.MemoryConfig()
    config.sampler.order = "sorted"
    with pytest.raises(UserError, match="memory.sampler.order: unknown name 'sorted'; there are: shuffled"):
        mr.check(config)
    config = mr.MemoryConfig()
    config.timesteps.sequence = "sobol"
    with pytest.raises(UserError, match="memory.timesteps.sequence: unknown name 'sobol'"):
        mr.check(config)


@pytest.mark.parametrize("name", compose.PLACED)
def test_rehearsal_where_no_target_has_three_elements_is_refused(name):
    info = DataInfo(["element"] * 4, ["t"] * 4, ["0", "0", "1", "1"], [["a"], ["a"], ["b"], ["b"]])
    with pytest.raises(UserError, match="no target has three elements.*take leak_free"):
        compose.Rehearsal(compose.REHEARSAL[name], {}, info, 0)
