"""An engine as its HTTP side sees it. It runs in this process (`local.py`) or in one of its own (`remote.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ..interfaces.handoff import HandoffStats
from ..protocol.calls import CommitCall
from ..protocol.info import KvInfo, TransferInfo
from ..protocol.ticket import Ticket
from ..request import GENERATES, AdapterName, GenerateRequest, ServedTask
from .loop import Snapshot


@dataclass(frozen=True, slots=True)
class AdapterProblem:
    """Why an adapter is not as --lora-file says."""

    name: str
    """Empty: it is about the file itself."""
    problem: str


@dataclass(frozen=True, slots=True)
class AdapterList:
    """What --lora-file has come to."""

    digest: str = ""
    """The first 16 hex digits of SHA-256 of the file that was understood last; empty: none was."""
    listed: int = 0
    """Adapters in it."""
    problems: tuple[AdapterProblem, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """What probes, metrics and /info tell of an engine."""

    snapshot: Snapshot
    failure: str = ""
    """Why it is broken; empty while it works."""
    problem: str = ""
    """What else is a reason to restart its process; empty: nothing."""
    stalled_s: float = 0.0
    """Seconds with work and no progress; 0 when idle."""
    transfer_failures: Mapping[str, int] = field(default_factory=dict)
    """Failed transfers by stage."""
    moved: HandoffStats | None = None
    """Counters of the transfer side; None without one."""
    adapters: tuple[AdapterName, ...] = ()
    """What requests may ask for."""
    adapter_list: AdapterList | None = None
    """None: there is no --lora-file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What does not change while an engine lives."""

    kv: KvInfo
    transfer: TransferInfo
    fingerprint: str
    """Routers pair engines whose fingerprints are equal."""
    vocab_size: int
    model_revision: str
    """What exactly is served; empty where that is not known."""
    task: ServedTask = GENERATES
    host_pool_bytes: int = 0
    """Of the KV pool, where that is in the host's memory: taken by and by."""
    rank_sums: str = ""
    """How the ranks of the engine sum; empty: there is one."""


class Engine(Protocol):
    """Takes requests and returns at once. Replies go to the sink that its maker gave it, by scheduler id: the attempt
    where there is one, else the request's id. Each request that is not aborted without an answer ends by exactly one
    `TokenChunk` with a finish reason, or `PrefillAnswer`."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, tokens."""

    def generate(
        self,
        request: GenerateRequest,
        *,
        attempt: str = "",
        local_attempt: str = "",
        peer_url: str = "",
        peer_epoch: str = "",
    ) -> None:
        """Run a request; with an attempt, its KV comes from a peer. A refusal arrives as the last chunk."""

    def prefill(self, request: GenerateRequest, attempt: str, ticket: Ticket | None) -> None:
        """Compute a prompt and send its KV as the ticket says; the reply is a PrefillAnswer or an ending chunk.

        Without a ticket, for requests that `may_begin_early`: the first token comes before, unless it is the last, and
        `ticket` has to follow.
        """

    def ticket(self, ticket: Ticket) -> None:
        """Give the ticket of a prompt that was begun without; ignored where that has ended."""

    def commit(self, call: CommitCall) -> None:
        """The router's word about the prefill leg of an attempt that is received here."""

    def abort(self, request_id: str, attempt: str, reason: str, *, answer: bool = True) -> None:
        """End a request in any phase; unknown ids are ignored.

        `answer` False: its caller is gone. A last chunk would reach whoever uses the same id next.
        """

    async def is_drained(self, attempt: str) -> bool:
        """For a peer: may no byte of this attempt leave any more? Raises EngineFailed where that is not known."""

    async def change_adapter(self, name: str, path: str | None, *, replace: bool = False) -> None:
        """Load the adapter at `path` of the folder of adapters under `name`; None: unload it. `status` has it then.

        Raises InvalidRequest, which says what is wrong with it, and EngineFailed where the engine does not answer.
        """

    def trim(self) -> None:
        """Have an engine process of its own give free memory back to the kernel."""

    def status(self) -> EngineStatus:
        """Its status as of now, or of a moment ago."""
