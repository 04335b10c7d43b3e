"""A process that was restarted must not be taken for the one before it. Found by the simulator."""

from __future__ import annotations

import pytest

from isthmus_runtime.config import TransferConfig
from isthmus_runtime.executor.fake import FakeExecutor
from isthmus_runtime.interfaces.handoff import BlockRef, Failed, HandoffEvent, ReceiveJob, Released, SendJob
from isthmus_runtime.interfaces.transport import Piece, TransferResult
from isthmus_runtime.transfer.agent import TransferAgent
from isthmus_runtime.transfer.memory import MemoryFabric

JOB = ReceiveJob(
    request_id="r",
    attempt="a",
    skip_blocks=0,
    blocks=(BlockRef(0, 1, "k", 0),),
    num_tokens=4,
    peer_url="p",
    peer_epoch="p1",
    deadline_s=10.0,
)


@pytest.mark.parametrize(("epoch", "refused"), [("p1", False), ("p2", True), ("", False)])
def test_a_restarted_prefill_refuses_a_ticket_made_for_the_one_before(epoch: str, refused: bool) -> None:
    """Its predecessor may have acknowledged the drain of this attempt: decode's blocks may be somebody else's now."""
    fabric, events = MemoryFabric(), list[HandoffEvent]()
    agents = {}
    for name, mine in (("d", "d1"), ("p", epoch)):
        memory = FakeExecutor(4, 4).kv_region()
        backend = fabric.connect(name, mine)
        backend.prepare(memory, 1.0)
        cfg = TransferConfig(mode="memory", timeout_s=1.0)
        agents[name] = TransferAgent(backend, memory, cfg, events.append, lambda: 0.0, epoch=mine)
    ticket = agents["d"].open_receive(JOB, 0.0)
    assert ticket.peer_epoch == "p1"
    agents["p"].open_send(SendJob(request_id="r", attempt="a", ticket=ticket, deadline_s=10.0), 0.0)
    assert [type(e) for e in events] == ([Failed, Released] if refused else [])
    if refused:
        assert isinstance(events[0], Failed)
        assert "p2" in events[0].reason and "restarted" in events[0].reason


def test_the_memory_fabric_does_not_write_to_addresses_of_a_process_that_is_gone() -> None:
    fabric = MemoryFabric()
    memories = [FakeExecutor(4, 4).kv_region() for _ in range(3)]
    old = fabric.connect("d", "d1")
    old.prepare(memories[0], 1.0)
    ticket = old.reserve(JOB, "fake")
    fabric.connect("d", "d2").prepare(memories[1], 1.0)
    sender = fabric.connect("p", "p1")
    sender.prepare(memories[2], 1.0)
    results: list[TransferResult] = []
    address = ticket.pool_base + ticket.block_stride
    piece = Piece(block_id=1, key="k", nbytes=memories[2].block_bytes, remote_address=address)
    sender.write("a", ticket, [piece], None, 1.0, results.append)
    fabric.advance(1.0)
    assert [r.ok for r in results] == [False]
    assert results[0].reason == "decode is gone"
