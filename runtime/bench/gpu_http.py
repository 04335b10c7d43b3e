"""`make bench-gpu-http`: the GPU's rows over HTTP, as clients see them: one engine, alone and behind a router, as two
processes (`--api-process on`) and as one.

Random weights of a real architecture are written to files once, with a tokenizer of the same vocabulary, so that the
start (reading weights, compiling, graphs) and the text of answers are real. Clients are processes of
`isthmus-runtime bench`. Where vLLM can be imported, or by what `--peer` names, its server serves the same files to the
same clients, after ours, and a table compares. With `--offline FILE` (the JSON of `gpu.py` from the same card and run)
each row also says what HTTP costs.

    python runtime/bench/gpu_http.py [--model qwen3-8b] [--rows single,decode] [--modes on,off] [--offline JSON]
        [--peer auto|none|PYTHON]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_peer import Peer, find_peer
from gpu_table import MODELS, ROWS, SMALL, Row, say
from safetensors.torch import save_file

from isthmus_runtime.checkpoints.random import RandomTensors
from isthmus_runtime.models.registry import read_model_spec

START_S = 240.0
LOAD_S = 300.0
PEER_START_S = 400.0
CLIENTS = 4
"""Processes that share a load: one alone could not read 20,000 tokens a second."""
SHARD_BYTES = 4 << 30
NAME = "bench"
FRACTION = 0.88
"""Of the GPU's memory."""
WARM = Row("warm", "warm", 256, 128, 8, "out tok/s", {})


def make_model(config: dict[str, Any], folder: Path, device: torch.device) -> None:
    """A checkpoint of random weights in shards, and a byte-level tokenizer with an entry for every id."""
    (folder / "config.json").write_text(json.dumps(config))
    shapes = read_model_spec(folder).tensor_shapes()
    dtype = torch.bfloat16 if config["torch_dtype"] == "bfloat16" else torch.float32
    source = RandomTensors(shapes, seed=0, device=device, dtype=dtype)
    where: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    number = held = 0

    def flush() -> None:
        nonlocal number, held
        if shard:
            save_file(shard, folder / f"model-{number:05}.safetensors")
            where.update(dict.fromkeys(shard, f"model-{number:05}.safetensors"))
            shard.clear()
            number, held = number + 1, 0

    for name in shapes:
        shard[name] = source.take(name).cpu()
        held += shard[name].nbytes
        if held >= SHARD_BYTES:
            flush()
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    make_tokenizer(config["vocab_size"], folder)


def make_tokenizer(vocab_size: int, folder: Path) -> None:
    """A byte-level BPE without merges, of ASCII alone; ids past that stand for words of a space and five letters or
    digits. Each token is whole characters: one that ended inside a character would bring no text, and clients, who tell
    tokens by their text, would take two steps for one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Printable bytes stand for themselves, the others for the letters from U+0100 on.
    vocab = {letter: i for i, letter in enumerate(c for c in letters if ord(c) < 127 or 0x100 <= ord(c) <= 0x121)}
    for token in range(len(vocab), vocab_size):
        vocab[f"\u0120{token:05x}"] = token
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    # vLLM's loader would guess a class from the model's, with special tokens of its own.
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


@dataclass
class Server:
    """A process that serves."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    start_s: float

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far by process, all threads; an engine may have two."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        found = {f"{self.name}'s API" if children else self.name: _cpu_s(pid)}
        return found | ({self.name: _cpu_s(int(children[0]))} if children else {})


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def serve(name: str, role: str, folder: Path, log: Path, *flags: str) -> AbstractContextManager[Server]:
    """One serving process of ours."""
    port = free_port()
    argv = [sys.executable, "-m", "isthmus_runtime", "serve", "--role", role, "--port", str(port), "--model"]
    argv += [str(folder), "--served-model-name", NAME, "--log-level", "info", "--drain-timeout", "5s", *flags]
    return running(name, argv, port, "/ready", log, START_S)


