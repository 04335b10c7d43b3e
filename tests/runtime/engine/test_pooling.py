"""Prompts that are pooled: one vector and one end each, past chunks, prefix hits and preemption; no token is drawn."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from engine_world import World, request
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_runtime.engine.sequence import Kind
from isthmus_runtime.errors import NeverFits
from isthmus_runtime.executor.fake import expected_tokens, expected_vector
from isthmus_runtime.request import FinishReason, GenerateRequest, PoolingParams


def asking(sid: str, prompt: list[int], dimensions: int = 0, **sampling: object) -> GenerateRequest:
    return replace(request(sid, prompt, 7, **sampling), pooling=PoolingParams(dimensions=dimensions))


def vector(world: World, sid: str) -> bytes:
    assert world.finish(sid) is FinishReason.STOP
    assert world.tokens[sid] == []
    return world.ends[sid][0].vector


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 32, 33, 40, 63])
@pytest.mark.parametrize("budget", [1, 3, 16, 64])
def test_a_prompt_ends_with_its_vector(length: int, budget: int) -> None:
    world, prompt = World(max_batched_tokens=budget), [7 * i % 50 for i in range(length)]
    for sid, dimensions in (("a", 0), ("b", 3)):
        world.add(asking(sid, prompt, dimensions))
        world.run()
        assert vector(world, sid) == expected_vector(prompt, PoolingParams(dimensions=dimensions))
    assert world.ends["b"][0].cached_tokens == (length - 1) // 4 * 4
    assert world.ends["a"][0].cached_tokens == 0 and world.ends["a"][0].note == "local"


def test_what_does_not_fit_is_refused() -> None:
    world = World(num_blocks=9)
    with pytest.raises(NeverFits, match="prompt is too long: it has 64 tokens"):
        world.add(asking("a", list(range(64))))
    with pytest.raises(NeverFits, match="needs 9 KV blocks, the pool has 8 usable"):
        world.add(asking("b", list(range(32))))
    world.add(asking("c", list(range(31))))
    world.run()
    assert vector(world, "c")


def test_nothing_is_drawn_and_nothing_guessed() -> None:
    world, plans = World(speculative_tokens=4), []
    run = world.executor.run
    world.executor.run = lambda plan: plans.append(plan) or run(plan)  # type: ignore[method-assign,func-returns-value]
    world.add(asking("a", [1, 2, 3] * 9))
    world.run()
    assert plans and all(chunk.draws == 0 and not chunk.drafts for plan in plans for chunk in plan.chunks)


def test_whoever_is_preempted_between_its_last_step_and_the_result_has_its_vector() -> None:
    world, prompt = World(num_blocks=9, max_num_seqs=2), list(range(20))
    world.add(asking("old", [9] * 3))
    world.run()
    world.add(asking("a", prompt))
    plan, _ = world.scheduler.schedule(world.now)
    assert plan is not None
    output = world.executor.run(plan)
    while (more := world.scheduler.schedule(world.now)[0]) is not None:
        world.take(world.scheduler.complete(output, world.now))
        output = world.executor.run(more)
    seq = world.scheduler.queues.live["a"]
    world.scheduler._preemption.preempt(seq)
    world.take(world.scheduler.complete(output, world.now))
    world.scheduler.settle()
    assert vector(world, "a") == expected_vector(prompt, PoolingParams())
    assert not world.scheduler.has_work
    world.scheduler.check()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_a_mixture_of_prompts_and_generations_ends_once_each(seed: int) -> None:
    """Small pools, so that rows preempt each other; requests that leave; several steps in flight."""
    rng = random.Random(seed)
    world = World(
        num_blocks=rng.choice([17, 20, 40]),
        max_model_len=48,
        max_batched_tokens=rng.choice([5, 9, 30]),
        prefix_caching=rng.random() < 0.7,
        depth=rng.choice([1, 2]),
        speculative_tokens=rng.choice([0, 3]),
    )
    common = [rng.randrange(50) for _ in range(20)]
    asked: dict[str, GenerateRequest] = {}
    gone: set[str] = set()
    for number in range(12):
        prompt = common[: rng.randint(0, 20)] + [rng.randrange(50) for _ in range(rng.randint(1, 20))]
        make = asking if rng.random() < 0.6 else lambda sid, prompt: request(sid, prompt, rng.randint(1, 12))
        asked[sid] = world_request = make(sid := f"r{number}", prompt)
        world.add(world_request)
        for _ in range(rng.randint(0, 3)):
            world.turn()
        if rng.random() < 0.1 and sid in world.scheduler.queues.live:
            world.take(world.scheduler.abort(sid, "", "left"))
            gone.add(sid)
    world.run()
    for sid, req in asked.items():
        if sid in gone:
            assert world.finish(sid) is FinishReason.ABORT
        elif req.pooling is not None:
            assert vector(world, sid) == expected_vector(req.prompt_token_ids, req.pooling)
        else:
            count = min(req.sampling.max_tokens, 48 - len(req.prompt_token_ids))
            assert world.tokens[sid] == expected_tokens(req.prompt_token_ids, req.sampling, count)
            assert world.finish(sid) is FinishReason.LENGTH


def test_local_alone() -> None:
    world = World()
    world.add(asking("a", [1, 2, 3]), kind=Kind.LOCAL, attempt="t1")
    world.run()
    assert vector(world, "t1") == expected_vector([1, 2, 3], PoolingParams())
