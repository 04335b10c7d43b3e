"""`make bench-gpu`: the table of the GPU's bars, through the engine loop, the scheduler and the executor.

Random weights of real architectures, made on the GPU; greedy, fixed lengths, no prefix cache, no HTTP. Beside each row
stand what vLLM 0.24.0 reached on one H200 (docs/benchmarks.md) and the computed limit.

    python runtime/bench/gpu.py [--models qwen3-8b,qwen3-30b-a3b] [--rows single,decode] [--quick] [--out FOLDER]
    python runtime/bench/gpu.py --parity     tokens of the GPU equal the CPU's, float32, random weights
    python runtime/bench/gpu.py --profile    where the time of a step goes, by kernel
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import random
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()

import torch  # noqa: E402 - what importing costs is part of a start

from isthmus_runtime.checkpoints.random import RandomTensors  # noqa: E402
from isthmus_runtime.config import KvConfig, ModelConfig, SchedulerConfig  # noqa: E402
from isthmus_runtime.engine.exchange import Reply  # noqa: E402
from isthmus_runtime.engine.loop import STEPS_IN_FLIGHT, EngineLoop  # noqa: E402
from isthmus_runtime.engine.scheduler import Scheduler  # noqa: E402
from isthmus_runtime.executor.device.cuda import CudaDevice  # noqa: E402
from isthmus_runtime.executor.model_runner import LoadedModel, TorchExecutor, load  # noqa: E402
from isthmus_runtime.kv.plan import KvPlanInput, plan  # noqa: E402
from isthmus_runtime.kv.pool import BlockPool  # noqa: E402
from isthmus_runtime.models.base import ModelSpec  # noqa: E402
from isthmus_runtime.models.shard import Slice  # noqa: E402
from isthmus_runtime.request import FinishReason, GenerateRequest, SamplingParams, TokenChunk  # noqa: E402

DEADLINE_S = 300.0
_QWEN3 = {
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        **_QWEN3,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
    },
    "qwen3-30b-a3b": {
        **_QWEN3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
# SmolLM2-135M's shape, for parity.
SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    # Tied, a random model repeats its input.
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


@dataclass(frozen=True)
class Row:
    """One line of the table: `requests` prompts of `input_len` tokens at once, `output_len` tokens each."""

    name: str
    title: str
    requests: int
    input_len: int
    output_len: int
    unit: str
    """out tok/s, total tok/s or ms (time to the first token)."""
    known: dict[str, tuple[float, float | None, float]]
    """By model: the peer, the computed limit, our bar."""
    repeats: int = 2

    def better(self, value: float, other: float) -> float:
        """How many times better `value` is than `other`."""
        return other / value if self.unit == "ms" else value / other


def _known(dense: tuple[float, float | None, float], moe: tuple[float, float | None, float]) -> dict[str, Any]:
    return {"qwen3-8b": dense, "qwen3-30b-a3b": moe}


ROWS = (
    Row("single", "single stream 128/256", 1, 128, 256, "out tok/s", _known((194, 265, 235), (230, 480, 350))),
    Row("ttft1k", "time to first token, 1024 in", 1, 1024, 1, "ms", _known((26.5, 22.5, 24), (59, None, 30)), 5),
    Row("ttft8k", "time to first token, 8192 in", 1, 8192, 1, "ms", _known((211, 198, 203), (155, 127, 140)), 3),
    Row(
        "prefill", "prefill 32 x 4096", 32, 4096, 1, "total tok/s",
        _known((41100, 44500, 43000), (64200, 85000, 72000)),
    ),
    Row(
        "decode", "256 x 128/512", 256, 128, 512, "out tok/s",
        _known((18270, 24400, 21500), (10990, 15000, 13000)),
    ),
    Row(
        "mixed", "512 x 1024/128", 512, 1024, 128, "total tok/s",
        _known((35000, 42500, 39000), (42600, 50000, 46000)),
    ),
    Row(
        "long", "64 x 8192/256", 64, 8192, 256, "total tok/s",
        _known((27300, 29000, 28300), (31900, 36500, 34000)), 1,
    ),
)  # fmt: skip
START = {"qwen3-8b": (76.0, 25.0), "qwen3-30b-a3b": (97.0, 40.0)}
"""Seconds from start to ready: the peer's, our bar."""


@dataclass
class Run:
    """One load that ran to its end."""

    seconds: float
    first_s: list[float]
    steps: int
    decode_ms: float
    """Median time between two answers of the engine, once prompts are computed."""
    out_tokens: int
    tokens: list[list[int]]


