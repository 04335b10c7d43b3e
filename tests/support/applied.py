"""Objects of a service as they are after they were applied, and what is wanted of them next."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from isthmus_operator.api.v1alpha1 import InferenceService, parse
from isthmus_operator.plan.desired import Desired, desired
from isthmus_operator.plan.observe import observe
from isthmus_operator.plan.observed import Facts
from isthmus_operator.plan.ownership import marked
from isthmus_operator.plan.planner import plan
from isthmus_operator.render import engine
from isthmus_operator.render.names import Component, Defaults

P, D, STORE, ROUTER = Component.PREFILL, Component.DECODE, Component.STORE, Component.ROUTER
OLD, NEW = Defaults(engine_image="engine:0.1"), Defaults(engine_image="engine:0.2")
NOW = 1e10
Object = dict[str, Any]


def service(roles: Object | None = None, **spec: Any) -> InferenceService:
    base = {"model": {"source": {"hostPath": {"path": "/m"}}}, "roles": roles or {"prefill": {}, "decode": {}}}
    return parse(
        {
            "apiVersion": "serving.isthmus.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "svc", "namespace": "ns", "uid": "u", "generation": 1},
            "spec": base | spec,
        }
    )


def fields(value: Any) -> Object:
    """A fieldsV1 tree that names all of a value."""
    if isinstance(value, dict):
        return {f"f:{key}": fields(item) for key, item in value.items()}
    if isinstance(value, list) and value and all(isinstance(item, dict) and "name" in item for item in value):
        return {"k:" + json.dumps({"name": item["name"]}): {".": {}, **fields(item)} for item in value}
    return {}


def live(manifest: Object, created: str = "2026-01-01T00:00:00Z") -> Object:
    """A workload after we have applied it."""
    manifest = marked(manifest)
    meta = {key: value for key, value in manifest["metadata"].items() if key not in ("name", "namespace")}
    content = {key: value for key, value in manifest.items() if key not in ("apiVersion", "kind")}
    entry = {
        "manager": "isthmus-operator",
        "operation": "Apply",
        "fieldsV1": fields(content | {"metadata": meta}),
    }
    meta = manifest["metadata"]
    meta |= {"managedFields": [entry], "creationTimestamp": created, "uid": meta["name"]}
    return {**manifest, "metadata": meta, "status": {}}


def applied(manifest: Object) -> Object:
    """Another object after we have applied it."""
    meta = {key: value for key, value in manifest["metadata"].items() if key not in ("name", "namespace")}
    tree = fields({"data": manifest["data"], "metadata": meta})
    entry = {"manager": "isthmus-operator", "operation": "Apply", "fieldsV1": tree}
    return {**manifest, "metadata": manifest["metadata"] | {"managedFields": [entry], "uid": meta.get("uid", "c")}}


def pod(of: Object, *, ready: bool = True, number: int = 0) -> Object:
    name = of["metadata"]["name"]
    condition = {"type": "Ready", "status": "True" if ready else "False", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    kind = "StatefulSet" if of["kind"] == "StatefulSet" else "ReplicaSet"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{name}-{number}",
            "labels": of["spec"]["template"]["metadata"]["labels"] | {"pod-template-hash": "abc"},
            "ownerReferences": [
                {
                    "kind": kind,
                    "name": name if kind == "StatefulSet" else f"{name}-abc",
                    "uid": name,
                    "controller": True,
                }
            ],
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "status": {"conditions": [condition]},
    }


def engines(target: InferenceService, defaults: Defaults = OLD) -> list[Object]:
    return [live(engine.deployment(target, part, defaults, replicas=1)) for part in (P, D)]


def wanted(
    target: InferenceService, children: Iterable[Object], defaults: Defaults = OLD, failed: str = "", now: float = NOW
) -> Desired:
    children = list(children)
    seen = observe(target, children, Facts(), {"revision": {"failed": failed}})
    return desired(target, defaults, plan(target, seen, now), children, seen, now)


def image(manifest: Object) -> str:
    return str(manifest["spec"]["template"]["spec"]["containers"][0]["image"])


def deployments(found: Desired, part: Component) -> list[Object]:
    return [m for m in found.apply if m["kind"] == "Deployment" and f"-{part.value}" in m["metadata"]["name"]]
