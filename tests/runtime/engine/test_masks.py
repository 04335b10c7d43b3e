"""Masks beside the forward: a slow or failing grammar costs its own request alone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from engine_stack import engine
from engine_world import request

from isthmus_runtime.engine import masks as module
from isthmus_runtime.engine.backend import EngineBackend
from isthmus_runtime.engine.grammar_line import GrammarLine
from isthmus_runtime.engine.masks import MaskThread
from isthmus_runtime.errors import EngineFailed, InvalidRequest, Overloaded, RequestError
from isthmus_runtime.executor.fake import expected_tokens
from isthmus_runtime.interfaces.steps import Forced, Later, Outgrown
from isthmus_runtime.request import FinishReason, TokenChunk

DEADLINE_S = 20
ODD = b"\xaa" * 124


class Rule:
    """Odd tokens only; from the third on it waits for the gate, and fails if it is told to."""

    apart_s = 0.0

    def lost(self) -> RequestError | None:
        return None

    def __init__(self, error: BaseException | None = None) -> None:
        self.gate = threading.Event()
        self.error = error
        self.threads: set[str] = set()

    def allowed(self, generated: Sequence[int]) -> bytes | None:
        self.threads.add(threading.current_thread().name)
        if len(generated) >= 2:
            assert self.gate.wait(DEADLINE_S)
            if self.error is not None:
                raise self.error
        return ODD

    def forced(self, generated: Sequence[int], most: int) -> Forced:
        return Forced()


async def ask(backend: EngineBackend, rid: str, rule: Rule | None) -> list[TokenChunk]:
    wanted = request(rid, [1, 2, 3], 6)
    queue = backend._streams.open(rid)
    try:
        backend.engine.loop.generate(wanted, constraint=rule)
        chunks = []
        while not chunks or chunks[-1].finish_reason is None:
            reply = await queue.get()
            assert isinstance(reply, TokenChunk)
            chunks.append(reply)
        return chunks
    finally:
        backend._streams.close(rid)


@pytest.mark.parametrize("error", [None, EngineFailed("too complex"), ValueError("a flaw"), BaseException("panic")])
def test_others_go_on_while_a_mask_is_computed(error: BaseException | None) -> None:
    async def main() -> None:
        with engine() as backend:
            rule = Rule(error)
            slow = asyncio.create_task(ask(backend, "slow", rule))
            for number in range(5):
                chunks = await ask(backend, f"free {number}", None)
                tokens = [t for chunk in chunks for t in chunk.token_ids]
                assert tokens == expected_tokens([1, 2, 3], request("x", [1], 1).sampling, 6)
            assert not slow.done()
            rule.gate.set()
            chunks = await slow
            tokens = [t for chunk in chunks for t in chunk.token_ids]
            assert all(t % 2 for t in tokens)
            if error is None:
                assert len(tokens) == 6 and chunks[-1].finish_reason is FinishReason.LENGTH
            else:
                assert len(tokens) == 2 and chunks[-1].finish_reason is FinishReason.ERROR
                assert chunks[-1].error is not None and str(error) in str(chunks[-1].error)
            assert rule.threads == {"masks"}
            backend.engine.loop.call(backend.engine.loop.scheduler.check)
            assert not backend.engine.loop.call(lambda: backend.engine.loop.scheduler.has_work)

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


class Lost(Rule):
    """Refuses at once when it is told to, though nobody asks it."""

    refusal: RequestError | None = None

    def lost(self) -> RequestError | None:
        return self.refusal


def test_who_waits_for_a_row_ends_when_its_grammar_is_let_go() -> None:
    async def main() -> None:
        with engine(max_num_seqs=1) as backend:
            loop, running, waits, early = backend.engine.loop, Lost(), Lost(), Lost()
            first = asyncio.create_task(ask(backend, "runs", running))
            second = asyncio.create_task(ask(backend, "waits", waits))
            await asyncio.sleep(0)
            loop.call(lambda: None)  # it has both, and one row
            waits.refusal, early.refusal = Overloaded("let go", status=429), Overloaded("let go before", status=429)
            loop.end_lost()
            for task, words in ((second, "let go"), (asyncio.create_task(ask(backend, "early", early)), "go before")):
                chunks = await task
                assert [chunk.finish_reason for chunk in chunks] == [FinishReason.ERROR]
                assert isinstance(chunks[0].error, Overloaded) and words in str(chunks[0].error)
            assert not early.threads and not first.done()
            running.gate.set()
            assert (await first)[-1].finish_reason is FinishReason.LENGTH
            loop.call(loop.scheduler.check)

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


def test_a_late_mask_comes_once_its_token_was_seen() -> None:
    rule = Rule()
    rule.gate.set()
    thread = MaskThread(lambda: None)
    thread.start()
    try:
        masks = thread.beside(rule)
        with ThreadPoolExecutor(1) as executor:
            late = executor.submit(masks.late(1).wait, DEADLINE_S)
            assert masks.allowed([]) in (ODD, Later.MASK)
            assert not late.done(), "nobody has seen its token"
            assert masks.allowed([7]) in (ODD, Later.MASK)
            assert late.result(DEADLINE_S) == ODD
            dropped = executor.submit(masks.late(2).wait, DEADLINE_S)
            masks.drop()
            assert dropped.result(DEADLINE_S) is None
            rule.gate.clear()
            slow = masks.late(2)
            assert masks.allowed([7, 9]) is Later.MASK
            assert executor.submit(slow.wait, 0.0).result(DEADLINE_S) is Later.MASK
            rule.error = EngineFailed("too complex")
            rule.gate.set()
            assert executor.submit(slow.wait, DEADLINE_S).result(DEADLINE_S) is Later.MASK
            with pytest.raises(EngineFailed, match="too complex"):
                masks.allowed([7, 9])
    finally:
        rule.gate.set()
        thread.stop(DEADLINE_S)


class Costs:
    """Uses 20 ms of processor time for a mask if it is told to, and says when it was asked."""

    apart_s = 0.0

    def lost(self) -> RequestError | None:
        return None

    def __init__(self, name: str, order: list[str], much: bool = False) -> None:
        self.name, self.order, self.much = name, order, much

    def allowed(self, generated: Sequence[int]) -> bytes:
        self.order.append(self.name)
        began = time.thread_time()
        while self.much and time.thread_time() < began + 0.02:
            pass
        return ODD

    def forced(self, generated: Sequence[int], most: int) -> Forced:
        return Forced()


def test_requests_whose_masks_cost_little_do_not_wait_for_costly_ones() -> None:
    order: list[str] = []
    gate = Rule()
    thread = MaskThread(lambda: None)
    thread.start()
    try:
        costly, cheap, late = (
            thread.beside(Costs(name, order, name == "costly")) for name in ("costly", "cheap", "late")
        )
        first = costly.late(0)
        costly.allowed([])
        assert first.wait(DEADLINE_S) == ODD
        held = thread.beside(gate)
        held.allowed([1, 2])  # the thread is busy until the gate opens
        last = costly.late(1)
        costly.allowed([1])
        cheap.allowed([])
        late.allowed([])
        gate.gate.set()
        assert last.wait(DEADLINE_S) == ODD
        assert order == ["costly", "cheap", "late", "costly"]
    finally:
        gate.gate.set()
        thread.stop(DEADLINE_S)


class Outgrows(Costs):
    """Has to be renewed before its first mask, which lasts until the gate opens."""

    def __init__(self, error: RequestError | None = None) -> None:
        super().__init__("outgrown", [])
        self.renewed, self.gate, self.error = 0, threading.Event(), error

    def allowed(self, generated: Sequence[int]) -> bytes:
        if not self.renewed:
            raise Outgrown(self.renew)
        return super().allowed(generated)

    def renew(self) -> None:
        assert self.gate.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error
        self.renewed += 1


@pytest.mark.parametrize("error", [None, InvalidRequest("too large")])
def test_a_constraint_is_renewed_while_others_have_their_masks(error: RequestError | None) -> None:
    outgrows = Outgrows(error)
    thread = MaskThread(lambda: None)
    thread.start()
    try:
        masks, others = thread.beside(outgrows), thread.beside(Costs("cheap", []))
        late = masks.late(0)
        for count in range(3):
            masks.allowed([])
            other = others.late(count)
            others.allowed([7] * count)
            assert other.wait(DEADLINE_S) == ODD
        assert masks.allowed([]) is Later.MASK and thread.busy
        outgrows.gate.set()
        assert late.wait(DEADLINE_S) == (ODD if error is None else Later.MASK)
        if error is None:
            assert masks.allowed([]) == ODD and outgrows.renewed == 1
        else:
            with pytest.raises(InvalidRequest, match="too large"):
                masks.allowed([])
    finally:
        outgrows.gate.set()
        thread.stop(DEADLINE_S)


def test_a_request_whose_masks_took_too_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_MASKS_S", 0.0)
    monkeypatch.setattr(module, "MOST_OF_A_TOKEN_S", 60.0)
    thread = MaskThread(lambda: None)
    thread.start()
    try:
        masks = thread.beside(Costs("costly", [], True))

        def drawn(count: int) -> bytes | Later | None:
            job = masks.late(count)
            masks.allowed([7] * count)
            return job.wait(DEADLINE_S)

        assert [drawn(0), drawn(1)] == [ODD, ODD], "a token more may take more"
        monkeypatch.setattr(module, "MOST_OF_A_TOKEN_S", 0.001)
        assert drawn(2) is Later.MASK
        with pytest.raises(InvalidRequest, match=r"after 2 tokens: its masks have taken 0\.\d s .*simplify"):
            masks.allowed([7, 7])
    finally:
        thread.stop(DEADLINE_S)


@pytest.mark.parametrize(
    "asked",
    [
        {"stop_token_ids": (99, 100)},
        {"logit_bias": ((-1, 1.0),)},
        {"allowed_token_ids": (1, 100)},
        {"bad_words": ((1,), (2, 100))},
        {"bad_words": ((),)},
    ],
)
def test_ids_that_the_model_does_not_have_never_reach_it(asked: dict[str, Any]) -> None:
    async def main() -> None:
        with engine() as stack:
            backend = EngineBackend(stack.engine, stack._streams, vocab_size=100)
            wanted = request("r", [1, 2, 3], 6)
            wrong = replace(wanted, sampling=replace(wanted.sampling, **asked))
            with pytest.raises(InvalidRequest, match=f"{next(iter(asked))}: token id"):
                await anext(backend.stream(wrong))

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


def test_grammars_are_compiled_in_turns_and_short_ones_first() -> None:
    line: GrammarLine[str] = GrammarLine()
    order = []
    for number in range(6):
        line.add("many", 60_000 + number, f"many {number}")
    line.add("few", 90_000, "few, long")
    line.add("many", 500, "many, short")
    for _ in range(8):
        whose, work = line.next()
        order.append(work)
        line.took(whose, 1.0)
    # By use, then by length; each fourth by age.
    assert order[:3] == ["many, short", "few, long", "many 0"] and order[3] == "many 1"
    assert not line._used and not line._waiting


def test_each_fourth_grammar_goes_by_age() -> None:
    line: GrammarLine[str] = GrammarLine()
    line.add("a", 90_000, "long")
    order = []
    for number in range(8):
        line.add("a", 10, f"short {number}")
        whose, work = line.next()
        order.append(work)
        line.took(whose, 0.1)
    assert order[3] == "long"
