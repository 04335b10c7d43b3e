"""Tokenises long texts that nothing cuts in a process of its own, within limits of memory and time (docs/adr/0059).

The library takes up to 400 bytes for each byte of a text, and a processor for as long as an expression wants, and
cannot be stopped. Parts of a text are short; a text without a place where it may be cut is not, and neither are long
ones of tokenizers that look at a text as a whole.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from ..errors import EngineFailed, InvalidRequest, Overloaded
from ..sharing.threads_in_turns import away, spent, whose
from .long_texts_process import ANSWER, ENDED, JOB, LENGTH, NO_MEMORY, READY, TEXT, Answer, Ended, Job
from .long_texts_process import END as ENDS
from .long_texts_process import __name__ as process_module

_log = logging.getLogger(__name__)

MOST_S = 5.0
"""Of a processor, for one text: a million letters take one or two."""
ANY_MEMORY = 4 << 30
"""Bytes that a text may take where no limit of memory is known."""
_WALL = 20.0
"""How many times as long it is waited for, on a machine that does much else."""
_START_S = 60.0
"""Longest time until a new process has read the tokenizer."""
_LOOK_S = 0.1
"""Between two times that it is asked whether somebody still waits."""
_PIECE = 1 << 20
_BY_OTHERS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What ends a text through no fault of its own."""


class LongTexts:
    """Of one tokenizer. Safe to use from several threads; one text at a time, clients in a circle."""

    def __init__(self, room: Callable[[], int | None] = lambda: None) -> None:
        """`room`: bytes that a text may take at present; None: ANY_MEMORY."""
        self.room = room
        self._line = _Line()
        self._process: _Process | None = None
        self._reads: Callable[[], str] | None = None
        """What the process has read."""

    def encode(
        self,
        serialised: Callable[[], str],
        text: str,
        *,
        special: bool = False,
        most: int | None = None,
        last: int = -1,
    ) -> tuple[int, array[int]]:
        """How many ids a text has, and the ids: all, or none where there are more than `most`, or the `last` ones.
        serialised: the tokenizer.json, always the same function for the same one; special: with the tokens that a
        prompt has before and after it.

        InvalidRequest: it takes more memory than there is room for, or more than MOST_S of a processor. Overloaded
        (503) where the process does not get to run, or is ended by others. Raises as `go_on` meanwhile.
        """
        data = text.encode()
        room = self.room()
        memory = ANY_MEMORY if room is None else room
        job = Job(special, -1 if most is None else most, last, memory, MOST_S, len(data))
        with away() as check, self._line.turn(whose(), check):
            for _ in range(2):
                try:
                    process = self._started(serialised, check)
                    ended, answer = process.tokenise(job, data, check)
                    break
                except _Gone as gone:  # it had nothing to do for a while, or was ended
                    self.close()
                    why = gone
                except BaseException:
                    if self._process is not None and not self._process.is_idle:
                        self.close()
                    raise
            else:
                raise Overloaded(
                    f"a text of {len(text)} characters: the process that tokenises such texts ended twice ({why}); its "
                    "log has the details, and the machine or pod may be short of memory; try again, or send less"
                )
        spent(ended.seconds)
        self._check(ended.status, len(text), memory)
        count, ids = answer
        return count, ids

    def close(self) -> None:
        """End the process; the next text starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def _started(self, serialised: Callable[[], str], check: Callable[[], None]) -> _Process:
        process = self._process
        if process is not None and self._reads == serialised and process.runs:
            return process
        self.close()
        self._process, self._reads = _Process(), serialised
        self._process.read_tokenizer(serialised().encode(), check)
        return self._process

    @staticmethod
    def _check(status: int, size: int, memory: int) -> None:
        if status == 0:
            return
        by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        what = f"a text of {size} characters, or a part of it without a place to cut it,"
        if by == signal.SIGPROF:
            raise InvalidRequest(
                f"{what} takes more than {MOST_S:g} s of a processor to be tokenised at a time: send less, with spaces "
                "or lines in it"
            )
        if by in _BY_OTHERS:
            raise Overloaded(
                f"{what} was being tokenised by a process that was killed, as a machine or pod without memory does; "
                "try again, or send less"
            )
        if by in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS) or os.waitstatus_to_exitcode(status) == NO_MEMORY:
            raise InvalidRequest(
                f"{what} takes more than {memory >> 20} MiB to be tokenised at a time, which is what there is for it: "
                "send less, with spaces or lines in it, or raise --memory-limit"
            )
        raise EngineFailed(f"{what} could not be tokenised; the log of this process has the details")


class _Gone(Exception):
    """The process has ended."""


class _Line:
    """One thread at a time: clients in a circle, each one's own in the order of their coming."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, deque[object]] = OrderedDict()
        self._has: object | None = None

    @contextmanager
    def turn(self, who: str, check: Callable[[], None]) -> Iterator[None]:
        """`check` raises where it is waited for no more."""
        me = object()
        with self._changed:
            self._waiting.setdefault(who, deque()).append(me)
            self._next()
            try:
                while self._has is not me:
                    self._changed.wait(_LOOK_S)
                    check()
            except BaseException:
                self._leave(who, me)
                raise
        try:
            yield
        finally:
            with self._changed:
                self._has = None
                self._next()

    def _next(self) -> None:
        if self._has is None and self._waiting:
            who, mine = next(iter(self._waiting.items()))
            self._has = mine.popleft()
            del self._waiting[who]
            if mine:
                self._waiting[who] = mine  # behind all others
            self._changed.notify_all()

    def _leave(self, who: str, me: object) -> None:
        if self._has is me:
            self._has = None
            self._next()
            return
        self._waiting[who].remove(me)
        if not self._waiting[who]:
            del self._waiting[who]


