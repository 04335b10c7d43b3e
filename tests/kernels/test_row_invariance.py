"""On CPU a row's result is the same bits alone and in any batch, in any chunk, with any number of threads.

Every instruction set of the library that this machine has is tried: each has its own order of additions.
"""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from isthmus_kernels import dispatch, dispatch_logits, dispatch_weights, native
from isthmus_kernels.testing import PagedCase, paged_case, poisoned, threads

pytestmark = pytest.mark.skipif(not native.available(), reason="the compiled library is not built")

LEVELS = ["base", "avx2", "avx512"]
HERE = LEVELS[: LEVELS.index(native.level() or "base") + 1]
DTYPES = [torch.float32, torch.bfloat16]
KV_DTYPES = [*DTYPES, torch.float8_e4m3fn]
BATCHES = [1, 2, 3, 5, 6, 7, 11, 12, 13, 24, 25, 40, 97, 193]


@pytest.fixture(params=[*HERE, *(["avx512 by pairs"] if native.multiplies_bf16() else [])])
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    level = request.param.split()[0]
    monkeypatch.setattr(native, "level", lambda: level)
    monkeypatch.setattr(native, "prefers_pairs", lambda: request.param == "avx512 by pairs")
    native.entry.cache_clear()
    yield request.param
    native.entry.cache_clear()


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("shape", [(80, 64), (33, 1201), (200, 576)])
def test_linear(dtype: torch.dtype, weight_dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight, bias = randn(*shape, dtype=weight_dtype), randn(shape[0], dtype=weight_dtype, seed=1)
    x = randn(max(BATCHES), shape[1], dtype=dtype, seed=2)
    for packed in (dispatch_weights.pack(weight, bias, dtype=dtype), dispatch_weights.pack(weight, dtype=dtype)):
        alone = torch.cat([dispatch.linear(row[None], packed) for row in x])
        for count in (1, 3):
            with threads(count):
                for batch in BATCHES:
                    first = len(x) - batch
                    assert torch.equal(dispatch.linear(x[first:], packed), alone[first:]), (batch, count)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, (80, 32, 32)), (601, (33,)), (72, (1200, 7))])
def test_lora(dtype: torch.dtype, shape: tuple[int, tuple[int, ...]]) -> None:
    inputs, widths = shape
    rows, starts = max(BATCHES), tuple(sum(widths[:part]) for part in range(len(widths)))
    x, out = randn(rows, inputs, dtype=dtype), randn(rows, sum(widths), dtype=dtype, seed=1)
    a, b = randn(2, len(widths), 8, inputs, dtype=dtype, seed=2), randn(2, 8, sum(widths), dtype=dtype, seed=3)
    slots = torch.arange(rows, dtype=torch.int32) % 3
    alone = out.clone()
    for row in range(rows):
        one = slice(row, row + 1)
        dispatch.lora(x[one], alone[one], slots[one], a, b, starts)
    for count in (1, 3):
        with threads(count):
            for batch in BATCHES:
                some = slice(rows - batch, None)
                together = out[some].clone()
                dispatch.lora(x[some], together, slots[some], a, b, starts)
                assert torch.equal(together, alone[some]), (batch, count)


