"""Low-rank adapters: the list that engines follow, and the volumes in which its adapters lie.

The list is in no revision: kubelets bring a changed one into pods that run. But engines of another base have a list
of their own, by their pairing: adapters of one base are none of another's. A volume is part of a pod, so the volumes
are in the revision of engines. Routers learn from engines which adapters there are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from posixpath import normpath
from typing import Any

from ..api.model_spec import AdapterSource, Model
from ..api.v1alpha1 import InferenceService
from .names import child_name, metadata

FOLDER = "/etc/isthmus/adapters"
_FLAG = "--lora-file"
_LIST = "adapters"
_ROOT = "/adapters"

Object = dict[str, Any]


def args(service: InferenceService, pairing: str) -> list[str]:
    """Arguments of an engine of a pairing; none without adapters."""
    return [_FLAG, f"{FOLDER}/{_file(pairing)}"] if service.spec.model.adapters else []


def _file(pairing: str) -> str:
    return f"adapters-{pairing}.json"


def file_of(workload: Mapping[str, Any]) -> str:
    """Name of the list that engines of a Deployment follow; empty for none."""
    for container in workload["spec"]["template"]["spec"].get("containers") or ():
        given = [*(container.get("args") or ())]
        if _FLAG in given[:-1]:
            return str(given[given.index(_FLAG) + 1]).removeprefix(f"{FOLDER}/")
    return ""


def keys(model: Model) -> list[str]:
    """What the volumes are, in an order of their own: which adapters lie in them does not change it."""
    return sorted(_volumes(model))


def volumes(service: InferenceService) -> list[Object]:
    """Volumes of an engine's pod. It may start before the ConfigMap is there: unlike a missing volume, it tells so."""
    found = _volumes(service.spec.model)
    if not found:
        return []
    listed = {"name": _LIST, "configMap": {"name": name(service), "optional": True}}
    return [listed, *({"name": f"{_LIST}-{key}", **found[key]} for key in sorted(found))]


def mounts(service: InferenceService) -> list[Object]:
    """Mounts of an engine's container, by folder: a `subPath` would keep a changed list from it."""
    found = keys(service.spec.model)
    if not found:
        return []
    listed = {"name": _LIST, "mountPath": FOLDER, "readOnly": True}
    return [listed, *({"name": f"{_LIST}-{key}", "mountPath": f"{_ROOT}/{key}", "readOnly": True} for key in found)]


def config_map(service: InferenceService, pairing: str, *, mounted: bool = True) -> Object:
    """The list, for engines of a pairing; none without adapters. Not `mounted`: for engines that see the folders of
    this machine as they are."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(service, name(service)),
        "data": {_file(pairing): text(service, mounted=mounted)} if service.spec.model.adapters else {},
    }


def digest(service: InferenceService) -> str:
    """Digest by which an engine tells that it has read this list."""
    return hashlib.sha256(text(service).encode()).hexdigest()[:16]


def name(service: InferenceService) -> str:
    """Name of the ConfigMap."""
    return child_name(service.name, "adapters")


def text(service: InferenceService, *, mounted: bool = True) -> str:
    """The list as engines read it."""
    entries = [{"name": one.name, "path": _path(one.source, mounted)} for one in service.spec.model.adapters]
    return json.dumps(entries, separators=(",", ":"))


def _path(source: AdapterSource, mounted: bool) -> str:
    key, _ = _volume(source)
    root = f"{_ROOT}/{key}"
    if source.host_path:
        return normpath(f"{root if mounted else source.host_path.path}/{source.host_path.sub_path}")
    return normpath(f"{root}/{source.pvc.path}") if source.pvc else root


def _volumes(model: Model) -> dict[str, Object]:
    return dict(_volume(one.source) for one in model.adapters)


def _volume(source: AdapterSource) -> tuple[str, Object]:
    """The volume that a source lies in, and a name for it that depends on nothing else."""
    if source.host_path:
        volume: Object = {"hostPath": {"path": source.host_path.path, "type": "Directory"}}
    elif source.pvc:
        volume = {"persistentVolumeClaim": {"claimName": source.pvc.claim_name, "readOnly": True}}
    else:
        assert source.oci is not None, "validation lets exactly one source through"
        volume = {"image": {"reference": source.oci.image, "pullPolicy": source.oci.pull_policy.value}}
    return hashlib.sha256(json.dumps(volume, sort_keys=True).encode()).hexdigest()[:8], volume
