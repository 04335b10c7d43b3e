"""The shape of a `podPatch`, as far as it must be known to join it with a pod template. Fields themselves are the API
server's to check, when the pods are made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import Problem

MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
"""Lists that a strategic merge patch joins by a key, as the pod API declares them. Other lists are replaced."""
DIRECTIVE = "$patch"
OWN_CONTAINERS = ("engine", "router", "master")
"""The main container of each kind of pod."""
TEMPLATE = ("metadata", "spec")
OWN_LABELS = "serving.isthmus.dev/"
"""How the labels begin by which the selectors of our Deployments, Services and budgets find their pods."""


def problems(patch: Mapping[str, Any], path: str) -> Iterator[Problem]:
    """What keeps a patch from being joined with a pod template: `path` is its own."""
    for name, value in patch.items():
        if name not in (*TEMPLATE, DIRECTIVE):
            allowed = ", ".join(TEMPLATE)
            fix = f"write it as spec.{name}" if name in MERGE_KEYS else "put it below spec or metadata"
            yield Problem(f"{path}.{name}", "is not a field of a pod template", allowed, fix)
        elif name in TEMPLATE and not isinstance(value, Mapping):
            yield Problem(f"{path}.{name}", "has the wrong type", "a mapping of fields", "give a mapping, or remove it")
    yield from _labels(patch, path)
    yield from _containers(patch.get("spec"), f"{path}.spec")
    yield from _lists(patch, path)


def _labels(patch: Mapping[str, Any], path: str) -> Iterator[Problem]:
    """What would take from pods the labels by which they are found."""
    allowed = f"labels to add, without those that begin with {OWN_LABELS}"
    within: Any = patch
    for name in ("metadata", "labels"):
        if DIRECTIVE in within:
            yield Problem(f"{path}.{DIRECTIVE}", "would remove the labels of pods", allowed, "remove it")
        if name not in within:
            return
        within, path = within[name], f"{path}.{name}"
        if not isinstance(within, Mapping):
            if name == "labels":
                yield Problem(path, "has the wrong type", f"a mapping: {allowed}", "give a mapping, or remove it")
            return
    for name in within:
        if name == DIRECTIVE or str(name).startswith(OWN_LABELS):
            yield Problem(f"{path}.{name}", "would change the labels by which pods are found", allowed, "remove it")


def _containers(spec: Any, path: str) -> Iterator[Problem]:
    """What would take the container from a pod that it is for."""
    if not isinstance(spec, Mapping):
        return
    if DIRECTIVE in spec:
        yield Problem(
            f"{path}.{DIRECTIVE}", "would remove the containers of pods", "fields to add or change", "remove it"
        )
    items = spec.get("containers", [])
    if not isinstance(items, list):
        yield Problem(f"{path}.containers", "has the wrong type", "a list of containers", "give a list, or remove it")
        return
    for index, item in enumerate(items):
        if isinstance(item, Mapping) and item.get("name") in OWN_CONTAINERS and item.get(DIRECTIVE) == "delete":
            where = f"{path}.containers[{index}].{DIRECTIVE}"
            yield Problem(where, "would remove the container that the pod is for", "fields to change", "remove it")


def _lists(value: Any, path: str) -> Iterator[Problem]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            where = f"{path}.{name}"
            if name in MERGE_KEYS and isinstance(inner, list):
                yield from _items(inner, where, MERGE_KEYS[name])
            yield from _lists(inner, where)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _lists(item, f"{path}[{index}]")


def _items(items: list[Any], path: str, key: str) -> Iterator[Problem]:
    for index, item in enumerate(items):
        where = f"{path}[{index}]"
        if not isinstance(item, Mapping):
            yield Problem(where, "has the wrong type", f"a mapping with {key}", f"write it as {{{key}: ...}}")
        elif not isinstance(item.get(key), str | int):
            yield Problem(f"{where}.{key}", "is missing", f"the {key} that tells items apart", f"set {where}.{key}")
