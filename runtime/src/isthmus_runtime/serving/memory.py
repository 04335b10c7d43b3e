"""Looks at the memory of the process, refuses what is large or new while little is left, and gives back what is free.

The net below all bounds of single things: whatever none of them counts is in here (docs/adr/0053).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from ..errors import ConfigError, MemoryShort
from ..heap import give_back
from ..threads import running_pool
from .memory_use import MemoryUse
from .pressure import Level, Pressure, Use

_log = logging.getLogger(__name__)

LARGE_BODY = 64 << 10
"""Bytes of a body that is refused where memory is tight: 16,000 tokens of English, and few requests have more."""
LOOK_AFTER = 1 << 20
"""Bytes of bodies that arrive, and of one that is planned, after which is looked again, beside the looks by time."""
_IDLE_LOOK_S = 1.0
_TRIM_S, _TRIM_CRITICAL_S = 1.0, 0.25
"""Between two times that free memory is given back: 0.2 ms a megabyte, in which who allocates more may wait."""
_WORTH_TRIMMING = 16 << 20
_LOG_S = 10.0
_MIB = 1 << 20


class MemoryGuard:
    """Watches the memory of one process. Belongs to its event loop."""

    def __init__(
        self,
        use: MemoryUse | None = None,
        *,
        reserved: int = 0,
        refused: Callable[[str], None] = lambda what: None,
        trim_others: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`use` None: nothing is watched. `reserved`: of `Pressure`. `refused` is told of each `body`, `request` or
        `ended` one. `trim_others`: processes that work for this one give back what they have free, too."""
        self.level = Level.CALM
        self._use = use
        self._reserved = reserved
        self._books: list[Callable[[], Iterable[tuple[object, int]]]] = []
        self._reserves: list[Callable[[], int]] = []
        self._lent = 0
        self._refused = refused
        self._trim_others = trim_others
        self._clock = clock
        self._pressure: Pressure | None = None
        self._last = Use(0, 0, 0)
        self._looked = self._trimmed = self._logged = -float("inf")
        self._come = 0
        self._trimmer: ThreadPoolExecutor | None = None
        self._trimming: Future[None] | None = None

    def start(self) -> None:
        """Count what is there now as no request's. ConfigError: it is more than the limit."""
        if self._use is None:
            return
        self._last = self._use.read()
        if self._last.used >= self._last.limit:
            raise ConfigError(
                f"{self._use.of}: {self._last.limit} bytes are less than the {self._last.used} that are used before "
                "any request; raise it"
            )
        self._pressure = Pressure(self._last, self._reserved)
        self._trimmer = running_pool(1, "trim")
        _log.info(
            "memory: %d MiB of %d (%s) are used before any request, of them %d MiB by this process",
            self._last.used // _MIB,
            self._last.limit // _MIB,
            self._use.of,
            self._last.mine // _MIB,
        )

    def close(self) -> None:
        """The thread ends."""
        if self._trimmer is not None:
            self._trimmer.shutdown(wait=False)

    def add_book(self, book: Callable[[], Iterable[tuple[object, int]]]) -> None:
        """`book` tells what requests hold that no port counts: their task, and bytes."""
        self._books.append(book)

    def beside(self) -> Mapping[object, int]:
        """Bytes by these books, of each task."""
        found: Counter[object] = Counter()
        for book in self._books:
            for task, size in book():
                found[task] += size
        return found

    @property
    def share(self) -> float:
        """The share of the memory for requests that they have, 0 to 1."""
        return 0.0 if self._pressure is None else self._pressure.share

    @property
    def room(self) -> int | None:
        """Bytes that requests may take, as it was at the start; None: nothing is watched."""
        return None if self._pressure is None else self._pressure.room

    @property
    def room_on_the_way(self) -> int | None:
        """Bytes that may be taken, all together, by what is made of bodies while they are planned; None: any."""
        return None if self.room is None else self.room // 2

    def add_reserve(self, set_aside: Callable[[], int]) -> None:
        """`set_aside` tells how many bytes works on the way may take at present, all together. From any thread."""
        self._reserves.append(set_aside)

    @contextmanager
    def elsewhere(self, own: int = 0) -> Iterator[int | None]:
        """Bytes that a process which works for this one may take meanwhile, one at a time; None: any. `own`: what is
        set aside for the work that waits for it, and takes no more until then. MemoryShort: they are not there beside
        what is set aside for others. From any thread."""
        if self.room is None:
            yield None
            return
        size = self.room // 4
        assert not self._lent, "one at a time"
        others = max(0, sum(told() for told in self._reserves) - own)
        if self._last.limit - self._last.used - others < size:
            raise MemoryShort(
                f"memory: {self._cause()}, and {size // _MIB} MiB are needed beside it and what is being planned, for "
                "a text of this length; try again, or send less"
            )
        self._lent = size
        try:
            yield size
        finally:
            self._lent = 0

    @property
    def excess(self) -> int:
        """Bytes that requests have beyond what makes it tight."""
        return 0 if self._pressure is None else self._pressure.excess

    @property
    def told(self) -> str:
        """The level in words, for probes."""
        return "unlimited" if self._use is None else self.level.name.lower()

    @property
    def tight(self) -> bool:
        """Whether what is large is refused, and planned one at a time."""
        return self.level >= Level.TIGHT

    @property
    def critical(self) -> bool:
        """Whether nothing new is taken."""
        return self.level is Level.CRITICAL

    def due(self, *, works: bool) -> bool:
        """Whether to look by time, which is asked ten times a second: always while requests are there."""
        return self._pressure is not None and (works or self._clock() - self._looked >= _IDLE_LOOK_S)

    def came(self, size: int) -> bool:
        """Note so many more bytes of a body. Whether memory is tight."""
        self._come += size
        if self._come >= LOOK_AFTER:
            self.look()
        return self.tight

    def look(self, *, idle: bool = False) -> None:
        """Look now."""
        self._come = 0
        if self._use is None or self._pressure is None:
            return
        try:
            self._last = self._use.read()
        except (OSError, ValueError) as error:
            self.level = Level.CALM
            self._tell("the memory of this process cannot be read, so nothing is refused for it: %s", error)
            return
        before, now = self.level, self._clock()
        self._looked = now
        self.level = self._pressure.look(self._last, idle=idle)
        if self.level is not before:
            if self.level > before:
                self._logged = -float("inf")  # that it has become worse is always said
            self._tell(
                "memory is %s: %s; requests have %.0f%% of what they may", self.told, self._cause(), self.share * 100
            )
        if self.tight or (idle and self._pressure.above_start(self._last) > _WORTH_TRIMMING):
            self._give_back(now)

    async def make_room(self, size: int) -> None:
        """Before what may take so many bytes, or more than all that is set aside for such work: where they are not
        there beside what is lent, what is free is given back first. MemoryShort: they are not there then either."""
        if not self._lacks(size):
            return
        if self._trimmer is not None:
            if self._trimming is None or self._trimming.done():
                self._trimmed = self._clock()
                self._trimming = self._trimmer.submit(give_back)
                self._trim_others()
            await asyncio.shield(asyncio.wrap_future(self._trimming))
            self.look()
        if self._lacks(size):
            self._refused("body")
            raise MemoryShort(
                f"memory: {self._cause()}, and what is made of a body of this size may take {size // _MIB} MiB on its "
                "way; try again, or send less"
            )

    def _lacks(self, size: int) -> bool:
        most = self.room_on_the_way
        # Not less what others have set aside: of that nobody knows how much is in `used` by now, and counted twice it
        # refused nearly all beside one of the largest. The reserves bound what they may have together.
        return most is not None and self._last.limit - self._last.used - self._lent < min(size, most)

    def may_end(self) -> bool:
        """Whether one of the requests that run has to end now."""
        return self._pressure is not None and self._pressure.may_end(self._clock())

    def large(self) -> MemoryShort:
        """The refusal of a large body."""
        self._refused("body")
        return MemoryShort(
            f"memory: {self._cause()}, so bodies of more than {LARGE_BODY} bytes are refused; try again, or send less"
        )

    def check_new(self) -> None:
        """Raises MemoryShort where no request is taken."""
        if self.critical:
            raise self.new()

    def new(self) -> MemoryShort:
        """The refusal of a new request."""
        self._refused("request")
        return MemoryShort(f"memory: {self._cause()}, so no request is taken; try again")

    def ended(self, size: int) -> MemoryShort:
        """What ends a request that holds `size` bytes, as far as is known."""
        self._refused("ended")
        error = MemoryShort(
            f"memory: {self._cause()}, so requests have to end; this one holds {size} bytes or more, its client most "
            "of all, and no smaller request would do; try again later, or send less"
        )
        error.stage = "memory"
        self._tell("%s", error.message)
        return error

    def _cause(self) -> str:
        return f"{self._last.used // _MIB} of {self._last.limit // _MIB} MiB are used"

    def _tell(self, text: str, *values: object) -> None:
        now = self._clock()
        if now - self._logged >= _LOG_S:
            self._logged = now
            _log.warning(text, *values)

    def _give_back(self, now: float) -> None:
        if (
            self._trimmer is None
            or now - self._trimmed < (_TRIM_CRITICAL_S if self.critical else _TRIM_S)
            or (self._trimming is not None and not self._trimming.done())
        ):
            return
        self._trimmed = now
        self._trimming = self._trimmer.submit(give_back)
        self._trim_others()
