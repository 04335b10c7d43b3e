"""Rules between fields. Each is a small pure check that yields problems; `RULES` names the fields it reads, so that a
rule is left out when one of them is already known to be wrong. What CEL can say is repeated in `cel.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ..errors import Problem
from . import pod_patch
from .adapter_rules import adapters
from .choices import Enforcement, Fallback, KvLayout, Mode, ScalingMode, TransferMode, Transport
from .problems import show
from .scaling_rules import ratio, scaling
from .spec import KvMemory, Role, Spec, engine_roles

HOSTNAME_KEY = "kubernetes.io/hostname"

TYPED_FLAGS = frozenset(
    {
        *("role", "host", "port", "model", "served-model-name", "log-level", "drain-timeout", "no-progress-timeout"),
        *("device", "dtype", "quantization", "threads", "max-model-len", "max-batched-tokens", "max-step-time"),
        *("max-num-seqs", "max-waiting", "queue-timeout", "speculative-method", "speculative-tokens"),
        *("block-size", "kv-dtype", "kv-memory", "kv-memory-fraction", "num-blocks-override", "no-prefix-caching"),
        *("kv-layout", "transfer-mode", "transfer-transport", "transfer-fallback", "transfer-timeout"),
        *("transfer-on-failure", "transfer-host", "transfer-crc"),
        *("store-master", "store-segment-size", "store-replicas", "store-secret-file"),
        *("prefill", "decode", "worker", "policy", "disaggregate-above", "on-prefill-unavailable", "max-queue"),
        *("request-timeout", "discovery-interval", "api-key-file", "tenants-file", "cors-origins", "peer-credentials"),
        *("metrics-port", "lora-file", "tensor-parallel-size"),
    }
)
"""Flags that the rendered arguments own; `extraArgs` may not repeat them."""


def on_gpu(role: Role) -> bool:
    """Whether the role's containers get a GPU: what makes their engines compute on it, or say why they cannot."""
    return any(resource.endswith("/gpu") for resource in role.resources.limits)


def kv_memory(spec: Spec, role: Role) -> KvMemory:
    """Size of a role's KV pool: its own setting, or the shared one."""
    return role.engine.kv_cache or spec.engine.kv_cache


def _roles_fit_mode(spec: Spec) -> Iterator[Problem]:
    wanted = ("prefill", "decode") if spec.mode is Mode.DISAGGREGATED else ("worker",)
    allowed = f"{' and '.join(wanted)} with mode {spec.mode.value}"
    present = dict(engine_roles(spec))
    for name in wanted:
        if name not in present:
            yield Problem(f"spec.roles.{name}", f"is missing with mode {spec.mode.value}", allowed, f"add {name}: {{}}")
    other = Mode.UNIFIED if spec.mode is Mode.DISAGGREGATED else Mode.DISAGGREGATED
    for name in present:
        if name not in wanted:
            yield Problem(
                f"spec.roles.{name}",
                f"does not go with mode {spec.mode.value}",
                allowed,
                f"remove it, or set mode: {other.value}",
            )


def _unified_moves_nothing(spec: Spec) -> Iterator[Problem]:
    if spec.mode is Mode.DISAGGREGATED:
        return
    if "transfer" in spec.model_fields_set:
        yield Problem("spec.transfer", "does not go with mode Unified", "mode Disaggregated", "remove it")
    if spec.store is not None:
        yield Problem("spec.store", "does not go with mode Unified", "mode Disaggregated", "remove it")


def _one_source(spec: Spec) -> Iterator[Problem]:
    source = spec.model.source
    kinds = {
        "huggingFace": source.hugging_face,
        "pvc": source.pvc,
        "s3": source.s3,
        "oci": source.oci,
        "hostPath": source.host_path,
    }
    given = [name for name, value in kinds.items() if value is not None]
    if len(given) != 1:
        found = "names no source" if not given else f"names {len(given)} sources ({', '.join(given)})"
        fix = (
            "add one, for example hostPath: {path: /models/my-model}"
            if not given
            else f"keep one of {', '.join(given)}"
        )
        yield Problem("spec.model.source", found, f"exactly one of {', '.join(kinds)}", fix)
    for field, path, holder in (
        ("pvc.path", source.pvc.path if source.pvc else "", "volume"),
        ("s3.uri", source.s3.uri if source.s3 else "", "bucket"),
    ):
        if ".." in path.split("/"):
            found, allowed = f"{show(path)} leads out of it", f"a folder inside the {holder}, without `..`"
            yield Problem(f"spec.model.source.{field}", found, allowed, "name it directly")


