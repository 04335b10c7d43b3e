"""Every Triton kernel in Triton's interpreter against its reference: small shapes that reach every branch.

Where a card is present, tests/gpu runs the same checks on it at real shapes, and these do not run.
"""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
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
    check_moe_of_4_bits,
    check_moe_of_8_bits,
    check_norm_of_parts,
    check_norms,
    check_rope,
    check_sample,
)

from isthmus_kernels import dispatch_logits
from isthmus_kernels.device import interpreted
from isthmus_kernels.moe.triton_routing import arrange
from isthmus_kernels.sampling import triton_filter

pytestmark = pytest.mark.skipif(not interpreted(), reason="kernels are compiled here: tests/gpu has these checks")

F32, BF16, FP8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
STORED = (
    (F32, BF16, "block-major"),
    (BF16, BF16, "layer-major"),
    (BF16, FP8, "block-major"),
    (F32, FP8, "layer-major"),
)
"""Data types of activations and of KV, and how KV lies."""


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)


def each_with(cases: Sequence[tuple[Any, ...]], others: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Every case with every other; while editing, every case with one of the others in turn."""
    return [
        pytest.param(*case, *other, marks=[pytest.mark.slow] if (i - j) % len(others) else [])
        for i, case in enumerate(cases)
        for j, other in enumerate(others)
    ]


@pytest.mark.parametrize(
    ("query_lens", "context_lens", "heads", "kv_heads", "dim", "block_size", "window", "dtype", "kv_dtype", "layout"),
    each_with(
        [
            ([1, 1, 0, 1], [130, 0, 0, 400], 8, 2, 64, 16, None),  # contexts that several programs share, and short
            ([1, 1], [300, 20], 3, 3, 32, 1, None),
            ([1], [1150], 4, 1, 32, 16, None),  # in fewer parts than there are programs for
            ([1, 1, 1], [200, 64, 9], 5, 1, 80, 8, 70),
            ([1, 40, 1, 7], [70, 0, 0, 70], 3, 1, 80, 8, None),
            ([70, 3], [30, 64], 4, 2, 32, 16, 33),
            ([17, 2], [0, 1], 8, 1, 96, 32, 1),
            ([130], [70], 2, 2, 64, 64, None),
            ([1] * 18, [0, 150, 31, 32] * 4 + [5, 64], 4, 2, 32, 16, None),  # enough requests for the plan of many
            ([1] * 17, [90] * 17, 4, 2, 32, 16, 40),
        ],
        STORED,
    ),
)
def test_attention(
    query_lens: list[int],
    context_lens: list[int],
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    layout: str,
) -> None:
    check_attention(
        "triton",
        "cpu",
        query_lens,
        context_lens,
        window=window,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        block_size=block_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        layout=layout,
    )


@pytest.mark.parametrize(
    ("softcap", "sinks", "window"), each_with([(2.0, False), (None, True), (3.0, True)], [(None,), (30,)])
)
def test_soft_cap_and_sinks(softcap: float | None, sinks: bool, window: int | None) -> None:
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 32, "block_size": 16}
    for kv_dtype in (F32, FP8):
        shape["kv_dtype"] = kv_dtype
        check_attention("triton", "cpu", [1, 20, 1], [90, 10, 0], window=window, softcap=softcap, sinks=sinks, **shape)


@pytest.mark.parametrize(
    ("q_norm", "k_norm", "heads", "dims", "dtype", "kv_dtype", "layout"),
    each_with(
        list(itertools.product((False, True), (False, True), (14, 0))),
        [
            (dims, *stored)
            for stored in (
                (F32, BF16, "block-major"),
                (BF16, F32, "layer-major"),
                (BF16, FP8, "block-major"),
                (F32, FP8, "layer-major"),
            )
            for dims in ((32, 32), (80, 32), (10, 6))
        ],
    ),
)
def test_rope(
    q_norm: bool,
    k_norm: bool,
    heads: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    layout: str,
) -> None:
    head_dim, rotary = dims
    check_rope(
        "triton",
        "cpu",
        tokens=9,
        heads=heads,
        kv_heads=3,
        head_dim=head_dim,
        rotary=rotary,
        dtype=dtype,
        kv_dtype=kv_dtype,
        q_norm=q_norm,
        k_norm=k_norm,
        layout=layout,
    )


@pytest.mark.parametrize("shape", [(0, 64), (1, 1), (3, 37), (5, 576), (2, 1000)])
@pytest.mark.parametrize(("dtype", "weight_dtype"), [(F32, F32), (BF16, F32), (BF16, BF16)])
def test_norms(shape: tuple[int, int], dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    check_norms("triton", "cpu", *shape, dtype, weight_dtype)


@pytest.mark.parametrize("shape", [(1, 5, 576), (2, 3, 37), (4, 2, 1000)])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_norm_of_sums_in_parts(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check_norm_of_parts("cpu", *shape, dtype)


@pytest.mark.parametrize("shape", [(0, 64), (1, 1), (3, 37), (2, 1500)])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_gated(shape: tuple[int, int], dtype: torch.dtype) -> None:
    check_gated("triton", "cpu", *shape, dtype)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("rows", "inputs", "widths", "rank"), [(1, 600, (40, 24, 24), 16), (35, 200, (150, 8), 8), (20, 48, (33,), 64)]
)
def test_lora(rows: int, inputs: int, widths: tuple[int, ...], rank: int, dtype: torch.dtype) -> None:
    check_lora("triton", "cpu", rows, inputs, widths, rank, dtype)


@pytest.mark.parametrize("block_dim", [0, 2])
@pytest.mark.parametrize(
    ("src", "dst"), [([], []), ([1], [0]), ([1, 1, 4], [2, 3, 5]), ([0, 1, 2], [1, 2, 3]), ([3, 4], [4, 3])]
)
def test_block_copy(block_dim: int, src: list[int], dst: list[int]) -> None:
    check_block_copy("triton", "cpu", block_dim, src, dst)


@pytest.mark.parametrize(
    ("filters", "vocab", "coarse", "holes"),
    each_with(
        [((),), (("top_k",),), (("top_p",),), (("min_p",),), (("top_k", "top_p", "min_p"),)],
        [(257, False, False), (257, True, True), (1, False, False)],
    ),
)
def test_sample(filters: tuple[str, ...], vocab: int, coarse: bool, holes: bool) -> None:
    check_sample("triton", "cpu", 6, vocab, filters, coarse=coarse, holes=holes, seed=vocab)


@pytest.mark.parametrize(
    ("filters", "shift"), each_with([({},), ({"top_k": 9},), ({"top_p": 0.9, "min_p": 0.05},)], [(0.0,), (-50.0,)])
)
def test_cold_rows_in_several_programs(filters: dict[str, float], shift: float) -> None:
    temperatures = [2.0**-149, 1e-40, 1e-38, 1e-30, 0.5, 3e38]
    logits = torch.randn(len(temperatures), 5000) + shift
    args = {"temperature": torch.tensor(temperatures), "seeds": torch.arange(6), "positions": torch.arange(6)}
    for name, value in filters.items():
        args[name] = torch.full((6,), value, dtype=torch.int32 if name == "top_k" else torch.float32)
    drawn = dispatch_logits.sample(logits, impl="triton", **args).tolist()
    assert drawn[:4] == logits[:4].argmax(dim=-1).tolist()
    assert drawn == dispatch_logits.sample(logits, impl="torch", **args).tolist()


@pytest.mark.parametrize(("filters", "seed"), each_with([((),), (("top_k", "top_p"),)], [(1,), (2,)]))
def test_sample_from_several_programs_a_row(filters: tuple[str, ...], seed: int) -> None:
    check_sample("triton", "cpu", 6, 9000, filters, coarse=False, holes=True, seed=seed)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7])
def test_filters_are_compiled_once_for_any_number_of_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles a kernel again for a pointer that is not at a multiple of 16 bytes: a stall of seconds."""
    launched: list[str] = []

    class Watched:
        def __init__(self, name: str) -> None:
            self._name, self._kernel = name, getattr(triton_filter, name)

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
            def launch(*args: Any, **options: Any) -> Any:
                launched.append(self._name)
                assert all(arg.data_ptr() % 16 == 0 for arg in args if isinstance(arg, torch.Tensor)), self._name
                return self._kernel[grid](*args, **options)

            return launch

    kernels = ("_peak", "_count", "_gather", "_draw")
    for name in kernels:
        monkeypatch.setattr(triton_filter, name, Watched(name))
    check_sample("triton", "cpu", rows, 257, ("top_k", "top_p"), coarse=False, holes=False, seed=rows)
    assert tuple(launched) == kernels


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_logprobs(dtype: torch.dtype) -> None:
    check_logprobs("triton", "cpu", 3, 5001, dtype)


@pytest.mark.parametrize(
    ("rows", "outputs", "columns"),
    each_with([(0,), (1,), (2,), (9,), (16,), (17,)], [(64, 1024), (50, 70), (130, 700)]),
)
def test_linear(rows: int, outputs: int, columns: int) -> None:
    check_linear("triton", "cpu", rows, outputs, columns, BF16, with_bias=outputs == 50)


@pytest.mark.parametrize("rows", [2, 16])
def test_linear_of_few_rows_and_outputs_has_its_columns_in_two_parts(rows: int) -> None:
    check_linear("triton", "cpu", rows, 70, 2200, BF16, with_bias=True)


@pytest.mark.parametrize("columns", [2560, 5120, 6144, 9000])
def test_linear_of_one_long_row_takes_two_outputs_a_program(columns: int) -> None:
    for outputs in (8, 11):
        check_linear("triton", "cpu", 1, outputs, columns, BF16, with_bias=outputs == 11)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "count", "top_k", "hidden", "inner"),
    [
        (0, 4, 2, 32, 16),
        (1, 8, 3, 64, 48),  # without a list
        (9, 5, 4, 70, 40),  # rows that the copy engine cannot read
        (40, 3, 1, 32, 130),
        (30, 8, 4, 64, 48),  # tiles of 16, 32 and 128 rows, full and at most half full
        (150, 3, 1, 64, 32),
        (330, 3, 1, 32, 16),
    ],
)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_moe(tokens: int, count: int, top_k: int, hidden: int, inner: int, dtype: torch.dtype) -> None:
    check_moe("triton", "cpu", tokens, count, top_k, hidden, inner, dtype)


