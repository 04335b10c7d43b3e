"""Speculative decoding on a model: the same tokens and log-probabilities as without, whatever is guessed."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import FakeDevice

from isthmus_runtime.checkpoints.provenance import Origin, record_files
from isthmus_runtime.commands.draft_model import load_drafts
from isthmus_runtime.config import ModelConfig, SchedulerConfig
from isthmus_runtime.engine import drafts, scheduler
from isthmus_runtime.engine.backend import EngineBackend
from isthmus_runtime.engine.draft_model import ROWS, DraftModel, DraftRows
from isthmus_runtime.engine.drafters import Drafter
from isthmus_runtime.engine.drafts import Speculation
from isthmus_runtime.engine.local import LocalEngine
from isthmus_runtime.engine.loop import EngineLoop
from isthmus_runtime.engine.streams import Streams
from isthmus_runtime.errors import WeightsError
from isthmus_runtime.executor.device.base import Device
from isthmus_runtime.kv.pool import BlockPool
from isthmus_runtime.request import GenerateRequest, SamplingParams, TokenChunk

VOCAB, COUNT = 97, 24
STOP = (5, 9, 60)
ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 7},
    {"repetition_penalty": 1.5},
    {"frequency_penalty": 1.25, "presence_penalty": 0.5, "temperature": 0.8},
    {"logit_bias": ((7, 3.0), (8, -100.0), (50, 2.5)), "min_tokens": 6, "stop_token_ids": STOP},
    {"allowed_token_ids": tuple(range(3, 90, 4)), "temperature": 1.5, "top_k": 5},
    {"bad_words": ((11,), (40, 41), *((a, b) for a in range(VOCAB) for b in range(0, VOCAB, 9)))},
    {"temperature": 1.0, "top_p": 0.8, "min_p": 0.02, "stop_token_ids": STOP},
)


def save(folder: Path, seed: int = 0) -> Any:
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=72, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.4,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(folder, safe_serialization=True)
    return model


def generate(
    served: Any,
    requests: Sequence[GenerateRequest],
    most: int,
    *,
    caching: bool = False,
    draft_model: DraftModel | None = None,
) -> tuple[list[list[TokenChunk]], Any]:
    """Every request's chunks, and the scheduler's counts at the end."""

    async def main() -> tuple[list[list[TokenChunk]], Any]:
        core = scheduler.Scheduler(
            SchedulerConfig(
                max_batched_tokens=served.budget,
                max_num_seqs=served.max_rows,
                speculative_tokens=most,
                max_waiting=9999,
            ),
            served.plan,
            BlockPool(served.plan.num_blocks, num_groups=len(served.plan.groups), prefix_caching=caching),
            layout_digest=served.executor.kv_region().layout_digest,
            draft_model=draft_model,
        )
        streams = Streams(asyncio.get_running_loop())
        loop = EngineLoop(core, served.executor, streams.sink, draft_model=draft_model)
        loop.start()
        backend = EngineBackend(LocalEngine(loop, streams.sink), streams, vocab_size=VOCAB)

        async def collect(request: GenerateRequest) -> list[TokenChunk]:
            return [chunk async for chunk in backend.generate(request)]

        try:
            return list(await asyncio.gather(*map(collect, requests))), core.stats()
        finally:
            loop.stop()

    return asyncio.run(asyncio.wait_for(main(), 240))


def guessing(monkeypatch: pytest.MonkeyPatch, guess: Callable[[Sequence[int], int], tuple[int, ...]]) -> None:
    """Every row guesses at each step, by `guess` of its tokens and how many there may be."""

    class Guessing(Drafter):
        def watch(self, tokens: Sequence[int]) -> bool:
            return True

        def judge(self, right: bool) -> None:
            self.trust = 1.0

        def guess(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
            return guess(tokens, count)

    monkeypatch.setattr(drafts, "Drafter", Guessing)
    always_worth(monkeypatch)


def always_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many drafts as there may be, whatever steps and drafts were measured to take on this machine."""
    monkeypatch.setattr(Speculation, "_most", lambda self, trust, most, seconds: most)


@pytest.mark.parametrize("device", [None, FakeDevice((1, 2, 4, 8), (4, 12))], ids=["cpu", "captured late"])
@pytest.mark.parametrize("num_blocks", [512, 40], ids=["roomy", "preempting"])
def test_answers_are_those_without_guesses(
    device: Device | None,
    num_blocks: int,
    tmp_path: Path,
    start_engine: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save(tmp_path)
    served = start_engine(
        tmp_path, block_size=4, budget=40, max_rows=7, num_blocks=num_blocks, max_model_len=64, device=device
    )
    rng = random.Random(11)
    requests = [
        GenerateRequest(
            request_id=str(number),
            prompt_token_ids=tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 26))),
            sampling=SamplingParams(
                **{"max_tokens": COUNT, "temperature": 0.0, "logprobs": number % 3 - 1, **ASKED[number % len(ASKED)]}
            ),
        )
        for number in range(16)
    ]
    plain, _ = generate(served, requests, 0)
    whole = {
        request.prompt_token_ids: [t for chunk in chunks for t in chunk.token_ids]
        for request, chunks in zip(requests, plain, strict=True)
    }

    def half_right(tokens: Sequence[int], count: int) -> tuple[int, ...]:
        prompt = max((p for p in whole if tuple(tokens[: len(p)]) == p), key=len)
        right = whole[prompt][len(tokens) - len(prompt) :]
        guesses = (*right, *itertools.repeat(0, count))[:count]
        return tuple(g if rng.random() < 0.8 else (g + 1) % VOCAB for g in guesses)

    guessing(monkeypatch, half_right)
    fast, stats = generate(served, requests, 5)
    assert stats.drafted > stats.accepted > 30
    assert (stats.preemptions > 0) == (num_blocks == 40)
    for number, (one, other) in enumerate(zip(plain, fast, strict=True)):
        assert [t for c in one for t in c.token_ids] == [t for c in other for t in c.token_ids], f"request {number}"
        assert one[-1].finish_reason == other[-1].finish_reason
        told, again = ([p for c in chunks for p in c.logprobs] for chunks in (one, other))
        assert [p.token_id for p in told] == [p.token_id for p in again]
        assert [p.logprob for p in told] == pytest.approx([p.logprob for p in again], abs=1e-4)


