"""Rebuilds `tokenizer.json` and `tokenizer_config.json` from a GGUF file's metadata: exactly what the file says.

Known are byte-level BPE (`tokenizer.ggml.model` = gpt2) with the pre-tokenizers named here, and SentencePiece's BPE
(`llama`) without a space put before a text; anything else is refused by name, because a guess would tokenise almost
right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..errors import WeightsError

# gguf's TokenType. A control token is special: skipped in output, matched before anything else.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
# Types that are ordinary entries: normal, unknown, unused, byte.
_PLAIN = (_NORMAL, _UNKNOWN, 5, _BYTE)

_LONGEST_PIECE = 4096
# What SentencePiece writes for a space.
_SPACE = "▁"

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vocabulary:
    """The file's tokens, by number."""

    source: str
    tokens: list[str]
    types: list[int]
    ids: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Method:
    """The parts of tokenizer.json that say how text becomes tokens and back."""

    normalizer: dict[str, Any] | None
    pre_tokenizer: dict[str, Any] | None
    post_processor: dict[str, Any] | None
    """Before the special tokens are added."""
    decoder: dict[str, Any]
    model: dict[str, Any]


def read_tokenizer(meta: Mapping[str, Any], *, source: str, max_length: int) -> Tokenizer:
    """Tokenizer files for a GGUF's metadata (field name to value). WeightsError names what is unknown or missing."""
    model = meta.get("tokenizer.ggml.model")
    if not isinstance(model, str) or model not in _METHODS:
        raise WeightsError(
            f"{source}: tokenizer.ggml.model {model!r} is not supported; known: gpt2 (byte-level BPE), llama "
            "(SentencePiece). Fetch the original safetensors model instead"
        )
    vocabulary = _vocabulary(meta, source)
    tokens, types = vocabulary.tokens, vocabulary.types
    method = _METHODS[model](meta, vocabulary)

    ids = {role: _token_id(meta, role, len(tokens), source) for role in ("bos", "eos", "eot", "padding", "unknown")}
    # A user-defined token is found in the text as it is normalised, if it is at all.
    found_late = method.normalizer is not None and model == "llama"
    added = [
        _added(number, tokens[number], kind, source, normalized=found_late and kind == _USER_DEFINED)
        for number, kind in enumerate(types)
        if kind not in _PLAIN
    ]
    add_bos = bool(meta.get("tokenizer.ggml.add_bos_token", False)) and ids["bos"] is not None
    add_eos = bool(meta.get("tokenizer.ggml.add_eos_token", False)) and ids["eos"] is not None
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": method.normalizer,
        "pre_tokenizer": method.pre_tokenizer,
        "post_processor": _post_processor(
            method.post_processor, tokens, ids["bos"] if add_bos else None, ids["eos"] if add_eos else None
        ),
        "decoder": method.decoder,
        "model": method.model,
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


def _vocabulary(meta: Mapping[str, Any], source: str) -> _Vocabulary:
    tokens = meta.get("tokenizer.ggml.tokens")
    if not tokens:
        raise WeightsError(f"{source}: tokenizer.ggml.tokens is missing")
    types = meta.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise WeightsError(f"{source}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    ids = {token: number for number, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise WeightsError(f"{source}: tokenizer.ggml.tokens repeats {len(tokens) - len(ids)} tokens")
    return _Vocabulary(source=source, tokens=tokens, types=types, ids=ids)


def _byte_level_bpe(meta: Mapping[str, Any], vocabulary: _Vocabulary) -> _Method:
    name = meta.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise WeightsError(
            f"{vocabulary.source}: tokenizer.ggml.pre {name!r} is not supported; known: {', '.join(PRE_TOKENIZERS)}. "
            "Fetch the original safetensors model instead"
        )
    pre = PRE_TOKENIZERS[name]
    merges = meta.get("tokenizer.ggml.merges")
    if merges is None:
        raise WeightsError(f"{vocabulary.source}: tokenizer.ggml.merges is missing")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pre.split is None}
    steps: list[dict[str, Any]] = [byte_level]
    if pre.digits:
        steps.insert(0, {"type": "Digits", "individual_digits": True})
    if pre.split is not None:
        steps.insert(0, {"type": "Split", "pattern": {"Regex": pre.split}, "behavior": "Isolated", "invert": False})
    return _Method(
        normalizer={"type": "NFC"} if pre.nfc else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": steps} if len(steps) > 1 else byte_level,
        post_processor=byte_level,
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        # A byte-level token holds no space, so the space in a merge always parts its two sides.
        model=_bpe(vocabulary, [list(merge.split(" ")) for merge in merges], ignore_merges=pre.ignore_merges),
    )


