"""The watched objects of every service, corrected by what we have just written.

A watch lags behind our own writes. Until it has caught up, the API server's answer to the write stands in its place, so
that no decision is taken twice from an old state.

Only what is read is kept, as compressed JSON: an object takes a hundredth of what it takes as Python dictionaries, and
is looked at once a minute or so. Anybody may label an object as a service's: of one that belongs to no service nothing
is kept but that it is there, so that nobody fills the operator's memory with his own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from ..render.names import SERVICE_LABEL
from .kept import SERVICE, Budget, Kept, Object, body_of, keep

Key = tuple[str, str]
"""Namespace and name of a service."""
Name = tuple[str, str]
"""Kind and name of an object."""

LAG_S = 30.0
"""A watch that is further behind than this is broken, and then the newest of what is known is as good as anything."""

MOST_OF_A_SERVICE = 1024 * 1024
"""Compressed bytes of a service's children but pods. Those of the largest spec, in three revisions, have half of it."""
MOST_WEIGHT_OF_A_SERVICE = 24 * 1024 * 1024
"""What they take as Python objects, about, when they are looked at: empty values and one letter repeated compress to
nothing. One service that has so much is looked at at a time."""
MOST_CHILDREN = 256
"""Of a service, but for pods. Three revisions of the largest spec are some fifty."""
MOST_WEIGHT_OF_PODS = 24 * 1024 * 1024
"""The same of a service's pods: of some four thousand usual ones."""
MOST_OF_A_NAMESPACE = 16 * 1024 * 1024
"""Compressed bytes of everything in it but services, whichever they are said to belong to: a label may name one that
does not exist. Ten thousand pods have 6 MB."""
MOST_OF_SERVICES = 8 * 1024 * 1024
"""Compressed bytes of all services of a namespace. Thousands of usual ones; of the largest that are admitted, full of
letters that do not compress, twenty."""
_log = logging.getLogger(__name__)
_UNBOUNDED = 1 << 62


class Children:
    """Objects of one service, which are many: not made before they are called for, on whichever thread."""

    def __init__(self, kept: list[Kept]) -> None:
        self._kept = kept

    @property
    def weight(self) -> int:
        """Bytes that they take, about."""
        return sum(kept.weight for kept in self._kept)

    def __call__(self) -> list[Object]:
        return [body_of(kept) for kept in self._kept]


