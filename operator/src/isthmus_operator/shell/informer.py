"""Watches: all objects of one kind, listed once in pages and from then on told of change by change.

Nothing is kept here but the place in the stream. Objects go to a `Sink` one by one as they come, so that a large
cluster is never in memory as a whole.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import ApiError
from .client import Api

Object = dict[str, Any]

PAGE = 100
GONE = 410
WATCH_S = 240.0
"""How long the server goes on telling before it ends the answer and is asked again, from the same place."""
SLACK_S = 30.0
"""How much longer than that an answer may take: a connection that is broken without a word is noticed then."""
MOST_PAUSE_S = 30.0

_log = logging.getLogger(__name__)


class Sink(Protocol):
    """Whoever keeps the objects."""

    def changed(self, body: Object) -> None:
        """An object as it is now; the same may come again."""

    def gone(self, body: Object) -> None:
        """An object as it was when it was deleted."""

    def absent(self, kind: str, namespace: str, present: set[str]) -> None:
        """After a list: of `kind` in `namespace` (empty: everywhere) there is nothing but these uids."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What to watch. group: empty for the core API; selector: of labels; empty for all objects."""

    group: str
    version: str
    plural: str
    selector: str = ""

    def path(self, namespace: str) -> str:
        """URL path of the collection, of all namespaces when `namespace` is empty."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        return f"{root}/namespaces/{namespace}/{self.plural}" if namespace else f"{root}/{self.plural}"


class Informer:
    """One kind in one namespace, or in all. `clock`: of the event loop, in seconds.

    listed: set when all objects that there were have been told; heard: when it last had an answer or an error
    """

    def __init__(
        self,
        api: Api,
        kind: Kind,
        namespace: str,
        sink: Sink,
        *,
        clock: Callable[[], float],
        spread: Callable[[], float] = random.random,
        first_pause_s: float = 1.0,
    ) -> None:
        self._api = api
        self._kind = kind
        self._namespace = namespace
        self._sink = sink
        self._clock = clock
        self._spread = spread
        self._first_pause_s = first_pause_s
        self._failures = 0
        self._place = ""
        self._turn: asyncio.Timeout | None = None
        self._round = 0
        self.listed = asyncio.Event()
        self.heard = clock()

    def __str__(self) -> str:
        return f"{self._kind.plural} of {self._namespace or 'all namespaces'}"

    def relist(self) -> None:
        """List anew at once: what was told may be old, as a connection may have been broken without a word. `listed` is
        set again after that."""
        self._round += 1
        self.listed.clear()
        if self._turn is not None and not self._turn.expired():
            self._turn.reschedule(asyncio.get_running_loop().time())

    async def run(self) -> None:
        """Until cancelled. What the server refuses or breaks off is tried again after growing pauses."""
        while True:
            self._place, self._failures = "", 0
            # It ends by `relist` alone.
            with suppress(TimeoutError):
                async with asyncio.timeout(None) as self._turn:
                    await self._follow()

    async def _follow(self) -> None:
        while True:
            try:
                if not self._place:
                    await self._list()
                await self._watch()
            except ApiError as error:
                # A lost connection goes on where it broke. A refusal may be about the place: from the start.
                if error.status:
                    self._place = ""
                await self._pause(error)

    async def _pause(self, error: ApiError) -> None:
        # An outage is no reason to be restarted: whoever goes on asking is not stuck.
        self.heard = self._clock()
        self._failures += 1
        if self._failures == 1 and error.status == GONE:
            return
        (_log.info if self._failures == 1 else _log.warning)("watch of %s: %s", self, error)
        pause = min(MOST_PAUSE_S, self._first_pause_s * 2.0 ** min(self._failures - 1, 10))
        await asyncio.sleep(pause * (1 - self._spread() / 4))

    def _heard(self) -> None:
        self._failures = 0
        self.heard = self._clock()

    async def _list(self) -> None:
        """Tell of all objects."""
        query = {"limit": str(PAGE)} | self._selected()
        present: set[str] = set()
        begun = self._round
        while True:
            page = await self._api.get(self._kind.path(self._namespace), **query)
            kind = page["kind"].removesuffix("List")
            for item in page["items"]:
                # Items of a list do not name their own kind.
                body = {"apiVersion": page["apiVersion"], "kind": kind, **item}
                present.add(body["metadata"]["uid"])
                self._sink.changed(body)
            if not page["metadata"].get("continue"):
                break
            query["continue"] = page["metadata"]["continue"]
            # Everybody else's turn: a large list must not keep the lease from being renewed.
            await asyncio.sleep(0)
        self._sink.absent(kind, self._namespace, present)
        self._heard()
        if begun == self._round:
            # Else it was begun before `relist` was called.
            self.listed.set()
        self._place = page["metadata"]["resourceVersion"]

    async def _watch(self) -> None:
        """Tell of changes until the server ends."""
        seconds = WATCH_S * (1 - self._spread() / 4)
        query = {
            "watch": "true",
            "resourceVersion": self._place,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": f"{seconds:.0f}",
            **self._selected(),
        }
        async for line in self._api.lines(self._kind.path(self._namespace), query, seconds + SLACK_S):
            told = json.loads(line)
            body = told["object"]
            if told["type"] == "ERROR":
                code, message = int(body.get("code") or 0), str(body.get("message"))
                raise ApiError(code, f"{self._kind.path(self._namespace)}: {message}")
            self._heard()
            if told["type"] == "DELETED":
                self._sink.gone(body)
            elif told["type"] in ("ADDED", "MODIFIED"):
                self._sink.changed(body)
            self._place = body["metadata"]["resourceVersion"]
        self._heard()

    def _selected(self) -> dict[str, str]:
        return {"labelSelector": self._kind.selector} if self._kind.selector else {}
