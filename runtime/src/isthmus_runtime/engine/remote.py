"""An engine in a process of its own, as the API process sees it: one socket, one event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import cast

from ..errors import EngineFailed, EngineLost, InvalidRequest, Overloaded, RequestError
from ..kv.prefix import BlockEvent, BlockRemoved, BlockStored
from ..protocol.calls import CommitCall
from ..protocol.ticket import Ticket
from ..request import FinishReason, GenerateRequest, TokenChunk
from .channel import (
    UNFIT,
    Abort,
    AdapterChanged,
    AskDrained,
    ChangeAdapter,
    ChannelError,
    Commit,
    Drained,
    Frames,
    FromEngine,
    Generate,
    GiveTicket,
    Gone,
    KvChanges,
    Prefill,
    Ready,
    Replies,
    Started,
    Status,
    Stop,
    Stopped,
    ToEngine,
    Trim,
    from_engine,
    pack,
)
from .seam import Engine, EngineFacts, EngineStatus
from .streams import Streams

_log = logging.getLogger(__name__)

MAX_UNREAD_BYTES = 64 << 20
"""Of commands that the engine has not read: with more, new requests are refused."""
_ANSWER_S = 5.0
"""Longest wait for an answer of the engine process to a question."""
_CHANGE_S = 60.0
"""The same where it reads the files of an adapter first."""


class RemoteEngine(Engine):
    """Belongs to the event loop that runs when it is made. `connect` first; the engine is usable once `ready` is done.

    When the other process is gone, every request ends by EngineLost, and new ones are refused.
    """

    def __init__(
        self,
        streams: Streams,
        *,
        silence_s: float,
        started: Callable[[str, float], None] | None = None,
        changed: Callable[[Iterable[BlockEvent]], None] | None = None,
        max_unread_bytes: int = MAX_UNREAD_BYTES,
    ) -> None:
        """`silence_s`: an engine that says nothing for so long is a reason to restart. `started` is told scheduler ids
        of rows and when they were first in a step, `changed` of changes of the prefix cache."""
        self._loop = asyncio.get_running_loop()
        self._streams = streams
        self._silence_s = silence_s
        self._started = started
        self._changed = changed
        self._max_unread = max_unread_bytes
        self._transport: asyncio.WriteTransport | None = None
        self._unsent: list[ToEngine] = []
        self._frames = Frames()
        self._facts: EngineFacts | None = None
        self._status: EngineStatus | None = None
        self._heard = self._loop.time()
        self._leaving: Counter[str] = Counter()
        """Requests that were aborted without an answer, by scheduler id, until the engine knows of it: what it still
        says to them must not reach whoever uses the same id next."""
        self._asked: dict[int, asyncio.Future[bool]] = {}
        self._changing: dict[int, asyncio.Future[RequestError | None]] = {}
        self._questions = 0
        self._stopped = False
        self.ready: asyncio.Future[EngineFacts] = self._loop.create_future()
        """EngineLost when the process ends before."""
        self.ended = asyncio.Event()
        """The process has closed its side, or is gone."""

    async def connect(self, sock: socket.socket) -> None:
        """Speak through `sock` from now on."""
        await self._loop.create_connection(lambda: _Wire(self), sock=sock)

    @property
    def max_model_len(self) -> int:
        """See `Engine`."""
        assert self._facts is not None, "not ready"
        return self._facts.kv.max_model_len

    def generate(
        self,
        request: GenerateRequest,
        *,
        attempt: str = "",
        local_attempt: str = "",
        peer_url: str = "",
        peer_epoch: str = "",
    ) -> None:
        """See `Engine`."""
        command = Generate(request, attempt, local_attempt, peer_url, peer_epoch)
        self._request(command, attempt or local_attempt or request.request_id)

    def prefill(self, request: GenerateRequest, attempt: str, ticket: Ticket | None) -> None:
        """See `Engine`."""
        self._request(Prefill(request, attempt, ticket), attempt)

    def ticket(self, ticket: Ticket) -> None:
        """See `Engine`."""
        self._send(GiveTicket(ticket))

    def commit(self, call: CommitCall) -> None:
        """See `Engine`."""
        self._send(Commit(call))

    def abort(self, request_id: str, attempt: str, reason: str, *, answer: bool = True) -> None:
        """See `Engine`."""
        if not answer and not self.ended.is_set():
            self._leaving[attempt or request_id] += 1
        self._send(Abort(request_id, attempt, reason, answer))

    async def is_drained(self, attempt: str) -> bool:
        """See `Engine`."""
        if self._stopped:
            return True
        if self.ended.is_set():
            raise self._lost()
        self._questions += 1
        number = self._questions
        answer: asyncio.Future[bool] = self._loop.create_future()
        self._asked[number] = answer
        self._send(AskDrained(number, attempt))
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await answer
        except TimeoutError as e:
            raise EngineFailed(f"the engine process has not answered for {_ANSWER_S:g} s") from e
        finally:
            del self._asked[number]

    async def change_adapter(self, name: str, path: str | None, *, replace: bool = False) -> None:
        """See `Engine`."""
        if self.ended.is_set():
            raise self._lost()
        self._questions += 1
        number = self._questions
        answer: asyncio.Future[RequestError | None] = self._loop.create_future()
        self._changing[number] = answer
        self._send(ChangeAdapter(number, name, path, replace))
        try:
            async with asyncio.timeout(_CHANGE_S):
                error = await answer
        except TimeoutError as e:
            raise EngineFailed(f"the engine process has not answered for {_CHANGE_S:g} s") from e
        finally:
            del self._changing[number]
        if error is not None:
            raise error

    def trim(self) -> None:
        """See `Engine`."""
        self._send(Trim())

    def status(self) -> EngineStatus:
        """See `Engine`: what the engine last told, and whether that is long ago."""
        assert self._status is not None, "not ready"
        if self.ended.is_set() and not self._stopped:
            return replace(self._status, failure=self._lost().message)
        silent = self._loop.time() - self._heard
        if silent > self._silence_s and not self._stopped:
            problem = f"the engine process has said nothing for {silent:.0f} s (limit {self._silence_s:g} s)"
            return replace(self._status, problem=self._status.problem or problem)
        return self._status

    async def stop(self, timeout_s: float) -> None:
        """End all its requests and transfers; returns when it has, when it is gone, or after `timeout_s`."""
        self._send(Stop())
        try:
            async with asyncio.timeout(timeout_s):
                await self.ended.wait()
        except TimeoutError:
            _log.error("the engine process has not stopped within %g s", timeout_s)

    def close(self) -> None:
        """Close the socket: an engine process that has not stopped ends now."""
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------------------------------------------ to the engine

    def _request(self, command: Generate | Prefill, sid: str) -> None:
        refusal: RequestError | None = None
        if self.ended.is_set():
            refusal = Overloaded(self._lost().message)
        elif self._transport is not None and self._transport.get_write_buffer_size() > self._max_unread:
            refusal = Overloaded("the engine process reads its requests too slowly; try again")
        if refusal is None:
            self._send(command)
        else:
            self._refuse(sid, refusal)

    def _refuse(self, sid: str, error: RequestError) -> None:
        chunk = TokenChunk(finish_reason=FinishReason.ERROR, error=error.located("admission", sid))
        self._streams.deliver([(sid, chunk)])

    def _send(self, command: ToEngine) -> None:
        """In one frame with whatever else comes up in this turn of the event loop."""
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(command)

    def _flush(self) -> None:
        commands, self._unsent = self._unsent, []
        self._write(commands)

    def _write(self, commands: Sequence[ToEngine]) -> None:
        if self._transport is None or self.ended.is_set():
            return  # what waits for an answer has been told
        frame = pack(commands)
        if frame is not None:
            self._transport.write(frame)
        elif len(commands) > 1:
            self._write(commands[: len(commands) // 2])
            self._write(commands[len(commands) // 2 :])
        else:
            command = commands[0]
            assert isinstance(command, Generate | Prefill), "all else is small and checked"
            local = command.local_attempt if isinstance(command, Generate) else ""
            sid = command.attempt or local or command.request.request_id
            self._refuse(sid, InvalidRequest(f"the request cannot be passed to the engine process: {UNFIT}"))

    # ---------------------------------------------------------------------------------------------- from the engine

    def _connected(self, transport: asyncio.WriteTransport) -> None:
        self._transport = transport

    def _received(self, data: bytes) -> None:
        self._heard = self._loop.time()
        try:
            for body in self._frames.feed(data):
                for message in from_engine(body):
                    self._take(message)
        except ChannelError as error:
            _log.critical("the engine process: %s", error)
            assert self._transport is not None
            self._transport.abort()

    def _take(self, message: FromEngine) -> None:
        match message:
            case Replies(chunks=chunks, tickets=tickets, answers=answers, long=long):
                for replies in (tickets, long, answers, chunks):
                    if replies:
                        self._streams.deliver([r for r in replies if r[0] not in self._leaving])
            case Gone(sid=sid):
                self._leaving[sid] -= 1
                if self._leaving[sid] <= 0:
                    del self._leaving[sid]
            case Started(sids=sids, at=at):
                if self._started is not None:
                    for sid in sids:
                        self._started(sid, at)
            case KvChanges(changes=changes):
                if self._changed is not None:
                    self._changed(
                        (BlockStored if stored else BlockRemoved)(seq, block_hash, group)
                        for stored, seq, block_hash, group in changes
                    )
            case Status(status=status):
                self._status = status
            case Drained(number=number, drained=drained):
                if (asked := self._asked.get(number)) is not None and not asked.done():
                    asked.set_result(drained)
            case AdapterChanged(number=number, error=error, adapters=adapters):
                if self._status is not None:
                    self._status = replace(self._status, adapters=adapters)
                if (changing := self._changing.get(number)) is not None and not changing.done():
                    changing.set_result(error)
            case Ready(facts=facts, status=status):
                self._facts, self._status = facts, status
                self.ready.set_result(facts)
            case Stopped():
                self._stopped = True
                self._end()

    def _end(self) -> None:
        """No more comes: each request that waits is told."""
        if self.ended.is_set():
            return
        self.ended.set()
        error = self._lost()
        if not self.ready.done():
            self.ready.set_exception(error)
        for asked in self._asked.values():
            if asked.done():
                continue
            if self._stopped:
                asked.set_result(True)
            else:
                asked.set_exception(error)
        for changing in self._changing.values():
            if not changing.done():
                changing.set_exception(error)
        self._streams.end_all(error)

    @staticmethod
    def _lost() -> EngineLost:
        return EngineLost("the engine process has ended; the log says why")


class _Wire(asyncio.Protocol):
    """asyncio's callbacks to `RemoteEngine`."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._engine._connected(cast(asyncio.WriteTransport, transport))  # uvloop's are no instances of asyncio's

    def data_received(self, data: bytes) -> None:
        self._engine._received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine._end()
