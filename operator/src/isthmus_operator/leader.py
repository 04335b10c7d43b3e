"""One working operator at a time: a coordination.k8s.io Lease, taken before the queue starts and renewed while it runs.

The webhook is served by every replica. Whoever loses the lease stops working at once and ends, so that two never write.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from .client import CONFLICT, Api, path_of
from .errors import ApiError, LeaseLost

_log = logging.getLogger(__name__)
VERSION = "coordination.k8s.io/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettings:
    """namespace, name: of the Lease; holder: of this process. Seconds: how long a silent holder keeps it, how often
    it is renewed, and within what time a renewal must have succeeded."""

    namespace: str
    name: str
    holder: str
    duration_s: int = 15
    renew_s: float = 3.0
    deadline_s: float = 10.0


async def lead(api: Api, settings: LeaseSettings, work: Callable[[], Awaitable[None]]) -> None:
    """Wait for the lease, then work. Raises LeaseLost when it cannot be kept; gives it back when cancelled."""
    lease = _Lease(api, settings)
    await lease.acquire()
    _log.info("holding lease %s/%s as %s", settings.namespace, settings.name, settings.holder)
    try:
        async with asyncio.TaskGroup() as group:
            working = group.create_task(_work(work))
            keeping = group.create_task(lease.keep())
            working.add_done_callback(lambda _: keeping.cancel())
    except* LeaseLost as lost:
        raise lost.exceptions[0] from None
    finally:
        await lease.release()


async def _work(work: Callable[[], Awaitable[None]]) -> None:
    await work()


class _Lease:
    def __init__(self, api: Api, settings: LeaseSettings) -> None:
        self._api = api
        self._settings = settings
        self._path = path_of(VERSION, "Lease", settings.namespace, settings.name)
        self._held = False
        # The holder's clock may differ from ours, so its silence is measured here.
        self._seen: tuple[str, str] = ("", "")
        self._seen_at = 0.0

    async def acquire(self) -> None:
        """Return when the lease is ours."""
        while True:
            try:
                if await self._try():
                    return
            except ApiError as error:
                _log.warning("lease: %s", error)
            await asyncio.sleep(self._settings.renew_s)

    async def keep(self) -> None:
        """Renew until cancelled."""
        loop = asyncio.get_running_loop()
        good = loop.time()
        while True:
            await asyncio.sleep(self._settings.renew_s)
            try:
                async with asyncio.timeout(self._settings.deadline_s):
                    mine = await self._try()
            except (ApiError, TimeoutError) as error:
                _log.warning("lease: not renewed: %s", error or "no answer in time")
                mine = True
                if loop.time() - good > self._settings.deadline_s:
                    self._held = False
                    raise LeaseLost(
                        f"lease {self._settings.name} was not renewed for {self._settings.deadline_s:g} s"
                    ) from error
            else:
                good = loop.time()
            if not mine:
                self._held = False
                raise LeaseLost(f"lease {self._settings.name} was taken by another operator")

    async def release(self) -> None:
        """Let another take over at once."""
        if not self._held:
            return
        self._held = False
        try:
            async with asyncio.timeout(2.0):
                lease = await self._api.find(self._path)
                if lease is not None and lease["spec"].get("holderIdentity") == self._settings.holder:
                    await self._api.replace(lease | {"spec": lease["spec"] | {"holderIdentity": ""}})
        except (ApiError, TimeoutError) as error:
            _log.warning("lease: not given back: %s", error or "no answer in time")

    async def _try(self) -> bool:
        """Take or renew the lease; whether it is ours now."""
        lease = await self._api.find(self._path)
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        spec: dict[str, Any] = {
            "holderIdentity": self._settings.holder,
            "leaseDurationSeconds": self._settings.duration_s,
            "renewTime": now,
        }
        try:
            if lease is None:
                meta = {"name": self._settings.name, "namespace": self._settings.namespace}
                first = spec | {"acquireTime": now, "leaseTransitions": 0}
                await self._api.create({"apiVersion": VERSION, "kind": "Lease", "metadata": meta, "spec": first})
            else:
                old = lease.get("spec") or {}
                mine = old.get("holderIdentity") == self._settings.holder
                if not mine and not self._free(old):
                    return False
                taken = {} if mine else {"acquireTime": now, "leaseTransitions": old.get("leaseTransitions", 0) + 1}
                await self._api.replace(lease | {"spec": old | spec | taken})
        except ApiError as error:
            if error.status == CONFLICT:
                return False
            raise
        self._held = True
        return True

    def _free(self, spec: dict[str, Any]) -> bool:
        loop = asyncio.get_running_loop()
        seen = (spec.get("holderIdentity") or "", spec.get("renewTime") or "")
        if seen != self._seen:
            self._seen, self._seen_at = seen, loop.time()
        silent = loop.time() - self._seen_at > float(spec.get("leaseDurationSeconds") or self._settings.duration_s)
        return not seen[0] or silent
