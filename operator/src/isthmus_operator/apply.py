"""The only writer: server-side apply by one field manager, create, delete, status and events."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from .api.v1alpha1 import API_VERSION, KIND, InferenceService
from .client import CONFLICT, NOT_FOUND, Api, path_of
from .desired import Desired, Name, name_of
from .errors import ApiError
from .ownership import altered, differs

Object = dict[str, Any]
Written = Callable[[str, Object], None]
"""Told of each write: verb, and the object as it is then."""


@dataclass(slots=True, kw_only=True)
class Changes:
    """What one run wrote. healed: objects that somebody else had changed or deleted; missing: optional kinds whose API
    is not installed."""

    applied: list[Name] = field(default_factory=list)
    deleted: list[Name] = field(default_factory=list)
    healed: list[Name] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


class Applier:
    """Makes the cluster what a `Desired` says. Holds no state of its own."""

    def __init__(self, api: Api, written: Written) -> None:
        self._api = api
        self._written = written

    async def run(
        self,
        wanted: Desired,
        live: Mapping[Name, Object],
        *,
        settled: bool,
        complete: bool,
        skipped: Collection[str] = (),
    ) -> Changes:
        """Write what differs. `settled`: the present spec had been applied before, so that a foreign value is foreign;
        `complete`: all of it had been there, but for `skipped` kinds, so that what is missing now was removed by
        somebody else.

        Raises ApiError; what was written before it stays, and the next run goes on.
        """
        changes = Changes()
        for manifest in wanted.apply:
            await self._apply(manifest, live.get(name_of(manifest)), changes, settled, complete)
        for manifest in wanted.create:
            if name_of(manifest) not in live:
                await self._create(manifest, changes)
        for child in wanted.delete:
            if child["metadata"].get("deletionTimestamp") is None and await self._api.delete(child):
                changes.deleted.append(name_of(child))
                self._written("delete", child)
        for manifest in wanted.optional:
            await self._optional(manifest, changes, settled, complete and manifest["kind"] not in skipped)
        for version, kind, name in wanted.unwanted:
            await self._remove_optional(version, kind, wanted, name, changes)
        return changes

    async def _apply(
        self, manifest: Object, there: Object | None, changes: Changes, settled: bool, complete: bool
    ) -> None:
        if there is not None and (there["metadata"].get("deletionTimestamp") or not differs(manifest, there)):
            return
        now = await self._api.apply(manifest)
        self._written("apply", now)
        changes.applied.append(name_of(manifest))
        if complete if there is None else settled and altered(manifest, there):
            changes.healed.append(name_of(manifest))

    async def _create(self, manifest: Object, changes: Changes) -> None:
        try:
            self._written("create", await self._api.create(manifest))
        except ApiError as error:
            if error.status != CONFLICT:
                raise
            return
        changes.applied.append(name_of(manifest))

    async def _optional(self, manifest: Object, changes: Changes, settled: bool, complete: bool) -> None:
        """Read first, as no watch covers these kinds; their API may be installed and removed at any time."""
        version, kind, meta = manifest["apiVersion"], manifest["kind"], manifest["metadata"]
        if not await self._api.serves(version, kind):
            changes.missing.append(kind)
            return
        there = await self._api.find(path_of(version, kind, meta["namespace"], meta["name"]))
        try:
            await self._apply(manifest, there, changes, settled, complete)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            # Removed since we asked.
            self._api.recheck(version)
            changes.missing.append(kind)

    async def _remove_optional(self, version: str, kind: str, wanted: Desired, name: str, changes: Changes) -> None:
        if not await self._api.serves(version, kind):
            return
        meta = wanted.apply[0]["metadata"]
        there = await self._api.find(path_of(version, kind, meta["namespace"], name))
        owners = {owner["uid"] for owner in meta.get("ownerReferences", ())}
        if there is None or owners.isdisjoint(o["uid"] for o in there["metadata"].get("ownerReferences") or ()):
            return
        if await self._api.delete(there):
            changes.deleted.append((kind, name))
            self._written("delete", there)

    async def status(self, service: Mapping[str, Any], status: Object) -> None:
        """Write the status of an InferenceService."""
        meta = service["metadata"]
        body = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": meta["name"], "namespace": meta["namespace"]},
            "status": status,
        }
        self._written("status", await self._api.apply(body, subresource="status"))

    async def scaler_status(self, body: Object) -> None:
        """Write the status of a RoleScaler."""
        self._written("status", await self._api.apply(body, subresource="status"))

    async def scale(self, service: InferenceService, body: Object) -> None:
        """Set the number of a role whose scaling is this operator's."""
        self._written("apply", await self._api.apply(body))

    async def event(self, service: Mapping[str, Any], *, warning: bool, reason: str, message: str, at: str) -> None:
        """Tell whoever looks at the service what has happened to it. `at`: an API time."""
        meta = service["metadata"]
        reference = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": meta["name"],
            "namespace": meta["namespace"],
            "uid": meta["uid"],
        }
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{meta['name']}.", "namespace": meta["namespace"]},
            "involvedObject": reference,
            "type": "Warning" if warning else "Normal",
            "reason": reason,
            "message": message[:1024],
            "source": {"component": "isthmus-operator"},
            "reportingComponent": "serving.isthmus.dev/isthmus-operator",
            "reportingInstance": "isthmus-operator",
            "action": reason,
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
        }
        await self._api.create(body)
        self._written("event", body)
