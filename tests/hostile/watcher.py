"""Pings a server, and asks it as an honest client would, from other addresses: `python watcher.py PORT PID`.

`reset` on its input forgets, `tell` writes the longest waits since as a line of JSON: by the clock, and by the clock or
the processor time of the server in that time, whichever is less, how many failed, were asked, and waited longer than
LATE_S. A machine that does much else makes the first long and
not the second, as what a server waits for without computing is nobody's request.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

import uvloop

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from measuring import cpu_s  # noqa: E402

PING_S, ASK_S, LATE_S = 0.01, 0.1, 1.0
_PATIENCE_S = 100.0
_SHORT, _LONG = "Say a word.", "The quick brown fox jumps over the lazy dog. " * 120
"""The second is planned on threads."""
ASKED = {
    "generate": (
        "/v1/chat/completions",
        lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 1},
    ),
    "embed": ("/v1/embeddings", lambda text: {"input": text}),
    "score": ("/v1/rerank", lambda text: {"query": "hi", "documents": [text]}),
}


class Watch:
    """Of one kind of request."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.wall = self.least = self.failed = 0.0
        self.asked = self.late = 0
        self._since: tuple[float, float] | None = None

    def reset(self) -> None:
        """Forget."""
        self.wall = self.least = self.failed = 0.0
        self.asked = self.late = 0
        if self._since is not None:
            self._since = (time.monotonic(), cpu_s(self.pid))

    def begins(self) -> None:
        """A request goes out."""
        self._since = (time.monotonic(), cpu_s(self.pid))

    def look(self) -> float:
        """It waits, or is answered: how long it has waited."""
        if self._since is None:
            return 0.0
        wall, used = time.monotonic() - self._since[0], cpu_s(self.pid) - self._since[1]
        self.wall, self.least = max(self.wall, wall), max(self.least, min(wall, used))
        return min(wall, used)

    def ends(self, ok: bool) -> None:
        """It is answered."""
        self.late += self.look() > LATE_S
        self._since = None
        self.asked += 1
        self.failed += not ok


async def ask(port: int, host: str, request: bytes, watch: Watch, every_s: float) -> None:
    """For ever."""
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(host, 0))
            while True:
                watch.begins()
                writer.write(request)
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _PATIENCE_S)
                length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
                await asyncio.wait_for(reader.readexactly(length), _PATIENCE_S)
                watch.ends(b" 200 " in head[:16])
                await asyncio.sleep(every_s)
        except (OSError, EOFError, TimeoutError, ValueError):
            watch.ends(False)
            await asyncio.sleep(every_s)


def post(path: str, body: object) -> bytes:
    """A request."""
    raw = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: t\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw


async def main(port: int, pid: int, task: str) -> None:
    """Until the input ends."""
    path, body = ASKED[task]
    watches = {name: Watch(pid) for name in ("gap", "short", "long")}
    tasks = [
        asyncio.create_task(ask(port, "127.0.0.7", b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n", watches["gap"], PING_S)),
        asyncio.create_task(ask(port, "127.0.0.8", post(path, body(_SHORT)), watches["short"], ASK_S)),
        asyncio.create_task(ask(port, "127.0.0.9", post(path, body(_LONG)), watches["long"], ASK_S)),
    ]
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        if line == b"reset\n":
            for watch in watches.values():
                watch.reset()
            print("{}", flush=True)
        else:
            for watch in watches.values():
                watch.look()
            told = {
                n: [round(w.wall, 4), round(w.least, 4), int(w.failed), w.asked, w.late] for n, w in watches.items()
            }
            print(json.dumps(told), flush=True)
    for one in tasks:
        one.cancel()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
