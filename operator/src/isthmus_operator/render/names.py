"""Names, labels, ports and addresses of a service's children, for the renderers and for whoever looks for them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ..api.v1alpha1 import API_VERSION, GROUP, KIND, InferenceService

ROUTER_PORT = 8000
ENGINE_PORT = 8001
MASTER_RPC_PORT = 50051
METRICS_PORT = 9003
"""Of every pod: metrics, and probes of engines and routers."""
MAX_LABEL = 63

SERVICE_LABEL = f"{GROUP}/service"
ROLE_LABEL = f"{GROUP}/role"
REVISION_LABEL = f"{GROUP}/revision"
UID_LABEL = f"{GROUP}/uid"
"""On pods: of their InferenceService. No other service has it, and only who copies or forges a pod of it writes it."""
PAIRING_LABEL = f"{GROUP}/pairing"
"""On Deployments (not on pods): what prefill and decode of one KV layout have in common; on those of routers, of the
engines that they were last wanted with."""
MODEL_LABEL = f"{GROUP}/model"
"""On Deployments of engines and routers (not on pods): equal where routers know engines' model."""
GUARDED_LABEL = f"{GROUP}/guarded"
"""On pods that have a credential and ask for one. Operators before 0.1.0 made others."""


READ_LABELS = frozenset(
    {
        *(f"app.kubernetes.io/{name}" for name in ("name", "instance", "part-of", "managed-by", "component")),
        *(
            SERVICE_LABEL,
            ROLE_LABEL,
            REVISION_LABEL,
            UID_LABEL,
            PAIRING_LABEL,
            MODEL_LABEL,
            GUARDED_LABEL,
            "llm-d.ai/role",
        ),
        *("pod-template-hash", "controller-revision-hash"),
    }
)
"""Of objects of a service: those that we write, and of pods those by which they are told apart."""


class Component(StrEnum):
    """What a pod of a service is for; the value of the role label."""

    PREFILL = "prefill"
    DECODE = "decode"
    WORKER = "worker"
    ROUTER = "router"
    STORE = "store"


ENGINES = (Component.PREFILL, Component.DECODE, Component.WORKER)


def is_engine(component: Component) -> bool:
    """Whether its pods run a model."""
    return component in ENGINES


_PICKER_ROLES = {Component.PREFILL: "prefill", Component.DECODE: "decode", Component.WORKER: "prefill-decode"}
"""Values of the label by which endpoint pickers of the llm-d family tell pods apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIssuer:
    """Who signs the tokens of ServiceAccounts. keys: its public ones, a JSON list of JWKs."""

    name: str
    keys: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What the installation, not the resource, decides: images for resources that name none.

    issuer:  of this cluster; None: not asked, and then it is not rendered
    guarded: whether engines get credentials. Those that are to pair with engines without have none either.
    """

    engine_image: str = "isthmus-engine:0.1.0"
    router_image: str = "isthmus-router:0.1.0"
    operator_namespace: str = ""
    """Where the operator runs, so that a NetworkPolicy lets it ask engines for /info; empty: not in a cluster."""
    issuer: TokenIssuer | None = None
    guarded: bool = True


def child_name(service: str, *parts: str) -> str:
    """`service-part-…`, cut and made unique by a hash where it would be longer than a label may be."""
    name = "-".join((service, *parts))
    if len(name) <= MAX_LABEL:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: MAX_LABEL - 9].rstrip('-')}-{digest}"


def selector(service: InferenceService, component: Component) -> dict[str, str]:
    """Labels that pick all pods of a component, whatever their revision."""
    return {SERVICE_LABEL: service.name, ROLE_LABEL: component.value}


def exactly(service: InferenceService, *, exact: bool = True) -> dict[str, str]:
    """What tells this service's own pods from others with its name in a label; nothing for a file that was never
    applied. `exact`: all of its pods have it: those that an older operator made have not, and are not restarted."""
    return {UID_LABEL: service.uid} if exact and service.uid else {}


def labels(service: InferenceService, component: Component | None = None, revision: str = "") -> dict[str, str]:
    """Labels of a child. None of them depends on the operator's version, so that an upgrade changes no pod."""
    out = {
        "app.kubernetes.io/name": "isthmus",
        "app.kubernetes.io/instance": service.name,
        "app.kubernetes.io/part-of": "isthmus",
        "app.kubernetes.io/managed-by": "isthmus-operator",
        SERVICE_LABEL: service.name,
    }
    if component is not None:
        out |= {"app.kubernetes.io/component": component.value, ROLE_LABEL: component.value}
        if component in _PICKER_ROLES:
            out["llm-d.ai/role"] = _PICKER_ROLES[component]
    if revision:
        out[REVISION_LABEL] = revision
    return out


def metadata(
    service: InferenceService, name: str, component: Component | None = None, revision: str = ""
) -> dict[str, Any]:
    """Object metadata of a child. It belongs to the service, so it goes with it, whether the operator runs or not."""
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": service.name, "uid": service.uid, "controller": True}
    return {
        "name": name,
        "namespace": service.namespace,
        "labels": labels(service, component, revision),
        **({"ownerReferences": [owner]} if service.uid else {}),
    }


def address(service: InferenceService, component: Component, port: int) -> str:
    """host:port of a component's Service, for pods of the same namespace, which is the first that their search list
    adds. Of `NAME.NAMESPACE.svc` resolvers ask `NAME.NAMESPACE.svc.svc.DOMAIN` first, which is a Service in a namespace
    that somebody has called `svc`."""
    return f"{child_name(service.name, component.value)}:{port}"


def older_address(service: InferenceService, component: Component, port: int) -> str:
    """`address` as operators up to November 2026 wrote it; pods that they made have it until they are replaced."""
    return f"{child_name(service.name, component.value)}.{service.namespace}.svc:{port}"


def url(service: InferenceService) -> str:
    """Base URL for OpenAI clients inside the cluster. With `.svc`, unlike `address`: it is copied to where no search
    list is, and a namespace may be called as a top-level domain of the world."""
    port = service.spec.router.expose.service.port
    return f"http://{service.name}.{service.namespace}.svc" + ("" if port == 80 else f":{port}") + "/v1"
