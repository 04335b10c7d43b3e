"""What an installation lets the creators of services do. Pure; asked at admission, and again at every reconcile.

The operator makes pods with its own rights, so whoever may create an InferenceService would have those rights too. With
the profile `restricted` such a pod gets nothing that Pod Security "restricted" refuses, and no reach beyond its
namespace (ADR 23).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from posixpath import normpath
from typing import Any

from ..errors import Problem
from .allowed_patch import allowed_patch, beyond, foreign_mounts, refused_field
from .choices import ServiceType, Transport
from .pod_patch import DIRECTIVE
from .pod_spec import PodSettings
from .problems import show
from .spec import Spec, engine_roles


class Feature(StrEnum):
    """What `restricted` refuses and an installation may allow by name."""

    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"
    RDMA = "RDMA"
    NVLINK = "NVLink"
    HOST_NETWORK = "HostNetwork"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """restricted: False lets everything pass, for clusters where whoever may create a service may create any pod.

    The rest is what `restricted` lets pass: host_paths: folders of the node below which models and adapters lie, which
    pods mount read-only; writable_host_paths: folders that are caches, in which `{namespace}` is the service's;
    gateway_namespaces: of Gateways that routes may name beside those of their own namespace; allow: features

    ValueError: a writable folder lies within another folder, or around it.
    """

    restricted: bool = True
    host_paths: tuple[str, ...] = ()
    writable_host_paths: tuple[str, ...] = ()
    gateway_namespaces: tuple[str, ...] = ()
    allow: frozenset[Feature] = frozenset()

    def __post_init__(self) -> None:
        for index, folder in enumerate(self.writable_host_paths):
            for other in (*self.host_paths, *self.writable_host_paths[:index]):
                if _overlap(folder, other):
                    raise ValueError(
                        f"writable folder of nodes {folder}: lies within {other}, or around it, so that a link which a "
                        "pod leaves there may lead another's mount anywhere; give folders beside each other"
                    )


def _overlap(one: str, other: str) -> bool:
    """Whether one of two folders is or holds the other, whatever `{namespace}` stands for."""
    pairs = zip(one.strip("/").split("/"), other.strip("/").split("/"), strict=False)
    return all(a == b or NAMESPACE in a + b for a, b in pairs)


NAMESPACE = "{namespace}"
"""In a folder for caches: the namespace of the service."""
PERMISSIVE = Profile(restricted=False)


def refused(spec: Spec, profile: Profile, namespace: str) -> Iterator[Problem]:
    """Every field that a service in `namespace` may not have."""
    if not profile.restricted:
        return
    yield from _folders(spec, profile, namespace)
    yield from _features(spec, profile.allow)
    route = spec.router.expose.http_route
    for index, ref in enumerate(route.parent_refs if route else ()):
        if ref.namespace not in (None, namespace, *profile.gateway_namespaces):
            allowed = ", ".join((f"{namespace}, where the service is", *profile.gateway_namespaces))
            path = f"spec.router.expose.httpRoute.parentRefs[{index}].namespace"
            yield refused_field(path, f"{show(ref.namespace)} is not allowed", allowed, "name a Gateway there")
    for path, container, settings in _pods(spec):
        template = settings.pod_patch.get("spec")
        patched = template.get("affinity") if isinstance(template, Mapping) else None
        yield from beyond(allowed_patch(container), settings.pod_patch, f"{path}.podPatch")
        yield from foreign_mounts(settings.pod_patch, f"{path}.podPatch")
        if _replaces_security(settings.pod_patch):
            where = f"{path}.podPatch.spec.securityContext.{DIRECTIVE}"
            need = "with runAsNonRoot: true and seccompProfile: {type: RuntimeDefault} beside it"
            yield refused_field(where, '"replace" is not allowed without them', need, "add them")
        for where, affinity in ((f"{path}.placement", settings.placement.affinity), (f"{path}.podPatch.spec", patched)):
            yield from _across_namespaces(affinity, f"{where}.affinity", namespace)
        priority = settings.placement.priority_class_name
        if priority is not None and priority.startswith("system-"):
            where = f"{path}.placement.priorityClassName"
            yield refused_field(where, f"{show(priority)} is not allowed", "a class that does not begin with system-")


def _pods(spec: Spec) -> Iterator[tuple[str, str, PodSettings]]:
    """Path, main container and settings of each kind of pod."""
    for name, role in engine_roles(spec):
        yield f"spec.roles.{name}", "engine", role
    yield "spec.router", "router", spec.router
    if spec.store is not None and spec.store.master.managed is not None:
        yield "spec.store.master.managed", "master", spec.store.master.managed


def _across_namespaces(value: Any, path: str, namespace: str) -> Iterator[Problem]:
    """Terms about pods of other namespaces. While a pod with such an anti-affinity runs no pod that it is about gets a
    place beside it, whoever's it is, and its place may be all nodes there are. Its depth is bounded by `limits`."""
    if isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _across_namespaces(inner, f"{path}[{index}]", namespace)
    if not isinstance(value, Mapping):
        return
    for name, inner in value.items():
        own = inner is None or (name == "namespaces" and inner in ([], [namespace]))
        if name in ("namespaces", "namespaceSelector") and not own:
            yield refused_field(f"{path}.{name}", "is not allowed", f"pods of {namespace}, where the service is")
        else:
            yield from _across_namespaces(inner, f"{path}.{name}", namespace)


