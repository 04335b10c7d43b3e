"""The watched objects of every service, as kopf's indexes hold them, corrected by what we have just written.

A watch lags behind our own writes. Until it has caught up, the API server's answer to the write stands in its place, so
that no decision is taken twice from an old state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

Object = dict[str, Any]
Key = tuple[str, str]
Index = Mapping[Key, Iterable[Object]]

LAG_S = 30.0
"""A watch that is further behind than this is broken, and then the newest of what is known is as good as anything."""


class Cache:
    """One per operator. `indexes` is filled once, when kopf has made them."""

    def __init__(self) -> None:
        self.indexes: dict[str, Index] = {}
        self.services: Index = {}
        self._written: dict[Key, dict[tuple[str, str], tuple[float, Object]]] = {}
        self._deleted: dict[str, float] = {}

    def service(self, key: Key) -> Object | None:
        """The InferenceService itself; None when it is gone."""
        found = self._found(self.services, key)
        newest = self._newest(key, found)
        return next((one for one in newest if one["kind"] == "InferenceService"), None) if found else None

    def children(self, key: Key) -> list[Object]:
        """Every object labelled as the service's, without those we have deleted."""
        found = [child for index in self.indexes.values() for child in self._found(index, key)]
        return [one for one in self._newest(key, found) if one["kind"] != "InferenceService"]

    def every(self) -> list[Object]:
        """All services."""
        return [body for key in self.services if (body := self.service(key)) is not None]

    def written(self, key: Key, verb: str, body: Object) -> None:
        """Remember an answer of the API server."""
        now = asyncio.get_running_loop().time()
        meta = body["metadata"]
        if verb == "delete":
            self._deleted[meta["uid"]] = now
        elif "resourceVersion" in meta:
            self._written.setdefault(key, {})[body["kind"], meta["name"]] = (now, body)

    def gone(self, key: Key, body: Mapping[str, Any]) -> None:
        """The watch has told that an object was deleted: our answer to an earlier write does not bring it back."""
        name = body["kind"], body["metadata"]["name"]
        known = self._written.get(key, {}).get(name)
        if known is not None and known[1]["metadata"]["uid"] == body["metadata"]["uid"]:
            del self._written[key][name]

    def forget(self, key: Key) -> None:
        """The service is gone."""
        self._written.pop(key, None)

    def _found(self, index: Index, key: Key) -> list[Object]:
        return list(index[key]) if key in index else []

    def _newest(self, key: Key, found: list[Object]) -> list[Object]:
        now = asyncio.get_running_loop().time()
        ours = self._written.get(key, {})
        there = {(one["kind"], one["metadata"]["name"]): one for one in found}
        for name, (at, body) in list(ours.items()):
            watched = there.get(name)
            if now - at > LAG_S or (watched is not None and _version(watched) >= _version(body)):
                del ours[name]
            else:
                there[name] = body
        self._deleted = {uid: at for uid, at in self._deleted.items() if now - at <= LAG_S}
        return [one for one in there.values() if one["metadata"].get("uid") not in self._deleted]


def _version(body: Object) -> int:
    return int(body["metadata"]["resourceVersion"])
