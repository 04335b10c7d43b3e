"""What a user of the operator sees, case by case, on a real API server."""

import json
import time
import urllib.error
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from operator_world import API, Operator, Service, roles, until
from simulated_kubelet import Behaviour, Pod
from testcluster.commands import CommandError


def image(pod: Pod) -> str:
    return str(pod["spec"]["containers"][0]["image"])


def role(pod: Pod) -> str:
    return str(pod["metadata"]["labels"]["serving.isthmus.dev/role"])


def bad_image(name: str) -> Any:
    def behave(pod: Pod) -> Behaviour:
        if image(pod) == name:
            return Behaviour(ready_after=None, waiting=("ImagePullBackOff", f'Back-off pulling image "{name}"'))
        return Behaviour()

    return behave


def uids(pods: list[Pod]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}


def test_a_service_becomes_ready_and_says_so(service: Service) -> None:
    service.apply(roles=roles(2, 3))
    service.ready()
    status = service.get()["status"]
    assert status["roles"]["prefill"]["summary"] == "2/2"
    assert status["roles"]["decode"]["summary"] == "3/3"
    assert status["url"] == f"http://svc.{service.namespace}.svc/v1"
    assert status["observedGeneration"] == 1
    assert status["pinned"]["engineImage"] == "engine:1"
    table = service.cluster.kubectl("get", "pdsvc", "-n", service.namespace, "-o", "wide")
    assert table.split("\n")[0].split() == [
        "NAME",
        "MODE",
        "PREFILL",
        "DECODE",
        "WORKER",
        "ROUTER",
        "STORE",
        "TRANSFER",
        "READY",
        "AGE",
        "URL",
        "REVISION",
        "REASON",
    ]
    assert "2/2" in table
    for kind, group in (
        ("deployments", "/apis/apps/v1"),
        ("services", "/api/v1"),
        ("networkpolicies", "/apis/networking.k8s.io/v1"),
    ):
        for child in service.children(kind, group=group):
            assert child["metadata"]["ownerReferences"][0]["uid"] == service.get()["metadata"]["uid"]
            assert "finalizers" not in child["metadata"]
    assert "finalizers" not in service.get()["metadata"]
    assert "annotations" not in service.get()["metadata"]


def test_with_nothing_to_do_nothing_is_written(service: Service) -> None:
    service.apply(roles=roles(2, 2), store={}, transfer={"mode": "Store"})
    service.ready()
    # Events are written after the status that they are about.
    until(lambda: {"Complete", "OptionalApiMissing"} <= set(service.events()), 20)

    def versions() -> dict[str, str]:
        found = {"service": service.get()["metadata"]["resourceVersion"]}
        groups = {"deployments": "/apis/apps/v1", "statefulsets": "/apis/apps/v1", "services": "/api/v1"}
        groups |= {"poddisruptionbudgets": "/apis/policy/v1", "networkpolicies": "/apis/networking.k8s.io/v1"}
        for kind, group in groups.items():
            for child in service.children(kind, group=group):
                managers = [m["time"] for m in child["metadata"]["managedFields"] if m["manager"] == "isthmus-operator"]
                found[f"{kind}/{child['metadata']['name']}"] = ",".join(managers)
        return found

    before, events = versions(), len(service.events())
    begin = datetime.now(UTC)
    # Several resyncs (every 5 s) and a wake-up by a foreign change.
    service.client.merge(service.path, {"metadata": {"annotations": {"note": "x"}}})
    end = time.monotonic() + 12
    until(lambda: time.monotonic() > end, 20)
    after = versions()
    before.pop("service"), after.pop("service")
    assert after == before
    assert len(service.events()) == events
    assert not service.writes_since(begin)