def _replaces_security(patch: Mapping[str, Any]) -> bool:
    """Whether a patch takes away what a pod is otherwise held to."""
    spec = patch.get("spec")
    context = spec.get("securityContext") if isinstance(spec, Mapping) else None
    if not isinstance(context, Mapping) or context.get(DIRECTIVE) != "replace":
        return False
    return context.get("runAsNonRoot") is not True or "seccompProfile" not in context


def _folders(spec: Spec, profile: Profile, namespace: str) -> Iterator[Problem]:
    model, cache = spec.model.source.host_path, spec.model.cache.host_path if spec.model.cache else None
    adapters = [one.source.host_path for one in spec.model.adapters]
    caches = tuple(top.replace(NAMESPACE, namespace) for top in profile.writable_host_paths)
    # Nothing below one: what is there pods have made, and may be a link that the node would follow to mount it.
    if cache is not None and cache.path not in caches:
        where = ", ".join(caches) or "no folder of nodes"
        fix = "use another kind, or have the folder allowed"
        yield refused_field("spec.model.cache.hostPath.path", f"{show(cache.path)} is not allowed", where, fix)
    for path, folder, allowed in (
        ("spec.model.source.hostPath.path", model.path if model else None, profile.host_paths),
        *(
            (f"spec.model.adapters[{index}].source.hostPath.path", one.path if one else None, profile.host_paths)
            for index, one in enumerate(adapters)
        ),
    ):
        if folder is None or (normpath(folder) == folder and any(_below(folder, top) for top in allowed)):
            continue
        where = f"a folder below {', '.join(allowed)}, without `.`, `..` or `//`" if allowed else "no folder of nodes"
        yield refused_field(
            path, f"{show(folder)} is not allowed", where, "use another kind, or have the folder allowed"
        )


def _below(folder: str, top: str) -> bool:
    return folder == top or folder.startswith(top.rstrip("/") + "/")


def _features(spec: Spec, allow: frozenset[Feature]) -> Iterator[Problem]:
    transfer, kind = spec.transfer, spec.router.expose.service.type
    rdma = transfer.rdma is not None or transfer.transport is Transport.RDMA
    used = (
        (Feature.NODE_PORT, "spec.router.expose.service.type", kind is ServiceType.NODE_PORT),
        (Feature.LOAD_BALANCER, "spec.router.expose.service.type", kind is ServiceType.LOAD_BALANCER),
        (Feature.RDMA, "spec.transfer.rdma" if transfer.rdma else "spec.transfer.transport", rdma),
        (Feature.NVLINK, "spec.transfer.transport", transfer.transport is Transport.NVLINK),
        (Feature.HOST_NETWORK, "spec.transfer.rdma.hostNetwork", bool(transfer.rdma and transfer.rdma.host_network)),
    )
    for feature, path, is_used in used:
        if is_used and feature not in allow:
            yield refused_field(path, f"{feature.value} is not allowed", "another value", _FIXES[feature])


_FIXES = {
    Feature.NODE_PORT: "use ClusterIP and an HTTPRoute",
    Feature.LOAD_BALANCER: "use ClusterIP and an HTTPRoute",
    Feature.RDMA: "use transport TCP: RDMA needs the capability IPC_LOCK",
    Feature.NVLINK: "use transport TCP: NVLink needs the IPC namespace of the node",
    Feature.HOST_NETWORK: "set it to false",
}
