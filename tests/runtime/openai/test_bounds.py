"""What is said of a text before it is tokenised is sure: no bound above the truth, no cut inside a piece."""

from __future__ import annotations

import asyncio
import base64
import copy
import gc
import json
import random
import re
import threading
import weakref
from array import array
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_bpe import byte_level_bpe
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

from isthmus_runtime.errors import ConfigError, EngineFailed, Overloaded
from isthmus_runtime.openai import bounds, words
from isthmus_runtime.openai import expressions as expressions_module
from isthmus_runtime.openai import tokenizer as tokenizer_module
from isthmus_runtime.openai.bounds import Letters, cut, growth, may_cut, token_bound
from isthmus_runtime.openai.expressions import Runs, is_steady
from isthmus_runtime.openai.together import together
from isthmus_runtime.openai.tokenizer import Tokenizer as ModelTokenizer
from isthmus_runtime.openai.tokenizer import TooManyTokens
from isthmus_runtime.openai.words import cuts_at_words
from isthmus_runtime.request import SamplingOptions

CORPUS = [
    "the quick, brown fox's den.",
    "it isn't; they'll say: 12 words!",
    "a word. A Word? word_word",
    "日本、語。",
] * 9
PATTERNS = sorted(words._LETTER_PATTERNS)
KNOWN = [
    # DeepSeek V3
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    # GPT-OSS
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    # Kimi K2
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    # Mistral's since Nemo
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lt}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    # BLOOM
    r" ?[^(\s|[.,!?…。，、।۔،])]+",
]
"""Of other models, as their files have them."""
STEPS = {
    "byte-level": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]),
}
for number, pattern in enumerate(PATTERNS):
    STEPS[f"pattern {number}"] = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )


def train(step, normalizer=None):
    made = byte_level_bpe(CORPUS, step=step, normalizer=normalizer)
    made.add_special_tokens([AddedToken("<|end|>", special=True)])
    return made


WITH_BOS = {"bos_token": "<|end|>", "add_bos_token": True}
MADE = {(name, nfc): train(step, normalizers.NFC() if nfc else None) for name, step in STEPS.items() for nfc in (0, 1)}
PARTS = [
    "a",
    "word",
    " word",
    "the",
    " ",
    "  ",
    "'s",
    "'",
    "\n",
    "\t",
    "é",
    "e\u0301",
    "日",
    "7",
    " 12",
    "_",
    ".",
    ",",
    "。",
]
PARTS += [
    "<|end|>",
    "\u0301",
    "\u00a0",
    "\u1fef",
    "\u212b",
    "\u1fbe\u0308\u0301",
    "\u1112\u1161\u11ab",
    "²",
    "Ⅷ",
    "…",
    "?!",
]
TEXTS = st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=14).map("".join)


@pytest.mark.parametrize("name", MADE, ids=str)
@settings(max_examples=40)
@given(text=TEXTS, size=st.integers(1, 9))
def test_a_text_has_the_ids_of_its_parts_and_no_fewer_than_its_bound(name, text, size):
    tokenizer = MADE[name]
    raw = json.loads(tokenizer.to_str())
    assert cuts_at_words(raw) and may_cut(raw["added_tokens"])
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    parts = list(cut(text, size))
    assert "".join(parts) == text
    assert [i for part in parts for i in tokenizer.encode(part, add_special_tokens=False).ids] == ids
    bound = token_bound(raw)
    assert bound is not None and bound.least(text) <= len(ids)


def loaded(made, *, trusted=False, **config):
    own = Tokenizer.from_str(made.to_str())
    return tokenizer_module.Tokenizer(
        own,
        config=config,
        eos_token_ids=(),
        vocab_size=400,
        chat_template=None,
        defaults=SamplingOptions(),
        trusted=trusted,
    )


LOADED = {(*name, bool(bos)): loaded(made, **bos) for name, made in MADE.items() for bos in ({}, WITH_BOS)}


@pytest.mark.parametrize("name", LOADED, ids=str)
@settings(max_examples=30)
@given(text=TEXTS, special=st.booleans(), less=st.integers(0, 3))
def test_what_surely_fits_does(name, text, special, less):
    tokenizer = LOADED[name]
    count = len(tokenizer.encode(text) if special else tokenizer.encode_alone(text))
    assert not tokenizer.surely_fits(text, count - 1 - less, special=special)
    assert tokenizer.surely_fits(text, 100 * len(text) + 2, special=special) == bool(text)
    if text.isascii() and text:
        assert tokenizer.surely_fits(text, len(text) + 2, special=special)


