"""Log-probabilities of prompts come whole and once, by chunks, past prefix hits, preemptions and transfers."""

from __future__ import annotations

import random

import pytest
from engine_world import World, request

from isthmus_runtime.engine.sequence import FinishSend, Kind, OpenReceive
from isthmus_runtime.errors import TransferFailed
from isthmus_runtime.executor.fake import expected_scores, expected_tokens
from isthmus_runtime.request import GenerateRequest


def asking(sid: str, prompt: list[int], max_tokens: int, alternatives: int = 2) -> GenerateRequest:
    return request(sid, prompt, max_tokens, prompt_logprobs=alternatives)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 40])
@pytest.mark.parametrize("max_tokens", [1, 5])
def test_a_prompt_is_scored_by_chunks_and_told_once(length: int, max_tokens: int) -> None:
    world, prompt = World(), [7 * i % 50 for i in range(length)]
    sid = world.add(asking("a", prompt, max_tokens))
    other = world.add(request("b", prompt, max_tokens))
    world.run()
    assert world.scores[sid] == expected_scores(prompt, 2)
    assert world.scores[other] == []
    assert (
        world.tokens[sid]
        == world.tokens[other]
        == expected_tokens(prompt, request("x", prompt, 1).sampling, max_tokens)
    )


def test_whoever_asks_takes_no_hit_and_leaves_one_for_others() -> None:
    world, prompt = World(), list(range(30))
    for sid, req in (
        ("warm", request("warm", prompt, 3)),
        ("a", asking("a", prompt, 3)),
        ("c", request("c", prompt, 3)),
    ):
        world.add(req)
        world.run()
        assert world.tokens[sid] == world.tokens["warm"]
    assert world.scores["a"] == expected_scores(prompt, 2)
    assert world.scheduler.stats().prefix_hits == 28, "of the last one alone"


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_scores_survive_preemption(caching: bool, seed: int) -> None:
    """Rows that outgrow a small pool preempt each other, some amid their prompts."""
    rng = random.Random(seed)
    print("seed", seed)
    world = World(num_blocks=17, max_model_len=48, max_batched_tokens=rng.choice([6, 9, 30]), prefix_caching=caching)
    prompts = {sid: [rng.randrange(50) for _ in range(rng.randint(6, 20))] for sid in "abcdef"}
    for sid, prompt in prompts.items():
        world.add(asking(sid, prompt, 25))
        for _ in range(rng.randint(0, 3)):
            world.turn()
    world.run()
    assert world.scheduler.stats().preemptions > 0
    for sid, prompt in prompts.items():
        assert world.scores[sid] == expected_scores(prompt, 2)
        assert len(world.tokens[sid]) == 25


def test_prefill_scores_what_it_sends_and_decode_does_not() -> None:
    prompt = list(range(23))
    p, d = World(max_batched_tokens=5), World()
    for skip in (0, 3):  # decode may have a prefix, prefill has one the second time
        sid = f"t{skip}"
        p.add(asking(sid, prompt, 4), kind=Kind.SEND, attempt=sid, skip_blocks=skip)
        p.scheduler.handoffs.open_send(sid)
        while not any(isinstance(e, FinishSend) and e.attempt == sid for e in p.effects):
            p.turn()
        seq = p.scheduler.sent(sid)
        assert seq is not None and list(seq.take_scores()) == expected_scores(prompt, 2)
        p.scheduler.released(sid, True)
    d.add(asking("t", prompt, 4), kind=Kind.RECEIVE, attempt="t")
    d.turn()
    (seq,) = d.scheduler.live()
    assert seq.scores is None


def test_decode_scores_a_prompt_that_it_computes_again() -> None:
    world, prompt = World(), list(range(23))
    world.add(asking("t", prompt, 4), kind=Kind.RECEIVE, attempt="t")
    world.turn()
    assert any(isinstance(e, OpenReceive) for e in world.effects)
    world.fail("t", TransferFailed("lost", stage="sending", attempt="t"))
    world.scheduler.released("t", True)
    world.run()
    assert world.scores["t"] == expected_scores(prompt, 2)
