"""A SentencePiece vocabulary out of a GGUF file, against the definition of the algorithm."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import pytest
from tokenizers import Tokenizer

from isthmus_runtime.checkpoints.gguf_tokenizer import read_tokenizer
from isthmus_runtime.errors import WeightsError
from isthmus_runtime.openai.pieces import Pieces

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
WORDS = [
    "he",
    "lo",
    "hel",
    "hello",
    "▁w",
    "▁wo",
    "or",
    "ld",
    "rld",
    "▁world",
    "ll",
    "ab",
    "bc",
    "abc",
    "▁a",
    "aa",
    "▁h",
]


def metadata(**changes: Any) -> dict[str, Any]:
    """As llama.cpp's converter writes it for Gemma: pieces with falling scores, then their characters."""
    special = {"<pad>": CONTROL, "<eos>": CONTROL, "<bos>": CONTROL, "<unk>": UNKNOWN, "▁▁": USER_DEFINED, "\n\n": 4}
    characters = sorted({c for word in WORDS for c in word})
    tokens = [*special, *(f"<0x{b:02X}>" for b in range(256)), *WORDS, *characters]
    types = [*special.values(), *[BYTE] * 256, *[NORMAL] * (len(WORDS) + len(characters))]
    plain = len(special) + 256
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [-1000.0] * plain + [-float(i) for i in range(len(tokens) - plain)],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
        **changes,
    }


def build(meta: dict[str, Any]) -> Tokenizer:
    made = read_tokenizer(meta, source="x.gguf", max_length=64)
    return Tokenizer.from_str(json.dumps(made.tokenizer))


def encode_slowly(text: str, meta: dict[str, Any]) -> list[int]:
    """Join the leftmost two neighbours whose piece scores best, until there are none; bytes for what is no piece."""
    tokens, types, scores = (meta[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type", "scores"))
    ids = {token: number for number, token in enumerate(tokens)}
    pieces = {token: score for token, kind, score in zip(tokens, types, scores, strict=True) if kind == NORMAL}
    whole = sorted((t for t, kind in zip(tokens, types, strict=True) if kind in (CONTROL, USER_DEFINED)), key=len)
    result: list[int] = []
    for part in re.split("(" + "|".join(map(re.escape, reversed(whole))) + ")", text.replace(" ", "▁")):
        if part in whole:
            result.append(ids[part])
            continue
        symbols = list(part)
        while True:
            joins = [(-pieces[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in pieces]
            if not joins:
                break
            at = min(joins)[1]
            symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
        for symbol in symbols:
            result += [ids[symbol]] if symbol in pieces else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return result


TEXTS = [
    "hello world",
    " hello",
    "  hello   abc",
    "aaaa aabc",
    "\n\nhello\n\n\n",
    "<bos>hello<eos>",
    "naïve 東京 🎉",
    "▁",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_follow_the_definition_and_come_back_as_text(text: str) -> None:
    meta = metadata()
    tokenizer = build(meta)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == encode_slowly(text, meta)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text.replace("▁", " ")


def test_random_texts_follow_the_definition() -> None:
    meta = metadata()
    tokenizer, rng = build(meta), random.Random(5)
    for _ in range(500):
        text = "".join(
            rng.choice(["h", "e", "l", "o", " ", "w", "r", "d", "a", "b", "c", "\n", "é"]) for _ in range(20)
        )
        assert tokenizer.encode(text, add_special_tokens=False).ids == encode_slowly(text, meta), repr(text)


def test_pieces_stream_the_bytes_of_the_text() -> None:
    meta = metadata()
    tokenizer = build(meta)
    made = read_tokenizer(meta, source="x.gguf", max_length=64)
    pieces = Pieces(tokenizer, made.tokenizer["decoder"], frozenset({0, 1, 2}))
    ids = tokenizer.encode("hello  wörld 🎉").ids
    assert ids[0] == 2 and pieces.join(ids) == "hello  wörld 🎉"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"add_space_prefix": True}, "tokenizer.ggml.add_space_prefix is on"),
        ({"precompiled_charsmap": [1, 2]}, "tokenizer.ggml.precompiled_charsmap is set"),
        ({"scores": [1.0]}, "tokenizer.ggml.scores has 1 entries for"),
        ({"token_type": [NORMAL] * len(metadata()["tokenizer.ggml.tokens"])}, "token <0x00> is not in the vocabulary"),
    ],
)
def test_what_would_tokenise_almost_right_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(WeightsError, match=re.escape(text)):
        build(metadata(**{f"tokenizer.ggml.{name}": value for name, value in changes.items()}))


def test_a_piece_as_long_as_a_book_is_named() -> None:
    """All ways to split it are tried, each of which copies it: a megabyte took minutes."""
    meta = metadata()
    tokens, types, scores = (list(meta[f"tokenizer.ggml.{name}"]) for name in ("tokens", "token_type", "scores"))
    more = {"tokens": [*tokens, "a" * 5000], "token_type": [*types, NORMAL], "scores": [*scores, 0.0]}
    with pytest.raises(WeightsError, match=f"token {len(tokens)} has 5000 characters; at most 4096 are allowed"):
        build(metadata(**{f"tokenizer.ggml.{name}": value for name, value in more.items()}))
