"""A TCP proxy that a test can cut: what goes through it then is as if the other side's machine had gone."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ended import accepted

CHUNK = 65536


class CutProxy:
    """Leads from `port` on loopback to `target`. Cut, it is silent: it takes connections and bytes, and says nothing,
    which costs the other side a timeout each time; `refuse` also breaks them off, which costs it none."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._loop = asyncio.new_event_loop()
        self._whole = asyncio.Event()
        self._whole.set()
        self._refusing = False
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = int(self._listener.getsockname()[1])

    def cut(self, *, refuse: bool = False) -> None:
        """From now on nothing passes."""

        def now() -> None:
            self._whole.clear()
            self._refusing = refuse
            if refuse:
                self._abort()

        self._loop.call_soon_threadsafe(now)

    def mend(self) -> None:
        """From now on new connections pass. Those of the time before are lost."""

        def now() -> None:
            self._abort()
            self._refusing = False
            self._whole.set()

        self._loop.call_soon_threadsafe(now)

    def _abort(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()
            return
        self._writers.add(writer)
        await self._whole.wait()
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        self._writers.add(far_writer)
        await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(CHUNK):
                await self._whole.wait()
                writer.write(data)
                await writer.drain()
        except (ConnectionError, OSError):
            pass
        finally:
            writer.transport.abort()
            self._writers.discard(writer)

    async def _run(self, stop: asyncio.Event) -> None:
        server = await asyncio.start_server(self._serve, sock=self._listener)
        await stop.wait()
        await accepted()
        server.close()
        self._abort()

    @contextmanager
    def running(self) -> Iterator[None]:
        stop = asyncio.Event()

        def run() -> None:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._run(stop))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(stop.set)
            thread.join(timeout=10)