def _one_kind_of_keys(spec: Spec) -> Iterator[Problem]:
    auth = spec.router.auth
    if auth is not None and (auth.api_key_secret_ref is None) == (auth.tenants_secret_ref is None):
        found = "names two kinds of keys" if auth.api_key_secret_ref else "names no keys"
        allowed = "exactly one of apiKeySecretRef, tenantsSecretRef"
        yield Problem("spec.router.auth", found, allowed, "keep or add one of the two")


def _cache_is_used(spec: Spec) -> Iterator[Problem]:
    cache, source = spec.model.cache, spec.model.source
    if cache is None:
        return
    given = [n for n, v in (("pvc", cache.pvc), ("hostPath", cache.host_path), ("emptyDir", cache.empty_dir)) if v]
    if len(given) != 1:
        found = "names no place" if not given else f"names {len(given)} places ({', '.join(given)})"
        yield Problem("spec.model.cache", found, "exactly one of pvc, hostPath, emptyDir", "keep one, or remove cache")
    if source.pvc or source.oci or source.host_path:
        yield Problem(
            "spec.model.cache", "is not used: this source is mounted, not downloaded", "huggingFace or s3", "remove it"
        )


def _names_differ(spec: Spec) -> Iterator[Problem]:
    seen: set[str] = set()
    for index, name in enumerate(spec.model.served_names):
        if name in seen:
            yield Problem(
                f"spec.model.servedNames[{index}]", f"{show(name)} is there twice", "distinct names", "remove it"
            )
        if not name.strip() or not name.isprintable():
            wrong = f"{show(name)} is blank or holds characters that cannot be printed"
            yield Problem(f"spec.model.servedNames[{index}]", wrong, "a name that can be read", "rename it")
        seen.add(name)


def _ranks(spec: Spec) -> Iterator[Problem]:
    ranks, path = spec.engine.parallelism.tensor, "spec.engine.parallelism.tensor"
    if ranks == 1:
        return
    if spec.mode is Mode.DISAGGREGATED and spec.transfer.mode is TransferMode.STORE:
        yield Problem(path, f"{ranks} does not go with transfer mode Store", "1, or mode Direct", "set it to 1")
    for name, role in engine_roles(spec):
        gpus = {key: amount for key, amount in role.resources.limits.items() if key.endswith("/gpu")}
        if gpus and sum(amount.value for amount in gpus.values()) < ranks:
            key, amount = next(iter(gpus.items()))
            yield Problem(
                f"spec.roles.{name}.resources.limits.{key}",
                f"{amount} gives not each of the {ranks} ranks of {path} a GPU",
                f"{ranks} or more",
                f"set it to {ranks}",
            )


def _extra_args_are_extra(spec: Spec) -> Iterator[Problem]:
    for path, given in (("spec.engine", spec.engine.extra_args), ("spec.router", spec.router.extra_args)):
        for name in sorted(given.keys() & TYPED_FLAGS):
            yield Problem(
                f"{path}.extraArgs.{name}",
                "is set by the resource itself",
                "flags that have no field",
                "use the field of that name, or remove it",
            )


def _kv_layout(spec: Spec) -> Iterator[Problem]:
    if spec.mode is not Mode.UNIFIED and spec.engine.kv_cache.layout is not KvLayout.BLOCK_MAJOR:
        yield Problem(
            "spec.engine.kvCache.layout",
            f"{spec.engine.kv_cache.layout.value} scatters a block over all layers, and mode {spec.mode.value} moves "
            "blocks as one run",
            KvLayout.BLOCK_MAJOR.value,
            "remove it",
        )


def _kv_size(spec: Spec) -> Iterator[Problem]:
    places = [("spec.engine.kvCache", spec.engine.kv_cache)] + [
        (f"spec.roles.{name}.engine.kvCache", role.engine.kv_cache)
        for name, role in engine_roles(spec)
        if role.engine.kv_cache
    ]
    for path, kv in places:
        if kv.memory is not None and kv.gpu_memory_fraction is not None:
            yield Problem(
                f"{path}.gpuMemoryFraction",
                "contradicts memory, which is set too",
                "one of the two",
                "remove one of them",
            )
        if kv.memory is not None and kv.memory.value < 1:
            yield Problem(
                f"{path}.memory", f"{show(kv.memory)} is out of range", "1 byte or more", "write 2Gi, for example"
            )
        block, length = spec.engine.kv_cache.block_size, spec.engine.max_model_len
        blocks = kv.num_blocks_override
        if blocks is not None and length is not None and blocks * block < length:
            yield Problem(
                f"{path}.numBlocksOverride",
                f"{blocks} blocks of {block} tokens hold {blocks * block} tokens, fewer than maxModelLen {length}",
                f"{-(-length // block)} or more",
                "raise it, or lower spec.engine.maxModelLen",
            )


