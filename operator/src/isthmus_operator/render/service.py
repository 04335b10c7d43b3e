"""All children of one service at its present revision, in the order they should be applied."""

from __future__ import annotations

from typing import Any

from ..api.v1alpha1 import InferenceService
from . import adapters, credentials, engine, mooncake, policies, router
from .names import Component, Defaults
from .revision import pairing


def components(service: InferenceService) -> tuple[Component, ...]:
    """What this service is made of; what others need comes first."""
    roles = service.spec.roles
    found = [Component.STORE] if mooncake.is_managed(service) else []
    found += [
        component
        for component, role in (
            (Component.PREFILL, roles.prefill),
            (Component.DECODE, roles.decode),
            (Component.WORKER, roles.worker),
        )
        if role is not None
    ]
    return (*found, Component.ROUTER)


def render(service: InferenceService, defaults: Defaults) -> list[dict[str, Any]]:
    """Every manifest. Those of optional APIs (PodMonitor, HTTPRoute) are last and are skipped where not installed."""
    parts = components(service)
    rdma = service.spec.transfer.rdma
    on_nodes = mooncake.is_managed(service) and rdma is not None and rdma.host_network
    out = policies.network_policies(service, defaults, on_nodes=on_nodes) + policies.disruption_budgets(service, parts)
    if defaults.issuer is not None:
        out.append(credentials.config_map(service, defaults.issuer, required=True))
    if service.spec.model.adapters:
        out.append(adapters.config_map(service, pairing(service)))
    for part in parts:
        if part is Component.STORE:
            out += [mooncake.master_service(service), mooncake.stateful_set(service, defaults)]
        elif part is Component.ROUTER:
            out += [router.client_service(service), router.deployment(service, defaults)]
        else:
            replicas = engine.own_replicas(engine.role_of(service, part))
            out += [
                engine.headless_service(service, part),
                engine.deployment(service, part, defaults, replicas=replicas),
            ]
    return out + [extra for extra in (policies.pod_monitor(service), router.http_route(service)) if extra is not None]