def test_growth_is_reached():
    text = "\U0001d160" * 5  # three characters of four bytes each in NFC
    for nfc in (False, True):
        tokenizer = loaded(MADE["byte-level", int(nfc)])
        assert len(tokenizer.encode(text)) == 20 * (3 if nfc else 1)
        assert not tokenizer.surely_fits(text, 59 if nfc else 19, special=False)
        assert tokenizer.surely_fits(text, 60 if nfc else 20, special=False)


@given(text=st.text(max_size=40))
def test_bytes_that_the_vocabulary_lacks_do_not_count(text):
    made = Tokenizer(BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=60, show_progress=False))
    bound = token_bound(json.loads(made.to_str()))
    assert bound is not None and ord("\t") in bound.dropped and ord("a") not in bound.dropped
    assert bound.least(text) <= len(made.encode(text).ids)


def test_the_bound_is_reached_by_the_longest_token():
    raw = json.loads(MADE["byte-level", 0].to_str())
    bound = token_bound(raw)
    assert bound is not None and bound.longest == len("<|end|>")
    assert bound.least("<|end|>" * 7 + "x") == 8


def test_parts_are_short_where_there_is_a_place_to_cut():
    assert max(map(len, cut("word " * 1000, 64))) <= 64 + 5
    assert list(cut("a" * 1000, 64)) == ["a" * 1000]


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"type": "Unigram"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Metaspace"}, {"type": "ByteLevel"}]}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "bbbb"}},
        {"normalizer": {"type": "Prepend", "prepend": "▁"}},
        {"normalizer": {"type": "NFKC"}},
    ],
    ids=str,
)
def test_growth_is_not_known(change):
    raw = json.loads(MADE["byte-level", 0].to_str())
    assert growth(raw) == 1
    assert growth(raw | change) is None


SURE = {
    "bytes for unknown characters": {
        "model": {
            "type": "BPE",
            "byte_fallback": True,
            "vocab": {f"<0x{b:02X}>": b for b in range(256)} | {"▁the": 256},
        },
        "pre_tokenizer": None,
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
    },
}
UNSURE = {
    "unknown words": {"model": {"type": "WordLevel", "vocab": {"a": 0}}},
    "no bytes": {"pre_tokenizer": None},
    "dropped white space": {"pre_tokenizer": {"type": "WhitespaceSplit"}},
    "a split that removes": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"String": "x"}, "behavior": "Removed"},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
            ],
        }
    },
    "a token that takes white space": {"added_tokens": [{"content": "<x>", "lstrip": True}]},
    "a normalizer that drops": {"normalizer": {"type": "Replace", "pattern": {"String": "ab"}, "content": "a"}},
    "another normalizer": {"normalizer": {"type": "StripAccents"}},
}


@pytest.mark.parametrize("change", SURE.values(), ids=SURE)
def test_other_tokenizers_with_a_bound(change):
    bound = token_bound(copy.deepcopy(json.loads(MADE["byte-level", 0].to_str())) | change)
    assert bound is not None and bound.longest == len("<|end|>")


@pytest.mark.parametrize("change", UNSURE.values(), ids=UNSURE)
def test_where_a_token_may_be_of_any_length_there_is_no_bound(change):
    assert token_bound(copy.deepcopy(json.loads(MADE["byte-level", 0].to_str())) | change) is None


class Counting:
    """How much of a text was given to the tokenizer proper."""

    def __init__(self, inner) -> None:
        self.inner, self.characters = inner, 0

    def encode(self, text):
        self.characters += len(text)
        return self.inner.encode(text)


@pytest.mark.parametrize(
    "text", ["a" * 3_000_000, "some words, and more of them. " * 100_000], ids=["one word", "words"]
)
def test_a_huge_text_is_refused_before_most_of_it_is_tokenised(tokenizer, monkeypatch, text):
    counting = Counting(tokenizer._words)
    monkeypatch.setattr(tokenizer, "_words", counting)
    with pytest.raises(TooManyTokens, match="tokens or more"):
        tokenizer.encode(text, 255)
    assert counting.characters <= 2 * tokenizer_module._PART and tokenizer.long_texts._process is None


