"""By what the pods of a service know each other: a token that the cluster signs for each, and whose tokens to take.

Nothing here is secret before a kubelet writes it into a pod, so the operator needs no right to any Secret
(docs/adr/0024). The runtime reads the same folder: `credentials.py` there says what is in it.
"""

from __future__ import annotations

import json
from typing import Any

from ..api.v1alpha1 import GROUP, InferenceService
from .names import GUARDED_LABEL, TokenIssuer, child_name, metadata

FOLDER = "/etc/isthmus/peers"
TOKEN_FILE, TRUST_FILE = "token", "trust.json"
TOKEN_S = 12 * 3600
"""How long a token is valid. The kubelet renews it after 80 % of that: without an API server a service goes on for
2.4 h or longer."""
GUARDED = {GUARDED_LABEL: "true"}
ARGS = ("--peer-credentials", FOLDER)
MOUNT = {"name": "peers", "mountPath": FOLDER, "readOnly": True}


def audience(service: InferenceService) -> str:
    """What tokens of its pods are for, and no others."""
    return f"{GROUP}/{service.namespace}/{service.name}"


def volume(service: InferenceService) -> dict[str, Any]:
    """Both files, the token for the pod's own ServiceAccount. A pod that starts before the ConfigMap is there waits for
    it by being unready, which tells why; a missing volume would not."""
    token = {"audience": audience(service), "expirationSeconds": TOKEN_S, "path": TOKEN_FILE}
    trust = {"name": _name(service), "items": [{"key": TRUST_FILE, "path": TRUST_FILE}], "optional": True}
    sources = [{"serviceAccountToken": token}, {"configMap": trust}]
    return {"name": MOUNT["name"], "projected": {"sources": sources, "defaultMode": 0o440}}


def config_map(service: InferenceService, issuer: TokenIssuer, *, required: bool) -> dict[str, Any]:
    """Whose tokens the service's pods take. Not `required`: callers without one are served as well, while pods of an
    operator that made none are left."""
    trust = {
        "issuer": issuer.name,
        "audience": audience(service),
        "namespace": service.namespace,
        "required": required,
        "keys": json.loads(issuer.keys),
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(service, _name(service)),
        "data": {TRUST_FILE: json.dumps(trust, sort_keys=True, separators=(",", ":"))},
    }


def _name(service: InferenceService) -> str:
    return child_name(service.name, "peers")
