"""Routes for adapters: who may ask, how often, and for how many at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import serving
from fastapi import Request

from isthmus_runtime.openai.adapters import BODIES, CHANGES_AT_ONCE, MOST_RUNNING, ChangeBudget, add_adapter_routes
from isthmus_runtime.openai.tenants import MAX_TENANTS, Tenant
from isthmus_runtime.serving.app import make_app

TENANTS = {name: Tenant(name=name, keys=[f"key-of-{name}-00000000"]) for name in ("one", "two")}


class Routes:
    """The routes, with changes that take until `go` and a clock that stands still."""

    def __init__(self) -> None:
        self.now = 5.0
        self.changes: list[tuple[str, str | None]] = []
        self.go = asyncio.Event()
        self.go.set()
        app = make_app("test", bodies=BODIES)
        add_adapter_routes(app, self.check, self.change, lambda: self.now)
        self.app = app
        self.port = 0

    async def ask(self, verb: str, who: str, **body: str) -> tuple[int, str, str]:
        """Status, Retry-After and text of an answer."""
        url, headers = f"http://127.0.0.1:{self.port}/v1/{verb}_lora_adapter", {"who": who}
        async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as answer:
            return answer.status, answer.headers.get("Retry-After", ""), await answer.text()

    def check(self, request: Request) -> Tenant | None:
        return TENANTS.get(request.headers.get("who", ""))

    async def change(self, name: str, path: str | None, *, replace: bool = False) -> None:
        self.changes.append((name, path))
        await self.go.wait()

    async def load(self, who: str = "") -> tuple[int, str, str]:
        return await self.ask("load", who, lora_name="sql", lora_path="sql")

    async def unload(self, who: str = "") -> tuple[int, str, str]:
        return await self.ask("unload", who, lora_name="sql")


@asynccontextmanager
async def served() -> AsyncIterator[Routes]:
    routes = Routes()
    async with serving.served(routes.app) as routes.port:
        yield routes


def test_each_client_has_a_rate_over_both_routes(run: Any) -> None:
    async def main() -> None:
        async with served() as routes:
            for number in range(int(CHANGES_AT_ONCE)):
                assert (await (routes.load("one") if number % 2 else routes.unload("one")))[0] == 200
            status, after, text = await routes.load("one")
            assert (status, after) == (429, "1") and "30 times at once and 1 time a second" in text
            assert len(routes.changes) == CHANGES_AT_ONCE
            assert (await routes.load("two"))[0] == (await routes.load())[0] == 200
            routes.now += 1.0
            assert (await routes.unload("one"))[0] == 200
            assert (await routes.unload("one"))[0] == 429

    run(main())


def test_few_changes_run_at_a_time(run: Any) -> None:
    async def main() -> None:
        async with served() as routes:
            routes.go.clear()
            waiting = {asyncio.ensure_future(routes.load("one")) for _ in range(MOST_RUNNING + 2)}
            refused = set[asyncio.Future[tuple[int, str, str]]]()
            while len(refused) < 2:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                refused |= done
            assert {one.result()[0] for one in refused} == {429}
            routes.go.set()
            assert {(await one)[0] for one in waiting} == {200}
            assert (await routes.load("one"))[0] == 200
            assert len(routes.changes) == MOST_RUNNING + 1

    run(main())


def test_tenants_that_come_and_go_leave_nothing_behind() -> None:
    budget = ChangeBudget()
    for number in range(MAX_TENANTS + 5):
        budget.admit(Tenant(name=f"t{number}", keys=["k" * 16]), 0.0)
    assert len(budget._buckets) == MAX_TENANTS and "t0" not in budget._buckets


def test_a_change_that_fails_runs_no_more() -> None:
    budget = ChangeBudget()
    for _ in range(MOST_RUNNING + 1):
        with pytest.raises(ValueError, match="broke"), budget.running():
            raise ValueError("broke")
