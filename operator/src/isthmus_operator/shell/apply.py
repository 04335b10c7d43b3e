"""The only writer: server-side apply by one field manager, create, delete, status and events.

An object that is not the service's is never written and never deleted, whatever its name.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..api.v1alpha1 import API_VERSION, KIND, InferenceService
from ..errors import ApiError, NameTaken
from ..plan.desired import Desired, Name, name_of
from ..plan.observe import is_child
from ..plan.ownership import Look, is_quick, look, may_write, owners, was_made_by_us
from .answers import HEAVY, SMALL, bare, cut, weight, weight_of_dumped
from .client import CONFLICT, INVALID, NOT_FOUND, Api, path_of

Object = dict[str, Any]
Written = Callable[[str, Object], None]
"""Told of each write: verb, and the object as it is then."""
MOST_READ = 4 * 1024 * 1024
"""What objects weigh that are read by their names in one run and kept whole: of those of the usual kind there are
twenty."""
Bench = Callable[[Callable[[], Look]], Awaitable[Look]]
BUDGET = "PodDisruptionBudget"
NOBODY = (0, 429, 503, 504)
"""HTTP statuses that do not judge the object: there was no answer, or the server is too busy to give one."""


@dataclass(slots=True, kw_only=True)
class Changes:
    """What one run wrote. healed: objects that somebody else had changed or deleted; missing: optional kinds whose API
    is not installed; refused: why objects could not be written; left_out: the same of optional ones. left_alone: those
    that are not healed in this run. futile: those that are not as they were written, and how they were left: an
    admission policy changes what it is given."""

    left_alone: Collection[Name] = ()
    applied: list[Name] = field(default_factory=list)
    deleted: list[Name] = field(default_factory=list)
    healed: list[Name] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    refused: list[ApiError] = field(default_factory=list)
    left_out: list[ApiError] = field(default_factory=list)
    futile: dict[Name, str] = field(default_factory=dict)


class Applier:
    """Makes the cluster what a `Desired` says. For one run."""

    def __init__(self, api: Api, written: Written, bench: Bench | None = None) -> None:
        """`bench`: runs work off the event loop; None: there is none."""
        self._api = api
        self._written = written
        self._bench = bench
        self._room = MOST_READ
        self._futile: Mapping[Name, str] = {}

    async def run(
        self,
        wanted: Desired,
        live: Mapping[Name, Object | None],
        *,
        settled: bool,
        complete: bool,
        skipped: Collection[str] = (),
        left_alone: Collection[Name] = (),
        futile: Mapping[Name, str] | None = None,
    ) -> Changes:
        """Write what differs. `settled`: the present spec had been applied before, so that a foreign value is foreign;
        `complete`: all of it had been there, but for `skipped` kinds, so that what is missing now was removed by
        somebody else. `left_alone`: what somebody else makes of these stays for now. `live`: what stands under each
        name; the server is asked about names that are not in it. `futile`: of the run before; writing the same over the
        same again would do nothing.

        One object that is refused does not keep others from being put right. But from then on nothing new is made, so
        that no pod starts without what comes before it, and no pod is taken away, which others should have replaced.
        Raises ApiError where the API server does not answer: what was written before stays, and the next run goes on.
        """
        changes = Changes(left_alone=left_alone)
        self._futile = futile or {}
        there = await self.standing((*wanted.apply, *wanted.create), live)
        for manifest in wanted.apply:
            found = there[name_of(manifest)]
            if changes.refused and (found is None or _pods(manifest) < _pods(found)):
                continue
            try:
                await self._required(manifest, found, changes, settled, complete)
            except ApiError as error:
                # No pod depends on a budget.
                _collect(error, changes.left_out if manifest["kind"] == BUDGET else changes.refused)
        for manifest in wanted.create:
            found = there[name_of(manifest)]
            if found is None and changes.refused:
                continue
            try:
                await self._create(manifest, found, changes)
            except ApiError as error:
                _collect(error, changes.refused)
        for child in wanted.delete:
            if changes.refused and child["kind"] == "StatefulSet":
                # It may be deleted to be made anew, which it would not be now.
                continue
            try:
                await self._delete(child, changes)
            except ApiError as error:
                _collect(error, changes.left_out)
        for manifest in wanted.optional:
            try:
                await self._optional(manifest, changes, settled, complete and manifest["kind"] not in skipped)
            except ApiError as error:
                _collect(error, changes.left_out)
        for version, kind, name in wanted.unwanted:
            try:
                await self._remove_optional(version, kind, wanted, name, changes)
            except ApiError as error:
                _collect(error, changes.left_out)
        return changes

    async def _delete(self, child: Object, changes: Changes) -> None:
        if child["metadata"].get("deletionTimestamp") is None and await self._api.delete(child):
            changes.deleted.append(name_of(child))
            self._written("delete", child)

    async def standing(
        self, manifests: Iterable[Object], live: Mapping[Name, Object | None], service: InferenceService | None = None
    ) -> dict[Name, Object | None]:
        """The objects under the names of `manifests`. `live` holds labelled objects, and what was read before: the
        server is asked whether there is one of those that are missing in it, of somebody else or without its labels.
        What is large and not the `service`'s is cut to what says so, and so is what is beyond MOST_READ in all calls.
        """
        missing = [manifest for manifest in manifests if name_of(manifest) not in live]

        async def read(manifest: Object) -> Object | None:
            found = await self._named(manifest)
            if found is None or service is None:
                return found
            if "ownerReferences" in manifest["metadata"]:
                ours = may_write(manifest, found)
            else:  # of it nothing is known but what its pods say
                ours = is_child(service, found)
            weighs = weight_of_dumped(json.dumps(found, separators=(",", ":")))
            if weighs <= self._room and (ours or weighs <= SMALL):
                self._room -= weighs
                return found
            return bare(found, found["kind"])

        found = await asyncio.gather(*(read(manifest) for manifest in missing))
        return {**live} | {name_of(manifest): one for manifest, one in zip(missing, found, strict=True)}

    async def _named(self, manifest: Object) -> Object | None:
        meta = manifest["metadata"]
        return await self._api.named(manifest["apiVersion"], manifest["kind"], meta["namespace"], meta["name"])

    async def _required(
        self, manifest: Object, there: Object | None, changes: Changes, settled: bool, complete: bool
    ) -> None:
        try:
            await self._apply(manifest, there, changes, settled, complete)
        except ApiError as error:
            if error.status not in (CONFLICT, INVALID) or isinstance(error, NameTaken):
                raise
            now = await self._named(manifest)
            if (now and now["metadata"]["uid"]) == (there and there["metadata"]["uid"]):
                raise
            # Made, deleted or replaced by somebody else since it was looked at.
            await self._apply(manifest, now, changes, settled, complete)

    async def _apply(
        self, manifest: Object, there: Object | None, changes: Changes, settled: bool, complete: bool
    ) -> None:
        name, heals = name_of(manifest), complete
        if there is not None:
            seen = await self._look(manifest, there)
            if not seen.ours:
                raise _taken(manifest)
            if there["metadata"].get("deletionTimestamp") or not seen.differs:
                return
            if seen.stand == self._futile.get(name):
                changes.futile[name] = seen.stand
                return
            heals = settled and seen.altered
        if heals and name in changes.left_alone:
            return
        answer = await self._api.apply(manifest, over=there)
        self._written("apply", answer)
        changes.applied.append(name)
        left = await self._look(manifest, answer)
        if left.differs:
            changes.futile[name] = left.stand
        if heals:
            changes.healed.append(name)

    async def _look(self, manifest: Object, there: Object) -> Look:
        """Off the event loop where others have said much of the object's fields."""
        if self._bench is None or is_quick(there):
            return look(manifest, there)
        return await self._bench(partial(look, manifest, there))

    async def _create(self, manifest: Object, there: Object | None, changes: Changes) -> None:
        if there is not None:
            # Its number is not ours, even where it was left by a former service of this name.
            kept = {**manifest, "spec": there["spec"]}
            if owners(manifest) & owners(there):
                return
            if not owners(there) and was_made_by_us(there):
                self._written("apply", await self._api.apply(kept, over=there))
                changes.applied.append(name_of(manifest))
            else:
                await self._apply(kept, there, changes, settled=False, complete=False)
            return
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
        there = _cut(await self._api.find(path_of(version, kind, meta["namespace"], meta["name"])), kind)
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
        there = _cut(await self._api.find(path_of(version, kind, meta["namespace"], name)), kind)
        if there is None or not owners(wanted.apply[0]) & owners(there):
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
        self._written("status", await self._api.apply(body, over=service, subresource="status"))

    async def scaler_status(self, there: Object, body: Object) -> None:
        """Write the status of a RoleScaler of ours."""
        self._written("status", await self._api.apply(body, over=there, subresource="status"))

    async def scale(self, there: Object, body: Object) -> None:
        """Set the number of a role whose scaling is this operator's."""
        self._written("apply", await self._api.apply(body, over=there))

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


def _cut(found: Object | None, kind: str) -> Object | None:
    """As objects of lists are: it is held until the run has ended, and may be somebody's."""
    if found is None or (weighs := weight(json.dumps(found, separators=(",", ":")))) <= HEAVY:
        return found
    return cut(found, kind, weighs)


def _taken(manifest: Object) -> NameTaken:
    kind, name = name_of(manifest)
    owned_by = manifest["metadata"].get("ownerReferences") or [{}]
    whose = f"InferenceService {owned_by[0]['name']}" if "name" in owned_by[0] else "this service"
    return NameTaken(CONFLICT, f"{kind} {name} exists and does not belong to {whose}; it is left as it is")


def _pods(manifest: Object) -> int:
    return int(manifest.get("spec", {}).get("replicas") or 0)


def _collect(error: ApiError, found: list[ApiError]) -> None:
    if error.status in NOBODY:
        raise error
    found.append(error)
