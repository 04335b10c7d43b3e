"""How many bytes a source of models may send: what it says that a model has, and no more.

Clients stop at the end of an answer and compare sizes then. Until that comes, an answer without end fills a disk that
other pods share, and a listing the memory.
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
_PIECE = 1 << 16


class SourceBytes:
    """A bound for all answers of one download together. Any thread."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._left = self._most = LISTING_BYTES

    def allow(self, nbytes: int) -> None:
        """From now on allow what files of `nbytes` bytes take."""
        with self._lock:
            self._left = self._most = _TIMES * nbytes + _BESIDE_BYTES

    def watch(self, response: Response, **_: object) -> None:
        """A response hook of requests' sessions: count what is read of this answer, unpacked. Reading raises
        WeightsError when all of it is used up."""
        stream: Callable[..., Iterator[Any]] = response.iter_content

        def counted(chunk_size: int | None = 1, decode_unicode: bool = False) -> Iterator[Any]:
            for chunk in stream(chunk_size, decode_unicode):
                self._take(len(chunk))
                yield chunk

        response.iter_content = counted  # type: ignore[method-assign]

    def watch_client(self, client: Any) -> None:
        """The same for all answers to a client of boto3, listings included, which it would read whole."""
        from botocore.exceptions import ConnectionClosedError, ReadTimeoutError
        from urllib3.exceptions import ProtocolError
        from urllib3.exceptions import ReadTimeoutError as Silent

        # What its events can change comes before an answer or after the whole of it.
        session = client._endpoint.http_session
        send: Callable[[Any], Any] = session.send

        def counted(request: Any) -> Any:
            whole = not request.stream_output
            request.stream_output = True  # `send` leaves the body to what follows
            response = send(request)
            read = response.raw.read

            def counted_read(amt: int | None = None) -> bytes:
                # All of it: what is left, and a byte that shows that there is more.
                chunk: bytes = read(max(0, self._left) + 1 if amt is None else amt)
                self._take(len(chunk))
                return chunk

            response.raw.read = counted_read
            response.raw.stream = lambda: iter(lambda: counted_read(_PIECE), b"")
            if whole:
                try:
                    _ = response.content
                except Silent as error:  # as `send` says it of what it reads: the client tries again
                    raise ReadTimeoutError(endpoint_url=request.url, error=error) from error
                except ProtocolError as error:
                    raise ConnectionClosedError(error=error, request=request, endpoint_url=request.url) from error
            return response

        session.send = counted

    def _take(self, nbytes: int) -> None:
        with self._lock:
            self._left -= nbytes
            if self._left >= 0:
                return
        raise WeightsError(f"{self._source}: more than {self._most} bytes came, more than are listed")
