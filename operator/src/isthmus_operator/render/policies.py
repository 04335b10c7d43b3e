"""Disruption budgets, network policies and metric scraping."""

from __future__ import annotations

import re
from typing import Any

from ..api.choices import Toggle
from ..api.v1alpha1 import InferenceService
from .names import (
    ENGINE_PORT,
    ENGINES,
    GUARDED_LABEL,
    MASTER_RPC_PORT,
    METRICS_PORT,
    ROLE_LABEL,
    ROUTER_PORT,
    SERVICE_LABEL,
    Component,
    Defaults,
    child_name,
    metadata,
    selector,
)


def disruption_budgets(
    service: InferenceService, components: tuple[Component, ...], *, answers: bool = True
) -> list[dict[str, Any]]:
    """One per component: voluntary disruptions take one pod at a time. Not `answers`: there is no engine, so that
    routers, which are ready only when they know one, give nobody an answer, and may all go."""
    if service.spec.availability.pdb is Toggle.DISABLED:
        return []
    return [
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": metadata(service, child_name(service.name, component.value), component),
            "spec": {
                "maxUnavailable": "100%" if component is Component.ROUTER and not answers else 1,
                # A pod that never became ready protects nobody, and must not block a node's drain.
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
                "selector": {"matchLabels": selector(service, component)},
            },
        }
        for component in components
    ]


def network_policies(
    service: InferenceService, defaults: Defaults, *, guarded: bool = True, on_nodes: bool = False
) -> list[dict[str, Any]]:
    """Anyone reaches the router's port; only pods of this service reach engines and store, on any port, because the
    transfer engine chooses its ports when it starts. Scrapers and the operator reach the port of metrics alone.

    Whatever roles the spec has: pods of others may be there still, as a master that old engines use.
    Not `guarded`: there are pods that have their metrics on the port of their API. `on_nodes`: engines that use the
    master have the addresses of nodes."""
    if service.spec.network_policy is Toggle.DISABLED:
        return []
    inside = [part.value for part in Component if part is not Component.ROUTER]
    own_pods = {"podSelector": {"matchLabels": {SERVICE_LABEL: service.name}}}
    ingress: list[dict[str, Any]] = [{"from": [own_pods]}]
    outsiders: list[dict[str, Any]] = []
    if namespaces := service.spec.observability.scrape_namespaces:
        expression = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": list(namespaces)}
        outsiders.append({"namespaceSelector": {"matchExpressions": [expression]}})
    if on_nodes:
        # No selector describes these addresses.
        ingress.append({"ports": [{"protocol": "TCP", "port": MASTER_RPC_PORT}]})
    if defaults.operator_namespace:
        operator = {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": defaults.operator_namespace}},
            "podSelector": {"matchLabels": {"app.kubernetes.io/component": "operator"}},
        }
        outsiders.append(operator)
    public: list[dict[str, Any]] = [{"ports": [{"protocol": "TCP", "port": ROUTER_PORT}]}]
    if outsiders:
        metrics = [{"protocol": "TCP", "port": METRICS_PORT}]
        public.append({"from": outsiders, "ports": metrics})
        before = [] if guarded else [{"protocol": "TCP", "port": ENGINE_PORT}]
        ingress.append({"from": outsiders, "ports": metrics + before})
    return [
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": metadata(service, child_name(service.name, "engines")),
            "spec": {
                "podSelector": {
                    "matchLabels": {SERVICE_LABEL: service.name},
                    "matchExpressions": [{"key": ROLE_LABEL, "operator": "In", "values": inside}],
                },
                "policyTypes": ["Ingress"],
                "ingress": ingress,
            },
        },
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": metadata(service, child_name(service.name, "router"), Component.ROUTER),
            "spec": {
                "podSelector": {"matchLabels": selector(service, Component.ROUTER)},
                "policyTypes": ["Ingress"],
                "ingress": public,
            },
        },
    ]


_OF_ENGINES = "num_requests_(running|waiting)|kv_cache_usage_perc|prefix_cache_(queries|hits)_total"
_OF_ROUTERS = (
    "(time_to_first_token|inter_token_latency|time_per_output_token|e2e_request_latency)_seconds_(bucket|count|sum)"
    "|(prompt_tokens|generation_tokens|request_success)_total"
)


def _each_request_once() -> list[dict[str, Any]]:
    """Routers and engines have the same `vllm:` names, of the same requests: what clients see is kept of routers, the
    state of engines of engines. Our own names are all kept."""
    engines = "|".join(component.value for component in ENGINES)
    labels = [_prometheus_label(ROLE_LABEL), "__name__"]
    dropped = (f"{Component.ROUTER.value};vllm:({_OF_ENGINES})", f"({engines});vllm:({_OF_ROUTERS})")
    return [{"sourceLabels": labels, "regex": regex, "action": "drop"} for regex in dropped]


def _prometheus_label(label: str) -> str:
    return re.sub("[^A-Za-z0-9]", "_", label)


def pod_monitor(service: InferenceService) -> dict[str, Any] | None:
    """Scraping by the Prometheus Operator; applied only where its API is installed."""
    if service.spec.observability.pod_monitor is Toggle.DISABLED:
        return None
    # Pods of an operator that gave metrics no port of their own.
    label = f"__meta_kubernetes_pod_label_{_prometheus_label(GUARDED_LABEL)}"
    drop = {"sourceLabels": [label], "regex": "true", "action": "drop"}
    once = {"metricRelabelings": _each_request_once()}
    before = {"port": "http", "path": "/metrics", "relabelings": [drop], **once}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": metadata(service, service.name),
        "spec": {
            "selector": {"matchLabels": {SERVICE_LABEL: service.name}},
            "podTargetLabels": [SERVICE_LABEL, ROLE_LABEL],
            "podMetricsEndpoints": [{"port": "metrics", "path": "/metrics", **once}, before],
        },
    }