def test_exactly_as_many_tokens_as_asked_for_are_no_error(tokenizer):
    ids = tokenizer.encode("größer als gedacht, schöner als erhofft")
    assert tokenizer.encode("größer als gedacht, schöner als erhofft", len(ids)) == ids
    with pytest.raises(TooManyTokens, match=f"^{len(ids)} tokens$"):
        tokenizer.encode("größer als gedacht, schöner als erhofft", len(ids) - 1)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_the_end_of_a_text_is_the_end_of_all_of_it(tokenizer, monkeypatch, seed):
    """Its parts are tokenised from the last one on, and no more of them than are asked for."""
    r, long = random.Random(seed), 4 * tokenizer_module._PART
    text = "".join(r.choices(PARTS, k=2 * long // 3))
    assert len(text) > long
    whole = tokenizer.encode(text)
    counting = Counting(tokenizer._words)
    monkeypatch.setattr(tokenizer, "_words", counting)
    for count in (1, 200, r.randrange(1, len(whole)), len(whole), len(whole) + 5, 10**9):
        counting.characters = 0
        assert tokenizer.encode_end(text, count) == whole[-count:], f"seed {seed}"
        assert count > 200 or counting.characters < 2 * tokenizer_module._PART
    assert tokenizer.encode_end(text, 0) == tokenizer.encode_end("a", 0) == []


AROUND = {
    "before": ("<|end|> $A", ([0], [])),
    "both": ("<|end|> <|a|> $A <|end|>", ([0, 1], [0])),
    "as text is": ("a $A", None),
}
"""What a post-processor adds, as Llama 3 has one, and its ids; None: they may be the text's."""


def with_specials(name):
    """A tokenizer whose post-processor adds ids, and the library's own, that tells what is right."""
    inner = byte_level_bpe(CORPUS, special=["<|end|>", "<|a|>"])
    special = [(text, inner.token_to_id(text)) for text in ("<|end|>", "<|a|>", "a")]
    inner.post_processor = processors.TemplateProcessing(single=AROUND[name][0], special_tokens=special)
    size = inner.get_vocab_size()
    made = ModelTokenizer(
        inner, config={}, eos_token_ids=[0], vocab_size=size, chat_template=None, defaults=SamplingOptions()
    )
    return made, inner


@pytest.mark.parametrize("name", AROUND)
def test_a_long_text_with_special_tokens_is_tokenised_by_parts(name, monkeypatch):
    """Llama 3's tokenizers add the token that texts begin with: theirs are no slower, and as few are refused."""
    made, inner = with_specials(name)
    assert made._around == AROUND[name][1]
    monkeypatch.setattr(tokenizer_module, "_PART", 1000)
    text = "".join(random.Random(5).choices([part for part in PARTS if part != "<|end|>"], k=5000))
    whole = inner.encode(text).ids
    assert len(text) > 8000 and made.encode("") == inner.encode("").ids
    if made._around is None:
        assert made.encode(text) == whole and made.encode_end(text, 9) == whole[-9:]
        return
    counting = Counting(made._words)
    monkeypatch.setattr(made, "_words", counting)
    for count in (0, 1, 2, 200, len(whole) - 1, len(whole), len(whole) + 9):
        counting.characters = 0
        assert made.encode_end(text, count) == tokenizer_module.last(whole, count)
        assert counting.characters <= (2500 if count <= 200 else len(text))
    counting.characters = 0
    assert made.encode(text, len(whole)) == whole
    assert counting.characters == len(text)
    with pytest.raises(TooManyTokens):
        made.encode(text, len(whole) - 1)


@pytest.mark.parametrize("count", [1, 10**6])
def test_no_text_is_tokenised_twice_for_its_end(tokenizer, monkeypatch, count):
    counting = Counting(tokenizer._words)
    monkeypatch.setattr(tokenizer, "_words", counting)
    monkeypatch.setattr(tokenizer, "_around", ([1], []))
    text = "some words, and more of them. " * 5000
    ids = tokenizer.encode_end(text, count)
    assert counting.characters <= len(text)
    assert (ids[0] == 1) is (count > 1) and len(ids) <= count


@pytest.mark.parametrize(
    ("pattern", "steady"),
    [
        (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{M}]*[\p{Ll}\p{M}]+(?i:'s|'t)?|\p{N}{1,3}|\s*[\r\n]+|\s+(?!\S)|\s+", True),
        (r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*", True),
        (r" ?(\p{L}+)+\d| ?\p{L}+|.", False),
        (r"(?:a|a)*b", False),
        (r"(a?){20}b", False),
        (r"\w*\w*+\w*?b", False),
        (r" ?(?<x>\p{L}\g<x>|\p{L}\g<x>|)\d| ?\p{L}+|.", False),
        (r"\p{L}+\p{L}+\d|.", False),
        (r"\p{L}+\p{L}+(\d)|.", False),
        (r" ?\p{L}+\p{L}?\p{L}?\p{L}?\p{L}*\d|.", False),
        (r"a?" * 10 + "b+|.", False),
        (r" ?\p{L}{0,99}\p{L}{0,99}\p{L}{0,99}\d|.", False),
        (r"(?x)[ ]?(\p{L}+) +\d|.", False),
        (r" ?(?:\p{L}|\p{L})+(?=\d)| ?\p{L}+|.", False),
        (r" ?(?:\p{L}\p{L}|\p{L})+(?:\d)| ?\p{L}+|.", False),
        (r" ?(?:\p{L}|\p{L})*\d*|.", False),
        (r"(?:\p{L}|\p{L}){9}(?:\p{L}|\p{L}){9}\d|.", False),
        (r"(?:\p{L}|\p{L})" * 14 + r"\d|.", False),
        (r"\p{L}{0,9}\p{L}{0,9}\p{L}{0,9}\p{L}+(?=\d)|.", False),
        (r"\p{L}?\p{L}?\p{L}?\p{L}+(?=\d)|.", False),
        (r"\p{L}+(?=\d)|" * 5 + ".", False),
        (r"[b-z]|" * 1000 + ".", False),
        (r"\X+\d|\X+!|.", False),
        # One way, and hundreds of letters in it, after each letter of a run.
        (r"\p{L}+(?:" + r"\p{L}" * 300 + r"\d)|.", False),
        (r"\p{L}?" * 6 + r"\p{L}" * 500 + r"\d|.", False),
        (r"(?:abc)+(?=\d)|.", False),
        (r"(?:abc)+|.", True),
        (r"\p{L}+(?=\d)|" * 4 + ".", True),
        (
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{M}]*[\p{Ll}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
            r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{M}]+[\p{Ll}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
            r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            True,
        ),
        *((pattern, True) for pattern in (*PATTERNS, *KNOWN)),
        (r" {2,}", True),
        (r"\p{L}{2,}\p{L}+\d", False),
        (r"[a[b]]+[a[b]]+c", False),
        # A number of times that is repeated, as the library reads it.
        (r"\p{L}{1,3}+\d|.", False),
        (r"\p{L}{1,}+\d|.", False),
        (r"\p{L}{2}*\d|.", False),
        (r"(?:\p{L}{1,3}+|a)\d|.", False),
        (r"(?:\p{L}{1,3}+)\d|.", False),
        (r"\p{N}{1,3}+|\s++", True),
        # What gives nothing back, as tiktoken has it.
        (
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
            True,
        ),
    ],
)
def test_what_may_try_a_text_in_many_ways_is_told_by_its_form_and_not_loaded(pattern, steady):
    step = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    made = byte_level_bpe(["a b"], step=step)
    within = {"type": "Sequence", "pretokenizers": [json.loads(made.to_str())["pre_tokenizer"]]}
    assert is_steady({"pre_tokenizer": within}) is is_steady(json.loads(made.to_str())) is steady
    if steady:
        assert loaded(made).surely_fits("a b", 100, special=False)
        return
    with pytest.raises(ConfigError, match="may take very long over a short text"):
        loaded(made)


@pytest.mark.parametrize(
    ("normalizer", "steady", "with_runs"),
    [
        (normalizers.Sequence([normalizers.NFC()]), True, True),
        (normalizers.NFKC(), True, False),
        (normalizers.Replace(" ", "\u2581"), True, False),
        (normalizers.Replace("1", ""), True, False),
        (normalizers.Sequence([normalizers.Replace("a", "aa")] * 3), True, False),
        (normalizers.Sequence([normalizers.Replace("a", "aa")] * 40), False, False),
        (normalizers.Replace(Regex("a"), "a" * 1000), False, False),
        (normalizers.Prepend("a" * 1000), False, False),
    ],
)
def test_a_normalizer_makes_no_text_much_longer_and_hides_no_run(normalizer, steady, with_runs):
    """Forty times twice as long: a letter takes all memory."""
    for pattern, expected in ((r"\p{L}+", steady), (r"\p{L}+(?=\d)|.", with_runs)):
        step = pre_tokenizers.Split(Regex(pattern), "isolated")
        made = byte_level_bpe(["a b"], step=step)
        made.normalizer = normalizer
        assert is_steady(json.loads(made.to_str())) is expected


GROWING = "\U0001d160"
"""Three characters of NFC: no other grows more."""


@pytest.mark.parametrize(
    "normalizer",
    [
        None,
        normalizers.NFC(),
        normalizers.Sequence([normalizers.NFC(), normalizers.NFC()]),
        normalizers.NFKD(),
        normalizers.Lowercase(),
        normalizers.Replace("a", "bcd"),
        normalizers.Replace(Regex(r"\s+"), " - "),
        normalizers.Sequence([normalizers.Prepend("_"), normalizers.Replace(" ", "\u2581")]),
    ],
)
@given(text=st.text() | st.text("aA \n\ufdfa\u0958\u0130" + GROWING), size=st.integers(1, 9))
@settings(deadline=None)
def test_a_text_counts_as_what_it_is_once_it_is_normalised(normalizer, text, size):
    made = byte_level_bpe(["a b"], normalizer=normalizer)
    count = Letters(json.loads(made.to_str()), None if normalizer is None else normalizer.normalize_str)
    bare = text if normalizer is None else normalizer.normalize_str(text)
    # At the borders of the parts that are counted: a text of spaces that one expression takes together.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounds, "_COUNTED", size)
        assert count(text) >= max(len(text), len(bare)) - bare.startswith("_")
    assert len(text) > bounds._COUNTED or count(text) <= max(len(text), len(bare))


def test_what_a_normalizer_s_trie_leads_to_is_bounded():
    for text, steady in ((b"a" * 32, True), (b"a" * 33, False)):
        blob = (4).to_bytes(4, "little") + bytes(4) + b"b\0" + text + b"\0c"
        step = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(blob).decode()}
        assert is_steady({"normalizer": {"type": "Sequence", "normalizers": [step]}}) is steady


DEEPSEEK_V2 = [
    r"[\r\n]",
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳ]+",
    r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
    r"\s+$",
    r"[一-龥ࠀ-一가-퟿]+",
]


def with_expressions(*patterns):
    splits = [pre_tokenizers.Split(Regex(one), "isolated") for one in patterns]
    return byte_level_bpe(
        CORPUS, step=pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False, use_regex=False)])
    )


