"""Objects that the operator cannot or must not write: each is said in a condition, and heals by itself."""

import asyncio
import json
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from operator_world import API, Object, Service, roles, until

from isthmus_operator.errors import ApiError
from isthmus_operator.shell.client import connect

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
MONITORS = "podmonitors.monitoring.coreos.com"
FOREIGN: tuple[tuple[str, str, str, str, Object], ...] = (
    ("/api/v1", "services", "Service", "svc", {"selector": {"app": "vllm"}, "ports": [{"port": 80}]}),
    (
        "/apis/policy/v1",
        "poddisruptionbudgets",
        "PodDisruptionBudget",
        "svc-decode",
        {"minAvailable": 1, "selector": {"matchLabels": {"app": "vllm"}}},
    ),
    (
        "/apis/networking.k8s.io/v1",
        "networkpolicies",
        "NetworkPolicy",
        "svc-engines",
        {"podSelector": {"matchLabels": {"app": "vllm"}}, "policyTypes": ["Ingress"]},
    ),
)


def explained(service: Service) -> str:
    return service.cluster_cli("explain", service.name)


def no_longer(service: Service) -> None:
    service.client("DELETE", service.path)
    until(lambda: service.client.find(service.path) is None and not service.children("services"), 30)


def test_nobodys_object_is_taken_over_or_deleted(service: Service) -> None:
    paths, before = {}, {}
    for group, resource, kind, name, spec in FOREIGN:
        folder = f"{group}/namespaces/{service.namespace}/{resource}"
        # As of another service of the same cluster: even our own labels make nothing ours.
        meta = {"name": name, "labels": {"serving.isthmus.dev/service": "svc"} if name == "svc-decode" else {}}
        service.client("POST", folder, {"metadata": meta, "spec": spec})
        paths[f"{kind} {name}"] = f"{folder}/{name}"

    def now() -> dict[str, Object]:
        found = {name: service.client("GET", path) for name, path in paths.items()}
        return {name: {"metadata": _bare(one), "spec": one["spec"]} for name, one in found.items()}

    before = now()
    service.apply()
    said = service.reason("Ready", "NameTaken")
    assert said["status"] == "False" and said["observedGeneration"] == 1
    for name in paths:
        assert f"{name} exists and does not belong to InferenceService svc" in said["message"]
        assert name in explained(service)
    assert "Rename or delete the object named" in explained(service)
    until(lambda: service.events().count("NameTaken") == 1, 20)
    assert not service.deployments()
    assert now() == before
    no_longer(service)
    assert now() == before

    service.apply()
    service.reason("Ready", "NameTaken")
    for path in paths.values():
        service.client("DELETE", path)
    service.ready()
    uid = service.get()["metadata"]["uid"]
    assert {o["metadata"]["ownerReferences"][0]["uid"] for o in now().values()} == {uid}
    assert "NameTaken" not in json.dumps(service.get()["status"])


def _bare(body: Object) -> Object:
    return {key: value for key, value in body["metadata"].items() if key not in ("managedFields", "resourceVersion")}


def test_what_is_there_goes_on_while_a_name_is_taken(service: Service) -> None:
    """A Service of the user takes the place of ours while we look away; it stays, and pods are still healed."""
    service.apply(roles=roles(1, 1))
    service.ready()
    path = f"/api/v1/namespaces/{service.namespace}/services"
    until(lambda: _replaced(service, path), 30)
    service.reason("Ready", "NameTaken")
    assert service.condition("Available")["status"] == "True"
    service.apply(roles=roles(1, 2))
    until(lambda: len(service.pods("decode")) == 2, 60)
    assert service.client("GET", f"{path}/svc-decode")["spec"]["selector"] == {"app": "mine"}
    service.client("DELETE", f"{path}/svc-decode")
    service.ready()


def _replaced(service: Service, path: str) -> bool:
    """Whether the user's Service came before ours was made anew."""
    service.client("DELETE", f"{path}/svc-decode")
    spec = {"selector": {"app": "mine"}, "ports": [{"port": 80}]}
    try:
        service.client("POST", path, {"metadata": {"name": "svc-decode"}, "spec": spec})
    except OSError:
        return False
    return True


def test_what_a_former_service_of_the_name_has_left_is_taken_up(service: Service) -> None:
    service.apply()
    service.ready()
    before = {c["metadata"]["uid"] for c in service.children("services")}
    service.client("DELETE", service.path, {"propagationPolicy": "Orphan"})
    until(lambda: service.client.find(service.path) is None, 30)
    service.apply()
    service.ready()
    assert {c["metadata"]["uid"] for c in service.children("services")} == before
    uid = service.get()["metadata"]["uid"]
    for child in (*service.children("services"), *service.deployments()):
        assert [owner["uid"] for owner in child["metadata"]["ownerReferences"]] == [uid]


def test_an_object_made_anew_under_the_same_name_is_not_written(service: Service) -> None:
    path = f"/api/v1/namespaces/{service.namespace}/services"
    spec = {"selector": {"app": "mine"}, "ports": [{"name": "http", "port": 80}]}
    theirs = service.client("POST", path, {"metadata": {"name": "web"}, "spec": spec})
    ours = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web", "namespace": service.namespace},
        "spec": {"selector": {"app": "ours"}, "ports": [{"name": "http", "port": 81}]},
    }

    async def refused(over: Object | None, name: str) -> int:
        api = await connect(str(service.cluster.kubeconfig))
        manifest = ours | {"metadata": ours["metadata"] | {"name": name}}
        try:
            with pytest.raises(ApiError) as caught:
                await api.apply(manifest, over=over)
            assert await api.named("v1", "Service", service.namespace, "none") is None
            found = await api.named("v1", "Service", service.namespace, "web")
            assert found is not None and found["metadata"]["uid"] == theirs["metadata"]["uid"]
            return caught.value.status
        finally:
            await api.close()

    former: Object = {"metadata": {"uid": "00000000-0000-0000-0000-000000000000"}}
    assert asyncio.run(refused(former, "web")) == 422
    assert asyncio.run(refused(former, "gone")) == 409
    assert asyncio.run(refused(None, "web")) == 409
    assert service.client("GET", f"{path}/web")["spec"]["selector"] == {"app": "mine"}
    assert service.client.find(f"{path}/gone") is None