@contextmanager
def running(
    name: str,
    argv: Sequence[str],
    port: int,
    ready: str,
    log: Path,
    start_s: float,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """A process that serves at `port`, from exec to the first answer at `ready` and to its end, and its children's.

    `environment`: None is this process's.
    """
    began = time.perf_counter()
    with log.open("ab") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=environment)
    try:
        while True:
            if process.poll() is not None or time.perf_counter() - began > start_s:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                raise SystemExit(f"bench: {name} is not ready, exit status {process.poll()}:\n{tail}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}{ready}", timeout=2):
                    break
            except (urllib.error.URLError, OSError):
                # Readiness of another process has no event to wait on.
                time.sleep(0.05)  # noqa: TID251
        yield Server(name, port, process, time.perf_counter() - began)
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def load(server: Server, row: Row, output_len: int, vocab: int, seed: int) -> dict[str, float]:
    """All requests of a row at once, from several client processes; what they saw together."""
    clients = min(CLIENTS, row.requests)
    share = row.requests // clients
    argv = [sys.executable, "-m", "isthmus_runtime", "bench", "--json", "--model", NAME, "--vocab-size", str(vocab)]
    argv += ["--url", f"http://127.0.0.1:{server.port}", "--timeout", str(LOAD_S), "--input-len", str(row.input_len)]
    argv += ["--output-len", str(output_len), "--requests", str(share), "--concurrency", str(share)]
    started = [
        subprocess.Popen([*argv, "--seed", str(seed * CLIENTS + i)], stdout=subprocess.PIPE, text=True)
        for i in range(clients)
    ]
    found = []
    for client in started:
        text, _ = client.communicate(timeout=LOAD_S)
        if client.returncode:
            raise SystemExit(f"bench: a client of {server.name} failed on {row.title}")
        found.append(json.loads(text)["result"])
    # They start within a few milliseconds of each other, once their prompts are made; the slowest decides.
    seconds = max(f["seconds"] for f in found)
    tokens = row.requests * (output_len + (row.input_len if row.unit.startswith("total") else 0))
    return {
        "seconds": seconds,
        "tok_s": tokens / seconds,
        "ttft_ms": statistics.median(f["ttft_median_s"] for f in found) * 1e3,
        "itl_p99_ms": max(f.get("itl_p99_s", 0.0) for f in found) * 1e3,
    }


def _cpu_of(servers: Sequence[Server]) -> dict[str, float]:
    return {name: cpu for server in servers for name, cpu in server.cpu_s().items()}


def measure(
    server: Server,
    beside: Sequence[Server],
    args: argparse.Namespace,
    vocab: int,
    offline: dict[str, Any],
    mode: str,
) -> list[dict[str, Any]]:
    """Each row at one server; CPU time of all processes on the way."""
    made = []
    for row in ROWS:
        if row.name not in args.rows.split(","):
            continue
        output_len = min(row.output_len, 64) if args.quick else row.output_len
        runs, cpu = [], []
        for repeat in range(1 if args.quick else row.repeats):
            before = _cpu_of(beside)
            runs.append(load(server, row, output_len, vocab, repeat))
            spent = _cpu_of(beside)
            # The checker of grammars is a process, too, and may begin on the way.
            cpu.append({name: (spent[name] - s) / runs[-1]["seconds"] for name, s in before.items()})
        key = "ttft_ms" if row.unit == "ms" else "tok_s"
        value = statistics.median(run[key] for run in runs)
        alone = offline.get(row.name, {}).get("values")
        cost = f"{row.better(value, statistics.median(alone)):>9.2f}x" if alone else f"{'':>10}"
        cores = ", ".join(f"{name} {statistics.median(c[name] for c in cpu):.2f}" for name in cpu[0])
        say(
            f"{server.name:8} {mode:3} {row.title + ', ' + row.unit:38} {value:>10.1f} {cost}"
            f"  first token {statistics.median(r['ttft_ms'] for r in runs):.1f} ms,"
            f" p99 between tokens {max(r['itl_p99_ms'] for r in runs):.1f} ms; cores: {cores}"
        )
        made.append(
            {"server": server.name, "api_process": mode, "row": row.name, "value": value, "runs": runs, "cores": cpu}
        )
    return made


def beside(
    peer: Peer, folder: Path, log: Path, args: argparse.Namespace, vocab: int, fraction: float
) -> list[dict[str, Any]]:
    """The rows by vLLM's server; none where it fails, which is told, and costs ours nothing."""
    port = free_port()
    argv = peer.server(folder, NAME, port, max_model_len=args.max_model_len, fraction=fraction)
    try:
        with running("vLLM", argv, port, "/health", log, PEER_START_S, peer.environment()) as server:
            say(f"vLLM: exec to ready {server.start_s:.1f} s")
            load(server, WARM, 8, vocab, 99)
            return measure(server, [server], args, vocab, {}, "")
    except SystemExit as error:
        say(str(error))
        return []


