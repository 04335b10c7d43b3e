"""The process of `long_texts`: reads a tokenizer, then tokenises one text at a time, each in a copy of itself.

What a text takes beyond its limits ends the copy, in the midst of the library as well, and the tokenizer need not be
read again. No thread may begin in it, as a copy has only the one that makes it.

stdin: the tokenizer.json, behind its length (LENGTH); then for each text TEXT, a `Job`, and the text as UTF-8; or END,
for the text that is being tokenised. stdout: an `Answer` and ids as int32, by a copy that ends well. The descriptor
that the one argument names: READY, then an `Ended` for each text.
"""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import struct
import sys
import traceback
from array import array
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

READY, TEXT, END = b"r", b"t", b"e"
LENGTH = struct.Struct("<Q")
NO_MEMORY = 3
"""Exit status where Python has noticed it; the library aborts."""
_IDLE_S = 30.0
"""Without a text, after which the process ends: its tokenizer takes 20 to 100 MB."""


class Job(NamedTuple):
    """most: ids that are answered at most, none where there are more; -1: any. last: so many of the end alone; -1: all.
    memory: bytes that it may take; seconds: of a processor; size: of the text, in bytes."""

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


JOB, ANSWER, ENDED = struct.Struct("<?qqQdQ"), struct.Struct("<QQ"), struct.Struct("<id")


def main() -> None:
    """Until stdin ends, or nothing has come for a while."""
    tell = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # where memory is short after all, the kernel is to end this and not a server
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    os.putenv("TOKENIZERS_PARALLELISM", "false")  # its threads would count as memory of a text
    tokenizer = Tokenizer.from_str(_read(LENGTH.unpack(_read(LENGTH.size))[0]).decode())
    gc.collect()
    gc.freeze()
    os.write(tell, READY)
    while select.select((0,), (), (), _IDLE_S)[0]:
        command = os.read(0, 1)
        if not command:
            return
        if command == END:  # of a text that has ended by itself meanwhile
            continue
        job = Job._make(JOB.unpack(_read(JOB.size)))
        text = _read(job.size)
        out, held = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(out)
            _work(tokenizer, job, text)
        os.close(held)
        del text
        goes_on = _watch(pid, out)
        os.close(out)
        _, status, used = os.wait4(pid, 0)
        os.write(tell, ENDED.pack(status, used.ru_utime + used.ru_stime))
        if not goes_on:
            return


def _watch(pid: int, out: int) -> bool:
    """Until a copy has ended, by itself or because nobody waits for it. Whether there may be other texts. out: a pipe
    that it holds."""
    while True:
        found, _, _ = select.select((out, 0), (), ())
        if out in found:
            return True
        command = os.read(0, 1)
        os.kill(pid, signal.SIGKILL)
        if command != END:
            return False


def _work(tokenizer: Tokenizer, job: Job, text: bytes) -> None:
    """In the copy, which ends with it."""
    status = 1
    stderr = os.dup(2)
    try:
        # The library says on stderr that it found no memory.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + job.memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        # Its signal's default is to end the process, in the midst of a library as well.
        signal.setitimer(signal.ITIMER_PROF, job.seconds)
        ids = tokenizer.encode_batch_fast([text.decode()], add_special_tokens=job.special)[0].ids
        count = len(ids)
        if job.most >= 0 and count > job.most:
            ids = []
        elif job.last >= 0:
            ids = ids[max(0, count - job.last) :]
        _write(ANSWER.pack(count, len(ids)))
        _write(array("i", ids).tobytes())
        status = 0
    except MemoryError:
        status = NO_MEMORY
    except BaseException:
        os.write(stderr, traceback.format_exc().encode())
    finally:
        os._exit(status)


def _read(size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        part = os.read(0, min(1 << 20, size - len(found)))
        if not part:
            os._exit(0)
        found += part
    return bytes(found)


def _write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


if __name__ == "__main__":
    main()
