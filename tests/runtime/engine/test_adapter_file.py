"""Adapters that a file lists: what the engine has follows it, and what cannot be is told and tried again."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import pytest
from config_mount import swap
from engine_stack import engine
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_runtime.config import EngineConfig
from isthmus_runtime.engine.adapter_file import (
    FIRST_RETRY_S,
    LAST_RETRY_S,
    MOST_ADAPTERS,
    MOST_BYTES,
    ListedAdapters,
)
from isthmus_runtime.engine.adapter_registry import AdapterRegistry
from isthmus_runtime.engine.local import LocalEngine
from isthmus_runtime.errors import ConfigError
from isthmus_runtime.executor.fake import FakeExecutor, expected_tokens
from isthmus_runtime.request import GenerateRequest, SamplingParams
from isthmus_runtime.serve_flags import parse_serve


def weights(folder: Path, text: str) -> str:
    """What the model-free executor takes for an adapter; its digest."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_text(text)
    return sha256(sha256(text.encode()).digest()).hexdigest()[:32]


def listing(**paths: Path) -> str:
    return json.dumps([{"name": name, "path": str(path)} for name, path in paths.items()])


class Bench:
    """An engine and the adapters of a file, whose turns the test takes."""

    def __init__(self, registry: AdapterRegistry, mount: Path) -> None:
        self.registry = registry
        self.mount = mount
        self.listed = ListedAdapters(registry, mount / "adapters.json", reserved=["fixed"])
        self.now = 0.0

    def turn(self, text: str | None = None, after: float = 2.0) -> dict[str, str]:
        """Digests by name, after the file became `text`."""
        if text is not None:
            swap(self.mount, "adapters.json", text)
        self.now += after
        self.listed.turn(self.now)
        return {one.name: one.digest for one in self.registry.names}

    def problems(self) -> dict[str, str]:
        return {one.name: one.problem for one in self.listed.status.problems}


