"""Real weights of three families, out of packages: tokens equal transformers' on the same weights, and make sense."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


def test_smollm2_matches_transformers(smollm2: Path, start_engine: Callable[..., Any], job: Any) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    chats = ["What is the capital of France?", "Write a haiku about rain.", "2+2=", "Explain KV caches. " * 20]
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True) for text in chats
    ]
    engine = start_engine(smollm2, budget=48, max_rows=3)
    got = engine.driver(seed=5).run([job(p, 24) for p in prompts])
    for prompt, tokens in zip(prompts, got, strict=True):
        with torch.no_grad():
            reference = model.generate(
                torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        assert tokens == reference[0, len(prompt) :].tolist()
    assert "Paris" in tokenizer.decode(got[0])


def test_gemma3_matches_transformers(gemma3: Path, start_engine: Callable[..., Any], job: Any) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(gemma3, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(gemma3 / "tokenizer.json"))
    texts = ["The capital of France is", "Once upon a time", "2 + 2 =", "One, two, three, " * 150]
    prompts = [tokenizer.encode(text).ids for text in texts]
    assert len(prompts[-1]) > 600, "the last prompt must be longer than the window"
    engine = start_engine(gemma3, budget=96, max_rows=3, max_model_len=1024)
    got = engine.driver(seed=5, preempt=0.0).run([job(p, 10) for p in prompts])
    for prompt, tokens in zip(prompts, got, strict=True):
        with torch.no_grad():
            reference = model.generate(
                torch.tensor([prompt]), max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        assert tokens == reference[0, len(prompt) :].tolist()
    assert "France" in tokenizer.decode(got[0])


def test_qwen25_coder_matches_transformers(qwen25_coder: Path, start_engine: Callable[..., Any], job: Any) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(qwen25_coder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(qwen25_coder / "tokenizer.json"))
    texts = ["def fibonacci(n):\n    ", "The capital of France is", "for i in range(10):\n    print(i)\n" * 12]
    prompts = [tokenizer.encode(text).ids for text in texts]
    engine = start_engine(qwen25_coder, budget=96, max_rows=3)
    got = engine.driver(seed=5, preempt=0.0).run([job(p, 16) for p in prompts])
    for prompt, tokens in zip(prompts, got, strict=True):
        with torch.no_grad():
            reference = model.generate(
                torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        assert tokens == reference[0, len(prompt) :].tolist()
    assert "if n <= 1" in tokenizer.decode(got[0]) or "if n ==" in tokenizer.decode(got[0]), tokenizer.decode(got[0])
    assert "Paris" in tokenizer.decode(got[1]), tokenizer.decode(got[1])
