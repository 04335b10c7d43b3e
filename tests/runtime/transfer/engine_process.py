"""One engine's side of a transfer as a process of its own: the real agent and the real transport, without a model.

Started by the tests with argv MODE HOST MASTER BLOCKS BLOCK_BYTES SEGMENT TIMEOUT and flags: `crc`, `secret=S`,
`silent=SECONDS`, after which decode renews its engine, and `ranks=N`, whose pools and movers are all in this process,
with channels between them. Reads one JSON call per line from stdin, answers each with a line, and prints every handoff
event as a line. Serves GET /internal/drained like an engine does.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import socket
import sys
import threading
import time
import zlib
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from isthmus_runtime.config import StoreConfig, TransferConfig
from isthmus_runtime.interfaces.handoff import (
    BlockRef,
    FetchJob,
    HandoffEvent,
    PromptResult,
    Received,
    ReceiveJob,
    SendJob,
)
from isthmus_runtime.interfaces.transport import KvRegion
from isthmus_runtime.kv.keys import pool_name, pool_secret
from isthmus_runtime.protocol.calls import CommitCall
from isthmus_runtime.protocol.ticket import Ticket
from isthmus_runtime.transfer import sessions
from isthmus_runtime.transfer.agent import TransferAgent
from isthmus_runtime.transfer.factory import make_transfer
from isthmus_runtime.transfer.other_ranks import OtherRank
from isthmus_runtime.transfer.rank_lines import channel
from isthmus_runtime.transfer.rank_mover import RankMover

mode, host, master, blocks, block_bytes, segment, timeout = sys.argv[1:8]
num_blocks, size = int(blocks), int(block_bytes)
out_lock = threading.Lock()


def say(body: dict[str, Any]) -> None:
    with out_lock:
        sys.stdout.write(json.dumps(body) + "\n")
        sys.stdout.flush()


def refs(rows: list[list[Any]]) -> tuple[BlockRef, ...]:
    return tuple(BlockRef(*row, 0) for row in rows)


ranks = next((int(flag[6:]) for flag in sys.argv[8:] if flag.startswith("ranks=")), 1)
pools = [mmap.mmap(-1, num_blocks * size) for _ in range(ranks)]
pool = pools[0]
memory, *other_memories = (
    KvRegion(
        base=ctypes.addressof(ctypes.c_char.from_buffer(one)),
        num_blocks=num_blocks,
        block_bytes=size,
        block_stride=size,
        layout_digest="L",
    )
    for one in pools
)
cfg = TransferConfig(
    mode=mode,
    host=host,
    timeout_s=float(timeout),
    verify_crc="crc" in sys.argv[8:],
    store=StoreConfig(master=master, segment_bytes=int(segment)),
)
epoch = f"epoch-{time.time_ns()}"
secret = next((pool_secret(flag[7:].encode()) for flag in sys.argv[8:] if flag.startswith("secret=")), b"")
sessions.SILENT_S = next((float(flag[7:]) for flag in sys.argv[8:] if flag.startswith("silent=")), sessions.SILENT_S)
channels = [channel() for _ in other_memories]
ended = [threading.Event() for _ in other_memories]
movers = [
    RankMover(theirs, region, cfg, end.set)
    for (_, theirs), region, end in zip(channels, other_memories, ended, strict=True)
]
others = [OtherRank(rank, ours) for rank, (ours, _) in enumerate(channels, 1)]
backend = make_transfer(cfg, epoch=epoch, secret=secret, others=others)
began = time.monotonic()
try:
    backend.prepare(memory, 10.0)
except ValueError as error:
    say({"failed": str(error), "seconds": time.monotonic() - began})
    raise SystemExit(1) from None


def notify(event: HandoffEvent) -> None:
    body: dict[str, Any] = {"stage": "", "drained": True, **asdict(event), "at": time.monotonic()}
    body["event"] = type(event).__name__.lower()
    if isinstance(event, Received):
        body["first_token"] = body.pop("record").first_token
    say(body)


rank_checksums = [other.checksum for other in others]
agent = TransferAgent(backend, memory, cfg, notify, time.monotonic, rank_checksums=rank_checksums)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        attempt = parse_qs(urlsplit(self.path).query)["attempt"][0]
        body = json.dumps({"attempt": attempt, "drained": agent.is_drained(attempt), "epoch": epoch}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
server.daemon_threads = True
threading.Thread(target=server.serve_forever, daemon=True).start()
stop = threading.Event()


def tick() -> None:
    while not stop.wait(0.01):
        agent.tick(time.monotonic())


threading.Thread(target=tick, daemon=True).start()
effective = backend.effective()
say({"ready": True, "url": f"http://127.0.0.1:{server.server_port}", "epoch": epoch, "gbps": effective.gbps})


def call(body: dict[str, Any]) -> Any:
    now = time.monotonic()
    attempt = body.get("attempt", "")
    match body["call"]:
        case "fill":
            for rank in body.get("ranks", range(ranks)):
                for block in body["blocks"]:
                    value = bytes([(block * 7 + rank * 17 + body["seed"]) % 251 + 1])
                    pools[rank][block * size : (block + 1) * size] = value * size
        case "crc":
            return [zlib.crc32(one[b * size : (b + 1) * size]) for one in pools for b in body["blocks"]]
        case "break rank":
            channels[body["rank"] - 1][1].shutdown(socket.SHUT_RDWR)
        case "rank ended":
            return ended[body["rank"] - 1].wait(10.0)
        case "open_receive":
            ticket = agent.open_receive(
                ReceiveJob(
                    request_id="r",
                    attempt=attempt,
                    skip_blocks=body.get("skip", 0),
                    blocks=refs(body["blocks"]),
                    num_tokens=body["tokens"],
                    peer_url=body["url"],
                    peer_epoch=body["epoch"],
                    deadline_s=now + body.get("deadline", 60.0),
                ),
                now,
            )
            return ticket.model_dump()
        case "open_send":
            ticket = Ticket.model_validate(body["ticket"])
            job = SendJob(request_id="r", attempt=attempt, ticket=ticket, deadline_s=now + body.get("deadline", 60.0))
            agent.open_send(job, now)
        case "send_blocks":
            agent.send_blocks(attempt, refs(body["blocks"]), now)
        case "finish_send":
            agent.finish_send(attempt, PromptResult(num_tokens=body["tokens"], first_token=11), now)
        case "fetch":
            deadline = now + body.get("deadline", 60.0)
            agent.fetch(FetchJob(attempt=attempt, blocks=refs(body["blocks"]), deadline_s=deadline), now)
        case "commit":
            agent.commit(CommitCall(request_id="r", attempt=attempt, ok=body["ok"], stage=body.get("stage", "")), now)
        case "cancel":
            agent.cancel(attempt, "test", now)
        case "is_drained":
            return agent.is_drained(attempt)
        case "exist":
            return backend._moves._open.lease(body["keys"])  # type: ignore[attr-defined]
        case "remove":
            return backend._pool.store.batch_remove(body["keys"], True)  # type: ignore[attr-defined]
        case "damage":
            store, name = backend._pool.store, pool_name(secret, body["key"])  # type: ignore[attr-defined]
            value = bytearray(store.get(name))
            value[len(value) // 2] ^= 1
            value = bytearray(body["size"]) if "size" in body else value
            assert store.batch_remove([name], True) == [0]
            return [store.put(name, bytes(value))]
        case "live":
            return agent.stats().live
        case "close":
            stop.set()
            agent.close()
            return [mover._closed.wait(10.0) and not end.is_set() for mover, end in zip(movers, ended, strict=True)]
        case other:
            raise ValueError(other)
    return None


for line in sys.stdin:
    body = json.loads(line)
    say({"answer": body["id"], "value": call(body), "at": time.monotonic()})
    if body["call"] == "close":
        break
