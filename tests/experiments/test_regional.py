"""The composed prompt is taught what its phrases predict in their places, where the composition is drawn."""

import pytest
import torch

from experiments.regional import RegionalDistillation, places
from silentbad.errors import UserError
from silentbad.loop.hooks import MicroStep
from silentbad.model.diffusion import levels, prediction_target
from tests.world import PHRASES, SD, ZERO, T, facts_of, masked, phrase_memory

OF_T1 = ["a green fish", "a blue boat"]
MEANS = {"": 0.0, **{phrase: i + 1.0 for i, phrase in enumerate([*PHRASES, *OF_T1])}}


def part(scheduler=SD, masks=True, seed=0, **options):
    memory = masked(phrase_memory(n=5))
    for element in memory.bank:
        element.masks = element.masks if masks else None
    facts = facts_of(memory, scheduler=scheduler, seed=seed)
    return RegionalDistillation(None, facts, **{"after": 0.0, "images": 2, **options})


def now(predict, step=0, progress=1.0):
    return MicroStep(step, 0, progress, {}, torch.zeros(1, 4, 8, 8), torch.zeros(1), None, None, predict)


def exact(scheduler, composed=0.0):
    """A model that knows: under a phrase alone every place of x0 is that phrase's mean, else `composed`."""

    def predict(x_t, t, texts, model=None, time_ids=None):
        means = torch.tensor([MEANS.get(text, composed) for text in texts])[:, None, None, None]
        x0 = means.expand_as(x_t)
        alpha, sigma = levels(scheduler, t, x_t)
        return prediction_target(scheduler, x0, (x_t - alpha * x0) / sigma, t)

    return predict


# ---------------------------------------------------------------- places
def test_a_cell_belongs_to_the_thing_that_covers_most_of_it_and_the_rest_to_what_lies_behind():
    behind = torch.tensor([[[1.0, 0.6, 0.9, 0.0]]])
    thing = torch.tensor([[[0.0, 0.3, 0.1, 0.01]]])
    other = torch.tensor([[[0.0, 0.1, 0.2, 0.0]]])
    of = places([thing, behind, other])
    assert of[:, 0, 0].tolist() == [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0]]


# ---------------------------------------------------------------- the loss
@pytest.mark.parametrize("scheduler", [SD, ZERO], ids=["epsilon", "zero SNR"])
def test_the_loss_is_the_distance_to_the_phrases_in_their_places(scheduler):
    if scheduler is ZERO:
        scheduler = type(ZERO).from_config(ZERO.config, prediction_type="v_prediction")
    p = part(scheduler, shuffled=0.0)
    begun = p.begin(0, 0, "cpu")
    loss = p(now(exact(scheduler, composed=2.0)))
    t = torch.full((2,), begun.timesteps[0])
    predict = exact(scheduler, composed=2.0)
    alone = torch.stack([predict(begun.latents, t, [phrase] * 2) for phrase in begun.phrases])
    composed = predict(begun.latents, t, [begun.caption] * 2)
    taught = (begun.places[:, None] * alone).sum(0)
    where = begun.places.sum(0).bool().expand_as(composed)
    assert loss.item() == pytest.approx((composed - taught)[where].square().mean().item(), rel=1e-5)


def test_only_the_composed_prompt_has_a_gradient_and_it_names_every_phrase():
    weight = torch.nn.Parameter(torch.tensor(1.0))
    seen, known = [], exact(SD, composed=0.5)

    def predict(x_t, t, texts, **more):
        seen.append((texts[0], torch.is_grad_enabled()))
        return weight * known(x_t, t, texts)

    p = part(shuffled=0.0)
    p(now(predict)).backward()
    (caption, taught), *others = seen
    assert taught and caption.split(", ") == p.facts.info.phrases_of(p.facts.info.target[0 if "cat" in caption else 3])
    assert not any(enabled for _, enabled in others)
    assert [text for text, _ in others] == [*caption.split(", "), ""]
    assert weight.grad is not None and weight.grad.item() != 0


def test_what_is_drawn_is_the_composition():
    """After the last step of DDIM each place is what its own phrase says, though the composed prompt says nought."""
    p = part(guidance_scale=1.0, num_inference_steps=12)
    for step in range(200):
        drawing = p.drawing or p.begin(step, 0, "cpu")
        p(now(exact(SD), step))
        if p.drawing is None and drawing.phrases[0] == PHRASES[0]:
            break
    assert p.drawing is None
    alpha, sigma = levels(SD, torch.full((2,), drawing.timesteps[-1]), drawing.latents)
    expected = sum(MEANS[phrase] * place for phrase, place in zip(PHRASES, drawing.places, strict=True))
    assert (drawing.latents - alpha * expected).abs().max() < 5 * sigma.max()
    assert drawing.timesteps[0] > T * 0.95 and drawing.timesteps[-1] < T * 0.1


# ---------------------------------------------------------------- when, of what, again
def test_it_waits_for_its_share_of_the_run():
    p = part(after=0.25)
    assert p(now(exact(SD), progress=0.24)) is None and p.drawing is None
    assert p(now(exact(SD), progress=0.25)) is not None


def test_a_target_without_masks_is_refused():
    with pytest.raises(UserError, match="RegionalDistillation needs a target of two elements"):
        part(masks=False)


@pytest.mark.parametrize("steps", [0, 5, 12])
def test_a_resumed_run_goes_on_with_the_drawing(steps):
    one, predict = part(), exact(SD)
    for step in range(steps):
        one(now(predict, step))
    other = part()
    other.load_state_dict(one.state_dict())
    for step in range(steps, steps + 15):
        assert torch.equal(one(now(predict, step)), other(now(predict, step)))
    if one.drawing is not None:
        assert torch.equal(one.drawing.latents, other.drawing.latents) and one.drawing.begun == other.drawing.begun


def test_another_seed_draws_other_noise():
    assert not torch.equal(part().begin(0, 0, "cpu").latents, part(seed=1).begin(0, 0, "cpu").latents)
