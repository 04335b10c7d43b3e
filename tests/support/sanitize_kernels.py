"""Every GPU kernel once under each tool of NVIDIA's compute-sanitizer, at small sizes that reach all its branches.

    python tests/support/sanitize_kernels.py [--jobs 16] [--tools memcheck,racecheck] [--groups prefill,swap]

Needs a CUDA device and compute-sanitizer. One process for each tool and group of cases; a table at the end, and 1 if a
tool reported anything or a process failed. The cases compare with references, as everywhere.
"""

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from invariance_checks import check_attention as alike_attention
from invariance_checks import check_experts as alike_experts
from invariance_checks import check_linear as alike_linear
from invariance_checks import check_lora as alike_lora
from invariance_checks import check_sampling as alike_sampling
from kernel_checks import (
    check_attention,
    check_block_copy,
    check_embedding,
    check_fp8,
    check_gated,
    check_linear,
    check_logprobs,
    check_lora,
    check_moe,
    check_moe_of_8_bits,
    check_norms,
    check_rope,
    check_sample,
)
from torch import Tensor
from torch.nn import functional

from isthmus_kernels import batch_invariance, dispatch
from isthmus_kernels.kv_swap.cases import SwapCase
from isthmus_kernels.kv_swap.geometry import DIRECTIONS
from isthmus_kernels.linear import cuda_impl
from isthmus_kernels.testing import assert_close

ON = ("triton", "cuda")
BF16 = torch.bfloat16
KINDS = {"dtype": BF16, "kv_dtype": BF16}
NARROW = {"dtype": BF16, "kv_dtype": torch.float8_e4m3fn}
TOOLS: dict[str, tuple[str, ...]] = {
    "memcheck": (),
    "racecheck": (),
    "initcheck": (),
    # By default it follows fewer barriers than a ring of copies has.
    "synccheck": ("--num-cuda-barriers", "4096"),
}


# Kernels alone, at their own pace and at a given one, and beside the copy engine with staging between.
SWAPS: tuple[dict[str, Any], ...] = (
    {"engine_from": 1 << 30, "spare_multiprocessors": False, "stage_bytes": 0},
    {"engine_from": 1 << 30, "rows_from": 1 << 60},
    {"engine_from": 1 << 30, "spare_multiprocessors": False, "stage_from": 1, "stage_bytes": 1 << 18},
)


def _written(*size: int, **options: Any) -> Tensor:
    """`torch.empty`, written by a kernel. initcheck does not count what `cudaMemcpyBatchAsync` writes and reports the
    slots of staging, which it fills; sanitizer_patterns.cu shows the same of that copy alone."""
    return torch.full(size, 0x5A, **options)


@patch.object(torch, "empty", _written)
def _swaps(options: dict[str, Any]) -> None:
    for case in (
        SwapCase(name="layer-major", blocks=20),
        SwapCase(name="rows-of-656", dtype=torch.uint8, kv_heads=1, head_dim=656, block_size=16, blocks=12),
        SwapCase(name="one-head", kv_heads=4, heads=slice(1, 2), blocks=12),
    ):
        for direction in DIRECTIONS:
            buffers = case.build(direction, "cuda", pin=True)
            swap = dispatch.kv_swap(buffers.pool, buffers.host, impl="cuda", **options)
            move = swap.swap_in if direction == "in" else swap.swap_out
            move(buffers.pool_ids, buffers.host_ids).synchronize()
            buffers.check()
            swap.close()


def _gated_product(rows: int, width: int, columns: int) -> None:
    x = torch.randn(rows, columns, device="cuda", dtype=BF16)
    weight = torch.randn(2 * width, columns, device="cuda", dtype=BF16) * columns**-0.5
    out = torch.full((rows, width), float("nan"), device="cuda", dtype=BF16)
    cuda_impl.gated_product(x, weight, out)
    gate, up = (x.float() @ weight.float().T).chunk(2, dim=1)
    assert_close(out, functional.silu(gate) * up)


def _alike(check: Callable[..., None], *args: Any, **options: Any) -> None:
    """With the kernels of `--deterministic on`."""
    device = torch.device("cuda", torch.cuda.current_device())
    batch_invariance.switch(device, True)
    try:
        check("cuda", *args, **options)
    finally:
        batch_invariance.switch(device, False)


