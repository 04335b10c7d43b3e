"""Compiles a client's grammar in a process of its own before anything else does, within limits of time and memory.

llguidance bounds most of its work by itself, but not all: an intersection of sixty patterns compiles for minutes, and
a thread cannot be ended (docs/adr/0029). The process is started by the first grammar, and ended by one that exceeds
its time, which is the processor's: on a busy machine no grammar is worse. The next one starts it again. What was found
is remembered where it is the grammar's doing; a process that did not get to run, or was killed, is not.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import signal
import sys
import traceback
from collections import OrderedDict
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from ..errors import InvalidRequest, Overloaded
from ..heap import give_back
from ..request import Structure
from ..sharing.turns import Turns
from .allocated import memory_in_use
from .compiled import MAX_TEXT, check_size, memory_of
from .grammars import Grammars

_log = logging.getLogger(__name__)

COMPILE_TIMEOUT_S = 3.0
"""Most processor time for one grammar."""
_SHORT_S, _OF_A_CHARACTER_S = 0.5, 20e-6
"""The same for a short one, and how much more for each character: engines compile what is short first, and a usual
schema takes 7 microseconds a character."""
_WALL = 20.0
"""How many times as long its answer is waited for, on a machine that does much else."""
_BY_OTHERS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What ends a process through no fault of the grammar that it compiles."""
_START_TIMEOUT_S = 60.0
"""Longest time until a new process has read the tokenizer."""
_END_TIMEOUT_S = 5.0
"""Longest time that a process whose output has ended may take to end itself."""
_MAX_BYTES = 384 << 20
"""Address space of the process, beside what it has before the first grammar: it is in the pod of a router."""
_MAX_WAITING = 64
_REMEMBERED = 1024
_LINE_LIMIT = 8 * MAX_TEXT
_READY = b"ready\n"


class Checker:
    """Says what is wrong with a grammar. Belongs to one event loop."""

    def __init__(self, model: str | Path, *, compile_timeout_s: float = COMPILE_TIMEOUT_S) -> None:
        """`model`: a directory with a tokenizer.json."""
        self._model = str(model)
        self._timeout_s = compile_timeout_s
        self._turns = Turns(_MAX_WAITING, "other grammars wait to be checked")
        self._asking: dict[tuple[str, str], asyncio.Task[str]] = {}
        """By client and grammar: one client's place in the line is none for another."""
        self._process: asyncio.subprocess.Process | None = None
        self._known: OrderedDict[str, str] = OrderedDict()

    async def check(self, structure: Structure, param: str, who: str = "") -> None:
        """Raise InvalidRequest, naming `param`, for a grammar that is wrong, impossible or too costly.

        Clients have turns, each by its name `who`. Overloaded when too many wait for theirs, and where the process does
        not get to run. A caller that leaves does not end the work: its answer is kept.
        """
        check_size(structure, param)
        key = sha256(f"{structure.kind}\0{structure.text}".encode("utf-8", "surrogatepass")).hexdigest()
        problem = self._known.get(key)
        if problem is None:
            task = self._asking.get((who, key))
            if task is None:
                task = self._asking[who, key] = asyncio.create_task(self._in_turn(who, key, structure))
                task.add_done_callback(lambda done: self._asked((who, key), done))
            problem = await asyncio.shield(task)
        else:
            self._known.move_to_end(key)
        if problem:
            raise InvalidRequest(f"{param}: {problem}", param=param)

    async def close(self) -> None:
        """End the process, and what waits for it."""
        for task in self._asking.values():
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)
        await self._end()

    def _asked(self, key: tuple[str, str], done: asyncio.Task[str]) -> None:
        del self._asking[key]
        if not done.cancelled():
            done.exception()  # whoever asked may have left

    async def _in_turn(self, who: str, key: str, structure: Structure) -> str:
        """What is wrong with it; empty: nothing."""
        async with self._turns.turn(who):
            known = self._known.get(key)  # by now, for another client
            problem = await self._ask(structure) if known is None else known
        self._known[key] = problem
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return problem

    async def _ask(self, structure: Structure) -> str:
        for _ in range(2):
            process = await self._started()
            try:
                async with asyncio.timeout(self._timeout_s * _WALL):
                    answer = await _answer(process, structure)
            except TimeoutError:
                await self._end()
                raise Overloaded(
                    f"structured output: the checker of grammars had no answer within {self._timeout_s * _WALL:g} s, "
                    f"though {self._timeout_s:g} s of a processor are enough for any; this machine is busy, try again"
                ) from None
            except asyncio.CancelledError:
                await self._end()
                raise
            if answer:
                problem: str = json.loads(answer)
                return problem
            # It ended: by this grammar, or before it was asked. A new one tells.
            with suppress(TimeoutError):  # how, is known only if it is not killed while it ends
                async with asyncio.timeout(_END_TIMEOUT_S):
                    await process.wait()
            await self._end()
            if process.returncode == -signal.SIGPROF:
                most_s = _seconds(structure, self._timeout_s)
                return f"takes more than {most_s:.2g} s to compile; simplify it"
        if process.returncode is not None and -process.returncode in _BY_OTHERS:
            raise Overloaded(
                "structured output: the checker of grammars was killed twice while it compiled this one, as a machine "
                "or pod without memory does; try again, or simplify the grammar"
            )
        return f"takes more than {_MAX_BYTES >> 20} MiB to compile; simplify it"

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            __name__,
            self._model,
            str(self._timeout_s),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE_LIMIT,
        )
        self._process = process
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                line = await process.stdout.readline()
        except TimeoutError:
            await self._end()
            raise Overloaded(
                f"structured output: its checker did not start within {_START_TIMEOUT_S:g} s; this machine is busy, "
                "try again"
            ) from None
        except BaseException:
            await self._end()
            raise
        if line != _READY:
            await self._end()
            raise Overloaded("structured output: its checker did not start; the log of this process has the details")
        _log.info("started the checker of grammars, process %d", process.pid)
        return process


