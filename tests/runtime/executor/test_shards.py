"""Tensor parallelism: ranks with a part of the weights each give what one rank with all of them gives.

The ranks of these tests are executors of one process that meet in memory; tests/e2e/test_tensor_parallel.py has
processes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from lora_adapters import ATTENTION, MLP, save_adapter
from safetensors.torch import load_file, save_file
from torch import Tensor

from isthmus_kernels import dispatch
from isthmus_runtime.config import KvConfig, ModelConfig, SchedulerConfig
from isthmus_runtime.errors import ConfigError
from isthmus_runtime.executor.loading import LoadedModel, load
from isthmus_runtime.executor.model_runner import TorchExecutor
from isthmus_runtime.interfaces.steps import AdapterSlot, StepOutput, StepPlan
from isthmus_runtime.kv.plan import KvPlan, KvPlanInput, plan
from isthmus_runtime.lora_config import LoraConfig
from isthmus_runtime.models.base import check_shards
from isthmus_runtime.models.registry import parse_model_spec, read_model_spec
from isthmus_runtime.models.shard import Shard
from isthmus_runtime.request import SamplingParams

DEADLINE_S = 120.0
BASE: dict[str, Any] = {
    "vocab_size": 97,  # two and four ranks have unequal parts of it
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True},
    "llama-tied": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 24},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3-one-kv-head": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "num_key_value_heads": 1},
    "phi3-joined-tensors": {"architectures": ["Phi3ForCausalLM"], "pad_token_id": 0},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh"},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 16,
        "sliding_window_pattern": 2,
    },
}


class Meeting:
    """Where the threads of the ranks exchange tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = Barrier(size, timeout=DEADLINE_S)
        self.slots: list[Tensor | None] = [None] * size

    def all(self, rank: int, own: Tensor) -> list[Tensor]:
        self.slots[rank] = own.clone()
        self.barrier.wait()
        found = [slot for slot in self.slots if slot is not None]
        self.barrier.wait()  # nobody writes the next one before all have read
        return found


class InMemory:
    """`models.shard.Collectives`."""

    parts = False

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.meeting = rank, meeting

    def sum(self, x: Tensor) -> None:
        x.copy_(torch.stack(self.meeting.all(self.rank, x)).sum(0))

    def sum_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        self.sum(x)
        dispatch.add_rms_norm(x, residual, weight, eps, out=out)
        x.fill_(math.nan) if x.data_ptr() != out.data_ptr() else None  # nobody reads it

    def gather(self, part: Tensor) -> Tensor:
        return torch.stack(self.meeting.all(self.rank, part))


class AllRanks:
    """An executor over the executors of the ranks, which must agree on every token."""

    def __init__(self, ranks: list[TorchExecutor]) -> None:
        self.ranks = ranks
        self.kv_cache = self

    def submit(self, step: StepPlan) -> Future[StepOutput]:
        outputs = [future.result(DEADLINE_S) for future in [rank.submit(step) for rank in self.ranks]]
        assert all(output == outputs[0] for output in outputs), "ranks drew different tokens"
        answer: Future[StepOutput] = Future()
        answer.set_result(outputs[0])
        return answer

    def poison(self, block_ids: Any = None) -> None:
        for rank in self.ranks:
            rank.kv_cache.poison(block_ids)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


class Adapted(AllRanks):
    """Every row computes with one adapter, in the second slot."""

    def __init__(self, ranks: list[TorchExecutor], digest: str) -> None:
        super().__init__(ranks)
        self.digest = digest

    def submit(self, step: StepPlan) -> Future[StepOutput]:
        slot = AdapterSlot(2, "one", self.digest)
        starts = tuple(replace(start, adapter=2) for start in step.starts)
        return super().submit(replace(step, starts=starts, adapters=(slot,) if starts else ()))


@dataclass(frozen=True)
class Ranked:
    """What `start_ranks` gives."""

    loaded: LoadedModel
    """Of the first rank."""
    plan: KvPlan
    executor: AllRanks


def write(folder: Path, config: dict[str, Any]) -> None:
    """A model of random weights."""
    (folder / "config.json").write_text(json.dumps({**BASE, **config}))
    made = torch.Generator().manual_seed(4)
    tensors = {}
    for name, shape in read_model_spec(folder).tensor_shapes().items():
        wide = 1.5 * shape[-1] ** -0.5 if len(shape) > 1 else 0.2
        tensors[name] = torch.randn(shape, generator=made) * wide + ("norm" in name)
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def start_ranks() -> Iterator[Callable[..., Ranked]]:
    """`start_ranks(folder, size)`: an engine of as many ranks; closed after the test. `adapter`: all rows have it."""
    started: list[AllRanks] = []

    def start(folder: Path, size: int, adapter: Path | None = None) -> Ranked:
        scheduler = SchedulerConfig(max_batched_tokens=24, max_num_seqs=4, max_model_len=96)
        meeting = Meeting(size)

        def rank(number: int) -> tuple[Any, Any, TorchExecutor]:
            shard = Shard(number, size, InMemory(number, meeting) if size > 1 else None)
            model = ModelConfig(path=str(folder), device="cpu", dtype="float32", threads=1)
            loaded = load(model, scheduler, shard=shard, lora=LoraConfig(max_loras=2, max_rank=8) if adapter else None)
            kv_plan = plan(
                KvPlanInput(
                    ranks=(loaded.layer_specs(8, "auto"),) * size,
                    available_bytes=(1 << 33,) * size,
                    max_model_len=96,
                    max_num_batched_tokens=24,
                    num_blocks_override=96,
                    batches_in_flight=2,
                )
            )
            return loaded, kv_plan, TorchExecutor(loaded, kv_plan, scheduler, KvConfig(block_size=8))

        # All at once: warming up is steps, in which they meet.
        with ThreadPoolExecutor(size) as threads:
            ranks = list(threads.map(rank, range(size)))
        executors = [executor for _, _, executor in ranks]
        if adapter is not None:
            found = [loaded.adapters.read(str(adapter)) for loaded, _, _ in ranks]
            assert len({one.digest for one in found}) == 1
            for (loaded, _, _), one in zip(ranks, found, strict=True):
                loaded.adapters.keep(one)
            started.append(Adapted(executors, found[0].digest))
        else:
            started.append(AllRanks(executors))
        loaded, kv_plan, _ = ranks[0]
        return Ranked(loaded, kv_plan, started[-1])

    yield start
    for executor in started:
        executor.close()


