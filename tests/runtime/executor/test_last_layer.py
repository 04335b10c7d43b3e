"""The last layer, computed for the tokens that somebody reads: the same bits as when it is computed for all."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from safetensors.torch import save_file
from torch import Tensor

from isthmus_kernels import dispatch, native
from isthmus_runtime.executor.device.cpu import CpuDevice
from isthmus_runtime.interfaces.steps import Chunk, RowStart, StepOutput, StepPlan
from isthmus_runtime.layers.batch import ForwardBatch, ReadBatch
from isthmus_runtime.models.decoder import Decoder, Workspace
from isthmus_runtime.models.registry import read_model_spec
from isthmus_runtime.models.shard import Shard
from isthmus_runtime.request import SamplingParams

compiled = pytest.mark.skipif(not native.available(), reason="rows are invariant with the compiled kernels alone")
BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True},
    # Queries end amid a panel of the packed weight.
    "llama-odd-heads": {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 3, "num_key_value_heads": 1},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 24},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
    "qwen3-experts": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
    },
    "phi3": {"architectures": ["Phi3ForCausalLM"], "pad_token_id": 0},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh"},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 16,
        "sliding_window_pattern": 2,
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
    },
    "deepseek": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
    },
}


class MultipliesFp8(CpuDevice):
    multiplies_fp8 = True


def model_dir(folder: Path, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(BASE | MODELS[name]))
    generator = torch.Generator().manual_seed(1)
    shapes = read_model_spec(folder).tensor_shapes()
    weights = {n: torch.randn(s, generator=generator) / s[-1] ** 0.5 for n, s in shapes.items()}
    save_file({n: w.bfloat16() for n, w in weights.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], list[tuple[int, int]]]:
    """Switch to a last layer that is computed for all tokens and then picked from; the list gets (read, of) of each
    step that was cut short."""
    forward, finish = Decoder.forward, Decoder.finish
    short: list[tuple[int, int]] = []
    tokens = 0

    def watched(self: Decoder, batch: ForwardBatch, kv: Any, scratch: Workspace, *, whole: bool = True) -> None:
        nonlocal tokens
        tokens = len(batch.token_ids)
        forward(self, batch, kv, scratch, whole=whole)

    def finished(self: Decoder, read: ReadBatch, kv: Any, scratch: Workspace) -> None:
        short.append((len(read.tokens), tokens))
        # Nothing but what it may read is left.
        poison(scratch, kept=(scratch.hidden, scratch.residual))
        finish(self, read, kv, scratch)

    def all_tokens(self: Decoder, batch: ForwardBatch, kv: Any, scratch: Workspace, *, whole: bool = True) -> None:
        forward(self, batch, kv, scratch)

    def picked(self: Decoder, read: ReadBatch, kv: Any, scratch: Workspace) -> None:
        for states in (scratch.residual, scratch.projected):
            states[: len(read.tokens)] = states[read.tokens]

    def switch(on: bool) -> list[tuple[int, int]]:
        monkeypatch.setattr(Decoder, "forward", all_tokens if on else watched)
        monkeypatch.setattr(Decoder, "finish", picked if on else finished)
        return short

    return switch


def poison(scratch: Workspace, kept: Sequence[Tensor]) -> None:
    for name in ("hidden", "residual", "projected", "qkv", "context", "gate_up", "inner"):
        if all(getattr(scratch, name) is not one for one in kept):
            getattr(scratch, name).fill_(float("nan"))


def answers(start_engine: Any, directory: Path, jobs: Callable[[], list[Any]], **options: Any) -> list[Any]:
    found = jobs()
    engine = start_engine(directory, max_rows=4, budget=48, max_model_len=256, **options)
    engine.driver(3).run(found)
    return [(one.generated, one.logprobs) for one in found]


@compiled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_every_family_answers_the_same(
    name: str, dtype: str, tmp_path: Path, start_engine: Any, job: Any, whole: Any
) -> None:
    """Prompts cut anywhere, beside rows that decode, preempted, in pools of NaN."""
    directory = model_dir(tmp_path / "model", name)

    def jobs() -> list[Any]:
        generator = torch.Generator().manual_seed(5)
        sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=4)
        lengths = [1, 3, 47, 65, 130, 17]
        return [job(torch.randint(0, 97, (n,), generator=generator).tolist(), 6, sampling) for n in lengths]

    whole(True)
    want = answers(start_engine, directory, jobs, dtype=dtype)
    short = whole(False)
    got = answers(start_engine, directory, jobs, dtype=dtype)
    assert short and min(of - read for read, of in short) > 0
    assert got == want


@compiled
def test_steps_of_captured_sizes_answer_the_same(tmp_path: Path, start_engine: Any, job: Any, whole: Any) -> None:
    """Steps with prompts that are padded to a captured size are cut short, too; what is read is not captured."""
    directory = model_dir(tmp_path / "model", "qwen3")

    def jobs() -> list[Any]:
        sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=2)
        return [job([(7 * n + i) % 97 for i in range(n)], 5, sampling) for n in (2, 11, 40, 90)]

    whole(True)
    want = answers(start_engine, directory, jobs)
    short = whole(False)
    device = FakeDevice((1, 2, 4, 8), (8, 16, 32))
    assert answers(start_engine, directory, jobs, device=device) == want
    assert device.replayed and {of for _, of in short} & {8, 16, 32}


@compiled
def test_8_bit_weights_answer_the_same(tmp_path: Path, start_engine: Any, job: Any, whole: Any) -> None:
    directory = model_dir(tmp_path / "model", "qwen3")

    def jobs() -> list[Any]:
        sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=2)
        return [job([(7 * n + i) % 97 for i in range(n)], 5, sampling) for n in (2, 40, 90)]

    def run() -> list[Any]:
        device = MultipliesFp8(threads=2)
        return answers(start_engine, directory, jobs, dtype="bfloat16", quantization="fp8", device=device)

    whole(True)
    want = run()
    assert whole(False) == []
    got = run()
    # Their products are PyTorch's on a CPU.
    for (tokens, told), (other, known) in zip(got, want, strict=True):
        assert tokens[0] == other[0]
        assert told[0].logprob == pytest.approx(known[0].logprob, abs=5e-2)


@compiled
def test_drafts_scores_and_prefix_hits_in_one_step(tmp_path: Path, start_engine: Any, whole: Any) -> None:
    """A step with a prompt behind a prefix hit, one that is scored, one amid its prompt, and a row that verifies
    drafts."""
    directory = model_dir(tmp_path / "model", "llama")
    sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=2)

    def run() -> list[StepOutput]:
        executor = start_engine(directory, max_rows=4, budget=128).executor
        prompt = [(5 * i + 1) % 97 for i in range(70)]
        shared, own, other, third = tuple(range(1, 6)), tuple(range(6, 11)), tuple(range(11, 16)), tuple(range(16, 21))

        def start(row: int, ids: tuple[int, ...], count: int, wanted: int = -1) -> RowStart:
            return RowStart(row, str(row), prompt[:count], count, (ids,), sampling, prompt_logprobs=wanted)

        plans = [
            StepPlan(0, (start(0, shared, 70),), (), (Chunk(0, 0, 70, 1),), 70),
            StepPlan(
                1,
                # Row 1 has four blocks of row 0's prompt.
                (start(1, (*shared[:4], own[0]), 70), start(2, other, 20, wanted=2), start(3, third, 60)),
                (),
                (Chunk(0, 70, 3, 3, (4, 9)), Chunk(1, 64, 6, 1), Chunk(2, 0, 20, 1), Chunk(3, 0, 40, 0)),
                69,
            ),
            StepPlan(2, (), (), (Chunk(3, 40, 20, 1), Chunk(1, 70, 1, 1)), 21),
        ]
        return [executor.submit(step).result(60) for step in plans]

    whole(True)
    want = run()
    short = whole(False)
    assert run() == want
    # 3 draws, 1, all 20 that are scored, none.
    assert short[-3:] == [(1, 70), (24, 69), (2, 21)]
    assert len(want[1].scores[0].logprobs) == 19


@pytest.mark.parametrize("draws", [0, 1])
def test_the_end_of_a_step_is_that_of_every_rank(draws: int, tmp_path: Path, start_engine: Any) -> None:
    """When ranks meet for the last time in a step, all of its keys and values are written: those of the others are sent
    when the first rank's own step has ended."""
    seen: list[bool] = []
    pools: list[Any] = []  # the steps of a start have none to look at

    class Ranks:
        """Of one."""

        parts = False

        def sum(self, x: Tensor) -> None:
            del x
            seen.extend(not bool(pool.layers[-1].pages[[1, 2]].isnan().any()) for pool in pools)

        def sum_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
            self.sum(x)
            dispatch.add_rms_norm(x, residual, weight, eps, out=out)

        def gather(self, part: Tensor) -> Tensor:
            self.sum(part)
            return part[None]

    engine = start_engine(model_dir(tmp_path / "model", "llama"), max_rows=2, budget=64, shard=Shard(0, 1, Ranks()))
    engine.executor.kv_cache.poison()
    pools.append(engine.executor.kv_cache)
    start = RowStart(0, "0", [5] * 40, 40, ((1, 2, 3),), SamplingParams(max_tokens=1, temperature=0.0))
    chunk = Chunk(0, 0, 40 if draws else 32, draws)
    engine.executor.submit(StepPlan(0, (start,), (), (chunk,), chunk.num_tokens)).result(60)
    assert seen[-1] and not seen[0], seen
