"""A decode step's kernels, started before those before them have ended, leave the bits that they leave one by one."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from isthmus_kernels import dependent_launch, dispatch
from isthmus_kernels.testing import paged_case

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, DIM, HIDDEN, INNER, LAYERS = 16, 4, 128, 2048, 6144, 6
CUDA, BF16 = "cuda", torch.bfloat16


@pytest.fixture(autouse=True)
def off_afterwards() -> Iterator[None]:
    yield
    dependent_launch.switch(torch.device("cuda", torch.cuda.current_device()), False)


class Decoder:
    """Layers on buffers that are reused at once, as an engine's are."""

    def __init__(self, rows: int) -> None:
        torch.manual_seed(5)
        self.case = paged_case(
            [1] * rows, list(range(3, 3 + 90 * rows, 90)), heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM,
            block_size=16, dtype=BF16, kv_dtype=BF16, device=CUDA,
        )  # fmt: skip
        shapes = ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), (HIDDEN, HEADS * DIM), (2 * INNER, HIDDEN), (HIDDEN, INNER)
        self.layers = [
            [dispatch.pack((torch.randn(shape, device=CUDA) / shape[1] ** 0.5).to(BF16)) for shape in shapes]
            for _ in range(LAYERS)
        ]
        self.head = dispatch.pack((torch.randn(5000, HIDDEN) / HIDDEN**0.5).to(CUDA, BF16))
        self.table = torch.randn(5000, HIDDEN).to(CUDA, BF16)
        self.norm = torch.rand(HIDDEN).to(CUDA, BF16)
        angles = torch.arange(4096)[:, None] * 10000.0 ** (-torch.arange(0, DIM, 2) / DIM)
        self.cos, self.sin = angles.cos().to(CUDA), angles.sin().to(CUDA)
        self.ids = torch.zeros(rows, dtype=torch.int32, device=CUDA)
        self.buffers = {
            name: torch.empty(rows, width, dtype=BF16, device=CUDA)
            for name, width in (
                ("residual", HIDDEN),
                ("hidden", HIDDEN),
                ("projected", HIDDEN),
                ("qkv", (HEADS + 2 * KV_HEADS) * DIM),
                ("context", HEADS * DIM),
                ("gate_up", 2 * INNER),
                ("inner", INNER),
                ("logits", 5000),
            )
        }
        self.drawn = torch.empty(rows, dtype=torch.int64, device=CUDA)
        self.noise = {
            "temperature": torch.ones(rows, device=CUDA),
            "top_p": torch.full((rows,), 0.9, device=CUDA),
            "seeds": torch.arange(rows, device=CUDA),
            "positions": torch.arange(rows, device=CUDA),
        }

    def step(self) -> None:
        case, b = self.case, self.buffers
        dispatch.embedding(self.table, self.ids, out=b["residual"])
        dispatch.rms_norm(b["residual"], self.norm, 1e-6, out=b["hidden"])
        for qkv, output, gate_up, down in self.layers:
            dispatch.linear(b["hidden"], qkv, out=b["qkv"])
            q = dispatch.rope_kv_write(
                b["qkv"], case.positions, self.cos, self.sin, case.kv, case.slot_mapping, num_heads=HEADS
            )
            dispatch.paged_attention(
                q,
                case.kv,
                case.block_tables,
                case.query_start_loc,
                case.seq_lens,
                scale=DIM**-0.5,
                max_query_len=1,
                max_seq_len=case.max_seq_len,
                out=b["context"].view(-1, HEADS, DIM),
            )
            dispatch.linear(b["context"], output, out=b["projected"])
            dispatch.add_rms_norm(b["projected"], b["residual"], self.norm, 1e-6, out=b["hidden"])
            dispatch.linear(b["hidden"], gate_up, out=b["gate_up"])
            dispatch.silu_mul(b["gate_up"], out=b["inner"])
            dispatch.linear(b["inner"], down, out=b["projected"])
            dispatch.add_rms_norm(b["projected"], b["residual"], self.norm, 1e-6, out=b["hidden"])
        dispatch.linear(b["hidden"], self.head, out=b["logits"])
        dispatch.sample(b["logits"], out=self.drawn, **self.noise)

    def replays(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Residual and draws of replays with other tokens each time, all else poisoned before each."""
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self.step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        found = []
        for seed in range(count):
            self.ids.copy_(torch.randint(0, 5000, self.ids.shape, generator=torch.Generator().manual_seed(seed)))
            for buffer in self.buffers.values():
                buffer.fill_(float("nan"))
            graph.replay()
            found.append((self.buffers["residual"].clone(), self.drawn.clone()))
        torch.cuda.synchronize()
        return found


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_same_bits(rows: int) -> None:
    decoder = Decoder(rows)
    device = decoder.drawn.device
    dependent_launch.switch(device, False)
    want = decoder.replays(20)
    dependent_launch.switch(device, True)
    got = decoder.replays(20)
    for (residual, drawn), (other, other_drawn) in zip(want, got, strict=True):
        assert not residual.isnan().any()
        assert torch.equal(residual, other) and torch.equal(drawn, other_drawn)
