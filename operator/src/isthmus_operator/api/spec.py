"""The spec of an InferenceService. The docstring under a field is its description in the CRD.

Only settings that take effect are declared. Settings that decide the KV layout exist once, in `engine`, so that
prefill and decode cannot be given different ones.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from .choices import (
    Dtype,
    Enforcement,
    Fallback,
    KvDtype,
    KvLayout,
    LogLevel,
    Mode,
    PullPolicy,
    Quantization,
    RolloutFailure,
    RolloutStrategy,
    ScalingMetric,
    ScalingMode,
    SpeculativeMethod,
    Toggle,
    TransferFailure,
    TransferMode,
    Transport,
)
from .fields import Block, CountOrPercent, Duration, Label, Name, Quantity, Text
from .model_spec import Model, SecretKey, SecretName
from .pod_spec import Count, ExtraArgs, PodSettings
from .router_spec import Router


class KvMemory(Block):
    """Size of a pod's KV pool: the part of the KV settings that does not change the layout."""

    memory: Quantity | None = None
    """Bytes of the KV pool, for example 2Gi. Absent: gpuMemoryFraction decides."""
    gpu_memory_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of memory for the KV pool: of all a GPU's, weights included; on a CPU of what is free after loading.
    Absent: the engine's default. Excludes memory."""
    num_blocks_override: Annotated[int, Field(ge=2, le=2**31 - 1)] | None = None
    """Exact number of KV blocks, whatever the memory allows. For tests and tuning."""


class KvCache(KvMemory):
    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    """Tokens in one KV block."""
    dtype: KvDtype = KvDtype.AUTO
    """Number format of the KV pool; auto: engine.dtype if that is given, else float32 on CPUs; fp8 halves bfloat16."""
    prefix_caching: bool = True
    """Whether finished blocks are kept and shared by prompts with the same beginning."""
    layout: KvLayout = KvLayout.BLOCK_MAJOR
    """Order in memory. BlockMajor makes one block one contiguous fragment, as transfers need it; LayerMajor goes with
    mode Unified alone."""


class EngineTuning(Block):
    """Engine settings that do not change the KV layout, so prefill and decode may differ in them."""

    threads: Annotated[int, Field(ge=0, le=4096)] | None = None
    """CPU threads of the executor; 0 or absent: all CPUs the container may use."""
    max_batched_tokens: Annotated[int, Field(ge=1, le=2**24)] | None = None
    """Most tokens in one step, prefill and decode together. Absent: the engine's default."""
    max_step_time: Duration | None = None
    """Longest gap that others' prompts may make between two tokens of a stream. Absent: the engine's default."""
    max_num_seqs: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Most requests that run at once. Absent: the engine's default."""
    max_waiting: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Most requests that wait; more are answered with 429. Absent: the engine's default."""
    queue_timeout: Duration | None = None
    """How long a request may wait before it is answered with 504. Absent: the engine's default."""
    no_progress_timeout: Duration | None = None
    """The engine counts as hung when there is work and no step ends for this long. Absent: the engine's default."""


class RoleEngine(EngineTuning):
    kv_cache: KvMemory | None = None
    """Size of this role's KV pool, in place of the shared one."""


class Speculative(Block):
    method: SpeculativeMethod
    """NGram: what followed the same tokens before."""
    tokens: Annotated[int, Field(ge=1, le=64)] = 6
    """Most guesses of a request and step."""


class Parallelism(Block):
    tensor: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes of a pod that split the model, a GPU each where there are GPUs. Not with transfer mode Store."""


class Engine(EngineTuning):
    image: Text | None = None
    """Image of the engine. Absent: the operator's default, fixed when a revision is first made."""
    image_pull_policy: PullPolicy | None = None
    """Absent: Kubernetes' own default."""
    image_pull_secrets: Annotated[tuple[SecretName, ...], Field(max_length=8)] = ()
    """Secrets for pulling images, for all pods of the service."""
    dtype: Dtype = Dtype.AUTO
    """Compute format; auto: bfloat16 where the hardware has instructions for it, else float32."""
    quantization: Quantization = Quantization.AUTO
    """Products of 8-bit floats. auto: for fp8 checkpoints, where the GPU can; fp8: for all weights, rounded at load, on
    GPUs of capability 8.9 or newer; none: never."""
    max_model_len: Annotated[int, Field(ge=2, le=2**24)] | None = None
    """Most tokens of prompt and answer together. Absent: the model's limit, or what the KV pool holds if less."""
    kv_cache: KvCache = Field(default_factory=KvCache)
    """The KV pool."""
    parallelism: Parallelism = Field(default_factory=Parallelism)
    """How a pod computes one model together."""
    speculative: Speculative | None = None
    """Guesses tokens ahead and verifies them in one step; answers stay the same."""
    extra_args: ExtraArgs = Field(default_factory=dict)
    """Further engine flags without their dashes, but those that have a field."""


