"""Greedy tokens equal transformers in float32, whatever the batch, the chunks, the blocks and the layout."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from tiny_models import DEEPSEEK, Tiny, build

from isthmus_kernels import native
from isthmus_runtime.config import KvConfig, SchedulerConfig
from isthmus_runtime.engine.backend import EngineBackend
from isthmus_runtime.engine.local import LocalEngine
from isthmus_runtime.engine.loop import EngineLoop
from isthmus_runtime.engine.scheduler import Scheduler
from isthmus_runtime.engine.streams import Streams
from isthmus_runtime.executor.device.base import Body, GraphMemory
from isthmus_runtime.executor.device.cpu import CpuDevice
from isthmus_runtime.executor.graphs import Graphs
from isthmus_runtime.executor.model_runner import TorchExecutor
from isthmus_runtime.kv.pool import BlockPool
from isthmus_runtime.request import GenerateRequest, SamplingParams, TokenChunk

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
TINY = {
    "gqa-tied": Tiny("LlamaConfig", {"tie_word_embeddings": True}),
    "mha-odd-heads-biases": Tiny(
        "LlamaConfig", {"head_dim": 32, "attention_bias": True, "mlp_bias": True}, heads=3, kv_heads=3, block_size=4
    ),
    "mqa-narrow-heads": Tiny("LlamaConfig", {"head_dim": 10}, heads=5, kv_heads=1, block_size=5, budget=7),
    "yarn-rope": Tiny(
        "LlamaConfig",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
        block_size=8,
    ),
    # Served up to the length that it was trained for; past it: tests/runtime/models/test_rope.py.
    "dynamic-rope": Tiny("LlamaConfig", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, block_size=8),
    "gqa3-llama3-rope": Tiny("LlamaConfig", {"rope_scaling": LLAMA3_ROPE}, heads=6, kv_heads=2, block_size=8),
    "linear-rope-layer-major": Tiny(
        "LlamaConfig", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}, layout="layer-major", block_size=1
    ),
    "mistral-window": Tiny("MistralConfig", {"sliding_window": 9}, heads=6, kv_heads=3, block_size=4),
    "qwen2-two-groups": Tiny(
        "Qwen2Config",
        {"sliding_window": 11, "use_sliding_window": True, "max_window_layers": 1},
        heads=4,
        kv_heads=1,
        block_size=4,
    ),
    "gemma3-two-ropes": Tiny(
        "Gemma3TextConfig",
        {
            "head_dim": 32,
            "num_hidden_layers": 7,
            "layer_types": None,
            "sliding_window": 11,
            "query_pre_attn_scalar": 50,
            "rope_theta": 5000.0,
            "rope_local_base_freq": 300.0,
            "tie_word_embeddings": True,
        },
        block_size=4,
    ),
    "gemma3-linear-rope-softcap": Tiny(
        "Gemma3TextConfig",
        {
            "head_dim": 24,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 24,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            "final_logit_softcapping": 5.0,
            "attention_bias": True,
        },
        heads=6,
        kv_heads=2,
        block_size=8,
    ),
    "gemma2-softcaps": Tiny(
        "Gemma2Config",
        {
            "head_dim": 32,
            "sliding_window": 9,
            "query_pre_attn_scalar": 40,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 30.0,
        },
        block_size=4,
    ),
    "gemma2-no-softcaps": Tiny(
        "Gemma2Config",
        {
            "head_dim": 16,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "sliding_window": 13,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
        },
        heads=6,
        kv_heads=3,
        block_size=8,
    ),
    "phi3-window": Tiny("Phi3Config", {"pad_token_id": 0, "sliding_window": 11}, heads=6, kv_heads=2, block_size=4),
    # Served up to the 256 tokens of the short factors; past them: test_long_contexts_of_longrope.
    "phi3-longrope-partial": Tiny(
        "Phi3Config",
        {
            "hidden_size": 128,
            "pad_token_id": 0,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0 + 0.1 * i for i in range(12)],
                "long_factor": [1.5 + 0.4 * i for i in range(12)],
            },
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 256,
            "max_position_embeddings": 1024,
        },
        block_size=8,
    ),
    "gpt-oss": Tiny(
        "GptOssConfig",
        {
            "head_dim": 32,
            "sliding_window": 9,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 40,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "truncate": False,
                "original_max_position_embeddings": 32,
            },
        },
        block_size=4,
    ),
    "deepseek-v2-lite": Tiny(
        "DeepseekV2Config",
        {
            **DEEPSEEK,
            "q_lora_rank": None,
            "topk_method": "greedy",
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": False,
        },
        kv_heads=4,
        block_size=4,
    ),
    "deepseek-v2-groups": Tiny(
        "DeepseekV2Config",
        {
            **DEEPSEEK,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.7,
            "attention_bias": True,
            "norm_topk_prob": False,
        },
        kv_heads=4,
        block_size=8,
    ),
    "deepseek-v3": Tiny("DeepseekV3Config", {**DEEPSEEK, "first_k_dense_replace": 1}, kv_heads=4, block_size=8),
    "deepseek-v3-yarn": Tiny(
        "DeepseekV3Config",
        {
            **DEEPSEEK,
            "first_k_dense_replace": 2,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "mscale": 0.8,
                "mscale_all_dim": 1.3,
            },
        },
        kv_heads=4,
        layout="layer-major",
    ),
    "qwen3-moe": Tiny(
        "Qwen3MoeConfig",
        {
            "head_dim": 24,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "moe_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
        block_size=8,
    ),
    "qwen3-moe-sparse-step": Tiny(
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 2},
    ),
    # Fewer layers than max_window_layers, which this family does not have.
    "qwen3-moe-window": Tiny(
        "Qwen3MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 28,
        },
        block_size=4,
    ),
    "qwen3-qk-norm": Tiny("Qwen3Config", {"head_dim": 24}, heads=5, kv_heads=5, block_size=32),
}


@torch.no_grad()
def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """Reference: the whole sequence again for every token, no cache."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_tiny_models_match_transformers(name: str, tmp_path: Path, start_engine: Callable[..., Any], job: Any) -> None:
    case = TINY[name]
    model = build(case, tmp_path)
    engine = start_engine(tmp_path, block_size=case.block_size, budget=case.budget, layout=case.layout, max_rows=5)
    rng = random.Random(name)
    prompts = [[rng.randrange(97) for _ in range(rng.choice([1, 2, 7, 16, 33, 50]))] for _ in range(9)]
    counts = [rng.randint(1, 14) for _ in prompts]
    got = engine.driver(seed=len(name)).run([job(p, n) for p, n in zip(prompts, counts, strict=True)])
    expected = [greedy(model, p, n) for p, n in zip(prompts, counts, strict=True)]
    assert got == expected
    assert len({token for tokens in expected for token in tokens}) > 8, "the model is too dull to prove anything"


