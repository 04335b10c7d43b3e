"""Embeddings equal transformers' last hidden states, pooled as the model's files say, whatever ran beside them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from embedding_model import write_pooling
from fake_device import FakeDevice

from isthmus_runtime.config import SchedulerConfig
from isthmus_runtime.engine.backend import EngineBackend
from isthmus_runtime.engine.loop import EngineLoop
from isthmus_runtime.engine.scheduler import Scheduler
from isthmus_runtime.engine.streams import Streams
from isthmus_runtime.errors import InvalidRequest
from isthmus_runtime.kv.pool import BlockPool
from isthmus_runtime.request import GenerateRequest, PoolingParams, SamplingParams, TokenChunk

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {"head_dim": 24}),
    "qwen2-two-groups": ("Qwen2Config", {"sliding_window": 11, "use_sliding_window": True, "max_window_layers": 1}),
    "llama": ("LlamaConfig", {}),
    "mistral-window": ("MistralConfig", {"sliding_window": 9}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 24, "sliding_window": 7, "query_pre_attn_scalar": 24}),
}
MODES = {"last": "pooling_mode_lasttoken", "mean": "pooling_mode_mean_tokens", "first": "pooling_mode_cls_token"}
HIDDEN = 48


def build(name: str, directory: Path, pooling: str, *, normalize: bool = True, whole: bool = False) -> Any:
    """Save a random model as sentence-transformers does, without its head unless `whole`; the transformers model."""
    import transformers

    config, options = FAMILIES[name]
    torch.manual_seed(0)
    made = getattr(transformers, config)(
        vocab_size=97,
        hidden_size=HIDDEN,
        intermediate_size=52,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=False,
        **options,
    )
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager").float().eval()
    (model if whole else model.model).save_pretrained(directory, safe_serialization=True)
    on = {mode: kind == pooling for kind, mode in MODES.items()}
    write_pooling(directory, {"word_embedding_dimension": HIDDEN, **on}, normalize=normalize)
    return model


@torch.no_grad()
def expected(model: Any, prompt: tuple[int, ...], pooling: str, dimensions: int, normalize: bool) -> torch.Tensor:
    states = model.model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0].double()
    vector = {"last": states[-1], "mean": states.mean(0), "first": states[0]}[pooling][: dimensions or None]
    return vector / vector.norm() if normalize else vector


def serve(
    served: Any, requests: list[GenerateRequest], *, at_once: bool, caching: bool = True, blocks: int = 0
) -> list[list[TokenChunk]]:
    """The chunks of the requests, which run one after another or all at once."""

    async def main() -> list[list[TokenChunk]]:
        core = Scheduler(
            SchedulerConfig(max_batched_tokens=served.budget, max_num_seqs=served.max_rows),
            served.plan,
            BlockPool(blocks or served.plan.num_blocks, num_groups=len(served.plan.groups), prefix_caching=caching),
        )
        streams = Streams(asyncio.get_running_loop())
        loop = EngineLoop(core, served.executor, streams.sink)
        loop.start()
        backend = EngineBackend(loop, streams, vocab_size=97, task=served.loaded.task)

        async def run(request: GenerateRequest) -> list[TokenChunk]:
            return [chunk async for chunk in backend.generate(request)]

        try:
            if at_once:
                return list(await asyncio.gather(*map(run, requests)))
            return [await run(request) for request in requests]
        finally:
            loop.stop()

    return asyncio.run(asyncio.wait_for(main(), 120))


def asking(number: int, prompt: tuple[int, ...], dimensions: int = 0) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"r{number}",
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=1),
        pooling=PoolingParams(dimensions=dimensions),
    )


def vector(chunks: list[TokenChunk]) -> torch.Tensor:
    (chunk,) = chunks
    assert chunk.finish_reason == "stop" and not chunk.token_ids
    return torch.from_numpy(np.frombuffer(chunk.vector, "<f4").astype(np.float64))


def some_prompts(seed: str) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(97) for _ in range(n)) for n in (1, 2, 7, 16, 33, 50, 120)]


@pytest.mark.slow
@pytest.mark.parametrize("pooling", MODES)
@pytest.mark.parametrize("name", FAMILIES)
def test_vectors_equal_transformers(name: str, pooling: str, tmp_path: Path, start_engine: Callable[..., Any]) -> None:
    model = build(name, tmp_path, pooling, whole=name in {"llama", "gemma3"})
    served = start_engine(tmp_path, block_size=4, budget=23, max_rows=5)
    assert served.loaded.task.kind == "embed" and served.loaded.task.dimensions == HIDDEN
    prompts = some_prompts(name)
    requests = [asking(i, prompt, 16 if i % 2 else 0) for i, prompt in enumerate(prompts)]
    for chunks, request in zip(serve(served, requests, at_once=True, caching=False), requests, strict=True):
        assert request.pooling is not None
        wanted = expected(model, request.prompt_token_ids, pooling, request.pooling.dimensions, True)
        torch.testing.assert_close(vector(chunks), wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("pooling", MODES)
def test_bits_do_not_depend_on_the_batch_the_chunks_or_hits(
    pooling: str, tmp_path: Path, start_engine: Callable[..., Any]
) -> None:
    build("qwen3", tmp_path, pooling)
    prompts = some_prompts(pooling)
    prompts += [(*prompts[-1][:100], 1, 2), prompts[-1]]
    requests = [asking(i, prompt) for i, prompt in enumerate(prompts)]
    served = start_engine(tmp_path, block_size=4, budget=200, max_rows=5)
    alone = [chunks[0].vector for chunks in serve(served, requests, at_once=False, caching=False)]
    hits = pooling == "last"  # `serve` turns them off for the others
    for budget in (9, 31):
        served = start_engine(tmp_path, block_size=4, budget=budget, max_rows=5)
        together = serve(served, requests, at_once=True, caching=False)
        again = serve(served, requests, at_once=False, caching=hits)
        assert [chunks[0].vector for chunks in together] == alone
        assert [chunks[0].vector for chunks in again] == alone
        assert (again[-1][0].cached_tokens > 100) is hits


def test_preempted_prompts_have_the_same_vectors(tmp_path: Path, start_engine: Callable[..., Any]) -> None:
    """A pool that a few of them fill."""
    model = build("qwen3", tmp_path, "mean")
    served = start_engine(tmp_path, block_size=4, budget=11, max_rows=5, max_model_len=64, num_blocks=21)
    requests = [asking(i, tuple((i + 3 * k) % 97 for k in range(20 + i))) for i in range(9)]
    for chunks, request in zip(serve(served, requests, at_once=True, caching=False), requests, strict=True):
        wanted = expected(model, request.prompt_token_ids, "mean", 0, True)
        torch.testing.assert_close(vector(chunks), wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("pooling", MODES)
def test_on_a_device_that_captures_and_is_late(pooling: str, tmp_path: Path, start_engine: Callable[..., Any]) -> None:
    model = build("qwen3", tmp_path, pooling)
    served = start_engine(tmp_path, block_size=4, budget=23, max_rows=7, device=FakeDevice((1, 2, 4, 8), (4, 12)))
    requests = [asking(i, prompt) for i, prompt in enumerate(some_prompts("late"))]
    for chunks, request in zip(serve(served, requests, at_once=True, caching=False), requests, strict=True):
        wanted = expected(model, request.prompt_token_ids, pooling, 0, True)
        torch.testing.assert_close(vector(chunks), wanted, atol=2e-5, rtol=1e-4)


def test_a_model_without_a_normalize_module_gives_its_states(tmp_path: Path, start_engine: Callable[..., Any]) -> None:
    model = build("qwen3", tmp_path, "mean", normalize=False)
    served = start_engine(tmp_path, block_size=4)
    prompt = some_prompts("plain")[4]
    (chunks,) = serve(served, [asking(0, prompt)], at_once=True, caching=False)
    torch.testing.assert_close(vector(chunks), expected(model, prompt, "mean", 0, False), atol=2e-4, rtol=1e-4)
    assert vector(chunks).norm() > 2


def test_an_embedding_engine_generates_nothing_and_a_generating_one_embeds_nothing(
    tmp_path: Path, start_engine: Callable[..., Any]
) -> None:
    build("qwen3", tmp_path, "last", whole=True)
    served = start_engine(tmp_path, block_size=4)
    plain = GenerateRequest(request_id="g", prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=2))
    with pytest.raises(InvalidRequest, match="--task embed and has no tokens to give"):
        serve(served, [plain], at_once=False)
    with pytest.raises(InvalidRequest, match="dimensions: 49, but the model's vectors have 48"):
        serve(served, [asking(1, (1, 2), 49)], at_once=False)
    (tmp_path / "modules.json").unlink()
    with pytest.raises(InvalidRequest, match="--task generate and has no embeddings to give"):
        serve(start_engine(tmp_path, block_size=4), [asking(1, (1, 2))], at_once=False)
