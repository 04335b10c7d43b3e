"""The process of `long_texts`: tokenises one text at a time, each in a copy of itself.

It is a copy of the one it works for, which has the tokenizers, so that nothing is read and little memory taken. What a
text takes beyond its limits ends its copy, in the midst of the library as well.

It reads TEXT, a `Job`, and the text as UTF-8; or END, for the text that is being tokenised. Copies that end well write
an `Answer` and ids as int32. For each text it tells an `Ended`.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import struct
import traceback
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

from tokenizers import Tokenizer

TEXT, END = b"t", b"e"
NO_MEMORY = 3
"""Exit status where Python has noticed it; the library aborts."""
_PR_SET_PDEATHSIG = 1
"""Of prctl(2): a signal when the process that has made this one ends."""


class Job(NamedTuple):
    """by: number of the tokenizer. most: ids that are answered at most, none where there are more; -1: any. last: so
    many of the end alone; -1: all. memory: bytes that it may take; seconds: of a processor; size: of the text, in
    bytes."""

    by: int
    special: bool
    most: int
    last: int
    memory: int
    seconds: float
    size: int


class Answer(NamedTuple):
    """has: ids of the text; sent: those that follow."""

    has: int
    sent: int


class Ended(NamedTuple):
    """status: as of waitpid(2); seconds: of a processor, that it took."""

    status: int
    seconds: float


JOB, ANSWER, ENDED = struct.Struct("<B?qqQdQ"), struct.Struct("<QQ"), struct.Struct("<id")


class Pipes(NamedTuple):
    """The ends that it has: texts come by `read`, copies `write`, and it says by `tell` how they ended."""

    read: int
    write: int
    tell: int


def serve(tokenizers: Sequence[Callable[[], Tokenizer]], pipes: Pipes) -> NoReturn:
    """In the new process: until nobody is there who writes. Nothing of what it is a copy of goes on in it."""
    status = 1
    try:
        _begin(pipes)
        while (command := os.read(pipes.read, 1)) and _take(command, tokenizers, pipes):
            pass
        status = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


def _begin(pipes: Pipes) -> None:
    # Of a terminal, it is for all of its processes: this one ends with the one it works for.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGPROF, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    last = 2
    for descriptor in sorted(pipes):  # others are not to be held open by it
        os.closerange(last + 1, descriptor)
        last = descriptor
    os.closerange(last + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # the kernel is to end this first, where it does not end all of a pod
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    os.putenv("TOKENIZERS_PARALLELISM", "false")  # its threads would count as memory of a text


def _take(command: bytes, tokenizers: Sequence[Callable[[], Tokenizer]], pipes: Pipes) -> bool:
    """Whether there may be other texts."""
    if command == END:  # of a text that has ended by itself meanwhile
        return True
    job = Job._make(JOB.unpack(_read(pipes.read, JOB.size)))
    text = _read(pipes.read, job.size)
    out, held = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(out)
        _work(tokenizers[job.by], job, text, pipes.write)
    os.close(held)
    del text
    goes_on = _watch(pid, out, pipes.read)
    os.close(out)
    _, status, used = os.wait4(pid, 0)
    os.write(pipes.tell, ENDED.pack(status, used.ru_utime + used.ru_stime))
    return goes_on


def _watch(pid: int, out: int, read: int) -> bool:
    """Until a copy has ended, by itself or because nobody waits for it. Whether there may be other texts. out: of a
    pipe that it holds."""
    poll = select.poll()  # the numbers of the pipes are those of a process with many connections
    for descriptor in (out, read):
        poll.register(descriptor, select.POLLIN)
    if out in {descriptor for descriptor, _ in poll.poll()}:
        return True
    command = os.read(read, 1)
    os.kill(pid, signal.SIGKILL)
    return command == END


def _work(tokenizer: Callable[[], Tokenizer], job: Job, text: bytes, write: int) -> NoReturn:
    """In the copy, which ends with it."""
    status = 1
    stderr = os.dup(2)
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The library says on stderr that it found no memory.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + job.memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        # Its signal's default is to end the process, in the midst of a library as well.
        signal.setitimer(signal.ITIMER_PROF, job.seconds)
        ids = tokenizer().encode_batch_fast([text.decode()], add_special_tokens=job.special)[0].ids
        count = len(ids)
        if job.most >= 0 and count > job.most:
            ids = []
        elif job.last >= 0:
            ids = ids[max(0, count - job.last) :]
        _write(write, ANSWER.pack(count, len(ids)))
        _write(write, array("i", ids).tobytes())
        status = 0
    except MemoryError:
        status = NO_MEMORY
    except BaseException:
        os.write(stderr, traceback.format_exc().encode())
    finally:
        os._exit(status)


def _read(descriptor: int, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        part = os.read(descriptor, min(1 << 20, size - len(found)))
        if not part:
            os._exit(0)
        found += part
    return bytes(found)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
