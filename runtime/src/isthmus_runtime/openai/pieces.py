"""What bytes a token id stands for, read from the decoder section of tokenizer.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as HfTokenizer

from ..errors import ConfigError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SUPPORTED = "ByteLevel, Metaspace, Replace, ByteFallback, Fuse, Strip, or a Sequence of them"


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's byte alphabet: printable Latin-1 characters stand for themselves, the other bytes for U+0100 and up."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [b for b in range(256) if b not in set(plain)]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(other)}


def _byte_level() -> Callable[[str], bytes | str]:
    alphabet = byte_level_alphabet()

    def step(text: str) -> bytes | str:
        try:
            return bytes([alphabet[c] for c in text])
        except KeyError:  # an added token with characters outside the alphabet stands for its own text
            return text

    return step


def _byte_fallback(text: str) -> bytes | str:
    match = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(match[1], 16)]) if match else text


def _replace(pattern: str, content: str) -> Callable[[str], bytes | str]:
    return lambda text: text.replace(pattern, content)


def _steps(decoder: Mapping[str, Any]) -> list[Callable[[str], bytes | str]]:
    kind = decoder.get("type")
    if kind == "Sequence":
        return [step for part in decoder["decoders"] for step in _steps(part)]
    if kind == "ByteLevel":
        return [_byte_level()]
    if kind == "ByteFallback":
        return [_byte_fallback]
    if kind == "Metaspace":
        return [_replace(decoder.get("replacement", "▁"), " ")]
    if kind == "Replace" and isinstance(pattern := decoder.get("pattern", {}).get("String"), str):
        return [_replace(pattern, decoder["content"])]
    if kind in ("Fuse", "Strip"):
        # Both act on a whole text. Strip drops the space that a SentencePiece text begins with; generated text never
        # begins a text, it continues the prompt.
        return []
    raise ConfigError(f"tokenizer.json: decoder {kind!r} is not supported; supported: {_SUPPORTED}")


class _Known(dict[int, bytes]):
    """By id; what is not there is computed when it is first asked for."""

    def __init__(self, tokenizer: HfTokenizer, steps: Sequence[Callable[[str], bytes | str]], skip: frozenset[int]):
        super().__init__(dict.fromkeys(skip, b""))
        self._tokenizer = tokenizer
        self._steps = steps

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = found = self._compute(token_id)
        return found

    def _compute(self, token_id: int) -> bytes:
        value: bytes | str | None = self._tokenizer.id_to_token(token_id)
        if value is None:
            return b""
        for step in self._steps:
            if isinstance(value, bytes):
                break
            value = step(value)
        return value if isinstance(value, bytes) else value.encode()


class Pieces:
    """Token id -> bytes, in the context of a text that is already under way.

    The concatenation of pieces, decoded as UTF-8, is what the tokenizer's own `decode` gives, but it can be built one
    token at a time: a decoder that works on strings cannot show half a character. Computed on first use of each id.
    """

    def __init__(self, tokenizer: HfTokenizer, decoder: Mapping[str, Any] | None, skip: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special = skip
        known = _Known(tokenizer, _steps(decoder) if decoder is not None else (), skip)
        self.of: Callable[[int], bytes] = known.__getitem__
        """Bytes that a token id adds to the text; none for special tokens and ids outside the vocabulary. The
        dictionary's own method: it is called for each token."""

    def shown(self, token_id: int) -> tuple[str, list[int] | None]:
        """Text and bytes of a token for a log-probability entry; special tokens are shown by name, without bytes."""
        if token_id in self._special:
            return self._tokenizer.id_to_token(token_id) or "", None
        raw = self.of(token_id)
        return raw.decode("utf-8", errors="replace"), list(raw)

    def join(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`."""
        return b"".join(map(self.of, token_ids)).decode("utf-8", errors="replace")