@pytest.mark.parametrize(
    "moment", [Behaviour(), Behaviour(flickers=True), Behaviour(forgets=True)], ids=["steady", "probe", "kubelet"]
)
def test_rollout_on_a_full_cluster(service: Service, moment: Behaviour) -> None:
    """Four GPUs, four pods: no pod waits for a place, and a whole pair runs at every moment, be it that all are
    unready for an instant as the rollout begins."""
    service.apply(roles=roles(2, 2, gpus=1))
    service.ready()
    assert service.kubelet is not None
    service.kubelet.behave = lambda pod: moment
    until(lambda: (service.condition("Ready")["status"] == "True") is (moment == Behaviour()), 20)
    service.apply(engine={"image": "engine:2"})
    until(lambda: service.get()["status"].get("observedGeneration") == 2, 20)
    service.kubelet.behave = lambda pod: Behaviour(ready_after=0.3, drain=0.5)
    worst: dict[str, int] = {"pairs": 9, "pods": 0}
    begun = service.kubelet.begun

    def watch() -> bool:
        pods = [p for p in service.pods() if role(p) in ("prefill", "decode")]
        runs = [p for p in pods if not p["metadata"].get("deletionTimestamp") and p["metadata"]["uid"] in begun]
        pairs = sum(
            min(sum(role(p) == r and image(p) == i for p in runs) for r in ("prefill", "decode"))
            for i in ("engine:1", "engine:2")
        )
        worst["pairs"] = min(worst["pairs"], pairs)
        worst["pods"] = max(worst["pods"], len(pods))
        unschedulable = [
            p for p in pods for c in p["status"].get("conditions", ()) if c.get("reason") == "Unschedulable"
        ]
        assert not unschedulable
        return {image(p) for p in pods} == {"engine:2"} and service.condition("Ready")["status"] == "True"

    until(watch, 120, lambda: json.dumps(service.get()["status"]))
    assert worst["pairs"] >= 1
    assert worst["pods"] <= 4
    until(lambda: len(service.deployments()) == 3, 20)


def test_burst_edits_roll_out_only_the_last(service: Service) -> None:
    service.apply(roles=roles(2, 2))
    service.ready()
    assert service.kubelet is not None
    service.kubelet.behave = lambda pod: Behaviour(ready_after=0.5)
    before = set(service.kubelet.created[service.namespace])
    for version in (2, 3, 4):
        service.apply(engine={"image": f"engine:{version}"})
    most: dict[str, set[str]] = {}

    def watch() -> bool:
        for part in ("prefill", "decode"):
            live = {image(p) for p in service.pods(part) if not p["metadata"].get("deletionTimestamp")}
            most[part] = max(most.get(part, set()), live, key=len)
        body = service.get()
        seen = body["status"]["observedGeneration"] == body["metadata"]["generation"]
        return seen and service.condition("Ready")["status"] == "True"

    until(watch, 90, lambda: json.dumps(service.get()["status"]))
    assert all(len(revisions) <= 2 for revisions in most.values()), most
    engines = [p for p in service.pods() if role(p) in ("prefill", "decode")]
    assert {image(p) for p in engines} == {"engine:4"}
    made = {n for n in service.kubelet.created[service.namespace] - before if "router" not in n}
    assert len(made) <= 8, made
    until(lambda: len(service.deployments()) == 3, 20)
    # Two resyncs, after the old pods' last words.
    begin, end = datetime.now(UTC) + timedelta(seconds=2), time.monotonic() + 13
    until(lambda: time.monotonic() > end, 20)
    assert not service.writes_since(begin)


def test_a_role_local_change_leaves_the_other_role_alone(service: Service) -> None:
    service.apply(roles=roles(2, 2))
    service.ready()
    prefill, router, decode = (uids(service.pods(r)) for r in ("prefill", "router", "decode"))
    changed = roles(2, 2)
    changed["decode"]["resources"] = {"limits": {"cpu": "2"}}
    service.apply(roles=changed)
    service.ready()
    assert uids(service.pods("prefill")) == prefill
    assert uids(service.pods("router")) == router
    assert not uids(service.pods("decode")) & decode


def test_deletion_works_with_the_operator_gone_and_in_the_foreground(service: Service, operator: Operator) -> None:
    service.apply(store={}, transfer={"mode": "Store"})
    service.ready()
    operator.stop()
    try:
        service.client("DELETE", service.path)
        until(lambda: service.client.find(service.path) is None, 20)
        gone(service)
    finally:
        operator.start()
    other = Service(client=service.client, cluster=service.cluster, namespace=service.namespace, name="other")
    other.apply()
    other.ready()
    service.client("DELETE", other.path, {"propagationPolicy": "Foreground"})
    until(lambda: service.client.find(other.path) is None, 60)
    gone(other)


