"""A transparent proxy that delays and throttles: `python slow_wire.py PORT DELAY_MS KBYTES_PER_S`.

Connections reach it by an nftables redirect; the kernel tells where they were going.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys

_SO_ORIGINAL_DST = 80
_PIECE = 16384


async def _carry(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float, bytes_per_s: float
) -> None:
    """One direction: every piece leaves `delay_s` after it came, and no faster than the rate."""
    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)

    async def take() -> None:
        while data := await reader.read(_PIECE):
            await pieces.put((loop.time() + delay_s, data))
        await pieces.put((loop.time() + delay_s, b""))

    taking = asyncio.create_task(take())
    try:
        while True:
            due, data = await pieces.get()
            await asyncio.sleep(max(0.0, due - loop.time()) + len(data) / bytes_per_s)
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()
    finally:
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)


async def _main(port: int, delay_s: float, bytes_per_s: float) -> None:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock = writer.get_extra_info("socket")
        _, to_port, address = struct.unpack("!HH4s", sock.getsockopt(socket.SOL_IP, _SO_ORIGINAL_DST, 16)[:8])
        there = None
        try:
            there_reader, there = await asyncio.open_connection(socket.inet_ntoa(address), to_port)
            async with asyncio.TaskGroup() as group:
                group.create_task(_carry(reader, there, delay_s, bytes_per_s))
                group.create_task(_carry(there_reader, writer, delay_s, bytes_per_s))
        except (OSError, ExceptionGroup):
            writer.transport.abort()
        finally:
            for end in (writer, there):
                if end is not None:
                    end.close()

    server = await asyncio.start_server(accept, "0.0.0.0", port, backlog=256)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), int(sys.argv[2]) / 1e3, int(sys.argv[3]) * 1e3))