def test_letters_in_a_row_that_are_tried_again_from_each_on_are_not_tokenised_here(monkeypatch):
    """An hour for a million spaces before a digit, in a thread that nobody can end."""
    tokenizer = loaded(with_expressions(*DEEPSEEK_V2))
    here, apart = [], []
    real = tokenizer._tokenizer
    monkeypatch.setattr(
        tokenizer,
        "_tokenizer",
        SimpleNamespace(encode_batch_fast=lambda *a, **b: here.append(a) or [real.encode("a")]),
    )
    monkeypatch.setattr(tokenizer.long_texts, "encode", lambda text, **_: apart.append(text) or (1, array("i", [1])))
    encodes = (tokenizer.encode, tokenizer.encode_alone, lambda text: tokenizer.encode_end(text, 5))
    for text in (" " * 40_000 + "1", "a word " * 3_000 + " " * 30_000 + "7 b", "x" + "\u00a0 \t" * 8_000 + "1"):
        for encode in encodes:
            encode(text)
    assert not here and len(apart) == 9
    for text in (" " * 7_000 + "1", "a" * 50_000, "7" * 50_000, ("word " * 99 + " " * 300 + "1\n") * 60):
        for encode in encodes:
            encode(text)
    assert len(here) == 12 and len(apart) == 9


