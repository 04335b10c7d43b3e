"""Prefill, decode and worker: one Deployment per revision, and one headless Service over all revisions.

Every revision is a Deployment of its own because a rollout moves prefill and decode in step, which two Deployments
that each roll by themselves cannot do. The Service spans revisions: the router pairs engines by the fingerprint they
report, not by revision.
"""

from __future__ import annotations

from typing import Any

from ..api.choices import Enforcement, KvLayout, Quantization, ScalingMode, TransferMode, Transport
from ..api.rules import kv_memory, on_gpu
from ..api.spec import Engine, EngineTuning, Locality, Rdma, Role
from ..api.v1alpha1 import InferenceService
from . import adapters, credentials
from .model import model_parts
from .names import (
    ENGINE_PORT,
    MASTER_RPC_PORT,
    MODEL_LABEL,
    PAIRING_LABEL,
    REVISION_LABEL,
    SERVICE_LABEL,
    Component,
    Defaults,
    address,
    child_name,
    exactly,
    metadata,
    older_address,
    selector,
)
from .pod import GRACE_AFTER_DRAIN_S, flag, http_probes, literal, pod_env, pod_template, resources, security_context
from .revision import model_digest, pairing, role_revision

_RUNTIME_ROLES = {Component.PREFILL: "prefill", Component.DECODE: "decode", Component.WORKER: "unified"}
_SECRET_FOLDER = "/etc/isthmus/store"
_SHARED_MEMORY = "1Gi"
"""For NCCL: the ranks of a pod meet there, and a container has 64 MiB otherwise, too little for eight. What they write
counts as the container's memory."""
_TRANSPORTS = {Transport.AUTO: "auto", Transport.RDMA: "rdma", Transport.NVLINK: "nvlink", Transport.TCP: "tcp"}


def role_of(service: InferenceService, component: Component) -> Role:
    """The block of an engine component that this service has."""
    roles = service.spec.roles
    role = {Component.PREFILL: roles.prefill, Component.DECODE: roles.decode, Component.WORKER: roles.worker}[component]
    assert role is not None, f"{component} is not part of this service"
    return role


def own_replicas(role: Role) -> int | None:
    """The number of pods this resource asks for; None where an autoscaler owns it."""
    if role.scaling.mode is not ScalingMode.STATIC:
        return None
    return 1 if role.scaling.replicas is None else role.scaling.replicas


def managed_addresses(service: InferenceService) -> tuple[str, str]:
    """host:port of the master that this service would run, as it is written now and as it was before."""
    where = service, Component.STORE, MASTER_RPC_PORT
    return address(*where), older_address(*where)


def master_address(service: InferenceService) -> str:
    """host:port of the pool's master; empty without a store."""
    store = service.spec.store
    if store is None:
        return ""
    if store.master.external:
        return store.master.external.address
    return address(service, Component.STORE, MASTER_RPC_PORT)


def engine_args(service: InferenceService, component: Component, model_path: str, *, guarded: bool = True) -> list[str]:
    """Arguments of `isthmus-runtime serve`. Settings the resource leaves open are left to the engine's defaults."""
    spec, role = service.spec, role_of(service, component)
    args = ["serve", "--role", _RUNTIME_ROLES[component], "--host", "0.0.0.0", "--port", str(ENGINE_PORT)]
    args += credentials.ARGS if guarded else ()
    args += ["--model", model_path]
    for name in service.served_names:
        args += flag("served-model-name", name)
    args += ["--log-level", spec.observability.log_level.value]
    args += ["--drain-timeout", spec.rollout.drain_timeout.canonical]
    if on_gpu(role):
        # Not left to `auto`: a pod that got a GPU and cannot use it must say so, not serve from its CPU.
        args += ["--device", "cuda"]
    args += _tuning(spec.engine, role.engine)
    args += _kv(service, role)
    if spec.engine.parallelism.tensor > 1:
        args += ["--tensor-parallel-size", str(spec.engine.parallelism.tensor)]
    args += adapters.args(service, pairing(service))
    if spec.engine.speculative is not None and component is not Component.PREFILL:
        guesses = spec.engine.speculative
        args += ["--speculative-method", guesses.method.value.lower(), "--speculative-tokens", str(guesses.tokens)]
    if component is not Component.WORKER:
        args += _transfer(service)
    for name, value in sorted(spec.engine.extra_args.items()):
        args += flag(name, value)
    return args


