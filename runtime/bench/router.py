"""`make bench-router`: CPU time and memory of the router beside vllm-router (Rust), in one run on one machine.

Both routers stand before the same fake engines (`router_upstream.py`). 32 keep-alive connections, prompts of 1.2 kB,
plain answers and streams of 64 chunks 2 ms apart. Quoted is CPU time of the router process per request:
unlike latency it does not depend on how busy the load generator is. The routers take turns, `--rounds` times; medians
are printed, each beside the peer's of the same kind and the same bodies, text or token ids: one engine by turns, by
prefix, or a prefill and a decode engine.
At the end 1,000 concurrent streams run through ours.

    python runtime/bench/router.py [--rounds 5] [--requests 3200] [--peer PATH/bin/vllm-router] [--out FILE]
                                   [--python /usr/bin/python3.11]

An interpreter that was built without profile guidance (pyenv's, by default) takes a tenth more or worse than those of
the images; `--python` runs the router on another one of the same version, with the packages of this one.

What is compared: vllm-router parses a body and writes it again, ids included; ours validates, applies limits, tokenises
and detokenises. Rows with token-id prompts show the routing alone, those with text what a user gets. Exits with 1 when
a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import uvloop

from isthmus_runtime.openai.tokenizer import Tokenizer

HERE = Path(__file__).resolve().parent
PEER = Path("~/.cache/isthmus/peers/vllm-router/bin/vllm-router").expanduser()
MODEL = Path(os.environ.get("ISTHMUS_CACHE", "~/.cache/isthmus")).expanduser() / "models/smollm2-135m-instruct"  # noqa: TID251
CHUNKS = 64
PLAIN_TOKENS = 16
CONNECTIONS = 32
PROMPT_BYTES = 1200
PROMPT_IDS = 300
BARS = {"plain": 4.0, "stream": 2.5}
"""Most times the CPU of the peer's row, by kind of answer."""
RSS_BAR_MB = 200.0
"""Most memory with the concurrent streams of `many_streams`."""
READY_S = 60.0
WORDS = re.findall(r"[A-Za-z]+", (HERE.parents[1] / "README.md").read_text())
Body = Callable[[random.Random, bool], dict[str, object]]


