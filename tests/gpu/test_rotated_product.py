"""The CUDA product of queries, keys and values on a card: against fp32, between poisoned memory, inside a graph."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from isthmus_kernels import cuda_library, dispatch
from isthmus_kernels.dispatch import Heads, Layout
from isthmus_kernels.linear import cuda_impl
from isthmus_kernels.testing import assert_close, poisoned

pytestmark = pytest.mark.gpu

BF16, DIM, POSITIONS = torch.bfloat16, 128, 9000


@pytest.fixture(autouse=True)
def usable() -> None:
    torch.manual_seed(7)
    assert cuda_library.library() is not None, "nvcc is among the development tools: install the kernels again"
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is made of instructions of compute capability 9.0")


def noise(rows: int, columns: int, scale: float = 1.0) -> Tensor:
    """A matrix between NaN on all sides."""
    wide = poisoned(rows + 2, columns + 16, dtype=BF16, device="cuda")
    inner = wide[1:-1, 8:-8]
    inner.copy_(torch.randn(rows, columns, device="cuda") * scale)
    return inner


def heads_of(
    rows: int,
    queries: int,
    kv_heads: int,
    *,
    block_size: int = 16,
    layout: Layout = "block-major",
    q_norm: bool = True,
    k_norm: bool = True,
) -> tuple[Heads, Tensor]:
    """Heads of `rows` tokens, one of which is not written, and the pool of NaN that they go to."""
    blocks = rows // block_size + 3
    shape = (2, 2, blocks) if layout == "layer-major" else (blocks, 2, 2)
    pool = poisoned(*shape, block_size, kv_heads, DIM, dtype=BF16, device="cuda")
    slots = torch.randperm(blocks * block_size, device="cuda")[:rows]
    slots[rows // 2] = -1
    angles = torch.rand(POSITIONS, DIM // 2, device="cuda") * 6.28
    norms = [(torch.rand(DIM, device="cuda") + 0.5).to(BF16) if on else None for on in (q_norm, k_norm)]
    heads = Heads(
        positions=torch.randint(0, POSITIONS, (rows,), device="cuda"),
        cos=angles.cos(),
        sin=angles.sin(),
        kv=dispatch.layer_view(pool, 1, layout),
        slot_mapping=slots,
        num_heads=queries,
        q_norm=norms[0],
        k_norm=norms[1],
        eps=1e-6,
        scales=None,
    )
    return heads, pool


def definition(x: Tensor, weight: Tensor, heads: Heads, pool: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    wide = torch.full(pool.shape, float("nan"), device="cuda")
    whole = replace(heads, kv=dispatch.layer_view(wide, 1, layout))
    return dispatch.write_heads(x.float() @ weight.float().T, whole).flatten(1), wide


@pytest.mark.parametrize("layout", ["block-major", "layer-major"])
@pytest.mark.parametrize(("q_norm", "k_norm"), [(True, True), (False, False), (False, True)])
@pytest.mark.parametrize(
    ("rows", "queries", "kv_heads", "columns", "block_size"),
    [
        (256, 2, 1, 64, 16),
        (1, 2, 1, 64, 16),
        (17, 4, 2, 128, 8),
        (129, 6, 3, 448, 16),
        (300, 32, 8, 4096, 16),
        (2049, 32, 4, 2048, 64),
        (5000, 8, 2, 64, 32),
    ],
)
def test_shapes(
    rows: int, queries: int, kv_heads: int, columns: int, block_size: int, q_norm: bool, k_norm: bool, layout: Layout
) -> None:
    heads, pool = heads_of(rows, queries, kv_heads, block_size=block_size, layout=layout, q_norm=q_norm, k_norm=k_norm)
    x, weight = noise(rows, columns), noise((queries + 2 * kv_heads) * DIM, columns, columns**-0.5)
    wide = poisoned(rows + 2, weight.shape[0] + 16, dtype=BF16, device="cuda")
    qkv = wide[1:-1, 8:-8]
    assert cuda_impl.rotated_refusal(x, weight, qkv, heads) is None
    cuda_impl.rotated_product(x, weight, qkv, heads)
    want, want_pool = definition(x, weight, heads, pool, layout)
    queried = qkv[:, : queries * DIM]
    assert_close(queried, want)
    queried.fill_(float("nan"))
    assert wide.isnan().all(), "written outside of the queries"
    written = ~want_pool.isnan()
    assert torch.equal(written, ~pool.isnan()), "bytes outside the slots were written"
    assert_close(pool[written], want_pool[written])


def test_bits_of_a_row_do_not_depend_on_the_others() -> None:
    heads, pool = heads_of(3000, 8, 2)
    x, weight = noise(3000, 1024), noise(12 * DIM, 1024, 1 / 32)
    whole = poisoned(3000, 12 * DIM, dtype=BF16, device="cuda")
    cuda_impl.rotated_product(x, weight, whole, heads)
    first_pool = pool.clone()
    for first in (1, 1700, 2999):
        part = poisoned(3000 - first, 12 * DIM, dtype=BF16, device="cuda")
        rest = replace(
            heads, positions=heads.positions[first:].clone(), slot_mapping=heads.slot_mapping[first:].clone()
        )
        cuda_impl.rotated_product(x[first:].clone(), weight, part, rest)
        assert torch.equal(part[:, : 8 * DIM], whole[first:, : 8 * DIM])
    torch.testing.assert_close(pool, first_pool, rtol=0, atol=0, equal_nan=True)


def test_the_op_takes_the_kernel_and_replays_it() -> None:
    rows = 2048
    heads, pool = heads_of(rows, 32, 8)
    x, weight = noise(rows, 4096), noise(48 * DIM, 4096, 1 / 64).contiguous()
    packed = dispatch.pack(weight)
    qkv = poisoned(rows, 48 * DIM, dtype=BF16, device="cuda")
    dispatch.linear_rope_kv_write(x, packed, heads, qkv=qkv)
    assert qkv[:, 32 * DIM :].isnan().all(), "the kernel leaves keys and values where they are; the two ops do not"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = dispatch.linear_rope_kv_write(x, packed, heads, qkv=qkv)
    once, once_pool = qkv.clone(), pool.clone()
    qkv.fill_(float("nan"))
    pool.fill_(float("nan"))
    graph.replay()
    assert q.data_ptr() == qkv.data_ptr()
    torch.testing.assert_close(qkv, once, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(pool, once_pool, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows", [17, 64, 256, 300, 2048])
@pytest.mark.parametrize(("outputs", "columns"), [(4096, 4096), (4096, 12_288), (2048, 768)])
def test_products_that_are_added(rows: int, outputs: int, columns: int) -> None:
    x, weight = noise(rows, columns), noise(outputs, columns, columns**-0.5).contiguous()
    residual, norm = noise(rows, outputs), (torch.rand(outputs, device="cuda") + 0.5).to(BF16)
    want = residual.float() + x.float() @ weight.float().T
    out = poisoned(rows, outputs, dtype=BF16, device="cuda")
    scratch = poisoned(rows, outputs, dtype=BF16, device="cuda")
    dispatch.linear_add_rms_norm(x, dispatch.pack(weight), residual, norm, 1e-6, scratch=scratch, out=out)
    assert scratch.isnan().all(), "nothing is between product and addition"
    assert_close(residual, want)
    assert_close(out, dispatch.rms_norm(residual, norm, 1e-6, impl="reference"))