def gone(service: Service) -> None:
    def left() -> list[str]:
        kinds = {
            "deployments": "/apis/apps/v1",
            "statefulsets": "/apis/apps/v1",
            "services": "/api/v1",
            "pods": "/api/v1",
        }
        kinds |= {"poddisruptionbudgets": "/apis/policy/v1", "networkpolicies": "/apis/networking.k8s.io/v1"}
        return [c["metadata"]["name"] for kind, group in kinds.items() for c in service.children(kind, group=group)]

    until(lambda: not left(), 60, lambda: str(left()))


@pytest.mark.parametrize(("name", "accepted"), [("a" * 40, True), ("a" * 41, False), ("a" * 63, False)])
def test_names_that_fit_are_taken_and_others_refused(service: Service, name: str, accepted: bool) -> None:
    service.name = name
    if not accepted:
        with pytest.raises(CommandError, match="40 characters"):
            service.apply()
        return
    twin = Service(client=service.client, cluster=service.cluster, namespace=service.namespace, name="a" * 39 + "b")
    service.apply()
    twin.apply()
    service.ready()
    twin.ready()
    assert not {d["metadata"]["name"] for d in service.deployments()} & {
        d["metadata"]["name"] for d in twin.deployments()
    }


def test_optional_apis_may_come_later(service: Service) -> None:
    name = "podmonitors.monitoring.coreos.com"
    crd = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"
    assert service.client.find(crd) is None
    service.apply()
    service.ready()
    until(lambda: service.events().count("OptionalApiMissing") == 1, 20)
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    body = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": name},
        "spec": {
            "group": "monitoring.coreos.com",
            "scope": "Namespaced",
            "names": {"kind": "PodMonitor", "plural": "podmonitors", "singular": "podmonitor"},
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}],
        },
    }
    service.client("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", body)
    try:
        path = f"/apis/monitoring.coreos.com/v1/namespaces/{service.namespace}/podmonitors/svc"
        until(lambda: service.client.find(path), 30)
        service.apply(observability={"podMonitor": "Disabled"})
        until(lambda: service.client.find(path) is None, 30)
        assert service.events().count("OptionalApiMissing") == 1
    finally:
        service.client("DELETE", crd)


def test_what_cel_cannot_say_changes_no_pod_when_the_webhook_is_off(service: Service) -> None:
    service.apply(roles=roles(1, 1))
    service.ready()
    before = uids(service.pods())
    service.apply(rollout={"drainTimeout": "5s"}, transfer={"timeout": "30s"}, engine={"image": "engine:2"})
    found = service.reason("Compatible", "InvalidSpec")
    assert "spec.rollout.drainTimeout" in found["message"]
    assert service.condition("Available")["status"] == "True"
    assert service.get()["status"]["observedGeneration"] == service.get()["metadata"]["generation"]
    assert uids(service.pods()) == before
    service.apply(rollout=None, transfer=None)
    service.ready()


def test_a_bad_image_fails_truthfully_and_a_good_one_goes_through(service: Service) -> None:
    assert service.kubelet is not None
    service.kubelet.behave = bad_image("engine:bad")
    service.apply(roles=roles(2, 2), rollout={"progressDeadline": "5s"})
    service.ready()
    service.apply(engine={"image": "engine:bad"})
    failed = service.reason("Progressing", "ProgressDeadlineExceeded")
    assert failed["status"] == "False"
    assert "ImagePullBackOff" in failed["message"]
    assert "svc-" in failed["message"]
    assert service.condition("Available")["status"] == "True"
    assert service.condition("Ready")["status"] == "False"
    status = service.get()["status"]
    assert status["observedGeneration"] == service.get()["metadata"]["generation"]
    assert status["url"]
    explained = service.cluster_cli("explain", "svc")
    assert "ImagePullBackOff" in explained
    # One old decode pod crashes while the good image is rolled out.
    sick = next(p["metadata"]["name"] for p in service.pods("decode") if image(p) == "engine:1")

    def behave(pod: Pod) -> Behaviour:
        if pod["metadata"]["name"] == sick:
            return Behaviour(ready_after=None, waiting=("CrashLoopBackOff", "back-off 5m0s"), crashed=1)
        return bad_image("engine:bad")(pod)

    service.kubelet.behave = behave
    service.apply(engine={"image": "engine:3"})
    service.ready()
    assert {image(p) for p in service.pods() if role(p) != "router"} == {"engine:3"}


