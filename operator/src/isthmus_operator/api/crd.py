"""The CustomResourceDefinitions, generated from the types. `python -m isthmus_operator.api.crd [NAME]` prints one.

Pure and deterministic; `make generate` writes the results to crds/.
"""

from __future__ import annotations

import sys
from typing import Any

import yaml
from pydantic import BaseModel

from . import cel
from .spec import Spec
from .status import Status
from .v1alpha1 import GROUP, KIND, PLURAL, VERSION

_KEPT = (
    "type", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "maxProperties",
    "format", "default", "x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields",
)  # fmt: skip

_REQUIRED: dict[cel.Place, list[str]] = {
    (): ["spec"],
    ("spec",): ["model", "roles"],
    ("spec", "model"): ["source"],
    ("spec", "model", "adapters", "*"): ["source"],
}
"""Fields that have a default only so that `parse` can go on and find further problems."""

_LIST_TYPES: dict[cel.Place, dict[str, Any]] = {
    ("status", "conditions"): {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"], "maxItems": 32},
    ("spec", "model", "servedNames"): {"x-kubernetes-list-type": "set"},
    ("spec", "model", "adapters"): {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
}


_DESCRIBED_ONCE: tuple[cel.Place, ...] = (
    *(("spec", "model", "adapters", "*", "source", kind) for kind in ("pvc", "oci")),
    ("spec", "roles", "prefill", "engine"),
    ("spec", "roles", "decode"),
    ("spec", "roles", "worker"),
    ("spec", "router", "resources"),
    ("spec", "router", "placement"),
    ("spec", "store", "master", "managed"),
    *(("status", "roles", role) for role in ("decode", "worker", "router", "store")),
)
"""Blocks whose fields are described under spec.engine or roles.prefill: repeating that would take a third of the
size."""


def crd() -> dict[str, Any]:
    """The CRD as plain data."""
    schema = {
        "description": "One prefill/decode-disaggregated (or unified) LLM service.",
        "type": "object",
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": _schema(Spec, ("spec",)),
            "status": _schema(Status, ("status",)),
        },
        "required": _REQUIRED[()],
        "x-kubernetes-validations": _validations(()),
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["pdsvc"],
                "categories": ["all"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": _columns(),
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }


def _columns() -> list[dict[str, Any]]:
    def column(name: str, path: str, *, wide: bool = False, kind: str = "string") -> dict[str, Any]:
        return {"name": name, "type": kind, "jsonPath": path} | ({"priority": 1} if wide else {})

    ready = ".status.conditions[?(@.type=='Ready')]"
    return [
        column("Mode", ".spec.mode"),
        column("Prefill", ".status.roles.prefill.summary"),
        column("Decode", ".status.roles.decode.summary"),
        column("Worker", ".status.roles.worker.summary"),
        column("Router", ".status.roles.router.summary"),
        column("Store", ".status.roles.store.summary"),
        column("Transfer", ".status.transfer.effective"),
        column("Ready", f"{ready}.status"),
        column("Age", ".metadata.creationTimestamp", kind="date"),
        column("URL", ".status.url", wide=True),
        column("Revision", ".status.revision.current", wide=True),
        column("Reason", f"{ready}.reason", wide=True),
    ]


def _validations(place: cel.Place) -> list[dict[str, str]]:
    return [{"rule": rule, "message": message} for rule, message in cel.RULES.get(place, [])]


def _schema(block: type[BaseModel], place: cel.Place) -> dict[str, Any]:
    full = block.model_json_schema(by_alias=True, mode="validation")
    return _structural(full, full.pop("$defs", {}), place)


def _structural(node: dict[str, Any], defs: dict[str, Any], place: cel.Place) -> dict[str, Any]:
    """JSON schema to what Kubernetes calls structural: references inlined, null alternatives and titles dropped."""
    description = node.get("description", "")
    node = _resolved(node, defs)
    out: dict[str, Any] = {}
    if description and not any(place[: len(known)] == known and place != known for known in _DESCRIBED_ONCE):
        out["description"] = " ".join(description.split())
    out |= {key: node[key] for key in _KEPT if key in node and node[key] is not None}
    if isinstance(out.get("default"), dict | list):
        # Parents are not filled in: absent stays absent, in the stored object and for CEL's has().
        del out["default"]
    if node.get("x-kubernetes-int-or-string"):
        # The API server allows int-or-string only in this form, and bounds on it only through pattern and minimum.
        out.pop("type", None)
        if str(out.get("default", "")).isdigit():
            out["default"] = int(out["default"])
    for key, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if key in node:
            out |= {bound: node[key], key: True}
    if "properties" in node:
        out["properties"] = {
            name: _structural(child, defs, (*place, name)) for name, child in node["properties"].items()
        }
        required = [*node.get("required", []), *_REQUIRED.get(place, [])]
        if required:
            out["required"] = required
    elif isinstance(node.get("additionalProperties"), dict):
        out["additionalProperties"] = _structural(node["additionalProperties"], defs, (*place, "*"))
    elif "patternProperties" in node:
        (value,) = node["patternProperties"].values()
        out["additionalProperties"] = _structural(value, defs, (*place, "*"))
    if "items" in node:
        out["items"] = _structural(node["items"], defs, (*place, "*"))
    out |= _LIST_TYPES.get(place, {})
    if rules := _validations(place):
        out["x-kubernetes-validations"] = rules
    return out


def _resolved(node: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    """The node with references and `or null` replaced by what they stand for; its own keys win."""
    while "$ref" in node or ("anyOf" in node and "x-kubernetes-int-or-string" not in node):
        if "$ref" in node:
            target = defs[node["$ref"].rsplit("/", 1)[1]]
        else:
            (target,) = (choice for choice in node["anyOf"] if choice.get("type") != "null")
        node = target | {key: value for key, value in node.items() if key not in ("$ref", "anyOf", "description")}
    return node


def to_yaml(manifest: object, *, dense: bool = False) -> str:
    """YAML with keys in the order given, without anchors; `dense` puts leaves on one line, and whatever has no
    description in it."""

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

        def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
            node = super().represent_mapping(tag, mapping, flow_style)
            # For programs: a third of the file would be their indentation.
            node.flow_style = node.flow_style or (dense and "properties" in mapping and not _described(mapping))
            return node

    # Deep down in a schema, a broken line is indented by more than it says.
    flow, width = (None, 1000) if dense else (False, 120)
    return yaml.dump(manifest, Dumper=Plain, sort_keys=False, allow_unicode=True, width=width, default_flow_style=flow)


def _described(schema: Any) -> bool:
    """Whether a schema or one within it has a description."""
    if isinstance(schema, dict):
        return isinstance(schema.get("description"), str) or any(map(_described, schema.values()))
    return isinstance(schema, list) and any(map(_described, schema))


def role_scaler_crd() -> dict[str, Any]:
    """The CRD of RoleScaler: one number with a `/scale`, for autoscalers."""
    count = {"type": "integer", "minimum": 0, "maximum": 10000}
    schema = {
        "description": "The number of pods of one role of an InferenceService, for HPA, KEDA and `kubectl scale`.",
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": {
                "type": "object",
                "required": ["replicas"],
                "properties": {"replicas": {**count, "description": "Pods wanted."}},
            },
            "status": {
                "type": "object",
                "properties": {
                    "replicas": {**count, "description": "Pods there are, of all revisions."},
                    "selector": {"type": "string", "maxLength": 1024, "description": "Label selector of those pods."},
                },
            },
        },
    }
    scale = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    columns = [
        {"name": "Wanted", "type": "integer", "jsonPath": ".spec.replicas"},
        {"name": "Pods", "type": "integer", "jsonPath": ".status.replicas"},
        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    ]
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}, "scale": scale},
        "additionalPrinterColumns": columns,
        "schema": {"openAPIV3Schema": schema},
    }
    names = {"kind": "RoleScaler", "listKind": "RoleScalerList", "plural": "rolescalers", "singular": "rolescaler"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"rolescalers.{GROUP}"},
        "spec": {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]},
    }


FILES = {"inferenceservice": crd, "rolescaler": role_scaler_crd}
"""Files of crds/, without .yaml."""


def main() -> None:
    made = FILES[sys.argv[1] if len(sys.argv) > 1 else "inferenceservice"]()
    sys.stdout.write("# Generated by `make generate`.\n" + to_yaml(made, dense=True))


if __name__ == "__main__":
    main()
