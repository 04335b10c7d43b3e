"""Sums over ranks without a card: which of them go which way, and that ranks without GPUs stay with their library."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import peer_sums_process
import pytest
import torch
from torch import Tensor, distributed

from isthmus_kernels import dispatch
from isthmus_kernels.peer_sum import reference
from isthmus_kernels.peer_sum.cuda_impl import Inboxes
from isthmus_runtime.executor import peer_sums
from isthmus_runtime.executor.peer_sums import PeerSums
from isthmus_runtime.executor.ranks import Collected
from isthmus_runtime.layers.linear import Linear
from isthmus_runtime.layers.norm import Joint, RmsNorm

DEADLINE_S = 120.0
WIDTH = 64


class Library:
    """`models.shard.Collectives` of two ranks with the same numbers, which counts rows."""

    parts = False

    def __init__(self) -> None:
        self.rows = 0

    def sum(self, x: Tensor) -> None:
        self.rows += len(x)
        x.mul_(2)

    def sum_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        self.sum(x)
        dispatch.add_rms_norm(x, residual, weight, eps, out=out)

    def gather(self, part: Tensor) -> Tensor:
        return torch.stack([part, part])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each call of the kernel, which is done by its definition here, over two ranks with the same numbers."""
    made: list[int] = []

    def total(x: Tensor, inboxes: Inboxes) -> None:
        made.append(len(x))
        x.copy_(reference.peer_sum([x, x]))

    def normed(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor, inboxes: Inboxes) -> None:
        made.append(len(residual))
        own = x.sum(0).to(residual.dtype) if x.dim() == 3 else x
        out.copy_(reference.peer_sum_add_rms_norm([own, own], residual, weight, eps))

    monkeypatch.setattr(peer_sums, "peer_sum", total)
    monkeypatch.setattr(peer_sums, "peer_sum_add_rms_norm", normed)
    return made


def sums(library: Library, *, ranks: int = 2, limit: int = 1 << 40, blocks: int = 3, rows: int = 2) -> PeerSums:
    """With room for `rows` rows of bfloat16 a block."""
    inboxes = Inboxes(
        rank=0,
        addresses=(0,) * ranks,
        blocks=blocks,
        room=rows * WIDTH * 2,
        calls=torch.zeros(blocks, dtype=torch.int32),
        words=torch.zeros(2, dtype=torch.int32),
        patience_s=1.5,
    )
    return PeerSums(library, inboxes, limit)


def tensors(rows: int, width: int = WIDTH) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rows)
    x, residual = (torch.randn(rows, width).bfloat16() for _ in range(2))
    return x, residual, torch.randn(width).bfloat16()


def test_more_rows_than_have_room_go_in_several_calls(calls: list[int]) -> None:
    library = Library()
    for parts in (0, 3):
        x, residual, weight = tensors(20)
        expected, out = residual.clone(), torch.empty_like(residual)
        wide = torch.randn(parts, 20, WIDTH) if parts else x
        own = wide.sum(0).bfloat16() if parts else x
        normed = reference.peer_sum_add_rms_norm([own, own], expected, weight, 1e-6)
        sums(library).sum_add_rms_norm(wide, residual, weight, 1e-6, out)
        assert torch.equal(residual, expected) and torch.equal(out, normed)
    x = tensors(7)[0]
    before = x.clone()
    sums(library).sum(x)
    assert torch.equal(x, before * 2)
    assert calls == [6, 6, 6, 2, 6, 6, 6, 2, 6, 1] and not library.rows


@pytest.mark.parametrize(
    ("ranks", "limit", "rows", "by_library"),
    [
        (2, 1, 50, False),  # with two ranks nothing is too large
        (3, 2 * 4 * 128, 4, False),
        (3, 2 * 4 * 128, 5, True),
        (3, 1 << 40, 500, False),
    ],
)
def test_large_sums_of_many_ranks_are_the_librarys(
    calls: list[int], ranks: int, limit: int, rows: int, by_library: bool
) -> None:
    library = Library()
    made = sums(library, ranks=ranks, limit=limit)
    x, residual, weight = tensors(rows)
    made.sum_add_rms_norm(x.clone(), residual, weight, 1e-6, torch.empty_like(x))
    made.sum(x)
    assert (library.rows, sum(calls)) == ((2 * rows, 0) if by_library else (0, 2 * rows))


def test_rows_that_the_kernel_does_not_take_are_the_librarys(calls: list[int]) -> None:
    library = Library()
    for width in (12, 3 * WIDTH):  # 24 bytes; more than there is room for
        sums(library).sum(tensors(3, width)[0])
    assert library.rows == 6 and not calls


def test_the_host_ends_waiting_and_learns_who_was_waited_for() -> None:
    made = sums(Library())
    words = made._inboxes.words
    assert not made.overdue() and not words[0]
    made.give_up()
    assert words[0] == 1
    words[1] = 2
    assert made.overdue() == "rank 1 did not come to a sum within 1.5 s"


class InParts:
    """A weight whose products are made in two parts; `PartedWeight`."""

    nbytes = 0

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def apply(self, x: Tensor, out: Tensor | None) -> Tensor:
        raise AssertionError("the product was made as a whole")

    def apply_parts(self, x: Tensor) -> Tensor | None:
        half = x.shape[1] // 2
        pairs = ((x[:, :half], self.weight[:, :half]), (x[:, half:], self.weight[:, half:]))
        return torch.stack([a.float() @ b.float().T for a, b in pairs])

    def outputs_from(self, first: int) -> None:
        return None


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of one rank."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_product_goes_to_the_ranks_in_parts_where_they_add_them_up(calls: list[int]) -> None:
    torch.manual_seed(1)
    weight, x = torch.randn(WIDTH, 32), torch.randn(5, 32)
    residual, norm = torch.randn(5, WIDTH), RmsNorm(torch.randn(WIDTH), 1e-6, torch.float32)
    expected, normed = residual + 2 * (x @ weight.T), torch.empty(5, WIDTH)
    linear: Any = Linear(weight, None, torch.float32)
    linear._packed = type(linear._packed)(
        in_features=32, out_features=WIDTH, weight_dtype=torch.float32, weight=InParts(weight)
    )
    out, joint = (
        torch.empty(5, WIDTH),
        Joint(residual=residual, ranks=sums(Library()), after=None, norm=norm, normed=normed),
    )
    linear.join(x, out, joint)
    torch.testing.assert_close(residual, expected)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(expected, (WIDTH,), norm.weight, 1e-6))
    assert sum(calls) == 5
    group = distributed.group.WORLD
    assert group is not None
    for other in (replace(joint, ranks=Collected(group)), replace(joint, after=norm), replace(joint, norm=None)):
        with pytest.raises(AssertionError, match="as a whole"):
            linear.join(x, out, other)


@pytest.mark.slow
def test_ranks_without_gpus_stay_with_their_library(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, peer_sums_process.__file__, str(rank), str(tmp_path / "meeting")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for output in outputs:
        told = json.loads(output.splitlines()[-1])
        assert told["sums"] == "gloo" and told["total"] == 3.0
        assert told["opened"] is False
        assert "rank 0: it has no GPU; rank 1: it has no GPU" in told["log"]
