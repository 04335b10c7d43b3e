"""What the operator says about itself: Events that are true and come once, and numbers with their reason."""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from operator_world import Service, roles, until
from simulated_kubelet import Behaviour, always_ready
from testcluster.commands import CommandError

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
MONITORS = "podmonitors.monitoring.coreos.com"


def messages(service: Service, reason: str) -> list[str]:
    items = service.client("GET", f"/api/v1/namespaces/{service.namespace}/events")["items"]
    return [e["message"] for e in items if e["reason"] == reason]


@contextmanager
def pod_monitors(service: Service) -> Iterator[None]:
    """As much of that API as the operator needs to see."""
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    body = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": MONITORS},
        "spec": {
            "group": "monitoring.coreos.com",
            "scope": "Namespaced",
            "names": {"kind": "PodMonitor", "plural": "podmonitors", "singular": "podmonitor"},
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": schema}],
        },
    }
    service.client("POST", CRDS, body)
    try:
        yield
    finally:
        service.client("DELETE", f"{CRDS}/{MONITORS}")
        until(lambda: service.client.find(f"{CRDS}/{MONITORS}") is None, 30)


def test_an_api_that_comes_later_is_no_healing_and_a_monitor_deleted_by_hand_is(service: Service) -> None:
    service.apply()
    service.ready()
    assert service.get()["status"]["skipped"] == ["PodMonitor"]
    assert messages(service, "OptionalApiMissing") == [
        "PodMonitor is left out because its API is not installed; it is created once the API is"
    ]
    assert "left out: PodMonitor" in service.cluster_cli("status", "svc")
    path = f"/apis/monitoring.coreos.com/v1/namespaces/{service.namespace}/podmonitors/svc"
    with pod_monitors(service):
        until(lambda: service.client.find(path), 30)
        until(lambda: "skipped" not in service.get()["status"], 30)
        assert messages(service, "ChildHealed") == []
        service.client("DELETE", path)
        until(lambda: messages(service, "ChildHealed"), 30)
        until(lambda: service.client.find(path), 30)
    until(lambda: service.get()["status"].get("skipped") == ["PodMonitor"], 30)
    # An Event is written after the status that it is about.
    until(lambda: len(messages(service, "OptionalApiMissing")) == 2, 30)
    assert len(messages(service, "ChildHealed")) == 1
    assert len(messages(service, "ReconcileFailed")) == 0


@pytest.mark.parametrize("role", ["decode", "router"])
def test_a_template_field_removed_by_hand_is_put_back_once(service: Service, role: str) -> None:
    service.apply()
    service.ready()
    name = next(d["metadata"]["name"] for d in service.deployments() if role in d["metadata"]["name"])
    path = f"/apis/apps/v1/namespaces/{service.namespace}/deployments/{name}"

    def probed() -> bool:
        container = service.client("GET", path)["spec"]["template"]["spec"]["containers"][0]
        return "livenessProbe" in container and bool(container.get("args"))

    for field in ("livenessProbe", "args"):
        told = len(messages(service, "ChildHealed"))
        patch = json.dumps([{"op": "remove", "path": f"/spec/template/spec/containers/0/{field}"}])
        service.cluster.kubectl("patch", f"deployment/{name}", "-n", service.namespace, "--type=json", f"-p={patch}")
        until(probed, 20)
        until(lambda told=told: len(messages(service, "ChildHealed")) == told + 1, 20)
        service.ready()
    assert set(messages(service, "ChildHealed")) == {
        f"Deployment {name} was changed or deleted by somebody else and has been restored"
    }


def test_auto_scaling_keeps_the_ratio_and_says_so(service: Service) -> None:
    target = {"metric": "QueuedRequests", "value": 4}
    auto = {"scaling": {"mode": "Auto", "min": 1, "max": 3, "target": target}}
    ratio: dict[str, Any] = {"ratio": {"prefillPerDecode": {"min": 2}}}
    service.apply(roles={"prefill": auto, "decode": auto}, scalingPolicy=ratio)
    until(lambda: len(service.pods("prefill")) == 2 and len(service.pods("decode")) == 1, 60)
    until(lambda: messages(service, "Scaled"), 30)
    assert messages(service, "Scaled") == [
        "prefill: 1 to 2 pods: scalingPolicy.ratio asks for more pods than its target"
    ]
    service.ready()


def test_kubectl_refuses_a_field_of_a_later_version(service: Service) -> None:
    body = {
        "apiVersion": "serving.isthmus.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "x"},
        "spec": {
            "model": {"source": {"hostPath": {"path": "/m"}}},
            "engine": {"hostOffload": {"memory": "1Gi"}},
            "roles": roles(1, 1),
        },
    }
    with pytest.raises(CommandError, match='unknown field "hostOffload"'):
        service.cluster.apply(body, namespace=service.namespace)


