"""How many bytes a hub may send: what it says that a model has, and no more.

Its client stops at the end of an answer and compares sizes then. Until that comes, an answer without end fills a disk
that other pods share, and a listing the memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from requests import Response

from ..errors import WeightsError

LISTING_BYTES = 32 << 20
"""Of a model's listing; one of 10,000 files has 4 MiB."""
_BESIDE_BYTES = 16 << 20
"""Of errors, redirections and what else comes beside files."""
_TIMES = 2
"""A download that broke is taken up again, by some servers from its beginning."""


class HubBytes:
    """A bound for all answers of one download together. `watch` is a response hook of requests' sessions."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._left = self._most = LISTING_BYTES

    def allow(self, nbytes: int) -> None:
        """For files of so many bytes, from now on."""
        with self._lock:
            self._left = self._most = _TIMES * nbytes + _BESIDE_BYTES

    def watch(self, response: Response, **_: object) -> None:
        """Count what is read of this answer, unpacked. Reading raises WeightsError when all of it is used up."""
        stream: Callable[..., Iterator[Any]] = response.iter_content

        def counted(chunk_size: int | None = 1, decode_unicode: bool = False) -> Iterator[Any]:
            for chunk in stream(chunk_size, decode_unicode):
                self._take(len(chunk))
                yield chunk

        response.iter_content = counted  # type: ignore[method-assign]

    def _take(self, nbytes: int) -> None:
        with self._lock:
            self._left -= nbytes
            if self._left >= 0:
                return
        raise WeightsError(f"{self._source}: the hub sent more than {self._most} bytes, more than it lists")