def answers(engine: Ranked, driver: Any, job: Any) -> tuple[list[list[int]], list[Any]]:
    """Tokens, and log-probabilities of the likeliest, of some greedy prompts in chunks, preempted now and then."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=8)
    jobs = [job([(7 * n * n + 11 * i) % 97 for i in range(5 + 9 * n)], 14, sampling) for n in range(1, 5)]
    tokens = driver(engine.executor, engine.plan, max_rows=4, budget=24, seed=3).run(jobs)
    return tokens, [logprobs for j in jobs for logprobs in j.logprobs]


SPLITS = [
    ("llama", 2),
    *(
        pytest.param(name, size, marks=pytest.mark.slow)
        for name, size in [*((name, 2) for name in MODELS if name != "llama"), ("llama", 4), ("qwen3-one-kv-head", 4)]
    ),
]


@pytest.mark.parametrize(("name", "size"), SPLITS)
def test_ranks_give_what_one_gives(
    name: str, size: int, tmp_path: Path, start_ranks: Callable[[Path, int], Ranked], driver: Any, job: Any
) -> None:
    write(tmp_path, MODELS[name])
    alone, together = start_ranks(tmp_path, 1), start_ranks(tmp_path, size)
    expected, got = answers(alone, driver, job), answers(together, driver, job)
    assert_equal(got, expected)
    assert len({token for tokens in got[0] for token in tokens}) > 4, "a model that repeats itself proves little"


@pytest.mark.parametrize(("name", "size"), SPLITS)
def test_adapters_of_ranks_equal_merged_weights(
    name: str, size: int, tmp_path: Path, start_ranks: Callable[..., Ranked], driver: Any, job: Any
) -> None:
    """A of an output's projection whole and B cut, of an input's A cut and B whole: one sum over the ranks for both."""
    write(tmp_path, MODELS[name])
    joined = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    added = save_adapter(
        tmp_path / "one",
        read_model_spec(tmp_path).tensor_shapes(),
        seed=6,
        size=0.1,
        targets=joined if name.startswith("phi3") else ATTENTION + MLP,
    )
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "config.json").write_text((tmp_path / "config.json").read_text())
    changed = {key: weight + added.get(key, 0) for key, weight in weights.items()}
    save_file(changed, tmp_path / "merged" / "model.safetensors")
    expected = answers(start_ranks(tmp_path / "merged", 1), driver, job)
    assert_equal(answers(start_ranks(tmp_path, size, tmp_path / "one"), driver, job), expected)
    assert answers(start_ranks(tmp_path, 1), driver, job)[0] != expected[0], "the adapter changes nothing"


def assert_equal(got: tuple[list[list[int]], list[Any]], expected: tuple[list[list[int]], list[Any]]) -> None:
    assert got[0] == expected[0]
    for found, wanted in zip(got[1], expected[1], strict=True):
        assert [token for token, _ in found.top] == [token for token, _ in wanted.top]
        for (_, logprob), (_, reference) in zip(found.top, wanted.top, strict=True):
            assert math.isclose(logprob, reference, abs_tol=2e-4)


def test_a_rank_holds_its_part_alone(tmp_path: Path, start_ranks: Callable[[Path, int], Ranked]) -> None:
    """Half of the large weights but the embedding, and half of the KV."""
    # Whole tiles of packed weights.
    write(tmp_path, {**MODELS["llama"], "vocab_size": 128, "hidden_size": 128, "intermediate_size": 256})
    alone, half = (start_ranks(tmp_path, size).loaded for size in (1, 2))
    embedding = 128 * 128 * 4
    assert (half.model.weight_bytes - embedding) * 2 == pytest.approx(alone.model.weight_bytes - embedding, rel=0.05)
    (whole,), (part,) = alone.layer_specs(8, "auto"), half.layer_specs(8, "auto")
    assert part.page_bytes * 2 == whole.page_bytes


@pytest.mark.parametrize(
    ("config", "size", "says"),
    [
        ({**BASE, **MODELS["llama"]}, 3, ("num_attention_heads 4", "intermediate_size 64", "num_key_value_heads 2")),
        ({**BASE, **MODELS["llama"], "num_attention_heads": 6, "num_key_value_heads": 6}, 4, ("heads 6",)),
    ],
)
def test_what_does_not_divide_is_named(config: dict[str, Any], size: int, says: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_shards(parse_model_spec(config, {}, source="config.json"), size)
    for text in (f"--tensor-parallel-size {size}", *says):
        assert text in str(caught.value)


def test_a_family_that_is_not_split_is_refused_by_name(tmp_path: Path) -> None:
    mixture = {"architectures": ["Qwen3MoeForCausalLM"], "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2}
    write(tmp_path, {**mixture, "moe_intermediate_size": 16})
    model = ModelConfig(path=str(tmp_path), device="cpu", dtype="float32", threads=1)
    with pytest.raises(ConfigError, match="--tensor-parallel-size 2: Qwen3MoeForCausalLM is not split over ranks"):
        load(model, shard=Shard(0, 2))