@pytest.mark.parametrize("name", TINY)
def test_log_probabilities_match_transformers(
    name: str, tmp_path: Path, start_engine: Callable[..., Any], job: Any
) -> None:
    case = TINY[name]
    model = build(case, tmp_path)
    engine = start_engine(tmp_path, block_size=case.block_size, budget=7, layout=case.layout)
    prompt = [(7 * i) % 97 for i in range(30)]
    asked = job(prompt, 3, SamplingParams(max_tokens=1, temperature=0.0, logprobs=97))
    engine.driver(seed=1).run([asked])
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *asked.generated]])).logits[0, len(prompt) - 1 : -1]
    for entry, expected in zip(asked.logprobs, logits.log_softmax(-1), strict=True):
        found = torch.tensor([value for _, value in sorted(entry.top)])
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-4)


def test_long_contexts_of_longrope(tmp_path: Path, start_engine: Callable[..., Any], job: Any) -> None:
    """An engine that serves more than the short factors are for turns all keys by the long ones, as transformers does
    for the sequences that are longer."""
    model = build(TINY["phi3-longrope-partial"], tmp_path)
    engine = start_engine(tmp_path, block_size=8, max_model_len=400)
    prompts = [[(7 * i + i * i * k) % 97 for i in range(257 + k)] for k in range(3)]
    got = engine.driver(seed=2).run([job(p, 6) for p in prompts])
    assert got == [greedy(model, p, 6) for p in prompts]


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_bfloat16_is_as_near_to_float32_as_transformers_is(
    name: str, tmp_path: Path, start_engine: Callable[..., Any], job: Any
) -> None:
    """Both round where they must. Ours may be at most half as far again from the truth as transformers in bfloat16, on
    the mean over a prompt's worth of log-probabilities."""
    case = TINY[name]
    model = build(case, tmp_path, scale=0.25)
    engine = start_engine(tmp_path, block_size=case.block_size, budget=7, layout=case.layout, dtype="bfloat16")
    prompt = [(7 * i) % 97 for i in range(30)]
    asked = job(prompt, 6, SamplingParams(max_tokens=1, temperature=0.0, logprobs=97))
    engine.driver(seed=1).run([asked])
    found = torch.stack([torch.tensor([value for _, value in sorted(entry.top)]) for entry in asked.logprobs])
    tokens = torch.tensor([[*prompt, *asked.generated]])

    def log_probabilities(reference: Any) -> torch.Tensor:
        logits: torch.Tensor = reference(tokens).logits[0, len(prompt) - 1 : -1]
        return logits.float().log_softmax(-1)

    truth, theirs = log_probabilities(model), log_probabilities(model.bfloat16())
    allowed = 1.5 * (theirs - truth).abs().mean() + 0.01
    assert (found - truth).abs().mean() <= allowed


