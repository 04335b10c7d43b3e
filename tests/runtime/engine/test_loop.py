"""The engine thread: concurrency, idleness, aborts, and a broken executor that strands nobody."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import cast

import pytest
from engine_stack import engine, make_loop
from engine_world import World, request
from executors import Breaking, Gated

from isthmus_runtime.engine.backend import EngineBackend
from isthmus_runtime.engine.exchange import Exchange, Reply
from isthmus_runtime.engine.sequence import CancelAttempt, Effect, FinishSend, Kind
from isthmus_runtime.errors import EngineFailed, InvalidRequest, NeverFits
from isthmus_runtime.executor.fake import FakeExecutor, expected_tokens
from isthmus_runtime.interfaces.handoff import BlockRef, HandoffEvent, KvHandoff, PromptResult, Received, ReceiveJob
from isthmus_runtime.interfaces.steps import StepOutput, StepPlan
from isthmus_runtime.kv.pool_records import PoolCounts
from isthmus_runtime.protocol.ticket import PrefillRecord, Ticket
from isthmus_runtime.request import FinishReason, TokenChunk

DEADLINE_S = 20


async def collect(backend: EngineBackend, rid: str, prompt: list[int], count: int) -> list[int]:
    chunks = [c async for c in backend.generate(request(rid, prompt, count))]
    assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason is FinishReason.LENGTH
    return [t for c in chunks for t in c.token_ids]


def test_many_clients_at_once_get_their_own_tokens() -> None:
    async def main() -> None:
        with engine() as backend:
            prompts = {f"r{i}": [i + j for j in range(1 + i % 20)] for i in range(40)}
            answers = await asyncio.wait_for(
                asyncio.gather(*(collect(backend, rid, p, 10) for rid, p in prompts.items())), DEADLINE_S
            )
            for prompt, answer in zip(prompts.values(), answers, strict=True):
                assert answer == expected_tokens(prompt, request("x", [1], 1).sampling, 10)
            backend.engine.loop.call(backend.engine.loop.scheduler.check)

    asyncio.run(main())


def sleeps(thread: threading.Thread) -> int:
    """How often a thread has gone to sleep so far."""
    told = Path(f"/proc/self/task/{thread.native_id}/status").read_text().splitlines()
    return int(next(line for line in told if line.startswith("voluntary_ctxt_switches:")).split()[1])


def test_an_idle_engine_uses_no_cpu() -> None:
    async def main() -> None:
        with engine() as backend:
            await collect(backend, "warm", [1, 2, 3], 4)
            loop = backend.engine.loop
            loop.call(lambda: None)  # the turn of the last token is over
            before, turns = sleeps(loop._thread), loop.steps
            await asyncio.sleep(0.5)
            assert loop.steps == turns
            wakes = sleeps(loop._thread) - before
            assert wakes < 20, f"{wakes} wake-ups while idle"

    asyncio.run(main())


def test_closing_the_stream_aborts_the_request() -> None:
    async def main() -> None:
        with engine() as backend:
            stream = backend.generate(request("a", [1, 2, 3], 100))
            assert (await asyncio.wait_for(anext(stream), DEADLINE_S)).token_ids
            await stream.aclose()
            turns = (backend.engine.loop.call(lambda: backend.engine.loop.scheduler.has_work) for _ in range(200))
            assert not all(turns), "the request still runs after its stream was closed"
            backend.engine.loop.call(backend.engine.loop.scheduler.check)

    asyncio.run(main())


def test_a_refusal_raises_before_anything_is_yielded() -> None:
    async def main() -> None:
        with engine() as backend, pytest.raises(NeverFits, match="at most 127"):
            await asyncio.wait_for(collect(backend, "long", [1] * 128, 1), DEADLINE_S)

    asyncio.run(main())


def test_a_broken_executor_ends_every_request_and_refuses_new_ones() -> None:
    async def main() -> None:
        with engine(executor=Breaking(65, 4)) as backend:
            streams = [backend.generate(request(f"r{i}", [i] * 5, 50)) for i in range(5)]

            async def last(stream: object) -> TokenChunk | EngineFailed:
                try:
                    return [c async for c in stream][-1]  # type: ignore[attr-defined]
                except EngineFailed as error:
                    return error

            ends = await asyncio.wait_for(asyncio.gather(*map(last, streams)), DEADLINE_S)
            for end in ends:
                error = end if isinstance(end, EngineFailed) else end.error
                assert error is not None and "device lost" in str(error)
            assert "device lost" in backend.ready()
            with pytest.raises(EngineFailed, match="device lost"):
                await asyncio.wait_for(collect(backend, "new", [1], 1), DEADLINE_S)

    asyncio.run(main())


def test_what_breaks_again_while_it_ends_strands_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        with engine(executor=Breaking(65, 4)) as backend:

            def broken(error: object) -> list[object]:
                raise AssertionError("again")

            monkeypatch.setattr(backend.engine.loop.scheduler, "abort_all", broken)
            with pytest.raises(EngineFailed, match="device lost"):
                async for chunk in backend.generate(request("a", [1] * 5, 50)):
                    if chunk.error is not None:
                        raise chunk.error
            with pytest.raises(EngineFailed, match="device lost"):
                await collect(backend, "new", [1], 1)
            monkeypatch.undo()

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


def test_who_ends_in_the_turn_that_breaks_is_told_too() -> None:
    """A prompt that is refused and a request that is aborted are no longer live when the executor's error is seen."""
    said: list[tuple[str, Reply]] = []
    executor, step = FakeExecutor(65, 4), Future[StepOutput]()
    executor.submit = lambda plan: step  # type: ignore[method-assign]
    loop = make_loop(said.extend, executor)
    loop.generate(request("runs", [1, 2], 5))
    loop.turn()
    loop.generate(request("refused", [1] * 500, 1))
    loop.generate(request("told", [1, 2], 5))
    loop.abort("told", "", "the router says so")
    step.set_exception(RuntimeError("no device"))
    with pytest.raises(RuntimeError) as broken:
        loop.turn()
    loop._break(str(broken.value))
    ends = [(sid, reply.finish_reason) for sid, reply in said if isinstance(reply, TokenChunk)]
    error, abort = FinishReason.ERROR, FinishReason.ABORT
    assert sorted(ends) == [("refused", error), ("runs", error), ("told", abort)]
    loop.generate(request("late", [1, 2], 5))
    loop.turn()
    assert len(said) == 4, "nothing is said twice"


