"""Small tokenizers, trained where they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


def byte_level_bpe(
    corpus: Iterable[str], *, step: Any = None, normalizer: Any = None, special: Sequence[str] = ()
) -> Any:
    """A BPE tokenizer of at most 400 ids over all bytes. `step`: the pre-tokenizer, if it is not the plain byte-level
    one; `special`: the tokens that have the first ids."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = step or pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(corpus, trainer)
    return made
