"""`make bench-planner`: how far the planner's answers are from a service that was measured.

For a Direct service (router, prefill, decode) and for a Unified one, each started by `isthmus up`:

1. its step times are measured (`isthmus-runtime bench --steps`: single prompts, pairs, streams of one length) and the
   planner is fitted to them;
2. a Poisson trace of mixed lengths runs through the service;
3. the planner simulates the same trace: same times, same lengths. It has seen nothing of the measured run;
4. TTFT and ITL are printed side by side. ITL is a request's mean time between tokens.

    python runtime/bench/planner.py [--seconds 90] [--direct-rate 2] [--unified-rate 1] [--out FOLDER]

Each engine computes with one thread on a core of its own (prefill on the first, decode and unified on the second), the
router and the client run wherever there is room. Exit status 1 when an error is above `--bar`.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from random import Random

from isthmus_runtime.commands.bench_client import Target, replay
from isthmus_runtime.commands.bench_steps import Step, Sweep, measure_steps
from isthmus_runtime.sim.measured import Calibration, calibrate
from isthmus_runtime.sim.planner import Cluster, Report, Slo, simulate
from isthmus_runtime.sim.traces import TraceRequest, write_trace

BIN = Path(sys.executable).parent
CACHE = Path(os.environ.get("ISTHMUS_CACHE", "~/.cache/isthmus")).expanduser()  # noqa: TID251
READY_S = 120.0
STOP_S = 30.0
NAME = "smollm2"
VOCABULARY = 49152
MAX_LEN = 2048
KV_BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 4
KV_MEMORY_MIB = 512
SHAPES = {"direct": {"prefills": 1, "decodes": 1}, "unified": {"unified": 1}}
CORES = {"prefill": 0, "decode": 1, "unified": 1, "worker": 1}
SWEEP = Sweep(
    prompts=(16, 32, 64, 128, 256, 512),
    decode=((1, 64), (2, 64), (4, 64), (8, 64), (1, 512), (4, 512)),
    loaded=((2, 64), (4, 128), (2, 256)),
    max_model_len=MAX_LEN,
)
"""Covers the trace's prompts, and batches up to what its rate makes of its answers."""
QUIET = 0.03
"""Share of the machine that others may use."""
SHARES = {"p50": 0.5, "mean": None, "p90": 0.9}


def resource(kind: str, model: str) -> dict[str, object]:
    """The InferenceService, as `examples/` has it but for one thread an engine."""
    roles = ("prefill", "decode") if kind == "direct" else ("worker",)
    spec: dict[str, object] = {
        "mode": "Disaggregated" if kind == "direct" else "Unified",
        "model": {"source": {"hostPath": {"path": model}}, "servedNames": [NAME]},
        "engine": {
            "maxModelLen": MAX_LEN,
            "threads": 1,
            "kvCache": {"blockSize": 16, "memory": f"{KV_MEMORY_MIB}Mi"},
        },
        "roles": {
            role: {"scaling": {"replicas": 1}, "resources": {"limits": {"cpu": "1", "memory": "2Gi"}}} for role in roles
        },
        "router": {"policy": "LeastLoad"},
    }
    if kind == "direct":
        spec["transfer"] = {"mode": "Direct", "transport": "TCP", "timeout": "30s", "onFailure": "Fail"}
    meta = {"name": NAME}
    return {"apiVersion": "serving.isthmus.dev/v1alpha1", "kind": "InferenceService", "metadata": meta, "spec": spec}


@contextmanager
def service(kind: str, model: str, folder: Path) -> Iterator[tuple[Target, int]]:
    """`isthmus up` until it is ready, with each engine on its core, and its process id; stopped at the end."""
    file, run_dir = folder / f"{kind}.yaml", folder / kind
    file.write_text(json.dumps(resource(kind, model)))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = int(s.getsockname()[1])
    argv = [str(BIN / "isthmus"), "up", str(file), "--port", str(port), "--run-dir", str(run_dir)]
    log = folder / f"{kind}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        until = time.monotonic() + READY_S
        while not is_ready(f"http://127.0.0.1:{port}/ready"):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"bench: {kind} did not become ready:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.1)  # noqa: TID251 - readiness of another process has no event to wait on
        pin(json.loads((run_dir / "state.json").read_text()))
        yield Target(url=f"http://127.0.0.1:{port}", model=NAME, vocab_size=VOCABULARY), process.pid
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def is_ready(url: str) -> bool:
    """Whether it answers 200."""
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except (urllib.error.URLError, OSError):
        return False


def pin(state: dict[str, object]) -> None:
    """Each engine with all its threads on its core; those that it starts later inherit that."""
    pods = state["pods"]
    assert isinstance(pods, list)
    for pod in pods:
        core = CORES.get(pod["role"])
        if core is None:
            continue
        for container in pod["containers"]:
            for task in Path(f"/proc/{container['pid']}/task").iterdir():
                os.sched_setaffinity(int(task.name), {core % (os.cpu_count() or 1)})


