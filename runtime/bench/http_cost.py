"""What serving over HTTP costs an engine, with the engine in the API process and beside it (`--api-process`).

The device is a stand-in that takes the time of an H200 with an 8B model (a step of 256 rows 12 ms, prompts 41,600
tokens a second) and, before each step while the last one runs, 3 ms of the interpreter, as launching kernels does.
256 streams of 128 ids begin at once. The same load runs offline (the loop, no HTTP), then over HTTP in both modes, by
turns; medians and ratios of a run count.

    python runtime/bench/http_cost.py [--rounds 3] [--requests 256] [--output-len 256] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

import isthmus_runtime.executor.fake as fake
from isthmus_runtime.__main__ import main as isthmus_runtime
from isthmus_runtime.commands import engine_process
from isthmus_runtime.config import EngineConfig
from isthmus_runtime.interfaces.steps import NOTHING_DRAWN, RowOutput, StepOutput, StepPlan
from isthmus_runtime.request import GenerateRequest, SamplingParams
from isthmus_runtime.serve_flags import parse_serve

MODEL = Path(os.environ.get("ISTHMUS_CACHE", "~/.cache/isthmus")).expanduser() / "models/smollm2-135m-instruct"  # noqa: TID251
FLAGS = (
    *("--executor=fake", "--max-model-len=4096", "--max-batched-tokens=8192", "--max-num-seqs=256"),
    *("--max-waiting=4096", "--no-prefix-caching", "--drain-timeout=5s", "--log-level=error"),
    "--served-model-name=bench",
)
INPUT_LEN = 128
STEP_S, ROW_S, TOKEN_S = 4e-3, 8e-3 / 256, 1 / 41_600
LAUNCHES, LAUNCH_S = 30, 1e-4
"""A step's calls into torch. Each gives the interpreter lock away and has to get it back."""
MODES = ("off", "on")
READY_S = 60.0
LIMIT_S = 240.0
TICK = os.sysconf("SC_CLK_TCK")


class TimedExecutor(fake.FakeExecutor):
    """Draws the same ids whatever it is given, after the time that a device would take. As with a GPU, one thread
    launches a step while the last one runs, and another waits for results; neither holds the lock for long."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._free = 0.0
        self._launcher = ThreadPoolExecutor(1, thread_name_prefix="launcher")
        self._device = ThreadPoolExecutor(1, thread_name_prefix="device")

    def submit(self, plan: StepPlan) -> Future[StepOutput]:
        """Queue a step."""
        promised: Future[StepOutput] = Future()
        self._launcher.submit(self._launch, plan, promised)
        return promised

    def close(self) -> None:
        """End the threads."""
        self._launcher.shutdown()
        self._device.shutdown()
        super().close()

    def _launch(self, plan: StepPlan, promised: Future[StepOutput]) -> None:
        if not promised.set_running_or_notify_cancel():
            return
        for _ in range(LAUNCHES):
            end = time.perf_counter() + LAUNCH_S
            while time.perf_counter() < end:
                pass
            time.sleep(0)  # noqa: TID251  # gives the lock away, and waits for nothing
        prompts = sum(chunk.num_tokens for chunk in plan.chunks if chunk.num_tokens > 1)
        self._free = max(self._free, time.perf_counter()) + STEP_S + ROW_S * len(plan.chunks) + TOKEN_S * prompts
        self._device.submit(self._complete, plan, promised, self._free)

    def _complete(self, plan: StepPlan, promised: Future[StepOutput], at: float) -> None:
        drawn = RowOutput((300 + plan.step % 400,))
        rows = tuple(drawn if chunk.draws else NOTHING_DRAWN for chunk in plan.chunks)
        # It stands for a device, which is not done before its time.
        time.sleep(max(0.0, at - time.perf_counter()))  # noqa: TID251
        promised.set_result(StepOutput(plan.step, rows))


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked for, all at once."""

    requests: int
    output_len: int

    def prompts(self, seed: int) -> list[list[int]]:
        """Random ids."""
        rng = random.Random(seed)
        return [[rng.randrange(100, 40_000) for _ in range(INPUT_LEN)] for _ in range(self.requests)]


@dataclass(slots=True)
class Run:
    """One pass of a load."""

    seconds: float
    first_s: list[float]
    cores: dict[str, float]


def offline(config: EngineConfig, load: Load, seed: int) -> Run:
    """The loop alone: what an engine does without anybody to tell."""
    from isthmus_runtime.commands.engine_core import load_executor, start_engine

    left, done = load.requests, threading.Event()
    first: dict[str, float] = {}

    def sink(replies: Sequence[tuple[str, Any]]) -> None:
        nonlocal left
        now = time.perf_counter()
        for sid, chunk in replies:
            first.setdefault(sid, now)
            left -= chunk.finish_reason is not None
        if not left:
            done.set()

    core = start_engine(config, load_executor(config), sink, events=None, started=None)
    try:
        began, cpu = time.perf_counter(), time.process_time()
        for number, prompt in enumerate(load.prompts(seed)):
            sampling = SamplingParams(max_tokens=load.output_len, temperature=0)
            core.engine.generate(
                GenerateRequest(request_id=str(number), prompt_token_ids=tuple(prompt), sampling=sampling)
            )
        if not done.wait(LIMIT_S):
            raise SystemExit(f"bench: {left} requests did not end within {LIMIT_S:g} s offline")
        seconds = time.perf_counter() - began
        return Run(seconds, [at - began for at in first.values()], {"engine": (time.process_time() - cpu) / seconds})
    finally:
        core.stop()
        core.close()


