"""A byte-level tokenizer of 400 ids, as a model directory."""

from pathlib import Path

import pytest
from small_bpe import byte_level_bpe


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    tokenizer = byte_level_bpe(
        ['{"name": "a", "age": 12, "tags": ["x", "y"], "on": true, "off": false, "none": null}', "größer 日本語 🙂"],
        special=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    tokenizer.save(str(root / "tokenizer.json"))
    return root