def _tuning(shared: Engine, own: EngineTuning) -> list[str]:
    args = ["--dtype", shared.dtype.value]
    if shared.quantization is not Quantization.AUTO:
        args += ["--quantization", shared.quantization.value]
    if shared.max_model_len is not None:
        args += ["--max-model-len", str(shared.max_model_len)]

    def setting(flag: str, mine: object, common: object) -> list[str]:
        value = common if mine is None else mine
        return [] if value is None else [flag, str(getattr(value, "canonical", value))]

    args += setting("--threads", own.threads, shared.threads)
    args += setting("--max-batched-tokens", own.max_batched_tokens, shared.max_batched_tokens)
    args += setting("--max-step-time", own.max_step_time, shared.max_step_time)
    args += setting("--max-num-seqs", own.max_num_seqs, shared.max_num_seqs)
    args += setting("--max-waiting", own.max_waiting, shared.max_waiting)
    args += setting("--queue-timeout", own.queue_timeout, shared.queue_timeout)
    args += setting("--no-progress-timeout", own.no_progress_timeout, shared.no_progress_timeout)
    return args


def _kv(service: InferenceService, role: Role) -> list[str]:
    layout, size = service.spec.engine.kv_cache, kv_memory(service.spec, role)
    args = ["--block-size", str(layout.block_size), "--kv-dtype", layout.dtype.value]
    args += ["--kv-layout", "block-major" if layout.layout is KvLayout.BLOCK_MAJOR else "layer-major"]
    if size.memory is not None:
        args += ["--kv-memory", str(int(size.memory.value))]
    if size.gpu_memory_fraction is not None:
        args += ["--kv-memory-fraction", f"{size.gpu_memory_fraction:g}"]
    if size.num_blocks_override is not None:
        args += ["--num-blocks-override", str(size.num_blocks_override)]
    if not layout.prefix_caching:
        args.append("--no-prefix-caching")
    return args


def _transfer(service: InferenceService) -> list[str]:
    transfer, store = service.spec.transfer, service.spec.store
    args = ["--transfer-mode", "direct" if transfer.mode is TransferMode.DIRECT else "store"]
    args += ["--transfer-transport", _TRANSPORTS[transfer.transport]]
    args += ["--transfer-fallback", "deny" if transfer.fallback.value == "Deny" else "allow-tcp"]
    args += ["--transfer-timeout", transfer.timeout.canonical]
    args += ["--transfer-on-failure", transfer.on_failure.value.lower()]
    if transfer.verify_checksums:
        args.append("--transfer-crc")
    if store is not None:
        args += ["--store-master", master_address(service)]
        args += ["--store-segment-size", str(int(store.segment_size.value))]
        args += ["--store-replicas", str(store.replicas)]
        if store.secret_ref:
            args += ["--store-secret-file", f"{_SECRET_FOLDER}/secret"]
    return args