async def _answer(process: asyncio.subprocess.Process, structure: Structure) -> bytes:
    """Its line; empty: it has ended."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(asdict(structure)).encode() + b"\n")
        await process.stdin.drain()
        return await process.stdout.readline()
    except ConnectionError:
        return b""


def _bound_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + _MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main() -> None:
    """The process: one line in, one line out, until its input ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    grammars = Grammars.load(sys.argv[1])
    most_s = float(sys.argv[2])
    in_use = memory_in_use()
    grammars.check(Structure("json_object", ""))  # what is made once is nobody's
    give_back()  # reading Gemma's tokenizer leaves 200 MB free in the heap, of a router's pod
    _bound_memory()
    out = sys.stdout.buffer
    out.write(_READY)
    out.flush()
    for line in sys.stdin.buffer:
        problem = ""
        structure = Structure(**json.loads(line))
        before = in_use()
        # Its signal's default is to end the process, in the midst of a library as well.
        signal.setitimer(signal.ITIMER_PROF, _seconds(structure, most_s))
        try:
            compiled = grammars.check(structure)
            taken, most = in_use() - before, memory_of(structure)
            if taken > most:
                problem = f"takes {taken >> 10} KiB, and one of its length may take {most >> 10}; simplify it"
            del compiled
        except InvalidRequest as error:
            problem = error.message.partition(": ")[2]
        except MemoryError:
            raise  # ends the process, by which it is told
        except Exception as error:  # of one grammar: all others are still to be checked
            traceback.print_exc()
            problem = f"cannot be compiled ({type(error).__name__}: {error})"
        signal.setitimer(signal.ITIMER_PROF, 0)
        out.write(json.dumps(problem).encode() + b"\n")
        out.flush()


def _seconds(structure: Structure, most_s: float) -> float:
    return min(most_s, _SHORT_S + _OF_A_CHARACTER_S * len(structure.text))


if __name__ == "__main__":
    main()
