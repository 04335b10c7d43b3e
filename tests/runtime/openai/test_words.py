"""Word by word tokenisation gives what the tokenizer gives, or is not used."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_bpe import byte_level_bpe
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from isthmus_runtime.openai import words
from isthmus_runtime.openai.words import Words, cuts_at_words

SPACES = ["a  b   c", "a \n  b\n 1 \n\n c", "x  \t y\t ", "  two  "] * 9
"""So that there are tokens of more than one space, and of spaces after lines, which a cut would break."""
CORPUS = ["the quick brown fox's den", "it isn't the others' word, they'll say 12 words", "a word a Word word_word"] * 9
CORPUS += SPACES
GPT2, LLAMA3, QWEN2 = sorted(words._LETTER_PATTERNS, key=len)[0], *sorted(words._LETTER_PATTERNS, key=len)[:0:-1]


def split(pattern):
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )


STEPS = {
    "byte-level": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]),
    "gpt2": split(GPT2),
    "llama3": split(LLAMA3),
    "qwen2": split(QWEN2),
}


def train(step, normalizer=None):
    made = byte_level_bpe(CORPUS, step=step, normalizer=normalizer)
    made.add_special_tokens([AddedToken("<|end|>", special=True)])
    return made


MADE = {name: train(step, normalizers.NFC() if name == "qwen2" else None) for name, step in STEPS.items()}


def of(tokenizer):
    return Words(lambda texts: [tokenizer.encode(t, add_special_tokens=False).ids for t in texts])


PARTS = ["a", "word", " word", " Word", "the", " the", " ", "  ", "'s", "'ll", "'", "\n", "\r\n", "\t", "é", "e\u0301"]
PARTS += ["日本", "7", " 12", "_", ".", "<|end|>", "İ", "ſ", "\u0301", "\u00a0", "Z"]


@pytest.mark.parametrize("name", STEPS)
@given(texts=st.lists(st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=12).map("".join), max_size=4))
def test_ids_are_the_tokenizers(name, texts):
    tokenizer = MADE[name]
    assert cuts_at_words(json.loads(tokenizer.to_str()))
    cut = of(tokenizer)
    for text in texts * 2:  # the second time from what is known
        assert cut.encode(text) == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("text", ["a  ", "1   = ", "\n 1", "\n ", "b\t ", " ", "  ", "a b  c ", "\n\n  a "])
def test_spaces_at_the_ends_are_the_tokenizers(name, text):
    cut = of(MADE[name])
    for _ in range(2):
        assert cut.encode(text) == MADE[name].encode(text, add_special_tokens=False).ids


def test_what_is_known_stays_bounded(monkeypatch):
    monkeypatch.setattr(words, "_WORDS", 4)
    cut = of(MADE["byte-level"])
    for i in range(20):
        text = f"word w{i * 'x'} the {'long' * 20}"
        assert cut.encode(text) == MADE["byte-level"].encode(text).ids
        assert len(cut._known) <= 4 and all(len(w) <= 32 for w in cut._known)


REFUSED = {
    "prefix space": {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
    "metaspace": {"pre_tokenizer": {"type": "Metaspace"}},
    "no pre-tokenizer": {"pre_tokenizer": None},
    "other pattern": {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"\s+"}, "behavior": "Isolated"}},
    "digits alone": {"pre_tokenizer": {"type": "Digits", "individual_digits": True}},
    "lower-casing": {"normalizer": {"type": "Lowercase"}},
    "unigram": {"model": {"type": "Unigram"}},
    "word suffix": {"model": {"type": "BPE", "end_of_word_suffix": "</w>"}},
    "token with a space": {"added_tokens": [{"content": "two words"}]},
    "token that takes spaces": {"added_tokens": [{"content": "<x>", "rstrip": True}]},
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_other_tokenizers_are_left_alone(change):
    raw = json.loads(MADE["byte-level"].to_str())
    assert cuts_at_words(raw)
    assert not cuts_at_words(copy.deepcopy(raw) | change)