@pytest.mark.parametrize("seed", range(10))
def test_runs_are_found_wherever_they_are(seed, monkeypatch):
    print("seed", seed)
    r = random.Random(seed)
    monkeypatch.setattr(expressions_module, "_LOOKED_AT", 1 << 20)
    runs = Runs(json.loads(with_expressions(r"\s+$", r"(?i:x|y)[a-cA-C]+(?=1)|[a-cA-C]+\d|.").to_str()))
    parts = [(" \t\u00a0", "abc", "ABC", "xyz1")[r.randrange(4)] for _ in range(40)]
    text = "".join("".join(r.choices(part, k=r.choice([1, 30, 511, 512, 600, 3000]))) for part in parts)
    # Two ways to begin, and one.
    spent = sum(len(run) ** 2 for run in re.findall(r"\s{512,}", text))
    lengths = [len(run) for run in re.findall(r"[a-cA-C]{512,}", text)]
    spent += 3 * sum(length**2 for length in lengths)
    for most, slow in ((spent, False), (spent - 1, spent > 0)):
        monkeypatch.setattr(expressions_module, "_MOST_OF_RUNS", most)
        assert runs.are_slow(text) is slow


def test_an_owner_may_take_the_risk():
    digits = with_expressions(r"(?=(\d{3})+(?!\d))")
    with pytest.raises(ConfigError, match="--trust-tokenizer on"):
        loaded(digits)
    trusted = loaded(digits, trusted=True)
    assert len(trusted.encode("1234")) == 4 and trusted.digest


