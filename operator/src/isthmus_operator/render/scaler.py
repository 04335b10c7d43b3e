"""RoleScaler: the object through which somebody else sets the number of pods of one role.

Engine workloads come and go with revisions, so an autoscaler cannot aim at them. It aims at this: a number, with the
`/scale` subresource that HPA, KEDA and `kubectl scale` use.
"""

from __future__ import annotations

from typing import Any

from ..api.v1alpha1 import API_VERSION, InferenceService
from .names import Component, child_name, metadata, selector


def role_scaler(service: InferenceService, component: Component, *, replicas: int) -> dict[str, Any]:
    """The scale of a role. `replicas` is where it begins; afterwards it belongs to whoever scales."""
    return {
        "apiVersion": API_VERSION,
        "kind": "RoleScaler",
        "metadata": metadata(service, child_name(service.name, component.value), component),
        "spec": {"replicas": replicas},
    }


def scaler_status(service: InferenceService, component: Component, *, replicas: int) -> dict[str, Any]:
    """The status an autoscaler reads: how many pods there are, and how to find them."""
    labels = selector(service, component)
    return {
        "apiVersion": API_VERSION,
        "kind": "RoleScaler",
        "metadata": {"name": child_name(service.name, component.value), "namespace": service.namespace},
        "status": {"replicas": replicas, "selector": ",".join(f"{key}={value}" for key, value in labels.items())},
    }