@contextmanager
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Inside an event loop."""
    executor = FakeExecutor(65, 4)
    with engine(executor=executor, max_loras=2) as backend:
        assert isinstance(backend.engine, LocalEngine)
        yield Bench(AdapterRegistry(backend.engine.loop, executor, taken=("base",)), tmp_path / "mount")


def test_the_engine_follows_the_file(tmp_path: Path) -> None:
    one, two, other = (weights(tmp_path / name, name) for name in ("one", "two", "other"))

    async def main() -> None:
        with bench(tmp_path) as b:
            assert b.turn(listing(sql=tmp_path / "one", chat=tmp_path / "two")) == {"sql": one, "chat": two}
            text = listing(sql=tmp_path / "other")
            assert b.turn(text) == {"sql": other}
            status = b.listed.status
            assert (status.listed, status.problems) == (1, ())
            assert status.digest == sha256(text.encode()).hexdigest()[:16]
            assert b.turn("[]") == {}

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_bad_file_changes_nothing(tmp_path: Path) -> None:
    one = weights(tmp_path / "one", "one")
    good = listing(sql=tmp_path / "one")

    async def main() -> None:
        with bench(tmp_path) as b:
            assert b.turn() == {}  # a pod may start before its ConfigMap is there
            assert "cannot be read" in b.problems()[""] and b.listed.status.digest == ""
            b.turn(good)
            assert b.problems() == {}
            for bad, told in (
                ("", "JSON"),
                ("{}", "list"),
                ('[{"name": "x"}]', "[0][path]"),
                ('[{"name": "x", "path": "relative"}]', "[0][path]"),
                ('[{"name": "x", "path": "/x", "more": 1}]', "[0][more]"),
                (listing(x=tmp_path)[:-1] + ", " + listing(x=tmp_path)[1:], "'x' more than once"),
                (json.dumps([{"name": f"n{i}", "path": "/x"} for i in range(MOST_ADAPTERS + 1)]), "at most"),
                (" " * (MOST_BYTES + 1), "at most"),
            ):
                assert b.turn(bad) == {"sql": one}, bad[:40]
                assert told in b.problems()[""], bad[:40]
                assert b.listed.status.digest == sha256(good.encode()).hexdigest()[:16]
            os.unlink(tmp_path / "mount" / "adapters.json")
            assert b.turn() == {"sql": one}
            assert "what was listed before stays" in b.problems()[""]

    asyncio.run(asyncio.wait_for(main(), 60))


def test_what_fails_is_tried_again_later_each_time_and_keeps_nobody_waiting(tmp_path: Path) -> None:
    one, two = weights(tmp_path / "one", "one"), weights(tmp_path / "two", "two")

    async def main() -> None:
        with bench(tmp_path) as b:
            text = listing(late=tmp_path / "late", sql=tmp_path / "one", base=tmp_path / "one", fixed=tmp_path / "one")
            assert b.turn(text) == {"sql": one}
            assert sorted(b.problems()) == ["base", "fixed", "late"]
            assert "another --lora" in b.problems()["fixed"] and "cannot be an adapter's name" in b.problems()["base"]
            late = weights(tmp_path / "late", "late")
            assert "late" not in b.turn(after=FIRST_RETRY_S - 0.1)
            assert b.turn(after=0.2)["late"] == late
            assert sorted(b.problems()) == ["base", "fixed"]
            # What cannot be replaced stays as it was; another path is tried at once.
            b.turn(listing(sql=tmp_path / "gone"))
            assert b.turn()["sql"] == one and list(b.problems()) == ["sql"]
            assert b.turn(listing(sql=tmp_path / "two"), after=0.1) == {"sql": two}
            assert b.problems() == {}

    asyncio.run(asyncio.wait_for(main(), 60))


def test_pauses_between_tries_grow_to_a_bound(tmp_path: Path) -> None:
    async def main() -> list[float]:
        with bench(tmp_path) as b:
            tried: list[float] = []
            load = b.registry.load

            def note(*args: object, **options: object) -> object:
                tried.append(b.now)
                return load(*args, **options)  # type: ignore[arg-type]

            b.registry.load = note  # type: ignore[method-assign,assignment]
            b.turn(listing(sql=tmp_path / "gone"))
            while b.now < 3000:
                b.turn(after=1.0)
            return [later - before for before, later in pairwise(tried)]

    pauses = asyncio.run(asyncio.wait_for(main(), 60))
    assert pauses[:4] == [FIRST_RETRY_S * 2**n for n in range(4)]
    assert max(pauses) == LAST_RETRY_S and pauses == sorted(pauses)


def test_names_of_others_are_left_alone(tmp_path: Path) -> None:
    one, two = weights(tmp_path / "one", "one"), weights(tmp_path / "two", "two")

    async def main() -> None:
        with bench(tmp_path) as b:
            b.registry.load("mine", str(tmp_path / "one"))
            assert b.turn(listing(mine=tmp_path / "two", sql=tmp_path / "two")) == {"mine": one, "sql": two}
            assert "load_inplace" in b.problems()["mine"]
            assert b.turn("[]") == {"mine": one}
            # What the file lists and somebody else has unloaded comes back.
            b.turn(listing(sql=tmp_path / "two"))
            b.registry.unload("sql")
            assert b.turn()["sql"] == two
            b.registry.unload("sql")
            assert b.turn("[]") == {"mine": one}

    asyncio.run(asyncio.wait_for(main(), 60))


@settings(max_examples=30, deadline=None)
@given(
    lists=st.lists(
        st.dictionaries(st.sampled_from("xyz"), st.sampled_from(["a", "b", "missing"])), min_size=1, max_size=8
    )
)
def test_whatever_was_listed_before_the_last_list_counts(
    lists: list[dict[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """But for a name whose new content cannot be loaded: that keeps the content it had."""
    tmp_path = tmp_path_factory.mktemp("lists")
    digests = {name: weights(tmp_path / name, name) for name in "ab"}

    async def main() -> None:
        with bench(tmp_path) as b:
            expected: dict[str, str] = {}
            for wanted in lists:
                found = b.turn(listing(**{name: tmp_path / path for name, path in wanted.items()}))
                kept = {name: digest for name, digest in expected.items() if name in wanted}
                expected = kept | {name: digests[path] for name, path in wanted.items() if path in digests}
                assert found == expected
                assert set(b.problems()) == {name for name, path in wanted.items() if path == "missing"}

    asyncio.run(asyncio.wait_for(main(), 60))


def test_requests_that_run_end_with_the_adapter_they_began_with(tmp_path: Path) -> None:
    weights(tmp_path / "one", "one")
    weights(tmp_path / "two", "two")
    sampling = SamplingParams(max_tokens=40, temperature=0.0)

    async def main() -> None:
        executor = FakeExecutor(65, 4)
        with engine(executor=executor, max_loras=1) as backend:
            assert isinstance(backend.engine, LocalEngine)
            b = Bench(AdapterRegistry(backend.engine.loop, executor), tmp_path / "mount")
            b.turn(listing(sql=tmp_path / "one"))
            (named,) = b.registry.names
            asked = GenerateRequest(request_id="r", prompt_token_ids=(1, 2, 3), sampling=sampling, adapter=named)

            async def ask() -> list[int]:
                return [t async for chunk in backend.generate(asked) for t in chunk.token_ids]

            running = asyncio.ensure_future(ask())
            await asyncio.sleep(0)
            b.turn(listing(sql=tmp_path / "two"))
            assert await running == expected_tokens([1, 2, 3], sampling, 40, adapter=named.digest)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_the_flag() -> None:
    plain = ["--role", "unified", "--model", "m", "--lora-file", "/etc/adapters.json"]
    config = parse_serve(plain)
    assert isinstance(config, EngineConfig)
    assert config.lora.file == "/etc/adapters.json" and config.lora.max_loras == 4
    with pytest.raises(ConfigError, match="--lora-file"):
        parse_serve([*plain, "--max-loras", "0"])