SCORED = tuple((5 * i + i * i) % 97 for i in range(150))


def serve_at_once(served: Any, requests: list[GenerateRequest]) -> list[list[TokenChunk]]:
    """The chunks of requests that run at once, after one whose prompt they share."""

    async def main() -> list[list[TokenChunk]]:
        core = Scheduler(
            SchedulerConfig(max_batched_tokens=served.budget, max_num_seqs=served.max_rows),
            served.plan,
            BlockPool(served.plan.num_blocks, num_groups=len(served.plan.groups)),
            layout_digest=served.executor.kv_region().layout_digest,
        )
        streams = Streams(asyncio.get_running_loop())
        loop = EngineLoop(core, served.executor, streams.sink)
        loop.start()
        backend = EngineBackend(LocalEngine(loop, streams.sink), streams, vocab_size=97)

        async def run(request: GenerateRequest) -> list[TokenChunk]:
            return [chunk async for chunk in backend.generate(request)]

        try:
            first = await run(requests[0])
            return [first, *await asyncio.gather(*map(run, requests[1:]))]
        finally:
            loop.stop()

    return asyncio.run(asyncio.wait_for(main(), 120))


def asking(name: str, prompt: tuple[int, ...], alternatives: int) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=3, temperature=0.0, logprobs=alternatives, prompt_logprobs=alternatives)
    return GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "name", ["gqa-tied", "qwen2-two-groups", "gemma3-linear-rope-softcap", "gpt-oss", "deepseek-v3"]
)
def test_scores_equal_transformers(name: str, late: bool, tmp_path: Path, start_engine: Callable[..., Any]) -> None:
    model = build(TINY[name], tmp_path)
    device = FakeDevice((1, 2, 4, 8), (4, 12)) if late else None
    served = start_engine(tmp_path, block_size=4, budget=90, num_blocks=900, device=device)
    requests = [
        asking("warm", SCORED, -1),
        asking("a", SCORED, 97),
        asking("b", SCORED[:41], 3),
        asking("c", SCORED[:1], 3),
    ]
    warm, full, few, one = serve_at_once(served, requests)
    assert not warm[0].prompt_logprobs and not one[0].prompt_logprobs
    assert full[0].cached_tokens == few[0].cached_tokens == 0
    assert [c.token_ids for c in full] == [c.token_ids for c in warm]
    with torch.no_grad():
        expected = model(torch.tensor([SCORED])).logits[0, :-1].float().log_softmax(-1)
    for entries, wanted in ((full[0].prompt_logprobs, 97), (few[0].prompt_logprobs, 3)):
        assert [entry.token_id for entry in entries] == list(SCORED[1 : len(entries) + 1])
        for entry, row in zip(entries, expected, strict=False):
            assert abs(entry.logprob - float(row[entry.token_id])) < 2e-3
            assert len(entry.top) == wanted
            assert [value for _, value in entry.top] == sorted((v for _, v in entry.top), reverse=True)
            for token, value in entry.top:
                assert abs(value - float(row[token])) < 2e-3
            assert 1 <= entry.rank <= 97 and (entry.rank > wanted or entry.top[entry.rank - 1][1] == entry.logprob)
    assert len(full[0].prompt_logprobs) == 149 and len(few[0].prompt_logprobs) == 40
    assert not any(chunk.prompt_logprobs for chunks in (full, few) for chunk in chunks[1:])


def slow(*names: str) -> list[Any]:
    """Cases for `make test`: one or two of their kind run while editing."""
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