def test_what_is_called_after_commands_comes_after_what_they_say() -> None:
    said: list[object] = []
    loop = make_loop(said.extend, FakeExecutor(65, 4))
    loop.generate(request("same", [1] * 500, 1))
    loop.abort("same", "", "its caller is gone", answer=False)
    loop.after(lambda: said.append("gone"))
    loop.generate(request("same", [1] * 600, 1))
    loop.turn()
    told = [one if one == "gone" else str(one[1].error) for one in said]  # type: ignore[index]
    assert len(told) == 3 and "500 tokens" in told[0] and told[1] == "gone" and "600 tokens" in told[2]


def test_an_attempt_on_an_engine_that_moves_no_kv_is_refused_and_breaks_nothing() -> None:
    async def main() -> None:
        with engine() as backend:
            stream = backend.stream(request("a", [1, 2, 3], 4), attempt="t1", peer_url="http://127.0.0.1:1")
            with pytest.raises(InvalidRequest, match="no KV transfer"):
                await anext(stream)
            assert backend.ready() == ""
            assert await collect(backend, "b", [1, 2, 3], 4) == expected_tokens(
                [1, 2, 3], request("x", [1], 1).sampling, 4
            )
            backend.engine.loop.call(backend.engine.loop.scheduler.check)

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


def test_the_next_step_is_planned_while_one_runs_and_a_stall_is_visible() -> None:
    async def main() -> None:
        gated = Gated()
        with engine(executor=gated) as backend:
            task = asyncio.create_task(collect(backend, "a", [1, 2, 3], 6))
            await asyncio.wait_for(asyncio.to_thread(gated.queued.wait), DEADLINE_S)
            assert backend.engine.loop.scheduler.in_flight == 2
            assert backend.engine.loop.steps == 0
            assert backend.engine.loop.stalled_s() > 0
            gated.gate.set()
            assert await asyncio.wait_for(task, DEADLINE_S) == expected_tokens(
                [1, 2, 3], request("x", [1], 1).sampling, 6
            )
            # The turn of the last token may not be over.
            stalls = (backend.engine.loop.call(backend.engine.loop.stalled_s) for _ in range(200))
            assert not all(stalls)

    asyncio.run(main())


