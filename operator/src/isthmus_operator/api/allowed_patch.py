"""Which fields a `podPatch` may have under the profile `restricted`: those of `allowed_patch`, and no others.

A field that Kubernetes adds later is refused until somebody has thought about it. None of these gives a pod more than
Pod Security "restricted" allows, reaches beyond its namespace, or makes the kubelet ask what it would not otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from ..errors import Problem
from .pod_patch import DIRECTIVE
from .problems import show


def refused_field(path: str, message: str, allowed: str, fix: str = "remove it") -> Problem:
    """One field that the profile refuses."""
    return Problem(path, f"{message} by the profile `restricted` of this installation", allowed, fix)


class Fields(NamedTuple):
    """A mapping of these fields alone."""

    known: Mapping[str, Node]


class Items(NamedTuple):
    """A list of such items."""

    each: Node


class Keys(NamedTuple):
    """A mapping of texts to scalars. only: beginnings of keys that are allowed, empty for all; never: keys that are
    not; plain: keys have no prefix, as in `team`."""

    only: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    plain: bool = False

    def takes(self, key: str) -> bool:
        """Whether a mapping may have this key."""
        return key not in self.never and not (self.plain and "/" in key) and key.startswith(self.only or "")

    @property
    def described(self) -> str:
        """What is allowed, in words."""
        if self.only:
            return f"keys that begin with {', '.join(self.only)}"
        return f"keys without a prefix, but for {', '.join(self.never)}"


class OneOf(NamedTuple):
    """One of these values."""

    values: tuple[str | bool, ...]


class Leaf(StrEnum):
    """SCALAR: not a list, a mapping or null, which removes a field; POSITIVE: a number above 0; ANYTHING: as it is."""

    SCALAR = "a text, a number or true or false"
    POSITIVE = "a whole number above 0"
    ANYTHING = "anything"


Node = Fields | Items | Keys | OneOf | Leaf

_S = Leaf.SCALAR
_TIMES = ("initialDelaySeconds", "periodSeconds", "timeoutSeconds", "failureThreshold", "successThreshold")
_PROBE = Fields(dict.fromkeys(_TIMES, _S))
"""When, not how: a probe of another kind or host is the kubelet's request."""
_RUN_AS: dict[str, Node] = {
    "runAsNonRoot": OneOf((True,)),
    "runAsUser": Leaf.POSITIVE,
    "runAsGroup": Leaf.POSITIVE,
    "seccompProfile": Fields({"type": OneOf(("RuntimeDefault",))}),
}
_FIELD_REF = Fields({"apiVersion": _S, "fieldPath": _S})
_RESOURCE_REF = Fields({"containerName": _S, "resource": _S, "divisor": _S})
_ENV = Fields(
    {
        "name": _S,
        "value": _S,
        "valueFrom": Fields({"fieldRef": _FIELD_REF, "resourceFieldRef": _RESOURCE_REF}),
    }
)
_FILES = Items(Fields({"key": _S, "path": _S, "mode": _S}))
_DOWNWARD = Items(Fields({"path": _S, "mode": _S, "fieldRef": _FIELD_REF, "resourceFieldRef": _RESOURCE_REF}))
_VOLUME = Fields(
    {
        "name": _S,
        "emptyDir": Fields({"medium": _S, "sizeLimit": _S}),
        "configMap": Fields({"name": _S, "optional": _S, "defaultMode": _S, "items": _FILES}),
        "downwardAPI": Fields({"defaultMode": _S, "items": _DOWNWARD}),
        "persistentVolumeClaim": Fields({"claimName": _S, "readOnly": _S}),
    }
)


def _container(name: str) -> Node:
    return Fields(
        {
            "name": OneOf((name,)),
            "env": Items(_ENV),
            "imagePullPolicy": _S,
            "resources": Fields({"requests": Keys(), "limits": Keys()}),
            "volumeMounts": Items(Fields({"name": _S, "mountPath": _S, "readOnly": _S, "subPath": _S})),
            **dict.fromkeys(("startupProbe", "readinessProbe", "livenessProbe"), _PROBE),
            "securityContext": Fields(
                {"allowPrivilegeEscalation": OneOf((False,)), "readOnlyRootFilesystem": OneOf((True,)), **_RUN_AS}
            ),
        }
    )


_LABELS = Keys(plain=True, never=("pod-template-hash", "controller-revision-hash"))
"""Labels with a prefix are read by controllers and webhooks, ours among them: they inject sidecars and identities."""
_ANNOTATIONS = (
    *("prometheus.io/", "karpenter.sh/", "cluster-autoscaler.kubernetes.io/"),
    "kubectl.kubernetes.io/default-container",
)
"""Others move pods into networks, inject sidecars, or turn off AppArmor."""


