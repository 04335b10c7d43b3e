"""The engine process's end of the channel: commands in on one thread, what the engine says out on another.

Neither is the engine's thread, which never waits for a socket, and there is no event loop: nothing here competes with
the planning of steps but the packing of one frame a step.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import msgspec

from ..errors import EngineFailed, RequestError
from ..heap import give_back
from ..interfaces.steps import RowStart
from ..kv.prefix import BlockStored
from ..threads import running_pool, send
from .channel import (
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
    Started,
    Status,
    Stop,
    Stopped,
    ToEngine,
    Trim,
    pack,
    replies,
    reply_frames,
    to_engine,
)
from .exchange import Reply
from .kv_events import QUEUE_EVENTS, EventQueue
from .local import LocalEngine
from .seam import EngineFacts

_log = logging.getLogger(__name__)

STATUS_S = 0.25
"""How often probes and metrics get news."""
_RECEIVE = 1 << 20
_ENDED = "the API process has ended"
"""Seen by whichever thread comes to the socket first."""
_Item = Sequence[tuple[str, Reply]] | FromEngine | Callable[[], FromEngine | None]


class EngineHost:
    """Give `sink`, `events` and `started` to the engine's parts, `start` at once, and `serve` when the engine runs."""

    def __init__(
        self, sock: socket.socket, *, lost: Callable[[str], None], clock: Callable[[], float], traced: bool = False
    ) -> None:
        """`lost` is called, on a thread of this, when the API process is gone or not to be understood. `traced`: it
        wants to know when rows start. `clock`: monotonic seconds."""
        self._sock = sock
        self._lost = lost
        self._clock = clock
        self._engine: LocalEngine | None = None
        self._out: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self.events = EventQueue(self._events_wait, QUEUE_EVENTS)
        """Give it to the block pool."""
        self._told = threading.Event()
        """The writer will look at `events`."""
        self.started = self._rows_started if traced else None
        self.stop = threading.Event()
        """The API process asks for the end."""
        self._finished = threading.Event()
        """It is told all; its end is no loss any more."""
        self._changer = running_pool(1, "adapters")
        self._reader = threading.Thread(target=self._read, name="channel-in", daemon=True)
        self._writer = threading.Thread(target=self._write, name="channel-out", daemon=True)

    def start(self) -> None:
        """Start listening: the end of the API process is noticed from now on."""
        self._reader.start()

    def serve(self, engine: LocalEngine, facts: EngineFacts) -> None:
        """Say that the engine runs, and pass on what both say."""
        self._engine = engine
        self._out.put(Ready(facts, engine.status()))
        self._writer.start()

    def finish(self, timeout_s: float) -> None:
        """Say that nothing moves any more, after all else; returns when that is sent, or after `timeout_s`."""
        self._finished.set()
        self._out.put(Stopped())
        self._out.put(None)
        self._writer.join(timeout_s)

    def sink(self, found: Sequence[tuple[str, Reply]]) -> None:
        """See `EngineLoop`; any thread."""
        self._out.put(found)

    def left(self, timeout_s: float) -> None:
        """See `EngineLoop`: returns when what the sink was given is being sent, or the time has passed."""
        taken = threading.Event()
        self._out.put(taken.set)
        taken.wait(timeout_s)

    def _rows_started(self, rows: Sequence[RowStart]) -> None:
        self._out.put(Started([row.request_id for row in rows], self._clock()))

    def _events_wait(self) -> None:
        if not self._told.is_set():
            self._told.set()
            self._out.put(self._changes)

    def _changes(self) -> FromEngine | None:
        """All that waits. The API process sees by its numbers when some were lost."""
        self._told.clear()
        found = []
        while self.events:
            event = self.events.popleft()
            found.append((isinstance(event, BlockStored), event.seq, event.block_hash, event.group))
        return KvChanges(found) if found else None

    # ------------------------------------------------------------------------------------------------ channel-out

    def _write(self) -> None:
        assert self._engine is not None
        status_at = self._clock() + STATUS_S
        last, failure = False, ""
        while not last:
            taken: list[_Item | None] = []
            with suppress(queue.Empty):
                taken.append(self._out.get(timeout=max(0.0, status_at - self._clock())))
                while True:
                    taken.append(self._out.get_nowait())
            items = [item for item in taken if item is not None]
            last = len(items) < len(taken)
            now, found = self._clock(), self._engine.loop.failure
            try:
                if now >= status_at or found != failure:
                    # Before the errors of requests: who sees one may look at probes at once.
                    items.insert(0, Status(self._engine.status()))
                    status_at, failure = now + STATUS_S, found
                for frame in _frames(items):
                    self._sock.sendall(frame)
            except OSError as error:
                # The reader sees the end of the API process, and not that this kernel had no memory for a message.
                if not self._finished.is_set():
                    gone = isinstance(error, (BrokenPipeError, ConnectionResetError))
                    self._lost(f"{_ENDED if gone else 'the channel to the API process broke'}: {error}")
                return
            except BaseException:  # Rust's panics are no Exception, and nobody would know that this thread has ended
                _log.exception("a message to the API process could not be written")
                self._lost("the channel to the API process broke")
                return

    # ------------------------------------------------------------------------------------------------- channel-in

    def _read(self) -> None:
        received, reason = Frames(), _ENDED
        try:
            while data := self._sock.recv(_RECEIVE):
                for body in received.feed(data):
                    for message in to_engine(body):
                        self._obey(message)
        except (OSError, ChannelError) as error:
            reason = f"{reason}: {error}"
        except BaseException as error:  # as above
            _log.exception("a command of the API process failed")
            reason = f"a command of the API process failed: {error}"
        # Also while the engine stops, which may take as long as a transfer or a rank that hangs.
        if not self._finished.is_set():
            self._lost(reason)

    def _obey(self, message: ToEngine) -> None:
        engine = self._engine
        if engine is None:
            raise EngineFailed(f"{type(message).__name__} came before the engine was ready")
        match message:
            case Generate(request=request, attempt=attempt, local_attempt=local, peer_url=url, peer_epoch=epoch):
                engine.generate(request, attempt=attempt, local_attempt=local, peer_url=url, peer_epoch=epoch)
            case Prefill(request=request, attempt=attempt, ticket=ticket):
                engine.prefill(request, attempt, ticket)
            case GiveTicket(ticket=ticket):
                engine.ticket(ticket)
            case Commit(call=call):
                engine.commit(call)
            case Abort(request_id=request_id, attempt=attempt, reason=reason, answer=answer):
                engine.abort(request_id, attempt, reason, answer=answer)
                if not answer:
                    gone = Gone(attempt or request_id)
                    engine.loop.after(lambda: self._out.put(gone))
            case AskDrained(number=number, attempt=attempt):
                self._out.put(Drained(number, engine.loop.is_drained(attempt)))
            case ChangeAdapter():
                # It reads files: whoever sends commands meanwhile does not wait for them.
                send(self._changer, self._change_adapter, engine, message)
            case Trim():
                send(self._changer, give_back)
            case Stop():
                self.stop.set()

    def _change_adapter(self, engine: LocalEngine, asked: ChangeAdapter) -> None:
        error: RequestError | None = None
        try:
            engine.adapters.change(asked.name, asked.path, replace=asked.replace)
        except RequestError as refused:
            error = refused
        except Exception as broken:
            _log.exception("adapter %s could not be changed", asked.name)
            error = EngineFailed(f"adapter {asked.name} could not be changed: {broken}")
        self._out.put(AdapterChanged(asked.number, error, engine.adapters.names))


def _frames(items: Sequence[_Item]) -> Iterator[bytes]:
    """One frame, with the replies of neighbouring turns in one message; several where that would be too large."""
    found: list[FromEngine | list[tuple[str, Reply]]] = []
    for item in items:
        if isinstance(item, msgspec.Struct):
            found.append(item)
        elif callable(item):
            if (made := item()) is not None:
                found.append(made)
        elif found and isinstance(found[-1], list):
            found[-1] += item
        else:
            found.append(list(item))
    if not found:
        return
    frame = pack([replies(each) if isinstance(each, list) else each for each in found])
    if frame is not None:
        yield frame
        return
    for each in found:
        if isinstance(each, list):
            yield from reply_frames(each)
        else:
            frame = pack([each])
            assert frame is not None, "all else is small"
            yield frame