# One of each family.
@pytest.mark.parametrize(
    "name",
    [
        *("gqa-tied", "gemma3-two-ropes", "deepseek-v3"),
        *slow("mistral-window", "qwen2-two-groups", "qwen3-qk-norm", "qwen3-moe", "gemma2-softcaps"),
        *slow("phi3-window", "gpt-oss", "deepseek-v2-lite"),
    ],
)
def test_prompts_from_the_prefix_cache_give_the_same_tokens(
    name: str, tmp_path: Path, start_engine: Callable[..., Any]
) -> None:
    model = build(TINY[name], tmp_path)
    served = start_engine(tmp_path, block_size=4)
    prompt = [(5 * i + i * i) % 97 for i in range(50)]

    async def main() -> list[tuple[list[int], int]]:
        core = Scheduler(
            SchedulerConfig(max_batched_tokens=served.budget, max_num_seqs=served.max_rows),
            served.plan,
            BlockPool(served.plan.num_blocks, num_groups=len(served.plan.groups)),
            layout_digest=served.executor.kv_region().layout_digest,
        )
        streams = Streams(asyncio.get_running_loop())
        loop = EngineLoop(core, served.executor, streams.sink)
        loop.start()
        backend = EngineBackend(LocalEngine(loop, streams.sink), streams, vocab_size=97)
        answers = []
        try:
            for number, tail in enumerate(([], [], [3, 4, 5])):
                request = GenerateRequest(
                    request_id=f"r{number}",
                    prompt_token_ids=(*prompt, *tail),
                    sampling=SamplingParams(max_tokens=9, temperature=0.0),
                )
                chunks = [chunk async for chunk in backend.generate(request)]
                answers.append(([t for chunk in chunks for t in chunk.token_ids], chunks[0].cached_tokens))
        finally:
            loop.stop()
        return answers

    answers = asyncio.run(asyncio.wait_for(main(), 60))
    assert answers[0] == (greedy(model, prompt, 9), 0)
    assert answers[1][0] == answers[0][0] and answers[1][1] >= 44
    assert answers[2][0] == greedy(model, [*prompt, 3, 4, 5], 9) and answers[2][1] >= 44


def test_steps_submitted_ahead_give_the_same_tokens(tmp_path: Path, start_engine: Callable[..., Any], job: Any) -> None:
    model = build(TINY["gqa-tied"], tmp_path)
    engine = start_engine(tmp_path, budget=20)
    rng = random.Random(3)
    prompts = [[rng.randrange(97) for _ in range(rng.randint(1, 40))] for _ in range(6)]
    got = engine.driver(seed=4, poison=False, ahead=True).run([job(p, 12) for p in prompts])
    assert got == [greedy(model, p, 12) for p in prompts]


class CountingCpu(CpuDevice):
    """Counts what is captured."""

    captured = 0
    failed = 0

    def capture(self, body: Body, memory: GraphMemory) -> Body | None:
        found = super().capture(body, memory)
        self.captured += found is not None
        self.failed += found is None
        return found


@pytest.mark.skipif(not native.available(), reason="the compiled library is not built")
@pytest.mark.parametrize("name", ["gqa-tied", *slow("qwen2-two-groups", "mqa-narrow-heads")])
def test_steps_with_prompts_are_recorded_once(
    name: str, tmp_path: Path, start_engine: Callable[..., Any], job: Any
) -> None:
    """Other rows, lengths and blocks, and as many tokens: the recorded step, with the same answers."""
    case = TINY[name]
    model = build(case, tmp_path)
    device = CountingCpu(2)
    engine = start_engine(tmp_path, block_size=case.block_size, budget=20, max_rows=7, device=device)
    rng = random.Random(name)
    prompts = [[rng.randrange(97) for _ in range(rng.randint(1, 30))] for _ in range(9)]
    driver = engine.driver(seed=5, poison=True)
    assert driver.run([job(p, 12) for p in prompts]) == [greedy(model, p, 12) for p in prompts]
    captured, steps = device.captured, driver.step
    # Layers of each number of tokens, cut short or not. What draws has operations of PyTorch in it.
    assert 7 < captured < steps
    others = [[rng.randrange(97) for _ in prompt] for prompt in prompts]
    assert driver.run([job(p, 12) for p in others]) == [greedy(model, p, 12) for p in others]
    assert device.captured - captured < (driver.step - steps) // 2


def test_the_sizes_met_last_are_kept() -> None:
    device = FakeDevice((), met_tokens=1000)
    graphs = Graphs(device, max_rows=8, max_tokens=1000, max_len=64)
    ran: list[int] = []
    for tokens in (*range(1, 257), 1, 257):
        assert graphs.padded_tokens(tokens) == tokens
        graphs.run("prompts", tokens, lambda tokens=tokens: ran.append(tokens))
    assert len(graphs) == device.graphs == 256 and device.captured == 257
    graphs.run("prompts", 1, lambda: ran.append(-1))
    graphs.run("prompts", 2, lambda: ran.append(-2))
    assert ran[-4:] == [1, 257, 1, -2]
    assert graphs.padded_tokens(1001) == 0


