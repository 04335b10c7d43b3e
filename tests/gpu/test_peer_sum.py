"""Sums over ranks on cards: by their definition, bits equal on all, between delays, in graphs, and when one is lost.

Ranks on one card are streams with a share of its multiprocessors each; on two they are processes (peer_sum_process).
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from isthmus_kernels.peer_sum import reference
from isthmus_kernels.peer_sum.cuda_impl import EMPTY, Inboxes, inbox_bytes, peer_sum, peer_sum_add_rms_norm
from isthmus_kernels.testing import poisoned

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_kernels")]
EPS = 1e-6
WAIT_S = 240.0
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
two_cards = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


class OneCard:
    """Ranks that are streams of this process."""

    def __init__(self, ranks: int, room: int = 64 << 10, patience_s: float = 20.0) -> None:
        # All blocks of all ranks are to run at once.
        blocks = torch.cuda.get_device_properties("cuda").multi_processor_count // ranks
        size = inbox_bytes(ranks, blocks, room)
        self.memory = [torch.full((size,), EMPTY, dtype=torch.uint8, device="cuda") for _ in range(ranks)]
        addresses = tuple(one.data_ptr() for one in self.memory)
        self.inboxes = [
            Inboxes(
                rank=rank,
                addresses=addresses,
                blocks=blocks,
                room=room,
                calls=torch.zeros(blocks, dtype=torch.int32, device="cuda"),
                words=torch.zeros(2, dtype=torch.int32, pin_memory=True),
                patience_s=patience_s,
            )
            for rank in range(ranks)
        ]
        self.streams = [torch.cuda.Stream() for _ in range(ranks)]

    def sum(self, xs: Sequence[Tensor]) -> None:
        """Each rank's on its stream, after all that was done before, to their ends."""
        torch.cuda.synchronize()
        for x, stream, inboxes in zip(xs, self.streams, self.inboxes, strict=True):
            with torch.cuda.stream(stream):
                peer_sum(x, inboxes)
        torch.cuda.synchronize()

    def add_norm(
        self,
        xs: Sequence[Tensor],
        residuals: Sequence[Tensor],
        weight: Tensor,
        outs: Sequence[Tensor],
    ) -> None:
        """Likewise."""
        torch.cuda.synchronize()
        for x, residual, out, stream, inboxes in zip(xs, residuals, outs, self.streams, self.inboxes, strict=True):
            with torch.cuda.stream(stream):
                peer_sum_add_rms_norm(x, residual, weight, EPS, out, inboxes)
        torch.cuda.synchronize()

    def empty(self) -> bool:
        """Nothing is left in any inbox."""
        torch.cuda.synchronize()
        return all(bool((one == EMPTY).all()) for one in self.memory)