def test_waiting_for_a_peer_is_no_stall() -> None:
    """A long prompt, or one behind others, takes prefill minutes: decode is well meanwhile, and is after."""
    now = 0.0
    heard: list[Callable[[HandoffEvent], None]] = []

    class Arriving:
        def open_receive(self, job: ReceiveJob, now: float) -> Ticket:
            return Ticket(mode="memory", attempt=job.attempt, layout_digest="")

        def tick(self, now: float) -> None: ...

        def next_deadline(self) -> float:
            return now

    def handoff(notify: Callable[[HandoffEvent], None]) -> KvHandoff:
        heard.append(notify)
        return cast(KvHandoff, Arriving())

    gated, said = Gated(), list[tuple[str, Reply]]()
    loop = make_loop(said.extend, gated, handoff=handoff)
    loop._clock = lambda: now
    prompt = request("a", [1, 2, 3], 3)
    loop.generate(prompt, attempt="t", peer_url="http://127.0.0.1:1")
    loop.turn()
    now = 500.0
    loop.turn()
    assert loop.scheduler.has_work and loop.stalled_s() == 0
    assert loop.last_progress_s == 500, "who may run when a deadline has ended this one has not stood still until then"
    record = PrefillRecord(attempt="t", num_tokens=3, first_token=5, key_digest="", block_bytes=0)
    heard[0](Received(attempt="t", record=record, seconds=0.0))
    loop.turn()
    assert loop.scheduler.in_flight == 1 and loop.stalled_s() == 0, "it counts from the arrival"
    now = 700.0
    assert loop.stalled_s() == 200, "a step that does not end is one"
    gated.gate.set()


class Transfers:
    """A handoff that notes what is asked of it, and fails at one attempt."""

    def __init__(self, breaks: str) -> None:
        self.breaks = breaks
        self.asked: list[tuple[str, str]] = []

    def finish_send(self, attempt: str, result: PromptResult, now: float) -> None:
        self.asked.append(("finish", attempt))
        if attempt == self.breaks:
            raise RuntimeError("no such segment")

    def cancel(self, attempt: str, reason: str, now: float) -> None:
        self.asked.append(("cancel", attempt))

    def tick(self, now: float) -> None: ...

    def next_deadline(self) -> None: ...


def test_transfers_that_were_to_end_in_the_turn_that_breaks_end_all_the_same() -> None:
    """Peers hold blocks for them."""
    said: list[tuple[str, Reply]] = []
    executor, step = FakeExecutor(65, 4), Future[StepOutput]()
    executor.submit = lambda plan: step  # type: ignore[method-assign]
    transfers = Transfers("breaks")
    loop = make_loop(said.extend, executor, handoff=lambda notify: transfers)  # type: ignore[arg-type, return-value]
    loop.generate(request("runs", [1, 2], 5))
    loop.turn()
    result = PromptResult(num_tokens=2, first_token=1)
    ends: list[Effect] = [CancelAttempt("left", "its client left"), ("x", TokenChunk((5,))), FinishSend("done", result)]
    loop._inbox.put(lambda now: ends)
    step.set_exception(RuntimeError("no device"))
    with pytest.raises(RuntimeError, match="no device") as broken:
        loop.turn()
    loop._break(str(broken.value))
    assert transfers.asked == [("cancel", "left"), ("finish", "done")]
    assert said[0] == ("x", TokenChunk((5,)))

    transfers.asked.clear()
    said.clear()
    loop._inbox.put(lambda now: [("y", TokenChunk((6,))), FinishSend("breaks", result), *ends])
    with pytest.raises(RuntimeError, match="no such segment"):
        loop.turn()
    loop._break("no such segment")
    assert transfers.asked == [("finish", "breaks"), ("cancel", "left"), ("finish", "done")], "each once"
    assert said == [("y", TokenChunk((6,))), ("x", TokenChunk((5,)))], "each once"


class ByHand(FakeExecutor):
    """Steps end when the test says so."""

    def __init__(self) -> None:
        super().__init__(65, 4)
        self.submitted: list[tuple[StepPlan, Future[StepOutput]]] = []

    def submit(self, plan: StepPlan) -> Future[StepOutput]:
        future: Future[StepOutput] = Future()
        self.submitted.append((plan, future))
        return future

    def finish(self, number: int) -> None:
        plan, future = self.submitted[number]
        future.set_result(self.run(plan))


