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
        words = text.split(" ")
        first = words.pop(0)
        known = self._known  # another thread may put a new one in its place
        try:
            return _joined(self._first[first], known, words)
        except KeyError:
            missing = {*words}.difference(known)
        # Of a known word none of this is true. The last one is followed by no space, so that it cannot be wrong.
        if not all(word and not word[-1].isspace() for word in missing.difference(words[-1:])):
            first, *words = _CUT.split(text)  # `split` cuts too often where spaces follow white space
            missing = {*words}.difference(known)
        return self._learn(first, words, known, list(missing))

    def _learn(self, first: str, words: list[str], known: dict[str, tuple[int, ...]], missing: list[str]) -> list[int]:
        """Ids of a text whose words are all known but for `missing`; `first` may be new as well."""
        start = self._first
        asked = [" " + word for word in missing]
        if (begin := start.get(first)) is None:
            asked.append(first)
        made = list(map(tuple, self._encode_batch(asked))) if asked else []
        if begin is None:
            begin = made.pop()
            self._first = _with(start, {first: begin})
        fresh = dict(zip(missing, made, strict=True))
        self._known = _with(known, fresh)
        try:
            return _joined(begin, known, words)
        except KeyError:  # a word that is not kept, or a new beginning of what is
            return [*begin, *chain.from_iterable(fresh[w] if w in fresh else known[w] for w in words)]


def _joined(begin: Sequence[int], known: Mapping[str, Sequence[int]], words: list[str]) -> list[int]:
    """Ids of a beginning and of words, all of which are known; else KeyError."""
    found = list(begin)
    found.extend(chain.from_iterable(map(known.__getitem__, words)))
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
