"""Connections to engines are looked after by the kernel while they are silent."""

from __future__ import annotations

import asyncio
import socket

from ended import answering

from isthmus_runtime.router.wire import Wire


def test_a_silent_connection_is_probed_within_seconds() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        await writer.drain()
        await reader.read()
        writer.close()

    async def main() -> None:
        async with answering(answer) as port:
            await ask(port)

    async def ask(port: int) -> None:
        wire = Wire()
        exchange = await wire.post(f"http://127.0.0.1:{port}", "/x", ())
        assert exchange._transport is not None
        sock = exchange._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, pause, count = (
            sock.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + pause * count <= 5
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 5000
        assert await exchange.read() == b"{}"
        exchange.close()
        wire.close()

    asyncio.run(asyncio.wait_for(main(), 10))
