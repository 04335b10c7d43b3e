"""A roofline line for each GPU op: time, bytes or operations, share of its ceiling. `python kernels/bench/gpu_ops.py`

FlashInfer's time stands beside it where that is installed.

Times are medians of CUDA-graph replays. A graph holds one call on each of several inputs, together larger than the L2
cache, so that every call reads memory. Ceilings (copy, read, matrix product) are measured in the same run.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus_kernels import dispatch, dispatch_logits, dispatch_weights, kv_view

DEVICE, BF16 = torch.device("cuda"), torch.bfloat16
VOCAB = 151_936
# heads, kv heads, head_dim
QWEN3_8B, QWEN3_30B = (32, 8, 128), (32, 4, 128)
ROWS: list[dict[str, object]] = []


def median_us(calls: Sequence[Callable[[], object]], replays: int = 30) -> float:
    """Microseconds of one call, from a graph that makes each of `calls` once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    return statistics.median(times) * 1e3 / len(calls)


def report(
    op: str, shape: str, us: float, amount: float, limits: dict[str, float], roof: str, peer_us: float | None = None
) -> None:
    """Print where a call lies under its roof, one of `limits`: `amount` in operations where that is the rate of
    products, else in bytes."""
    share = amount / (us * 1e-6) / limits[roof]
    unit = "FLOP" if roof == "product" else "B"
    ratio = "" if peer_us is None else f"  peer {peer_us:9.1f} us, ours {peer_us / us:5.2f}x"
    print(
        f"{op:14} {shape:34} {us:9.1f} us {amount / 1e9:9.3f} G{unit:4} {amount / us / 1e6:7.2f} T{unit + '/s':6}"
        f" {share:6.1%} of {roof}{ratio}",
        flush=True,
    )
    ROWS.append(
        {"op": op, "shape": shape, "us": us, "amount": amount, "unit": unit, "roof": roof, "share": share}
        | {"peer_us": peer_us}
    )


