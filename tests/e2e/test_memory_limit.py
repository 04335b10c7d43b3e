"""A router whose memory is limited, and that is told to take bodies of any size: clients that would have it killed are
refused, by what memory leaves for bodies or by the net below, and it serves again. In a control group where one can be
made here, so that going over the limit really kills."""

from __future__ import annotations

import asyncio
import json
import os
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from processes import Stack, get_json, metric, until

pytestmark = pytest.mark.e2e

MIB = 1 << 20
LIMIT = 320 * MIB
CLIENTS = 120
TEXT = "hello world " * (2 * MIB // 12)


KINDS = ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max"))


def make_group(limit: int) -> Path | None:
    """A group of processes with a limit; None where none can be made."""
    for root, name in KINDS:
        folder = root / f"isthmus-test-{os.getpid()}"
        with suppress(OSError):
            folder.mkdir()
            try:
                (folder / name).write_text(str(limit))
            except OSError:
                folder.rmdir()
                raise
            with suppress(OSError):
                (folder / "memory.swap.max").write_text("0")
            return folder
    return None


@contextmanager
def control_group(limit: int) -> Iterator[Path | None]:
    """The same, gone at the end."""
    group = make_group(limit)
    try:
        yield group
    finally:
        if group is not None:
            processes = group / "cgroup.procs"
            until(lambda: not processes.read_text(), "the group is not empty")
            group.rmdir()


class Limited(Stack):
    """Its router has little memory, and the bound on bodies is far beyond that."""

    group: Path | None

    def _argv(self, name: str) -> list[str]:
        argv = super()._argv(name)
        if name != "router":
            return argv
        argv += ["--max-body-memory", "4Gi"]
        if self.group is None:
            return [*argv, "--memory-limit", str(LIMIT)]
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.group / "cgroup.procs"), *argv]


async def client(port: int, seen: Counter[str], sent: asyncio.Barrier) -> None:
    """Sends all of a large body but its end, and that when all others have done so or were refused."""
    body = json.dumps({"model": "test", "prompt": TEXT, "max_tokens": 1}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    with suppress(ConnectionError):
        writer.write(head.encode() + body[:-1])
        await writer.drain()
    await sent.wait()
    with suppress(ConnectionError):
        writer.write(body[-1:])
        answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    if not answer:
        seen["closed"] += 1  # it was told while it still sent
        return
    assert answer.count(b"HTTP/1.1 ") == 1
    status, told = answer.split(b" ", 2)[1].decode(), json.loads(answer.partition(b"\r\n\r\n")[2])
    seen[told["error"]["code"] if status == "503" else status] += 1


async def crowd(port: int) -> Counter[str]:
    seen, sent = Counter[str](), asyncio.Barrier(CLIENTS)
    async with asyncio.timeout(90):
        await asyncio.gather(*(client(port, seen, sent) for _ in range(CLIENTS)))
    return seen


def ask(url: str, text: str) -> int:
    body = json.dumps({"model": "test", "prompt": text, "max_tokens": 1}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert len(json.load(answer)["choices"]) == 1
        return int(answer.status)


def test_a_router_with_little_memory_refuses_lives_on_and_serves_again(tmp_path: Path) -> None:
    with control_group(LIMIT) as group, ExitStack() as exits:
        service = Limited(tmp_path, "direct", engine_args=("--kv-memory", "4Mi"))
        service.group = group
        service.up(exits)
        url, router = service.url("router"), service.all["router"]
        seen = asyncio.run(crowd(service.ports["router"]))
        assert router.popen.poll() is None, f"{seen}\n{router.tail()}"
        refused = seen["memory_short"] + seen["overloaded"]
        assert seen.total() == CLIENTS and refused, seen
        assert set(seen) <= {"memory_short", "overloaded", "400", "429", "closed"}, seen
        until(lambda: get_json(f"{url}/health")["memory"] == "calm", "memory stays short")
        assert ask(url, "hello " * 200) == 200
        assert metric(url, "isthmus_router_memory_refusals_total") >= seen["memory_short"]
        assert metric(url, "isthmus_router_memory_level") == 0
