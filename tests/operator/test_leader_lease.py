"""The lease against an API server of its own kind: one object with a version, over the same small client interface."""

import asyncio
import itertools
from datetime import datetime, timedelta, tzinfo
from typing import Any, cast

import pytest
from jumping_loop import run_jumping

from isthmus_operator.errors import ApiError
from isthmus_operator.shell import leader
from isthmus_operator.shell.client import Api
from isthmus_operator.shell.leader import LeaseSettings, lead


class LeaseServer:
    """Stores one Lease; refuses a write of an old version, as the API server does."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.down = False
        self.answer_s = 0.0
        self.begun = 0.0
        self.annotated = False
        self.written = asyncio.Event()

    async def find(self, path: str) -> dict[str, Any] | None:
        if self.down:
            raise ApiError(0, "no answer")
        found = None if self.lease is None else self.lease | {"metadata": dict(self.lease["metadata"])}
        if self.annotated and self.lease is not None:
            # Somebody writes it between our reading and our writing.
            self.annotated = False
            self._store(self.lease | {"metadata": self.lease["metadata"] | {"annotations": {"a": "b"}}})
        return found

    async def create(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.lease is not None:
            raise ApiError(409, "exists")
        return self._store(body)

    async def replace(self, body: dict[str, Any]) -> dict[str, Any]:
        begun = asyncio.get_running_loop().time()
        await asyncio.sleep(self.answer_s)
        if self.down:
            raise ApiError(0, "no answer")
        assert self.lease is not None
        if body["metadata"].get("resourceVersion") != self.lease["metadata"]["resourceVersion"]:
            raise ApiError(409, "changed")
        self.begun = begun
        return self._store(body)

    def _store(self, body: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.lease = body | {"metadata": body["metadata"] | {"resourceVersion": str(self.version)}}
        self.written.set()
        return self.lease

    @property
    def holder(self) -> str:
        return "" if self.lease is None else str(self.lease["spec"]["holderIdentity"])


def settings(holder: str) -> LeaseSettings:
    return LeaseSettings(namespace="ns", name="l", holder=holder, duration_s=1, renew_s=0.01, deadline_s=0.1)


async def forever(started: asyncio.Event) -> None:
    started.set()
    await asyncio.Event().wait()


def test_one_works_and_gives_the_lease_back_when_it_ends() -> None:
    async def main() -> None:
        server, first, second = LeaseServer(), asyncio.Event(), asyncio.Event()
        api = cast(Api, server)
        one = asyncio.create_task(lead(api, settings("one"), lambda: forever(first)))
        await asyncio.wait_for(first.wait(), 5)
        two = asyncio.create_task(lead(api, settings("two"), lambda: forever(second)))
        for _ in range(5):
            server.written.clear()
            await asyncio.wait_for(server.written.wait(), 5)
        assert server.holder == "one"
        assert not second.is_set()
        one.cancel()
        await asyncio.gather(one, return_exceptions=True)
        assert server.holder in ("", "two")
        await asyncio.wait_for(second.wait(), 5)
        assert server.holder == "two"
        two.cancel()
        await asyncio.gather(two, return_exceptions=True)
        assert server.holder == ""

    asyncio.run(main())


def test_a_wall_clock_that_jumps_moves_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a holder writes as the time of its renewal is for people: others see only that it has changed."""
    hours = itertools.cycle((0, 26, -26, 1))

    class Jumping(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> "Jumping":
            return super().now(tz) + timedelta(hours=next(hours))

    monkeypatch.setattr(leader, "datetime", Jumping)

    async def main() -> None:
        server, first, second = LeaseServer(), asyncio.Event(), asyncio.Event()
        api = cast(Api, server)
        both = [asyncio.create_task(lead(api, settings("one"), lambda: forever(first)))]
        await first.wait()
        both.append(asyncio.create_task(lead(api, settings("two"), lambda: forever(second))))
        for _ in range(300):
            server.written.clear()
            await server.written.wait()
            assert server.holder == "one" and not second.is_set()
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)

    run_jumping(main())


class Work:
    """Something to do while the lease is held; counts how often it was begun and ended."""

    def __init__(self) -> None:
        self.begun = self.ended = 0
        self.changed = asyncio.Condition()

    async def run(self) -> None:
        self.begun += 1
        await self.tell()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended += 1
            await self.tell()

    async def tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def until(self, begun: int, ended: int) -> None:
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(lambda: self.begun >= begun and self.ended >= ended)


@pytest.mark.parametrize("how", ["taken", "unreachable"])
def test_who_loses_the_lease_stops_working_and_goes_on_when_it_is_won_back(how: str) -> None:
    async def main() -> None:
        server, work = LeaseServer(), Work()
        task = asyncio.create_task(lead(cast(Api, server), settings("one"), work.run))
        await work.until(1, 0)
        if how == "taken":
            assert server.lease is not None
            server._store(server.lease | {"spec": server.lease["spec"] | {"holderIdentity": "thief", "renewTime": "x"}})
        else:
            server.down = True
        await work.until(1, 1)
        assert not task.done()
        server.down = False
        await work.until(2, 1)
        assert server.holder == "one"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (work.begun, work.ended, server.holder) == (2, 2, "")

    asyncio.run(main())


def test_a_change_of_the_lease_by_somebody_else_is_no_loss() -> None:
    async def main() -> None:
        server, work = LeaseServer(), Work()
        task = asyncio.create_task(lead(cast(Api, server), settings("one"), work.run))
        await work.until(1, 0)
        server.annotated = True
        while server.annotated:
            server.written.clear()
            await asyncio.wait_for(server.written.wait(), 5)
        for _ in range(3):
            server.written.clear()
            await asyncio.wait_for(server.written.wait(), 5)
        assert (work.begun, work.ended) == (1, 0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


@pytest.mark.parametrize("answer_s", [0.0, 2.9, 4.9, 5.1, 9.9, 14.0, 1e9])
def test_work_stops_before_another_may_take_the_lease_however_long_renewals_take(answer_s: float) -> None:
    async def main() -> None:
        loop, server, work = asyncio.get_running_loop(), LeaseServer(), Work()
        ours = LeaseSettings(namespace="ns", name="l", holder="one")
        task = asyncio.create_task(lead(cast(Api, server), ours, work.run))
        await work.until(1, 0)
        server.answer_s = answer_s
        end = loop.time() + 300
        while loop.time() < end and work.ended == 0:
            begun = server.begun
            await asyncio.sleep(0.1)
            assert loop.time() - begun <= ours.deadline_s + 0.2 or work.ended
        # One that was begun when the one before it ended must end within the deadline that began with that one.
        assert (work.ended > 0) == (2 * answer_s > ours.deadline_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run_jumping(main())


def test_cancelled_while_the_lease_is_being_lost_it_ends() -> None:
    async def main() -> None:
        server, leaving = LeaseServer(), asyncio.Event()

        async def slow_to_end() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                leaving.set()
                await asyncio.sleep(0.05)

        task = asyncio.create_task(lead(cast(Api, server), settings("one"), slow_to_end))
        await asyncio.wait_for(server.written.wait(), 5)
        server.down = True
        await asyncio.wait_for(leaving.wait(), 5)
        task.cancel()
        await asyncio.wait((task,), timeout=5)
        assert task.cancelled()

    asyncio.run(main())


def test_the_end_of_the_work_is_the_end_and_gives_the_lease_back() -> None:
    async def main() -> None:
        server = LeaseServer()
        await asyncio.wait_for(lead(cast(Api, server), settings("one"), lambda: asyncio.sleep(0)), 5)
        assert server.holder == ""

    asyncio.run(main())
