"""The imported SmolLM2 tokenizer against ids and facts of the original."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from real_models import smollm2_135m_instruct
from tokenizers import Tokenizer


@pytest.fixture(scope="module")
def directory() -> Path:
    return smollm2_135m_instruct()


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def test_vocabulary_and_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == 49152
    for number, token in enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"]):
        assert tokenizer.token_to_id(token) == number
        assert tokenizer.encode(token).ids == [number]


# Each equals byte-level BPE run by its definition over the file's own vocabulary and merges.
GOLDEN: dict[str, list[int]] = {
    "Hello, world!": [19556, 28, 905, 17],
    "The capital of France is Paris.": [504, 3575, 282, 4649, 314, 7042, 30],
    "<|im_start|>user\nWhat's 2+2?<|im_end|>\n<|im_start|>assistant\n": [
        1,
        4093,
        198,
        1780,
        506,
        216,
        34,
        27,
        34,
        47,
        2,
        198,
        1,
        520,
        9531,
        198,
    ],
    "def f(x):\n    return x ** 2  # café\n": [
        1604,
        275,
        24,
        104,
        727,
        472,
        1003,
        1792,
        1903,
        216,
        34,
        216,
        907,
        37366,
        198,
    ],
    "In 2024, 3.14159 and 1,000,000": [
        788,
        216,
        34,
        32,
        34,
        36,
        28,
        216,
        35,
        30,
        33,
        36,
        33,
        37,
        41,
        284,
        216,
        33,
        28,
        32,
        32,
        32,
        28,
        32,
        32,
        32,
    ],
    "naïve café — 東京 🎉 ½": [
        3546,
        46494,
        37366,
        1841,
        17097,
        247,
        126,
        16736,
        122,
        15107,
        232,
        227,
        216,
        16738,
    ],
    "  two  spaces\t\ttabs\n\n": [216, 827, 216, 5600, 197, 197, 100, 7366, 1116],
}


@pytest.mark.parametrize("text", GOLDEN)
def test_golden_ids(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text).ids
    assert ids == GOLDEN[text]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_digits_stand_alone(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("20240131").ids) == 8


def test_nothing_is_added(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("hello").ids == tokenizer.encode("hello", add_special_tokens=False).ids


def test_template_and_ends(directory: Path) -> None:
    config = json.loads((directory / "tokenizer_config.json").read_text())
    assert config["add_bos_token"] is False
    assert "<|im_start|>assistant" in config["chat_template"]
    generation = json.loads((directory / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
