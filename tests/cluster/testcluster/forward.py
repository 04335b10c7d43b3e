"""Copies TCP connections from an inherited listening socket to an address in this process's network namespace.

Run as `python -I forward.py FD HOST:PORT` through `nsenter --net`: the socket was bound outside, on loopback, the
connections are made inside. Ends when standard input does, unless that is /dev/null. Standard library only.
"""

import asyncio
import os
import socket
import sys

CHUNK = 65536


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except ConnectionError:
        # One side has gone: the other must see the same, not a clean end.
        writer.transport.abort()


async def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    host, _, port = sys.argv[2].rpartition(":")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        except OSError as error:
            print(f"cannot connect to {host}:{port}: {error}", file=sys.stderr, flush=True)
            writer.transport.abort()
            return
        try:
            await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))
        finally:
            far_writer.close()
            writer.close()

    server = await asyncio.start_server(serve, sock=listener)
    if os.fstat(0).st_rdev == os.stat(os.devnull).st_rdev:
        await server.serve_forever()
    await asyncio.to_thread(sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(main())