def _sentencepiece_bpe(meta: Mapping[str, Any], vocabulary: _Vocabulary) -> _Method:
    """SentencePiece joins, again and again, the two neighbours whose joined piece has the highest score; what is no
    piece becomes its bytes. A merge list says the same: of each way to split a piece in two, by falling score."""
    source, tokens, types, ids = vocabulary.source, vocabulary.tokens, vocabulary.types, vocabulary.ids
    if meta.get("tokenizer.ggml.add_space_prefix", True):
        raise WeightsError(
            f"{source}: tokenizer.ggml.add_space_prefix is on (a space in front of every text), which is not supported."
            " Fetch the original safetensors model instead"
        )
    if meta.get("tokenizer.ggml.precompiled_charsmap"):
        raise WeightsError(f"{source}: tokenizer.ggml.precompiled_charsmap is set, which is not supported")
    scores = meta.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise WeightsError(f"{source}: tokenizer.ggml.scores has {len(scores or ())} entries for {len(tokens)} tokens")
    missing = [name for name in (f"<0x{byte:02X}>" for byte in range(256)) if types[ids.get(name, 0)] != _BYTE]
    if missing:
        raise WeightsError(f"{source}: token {missing[0]} is not in the vocabulary as a byte; all 256 are needed")
    pieces = {token: number for token, number in ids.items() if types[number] == _NORMAL}
    longest = max(pieces, key=len, default="")
    if len(longest) > _LONGEST_PIECE:  # all ways to split it are tried
        raise WeightsError(
            f"{source}: token {pieces[longest]} has {len(longest)} characters; at most {_LONGEST_PIECE} are allowed"
        )
    splits = [
        (-scores[number], number, len(token) - cut)
        for token, number in pieces.items()
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]
    # Of several ways to one piece transformers' converter takes the one with the longer left side first.
    merges = [[tokens[number][:-back], tokens[number][-back:]] for _, number, back in sorted(splits)]
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    return _Method(
        normalizer={"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
        pre_tokenizer=None,
        post_processor=None,
        decoder={
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        model=_bpe(vocabulary, merges, byte_fallback=True, unknown=unknown),
    )


_METHODS: Mapping[str, Callable[[Mapping[str, Any], _Vocabulary], _Method]] = MappingProxyType(
    {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
)


def _bpe(
    vocabulary: _Vocabulary,
    merges: list[list[str]],
    *,
    ignore_merges: bool = False,
    byte_fallback: bool = False,
    unknown: str | None = None,
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": byte_fallback,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": vocabulary.ids,
        "merges": merges,
    }


def _token_id(meta: Mapping[str, Any], role: str, vocab_size: int, source: str) -> int | None:
    key = f"tokenizer.ggml.{role}_token_id"
    value = meta.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < vocab_size:
        raise WeightsError(f"{source}: {key} {value!r} is outside the vocabulary of {vocab_size} tokens")
    return value


def _added(number: int, token: str, kind: int, source: str, *, normalized: bool) -> dict[str, Any]:
    if kind not in (_CONTROL, _USER_DEFINED):
        raise WeightsError(f"{source}: token {number} {token!r} has the unknown type {kind}")
    return {
        "id": number,
        "content": token,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": normalized,
        "special": kind == _CONTROL,
    }


def _post_processor(
    first: dict[str, Any] | None, tokens: list[str], bos: int | None, eos: int | None
) -> dict[str, Any] | None:
    """`first`, then what `add_bos_token` and `add_eos_token` ask for."""
    if bos is None and eos is None:
        return first

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
    return template if first is None else {"type": "Sequence", "processors": [first, template]}