def compare(model: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Each row of the first mode beside the peer's and the computed limit."""
    found = {(row["server"], row["row"]): row["value"] for row in reversed(rows)}
    say(f"\n{model + ', over HTTP':38} {'engine':>10} {'router':>10} {'vLLM':>10} {'limit':>8}  engine/vLLM")
    for row in ROWS:
        if ("engine", row.name) not in found:
            continue
        ours, router, peer = (found.get((server, row.name)) for server in ("engine", "router", "vLLM"))
        limit = row.known.get(model, (0.0, None, 0.0))[1]
        told = "".join(f" {'-' if value is None else format(value, '.1f'):>10}" for value in (ours, router, peer))
        ratio = "" if peer is None else f"{row.better(ours, peer):>11.2f}x"
        say(f"{row.title + ', ' + row.unit:38}{told} {'-' if limit is None else format(limit, 'g'):>8}  {ratio}")


def main() -> int:
    """Make the model, start the servers, run the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b", choices=[*MODELS, "small"])
    parser.add_argument("--rows", default="single,ttft1k,ttft8k,decode")
    parser.add_argument("--modes", default="on,off", help="of --api-process; each is a start, the first has a router")
    parser.add_argument("--quick", action="store_true", help="one repeat, at most 64 tokens out")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--offline", default="", help="bench-gpu.json of gpu.py, to say what HTTP costs")
    parser.add_argument(
        "--engine-flag", action="append", default=[], help="another flag of the engine, as --flag=value"
    )
    parser.add_argument("--out", default="", help="JSON file for the results")
    parser.add_argument("--peer", default="auto", help="auto, none, an interpreter or PYTHONPATH that has vLLM")
    args = parser.parse_args()
    # Who ends this ends what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        peer = find_peer(args.peer)
    except ValueError as error:
        parser.error(str(error))
    config = SMALL if args.model == "small" else MODELS[args.model]
    offline: dict[str, Any] = {}
    if args.offline and Path(args.offline).is_file():
        offline = json.loads(Path(args.offline).read_text()).get(args.model, {}).get("rows", {})
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / NAME
        folder.mkdir()
        began = time.perf_counter()
        make_model(config, folder, torch.device(args.device))
        say(f"model written in {time.perf_counter() - began:.1f} s")
        if args.device == "cuda":
            torch.cuda.empty_cache()
        flags = [
            f"--device={args.device}",
            f"--max-model-len={args.max_model_len}",
            "--max-batched-tokens=8192",
            "--max-num-seqs=256",
            "--max-waiting=4096",
            "--no-prefix-caching",
            *([f"--kv-memory-fraction={FRACTION}"] if args.device == "cuda" else []),
            *args.engine_flag,
        ]
        log = Path(args.out or made).parent if args.out else Path(made)
        rows, starts = [], {}
        for mode in args.modes.split(","):
            own = f"--api-process={mode}"
            with serve("engine", "unified", folder, log / "http-engine.log", *flags, own) as engine:
                starts[mode] = engine.start_s
                say(f"engine, --api-process {mode}: exec to ready {engine.start_s:.1f} s")
                load(engine, WARM, 8, config["vocab_size"], 99)
                rows += measure(engine, [engine], args, config["vocab_size"], offline, mode)
                if rows[0]["api_process"] != mode:
                    continue
                worker = f"--worker=127.0.0.1:{engine.port}"
                with serve("router", "router", folder, log / "http-router.log", worker) as router:
                    say(f"router: exec to ready {router.start_s:.1f} s")
                    load(router, WARM, 8, config["vocab_size"], 98)
                    rows += measure(router, [engine, router], args, config["vocab_size"], offline, mode)
        if peer is not None:
            rows += beside(peer, folder, log / "http-vllm.log", args, config["vocab_size"], FRACTION)
    compare(args.model, rows)
    if args.out:
        data = {"model": args.model, "engine_start_s": starts, "rows": rows}
        Path(args.out).write_text(json.dumps(data, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
