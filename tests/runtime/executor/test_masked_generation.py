"""Structured output on the executor: masked rows draw what transformers draws under the same masks, others as ever."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import FakeDevice

from isthmus_runtime.config import SchedulerConfig
from isthmus_runtime.engine.backend import EngineBackend, Streams
from isthmus_runtime.engine.loop import EngineLoop
from isthmus_runtime.engine.scheduler import Scheduler
from isthmus_runtime.executor.device.base import Device
from isthmus_runtime.kv.pool import BlockPool
from isthmus_runtime.request import GenerateRequest, SamplingParams, TokenChunk

VOCAB = 97
COUNT = 12


class NextResidue:
    """After a token of residue r modulo 3, only ids of residue r + 1; the first of residue 0."""

    def ids(self, generated: Sequence[int]) -> list[int]:
        return [i for i in range(VOCAB) if i % 3 == ((generated[-1] + 1) % 3 if generated else 0)]

    def allowed(self, generated: Sequence[int]) -> bytes:
        mask = bytearray(-(-VOCAB // 8))
        for i in self.ids(generated):
            mask[i // 8] |= 1 << i % 8
        return bytes(mask)


@torch.no_grad()
def reference(model: Any, prompt: Sequence[int], rule: NextResidue | None) -> list[int]:
    tokens = list(prompt)
    for _ in range(COUNT):
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        if rule is not None:
            left = torch.full_like(logits, float("-inf"))
            ids = rule.ids(tokens[len(prompt) :])
            left[ids] = logits[ids]
            logits = left
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("device", [None, FakeDevice((1, 2, 4, 8), (4, 12))], ids=["cpu", "captured late"])
@pytest.mark.parametrize("num_blocks", [512, 24], ids=["roomy", "preempting"])
def test_masked_rows_among_free_ones(
    device: Device | None, num_blocks: int, tmp_path: Path, start_engine: Callable[..., Any]
) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=72, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.4,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(tmp_path, safe_serialization=True)
    served = start_engine(
        tmp_path, block_size=4, budget=20, max_rows=7, num_blocks=num_blocks, max_model_len=64, device=device
    )
    rng = random.Random(11)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 26))] for _ in range(8)]
    rules = [NextResidue() if number % 2 else None for number in range(len(prompts))]

    async def main() -> tuple[list[list[TokenChunk]], int]:
        core = Scheduler(
            SchedulerConfig(max_batched_tokens=served.budget, max_num_seqs=served.max_rows),
            served.plan,
            BlockPool(served.plan.num_blocks, num_groups=len(served.plan.groups), prefix_caching=False),
            layout_digest=served.executor.kv_region().layout_digest,
        )
        streams = Streams(asyncio.get_running_loop())
        loop = EngineLoop(core, served.executor, streams.sink)
        loop.start()
        backend = Ruled(loop, streams, vocab_size=VOCAB)
        try:
            requests = [
                GenerateRequest(
                    request_id=str(number),
                    prompt_token_ids=tuple(prompt),
                    sampling=SamplingParams(max_tokens=COUNT, temperature=0.0, logprobs=2 if number in {1, 2} else -1),
                )
                for number, prompt in enumerate(prompts)
            ]
            answers = await asyncio.gather(*(collect(backend, request) for request in requests))
            return answers, core.stats().preemptions
        finally:
            loop.stop()

    class Ruled(EngineBackend):
        async def _constraint(self, request: GenerateRequest) -> Any:
            return rules[int(request.request_id)]

    answers, preemptions = asyncio.run(asyncio.wait_for(main(), 120))
    assert (preemptions > 0) == (num_blocks == 24)
    for number, (prompt, rule, chunks) in enumerate(zip(prompts, rules, answers, strict=True)):
        tokens = [t for chunk in chunks for t in chunk.token_ids]
        assert tokens == reference(model, prompt, rule), f"request {number}"
    ruled = [p for chunk in answers[1] for p in chunk.logprobs]
    assert len(ruled) == COUNT
    assert all(p.token_id == p.top[0][0] and p.logprob > -50 for p in ruled), "log-probabilities are of what is left"


async def collect(backend: EngineBackend, request: GenerateRequest) -> list[TokenChunk]:
    return [chunk async for chunk in backend.generate(request)]
