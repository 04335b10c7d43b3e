"""Chunks that are taken where they arrive: the same as by waiting for each, whatever the engine says, and whatever
becomes of them."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_runtime.errors import EngineFailed, EngineLost, RequestError, TransferFailed
from isthmus_runtime.protocol.lines import parse_line, token_line
from isthmus_runtime.request import FinishReason, TokenChunk, TokenLogprobs
from isthmus_runtime.router.token_lines import TokenLines
from isthmus_runtime.serving.call import Cut

LENGTH = FinishReason.LENGTH


def ids(chunks):
    return [i for c in chunks for i in c.token_ids]


def summed(chunks):
    """What must not depend on how lines come together."""
    last = chunks[-1]
    return (
        ids(chunks),
        [e for c in chunks for e in c.logprobs],
        [c.note for c in chunks if c.note],
        last.finish_reason,
        None if last.error is None else (type(last.error), last.error.stage),
    )


async def pulled(backend, wanted):
    return [chunk async for chunk in backend.generate(wanted)]


def some_line(r):
    kind = r.randrange(6)
    if kind < 4:
        return TokenChunk((r.randrange(50),))
    if kind == 4:
        return TokenChunk(tuple(r.choices(range(50), k=r.randrange(4))))
    return TokenChunk((5,), (TokenLogprobs(5, -0.5),))


def some_end(r, die):
    kind = r.randrange(5)
    if kind == 0:
        return [die]
    if kind == 1:
        return []  # it just ends
    if kind == 2:
        return [TokenChunk(finish_reason=FinishReason.ERROR, error=TransferFailed("x", stage="s"))]
    return [TokenChunk((7,) * r.randrange(3), finish_reason=r.choice([LENGTH, FinishReason.STOP]))]


def in_pieces(r, script):
    """The lines as bytes that are cut anywhere, or come together."""
    found, held = [], b""
    for item in script:
        if not isinstance(item, TokenChunk):
            found += [held, item] if held else [item]
            held = b""
            continue
        held += token_line(item)
        cut = r.choice([0, len(held), r.randrange(len(held))])
        found += [held[:cut]] if cut else []
        held = held[cut:]
    return found + ([held] if held else [])


@pytest.mark.parametrize("seed", range(40))
def test_pushed_and_pulled_are_one_answer(rig, run, kit, seed):
    print("seed", seed)
    r = random.Random(seed)
    script = [kit.tokens(1, note="local"), *(some_line(r) for _ in range(r.randrange(12))), *some_end(r, kit.DIE)]

    async def pushed(backend, wanted):
        found = []

        async def later(chunk):
            await asyncio.sleep(0)
            found.append(chunk)
            return True

        def take(chunk):
            if r.random() < 0.5:
                return lambda: later(chunk)
            found.append(chunk)
            return True

        await backend.push(wanted, take)
        return found

    async def main():
        engine = kit.Engine("unified")
        async with rig(engine) as service:
            answers = []
            for get in (pulled, pushed):
                engine.local_script = in_pieces(r, script)
                await service.until_ready()
                answers.append(await get(service.backend, kit.request()))
                assert [c.finish_reason is not None for c in answers[-1]] == [False] * (len(answers[-1]) - 1) + [True]
                assert service.idle() and service.metric("isthmus_router_requests_in_flight") == 0
            assert summed(answers[0]) == summed(answers[1])

    run(main())


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("how", ["enough", "fails", "breaks"])
def test_whoever_takes_chunks_ends_the_request(rig, run, kit, at, later, how):
    """At the first chunk, at one that arrives alone, and at the first of two that arrive together."""
    errors = {"enough": None, "fails": EngineFailed("no"), "breaks": Cut()}

    async def main():
        never, error, found = asyncio.Event(), errors[how], []
        gates = [asyncio.Event(), asyncio.Event()]
        engine = kit.Engine("unified")
        together = token_line(kit.tokens(3, note="a")) + token_line(kit.tokens(4, note="b"))
        engine.local_script = [kit.tokens(1), gates[0], kit.tokens(2), gates[1], together, never]

        def said():
            for gate in gates[: len(found)]:
                gate.set()
            if len(found) < at:
                return True
            if error is not None:
                raise error
            return False

        async def told():
            return said()

        def take(chunk):
            found.extend(chunk.token_ids)
            return told if later else said()

        async with rig(engine) as service:
            push = service.backend.push(kit.request(), take)
            if error is None:
                await push
            else:
                with pytest.raises(type(error)):
                    await push
            await engine.until(lambda e: e.cancelled == 1)
            assert found == [1, 2, 3][:at]
            assert service.idle() and service.metric("isthmus_router_requests_in_flight") == 0

    run(main())


@pytest.mark.parametrize("waits", [False, True])
def test_whoever_leaves_ends_the_request(rig, run, kit, waits):
    """While the engine says nothing, and while the client has to be waited for."""

    async def main():
        never, taken = asyncio.Event(), asyncio.Event()
        engine = kit.Engine("unified")
        engine.local_script = [kit.tokens(1), kit.tokens(2), never]

        async def wait():
            await never.wait()

        def take(chunk):
            if 2 in chunk.token_ids:
                taken.set()
                return wait if waits else True
            return True

        async with rig(engine) as service:
            task = asyncio.create_task(service.backend.push(kit.request(), take))
            await taken.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await engine.until(lambda e: e.cancelled == 1)
            assert service.idle() and service.metric("isthmus_router_requests_in_flight") == 0

    run(main())


def test_an_engine_that_is_lost_in_mid_stream_is_the_last_chunk(rig, run, kit):
    async def main():
        engine = kit.Engine("unified")
        gate, found = asyncio.Event(), []
        engine.local_script = [kit.tokens(1), kit.tokens(2), gate, kit.DIE]

        def take(chunk):
            found.append(chunk)
            if 2 in chunk.token_ids:
                gate.set()
            if chunk.error is not None:
                raise chunk.error
            return True

        async with rig(engine) as service:
            with pytest.raises(EngineLost):
                await service.backend.push(kit.request(), take)
            assert ids(found) == [1, 2] and service.idle()

    run(main())


_CHUNKS = st.one_of(
    st.lists(st.integers(0, 2**40), max_size=3).map(lambda ids: TokenChunk(tuple(ids))),
    st.just(TokenChunk((1,), (TokenLogprobs(1, -0.25),))),
    st.builds(lambda note: TokenChunk((3,), note=note), st.sampled_from(["local", 'a"]}\\n', ""])),
)
_ENDS = st.builds(lambda ids, reason: TokenChunk(ids, (), reason), st.sampled_from([(), (9,), (9, 8)]),
                  st.sampled_from([*FinishReason]))  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(
    chunks=st.lists(_CHUNKS, max_size=8), end=_ENDS, cuts=st.lists(st.integers(0, 400), max_size=8), eager=st.booleans()
)
def test_lines_say_the_same_however_they_are_cut(chunks, end, cuts, eager):
    raw = b"".join(map(token_line, [*chunks, end]))
    places = sorted({0, len(raw), *(c for c in cuts if c < len(raw))})
    lines, found = TokenLines(), []

    def others():
        while lines:
            if (plain := lines.plain()) is not None:
                found.append(plain)
            else:
                found.append(parse_line(lines.pop()))

    for a, b in pairwise(places):
        if eager:
            if (plain := lines.plain_of(raw[a:b])) is not None:
                found.append(plain)
        else:
            lines.add(raw[a:b])
        others()
    assert ids(found) == ids([*chunks, end])
    assert [e for c in found for e in c.logprobs] == [e for c in chunks for e in c.logprobs]
    assert [c.note for c in found if c.note] == [c.note for c in chunks if c.note]
    assert [c.finish_reason for c in found if c.finish_reason] == [end.finish_reason]
    assert found[-1].finish_reason is end.finish_reason and not lines


@pytest.mark.parametrize(
    "line",
    [
        b'{"t":[1]]',
        b'{"t":[1}}',
        b'{"t":[1]',
        b'{"t":[-1]}',
        b'{"t":[ 1]}',
        b'{"t":[1],"f":"stopped"}',
        b'{"t":[x]}',
        b"",
    ],
)
def test_only_what_is_plain_is_taken_for_it(line):
    lines = TokenLines()
    assert lines.plain_of(line + b"\n") is None
    lines = TokenLines()
    lines.add(line + b"\n")
    assert lines.plain() is None and lines.pop() == line


def test_a_line_that_is_none_ends_the_request(rig, run, kit):
    async def main():
        engine = kit.Engine("unified")
        gate = asyncio.Event()
        engine.local_script = [kit.tokens(1), gate, b'{"t":[1]]\n']
        found = []

        def take(chunk):
            gate.set()
            found.append(chunk)
            return True

        async with rig(engine) as service:
            await service.backend.push(kit.request(), take)
            assert ids(found) == [1]
            assert isinstance(found[-1].error, RequestError) and "not a valid chunk" in found[-1].error.message
            assert service.idle()

    run(main())
