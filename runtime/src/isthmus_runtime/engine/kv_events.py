"""The engine's prefix cache as a stream of changes, for routers that send prompts where their prefix is.

The block pool reports each change from the engine thread; the event loop keeps a copy of what is visible and hands out
changes. A reader that is new, or too slow for the bounded log, gets a snapshot instead: nobody is ever slowed down.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from itertools import islice

from ..kv.prefix import BlockEvent, BlockStored
from ..protocol.info import KvEvents

QUEUE_EVENTS = 1 << 17
"""Events that may wait for the event loop. When more come, what is visible is forgotten and learned again."""
LOG_CHANGES = 1 << 14
"""How far a reader may fall behind before it gets a snapshot."""
_LINE_CHANGES = 4096


class EventQueue(deque[BlockEvent]):
    """A bounded deque that tells when something is in it."""

    def __init__(self, notify: Callable[[], None], size: int) -> None:
        super().__init__(maxlen=size)
        self._notify = notify

    def append(self, event: BlockEvent, /) -> None:
        super().append(event)
        self._notify()


class KvEventFeed:
    """Give `queue` to the block pool, or to `take` what another process tells of it. Everything else belongs to the
    event loop `loop`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, *, queue_events: int = QUEUE_EVENTS, log_changes: int = LOG_CHANGES
    ) -> None:
        self.queue: deque[BlockEvent] = EventQueue(self._notify, queue_events)
        self._loop = loop
        self._woken = False
        self._seq = 0
        self._blocks: dict[str, int] = {}
        self._log: deque[str] = deque(maxlen=log_changes)
        self._end = 0
        self._changed = asyncio.Event()
        self._closed = False

    async def lines(self) -> AsyncIterator[KvEvents]:
        """A snapshot, then changes as they come, until `close`."""
        position = -1
        while not self._closed:
            first = self._end - len(self._log)
            if position < first:
                position, keys = self._end, list(self._blocks)
                for start in range(0, max(1, len(keys)), _LINE_CHANGES):
                    part = tuple("+" + key for key in keys[start : start + _LINE_CHANGES])
                    yield KvEvents(previous=position, following=position, reset=start == 0, changes=part)
            elif position < self._end:
                part = tuple(islice(self._log, position - first, position - first + _LINE_CHANGES))
                yield KvEvents(previous=position, following=position + len(part), changes=part)
                position += len(part)
            else:
                await self._changed.wait()

    def close(self) -> None:
        """End all readers."""
        self._closed = True
        self._tell()

    def _notify(self) -> None:
        """Called on the engine thread, once per event: wakes the loop once per batch."""
        if not self._woken and not self._loop.is_closed():
            self._woken = True
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._woken = False
        self.take(self._waiting())

    def _waiting(self) -> Iterator[BlockEvent]:
        while self.queue:
            yield self.queue.popleft()

    def take(self, events: Iterable[BlockEvent]) -> None:
        """Changes in their order; where `seq` shows that some are missing, what is visible is learned again."""
        blocks = self._blocks
        for event in events:
            if event.seq != self._seq:
                # The queue overflowed: what was visible before is unknown, and no reader may go on from it.
                blocks.clear()
                self._log.clear()
                self._end += 1
            self._seq = event.seq + 1
            key = event.block_hash[:8].hex()
            # A block of a hybrid model is stored once per KV group; the first and the last count.
            count = blocks.get(key, 0)
            if isinstance(event, BlockStored):
                blocks[key] = count + 1
                if count == 0:
                    self._note("+" + key)
            elif count == 1:
                del blocks[key]
                self._note("-" + key)
            elif count > 1:
                blocks[key] = count - 1
        self._tell()

    def _note(self, change: str) -> None:
        self._log.append(change)
        self._end += 1

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
