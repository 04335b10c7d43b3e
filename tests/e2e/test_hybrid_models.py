"""Every family, prefill and decode apart: tokens equal transformers', in both modes (CI runs six, and two in Store).

Real router, engines and Mooncake; windows shorter than the prompts, so that most of a sliding group never moves.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from processes import MODEL, Stack, metric, stack
from tokenizers import Tokenizer

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
DEADLINE_S = 60
WINDOW = 21
CASES: dict[str, dict[str, Any]] = {
    "llama": {"config": "LlamaConfig", "sliding_window": None},
    "qwen3": {"config": "Qwen3Config", "head_dim": 16, "sliding_window": None},
    "qwen3-moe": {
        "config": "Qwen3MoeConfig",
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "sliding_window": None,
    },
    "gemma3": {
        "config": "Gemma3TextConfig",
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "pad_token_id": 0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "phi3": {"config": "Phi3Config", "pad_token_id": 0},
    "qwen2-hybrid": {
        "config": "Qwen2Config",
        "use_sliding_window": True,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "mistral-sliding": {"config": "MistralConfig"},
    "gemma2": {"config": "Gemma2Config", "head_dim": 16, "attn_logit_softcapping": 3.0, "pad_token_id": 0},
    "deepseek-latent": {
        "config": "DeepseekV3Config",
        "q_lora_rank": 32,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "sliding_window": None,
    },
    "gpt-oss": {
        "config": "GptOssConfig",
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    },
}


def build(case: dict[str, Any], directory: Path) -> Any:
    """A random model with SmolLM2's tokenizer; the transformers model."""
    import transformers

    torch.manual_seed(0)
    options = {key: value for key, value in case.items() if key != "config"}
    plain: dict[str, Any] = {"num_key_value_heads": 2, "sliding_window": WINDOW}
    config = getattr(transformers, case["config"])(
        vocab_size=Tokenizer.from_file(str(MODEL / "tokenizer.json")).get_vocab_size(),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=512,
        # Wide weights: a narrow random model repeats one token, which proves little.
        initializer_range=0.4,
        tie_word_embeddings=False,
        eos_token_id=2,
        **{**plain, **options},
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    model.save_pretrained(directory, safe_serialization=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, directory)
    return model


@torch.no_grad()
def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """Reference: the whole sequence again for every token, no cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False, logits_to_keep=1).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@dataclass(frozen=True)
class Service:
    """A running service and the model that says what it must answer."""

    stack: Stack
    model: Any
    tokenizer: Tokenizer


# CI runs one family of each way of keeping KV, in Store mode two: the others' blocks look like one of these, and
# tests/runtime/executor shows that every family computes what transformers does.
IN_CI = {
    "direct": ("qwen3-moe", "gemma3", "phi3", "qwen2-hybrid", "deepseek-latent", "gpt-oss"),
    "store": ("gemma3", "deepseek-latent"),
}


def chosen(family: str, mode: str) -> Any:
    marks = [] if family in IN_CI[mode] else [pytest.mark.long]
    return pytest.param((family, mode), id=f"{family}-{mode}", marks=marks)


@pytest.fixture(scope="module", params=[chosen(family, mode) for family in CASES for mode in ("direct", "store")])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    family, mode = request.param
    directory, tmp = tmp_path_factory.mktemp(family), tmp_path_factory.mktemp(mode)
    reference = build(CASES[family], directory)
    args = ("--dtype", "float32", "--block-size", "8", "--kv-memory", "4Mi", "--max-model-len", "320")
    args += ("--max-batched-tokens", "48", "--threads", "1", "--transfer-crc", "--transfer-on-failure", "fail")
    with stack(tmp, mode, executor="torch", model=directory, engine_args=args) as running:
        yield Service(running, reference, Tokenizer.from_file(str(directory / "tokenizer.json")))


async def complete(session: aiohttp.ClientSession, url: str, prompt: list[int], count: int) -> str:
    body = {"model": "test", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return str(answer["choices"][0]["text"])


def test_tokens_equal_transformers(service: Service) -> None:
    """Lengths around blocks and windows; some prompts begin alike, so that caches are hit and blocks are skipped."""
    lengths = (1, 7, 8, 9, WINDOW - 1, WINDOW, WINDOW + 1, 64, 100, 203)
    prompts = [[(i * 37 + number % 2 * 11) % 3000 + 50 for i in range(n)] for number, n in enumerate(lengths)]

    async def main() -> list[str]:
        timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            url = service.stack.url("router")
            first = await asyncio.gather(*(complete(session, url, p, 12) for p in prompts[:5]))
            return first + await asyncio.gather(*(complete(session, url, p, 12) for p in prompts[5:]))

    expected = [
        service.tokenizer.decode(greedy(service.model, prompt, 12), skip_special_tokens=True) for prompt in prompts
    ]
    assert asyncio.run(main()) == expected
    moved = metric(service.stack.url("decode0"), "isthmus_xfer_prompts_total", source="transferred")
    assert moved == len(prompts), "every prompt's KV must have come from the prefill engine"