class Server:
    """A serving engine, of one process or two."""

    def __init__(self, port: int, process: subprocess.Popen[bytes]) -> None:
        self.port = port
        self._process = process

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far by process."""
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return {"API" if children else "both": _cpu_s(pid)} | ({"engine": _cpu_s(int(children[0]))} if children else {})


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


@contextmanager
def serve(mode: str) -> Iterator[Server]:
    """From start to end."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = int(s.getsockname()[1])
    argv = [sys.executable, __file__, "serve", "--role=unified", f"--port={port}", f"--model={MODEL}", *FLAGS]
    process = subprocess.Popen([*argv, f"--api-process={mode}"])
    try:
        end = time.perf_counter() + READY_S
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2):
                    break
            except (urllib.error.URLError, OSError) as error:
                if process.poll() is not None or time.perf_counter() > end:
                    raise SystemExit(f"bench: the server of --api-process {mode} is not ready") from error
                time.sleep(0.05)  # noqa: TID251
        yield Server(port, process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


async def one(port: int, prompt: Sequence[int], output_len: int) -> tuple[float, float]:
    """Seconds to the first bytes of the answer's events and to its end; the client does next to nothing with them."""
    body = json.dumps(
        {"model": "bench", "prompt": list(prompt), "max_tokens": output_len, "ignore_eos": True, "stream": True}
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = "POST /v1/completions HTTP/1.1\r\nHost: b\r\nContent-Type: application/json\r\n"
    began = time.perf_counter()
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    first, events, tail = 0.0, 0, b""
    while b"[DONE]" not in tail:
        data = await reader.read(1 << 16)
        if not data:
            raise SystemExit(f"bench: a stream broke off after {events} events: {tail!r}")
        events += data.count(b"data: ")
        if events and not first:
            first = time.perf_counter() - began
        tail = (tail + data)[-200:]
    seconds = time.perf_counter() - began
    writer.close()
    return first, seconds


def client(port: int, load: Load, seed: int) -> None:
    """`bench client`: a process of its own, so that the servers' interpreters are theirs."""

    async def main() -> list[tuple[float, float]]:
        prompts = load.prompts(seed)
        return await asyncio.gather(*(one(port, prompt, load.output_len) for prompt in prompts))

    found = uvloop.run(main())
    print(json.dumps({"first": [f for f, _ in found], "seconds": max(s for _, s in found)}))


def over_http(server: Server, load: Load, seed: int) -> Run:
    """One pass."""
    argv = [sys.executable, __file__, "client", str(server.port), str(load.requests), str(load.output_len), str(seed)]
    before = server.cpu_s()
    made = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT_S)
    found = json.loads(made.stdout)
    seconds = found["seconds"]
    return Run(seconds, found["first"], {name: (cpu - before[name]) / seconds for name, cpu in server.cpu_s().items()})


def told(name: str, runs: Sequence[Run], load: Load, base: Sequence[Run]) -> dict[str, Any]:
    """Print one row."""
    speed = statistics.median(load.requests * load.output_len / run.seconds for run in runs)
    pairs = sorted(b.seconds / r.seconds for b, r in zip(base, runs, strict=True))
    first = sorted(f for run in runs for f in run.first_s)
    p50, p99 = (1e3 * first[int(share * (len(first) - 1))] for share in (0.5, 0.99))
    cores = {key: statistics.median(run.cores[key] for run in runs) for key in runs[0].cores}
    said = ", ".join(f"{key} {share:.2f}" for key, share in cores.items())
    ratio = statistics.median(pairs)
    print(
        f"{name:22} {speed:>8.0f} tok/s {ratio:>6.2f}x of offline ({pairs[0]:.2f} to {pairs[-1]:.2f})"
        f"  first token median {p50:.0f} ms, p99 {p99:.0f} ms; cores: {said}",
        flush=True,
    )
    return {"row": name, "tok_s": speed, "of_offline": ratio, "first_p50_ms": p50, "first_p99_ms": p99, "cores": cores}


def bench() -> int:
    """Run all and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--json", default="", help="file for the results")
    args = parser.parse_args()
    load = Load(args.requests, args.output_len)
    config = parse_serve(["--role=unified", f"--model={MODEL}", *FLAGS])
    assert isinstance(config, EngineConfig)
    runs: dict[str, list[Run]] = {"offline": [], **{mode: [] for mode in MODES}}
    with serve("off") as off, serve("on") as on:
        servers = {"off": off, "on": on}
        for server in servers.values():
            over_http(server, Load(32, 8), 0)
        for number in range(args.rounds):
            runs["offline"].append(offline(config, load, number))
            for mode in MODES if number % 2 else reversed(MODES):
                runs[mode].append(over_http(servers[mode], load, number))
    load1 = os.getloadavg()[0]
    print(f"{load.requests} streams of {INPUT_LEN} ids and {load.output_len} tokens; load of the machine {load1:.1f}")
    rows = [told("offline", runs["offline"], load, runs["offline"])]
    rows += [told(f"--api-process {mode}", runs[mode], load, runs["offline"]) for mode in MODES]
    if args.json:
        Path(args.json).write_text(json.dumps({"load": load1, "rows": rows}, indent=1))
    return 0


def main() -> int:
    """The bench, or one of its processes, which have its executor."""
    fake.FakeExecutor = TimedExecutor  # type: ignore[misc]
    engine_process.COMMAND = (sys.executable, __file__, "engine")  # type: ignore[misc]
    match sys.argv[1:]:
        case ["serve" | "engine", *_]:
            return isthmus_runtime(sys.argv[1:])
        case ["client", port, requests, output_len, seed]:
            client(int(port), Load(int(requests), int(output_len)), int(seed))
            return 0
    return bench()


if __name__ == "__main__":
    sys.exit(main())