@pytest.mark.parametrize("pairs", [1, 3000, 9000])  # of which an expert's are found by one program, or by three
def test_pairs_are_listed_by_expert(pairs: int) -> None:
    chosen = torch.randint(0, 6, (pairs, 1)).int()
    chosen[chosen == 4] = 1
    order, places, tiles = arrange(chosen, 6, 64)
    assert torch.equal(order.long(), chosen.view(-1).argsort(stable=True))
    assert torch.equal(order[places.long()].long(), torch.arange(pairs))
    counts = chosen.view(-1).bincount(minlength=6)
    starts = counts.cumsum(0) - counts
    want = [
        (expert, start + at, start + min(at + 64, count))
        for expert, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True))
        for at in range(0, count, 64)
    ]
    assert tiles[0, 0] == len(want)
    assert [tuple(row) for row in tiles[1 : 1 + len(want), :3].tolist()] == want


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "count", "hidden", "inner"), [(1, 8, 64, 48), (40, 3, 64, 128), (140, 3, 80, 32)])
def test_moe_of_8_bits(tokens: int, count: int, hidden: int, inner: int) -> None:
    check_moe_of_8_bits("triton", "cpu", tokens, count, 2, hidden, inner)


@pytest.mark.parametrize(
    ("tokens", "count", "top_k", "hidden", "inner"),
    [
        (0, 4, 2, 32, 32),
        (1, 8, 3, 288, 96),
        (9, 5, 4, 96, 160),
        (30, 4, 2, 128, 64),
        (150, 3, 1, 64, 32),
        (330, 3, 1, 160, 32),  # unpacked before it is multiplied
    ],
)
def test_moe_of_4_bits(tokens: int, count: int, top_k: int, hidden: int, inner: int) -> None:
    check_moe_of_4_bits("triton", "cpu", tokens, count, top_k, hidden, inner)


@pytest.mark.parametrize("rows", [0, 1, 2, 16])
@pytest.mark.parametrize(("outputs", "columns"), [(64, 1024), (48, 80), (144, 704), (16, 1040)])
def test_fp8(rows: int, outputs: int, columns: int) -> None:
    check_fp8("triton", "cpu", rows, outputs, columns, with_bias=outputs == 48)


@pytest.mark.slow
def test_every_kernel_compiles_for_a_card_that_is_not_here() -> None:
    program = Path(__file__).parents[1] / "support/compile_kernels.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(program.parent)
    done = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("count", "width"), [(11, 37), (5, 1500)])
@pytest.mark.parametrize(("dtype", "table_dtype"), [(F32, BF16), (BF16, BF16)])
def test_embedding(count: int, width: int, dtype: torch.dtype, table_dtype: torch.dtype) -> None:
    check_embedding("triton", "cpu", count, width, dtype, table_dtype)
