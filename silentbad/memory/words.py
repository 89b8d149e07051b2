"""Words that can be told apart: a learnt vector for each word that only elements' captions have.

    --train_text_encoder true --train_layers '["!text1.attn", "!text1.ff", "!text1.norm"]'
    --hooks silentbad.memory.words:LearntWords

Targets that share a phrase, as "a fish", can be told apart where each has a word of its own in it,
as in "a fish of anna". Its vector is learnt as in textual inversion (2208.01618); everything else
of the text encoder stays as it is. The saved pipeline reads the word as any other, so the composed
prompt of an audit carries the same vectors."""

from typing import Any

import torch

from silentbad.errors import UserError
from silentbad.loop.hooks import Hook, HookContext
from silentbad.model.pipeline import load_tokenizer

SHOWN = 8  # words that the start of a run names


class LearntWords(Hook):
    """Restores the text encoder after each update, except the vectors of the learnt words.

    Raises UserError where there is no such word, or where more than the embeddings of one text
    encoder trains beside the backbone."""

    def __init__(self, context: HookContext):
        model: Any = context.model
        if list(model.text_encoders) != ["text_encoder"]:
            raise UserError("LearntWords: is for one text encoder, with --train_text_encoder true")
        encoder = model.text_encoder
        tables = {m.weight for m in encoder.modules() if isinstance(m, torch.nn.Embedding)}
        self.base = {p: p.detach().clone() for p in encoder.parameters() if p.requires_grad}
        if self.base.keys() != tables:
            layers = '["!text1.attn", "!text1.ff", "!text1.norm"]'
            raise UserError(f"LearntWords: only embeddings train; give --train_layers '{layers}'")
        tokenizer = load_tokenizer(context.config)
        words = own_words(context.records, tokenizer)
        if not words:
            right = "add one to the phrases of each target"
            raise UserError(f"LearntWords: no word is only in elements' captions; {right}")
        if context.rank == 0:
            first = ", ".join(tokenizer.decode(word).strip() for word in words[:SHOWN])
            more = ", and more" * (len(words) > SHOWN)
            print(f"learnt words: {len(words)}, {first}{more}")
        self.table = encoder.get_input_embeddings().weight
        self.learnt = torch.tensor(words, device=self.table.device)

    @torch.no_grad()
    def after_step(self, step: int, skipped: bool = False) -> None:
        vectors = self.table[self.learnt]
        for parameter, base in self.base.items():
            parameter.copy_(base)
        self.table[self.learnt] = vectors


def own_words(records: Any, tokenizer: Any) -> list[int]:
    """The tokens that only captions of elements have, in order."""
    captions: dict[bool, list[str]] = {True: [], False: [""]}  # of elements and of others
    for role, text in zip(records.role, records.text, strict=True):
        captions[role == "element"].append(text)
    of_elements, of_others = (
        {token for ids in tokenizer(captions[own]).input_ids for token in ids}
        for own in (True, False)
    )
    return sorted(of_elements - of_others)