def test_a_master_that_no_limit_range_lets_be_made_fails_by_its_deadline(service: Service) -> None:
    limits = {"limits": [{"type": "Container", "max": {"cpu": "4"}, "default": {"cpu": "1"}}]}
    ranges = f"/api/v1/namespaces/{service.namespace}/limitranges"
    service.client("POST", ranges, {"metadata": {"name": "small"}, "spec": limits})
    master = {"managed": {"resources": {"limits": {"cpu": "8"}}}}
    service.apply(store={"master": master}, transfer={"mode": "Store"}, rollout={"progressDeadline": "3s"})
    failed = service.reason("Progressing", "ProgressDeadlineExceeded")
    assert "kubectl describe statefulset svc-store" in failed["message"]
    assert "ProgressDeadlineExceeded" in service.cluster_cli("explain", "svc")
    service.client("DELETE", f"{ranges}/small")
    service.ready(150)


def test_pods_of_a_copied_deployment_are_not_counted_and_named(service: Service) -> None:
    service.apply()
    service.ready()
    original = next(d for d in service.deployments() if "-decode-" in d["metadata"]["name"])
    spec = original["spec"] | {"replicas": 2}
    copy = {"metadata": {"name": "copy", "labels": original["metadata"]["labels"]}, "spec": spec}
    deployments = f"/apis/apps/v1/namespaces/{service.namespace}/deployments"
    service.client("POST", deployments, copy)
    assert "copy-" in service.reason("Compatible", "ForeignPods")["message"]
    assert service.condition("Ready")["status"] == "False"
    assert service.get()["status"]["roles"]["decode"]["summary"] == "1/1"
    # They do not make up for a pod of the service's own.
    assert service.kubelet is not None
    names = {p["metadata"]["name"] for p in service.pods("decode") if not p["metadata"]["name"].startswith("copy-")}
    service.kubelet.behave = lambda pod: Behaviour(flickers=pod["metadata"]["name"] in names)
    until(lambda: service.condition("Available")["reason"] == "NoEngine", 30)
    service.kubelet.behave = always_ready
    service.client("DELETE", f"{deployments}/copy", {"propagationPolicy": "Foreground"})
    service.ready()
    until(lambda: messages(service, "ForeignPods"), 30)


def test_pods_of_a_deployment_with_the_labels_of_another_get_no_requests(service: Service) -> None:
    """As of a manifest written by hand, or copied from another namespace: it has not got the uid of this service."""
    service.apply()
    service.ready()
    original = next(d for d in service.deployments() if "-decode-" in d["metadata"]["name"])
    spec = copy.deepcopy(original["spec"])
    del spec["template"]["metadata"]["labels"]["serving.isthmus.dev/uid"]
    foreign = {"metadata": {"name": "foreign", "labels": original["metadata"]["labels"]}, "spec": spec}
    service.client("POST", f"/apis/apps/v1/namespaces/{service.namespace}/deployments", foreign)

    until(lambda: any(p["metadata"]["name"].startswith("foreign-") for p in service.pods("decode")), 60)
    (one,) = [s for s in service.children("services") if s["metadata"]["name"] == "svc-decode"]
    chosen = [p for p in service.pods("decode") if one["spec"]["selector"].items() <= p["metadata"]["labels"].items()]
    (name,) = [p["metadata"]["name"] for p in chosen]
    assert name.startswith("svc-decode-")
    # The operator has seen them, and what it does next is of a time after that.
    service.apply(roles=roles(1, 2))
    service.ready()
    assert service.condition("Compatible")["reason"] != "ForeignPods"
    assert service.get()["status"]["roles"]["decode"]["summary"] == "2/2"


def test_a_quota_takes_the_routers(service: Service) -> None:
    hard = {"requests.cpu": "9", "requests.memory": "20Gi", "limits.cpu": "20", "limits.memory": "20Gi"}
    quotas = f"/api/v1/namespaces/{service.namespace}/resourcequotas"
    service.client("POST", quotas, {"metadata": {"name": "all"}, "spec": {"hard": hard}})
    small = {"resources": {"limits": {"cpu": "1", "memory": "1Gi"}}}
    service.apply(roles={"prefill": small, "decode": small})
    service.ready()
    assert service.get()["status"]["roles"]["router"]["summary"] == "2/2"


def test_labels_taken_off_are_put_back_and_the_status_does_not_flicker(service: Service) -> None:
    service.apply(roles=roles(1, 1))
    service.ready()
    pods = {p["metadata"]["uid"] for p in service.pods()}
    before = {c["type"]: c["lastTransitionTime"] for c in service.get()["status"]["conditions"]}
    path = f"/apis/apps/v1/namespaces/{service.namespace}/deployments"
    for deployment in service.deployments():
        for label in ("serving.isthmus.dev/service", "serving.isthmus.dev/role"):
            patch = {"metadata": {"labels": {label: None}}}
            service.client.merge(f"{path}/{deployment['metadata']['name']}", patch)
    until(lambda: len(service.deployments()) == 3, 30)
    until(lambda: all("serving.isthmus.dev/role" in d["metadata"]["labels"] for d in service.deployments()), 30)
    assert {p["metadata"]["uid"] for p in service.pods()} == pods
    status = service.get()["status"]
    assert {c["type"]: c["lastTransitionTime"] for c in status["conditions"]} == before
    assert {c["status"] for c in status["conditions"] if c["type"] in ("Ready", "DecodeReady", "RouterReady")} == {
        "True"
    }