@pytest.mark.parametrize("name", ["gqa-tied", *slow("qwen2-two-groups", "mqa-narrow-heads")])
@pytest.mark.parametrize("ahead", [False, True])
def test_padded_captured_late_steps_give_the_same_tokens(
    name: str, ahead: bool, tmp_path: Path, start_engine: Callable[..., Any], job: Any
) -> None:
    """On a device that captures ahead, runs its work as late as it may, and leaves garbage in used staging."""
    case = TINY[name]
    model = build(case, tmp_path)
    device = FakeDevice((1, 2, 4, 8), (4, 12))
    engine = start_engine(tmp_path, block_size=case.block_size, budget=20, max_rows=7, device=device)
    captured, made = device.captured, device.allocations
    rng = random.Random(name)
    prompts = [[rng.randrange(97) for _ in range(rng.randint(1, 30))] for _ in range(9)]
    got = engine.driver(seed=5, poison=not ahead, ahead=ahead).run([job(p, 12) for p in prompts])
    assert got == [greedy(model, p, 12) for p in prompts]
    # Layers and draw of each size, and layers of steps with prompts.
    assert captured == 10 and device.captured == captured, "a graph was captured while steps ran"
    assert device.replayed > 20
    assert device.allocations == made, "a step allocated"


@pytest.mark.parametrize("ahead", [False, True])
def test_log_probabilities_allocate_nothing(
    ahead: bool, tmp_path: Path, start_engine: Callable[..., Any], job: Any
) -> None:
    """Every row asks for as many as the API has. On a GPU what a step brings back is in pinned memory, which the driver
    takes its time to make; here it comes as late as it may."""
    build(TINY["gqa-tied"], tmp_path)
    device = FakeDevice((1, 2, 4, 8), (4, 12))
    found = []
    for on in (None, device):
        engine = start_engine(tmp_path, budget=20, max_rows=7, device=on)
        made = device.allocations
        rng = random.Random(8)
        sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=20)
        jobs = [job([rng.randrange(97) for _ in range(rng.randint(1, 30))], 12, sampling) for _ in range(9)]
        engine.driver(seed=5, poison=not ahead, ahead=ahead).run(jobs)
        found.append([(entry.token_id, *entry.top) for one in jobs for entry in one.logprobs])
        assert device.allocations == made, "a step allocated"
    for (token, *top), (other, *others) in zip(*found, strict=True):
        assert token == other and len(top) == len(others) == 20
        assert [value for _, value in top] == pytest.approx([value for _, value in others], abs=1e-4)


def test_a_closed_engine_leaves_its_model_to_another(
    tmp_path: Path, start_engine: Callable[..., Any], job: Any
) -> None:
    """Graphs share memory, which is gone with the last of them: another engine's need memory of their own."""
    model = build(TINY["gqa-tied"], tmp_path)
    device = FakeDevice((1, 2, 4, 8), (4, 12))
    first = start_engine(tmp_path, budget=20, max_rows=7, device=device)
    captured = device.graphs
    first.executor.close()
    assert captured == device.captured and not device.graphs, "a closed engine keeps graphs"
    scheduler = SchedulerConfig(max_batched_tokens=20, max_num_seqs=7, max_model_len=256)
    executor = TorchExecutor(first.loaded, first.plan, scheduler, KvConfig(block_size=16))
    second = replace(first, executor=executor)
    assert device.graphs == captured
    assert second.driver(seed=5, poison=False).run([job([5, 6, 7], 12)]) == [greedy(model, [5, 6, 7], 12)]
    executor.close()


def test_longest_sequence_fills_every_position(tmp_path: Path, start_engine: Callable[..., Any], job: Any) -> None:
    model = build(TINY["gqa-tied"], tmp_path)
    engine = start_engine(tmp_path, max_model_len=48, block_size=16, num_blocks=4)
    prompt = list(range(40))
    assert engine.driver(seed=1).run([job(prompt, 8)]) == [greedy(model, prompt, 8)]


def test_sharded_checkpoint_gives_the_same_tokens(tmp_path: Path, start_engine: Callable[..., Any], job: Any) -> None:
    model = build(TINY["mha-odd-heads-biases"], tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    prompt = [5, 6, 7]
    engine = start_engine(tmp_path / "shards")
    assert engine.driver(seed=1).run([job(prompt, 6)]) == [greedy(model, prompt, 6)]
