"""What a storage pool has of a prompt is read before the rest is computed, and nothing is lost where it cannot be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from engine_world import POISON, World, request

from isthmus_runtime.engine.fetches import AT_ONCE, DEADLINE_S, DEADLINE_TOKEN_S, LEAST_BLOCKS, PAUSE_S
from isthmus_runtime.engine.sequence import CancelAttempt, Kind, OpenFetch, Phase
from isthmus_runtime.executor.fake import entry_bytes
from isthmus_runtime.interfaces.handoff import FetchJob
from isthmus_runtime.request import FinishReason

PROMPT = list(range(100, 130))
"""Seven full blocks of four tokens, and two tokens more."""


def world_that_fetches(**settings: object) -> World:
    return World(fetches=True, **settings)  # type: ignore[arg-type]


def begun(world: World) -> list[FetchJob]:
    """The fetches that were begun since this was last asked."""
    jobs = [effect.job for effect in world.effects if isinstance(effect, OpenFetch)]
    world.effects.clear()
    return jobs


def give(world: World, job: FetchJob, tokens: Sequence[int], count: int, *, drained: bool = True) -> None:
    """The pool has the first `count` blocks of the job; what was not read is garbage."""
    size = world.block_size
    for number, ref in enumerate(job.blocks):
        view = world.executor.block_bytes(ref.block_id)
        start = ref.index * size
        right = b"".join(entry_bytes(0, tokens[p], p) for p in range(start, start + size))
        view[:] = right if number < count else bytes([POISON]) * len(right)
    world.scheduler.fetched(job.attempt, count, world.now, fault=False)
    world.scheduler.released(job.attempt, drained)


def computed(prompt: list[int], max_tokens: int) -> list[int]:
    world = World()
    sid = world.add(request("alone", prompt, max_tokens))
    world.run()
    return world.tokens[sid]


@pytest.mark.parametrize("count", [0, 1, 4, 7])
def test_what_the_pool_has_is_not_computed(count: int) -> None:
    world = world_that_fetches()
    sid = world.add(request("r", PROMPT, 6))
    world.turn()
    (job,) = begun(world)
    assert [ref.index for ref in job.blocks] == list(range(7)), "all full blocks, as one token is left to compute"
    assert len({ref.key for ref in job.blocks}) == 7
    assert world.scheduler.stats().fetching == 1 and world.scheduler.in_flight == 0
    give(world, job, PROMPT, count)
    world.run()
    assert world.tokens[sid] == computed(PROMPT, 6)
    assert world.scheduler.stats().prefix_hits == 4 * count
    stats = world.scheduler.stats()
    assert (stats.fetch_queries, stats.fetch_hits, stats.fetching, stats.fetch_failures) == (28, 4 * count, 0, 0)
    assert begun(world) == [], "a request asks once"
    # Whoever comes next has it in the engine's own cache.
    again = world.add(request("again", PROMPT, 6))
    world.run()
    assert begun(world) == [] and world.tokens[again] == world.tokens[sid]


def test_a_prompt_that_ends_with_a_block_leaves_one_token_to_compute() -> None:
    world = world_that_fetches()
    world.add(request("r", PROMPT[:28], 2))
    world.turn()
    (job,) = begun(world)
    assert len(job.blocks) == 6


def test_what_the_engine_has_is_not_asked_for() -> None:
    world = world_that_fetches()
    world.add(request("first", PROMPT[: 2 * 4 + 1], 1))
    world.run()
    assert begun(world) == [], f"fewer than {LEAST_BLOCKS} blocks"
    sid = world.add(request("r", PROMPT, 6))
    world.turn()
    (job,) = begun(world)
    assert [ref.index for ref in job.blocks] == [2, 3, 4, 5, 6]
    give(world, job, PROMPT, 3)
    world.run()
    assert world.tokens[sid] == computed(PROMPT, 6)
    assert world.scheduler.stats().fetch_hits == 12


def test_a_prompt_that_is_sent_on_is_fetched_under_a_name_of_its_own() -> None:
    world = world_that_fetches()
    world.add(request("r", PROMPT, 1), kind=Kind.SEND, attempt="r.1")
    world.scheduler.handoffs.open_send("r.1")
    world.turn()
    (job,) = begun(world)
    assert job.attempt != "r.1"
    give(world, job, PROMPT, 7)
    while not world.scheduler.stats().sending:
        assert world.turn()
    sent = [ref.index for effect in world.effects for ref in getattr(effect, "blocks", ())]
    assert sorted(sent) == list(range(8)), "decode may have none of them"


def test_who_receives_its_prompt_fetches_nothing() -> None:
    world = world_that_fetches()
    world.add(request("r", PROMPT, 4), kind=Kind.RECEIVE, attempt="r.1")
    world.turn()
    assert begun(world) == []


@pytest.mark.parametrize(
    "settings",
    [{"prefix_caching": False}, {"windows": (8,)}, {"windows": (None, 8), "num_blocks": 65}, {"fetches": False}],
    ids=str,
)
def test_where_a_hit_is_not_a_run_of_blocks_nothing_is_fetched(settings: dict[str, object]) -> None:
    world = World(**{"fetches": True, **settings})  # type: ignore[arg-type]
    world.add(request("r", PROMPT, 4))
    world.run()
    assert begun(world) == []


def test_a_fetch_has_a_deadline_and_a_failed_one_costs_the_next_nothing() -> None:
    world = world_that_fetches(num_blocks=65, max_model_len=128)
    sid = world.add(request("r", PROMPT, 6))
    world.turn()
    (job,) = begun(world)
    assert job.deadline_s == pytest.approx(world.now + DEADLINE_S + 28 * DEADLINE_TOKEN_S)
    world.scheduler.fetched(job.attempt, None, world.now, fault=True)
    world.scheduler.released(job.attempt, False)
    assert world.pool.counts().quarantined == 7, "bytes may still come"
    other = world.add(request("other", [7, *PROMPT], 6))
    world.run()
    assert begun(world) == [], "the pool is left alone for a while"
    assert world.tokens[sid] == computed(PROMPT, 6) and world.tokens[other] == computed([7, *PROMPT], 6)
    world.scheduler.drained(job.attempt)
    assert world.pool.counts().quarantined == 0
    world.now += PAUSE_S
    world.add(request("later", [8, *PROMPT], 6))
    world.turn()
    assert len(begun(world)) == 1
    assert world.scheduler.stats().fetch_failures == 1


def test_who_leaves_during_its_fetch_takes_nothing_along() -> None:
    world = world_that_fetches()
    world.add(request("first", PROMPT[:9], 1))
    world.run()
    sid = world.add(request("r", PROMPT, 6))
    world.turn()
    (job,) = begun(world)
    world.take(world.scheduler.abort("r", "", "the client disconnected"))
    assert [e.attempt for e in world.effects if isinstance(e, CancelAttempt)] == [job.attempt]
    assert len(world.ends[sid]) == 1 and not world.scheduler.has_work
    world.scheduler.check()
    # What it gave up is not the pool's fault.
    world.scheduler.fetched(job.attempt, None, world.now, fault=False)
    world.scheduler.released(job.attempt, True)
    world.scheduler.check()
    assert world.pool.counts().writing == 0 and world.scheduler.stats().fetch_failures == 0
    world.add(request("r", PROMPT, 6))
    world.turn()
    assert len(begun(world)) == 1


def test_a_deadline_that_passes_during_a_fetch_ends_the_request() -> None:
    world = world_that_fetches()
    sid = world.add(replace(request("r", PROMPT, 6), timeout_s=1.0))
    world.turn()
    (job,) = begun(world)
    assert job.deadline_s < world.now + 1.0, "at most the request's own"
    world.now += 2.0
    world.take(world.scheduler.tick(world.now))
    assert world.finish(sid) is FinishReason.ERROR
    assert [e.attempt for e in world.effects if isinstance(e, CancelAttempt)] == [job.attempt]


def test_a_queue_deadline_that_passed_meanwhile_is_not_forgotten() -> None:
    world = world_that_fetches(num_blocks=17, max_num_seqs=1)
    sid = world.add(request("r", PROMPT, 6))
    world.turn()
    (job,) = begun(world)
    world.now += 150.0
    world.take(world.scheduler.tick(world.now))
    assert not world.ends[sid], "it waits for its fetch, which has a deadline of its own"
    world.scheduler.fetched(job.attempt, None, world.now, fault=True)
    world.scheduler.released(job.attempt, True)
    world.take(world.scheduler.tick(world.now))
    assert world.finish(sid) is FinishReason.ERROR


def test_prompts_that_begin_alike_are_fetched_once() -> None:
    world = world_that_fetches(num_blocks=129)
    sids = [world.add(request(f"r{n}", [*PROMPT, n], 4)) for n in range(4)]
    for _ in range(3):
        world.turn()
    (job,) = begun(world)
    assert world.scheduler.stats().waiting == 3
    give(world, job, PROMPT, 7)
    world.run()
    assert begun(world) == []
    assert [world.tokens[sid] for sid in sids] == [computed([*PROMPT, n], 4) for n in range(4)]
    assert world.scheduler.stats().prefix_hits == 4 * 28


def test_few_fetches_at_once_and_the_others_are_computed() -> None:
    world = world_that_fetches(num_blocks=257, max_num_seqs=8, max_batched_tokens=256)
    for n in range(AT_ONCE + 2):
        world.add(request(f"r{n}", [n, *PROMPT], 40))
    world.turn()
    assert len(begun(world)) == AT_ONCE
    assert world.scheduler.stats().running == 2


def test_a_fetch_takes_no_blocks_that_a_running_request_needs() -> None:
    """As a receiver: it cannot be preempted, so the largest answer must be able to go on beside it."""
    world = world_that_fetches(num_blocks=17, max_num_seqs=2)
    sid = world.add(request("old", [1, 2, 3, 4, 5], 50))
    for _ in range(20):
        world.turn()
    world.add(request("r", PROMPT, 6))
    while world.scheduler.has_work:
        if not world.turn():
            jobs = begun(world)
            assert jobs, "work but no progress"
            give(world, jobs[0], PROMPT, 7)
    assert len(world.tokens[sid]) == 50


def test_what_was_read_is_given_up_for_others() -> None:
    """A prompt that was fetched and waits for a row holds nothing."""
    world = world_that_fetches(num_blocks=17, max_num_seqs=1)
    world.add(request("r", PROMPT, 6))
    world.turn()
    (job,) = begun(world)
    first = world.add(replace(request("urgent", [1, 2, 3], 20), priority=-1))
    world.turn()
    give(world, job, PROMPT, 7)
    assert world.pool.counts().cached == 7
    assert {seq.phase for seq in world.scheduler.live()} == {Phase.RUNNING, Phase.WAITING}
    world.run()
    assert len(world.tokens[first]) == 20