class Cache:
    """One per operator. Told of everything by kopf's watches, and by lists; each may be behind the other.

    changed: called with the key of a service of which something that is read has changed; edited: with that of one
    whose spec has; removed: with that of one which is gone
    """

    def __init__(
        self, changed: Callable[[Key], None], edited: Callable[[Key], None], removed: Callable[[Key], None]
    ) -> None:
        self._changed = changed
        self._edited = edited
        self._removed = removed
        self._watched: dict[Key, dict[Name, Kept]] = {}
        self._used: dict[tuple[str, ...], Budget] = {}
        """Of each purse, all `budget`s together."""
        self._places: dict[str, tuple[Key, Name]] = {}
        self._ready: dict[Key, bool] = {}
        self._generations: dict[Key, int] = {}
        self._written: dict[Key, dict[Name, tuple[float, Kept]]] = {}
        self._deleted: dict[str, tuple[float, int]] = {}
        self._gone: dict[str, tuple[float, int]] = {}

    # -------------------------------------------------------------------------------------------------- decisions

    def service(self, key: Key) -> Object | None:
        """The InferenceService itself; None when it is gone, and when it is left out."""
        if key not in self:
            return None
        found = self._newest(key).get((SERVICE, key[1]))
        return body_of(found) if found is not None and found.data else None

    def left_out(self, key: Key) -> bool:
        """Whether there is such a service, and nothing is kept of it: others of its namespace have all the room."""
        found = self._watched.get(key, {}).get((SERVICE, key[1]))
        return found is not None and not found.data

    def children(self, key: Key) -> Children:
        """Every object labelled as the service's that a service of its name has made, and every pod, as they are now;
        without those we have deleted."""
        return Children([kept for (kind, _), kept in self._newest(key).items() if kind != SERVICE and kept.data])

    def __contains__(self, key: Key) -> bool:
        """Whether there is such a service."""
        return key in self._ready

    def services(self) -> list[Key]:
        """All services there are."""
        return list(self._ready)

    def counts(self) -> tuple[int, int]:
        """Services that are ready, and that are not."""
        ready = sum(self._ready.values())
        return ready, len(self._ready) - ready

    def written(self, key: Key, verb: str, body: Object) -> None:
        """Remember an answer of the API server."""
        now = asyncio.get_running_loop().time()
        if key not in self:
            # Gone while this was written: nobody would ever forget it.
            return
        if verb == "delete":
            self._deleted[body["metadata"]["uid"]] = now, 0
        elif "resourceVersion" in body["metadata"]:
            if body["kind"] == SERVICE and self.left_out(key):
                return
            self._written.setdefault(key, {})[body["kind"], body["metadata"]["name"]] = (now, keep(body))

    # ------------------------------------------------------------------------------------------------ what is told

    def changed(self, body: Object) -> None:
        """An object as it is now, or as it was before something that is known already."""
        key, name = _key(body), (body["kind"], body["metadata"]["name"])
        before = self._watched.get(key, {}).get(name)
        uid, version = body["metadata"].get("uid", ""), int(body["metadata"]["resourceVersion"])
        newest = before.version if before is not None and before.uid == uid else self._gone.get(uid, (0.0, 0))[1]
        left_out = before is not None and (before.uid, before.version) == (uid, version) and not before.data
        if version <= newest and not left_out:
            return
        kept = self._within_budget(key, name, keep(body))
        place = self._places.get(uid)
        if place is not None and place[0] != key:
            self._drop(uid)
        answer = self._written.get(key, {}).get(name)
        if answer is not None and answer[1].version <= version:
            # The watch has caught up: an answer would take as much room again until somebody looks.
            del self._written[key][name]
        self._put(key, name, kept)
        self._places[uid] = key, name
        if name[0] == SERVICE:
            self._ready[key] = _is_ready(body)
            generation = body["metadata"].get("generation", 0)
            if self._generations.setdefault(key, generation) != generation:
                self._generations[key] = generation
                self._edited(key)
                return
        if any(known is None or known.data != kept.data for known in (before, answer[1] if answer else before)):
            self._wake(key)

    def _within_budget(self, key: Key, name: Name, kept: Kept) -> Kept:
        """Nothing of an object for which its service or its namespace has no room: an owner reference is easily
        forged, and so is a pod."""
        before = self._watched.get(key, {}).get(name)
        for purse, most in _purses(key, name):
            used = self._used.get(purse, (0, 0, 0))
            needed = _sum(_sum(used, before.budget, -1) if before is not None else used, kept.budget)
            if any(n > m for n, m in zip(needed, most, strict=True)):
                if before is None or before.data:
                    what = f"{name[0]} {key[0]}/{name[1]}"
                    _log.warning("%s is left out: there is no room for it beside other %s", what, " ".join(purse))
                return kept._replace(data=b"")
        return kept

    def _put(self, key: Key, name: Name, kept: Kept) -> None:
        there = self._watched.setdefault(key, {})
        if name in there:
            self._count(key, name, there[name], -1)
        there[name] = kept
        self._count(key, name, kept, 1)

    def _count(self, key: Key, name: Name, kept: Kept, times: int) -> None:
        for purse, _ in _purses(key, name):
            used = _sum(self._used.pop(purse, (0, 0, 0)), kept.budget, times)
            if any(used):
                self._used[purse] = used

    def gone(self, body: Object) -> None:
        """An object was deleted, or has lost its label: neither our answer to an earlier write nor a list begun before
        brings it back."""
        now, meta = asyncio.get_running_loop().time(), body["metadata"]
        _forget(self._gone, now)
        self._gone[meta["uid"]] = now, int(meta["resourceVersion"])
        self._drop(meta["uid"])

    def absent(self, kind: str, namespace: str, present: set[str], version: int) -> None:
        """What is not in a list was deleted unheard, unless it is newer than the list, which is of `version`."""
        lost = [
            uid
            for uid, (key, name) in self._places.items()
            if name[0] == kind
            and namespace in ("", key[0])
            and uid not in present
            # What has its name by now, or had it and went first, is told of by itself.
            and (
                (there := self._watched.get(key, {}).get(name)) is None or there.uid != uid or there.version <= version
            )
        ]
        for uid in lost:
            self._drop(uid)

    def _drop(self, uid: str) -> None:
        if uid not in self._places:
            return
        key, name = self._places.pop(uid)
        there = self._watched.get(key, {})
        if name in there and there[name].uid == uid:
            self._count(key, name, there.pop(name), -1)
        if not there:
            self._watched.pop(key, None)
        answer = self._written.get(key, {}).get(name)
        if answer is not None and answer[1].uid == uid:
            del self._written[key][name]
        if name[0] == SERVICE and name not in there:
            self._ready.pop(key, None)
            self._generations.pop(key, None)
            self._written.pop(key, None)
            self._removed(key)
        else:
            self._wake(key)

    def _wake(self, key: Key) -> None:
        if key in self._ready:
            self._changed(key)

    def _newest(self, key: Key) -> dict[Name, Kept]:
        now = asyncio.get_running_loop().time()
        there, ours = dict(self._watched.get(key, {})), self._written.get(key, {})
        for name, (at, kept) in list(ours.items()):
            watched = there.get(name)
            if now - at > LAG_S or (watched is not None and watched.version >= kept.version):
                del ours[name]
            else:
                there[name] = kept
        _forget(self._deleted, now)
        return {name: kept for name, kept in there.items() if kept.uid not in self._deleted}


def _purses(key: Key, name: Name) -> tuple[tuple[tuple[str, ...], Budget], ...]:
    """Out of what an object's room is taken, and how much there is in each."""
    if name[0] == SERVICE:
        return ((("services", key[0]), (MOST_OF_SERVICES, _UNBOUNDED, _UNBOUNDED)),)
    if name[0] == "Pod":
        own = ("pods", *key), (_UNBOUNDED, MOST_WEIGHT_OF_PODS, _UNBOUNDED)
    else:
        own = ("children", *key), (MOST_OF_A_SERVICE, MOST_WEIGHT_OF_A_SERVICE, MOST_CHILDREN)
    return own, (("namespace", key[0]), (MOST_OF_A_NAMESPACE, _UNBOUNDED, _UNBOUNDED))


def _sum(one: Budget, other: Budget, times: int = 1) -> Budget:
    return one[0] + times * other[0], one[1] + times * other[1], one[2] + times * other[2]


def _forget(times: dict[str, tuple[float, int]], now: float) -> None:
    """Drop what is older than LAG_S from times in the order in which they came."""
    while times and now - next(iter(times.values()))[0] > LAG_S:
        del times[next(iter(times))]


def _key(body: Mapping[str, Any]) -> Key:
    meta = body["metadata"]
    name = meta["name"] if body["kind"] == SERVICE else (meta.get("labels") or {}).get(SERVICE_LABEL, "")
    return meta.get("namespace", ""), name


def _is_ready(body: Mapping[str, Any]) -> bool:
    found = (body.get("status") or {}).get("conditions") or ()
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in found)
