"""One probe attempt, as a kubelet makes it."""

from __future__ import annotations

import asyncio
import contextlib

from .pods import Probe


async def attempt(probe: Probe, address: str) -> str:
    """Empty when the probe succeeded; otherwise what went wrong, in a few words."""
    try:
        async with asyncio.timeout(probe.timeout_s):
            return await _attempt(probe, address)
    except TimeoutError:
        return f"{probe}: no answer in {probe.timeout_s:g} s"
    except ConnectionRefusedError:
        return f"{probe}: nothing listens yet"
    except OSError as error:
        return f"{probe}: {error.strerror or error}"


async def _attempt(probe: Probe, address: str) -> str:
    if probe.command:
        process = await asyncio.create_subprocess_exec(
            *probe.command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            process.kill()
            await process.wait()
            raise
        return f"{probe}: exit code {code}" if code else ""
    reader, writer = await asyncio.open_connection(address, probe.port)
    try:
        if not probe.path:
            return ""
        writer.write(f"GET {probe.path} HTTP/1.1\r\nHost: {address}:{probe.port}\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        status_line = (await reader.readline()).split()
        code = int(status_line[1]) if len(status_line) > 1 and status_line[1].isdigit() else 0
        return "" if 200 <= code < 400 else f"{probe}: {f'status {code}' if code else 'no HTTP answer'}"
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