def between_nans(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """A matrix of noise between NaN on all sides."""
    wide = poisoned(rows + 2, width + 16, dtype=dtype, device="cuda")
    inner = wide[1:-1, 8:-8]
    inner.copy_(torch.randn(rows, width, device="cuda"))
    return inner


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def same(x: Tensor, y: Tensor) -> bool:
    """Number for number, NaN where NaN is."""
    return bool(((x == y) | (x.isnan() & y.isnan())).all())


def near(x: Tensor, y: Tensor) -> bool:
    """Norms of rows, whose sums may be added in another order."""
    return bool(torch.allclose(x.float(), y.float(), rtol=1e-2 if x.element_size() == 2 else 1e-5, atol=1e-5))


SHAPES = [
    (1, 5120),
    (1, 8),
    (3, 64),
    (7, 2560),
    (132, 4096),
    (133, 5120),
    (300, 1024),
    (17, 8192),
    (5, 16_384),
    (260, 264),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_sums_are_the_definition_on_every_rank(ranks: int, dtype: torch.dtype) -> None:
    card = OneCard(ranks, room=256 << 10)
    for rows, width in SHAPES:
        if rows > card.inboxes[0].rows(torch.empty(0, width, dtype=dtype)):
            continue
        xs = [between_nans(rows, width, dtype) for _ in range(ranks)]
        stream, weight = torch.randn(rows, width, device="cuda").to(dtype), torch.randn(width, device="cuda").to(dtype)
        expected_stream = stream.clone()
        total = reference.peer_sum(xs)
        normed = reference.peer_sum_add_rms_norm(xs, expected_stream, weight, EPS)
        streams = [between_nans(rows, width, dtype).copy_(stream) for _ in range(ranks)]
        outs = [poisoned(rows, width, dtype=dtype, device="cuda") for _ in range(ranks)]
        card.add_norm(xs, streams, weight, outs)
        for rank in range(ranks):
            assert torch.equal(streams[rank], expected_stream), (rows, width, rank)
            assert near(outs[rank], normed), (rows, width, rank)
            assert torch.equal(bits(outs[rank]), bits(outs[0])), (rows, width, rank)
        card.sum(xs)
        for rank in range(ranks):
            assert torch.equal(xs[rank], total), (rows, width, rank)
            xs[rank].fill_(float("nan"))
            around = xs[rank]._base
            assert around is not None and around.isnan().all(), "written outside of the result"
    assert card.empty()


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_bits_arrive(dtype: torch.dtype) -> None:
    """Those too by which an inbox says that nothing has."""
    card = OneCard(2)
    kind = torch.int16 if dtype.itemsize == 2 else torch.int32
    words = torch.randint(-(2**15), 2**15, (64, 512), device="cuda").to(kind)
    words[::2] = -1
    words[1::4] = 0
    words[5] = torch.iinfo(kind).min  # the other zero
    words[:, ::7] = 0x3C00 if kind is torch.int16 else 0x3C003C00
    first, second = words.view(dtype), words.flip(0).contiguous().view(dtype)
    expected = reference.peer_sum([first, second])
    xs = [first.clone(), second.clone()]
    card.sum(xs)
    assert same(xs[0], expected) and torch.equal(bits(xs[0]), bits(xs[1]))
    assert card.empty()


def test_bits_of_a_row_do_not_depend_on_the_others() -> None:
    card = OneCard(2, room=256 << 10)
    xs = [torch.randn(400, 4096, device="cuda").bfloat16() for _ in range(2)]
    stream, weight = torch.randn(400, 4096, device="cuda").bfloat16(), torch.ones(4096, device="cuda").bfloat16()

    def normed(first: int, last: int) -> Tensor:
        streams = [stream[first:last].clone() for _ in range(2)]
        outs = [torch.empty_like(one) for one in streams]
        parts = [x[first:last] for x in xs]
        card.add_norm(parts, streams, weight, outs)
        return outs[1]

    whole = normed(0, 400)
    for first, last in ((0, 1), (7, 20), (399, 400), (100, 300)):
        assert torch.equal(normed(first, last), whole[first:last])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_summands_in_parts(dtype: torch.dtype) -> None:
    card = OneCard(2, room=256 << 10)
    for rows, width in ((1, 5120), (1, 8), (16, 4096), (17, 4096), (133, 2560), (3, 10_240)):
        parts = [torch.randn(3, rows, width, device="cuda") for _ in range(2)]
        xs = [(one[0] + one[1] + one[2]).to(dtype) for one in parts]
        stream, weight = torch.randn(rows, width, device="cuda").to(dtype), torch.randn(width, device="cuda").to(dtype)
        expected = stream.clone()
        normed = reference.peer_sum_add_rms_norm(xs, expected, weight, EPS)
        for summands in (parts, xs, [parts[0], xs[1]]):
            streams = [stream.clone() for _ in xs]
            outs = [poisoned(rows, width, dtype=dtype, device="cuda") for _ in xs]
            card.add_norm(summands, streams, weight, outs)
            for rank in range(2):
                assert torch.equal(streams[rank], expected), (rows, width, rank)
                assert near(outs[rank], normed) and torch.equal(outs[rank], outs[0]), (rows, width, rank)
    assert card.empty()


@pytest.mark.parametrize("ranks", [2, 4])
def test_thousands_of_calls_between_delays(ranks: int) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    card = OneCard(ranks)
    sources = [torch.randn(64, 2560, device="cuda").bfloat16() for _ in range(ranks)]
    # What is called first is loaded, and allocations may wait for the device: not while a rank waits for another.
    torch.cuda._sleep(10)
    warm = [source[:1].clone() for source in sources]
    card.sum(warm)
    for _ in range(20):
        shapes = [(rng.choice((1, 1, 2, 9, 40, 64)), rng.choice((64, 1024, 2560))) for _ in range(150)]
        xs = [[source[:rows, :width].clone() for rows, width in shapes] for source in sources]
        torch.cuda.synchronize()
        for number in range(len(shapes)):
            for rank, (stream, inboxes) in enumerate(zip(card.streams, card.inboxes, strict=True)):
                with torch.cuda.stream(stream):
                    if rng.random() < 0.05:
                        torch.cuda._sleep(rng.randrange(300_000))
                    peer_sum(xs[rank][number], inboxes)
        torch.cuda.synchronize()
        for number, (rows, width) in enumerate(shapes):
            expected = reference.peer_sum([source[:rows, :width] for source in sources])
            assert all(torch.equal(x[number], expected) for x in xs), (number, rows, width)
    assert card.empty()


def test_graphs_replayed_in_any_order_between_plain_calls() -> None:
    card = OneCard(2)
    warm = [torch.zeros(1, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    card.sum(warm)
    rng = random.Random(5)
    graphs: list[list[torch.cuda.CUDAGraph]] = []
    held: list[list[list[Tensor]]] = []
    for rows in ((1, 3, 3), (64,), (2, 66)):
        held.append(
            [[torch.empty(count, 1024, dtype=torch.bfloat16, device="cuda") for count in rows] for _ in range(2)]
        )
        captured = []
        for stream, inboxes, xs in zip(card.streams, card.inboxes, held[-1], strict=True):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for x in xs:
                    peer_sum(x, inboxes)
            captured.append(graph)
        graphs.append(captured)
    for _ in range(300):
        which = rng.randrange(4)
        if which == 3:
            plain = [torch.randn(5, 512, device="cuda").bfloat16() for _ in range(2)]
            total = reference.peer_sum(plain)
            card.sum(plain)
            assert torch.equal(plain[0], total) and torch.equal(plain[1], total)
            continue
        for xs in held[which]:
            for x in xs:
                x.normal_()
        expected = [reference.peer_sum(pair) for pair in zip(*held[which], strict=True)]
        torch.cuda.synchronize()  # the graphs' streams do not wait for this one
        for stream, graph in zip(card.streams, graphs[which], strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for rank in range(2):
            assert all(torch.equal(x, total) for x, total in zip(held[which][rank], expected, strict=True))
    assert card.empty()


def processes(tmp_path: Path, *what: str) -> list[tuple[int, str]]:
    """Two ranks on two cards to their end: exit status and last line of each."""
    script = Path(__file__).parent / "peer_sum_process.py"
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "meeting"), *what],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ended = [process.communicate(timeout=WAIT_S)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [
        (process.returncode, (text.strip().splitlines() or [""])[-1])
        for process, text in zip(started, ended, strict=True)
    ]


@two_cards
@pytest.mark.parametrize("room", [16_384, 262_144])
def test_ten_thousand_calls_between_two_cards(tmp_path: Path, room: int) -> None:
    found = processes(tmp_path, "race", str(room))
    assert [status for status, _ in found] == [0, 0], found
    for _, line in found:
        told = json.loads(line)
        assert told["sums"] == "peer" and told["calls"] >= 10_000 and told["wrong"] == 0, told


@two_cards
@pytest.mark.parametrize("how", ["overdue", "given up"])
def test_who_waits_for_a_lost_rank_ends(tmp_path: Path, how: str) -> None:
    (status, line), _ = processes(tmp_path, how, "262144")
    assert status == 0, line
    told = json.loads(line)
    assert told["error"], told
    assert told["overdue"] == ("rank 1 did not come to a sum within 2 s" if how == "overdue" else ""), told