def text_prompt(r: random.Random, stream: bool) -> dict[str, object]:
    """1.2 kB of words, different each time."""
    words = " ".join(r.choices(WORDS, k=PROMPT_BYTES // 3))[:PROMPT_BYTES]
    return {"model": "m", "prompt": words, "max_tokens": CHUNKS if stream else PLAIN_TOKENS, "stream": stream}


def id_prompt(r: random.Random, stream: bool) -> dict[str, object]:
    """As many ids as 1.2 kB of text usually have."""
    return {**text_prompt(r, stream), "prompt": r.choices(range(1000, 9999), k=PROMPT_IDS)}


class Client(asyncio.Protocol):
    """One keep-alive connection that sends `requests` one after another and checks each answer."""

    def __init__(self, requests: list[bytes], stream: bool) -> None:
        self.requests = requests[::-1]
        self.stream = stream
        self.answer = b""
        self.done = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        self.transport.write(self.requests.pop())

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(f"the router hung up: {exc}; got {self.answer[:300]!r}"))

    def data_received(self, data: bytes) -> None:
        self.answer += data
        if not self._complete() or self.done.done():
            return
        assert self.transport is not None
        words = self.answer.count(b" word")
        if not self.answer.startswith(b"HTTP/1.1 200") or words != (CHUNKS if self.stream else PLAIN_TOKENS):
            self.done.set_exception(RuntimeError(f"not the answer ({words} tokens): {self.answer[:500]!r}"))
        elif self.requests:
            self.answer = b""
            self.transport.write(self.requests.pop())
        else:
            self.done.set_result(None)
            self.transport.close()

    def _complete(self) -> bool:
        if self.answer.endswith(b"0\r\n\r\n"):
            return True
        opening, found, body = self.answer.partition(b"\r\n\r\n")
        at = opening.lower().find(b"content-length:")
        return bool(found) and at >= 0 and len(body) >= int(opening[at + 15 :].split(b"\r\n", 1)[0])


def _same(client: Client) -> Client:
    return client


async def load(port: int, requests: int, connections: int, body: Body, stream: bool, seed: int) -> None:
    """Send `requests` over `connections`. Raises on the first answer that is none."""
    r = random.Random(seed)
    per = max(1, requests // connections)
    loop = asyncio.get_running_loop()

    def post() -> bytes:
        raw = json.dumps(body(r, stream)).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw

    clients = [Client([post() for _ in range(per)], stream) for _ in range(connections)]
    for client in clients:
        await loop.create_connection(partial(_same, client), "127.0.0.1", port)
    await asyncio.gather(*(client.done for client in clients))


@dataclass(eq=False)
class Router:
    """A router process under test."""

    name: str
    argv: list[str]
    port: int
    ready_path: str
    body: Body
    cpu_ms: dict[str, list[float]] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def start(self, log: Path) -> None:
        """Start and wait until it answers."""
        with log.open("ab") as out:
            self.process = subprocess.Popen(self.argv, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        until = time.monotonic() + READY_S
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise SystemExit(f"{self.name} exited {self.process.returncode}; see {log}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{self.ready_path}", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                # Readiness of a foreign process has no event to wait on.
                time.sleep(0.05)  # noqa: TID251
        raise SystemExit(f"{self.name} was not ready after {READY_S:.0f} s; see {log}")

    def cpu_s(self) -> float:
        """User and system time of the process so far, all threads, by its clock of clock_getcpuclockid(3): /proc tells
        hundredths of a second, a fifth of what the peer's plain requests of a round take."""
        assert self.process is not None
        return time.clock_gettime(~self.process.pid << 3 | 2)

    def memory_mb(self, key: str) -> float:
        """`VmRSS` or `VmHWM`, MB."""
        assert self.process is not None
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024

    def measure(self, kind: str, requests: int, seed: int) -> None:
        """CPU time per request of one load."""
        stream = kind == "stream"
        before = self.cpu_s()
        uvloop.run(load(self.port, requests, CONNECTIONS, self.body, stream, seed))
        spent = self.cpu_s() - before
        self.cpu_ms.setdefault(kind, []).append(spent / (requests // CONNECTIONS * CONNECTIONS) * 1e3)

    def stop(self) -> None:
        """End the process and wait for it."""
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@dataclass(frozen=True)
class Engines:
    """Ports of fake engines: two workers, or two of each role."""

    worker: tuple[int, ...] = ()
    prefill: tuple[int, ...] = ()
    decode: tuple[int, ...] = ()


def upstream(engines: Engines, interval: float, tokenizer: str) -> list[subprocess.Popen[bytes]]:
    """Fake engines on these ports. `tokenizer`: digest of that of unified ones."""
    argv = [sys.executable, str(HERE / "router_upstream.py"), "--chunks", str(CHUNKS), "--interval", str(interval)]
    argv += ["--tokenizer", tokenizer]
    roles = {"unified": engines.worker, "prefill": engines.prefill, "decode": engines.decode}
    return [subprocess.Popen([*argv, "--role", role, str(port)]) for role, ports in roles.items() for port in ports]


def interpreter(python: str) -> list[str]:
    """What runs Python: this interpreter for "", or another one, which finds this one's packages."""
    found = [path for path in sys.path if path and not path.startswith(sys.base_prefix)]
    return ["env", f"PYTHONPATH={os.pathsep.join(found)}", python] if python else [sys.executable]


def ours(name: str, engines: Engines, model: Path, body: Body, policy: str, python: str = "", **flags: str) -> Router:
    """Our router before `engines`; `python` runs it, "" for this interpreter."""
    port = free_port()
    argv = [*interpreter(python), "-m", "isthmus_runtime", "serve", "--role", "router", "--port", str(port)]
    argv += ["--model", str(model), "--served-model-name", "m", "--log-level", "error", "--policy", policy]
    for flag, ports in vars(engines).items():
        argv += [f"--{flag}", ",".join(f"127.0.0.1:{p}" for p in ports)] if ports else []
    argv += [part for flag, value in flags.items() for part in ("--" + flag.replace("_", "-"), value)]
    return Router(name, argv, port, "/ready", body)


def theirs(name: str, peer: Path, engines: Engines, policy: str, body: Body) -> Router:
    """vllm-router before `engines`."""
    port = free_port()
    argv = [str(peer), "--host", "127.0.0.1", "--port", str(port), "--policy", policy, "--log-level", "error"]
    argv += ["--prometheus-port", str(free_port())]
    if engines.worker:
        argv += ["--worker-urls", *(f"http://127.0.0.1:{p}" for p in engines.worker)]
    else:
        argv += ["--vllm-pd-disaggregation"]
        argv += [a for p in engines.prefill for a in ("--prefill", f"http://127.0.0.1:{p}")]
        argv += [a for p in engines.decode for a in ("--decode", f"http://127.0.0.1:{p}")]
    return Router(name, argv, port, "/health", body)


def many_streams(model: Path, count: int, log: Path, python: str) -> dict[str, float]:
    """`count` concurrent streams, 64 chunks 20 ms apart, through ours: memory before, at most and after, MB."""
    workers = Engines(worker=(free_port(), free_port()))
    engines = upstream(workers, 0.02, Tokenizer.load(model).digest)
    router = ours("many", workers, model, text_prompt, "least-load", python, max_queue=str(2 * count))
    try:
        router.start(log)
        uvloop.run(load(router.port, CONNECTIONS, CONNECTIONS, text_prompt, True, 1))
        before, began, cpu = router.memory_mb("VmRSS"), time.perf_counter(), router.cpu_s()
        uvloop.run(load(router.port, count, count, text_prompt, True, 2))
        return {
            "streams": count,
            "rss_before_mb": before,
            "rss_peak_mb": router.memory_mb("VmHWM"),
            "rss_after_mb": router.memory_mb("VmRSS"),
            "seconds": time.perf_counter() - began,
            "cpu_ms_per_stream": (router.cpu_s() - cpu) / count * 1e3,
        }
    finally:
        router.stop()
        for engine in engines:
            engine.terminate()
            engine.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="Router CPU time beside vllm-router")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=3200, help="plain requests per round; streams: a fifth")
    parser.add_argument("--streams", type=int, default=1000, help="concurrent streams of the memory run; 0: skip it")
    parser.add_argument("--peer", type=Path, default=PEER)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--python", default="", help="runs our router, instead of the interpreter of this script")
    args = parser.parse_args()
    workers = Engines(worker=(free_port(), free_port()))
    pairs = Engines(prefill=(free_port(), free_port()), decode=(free_port(), free_port()))
    by_turns, by_prefix, paired = "vllm-router round_robin", "vllm-router cache_aware", "vllm-router prefill + decode"
    by_turns_ids, paired_ids = f"{by_turns}, ids", f"{paired}, ids"
    beside = {
        ours("isthmus ids", workers, args.model, id_prompt, "round-robin", args.python): by_turns_ids,
        ours("isthmus text", workers, args.model, text_prompt, "round-robin", args.python): by_turns,
        ours("isthmus text prefix-aware", workers, args.model, text_prompt, "prefix-aware", args.python): by_prefix,
        ours("isthmus ids prefill + decode", pairs, args.model, id_prompt, "round-robin", args.python): paired_ids,
        ours("isthmus text prefill + decode", pairs, args.model, text_prompt, "round-robin", args.python): paired,
    }
    routers = list(beside)
    if args.peer.exists():
        routers += [
            theirs(by_turns_ids, args.peer, workers, "round_robin", id_prompt),
            theirs(by_turns, args.peer, workers, "round_robin", text_prompt),
            theirs(by_prefix, args.peer, workers, "cache_aware", text_prompt),
            theirs(paired_ids, args.peer, pairs, "round_robin", id_prompt),
            theirs(paired, args.peer, pairs, "round_robin", text_prompt),
        ]
    else:
        print(f"no {args.peer}: ours alone (docs/benchmarks.md has the recipe)", file=sys.stderr)
    log = Path(tempfile.mkdtemp(prefix="bench-router-")) / "log"
    digest = Tokenizer.load(args.model).digest
    engines = [*upstream(workers, 0.002, digest), *upstream(pairs, 0.002, digest)]
    rows: dict[str, dict[str, float]] = {}
    try:
        for router in routers:
            router.start(log)
            for kind in BARS:
                router.measure(kind, 10 * CONNECTIONS, 0)  # warm: lazily built caches, connections
            router.cpu_ms.clear()
        for number in range(args.rounds):
            for kind, requests in (("plain", args.requests), ("stream", args.requests // 5)):
                for router in routers:
                    router.measure(kind, requests, number + 1)
        for router in routers:
            medians = {kind: statistics.median(values) for kind, values in router.cpu_ms.items()}
            rows[router.name] = {**medians, "rss_mb": router.memory_mb("VmHWM")}
    finally:
        for router in routers:
            router.stop()
        for engine in engines:
            engine.terminate()
            engine.wait()
    missed = []
    print(
        f"{'CPU ms per request':<36}{'plain':>8}{'stream':>8}{'peak RSS MB':>13}{'plain x':>9}{'stream x':>9}  beside"
    )
    for router in routers:
        row, peer = rows[router.name], beside.get(router, "")
        ratios = {kind: row[kind] / rows[peer][kind] for kind in BARS} if peer in rows else {}
        missed += [f"{router.name}: {k} {r:.2f}x, bar {BARS[k]:g}x" for k, r in ratios.items() if r > BARS[k]]
        tail = "".join(f"{ratios[kind]:>9.2f}" for kind in BARS) + f"  {peer}" if ratios else ""
        print(f"{router.name:<36}{row['plain']:>8.3f}{row['stream']:>8.2f}{row['rss_mb']:>13.0f}{tail}")
    report: dict[str, object] = {
        "machine": platform.platform(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg(),
        "python": subprocess.check_output([args.python or sys.executable, "-VV"], text=True).strip(),
        "routers": rows,
    }
    print(report["python"], "load", *(f"{load:.1f}" for load in os.getloadavg()))
    if args.streams:
        report["many"] = many = many_streams(args.model, args.streams, log, args.python)
        print(", ".join(f"{k} {v:.1f}" for k, v in many.items()))
        if many["rss_peak_mb"] > RSS_BAR_MB:
            missed.append(f"{args.streams} streams: {many['rss_peak_mb']:.0f} MB, bar {RSS_BAR_MB:g} MB")
    if args.out:
        args.out.write_text(json.dumps({**report, "missed": missed}, indent=1))
    if missed:
        raise SystemExit("missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
