"""What an engine tells routers of itself."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict

from ..request import GENERATES, ServedTask
from .base import Wire


class _Reading(Wire):
    """What an engine tells of itself. A router reads it before it knows the engine's version, and passes over what it
    has no name for: an engine that is newer serves as well."""

    model_config = ConfigDict(extra="ignore")


class KvInfo(_Reading):
    """KV numbers of one engine, both counts named (kv.md)."""

    block_size: int
    physical_blocks: int
    usable_blocks: int
    bytes_per_block: int
    max_model_len: int
    layout_digest: str


class TransferInfo(_Reading):
    """What this engine really moves KV with."""

    mode: Literal["none", "direct", "store", "memory"] = "none"
    transport: str = ""
    """Effective transport as probed, for example `tcp`."""
    probed_gbps: float = 0.0
    """GB/s of the probe; 0 when not probed."""
    epoch: str = ""
    """Changes with each start of the process: a peer with a new epoch cannot write into old blocks."""
    ready: bool = True
    reason: str = ""


class LoadInfo(_Reading):
    """What an engine does and has done since its start (a new `transfer.epoch`)."""

    kv_usage: float = 0.0
    """Share of usable KV blocks in use, 0 to 1."""
    generated_tokens: int = 0
    sent_bytes: int = 0
    """KV bytes sent to peers."""


class AdapterInfo(_Reading):
    """A low-rank adapter that an engine has."""

    name: str
    digest: str


class AdapterProblemInfo(_Reading):
    """Why an adapter is not as --lora-file says. `name` empty: it is about the file itself."""

    name: str
    problem: str


class AdapterListInfo(_Reading):
    """What --lora-file has come to."""

    digest: str
    """The first 16 hex digits of SHA-256 of the file that was understood last; empty: none was."""
    listed: int = 0
    """Adapters in it."""
    problems: tuple[AdapterProblemInfo, ...] = ()


class EngineInfo(_Reading):
    """Answer of GET /info. The router pairs only engines of equal `fingerprint`."""

    role: Literal["prefill", "decode", "unified"]
    model: str
    served_names: tuple[str, ...]
    fingerprint: str
    kv: KvInfo
    transfer: TransferInfo
    version: str
    running: int = 0
    waiting: int = 0
    load: LoadInfo = LoadInfo()
    draining: bool = False
    adapters: tuple[AdapterInfo, ...] = ()
    adapter_list: AdapterListInfo | None = None
    """None: it has no --lora-file."""
    vocab_size: int = 0
    task: ServedTask = GENERATES
    rank_sums: str = ""
    """How the ranks of a tensor-parallel engine sum: `peer`, by memory of each other over NVLink, or the library's
    name, `nccl` or `gloo`. Empty: it has one rank."""
    model_revision: str = ""
    """What exactly is served, as `checkpoints.provenance.pinned_revision` finds it; empty where that is not known."""
    tokenizer: str = ""
    """Digest of the tokenizer by which it takes prompts as text; empty: it takes ids alone."""
    vocabulary: str = ""
    """Digest of its model's tokenizer, of any role: what its ids mean. Empty: that is not known."""
    begins_early: bool = False
    """It takes prompts before their tickets (prefill), and commits that tell the first token (decode)."""


class KvEvents(Wire):
    """Changes of an engine's prefix cache. The first line, and one after a gap, begins a snapshot."""

    previous: int
    """Changes before this line: where the last line ended, unless `reset`."""
    following: int
    """Changes up to and including this line. Equal to `previous` within a snapshot."""
    reset: bool = False
    """Forget everything known; this line and the next ones with `following` == `previous` are the snapshot."""
    changes: tuple[str, ...] = ()
    """In order: `+` a block became a hit, `-` it no longer is one; then the first 8 bytes of its hash in hex."""
