"""Frozen configuration, one record per component; `serve_flags` makes them of a command line.

The only module of this distribution that may read the environment (pod identity).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from .lora_config import LoraConfig


class Role(StrEnum):
    """What a process does."""

    PREFILL = "prefill"
    DECODE = "decode"
    UNIFIED = "unified"
    ROUTER = "router"


class OnFailure(StrEnum):
    """What decode does when KV does not arrive."""

    RECOMPUTE = "recompute"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """OpenTelemetry traces."""

    endpoint: str = ""
    """URL of a collector's traces (OTLP over HTTP); empty: there are no traces."""
    sampling: float = 1.0
    """Share of the traces that begin here which is recorded; what comes with a trace is recorded if that one is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """HTTP side of any role."""

    host: str = "127.0.0.1"
    port: int = 8000
    drain_timeout_s: float = 120.0
    """After SIGTERM: finish what runs for at most this long, then abort the rest."""
    no_progress_timeout_s: float = 120.0
    """/health turns 503 when there is work and no step finished for this long."""
    log_level: str = "info"
    api_process: str = "auto"
    """Whether an engine has a process of its own beside this one: on | off; auto: with a GPU (ADR 41)."""
    metrics_port: int = 0
    """Where /metrics is, and probes as well; 0: on `port`."""
    peer_credentials: str = ""
    """Folder by which routers and engines of one service know each other (credentials.py). Empty: internal routes are
    open to everybody who reaches the port."""
    max_connections: int = 16_384
    """Fewer where the process may not open enough files for them."""
    max_connections_per_address: int = 8_192
    max_body_memory_bytes: int = 256 << 20
    """Of all request bodies that arrive or wait for their answer to begin."""
    memory_limit_bytes: int | None = None
    """Of the process and its engine process; None: of their control group, where it has one."""
    tracing: TracingConfig = field(default_factory=TracingConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which weights, under which names."""

    path: str
    served_names: tuple[str, ...] = ()
    """Names clients may use; default: the last path component."""
    device: str = "auto"
    """auto | cpu | cuda; auto picks a usable GPU, else the CPU."""
    dtype: str = "auto"
    """auto | float32 | bfloat16; auto picks what the device computes fast."""
    quantization: str = "auto"
    """auto | fp8 | none: whether matrices are multiplied as 8-bit floats (ADR 32). auto: those that the checkpoint
    holds so, where the device can; fp8: all, else the engine does not start; none: never."""
    task: str = "auto"
    """auto | generate | embed | score; auto: what the model's files say (`models/pooling.py`)."""
    threads: int = 0
    """CPU threads for the executor; 0: what the scheduler affinity or cgroup gives."""
    deterministic: bool = False
    """Whether a request's tokens must not depend on what shares its steps (ADR 40)."""
    trust_tokenizer: bool = False
    """Whether texts are tokenised by expressions that may take very long over some (`openai/expressions.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """How the API reads conversations and answers."""

    control_tokens: str = "request"
    """Whether text of messages may be control tokens: `never`; `request`: where a request asks for it; `always`: unless
    a request forbids it (ADR 27)."""
    tool_format: str = "auto"
    """In which the model calls tools; auto: as its chat template shows."""
    reasoning: str = "auto"
    """Whether reasoning is split off the answer: `think` (between <think> and </think>), `none`; auto: where the model
    has these tags."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvConfig:
    """The KV pool."""

    block_size: int = 16
    dtype: str = "auto"
    """auto: same as compute."""
    memory_bytes: int | None = None
    """Pool size; None: `memory_fraction` decides."""
    memory_fraction: float = 0.5
    """On a CPU: of what is free after the weights are loaded. On a GPU: of all its memory, weights included."""
    num_blocks_override: int | None = None
    prefix_caching: bool = True
    layout: str = "block-major"
    """block-major | layer-major"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """One token budget for prefill and decode alike."""

    max_model_len: int | None = None
    """None: the model's own limit, shrunk to what the pool holds (auto-fit)."""
    max_batched_tokens: int = 2048
    max_step_s: float = 0.2
    """Longest step beside a request that generates: the gap that a prompt may make in another's stream."""
    max_num_seqs: int = 128
    speculative_tokens: int = 0
    """Most tokens that a row guesses (from its own text, or by a draft model) and verifies in one step; 0: none."""
    max_waiting: int = 1024
    """More waiting requests than this are refused with 429."""
    queue_timeout_s: float = 300.0
    """A request that waited this long without running ends with 504."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Mooncake storage pool."""

    master: str = ""
    """host:port of mooncake_master."""
    segment_bytes: int = 1 << 30
    """Host memory this process lends to the pool."""
    replicas: int = 1
    reads: bool = True
    """Whether prompts that are computed here are read from the pool first, as far as it has them."""
    secret_file: str = ""
    """File with a secret of the service, 16 bytes or more: salts names in the pool and seals values. Empty: neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """How KV travels."""

    mode: str = "none"
    """none | direct | store"""
    transport: str = "auto"
    """auto | rdma | nvlink | tcp. An explicit one is never replaced in silence."""
    fallback: str = "deny"
    """deny | allow-tcp: whether auto may settle on TCP when a faster class was expected."""
    timeout_s: float = 30.0
    on_failure: OnFailure = OnFailure.RECOMPUTE
    host: str = ""
    """Address peers reach this process at; default: the server's host, or POD_IP."""
    verify_crc: bool = False
    store: StoreConfig = field(default_factory=StoreConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an engine process needs, each part handed to its own component."""

    role: Role
    server: ServerConfig
    model: ModelConfig
    kv: KvConfig
    scheduler: SchedulerConfig
    transfer: TransferConfig
    chat: ChatConfig = field(default_factory=ChatConfig)
    """Of the unified role, which has the API."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    tensor_parallel_size: int = 1
    """Ranks that compute the model together, a process and on GPUs a device each."""
    draft_model: str = ""
    """Local directory of a small model that guesses tokens; empty: none does."""
    executor: str = "torch"
    """torch | fake (no weights, no torch: protocol tests and load tests)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The router. Engine addresses are host:port, where a host may resolve to many pods."""

    server: ServerConfig
    model: ModelConfig
    chat: ChatConfig = field(default_factory=ChatConfig)
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    worker: tuple[str, ...] = ()
    policy: str = "least-load"
    """round-robin | least-load | prefix-aware | kv-aware"""
    disaggregate_above: int = 0
    """Prompts of at most this many tokens are computed on decode itself."""
    on_prefill_unavailable: str = "local"
    """local | reject"""
    max_queue: int = 1024
    """Most requests in flight; more are refused with 429."""
    request_timeout_s: float = 600.0
    discovery_interval_s: float = 1.0
    tenants_file: str = ""
    """Path of a mounted JSON file with tenants, their keys and limits (docs/tenants.md), read again when it changes."""
    api_key_file: str = ""
    """Path of a mounted file holding the key clients must send; empty: no key."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the API from a browser; "*": all. Empty: none."""
    lora_updates: bool = False
    """Whether clients may load and unload adapters, on all engines."""
    page: bool = True
    """Whether `/` is a page with a chat and the state of the service, and /status what it shows."""


def pod_ip() -> str:
    """The pod's own address, from the downward API; empty outside Kubernetes."""
    return os.environ.get("POD_IP", "")


def apply_native_environment(settings: Mapping[str, str]) -> None:
    """Set what a native library reads from the environment. Only before it is first used."""
    os.environ.update(settings)