class Bench:
    """An engine without HTTP: loop, scheduler, executor."""

    def __init__(self, loaded: LoadedModel, *, scheduler: SchedulerConfig, kv: KvConfig) -> None:
        specs = loaded.layer_specs(kv.block_size, kv.dtype)
        self.plan = plan(
            KvPlanInput(
                ranks=(specs,),
                available_bytes=(kv.memory_bytes or loaded.device.kv_bytes(kv.memory_fraction),),
                max_model_len=scheduler.max_model_len or loaded.spec.max_position,
                auto_fit=True,
                max_num_batched_tokens=scheduler.max_batched_tokens,
                batches_in_flight=STEPS_IN_FLIGHT,
            )
        )
        self.executor = TorchExecutor(loaded, self.plan, scheduler, kv)
        pool = BlockPool(self.plan.num_blocks, num_groups=len(self.plan.groups), prefix_caching=False, events=None)
        planner = Scheduler(scheduler, self.plan, pool)
        runner = self.executor.runner
        self.host = {
            "schedule": _timed(planner, "schedule"),
            "complete": _timed(planner, "complete"),
            "launch": _timed(runner, "launch"),
            "collect": _timed(runner, "collect"),
        }
        """Milliseconds of the host, by call, of the last run."""
        self._loop = EngineLoop(planner, self.executor, self._sink)
        self._changed = threading.Condition()
        self._tokens: dict[str, list[int]] = {}
        self._first: dict[str, float] = {}
        self._answers: list[float] = []
        self._open: set[str] = set()
        self._errors: list[str] = []
        self._number = 0
        self._loop.start()

    def run(self, prompts: Sequence[Sequence[int]], output_len: int) -> Run:
        """Send all prompts at once; returns when all have all their tokens."""
        names = []
        for _ in prompts:
            self._number += 1
            names.append(f"r{self._number}")
        with self._changed:
            self._open = set(names)
            self._tokens = {name: [] for name in names}
            self._first = {}
            self._answers = []
            for times in self.host.values():
                times.clear()
        sampling = SamplingParams(max_tokens=output_len, temperature=0.0)
        steps, begin = self._loop.steps, time.perf_counter()
        for name, prompt in zip(names, prompts, strict=True):
            self._loop.generate(
                GenerateRequest(
                    request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling, timeout_s=DEADLINE_S
                )
            )
        with self._changed:
            if not self._changed.wait_for(lambda: not self._open or self._errors, DEADLINE_S):
                raise TimeoutError(f"{len(self._open)} requests had not ended after {DEADLINE_S:.0f} s")
            if self._errors:
                raise RuntimeError(self._errors[0])
        seconds = time.perf_counter() - begin
        tokens = [self._tokens[name] for name in names]
        assert all(len(one) == output_len for one in tokens)
        begun = max(self._first.values())
        gaps = [later - earlier for earlier, later in pairwise(t for t in self._answers if t >= begun)]
        return Run(
            seconds=seconds,
            first_s=sorted(self._first[name] - begin for name in names),
            steps=self._loop.steps - steps,
            decode_ms=statistics.median(gaps) * 1e3 if gaps else 0.0,
            out_tokens=sum(map(len, tokens)),
            tokens=tokens,
        )

    def close(self) -> None:
        """End the loop, give the memory back."""
        self._loop.stop()
        self.executor.close()

    def _sink(self, replies: Sequence[tuple[str, Reply]]) -> None:
        now = time.perf_counter()
        ended = False
        self._answers.append(now)
        for name, reply in replies:
            if not isinstance(reply, TokenChunk):
                continue
            if reply.token_ids:
                self._first.setdefault(name, now)
                self._tokens[name].extend(reply.token_ids)
            if reply.finish_reason is not None:
                ended = True
                if reply.finish_reason is not FinishReason.LENGTH:
                    self._errors.append(f"{name} ended with {reply.finish_reason}: {reply.error}")
                self._open.discard(name)
        if ended:
            with self._changed:
                self._changed.notify_all()


def _timed(owner: Any, name: str) -> list[float]:
    """Note how long each call of a method takes; the list that gets the milliseconds."""
    method, times = getattr(owner, name), list[float]()

    def timed(*args: Any) -> Any:
        begin = time.perf_counter()
        try:
            return method(*args)
        finally:
            times.append((time.perf_counter() - begin) * 1e3)

    setattr(owner, name, timed)
    return times


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)


