"""What is kept of an object of the cluster: what anybody reads of it, as compressed JSON. Pure."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..api.v1alpha1 import API_VERSION
from ..plan.ownership import TEMPLATE_MARK
from ..render.names import READ_LABELS, SERVICE_LABEL
from .answers import MOST_NAME, weight_of_dumped

Object = dict[str, Any]
SERVICE = "InferenceService"

_META = (
    "name",
    "namespace",
    "uid",
    "generation",
    "labels",
    "annotations",
    "ownerReferences",
    "creationTimestamp",
    "deletionTimestamp",
)
MOST_KEPT = 512 * 1024
"""Characters of a child. The largest that a spec can ask for, with a `podPatch` in it, has fewer than 400 KiB."""
MOST_OF_A_POD = 32 * 1024
"""The same of a pod, of which no spec is kept. One of two containers has 3 KiB."""
_MOST_OWNERS = 16
_POD_STATUS = ("phase", "reason", "message", "podIP")
_POD_CONDITION = ("type", "status", "reason", "message", "lastTransitionTime")
_POD_CONTAINER = ("name", "ready", "started", "restartCount", "state", "lastState")
_MOST_TEXT = 1024
"""Characters of what a container or a condition says."""

Budget = tuple[int, int, int]
"""Compressed bytes, bytes as Python objects, and how many objects: what there is, or may be at most."""


class Kept(NamedTuple):
    """One object. data: without the resource version, so that equal data means that nothing has changed; empty for one
    that no service can have made. weight: bytes that it takes when it is looked at."""

    uid: str
    version: int
    data: bytes
    weight: int = 0

    @property
    def budget(self) -> Budget:
        """Bytes that it takes of what a service may have."""
        return (len(self.data), self.weight, 1) if self.data else (0, 0, 0)


def keep(body: Mapping[str, Any]) -> Kept:
    """What is kept of an object of the API server: nothing where no service can have made it, or it is too large."""
    meta = body["metadata"]
    uid, version = meta.get("uid", ""), int(meta["resourceVersion"])
    if body["kind"] not in (SERVICE, "Pod") and not _is_of_its_service(meta):
        return Kept(uid, version, b"")
    # In the server's own order, which is the same each time.
    text = json.dumps(_read(body), separators=(",", ":"))
    fits = body["kind"] == SERVICE or len(text) <= (MOST_OF_A_POD if body["kind"] == "Pod" else MOST_KEPT)
    return (
        Kept(uid, version, zlib.compress(text.encode(), 1), weight_of_dumped(text)) if fits else Kept(uid, version, b"")
    )


def _is_of_its_service(meta: Mapping[str, Any]) -> bool:
    """Whether the service that an object's label names is, or was, its owner. The garbage collector removes what says
    so without being true."""
    named = (meta.get("labels") or {}).get(SERVICE_LABEL)
    return any(
        owner["kind"] == SERVICE and owner["name"] == named and owner["apiVersion"] == API_VERSION
        for owner in meta.get("ownerReferences") or ()
    )


def body_of(kept: Kept) -> Object:
    """The object again, as far as it was kept."""
    body: Object = json.loads(zlib.decompress(kept.data))
    body["metadata"]["resourceVersion"] = str(kept.version)
    return body


def _read(body: Mapping[str, Any]) -> Object:
    """What anybody reads of an object. The rest changes often, and would be handled for nothing."""
    kind, status = body["kind"], body.get("status") or {}
    meta = _marked({key: body["metadata"][key] for key in _META if key in body["metadata"]}, "")
    found: Object = {"apiVersion": body["apiVersion"], "kind": kind, "metadata": meta}
    if kind == SERVICE:
        meta.pop("ownerReferences", None)  # nobody reads whose it is, and a name in it may have a megabyte
        return found | {"spec": body.get("spec"), "status": status}
    # Of children it moves with every status that their controllers write.
    meta.pop("generation", None)
    if kind == "Pod":
        meta.pop("annotations", None)
        if owners := meta.get("ownerReferences"):
            meta["ownerReferences"] = [one for one in owners[:_MOST_OWNERS] if len(one["name"]) <= MOST_NAME]
        return found | {"status": _pod_status(status)}
    meta["managedFields"] = [
        _marks_of({key: value for key, value in entry.items() if key != "time"})
        for entry in body["metadata"].get("managedFields") or ()
        if entry.get("subresource") != "status"
    ]
    if kind in ("Deployment", "StatefulSet"):
        trouble = [c for c in status.get("conditions") or () if c["type"] == "ReplicaFailure"]
        found["status"] = {"conditions": trouble}
    elif kind == "RoleScaler":
        found["status"] = status
    return found | {key: value for key, value in body.items() if key not in (*found, "status")}


def _pod_status(status: Object) -> Object:
    found: Object = {key: _short(status[key]) for key in _POD_STATUS if key in status}
    for field, known in (
        ("conditions", _POD_CONDITION),
        ("containerStatuses", _POD_CONTAINER),
        ("initContainerStatuses", _POD_CONTAINER),
    ):
        if there := status.get(field):
            found[field] = [{key: _short(one[key]) for key in known if key in one} for one in there]
    return found


def _short(value: Any) -> Any:
    """Without what is in the middle of long texts."""
    if isinstance(value, dict):
        return {key: _short(inner) for key, inner in value.items()}
    if isinstance(value, str) and len(value) > _MOST_TEXT:
        return f"{value[: _MOST_TEXT // 2]} ... {value[-_MOST_TEXT // 2 :]}"
    return value


def _marks_of(entry: Object) -> Object:
    """An entry of managedFields, as far as it says who set what is kept of labels and annotations."""
    fields = entry.get("fieldsV1") or {}
    if "f:metadata" not in fields:
        return entry
    return {**entry, "fieldsV1": {**fields, "f:metadata": _marked(fields["f:metadata"], "f:")}}


def _marked(meta: Object, prefix: str) -> Object:
    """Metadata with those labels and annotations alone that are read. `prefix`: of each field's name."""
    out = dict(meta)
    for name, known in (("labels", READ_LABELS), ("annotations", (TEMPLATE_MARK,))):
        there = meta.get(prefix + name)
        if there:
            out[prefix + name] = {key: value for key, value in there.items() if key.removeprefix(prefix) in known}
    return out