def test_a_typo_in_a_pod_patch_is_said_until_it_is_corrected(service: Service) -> None:
    service.apply(roles=roles(1, 2))
    service.ready()
    before = {p["metadata"]["uid"] for p in service.pods()}
    wrong = roles(1, 2)
    wrong["decode"]["podPatch"] = {"spec": {"dnsPolcy": "Default"}}
    body = service.apply(roles=wrong)
    said = service.reason("Ready", "ReconcileFailed")
    generation = body["metadata"]["generation"]
    assert said["status"] == "False" and said["observedGeneration"] == generation
    assert "dnsPolcy" in said["message"] and "deployments/svc-decode" in said["message"]
    assert service.condition("Progressing")["status"] == "False"
    assert service.condition("Progressing")["observedGeneration"] == generation
    assert service.condition("Available")["status"] == "True"
    assert service.get()["status"]["observedGeneration"] == generation
    text = explained(service)
    assert text.startswith("svc is not ready: ReconcileFailed\n") and "dnsPolcy" in text and "podPatch" in text
    assert {p["metadata"]["uid"] for p in service.pods()} == before
    until(lambda: service.events().count("ReconcileFailed") == 1, 20)
    right = roles(1, 2)
    right["decode"]["podPatch"] = {"spec": {"dnsPolicy": "Default"}}
    service.apply(roles=right)
    service.ready()
    assert {p["spec"]["dnsPolicy"] for p in service.pods("decode")} == {"Default"}


@contextmanager
def strict_monitors(service: Service) -> Iterator[None]:
    """That API in a version that refuses what we write."""
    spec = {"type": "object", "required": ["never"], "properties": {"never": {"type": "string"}}}
    schema: Object = {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec}}}
    names = {"kind": "PodMonitor", "plural": "podmonitors", "singular": "podmonitor"}
    version = {"name": "v1", "served": True, "storage": True, "schema": schema}
    body = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": MONITORS},
        "spec": {"group": "monitoring.coreos.com", "scope": "Namespaced", "names": names, "versions": [version]},
    }
    service.client("POST", CRDS, body)
    try:
        yield
    finally:
        service.client("DELETE", f"{CRDS}/{MONITORS}")
        until(lambda: service.client.find(f"{CRDS}/{MONITORS}") is None, 30)


def test_an_optional_object_that_is_refused_takes_nothing_with_it(service: Service) -> None:
    external: dict[str, Any] = roles(1, 1)
    external["decode"] = {"scaling": {"mode": "External"}}
    with strict_monitors(service):
        service.apply(roles=external)
        said = service.reason("Ready", "ReconcileFailed")
        assert "podmonitors/svc" in said["message"]
        assert service.reason("Progressing", "Complete")["status"] == "True"
        path = f"{API}/namespaces/{service.namespace}/rolescalers/svc-decode"
        service.client.merge(path, {"spec": {"replicas": 2}})
        until(lambda: service.client("GET", path).get("status", {}).get("replicas") == 2, 30)
        assert "podmonitors/svc" in explained(service)
    service.ready()
    assert "ChildHealed" not in service.events()


def test_a_namespace_that_takes_no_events_is_served_all_the_same(service: Service) -> None:
    with no_events(service):
        external = roles(1, 1)
        external["decode"] = {"scaling": {"mode": "External"}}
        service.apply(roles=external)
        service.ready()
        path = f"{API}/namespaces/{service.namespace}/rolescalers/svc-decode"
        until(lambda: service.client("GET", path).get("status", {}).get("replicas") == 1, 30)
        assert service.events() == []


@contextmanager
def no_events(service: Service) -> Iterator[None]:
    """A policy that refuses every Event of the namespace."""
    group = "/apis/admissionregistration.k8s.io/v1"
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["events"], "operations": ["CREATE"]}
    here = {"matchLabels": {"kubernetes.io/metadata.name": service.namespace}}
    policy = {
        "matchConstraints": {"resourceRules": [rule], "namespaceSelector": here},
        "validations": [{"expression": "false", "message": "no Events here"}],
    }
    binding = {"policyName": service.namespace, "validationActions": ["Deny"]}
    meta = {"name": service.namespace}
    paths = [f"{group}/validatingadmissionpolicies", f"{group}/validatingadmissionpolicybindings"]
    for path, spec in zip(paths, (policy, binding), strict=True):
        service.client("POST", path, {"metadata": meta, "spec": spec})

    def refused() -> bool:
        event = {
            "metadata": {"generateName": "probe."},
            "involvedObject": {"namespace": service.namespace},
            "reason": "Probe",
        }
        try:
            service.client("POST", f"/api/v1/namespaces/{service.namespace}/events?dryRun=All", event)
        except urllib.error.HTTPError as error:
            return error.code == 422
        return False

    try:
        until(refused, 30)
        yield
    finally:
        for path in paths:
            service.client("DELETE", f"{path}/{service.namespace}")
