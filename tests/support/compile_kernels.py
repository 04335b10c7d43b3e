"""Compile every Triton kernel for a Hopper GPU on a machine without one, at the shapes of real models.

Run as a program. It calls the ops on small CPU tensors; each launch only compiles. One line a kernel: its name, the
shared memory that it needs, and whether the compiler put arrays in local memory. The interpreter checks what kernels
compute; this checks that they compile at all, fit the device, and wait where they are launched early.
"""

import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from isthmus_kernels import batch_invariance, early_launch
from isthmus_kernels.block_copy import triton_impl as block_copy
from isthmus_kernels.embedding import triton_impl as embedding
from isthmus_kernels.fp8_linear import triton_impl as fp8
from isthmus_kernels.linear import triton_impl as linear
from isthmus_kernels.lora import triton_impl as lora
from isthmus_kernels.moe import triton_impl as moe
from isthmus_kernels.paged_attention import triton_impl as attention
from isthmus_kernels.rms_norm import triton_impl as rms_norm
from isthmus_kernels.rope_kv_write import triton_impl as rope
from isthmus_kernels.sampling import triton_impl as sampling
from isthmus_kernels.silu_mul import triton_impl as silu
from isthmus_kernels.testing import paged_case

F32, BF16, E4M3 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
LIMIT = 227 << 10  # bytes of shared memory that one program may have
WAIT = "griddepcontrol.wait"
_NOT_BEFORE = re.compile(
    r"^\s*(?:@!?%p\d+\s+)?(st\.global|atom|red\.|cp\.async|bra|brx|ret|exit|call)\b",
    re.MULTILINE,
)


