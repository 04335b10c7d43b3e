"""A tokenizer by which the tokens of a grammar's text have the bytes of that text, and of no other.

llguidance tokenises text that a grammar forces by the model's tokenizer. This one may compose letters (NFC), write a
space before a text, or take its vocabulary's sign for a space (`▁`) for a space where a text has it: tokens of another
text, which the grammar does not take.
"""

from __future__ import annotations

from typing import Any

_SPACE = "\u2581"
"""What vocabularies of SentencePiece have for a space."""
_OTHER = "\ufdd0"
"""The same here: a code point that is no character, so that no text has it."""


def as_written(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer.json, changed; the ids stay."""
    tokenizer["normalizer"] = _of_spaces(tokenizer.get("normalizer"))
    for part in parts_of(tokenizer.get("pre_tokenizer")):
        prefixed = part.pop("add_prefix_space", None) is not None
        if part.get("type") == "Metaspace":
            part["prepend_scheme"] = "never"  # an older file has the other name, or both, which have to agree
        elif prefixed:
            part["add_prefix_space"] = False
    if is_byte_level(tokenizer):
        return tokenizer  # whose tokens have no such sign
    return {name: _with_other(value) for name, value in tokenizer.items()}


def is_byte_level(tokenizer: dict[str, Any]) -> bool:
    """Whether a letter of the vocabulary is a byte (GPT-2's alphabet)."""
    found = (tokenizer.get("decoder"), tokenizer.get("pre_tokenizer"), tokenizer.get("normalizer"))
    return any(part.get("type") == "ByteLevel" for whole in found for part in parts_of(whole))


def parts_of(part: Any) -> list[dict[str, Any]]:
    """A part of a tokenizer.json, or those of a sequence."""
    if not isinstance(part, dict):
        return []
    inner = [*part.get("decoders", ()), *part.get("pretokenizers", ()), *part.get("normalizers", ())]
    return [part, *(one for each in inner for one in parts_of(each))]


def _of_spaces(normalizer: Any) -> Any:
    """What is left of a normalizer that only writes a text as the vocabulary does. One that prepends a space (Llama 2)
    does so after each added word as well, within a text."""
    kept = [one for one in parts_of(normalizer) if one.get("type") == "ByteLevel" or _writes_spaces(one)]
    return {"type": "Sequence", "normalizers": kept} if kept else None


def _writes_spaces(normalizer: dict[str, Any]) -> bool:
    return normalizer.get("type") == "Replace" and normalizer.get("pattern") == {"String": " "}


def _with_other(value: Any) -> Any:
    """A value of JSON with another sign for a space in all of its texts."""
    if isinstance(value, str):
        return value.replace(_SPACE, _OTHER)
    if isinstance(value, list):
        for i, one in enumerate(value):  # in its place: merges are half a million
            value[i] = _with_other(one)
        return value
    if isinstance(value, dict):
        return {_with_other(name): _with_other(one) for name, one in value.items()}
    return value
