"""The bridge from the thread that replies come from to the coroutines that wait for them, and what it holds between."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from ..errors import Cancelled, RequestError
from ..request import FinishReason, TokenChunk
from ..sharing.giving_way import Held, who_gives_way
from .exchange import Reply
from .long_reply import LongReply

_log = logging.getLogger(__name__)

MAX_UNREAD = 1 << 20
"""Numbers in all replies that nobody has read: some 110 bytes each. 256 rows with the 20 likeliest tokens each make
6,700 a step, without them 1,300: 150 steps at least."""
_CHUNK = 4
"""Numbers that a chunk costs whatever it holds."""


class Inbox:
    """Replies to one request, until they are read."""

    def __init__(self, dropped: Callable[[], None], whose: str = "") -> None:
        self.whose = whose
        """Which client's the request is, as far as is known."""
        self._queue: asyncio.Queue[Reply | LongReply] = asyncio.Queue()
        self._dropped = dropped
        self.unread = 0
        """Numbers in chunks that wait."""
        self.given_up = False
        """Its reader was too slow: nothing is added any more."""

    def put(self, reply: Reply | LongReply) -> None:
        """Add one."""
        self._queue.put_nowait(reply)
        self.unread += _numbers(reply)

    async def get(self) -> Reply | LongReply:
        """The next one."""
        reply = await self._queue.get()
        self.unread -= _numbers(reply)
        return reply

    def give_up(self, error: RequestError) -> None:
        """Instead of all that waits its reader gets `error`, and the engine is told that nobody wants more."""
        while not self._queue.empty():
            self._queue.get_nowait()
        self.unread = 0
        self.given_up = True
        self.put(TokenChunk(finish_reason=FinishReason.ERROR, error=error))
        self._dropped()


class Streams:
    """Delivers replies from the engine thread to waiting coroutines: one wake-up of the event loop per step.

    A client that reads slowly lets its replies pile up here, as the engine waits for nobody. What all of them have not
    read is bounded; beyond that the largest of the client that has most of it gives way.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, most: int = MAX_UNREAD) -> None:
        """`most`: numbers (token ids, log-probabilities) in unread replies, all requests together."""
        self._loop = loop
        self._most = most
        self._inboxes: dict[str, Inbox] = {}
        self._looking = False

    def sink(self, replies: Sequence[tuple[str, Reply]]) -> None:
        """Called on the engine thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.deliver, replies)

    def open(self, sid: str, dropped: Callable[[], None] = lambda: None, whose: str = "") -> Inbox:
        """Where replies to `sid`, of a client, wait; close it in a `finally`. `dropped` is called when its reader was
        too slow: the request has an error then as its end, and the engine need not go on."""
        return self._inboxes.setdefault(sid, Inbox(dropped, whose))

    def close(self, sid: str) -> None:
        """Nobody listens to `sid` any more."""
        self._inboxes.pop(sid, None)

    def busy(self, sid: str) -> bool:
        """Whether somebody listens to `sid`."""
        return sid in self._inboxes

    def end_all(self, error: RequestError) -> None:
        """Each request that somebody listens to ends by `error`. Called on the event loop."""
        for sid, inbox in self._inboxes.items():
            if not inbox.given_up:
                inbox.put(TokenChunk(finish_reason=FinishReason.ERROR, error=error.located("generation", sid)))

    def deliver(self, replies: Sequence[tuple[str, Reply | LongReply]]) -> None:
        """Called on the event loop."""
        for sid, reply in replies:
            inbox = self._inboxes.get(sid)
            if inbox is not None and not inbox.given_up:
                inbox.put(reply)
        if not self._looking:
            # After those whom this wakes, and what waits beside it: that the loop was held up is not their fault.
            self._looking = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._looking = False
        # A sum over all: nothing that could drift is kept.
        excess = sum(inbox.unread for inbox in self._inboxes.values()) - self._most
        # Of whom nothing is known is a client for each: what others do is not theirs.
        held = (
            Held(inbox.whose or sid, inbox.unread, sid) for sid, inbox in self._inboxes.items() if not inbox.given_up
        )
        for one in who_gives_way(held, excess):
            error = Cancelled(
                f"the client reads too slowly: {one.size} numbers (tokens and log-probabilities) of this answer were "
                f"unread, and no other client has more of all, which together passed {self._most}; read on while the "
                "answer is made, or ask for fewer top_logprobs"
            )
            _log.warning("request %s: %s", one.what, error.message)
            self._inboxes[one.what].give_up(error.located("generation", one.what))


def _numbers(reply: Reply | LongReply) -> int:
    # Other kinds come once a request, and their sizes have bounds of their own (openai/budgets.py).
    if not isinstance(reply, TokenChunk):
        return 0
    scores = reply.logprobs
    return _CHUNK + len(reply.token_ids) + (len(scores) * (1 + len(scores[0].top)) if scores else 0)
