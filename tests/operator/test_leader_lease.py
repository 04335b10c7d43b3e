"""The lease against an API server of its own kind: one object with a version, over the same small client interface."""

import asyncio
from typing import Any, cast

import pytest

from isthmus_operator.client import Api
from isthmus_operator.errors import ApiError, LeaseLost
from isthmus_operator.leader import LeaseSettings, lead


class LeaseServer:
    """Stores one Lease; refuses a write of an old version, as the API server does."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.down = False
        self.written = asyncio.Event()

    async def find(self, path: str) -> dict[str, Any] | None:
        if self.down:
            raise ApiError(0, "no answer")
        return None if self.lease is None else self.lease | {"metadata": dict(self.lease["metadata"])}

    async def create(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.lease is not None:
            raise ApiError(409, "exists")
        return self._store(body)

    async def replace(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.down:
            raise ApiError(0, "no answer")
        assert self.lease is not None
        if body["metadata"].get("resourceVersion") != self.lease["metadata"]["resourceVersion"]:
            raise ApiError(409, "changed")
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


@pytest.mark.parametrize("how", ["taken", "unreachable"])
def test_who_loses_the_lease_stops_working(how: str) -> None:
    async def main() -> None:
        server, started = LeaseServer(), asyncio.Event()
        task = asyncio.create_task(lead(cast(Api, server), settings("one"), lambda: forever(started)))
        await asyncio.wait_for(started.wait(), 5)
        if how == "taken":
            assert server.lease is not None
            server._store(server.lease | {"spec": server.lease["spec"] | {"holderIdentity": "thief", "renewTime": "x"}})
        else:
            server.down = True
        with pytest.raises(LeaseLost):
            await asyncio.wait_for(task, 5)

    asyncio.run(main())