def part_of(case: PagedCase, parts: Sequence[tuple[int, int, int]], window: int | None) -> Tensor:
    """Attention of queries [begin, end) of requests of `case`, whose chunks are whole contexts; each part a request of
    a batch. Blocks that a window has passed are in no table."""
    starts = case.query_start_loc.tolist()
    block_size = case.kv.shape[2]
    queries = [case.q[starts[row] + begin : starts[row] + end] for row, begin, end in parts]
    tables = case.block_tables[[row for row, _, _ in parts]].clone()
    used = set(case.block_tables.flatten().tolist())
    nan_block = next(block for block in range(case.kv.shape[0]) if block not in used)
    if window is not None:
        for table, (_, begin, _) in zip(tables, parts, strict=True):
            table[: max(0, begin + 1 - window) // block_size] = nan_block
    counts = torch.tensor([0, *(len(part) for part in queries)])
    return dispatch.paged_attention(
        torch.cat(queries),
        case.kv,
        tables,
        counts.cumsum(0).int(),
        torch.tensor([end for _, _, end in parts], dtype=torch.int32),
        scale=case.q.shape[2] ** -0.5,
        max_query_len=max(len(part) for part in queries),
        max_seq_len=case.max_seq_len,
        window=window,
        softcap=3.0,
        sinks=torch.linspace(-2, 2, case.q.shape[1]),
        scales=case.scales,
        out=poisoned(sum(len(part) for part in queries), *case.q.shape[1:], dtype=case.q.dtype),
        impl="cpu",
    )


@pytest.mark.usefixtures("instruction_set")
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.sampled_from([1, 5, 64, 65, 127, 128, 200, 300, 520]), min_size=1, max_size=3),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 7, 9, 70]),
    head_dim=st.sampled_from([1, 8, 16, 20, 32, 64, 72, 80, 99, 128]),
    block_size=st.sampled_from([1, 16, 48, 64]),
    dtype=st.sampled_from(DTYPES),
    kv_dtype=st.sampled_from(KV_DTYPES),
    window=st.none() | st.integers(1, 400),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_attention(
    lengths: list[int],
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    window: int | None,
    seed: int,
    data: st.DataObject,
) -> None:
    if group == 70:  # or the plainest instruction set takes seconds for one case
        kv_heads, lengths = 1, [min(length, 200) for length in lengths]
    case = paged_case(
        lengths,
        [0] * len(lengths),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        seed=seed,
    )
    wholes = [(row, 0, length) for row, length in enumerate(lengths)]
    want = part_of(case, wholes, window)
    starts = case.query_start_loc.tolist()
    batches = [[whole] for whole in wholes]
    # One token after another from some point on, as decode does; and any chunks of any requests together.
    batches += [[(row, at, at + 1)] for row, length in enumerate(lengths) for at in {0, length // 2, length - 1}]
    batches.append([(row, length - 1, length) for row, length in enumerate(lengths)])
    for _ in range(4):
        batch = []
        for row in data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=6)):
            begin = data.draw(st.integers(0, lengths[row] - 1))
            end = data.draw(st.integers(begin + 1, lengths[row]))
            batch.append((row, begin, end))
        batches.append(batch)
    for number, batch in enumerate(batches):
        with threads(1 + number % 3):
            got = part_of(case, batch, window)
        same = torch.cat([want[starts[row] + begin : starts[row] + end] for row, begin, end in batch])
        assert torch.equal(got, same), batch


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_works_row_by_row(dtype: torch.dtype) -> None:
    width, most = 100, 200
    weight = randn(width, dtype=dtype)
    table, ids = randn(50, width, dtype=dtype), torch.arange(most, dtype=torch.int32) % 50
    x, residual = randn(most, width, dtype=dtype, seed=1), randn(most, width, dtype=dtype, seed=2)

    def embedded(rows: slice) -> Tensor:
        return dispatch.embedding(table, ids[rows], scale=3.0, out=poisoned(len(ids[rows]), width, dtype=dtype))

    ops: dict[str, Callable[[slice], Tensor]] = {
        "embedding": embedded,
        "rms_norm": lambda rows: dispatch.rms_norm(x[rows], weight, 1e-5),
        "add_rms_norm": lambda rows: dispatch.add_rms_norm(x[rows], residual[rows].clone(), weight, 1e-5),
        "silu_mul": lambda rows: dispatch.silu_mul(x[rows]),
        "gelu_tanh_mul": lambda rows: dispatch.gelu_tanh_mul(x[rows]),
    }
    for name, run in ops.items():
        alone = torch.cat([run(slice(row, row + 1)) for row in range(most)])
        for count in (1, 3):
            with threads(count):
                assert torch.equal(run(slice(0, most)), alone), name
                assert torch.equal(run(slice(3, 20)), alone[3:20]), name


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_rope_and_kv(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    tokens, heads, kv_heads, dim = 150, 3, 1, 64
    qkv = randn(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    angles = torch.arange(512)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    norm = randn(dim, dtype=dtype, seed=3)

    def run(rows: slice, kv: Tensor, scales: Tensor | None) -> Tensor:
        at, norms = torch.arange(tokens)[rows], {"q_norm": norm, "k_norm": norm}
        return dispatch.rope_kv_write(
            qkv[rows].clone(), at, angles.cos(), angles.sin(), kv, at, num_heads=heads, scales=scales, **norms
        )

    together, apart = (poisoned(10, 2, 16, kv_heads, dim, dtype=kv_dtype) for _ in range(2))
    scaled = kv_dtype not in DTYPES
    scales, own_scales = (poisoned(10, 2, 16, kv_heads) if scaled else None for _ in range(2))
    with threads(3):
        q = run(slice(0, tokens), together, scales)
    assert torch.equal(q, torch.cat([run(slice(row, row + 1), apart, own_scales) for row in range(tokens)]))
    assert torch.equal(together.float().nan_to_num(), apart.float().nan_to_num())
    if scales is not None and own_scales is not None:
        assert torch.equal(scales.nan_to_num(), own_scales.nan_to_num())


@pytest.mark.parametrize("filters", [(), ("top_k",), ("top_p", "min_p")])
def test_sampling(filters: tuple[str, ...]) -> None:
    logits = randn(70, 1000) * 3
    args = {
        "temperature": torch.rand(70) * 2,
        "seeds": torch.arange(70) * 1234567,
        "positions": torch.arange(70),
        "top_k": torch.arange(70, dtype=torch.int32),
        "top_p": torch.rand(70),
        "min_p": torch.rand(70) / 10,
    }
    args = {name: value for name, value in args.items() if name in ("temperature", "seeds", "positions", *filters)}
    alone = [
        dispatch_logits.sample(logits[row, None], **{name: value[row, None] for name, value in args.items()}).item()
        for row in range(70)
    ]
    with threads(3):
        assert dispatch_logits.sample(logits, **args).tolist() == alone
