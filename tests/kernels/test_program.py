"""Recorded CPU ops: a replay on changed contents equals the ops themselves, and fails as they would."""

import pytest
import torch

from isthmus_kernels import dispatch as ops
from isthmus_kernels import dispatch_weights, native
from isthmus_kernels.testing import PagedCase, paged_case, poisoned

pytestmark = pytest.mark.skipif(not native.available(), reason="the compiled library is not built")

HEADS, KV_HEADS, DIM, HIDDEN = 4, 2, 32, 96


class Layer:
    """One decoder layer on buffers that are made once."""

    def __init__(self, tokens: int) -> None:
        torch.manual_seed(7)
        self.x, self.residual = torch.randn(tokens, HIDDEN), torch.randn(tokens, HIDDEN)
        self.hidden, self.out = poisoned(tokens, HIDDEN), poisoned(tokens, HIDDEN)
        self.fused = poisoned(tokens, (HEADS + 2 * KV_HEADS) * DIM)
        self.context = poisoned(tokens, HEADS, DIM)
        self.gated, self.inner = poisoned(tokens, 128), poisoned(tokens, 64)
        self.norm = torch.rand(HIDDEN)
        shapes = [(self.fused.shape[1], HIDDEN), (HIDDEN, HEADS * DIM), (128, HIDDEN), (HIDDEN, 64)]
        self.weights = [dispatch_weights.pack(torch.randn(shape) / 10, impl="cpu") for shape in shapes]
        angles = torch.arange(512)[:, None] * 10000.0 ** (-torch.arange(0, DIM, 2) / DIM)
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, case: PagedCase) -> None:
        qkv, output, gate_up, down = self.weights
        ops.add_rms_norm(self.x, self.residual, self.norm, 1e-5, out=self.hidden)
        ops.linear(self.hidden, qkv, out=self.fused)
        q = ops.rope_kv_write(
            self.fused, case.positions, self.cos, self.sin, case.kv, case.slot_mapping, num_heads=HEADS
        )
        ops.paged_attention(
            q,
            case.kv,
            case.block_tables,
            case.query_start_loc,
            case.seq_lens,
            scale=DIM**-0.5,
            max_query_len=case.max_query_len,
            max_seq_len=case.max_seq_len,
            out=self.context,
        )
        ops.linear(self.context.flatten(1), output, out=self.hidden)
        ops.linear(self.hidden, gate_up, out=self.gated)
        ops.silu_mul(self.gated, out=self.inner)
        ops.linear(self.inner, down, out=self.out)


def decode_case(seed: int) -> PagedCase:
    return paged_case([1, 1, 1], [40, 3, 90], heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, block_size=8, seed=seed)


def test_replay_follows_the_contents_of_its_buffers() -> None:
    layer, case = Layer(3), decode_case(1)
    with native.record() as program:
        layer.forward(case)
    assert len(program) == 8
    for step in range(3):
        layer.x.normal_()
        layer.residual.normal_()
        # Another position of the same table: one token less than before.
        case.seq_lens.sub_(1)
        case.positions.sub_(1)
        case.slot_mapping.copy_(case.block_tables[torch.arange(3), case.positions // 8] * 8 + case.positions % 8)
        x, residual, pool = layer.x.clone(), layer.residual.clone(), case.pool.clone()
        layer.forward(case)
        want, want_pool = layer.out.clone(), case.pool.nan_to_num()
        layer.x.copy_(x)
        layer.residual.copy_(residual)
        case.pool.copy_(pool)
        layer.out.fill_(float("nan"))
        program.run()
        assert torch.equal(layer.out, want), step
        assert torch.equal(case.pool.nan_to_num(), want_pool)


def test_replay_raises_what_the_op_raises() -> None:
    layer, case = Layer(3), decode_case(2)
    with native.record() as program:
        layer.forward(case)
    program.run()
    case.block_tables[1, 0] = -5
    with pytest.raises(IndexError, match=r"block_tables\[1\]"):
        program.run()
    case.slot_mapping[2] = 10**9
    with pytest.raises(IndexError, match=r"slot_mapping\[2\] = 1000000000"):
        program.run()


def test_program_keeps_its_memory() -> None:
    with native.record() as program:
        result = ops.silu_mul(torch.ones(2, 8))
    result.fill_(0)
    program.run()
    assert torch.equal(result, ops.silu_mul(torch.ones(2, 8)))


def test_what_is_recorded_does_not_run_yet() -> None:
    x, out = torch.ones(2, 8), torch.zeros(2, 4)
    with native.record() as program:
        ops.silu_mul(x, out=out)
        assert not out.any()
    assert not out.any() and len(program) == 1
    program.run()
    assert torch.equal(out, ops.silu_mul(x))


def test_nothing_is_recorded_outside_or_after_an_error() -> None:
    with pytest.raises(ValueError, match="x: expected"), native.record() as program:
        ops.silu_mul(torch.ones(2, 7))
    ops.silu_mul(torch.ones(2, 8))
    assert len(program) == 0
    program.run()