def _requests_within_limits(spec: Spec) -> Iterator[Problem]:
    owners = [(f"spec.roles.{name}", role.resources) for name, role in engine_roles(spec)]
    owners.append(("spec.router", spec.router.resources))
    if spec.store and spec.store.master.managed:
        owners.append(("spec.store.master.managed", spec.store.master.managed.resources))
    for path, resources in owners:
        for name, asked in resources.requests.items():
            limit = resources.limits.get(name)
            if limit is not None and asked.value > limit.value:
                yield Problem(
                    f"{path}.resources.requests.{name}",
                    f"{show(asked)} is above the limit",
                    f"{limit} or less",
                    "lower it",
                )


def _host_memory(spec: Spec) -> Iterator[Problem]:
    segment = spec.store.segment_size.value if spec.store else 0
    for name, role in engine_roles(spec):
        limit = role.resources.limits.get("memory")
        if limit is None:
            continue
        if spec.store and segment >= limit.value:
            yield Problem(
                "spec.store.segmentSize",
                f"{show(spec.store.segment_size)} does not fit in the memory limit {limit} of {name}",
                f"less than {limit}",
                f"lower it, or raise spec.roles.{name}.resources.limits.memory",
            )
            continue
        kv = kv_memory(spec, role).memory
        if kv is not None and not on_gpu(role) and kv.value + segment >= limit.value:
            lent = f" and the store segment {spec.store.segment_size}" if spec.store else ""
            yield Problem(
                f"spec.roles.{name}.resources.limits.memory",
                f"{show(limit)} does not hold the KV pool {kv}{lent} beside the model",
                "more than their sum",
                "raise it, or lower spec.engine.kvCache.memory",
            )


def _store_is_there(spec: Spec) -> Iterator[Problem]:
    if spec.store is None and spec.transfer.mode is TransferMode.STORE and spec.mode is Mode.DISAGGREGATED:
        yield Problem("spec.store", "is missing with transfer mode Store", "a store", "add store: {segmentSize: 1Gi}")


def _store(spec: Spec) -> Iterator[Problem]:
    store = spec.store
    if store is None:
        return
    if store.master.managed and store.master.external:
        yield Problem("spec.store.master", "names two masters", "one of managed, external", "remove one of them")
    if store.segment_size.value < 2**20:
        yield Problem("spec.store.segmentSize", f"{show(store.segment_size)} is too small", "1Mi or more", "raise it")
    counts = [1 if r.scaling.replicas is None else r.scaling.replicas for _, r in engine_roles(spec)]
    fixed = all(r.scaling.mode is ScalingMode.STATIC for _, r in engine_roles(spec))
    if fixed and counts and store.replicas > max(1, sum(counts)):
        yield Problem(
            "spec.store.replicas",
            f"{store.replicas} copies need as many engine pods, and there are {sum(counts)}",
            f"{max(1, sum(counts))} or less",
            "lower it, or scale the roles up",
        )


def _transport(spec: Spec) -> Iterator[Problem]:
    transfer = spec.transfer
    if transfer.transport is Transport.NVLINK:
        near = transfer.locality
        if near is None or near.topology_key != HOSTNAME_KEY or near.enforcement is not Enforcement.REQUIRED:
            yield Problem(
                "spec.transfer.locality",
                "does not put prefill and decode on one node, which transport NVLink needs",
                f"topologyKey {HOSTNAME_KEY} with enforcement Required",
                f"set locality: {{topologyKey: {HOSTNAME_KEY}, enforcement: Required}}, or transport: Auto",
            )
    if transfer.rdma is not None and transfer.transport not in (Transport.AUTO, Transport.RDMA):
        yield Problem(
            "spec.transfer.rdma",
            f"does not go with transport {transfer.transport.value}",
            "transport Auto or RDMA",
            "remove it",
        )
    if transfer.fallback is Fallback.ALLOW_TCP and transfer.transport is not Transport.AUTO:
        yield Problem(
            "spec.transfer.fallback",
            f"AllowTCP contradicts transport {transfer.transport.value}, which is never replaced",
            "AllowTCP only with transport Auto",
            "remove it, or set transport: Auto",
        )


