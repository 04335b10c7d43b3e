"""Adapters of all engines at once: what one engine answers must not hide what the others did."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from isthmus_runtime.errors import EngineLost, InvalidRequest, Overloaded, RequestError, UnknownModel
from isthmus_runtime.protocol.info import AdapterInfo
from isthmus_runtime.request import AdapterName, FinishReason
from isthmus_runtime.router.adapters import FleetAdapters
from isthmus_runtime.router.passed_on import OwnTokenizer

UNKNOWN = UnknownModel("lora_name: no adapter 'sql' is loaded")
WRONG = InvalidRequest("lora_path: there is no folder")


def change(path: str | None, *answers: Exception | None, state: str = "ready") -> int:
    """Ask engines that answer so; how often the pool was told to ask them again."""
    again: list[int] = []
    left = dict(enumerate(answers))

    async def adapter(url: str, call: object) -> None:
        if (error := left[int(url)]) is not None:
            raise error

    statuses = [SimpleNamespace(url=str(number), state=state, role="decode") for number in left]

    async def ask_again() -> None:
        again.append(1)

    pool = SimpleNamespace(statuses=lambda: statuses, ask_again=ask_again)
    adapters = FleetAdapters(cast(Any, pool), cast(Any, SimpleNamespace(adapter=adapter)))
    asyncio.run(adapters.change("sql", path))
    return len(again)


def test_all_have_done_it() -> None:
    assert change("sql", None, None) == change(None, None, None) == 1


def test_an_unload_that_is_repeated_for_one_that_failed_succeeds() -> None:
    assert change(None, None, UNKNOWN, UNKNOWN) == 1


@pytest.mark.parametrize(
    ("path", "answers", "kind", "text"),
    [
        (None, (UNKNOWN, UNKNOWN), UnknownModel, "no adapter 'sql'"),
        (None, (UNKNOWN, OSError("refused")), EngineLost, r"2 of 2 engines failed, none did it; repeat this \("),
        (None, (None, OSError("refused"), UNKNOWN), EngineLost, "1 of 3 engines failed, the others did it"),
        ("sql", (WRONG, WRONG), InvalidRequest, "no folder"),
        ("sql", (None, WRONG), EngineLost, "1 of 2 engines failed"),
    ],
)
def test_who_failed_is_told(
    path: str | None, answers: tuple[Exception | None, ...], kind: type[RequestError], text: str
) -> None:
    with pytest.raises(kind, match=text):
        change(path, *answers)


def test_where_engines_are_is_not_told() -> None:
    refused = OSError("Connect call failed ('10.1.2.3', 8000)")
    with pytest.raises(EngineLost, match=r"2 of 3 engines .*\(2 x decode: did not answer or broke; .*log") as caught:
        change("sql", None, refused, refused)
    assert "10.1.2.3" not in caught.value.message and caught.value.status == 502


def test_no_engine_is_ready() -> None:
    with pytest.raises(Overloaded, match="no engine is ready"):
        change("sql", None, state="starting")


def test_an_adapter_is_known_while_the_engines_that_have_it_are_away(rig: Any, run: Any, kit: Any) -> None:
    async def main() -> None:
        engine, other = kit.Engine("unified"), kit.Engine("unified")
        async with rig(engine, other) as r:
            await r.router.adapters.change("sql", "d1")
            assert set(r.pool.adapters) == {"sql"}
            for one in (engine, other):
                one.is_ready = False
            await r.until(lambda pool: not pool.fleet.decode)
            assert set(r.pool.adapters) == {"sql"}
            other.adapters = ()
            other.is_ready = True
            await r.until(lambda pool: len(pool.fleet.decode) == 1)
            assert set(r.pool.adapters) == {"sql"}, "the engine that has it will be back"
            engine.adapters = ()
            engine.is_ready = True
            await r.until(lambda pool: len(pool.fleet.decode) == 2)
            assert not r.pool.adapters

    run(main())


@pytest.mark.parametrize("how", ["not ready", "another tokenizer"])
def test_what_a_name_stands_for_is_what_engines_that_answer_have(rig: Any, run: Any, kit: Any, how: str) -> None:
    """Those that were away outvoted the one that could answer: each request waited for them, and had 503."""

    async def main() -> None:
        olds, new = [kit.Engine("unified") for _ in range(2)], kit.Engine("unified")
        for one in (*olds, new):
            one.vocabulary = "new"
        async with rig(*olds, new, tokenizer=OwnTokenizer("new", lambda prompt: [1])) as r:
            await r.router.adapters.change("sql", "d1")
            await r.router.adapters.change("other", "d3")
            new.adapters = (AdapterInfo(name="sql", digest="d2"),)
            for one in olds:
                if how == "not ready":
                    one.is_ready = False
                else:
                    one.vocabulary = "old"
            await r.until(lambda pool: [set(one.adapters) for one in pool.fleet.decode] == [{"d2"}])
            found = {name: adapter.digest for name, adapter in r.pool.adapters.items()}
            # The others come back, if ever they are this router's.
            assert found == {"sql": "d2"} | ({"other": "d3"} if how == "not ready" else {})

    run(main())


def test_what_was_changed_may_be_asked_for_at_once(rig: Any, run: Any, kit: Any) -> None:
    """Also where a probe was under way that was answered before, and where another name has the same content."""

    async def main() -> None:
        engines = [kit.Engine("unified"), kit.Engine("unified")]
        async with rig(*engines, discovery_interval_s=25.0) as r:
            names = lambda: {name: adapter.digest for name, adapter in r.pool.adapters.items()}  # noqa: E731
            change = r.router.adapters.change
            await change("sql", "d1")
            assert names() == {"sql": "d1"}
            await change("same", "d1")
            assert names() == {"sql": "d1", "same": "d1"}
            slow, probes = engines[0], engines[0].probes
            slow.frozen = asyncio.Event()
            r.pool._engines[slow.url].wake.set()
            await slow.until(lambda e: e.probes == probes + 1)
            changing = asyncio.ensure_future(change("sql", "d2", replace=True))
            await slow.until(lambda e: any(adapter.digest == "d2" for adapter in e.adapters))
            slow.frozen.set()
            await changing
            assert names() == {"sql": "d2", "same": "d1"}
            await change("same", None)
            assert names() == {"sql": "d2"}

    run(main())


def asks(kit: Any, digest: str) -> Any:
    return replace(kit.request(), adapter=AdapterName("sql", digest))


@pytest.mark.parametrize("changed", [(0,), (0, 1), (1,)])
@pytest.mark.parametrize("roles", [("unified", "unified"), ("prefill", "decode")])
def test_a_request_follows_its_adapter_to_another_content(
    rig: Any, run: Any, kit: Any, roles: tuple[str, str], changed: tuple[int, ...]
) -> None:
    """Engines are given it one after the other, and a router learns that by its next probe: until then each request
    had 404, though what it asks for was there all the time."""

    async def main() -> None:
        engines = [kit.Engine(role) for role in roles]
        async with rig(*engines, discovery_interval_s=25.0) as r:
            await r.router.adapters.change("sql", "d1")
            for number in changed:
                engines[number].adapters = (AdapterInfo(name="sql", digest="d2"),)
            for number in range(4):
                chunks = await kit.collect(r.backend, replace(asks(kit, "d1"), request_id=f"r{number}"))
                assert chunks[-1].finish_reason is FinishReason.STOP
            served = {call.request.adapter.digest for engine in engines for call in engine.generates}
            assert served <= {"d1", "d2"} and r.idle()

    run(main())


def test_a_request_that_was_planned_before_a_change_gets_the_new_content(rig: Any, run: Any, kit: Any) -> None:
    async def main() -> None:
        engine = kit.Engine("unified")
        async with rig(engine, discovery_interval_s=25.0) as r:
            await r.router.adapters.change("sql", "d2")
            assert (await kit.collect(r.backend, asks(kit, "d1")))[-1].finish_reason is FinishReason.STOP
            assert [call.request.adapter.digest for call in engine.generates] == ["d2"]

    run(main())


@pytest.mark.parametrize("left", [(), (AdapterInfo(name="sql", digest="d1"),)])
def test_an_adapter_that_is_gone_is_unknown(rig: Any, run: Any, kit: Any, left: tuple[AdapterInfo, ...]) -> None:
    """And one that an engine tells and refuses all the same is not tried for ever."""

    async def main() -> None:
        engine = kit.Engine("unified")
        async with rig(engine, discovery_interval_s=25.0) as r:
            await r.router.adapters.change("sql", "d1")
            engine.adapters = left
            if left:
                engine.before = [UNKNOWN]
            with pytest.raises(UnknownModel):
                await kit.collect(r.backend, asks(kit, "d1"))
            assert len(engine.generates) == 1 and r.idle()

    run(main())