class ScalingTarget(Block):
    metric: ScalingMetric
    """What is held at the target, averaged over the pods of the role."""
    value: Quantity
    """QueuedRequests: waiting requests per pod. KVCacheUsage: used share of the KV pool, for example 800m for 80%."""


class Scaling(Block):
    mode: ScalingMode = ScalingMode.STATIC
    """Who owns the number of pods. Static: this resource. External: an autoscaler or a person, through the scale of
    the role. Auto: this resource, between min and max."""
    replicas: Count | None = None
    """Number of pods. Only with Static. Absent: 1."""
    min: Annotated[int, Field(ge=1, le=10000)] | None = None
    """Fewest pods. Only with Auto."""
    max: Annotated[int, Field(ge=1, le=10000)] | None = None
    """Most pods. Only with Auto."""
    target: ScalingTarget | None = None
    """What to scale for. Only with Auto."""


class RatioBounds(Block):
    min: Quantity | None = None
    """Fewest, for example 250m or "0.25" for one prefill pod to four decode pods. Absent: no bound."""
    max: Quantity | None = None
    """Most. Absent: no bound."""


class ScalingRatio(Block):
    prefill_per_decode: RatioBounds
    """Prefill pods for each decode pod."""


class ScalingPolicy(Block):
    ratio: ScalingRatio | None = None
    """Bounds between roles, kept by those with scaling mode Auto: one that lags is scaled up; only what its max does
    not allow takes the other down. Not while a role has no pods."""


class Role(PodSettings):
    scaling: Scaling = Field(default_factory=Scaling)
    """How many pods."""
    engine: RoleEngine = Field(default_factory=RoleEngine)
    """Settings of this role in place of the shared ones. Only settings that leave the KV layout alone."""


class Roles(Block):
    prefill: Role | None = None
    """Pods that compute prompts. Required by mode Disaggregated."""
    decode: Role | None = None
    """Pods that generate. Required by mode Disaggregated. Fields as in prefill."""
    worker: Role | None = None
    """Pods that do both. Required by mode Unified. Fields as in prefill."""


class Rdma(Block):
    resource_name: Label = "rdma/ib"
    """Extended resource of the RDMA device plugin, added to the engines' limits."""
    resource_count: Annotated[int, Field(ge=1, le=64)] = 1
    """How many devices each engine pod gets."""
    host_network: bool = False
    """Run engines in the node's network. Their ports then are the node's, and NetworkPolicies do not apply to them."""


class Locality(Block):
    topology_key: Label = "topology.kubernetes.io/zone"
    """Node label whose value prefill and decode pods should share."""
    enforcement: Enforcement = Enforcement.PREFERRED
    """Required: pods that cannot be placed together stay pending."""


class Transfer(Block):
    mode: TransferMode = TransferMode.DIRECT
    """Direct: prefill writes into decode's memory. Store: KV goes through the Mooncake pool of spec.store."""
    transport: Transport = Transport.AUTO
    """What moves the bytes. Auto probes and reports. An explicit one is never replaced."""
    fallback: Fallback = Fallback.DENY
    """Whether Auto may settle for TCP when a faster transport was expected."""
    timeout: Duration = Duration("30s")
    """How long the KV of one prompt may take."""
    on_failure: TransferFailure = TransferFailure.RECOMPUTE
    """Recompute: decode computes the prompt itself. Fail: the request is answered with 502."""
    verify_checksums: bool = False
    """Changes nothing: Direct checksums KV in host memory always, Store seals every value. Engines with KV on a GPU
    refuse it in Direct."""
    rdma: Rdma | None = None
    """RDMA devices for the engine pods. Assumed with its defaults by transport RDMA."""
    locality: Locality | None = None
    """Keep prefill and decode near each other."""


class ManagedMaster(PodSettings):
    """Settings of the master's pod. Fields as in roles.prefill."""


