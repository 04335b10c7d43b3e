"""What is sure about a text before it is tokenised: how few tokens it can have, and where it may be cut. Pure.

A prompt of megabytes costs seconds of tokenising, and most such prompts are far beyond the model's limit.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..sharing.threads_in_turns import go_on
from .pieces import byte_level_alphabet

_PUNCTUATION = ".,;:!?。、，；：！？"
"""No letter, number or combining mark, and part of no contraction."""
_CUT = re.compile(rf"(?<=\S) |(?<=[^\W_])(?=[{re.escape(_PUNCTUATION)}])")
_NFC_SHRINKS = 9
"""Most bytes that become one byte of NFC: a singleton takes up to 3 for each, and composition again 3 (UTF-8)."""

_NFC_GROWS = 3
"""Most bytes of NFC that one byte becomes, and characters one character (UTF-8 and UTF-32; UAX 15): some characters
are excluded from composition."""
_COUNTED = 1 << 13
"""Characters that are normalised at a time to be counted: the library takes 400 bytes for one that becomes three."""


@dataclass(frozen=True, slots=True)
class TokenBound:
    """Every token stands for at most `longest` bytes of the normalised text."""

    longest: int
    dropped: bytes
    """Bytes that the vocabulary does not have: the tokenizer leaves them out, or merges them into one unknown token."""
    composes: bool
    """The text is normalised to NFC, which may shorten it."""

    def least(self, text: str) -> int:
        """Tokens that `text` surely has."""
        size = len(text.encode("utf-8", "surrogatepass").translate(None, self.dropped))
        if self.composes and not text.isascii() and not unicodedata.is_normalized("NFC", text):
            size //= _NFC_SHRINKS
        return -(-size // self.longest)


class Letters:
    """How many characters a text counts as while it is tokenised: those that it has, or has once it is normalised where
    these are more."""

    def __init__(self, tokenizer: Mapping[str, Any], normalise: Callable[[str], str] | None) -> None:
        """Of a tokenizer.json. `normalise`: its normalizer, where it has one."""
        steps = _parts(tokenizer.get("normalizer"), "normalizers")
        if steps and all(step.get("type") == "NFC" for step in steps):
            normalise = partial(unicodedata.normalize, "NFC")
        self._normalise = normalise
        self._ascii_stays = all(map(_leaves_ascii, steps))

    def __call__(self, text: str) -> int:
        """Of a text."""
        if self._normalise is None or (self._ascii_stays and text.isascii()):
            return len(text)
        found = 0
        for start in range(0, len(text), _COUNTED):
            go_on()
            part = text[start : start + _COUNTED]
            found += max(len(part), len(self._normalise(part)))
        return found


def token_bound(tokenizer: Mapping[str, Any]) -> TokenBound | None:
    """The bound of a tokenizer.json, or None where a token may stand for any length of text: unknown words, a
    pre-tokenizer or normalizer that drops something, tokens that take the white space around them."""
    model = tokenizer.get("model") or {}
    vocab = model.get("vocab")
    if model.get("type") != "BPE" or not isinstance(vocab, Mapping) or not vocab:
        return None
    added = tokenizer.get("added_tokens") or ()
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        return None
    cutters = _parts(tokenizer.get("pre_tokenizer"), "pretokenizers")
    if any(part.get("type") not in ("ByteLevel", "Digits", "Metaspace", "Split") for part in cutters):
        return None
    if any(part.get("type") == "Split" and part.get("behavior") == "Removed" for part in cutters):
        return None
    byte_level = any(part.get("type") == "ByteLevel" for part in cutters)
    if not byte_level and not (model.get("byte_fallback") and all(f"<0x{b:02X}>" in vocab for b in range(256))):
        return None
    normalizers = _parts(tokenizer.get("normalizer"), "normalizers")
    if not all(map(_keeps_length, normalizers)):
        return None
    # In a byte-level vocabulary each character of a token is a byte of the text.
    sizes = map(len, vocab) if byte_level else (len(token.encode()) for token in vocab)
    longest = max(*sizes, *(len(token["content"].encode()) for token in added), 1)
    dropped = bytes(b for c, b in byte_level_alphabet().items() if c not in vocab) if byte_level else b""
    return TokenBound(longest, dropped, any(part.get("type") == "NFC" for part in normalizers))


def growth(tokenizer: Mapping[str, Any]) -> int | None:
    """Most tokens that a byte of a text becomes, for a tokenizer.json; 1 for each of ASCII. None: that is not known.

    A byte-level vocabulary begins with a symbol for each byte and merges from there.
    """
    model = tokenizer.get("model") or {}
    cutters = _parts(tokenizer.get("pre_tokenizer"), "pretokenizers")
    if model.get("type") != "BPE" or not any(part.get("type") == "ByteLevel" for part in cutters):
        return None
    if any(
        part.get("type") not in ("ByteLevel", "Digits", "Split") or part.get("add_prefix_space") for part in cutters
    ):
        return None
    normalizers = _parts(tokenizer.get("normalizer"), "normalizers")
    if any(part.get("type") != "NFC" for part in normalizers):
        return None
    return _NFC_GROWS if normalizers else 1


def _parts(step: Any, name: str) -> Sequence[Mapping[str, Any]]:
    if not step:
        return ()
    return step.get(name) or () if step.get("type") == "Sequence" else (step,)


def _keeps_length(step: Mapping[str, Any]) -> bool:
    """Whether a normalizer never makes a text shorter, NFC aside."""
    if step.get("type") == "Replace":
        pattern = (step.get("pattern") or {}).get("String")
        return isinstance(pattern, str) and len(step.get("content", "").encode()) >= len(pattern.encode())
    return step.get("type") in ("NFC", "Prepend")


def _leaves_ascii(step: Mapping[str, Any]) -> bool:
    """Whether a normalizer makes a text of ASCII no longer, but for a few characters before all of it."""
    if step.get("type") == "Replace":
        pattern = (step.get("pattern") or {}).get("String")
        return isinstance(pattern, str) and len(step.get("content", "")) <= len(pattern)
    return step.get("type") in ("NFC", "NFD", "NFKC", "NFKD", "Prepend", "Lowercase")


def may_cut(added_tokens: Sequence[Mapping[str, Any]]) -> bool:
    """Whether `cut` keeps these tokens whole, for a tokenizer of which `words.cuts_at_words` holds."""
    return not any(set(token["content"]) & {*_PUNCTUATION, " "} for token in added_tokens)


def cut(text: str, size: int) -> Iterator[str]:
    """`text` in parts of about `size` characters, so that the ids of the parts are those of the text.

    A part ends before a space that follows something other than white space, or between a letter or digit and a
    punctuation mark: no piece of a known pre-tokenizer has both. Where there is no such place, a part is longer.
    """
    start, looked = 0, size
    while looked < len(text):
        # No further than `size` at once: a search does not let other threads run.
        place = _CUT.search(text, looked, looked + size + 1)
        looked = place.start() if place else looked + size
        if place:
            yield text[start:looked]
            start, looked = looked, looked + size
    yield text[start:]
