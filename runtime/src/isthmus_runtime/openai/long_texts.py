"""Tokenises long texts that nothing cuts in a process of its own, within limits of memory and time (docs/adr/0059).

The library takes up to 400 bytes for each byte of a text, and a processor for as long as an expression wants, and
cannot be stopped. Parts of a text are short; a text without a place where it may be cut is not, and neither are long
ones of tokenizers that look at a text as a whole.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from tokenizers import Tokenizer

from ..errors import InvalidRequest, MemoryShort, Overloaded
from ..heap import give_back
from ..serving.memory import MemoryGuard
from ..sharing.fair_line import FairLine
from ..sharing.threads_in_turns import away, set_aside, spent, whose
from .long_texts_process import ANSWER, END, ENDED, JOB, NO_MEMORY, TEXT, Answer, Ended, Job, Pipes, serve

_log = logging.getLogger(__name__)

MOST_S = 5.0
"""Of a processor, for one text: a million letters take one or two."""
_SHORT_S, _OF_A_BYTE_S = 0.5, 20e-6
"""The same for a short one, and how much more for each of its bytes: usual ones take a twentieth of it."""
ANY_MEMORY = 4 << 30
"""Bytes that a text may take where no limit of memory is known."""
_WALL = 20.0
"""How many times as long it is waited for, on a machine that does much else."""
_END_S = 5.0
"""How long it is waited for the end of a text that was ended."""
_MEMORY_S = 5.0
"""How long a text waits for its memory."""
_LOOK_S = 0.1
"""Between two times that it is asked whether somebody still waits."""
_PIECE = 1 << 20
_BY_OTHERS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What ends a text through no fault of its own."""