class Hopper:
    """What Triton asks a driver before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def attend(
    dtype: torch.dtype, kv_dtype: torch.dtype, heads: int, kv_heads: int, dim: int, window: int | None, ones: int = 1
) -> None:
    """`ones`: requests with one query, beside one with many."""
    case = paged_case(
        [*[1] * ones, 40],
        [*[20] * ones, 0],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        block_size=16,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
    # Rows enough for the widest plan, without their numbers.
    q = case.q.new_empty(1).expand(9000, heads, dim) if dtype == BF16 and dim == 128 else case.q
    attention.paged_attention(
        q,
        case.kv,
        case.block_tables,
        case.query_start_loc,
        case.seq_lens,
        scale=0.1,
        max_query_len=40,
        max_seq_len=40,
        window=window,
        scales=case.scales,
    )


def everything() -> None:
    for dtype, kv_dtype, heads, kv_heads, dim in (
        (BF16, BF16, 32, 8, 128),
        (BF16, BF16, 9, 3, 64),
        (BF16, BF16, 8, 4, 256),
        (F32, F32, 9, 3, 64),
        (F32, BF16, 9, 3, 64),
        (F32, F32, 4, 1, 128),
        (F32, F32, 2, 1, 256),
        (BF16, E4M3, 32, 8, 128),
        (BF16, E4M3, 9, 3, 64),
        (BF16, E4M3, 8, 4, 256),
        (F32, E4M3, 9, 3, 64),
    ):
        attend(dtype, kv_dtype, heads, kv_heads, dim, None)
    attend(BF16, BF16, 16, 1, 576, None)
    attend(BF16, BF16, 32, 8, 128, 128)
    # Larger batches decode by another plan.
    for heads, dim, window in ((32, 128, None), (32, 128, 128), (64, 64, None)):
        for kv_dtype in (BF16, E4M3):
            attend(BF16, kv_dtype, heads, 8, dim, window, ones=40)

    def some(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.ones(shape, dtype=dtype)

    tables = some(64, 64, dtype=F32)
    for kv_dtype in (BF16, E4M3):
        case = paged_case([16], [0], heads=32, kv_heads=8, head_dim=128, block_size=16, kv_dtype=kv_dtype)
        for norm in (None, some(128)):
            for heads in (32, 0):
                rope.rope_kv_write(
                    some(16, (heads + 16) * 128), case.positions, tables, tables, case.kv, case.slot_mapping,
                    num_heads=heads, q_norm=norm, k_norm=norm, scales=case.scales,
                )  # fmt: skip
    rms_norm.rms_norm(some(16, 4096), some(4096), 1e-5)
    rms_norm.add_rms_norm(some(16, 4096), some(16, 4096), some(4096), 1e-5)
    silu.silu_mul(some(16, 24_576))
    silu.gelu_tanh_mul(some(16, 24_576))
    embedding.embedding(some(64, 4096), torch.zeros(16, dtype=torch.int32), out=some(16, 4096))
    block_copy.block_copy(some(32, 2, 2, 16, 8, 128), [1, 2], [3, 4])
    for early in (True, False):
        early_launch.switch(torch.device("cpu"), early)
        for columns in (4096, 5120, 12_288, 1000):
            linear.pack(some(128, columns), None, BF16).apply(some(1, columns), None)
    # A weight with more outputs goes to cuBLAS from two rows on.
    for rows, outputs in ((1, 512), (4, 128)):
        linear.pack(some(outputs, 4096), None, BF16).apply(some(rows, 4096), None)
    for dtype, rank in ((BF16, 16), (BF16, 256), (F32, 64), (F32, 256)):
        for rows in (1, 600):
            a, b = some(4, 3, rank, 2048, dtype=dtype), some(4, rank, 3072, dtype=dtype)
            x, out = some(rows, 2048, dtype=dtype), some(rows, 3072, dtype=dtype)
            lora.lora(x, out, torch.ones(rows, dtype=torch.int32), a, b, (0, 2048, 2560))
    logits, ones = some(16, 151_936), some(16, dtype=F32)
    ids = torch.zeros(16, dtype=torch.int64)
    noise: dict[str, Any] = {"temperature": ones, "seeds": ids, "positions": ids}
    sampling.sample(logits)
    sampling.sample(logits, **noise)
    sampling.sample(logits, top_k=ids.int(), top_p=ones, min_p=ones, **noise)
    sampling.logprobs(logits, ids, 5)
    for dtype in (BF16, E4M3):
        # Memory that is reserved and never touched.
        gate_up, down = torch.empty(128, 1536, 2048, dtype=dtype), torch.empty(128, 2048, 768, dtype=dtype)
        scales = {"gate_up_scale": some(128, 1536, dtype=F32), "down_scale": some(128, 2048, dtype=F32)}
        for tokens in (1, 16, 256, 1024, 4096):
            weights, experts = moe.moe_route(some(tokens, 128), 8)
            moe.moe(some(tokens, 2048), weights, experts, gate_up, down, **(scales if dtype == E4M3 else {}))
    for rows in (1, 4):
        packed = fp8.pack_fp8(torch.empty(512, 4096, dtype=E4M3), some(512, dtype=F32), None, BF16)
        packed.apply(some(rows, 4096), None)
    batch_invariance.switch(torch.device("cpu"), True)
    for dtype, dim in ((BF16, 128), (F32, 64)):
        attend(dtype, dtype, 32, 8, dim, None)
        for rows in (1, 4096):
            linear.pack(some(4096, 4096, dtype=dtype), None, dtype).apply(some(rows, 4096, dtype=dtype), None)
    weights, experts = moe.moe_route(some(16, 128), 8)
    gate_up, down = torch.empty(128, 1536, 2048, dtype=BF16), torch.empty(128, 2048, 768, dtype=BF16)
    moe.moe(some(16, 2048), weights, experts, gate_up, down)


def rules_broken(ptx: str, early: bool) -> list[str]:
    """What a compiled kernel does against `isthmus_kernels.early_launch`: it waits in every program exactly where it is
    launched early, and neither writes nor leaves before. What it reads before, tests/gpu/test_early_launch.py tells."""
    if early != (WAIT in ptx):
        return ["is launched early and never waits" if early else "waits for nothing"]
    body = re.sub(r"//.*", "", ptx[ptx.index("{") :])
    return [f"{what} before the wait" for what in _NOT_BEFORE.findall(body[: body.index(WAIT)])] if early else []


def main() -> int:
    compiled: dict[int, Any] = {}
    wrong: list[str] = []
    run: Callable[..., Any] = jit.JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if id(kernel) not in compiled:
            compiled[id(kernel)] = kernel
            over = " TOO MUCH" if kernel.metadata.shared > LIMIT else ""
            print(f"{self.fn.__name__}: {kernel.metadata.shared} bytes of shared memory{over}", flush=True)
            broken = rules_broken(kernel.asm["ptx"], kernel.metadata.launch_pdl)
            wrong.extend(f"{self.fn.__name__} {what}" for what in broken)
        return kernel

    jit.JITFunction.run = compile_only
    driver.set_active(Hopper())
    everything()
    print(*wrong, sep="\n")
    return 1 if wrong or any(kernel.metadata.shared > LIMIT for kernel in compiled.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
