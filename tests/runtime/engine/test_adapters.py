"""Slots of adapters: every row computes with its own, none is taken from a row, nobody waits for ever."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_stack import engine
from engine_world import Flood, World, request
from executors import Gated
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_runtime.engine.adapter_registry import MOST_TOLD, AdapterRegistry
from isthmus_runtime.engine.adapters import AdapterSlots
from isthmus_runtime.engine.backend import EngineBackend
from isthmus_runtime.engine.local import LocalEngine
from isthmus_runtime.engine.loop import EngineLoop
from isthmus_runtime.errors import ConfigError, DeadlineExceeded, InvalidRequest, UnknownModel
from isthmus_runtime.executor.fake import FakeExecutor, expected_tokens
from isthmus_runtime.interfaces.steps import AdapterSlot
from isthmus_runtime.protocol.info import AdapterInfo
from isthmus_runtime.request import AdapterName, FinishReason, GenerateRequest, SamplingParams

A, B, C, D = (AdapterName(name, name) for name in "abcd")


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0)


@settings(max_examples=60, deadline=None)
@given(
    jobs=st.lists(
        st.tuples(
            st.sampled_from([None, "a", "b", "c", "d"]), st.integers(1, 14), st.integers(1, 12), st.integers(0, 3)
        ),
        min_size=1,
        max_size=14,
    ),
    slots=st.integers(1, 3),
    blocks=st.integers(9, 33),
    depth=st.integers(1, 2),
    retired=st.sampled_from([None, "a", "b"]),
)
def test_every_row_computes_with_its_own(
    jobs: list[tuple[str | None, int, int, int]], slots: int, blocks: int, depth: int, retired: str | None
) -> None:
    """Rows, slots and blocks are short: requests wait, are preempted and come back. Prompts share beginnings."""
    world = World(num_blocks=blocks, max_model_len=28, depth=depth, max_loras=slots)
    adapters = {name: world.load(name) for name in "abcd"}
    for number, (name, length, count, pause) in enumerate(jobs):
        world.add(request(f"r{number}", list(range(1, length + 1)), count, adapter=adapters.get(name or "")))
        for _ in range(pause):
            world.turn()
    if retired is not None:
        # Its requests go on; its weights go after the last.
        world.scheduler.retire_adapter(retired)
        with pytest.raises(UnknownModel, match="does not have it"):
            world.add(request("late", [1], 1, adapter=adapters[retired]))
    world.run()
    for number, (name, length, count, _) in enumerate(jobs):
        expected = expected_tokens(range(1, length + 1), greedy(count), count, adapter=name or "")
        assert world.tokens[f"r{number}"] == expected, f"r{number} with {name}"
    world.turn()
    if retired is not None:
        assert retired not in world.scheduler.adapters.in_slots()
        assert world.scheduler.unused_adapters() == []


def test_a_request_without_an_adapter_passes_those_that_wait_for_a_slot() -> None:
    world = World(max_loras=1)
    a, b = world.load("a"), world.load("b")
    world.add(request("long", [1, 2], 40, adapter=a))
    world.turn()
    world.add(request("waits", [1, 2], 4, adapter=b))
    world.add(request("plain", [1, 2], 4))
    for _ in range(12):
        world.turn()
    assert world.finish("plain") is FinishReason.LENGTH
    assert not world.tokens["waits"] and not world.ends["waits"]
    world.run()
    assert world.tokens["waits"] == expected_tokens([1, 2], greedy(4), 4, adapter="b")


def test_an_endless_stream_for_one_adapter_does_not_starve_another() -> None:
    world = World(max_loras=1, max_num_seqs=3)
    a, b = world.load("a"), world.load("b")
    world.add(request("a0", [1], 6, adapter=a))
    world.turn()
    world.add(request("b", [2], 2, adapter=b))
    number = 0
    while not world.ends["b"]:
        number += 1
        world.add(request(f"a{number}", [1], 6, adapter=a))
        world.turn()
        assert number < 30, "b never came to its turn"


def test_waiting_for_a_slot_ends_by_the_deadline_of_the_queue() -> None:
    world = World(max_loras=1)
    a, b = world.load("a"), world.load("b")
    world.add(request("long", [1], 50, adapter=a))
    world.turn()
    world.add(request("waits", [1], 4, adapter=b))
    world.turn()
    world.now += 101
    world.turn()
    assert isinstance(world.ends["waits"][0].error, DeadlineExceeded)
    world.run()


def test_what_a_withdrawn_step_was_to_load_is_loaded_by_a_later_one() -> None:
    world = World(max_loras=1, max_num_seqs=2)
    a = world.load("a")
    world.add(request("plain", [1], 20))
    first, _ = world.scheduler.schedule(0.0)
    world.add(request("gone", [1], 4, adapter=a))
    second, _ = world.scheduler.schedule(0.0)
    assert first is not None and second is not None and second.adapters == (AdapterSlot(1, "a", "a"),)
    # The only row of the step ends before it has begun.
    alone = [w for w in world.scheduler.steps.steps[-1][1] if w[0].sid == "plain"]
    for sid in ("gone", *(w[0].sid for w in alone)):
        world.scheduler.abort(sid, "", "left")
    assert world.scheduler.without_ended(second, 0.0) is None
    world.take(world.scheduler.complete(world.executor.run(first), 0.1))
    world.add(request("again", [1], 4, adapter=a))
    world.run()
    assert world.tokens["again"] == expected_tokens([1], greedy(4), 4, adapter="a")


def test_the_least_recently_started_gives_way() -> None:
    slots = AdapterSlots(2)
    for adapter in (A, B, C):
        slots.add(adapter)
    for adapter in (A, B, A, C):
        slots.begin()
        assert slots.may_start(adapter.digest)
        slots.start(adapter.digest)
        slots.stopped(adapter.digest)
    assert slots.in_slots() == ("a", "c")
    assert [load.digest for load in slots.take_loads()] == ["a", "c"] and slots.take_loads() == ()


def test_another_content_of_the_name_is_told() -> None:
    slots = AdapterSlots(1)
    slots.add(AdapterName("sql", "old"))
    with pytest.raises(
        UnknownModel, match=r"adapter 'sql' of content new was asked for, and this engine has another.*old"
    ):
        slots.arrived(AdapterName("sql", "new"))


def adapter(folder: Path, text: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_text(text)
    return str(folder)


def loop_of(backend: EngineBackend) -> EngineLoop:
    assert isinstance(backend.engine, LocalEngine)
    return backend.engine.loop


def test_registry(tmp_path: Path) -> None:
    """Loading, replacing and unloading while requests run; what is refused, and by which words."""
    executor = FakeExecutor(65, 4)

    async def main() -> None:
        with engine(executor=executor, max_loras=1) as backend:
            registry = AdapterRegistry(loop_of(backend), executor, taken=("base",), folder=str(tmp_path))

            async def ask(name: str, named: AdapterName, count: int = 6) -> list[int]:
                asked = GenerateRequest(
                    request_id=name, prompt_token_ids=(1, 2, 3, 4, 5), sampling=greedy(count), adapter=named
                )
                return [t async for chunk in backend.generate(asked) for t in chunk.token_ids]

            adapter(tmp_path / "one", "first")
            registry.change("sql", "one")
            first = registry.names[0]
            expected = expected_tokens([1, 2, 3, 4, 5], greedy(40), 40, adapter=first.digest)
            assert await ask("r1", first) == expected[:6]
            running = asyncio.ensure_future(ask("long", first, 40))
            await asyncio.sleep(0)
            adapter(tmp_path / "one", "second")
            with pytest.raises(InvalidRequest, match="load_inplace"):
                registry.change("sql", "one")
            registry.change("sql", "one", replace=True)
            second = registry.names[0]
            assert second.digest != first.digest
            assert await running == expected
            # Neither the old name's requests nor its KV.
            assert await ask("r2", second) == expected_tokens([1, 2, 3, 4, 5], greedy(6), 6, adapter=second.digest)
            with pytest.raises(UnknownModel, match="has another one of this name"):
                await ask("r3", first)
            registry.change("sql", None)
            assert registry.names == ()
            with pytest.raises(UnknownModel):
                await ask("r4", second)
            with pytest.raises(UnknownModel, match="no adapter 'sql' is loaded"):
                registry.change("sql", None)
            loop_of(backend).call(loop_of(backend).scheduler.check)

            def refused(name: str, path: str) -> str:
                with pytest.raises(InvalidRequest) as error:
                    registry.change(name, path)
                assert str(tmp_path) not in error.value.message
                return error.value.message

            (tmp_path / "link").symlink_to("/usr")
            for path in ("..", "/usr", "link", "missing", "one\0", "one/adapter_model.safetensors"):
                assert "no folder" in refused("x", path), path
            (tmp_path / "empty").mkdir()
            assert refused("x", "empty") == "lora_path: empty has no files"
            for name in ("base", "a\nCRITICAL forged", "\x7f"):
                assert "cannot be an adapter's name" in refused(name, "one"), name
            off = AdapterRegistry(loop_of(backend), executor)
            with pytest.raises(InvalidRequest, match="--lora-dir"):
                await off.change("x", "one")
            with pytest.raises(InvalidRequest, match="--max-loras"):
                AdapterRegistry(loop_of(backend), None).load("x", str(tmp_path / "one"))
            with pytest.raises(ConfigError):
                registry.load("x", str(tmp_path / "empty"))

    asyncio.run(asyncio.wait_for(main(), 60))


def test_names_have_room_in_what_an_engine_tells(tmp_path: Path) -> None:
    executor = FakeExecutor(65, 4)

    async def main() -> None:
        with engine(executor=executor, max_loras=1) as backend:
            registry = AdapterRegistry(loop_of(backend), executor)
            folder = adapter(tmp_path / "one", "first")
            with pytest.raises(InvalidRequest, match="bytes, of at most 49152; unload others"):
                for number in range(1000):
                    registry.load(f"{number:03}" + "é" * 200, folder)
            loaded = registry.names
            told = [AdapterInfo(name=each.name, digest=each.digest).model_dump(mode="json") for each in loaded]
            assert len(loaded) > 30 and len(json.dumps(told)) < MOST_TOLD
            registry.unload(loaded[0].name)
            registry.load(loaded[0].name, folder)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_two_names_of_one_content(tmp_path: Path) -> None:
    executor = FakeExecutor(65, 4)

    async def main() -> Any:
        with engine(executor=executor, max_loras=1) as backend:
            registry = AdapterRegistry(loop_of(backend), executor)
            folder = adapter(tmp_path / "one", "first")
            registry.load("x", folder)
            named = registry.load("y", folder)
            registry.unload("x")
            asked = GenerateRequest(request_id="r", prompt_token_ids=(1, 2), sampling=greedy(3), adapter=named)
            return [t async for chunk in backend.generate(asked) for t in chunk.token_ids], named

    tokens, named = asyncio.run(asyncio.wait_for(main(), 60))
    assert tokens == expected_tokens([1, 2], greedy(3), 3, adapter=named.digest)


def test_memory_of_the_host_is_bounded(tmp_path: Path) -> None:
    """What requests still use counts though its name is gone."""
    executor = Gated()

    async def main() -> None:
        with engine(executor=executor, max_loras=1) as backend:
            registry = AdapterRegistry(loop_of(backend), executor, memory_bytes=25)
            folders = [adapter(tmp_path / str(number), f"{number:010}") for number in range(4)]
            first = registry.load("a", folders[0])
            registry.load("same", folders[0])
            registry.load("b", folders[1])
            with pytest.raises(
                InvalidRequest, match=r"2 adapters are in memory, and with 'c' .* 30 bytes .*of at most 25 "
            ):
                registry.load("c", folders[2])
            with pytest.raises(InvalidRequest, match="--lora-memory"):
                registry.load("b", folders[2], replace=True)
            registry.load("again", folders[1])
            registry.unload("again")
            asked = GenerateRequest(request_id="r", prompt_token_ids=(1, 2), sampling=greedy(100), adapter=first)
            stream = backend.generate(asked)
            begun = asyncio.ensure_future(anext(stream))
            assert await asyncio.to_thread(executor.queued.wait, 20)
            registry.unload("a")
            registry.unload("same")
            with pytest.raises(InvalidRequest, match="--lora-memory"):
                registry.load("c", folders[2])
            executor.gate.set()
            await begun
            await stream.aclose()
            while first.digest in executor.kept():  # noqa: ASYNC110  (another thread drops it)
                await asyncio.sleep(0)
            registry.load("c", folders[2])

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("waiting", [1, 4])
def test_however_many_wait_for_an_adapter_they_claim_one_slot(waiting: int) -> None:
    """Four that waited for one adapter kept all requests for all others from starting."""
    world = World(num_blocks=400, max_model_len=128, max_num_seqs=16, max_loras=2)
    a, b, z = (world.load(name) for name in "abz")
    for name, adapter in (("a", a), ("b", b)):
        world.add(request(name, [1, 2, 3], 60, adapter=adapter))
    world.turn()
    for number in range(waiting):
        world.add(request(f"z{number}", [4, 5, number], 4, adapter=z))
    world.turn()
    others = [
        world.add(request(f"{adapter.name}{n}", [6, n], 4, adapter=adapter)) for n in range(3) for adapter in (a, b)
    ]
    for _ in range(20):
        world.turn()
    assert {sid[0] for sid in others if not world.ends[sid]} == {"a"}, "whose slot is claimed, and no other"
    world.run()
    assert all(world.finish(f"z{number}") is FinishReason.LENGTH for number in range(waiting))


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("priority", [0, -100])
def test_a_slot_is_for_who_is_computed_here_beside_what_keeps_arriving(slots: int, priority: int) -> None:
    """What arrives was asked first, and took each slot again: the other never started."""
    world = World(num_blocks=2000, max_num_seqs=32, poison=False, max_batched_tokens=64, max_loras=slots)
    adapters, z = [world.load(name) for name in "abc"[:slots]], world.load("z")
    flood = Flood(world, 8 * slots, adapters=adapters)
    for _ in range(50):
        flood.turn()
    before = flood.ended
    world.add(replace(request("here", [9, 8, 7, 6, 5], 4, adapter=z), priority=priority))
    while not world.tokens["here"]:
        assert flood.ended - before <= 40 * slots, f"{flood.ended - before} others have ended"
        flood.turn()


@pytest.mark.parametrize("blocks", [40, 60])
@pytest.mark.parametrize("priority", [0, -100])
def test_a_slot_is_for_who_is_computed_here_where_what_arrives_fills_the_pool(blocks: int, priority: int) -> None:
    """It was passed over, and those behind it took every block that came free."""
    world = World(num_blocks=blocks, max_num_seqs=32, poison=False, max_batched_tokens=64, max_loras=1)
    a, z = world.load("a"), world.load("z")
    flood = Flood(world, 48, adapters=[a])
    for _ in range(60):
        flood.turn()
    before = flood.ended
    world.add(replace(request("here", list(range(1, 41)), 4, adapter=z), priority=priority))
    while not world.tokens["here"]:
        assert flood.ended - before <= 200, f"{flood.ended - before} others have ended"
        flood.turn()


def test_a_slot_is_not_claimed_by_who_lacks_blocks() -> None:
    """What has arrived holds them, and must be able to start."""
    world = World(num_blocks=17, max_num_seqs=8, max_batched_tokens=64, max_loras=1)
    a, z = world.load("a"), world.load("z")
    flood = Flood(world, 6, prompt=9, adapters=[a])
    for _ in range(20):
        flood.turn()
    world.add(request("here", list(range(1, 40)), 4, adapter=z))
    before = flood.ended
    flood.clients = 0
    for _ in range(400):
        flood.turn()
    assert flood.ended > before and world.finish("here") is FinishReason.LENGTH
