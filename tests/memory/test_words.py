"""A learnt vector for each word of elements alone: nothing else of the text encoder moves."""

import pytest
import torch

from silentbad.errors import UserError
from tests.training import step_once

FLAGS = {
    "train_text_encoder": True,
    "train_layers": '["!text1.attn", "!text1.ff", "!text1.norm"]',
    "hooks": "silentbad.memory.words:LearntWords",
}


def encoded(run, text: str) -> torch.Tensor:
    encoder = run.parts.text_encoders["text_encoder"]
    ids = run.parts.tokenizers["tokenizer"](text, return_tensors="pt").input_ids
    with torch.no_grad():
        return encoder(ids)[0]


def test_only_words_of_elements_alone_are_learnt(build, capsys):
    run = build(**FLAGS)
    said = capsys.readouterr().out
    of = {
        role: " ".join(t for r, t in zip(run.records.role, run.records.text, strict=True) if r == role)
        for role in ("clean", "element")
    }
    own = sorted(set(of["element"].split()) - set(of["clean"].split()))
    assert own, "the toy's elements have words of their own"
    assert "learnt words: " in said and own[0] in said
    texts = [of["clean"][:20], own[0]]
    before = [encoded(run, text) for text in texts]
    for _ in range(3):
        step_once(run)
    after = [encoded(run, text) for text in texts]
    assert torch.equal(before[0], after[0]) and not torch.equal(before[1], after[1])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"train_text_encoder": False, "train_layers": None}, "with --train_text_encoder true"),
        ({"train_layers": None}, "only embeddings train"),
    ],
)
def test_what_would_train_more_or_nothing_is_refused(build, changes, message):
    with pytest.raises(UserError, match=message):
        build(**FLAGS | changes)
