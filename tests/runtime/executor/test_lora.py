"""Rows of several adapters in one batch answer as models whose weights had them merged in; rows of none as without."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from lora_adapters import ATTENTION, MLP, save_adapter
from safetensors.torch import load_file, save_file

from isthmus_kernels import native
from isthmus_runtime.config import SchedulerConfig
from isthmus_runtime.engine.backend import EngineBackend
from isthmus_runtime.engine.local import LocalEngine
from isthmus_runtime.engine.loop import EngineLoop
from isthmus_runtime.engine.scheduler import Scheduler
from isthmus_runtime.engine.streams import Streams
from isthmus_runtime.errors import WeightsError
from isthmus_runtime.kv.pool import BlockPool
from isthmus_runtime.lora_config import LoraConfig
from isthmus_runtime.models.registry import read_model_spec
from isthmus_runtime.request import AdapterName, GenerateRequest, SamplingParams, TokenChunk

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

DEEPSEEK: dict[str, Any] = {
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2 with windows": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16}),
    "phi3": ("Phi3Config", {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}),
    "qwen3 moe": (
        "Qwen3MoeConfig",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "deepseek v3": ("DeepseekV3Config", DEEPSEEK),
    "deepseek v2, queries not narrowed": (
        "DeepseekV2Config",
        DEEPSEEK | {"q_lora_rank": None, "topk_method": "greedy", "norm_topk_prob": False, "attention_bias": True},
    ),
}
LATENT = ("self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.q_a_proj", "self_attn.q_proj")
"""Projections of latent attention that can have adapters, beside the one to the output."""


def build(name: str, folder: Path) -> Any:
    """A random model, saved to `folder`."""
    import transformers

    config, overrides = FAMILIES[name]
    torch.manual_seed(3)
    settings = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 76,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.4,
        "tie_word_embeddings": False,
        **overrides,
    }
    made = getattr(transformers, config)(**settings)
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()
    model.save_pretrained(folder)
    return model


def merged(model: Any, added: dict[str, torch.Tensor]) -> Any:
    """The model with an adapter's products added to its weights."""
    other = copy.deepcopy(model)
    weights = dict(other.named_parameters())
    with torch.no_grad():
        for name, delta in added.items():
            weights[name] += delta
    return other


def greedy(model: Any, prompt: tuple[int, ...], count: int) -> tuple[list[int], list[torch.Tensor]]:
    """Tokens, and the log-probabilities that each was chosen by."""
    tokens, logits = list(prompt), []
    with torch.no_grad():
        for _ in range(count):
            logits.append(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].float().log_softmax(-1))
            tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :], logits


def asking(name: str, prompt: tuple[int, ...], adapter: AdapterName | None, count: int = 8) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=count, temperature=0.0, logprobs=97)
    return GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, adapter=adapter)


def serve(
    served: Any,
    folders: dict[str, Path],
    rounds: list[list[tuple[str, tuple[int, ...], str]]],
    *,
    num_blocks: int | None = None,
    max_loras: int = 2,
) -> dict[str, list[TokenChunk]]:
    """What is answered to (id, prompt, name of an adapter or "") in rounds, each at once."""
    found: dict[str, list[TokenChunk]] = {}

    async def main() -> None:
        core = Scheduler(
            SchedulerConfig(max_batched_tokens=served.budget, max_num_seqs=served.max_rows),
            served.plan,
            BlockPool(num_blocks or served.plan.num_blocks, num_groups=len(served.plan.groups)),
            max_loras=max_loras,
        )
        streams = Streams(asyncio.get_running_loop())
        holder = served.loaded.adapters
        loop = EngineLoop(core, served.executor, streams.sink, adapters=holder)
        loop.start()
        backend = EngineBackend(LocalEngine(loop, streams.sink), streams, vocab_size=97)
        names: dict[str, AdapterName | None] = {"": None}
        for name, folder in folders.items():
            adapter = holder.read(str(folder))
            loop.add_adapter(name, adapter)
            names[name] = AdapterName(name, adapter.digest)

        async def run(key: str, prompt: tuple[int, ...], name: str) -> None:
            request = asking(key, prompt, names[name])
            found[key] = [chunk async for chunk in backend.generate(request)]

        try:
            for together in rounds:
                await asyncio.gather(*(run(*one) for one in together))
            loop.call(core.check)
            stats = core.stats()
            if num_blocks is not None:
                assert stats.preemptions > 0, "this was to show preemption"
        finally:
            loop.stop()

    asyncio.run(asyncio.wait_for(main(), 240))
    return found


def tokens_of(chunks: list[TokenChunk]) -> list[int]:
    assert chunks[-1].error is None, chunks[-1].error
    return [token for chunk in chunks for token in chunk.token_ids]


PROMPTS = [tuple((7 * i + 3 * n + i * i) % 97 for i in range(length)) for n, length in enumerate((5, 40, 23, 61, 11))]