def test_an_answer_does_not_wait_until_its_blocks_are_published_and_freed() -> None:
    """Which of a prompt of 8,192 tokens takes more than a millisecond."""
    seen: list[tuple[FinishReason | None, PoolCounts]] = []

    def sink(replies: Sequence[tuple[str, Reply]]) -> None:
        for _, reply in replies:
            assert isinstance(reply, TokenChunk)
            seen.append((reply.finish_reason, loop.scheduler.pool.counts()))

    executor = ByHand()
    loop = make_loop(sink, executor)
    loop.generate(request("a", list(range(20)), 1))
    loop.turn()
    executor.finish(0)
    loop.turn()
    ((reason, counts),) = seen
    assert reason is FinishReason.LENGTH
    assert (counts.owned, counts.cached) == (5, 0), "the answer came last"
    assert (loop.snapshot.blocks.owned, loop.snapshot.blocks.cached) == (0, 5)
    loop.generate(request("b", list(range(20)), 1))  # whoever has the answer finds what was computed for it
    loop.turn()
    executor.finish(1)
    loop.turn()
    assert loop.scheduler.stats().prefix_hits == 16
    loop.scheduler.check()


def test_an_answer_is_not_lost_where_the_step_after_it_breaks_the_engine() -> None:
    """Both have ended before the loop looks."""
    ends: list[tuple[str, FinishReason | None]] = []

    def sink(replies: Sequence[tuple[str, Reply]]) -> None:
        ends.extend((sid, reply.finish_reason) for sid, reply in replies if isinstance(reply, TokenChunk))

    executor = ByHand()
    loop = make_loop(sink, executor)
    loop.generate(request("a", [1, 2, 3], 1))
    loop.generate(request("b", [4, 5, 6], 9))
    loop.turn()
    loop.turn()
    assert len(executor.submitted) == 2
    executor.finish(0)
    executor.submitted[1][1].set_exception(RuntimeError("the device is lost"))
    with pytest.raises(RuntimeError):
        while True:
            loop.turn()
    loop._break("the device is lost")
    assert dict(ends) == {"a": FinishReason.LENGTH, "b": FinishReason.ERROR}
    assert [sid for sid, reason in ends if reason is not None] in (["a", "b"], ["b", "a"])


@pytest.mark.parametrize("ended", [1, 2])
def test_an_answer_does_not_wait_for_the_next_plan_while_the_device_has_work(ended: int) -> None:
    """Nor does a device that has none wait for an answer to be given."""
    submitted: list[int] = []
    executor = ByHand()
    loop = make_loop(lambda replies: submitted.append(len(executor.submitted)), executor)
    loop.generate(request("a", [1, 2, 3], 9))
    loop.turn()
    loop.turn()
    assert len(executor.submitted) == 2 and not submitted
    for number in range(ended):
        executor.finish(number)
    while not submitted:
        loop.turn()
    assert submitted == [2 if ended == 1 else 3]
    assert len(executor.submitted) == 3


@pytest.mark.parametrize("moves_kv", [False, True])
def test_all_threads_end_within_one_deadline(moves_kv: bool) -> None:
    """Transfers have time of their own, however long the others take."""
    now, waits = 0.0, list[float]()

    class Hangs:
        ident = 1

        def join(self, timeout: float) -> None:
            nonlocal now
            waits.append(timeout)
            now += timeout

        stop = close = join

    loop = make_loop(lambda replies: None, FakeExecutor(65, 4))
    loop._clock = lambda: now
    loop._thread, loop._masks, loop._draft_model = Hangs(), Hangs(), Hangs()  # type: ignore[assignment]
    loop._handoff = Hangs() if moves_kv else None  # type: ignore[assignment]
    loop.stop(10.0)
    assert now == 10.0
    assert waits[-1] == (5.0 if moves_kv else 0.0)


def test_a_first_token_leaves_before_its_blocks_are_seen_to() -> None:
    """Those of a long prompt keep the interpreter for longer than the token needs to leave."""
    order: list[object] = []

    class Handoff:
        def send_blocks(self, attempt: str, blocks: Sequence[BlockRef], now: float) -> None:
            order.append("blocks")

        def finish_send(self, attempt: str, result: PromptResult, now: float) -> None:
            order.append("finish")

    world = World()
    exchange = Exchange(
        world.scheduler,
        cast(KvHandoff, Handoff()),
        lambda replies: order.append([sid for sid, _ in replies]),
        lambda timeout_s: order.append("left"),
    )
    world.add(request("t", list(range(9)), 4), kind=Kind.SEND, attempt="t")
    world.scheduler.begin_early("t")
    seq = world.scheduler.awaits_ticket("t")
    assert seq is not None
    exchange.effects += world.scheduler.give_ticket(seq, 0)
    plan, _ = world.scheduler.schedule(0.0)
    assert plan is not None
    exchange.effects += world.scheduler.complete(world.executor.run(plan), 0.0)
    exchange.effects.append(("other", TokenChunk((1,))))
    exchange.apply(0.0)
    assert order == [["t"], "left", "blocks", "blocks", "finish", ["other"]]
