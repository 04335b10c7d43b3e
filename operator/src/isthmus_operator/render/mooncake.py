"""The Mooncake master of a managed store: StatefulSet and Service."""

from __future__ import annotations

from typing import Any

from ..api.v1alpha1 import InferenceService
from .names import MASTER_RPC_PORT, METRICS_PORT, Component, Defaults, child_name, exactly, metadata, selector
from .pod import pod_env, pod_template, resources
from .revision import role_revision

_GRACE_S = 10.0
"""The master keeps nothing that a longer stop would save: engines register again with its successor."""


def is_managed(service: InferenceService) -> bool:
    """Whether this service runs its own master."""
    return service.spec.store is not None and service.spec.store.master.external is None


def stateful_set(service: InferenceService, defaults: Defaults) -> dict[str, Any]:
    """One master. It runs from the engine image, so that master and clients have the same Mooncake."""
    store = service.spec.store
    assert store is not None and is_managed(service)
    revision = role_revision(service, Component.STORE)
    managed = store.master.managed
    metrics = {"httpGet": {"path": "/metrics", "port": "metrics"}}
    container = {
        "name": "master",
        "image": service.spec.engine.image or defaults.engine_image,
        "command": ["mooncake_master"],
        "args": [
            # All addresses of IPv4 would be none where pods have others.
            "--rpc_address=$(POD_IP)",
            f"--rpc_port={MASTER_RPC_PORT}",
            "--metrics_host=$(POD_IP)",
            f"--metrics_port={METRICS_PORT}",
            # A log line of a thousand characters every ten seconds; /metrics has the same numbers.
            "--enable_metric_reporting=false",
        ],
        "env": pod_env(),
        "ports": [
            {"name": "rpc", "containerPort": MASTER_RPC_PORT},
            {"name": "metrics", "containerPort": METRICS_PORT},
        ],
        "resources": resources(managed.resources) if managed else {},
        "startupProbe": {**metrics, "periodSeconds": 1, "failureThreshold": 60},
        "readinessProbe": {"tcpSocket": {"port": "rpc"}, "periodSeconds": 2, "failureThreshold": 2},
        "livenessProbe": {**metrics, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 3},
    }
    name = child_name(service.name, Component.STORE.value)
    template = pod_template(
        service,
        Component.STORE,
        revision,
        managed,
        container=container,
        init_containers=[],
        volumes=[],
        grace_s=_GRACE_S,
    )
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(service, name, Component.STORE, revision),
        "spec": {
            "replicas": 1,
            # Else the controller never replaces a pod that is not ready, not even by that of a corrected template.
            "podManagementPolicy": "Parallel",
            "serviceName": name,
            "selector": {"matchLabels": selector(service, Component.STORE)},
            "template": template,
        },
    }


def master_service(service: InferenceService, *, exact: bool = True) -> dict[str, Any]:
    """One stable address: engines reconnect to it when the master's pod has been replaced. `exact`: as of
    `names.exactly`."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(service, child_name(service.name, Component.STORE.value), Component.STORE),
        "spec": {
            "selector": selector(service, Component.STORE) | exactly(service, exact=exact),
            "ports": [
                {"name": "rpc", "port": MASTER_RPC_PORT, "targetPort": "rpc"},
                {"name": "metrics", "port": METRICS_PORT, "targetPort": "metrics"},
            ],
        },
    }