def allowed_patch(container: str) -> Node:
    """What a `podPatch` may hold. `container`: name of the main one."""
    return Fields(
        {
            "metadata": Fields({"labels": _LABELS, "annotations": Keys(only=_ANNOTATIONS)}),
            "spec": Fields(
                {
                    "containers": Items(_container(container)),
                    "volumes": Items(_VOLUME),
                    "nodeSelector": Keys(),
                    "tolerations": Items(Leaf.ANYTHING),
                    "affinity": Leaf.ANYTHING,
                    "topologySpreadConstraints": Items(Leaf.ANYTHING),
                    "terminationGracePeriodSeconds": _S,
                    "enableServiceLinks": _S,
                    "imagePullSecrets": Items(Fields({"name": _S})),
                    "hostAliases": Items(Leaf.ANYTHING),
                    "dnsConfig": Leaf.ANYTHING,
                    "securityContext": Fields(
                        {
                            **_RUN_AS,
                            "fsGroup": Leaf.POSITIVE,
                            "fsGroupChangePolicy": _S,
                            "supplementalGroups": Items(Leaf.POSITIVE),
                            DIRECTIVE: OneOf(("replace",)),
                        }
                    ),
                }
            ),
        }
    )


def beyond(node: Node, value: Any, path: str) -> Iterator[Problem]:
    """What of a value is not allowed. Its depth is bounded by `limits`."""
    if isinstance(node, Fields) and isinstance(value, Mapping):
        for name, inner in value.items():
            if name in node.known:
                yield from beyond(node.known[name], inner, f"{path}.{name}")
            else:
                yield refused_field(f"{path}.{name}", "is not allowed", ", ".join(node.known) or "nothing")
    elif isinstance(node, Items) and isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from beyond(node.each, inner, f"{path}[{index}]")
    elif isinstance(node, Keys) and isinstance(value, Mapping):
        for name, inner in value.items():
            if not node.takes(name):
                yield refused_field(f"{path}.{name}", "is not allowed", node.described)
            else:
                yield from beyond(_S, inner, f"{path}.{name}")
    elif not _fits(node, value):
        yield refused_field(path, f"{show(value)} is not allowed", _described(node))


def _fits(node: Node, value: Any) -> bool:
    if node is Leaf.ANYTHING:
        return True
    if node is Leaf.SCALAR:
        return isinstance(value, str | int | float)
    if node is Leaf.POSITIVE:
        return isinstance(value, int) and not isinstance(value, bool) and value > 0
    return isinstance(node, OneOf) and any(
        value is one or (value == one and isinstance(value, str)) for one in node.values
    )


def _described(node: Node) -> str:
    if isinstance(node, OneOf):
        return " or ".join(show(one) for one in node.values)
    return node.value if isinstance(node, Leaf) else "a list" if isinstance(node, Items) else "a mapping"


RENDERED_VOLUMES = frozenset(
    {"model", "model-credentials", "api-key", "store-secret", "peers", "tmp", "shm", "adapters"}
)
"""Names of the volumes that pods have without a patch; those of adapters go on behind `adapters`."""


def is_rendered(name: str) -> bool:
    """Whether a pod may have a volume of that name without a patch."""
    return name in RENDERED_VOLUMES or name.startswith("adapters-")


def foreign_mounts(patch: Mapping[str, Any], path: str) -> Iterator[Problem]:
    """Mounts and volumes of a patch that has allowed fields alone and that would change those that pods have anyway.

    A folder of the node is read-only by its mount, so a second mount of the same volume would let a pod write to it.
    """
    spec = patch.get("spec")
    spec = spec if isinstance(spec, Mapping) else {}
    volumes = [str(volume.get("name")) for volume in _mappings(spec.get("volumes"))]
    for index, name in enumerate(volumes):
        if is_rendered(name):
            names = f"a name other than {', '.join(sorted(RENDERED_VOLUMES))}"
            yield refused_field(
                f"{path}.spec.volumes[{index}].name", f"{show(name)} is not allowed", names, "rename it"
            )
    own = {name for name in volumes if not is_rendered(name)}
    for number, container in enumerate(_mappings(spec.get("containers"))):
        for index, mount in enumerate(_mappings(container.get("volumeMounts"))):
            if str(mount.get("name")) not in own:
                where = f"{path}.spec.containers[{number}].volumeMounts[{index}].name"
                yield refused_field(where, f"{show(mount.get('name'))} is not allowed", "a volume of the same patch")


def _mappings(items: Any) -> list[Mapping[str, Any]]:
    return [one for one in items if isinstance(one, Mapping)] if isinstance(items, list | tuple) else []
