"""How an attempt's blocks go into the storage pool and come out of it whole: the order of the single calls.

A full block is protected from eviction until decode reads it by a lease, taken with `is_exist` before and after the put
(docs/adr/0004): that also covers blocks that were in the pool before, and shows whether a block was evicted between the
two calls.

The pool does not keep late bytes of a failed put out of memory that it has given to another key meanwhile
(docs/adr/0007), so every value is sealed, and what decode reads is checked against its seal (docs/adr/0021). A value
that is damaged in the pool is removed; no other failure removes what requests share.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from ..interfaces.transport import Piece
from .pool_codes import NO_SPACE, NOT_AS_PUT, OWNER_GONE, explain
from .pool_jobs import Broken, Job
from .pool_values import PoolValues
from .seal import SEAL_BYTES

log = logging.getLogger(__name__)

CHUNK_KEYS = 256
"""Keys per call: keeps a call well inside the pool's lease."""
NO_SPACE_PAUSE_S = 0.2
PUT_TRIES = 3
"""A put that found no space, or the segment of a pod that is gone, is tried on: the pool chooses again."""
OTHERS_PUT_S = 0.5
"""How long a key that another process is putting may stay incomplete."""
OTHERS_PAUSE_S = 0.005
READ_TRIES = 2
"""A value that is damaged once may have left the pool during the read; one that is damaged twice is so in the pool."""


def chunks(pieces: Sequence[Piece]) -> Iterator[Sequence[Piece]]:
    """The pieces of one call after another."""
    for first in range(0, len(pieces), CHUNK_KEYS):
        yield pieces[first : first + CHUNK_KEYS]


class PoolMoves:
    """Each method blocks for as long as its calls do, and raises Broken with the reason that it came to nothing.

    `pause`: waits for some seconds, or until the end of the process.
    """

    def __init__(self, values: PoolValues, pause: Callable[[float], None], clock: Callable[[], float]) -> None:
        self._open: PoolValues | None = values
        self._pause = pause
        self._clock = clock

    def close(self) -> None:
        """Make no further call."""
        self._open = None

    def put(self, job: Job, pieces: Sequence[Piece]) -> None:
        """Store what belongs to the attempt alone: it is not evicted before it is removed."""
        for chunk in chunks(pieces):
            self._put_all(job, chunk, pinned=True)

    def hold(self, job: Job, pieces: Sequence[Piece]) -> None:
        """Lease blocks that are shared by content, storing those that are not in the pool, or were evicted meanwhile.

        A put on a key that somebody else is putting just now succeeds at once, and the key is there only when that
        other put has ended: prompts that begin alike arrive together.
        """
        for chunk in chunks(pieces):
            missing = self._lease(job, chunk)
            pause, give_up = 0.0, float("inf")
            while missing:
                if self._clock() >= give_up:
                    raise Broken(
                        f"{len(missing)} blocks are not in the pool {OTHERS_PUT_S:g} s after they were put: it is too "
                        "small for its load, or another process that puts the same blocks is stuck"
                    )
                self._pause(pause)
                pause = pause + OTHERS_PAUSE_S
                self._put_all(job, missing, pinned=False)
                give_up = min(give_up, self._clock() + OTHERS_PUT_S)
                missing = self._lease(job, missing)

    def put_record(self, job: Job, key: str, record: bytes) -> None:
        """Store a record from the job's slot."""
        assert job.slot is not None
        if code := self._values(job).put_record(key, job.slot, record):
            raise Broken(f"the record was not stored: {explain(code)}")

    def get_record(self, job: Job, key: str) -> bytes:
        """Fetch a record through the job's slot."""
        assert job.slot is not None
        record, problem = self._values(job).get_record(key, job.slot)
        if problem:
            raise Broken(f"the record of attempt {job.attempt}: {problem}")
        return record

    def get(self, job: Job, pieces: Sequence[Piece]) -> None:
        """Read values until each is whole."""
        for chunk in chunks(pieces):
            self._get_whole(job, chunk)

    def get_first(self, job: Job, pieces: Sequence[Piece]) -> int:
        """Read the longest run of the first values that are in the pool: how many they are. What is there is leased
        before it is read, so that it stays."""
        found = 0
        for chunk in chunks(pieces):
            missing = self._lease(job, chunk)
            there = chunk.index(missing[0]) if missing else len(chunk)
            if there:
                self._get_whole(job, chunk[:there])
            found += there
            if missing:
                break
        return found

    def remove(self, job: Job, keys: Sequence[str]) -> str:
        """Remove values; why that failed, or ""."""
        return self._values(job).remove(keys)

    def _values(self, job: Job) -> PoolValues:
        """For the next call of a job: raises Broken once it was cancelled."""
        if job.cancelled:
            raise Broken("cancelled")
        if self._open is None:
            raise Broken("the transfer was closed")
        return self._open

    def _put_all(self, job: Job, pieces: Sequence[Piece], *, pinned: bool) -> None:
        left = list(pieces)
        for attempt in range(1, PUT_TRIES + 1):
            codes = self._values(job).put(left, job.seals, pinned=pinned)
            bad = [(p, code) for p, code in zip(left, codes, strict=True) if code != 0]
            if not bad:
                return
            key, code = bad[0][0].key, bad[0][1]
            if attempt == PUT_TRIES or any(code not in (NO_SPACE, OWNER_GONE) for _, code in bad):
                raise Broken(f"{len(bad)} of {len(left)} blocks were not stored; {key}: {explain(code)}")
            left = [piece for piece, _ in bad]
            if any(code == NO_SPACE for _, code in bad):
                self._pause(NO_SPACE_PAUSE_S)

    def _lease(self, job: Job, pieces: Sequence[Piece]) -> list[Piece]:
        """Lease the pieces' keys; those that are not in the pool."""
        codes = self._values(job).lease([p.key for p in pieces])
        if (code := min(codes)) < 0:
            raise Broken(f"{len(codes)} blocks were asked for: {explain(code)}")
        return [piece for piece, found in zip(pieces, codes, strict=True) if not found]

    def _get_whole(self, job: Job, pieces: Sequence[Piece]) -> None:
        """As `get`. A value that is damaged in the pool goes: a put would not replace it."""
        left = pieces
        for _ in range(READ_TRIES):
            values, sizes, problems = self._values(job), [], {}
            for piece, code in zip(left, values.get(left, job.seals), strict=True):
                if code < 0 and code not in NOT_AS_PUT:
                    raise Broken(f"block {piece.key}: {explain(code)}")
                if code < 0:
                    problems[piece.key] = explain(code)
                sizes.append(code)
            unsealed = values.damaged(left, job.seals)
            # A seal of before may stand where a value of another size was not read to its end.
            left = [p for p, size in zip(left, sizes, strict=True) if p in unsealed or size != p.nbytes + SEAL_BYTES]
            if not left:
                return
        keys = [piece.key for piece in left]
        unremoved = self._values(job).remove(keys)
        problem = problems.get(keys[0], "it is not what was put under its name")
        log.warning(
            "removing %d damaged blocks from the pool, %s (%s): %s", len(keys), keys[0], problem, unremoved or "done"
        )
        more = f", with {len(keys) - 1} others" if len(keys) > 1 else ""
        raise Broken(f"block {keys[0]} is damaged in the pool{more}: {problem}")