def test_a_failed_rollout_is_rolled_back(service: Service) -> None:
    assert service.kubelet is not None
    service.kubelet.behave = bad_image("engine:bad")
    service.apply(roles=roles(2, 2), rollout={"progressDeadline": "3s", "onFailure": "Rollback"})
    service.ready()
    service.apply(engine={"image": "engine:bad"})
    service.reason("Progressing", "RolledBack")
    until(lambda: {image(p) for p in service.pods() if role(p) != "router"} == {"engine:1"}, 30)
    until(lambda: service.get()["status"]["roles"]["decode"]["ready"] == 2, 30)
    until(lambda: "RolledBack" in service.events(), 20)
    # The deadline was for the bad image; on a busy machine a good one may need longer.
    service.apply(engine={"image": "engine:3"}, rollout={"progressDeadline": "5m"})
    service.ready()


def test_children_edited_by_hand_are_healed_once_and_the_pods_stay(service: Service) -> None:
    service.apply(roles=roles(2, 2))
    service.ready()
    decode = next(d for d in service.deployments() if "decode" in d["metadata"]["name"])["metadata"]["name"]
    kubectl = service.cluster.kubectl
    kubectl("scale", f"deployment/{decode}", "--replicas=5", "-n", service.namespace)
    until(lambda: service.client("GET", deployment(service, decode))["spec"]["replicas"] == 2, 20)
    until(lambda: service.events().count("ChildHealed") == 1, 20)
    kubectl("delete", "service/svc-decode", "-n", service.namespace)
    until(lambda: service.client.find(f"/api/v1/namespaces/{service.namespace}/services/svc-decode"), 20)
    until(lambda: service.events().count("ChildHealed") == 2, 20)
    kubectl("set", "image", f"deployment/{decode}", "engine=other:1", "-n", service.namespace)
    until(lambda: main_image(service, decode) == "engine:1", 20)
    service.ready()
    kubectl("label", f"deployment/{decode}", "team=blue", "-n", service.namespace)
    kubectl("delete", f"deployment/{decode}", "-n", service.namespace)
    until(lambda: service.client.find(deployment(service, decode)), 20)
    service.ready()


def deployment(service: Service, name: str) -> str:
    return f"/apis/apps/v1/namespaces/{service.namespace}/deployments/{name}"


def main_image(service: Service, name: str) -> str:
    found = service.client("GET", deployment(service, name))
    return str(found["spec"]["template"]["spec"]["containers"][0]["image"])


def test_the_store_comes_first_and_goes_last(service: Service) -> None:
    service.apply(roles=roles(2, 2))
    service.ready()
    assert service.kubelet is not None
    service.kubelet.behave = lambda pod: Behaviour(ready_after=1.0 if role(pod) == "store" else 0.2, drain=0.3)
    service.apply(transfer={"mode": "Store"}, store={"segmentSize": "64Mi"})
    early: list[str] = []

    def watch() -> bool:
        masters = [p for p in service.pods("store") if is_ready(p)]
        pooled = [
            p for p in service.pods() if any("--store-master" in (c.get("args") or ()) for c in p["spec"]["containers"])
        ]
        if pooled and not masters:
            early.extend(p["metadata"]["name"] for p in pooled)
        body = service.get()
        return body["status"]["observedGeneration"] == 2 and service.condition("Ready")["status"] == "True"

    until(watch, 90, lambda: json.dumps(service.get()["status"]))
    assert not early
    assert service.get()["status"]["transfer"]["mode"] == "Store"
    service.apply(transfer=None, store=None)

    def leaving() -> bool:
        pooled = [
            p for p in service.pods() if any("--store-master" in (c.get("args") or ()) for c in p["spec"]["containers"])
        ]
        assert not pooled or service.children("statefulsets", group="/apis/apps/v1")
        return not service.children("statefulsets", group="/apis/apps/v1")

    until(leaving, 90)
    service.ready()


def is_ready(pod: Pod) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ()))


def test_an_empty_role_is_served_by_the_other_or_reported(service: Service) -> None:
    service.apply(roles=roles(0, 1))
    service.ready()
    assert service.condition("PrefillReady")["reason"] == "ScaledToZero"
    service.apply(router={"onPrefillUnavailable": "Reject"})
    service.reason("Available", "NoEngine")


