"""What the pods of each service say about themselves, without a reconcile that waits for those that say nothing.

An engine that hangs is asked for as long as FactReader allows, but the workers, which are few, go on with what was
known of its service before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from ..plan.observed import Facts, Pod
from .cache import Key

PATIENCE_S = 0.25
"""A pod that is well answers in a few milliseconds."""


class Reader(Protocol):
    """FactReader, as it is used here."""

    async def read(self, namespace: str, pods: Iterable[Pod], *, load: bool, patient: bool) -> Facts:
        """Never raises for what a pod does or does not say."""

    async def close(self) -> None:
        """Idempotent."""


class KnownFacts:
    """One per operator. wake: called with a service about which something new is known."""

    def __init__(self, reader: Reader, wake: Callable[[Key], None]) -> None:
        self._reader = reader
        self._wake = wake
        self._asked: dict[Key, asyncio.Task[Facts]] = {}
        self._last: dict[Key, Facts] = {}
        self._late: set[Key] = set()

    async def read(self, key: Key, pods: Iterable[Pod], *, load: bool) -> Facts | None:
        """The answers, or after PATIENCE_S what was known before; then the service is woken by answers that differ.

        None: nothing was ever known, as after a start; the service is woken when it is. What its status says is not to
        be taken back only because the operator is new.
        """
        asked = self._asked.get(key)
        if asked is None:
            asked = self._asked[key] = asyncio.create_task(
                self._reader.read(key[0], pods, load=load, patient=key not in self._last)
            )
            asked.add_done_callback(partial(self._answered, key))
        await asyncio.wait([asked], timeout=PATIENCE_S)
        if asked.cancelled():
            return None
        if asked.done():
            return asked.result()
        self._late.add(key)
        return self._last.get(key)

    def _answered(self, key: Key, asked: asyncio.Task[Facts]) -> None:
        # Forgotten in the moment between its end and this: what is known by now is of a successor of that name.
        if asked.cancelled() or self._asked.get(key) is not asked:
            return
        del self._asked[key]
        late = key in self._late
        self._late.discard(key)
        facts, before = asked.result(), self._last.get(key)
        self._last[key] = facts
        if late and facts != before:
            self._wake(key)

    def forget(self, key: Key) -> None:
        """The service is gone."""
        if (asked := self._asked.pop(key, None)) is not None:
            asked.cancel()
        self._last.pop(key, None)
        self._late.discard(key)

    async def close(self) -> None:
        """Idempotent."""
        asked = [*self._asked.values()]
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await self._reader.close()
