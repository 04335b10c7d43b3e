"""The pod template around a main container: security, probes, placement, volumes, and the user's patch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from ..api.choices import Toggle
from ..api.pod_patch import DIRECTIVE, MERGE_KEYS
from ..api.pod_spec import PodSettings, Resources
from ..api.v1alpha1 import InferenceService
from . import credentials
from .names import Component, exactly, labels, selector

GRACE_AFTER_DRAIN_S = 15
"""Time between the end of a drain and SIGKILL: for telling peers, and for closing the transfer engine."""

USER_ID = 65532


def flag(name: str, value: str) -> list[str]:
    """Arguments that set a flag to a user's text. One that begins like a flag would be taken for one."""
    return [f"--{name}={value}"] if value.startswith("-") else [f"--{name}", value]


def literal(args: Iterable[str]) -> list[str]:
    """Arguments as they are: in a user's text, `$(NAME)` would become a variable's value, and `$$` one `$`."""
    return [one.replace("$", "$$") for one in args]


def pod_env() -> list[dict[str, Any]]:
    """Environment of every container: the pod's identity, and a home that can be written to."""
    return [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "HOME", "value": "/tmp"},
    ]


def resources(
    block: Resources, *, extra: dict[str, str] | None = None, usual: dict[str, tuple[str, str]] | None = None
) -> dict[str, Any]:
    """Container resources; `extra` is added to the limits (extended resources are requested through them). `usual`:
    name -> request and limit of what the block does not name at all."""
    left = {name: both for name, both in (usual or {}).items() if name not in block.limits | block.requests}
    limits = {name: limit for name, (_, limit) in left.items()}
    limits |= {name: str(value) for name, value in block.limits.items()} | (extra or {})
    requests = {name: request for name, (request, _) in left.items()}
    requests |= {name: str(value) for name, value in block.requests.items()}
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}


def security_context(*, capabilities: tuple[str, ...] = ()) -> dict[str, Any]:
    """Container security: Pod Security "restricted", unless capabilities are asked for (RDMA)."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]} | ({"add": list(capabilities)} if capabilities else {}),
    }


def http_probes(*, startup_timeout_s: float, ready: str = "/ready", port: str = "metrics") -> dict[str, Any]:
    """Startup, readiness and liveness of a container, at its port of that name.

    Startup and liveness ask /health, which answers while a model loads or a kernel compiles; only a hung process
    fails it. A compiler that holds the interpreter's lock makes it late, for 90 s at worst: liveness gives a silent
    process as long as /health gives an engine without a step (--no-progress-timeout). Readiness asks `ready`.
    """
    period = 2

    def get(path: str) -> dict[str, Any]:
        return {"path": path, "port": port}

    return {
        "startupProbe": {
            "httpGet": get("/health"),
            "periodSeconds": period,
            "timeoutSeconds": 5,
            "failureThreshold": max(1, math.ceil(startup_timeout_s / period)),
        },
        "readinessProbe": {"httpGet": get(ready), "periodSeconds": 2, "timeoutSeconds": 2, "failureThreshold": 2},
        "livenessProbe": {"httpGet": get("/health"), "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 12},
    }


def pod_template(
    service: InferenceService,
    component: Component,
    revision: str,
    settings: PodSettings | None,
    *,
    container: dict[str, Any],
    init_containers: list[dict[str, Any]],
    volumes: list[dict[str, Any]],
    grace_s: float,
    affinity: dict[str, Any] | None = None,
    host_network: bool = False,
    host_ipc: bool = False,
    guarded: bool = False,
) -> dict[str, Any]:
    """metadata and spec of the pods of one component. `guarded`: the main container gets its credentials."""
    common = {"terminationMessagePolicy": "FallbackToLogsOnError"}
    tmp = {"name": "tmp", "mountPath": "/tmp"}
    peers = [credentials.MOUNT] if guarded else []
    main = {**container, **common, "volumeMounts": [*container.get("volumeMounts", []), *peers, tmp]}
    main.setdefault("securityContext", security_context())
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": math.ceil(grace_s),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [main],
        "volumes": [*volumes, *([credentials.volume(service)] if guarded else []), {"name": "tmp", "emptyDir": {}}],
    }
    if init_containers:
        spec["initContainers"] = [
            {
                **init,
                **common,
                "env": pod_env(),
                "securityContext": security_context(),
                # The same as the main container's, which costs nothing as they never run at once: quotas ask for
                # them, and a pod is only Guaranteed if all its containers are.
                **_plain_resources(main),
                "volumeMounts": [*init["volumeMounts"], tmp],
            }
            for init in init_containers
        ]
    if secrets := service.spec.engine.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": secret.name} for secret in secrets]
    if host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if host_ipc:
        spec["hostIPC"] = True
    if policy := service.spec.engine.image_pull_policy:
        for one in (*spec["containers"], *spec.get("initContainers", [])):
            one["imagePullPolicy"] = policy.value
    if settings is not None:
        spec |= _placement(service, component, settings, affinity or {})
    marks = labels(service, component, revision) | exactly(service) | (credentials.GUARDED if guarded else {})
    template = {"metadata": {"labels": marks}, "spec": spec}
    return merge(template, settings.pod_patch) if settings is not None and settings.pod_patch else template


def _plain_resources(container: dict[str, Any]) -> dict[str, Any]:
    """The container's resources without devices."""
    plain = {
        kind: kept
        for kind, amounts in container.get("resources", {}).items()
        if (kept := {name: amount for name, amount in amounts.items() if name in ("cpu", "memory")})
    }
    return {"resources": plain} if plain else {}


def _placement(
    service: InferenceService, component: Component, settings: PodSettings, affinity: dict[str, Any]
) -> dict[str, Any]:
    wanted = settings.placement
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": selector(service, component)},
    }
    out = {
        "nodeSelector": dict(wanted.node_selector),
        "tolerations": list(wanted.tolerations),
        "affinity": merge(affinity, wanted.affinity),
        "topologySpreadConstraints": [spread] if wanted.topology_spread is Toggle.AUTO else [],
        "priorityClassName": wanted.priority_class_name,
        "runtimeClassName": wanted.runtime_class_name,
    }
    return {key: value for key, value in out.items() if value}


def merge(base: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Strategic merge: mappings join, null removes, lists with a merge key join by it, other values are replaced.

    `$patch: replace` in a mapping replaces it, `$patch: delete` removes it. `kubectl apply` drops nulls, but not these.
    """
    out = {} if patch.get(DIRECTIVE) == "replace" else dict(base)
    for key, value in patch.items():
        old = out.get(key)
        if key == DIRECTIVE:
            continue
        if value is None or _deletes(value):
            out.pop(key, None)
        elif isinstance(value, dict):
            out[key] = merge(old if isinstance(old, dict) else {}, value)
        elif isinstance(value, list) and isinstance(old, list) and key in MERGE_KEYS:
            out[key] = _merge_list(old, value, MERGE_KEYS[key])
        else:
            out[key] = value
    return out


def _deletes(value: Any) -> bool:
    return isinstance(value, dict) and value.get(DIRECTIVE) == "delete"


def _merge_list(old: list[Any], patch: list[Any], key: str) -> list[Any]:
    found = {known.get(key): known for known in old}
    for item in patch:
        name = item.get(key)
        if _deletes(item):
            found.pop(name, None)
        else:
            found[name] = merge(found.get(name, {}), item)
    return list(found.values())