def open_model(
    config: dict[str, Any],
    scheduler: SchedulerConfig,
    *,
    device: str,
    dtype: str,
    seed: int,
    on: str,
    quantization: str = "auto",
    deterministic: bool = False,
) -> LoadedModel:
    """Random weights for `config`, generated on the device `on` (`cpu`: alike everywhere)."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))

        def source(spec: ModelSpec, where: torch.device) -> Any:
            made = torch.device("cpu") if on == "cpu" else where
            kind = torch.bfloat16 if config["torch_dtype"] == "bfloat16" else torch.float32
            weights = RandomTensors(spec.tensor_shapes(), device=made, dtype=kind, seed=seed)
            return weights if made == where else _Moved(weights, where)

        model = ModelConfig(
            path=folder, device=device, dtype=dtype, quantization=quantization, deterministic=deterministic
        )
        return load(model, scheduler, source=source)


@dataclass
class _Moved:
    source: RandomTensors
    device: torch.device

    def take(self, *parts: str | Slice) -> torch.Tensor:
        return self.source.take(*parts).to(self.device)


@dataclass
class Report:
    """What was measured, as text and as JSON."""

    lines: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def line(self, text: str) -> None:
        say(text)
        self.lines.append(text)

    def write(self, folder: str) -> None:
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / "bench-gpu.txt").write_text("\n".join(self.lines) + "\n")
            (Path(folder) / "bench-gpu.json").write_text(json.dumps(self.data, indent=1))


def bench_model(name: str, args: argparse.Namespace, report: Report, began: float) -> None:
    """All rows of one model."""
    scheduler = SchedulerConfig(
        max_model_len=args.max_model_len,
        max_batched_tokens=args.max_batched_tokens,
        max_num_seqs=256,
        max_waiting=4096,
    )
    loaded = open_model(
        MODELS[name],
        scheduler,
        device=args.device,
        dtype="auto",
        seed=0,
        on="device",
        quantization=args.quantization,
        deterministic=args.deterministic == "on",
    )
    say(f"bench: {name} loaded {time.perf_counter() - began:.1f} s after its start")
    bench = Bench(
        loaded, scheduler=scheduler, kv=KvConfig(memory_fraction=args.kv_memory_fraction, dtype=args.kv_dtype)
    )
    ready = time.perf_counter() - began
    peer, bar = START[name]
    report.line(f"\n{name}: {bench.plan.num_blocks} KV blocks, max_model_len {bench.plan.max_model_len}")
    report.line(f"{'row':32} {'ours':>10} {'peer':>9} {'limit':>9} {'bar':>9}  ours/peer  to bar")
    report.line(
        f"{'start to ready, s':32} {ready:>10.1f} {peer:>9.0f} {'':>9} {bar:>9.0f}  {peer / ready:>8.2f}x"
        f"  {'met' if ready <= bar else 'short'}"
    )
    report.data[name] = {"start_s": ready, "rows": {}}
    rng = random.Random(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[rng.randrange(1000, 150000) for _ in range(length)] for _ in range(count)]

    try:
        for count, length, output in () if args.rows == "none" else ((8, 128, 16), (256, 128, 8), (2, 4096, 2)):
            bench.run(prompts(count, length), output)
        say(f"bench: {name} ready and warm after {time.perf_counter() - began:.1f} s")
        for row in ROWS:
            if args.rows and row.name not in args.rows.split(","):
                continue
            try:
                _row(row, name, bench, prompts, args, report)
            except Exception as error:
                report.line(f"{row.title:32} FAILED: {type(error).__name__}: {error}")
                report.data[name]["rows"][row.name] = {"error": str(error)}
                traceback.print_exc()
                if "failed" in str(error):
                    break  # the engine is gone
            report.write(args.out)
        if args.profile:
            report.line(profile(bench, prompts))
    finally:
        bench.close()
        report.write(args.out)


def _row(
    row: Row,
    model: str,
    bench: Bench,
    prompts: Callable[[int, int], list[list[int]]],
    args: argparse.Namespace,
    report: Report,
) -> None:
    output = min(row.output_len, 64) if args.quick else row.output_len
    values, runs = [], []
    for _ in range(1 if args.quick else row.repeats):
        run = bench.run(prompts(row.requests, row.input_len), output)
        runs.append(run)
        if row.unit == "ms":
            values.append(run.first_s[0] * 1e3)
        else:
            counted = run.out_tokens + (row.requests * row.input_len if row.unit.startswith("total") else 0)
            values.append(counted / run.seconds)
    value = statistics.median(values)
    peer, limit, bar = row.known[model]
    last = runs[-1]
    report.line(
        f"{row.title + ', ' + row.unit:32} {value:>10.1f} {peer:>9g} {limit or float('nan'):>9g} {bar:>9g}"
        f"  {row.better(value, peer):>8.2f}x  {'met' if row.better(value, bar) >= 1 else 'short'}"
        f"  ({last.steps} steps; decode {last.decode_ms:.2f} ms; first token {last.first_s[0] * 1e3:.1f} ms)"
        + ("  [quick: fewer tokens than the peer]" if output != row.output_len else "")
    )
    host = {name: statistics.median(times) for name, times in bench.host.items() if times}
    report.line(" " * 34 + "host, median ms a step: " + ", ".join(f"{name} {ms:.2f}" for name, ms in host.items()))
    report.data[model]["rows"][row.name] = {
        "host_ms": host,
        "values": values, "unit": row.unit, "peer": peer, "limit": limit, "bar": bar,
        "steps": [r.steps for r in runs], "decode_ms": [r.decode_ms for r in runs],
        "seconds": [r.seconds for r in runs], "output_len": output,
    }  # fmt: skip


def profile(bench: Bench, prompts: Callable[[int, int], list[list[int]]]) -> str:
    """Kernels by time: decode of one row, decode of 256 rows, prefill of 8192 tokens."""
    texts = []
    for title, count, length, output in (("single", 1, 128, 24), ("256 rows", 256, 128, 24), ("prefill", 2, 8192, 1)):
        inputs = prompts(count, length)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            bench.run(inputs, output)
        table = found.key_averages().table(sort_by="cuda_time_total", row_limit=22, max_name_column_width=70)
        texts.append(f"\nprofile: {title}, {count} x {length}/{output}\n{table}")
    return "\n".join(texts)


def parity(args: argparse.Namespace, report: Report) -> bool:
    """Greedy tokens of the GPU and of the CPU, float32, one model of random weights, mixed lengths."""
    rng = random.Random(7)
    prompts = [[rng.randrange(49152) for _ in range(n)] for n in (1, 7, 16, 33, 120, 400)]
    scheduler = SchedulerConfig(max_model_len=1024, max_batched_tokens=256, max_num_seqs=8)
    found: dict[str, list[list[int]]] = {}
    for device in ("cpu", args.device):
        loaded = open_model(SMALL, scheduler, device=device, dtype="float32", seed=3, on="cpu")
        bench = Bench(loaded, scheduler=scheduler, kv=KvConfig(memory_bytes=512 << 20))
        found[device] = bench.run(prompts, 48).tokens
        bench.close()
    pairs = list(zip(found["cpu"], found[args.device], strict=True))
    same = sum(a == b for a, b in pairs)
    kinds = len({token for a, _ in pairs for token in a})
    first = [next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None) for a, b in pairs]
    report.line(
        f"parity, float32: {same} of {len(pairs)} requests have equal tokens ({kinds} different tokens; "
        f"first difference at {first})"
    )
    report.data["parity"] = {"equal": same, "of": len(pairs), "first_difference": first}
    return same == len(pairs)


def main() -> int:
    """Run what was asked for; 1 when parity failed or nothing could run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen3-8b")
    parser.add_argument("--rows", default="", help="comma-separated names, or none (start only); default: all")
    parser.add_argument("--quick", action="store_true", help="one repeat, at most 64 tokens out")
    parser.add_argument("--parity", action="store_true", help="first compare the GPU's tokens with the CPU's")
    parser.add_argument("--profile", action="store_true", help="last a table of kernels by time")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--quantization", default="auto", choices=["auto", "fp8"], help="fp8: 8-bit products")
    parser.add_argument("--deterministic", default="off", choices=["on", "off"], help="as the engine's flag")
    parser.add_argument("--kv-dtype", default="auto", choices=["auto", "bfloat16", "fp8"], help="of the KV pool")
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--max-batched-tokens", type=int, default=8192)
    parser.add_argument("--kv-memory-fraction", type=float, default=0.9)
    parser.add_argument("--no-prompt-graphs", action="store_true", help="launch steps with prompts one by one")
    parser.add_argument("--out", default="", help="folder for bench-gpu.txt and bench-gpu.json")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)7.0f ms %(name)s: %(message)s")
    if args.no_prompt_graphs:
        CudaDevice.graph_tokens = lambda self, max_tokens: ()  # type: ignore[method-assign]
    report, ok = Report(), True
    if args.device == "cuda":
        report.line(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    if args.parity:
        try:
            ok = parity(args, report)
        except Exception as error:
            ok = False
            report.line(f"parity FAILED: {type(error).__name__}: {error}")
            traceback.print_exc()
    for number, name in enumerate(filter(None, args.models.split(","))):
        try:
            # What importing took belongs to the first start.
            bench_model(name, args, report, time.perf_counter() if number else STARTED)
        except Exception as error:
            ok = False
            report.line(f"{name} FAILED: {type(error).__name__}: {error}")
            traceback.print_exc()
        # The next model needs this one's memory.
        gc.collect()
    report.write(args.out)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
