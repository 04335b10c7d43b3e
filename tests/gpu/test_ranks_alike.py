"""Two ranks on two cards, `--deterministic on`: a request has the same bits alone, by the prefix cache, in a batch."""

from __future__ import annotations

import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Process, free_port
from safetensors.torch import save_file
from small_bpe import byte_level_bpe

from isthmus_runtime.checkpoints.random import RandomTensors
from isthmus_runtime.models.registry import read_model_spec

DEVICE, DEADLINE_S = "cuda", 100.0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = byte_level_bpe(["no more than its bytes"])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": made.get_vocab_size()}))
    shapes, device = read_model_spec(tmp_path).tensor_shapes(), torch.device(DEVICE)
    source = RandomTensors(shapes, seed=3, device=device, dtype=torch.bfloat16)
    save_file({name: source.take(name).cpu() for name in shapes}, tmp_path / "model.safetensors")
    return tmp_path


def test_alone_by_the_cache_and_among_others(folder: Path) -> None:
    port = free_port()
    argv = [sys.executable, "-m", "isthmus_runtime", "serve", "--role", "unified", "--port", str(port)]
    argv += ["--model", str(folder), "--served-model-name", "m", "--device", DEVICE, "--kv-memory", "1Gi"]
    argv += ["--tensor-parallel-size", "2", "--deterministic", "on", "--max-model-len", "1024", "--dtype", "bfloat16"]
    engine = Process("alike", argv, folder / "engine.log").start()

    def ask(prompt: list[int]) -> Any:
        body = {"model": "m", "prompt": prompt, "max_tokens": 24, "ignore_eos": True, "temperature": 0, "logprobs": 5}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode())
        request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return json.load(answer)["choices"][0]["logprobs"]

    prompts = [[(7 * i * i + 3 * i + length) % 250 for i in range(length)] for length in (23, 70, 203, 517)]
    others = [[(11 * i + 5 * j) % 250 for j in range(20 + 17 * i)] for i in range(24)]
    try:
        engine.wait_http(f"http://127.0.0.1:{port}/ready")
        whole = [ask(prompt) for prompt in prompts]
        cached = [ask(prompt) for prompt in prompts]
        with ThreadPoolExecutor(len(prompts) + len(others)) as pool:
            *among, last = pool.map(ask, [*prompts, *others])
        alone = ask(others[-1])
    finally:
        engine.stop()
    assert cached == whole
    assert among[: len(prompts)] == whole
    assert last == alone
