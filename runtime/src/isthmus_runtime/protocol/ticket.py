"""What decode and prefill tell each other of a transfer: where KV goes, what was written, and whether more may come."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from .base import Wire

ATTEMPT = r"^[!-~]{0,128}$"
"""An attempt's name is part of a line where processes greet each other."""
SESSION = r"^[!-~]{0,261}$"
GREETING = r"^([!-~]{1,255}:[0-9]{1,5}(/[!-~]{1,128})?)?$"
MAPPING = r"^([0-9a-f-]{36}/[0-9a-f]{32}/[0-9a-f]{128}/[0-9]{1,20}/[0-9]{1,20})?$"
_Word = Annotated[int, Field(ge=0, lt=2**64)]
"""An address or a size in a peer's memory."""


class ReservedBlocks(Wire):
    """Decode's blocks for a run of neighbouring prompt blocks of one KV group."""

    group: int = Field(ge=0, lt=2**31)
    first: int = Field(ge=0, lt=2**31)
    """Prompt block index, 0-based, that the first of `block_ids` is for."""
    block_ids: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...]


class RankPool(Wire):
    """Direct: the pool of one of decode's ranks but the first. Its blocks are as far apart as those of the first."""

    session: str = Field(pattern=SESSION)
    pool_base: _Word
    mapping: str = Field(default="", pattern=MAPPING)
    """As `Ticket.mapping`."""


class Ticket(Wire):
    """What decode tells prefill, through the router, so that prefill can send. Opaque to the router."""

    mode: Literal["direct", "store", "memory"]
    attempt: str = Field(pattern=ATTEMPT)
    layout_digest: str
    skip_blocks: int = Field(default=0, ge=0, lt=2**31)
    """Leading full blocks decode already has in its own prefix cache: not sent."""
    peer_epoch: str = ""
    """The prefill process that may write. One that was started since then knows of no drain it acknowledged before,
    and refuses. Empty: not checked."""
    session: str = Field(default="", pattern=SESSION)
    """Direct: TransferEngine peer id `host:port`."""
    greeting: str = Field(default="", pattern=GREETING)
    """Direct: `host:port/WORD`. The process that reserved says its epoch there to whoever says the word, its signature
    of this ticket (transfer/tickets.py)."""
    epoch: str = ""
    """Direct: of the process that reserved. Nothing is written to another one at the same address."""
    pool_base: _Word = 0
    """Direct: address of block 0 of decode's pool."""
    block_stride: _Word = 0
    """Direct: bytes between two blocks."""
    blocks: tuple[ReservedBlocks, ...] = ()
    """Direct: of each KV group, the prompt blocks that decode takes: from skip_blocks on, and of a sliding group only
    what the next token looks back at."""
    record_address: _Word = 0
    record_capacity: _Word = 0
    """Direct: where the record is written, last, and how many bytes it may take."""
    mapping: str = Field(default="", pattern=MAPPING)
    """Direct over NVLink: how processes of the host map decode's pool (transfer/peer_memory.py). Empty: it is not, and
    is not written: engines and routers of an older version refuse a field that they do not know, and the signature is
    of what is written."""

    ranks: Annotated[tuple[RankPool, ...], Field(max_length=63)] = ()
    """Direct: the pools of decode's other ranks, by rank; `blocks` are those of all. Not written where there is one."""

    @model_serializer(mode="wrap")
    def _known_to_older(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        written: dict[str, object] = write(self)
        for name in ("mapping", "ranks"):
            if not getattr(self, name):
                written.pop(name, None)
        return written


class PrefillRecord(Wire):
    """Written last by prefill; decode starts only when it verifies."""

    attempt: str
    num_tokens: int
    """Prompt tokens whose KV was written."""
    first_token: int
    first_logprobs: tuple[int, float, tuple[tuple[int, float], ...]] | None = None
    """(token id, logprob, top) of the first token when logprobs were asked for."""
    key_digest: str
    """Hex digest over the ordered block keys (kv/keys.py)."""
    block_bytes: int
    crc: int | None = None
    """CRC-32 over the blocks, with `--transfer-crc`, where the transport does not seal each block."""


class DrainAnswer(Wire):
    """True: no byte of the attempt can still move, now or later."""

    attempt: str
    drained: bool
    epoch: str