def test_the_expressions_of_deepseek_s_tokenizer_are_taken_together():
    splits = [{"type": "Split", "pattern": {"Regex": one}} for one in KNOWN[:3]]
    assert is_steady({"pre_tokenizer": {"type": "Sequence", "pretokenizers": splits}})


def test_ids_of_prompts_share_their_numbers(tokenizer, monkeypatch):
    """A number above 256 takes 28 bytes beside its place, and prompts of a request may have millions."""
    monkeypatch.setitem(tokenizer.__dict__, "_ints", tuple(range(1000)))
    one, other = (tokenizer.compact([int(text) for text in ("7", "300", "999")]) for _ in range(2))
    assert one == other == (7, 300, 999) and all(a is b for a, b in zip(one, other, strict=True))
    assert tokenizer.compact([1, 1000]) == (1, 1000)


def test_a_long_legal_text_lets_other_threads_run_throughout(tokenizer):
    """Words that are known need no call that gives the interpreter's lock away: the parts must.

    However long the text, a call that kept the lock would let this thread have a turn at its beginning and one at its
    end; on a fast machine the text must be long for more turns to fit.
    """
    sentence = "some words, and more of them. "
    tokenizer.encode(sentence)
    turns = 0
    for repeats in (60_000, 240_000, 960_000):
        turns = turns_beside(lambda n=repeats: tokenizer.encode(sentence * n))
        if turns >= 5:
            break
    assert turns >= 5


def turns_beside(work) -> int:
    """How often this thread ran, 20 times at most, while another did the work."""
    started = threading.Event()
    thread = threading.Thread(target=lambda: (started.set(), work()))
    thread.start()
    assert started.wait(30)
    turns = 0
    while thread.is_alive() and turns < 20:
        threading.Event().wait(0.001)
        turns += 1
    thread.join(60)
    return turns


@pytest.mark.parametrize(("kind", "told"), [(EngineFailed, EngineFailed), (ConnectionResetError, Overloaded)])
@pytest.mark.parametrize("alone", [False, True])
def test_works_that_fail_together_leave_nothing_behind(
    kind: type[Exception], told: type[Exception], alone: bool
) -> None:
    """No cycle that would keep what they held until the collector comes by, which is seldom in a router."""

    class Held:
        pass

    async def fails(held: Held, kind: type[Exception]) -> None:
        try:
            await asyncio.sleep(0)
            raise kind("no room")
        finally:
            held.seen = True  # type: ignore[attr-defined]

    async def waits() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        held = Held()
        left = weakref.ref(held)
        works = [fails(held, kind), waits(), *([] if alone else [fails(held, Overloaded)])]
        with pytest.raises(kind if alone else told, match="no room") as caught:
            await together(works)
        assert caught.value.__context__ is None
        del held, caught, works
        await asyncio.sleep(0)  # for what the loop has still to call
        assert left() is None

    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()
