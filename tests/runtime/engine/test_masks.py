"""Masks beside the forward: a slow or failing grammar costs its own request alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from engine_stack import engine
from engine_world import request

from isthmus_runtime.engine.backend import EngineBackend
from isthmus_runtime.engine.masks import MaskThread
from isthmus_runtime.errors import EngineFailed, InvalidRequest
from isthmus_runtime.executor.fake import expected_tokens
from isthmus_runtime.interfaces.steps import Forced, Later
from isthmus_runtime.request import FinishReason, TokenChunk

DEADLINE_S = 20
ODD = b"\xaa" * 124


class Rule:
    """Odd tokens only; from the third on it waits for the gate, and fails if it is told to."""

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


class Timed:
    """A grammar whose masks take a time of their own, on a clock that is moved by hand; `order`: who was computed."""

    now = threading.local()

    def __init__(self, name: str, takes_s: float, order: list[str], gate: threading.Event | None = None) -> None:
        self.name, self.takes_s, self.order, self.gate = name, takes_s, order, gate

    @classmethod
    def clock(cls) -> float:
        return float(getattr(cls.now, "s", 0.0))

    def allowed(self, generated: Sequence[int]) -> bytes | None:
        if self.gate is not None:
            assert self.gate.wait(DEADLINE_S)
        type(self).now.s = self.clock() + self.takes_s
        self.order.append(self.name)
        return ODD

    def forced(self, generated: Sequence[int], most: int) -> Forced:
        return Forced()


def mask(masks: Any, generated: list[int]) -> None:
    """Ask, and wait until it is there."""
    late = masks.late(len(generated))
    masks.allowed(generated)
    assert late.wait(DEADLINE_S) == ODD


def test_slow_grammars_hold_up_each_other_and_share_evenly() -> None:
    """One of forty bytes held up those of all tenants for minutes."""
    order: list[str] = []
    thread = MaskThread(lambda: None, Timed.clock)
    thread.start()
    gate = threading.Event()
    gate.set()
    try:
        slow = {name: thread.beside(Timed(name, s, order, gate)) for name, s in (("a", 1.0), ("b", 0.1), ("c", 0.1))}
        for masks in slow.values():
            mask(masks, [])
        mask(slow["a"], [1])
        gate.clear()
        waits = [slow["b"].late(1), slow["b"].allowed([1]), slow["a"].allowed([1, 1]), slow["c"].allowed([1])]
        quick = thread.beside(Timed("quick", 0.001, order))
        for count in range(50):
            mask(quick, [1] * count)
        assert order.count("quick") == 50
        assert waits[1] is Later.MASK
        gate.set()
        late = slow["a"].late(2)
        while late.wait(DEADLINE_S) != ODD:
            pass
        assert [name for name in order if name != "quick"] == ["a", "b", "c", "a", "b", "c", "a"]
    finally:
        gate.set()
        thread.stop(DEADLINE_S)
    assert not thread.busy


def test_masks_that_take_far_too_long_end_their_request() -> None:
    thread = MaskThread(lambda: None, Timed.clock)
    thread.start()
    try:
        masks = thread.beside(Timed("a", 2.0, []))
        mask(masks, [])
        mask(masks, [1])
        late = masks.late(2)
        masks.allowed([1, 1])
        assert late.wait(DEADLINE_S) is Later.MASK
        with pytest.raises(InvalidRequest, match=r"took 6\.0 s to work out for 2 tokens; simplify the grammar"):
            masks.allowed([1, 1])
        usual = thread.beside(Timed("b", 0.029, []))
        for count in range(300):
            mask(usual, [1] * count)
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