@pytest.mark.parametrize("seed", [0, 1], ids=["the same model", "another"])
@pytest.mark.parametrize("device", [None, FakeDevice((1, 2, 4, 8), (4, 12))], ids=["cpu", "captured late"])
def test_answers_are_those_without_a_draft_model(
    device: Device | None,
    seed: int,
    tmp_path: Path,
    start_engine: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Greedy and by seed, with every option; the same model is right about what is greedy."""
    always_worth(monkeypatch)
    for name, weights in (("served", 0), ("draft", seed)):
        (tmp_path / name).mkdir()
        save(tmp_path / name, weights)
    served = start_engine(
        tmp_path / "served", block_size=4, budget=40, max_rows=7, num_blocks=256, max_model_len=64, device=device
    )
    small = start_engine(
        tmp_path / "draft", block_size=4, budget=12, max_rows=ROWS, num_blocks=1 + ROWS * 16, max_model_len=64
    )
    rng = random.Random(3)
    requests = [
        GenerateRequest(
            request_id=str(number),
            prompt_token_ids=tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 26))),
            sampling=SamplingParams(**{"max_tokens": COUNT, "temperature": 0.0, **ASKED[number % len(ASKED)]}),
        )
        for number in range(10)
    ]
    plain, _ = generate(served, requests, 0)

    def guessing() -> DraftModel:
        return DraftModel(small.executor, DraftRows(small.plan, ROWS, small.budget), VOCAB)

    fast, stats = generate(served, requests, 4, draft_model=guessing())
    for number, (one, other) in enumerate(zip(plain, fast, strict=True)):
        assert [t for c in one for t in c.token_ids] == [t for c in other for t in c.token_ids], f"request {number}"
    alone, told = generate(served, requests[:1], 4, draft_model=guessing())
    assert [t for c in alone[0] for t in c.token_ids] == [t for c in plain[0] for t in c.token_ids]
    assert told.drafted > 0
    if seed == 0:
        assert told.accepted > told.drafted / 2, (told.accepted, told.drafted)
    assert stats.accepted <= stats.drafted


def test_a_draft_model_whose_files_were_changed_is_refused(tmp_path: Path) -> None:
    for name in ("served", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text('{"model": {}}')
    record_files(tmp_path / "draft", Origin(source="hf://owner/name"))
    (tmp_path / "draft" / "tokenizer.json").write_text('{"model": {} }')
    with pytest.raises(WeightsError, match="14 bytes, 13 were downloaded"):
        load_drafts(tmp_path / "draft", ModelConfig(path=str(tmp_path / "served")), block_size=4, max_model_len=None)


@pytest.mark.slow
def test_draws_have_the_distribution_of_the_model(
    tmp_path: Path, start_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chi-square of three tokens in a row, drawn while every step verifies guesses of which some are right."""
    model = save(tmp_path)
    served = start_engine(tmp_path, block_size=4, budget=256, max_rows=64, num_blocks=2048, max_model_len=32)
    ids, prompt, draws = (3, 14, 15, 92, 65), (3, 58, 9, 7, 9), 4000
    rng = random.Random(5)
    requests = [
        GenerateRequest(
            request_id=str(number),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=3, temperature=3.0, seed=1000 + number, allowed_token_ids=ids),
        )
        for number in range(draws)
    ]
    guessing(monkeypatch, lambda tokens, count: tuple(rng.choice(ids) for _ in range(count)))
    answers, stats = generate(served, requests, 2, caching=True)
    assert 0 < stats.accepted < stats.drafted
    found = Counter(tuple(t for chunk in chunks for t in chunk.token_ids) for chunks in answers)

    @torch.no_grad()
    def chances(tokens: tuple[int, ...]) -> dict[int, float]:
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1] / 3.0
        return dict(zip(ids, torch.softmax(logits[list(ids)], 0).tolist(), strict=True))

    expected = {
        (a, b, c): draws * p * q * r
        for a, p in chances(prompt).items()
        for b, q in chances((*prompt, a)).items()
        for c, r in chances((*prompt, a, b)).items()
    }
    large = {cell: count for cell, count in expected.items() if count >= 5}
    rest = sum(expected.values()) - sum(large.values())
    square = sum((found[cell] - count) ** 2 / count for cell, count in large.items())
    if rest >= 1:
        square += (draws - sum(found[cell] for cell in large) - rest) ** 2 / rest
    freedom = len(large) - (rest < 1)
    deviations = (square - freedom) / math.sqrt(2 * freedom)
    assert freedom > 20 and deviations < 4, f"seeds 1000 to {1000 + draws}: chi-square {square:.1f}, {freedom} degrees"
