"""Masks, penalties, biases and forbidden words: each row draws what its definition says, and the others as ever."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from fake_device import FakeDevice

from isthmus_runtime.config import SchedulerConfig
from isthmus_runtime.engine import drafts
from isthmus_runtime.engine import loop as loop_of_engine
from isthmus_runtime.engine.backend import EngineBackend
from isthmus_runtime.engine.local import LocalEngine
from isthmus_runtime.engine.loop import EngineLoop
from isthmus_runtime.engine.scheduler import Scheduler
from isthmus_runtime.engine.sequence import SchedulerStats
from isthmus_runtime.engine.streams import Streams
from isthmus_runtime.executor.adjustments import AdjustedRows
from isthmus_runtime.executor.device.base import Device
from isthmus_runtime.interfaces.steps import Forced
from isthmus_runtime.kv.pool import BlockPool
from isthmus_runtime.request import GenerateRequest, SamplingParams, TokenChunk

VOCAB = 97
COUNT = 12
DEADLINE_S = 120.0


class NextResidue:
    """After a token of residue r modulo 3, only ids of residue r + 1; the first of residue 0."""

    apart_s = 0.0

    def lost(self) -> None:
        return None

    def ids(self, generated: Sequence[int]) -> list[int]:
        return [i for i in range(VOCAB) if i % 3 == ((generated[-1] + 1) % 3 if generated else 0)]

    def allowed(self, generated: Sequence[int]) -> bytes:
        mask = bytearray(-(-VOCAB // 8))
        for i in self.ids(generated):
            mask[i // 8] |= 1 << i % 8
        return bytes(mask)

    def forced(self, generated: Sequence[int], most: int) -> Forced:
        return Forced()


class Stretches(NextResidue):
    """The same, but two of three tokens are forced: 3 and 7 more than the one before."""

    def ids(self, generated: Sequence[int]) -> list[int]:
        turn = len(generated) % 3
        return super().ids(generated) if turn == 0 else [(generated[-1] + (3, 7)[turn - 1]) % VOCAB]

    def forced(self, generated: Sequence[int], most: int) -> Forced:
        tokens, masks = list(generated), list[bytes]()
        while len(tokens) % 3 and len(masks) < max(1, most):
            tokens += self.ids(tokens)
            masks.append(self.allowed(tokens))
        return Forced(tuple(tokens[len(generated) :]), tuple(masks) if most else ())


STOP = (5, 9, 60)
ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.5},
    {"frequency_penalty": 1.25, "presence_penalty": 0.5},
    {"logit_bias": ((7, 3.0), (8, -100.0), (50, 2.5)), "min_tokens": 6, "stop_token_ids": STOP},
    {"allowed_token_ids": tuple(range(3, 90, 4))},
    {"bad_words": ((11,), (40, 41), *((a, b) for a in range(VOCAB) for b in range(0, VOCAB, 9)))},
    {"presence_penalty": -1.0, "logit_bias": ((1, 1.0),), "allowed_token_ids": tuple(range(60))},
)


@torch.no_grad()
def reference(model: Any, prompt: Sequence[int], rule: NextResidue | None, asked: dict[str, Any]) -> list[int]:
    """One token after another, each option by its definition."""
    tokens = list(prompt)
    for _ in range(COUNT):
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        made = tokens[len(prompt) :]
        factor = asked.get("repetition_penalty", 1.0)
        for token in set(tokens):
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        for token in set(made):
            logits[token] -= asked.get("frequency_penalty", 0.0) * made.count(token) + asked.get(
                "presence_penalty", 0.0
            )
        for token, bias in asked.get("logit_bias", ()):
            logits[token] += bias
        refused = set(STOP) if len(made) < asked.get("min_tokens", 0) else set()
        if "allowed_token_ids" in asked:
            refused |= set(range(VOCAB)) - set(asked["allowed_token_ids"])
        refused |= {w[-1] for w in asked.get("bad_words", ()) if tuple(made[len(made) - len(w) + 1 :]) == w[:-1]}
        if rule is not None:
            refused |= set(range(VOCAB)) - set(rule.ids(made))
        logits[list(refused)] = float("-inf")
        tokens.append(int(logits.argmax()))
        if tokens[-1] in asked.get("stop_token_ids", ()):
            break
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    ("num_blocks", "device"),
    [
        pytest.param(512, None, id="roomy-cpu", marks=pytest.mark.slow),
        pytest.param(24, None, id="preempting-cpu"),
        pytest.param(512, FakeDevice((1, 2, 4, 8), (4, 12)), id="roomy-captured late", marks=pytest.mark.slow),
        pytest.param(24, FakeDevice((1, 2, 4, 8), (4, 12)), id="preempting-captured late", marks=pytest.mark.slow),
    ],
)
def test_adjusted_rows_among_others(
    device: Device | None,
    num_blocks: int,
    tmp_path: Path,
    start_engine: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import transformers

    # Whether forced tokens are worth being computed together follows from measured times, and in a batch from how many
    # there are: here they always are.
    monkeypatch.setattr(drafts, "FORCED_WORTH", 0.0)
    monkeypatch.setattr(drafts, "MOSTLY_FORCED", drafts.ENOUGH_FORCED)
    monkeypatch.setattr(loop_of_engine, "MASK_PATIENCE_S", DEADLINE_S)

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
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 26))] for _ in range(14)]
    asked = [ASKED[number // 2 % len(ASKED)] for number in range(len(prompts))]
    rules = [
        NextResidue() if number in {1, 3, 5} else Stretches() if number in {4, 7, 12} else None
        for number in range(len(prompts))
    ]

    async def main() -> tuple[list[list[TokenChunk]], SchedulerStats]:
        core = Scheduler(
            SchedulerConfig(max_batched_tokens=served.budget, max_num_seqs=served.max_rows),
            served.plan,
            BlockPool(served.plan.num_blocks, num_groups=len(served.plan.groups), prefix_caching=False),
            layout_digest=served.executor.kv_region().layout_digest,
            late_masks=True,
        )
        streams = Streams(asyncio.get_running_loop())
        loop = EngineLoop(core, served.executor, streams.sink)
        loop.start()
        backend = EngineBackend(Ruled(loop, streams.sink), streams, vocab_size=VOCAB)
        try:
            requests = [
                GenerateRequest(
                    request_id=str(number),
                    prompt_token_ids=tuple(prompt),
                    sampling=SamplingParams(
                        max_tokens=COUNT, temperature=0.0, logprobs=2 if number in {1, 2} else -1, **asked[number]
                    ),
                )
                for number, prompt in enumerate(prompts)
            ]
            answers = await asyncio.gather(*(collect(backend, request) for request in requests))
            return answers, core.stats()
        finally:
            loop.stop()

    class Ruled(LocalEngine):
        def _compiled(self, request: GenerateRequest, attempt: str, run: Callable[[Any], None]) -> None:
            run(rules[int(request.request_id)])

    answers, stats = asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
    assert (stats.preemptions > 0) == (num_blocks == 24)
    assert stats.forced > 6
    for number, (prompt, rule, chunks) in enumerate(zip(prompts, rules, answers, strict=True)):
        tokens = [t for chunk in chunks for t in chunk.token_ids]
        assert tokens == reference(model, prompt, rule, asked[number]), f"request {number}"
    ruled = [p for chunk in answers[1] for p in chunk.logprobs]
    assert len(ruled) == COUNT
    assert all(p.token_id == p.top[0][0] and p.logprob > -50 for p in ruled), "log-probabilities are of what is left"


async def collect(backend: EngineBackend, request: GenerateRequest) -> list[TokenChunk]:
    return [chunk async for chunk in backend.generate(request)]


def instructions(work: Callable[[], object]) -> int:
    """How many of the interpreter's instructions `work` takes."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_a_step_does_not_go_through_what_requests_list() -> None:
    """One request with n = 128 and long lists must not cost every step of the others half a second."""

    def listed(times: int) -> AdjustedRows:
        rows = AdjustedRows()
        asked = SamplingParams(
            max_tokens=9,
            min_tokens=9,
            stop_token_ids=tuple(range(2 * times)),
            logit_bias=tuple((i, 1.0) for i in range(8 * times)),
            bad_words=tuple(tuple(range(i, i + 8)) for i in range(2 * times)),
        )
        for row in range(128):
            rows.set(row, asked, 10)
        return rows

    few, many = listed(1), listed(128)
    step = (np.arange(128), np.full(128, 12))
    found = many.of(*step)
    assert found is not None and len(found.biases[0]) == 128 * (1024 + 256) and found.words[-1].shape == (128 * 256, 7)
    assert instructions(lambda: many.of(*step)) < 1.1 * instructions(lambda: few.of(*step))