SMALL = {"heads": 8, "kv_heads": 2, "head_dim": 128, "block_size": 16}
TINY = {"heads": 2, "kv_heads": 1, "head_dim": 128, "block_size": 16}
GROUPS: dict[str, list[Callable[[], None]]] = {
    "prefill": [  # of the CUDA library
        partial(check_attention, "cuda", "cuda", [70, 3, 1], [30, 64, 20], **TINY, **KINDS),
        partial(check_attention, "cuda", "cuda", [140], [130], **TINY, **KINDS),
    ],
    "gated product": [partial(_gated_product, *shape) for shape in ((17, 264, 128), (300, 136, 192))],
    "attention": [
        partial(check_attention, *ON, [1, 1, 0, 1], [300, 0, 0, 700], **SMALL, **KINDS),
        partial(check_attention, *ON, [70, 3, 1], [30, 64, 20], **SMALL, **KINDS),
        partial(check_attention, *ON, [70, 3, 1, 1], [30, 64, 20, 700], **SMALL, **NARROW),
        partial(check_attention, *ON, [1, 20, 1], [190, 10, 0], window=30, softcap=2.0, sinks=True, **SMALL, **KINDS),
    ],
    "layers": [
        *(
            partial(
                check_rope, *ON, tokens=9, heads=14, kv_heads=3, head_dim=80, rotary=32, q_norm=True, k_norm=True,
                layout="block-major", **kinds,
            )
            for kinds in (KINDS, NARROW)
        ),
        partial(check_norms, *ON, 3, 1037, BF16, BF16),
        partial(check_gated, *ON, 3, 1037, BF16),
        partial(check_embedding, *ON, 50, 1037, BF16, BF16),
        partial(check_block_copy, *ON, 0, [1, 1, 4], [2, 3, 5]),
    ],
    "linear": [
        *(partial(check_linear, *ON, rows, 130, 700, BF16, with_bias=True) for rows in (1, 5)),
        *(partial(check_fp8, *ON, rows, 128, 512, with_bias=True) for rows in (1, 5)),
    ],
    "swap": [partial(_swaps, options) for options in SWAPS],
    "sampling": [
        *(
            partial(check_sample, *ON, 6, 9000, filters, coarse=False, holes=True, seed=1)
            for filters in ((), ("top_k", "top_p", "min_p"))
        ),
        partial(check_logprobs, *ON, 3, 5001, BF16),
    ],
    "moe of few": [partial(check_moe, *ON, 3, 4, 2, 64, 32, BF16), partial(check_moe, *ON, 9, 5, 4, 70, 40, BF16)],
    "moe of many": [partial(check_moe, *ON, 60, 4, 2, 64, 32, BF16)],
    "moe of most": [partial(check_moe, *ON, 330, 3, 1, 32, 16, BF16)],  # the largest tiles
    "moe of 8 bits": [partial(check_moe_of_8_bits, *ON, tokens, 4, 2, 128, 64) for tokens in (3, 40)],
    "adapters": [
        partial(check_lora, *ON, 9, 200, (48, 16, 16), 8, BF16),
        partial(check_lora, *ON, 70, 130, (96,), 16, BF16),
    ],
    "alike": [
        partial(_alike, alike_linear, BF16, 100, 328, [1, 3, 66]),
        partial(_alike, alike_attention, BF16, lengths=[1, 40, 70], window=None, **TINY),
        partial(_alike, alike_lora, BF16, rows=5, inputs=200, widths=(48, 16)),
        partial(_alike, alike_sampling, rows=3, vocab=5001),
    ],
    "moe alike": [partial(_alike, alike_experts, BF16, tokens=12, count=4, top_k=2, hidden=64, inner=32)],
}  # fmt: skip
SUMMARY = re.compile(r"ERROR SUMMARY: .*|RACECHECK SUMMARY: .*")


def _checked(pair: tuple[str, str], limit_s: float) -> tuple[str, bool, str]:
    """Run one group under one tool: what to print, whether all was well, the whole output."""
    tool, group = pair
    begin = time.monotonic()
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *TOOLS[tool]]
    try:
        done = subprocess.run(
            [*command, sys.executable, __file__, "--run", group],
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        return f"{tool:10} {group:14} did not end within {late.timeout:.0f} s", False, ""
    output = done.stdout + done.stderr
    found = SUMMARY.findall(output) or [f"no summary, exit status {done.returncode}"]
    well = done.returncode == 0
    text = f"{tool:10} {group:14} {'ok    ' if well else 'FAILED'} {time.monotonic() - begin:5.0f} s  {found[-1]}"
    return text, well, output


def main() -> int:
    """Run the pairs, print their summaries; of what failed, the last lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--limit", type=float, default=280, help="seconds a process may take")
    parser.add_argument("--run", choices=GROUPS, help="run the cases of a group, here")
    arguments = parser.parse_args()
    if arguments.run:
        torch.manual_seed(7)
        for case in GROUPS[arguments.run]:
            case()
        torch.cuda.synchronize()
        return 0
    pairs = [(tool, group) for tool in arguments.tools.split(",") for group in arguments.groups.split(",")]
    ok = True
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for done in as_completed([pool.submit(_checked, pair, arguments.limit) for pair in pairs]):
            text, well, output = done.result()
            print(text, flush=True)
            ok = ok and well
            if not well:
                print("\n".join(output.splitlines()[-25:]), flush=True)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