def deployment(
    service: InferenceService, component: Component, defaults: Defaults, *, replicas: int | None
) -> dict[str, Any]:
    """The Deployment of the present revision. `replicas` None leaves the field to whoever else owns it."""
    spec, role = service.spec, role_of(service, component)
    revision = role_revision(service, component)
    image = spec.engine.image or defaults.engine_image
    model = model_parts(service, image=image, deadline=spec.availability.startup_timeout.canonical)
    volumes = [*model.volumes, *adapters.volumes(service)]
    mounts = [*model.mounts, *adapters.mounts(service)]
    if spec.store and (ref := spec.store.secret_ref) and component is not Component.WORKER:
        secret = {"secretName": ref.name, "items": [{"key": ref.key, "path": "secret"}], "defaultMode": 0o440}
        volumes.append({"name": "store-secret", "secret": secret})
        mounts.append({"name": "store-secret", "mountPath": _SECRET_FOLDER, "readOnly": True})
    if spec.engine.parallelism.tensor > 1 and on_gpu(role):
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": _SHARED_MEMORY}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    rdma = _rdma(service) if component is not Component.WORKER else None
    container = {
        "name": "engine",
        "image": image,
        "command": ["isthmus-runtime"],
        "args": literal(engine_args(service, component, model.path, guarded=defaults.guarded)),
        "env": pod_env(),
        "ports": [{"name": "http", "containerPort": ENGINE_PORT}, *([credentials.PORT] if defaults.guarded else [])],
        "resources": resources(role.resources, extra={rdma.resource_name: str(rdma.resource_count)} if rdma else None),
        **http_probes(
            startup_timeout_s=spec.availability.startup_timeout.seconds,
            port="metrics" if defaults.guarded else "http",
        ),
        "volumeMounts": mounts,
        # RDMA pins memory, which needs IPC_LOCK: the one exception from Pod Security "restricted".
        "securityContext": security_context(capabilities=("IPC_LOCK",) if rdma else ()),
    }
    template = pod_template(
        service,
        component,
        revision,
        role,
        container=container,
        init_containers=model.init_containers,
        volumes=volumes,
        grace_s=spec.rollout.drain_timeout.seconds + GRACE_AFTER_DRAIN_S,
        affinity=_locality(service, component),
        host_network=rdma is not None and rdma.host_network,
        # CUDA memory handles are shared through the host's IPC namespace.
        host_ipc=component is not Component.WORKER and spec.transfer.transport is Transport.NVLINK,
        guarded=defaults.guarded,
    )
    meta = metadata(service, child_name(service.name, component.value, revision), component, revision)
    meta["labels"][PAIRING_LABEL] = pairing(service)
    meta["labels"][MODEL_LABEL] = model_digest(service)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": meta,
        "spec": {
            **({} if replicas is None else {"replicas": replicas}),
            "selector": {"matchLabels": selector(service, component) | {REVISION_LABEL: revision}},
            # The operator moves replicas between revisions; within one, a changed template must not surge.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            "progressDeadlineSeconds": int(spec.rollout.progress_deadline.seconds) or 1,
            "revisionHistoryLimit": 0,
            "template": template,
        },
    }


def headless_service(service: InferenceService, component: Component, *, exact: bool = True) -> dict[str, Any]:
    """DNS for the router. Lists pods that are not ready too: the router asks each for /info and /ready itself, so it
    still reaches a draining prefill that decode is fetching from. `exact`: as of `names.exactly`."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(service, child_name(service.name, component.value), component),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": selector(service, component) | exactly(service, exact=exact),
            "ports": [{"name": "http", "port": ENGINE_PORT, "targetPort": "http"}],
        },
    }


def _rdma(service: InferenceService) -> Rdma | None:
    transfer = service.spec.transfer
    if transfer.rdma is None and transfer.transport is Transport.RDMA:
        return Rdma()
    return transfer.rdma


def _locality(service: InferenceService, component: Component) -> dict[str, Any]:
    near: Locality | None = service.spec.transfer.locality
    if near is None or component is Component.WORKER:
        return {}
    # Selects every engine pod of the service, itself included: the first one to come is then free to be placed.
    term = {
        "labelSelector": {
            "matchLabels": {SERVICE_LABEL: service.name},
            "matchExpressions": [
                {"key": "llm-d.ai/role", "operator": "In", "values": ["prefill", "decode"]},
            ],
        },
        "topologyKey": near.topology_key,
    }
    if near.enforcement is Enforcement.REQUIRED:
        return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    weighted = {"weight": 100, "podAffinityTerm": term}
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [weighted]}}
