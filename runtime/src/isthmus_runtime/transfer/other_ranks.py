"""The other ranks of an engine in Direct mode, as the first one sees them: each moves its part of a block.

The first rank has the legs, the tickets and the record. All ranks' pools have the same blocks at the same distances, so
one list of runs, relative to a pool, tells each what to write; the record goes out when every rank's have ended. A rank
whose channel breaks is lost: what it had in flight counts as moving until its process has ended, and the engine's with
it.
"""

from __future__ import annotations

import itertools
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from pydantic import ValidationError

from ..errors import ConfigError
from ..interfaces.transport import Done, TransferResult
from ..threads import guarded
from .bounded import TookTooLong, run_bounded
from .rank_lines import ANSWER, ASK, TAKE_S, TOLD, Answer, Ask, Part, Told, What, lines

_log = logging.getLogger(__name__)

Then = Callable[[Answer], None]


class OtherRank:
    """Rank `rank`, 1 and up, as the first one sees it. Any thread may call; answers come on a thread of its own."""

    def __init__(self, rank: int, ours: socket.socket) -> None:
        self.rank = rank
        self._socket = ours
        self._lines = lines(ours)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Then] = {}
        self._lost = ""
        self._closing = False

    def prepared(self, timeout_s: float) -> Told:
        """What it tells once its pool is registered; called once, before all else. ConfigError: why it is not."""
        try:
            line = run_bounded(lambda: next(self._lines, b""), timeout_s, "transfer-prepare")
        except TookTooLong as error:
            self._shut()
            error.ended.wait(TAKE_S)
            self._socket.close()
            raise ConfigError(f"rank {self.rank} has not registered its KV pool within {timeout_s:g} s") from error
        told = TOLD.validate_json(line) if line else Told(problem="it ended before its KV pool was registered")
        if told.problem:
            self._socket.close()
            raise ConfigError(f"rank {self.rank}: {told.problem}; its log lines say more")
        threading.Thread(target=self._listen, name=f"transfer-rank-{self.rank}", daemon=True).start()
        return told

    def expect(self, part: Part) -> None:
        """Writes for this ticket will follow."""
        self._say("expect", part=part)

    def write(self, part: Part, done: Done) -> None:
        """Write its runs; `done` comes once, on a thread of this."""

        def ended(answer: Answer) -> None:
            reason = answer.reason and f"rank {self.rank}: {answer.reason}"
            done(TransferResult(ok=answer.ok, moved_bytes=answer.moved, reason=reason, settled=answer.settled))

        self._say("write", part=part, then=ended)

    def cancel(self, attempt: str) -> None:
        """Begin no further write of the attempt."""
        self._say("cancel", attempt=attempt)

    def forget(self, attempt: str) -> None:
        """The attempt is over and drained."""
        self._say("forget", attempt=attempt)

    def moving(self, attempt: str, then: Then) -> None:
        """Whether a byte of the attempt may still leave it."""
        self._say("moving", attempt=attempt, then=then)

    def hang_up(self, host: str, then: Then) -> None:
        """End the connections by which a process of that host, which is gone, wrote into its pool."""
        self._say("hang up", host=host, then=then)

    def checksum(self, blocks: Sequence[int], then: Callable[[int], None]) -> None:
        """CRC-32 of its part of the blocks, in this order. No answer from one that is lost."""
        self._say("checksum", blocks=tuple(blocks), then=lambda answer: then(answer.crc) if answer.ok else None)

    def close(self, timeout_s: float, then: Then) -> None:
        """Move nothing more; `ok`: nothing of it moves any more, which it waits for within `timeout_s`."""
        self._closing = True
        self._say("close", then=then, timeout_s=timeout_s)

    def leave(self) -> None:
        """Ask nothing more, whatever it has answered."""
        self._closing = True
        self._lose("closed")

    def _say(
        self,
        what: What,
        *,
        then: Then | None = None,
        attempt: str = "",
        part: Part | None = None,
        host: str = "",
        blocks: tuple[int, ...] = (),
        timeout_s: float = 0.0,
    ) -> None:
        number, problem = next(self._numbers), ""
        ask = Ask(number=number, what=what, attempt=attempt, part=part, host=host, blocks=blocks, timeout_s=timeout_s)
        with self._lock:
            lost = self._lost
            if not lost:
                if then is not None:
                    self._waiting[number] = then
                try:
                    self._socket.sendall(ASK.dump_json(ask) + b"\n")
                except OSError as error:
                    problem = f"it takes no message: {error}"
        if problem:
            self._lose(problem)
        elif lost and then is not None:
            guarded(then, self._of_lost(number, lost))

    def _listen(self) -> None:
        problem = "its channel was closed"
        try:
            for line in self._lines:
                answer = ANSWER.validate_json(line)
                with self._lock:
                    then = self._waiting.pop(answer.number, None)
                if then is not None:
                    guarded(then, answer)
        except (OSError, ValidationError) as error:
            problem = str(error)
        finally:
            self._lose(problem)
            self._socket.close()  # by the thread that reads it: its number may be another's at once

    def _shut(self) -> None:
        """Wake who reads."""
        with suppress(OSError):  # the other side has left
            self._socket.shutdown(socket.SHUT_RDWR)

    def _lose(self, problem: str) -> None:
        """Nothing is known any more of what it does."""
        with self._lock:
            if self._lost:
                return
            self._lost = problem
            waiting, self._waiting = self._waiting, {}
        if not self._closing:
            _log.error("rank %d moves no KV any more: %s", self.rank, problem)
        self._shut()
        for number, then in waiting.items():
            guarded(then, self._of_lost(number, problem))

    def _of_lost(self, number: int, problem: str) -> Answer:
        return Answer(number=number, ok=False, reason=f"is lost: {problem}", settled=False, moving=True)


def ask_all(
    ranks: Sequence[OtherRank], ask: Callable[[OtherRank, Then], None], then: Callable[[list[Answer]], None]
) -> None:
    """Ask every rank; `then` gets all answers, in any order, on the thread of the last, or at once where there is
    no rank."""
    answers: list[Answer] = []
    lock = threading.Lock()

    def answered(answer: Answer) -> None:
        with lock:
            answers.append(answer)
            last = len(answers) == len(ranks)
        if last:
            then(answers)

    for rank in ranks:
        ask(rank, answered)
    if not ranks:
        then(answers)


class Joined:
    """One result of the writes of all ranks: at the first failure, when others may still move, or when all ended."""

    def __init__(self, parts: int, done: Done) -> None:
        self._left = parts
        self._done = done
        self._lock = threading.Lock()
        self._moved = 0
        self._told = False

    def ended(self, result: TransferResult) -> None:
        """Of one rank. Any thread."""
        with self._lock:
            self._left -= 1
            self._moved += result.moved_bytes
            tell = not self._told and (not result.ok or not self._left)
            self._told = self._told or tell
            settled, moved = result.settled and not self._left, self._moved
        if tell:
            self._done(TransferResult(ok=result.ok, moved_bytes=moved, reason=result.reason, settled=settled))
