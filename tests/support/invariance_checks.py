"""Checks that rows do not depend on what they are computed beside, to the bit: in Triton's interpreter and on a card.

The device has been switched to `batch_invariance`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from isthmus_kernels import dispatch, dispatch_logits, dispatch_weights
from isthmus_kernels.linear.reference import linear as reference_linear
from isthmus_kernels.testing import PagedCase, assert_close, paged_case, poisoned


def check_linear(device: str, dtype: torch.dtype, outputs: int, columns: int, batches: Sequence[int]) -> None:
    weight = (torch.randn(outputs, columns) / columns**0.5).to(device, dtype)
    x = torch.randn(max(batches), columns).to(device, dtype)
    bias = torch.randn(outputs).to(device, dtype)
    packed = dispatch_weights.pack(weight, bias, impl="triton")
    alone = torch.cat([dispatch.linear(row[None], packed) for row in x])
    assert_close(alone, reference_linear(x, weight, bias))
    for batch in batches:
        first = len(x) - batch
        assert torch.equal(dispatch.linear(x[first:], packed), alone[first:]), f"{batch} rows"


def check_lora(device: str, dtype: torch.dtype, *, rows: int, inputs: int, widths: tuple[int, ...]) -> None:
    x, out = (torch.randn(rows, size).to(device, dtype) for size in (inputs, sum(widths)))
    a = (torch.randn(2, len(widths), 8, inputs) / inputs**0.5).to(device, dtype)
    b = torch.randn(2, 8, sum(widths)).to(device, dtype)
    slots = (torch.arange(rows, dtype=torch.int32) % 3).to(device)
    starts = tuple(sum(widths[:part]) for part in range(len(widths)))

    def some(first: int) -> Tensor:
        changed = out[first:].clone()
        dispatch.lora(x[first:], changed, slots[first:], a, b, starts, impl="triton")
        return changed

    whole = some(0)
    for count in (1, 2, 17):
        assert torch.equal(some(rows - count), whole[-count:]), f"{count} rows"


def part_of(case: PagedCase, parts: Sequence[tuple[int, int, int]], window: int | None) -> Tensor:
    """Attention of queries [begin, end) of requests of `case`, whose chunks are whole contexts; each part a request of
    a batch."""
    starts = case.query_start_loc.tolist()
    queries = [case.q[starts[row] + begin : starts[row] + end] for row, begin, end in parts]
    counts = torch.tensor([0, *(len(part) for part in queries)])
    device = case.q.device
    return dispatch.paged_attention(
        torch.cat(queries),
        case.kv,
        case.block_tables[[row for row, _, _ in parts]],
        counts.cumsum(0).int().to(device),
        torch.tensor([end for _, _, end in parts], dtype=torch.int32, device=device),
        scale=case.q.shape[2] ** -0.5,
        max_query_len=max(len(part) for part in queries),
        max_seq_len=case.max_seq_len,
        window=window,
        out=poisoned(sum(len(part) for part in queries), *case.q.shape[1:], dtype=case.q.dtype, device=device),
        impl=None if device.type == "cuda" else "triton",
    )


def check_attention(
    device: str, dtype: torch.dtype, *, lengths: Sequence[int], window: int | None, **shape: int
) -> None:
    case = paged_case(lengths, [0] * len(lengths), dtype=dtype, kv_dtype=dtype, device=device, seed=5, **shape)
    wholes = [(row, 0, length) for row, length in enumerate(lengths)]
    want = part_of(case, wholes, window)
    starts = case.query_start_loc.tolist()
    batches = [[whole] for whole in wholes]
    batches += [[(row, at, at + 1)] for row, length in enumerate(lengths) for at in {0, length // 2, length - 1}]
    batches.append([(row, length - 1, length) for row, length in enumerate(lengths)])
    # Prompts cut in two, at places of no tile.
    batches += [
        [(row, cut, length) for row, length in enumerate(lengths)] for cut in (1, 5) if all(n > cut for n in lengths)
    ]
    batches.append([(row, length // 3, length) for row, length in enumerate(lengths)])
    for batch in batches:
        got = part_of(case, batch, window)
        same = torch.cat([want[starts[row] + begin : starts[row] + end] for row, begin, end in batch])
        assert torch.equal(got, same), batch


def check_experts(
    device: str, dtype: torch.dtype, *, tokens: int, count: int, top_k: int, hidden: int, inner: int
) -> None:
    x = torch.randn(tokens, hidden).to(device, dtype)
    weights, experts = dispatch.moe_route(torch.randn(tokens, count).to(device, dtype), top_k, impl="triton")
    gate_up = (torch.randn(count, 2 * inner, hidden) / hidden**0.5).to(device, dtype)
    down = (torch.randn(count, hidden, inner) / inner**0.5).to(device, dtype)

    def some(rows: slice) -> Tensor:
        return dispatch.moe(x[rows], weights[rows], experts[rows], gate_up, down, impl="triton")

    whole = some(slice(0, tokens))
    for rows in (slice(0, 1), slice(tokens - 1, tokens), slice(3, tokens), slice(1, 20)):
        assert torch.equal(some(rows), whole[rows]), rows


def check_sampling(device: str, *, rows: int, vocab: int) -> None:
    logits = (torch.randn(rows, vocab) * 3).to(device)
    args = {
        "temperature": torch.rand(rows) + 0.5,
        "seeds": torch.arange(rows) * 1234567,
        "positions": torch.arange(rows),
        "top_p": torch.rand(rows),
    }
    args = {name: value.to(device) for name, value in args.items()}
    alone = [
        dispatch_logits.sample(
            logits[row, None], **{name: value[row, None] for name, value in args.items()}, impl="triton"
        )
        for row in range(rows)
    ]
    assert torch.equal(dispatch_logits.sample(logits, **args, impl="triton"), torch.cat(alone))
