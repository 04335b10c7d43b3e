"""Tokens that are no text, apart from a grammar's text, which is text whatever it says.

llguidance tokenises text that a grammar forces by the model's tokenizer, which finds its added tokens in any text
(`<think>`); but to llguidance these are no text, and so not what the grammar asks for. So it gets a tokenizer whose
added tokens have names that nobody knows. A grammar may ask for one by name outside of quotes, in llguidance's syntax.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from .as_written import is_byte_level

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
"""A token for what no other has; the model's algorithm knows it by this name."""
_LETTERS = frozenset(letter for letter in ByteLevel.alphabet() if not letter.isascii())
"""What stands for one byte in tokens of a byte-level vocabulary, and where tokens are decoded."""
_LARK = re.compile(
    r'"(?:\\.|[^"\\\n])*+"?'  # a text; each to its end, or that of its line, so that nothing is gone over twice
    r"|//[^\n]*+|#[^\n]*+"
    r"|/(?:\\.|[^/\\\n])*+/?"
    r"|(?P<token><(?!\[)[^<>\s]++>)"
)


class SpecialTokens:
    """The added tokens of one tokenizer that are no text to llguidance."""

    def __init__(self, tokenizer: Mapping[str, Any]) -> None:
        """Of a tokenizer.json."""
        added = tokenizer.get("added_tokens") or ()
        self._ids = {token["content"]: int(token["id"]) for token in added if _is_special(token)}

    def apart(self, tokenizer: dict[str, Any]) -> dict[str, Any]:
        """The tokenizer.json, changed, as llguidance is to have it."""
        words = self._other_bytes(tokenizer)
        # Those that the vocabulary has as well (`é`, a byte) stay tokens, and are found in no text any more.
        tokens = {word for word in words if word in tokenizer["model"]["vocab"]}
        if tokens:
            tokenizer["added_tokens"] = [t for t in tokenizer["added_tokens"] if t["content"] not in tokens]
        salt = secrets.token_hex(16)
        names = {text: f"<|{salt}{i:08x}|>" for i, text in enumerate([*self._ids, *sorted(words - tokens)])}
        if not names:
            return tokenizer
        for token in tokenizer["added_tokens"]:
            token["special"] = bool(token.get("special")) or token["content"] in names  # by its old name it was
        return renamed(tokenizer, names)

    def _other_bytes(self, tokenizer: dict[str, Any]) -> set[str]:
        """Words that were added (`größer`) and are found in texts, but decoded as other bytes than theirs."""
        if not isinstance(tokenizer["model"].get("vocab"), dict) or not is_byte_level(tokenizer):
            return set()
        added = {token["content"] for token in tokenizer.get("added_tokens") or ()}
        return {word for word in added - self._ids.keys() if not _LETTERS.isdisjoint(word)}

    def by_id(self, grammar: str) -> str:
        """A grammar in Lark's syntax, or as JSON, with ids for names of tokens. ValueError for a name of none."""
        if not grammar.lstrip().startswith("{"):
            return _LARK.sub(self._id, grammar)
        try:
            found = json.loads(grammar)
        except (ValueError, RecursionError):
            return grammar  # which llguidance refuses
        parts = found.get("grammars")
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and isinstance(source := part.get("lark_grammar"), str):
                part["lark_grammar"] = _LARK.sub(self._id, source)
        return json.dumps(found)

    def _id(self, match: re.Match[str]) -> str:
        name = match["token"]
        if name is None:
            return match[0]
        if name not in self._ids:
            raise ValueError(f"{name[:64]} is no token of this model; text stands in quotes")
        return f"<[{self._ids[name]}]>"


def _is_special(token: Mapping[str, Any]) -> bool:
    """Whether llguidance takes it for one: it is allowed where a grammar names it, and nowhere else."""
    text = token["content"]
    if _BYTE.fullmatch(text):
        return False
    return bool(token.get("special")) or (text.startswith("<") and text.endswith(">"))


def renamed(tokenizer: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A tokenizer.json, changed: tokens have other `names`, in every place; the ids stay."""
    for token in tokenizer["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = tokenizer["model"]
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(text, text): i for text, i in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[names.get(text, text), *rest] for text, *rest in vocab]
    if model.get("merges"):
        model["merges"] = [pair for pair in model["merges"] if not _touches(pair, names)]
    if (unknown := model.get("unk_token")) in names:
        model["unk_token"] = names[unknown]
    tokenizer["post_processor"] = None  # it names control tokens, and adds them to texts that are no chats
    return tokenizer


def _touches(pair: str | Sequence[str], names: Mapping[str, str]) -> bool:
    left, right = pair.split(" ", 1) if isinstance(pair, str) else pair
    return left + right in names or left in names or right in names