class ExternalMaster(Block):
    address: Annotated[str, StringConstraints(max_length=259, pattern=r"^[A-Za-z0-9_][^\s:/]*:[0-9]{1,5}$")]
    """host:port of a running mooncake_master. A host begins with no dash, as flags do."""


class StoreMaster(Block):
    managed: ManagedMaster | None = None
    """A master run by this service. The default."""
    external: ExternalMaster | None = None
    """A master run by somebody else."""


class Store(Block):
    segment_size: Quantity = Quantity("1Gi")
    """Host memory each engine pod lends to the pool. Must fit in the pod's memory limit."""
    replicas: Annotated[int, Field(ge=1, le=16)] = 1
    """Copies of each KV object, on different engine pods."""
    secret_ref: SecretKey | None = None
    """A secret of 16 bytes or more that salts names and seals values in the pool, so that services of one master cannot
    find or replace each other's KV. It encrypts nothing."""
    master: StoreMaster = Field(default_factory=StoreMaster)
    """The pool's master: managed or external."""


class Rollout(Block):
    strategy: RolloutStrategy = RolloutStrategy.COORDINATED
    """Coordinated: prefill and decode change in step, so that pairs of one KV layout exist at any time.
    Recreate: all old pods stop first. Independent: each role by itself while the KV layout stays, else Coordinated."""
    max_unavailable: CountOrPercent = CountOrPercent("25%")
    """Pods of a role that may be missing during a rollout (a percentage is rounded up)."""
    max_surge: CountOrPercent = CountOrPercent("0")
    """Pods of a role that may exist beyond the desired number. 0 works when all GPUs are in use."""
    min_ready: Duration | None = None
    """How long a new engine pod has to stay ready before old ones make way for it; unset: not at all."""
    drain_timeout: Duration = Duration("120s")
    """How long a stopping pod may finish its work: for prefill, until its KV has been fetched."""
    progress_deadline: Duration = Duration("30m")
    """A rollout without progress for this long has failed."""
    on_failure: RolloutFailure = RolloutFailure.PAUSE
    """What a failed rollout does."""
    paused: bool = False
    """Stop at the next safe point and change nothing but the numbers of pods until this is false."""


class Availability(Block):
    pdb: Toggle = Toggle.AUTO
    """Auto: a PodDisruptionBudget per role lets one pod go at a time."""
    startup_timeout: Duration = Duration("30m")
    """How long a pod may take to load its model before it is restarted."""


class Observability(Block):
    log_level: LogLevel = LogLevel.INFO
    """Detail of the logs of engines and router."""
    pod_monitor: Toggle = Toggle.AUTO
    """Auto: a PodMonitor (Prometheus Operator) for all pods. Skipped with an Event while that API is not installed."""
    scrape_namespaces: Annotated[tuple[Name, ...], Field(max_length=16)] = ()
    """Namespaces whose pods may reach the metrics of all pods through the NetworkPolicies."""


class Spec(Block):
    mode: Mode = Mode.DISAGGREGATED
    """Disaggregated: separate prefill and decode pods. Unified: worker pods do both."""
    model: Model = Field(default_factory=Model)
    """What is served."""
    engine: Engine = Field(default_factory=Engine)
    """Settings shared by all engine pods."""
    roles: Roles = Field(default_factory=Roles)
    """The engine pods: prefill and decode, or worker, as the mode says."""
    scaling_policy: ScalingPolicy | None = None
    """What holds between the numbers of pods of several roles. Only with mode Disaggregated."""
    transfer: Transfer = Field(default_factory=Transfer)
    """How KV travels from prefill to decode. Only with mode Disaggregated."""
    store: Store | None = None
    """A Mooncake storage pool. Required by transfer mode Store; engines with Direct do not use it."""
    router: Router = Field(default_factory=Router)
    """The entry point for clients."""
    rollout: Rollout = Field(default_factory=Rollout)
    """How changes reach the pods."""
    availability: Availability = Field(default_factory=Availability)
    """Disruptions and slow starts."""
    observability: Observability = Field(default_factory=Observability)
    """Logs and metrics."""
    network_policy: Toggle = Toggle.AUTO
    """Auto: only the service's own pods reach the engines and the store; clients reach the router."""


def engine_roles(spec: Spec) -> list[tuple[str, Role]]:
    """The roles that are set, by name."""
    found = [("prefill", spec.roles.prefill), ("decode", spec.roles.decode), ("worker", spec.roles.worker)]
    return [(name, role) for name, role in found if role is not None]
