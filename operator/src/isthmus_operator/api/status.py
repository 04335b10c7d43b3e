"""The status of an InferenceService, written only by the operator, through the status subresource."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints, WithJsonSchema

from .choices import TransferMode, Transport
from .fields import Block

Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Number = Annotated[int, Field(ge=0, le=2**53)]
Line = Annotated[str, StringConstraints(max_length=512)]
Time = Annotated[str, StringConstraints(max_length=64), WithJsonSchema({"type": "string", "format": "date-time"})]


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(Block):
    """metav1.Condition."""

    type: Annotated[str, StringConstraints(max_length=316)]
    """Ready, Available, Progressing, ModelReady, PrefillReady, DecodeReady, WorkerReady, RouterReady, StoreReady,
    AdaptersReady, TransferReady or Compatible."""
    status: ConditionStatus
    """True, False or Unknown."""
    reason: Annotated[str, StringConstraints(max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    """One CamelCase word for programs."""
    message: Annotated[str, StringConstraints(max_length=32768)]
    """What happened, naming the object to look at."""
    last_transition_time: Time
    """When status last changed."""
    observed_generation: Number | None = None
    """Generation of the spec this is about."""


class ModelStatus(Block):
    revision: Line = ""
    """Commit or digest that the weights were resolved to, as the engines report it; several while they differ."""


class RoleStatus(Block):
    desired: Count = 0
    """Pods wanted."""
    ready: Count = 0
    """Pods that are ready."""
    updated: Count = 0
    """Pods of the newest revision."""
    routable: Count | None = None
    """Pods the router may choose now. Absent while no router answers."""
    summary: Line = ""
    """ready/desired, for kubectl get."""


class RolesStatus(Block):
    prefill: RoleStatus | None = None
    """Prefill pods."""
    decode: RoleStatus | None = None
    """Decode pods."""
    worker: RoleStatus | None = None
    """Unified pods."""
    router: RoleStatus | None = None
    """Routers."""
    store: RoleStatus | None = None
    """The managed Mooncake master."""


class TransferStatus(Block):
    mode: TransferMode | None = None
    """Mode in use."""
    effective: Transport | None = None
    """Transport that really moved the bytes of the last probe."""
    probed_gbps: Annotated[str, Field(alias="probedGBps", max_length=32)] = ""
    """Speed of the last probe in GB/s."""
    last_probe: Time | None = None
    """When it was probed."""


class KvCacheStatus(Block):
    physical_blocks: Number = 0
    """KV blocks in the smallest pool of a role."""
    usable_blocks: Number = 0
    """Blocks requests may use."""
    bytes_per_block: Number = 0
    """Bytes of one block on one pod."""
    max_model_len: Number = 0
    """Tokens one request may have, after fitting the pool."""


class Revision(Block):
    current: Line = ""
    """Revision that serves."""
    updated: Line = ""
    """Revision of the present spec."""
    failed: Line = ""
    """Revision whose rollout failed and was rolled back. It is tried again only after the spec has changed."""


class Pinned(Block):
    engine_image: Line = ""
    """Image the engines of this revision run."""
    router_image: Line = ""
    """Image the routers of this revision run."""


class Status(Block):
    observed_generation: Number | None = None
    """Generation of the spec that this status describes."""
    url: Line = ""
    """Base URL for OpenAI clients inside the cluster."""
    revision: Revision | None = None
    """Hash of the spec in canonical form."""
    fingerprint: Annotated[str, StringConstraints(max_length=4096)] = ""
    """KV layout and engine KV ABI, as the engines report it. Only equal ones are paired."""
    model: ModelStatus | None = None
    """The model that is served."""
    roles: RolesStatus | None = None
    """Pods by role."""
    transfer: TransferStatus | None = None
    """KV transfer as measured."""
    kv_cache: KvCacheStatus | None = None
    """KV pool as the engines report it."""
    pinned: Pinned | None = None
    """What the operator's defaults were when this revision was made."""
    skipped: Annotated[tuple[Line, ...], Field(max_length=16)] = ()
    """Kinds of optional objects left out because their API is not installed. They are made when it is."""
    conditions: tuple[Condition, ...] = ()
    """State in detail; Ready sums it up."""
