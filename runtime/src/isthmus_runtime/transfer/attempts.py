"""What one attempt's transfer holds beside its leg: a sending one its blocks, a receiving one its record. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..interfaces.handoff import BlockRef, FetchJob, PromptResult, ReceiveJob, SendJob
from ..interfaces.transport import Piece
from ..kv.keys import keys_digest
from ..protocol.ticket import PrefillRecord, Ticket
from .leg import Leg
from .places import Place, block_at, gaps
from .record import Expected, mismatch, unpack_record

_ENDED_KEPT = 65536


def ticket_problem(job: SendJob, layout_digest: str, epoch: str) -> str:
    """Why nothing can be sent for the job's ticket by the process of `epoch`, whose KV has `layout_digest`; or ""."""
    ticket = job.ticket
    if ticket.layout_digest != layout_digest:
        return (
            f"KV layouts differ: decode has {ticket.layout_digest}, this prefill has {layout_digest}; "
            "run both with the same model, dtype, block size and layout"
        )
    if ticket.peer_epoch and epoch and ticket.peer_epoch != epoch:
        return f"decode reserved for prefill process {ticket.peer_epoch}; restarted since, this is {epoch}"
    if ticket.attempt != job.attempt:
        return f"ticket is of attempt {ticket.attempt}, the call of attempt {job.attempt}"
    return ""


@dataclass(slots=True)
class Sending:
    """Prefill's side."""

    leg: Leg
    ticket: Ticket
    blocks: dict[Place, BlockRef] = field(default_factory=dict)
    """What was given so far."""
    result: PromptResult | None = None
    """Set when every block was given."""
    targets: dict[Place, int] = field(init=False)
    """The receiver's blocks, where the transport writes into them."""

    def __post_init__(self) -> None:
        self.targets = block_at(self.ticket)

    def give(self, blocks: Sequence[BlockRef], nbytes: int) -> tuple[tuple[tuple[Place, Piece], ...], str]:
        """The pieces that these blocks, of `nbytes` each, make; or why one of them cannot be sent."""
        targets, skip = self.targets, self.ticket.skip_blocks
        base, stride = self.ticket.pool_base, self.ticket.block_stride
        pieces: list[tuple[Place, Piece]] = []
        for block in blocks:
            index = block.index
            if index < skip:
                continue
            at = (block.group, index)
            if targets and at not in targets:
                return (), (
                    f"prompt block {index} of KV group {block.group} has no place: decode reserved "
                    f"{len(targets)} after skipping {skip}"
                )
            address = base + targets[at] * stride if targets else 0
            pieces.append((at, Piece(block.block_id, block.key, nbytes, 0, address)))
            self.blocks.setdefault(at, block)
        return tuple(pieces), ""

    def gap(self) -> str:
        """What is missing of the blocks; empty when all were given."""
        missing = sorted(self.targets.keys() - self.blocks.keys()) or gaps(self.blocks)
        if not missing:
            return ""
        group, index = missing[0]
        return (
            f"{len(self.blocks)} blocks were given, {len(missing)} are missing, the first of them prompt block "
            f"{index} of KV group {group}; all or none are sent"
        )

    def moved(self) -> list[BlockRef]:
        """The blocks in the order of the record's key digest and checksum."""
        return [self.blocks[at] for at in sorted(self.blocks)]

    def record(self, block_bytes: int, crc: int | None) -> PrefillRecord:
        """What is written last, of the blocks that were really moved."""
        result = self.result
        assert result is not None, f"attempt {self.leg.attempt} has no result yet"
        first = result.first_logprobs
        return PrefillRecord(
            attempt=self.leg.attempt,
            num_tokens=result.num_tokens,
            first_token=result.first_token,
            first_logprobs=None if first is None else (first.token_id, first.logprob, first.top),
            key_digest=keys_digest([block.key for block in self.moved()]),
            block_bytes=block_bytes,
            crc=crc,
        )


@dataclass(slots=True)
class Receiving:
    """Decode's side."""

    leg: Leg
    job: ReceiveJob
    raw_record: bytes | None = None
    """What came."""
    record: PrefillRecord | None = None
    """The same, once it was read."""

    def pieces(self, nbytes: int) -> list[Piece]:
        """What is to be read, blocks of `nbytes` each."""
        return [Piece(block_id=block.block_id, key=block.key, nbytes=nbytes) for block in self.job.blocks]

    def check(self, block_bytes: int, vocab_size: int, crc: int | None) -> str:
        """Read the record; why the blocks with checksum `crc` (None: not made) are not to be used, or ""."""
        if self.raw_record is None:
            return "no record came with the blocks"
        try:
            record = unpack_record(self.raw_record)
        except ValueError as error:
            return str(error)
        expected = Expected(
            attempt=self.job.attempt,
            num_tokens=self.job.num_tokens,
            keys=tuple(block.key for block in self.job.blocks),
            block_bytes=block_bytes,
            vocab_size=vocab_size,
        )
        self.record = record
        if problem := mismatch(record, expected):
            return problem
        if crc is not None and record.crc is None:
            return "record has no checksum; set --transfer-crc on prefill as well"
        if crc is not None and record.crc != crc:
            return f"blocks have CRC-32 {crc:08x}, the record says {record.crc:08x}"
        return ""


@dataclass(slots=True)
class Fetching:
    """Takes the beginning of a prompt from a storage pool."""

    leg: Leg
    job: FetchJob
    found_bytes: int = 0

    def pieces(self, nbytes: int) -> list[Piece]:
        """What is to be read, blocks of `nbytes` each."""
        return [Piece(block_id=block.block_id, key=block.key, nbytes=nbytes) for block in self.job.blocks]


class Ended:
    """The latest attempts that have ended: a late message cannot bring one of them back."""

    def __init__(self) -> None:
        self._attempts: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, attempt: str) -> bool:
        return attempt in self._attempts

    def note(self, attempt: str) -> None:
        """It has ended."""
        self._attempts[attempt] = None
        self._attempts.move_to_end(attempt)
        while len(self._attempts) > _ENDED_KEPT:
            self._attempts.popitem(last=False)
