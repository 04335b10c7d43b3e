"""Tokenises by words that were met before: prompts are mostly the same words, and looking one up costs less than BPE.

A text may be cut before every space that follows something other than white space: no piece of the pre-tokenizer
reaches from one to the other, in any context, so the ids of the text are those of its words, one after the other.
`cuts_at_words` says for which tokenizers that holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

_CUT = re.compile(r"(?<=\S) ")
_WORD_LENGTH = 32
"""Longer words (code, other scripts) rarely come again and are not kept."""
_WORDS = 1 << 15
"""Words kept: a few MB. When there are more, all are dropped; the common ones are back at once."""
_FEW = 6
"""Texts that are encoded sooner one after the other than by the threads that share a batch."""

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
        """Word -> ids of a space and the word. No word ends in white space: another may follow each."""
        self._first: dict[str, tuple[int, ...]] = {}
        """The same for what a text begins with, without a space before it."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without special tokens."""
        first, *words = text.split(" ")
        parts = list(map(self._known.get, words))
        try:
            return _joined(self._first[first], parts)
        except (KeyError, TypeError):  # it begins with a word that is new, or has one
            missing = {word for word, ids in zip(words, parts, strict=True) if ids is None}
        # Of a known word none of this is true. The last one is followed by no space, so that it cannot be wrong.
        before = missing.intersection(words[:-1])
        if first[-1:].isspace() or not all(word and not word[-1].isspace() for word in before):
            first, *words = _CUT.split(text)  # `split` cuts too often where spaces follow white space
            parts = list(map(self._known.get, words))
            missing = {word for word, ids in zip(words, parts, strict=True) if ids is None}
        fresh = dict(zip(missing, self._ids([" " + word for word in missing]), strict=True))
        begin = self._first.get(first)
        if begin is None:
            (begin,) = self._ids([first])
            self._first = _with(self._first, {first: begin})
        self._known = _with(self._known, fresh)
        return _joined(begin, [fresh[word] if ids is None else ids for word, ids in zip(words, parts, strict=True)])

    def _ids(self, texts: list[str]) -> list[tuple[int, ...]]:
        if len(texts) <= _FEW:
            return [tuple(self._encode_batch([text])[0]) for text in texts]
        return list(map(tuple, self._encode_batch(texts)))


def _joined(begin: Sequence[int], parts: Sequence[Sequence[int] | None]) -> list[int]:
    """Ids of a beginning and of what follows it. TypeError where a part is not known."""
    found = list(begin)
    found.extend(chain.from_iterable(parts))  # type: ignore[arg-type]  # it raises what is documented
    return found


def _with(known: dict[str, tuple[int, ...]], more: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """`known` with what is worth keeping of `more`; a new one where it would be too large: others may be reading."""
    more = {w: i for w, i in more.items() if 0 < len(w) <= _WORD_LENGTH and not w[-1].isspace()}
    if len(known) + len(more) > _WORDS:
        return dict(list(more.items())[:_WORDS])
    known.update(more)
    return known


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
