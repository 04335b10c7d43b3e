"""Paged attention by FlashInfer, where somebody has installed it: against the reference, and ours against it."""

import pytest
import torch
from kernel_checks import attend, check_attention

from isthmus_kernels.testing import assert_close, paged_case

pytestmark = pytest.mark.gpu
pytest.importorskip("flashinfer", reason="FLASHINFER IS NOT INSTALLED: the peer was not compared with")

KINDS = {"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
SHAPE = {"heads": 32, "kv_heads": 8, "head_dim": 128, "block_size": 16}


@pytest.mark.parametrize(
    ("query_lens", "context_lens"), [([1] * 5, [700, 0, 31, 32, 4000]), ([300, 1, 0, 129], [500, 80, 3, 64])]
)
def test_batches(query_lens: list[int], context_lens: list[int]) -> None:
    torch.manual_seed(7)
    check_attention("flashinfer", "cuda", query_lens, context_lens, **SHAPE, **KINDS)
    case = paged_case(query_lens, context_lens, device="cuda", spare_tokens=2, **SHAPE, **KINDS)
    assert_close(attend(case, "cuda"), attend(case, "flashinfer"))


def test_what_it_does_not_take_is_refused() -> None:
    case = paged_case([1], [20], device="cuda", **SHAPE, **KINDS)
    with pytest.raises(ValueError, match="sinks"):
        attend(case, "flashinfer", sinks=torch.zeros(32, device="cuda"))
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="captured graph"), torch.cuda.graph(graph):
        attend(case, "flashinfer")