def test_an_evicted_pod_is_replaced(service: Service) -> None:
    service.apply()
    service.ready()
    (pod,) = service.pods("decode")
    path = f"/api/v1/namespaces/{service.namespace}/pods/{pod['metadata']['name']}"
    service.client.merge(f"{path}/status", {"status": {"phase": "Failed", "reason": "Evicted", "message": "low disk"}})
    until(
        lambda: any(is_ready(p) and p["metadata"]["uid"] != pod["metadata"]["uid"] for p in service.pods("decode")), 30
    )
    service.ready()


def test_unschedulable_pods_are_explained(service: Service) -> None:
    service.apply(roles=roles(3, 3, gpus=1))
    found = service.reason("Ready", "Unschedulable", 60)
    assert "nvidia.com/gpu" in found["message"]


def test_a_restart_of_the_operator_changes_no_pod(service: Service, operator: Operator) -> None:
    service.apply(roles=roles(2, 2), store={})
    service.ready()

    def all_but_routers() -> set[str]:
        # The former router may still be on its way out when its successor is ready.
        return uids([pod for pod in service.pods() if role(pod) != "router"])

    before = all_but_routers()
    assert len(before) == 5
    operator.stop()
    operator.start()
    service.apply(router={"maxQueue": 77})
    service.ready()
    assert all_but_routers() == before


def test_replace_without_annotations_leaves_no_orphan(service: Service) -> None:
    body = service.apply()
    service.ready()
    body = service.get()
    body["spec"]["engine"]["image"] = "engine:9"
    body["metadata"].pop("managedFields")
    body["metadata"].pop("annotations", None)
    service.client("PUT", service.path, body)
    service.ready()
    until(lambda: len(service.deployments()) == 3, 30)


def test_external_scaling_goes_through_the_scale_of_the_role(service: Service) -> None:
    wanted = roles(1, 2)
    wanted["decode"] = {"scaling": {"mode": "External"}}
    service.apply(roles=wanted)
    service.ready()
    path = f"{API}/namespaces/{service.namespace}/rolescalers/svc-decode"
    assert service.client("GET", f"{path}/scale")["spec"]["replicas"] == 1
    service.cluster.kubectl("scale", "rolescaler/svc-decode", "--replicas=3", "-n", service.namespace)
    until(lambda: len([p for p in service.pods("decode") if is_ready(p)]) == 3, 30)
    until(lambda: service.client("GET", f"{path}/scale")["status"]["replicas"] == 3, 20)
    scale = service.client("GET", f"{path}/scale")
    assert scale["status"]["selector"] == "serving.isthmus.dev/service=svc,serving.isthmus.dev/role=decode"
    service.ready()
    service.apply(engine={"image": "engine:2"})
    service.ready()
    assert service.client("GET", path)["spec"]["replicas"] == 3
    service.apply(roles=roles(1, 2))
    until(lambda: service.client.find(path) is None, 20)


def test_mode_change_hands_over(service: Service) -> None:
    service.apply()
    service.ready()
    service.apply(mode="Unified", roles={"worker": {"scaling": {"replicas": 2}}}, transfer=None)
    service.ready()
    until(lambda: {role(p) for p in service.pods()} == {"worker", "router"}, 60)
    until(lambda: not any("prefill" in s["metadata"]["name"] for s in service.children("services")), 30)


def test_two_services_share_nothing(service: Service) -> None:
    twin = Service(client=service.client, cluster=service.cluster, namespace=service.namespace, name="svc-two")
    service.apply()
    twin.apply()
    service.ready()
    twin.ready()
    service.client("DELETE", service.path)
    gone(service)
    twin.ready()


def test_scale_to_zero_and_back(service: Service) -> None:
    service.apply()
    service.ready()
    service.apply(roles=roles(0, 0))
    service.reason("Available", "ScaledToZero")
    service.apply(roles=roles(1, 1))
    service.ready()


def test_unknown_fields_are_refused_by_the_server(service: Service) -> None:
    body = {
        "apiVersion": "serving.isthmus.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "x"},
        "spec": {
            "model": {"source": {"hostPath": {"path": "/m"}}},
            "roles": {"prefill": {}, "decode": {}},
            "transfr": {},
        },
    }
    path = f"{API}/namespaces/{service.namespace}/inferenceservices?fieldValidation=Strict"
    with pytest.raises(urllib.error.HTTPError) as caught:
        service.client("POST", path, body)
    assert "transfr" in caught.value.read().decode()