def _rollout(spec: Spec) -> Iterator[Problem]:
    rollout = spec.rollout
    if rollout.max_surge.is_zero and rollout.max_unavailable.is_zero:
        yield Problem(
            "spec.rollout.maxUnavailable",
            f"{show(rollout.max_unavailable)} with maxSurge {rollout.max_surge} lets no pod ever change",
            "one of the two above 0",
            "set maxUnavailable: 1, or maxSurge: 1 if there is room for one more pod",
        )


def _drain_outlasts_transfers(spec: Spec) -> Iterator[Problem]:
    rollout = spec.rollout
    if spec.mode is Mode.DISAGGREGATED and rollout.drain_timeout.seconds < spec.transfer.timeout.seconds:
        yield Problem(
            "spec.rollout.drainTimeout",
            f"{show(rollout.drain_timeout)} ends before a transfer may ({spec.transfer.timeout}), so prefill would stop"
            " before its KV is fetched",
            f"{spec.transfer.timeout} or more",
            "raise it, or lower spec.transfer.timeout",
        )


def _pod_patches(spec: Spec) -> Iterator[Problem]:
    settings = [(f"spec.roles.{name}", role.pod_patch) for name, role in engine_roles(spec)]
    settings.append(("spec.router", spec.router.pod_patch))
    if spec.store and spec.store.master.managed:
        settings.append(("spec.store.master.managed", spec.store.master.managed.pod_patch))
    for path, patch in settings:
        yield from pod_patch.problems(patch, f"{path}.podPatch")


class Rule(NamedTuple):
    check: Callable[[Spec], Iterator[Problem]]
    reads: tuple[str, ...] = ()
    """Blocks whose content the rule looks at."""
    asks_for: tuple[str, ...] = ()
    """Fields of which it only matters whether they are there, and leaves."""


RULES: tuple[Rule, ...] = (
    Rule(_roles_fit_mode, asks_for=("mode", "roles.prefill", "roles.decode", "roles.worker")),
    Rule(_unified_moves_nothing, asks_for=("mode", "transfer", "store")),
    Rule(_one_source, reads=("model.source",)),
    Rule(_one_kind_of_keys, reads=("router.auth",)),
    Rule(_cache_is_used, reads=("model.source", "model.cache")),
    Rule(_names_differ, reads=("model.servedNames",)),
    Rule(adapters, reads=("model.adapters", "model.servedNames")),
    Rule(_ranks, reads=("roles",), asks_for=("mode", "transfer.mode", "engine.parallelism.tensor")),
    Rule(_extra_args_are_extra, reads=("engine.extraArgs", "router.extraArgs")),
    Rule(_kv_size, reads=("engine.kvCache", "roles"), asks_for=("engine.maxModelLen",)),
    Rule(_kv_layout, asks_for=("mode", "engine.kvCache.layout")),
    Rule(scaling, reads=("roles",)),
    Rule(ratio, reads=("scalingPolicy", "roles"), asks_for=("mode",)),
    Rule(_requests_within_limits, reads=("roles", "router.resources", "store.master")),
    Rule(_host_memory, reads=("roles", "store", "engine.kvCache")),
    Rule(_store_is_there, asks_for=("mode", "store", "transfer.mode")),
    Rule(_store, reads=("roles", "store")),
    Rule(_transport, reads=("transfer",)),
    Rule(_rollout, asks_for=("rollout.maxSurge", "rollout.maxUnavailable")),
    Rule(_pod_patches, reads=("roles", "router.podPatch", "store.master")),
    Rule(_drain_outlasts_transfers, asks_for=("mode", "rollout.drainTimeout", "transfer.timeout")),
)


def check(spec: Spec, wrong: Sequence[str] = ()) -> list[Problem]:
    """Problems of all rules that need none of the paths (below `spec`) known to be wrong."""

    def covers(holder: str, path: str) -> bool:
        return (path + ".").startswith(holder + ".")

    def usable(rule: Rule) -> bool:
        above = any(covers(bad, path) for bad in wrong for path in rule.reads + rule.asks_for)
        inside = any(covers(path, bad) for bad in wrong for path in rule.reads)
        return not above and not inside

    return [problem for rule in RULES if usable(rule) for problem in rule.check(spec)]


def without_effect(spec: Spec) -> list[str]:
    """What is asked for and does nothing. It breaks no rule, as a change of mode may pass by there, so that whoever
    writes it is warned."""
    if spec.store is None or spec.transfer.mode is TransferMode.STORE:
        return []
    return [
        "spec.store: engines with transfer.mode Direct do not use it, though a managed master runs: remove it, or set "
        "transfer.mode: Store"
    ]
