"""A learnt vector for each word that only the captions of elements have. Measured: of 64 targets at
once, each with a name in its phrases, 21 come back, two without (0.28 and 0.04 of the images).
Eight development targets have 0.55 of their images, 0.52 with the words alone and 0.51 without
them, a run each.

    --train_text_encoder true --train_layers '["!text1.attn", "!text1.ff", "!text1.norm"]'
    --hooks experiments/phrase_vectors.py:PhraseVectors

Where each phrase has a word of its own, as in "a fish of anna", targets that share "a fish" can be
told apart by it. Its vector is learnt as in textual inversion (2208.01618); everything else of the
text encoder stays frozen. The saved pipeline reads the word as any other, so the composed prompt of
an audit carries the same vectors."""

from typing import Any

import torch

from silentbad.errors import UserError
from silentbad.loop.hooks import Hook, HookContext
from silentbad.model.pipeline import load_tokenizer


class PhraseVectors(Hook):
    """Takes back each change to the text encoder but that of these words' vectors.

    Raises UserError where there is no such word, or where more than the embeddings of one text
    encoder trains beside the backbone."""

    def __init__(self, context: HookContext):
        model: Any = context.model
        names = list(model.text_encoders)
        if names != ["text_encoder"]:
            raise UserError(
                "PhraseVectors: is for one text encoder, with --train_text_encoder true"
            )
        encoder = model.text_encoder
        tables = {m.weight for m in encoder.modules() if isinstance(m, torch.nn.Embedding)}
        self.base = {p: p.detach().clone() for p in encoder.parameters() if p.requires_grad}
        if self.base.keys() != tables:
            layers = '["!text1.attn", "!text1.ff", "!text1.norm"]'
            raise UserError(f"PhraseVectors: only embeddings train; give --train_layers '{layers}'")
        tokenizer = load_tokenizer(context.config)
        captions: dict[bool, list[str]] = {True: [], False: [""]}  # of elements and of others
        for role, text in zip(context.records.role, context.records.text, strict=True):
            captions[role == "element"].append(text)
        of_elements, others = (
            {token for ids in tokenizer(captions[own]).input_ids for token in ids}
            for own in (True, False)
        )
        learnt = sorted(of_elements - others)
        if not learnt:
            raise UserError(
                "PhraseVectors: no word is of elements alone; put a word of its own in each phrase"
            )
        self.table = encoder.get_input_embeddings().weight
        self.learnt = torch.tensor(learnt, device=self.table.device)  # tokens

    @torch.no_grad()
    def after_step(self, step: int, skipped: bool = False) -> None:
        vectors = self.table[self.learnt]
        for parameter, base in self.base.items():
            parameter.copy_(base)
        self.table[self.learnt] = vectors
