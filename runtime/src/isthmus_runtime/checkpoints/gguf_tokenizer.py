"""Rebuilds `tokenizer.json` and `tokenizer_config.json` from a GGUF file's metadata: exactly what the file says.

Only byte-level BPE (`tokenizer.ggml.model` = gpt2) is known, with the pre-tokenizers named here; anything else is
refused by name, because a guess would tokenise almost right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..errors import WeightsError

# gguf's TokenType. A control token is special: skipped in output, matched before anything else.
_CONTROL, _USER_DEFINED = 3, 4
# Types that are ordinary entries: normal, unknown, unused, byte.
_PLAIN = (1, 2, 5, 6)

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut before merging. `split`: a pattern in place of GPT-2's; `digits`: each digit stands alone."""

    split: str | None = None
    digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    """A word that is itself a token is taken whole, even if the merges do not lead to it."""


PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {
        "gpt-2": PreTokenizer(),
        "smollm": PreTokenizer(digits=True),
        "llama-bpe": PreTokenizer(split=_LLAMA3_SPLIT, ignore_merges=True),
        "qwen2": PreTokenizer(split=_QWEN2_SPLIT, nfc=True),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """The files of a tokenizer, as JSON values, and the token ids that the model's configuration repeats."""

    tokenizer: dict[str, Any]
    tokenizer_config: dict[str, Any]
    vocab_size: int
    bos: int | None
    eos: tuple[int, ...]
    """End of sequence, then end of turn if the file names another."""
    pad: int | None


def read_tokenizer(meta: Mapping[str, Any], *, source: str, max_length: int) -> Tokenizer:
    """Tokenizer files for a GGUF's metadata (field name to value). WeightsError names what is unknown or missing."""
    model = meta.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise WeightsError(
            f"{source}: tokenizer.ggml.model {model!r} is not supported; known: gpt2 (byte-level BPE). "
            "Fetch the original safetensors model instead"
        )
    name = meta.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise WeightsError(
            f"{source}: tokenizer.ggml.pre {name!r} is not supported; known: {', '.join(PRE_TOKENIZERS)}. "
            "Fetch the original safetensors model instead"
        )
    pre = PRE_TOKENIZERS[name]
    tokens, merges = meta.get("tokenizer.ggml.tokens"), meta.get("tokenizer.ggml.merges")
    if not tokens or merges is None:
        raise WeightsError(f"{source}: tokenizer.ggml.tokens or tokenizer.ggml.merges is missing")
    types = meta.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise WeightsError(f"{source}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    vocab = {token: number for number, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise WeightsError(f"{source}: tokenizer.ggml.tokens repeats {len(tokens) - len(vocab)} tokens")

    ids = {role: _token_id(meta, role, len(tokens), source) for role in ("bos", "eos", "eot", "padding", "unknown")}
    added = [_added(number, tokens[number], kind, source) for number, kind in enumerate(types) if kind not in _PLAIN]
    add_bos = bool(meta.get("tokenizer.ggml.add_bos_token", False)) and ids["bos"] is not None
    add_eos = bool(meta.get("tokenizer.ggml.add_eos_token", False)) and ids["eos"] is not None

    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pre.split is None}
    steps: list[dict[str, Any]] = [byte_level]
    if pre.digits:
        steps.insert(0, {"type": "Digits", "individual_digits": True})
    if pre.split is not None:
        steps.insert(0, {"type": "Split", "pattern": {"Regex": pre.split}, "behavior": "Isolated", "invert": False})
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps} if len(steps) > 1 else byte_level,
        "post_processor": _post_processor(
            byte_level, tokens, ids["bos"] if add_bos else None, ids["eos"] if add_eos else None
        ),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.ignore_merges,
            "vocab": vocab,
            # A byte-level token holds no space, so the space in a merge always parts its two sides.
            "merges": [list(merge.split(" ")) for merge in merges],
        },
    }

    def text(role: str) -> str | None:
        number = ids[role]
        return None if number is None else tokens[number]

    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "bos_token": text("bos"),
        "eos_token": text("eos"),
        "pad_token": text("padding"),
        "unk_token": text("unknown"),
        "added_tokens_decoder": {
            str(entry["id"]): {key: value for key, value in entry.items() if key != "id"} for entry in added
        },
    }
    if "tokenizer.chat_template" in meta:
        config["chat_template"] = meta["tokenizer.chat_template"]
    ends = tuple(dict.fromkeys(number for number in (ids["eos"], ids["eot"]) if number is not None))
    return Tokenizer(
        tokenizer=tokenizer,
        tokenizer_config=config,
        vocab_size=len(tokens),
        bos=ids["bos"],
        eos=ends,
        pad=ids["padding"],
    )


def _token_id(meta: Mapping[str, Any], role: str, vocab_size: int, source: str) -> int | None:
    key = f"tokenizer.ggml.{role}_token_id"
    value = meta.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < vocab_size:
        raise WeightsError(f"{source}: {key} {value!r} is outside the vocabulary of {vocab_size} tokens")
    return value


def _added(number: int, token: str, kind: int, source: str) -> dict[str, Any]:
    if kind not in (_CONTROL, _USER_DEFINED):
        raise WeightsError(f"{source}: token {number} {token!r} has the unknown type {kind}")
    return {
        "id": number,
        "content": token,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": kind == _CONTROL,
    }


def _post_processor(byte_level: dict[str, Any], tokens: list[str], bos: int | None, eos: int | None) -> dict[str, Any]:
    """Adds what `add_bos_token` and `add_eos_token` ask for; without them only offsets are trimmed."""
    if bos is None and eos is None:
        return byte_level

    def special(number: int | None, part: int) -> list[dict[str, Any]]:
        return [] if number is None else [{"SpecialToken": {"id": tokens[number], "type_id": part}}]

    def around(sequence: str, part: int) -> list[dict[str, Any]]:
        return [*special(bos, part), {"Sequence": {"id": sequence, "type_id": part}}, *special(eos, part)]

    template = {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {
            tokens[number]: {"id": tokens[number], "ids": [number], "tokens": [tokens[number]]}
            for number in (bos, eos)
            if number is not None
        },
    }
    return {"type": "Sequence", "processors": [byte_level, template]}