class _Said(NamedTuple):
    """What has come of the process: on its own descriptor, and on stdout."""

    told: bytearray
    out: bytearray


class _Process:
    """Started; used by one thread at a time."""

    def __init__(self) -> None:
        """Overloaded where the system has no process or memory for it."""
        told = tell = -1
        try:
            told, tell = os.pipe()
            self._process = subprocess.Popen(
                (sys.executable, "-m", process_module, str(tell)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                pass_fds=(tell,),
            )
        except OSError as error:
            if told >= 0:
                os.close(told)
            raise Overloaded(f"no process to tokenise a long text can be started: {error}; try again") from error
        finally:
            if tell >= 0:
                os.close(tell)
        self._told = told
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        for descriptor in (self._in, self._out, self._told):
            os.set_blocking(descriptor, False)
        self.is_idle = True
        """It waits for a text, and nothing of an old one is left in its pipes."""
        self.close = weakref.finalize(self, _close, self._process, self._told)

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def read_tokenizer(self, text: bytes, check: Callable[[], None]) -> None:
        """_Gone, and what `check` raises. Overloaded: it took too long."""
        self._talk(LENGTH.pack(len(text)) + text, len(READY), _START_S, check)
        _log.info("started process %d, which tokenises long texts", self._process.pid)

    def tokenise(self, job: Job, text: bytes, check: Callable[[], None]) -> tuple[Ended, tuple[int, array[int]]]:
        """How it ended, and, where it ended well, how many ids there are and those that were asked for. Raises as
        `read_tokenizer`."""
        said = self._talk(TEXT + JOB.pack(*job) + text, ENDED.size, job.seconds * _WALL, check)
        ended = Ended._make(ENDED.unpack(said.told))
        ids = array("i")
        if ended.status != 0:
            return ended, (0, ids)
        answer = Answer._make(ANSWER.unpack(said.out[: ANSWER.size]))
        ids.frombytes(memoryview(said.out)[ANSWER.size :])
        assert len(ids) == answer.sent, "a copy that ends well has written all"
        return ended, (answer.has, ids)

    def _talk(self, data: bytes, size: int, most_s: float, check: Callable[[], None]) -> _Said:
        """Send, and receive until `size` bytes were told."""
        self.is_idle = False
        until = time.monotonic() + most_s
        said, left = _Said(bytearray(), bytearray()), memoryview(data)
        try:
            while len(said.told) < size:
                check()
                ready = self._ready(writing=bool(left))
                if self._in in ready:
                    left = left[os.write(self._in, left[:_PIECE]) :]
                if self._out in ready:
                    self._receive(self._out, said.out)
                if self._told in ready:
                    self._receive(self._told, said.told)
                if time.monotonic() > until:
                    raise Overloaded(
                        f"a long text was not tokenised within {most_s:g} s by the process for it; this machine is "
                        "busy, try again"
                    )
            # What was written before it was told.
            while self._receive(self._out, said.out):
                pass
        except OSError as error:
            raise _Gone(str(error)) from error
        except _Gone:
            raise
        except BaseException:
            if not left:
                self._end_text()
            raise
        self.is_idle = True
        return said

    def _ready(self, *, writing: bool) -> set[int]:
        poll = select.poll()  # select(2) takes no descriptors from 1,024 on
        for descriptor in (self._out, self._told):
            poll.register(descriptor, select.POLLIN)
        if writing:
            poll.register(self._in, select.POLLOUT)
        return {descriptor for descriptor, _ in poll.poll(_LOOK_S * 1000)}

    def _receive(self, descriptor: int, into: bytearray) -> int:
        try:
            found = os.read(descriptor, _PIECE)
        except BlockingIOError:
            return 0
        if not found:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
            raise _Gone(f"exit status {self._process.poll()}")
        into += found
        return len(found)

    def _end_text(self) -> None:
        """Nobody waits for it any more: the process need not read its tokenizer again for that."""
        with suppress(OSError, _Gone, Overloaded):
            self._talk(ENDS, ENDED.size, 1.0, lambda: None)


def _close(process: subprocess.Popen[bytes], told: int) -> None:
    process.kill()
    process.wait()
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    os.close(told)