@triton.jit
def _read(out, x, count, PIECE: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * PIECE + tl.arange(0, PIECE)
    value = tl.load(x + index, mask=index < count, other=0)
    if tl.sum(value, axis=0) == 12345:
        tl.store(out, 1)


def ceilings() -> dict[str, float]:
    """Bytes per second read and copied (read and written), operations per second of a bf16 product."""
    x, y = (torch.randint(0, 1 << 30, (1 << 28,), dtype=torch.int64, device=DEVICE) for _ in range(2))
    read = median_us([lambda: _read[(x.numel() // 4096,)](y, x, x.numel(), PIECE=4096, num_warps=4)], 5)
    # By multiprocessors: a copy in a graph would go to a copy engine, which is slower inside the device.
    copy = median_us([lambda: torch.add(x, 1, out=y)], 5)
    a = torch.randn(8192, 8192, device=DEVICE).to(BF16)
    product = median_us([lambda: torch.mm(a, a)], 5)
    found = {
        "read": x.nbytes / read * 1e6,
        "copy": 2 * x.nbytes / copy * 1e6,
        "product": 2 * 8192**3 / product * 1e6,
    }
    print("ceilings: " + ", ".join(f"{name} {value / 1e12:.2f} T/s" for name, value in found.items()), flush=True)
    return found


class Batch:
    """Paged requests over a block-major pool with enough layers that one pass does not fit the cache."""

    def __init__(self, shape: tuple[int, int, int], query_lens: list[int], seq_lens: list[int]) -> None:
        self.heads, self.kv_heads, self.dim = shape
        self.query_lens, self.lens = query_lens, seq_lens
        counts = [-(-length // 16) for length in seq_lens]
        self.bytes = sum(seq_lens) * 2 * self.kv_heads * self.dim * 2
        self.layers = max(1, min(32, (300 << 20) // self.bytes + 1))
        blocks = sum(counts)
        self.pool = torch.randn(blocks, self.layers, 2, 16, self.kv_heads, self.dim, device=DEVICE, dtype=BF16)
        self.ids = torch.randperm(blocks, dtype=torch.int32, device=DEVICE)
        self.counts = counts
        self.tables = torch.zeros(len(seq_lens), max(counts), dtype=torch.int32, device=DEVICE)
        for row, part in enumerate(self.ids.split(counts)):
            self.tables[row, : len(part)] = part
        self.starts = torch.tensor([0, *query_lens], dtype=torch.int32, device=DEVICE).cumsum(0, dtype=torch.int32)
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE)
        self.q = torch.randn(sum(query_lens), self.heads, self.dim, device=DEVICE, dtype=BF16)
        self.out = torch.empty_like(self.q)

    def calls(self, impl: str | None = None) -> list[Callable[[], object]]:
        """Our attention, once a layer; the implementation that dispatch chooses, or `impl`."""
        return [
            partial(
                dispatch.paged_attention,
                self.q,
                kv_view.layer_view(self.pool, index),
                self.tables,
                self.starts,
                self.seq_lens,
                scale=self.dim**-0.5,
                max_query_len=max(self.query_lens),
                max_seq_len=max(self.lens),
                out=self.out,
                impl=impl,
            )
            for index in range(self.layers)
        ]

    def peer(self, backend: str) -> float | None:
        """FlashInfer's time, after its plan, or None where it is not installed."""
        try:
            import flashinfer
        except ImportError:
            return None
        space = torch.zeros(512 << 20, dtype=torch.uint8, device=DEVICE)
        indptr = torch.tensor([0, *self.counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        last = torch.tensor([(length - 1) % 16 + 1 for length in self.lens], dtype=torch.int32)
        if max(self.query_lens) == 1:
            run = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=True, backend=backend)
            run.plan(
                indptr.to(DEVICE), self.ids, last.to(DEVICE), self.heads, self.kv_heads, self.dim, 16,
                q_data_type=BF16, kv_data_type=BF16,
            )  # fmt: skip
        else:
            run = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend=backend)
            run.plan(
                self.starts, indptr.to(DEVICE), self.ids, last.to(DEVICE), self.heads, self.kv_heads, self.dim, 16,
                causal=True, q_data_type=BF16, kv_data_type=BF16,
            )  # fmt: skip
        layers = [self.pool[:, index] for index in range(self.layers)]
        return median_us([partial(run.run, self.q, kv, out=self.out) for kv in layers])


DECODE = [
    (1, 512), (1, 2048), (1, 8192), (1, 32_768), (1, 131_072), (16, 512), (16, 2048), (16, 8192), (64, 512), (64, 2048),
    (64, 8192), (256, 256), (256, 640), (256, 2048),
]  # fmt: skip


def decode(limits: dict[str, float], peers: bool) -> None:
    """One query a request, equal and ragged lengths."""
    cases = [(f"b{rows} ctx {length}", [length] * rows) for rows, length in DECODE]
    cases.append(("1 x 128k + 63 x 1k", [131_072] + [1024] * 63))
    for name, shape in (("8B", QWEN3_8B), ("30B-A3B", QWEN3_30B)):
        for title, lens in cases if shape is QWEN3_8B else cases[::3]:
            batch = Batch(shape, [1] * len(lens), lens)
            us = median_us(batch.calls())
            peer = batch.peer("fa2") if peers else None
            report("decode", f"{name} {title}", us, batch.bytes, limits, "read", peer)


def prefill(limits: dict[str, float], peers: bool) -> None:
    """Chunks of prompts with and without context."""
    for title, queries, contexts in (
        ("1 x 1024", [1024], [0]),
        ("1 x 8192", [8192], [0]),
        ("4 x 2048", [2048] * 4, [0] * 4),
        ("2048 on 8192", [2048], [8192]),
        ("512 on 32768", [512], [32_768]),
        ("16 x 128 on 1024", [128] * 16, [1024] * 16),
        ("32 x 512", [512] * 32, [0] * 32),
        ("1 x 32768", [32_768], [0]),
    ):
        batch = Batch(QWEN3_8B, queries, [q + c for q, c in zip(queries, contexts, strict=True)])
        work = sum(4 * batch.heads * batch.dim * q * (c + q / 2) for q, c in zip(queries, contexts, strict=True))
        peer = batch.peer("fa3") if peers else None
        for impl in ("cuda", "triton"):
            us = median_us(batch.calls(impl)[:4], 10)
            report(f"prefill {impl}", title, us, work, limits, "product", peer)


def pointwise(limits: dict[str, float], peers: bool) -> None:
    """The fused elementwise ops of one Qwen3-8B layer."""
    weight, norm = torch.ones(4096, device=DEVICE, dtype=BF16), torch.ones(128, device=DEVICE, dtype=BF16)
    cos, sin = torch.randn(2, 4096, 64, device=DEVICE)
    for tokens in (1, 64, 512, 8192):
        copies = max(2, min(40, (400 << 20) // (tokens * 24_576 * 2)))
        xs, residuals = ([_noise(tokens, 4096) for _ in range(copies)] for _ in range(2))
        us = median_us(
            [partial(dispatch.add_rms_norm, a, b, weight, 1e-6, out=a) for a, b in zip(xs, residuals, strict=True)]
        )
        report("add_rms_norm", f"{tokens} x 4096", us, 4 * xs[0].nbytes, limits, "copy")
        out = torch.empty(tokens, 12_288, device=DEVICE, dtype=BF16)
        us = median_us([partial(dispatch.silu_mul, _noise(tokens, 24_576), out=out) for _ in range(copies)])
        report("silu_mul", f"{tokens} x 12288", us, 3 * out.nbytes, limits, "copy")
        batch = Batch(QWEN3_8B, [1] * tokens, [16] * tokens)
        slots = batch.tables[:, 0].long() * 16 + 3
        positions = slots % 4096
        us = median_us(
            [
                partial(
                    dispatch.rope_kv_write,
                    _noise(tokens, 6144),
                    positions,
                    cos,
                    sin,
                    batch.pool[:, index % batch.layers],
                    slots,
                    num_heads=32,
                    q_norm=norm,
                    k_norm=norm,
                )
                for index in range(copies)
            ]
        )
        report("rope_kv_write", f"{tokens} tokens", us, 2 * tokens * 6144 * 2, limits, "copy")


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(BF16)


def _peer_draws(heat: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> dict[str, Callable[[Tensor], object]]:
    """FlashInfer's ways from logits to tokens; its filters take probabilities, so the softmax is part of them."""
    try:
        from flashinfer import sampling as peer
    except ImportError:
        return {}

    def probs(logits: Tensor) -> Tensor:
        return peer.softmax(logits, temperature=heat)

    return {
        "temperature": peer.sampling_from_logits,
        "min-p": lambda x: peer.min_p_sampling_from_probs(probs(x), min_p),
        "top-k": lambda x: peer.top_k_sampling_from_probs(probs(x), top_k),
        "top-p": lambda x: peer.top_p_sampling_from_probs(probs(x), top_p),
        "top-k, top-p": lambda x: peer.top_k_top_p_sampling_from_logits(x / heat[:, None], top_k, top_p),
    }


def sampling(limits: dict[str, float], peers: bool) -> None:
    """Greedy, random and filtered choices over a vocabulary of 151,936."""
    for rows in (1, 8, 64, 256):
        inputs = [torch.randn(rows, VOCAB, device=DEVICE) * 3 for _ in range(max(2, min(16, 256 // rows)))]
        heat = torch.full((rows,), 0.8, device=DEVICE)
        seeds, positions = (torch.arange(rows, device=DEVICE) for _ in range(2))
        top_k = torch.full((rows,), 50, dtype=torch.int32, device=DEVICE)
        top_p, min_p = (torch.full((rows,), value, device=DEVICE) for value in (0.9, 0.05))
        noise = {"temperature": heat, "seeds": seeds, "positions": positions}
        ways = _peer_draws(heat, top_k, top_p, min_p) if peers else {}
        for name, args in (
            ("greedy", {}),
            ("temperature", noise),
            ("min-p", {**noise, "min_p": min_p}),
            ("top-k", {**noise, "top_k": top_k}),
            ("top-p", {**noise, "top_p": top_p}),
            ("top-k, top-p", {**noise, "top_k": top_k, "top_p": top_p}),
        ):
            us = median_us([partial(dispatch_logits.sample, x, **args) for x in inputs], 10)
            peer = median_us([partial(ways[name], x) for x in inputs], 10) if name in ways else None
            report("sample", f"b{rows} {name}", us, inputs[0].nbytes, limits, "read", peer)


PRODUCTS = {
    "qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24_576, 4096), "down": (4096, 12_288), "head": (VOCAB, 4096),
}  # fmt: skip


def linear(limits: dict[str, float], peers: bool) -> None:
    """Few rows against each weight of Qwen3-8B, beside cuBLAS."""
    for name, (outputs, columns) in PRODUCTS.items():
        copies = max(2, (400 << 20) // (outputs * columns * 2))
        weights = [_noise(outputs, columns) for _ in range(copies)]
        packed = [dispatch_weights.pack(weight) for weight in weights]
        for rows in (1, 2, 4, 8, 16):
            x, out = _noise(rows, columns), torch.empty(rows, outputs, device=DEVICE, dtype=BF16)
            us = median_us([partial(dispatch.linear, x, weight, out=out) for weight in packed])
            peer = median_us([partial(torch.mm, x, weight.T, out=out) for weight in weights])
            report("linear", f"m={rows} {name}", us, weights[0].nbytes, limits, "read", peer)


def moe(limits: dict[str, float], peers: bool) -> None:
    """One layer of Qwen3-30B-A3B, routing included: against reading its distinct experts, or multiplying."""
    experts, top_k, hidden, inner = 128, 8, 2048, 768
    layers = [(_noise(experts, 2 * inner, hidden), _noise(experts, hidden, inner)) for _ in range(2)]
    for tokens in (1, 8, 64, 256, 1024, 4096):
        x, logits = _noise(tokens, hidden), _noise(tokens, experts)

        def layer(gate_up: Tensor, down: Tensor, x: Tensor = x, logits: Tensor = logits) -> Tensor:
            weights, chosen = dispatch.moe_route(logits, top_k)
            return dispatch.moe(x, weights, chosen, gate_up, down)

        us = median_us([partial(layer, *weights) for weights in layers])
        distinct = dispatch.moe_route(logits, top_k)[1].unique().numel()
        amounts = {"read": distinct * 3 * inner * hidden * 2, "product": tokens * top_k * 6 * inner * hidden}
        roof = max(amounts, key=lambda name: amounts[name] / limits[name])
        report("moe", f"{tokens} tokens, {distinct} experts", us, amounts[roof], limits, roof)


SECTIONS = {
    "decode": decode,
    "prefill": prefill,
    "pointwise": pointwise,
    "sampling": sampling,
    "linear": linear,
    "moe": moe,
}


def main() -> None:
    """Run the sections that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", choices=[[], *SECTIONS], default=list(SECTIONS))
    parser.add_argument("--no-peers", action="store_true", help="do not look for FlashInfer")
    parser.add_argument("--json", type=Path, help="write the rows there")
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__)
    limits = ceilings()
    for name in arguments.sections:
        SECTIONS[name](limits, not arguments.no_peers)
        torch.cuda.empty_cache()
    if arguments.json:
        arguments.json.write_text(json.dumps({"ceilings": limits, "rows": ROWS}, indent=1))


if __name__ == "__main__":
    main()
