"""The router: Deployment, the Service clients use, and an HTTPRoute where one is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..api.choices import Mode, PrefillUnavailable, RolloutStrategy, RouterPolicy
from ..api.v1alpha1 import InferenceService
from . import credentials
from .model import model_parts
from .names import (
    ENGINE_PORT,
    MODEL_LABEL,
    PAIRING_LABEL,
    REVISION_LABEL,
    ROUTER_PORT,
    Component,
    Defaults,
    address,
    child_name,
    exactly,
    metadata,
    selector,
)
from .pod import GRACE_AFTER_DRAIN_S, flag, http_probes, literal, pod_env, pod_template, resources
from .revision import model_digest, pairing, role_revision

_POLICIES = {
    RouterPolicy.ROUND_ROBIN: "round-robin",
    RouterPolicy.LEAST_LOAD: "least-load",
    RouterPolicy.PREFIX_AWARE: "prefix-aware",
    RouterPolicy.KV_AWARE: "kv-aware",
}
USUAL_RESOURCES = {"cpu": ("100m", "2"), "memory": ("256Mi", "1Gi")}
"""Request and limit. A namespace with a ResourceQuota refuses pods without. A thousand streams take less than 200 MB, a
large tokenizer as much again."""
KEY_FOLDER = "/etc/isthmus/auth"
_STARTUP_S = 300.0
"""The router loads only a tokenizer."""


def router_args(service: InferenceService, model_path: str) -> list[str]:
    """Arguments of `isthmus-runtime serve --role router`."""
    spec, router = service.spec, service.spec.router
    args = ["serve", "--role", "router", "--host", "0.0.0.0", "--port", str(ROUTER_PORT)]
    args += [*credentials.ARGS, "--model", model_path]
    for name in service.served_names:
        args += flag("served-model-name", name)
    args += ["--log-level", spec.observability.log_level.value]
    args += ["--drain-timeout", spec.rollout.drain_timeout.canonical]
    if spec.mode is Mode.DISAGGREGATED:
        args += ["--prefill", address(service, Component.PREFILL, ENGINE_PORT)]
        args += ["--decode", address(service, Component.DECODE, ENGINE_PORT)]
        args += ["--disaggregate-above", str(router.disaggregate_above)]
        local = router.on_prefill_unavailable is PrefillUnavailable.LOCAL
        args += ["--on-prefill-unavailable", "local" if local else "reject"]
    else:
        args += ["--worker", address(service, Component.WORKER, ENGINE_PORT)]
    args += ["--policy", _POLICIES[router.policy]]
    args += ["--max-queue", str(router.max_queue), "--request-timeout", router.request_timeout.canonical]
    if router.auth:
        keys = "--api-key-file" if router.auth.api_key_secret_ref else "--tenants-file"
        args += [keys, f"{KEY_FOLDER}/key"]
    if router.cors_origins:
        args += ["--cors-origins", ",".join(router.cors_origins)]
    for name, value in sorted(router.extra_args.items()):
        args += flag(name, value)
    return args


def surges(service: InferenceService) -> bool:
    """Whether a new router comes before an old one goes: where rollouts have a surge, and where there is one router, as
    it needs no GPU, unless old pods are to stop first."""
    rollout = service.spec.rollout
    only = service.spec.router.replicas == 1 and rollout.strategy is not RolloutStrategy.RECREATE
    return only or not rollout.max_surge.is_zero


def deployment(
    service: InferenceService,
    defaults: Defaults,
    *,
    replicas: int | None = None,
    there: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The routers of the present revision. `there`: that Deployment as it is. Earlier operators made one for all
    revisions, which goes on under its name, and with its selector, as long as its revision is the present one."""
    spec, router = service.spec, service.spec.router
    revision = role_revision(service, Component.ROUTER)
    image = router.image or defaults.router_image
    model = model_parts(service, image=image, deadline=f"{_STARTUP_S:.0f}s", tokenizer_only=True)
    volumes, mounts = list(model.volumes), list(model.mounts)
    if router.auth:
        ref = router.auth.api_key_secret_ref or router.auth.tenants_secret_ref
        assert ref is not None, "a rule asks for one of the two"
        secret = {"secretName": ref.name, "items": [{"key": ref.key, "path": "key"}], "defaultMode": 0o440}
        volumes.append({"name": "api-key", "secret": secret})
        mounts.append({"name": "api-key", "mountPath": KEY_FOLDER, "readOnly": True})
    container = {
        "name": "router",
        "image": image,
        "command": ["isthmus-runtime"],
        "args": literal(router_args(service, model.path)),
        "env": pod_env(),
        "ports": [{"name": "http", "containerPort": ROUTER_PORT}, credentials.PORT],
        "resources": resources(router.resources, usual=USUAL_RESOURCES),
        **http_probes(startup_timeout_s=_STARTUP_S, ready="/accepting"),
        "volumeMounts": mounts,
    }
    template = pod_template(
        service,
        Component.ROUTER,
        revision,
        router,
        container=container,
        init_containers=model.init_containers,
        volumes=volumes,
        grace_s=spec.rollout.drain_timeout.seconds + GRACE_AFTER_DRAIN_S,
        guarded=True,
    )
    name, selects = child_name(service.name, Component.ROUTER.value, revision), selector(service, Component.ROUTER)
    selects[REVISION_LABEL] = revision
    if there is not None:
        name, selects = there["metadata"]["name"], there["spec"]["selector"]["matchLabels"]
    meta = metadata(service, name, Component.ROUTER, revision)
    meta["labels"][PAIRING_LABEL] = pairing(service)
    meta["labels"][MODEL_LABEL] = model_digest(service)
    surge = surges(service)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": meta,
        "spec": {
            "replicas": router.replicas if replicas is None else replicas,
            "selector": {"matchLabels": selects},
            # The operator moves replicas between revisions. Within one they share nothing, and go one at a time: by a
            # surge where one would be missed or rollouts may have one, as a quota or a full cluster may have no room.
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": int(surge), "maxUnavailable": int(not surge)},
            },
            "revisionHistoryLimit": 0,
            "template": template,
        },
    }


def client_service(service: InferenceService, *, exact: bool = True) -> dict[str, Any]:
    """The Service clients use; it has the name of the InferenceService. `exact`: as of `names.exactly`."""
    expose = service.spec.router.expose.service
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(service, service.name, Component.ROUTER),
        "spec": {
            "type": expose.type.value,
            "selector": selector(service, Component.ROUTER) | exactly(service, exact=exact),
            "ports": [{"name": "http", "port": expose.port, "targetPort": "http"}],
        },
    }


def http_route(service: InferenceService) -> dict[str, Any] | None:
    """An HTTPRoute to the router; None when the resource asks for none."""
    expose = service.spec.router.expose
    if expose.http_route is None:
        return None
    parents = [
        {
            "name": ref.name,
            **({"namespace": ref.namespace} if ref.namespace else {}),
            **({"sectionName": ref.section_name} if ref.section_name else {}),
        }
        for ref in expose.http_route.parent_refs
    ]
    backend = {"name": service.name, "port": expose.service.port}
    # Token streams outlive the usual timeout of a gateway; the router has its own.
    rule = {"backendRefs": [backend], "timeouts": {"request": "0s"}}
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": metadata(service, service.name, Component.ROUTER),
        "spec": {
            "parentRefs": parents,
            **({"hostnames": list(expose.http_route.hostnames)} if expose.http_route.hostnames else {}),
            "rules": [rule],
        },
    }