class LongTexts:
    """Of one model. Safe to use from several threads; one text at a time, in fair turns of clients."""

    def __init__(self, tokenizers: Sequence[Callable[[], Tokenizer]]) -> None:
        """`tokenizers`: as texts ask for them by number."""
        self.memory = MemoryGuard()
        """Of this process: says what a text may take at present. Where it does not, ANY_MEMORY."""
        self._tokenizers = tokenizers
        self._line = FairLine()
        self._pause = threading.Event()
        """Never set: nobody tells when there is memory again."""
        self._process: _Process | None = None

    def start(self) -> None:
        """The process, before there are threads: a copy has the one that makes it alone, and what others held stays
        locked in it. Only where it was killed does a later text start another. Overloaded where the system has no
        process or memory for it."""
        self.close()
        # What is free now would be taken by this process, and held by the other.
        gc.collect()
        give_back()
        self._process = _Process(self._tokenizers)

    def close(self) -> None:
        """End the process; the next text starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def encode(
        self, text: str, *, by: int = 0, special: bool = False, most: int | None = None, last: int = -1
    ) -> tuple[int, array[int]]:
        """How many ids a text has, and the ids: all, or none where there are more than `most`, or the `last` ones.
        by: number of the tokenizer; special: with the tokens that a prompt has before and after it.

        Raises:
            InvalidRequest: it takes more memory than there is room for, more than MOST_S of a processor, or the library
                gives it up.
            MemoryShort: memory is not there for some seconds (503).
            Overloaded: the process does not get to run, or is ended by others (503); and as `go_on` raises meanwhile.
        """
        data = text.encode()
        seconds = min(MOST_S, _SHORT_S + _OF_A_BYTE_S * len(data))
        until = time.monotonic() + _MEMORY_S
        with away() as check:
            while True:
                try:
                    with self._line.turn(whose(), check), self.memory.elsewhere(set_aside()) as room:
                        memory = ANY_MEMORY if room is None else room
                        job = Job(by, special, -1 if most is None else most, last, memory, seconds, len(data))
                        ended, (count, ids) = self._ask(job, data, check)
                    break
                except MemoryShort:  # others may have it meanwhile, who need none
                    if time.monotonic() > until:
                        raise
                self._pause.wait(_LOOK_S)
        spent(ended.seconds)
        self._check(ended.status, job, len(text))
        return count, ids

    def _ask(self, job: Job, data: bytes, check: Callable[[], None]) -> tuple[Ended, tuple[int, array[int]]]:
        for _ in range(2):
            process = self._process
            if process is None:
                _log.warning("the process that tokenises long texts is started anew")
                process = self._process = _Process(self._tokenizers)
            try:
                return process.tokenise(job, data, check)
            except _Gone as gone:
                self.close()
                why = str(gone)
            except BaseException:
                if not process.is_idle:
                    self.close()
                raise
        raise Overloaded(
            f"the process that tokenises long texts ended twice ({why}); the machine or pod may be short of memory; "
            "try again, or send less"
        )

    @staticmethod
    def _check(status: int, job: Job, size: int) -> None:
        if status == 0:
            return
        by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        what = f"a text of {size} characters, or a part of it without a place to cut it,"
        if by == signal.SIGPROF:
            raise InvalidRequest(
                f"{what} takes more than {job.seconds:.2g} s of a processor to be tokenised at a time: send less, with "
                "spaces or lines in it"
            )
        if by in _BY_OTHERS:
            raise Overloaded(
                f"{what} was being tokenised by a process that was killed, as a machine or pod without memory does; "
                "try again, or send less"
            )
        if by in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS) or os.waitstatus_to_exitcode(status) == NO_MEMORY:
            raise InvalidRequest(
                f"{what} takes more than {job.memory >> 20} MiB to be tokenised at a time, which is what there is for "
                "it: send less, with spaces or lines in it, or raise --memory-limit"
            )
        raise InvalidRequest(
            f"{what} is such that this model's tokenizer fails (the log of this process has the details): break up "
            "long runs of one kind of characters"
        )


class _Gone(Exception):
    """The process has ended."""


class _Said(NamedTuple):
    """What has come: from the process, and from the copy that tokenises."""

    told: bytearray
    out: bytearray


class _Process:
    """Used by one thread at a time."""

    def __init__(self, tokenizers: Sequence[Callable[[], Tokenizer]]) -> None:
        """Starts it. Raises as `LongTexts.start`."""
        opened: list[int] = []
        try:
            for _ in range(3):
                opened += os.pipe()
            self.pid = os.fork()
        except OSError as error:
            for descriptor in opened:
                os.close(descriptor)
            raise Overloaded(f"no process to tokenise long texts can be started: {error}; try again") from error
        read, self._in, self._out, write, self._told, tell = opened
        if self.pid == 0:
            serve(tokenizers, Pipes(read, write, tell))
        for descriptor in (read, write, tell):
            os.close(descriptor)
        mine = (self._in, self._out, self._told)
        for descriptor in mine:
            os.set_blocking(descriptor, False)
        self.is_idle = True
        """It waits for a text, and nothing of an old one is left in its pipes."""
        self.close = weakref.finalize(self, _close, self.pid, mine)

    def tokenise(self, job: Job, text: bytes, check: Callable[[], None]) -> tuple[Ended, tuple[int, array[int]]]:
        """How it ended, and, where it ended well, how many ids there are and those that were asked for. _Gone;
        Overloaded where it took too long; and what `check` raises."""
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
        """Send, and receive until `size` bytes were told. Raises as `tokenise`; then the text is ended."""
        self.is_idle = False
        until = time.monotonic() + most_s
        said, left = _Said(bytearray(), bytearray()), memoryview(data)
        try:
            while len(said.told) < size:
                check()
                if time.monotonic() > until:
                    raise Overloaded(
                        f"a long text was not tokenised within {most_s:g} s by the process for it; this machine is "
                        "busy, try again"
                    )
                ready = self._ready(writing=bool(left))
                if self._in in ready:
                    left = left[os.write(self._in, left[:_PIECE]) :]
                if self._out in ready:
                    self._receive(self._out, said.out)
                if self._told in ready:
                    self._receive(self._told, said.told)
            # What was written before it was told.
            while self._receive(self._out, said.out):
                pass
        except OSError as error:
            raise _Gone(str(error)) from error
        except _Gone:
            raise
        except BaseException:
            if data != END:
                # Nobody waits for it any more; the process stays.
                with suppress(_Gone, Overloaded):
                    self._talk(bytes(left) + END if left else END, ENDED.size, _END_S, lambda: None)
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
            raise _Gone(f"process {self.pid} has ended")
        into += found
        return len(found)


def _close(pid: int, descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