def cpu_s(root: int) -> tuple[float, float]:
    """CPU seconds so far of the whole machine, and of `root`, its descendants and this process."""
    tick = os.sysconf("SC_CLK_TCK")
    user, nice, system, _, _, irq, soft = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8])
    parents, used = dict[int, int](), dict[int, int]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended while we looked
        pid = int(stat.parent.name)
        parents[pid], used[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
    mine = used.get(os.getpid(), 0)
    for pid, ticks in used.items():
        up = pid
        while up not in (root, 0, 1) and up in parents:
            up = parents[up]
        mine += ticks if up == root else 0
    return (user + nice + system + irq + soft) / tick, mine / tick


def poisson(rate: float, seconds: float, seed: int) -> list[TraceRequest]:
    """Mixed lengths: log-normal, prompts of 16 to 384 tokens (median 64), answers of 4 to 96 (median 24)."""
    rng = Random(seed)
    at, trace = rng.expovariate(rate), list[TraceRequest]()
    while at < seconds:
        prompt = min(384, max(16, round(64 * rng.lognormvariate(0, 0.8))))
        output = min(96, max(4, round(24 * rng.lognormvariate(0, 0.6))))
        trace.append(TraceRequest(at, prompt, output, ()))
        at += rng.expovariate(rate)
    return trace


def fit(kind: str, steps: Sequence[Step]) -> tuple[Cluster, Calibration]:
    """The planner's cluster for what was measured."""
    found = calibrate(
        steps,
        name="smollm2-135m",
        kv_tokens=(KV_MEMORY_MIB << 20) // KV_BYTES_PER_TOKEN,
        kv_bytes_per_token=KV_BYTES_PER_TOKEN,
        tp=1,
        unified=kind == "unified",
    )
    return found.around(Cluster(steps=found.steps, cache="none", max_batch=128, **SHAPES[kind])), found


def figure(values: Sequence[float], share: float | None) -> float:
    """A percentile by nearest rank, or the mean."""
    ranked = sorted(values)
    return statistics.mean(ranked) if share is None else ranked[min(len(ranked) - 1, int(share * len(ranked)))]


def compare(measured: dict[str, list[float]], report: Report) -> list[tuple[str, str, float, float]]:
    """(what, which, measured, simulated) in seconds."""
    simulated = {"TTFT": report.ttft, "ITL": report.itl}
    return [
        (what, which, figure(measured[what], share), figure(simulated[what], share))
        for what in simulated
        for which, share in SHARES.items()
    ]


def run(kind: str, args: argparse.Namespace, folder: Path, out: Path | None) -> list[tuple[str, str, float, float]]:
    """One service: measure, fit, replay, simulate."""
    rate = args.direct_rate if kind == "direct" else args.unified_rate
    trace = poisson(rate, args.seconds, args.seed)
    with service(kind, args.model, folder) as (target, pid):
        began, before = time.monotonic(), cpu_s(pid)
        print(f"bench: {kind}: step times", file=sys.stderr, flush=True)
        steps = asyncio.run(measure_steps(target, replace(SWEEP, repeats=args.repeats)))
        print(f"bench: {kind}: {len(trace)} requests in {args.seconds:g} s", file=sys.stderr, flush=True)
        answers = asyncio.run(replay(target, trace, args.seed))
        after, cores = cpu_s(pid), (os.cpu_count() or 1) * (time.monotonic() - began)
    others = max(0.0, (after[0] - before[0] - after[1] + before[1]) / cores)
    cluster, found = fit(kind, steps)
    report = simulate(cluster, trace, Slo(ttft_s=1e9, itl_s=1e9))
    measured = {"TTFT": [a.ttft_s for a in answers], "ITL": [a.itl_s for a in answers if a.itl_s is not None]}
    busy = {"prefill": report.prefill_busy_s, "decode": report.decode_busy_s}
    shares = ", ".join(f"{name} {seconds / report.span_s:.0%}" for name, seconds in busy.items() if seconds)
    errors = ", ".join(f"{name} {error:.0%}" for name, error in found.errors.items())
    print(f"{kind}: {len(trace)} requests, simulated load: {shares}; largest error of the fit: {errors}")
    noise = " - NOT A QUIET MACHINE, these numbers say little" if others > QUIET else ""
    print(f"{kind}: other processes used {others:.1%} of the machine meanwhile{noise}", flush=True)
    if out is not None:
        (out / f"{kind}-steps.json").write_text(json.dumps({"target": asdict(target), "steps": steps}, indent=1))
        write_trace(out / f"{kind}-trace.jsonl", trace)
        requests = [{"at_s": r.at_s, "ttft_s": a.ttft_s, "itl_s": a.itl_s} for r, a in zip(trace, answers, strict=True)]
        (out / f"{kind}-measured.json").write_text(json.dumps(requests, indent=1))
    return compare(measured, report)


def main() -> int:
    """Run both services, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(CACHE / "models" / "smollm2-135m-instruct"))
    parser.add_argument("--seconds", type=float, default=90.0, help="length of the trace")
    parser.add_argument("--direct-rate", type=float, default=2.0, help="requests per second")
    parser.add_argument("--unified-rate", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5, help="of each step-time experiment; medians are taken")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--bar", type=float, default=0.15, help="largest relative error that passes")
    parser.add_argument("--only", choices=sorted(SHAPES), action="append")
    parser.add_argument("--out", default="", help="folder for step times, traces and what was measured")
    args = parser.parse_args()
    # Whoever ends this run ends the service too.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    out = Path(args.out) if args.out else None
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    rows = [
        "| service | | measured | simulated | error |",
        "|---|---|---|---|---|",
    ]
    worst = 0.0
    with tempfile.TemporaryDirectory(prefix="isthmus-planner-") as folder:
        for kind in args.only or SHAPES:
            for what, which, measured, simulated in run(kind, args, Path(folder), out):
                error = simulated / measured - 1
                worst = max(worst, abs(error))
                rows.append(
                    f"| {kind} | {what} {which} | {measured * 1e3:.1f} ms | {simulated * 1e3:.1f} ms | {error:+.1%} |"
                )
    cpu = platform.processor() or platform.machine()
    print(f"\n{cpu}, {os.cpu_count()} cores\n")
    print("\n".join(rows))
    print(f"\nlargest error {worst:.1%}, bar {args.bar:.0%}")
    return 0 if worst <= args.bar else 1


if __name__ == "__main__":
    sys.exit(main())
