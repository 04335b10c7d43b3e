"""Time every CPU op beside its PyTorch form: `python kernels/bench/cpu_ops.py [--threads 2] [--only linear]`.

The shapes are those of SmolLM2-135M (hidden 576, intermediate 1536, 9 heads, 3 kv heads, head_dim 64,
vocabulary 49,152). The best of many runs is reported: on a shared machine the others measure the neighbours.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from isthmus_kernels import dispatch, dispatch_logits, dispatch_weights, kv_view, native

HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB, BLOCK = 576, 1536, 9, 3, 64, 49152, 16
QKV = (HEADS + 2 * KV_HEADS) * DIM


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the table: `ours` and `peer` do the same work, of `flops` operations on `nbytes` bytes."""

    op: str
    shape: str
    ours: Callable[[], Any]
    peer: Callable[[], Any]
    nbytes: float
    flops: float = 0.0


def best_time(run: Callable[[], Any], seconds: float) -> float:
    """Seconds of the fastest of at least 3 runs, repeated for about `seconds`."""
    run()
    best, stop, runs = float("inf"), time.perf_counter() + seconds, 0
    while runs < 3 or time.perf_counter() < stop:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
        runs += 1
    return best


def linear_cases() -> Iterator[Case]:
    """The five products of a step, with bf16 weights in memory, against fp32 F.linear."""
    layers = {"qkv": (QKV, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
    layers["lm_head"] = (VOCAB, HIDDEN)
    for tokens in (1, 4, 8, 64, 256, 512):
        for name, (rows, columns) in layers.items():
            if name == "lm_head" and tokens > 64:
                continue
            weight = torch.randn(rows, columns).bfloat16()
            wide, packed = weight.float(), dispatch_weights.pack(weight, dtype=torch.float32)
            x, out = torch.randn(tokens, columns), torch.empty(tokens, rows)
            yield Case(
                op="linear",
                shape=f"{name} m={tokens}",
                ours=partial(dispatch.linear, x, packed, out=out),
                peer=partial(functional.linear, x, wide),
                nbytes=packed.nbytes + 4 * tokens * (rows + columns),
                flops=2.0 * tokens * rows * columns,
            )


def attention_cases() -> Iterator[Case]:
    """Decode and prefill over a scattered block-major pool."""
    shapes = [(1, 1, 384), (1, 1, 4096), (16, 1, 288), (64, 1, 288), (1, 256, 256), (1, 512, 2048)]
    for dtype in (torch.float32, torch.bfloat16):
        for rows, queries, context in shapes:
            blocks = -(-context // BLOCK)
            pool = torch.randn(rows * blocks + 1, 4, 2, BLOCK, KV_HEADS, DIM).to(dtype)
            q = torch.randn(rows * queries, HEADS, DIM)
            run = partial(
                dispatch.paged_attention,
                q,
                kv_view.layer_view(pool, 1),
                (torch.randperm(rows * blocks) + 1).int().view(rows, blocks),
                torch.arange(0, rows * queries + 1, queries, dtype=torch.int32),
                torch.full((rows,), context, dtype=torch.int32),
                scale=DIM**-0.5,
                max_query_len=queries,
                max_seq_len=context,
                out=torch.empty_like(q),
            )
            yield Case(
                op="paged_attention",
                shape=f"{str(dtype).removeprefix('torch.')} r={rows} q={queries} ctx={context}",
                ours=run,
                peer=partial(run, impl="torch"),
                nbytes=rows * context * KV_HEADS * DIM * 2 * dtype.itemsize,
                flops=4.0 * rows * HEADS * DIM * queries * (context - (queries - 1) / 2),
            )


def pointwise_cases() -> Iterator[Case]:
    """Norm, activation, rotary and KV write."""
    for tokens in (1, 64, 256):
        x, residual, weight = torch.randn(tokens, HIDDEN), torch.randn(tokens, HIDDEN), torch.ones(HIDDEN)
        out = torch.empty_like(x)
        norm = partial(dispatch.add_rms_norm, x, residual, weight, 1e-5, out=out)
        yield Case(
            op="add_rms_norm",
            shape=f"m={tokens}",
            ours=norm,
            peer=partial(norm, impl="reference"),
            nbytes=16.0 * tokens * HIDDEN,
        )
        gated = torch.randn(tokens, 2 * INNER)
        silu = partial(dispatch.silu_mul, gated, out=torch.empty(tokens, INNER))
        yield Case(
            op="silu_mul",
            shape=f"m={tokens}",
            ours=silu,
            peer=partial(silu, impl="reference"),
            nbytes=12.0 * tokens * INNER,
        )
        pool = torch.zeros(tokens // BLOCK + 2, 4, 2, BLOCK, KV_HEADS, DIM)
        table = torch.zeros(2048, DIM // 2)
        rope = partial(
            dispatch.rope_kv_write,
            torch.zeros(tokens, QKV),
            torch.arange(tokens),
            table + 1,
            table,
            kv_view.layer_view(pool, 1),
            torch.arange(tokens),
            num_heads=HEADS,
        )
        yield Case(
            op="rope_kv_write",
            shape=f"m={tokens}",
            ours=rope,
            peer=partial(rope, impl="reference"),
            nbytes=8.0 * tokens * QKV,
        )


def sampling_cases() -> Iterator[Case]:
    """Greedy, plain temperature, and both filters."""
    for rows in (1, 64):
        logits = torch.randn(rows, VOCAB) * 2
        warm: dict[str, Any] = {
            "temperature": torch.full((rows,), 0.8),
            "seeds": torch.arange(rows),
            "positions": torch.arange(rows),
        }
        filters = {"top_k": torch.full((rows,), 50, dtype=torch.int32), "top_p": torch.full((rows,), 0.9)}
        choices: list[tuple[str, dict[str, Any]]] = [("greedy", {}), ("temperature", warm)]
        choices.append(("top-k+top-p", {**warm, **filters}))
        for name, args in choices:
            yield Case(
                op="sample",
                shape=f"{name} B={rows}",
                ours=partial(dispatch_logits.sample, logits, **args),
                peer=partial(dispatch_logits.sample, logits, impl="torch", **args),
                nbytes=4.0 * rows * VOCAB,
            )


GROUPS = {
    "linear": linear_cases,
    "attention": attention_cases,
    "pointwise": pointwise_cases,
    "sampling": sampling_cases,
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.2, help="time spent on each measurement")
    parser.add_argument("--only", choices=sorted(GROUPS), help="one group of ops")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{args.threads} threads, {native.level() or 'not compiled'}")
    print(f"{'op':<16} {'shape':<28} {'us':>9} {'GB/s':>7} {'GFLOP/s':>8} {'torch us':>10} {'ratio':>6}")
    for name in [args.only] if args.only else GROUPS:
        for case in GROUPS[name]():
            ours, peer = best_time(case.ours, args.seconds), best_time(case.peer, args.seconds)
            print(
                f"{case.op:<16} {case.shape:<28} {ours * 1e6:>9.1f} {case.nbytes / ours / 1e9:>7.1f} "
                f"{case.flops / ours / 1e9:>8.1f} {peer * 1e6:>10.1f} {peer / ours:>6.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
