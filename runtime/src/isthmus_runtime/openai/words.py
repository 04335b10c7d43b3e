"""Tokenises by words that were met before: prompts are mostly the same words, and looking one up costs less than BPE.

A text may be cut between a letter and ` letter` (ASCII) wherever the pre-tokenizer cuts there too, in any context: then
the ids of the text are those of its pieces, one after the other. `cuts_at_words` says for which tokenizers that holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_CUT = re.compile(r"(?<=[a-z])(?= [A-Za-z])")
_WORD_LENGTH = 32
"""Longer pieces (code, other scripts) rarely come again and are not kept."""
_WORDS = 1 << 15
"""Words kept: a few MB. When there are more, all are dropped; the common ones are back at once."""

_LETTER_PATTERNS = frozenset(
    (
        # GPT-2
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        # Llama 3
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
        # Qwen 2 and 3
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
    )
)
"""Expressions of `Split` that begin a new piece at a space before a letter and end one after the last letter."""


class Words:
    """Ids of texts. Safe to use from several threads."""

    def __init__(self, encode_batch: Callable[[list[str]], Sequence[Sequence[int]]]) -> None:
        """`encode_batch`: ids of several texts, without special tokens."""
        self._encode_batch = encode_batch
        self._known: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without special tokens."""
        pieces = _CUT.split(text)
        known = self._known
        found = [known.get(piece) for piece in pieces]
        missing = [piece for piece, ids in zip(pieces, found, strict=True) if ids is None]
        if missing:
            fresh = {p: tuple(i) for p, i in zip(missing, self._encode_batch(missing), strict=True)}
            found = [fresh[piece] if ids is None else ids for piece, ids in zip(pieces, found, strict=True)]
            if len(known) + len(fresh) > _WORDS:
                known.clear()
            known.update((p, i) for p, i in fresh.items() if len(p) <= _WORD_LENGTH)
        return [i for ids in found if ids is not None for i in ids]


def cuts_at_words(tokenizer: Mapping[str, Any]) -> bool:
    """Whether the ids of a text are those of its words, for a tokenizer.json: byte-level BPE whose pre-tokenizer is
    known, no normalizer that looks past a character, and no added token that a cut would break."""
    model = tokenizer.get("model") or {}
    if model.get("type") != "BPE" or any(
        model.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    ):
        return False
    if (tokenizer.get("normalizer") or {"type": "NFC"}).get("type") != "NFC":
        return False
    for token in tokenizer.get("added_tokens") or ():
        if token.get("lstrip") or token.get("rstrip") or token.get("single_word") or " " in token["content"]:
            return False
    first = tokenizer.get("pre_tokenizer") or {}
    steps = first.get("pretokenizers", ()) if first.get("type") == "Sequence" else (first,)
    cuts = [_cuts(step) for step in steps]
    return None not in cuts and any(cuts)


def _cuts(step: Mapping[str, Any]) -> bool | None:
    """Whether a pre-tokenizer cuts at words; None: it is not known, or looks at what is around a piece."""
    kind = step.get("type")
    if kind == "ByteLevel":
        return None if step.get("add_prefix_space") else bool(step.get("use_regex", True))
    if kind == "Digits":
        return False
    if kind == "Split" and (step.get("pattern") or {}).get("Regex") in _LETTER_PATTERNS:
        return True if step.get("behavior") == "Isolated" and not step.get("invert") else None
    return None
