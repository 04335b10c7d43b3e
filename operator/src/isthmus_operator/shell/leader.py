"""One working operator at a time: a coordination.k8s.io Lease, taken before work starts and renewed while it goes on.

Whoever loses the lease stops working at once, so that two never write, and waits for it again: its webhook and its
watches go on. An outage of the API server is one way to lose it, and no reason to end the process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ..errors import ApiError
from .client import CONFLICT, Api, path_of

_log = logging.getLogger(__name__)
VERSION = "coordination.k8s.io/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettings:
    """namespace, name: of the Lease; holder: of this process. Seconds: how long a silent holder keeps it, how often
    it is renewed, and how long after one renewal was begun the next must have succeeded."""

    namespace: str
    name: str
    holder: str
    duration_s: int = 15
    renew_s: float = 3.0
    deadline_s: float = 10.0


class _LeaseLost(Exception):
    """Not renewed in time, or another's."""


async def lead(api: Api, settings: LeaseSettings, work: Callable[[], Awaitable[None]]) -> None:
    """Work while the lease is held: `work` is cancelled when it is lost and called again when it is back.

    Returns when `work` does; gives the lease back then, and when cancelled.
    """
    lease = _Lease(api, settings)
    try:
        while True:
            begun = await lease.acquire()
            _log.info("holding lease %s/%s as %s", settings.namespace, settings.name, settings.holder)
            try:
                await _while_kept(lease.keep(begun), work())
            except _LeaseLost as lost:
                _log.warning("%s: not working until it is held again", lost)
            else:
                return
    finally:
        await lease.release()


async def _while_kept(keep: Awaitable[None], work: Awaitable[None]) -> None:
    """Until the work ends, or the lease is lost and the work has been cancelled.

    No TaskGroup: one that is cancelled while a task of it has failed forgets (Python 3.11) that it was cancelled.
    """
    keeping, working = (asyncio.ensure_future(one) for one in (keep, work))
    try:
        await asyncio.wait((keeping, working), return_when=asyncio.FIRST_COMPLETED)
        (working if working.done() else keeping).result()
    finally:
        keeping.cancel()
        working.cancel()
        await asyncio.gather(keeping, working, return_exceptions=True)


class _Lease:
    def __init__(self, api: Api, settings: LeaseSettings) -> None:
        self._api = api
        self._settings = settings
        self._path = path_of(VERSION, "Lease", settings.namespace, settings.name)
        self._held = False
        # The holder's clock may differ from ours, so its silence is measured here.
        self._seen: tuple[str, str] = ("", "")
        self._seen_at = 0.0

    async def acquire(self) -> float:
        """Return when the lease is ours: when the request that made it so was begun."""
        loop = asyncio.get_running_loop()
        while True:
            begun = loop.time()
            try:
                async with asyncio.timeout(self._settings.deadline_s):
                    if await self._try():
                        return begun
            except (ApiError, TimeoutError) as error:
                _log.warning("lease: %s", error or "no answer in time")
            await asyncio.sleep(self._settings.renew_s)

    async def keep(self, begun: float) -> None:
        """Renew until cancelled. `begun`: when the renewal that holds now was.

        Others count its silence from when they have seen it, which is later; so we stop before they may take it.
        """
        while True:
            try:
                async with asyncio.timeout_at(begun + self._settings.deadline_s):
                    begun = await self._renewed(begun)
            except TimeoutError as error:
                self._held = False
                why = f"was not renewed for {self._settings.deadline_s:g} s"
                raise _LeaseLost(f"lease {self._settings.name} {why}") from error

    async def _renewed(self, begun: float) -> float:
        """The renewal after the one that was begun at `begun`: when it was begun."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(max(0.0, begun + self._settings.renew_s - loop.time()))
            begun = loop.time()
            try:
                mine = await self._try()
            except ApiError as error:
                _log.warning("lease: not renewed: %s", error)
                continue
            if not mine:
                self._held = False
                raise _LeaseLost(f"lease {self._settings.name} was taken by another operator")
            return begun

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
            _log.warning("lease: not released: %s", error or "no answer in time")

    async def _try(self) -> bool:
        """Take or renew the lease; whether it is ours now."""
        while True:
            try:
                return await self._write()
            except ApiError as error:
                # Somebody has written it since it was read, if only an annotation: what it says now counts.
                if error.status != CONFLICT:
                    raise

    async def _write(self) -> bool:
        lease = await self._api.find(self._path)
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        spec: dict[str, Any] = {
            "holderIdentity": self._settings.holder,
            "leaseDurationSeconds": self._settings.duration_s,
            "renewTime": now,
        }
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
        self._held = True
        return True

    def _free(self, spec: dict[str, Any]) -> bool:
        loop = asyncio.get_running_loop()
        seen = (spec.get("holderIdentity") or "", spec.get("renewTime") or "")
        if seen != self._seen:
            self._seen, self._seen_at = seen, loop.time()
        silent = loop.time() - self._seen_at > float(spec.get("leaseDurationSeconds") or self._settings.duration_s)
        return not seen[0] or silent
