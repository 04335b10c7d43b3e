"""Moves the KV of a rank of a tensor-parallel engine, 1 and up, in its own process, as the first rank says."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from ..config import TransferConfig
from ..errors import ConfigError
from ..interfaces.transport import CLOSE_S, KvRegion, TransferResult
from .bounded import TookTooLong, run_bounded
from .checksums import Checksums
from .native_engine import NativeEngine, start_engine
from .peer_memory import batches
from .peers import Peers
from .rank_lines import ANSWER, ASK, TOLD, Answer, Ask, Part, Told, lines
from .slots import RecordSlots
from .sockets import end_connections_from
from .transport import Run
from .writes import Write, Writes

_log = logging.getLogger(__name__)


class RankMover:
    """What moves the KV of a rank, 1 and up, in its own process: on a thread, as the first rank says."""

    def __init__(
        self,
        theirs: socket.socket,
        region: KvRegion,
        cfg: TransferConfig,
        on_end: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_end`: called on the thread when the channel breaks, or something in it does: the rank is lost then."""
        self._socket = theirs
        self._region, self._cfg, self._clock = region, cfg, clock
        self._on_end = on_end
        self._lock = threading.Lock()
        self._slots = RecordSlots()
        self._peers = Peers(clock)
        self._writes = Writes(self._peers, clock)
        self._checksums: Checksums | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="transfer-rank", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """The first rank has ended, or said that this is to: wait until nothing moves."""
        self._closed.wait(timeout_s)

    def _run(self) -> None:
        try:
            native = self._prepare()
            if native is None:
                return
            for line in lines(self._socket):
                ask = ASK.validate_json(line)
                if ask.what == "close":
                    self._answer(Answer(number=ask.number, ok=self._close(native, ask.timeout_s)))
                    return
                self._do(ask, native)
            _log.error("the first rank's channel was closed")
        except Exception:
            _log.exception("this rank moves no KV any more")
        finally:
            quiet = self._closed.is_set()
            self._closed.set()
            self._socket.close()
            if not quiet:
                self._on_end()

    def _prepare(self) -> NativeEngine | None:
        cfg = self._cfg
        try:
            native = start_engine(
                cfg.host, self._region, self._slots, transport=cfg.transport, fallback=cfg.fallback,
                timeout_s=cfg.timeout_s, clock=self._clock,
            )  # fmt: skip
        except ConfigError as error:
            self._send(TOLD.dump_json(Told(problem=str(error))))
            self._closed.set()  # the first rank ends all
            return None
        if self._region.device == "cpu":
            self._checksums = Checksums(self._region)
        self._writes.start(native.engine, native.memory)
        mapping = "" if native.memory is None else native.memory.offer
        told = Told(
            session=native.session, base=self._region.base, mapping=mapping, transport=native.effective.transport
        )
        self._send(TOLD.dump_json(told))
        return native

    def _do(self, ask: Ask, native: NativeEngine) -> None:
        number = ask.number
        match ask.what:
            case "expect" if ask.part is not None:
                self._peers.expect(ask.part.attempt)
                self._peers.greet(ask.part.peer, ask.part.claim.encode(), ask.part.attempt)
            case "write" if ask.part is not None:
                self._write(number, ask.part)
            case "cancel":
                self._writes.cancel(ask.attempt)
            case "forget":
                self._writes.forget(ask.attempt)
                self._peers.forget(ask.attempt)
            case "moving":
                self._answer(Answer(number=number, moving=self._writes.moving(ask.attempt)))
            case "hang up":
                end_connections_from(ask.host, native.ports)
                self._answer(Answer(number=number))
            case "checksum":
                assert self._checksums is not None, "checksums are of pools in host memory"
                self._checksums.compute(ask.blocks, lambda crc: self._answer(Answer(number=number, crc=crc)))
            case _:
                raise AssertionError(f"{ask.what} without what it is about")

    def _write(self, number: int, part: Part) -> None:
        runs = [Run(self._region.base + here, part.base + there, nbytes) for here, there, nbytes in part.runs]

        def done(result: TransferResult) -> None:
            self._answer(
                Answer(
                    number=number, ok=result.ok, moved=result.moved_bytes, reason=result.reason, settled=result.settled
                )
            )

        self._writes.submit(
            Write(
                attempt=part.attempt,
                peer=part.peer,
                claim=part.claim.encode(),
                runs=deque(batches(runs) if part.mapping else runs),
                mapping=part.mapping,
                base=part.base,
                record=None,
                done=done,
                over=lambda: None,
                timeout_s=part.timeout_s,
                deadline=self._clock() + part.timeout_s,
            )
        )

    def _close(self, native: NativeEngine, timeout_s: float) -> bool:
        """Whether nothing moves any more; then the memory is not registered any more either."""
        ends_at = time.monotonic() + timeout_s
        if self._checksums is not None:
            self._checksums.stop()
        quiet = self._writes.close(timeout_s)
        try:
            run_bounded(self._peers.close, max(0.0, ends_at - time.monotonic()), "transfer-close")
        except TookTooLong:
            quiet = False
        if quiet:
            native.release(self._region.base, self._slots.base)
        if self._checksums is not None:
            self._checksums.close(max(0.0, ends_at - time.monotonic()))
        self._closed.set()
        return quiet

    def _answer(self, answer: Answer) -> None:
        self._send(ANSWER.dump_json(answer))

    def _send(self, line: bytes) -> None:
        with self._lock:
            self._socket.sendall(line + b"\n")