@pytest.mark.slow
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_equal_to_merged_weights(name: str, captured: bool, tmp_path: Path, start_engine: Callable[..., Any]) -> None:
    model = build(name, tmp_path / "model")
    shapes = read_model_spec(tmp_path / "model").tensor_shapes()
    targets = {
        "phi3": ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"),
        "qwen3 moe": ATTENTION,
    }.get(name, ATTENTION + MLP)
    if name.startswith("deepseek"):
        shared = tuple(f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down"))
        targets = (*LATENT, "self_attn.o_proj", *MLP, *shared)
    folders = {key: tmp_path / key for key in ("one", "two", "three")}
    models = {
        "": model,
        "one": merged(model, save_adapter(folders["one"], shapes, seed=1, targets=targets)),
        "two": merged(model, save_adapter(folders["two"], shapes, seed=2, rank=8, alpha=4, targets=targets[:2])),
        "three": merged(
            model,
            save_adapter(folders["three"], shapes, seed=3, rank=1, targets=targets[1:], layers=[1], use_rslora=True),
        ),
    }
    served = start_engine(
        tmp_path / "model",
        block_size=8,
        budget=48,
        max_rows=6,
        lora=LoraConfig(max_loras=2, max_rank=8),
        device=FakeDevice((1, 2, 4, 8), (16, 48)) if captured else None,
    )
    # More adapters than slots, and more rows than a batch: they wait for each other. Prompts that come again hit the
    # prefix cache of their own adapter alone.
    rounds = [
        [(f"{key or 'none'} {n}", prompt, key) for n, prompt in enumerate(PROMPTS) for key in models],
        [(f"again {key or 'none'}", PROMPTS[3], key) for key in models],
    ]
    found = serve(served, folders, rounds)
    for together in rounds:
        for key, prompt, adapter in together:
            expected, logits = greedy(models[adapter], prompt, 8)
            assert tokens_of(found[key]) == expected, key
            told = [entry for chunk in found[key] for entry in chunk.logprobs]
            for entry, row in zip(told, logits, strict=True):
                assert max(abs(value - float(row[token])) for token, value in entry.top) < 5e-3, key
    assert {found[f"again {key or 'none'}"][0].cached_tokens for key in models} == {56}
    different = {tuple(tokens_of(found[f"{key or 'none'} 3"])) for key in models}
    assert len(different) == 4, "the adapters change too little to prove anything"


def test_through_preemption(tmp_path: Path, start_engine: Callable[..., Any]) -> None:
    model = build("llama", tmp_path / "model")
    shapes = read_model_spec(tmp_path / "model").tensor_shapes()
    folders = {key: tmp_path / key for key in ("one", "two", "three")}
    models = {
        key: merged(model, save_adapter(folder, shapes, seed=number))
        for number, (key, folder) in enumerate(folders.items())
    }
    served = start_engine(
        tmp_path / "model", block_size=4, num_blocks=25, max_model_len=80, budget=32, lora=LoraConfig(max_loras=2)
    )
    asked = [(f"{key} {n}", PROMPTS[n][:20], key) for n in (1, 2, 3) for key in models]
    found = serve(served, folders, [asked], num_blocks=25)
    for key, prompt, adapter in asked:
        assert tokens_of(found[key]) == greedy(models[adapter], prompt, 8)[0], key


@pytest.mark.skipif(not native.available(), reason="promised of the compiled kernels alone")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_neighbours_change_no_bit(dtype: str, tmp_path: Path, start_engine: Callable[..., Any]) -> None:
    build("llama", tmp_path / "model")
    shapes = read_model_spec(tmp_path / "model").tensor_shapes()
    folders = {key: tmp_path / key for key in ("one", "two")}
    for number, folder in enumerate(folders.values()):
        save_adapter(folder, shapes, seed=number)
    asked = [(f"{key or 'none'} {n}", prompt, key) for n, prompt in enumerate(PROMPTS) for key in ("", "one", "two")]
    lora = LoraConfig(max_loras=2, max_rank=8)
    alone = start_engine(tmp_path / "model", dtype=dtype, budget=256, max_rows=1, lora=lora)
    want = serve(alone, folders, [[one] for one in asked])
    together = start_engine(tmp_path / "model", dtype=dtype, budget=19, max_rows=8, lora=lora)
    got = serve(together, folders, [asked])
    plain = start_engine(tmp_path / "model", dtype=dtype, budget=64, max_rows=8)
    without = serve(plain, {}, [[one for one in asked if not one[2]]], max_loras=0)

    def told(chunks: list[TokenChunk]) -> list[Any]:
        return [entry for chunk in chunks for entry in chunk.logprobs]

    for key, _, adapter in asked:
        assert told(got[key]) == told(want[key]), key
        if not adapter:
            assert told(got[key]) == told(without[key]), key


@pytest.mark.parametrize(("dtype", "number"), [("float32", float("nan")), ("bfloat16", 3.4e38)])
@pytest.mark.parametrize("matrix", ["A", "B"])
def test_numbers_that_would_spread_are_refused(
    dtype: str, number: float, matrix: str, tmp_path: Path, start_engine: Callable[..., Any]
) -> None:
    """On a GPU a row of another adapter in the same tile is multiplied with 0 of these."""
    build("llama", tmp_path / "model")
    save_adapter(tmp_path / "bad", read_model_spec(tmp_path / "model").tensor_shapes(), seed=1, layers=(1,))
    path = tmp_path / "bad" / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith(f"q_proj.lora_{matrix}.weight"))
    tensors[name][0, 0] = number
    save_file(tensors, path)
    served = start_engine(tmp_path / "model", dtype=dtype, lora=LoraConfig(max_loras=1, max_rank=8))
    with pytest.raises(WeightsError, match=r"1\.self_attn\.q_proj has NaN or infinity in A, or in B times its scale 2"):
        served.loaded.adapters.read(str(tmp_path / "bad"))
